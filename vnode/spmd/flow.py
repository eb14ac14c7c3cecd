"""Layouts through a program: how every value lies, and how every equation is cut.

Knows programs, loops and branches, and the choice for one equation. Must not know devices, virtual nodes, nor how
anything is carried out.

Layouts flow forward from the inputs; each equation follows its operands. Inside loops they run to a fixpoint over what
is carried. What is made from nothing (constants, iotas, broadcasts of scalars, random bits of a key) has no layout: it
is made in whatever layout it is needed in.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Atom, Program, message_about
from vnode.errors import PartitionError, UnsupportedPrimitiveError
from vnode.operators import Algebra, Monoid, OperatorDescription
from vnode.operators.control import Region, region_of
from vnode.spmd.choice import Choice, Given, Way, carried_out, choose, passing, reached
from vnode.spmd.layout import Axes, Layout, cut_of, replicated

Path = tuple[int, ...]
"""Which equation of a program: its number; in a loop or branch that equation's, the body's, and the number there."""

TURNS = 4
"""How often a loop's body is followed until what it carries keeps its layout; then layouts stay what they are."""

CHEAP = 30
"""Operations per element up to which a value from nothing is made where it is needed, rather than once."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """How an equation shall be cut.

    Attributes:
      ways: the axes that divide it.
      given: how each operand lies when it is read; what the equation lacks of it is fetched from there.
      passed: axes over which operands are in pieces, and so are the results.
    """

    ways: tuple[Way, ...]
    given: tuple[Layout, ...]
    passed: tuple[tuple[str, Monoid], ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """How one equation is carried out.

    Attributes:
      eqn: the equation.
      operands: how each operand has to lie; None for one that is not read.
      made: how each result lies where it is made.
      results: how each result lies for who reads it.
      choice: how the equation is cut; None for a loop or branch, and for what every device evaluates whole.
      region: the loop or branch that it is.
      bodies: layouts through each body.
      anyhow: it is evaluated wherever its result is needed, in that layout.
    """

    eqn: JaxprEqn
    operands: tuple[Layout, ...]
    made: tuple[Layout, ...]
    results: tuple[Layout, ...]
    choice: Choice | None = None
    region: Region | None = None
    bodies: tuple[Flow, ...] = ()
    anyhow: bool = False


@dataclasses.dataclass(frozen=True)
class Flow:
    """Layouts through a program.

    Attributes:
      program: what was followed.
      inputs: how each input lies.
      steps: one per equation, in order.
      outputs: how each output lies where it is handed on.
      ends: how each output lies where it is made.
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
    asked: Mapping[Path, Asked] | None = None,
) -> Flow:
    """Finds how every value of a program lies.

    Args:
      program: the program.
      inputs: how each of its inputs lies.
      axes: of the mesh, those longer than one.
      outputs: for each output how it shall be handed on; None where that is left open, or for all of them.
      wishes: how single variables shall lie, those of loops' and branches' bodies (`Program.bodies`) among them. What
        begins as zero, and is carried by a loop, may be wished in pieces of a sum.
      asked: how single equations shall be cut.

    Returns:
      The flow.

    Raises:
      PartitionError: an equation cannot be cut as is asked.
      UnsupportedPrimitiveError: an equation has an effect, which every device would have.
    """
    made = _Follower(program, axes, wishes or {}, asked or {}).follow([Given(layout) for layout in inputs])
    wanted = outputs if outputs is not None else [None] * len(program.outputs)
    ends = tuple(state.layout for state in made.ends)
    handed_on = tuple(end.complete if want is None else want for end, want in zip(ends, wanted, strict=True))
    return Flow(program, tuple(inputs), tuple(made.steps), handed_on, ends)


