"""Blocks of a factor in loops of run-time length: virtual nodes along hidden units, heads, channels, words.

Knows programs, what is cut together in them, and how many blocks each device has. Must not know layouts, nor how
anything is carried out.

All equations that have a factor are evaluated block by block, as virtual nodes are example by example: one loop over a
device's own blocks, as often as it has blocks. What has the factor is written block by block, what is reduced
over it is added up, first in the loop and then over devices. An equation that reads such a sum is in a later loop.
The loops of a train step are few: one forward, one backward with the optimizer's update in it.

Source: unequal shares of an operator's dimensions are AccPar's (Song et al., HPCA 2020, section 5). There they were
simulated; programs of one shape for all devices, as XLA's, pad all to the largest share.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Primitive, Var

from vnode.analysis.program import Atom, Program, barrier_equation, bind, context_of, inline
from vnode.errors import PartitionError
from vnode.operators import Algebra, Monoid, Role, evaluate, evaluate_wide
from vnode.operators.sharding import constraint_equation
from vnode.spmd.choice import is_narrow, itemsize
from vnode.spmd.shares import Share, check_divides, restored, stored
from vnode.spmd.tied import Tied, partial, refuse, tied

in_blocks_p = Primitive("in_blocks")
in_blocks_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Loop:
    """What an `in_blocks` equation consists of.

    Attributes:
      share: whose blocks are how many.
      program: of one block: from the block's number, int32, and the operands, to the results. Sums of narrow types are
        handed on in float32.
      operands: for each operand the dimension of which the program is given a block; None for all of it.
      results: for each result the dimension of which the program makes a block, or how the blocks' results combine.
    """

    share: Share
    program: Program
    operands: tuple[int | None, ...]
    results: tuple[int | Monoid, ...]


def loop_of(eqn: JaxprEqn) -> Loop | None:
    """The loop that an equation is; None if it is none of `in_blocks`."""
    return eqn.params["loop"] if eqn.primitive is in_blocks_p else None


@dataclasses.dataclass(frozen=True, eq=False)
class InBlocks:
    """A program with a dimension in blocks.

    Attributes:
      program: for `vnode.spmd.flow.follow` over a mesh that has the share's axes. What has the dimension is given and
        returned as `vnode.spmd.shares.stored` stores it.
      share: whose blocks are how many.
      inputs: for each input the dimension that is in blocks, or None.
      outputs: the same of outputs.
    """

    program: Program
    share: Share
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    def put(self, values: Sequence[Any]) -> list[Any]:
        """Inputs as the program takes them, of inputs in the user's shapes."""
        return [x if d is None else stored(x, d, self.share) for x, d in zip(values, self.inputs, strict=True)]

    def get(self, values: Sequence[Any]) -> list[Any]:
        """Outputs in the user's shapes, of outputs as the program makes them."""
        return [x if d is None else restored(x, d, self.share) for x, d in zip(values, self.outputs, strict=True)]


def in_blocks(program: Program, share: Share, dims: Mapping[int, int]) -> InBlocks:
    """A program in which everything that has a dimension is computed block by block.

    Args:
      program: with calls inlined, its gradients and updates in it.
      share: whose blocks are how many.
      dims: for some inputs, by number, the dimension that is cut into blocks. What is tied to it through the program is
        found: one weight of a layer says enough.

    Returns:
      The program, and which of its inputs and outputs are stored in blocks.

    Raises:
      PartitionError: an equation that has the dimension is neither free in it nor a reduction of it; or the blocks do
        not divide it.

    Example:
      >>> def perceptron(w, v, x):
      ...     return jax.nn.relu(x @ w) @ v
      >>> shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 16), (16, 4), (2, 4))]
      >>> closed = jax.make_jaxpr(perceptron)(*shapes)
      >>> split = in_blocks(inline(closed.jaxpr, closed.consts), Share(("model",), (5, 3)), {0: 1})
      >>> split.inputs, [var.aval.shape for var in split.program.inputs]
      ((1, 0, None), [(4, 20), (20, 4), (2, 4)])
      >>> [eqn.primitive.name for eqn in split.program.equations]
      ['in_blocks']
    """
    for number, dim in dims.items():
        if not 0 <= number < len(program.inputs):
            raise PartitionError(f"input {number} is to be cut, of a program that has {len(program.inputs)}")
        check_divides(share, program.inputs[number].aval.shape, dim, f"input {number}")
    found = tied(program, {program.inputs[number]: dim for number, dim in dims.items()}, share.blocks)
    return _Builder(program, share, found).build()


