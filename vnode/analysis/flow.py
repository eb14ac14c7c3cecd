"""Batch flow: follows the examples through a program and finds, for every value, the form in which nodes hold it.

Knows operator descriptions, forms, and how loops and branches pass values on. Must not know devices, how many nodes
there are beyond what a grain needs, or how anything is evaluated.

Levels. A value of level k is available once k rounds of reductions are complete: the step's arguments have level 0, a
sum over examples that node programs of pass k produce has level k + 1 when it is read as a whole value. An equation
over batched values that reads a whole value of level k belongs to pass k. Where a batched value must be had whole
(a sort over the batch, all pairs), it is materialized: gathered after its pass, one level up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.forms import (
    VARYING,
    WHOLE,
    Batch,
    Form,
    Location,
    Partial,
    Slice,
    Varying,
    Whole,
    locate,
    project,
    stands_in,
)
from vnode.analysis.program import Atom, Program, inline, signature, where
from vnode.errors import CouplingError, UnsupportedPrimitiveError, layout_message
from vnode.operators import Monoid, OperatorDescription
from vnode.operators.control import Body, Branches, Loop, Region, While, region_of

IDEMPOTENT = {Monoid.MAX, Monoid.MIN, Monoid.AND, Monoid.OR}


@dataclasses.dataclass(frozen=True)
class State:
    """What batch flow knows of a value.

    Attributes:
      form: how nodes hold it.
      level: the round after which a whole value is available; the earliest pass that can compute any other.
      local: the round after which nodes can have the whole value or their own estimate of it; below `whole_level`
        where ``coupling="local"`` applies.
      zero: known to be all zeros.
      model: depends on an argument that is not batched.
      given: a batched value that exists for all nodes at once (an argument, what a loop around passes returns), so that
        reading it whole takes no pass.
      examples: of a whole value, dimensions that descend from the batch; nodes may divide them again.
    """

    form: Form
    level: int = 0
    local: int = 0
    zero: bool = False
    model: bool = False
    given: bool = False
    examples: frozenset[int] = frozenset()

    @property
    def whole_level(self) -> int:
        """The round after which the value can be read whole."""
        return self.level if isinstance(self.form, Whole) or self.given else self.level + 1

    @property
    def estimated(self) -> bool:
        """Whether nodes that would have to wait for the whole value read their own estimate of it instead."""
        return isinstance(self.form, Whole | Partial) and self.local < self.whole_level


@dataclasses.dataclass(frozen=True)
class Coupling:
    """One place where an example influences another.

    Attributes:
      eqn: the equation that reads what other examples contributed.
      kind: ``"reduction"`` (it reads a completed reduction) or ``"materialize"`` (it needs the whole batch at once).
      level: the pass it belongs to.
      mode: ``"exact"`` or ``"local"``.
      source: for a reduction, the equation that reduces.
    """

    eqn: JaxprEqn
    kind: str
    level: int
    mode: str = "exact"
    source: JaxprEqn | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """How one equation is evaluated.

    Attributes:
      eqn: the equation.
      per_node: evaluated by every node on its own operands; otherwise once, on whole values.
      level: the pass, or the level of the whole values it reads.
      operands: the form in which each operand is read.
      results: the form of each result.
      description: for an equation that is neither loop nor branch.
      location: the factor that is split, if one is.
      region: the loop or branch that the equation is.
      bodies: batch flow of the region's bodies, in the order of the region's fields.
      over_batch: the region is a loop that takes the examples one after another.
      around: the region is evaluated once, around passes of its own; its batched operands and results exist for all
        nodes at once.
    """

    eqn: JaxprEqn
    per_node: bool
    level: int
    operands: tuple[Form, ...]
    results: tuple[Form, ...]
    description: OperatorDescription | None = None
    location: Location | None = None
    region: Region | None = None
    bodies: tuple[Flow, ...] = ()
    over_batch: bool = False
    around: bool = False


@dataclasses.dataclass(eq=False)
class Flow:
    """Batch flow of one program.

    Attributes:
      program: what was followed.
      states: of every variable.
      steps: one per equation, in order.
      output_forms: the form in which each output is handed on.
      gathered: batched values that are read whole.
      batch: what is divided.
      node_size: examples per node, padding included.
    """

    program: Program
    states: dict[Var, State]
    steps: list[Step]
    output_forms: list[Form] = dataclasses.field(default_factory=list)
    gathered: set[Var] = dataclasses.field(default_factory=set)
    batch: Batch = dataclasses.field(default_factory=lambda: Batch(1))
    node_size: int = 1

    def state(self, atom: Atom) -> State:
        if isinstance(atom, Literal):
            return State(WHOLE, zero=bool(np.all(np.asarray(atom.val) == 0)))
        return self.states[atom]


class Coupled(Exception):
    """Inside a loop's body: examples meet here, so nodes cannot run the loop on their own."""

    def __init__(self, eqn: JaxprEqn, why: str) -> None:
        super().__init__(why)
        self.eqn = eqn