class _Follower:
    """Follows one program once; `steps` and `ends` are what it finds."""

    def __init__(
        self,
        program: Program,
        axes: Axes,
        wishes: Mapping[Var, Layout],
        asked: Mapping[Path, Asked],
        path: Path = (),
    ) -> None:
        self.program, self.axes, self.wishes, self.asked, self.path = program, axes, wishes, asked, path
        self.states: dict[Var, Given] = {}
        self.pieces: dict[Var, Layout] = {}  # how what lies complete was made, if in pieces
        self.steps: list[Step] = []
        self.ends: list[Given] = []

    def follow(self, inputs: Sequence[Given]) -> _Follower:
        self.states.update(zip(self.program.inputs, inputs, strict=True))
        for var in self.program.constants:
            self.states[var] = Given(replicated(len(var.aval.shape)))
        for number, eqn in enumerate(self.program.equations):
            self.steps.append(self.step(eqn, (*self.path, number)))
        self.ends = [self.state(atom) for atom in self.program.outputs]
        return self

    def state(self, atom: Atom) -> Given:
        if isinstance(atom, Literal):
            shape = getattr(atom.aval, "shape", ())
            return Given(replicated(len(shape)), anyhow=True, zero=not shape and atom.val == 0)
        return self.states[atom]

    def step(self, eqn: JaxprEqn, path: Path) -> Step:
        given = [self.state(atom) for atom in eqn.invars]
        region = region_of(eqn)
        if region is not None:
            return self.region_step(eqn, region, given, path)
        description = self.program.describe(eqn)
        if eqn.effects or any(hasattr(atom.aval, "inner_aval") for atom in (*eqn.invars, *eqn.outvars)):
            raise UnsupportedPrimitiveError(
                message_about(
                    eqn,
                    f"{eqn.primitive.name!r} has an effect, and every device of a mesh that splits more than the batch "
                    "would have it.",
                    remedies=[
                        "return the value from the step and use it there",
                        "or split the batch only, or leave the rest to XLA: partition='xla'",
                    ],
                )
            )
        if description is not None and description.layout is not None:
            return self.constraint_step(eqn, description.layout, given[0])
        wishes = [self.wishes.get(var) for var in eqn.outvars]
        if path in self.asked and description is not None:
            return self.asked_step(eqn, description, given, self.asked[path])
        if description is None or (all(each.layout.whole for each in given) and not any(wishes)):
            anyhow = description is not None and self.from_nothing(eqn, given)
            operands = tuple(replicated(len(each.layout.dims)) for each in given)
            made = tuple(replicated(len(getattr(var.aval, "shape", ()))) for var in eqn.outvars)
            results = made if description is not None else wished(made, wishes)
            zero = (
                description is not None
                and anyhow
                and description.has(Algebra.MOVES)
                and all(each.zero for each in given)
                and bool(given)
            )
            self.states.update((var, Given(r, anyhow, zero)) for var, r in zip(eqn.outvars, results, strict=True))
            return Step(eqn, operands, made, results, anyhow=anyhow)
        choice = choose(eqn, description, given, self.axes, wishes)
        made = reached(eqn, choice)
        results = wished(made, wishes)
        for atom, each, want in zip(eqn.invars, given, choice.operands, strict=True):
            if isinstance(atom, Var) and each.layout.partial and not want.partial:
                self.states[atom] = Given(want)  # from here on it is at hand like this
        self.states.update(
            (var, Given(r, settled=bool(r.partial) and self.is_combined(var, r)))
            for var, r in zip(eqn.outvars, results, strict=True)
        )
        return Step(eqn, choice.operands, made, results, choice)

    def is_combined(self, var: Var, layout: Layout) -> bool:
        """Whether some equation that reads a variable needs its pieces combined."""
        for eqn in self.readers.get(var, ()):
            description = None if region_of(eqn) is not None else self.program.describe(eqn)
            having = {i for i, atom in enumerate(eqn.invars) if atom is var}
            if description is None or not all(
                any(having <= group for group in passing(description, monoid)) for _, monoid in layout.partial
            ):
                return True
        return False

    @functools.cached_property
    def readers(self) -> dict[Var, list[JaxprEqn]]:
        """The equations that read a variable."""
        readers: dict[Var, list[JaxprEqn]] = {}
        for eqn in self.program.equations:
            for var in {atom for atom in eqn.invars if isinstance(atom, Var)}:
                readers.setdefault(var, []).append(eqn)
        return readers

    def asked_step(self, eqn: JaxprEqn, description: OperatorDescription, given: Sequence[Given], asked: Asked) -> Step:
        """What shall be cut in some ways is cut in these, or refused."""
        choice = carried_out(eqn, description, asked.ways, [Given(x) for x in asked.given], self.axes, asked.passed)
        several = zip(eqn.invars, given, () if choice is None else choice.operands, strict=False)
        if choice is None or not all(self.has_pieces(*each) for each in several):
            raise PartitionError(
                message_about(
                    eqn,
                    f"{eqn.primitive.name!r} cannot be cut as it is asked for.",
                    facts=[f"factors {way.lead} over {', '.join(way.axes)}" for way in asked.ways],
                    remedies=["take the ways from this program's own equations"],
                )
            )
        made = reached(eqn, choice)
        results = wished(made, [self.wishes.get(var) for var in eqn.outvars])
        self.pieces.update((var, x) for var, x in zip(eqn.outvars, made, strict=True) if x.partial)
        self.states.update((var, Given(layout)) for var, layout in zip(eqn.outvars, results, strict=True))
        return Step(eqn, choice.operands, made, results, choice)

    def has_pieces(self, atom: Atom, given: Given, want: Layout) -> bool:
        """Whether what is read in pieces is at hand in these: nothing else may be added more than once."""
        made = self.pieces.get(atom, given.layout) if isinstance(atom, Var) else given.layout
        return given.zero or any(set(want.partial) <= set(layout.partial) for layout in (made, given.layout))

    def constraint_step(self, eqn: JaxprEqn, asked: Sequence[tuple[str, ...] | None], given: Given) -> Step:
        """What asks for a layout gets it, over the axes that there are."""
        (var,) = eqn.outvars
        dims = list(given.layout.dims)
        for d, (names, n) in enumerate(zip(asked, var.aval.shape, strict=True)):
            if names is not None:
                names = tuple(name for name in names if name in self.axes)
                dims[d] = cut_of(names, 1, n, n, self.axes) if names and n > 1 else None
        taken = [name for names in asked for name in names or ()]
        for d, cut in enumerate(dims):  # an axis cuts one dimension
            if asked[d] is None and cut is not None and set(cut.axes) & set(taken):
                dims[d] = None
        layout = Layout(tuple(dims))
        self.states[var] = Given(layout)
        return Step(eqn, (layout,), (layout,), (layout,))

    def from_nothing(self, eqn: JaxprEqn, given: Sequence[Given]) -> bool:
        """Whether a value is made of so little, by so few operations, that it is made where it is needed."""
        description = self.program.describe(eqn)
        assert description is not None
        if description.has(Algebra.CONTRACTS) or description.reduced or len(eqn.outvars) != 1:
            return False
        size = math.prod(eqn.outvars[0].aval.shape)
        read = sum(math.prod(atom.aval.shape) for atom, each in zip(eqn.invars, given, strict=True) if not each.anyhow)
        return (size > read or all(each.anyhow for each in given)) and description.flops <= CHEAP * max(size, 1)

    # Loops and branches

    def region_step(self, eqn: JaxprEqn, region: Region, given: Sequence[Given], path: Path) -> Step:
        programs = self.program.bodies(eqn)
        layouts = [each.layout.complete for each in given]
        for i in range(len(layouts)):
            if i == region.chooser:
                layouts[i] = replicated(len(layouts[i].dims))
            elif i in region.scanned:
                layouts[i] = Layout((None, *layouts[i].dims[1:]))
        carried = list(region.carried)
        held = self.held(region, programs, given)
        for i, layout in held.items():
            layouts[i] = layout
        # Where elements of the carry stop for themselves, the loop must turn equally often on all devices.
        stopping = max((len(a.aval.shape) for program in programs[: region.tests] for a in program.outputs), default=0)
        for i in carried:
            layouts[i] = whole_along(stopping, layouts[i])
        flows, ends = self.bodies(region, programs, layouts, path)
        for turn in range(TURNS):
            before = [layouts[i] for i in carried]
            after = [
                layouts[i]
                if i in held
                else end.layout
                if region.stacks and self.may_be_partial(end.layout, given[i])
                else whole_along(stopping, end.layout.complete)
                for i, end in zip(carried, ends[-1], strict=False)
            ]
            if before == after or turn == TURNS - 1:
                break
            for i, layout in zip(carried, after, strict=True):
                layouts[i] = layout
            flows, ends = self.bodies(region, programs, layouts, path)
        made = self.results_of(region, ends[region.tests :], [layouts[i] for i in carried])
        wishes = [self.wishes.get(var) for var in eqn.outvars]
        for j in range(len(carried), len(made)):
            wish = wishes[j]
            if wish is not None:  # bodies hand it on so; of a stack, each turn its piece
                made[j] = Layout((None, *wish.dims[1:])) if region.stacks else wish
        results = wished(made, wishes)
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
        self.states.update((var, Given(layout)) for var, layout in zip(eqn.outvars, results, strict=True))
        return Step(eqn, tuple(layouts), tuple(made), results, region=region, bodies=tuple(bodies))

    def held(self, region: Region, programs: Sequence[Program], given: Sequence[Given]) -> dict[int, Layout]:
        """How operands shall lie, by what is wished of the bodies' inputs."""
        found = dict[int, Layout]()
        for program, inputs in zip(programs, region.inputs, strict=True):
            for i, var in zip(inputs, program.inputs, strict=False):
                wish = self.wishes.get(var)
                if wish is not None:
                    kept = wish if i in region.carried and self.may_be_partial(wish, given[i]) else wish.complete
                    found[i] = Layout((None, *kept.dims)) if i in region.scanned else kept
        return found

    @staticmethod
    def may_be_partial(layout: Layout, given: Given) -> bool:
        """Whether what begins as given may become pieces of a sum: nothing is added more than once."""
        return given.zero and all(monoid is Monoid.SUM for _, monoid in layout.partial)

    def bodies(
        self, region: Region, programs: Sequence[Program], layouts: Sequence[Layout], path: Path
    ) -> tuple[list[Flow], list[list[Given]]]:
        """Follows each body once."""
        flows, ends = [], []
        for number, (program, inputs) in enumerate(zip(programs, region.inputs, strict=True)):
            given = [Given(Layout(layouts[i].dims[1:]) if i in region.scanned else layouts[i]) for i in inputs]
            follower = _Follower(program, self.axes, self.wishes, self.asked, (*path, number)).follow(given)
            flows.append(Flow(program, tuple(g.layout for g in given), tuple(follower.steps), ()))
            ends.append(follower.ends)
        return flows, ends

    def results_of(self, region: Region, ends: Sequence[Sequence[Given]], carried: Sequence[Layout]) -> list[Layout]:
        """How a region's results lie: what is carried as it is carried, others as the bodies agree."""
        results = list(carried)
        for several in list(zip(*ends, strict=True))[len(carried) :]:
            layouts = {end.layout for end in several if not end.anyhow} or {several[0].layout}
            layout = layouts.pop() if len(layouts) == 1 else next(iter(sorted(layouts, key=str))).complete
            if len({end.layout for end in several}) > 1:
                layout = layout.complete
            results.append(Layout((None, *layout.dims), layout.partial) if region.stacks else layout)
        return results


def wished(made: Sequence[Layout], wishes: Sequence[Layout | None]) -> tuple[Layout, ...]:
    """Layouts, with what is wished in their places."""
    return tuple(layout if wish is None else wish for layout, wish in zip(made, wishes, strict=True))


def whole_along(dims: int, layout: Layout) -> Layout:
    """A layout of which the first dimensions are not cut."""
    return Layout((*(None,) * dims, *layout.dims[dims:]), layout.partial)
