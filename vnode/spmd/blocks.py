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
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Primitive, Var

from vnode.analysis.program import Atom, Program, barrier_equation, bind, context_of, inline
from vnode.errors import PartitionError
from vnode.operators import Monoid, Role, evaluate, evaluate_wide
from vnode.operators.sharding import constraint_equation
from vnode.spmd.choice import is_narrow, itemsize
from vnode.spmd.shares import Share, check_divides, restored, stored
from vnode.spmd.tied import Tied, partial, refuse, taken, tied

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


def some_in_blocks(program: Program, share: Share, factors: Mapping[int, int]) -> InBlocks:
    """A program in which single equations are computed block by block, and others as they were.

    Values that both have are brought from one form to the other in between; inputs that are read in blocks are
    stored so.

    Args:
      program: with calls inlined.
      share: whose blocks are how many.
      factors: for equations, by number, the factor of their description that is cut.

    Returns:
      The program, and which of its inputs and outputs are stored in blocks. Equations that are not cut are the same
      objects as before.

    Raises:
      PartitionError: as `in_blocks`.
    """
    return _Builder(program, share, taken(program, factors, share.blocks)).build()


@dataclasses.dataclass(frozen=True)
class Planned:
    """A loop.

    Attributes:
      inside: the equations that it evaluates, by number.
      makes: what it hands on.
    """

    inside: tuple[int, ...]
    makes: tuple[Var, ...]


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
        self.inputs = set(program.inputs)
        self.stored: dict[Var, Var] = {}
        self.returned = {atom for atom in program.outputs if isinstance(atom, Var)}
        self.stages = self.soonest()
        self.loops = self.planned()

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
        """The values that an equation reads, without literals."""
        return [atom for atom in self.program.equations[number].invars if isinstance(atom, Var)]

    # Which equation is in which loop

    def soonest(self) -> dict[int, int]:
        """For each equation how many loops must have ended before it: those whose sums it depends on."""
        stages: dict[int, int] = {}
        for number in range(len(self.program.equations)):
            sources = [self.makers[var] for var in self.operands(number) if var in self.makers]
            stages[number] = max((stages[s] + self.ends(s, number) for s in sources), default=0)
        return stages

    def ends(self, source: int, reader: int) -> bool:
        """Whether a loop must have ended before what it makes is read."""
        return source in self.factors and (reader not in self.factors or self.monoids[source] is not None)

    def planned(self) -> dict[int, Planned]:
        """The loops by stage: what each evaluates and hands on, found backward from what others read.

        What a loop needs of an earlier one is handed on, or evaluated again where that holds fewer bytes.
        """
        wanted: dict[int, set[Var]] = {}
        for number in self.factors:
            for var in self.program.equations[number].outvars:
                outside = any(n not in self.factors for n in self.readers.get(var, ()))
                read = self.monoids[number] is not None and var in self.readers
                if outside or read or var in self.returned:
                    wanted.setdefault(self.stages[number], set()).add(var)
        loops: dict[int, Planned] = {}
        for stage in range(max(self.stages.values(), default=0), -1, -1):
            makes = wanted.get(stage, set())
            inside, border = self.needed({self.makers[var] for var in makes}, stage)
            handed = {var for var in border if not self.is_cheap(var)}
            for var in sorted(border - handed, key=self.order):
                again, sources = self.again(var, handed)
                if sum(map(nbytes, sources - handed)) <= nbytes(var):
                    handed |= sources
                    inside |= again
                else:
                    handed.add(var)
            for var in handed:
                wanted.setdefault(self.stages[self.makers[var]], set()).add(var)
            if inside:
                loops[stage] = Planned(tuple(sorted(inside)), tuple(sorted(makes, key=self.order)))
        return loops

    def order(self, var: Var) -> tuple[int, int]:
        """Where a value is made."""
        maker = self.makers[var]
        return maker, self.program.equations[maker].outvars.index(var)

    def needed(self, roots: set[int], stage: int) -> tuple[set[int], set[Var]]:
        """The equations of a stage that others of it need, and what they need of earlier ones in blocks."""
        inside, border, pending = set(roots), set[Var](), list(roots)
        while pending:
            for var in self.operands(pending.pop()):
                maker = self.makers.get(var, -1)
                if maker not in self.factors or self.monoids[maker] is not None or maker in inside:
                    continue
                if self.stages[maker] < stage:
                    border.add(var)
                else:
                    inside.add(maker)
                    pending.append(maker)
        return inside, border

    def again(self, var: Var, handed: Container[Var]) -> tuple[set[int], set[Var]]:
        """The equations that make a value again of what is given or handed on, and what must be handed on for it."""
        inside, sources, pending = set[int](), set[Var](), [var]
        while pending:
            var = pending.pop()
            maker = self.makers.get(var, -1)
            if maker not in self.factors or self.monoids[maker] is not None or maker in inside:
                continue
            if var in handed or not self.is_cheap(var):
                sources.add(var)
            else:
                inside.add(maker)
                pending += self.operands(maker)
        return inside, sources

    def is_cheap(self, var: Var) -> bool:
        """Whether a value is made element by element, or of nothing."""
        description = self.program.describe(self.program.equations[self.makers[var]])
        assert description is not None
        return description.by_element

    # The program

    def build(self) -> InBlocks:
        equations: list[JaxprEqn] = []
        whole: set[Var] = set()  # of what is cut, what there is in one piece as well
        inputs = {var for var in self.program.inputs if self.is_cut(var)}
        self.stored = {var: Var(self.stored_type(var)) for var in inputs}

        def in_one_piece(atom: Atom) -> None:
            if isinstance(atom, Var) and self.is_cut(atom) and atom not in whole:
                whole.add(atom)
                equations.extend(between(restored, self.stored[atom], atom, self.dims[atom], self.share))

        def as_stored(var: Var) -> Var:
            if var not in self.dims:
                return var
            if var not in self.stored:
                self.stored[var] = Var(self.stored_type(var))
                if self.makers.get(var) not in self.factors:
                    equations.extend(between(stored, var, self.stored[var], self.dims[var], self.share))
            return self.stored[var]

        for stage in range(max(self.stages.values(), default=0) + 1):
            there = sorted(number for number, own in self.stages.items() if own == stage)
            for number in there:
                if number not in self.factors:
                    for atom in self.operands(number):
                        in_one_piece(atom)
                    equations.append(self.program.equations[number])
            if stage in self.loops:
                loop, reads = self.loop(self.loops[stage])
                invars: list[Atom] = [as_stored(var) for var in reads]
                equations.append(loop.replace(invars=invars, outvars=[as_stored(v) for v in self.loops[stage].makes]))
        program = dataclasses.replace(
            self.program,
            inputs=[self.stored[var] if var in inputs else var for var in self.program.inputs],
            equations=equations,
            outputs=[self.output(atom)[0] for atom in self.program.outputs],
            _descriptions={},
            _kinds={},
            _bodies={},
        )
        return InBlocks(
            program,
            self.share,
            tuple(self.dims[var] if var in inputs else None for var in self.program.inputs),
            tuple(self.output(atom)[1] for atom in self.program.outputs),
        )

    def is_cut(self, var: Var) -> bool:
        """Whether a value is given or made in blocks."""
        return var in self.dims and (self.makers.get(var) in self.factors or var in self.inputs)

    def output(self, atom: Atom) -> tuple[Atom, int | None]:
        """What is returned for an output, and along which dimension it is in blocks."""
        if isinstance(atom, Literal) or not self.is_cut(atom):
            return atom, None
        return self.stored[atom], self.dims[atom]

    def stored_type(self, var: Var) -> Any:
        shape, dim = list(var.aval.shape), self.dims[var]
        shape[dim] = self.share.room(shape[dim])
        return var.aval.update(shape=tuple(shape))

    def loop(self, planned: Planned) -> tuple[JaxprEqn, list[Var]]:
        """The equation that stands for a loop, and what it reads."""
        inside, makes = planned.inside, planned.makes
        made = {var for n in inside for var in self.program.equations[n].outvars}
        reads = list(dict.fromkeys(var for n in inside for var in self.operands(n) if var not in made))
        operands = tuple(self.dims.get(var) for var in reads)
        results = tuple(self.result(var) for var in makes)
        traced = jax.make_jaxpr(functools.partial(self.block, inside, reads, makes))(
            jax.ShapeDtypeStruct((), np.int32), *map(self.block_shape, reads)
        )
        loop = Loop(self.share, inline(traced.jaxpr, traced.consts), operands, results)
        source = self.program.equations[inside[0]].source_info
        eqn = barrier_equation().replace(primitive=in_blocks_p, params={"loop": loop}, source_info=source)
        return eqn, reads

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


def between(change: Callable[..., Any], start: Var, end: Var, dim: int, share: Share) -> list[JaxprEqn]:
    """Equations that bring a value from one form to another."""
    traced = jax.make_jaxpr(lambda value: change(value, dim, share))(
        jax.ShapeDtypeStruct(start.aval.shape, start.aval.dtype)
    )
    program = inline(traced.jaxpr, traced.consts)
    (first,), (last,) = program.inputs, program.outputs
    names = {first: start, last: end}
    return [
        eqn.replace(
            invars=[a if isinstance(a, Literal) else names.get(a, a) for a in eqn.invars],
            outvars=[names.get(var, var) for var in eqn.outvars],
        )
        for eqn in program.equations
    ]


def nbytes(var: Var) -> int:
    """Of a whole value."""
    return math.prod(var.aval.shape) * itemsize(var.aval.dtype)