class _Builder:
    """Makes loops of the equations that are cut, and the program with them."""

    def __init__(self, program: Program, share: Share, found: Tied) -> None:
        self.program, self.share, self.dims, self.factors = program, share, found.dims, found.factors
        self.monoids = {number: self.monoid(number) for number in self.factors}
        self.makers = {var: number for number, eqn in enumerate(program.equations) for var in eqn.outvars}
        self.readers: dict[Var, list[int]] = {}
        for number, eqn in enumerate(program.equations):
            for var in dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)):
                self.readers.setdefault(var, []).append(number)
        self.returned = {atom for atom in program.outputs if isinstance(atom, Var)}
        self.repeated = self.repeatable()
        self.stages = self.moved(self.soonest())

    def monoid(self, number: int) -> Monoid | None:
        """How an equation's blocks combine; None if they stand one beside the other."""
        eqn, factor = self.program.equations[number], self.factors[number]
        description = self.program.describe(eqn)
        assert description is not None
        monoid = partial(description, factor)
        having = [any(factor in dim for dim in dims) for dims in description.results]
        if any(has is (monoid is not None) for has in having):
            refuse(eqn, "has results that have the factor, and others that do not")
        if any(jnp.issubdtype(atom.aval.dtype, jax.dtypes.extended) for atom in eqn.outvars):
            refuse(eqn, "makes random keys")
        return monoid

    def operands(self, number: int) -> list[Var]:
        return [atom for atom in self.program.equations[number].invars if isinstance(atom, Var)]

    # Which equation is in which loop

    def repeatable(self) -> set[int]:
        """Equations that are evaluated in every loop that needs them: cheap ones of nothing, or of what is given."""
        found: set[int] = set()
        for number in self.factors:
            description = self.program.describe(self.program.equations[number])
            assert description is not None
            cheap = self.monoids[number] is None and not description.has(Algebra.CONTRACTS) and not description.reduced
            sources = [self.makers.get(var) for var in self.operands(number)]
            if cheap and all(source is None or source in found for source in sources):
                found.add(number)
        return found

    def soonest(self) -> dict[int, int]:
        """For each equation how many loops must have ended before it: those whose sums it depends on."""
        stages: dict[int, int] = {}
        for number in range(len(self.program.equations)):
            sources = [self.makers[var] for var in self.operands(number) if var in self.makers]
            stages[number] = max((stages[s] + (self.monoids.get(s) is not None) for s in sources), default=0)
        return stages

    def moved(self, stages: dict[int, int]) -> dict[int, int]:
        """The same with equations later, where the loops hand on less to each other then."""

        def held(number: int, stage: int) -> int:
            """Bytes that are kept for an equation if it is in a loop."""
            total = 0
            for var in dict.fromkeys(self.operands(number)):
                maker = self.makers.get(var)
                if maker not in self.factors or self.monoids[maker] is not None or maker in self.repeated:
                    continue
                others = [stages[n] for n in self.readers[var] if n != number]
                if stages[maker] < stage and var not in self.returned and max(others, default=-1) <= stages[maker]:
                    total += nbytes(var)
            return total

        for number in sorted(self.factors, reverse=True):
            if self.monoids[number] is not None or number in self.repeated:
                continue
            results = self.program.equations[number].outvars
            reading = [stages[n] for var in results for n in self.readers.get(var, ())]
            stage = min(reading, default=stages[number])
            if self.returned.isdisjoint(results) and stage > stages[number]:
                if held(number, stage) <= sum(map(nbytes, results)):
                    stages[number] = stage
        return stages

    # The program

    def build(self) -> InBlocks:
        stored_as: dict[Var, Var] = {}

        def named(atom: Atom) -> Atom:
            """A value as it is stored."""
            if isinstance(atom, Literal) or atom not in self.dims:
                return atom
            if atom not in stored_as:
                shape, dim = list(atom.aval.shape), self.dims[atom]
                shape[dim] = self.share.room(shape[dim])
                stored_as[atom] = Var(atom.aval.update(shape=tuple(shape)))
            return stored_as[atom]

        equations: list[JaxprEqn] = []
        last = max(self.stages.values(), default=0)
        for stage in range(last + 1):
            there = [number for number, own in self.stages.items() if own == stage]
            equations += [self.program.equations[n] for n in sorted(there) if n not in self.factors]
            own = [n for n in sorted(there) if n in self.factors and self.is_made(n)]
            if own:
                equations.append(self.loop(own, named))
        program = dataclasses.replace(
            self.program,
            inputs=[named(var) for var in self.program.inputs],
            constants={
                named(var): stored(np.asarray(value), self.dims[var], self.share) if var in self.dims else value
                for var, value in self.program.constants.items()
            },
            equations=equations,
            outputs=[named(atom) for atom in self.program.outputs],
            _descriptions={},
            _kinds={},
            _bodies={},
        )
        return InBlocks(
            program,
            self.share,
            tuple(self.dims.get(var) for var in self.program.inputs),
            tuple(self.dims.get(atom) if isinstance(atom, Var) else None for atom in self.program.outputs),
        )

    def is_made(self, number: int) -> bool:
        """Whether an equation belongs to one loop; others are evaluated where they are needed."""
        returned = not self.returned.isdisjoint(self.program.equations[number].outvars)
        return number not in self.repeated or returned

    def loop(self, own: Sequence[int], named: Any) -> JaxprEqn:
        """The equation that stands for a loop."""
        needed, pending = set(own), list(own)
        while pending:
            for var in self.operands(pending.pop()):
                maker = self.makers.get(var)
                if maker in self.repeated and maker not in needed:
                    needed.add(maker)
                    pending.append(maker)
        inside = sorted(needed)
        made = {var for n in inside for var in self.program.equations[n].outvars}
        reads = list(dict.fromkeys(var for n in inside for var in self.operands(n) if var not in made))
        makes = [
            var
            for n in own
            for var in self.program.equations[n].outvars
            if var in self.returned or any(reader not in needed for reader in self.readers.get(var, ()))
        ]
        operands = tuple(self.dims.get(var) for var in reads)
        results = tuple(self.result(var) for var in makes)
        traced = jax.make_jaxpr(functools.partial(self.block, inside, reads, makes))(
            jax.ShapeDtypeStruct((), np.int32), *map(self.block_shape, reads)
        )
        loop = Loop(self.share, inline(traced.jaxpr, traced.consts), operands, results)
        source = self.program.equations[own[0]].source_info
        return barrier_equation().replace(
            primitive=in_blocks_p,
            invars=[named(var) for var in reads],
            outvars=[named(var) for var in makes],
            params={"loop": loop},
            source_info=source,
        )

    def result(self, var: Var) -> int | Monoid:
        monoid = self.monoids[self.makers[var]]
        return self.dims[var] if monoid is None else monoid

    def block_shape(self, var: Var) -> jax.ShapeDtypeStruct:
        shape = list(var.aval.shape)
        if var in self.dims:
            shape[self.dims[var]] //= self.share.blocks
        return jax.ShapeDtypeStruct(tuple(shape), var.aval.dtype)

    def block(self, inside: Sequence[int], reads: Sequence[Var], makes: Sequence[Var], k: Any, *values: Any) -> Any:
        """Evaluates equations on block `k` of all."""
        held = dict(zip(reads, values, strict=True))
        for number in inside:
            eqn = self.program.equations[number]
            operands = [atom.val if isinstance(atom, Literal) else held[atom] for atom in eqn.invars]
            with context_of(eqn):
                held.update(zip(eqn.outvars, self.copy(number, eqn, operands, k), strict=True))
        return [held[var] for var in makes]

    def copy(self, number: int, eqn: JaxprEqn, operands: list[Any], k: Any) -> list[Any]:
        """An equation on block `k` of its factor."""
        factor, monoid = self.factors[number], self.monoids[number]
        description = self.program.describe(eqn)
        assert description is not None
        if description.layout is not None:
            asked = [
                None if factor in dim else names
                for names, dim in zip(description.layout, description.results[0], strict=True)
            ]
            return bind(constraint_equation(tuple(asked)), operands) if any(asked) else operands
        length = description.sizes[factor] // self.share.blocks
        sizes = tuple(length if f == factor else n for f, n in enumerate(description.sizes))
        positions = {factor: lambda: k * length + jnp.arange(length, dtype=jnp.int32)}
        for i in description.role(Role.ONCE):
            if monoid is not None and not any(factor in dim for dim in description.operands[i]):
                dtype = jnp.result_type(operands[i])
                operands[i] = jnp.where(k == 0, operands[i], monoid.identity(dtype))
        if monoid is not None and any(is_narrow(var.aval.dtype) for var in eqn.outvars):
            return evaluate_wide(description, eqn, operands, sizes, positions)
        return evaluate(description, eqn, operands, sizes, positions)


def nbytes(var: Var) -> int:
    """Of a whole value."""
    return math.prod(var.aval.shape) * itemsize(var.aval.dtype)
