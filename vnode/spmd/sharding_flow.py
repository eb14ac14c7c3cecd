"""Program and layouts of its inputs -> the layout of every value, and the sharding of every equation.

Knows programs, loops and branches, and shardings of one equation. Must not know devices, virtual nodes, nor how
programs are run.

    x: [data, -];  w: [-, model]          h = x @ w:   [data, model], computed in shards without communication
                                          s = sum(h):  partial over data and model, each device's sum of its shard

Layouts flow forward from the inputs; each equation follows its operands. In loops, layouts of the carry are iterated to
a fixpoint. Materializable values have no layout: they are cheap and larger than what they are computed from (constants,
iotas, broadcasts, random bits of a key). Each device computes them where they are read, in the layout needed there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Atom, Program, message_about
from vnode.errors import PartitionError, UnsupportedPrimitiveError
from vnode.operators import Algebra, Monoid, OperatorDescription
from vnode.operators.control_flow import Region, region_of
from vnode.spmd.branch_groups import Branches, branch_locations, branches_of
from vnode.spmd.factor_blocks import Loop, loop_of
from vnode.spmd.layout import Axes, Cut, Layout, cut_of, replicated
from vnode.spmd.op_sharding import (
    FactorSharding,
    OperandSharding,
    OpSharding,
    build_sharding,
    choose,
    is_narrow,
    passing_groups,
    reached_layouts,
    shardings_for_result,
)
from vnode.spmd.resharding import finest_layout

Path = tuple[int, ...]
"""The position of an equation: its number; inside a loop or branch that equation's, the body's, and the number
there."""

MAX_ROUNDS = 4
"""Rounds after which the search for a fixpoint of a loop's carries stops; a carry is then resharded in the loop."""

CHEAP_FLOPS = 30
"""Operations per element up to which a value is materializable: computed at each use, rather than once."""


