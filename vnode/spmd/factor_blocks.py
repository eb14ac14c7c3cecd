"""Program -> program with loops over blocks of a factor: virtual nodes along hidden units, heads, channels, words.

Knows programs, their tied dimensions, and the number of blocks of each device. Must not know layouts, nor how programs
are run.

    h = relu(x @ w);  y = h @ v                      w: [4, 16], v: [16, 4], 16 hidden units in 8 blocks

    y = in_blocks(x, w, v):                          on a device with 5 of the blocks
        for k in its blocks:  y += relu(x @ w[:, k]) @ v[k]
                                                     then y is summed over devices

Equations with the factor are evaluated block by block, as virtual nodes are slice by slice: in one loop over a device's
own blocks, with a run-time trip count. Results with the factor are written block by block; reductions over it are
summed in the loop, then over devices. An equation that reads such a sum is in a later loop. A train step has few loops:
one forward, one backward that includes the optimizer's update. The program's own loops and branches stay; their
carries, stacks and bodies are in blocks.

Source: unequal shares of an operator's dimensions are AccPar's (Song et al., HPCA 2020, section 5). There they were
simulated; programs of one shape for all devices, as XLA's, pad all to the largest share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Primitive, Var

from vnode.analysis.program import Atom, Program, barrier_equation, bind, context_of, inline
from vnode.errors import PartitionError
from vnode.operators import Monoid, OperatorDescription, Role, evaluate, evaluate_wide
from vnode.operators.control_flow import region_of, with_bodies
from vnode.operators.sharding import constraint_equation
from vnode.spmd.dimension_propagation import (
    TiedDimensions,
    dim_of,
    nbytes,
    partial,
    propagate_dimension,
    refuse,
)
from vnode.spmd.op_sharding import is_narrow
from vnode.spmd.uneven_blocks import Share, check_divides, restore, store

in_blocks_p = Primitive("in_blocks")
in_blocks_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Loop:
    """The content of an `in_blocks` equation.

    Attributes:
      share: the number of blocks of each device.
      program: computes one block, from the block's number, int32, and the operands, to the results. Sums of narrow
        types are returned in float32.
      operands: for each operand the dimension of which the program reads a block; None for the whole operand.
      results: for each result the dimension of which the program computes a block, or the monoid that combines the
        blocks' results.
      dtypes: the dtype of each result.
      at: for cost estimates, the number of blocks, and the first block, of a representative device; None where each
        device finds its own.
    """

    share: Share
    program: Program
    operands: tuple[int | None, ...]
    results: tuple[int | Monoid, ...]
    dtypes: tuple[Any, ...]
    at: tuple[int, int] | None = None


@in_blocks_p.def_abstract_eval
def _(*_: Any, loop: Loop) -> list[Any]:
    """The types of results when a program is traced again."""
    found = []
    for atom, result, dtype in zip(loop.program.outputs, loop.results, loop.dtypes, strict=True):
        shape = list(atom.aval.shape)
        if not isinstance(result, Monoid):
            shape[result] *= loop.share.max_blocks * len(loop.share.counts)
        found.append(ShapedArray(tuple(shape), dtype))
    return found


def loop_of(eqn: JaxprEqn) -> Loop | None:
    """The loop of an `in_blocks` equation; None for any other equation."""
    return eqn.params["loop"] if eqn.primitive is in_blocks_p else None


@dataclasses.dataclass(frozen=True, eq=False)
class InBlocks:
    """A program with a dimension in blocks.

    Attributes:
      program: for `vnode.spmd.sharding_flow.follow` over a mesh that has the share's axes. Values with the dimension
        are stored by `vnode.spmd.uneven_blocks.store`.
      share: the number of blocks of each device.
      inputs: for each input the dimension stored in blocks, or None.
      outputs: the same for outputs.
    """

    program: Program
    share: Share
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    def put(self, values: Sequence[Any]) -> list[Any]:
        """Converts inputs from the user's shapes to the program's."""
        return [x if d is None else store(x, d, self.share) for x, d in zip(values, self.inputs, strict=True)]

    def get(self, values: Sequence[Any]) -> list[Any]:
        """Converts outputs from the program's shapes to the user's."""
        return [x if d is None else restore(x, d, self.share) for x, d in zip(values, self.outputs, strict=True)]


def in_blocks(
    program: Program,
    share: Share,
    dims: Mapping[int, int],
    others: bool = True,
    whole: Collection[int] = (),
    names: Mapping[int, str] | None = None,
) -> InBlocks:
    """Computes everything that has a dimension block by block.

    Args:
      program: with calls inlined; a train step includes gradients and updates.
      share: the number of blocks of each device.
      dims: for some inputs, by number, the dimension that is cut. Tied dimensions are found: one weight of a layer is
        enough.
      others: whether other inputs with tied dimensions are given in blocks as well, or in one piece.
      whole: outputs, by number, that are returned in one piece.
      names: names of inputs in errors, by number.

    Returns:
      The program, and which of its inputs and outputs are stored in blocks.

    Raises:
      PartitionError: an equation with the dimension is neither free in it nor a reduction of it; or the blocks do not
        divide it.

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
            raise PartitionError(f"there is no input {number} to cut: the program has {len(program.inputs)}")
        check_divides(share, program.inputs[number].aval.shape, dim, (names or {}).get(number, f"input {number}"))
    found = propagate_dimension(program, {program.inputs[number]: dim for number, dim in dims.items()}, share.blocks)
    outputs = [
        found.dims.get(atom) if isinstance(atom, Var) and i not in whole else None
        for i, atom in enumerate(program.outputs)
    ]
    inputs = [found.dims.get(var) if others or i in dims else None for i, var in enumerate(program.inputs)]
    return _Builder(program, share, found, inputs, outputs).build()