Mode = Callable[[JaxprEqn], str]


@dataclasses.dataclass(eq=False)
class Follower:
    """Follows one batch through programs; holds what is common to a program and its bodies.

    Attributes:
      batch: the examples.
      nodes: how many nodes there will be; decides which grains are acceptable.
      mode: the coupling mode (``"exact"``, ``"local"``, ``"error"``) of a reducing or materializing equation.
      couplings: found so far.
      grain: the number of examples that a node must hold a multiple of, so far.
      sums: values that a loop over the examples adds up in a carry.
    """

    batch: Batch
    nodes: int
    mode: Mode
    couplings: list[Coupling] = dataclasses.field(default_factory=list)
    grain: int = 1
    sums: set[Var] = dataclasses.field(default_factory=set)

    def accept(self, form: Slice | Location) -> bool:
        """Whether nodes may hold multiples of the form's grain without leaving most of them empty."""
        grain = math.lcm(self.grain, form.ratio.denominator)
        node = -(-self.batch.size // self.nodes)
        if grain > max(2 * node, 1) and node % grain:
            return False
        self.grain = grain
        return True

    def follow(self, program: Program, inputs: Sequence[State], *, body: bool = False) -> Flow:
        """Runs batch flow over `program`.

        Args:
          program: what to follow.
          inputs: states of its inputs.
          body: the program is a loop's body or a branch: nothing can be completed or materialized inside it.

        Returns:
          The flow.

        Raises:
          Coupled: in a body, where something would have to be.
          UnsupportedPrimitiveError: a batched value meets a primitive without description.
        """
        flow = Flow(program, {}, [])
        flow.states.update(zip(program.inputs, inputs, strict=True))
        flow.states.update((var, State(WHOLE)) for var in program.constants)
        reducers: dict[Var, JaxprEqn] = {}
        for eqn in program.equations:
            step = self.plain(flow, eqn)
            if step is None:
                view = View(self, flow, eqn, body, reducers)
                step = self.step(view)
                view.record(step)
            flow.steps.append(step)
        flow.output_forms = [flow.state(atom).form for atom in program.outputs]
        flow.batch = self.batch
        flow.node_size = math.ceil(self.batch.size / (self.nodes * self.grain)) * self.grain
        return flow

    @staticmethod
    def plain(flow: Flow, eqn: JaxprEqn) -> Step | None:
        """The quick way for what most equations of an optimizer are: whole values that have nothing of the batch."""
        states = [flow.states[atom] for atom in eqn.invars if isinstance(atom, Var)]
        if any(not isinstance(s.form, Whole) or s.level or s.zero or s.examples for s in states):
            return None
        if len(states) < len(eqn.invars) and any(flow.state(a).zero for a in eqn.invars if isinstance(a, Literal)):
            return None
        count = len(eqn.outvars)
        state = State(WHOLE, model=any(s.model for s in states))
        flow.states.update(dict.fromkeys(eqn.outvars, state))
        return Step(eqn, False, 0, (WHOLE,) * len(eqn.invars), (WHOLE,) * count)

    def step(self, view: View) -> Step:
        """Decides how one equation is evaluated."""
        eqn = view.eqn
        forms = view.forms
        if not self.sums.isdisjoint(eqn.outvars):
            return view.per_node((Partial(Monoid.SUM),), None)
        region = region_of(eqn)
        if all(isinstance(form, Whole) for form in forms):
            if not any(state.examples for state in view.states):
                return view.once()
            if region is not None:
                return self.around_step(view, region)
            description = view.flow.program.describe(eqn)
            return view.once() if description is None else self.described_step(view, description)
        if region is not None:
            return self.region_step(view, region)
        if eqn.effects and not eqn.outvars:
            return self.effect_step(view)
        description = view.flow.program.describe(eqn)
        if description is None:
            if all(isinstance(form, Whole | Partial) for form in forms):
                view.complete(range(len(forms)))
                return view.once()
            raise UnsupportedPrimitiveError(
                layout_message(
                    f"vnode has no description of the primitive {eqn.primitive.name!r}, "
                    "which is applied to a batched value.",
                    where=where(eqn),
                    facts=[signature(eqn)],
                    remedies=[
                        "describe it with vnode.operators.register (docs/registering-a-primitive.md)",
                        "or write the operation with primitives that jax.lax documents",
                    ],
                )
            )
        return self.described_step(view, description)

    def described_step(self, view: View, description: OperatorDescription) -> Step:
        partial = [i for i, form in enumerate(view.forms) if isinstance(form, Partial)]
        if partial:
            monoid = self.stays_partial(view, description, partial)
            if monoid is not None:
                return view.per_node((Partial(monoid),) * len(view.eqn.outvars), description)
            view.complete(partial)
        location = self.agree(view, description) or self.divide_again(view, description)
        if location is None:
            if any(isinstance(form, Varying) for form in view.forms):
                return view.per_node((VARYING,) * len(view.eqn.outvars), description)
            return view.once()
        for i, dims in enumerate(description.operands):
            if isinstance(view.forms[i], Whole) and stands_in(location.factor, dims):
                view.forms[i] = project(location, dims, description.sizes) or WHOLE
        results: list[Form] = []
        for dims in description.results:
            form = project(location, dims, description.sizes)
            if form is None:
                results.append(Partial(description.reduced[location.factor]))
            else:
                results.append(form)
        return view.per_node(tuple(results), description, location)

    @staticmethod
    def stays_partial(view: View, description: OperatorDescription, partial: Sequence[int]) -> Monoid | None:
        """The monoid under which an equation of partial operands gives a partial result, or None."""
        monoids = {form.monoid for form in view.forms if isinstance(form, Partial)}
        if len(monoids) != 1:
            return None
        (monoid,) = monoids
        if any(not isinstance(form, Whole | Partial) for form in view.forms):
            return None
        made = max(view.states[i].level for i in partial)
        if any(view.states[i].local > made for i, form in enumerate(view.forms) if isinstance(form, Whole)):
            return None  # it would be computed in a later pass for the sake of one whole operand (gradient clipping)
        if len(view.forms) == 1 and description.reduced and set(description.reduced.values()) == {monoid}:
            return monoid
        if monoid is not Monoid.SUM and not description.movement:
            return None
        for group in description.linear:
            if not group.issuperset(partial):
                continue
            if all(
                i in partial or view.states[i].zero or (monoid in IDEMPOTENT and description.movement) for i in group
            ) and (monoid in (Monoid.SUM, *IDEMPOTENT) or len(group) == 1):
                return monoid
        return None

    def agree(self, view: View, description: OperatorDescription) -> Location | None:
        """Finds the one factor that holds the batch, materializing operands that stand in the way."""
        locations: dict[int, Location] = {}
        for i, form in enumerate(view.forms):
            if not isinstance(form, Slice):
                continue
            location = locate(form, description.operands[i], description.sizes)
            if location is None or location.factor in description.whole or not self.accept(location):
                view.materialize([i], "needs the whole batch at once")
            elif location.factor not in description.reduced and not all(
                stands_in(location.factor, dims) for dims in description.results
            ):
                view.materialize([i], "does not keep the batch in every result")
            else:
                locations[i] = location
        if not locations:
            return None
        free = {loc.factor for loc in locations.values() if loc.factor not in description.reduced}
        if len(free) > 1:
            view.materialize(locations, "compares every example with every other")
            return None

        def weight(i: int) -> tuple[bool, int]:
            return locations[i].factor in free, math.prod(view.eqn.invars[i].aval.shape)

        location = locations[max(locations, key=weight)]
        if self.contracts_gathered(view, description, locations, location):
            view.materialize(locations, "is contracted with a value that needed the whole batch")
            return None
        view.materialize([i for i, other in locations.items() if other != location], "orders the batch differently")
        for dims in description.results:
            form = project(location, dims, description.sizes)
            if form is not None:
                self.accept(form)
        for i, dims in enumerate(description.operands):
            form = project(location, dims, description.sizes)
            if form is not None and not isinstance(view.forms[i], Slice) and not self.accept(form):
                raise AssertionError("a projection is never finer than its factor")
        return location

    @staticmethod
    def contracts_gathered(
        view: View, description: OperatorDescription, locations: Iterable[int], location: Location
    ) -> bool:
        """Whether gathered values meet, over the batch, a whole value that was made from gathered values.

        The backward pass of an all-pairs loss does this. The sum is then formed once, rather than over nodes in another
        pass.
        """
        if location.factor not in description.reduced or view.body:
            return False
        gathered = all(view.eqn.invars[i] in view.flow.gathered for i in locations)
        return gathered and any(
            isinstance(form, Whole) and view.states[i].examples and stands_in(location.factor, description.operands[i])
            for i, form in enumerate(view.forms)
        )

    def divide_again(self, view: View, description: OperatorDescription) -> Location | None:
        """Divides the examples of a whole value among the nodes again, where the model is applied to them.

        After a shuffle of the batch, say: the shuffle needs the whole batch, the network behind it does not.
        """
        if not description.contraction or view.body or not all(isinstance(form, Whole) for form in view.forms):
            return None
        having = [i for i, state in enumerate(view.states) if state.examples]
        if len(having) != 1:
            return None
        (i,) = having
        shape = view.eqn.invars[i].aval.shape
        dim = max(view.states[i].examples, key=lambda d: shape[d])
        form = Slice(self.batch, dim, 1, Fraction(shape[dim], self.batch.size))
        location = locate(form, description.operands[i], description.sizes)
        if location is None or shape[dim] == 1 or location.factor in description.whole or not self.accept(location):
            return None
        return location

    def effect_step(self, view: View) -> Step:
        """An equation that is run for its effect: once per node if a node's examples reach it, else once."""
        view.complete([i for i, form in enumerate(view.forms) if isinstance(form, Partial)])
        if all(isinstance(form, Whole) for form in view.forms):
            return view.once()
        if any("Ordered" in type(effect).__name__ for effect in view.eqn.effects):
            raise CouplingError(
                layout_message(
                    f"the ordered effect of {view.eqn.primitive.name!r} cannot be kept: nodes run in parallel.",
                    where=where(view.eqn),
                    facts=[signature(view.eqn)],
                    remedies=["use ordered=False", "or pass values that are reduced over the batch"],
                )
            )
        return view.per_node((), None)

    # Loops and branches

    def region_step(self, view: View, region: Region) -> Step:
        kept = list(view.forms), view.level
        try:
            match region:
                case Loop():
                    return self.loop_step(view, region)
                case While():
                    return self.while_step(view, region)
                case Branches():
                    return self.branch_step(view, region)
        except Coupled as coupled:
            if view.body:
                raise
            view.forms[:], view.level = kept
            view.coupled = coupled
            return self.around_step(view, region)

    def around_step(self, view: View, region: Region) -> Step:
        """A loop or branch in which examples meet: evaluated once, with passes of its own in its bodies."""
        if view.body:
            return view.once()
        view.complete([i for i, form in enumerate(view.forms) if isinstance(form, Partial | Varying)])
        match region:
            case Loop():
                return self.around_loop(view, region)
            case While():
                return self.around_while(view, region)
            case _:
                return self.around_branches(view, region)

    def nested(self, view: View, bodies: Sequence[Body], inputs: Sequence[Sequence[State]]) -> list[Flow]:
        """Batch flow of bodies that have passes of their own; levels start again at 0."""
        flows = []
        for body, states in zip(bodies, inputs, strict=True):
            program = inline(body.jaxpr, body.constants)
            flows.append(self.inner(states, program).follow(program, states))
        return flows

    def inner(self, states: Sequence[State], program: Program) -> Follower:
        """Who follows a body with passes of its own: a batch of its own if it is not given this one."""
        if any(isinstance(state.form, Slice) for state in states):
            return dataclasses.replace(self, couplings=self.couplings)
        sizes = [
            var.aval.shape[d] for var, state in zip(program.inputs, states, strict=True) for d in state.examples
        ]
        return Follower(Batch(max(sizes, default=1)), self.nodes, self.mode, self.couplings)

    def outside(self, view: View, positions: Iterable[int]) -> list[State]:
        """States of the inputs of a body with passes of its own."""
        states = []
        for i in positions:
            form, state = view.forms[i], view.states[i]
            if isinstance(form, Slice):
                states.append(State(form, given=True, model=state.model))
            else:
                states.append(State(WHOLE, zero=state.zero, model=state.model, examples=state.examples))
        return states

    def around_loop(self, view: View, loop: Loop) -> Step:
        first, split = loop.constants, loop.constants + loop.carries
        for i, form in enumerate(view.forms):
            if i >= split and isinstance(form, Slice) and form.dim == 0:
                view.materialize([i], "is gone through in order")
        constants, carries, xs = (
            self.outside(view, positions)
            for positions in (range(first), range(first, split), range(split, len(view.forms)))
        )
        xs = [inside(state) for state in xs]
        while True:
            (flow,) = self.nested(view, [loop.body], [[*constants, *carries, *xs]])
            after = [meet(flow, atom) for atom in flow.program.outputs]
            joined = [
                either(carry, state) for carry, state in zip(carries, after[: loop.carries], strict=True)
            ]
            if joined == carries:
                break
            carries = joined
        view.forms[first:split] = [state.form for state in carries]
        results = [*carries, *(behind(state) for state in after[loop.carries :])]
        flow.output_forms = [*(s.form for s in carries), *(s.form for s in after[loop.carries :])]
        return view.around(loop, (flow,), results)

    def around_while(self, view: View, loop: While) -> Step:
        split = loop.condition_constants
        first = split + loop.body_constants
        tested, constants, carries = (
            self.outside(view, positions)
            for positions in (range(split), range(split, first), range(first, len(view.forms)))
        )
        while True:
            test, flow = self.nested(view, [loop.condition, loop.body], [[*tested, *carries], [*constants, *carries]])
            after = [meet(flow, atom) for atom in flow.program.outputs]
            joined = [either(carry, state) for carry, state in zip(carries, after, strict=True)]
            if joined == carries:
                break
            carries = joined
        view.forms[first:] = [state.form for state in carries]
        flow.output_forms = [state.form for state in carries]
        return view.around(loop, (test, flow), carries)

    def around_branches(self, view: View, branches: Branches) -> Step:
        view.materialize([0], "chooses a branch")
        inputs = self.outside(view, range(1, len(view.forms)))
        flows = self.nested(view, branches.bodies, [inputs] * len(branches.bodies))
        results = [meet(flows[0], atom) for atom in flows[0].program.outputs]
        for flow in flows[1:]:
            results = [
                either(state, meet(flow, atom)) for state, atom in zip(results, flow.program.outputs, strict=True)
            ]
        for flow in flows:
            flow.output_forms = [state.form for state in results]
        return view.around(branches, tuple(flows), results)

    def inputs_of(self, view: View, positions: Iterable[int]) -> list[State]:
        """States of a body's inputs: as the equation reads its operands, all available from the start."""
        return [
            State(view.forms[i], zero=view.states[i].zero, model=view.states[i].model) for i in positions
        ]

    def loop_step(self, view: View, loop: Loop) -> Step:
        first, split = loop.constants, loop.constants + loop.carries
        count = len(view.forms)
        view.complete([i for i in range(count) if isinstance(view.forms[i], Partial) and not first <= i < split])
        if all(isinstance(form, Whole) for form in view.forms):
            return view.once()
        body = inline(loop.body.jaxpr, loop.body.constants)
        scanned = {form for form in view.forms[split:] if isinstance(form, Slice) and form.dim == 0}
        if scanned:
            return self.loop_over_batch(view, loop, body, scanned)
        xs = [
            dataclasses.replace(s, form=s.form.move(s.form.dim - 1)) if isinstance(s.form, Slice) else s
            for s in self.inputs_of(view, range(split, count))
        ]
        constants = self.inputs_of(view, range(first))
        carries = self.inputs_of(view, range(first, split))
        carries, flow = self.fixpoint(
            view.eqn, carries, lambda states: self.follow(body, [*constants, *states, *xs], body=True), loop.carries
        )
        forms = [state.form for state in carries]
        results: list[Form] = [
            *forms,
            *(
                form.move(form.dim + 1) if isinstance(form, Slice) else form
                for form in flow.output_forms[loop.carries :]
            ),
        ]
        flow.output_forms = [*forms, *flow.output_forms[loop.carries :]]
        view.forms[first:split] = forms
        return view.per_node(tuple(results), None, region=loop, bodies=(flow,))

    def fixpoint(
        self, eqn: JaxprEqn, carries: list[State], follow: Callable[[list[State]], Flow], count: int
    ) -> tuple[list[State], Flow]:
        """Follows a body until its carries keep their forms."""
        while True:
            flow = follow(carries)
            joined = [
                join(eqn, carry, flow.state(atom))
                for carry, atom in zip(carries, flow.program.outputs[:count], strict=True)
            ]
            if joined == carries:
                return carries, flow
            carries = joined

    def loop_over_batch(self, view: View, loop: Loop, body: Program, scanned: set[Slice]) -> Step:
        """A loop that takes the examples one after another, without passing anything on, is a plain split."""
        first, split = loop.constants, loop.constants + loop.carries
        (form, *others) = scanned
        if others or form.outer != 1 or form.ratio.denominator != 1:
            raise Coupled(view.eqn, "it takes the examples in several orders")
        for i, other in enumerate(view.forms):
            if i >= split and isinstance(other, Whole):
                view.forms[i] = form
            elif other != form and not isinstance(other, Whole):
                raise Coupled(view.eqn, "it reads the batch while it goes through the batch")
        states = [
            *self.inputs_of(view, range(split)),
            *(State(VARYING, model=view.states[i].model) for i in range(split, len(view.forms))),
        ]
        for i in range(loop.carries):
            carry, out = body.inputs[first + i], body.outputs[i]
            if out is carry:
                continue
            added = added_up(body, carry, out)
            if not added:
                raise Coupled(view.eqn, "it carries a value from example to example")
            self.sums |= added
            states[first + i] = State(Partial(Monoid.SUM), model=view.states[first + i].model)
            view.forms[first + i] = Partial(Monoid.SUM)
        flow = self.follow(body, states, body=True)
        ys = flow.output_forms[loop.carries :]
        if any(isinstance(f, Partial | Slice) for f in ys):
            raise Coupled(view.eqn, "it reads the batch while it goes through the batch")
        flow.output_forms[loop.carries :] = [VARYING] * len(ys)
        results = (*view.forms[first:split], *(form for _ in view.eqn.outvars[loop.carries :]))
        return view.per_node(results, None, region=loop, bodies=(flow,), over_batch=True)

    def while_step(self, view: View, loop: While) -> Step:
        first = loop.condition_constants + loop.body_constants
        count = len(view.forms)
        view.complete([i for i in range(first) if isinstance(view.forms[i], Partial)])
        if all(isinstance(form, Whole) for form in view.forms):
            return view.once()
        body = inline(loop.body.jaxpr, loop.body.constants)
        condition = inline(loop.condition.jaxpr, loop.condition.constants)
        condition_constants = self.inputs_of(view, range(loop.condition_constants))
        constants = self.inputs_of(view, range(loop.condition_constants, first))
        carries = self.inputs_of(view, range(first, count))
        while True:
            carries, flow = self.fixpoint(
                view.eqn,
                carries,
                lambda states: self.follow(body, [*constants, *states], body=True),
                len(carries),
            )
            test = self.follow(condition, [*condition_constants, *carries], body=True)
            (form,) = test.output_forms
            if isinstance(form, Whole):
                break
            if isinstance(form, Partial):
                raise Coupled(view.eqn, "its condition is reduced over the batch")
            if isinstance(form, Varying):
                joined = [join(view.eqn, state, State(VARYING)) for state in carries]
            else:
                joined = [join(view.eqn, state, State(form)) for state in carries]
            if joined == carries:
                break
            carries = joined
        forms = tuple(state.form for state in carries)
        flow.output_forms = list(forms)
        view.forms[first:] = forms
        return view.per_node(forms, None, region=loop, bodies=(test, flow))

    def branch_step(self, view: View, branches: Branches) -> Step:
        view.complete([0] if isinstance(view.forms[0], Partial) else [])
        if isinstance(view.forms[0], Slice | Varying):
            raise Coupled(view.eqn, "its branch depends on single examples")
        if all(isinstance(form, Whole) for form in view.forms):
            return view.once()
        inputs = self.inputs_of(view, range(1, len(view.forms)))
        flows = [
            self.follow(inline(body.jaxpr, body.constants), inputs, body=True) for body in branches.bodies
        ]
        joined = [flows[0].state(atom) for atom in flows[0].program.outputs]
        for flow in flows[1:]:
            joined = [
                join(view.eqn, state, flow.state(atom))
                for state, atom in zip(joined, flow.program.outputs, strict=True)
            ]
        forms = tuple(state.form for state in joined)
        for flow in flows:
            flow.output_forms = list(forms)
        return view.per_node(forms, None, region=branches, bodies=tuple(flows))


def meet(flow: Flow, atom: Atom) -> State:
    """The state in which a body with passes of its own returns a value."""
    state = flow.state(atom)
    if isinstance(state.form, Slice):
        return State(state.form, given=True, model=state.model)
    return State(WHOLE, zero=state.zero, model=state.model, examples=state.examples)


def either(a: State, b: State) -> State:
    """The state of a value around passes that is sometimes `a` and sometimes `b`: batched if either is."""
    model, zero = a.model or b.model, a.zero and b.zero
    forms = {state.form for state in (a, b) if isinstance(state.form, Slice)}
    if len(forms) == 1:
        return State(forms.pop(), given=True, model=model)
    return State(WHOLE, zero=zero, model=model, examples=a.examples | b.examples)


def inside(state: State) -> State:
    """The state of a scanned array inside the loop's body."""
    if isinstance(state.form, Slice):
        return dataclasses.replace(state, form=state.form.move(state.form.dim - 1))
    return dataclasses.replace(state, examples=frozenset(d - 1 for d in state.examples if d > 0))


def behind(state: State) -> State:
    """The state of a stacked result of a loop whose body returns `state`."""
    if isinstance(state.form, Slice):
        return dataclasses.replace(state, form=state.form.move(state.form.dim + 1))
    return dataclasses.replace(state, examples=frozenset(d + 1 for d in state.examples))


def examples_of(
    eqn: JaxprEqn, result: int, states: Sequence[State], description: OperatorDescription | None
) -> set[int]:
    """Dimensions of a whole result that descend from the batch, as far as can be told."""
    found: set[int] = set()
    shape = getattr(eqn.outvars[result].aval, "shape", ())
    for i, state in enumerate(states):
        have = getattr(eqn.invars[i].aval, "shape", ())
        for d in state.examples:
            factors = description.operands[i][d] if description is not None else ()
            dims = {
                e for e, dim in enumerate(description.results[result]) if set(dim) & set(factors)
            } if description is not None else set()
            if not dims and len(have) == len(shape) and shape[d] > 1:
                dims = {d}
            elif not dims:
                dims = {e for e, n in enumerate(shape) if n == have[d]}
            found |= dims
    return {d for d in found if shape[d] > 1}


def added_up(body: Program, carry: Var, out: Atom) -> set[Var]:
    """The values between a carry and its successor, if terms that do not depend on it are merely added to it."""
    users: dict[Var, list[JaxprEqn]] = {}
    for eqn in body.equations:
        for atom in eqn.invars:
            if isinstance(atom, Var):
                users.setdefault(atom, []).append(eqn)
    added: set[Var] = set()
    while carry is not out:
        if len(users.get(carry, ())) != 1 or carry in body.outputs:
            return set()
        (eqn,) = users[carry]
        description = body.describe(eqn) if region_of(eqn) is None else None
        if description is None or not description.adds:
            return set()
        (carry,) = eqn.outvars
        added.add(carry)
    return added


def join(eqn: JaxprEqn, a: State, b: State) -> State:
    """The state of a value that is sometimes `a` and sometimes `b`: the form that both can be brought to."""
    zero, model = a.zero and b.zero, a.model or b.model
    for form, other, is_zero in ((a.form, b.form, b.zero), (b.form, a.form, a.zero)):
        if form == other or isinstance(other, Whole):
            if isinstance(form, Partial) and form.monoid is not Monoid.SUM and form != other and not is_zero:
                break
            if isinstance(form, Partial) and form.monoid is not Monoid.SUM and form != other:
                break
            return State(form, zero=zero and isinstance(form, Whole), model=model)
    raise Coupled(eqn, f"it carries a value that is {a.form} and becomes {b.form}")


@dataclasses.dataclass(eq=False)
class View:
    """An equation while batch flow decides about it: the forms in which it reads its operands so far."""

    follower: Follower
    flow: Flow
    eqn: JaxprEqn
    body: bool
    reducers: dict[Var, JaxprEqn]

    def __post_init__(self) -> None:
        self.states = [self.flow.state(atom) for atom in self.eqn.invars]
        self.forms: list[Form] = [state.form for state in self.states]
        self.gathered: dict[int, str] = {}
        self.coupled: Coupled | None = None
        self.level = 0

    def complete(self, positions: Iterable[int]) -> None:
        """Reads partial operands as completed reductions, one level up."""
        for i in positions:
            if self.body:
                raise Coupled(self.eqn, "it reads a sum over the batch inside the loop")
            self.forms[i] = WHOLE

    def materialize(self, positions: Iterable[int], why: str) -> None:
        """Reads batched operands whole, one level up."""
        for i in positions:
            if self.body:
                raise Coupled(self.eqn, f"{self.eqn.primitive.name} {why}")
            if isinstance(self.forms[i], Slice | Varying):
                self.gathered[i] = why
                atom = self.eqn.invars[i]
                if isinstance(atom, Var):
                    self.flow.gathered.add(atom)
            self.forms[i] = WHOLE

    def around(self, region: Region, bodies: tuple[Flow, ...], results: Sequence[State]) -> Step:
        """The equation is evaluated once, around passes of its own."""
        level = max((state.whole_level for state in self.states), default=0)
        self.results = list(results)
        return Step(
            self.eqn,
            False,
            level,
            tuple(self.forms),
            tuple(state.form for state in results),
            region=region,
            bodies=bodies,
            around=True,
        )

    def once(self) -> Step:
        """The equation is evaluated once, on whole values."""
        level = max((state.whole_level for state in self.states), default=0)
        return Step(
            self.eqn, False, level, (WHOLE,) * len(self.forms), (WHOLE,) * len(self.eqn.outvars), region=None
        )

    def per_node(
        self,
        results: tuple[Form, ...],
        description: OperatorDescription | None,
        location: Location | None = None,
        region: Region | None = None,
        bodies: tuple[Flow, ...] = (),
        over_batch: bool = False,
    ) -> Step:
        """The equation is evaluated by every node."""
        level = 0
        for i, form in enumerate(self.forms):
            state = self.states[i]
            if form == state.form and not isinstance(form, Whole):
                level = max(level, state.level)
            elif state.estimated:
                if isinstance(form, Whole):
                    self.forms[i] = VARYING
                level = max(level, state.local)
            else:
                level = max(level, state.whole_level)
        return Step(
            self.eqn, True, level, tuple(self.forms), results, description, location, region, bodies, over_batch
        )

    def record(self, step: Step) -> None:
        """Writes the states of the results, and the couplings met."""
        model = any(state.model for state in self.states)
        if step.around:
            for var, state in zip(self.eqn.outvars, self.results, strict=True):
                self.flow.states[var] = dataclasses.replace(state, level=step.level, local=step.level, zero=False)
            if self.coupled is not None:
                self.follower.couplings.append(Coupling(self.coupled.eqn, "loop", step.level))
            return
        zero = self.results_zero(step)
        states = [
            dataclasses.replace(state, examples=state.examples | {state.form.dim})
            if isinstance(state.form, Slice) and isinstance(form, Whole)
            else state
            for state, form in zip(self.states, step.operands, strict=True)
        ]
        descends = any(state.examples for state in states)
        description = step.description
        if descends and description is None and region_of(self.eqn) is None:
            description = self.flow.program.describe(self.eqn)
        inherited = [self.reducers[a] for a in self.eqn.invars if isinstance(a, Var) and a in self.reducers]
        for k, (var, form) in enumerate(zip(self.eqn.outvars, step.results, strict=True)):
            local = step.level
            examples: set[int] = set()
            match form:
                case Whole():
                    if descends and not step.per_node:
                        examples = examples_of(self.eqn, k, states, description)
                    local = min(local, max((state.local for state in self.states), default=0))
                case Partial():
                    self.reducers[var] = inherited[0] if inherited else self.eqn
                    local += not (model and self.follower.mode(self.reducers[var]) == "local")
                case _:
                    local += 1
            self.flow.states[var] = State(form, step.level, local, zero, model, False, frozenset(examples))
            if isinstance(form, Whole) and inherited:
                self.reducers[var] = inherited[0]
        if self.gathered:
            self.follower.couplings.append(Coupling(self.eqn, "materialize", step.level))
        elif step.per_node:
            for i, form in enumerate(step.operands):
                atom = self.eqn.invars[i]
                reads_reduction = isinstance(form, Whole | Varying | Slice) and isinstance(
                    self.states[i].form, Whole | Partial
                )
                if not reads_reduction or self.states[i].whole_level == 0:
                    continue
                mode = "local" if self.states[i].estimated else "exact"
                source = self.reducers.get(atom) if isinstance(atom, Var) else None
                self.follower.couplings.append(Coupling(self.eqn, "reduction", step.level, mode, source))

    def results_zero(self, step: Step) -> bool:
        """Whether the equation maps zeros to zeros, and its operands are zeros."""
        if not any(state.zero for state in self.states):
            return False
        description = step.description
        if description is None:
            description = self.flow.program.describe(self.eqn) if region_of(self.eqn) is None else None
        if description is None:
            return False
        return any(all(self.states[i].zero for i in group) for group in description.linear)