@dataclasses.dataclass(frozen=True)
class RequestedSharding:
    """A requested sharding of an equation.

    Attributes:
      ways: the sharded factors and their axes.
      given: the layouts of the operands before the equation; a part fetches indices that it lacks (a halo) from there.
      passed: axes over which operands are partial, and results stay so.
    """

    ways: tuple[FactorSharding, ...]
    given: tuple[Layout, ...]
    passed: tuple[tuple[str, Monoid], ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """The sharding of one equation in a program.

    Attributes:
      eqn: the equation.
      operands: required layouts of operands; None for one that is not read.
      made: layouts in which results are computed.
      results: layouts in which results are read.
      choice: the equation's sharding; None for a loop or branch, and for an equation that every device evaluates whole.
      region: the loop or branch that the equation is.
      bodies: layouts through each body.
      branches: its branches, if devices of their own evaluate each body.
      loop: its loop over blocks, if devices have different numbers of blocks.
      materializable: evaluated wherever its result is needed, in that layout.
      is_constraint: a sharding constraint, which computes nothing.
      leaves: a copy in the layout `made` is dropped once the one in `results` exists.
      gather_after: for a loop, values that must be ready before its loop-invariant operands are gathered. They are then
        gathered for this loop alone.
    """

    eqn: JaxprEqn
    operands: tuple[Layout, ...]
    made: tuple[Layout, ...]
    results: tuple[Layout, ...]
    choice: OpSharding | None = None
    region: Region | None = None
    bodies: tuple[Flow, ...] = ()
    branches: Branches | None = None
    loop: Loop | None = None
    materializable: bool = False
    is_constraint: bool = False
    leaves: bool = False
    gather_after: tuple[Var, ...] = ()


@dataclasses.dataclass(frozen=True)
class Flow:
    """Layouts through a program.

    Attributes:
      program: the program.
      inputs: layouts of inputs.
      steps: one per equation, in order.
      outputs: layouts in which outputs are returned.
      ends: layouts in which outputs are computed.
    """

    program: Program
    inputs: tuple[Layout, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Layout, ...]
    ends: tuple[Layout, ...] = ()


def follow(
    program: Program,
    inputs: Sequence[Layout],
    axes: Axes,
    *,
    outputs: Sequence[Layout | None] | None = None,
    wishes: Mapping[Var, Layout] | None = None,
    asked: Mapping[Path, RequestedSharding] | None = None,
) -> Flow:
    """Finds the layout of every value of a program.

    Args:
      program: the program.
      inputs: layouts of its inputs.
      axes: the mesh axes longer than one.
      outputs: for each output its required layout; None where any will do, or for all of them.
      wishes: wanted layouts of single variables, including those of loops' and branches' bodies (`Program.bodies`). A
        carry that begins as zero may be wished partial.
      asked: requested shardings of single equations.

    Returns:
      The flow.

    Raises:
      PartitionError: an equation cannot be sharded as requested.
      UnsupportedPrimitiveError: an equation has an effect, which every device would repeat.
    """
    follower = _Follower(program, axes, wishes or {}, asked or {})
    follower.follow([OperandSharding(layout) for layout in inputs])
    wanted = outputs if outputs is not None else [None] * len(program.outputs)
    ends = tuple(state.layout for state in follower.ends)
    handed_on = tuple(end.without_partial if want is None else want for end, want in zip(ends, wanted, strict=True))
    return Flow(program, tuple(inputs), tuple(follower.steps), handed_on, ends)


class _Follower:
    """Propagates layouts through one program, once. The results are in `steps` and `ends`."""

    def __init__(
        self,
        program: Program,
        axes: Axes,
        wishes: Mapping[Var, Layout],
        asked: Mapping[Path, RequestedSharding],
        path: Path = (),
    ) -> None:
        self.program, self.axes, self.wishes, self.asked, self.path = program, axes, wishes, asked, path
        self.states: dict[Var, OperandSharding] = {}
        self.pieces: dict[Var, Layout] = {}  # for combined values, the partial layouts in which they were computed
        self.steps: list[Step] = []
        self.ends: list[OperandSharding] = []

    def follow(self, inputs: Sequence[OperandSharding]) -> _Follower:
        """Propagates the inputs' shardings through all equations; returns itself."""
        self.states.update(zip(self.program.inputs, inputs, strict=True))
        for var in self.program.constants:
            self.states[var] = OperandSharding(replicated(len(var.aval.shape)))
        for number, eqn in enumerate(self.program.equations):
            self.steps.append(self.step(eqn, (*self.path, number)))
        self.ends = [self.state(atom) for atom in self.program.outputs]
        return self

    def state(self, atom: Atom) -> OperandSharding:
        if isinstance(atom, Literal):
            shape = getattr(atom.aval, "shape", ())
            return OperandSharding(replicated(len(shape)), materializable=True, zero=not shape and atom.val == 0)
        return self.states[atom]

    def step(self, eqn: JaxprEqn, path: Path) -> Step:
        """The step of one equation; records the shardings of its results.

        Raises:
          PartitionError: it cannot be sharded as requested.
          UnsupportedPrimitiveError: it has an effect, which every device would repeat.
        """
        given = [self.state(atom) for atom in eqn.invars]
        region, branches, loop = region_of(eqn), branches_of(eqn), loop_of(eqn)
        if region is not None:
            return self.region_step(eqn, region, given, path)
        if branches is not None:
            return self.side_by_side_step(eqn, branches, given, path)
        if loop is not None:
            return self.blocks_step(eqn, loop, given, path)
        description = self.program.describe(eqn)
        mutable = any(hasattr(atom.aval, "inner_aval") for atom in (*eqn.invars, *eqn.outvars))
        if mutable or (eqn.effects and self.axes):
            raise UnsupportedPrimitiveError(
                message_about(
                    eqn,
                    f"{eqn.primitive.name!r} has an effect, which would happen on every device of a mesh that splits "
                    "more than the batch.",
                    remedies=[
                        "return the value from the step and use it there",
                        "or split the batch only, or leave the rest to XLA: partition='xla'",
                    ],
                )
            )
        if description is not None and description.layout is not None:
            return self.constraint_step(eqn, description.layout, given[0])
        wishes = [self.wishes.get(var) or self.requested_layouts.get(var) for var in eqn.outvars]
        if path in self.asked and description is not None:
            return self.asked_step(eqn, description, given, self.asked[path])
        if description is None or (all(each.layout.is_whole for each in given) and not any(wishes)):
            cheap = description is not None and self.is_materializable(eqn, given)
            operands = tuple(replicated(len(each.layout.dims)) for each in given)
            made = tuple(replicated(len(getattr(var.aval, "shape", ()))) for var in eqn.outvars)
            results = made if description is not None else apply_wishes(made, wishes)
            zero = (
                description is not None
                and cheap
                and description.has(Algebra.MOVES)
                and all(each.zero for each in given)
                and bool(given)
            )
            self.states.update(
                (var, OperandSharding(r, cheap, zero)) for var, r in zip(eqn.outvars, results, strict=True)
            )
            return Step(eqn, operands, made, results, materializable=cheap)
        choice = choose(eqn, description, given, self.axes, wishes)
        made = reached_layouts(eqn, choice)
        results = apply_wishes(made, wishes)
        for atom, each, want in zip(eqn.invars, given, choice.operands, strict=True):
            if isinstance(atom, Var) and each.layout.partial and not want.partial:
                self.states[atom] = OperandSharding(want)  # later equations find it in this layout
        self.states.update(
            (var, OperandSharding(r, settled=bool(r.partial) and self.is_combined(var, r)))
            for var, r in zip(eqn.outvars, results, strict=True)
        )
        return Step(eqn, choice.operands, made, results, choice)

    def is_combined(self, var: Var, layout: Layout) -> bool:
        """Whether some equation that reads a variable needs its partial values combined."""
        for eqn in self.program.readers.get(var, ()):
            description = None if region_of(eqn) is not None else self.program.describe(eqn)
            having = {i for i, atom in enumerate(eqn.invars) if atom is var}
            if description is None or not all(
                any(having <= group for group in passing_groups(description, monoid)) for _, monoid in layout.partial
            ):
                return True
        return False

    @functools.cached_property
    def requested_layouts(self) -> dict[Var, Layout]:
        """Layouts of variables whose only readers, directly or through elementwise equations, are sharding
        constraints on all dimensions."""
        asked: dict[Var, Layout] = {}

        def ask(atom: Atom, layout: Layout) -> None:
            if isinstance(atom, Var) and len(self.program.readers[atom]) == 1 and atom not in self.output_variables:
                asked[atom] = layout

        for eqn in reversed(self.program.equations):
            description = None if region_of(eqn) is not None else self.program.describe(eqn)
            if description is None or len(eqn.outvars) != 1:
                continue
            (var,) = eqn.outvars
            whole = replicated(len(var.aval.shape))
            if description.layout is not None and None not in description.layout:
                ask(eqn.invars[0], self.layout_asked(description.layout, whole, var.aval.shape))
            elif var in asked and not asked[var].is_whole and description.by_element:
                ways = shardings_for_result(description, 0, asked[var], self.axes)
                given = [OperandSharding(replicated(len(getattr(atom.aval, "shape", ())))) for atom in eqn.invars]
                choice = ways and build_sharding(eqn, description, ways, given, self.axes, ())
                if choice and choice.results[0] == asked[var]:
                    for atom, layout in zip(eqn.invars, choice.operands, strict=True):
                        if not layout.is_whole:
                            ask(atom, layout)
        return asked

    @functools.cached_property
    def output_variables(self) -> set[Var]:
        """The variables that are outputs."""
        return {atom for atom in self.program.outputs if isinstance(atom, Var)}

    def asked_step(
        self,
        eqn: JaxprEqn,
        description: OperatorDescription,
        given: Sequence[OperandSharding],
        asked: RequestedSharding,
    ) -> Step:
        """Shards an equation as requested.

        Raises:
          PartitionError: it cannot be sharded so, or an operand that is wanted partial is not.
        """
        choice = build_sharding(
            eqn, description, asked.ways, [OperandSharding(x) for x in asked.given], self.axes, asked.passed
        )
        operands = zip(eqn.invars, given, () if choice is None else choice.operands, strict=False)
        if choice is None or not all(self.is_partial_as_wanted(*each) for each in operands):
            raise PartitionError(
                message_about(
                    eqn,
                    f"{eqn.primitive.name!r} cannot be sharded as requested.",
                    facts=[f"factors {way.lead} over {', '.join(way.axes)}" for way in asked.ways],
                    remedies=["take the factors from this program's own equations"],
                )
            )
        made = reached_layouts(eqn, choice)
        results = apply_wishes(made, [self.wishes.get(var) for var in eqn.outvars])
        self.pieces.update((var, x) for var, x in zip(eqn.outvars, made, strict=True) if x.partial)
        self.states.update((var, OperandSharding(layout)) for var, layout in zip(eqn.outvars, results, strict=True))
        return Step(eqn, choice.operands, made, results, choice)

    def is_partial_as_wanted(self, atom: Atom, given: OperandSharding, want: Layout) -> bool:
        """Whether an operand is partial, or zero, over the axes over which it is wanted partial.

        The later sum over devices would count a replicated operand once per device.
        """
        made = self.pieces.get(atom, given.layout) if isinstance(atom, Var) else given.layout
        return given.zero or any(set(want.partial) <= set(layout.partial) for layout in (made, given.layout))

    def constraint_step(self, eqn: JaxprEqn, asked: Sequence[tuple[str, ...] | None], given: OperandSharding) -> Step:
        """Applies a sharding constraint, over the axes that exist."""
        (var,) = eqn.outvars
        layout = self.layout_asked(asked, given.layout, var.aval.shape)
        self.states[var] = OperandSharding(layout)
        return Step(eqn, (layout,), (layout,), (layout,), is_constraint=True)

    def layout_asked(self, asked: Sequence[tuple[str, ...] | None], layout: Layout, shape: Sequence[int]) -> Layout:
        """A layout with a constraint applied, over the axes that exist."""
        dims = list(layout.dims)
        for d, (names, n) in enumerate(zip(asked, shape, strict=True)):
            if names is not None:
                names = tuple(name for name in names if name in self.axes)
                dims[d] = cut_of(names, 1, n, n, self.axes) if names and n > 1 else None
        taken = [name for names in asked for name in names or ()]
        for d, cut in enumerate(dims):  # an axis cuts one dimension only
            if asked[d] is None and cut is not None and set(cut.axes) & set(taken):
                dims[d] = None
        return Layout(tuple(dims))

    def is_materializable(self, eqn: JaxprEqn, given: Sequence[OperandSharding]) -> bool:
        """Whether a value is materializable: larger than its operands, unless these are too, and cheap to compute."""
        description = self.program.describe(eqn)
        assert description is not None
        if description.has(Algebra.CONTRACTS) or description.reduced or len(eqn.outvars) != 1:
            return False
        size = math.prod(eqn.outvars[0].aval.shape)
        read = sum(
            math.prod(atom.aval.shape) for atom, each in zip(eqn.invars, given, strict=True) if not each.materializable
        )
        return (size > read or all(each.materializable for each in given)) and description.flops <= CHEAP_FLOPS * max(
            size, 1
        )

    # Branches on devices of their own

    def side_by_side_step(
        self, eqn: JaxprEqn, branches: Branches, given: Sequence[OperandSharding], path: Path
    ) -> Step:
        """Shards branches side by side: devices of one index along an axis evaluate each, sharded over the other
        axes."""
        axis, count = branches.axis, len(branches.programs)
        if self.axes.get(axis, 1) < count:
            raise PartitionError(
                message_about(
                    eqn,
                    f"{count} branches cannot run side by side along {axis!r}, of size {self.axes.get(axis, 1)}.",
                    facts=[f"axes: {', '.join(f'{name} of {n}' for name, n in self.axes.items())}"],
                    remedies=["take another axis", "or merge branches"],
                )
            )
        inner = {name: size for name, size in self.axes.items() if name != axis}
        operands = [
            self.at_branches(
                branches, i, atom, below_axis(axis, each.layout, getattr(atom.aval, "shape", ()), self.axes)
            )
            for i, (atom, each) in enumerate(zip(eqn.invars, given, strict=True))
        ]
        inside = [OperandSharding(present_at_one(layout, axis)) for layout in operands]
        flows = []
        for number, (program, reads) in enumerate(zip(branches.programs, branches.operands, strict=True)):
            inputs = [inside[i] for i in reads]
            follower = _Follower(program, inner, self.wishes, self.asked, (*path, number)).follow(inputs)
            outputs = [
                self.pieces_at_one(eqn, atom, end) for atom, end in zip(program.outputs, follower.ends, strict=True)
            ]
            flows.append(Flow(program, tuple(g.layout for g in inputs), tuple(follower.steps), tuple(outputs)))
        made = branch_result_layouts(branches, flows, self.axes)
        results = apply_wishes(made, [self.wishes.get(var) for var in eqn.outvars])
        for i, (var, layout) in enumerate(zip(eqn.outvars, results, strict=True)):
            self.pieces[var] = made[i]
            self.states[var] = OperandSharding(layout, settled=bool(layout.partial) and self.is_combined(var, layout))
        return Step(eqn, tuple(operands), made, results, bodies=tuple(flows), branches=branches)

    def at_branches(self, branches: Branches, i: int, atom: Atom, layout: Layout) -> Layout:
        """The layout in which branches read an operand: the wished one, if there is one.

        A result of an earlier group that only the branch at the same index reads stays where it is: partial.
        """
        inside = (
            program.inputs[reads.index(i)]
            for program, reads in zip(branches.programs, branches.operands, strict=True)
            if i in reads
        )
        wish = next((self.wishes[var] for var in inside if var in self.wishes), None)
        layout = layout if wish is None else wish.without_partial
        if not isinstance(atom, Var):
            return layout
        there = (p for p in self.states[atom].layout.partial if p[0] == branches.axis)
        stays = branches.reads_at(i, self.branch_locations.get(atom))
        return Layout(layout.dims, tuple(there)) if stays else layout

    @functools.cached_property
    def branch_locations(self) -> dict[Var, tuple[str, int]]:
        """The axis and index of the devices that alone have a branch's values."""
        return branch_locations(self.program)

    @staticmethod
    def pieces_at_one(eqn: JaxprEqn, atom: Atom, end: OperandSharding) -> Layout:
        """The layout in which a branch returns a result: it may stay partial over other axes with the same monoid.

        Raises:
          PartitionError: the result is an array of random keys, which cannot be added.
        """
        dtype = atom.aval.dtype
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise PartitionError(
                message_about(
                    eqn,
                    f"A branch that runs beside others makes random keys, {dtype}.",
                    remedies=["make keys outside the branches", "or use them in the branch that makes them"],
                )
            )
        alike = all(monoid is monoid_of_one(dtype) for _, monoid in end.layout.partial)
        return end.layout if alike else end.layout.without_partial

    # Blocks in different numbers

    def blocks_step(self, eqn: JaxprEqn, loop: Loop, given: Sequence[OperandSharding], path: Path) -> Step:
        """Shards a loop over blocks: some axes divide the blocks among devices, the other axes divide each block."""
        share = loop.share
        share.check(self.axes)
        inner = {name: size for name, size in self.axes.items() if name not in share.axes}
        operands, inputs = [], [OperandSharding(replicated(0))]
        for atom, each, dim in zip(eqn.invars, given, loop.operands, strict=True):
            shape, layout = getattr(atom.aval, "shape", ()), each.layout
            for axis in share.axes:
                layout = below_axis(axis, layout, shape, self.axes)
            inputs.append(OperandSharding(layout if dim is None else with_cut(dim, None, layout)))
            operands.append(layout if dim is None else with_cut(dim, share.cut(shape[dim], self.axes), layout))
        follower = _Follower(loop.program, inner, self.wishes, self.asked, (*path, 0)).follow(inputs)
        made, outputs = [], []
        for var, end, result in zip(eqn.outvars, follower.ends, loop.results, strict=True):
            monoid = result if isinstance(result, Monoid) else Monoid.SUM
            alike = all(m is monoid for _, m in end.layout.partial)
            layout = end.layout if alike else end.layout.without_partial
            if isinstance(result, Monoid):
                outputs.append(layout)
                partial = [*layout.partial, *((name, monoid) for name in share.axes)]
                partial = [] if is_narrow(var.aval.dtype) else partial
                made.append(Layout(layout.dims, tuple(sorted(partial, key=lambda p: list(self.axes).index(p[0])))))
            else:
                outputs.append(with_cut(result, None, layout))
                made.append(with_cut(result, share.cut(var.aval.shape[result], self.axes), layout))
        self.states.update(
            (var, OperandSharding(layout, settled=bool(layout.partial) and self.is_combined(var, layout)))
            for var, layout in zip(eqn.outvars, made, strict=True)
        )
        flow = Flow(loop.program, tuple(g.layout for g in inputs), tuple(follower.steps), tuple(outputs))
        return Step(eqn, tuple(operands), tuple(made), tuple(made), bodies=(flow,), loop=loop)

    # Loops and branches

    def region_step(self, eqn: JaxprEqn, region: Region, given: Sequence[OperandSharding], path: Path) -> Step:
        """Shards a loop or branch: follows its bodies until the layouts of the carries no longer change."""
        programs = self.program.bodies(eqn)
        layouts = [each.layout.without_partial for each in given]
        for i in range(len(layouts)):
            if i == region.chooser:
                layouts[i] = replicated(len(layouts[i].dims))
            elif i in region.scanned:
                layouts[i] = Layout((None, *layouts[i].dims[1:]))
        carried = list(region.carried)
        wished = self.operand_layouts(region, programs, given)
        for i, layout in wished.items():
            layouts[i] = layout
        # if elements of the carry stop by themselves, all devices must run the same number of iterations
        stopping = max((len(a.aval.shape) for program in programs[: region.tests] for a in program.outputs), default=0)
        for i in carried:
            layouts[i] = whole_along(stopping, layouts[i])
        flows, ends = self.follow_bodies(region, programs, layouts, path)
        for number in range(MAX_ROUNDS):
            before = [layouts[i] for i in carried]
            after = [
                layouts[i]
                if i in wished
                else end.layout
                if region.stacks and self.may_be_partial(end.layout, given[i])
                else whole_along(stopping, end.layout.without_partial)
                for i, end in zip(carried, ends[-1], strict=False)
            ]
            if before == after or number == MAX_ROUNDS - 1:
                break
            for i, layout in zip(carried, after, strict=True):
                layouts[i] = layout
            flows, ends = self.follow_bodies(region, programs, layouts, path)
        made = self.results_of(eqn, region, ends[region.tests :], [layouts[i] for i in carried])
        wishes = [self.wishes.get(var) for var in eqn.outvars]
        for j in range(len(carried), len(made)):
            wish = wishes[j]
            if wish is not None:  # bodies return it so; of a stack, one iteration's element
                made[j] = Layout((None, *wish.dims[1:])) if region.stacks else wish
        results = apply_wishes(made, wishes)
        bodies = []
        for k, flow in enumerate(flows):
            if k < region.tests:
                outputs = tuple(replicated(len(each.layout.dims)) for each in ends[k])
            else:
                outputs = tuple(
                    Layout(layout.dims[1:], layout.partial) if region.stacks and j >= len(carried) else layout
                    for j, layout in enumerate(made)
                )
            bodies.append(dataclasses.replace(flow, outputs=outputs))
        self.states.update((var, OperandSharding(layout)) for var, layout in zip(eqn.outvars, results, strict=True))
        return Step(eqn, tuple(layouts), tuple(made), results, region=region, bodies=tuple(bodies))

    def operand_layouts(
        self, region: Region, programs: Sequence[Program], given: Sequence[OperandSharding]
    ) -> dict[int, Layout]:
        """The wished layouts of a loop's or branch's operands, by number: those wished for the bodies' inputs."""
        found = dict[int, Layout]()
        for program, inputs in zip(programs, region.inputs, strict=True):
            for i, var in zip(inputs, program.inputs, strict=False):
                wish = self.wishes.get(var)
                if wish is not None:
                    kept = wish if i in region.carried and self.may_be_partial(wish, given[i]) else wish.without_partial
                    found[i] = Layout((None, *kept.dims)) if i in region.scanned else kept
        return found

    @staticmethod
    def may_be_partial(layout: Layout, given: OperandSharding) -> bool:
        """Whether an initial carry may become a partial sum: it must be zero or partial itself."""
        return given.zero and all(monoid is Monoid.SUM for _, monoid in layout.partial)

    def follow_bodies(
        self, region: Region, programs: Sequence[Program], layouts: Sequence[Layout], path: Path
    ) -> tuple[list[Flow], list[list[OperandSharding]]]:
        """Follows each body once."""
        flows, ends = [], []
        for number, (program, inputs) in enumerate(zip(programs, region.inputs, strict=True)):
            given = [
                OperandSharding(Layout(layouts[i].dims[1:]) if i in region.scanned else layouts[i]) for i in inputs
            ]
            follower = _Follower(program, self.axes, self.wishes, self.asked, (*path, number)).follow(given)
            flows.append(Flow(program, tuple(g.layout for g in given), tuple(follower.steps), ()))
            ends.append(follower.ends)
        return flows, ends

    def results_of(
        self, eqn: JaxprEqn, region: Region, ends: Sequence[Sequence[OperandSharding]], carried: Sequence[Layout]
    ) -> list[Layout]:
        """The layouts of a region's results: carries keep theirs; others follow the bodies.

        Where branches differ, the result has the layout that all others are slices of, if there is one.
        """
        results = list(carried)
        for var, several in list(zip(eqn.outvars, zip(*ends, strict=True), strict=True))[len(carried) :]:
            layouts = {end.layout for end in several if not end.materializable} or {several[0].layout}
            if len(layouts) > 1:
                complete = sorted({layout.without_partial for layout in layouts}, key=str)
                layouts = {finest_layout(complete, var.aval.shape, self.axes, var.aval.dtype) or complete[0]}
            (layout,) = layouts
            if len({end.layout for end in several}) > 1:
                layout = layout.without_partial
            results.append(Layout((None, *layout.dims), layout.partial) if region.stacks else layout)
        return results


def apply_wishes(made: Sequence[Layout], wishes: Sequence[Layout | None]) -> tuple[Layout, ...]:
    """Replaces layouts by the wished ones."""
    return tuple(layout if wish is None else wish for layout, wish in zip(made, wishes, strict=True))


def below_axis(axis: str, layout: Layout, shape: Sequence[int], axes: Axes) -> Layout:
    """A layout without partial values, in which cuts lose `axis` and the axes minor to it."""
    dims: list[Cut | None] = []
    for cut, n in zip(layout.dims, shape, strict=True):
        if cut is not None and axis in cut.axes:
            before = cut.axes[: cut.axes.index(axis)]
            cut = cut_of(before, cut.outer, cut.size, n, axes) if before else None
        dims.append(cut)
    return Layout(tuple(dims))


def present_at_one(layout: Layout, axis: str) -> Layout:
    """The layout of a value that only devices of one index along an axis have."""
    return Layout(layout.dims, tuple(each for each in layout.partial if each[0] != axis))


def branch_result_layouts(branches: Branches, flows: Sequence[Flow], axes: Axes) -> tuple[Layout, ...]:
    """The layouts of branches' results: partial along their axis, since one device has each value."""
    order = list(axes)
    found: dict[int, Layout] = {}
    for flow, makes in zip(flows, branches.results, strict=True):
        for i, atom, layout in zip(makes, flow.program.outputs, flow.outputs, strict=True):
            partial = (*layout.partial, (branches.axis, monoid_of_one(atom.aval.dtype)))
            found[i] = Layout(layout.dims, tuple(sorted(partial, key=lambda piece: order.index(piece[0]))))
    return tuple(found[i] for i in range(len(found)))


def with_cut(dim: int, cut: Cut | None, layout: Layout) -> Layout:
    """A layout with another cut of one dimension."""
    return Layout((*layout.dims[:dim], cut, *layout.dims[dim + 1 :]), layout.partial)


def monoid_of_one(dtype: object) -> Monoid:
    """The monoid that broadcasts one device's value."""
    return Monoid.OR if dtype == np.bool_ else Monoid.SUM


def whole_along(dims: int, layout: Layout) -> Layout:
    """A layout whose first `dims` dimensions are not cut."""
    return Layout((*(None,) * dims, *layout.dims[dims:]), layout.partial)