@dataclasses.dataclass(frozen=True)
class PlannedLoop:
    """A loop over blocks.

    Attributes:
      equations: numbers of the equations that it evaluates.
      makes: the variables that it returns.
    """

    equations: tuple[int, ...]
    makes: tuple[Var, ...]


class _Builder:
    """Builds loops of the equations that are cut, and the program that contains them.

    A value's form is None (in one piece), or the dimension in which it is in blocks. Values are converted when read.

    Args:
      program: the original program.
      share: the number of blocks of each device.
      found: the dimensions and factors that are cut.
      inputs: the form in which each input is given.
      outputs: the form of each output.
    """

    def __init__(
        self,
        program: Program,
        share: Share,
        found: TiedDimensions,
        inputs: Sequence[int | None],
        outputs: Sequence[int | None],
    ) -> None:
        self.program, self.share, self.found, self.factors = program, share, found, found.factors
        self.monoids = {number: self.monoid(number) for number in self.factors}
        self.makers = {var: number for number, eqn in enumerate(program.equations) for var in eqn.outvars}
        self.made = self.native_forms(inputs)
        self.outputs = list(outputs)
        self.readers: dict[Var, dict[int, None]] = {}
        for number in range(len(program.equations)):
            for var, _ in self.reads(number):
                self.readers.setdefault(var, {})[number] = None
        self.returned = {atom for atom in program.outputs if isinstance(atom, Var)}
        self.stages = self.earliest_stage()
        self.loops = self.planned()
        self.names: dict[tuple[Var, int | None], Var] = {}

    @staticmethod
    def vars(atoms: Sequence[Atom]) -> list[Var | None]:
        """Variables, with None for literals."""
        return [atom if isinstance(atom, Var) else None for atom in atoms]

    def monoid(self, number: int) -> Monoid | None:
        """The monoid that combines an equation's blocks; None if its results are blocks."""
        eqn, factor = self.program.equations[number], self.factors[number]
        description = self.described(number)
        monoid = partial(description, factor)
        having = [dim_of(factor, dims) is not None for dims in description.results]
        if any(has is (monoid is not None) for has in having):
            refuse(eqn, "has results that have the factor, and others that do not")
        if any(jnp.issubdtype(atom.aval.dtype, jax.dtypes.extended) for atom in eqn.outvars):
            refuse(eqn, "makes random keys")
        return monoid

    def described(self, number: int) -> OperatorDescription:
        """The description of an equation that is cut."""
        description = self.program.describe(self.program.equations[number])
        assert description is not None
        return description

    # Forms

    def native_forms(self, inputs: Sequence[int | None]) -> dict[Var | None, int | None]:
        """The form in which each value is given or computed."""
        made: dict[Var | None, int | None] = dict(zip(self.program.inputs, inputs, strict=True))
        for number, factor in self.factors.items():
            outvars = self.program.equations[number].outvars
            for var, dims in zip(outvars, self.described(number).results, strict=True):
                made[var] = dim_of(factor, dims)
        for number in self.found.bodies:
            made.update((var, self.found.dims.get(var)) for var in self.program.equations[number].outvars)
        return made

    def forms(self, number: int) -> list[int | None]:
        """The form in which an equation reads each operand."""
        eqn = self.program.equations[number]
        if number in self.factors:
            return [dim_of(self.factors[number], dims) for dims in self.described(number).operands]
        if number in self.found.bodies:
            return [self.found.dims.get(atom) if isinstance(atom, Var) else None for atom in eqn.invars]
        return [None] * len(eqn.invars)

    def reads(self, number: int) -> list[tuple[Var, int | None]]:
        """The variables that an equation reads, and in which forms."""
        several = zip(self.program.equations[number].invars, self.forms(number), strict=True)
        return [(atom, form) for atom, form in several if isinstance(atom, Var)]

    # Which equation is in which loop

    def earliest_stage(self) -> dict[int, int]:
        """For each equation the number of loops that must end before it: those whose sums it depends on."""
        stages: dict[int, int] = {}
        for number in range(len(self.program.equations)):
            sources = [(self.makers[var], var, form) for var, form in self.reads(number) if var in self.makers]
            stages[number] = max(
                (stages[s] + self.must_end_before(var, number, form) for s, var, form in sources), default=0
            )
        return stages

    def must_end_before(self, var: Var, reader: int, form: int | None) -> bool:
        """Whether the loop that computes a value must end before it is read: yes, unless block k reads block k."""
        return self.makers.get(var) in self.factors and (reader not in self.factors or not self.is_own(var, form))

    def is_own(self, var: Var, form: int | None) -> bool:
        """Whether a block that reads a value in a form reads only what the same block of a loop computes."""
        return self.monoids.get(self.makers.get(var, -1), Monoid.SUM) is None and form == self.made[var]

    def planned(self) -> dict[int, PlannedLoop]:
        """Plans the loops by stage: the equations and results of each, found backward from the readers.

        Values of an earlier loop are returned from it, or recomputed where that keeps fewer bytes.
        """
        wanted: dict[int, set[Var]] = {}
        for number in range(len(self.program.equations)):
            for var, form in self.reads(number):
                if self.must_end_before(var, number, form):
                    wanted.setdefault(self.stages[self.makers[var]], set()).add(var)
        for var in self.returned:
            if self.makers.get(var) in self.factors:
                wanted.setdefault(self.stages[self.makers[var]], set()).add(var)
        loops: dict[int, PlannedLoop] = {}
        for stage in range(max(self.stages.values(), default=0), -1, -1):
            makes = wanted.get(stage, set())
            inside, border = self.needed({self.makers[var] for var in makes}, stage)
            returned = {var for var in border if not self.is_cheap(var)}
            for var in sorted(border - returned, key=self.order):
                again, sources = self.recomputation(var, returned)
                if sum(map(nbytes, sources - returned)) <= nbytes(var):
                    returned |= sources
                    inside |= again
                else:
                    returned.add(var)
            for var in returned:
                wanted.setdefault(self.stages[self.makers[var]], set()).add(var)
            if inside:
                loops[stage] = PlannedLoop(tuple(sorted(inside)), tuple(sorted(makes, key=self.order)))
        return loops

    def order(self, var: Var) -> tuple[int, int]:
        """The number of the equation that computes a value."""
        maker = self.makers[var]
        return maker, self.program.equations[maker].outvars.index(var)

    def needed(self, roots: set[int], stage: int) -> tuple[set[int], set[Var]]:
        """The equations that given ones of a stage need, and the values that these need from earlier stages in
        blocks."""
        inside, border, pending = set(roots), set[Var](), list(roots)
        while pending:
            for var, form in self.reads(pending.pop()):
                maker = self.makers.get(var, -1)
                if not self.is_own(var, form) or maker in inside:
                    continue
                if self.stages[maker] < stage:
                    border.add(var)
                else:
                    inside.add(maker)
                    pending.append(maker)
        return inside, border

    def recomputation(self, var: Var, returned: Container[Var]) -> tuple[set[int], set[Var]]:
        """The equations that recompute a value, and the values of earlier loops that they read.

        Args:
          var: the value.
          returned: values that earlier loops return anyway.
        """
        inside, sources, pending = set[int](), set[Var](), [(var, self.made[var])]
        while pending:
            var, form = pending.pop()
            maker = self.makers.get(var, -1)
            if not self.is_own(var, form) or maker in inside:
                continue
            if var in returned or not self.is_cheap(var):
                sources.add(var)
            else:
                inside.add(maker)
                pending += self.reads(maker)
        return inside, sources

    def is_cheap(self, var: Var) -> bool:
        """Whether a value is computed element by element, or from nothing."""
        return self.described(self.makers[var]).by_element

    # The program

    def build(self) -> InBlocks:
        """The program with loops over blocks: stage by stage, first other equations, then the stage's loop."""
        equations: list[JaxprEqn] = []
        available: set[tuple[Var, int | None]] = {(var, self.made[var]) for var in self.program.inputs}

        def ensure_form(var: Var, form: int | None) -> Var:
            """A value in a form, converted if necessary."""
            made = self.made.get(var)
            if form != made and (var, form) not in available:
                change, start, dim = (gather_blocks, made, made) if form is None else (store, None, form)
                equations.extend(
                    conversion_equations(change, ensure_form(var, start), self.name(var, form), dim, self.share)
                )
                available.add((var, form))
            return self.name(var, form)

        for stage in range(max(self.stages.values(), default=0) + 1):
            for number in sorted(number for number, own in self.stages.items() if own == stage):
                if number not in self.factors:
                    for var, form in self.reads(number):
                        ensure_form(var, form)
                    cut = number in self.found.bodies
                    equations.append(self.region(number) if cut else self.program.equations[number])
            if stage in self.loops:
                loop, reads = self.loop(self.loops[stage])
                invars: list[Atom] = [ensure_form(*read) for read in reads]
                makes = self.loops[stage].makes
                equations.append(loop.replace(invars=invars, outvars=[self.name(v, self.made[v]) for v in makes]))
        outputs = [
            atom if isinstance(atom, Literal) else ensure_form(atom, form)
            for atom, form in zip(self.program.outputs, self.outputs, strict=True)
        ]
        inputs = [self.made[var] for var in self.program.inputs]
        program = dataclasses.replace(
            self.program,
            inputs=[self.name(var, form) for var, form in zip(self.program.inputs, inputs, strict=True)],
            equations=equations,
            outputs=outputs,
            _descriptions={},
            _bodies={},
        )
        return InBlocks(program, self.share, tuple(inputs), tuple(self.outputs))

    def name(self, var: Var, form: int | None) -> Var:
        """The variable for a value in a form."""
        if form is None:
            return var
        if (var, form) not in self.names:
            shape = list(var.aval.shape)
            shape[form] = self.share.stored_size(shape[form])
            self.names[var, form] = Var(var.aval.update(shape=tuple(shape)))
        return self.names[var, form]

    def region(self, number: int) -> JaxprEqn:
        """Rebuilds a loop or branch with bodies in blocks."""
        eqn = self.program.equations[number]
        region = region_of(eqn)
        assert region is not None
        bodies = []
        for k, (body, found) in enumerate(zip(self.program.bodies(eqn), self.found.bodies[number], strict=True)):
            outputs = [found.dims.get(var) if var is not None else None for var in self.vars(body.outputs)]
            inputs = [found.dims.get(var) for var in body.inputs]
            forms = [None] * len(outputs) if k < region.tests else outputs
            made = _Builder(body, self.share, found, inputs, forms).build()
            bodies.append(made.program.to_closed_jaxpr(region.bodies[k].jaxpr))
        several = zip(eqn.invars, self.forms(number), strict=True)
        return with_bodies(eqn, bodies).replace(
            invars=[atom if isinstance(atom, Literal) else self.name(atom, form) for atom, form in several],
            outvars=[self.name(var, self.made[var]) for var in eqn.outvars],
        )

    def loop(self, planned: PlannedLoop) -> tuple[JaxprEqn, list[tuple[Var, int | None]]]:
        """The equation of a planned loop, and its operands."""
        inside, makes = planned.equations, planned.makes
        made = {var for n in inside for var in self.program.equations[n].outvars}
        every = dict.fromkeys(read for n in inside for read in self.reads(n))
        reads = [(var, form) for var, form in every if var not in made or not self.is_own(var, form)]
        results = tuple(self.result(var) for var in makes)
        traced = jax.make_jaxpr(functools.partial(self.block, inside, reads, makes))(
            jax.ShapeDtypeStruct((), np.int32), *(self.block_shape(*read) for read in reads)
        )
        operands, dtypes = tuple(form for _, form in reads), tuple(var.aval.dtype for var in makes)
        loop = Loop(self.share, inline(traced.jaxpr, traced.consts), operands, results, dtypes)
        source = self.program.equations[inside[0]].source_info
        eqn = barrier_equation().replace(primitive=in_blocks_p, params={"loop": loop}, source_info=source)
        return eqn, reads

    def result(self, var: Var) -> int | Monoid:
        monoid, dim = self.monoids[self.makers[var]], self.made[var]
        if monoid is not None:
            return monoid
        assert dim is not None
        return dim

    def block_shape(self, var: Var, form: int | None) -> jax.ShapeDtypeStruct:
        shape = list(var.aval.shape)
        if form is not None:
            shape[form] //= self.share.blocks
        return jax.ShapeDtypeStruct(tuple(shape), var.aval.dtype)

    def block(
        self, inside: Sequence[int], reads: Sequence[tuple[Var, int | None]], makes: Sequence[Var], k: Any, *values: Any
    ) -> Any:
        """Evaluates equations on block `k`."""
        held = dict(zip(reads, values, strict=True))
        for number in inside:
            eqn = self.program.equations[number]
            several = zip(eqn.invars, self.forms(number), strict=True)
            operands = [atom.val if isinstance(atom, Literal) else held[atom, form] for atom, form in several]
            with context_of(eqn):
                results = self.copy(number, eqn, operands, k)
            held.update(((var, self.made[var]), x) for var, x in zip(eqn.outvars, results, strict=True))
        return [held[var, self.made[var]] for var in makes]

    def copy(self, number: int, eqn: JaxprEqn, operands: list[Any], k: Any) -> list[Any]:
        """Evaluates an equation on block `k` of its factor."""
        factor, monoid, description = self.factors[number], self.monoids[number], self.described(number)
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


def gather_blocks(value: Any, dim: int, share: Share) -> jax.Array:
    """Gathers a value stored in blocks: first the padded parts of all devices, then the blocks without the padding."""
    everywhere = constraint_equation(tuple(() if d == dim else None for d in range(value.ndim)))
    return restore(bind(everywhere, [value])[0], dim, share)


def conversion_equations(
    change: Callable[..., Any], start: Var, end: Var, dim: int | None, share: Share
) -> list[JaxprEqn]:
    """Equations that convert a value from one form to another."""
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
