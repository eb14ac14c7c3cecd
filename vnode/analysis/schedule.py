"""The schedule of a step: its passes, what each accumulates and gathers, and what is computed once in between.

Knows recipes and levels. Must not know devices or how anything is evaluated.

Where a partial value is accumulated matters: the frontier between per-node and once-only work may be moved along
linear equations. It is moved as early as possible as long as the accumulators do not grow, so that scaling happens
once, while two gradients of a tied weight are added before they are accumulated. A transpose stays in the loop, where
the compiler folds it into the product before it. A cast of a sum to more bits always comes after the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from vnode.analysis.decisions import decisions, first_reads, living
from vnode.analysis.forms import WHOLE, Form, Partial, Slice, Varying, Whole
from vnode.analysis.keep import cheapest
from vnode.analysis.narrow import after_sums, itemsize, rounded_results
from vnode.analysis.program import Atom, signature, where
from vnode.analysis.recipe import Conversion, Evaluation, Recipe, evaluation, recipe
from vnode.analysis.states import Flow, Step
from vnode.errors import CouplingError, layout_message
from vnode.operators import Monoid


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """A partial value that a pass completes.

    Attributes:
      var: the value.
      monoid: how pieces combine.
      dtype: of the accumulator.
      rounded: what the total is rounded to before it gets the type of the value; None if that is all.
    """

    var: Var
    monoid: Monoid
    dtype: Any
    rounded: Any = None

    @property
    def bytes(self) -> int:
        return math.prod(self.var.aval.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """One scan over all nodes.

    Attributes:
      level: of the whole values it reads.
      recipe: what every node evaluates.
      accumulators: partial values that are completed over all nodes.
      collected: batched values that are kept for all nodes: to be returned, gathered, or read by a later pass.
    """

    level: int
    recipe: Recipe
    accumulators: tuple[Accumulator, ...]
    collected: tuple[tuple[Var, Slice], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """What happens at one level: some equations once, then a pass.

    Attributes:
      once: evaluated once, on whole values, in order.
      nodes: the pass that follows, if one is needed.
    """

    once: tuple[Evaluation, ...]
    nodes: Pass | None


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A step, ready to be emitted.

    Attributes:
      flow: batch flow of the step.
      stages: in order.
      gathered: batched values that are read whole.
      repeated: for every pass the flops of equations that an earlier pass has evaluated already.
    """

    flow: Flow
    stages: tuple[Stage, ...]
    gathered: dict[Var, Slice]
    repeated: dict[int, int]

    @functools.cached_property
    def recomputed(self) -> int:
        """Flops of equations that more than one pass evaluates, beyond the first time, also in loops around passes."""
        inner = sum(
            action.times * inner.recomputed
            for stage in self.stages
            for action in stage.once
            for inner in action.schedules
        )
        return sum(self.repeated.values()) + inner

    @functools.cached_property
    def flops(self) -> int:
        """Scalar operations of the whole step, each equation counted once."""
        return sum(step.flops for step in self.flow.steps)

    @functools.cached_property
    def between(self) -> tuple[Var, ...]:
        """Batched values that passes keep for the nodes of later ones: those held when they take most memory.

        A pass holds what it was given while it writes what it keeps.
        """
        made = {var: nodes.level for nodes in self.passes for var, _ in nodes.collected}
        last = {
            var: nodes.level
            for nodes in self.passes
            for var, form in nodes.recipe.leaves
            if isinstance(form, Slice) and var in made
        }
        held = [tuple(var for var in last if made[var] <= nodes.level <= last[var]) for nodes in self.passes]
        return max(held, key=lambda several: sum(map(nbytes, several)), default=())

    @functools.cached_property
    def around(self) -> tuple[Var, ...]:
        """Batched values that go into loops and branches around passes, or come out of them, no arguments."""
        inputs = set(self.flow.program.inputs)
        crossing = [
            (atom, form)
            for stage in self.stages
            for action in stage.once
            if action.schedules
            for atoms, forms in (
                (action.step.eqn.invars, action.operands),
                (action.step.eqn.outvars, action.results),
            )
            for atom, form in zip(atoms, forms, strict=True)
        ]
        return tuple(
            dict.fromkeys(
                var for var, form in crossing if isinstance(var, Var) and isinstance(form, Slice) and var not in inputs
            )
        )

    @functools.cached_property
    def read_whole(self) -> set[Var]:
        """Batched values that something reads at once, also in loops and branches around passes: all turns the same."""
        inside = {
            atom
            for stage in self.stages
            for action in stage.once
            for i, atom in enumerate(action.step.eqn.invars)
            if i in action.read_whole and isinstance(atom, Var)
        }
        return inside.union(self.gathered)

    @property
    def sums_only(self) -> bool:
        """Whether every reduction over nodes is a sum, also in loops around passes."""
        return all(a.monoid is Monoid.SUM for nodes in self.passes for a in nodes.accumulators) and all(
            inner.sums_only for stage in self.stages for action in stage.once for inner in action.schedules
        )

    @property
    def passes(self) -> list[Pass]:
        return [stage.nodes for stage in self.stages if stage.nodes is not None]


def accumulator_dtype(dtype: Any, monoid: Monoid, wanted: Any) -> Any:
    """16-bit (and smaller) floats are summed in float32, unless the user wants another dtype."""
    dtype = np.dtype(dtype)
    if monoid not in (Monoid.SUM, Monoid.PROD) or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    if wanted is not None:
        return np.dtype(wanted)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


@dataclasses.dataclass(frozen=True)
class Keeping:
    """What is kept of every node for a later pass, rather than computed again.

    Attributes:
      price: scalar operations that a byte is worth.
      bounded: whether all that is kept at a time takes no more than the batched arguments do; else that holds of each
        value only.
    """

    price: float
    bounded: bool


KEEPING = (Keeping(50, True), Keeping(50, False), Keeping(10, False))
"""From what needs least memory to what computes least again. A byte is worth 50 operations as that is about what a
device computes in the time in which it writes and reads one."""

FOR_MEMORY = 1.0
"""The fraction of a step that is computed again at most for no other reason than to keep less."""


def schedule(flow: Flow, accumulate_dtype: Any = None, budget: float = math.inf) -> Schedule:
    """Divides a step into passes, with as little kept between them as its budget allows.

    Args:
      flow: batch flow of the step.
      accumulate_dtype: the dtype of floating-point accumulators; None for the default.
      budget: the fraction of the step's scalar operations that may be computed again; what exceeds it in any case is
        returned nevertheless.

    Returns:
      The schedule.
    """
    made = None
    for keeping in KEEPING:
        before, made = made, divided(flow, accumulate_dtype, keeping)
        if before is not None and made.recomputed >= before.recomputed:
            made = before  # to keep more would not help
        if made.recomputed <= min(budget, FOR_MEMORY) * made.flops:
            break
    assert made is not None
    return made


def divided(flow: Flow, accumulate_dtype: Any, keeping: Keeping) -> Schedule:
    """Divides a step into passes."""
    earliest: dict[Var, int] = {}
    decided: dict[Var, int] = {}
    if any(step.level for step in flow.steps):
        steps = living(flow)
        earliest = first_reads(flow, steps)
        decided = {**decisions(flow, steps, earliest), **answers(flow)}
    known = known_values(flow)
    while True:
        sweep = Sweep(flow, accumulate_dtype, keeping, decided, earliest, known)
        stages = sweep.run()
        late = {var: stage for var, stage in sweep.needed.items() if sweep.made.get(var, stage) > stage}
        if not late:
            break
        earliest = {var: min(stage, earliest.get(var, stage)) for var, stage in {**earliest, **sweep.needed}.items()}
    check_calls(stages)
    return Schedule(flow, tuple(stages), sweep.gathered, repeated_work(stages))


class Sweep:
    """One sweep from the last level to the first, collecting what each level asks of the levels before it.

    What a pass completes or collects is wanted by some later level and possible from some level on. It waits
    (`pending`) until a pass is inevitable, so that there are as few passes as possible and each value is computed in
    the latest: a loss is summed where the gradients are, not in the pass that only counts tokens.

    Attributes:
      needed: for every whole value the first level at which it is needed.
      made: the level at which it is there. A value that was put too late (its first user was met last) calls for
        another sweep, which is told so by `earliest`.
    """

    def __init__(
        self,
        flow: Flow,
        accumulate_dtype: Any,
        keeping: Keeping,
        decided: dict[Var, int],
        earliest: dict[Var, int],
        known: set[Var],
    ) -> None:
        self.flow = flow
        self.node_size = flow.node_size
        self.accumulate_dtype = accumulate_dtype
        self.earliest = earliest
        self.given = set(flow.program.inputs) | set(flow.program.constants)
        self.level = 1 + max((step.level for step in flow.steps), default=0)
        self.needed: dict[Var, int] = {}
        self.made: dict[Var, int] = {}
        self.gathered: dict[Var, Slice] = {}
        self.pending: dict[Var, None] = {}
        self.effects = [step for step in flow.steps if step.per_node and step.eqn.effects]
        self.position = flow.position
        self.waiting: list[int] = []
        self.known = known
        self.rounded = rounded_results(flow)
        self.widened = after_sums(flow, self.rounded)
        self.evaluated: set[int] = set()
        self.decided = decided
        self.keeping = keeping
        self.kept: dict[Var, None] = {}  # from earlier passes for those that were made so far
        self.given_kept: set[Var] = set()  # to the current pass
        self.room = sum(size_of(var) for var in flow.program.inputs if isinstance(flow.states[var].form, Slice))
        self.held: dict[int, list[int]] = {}
        for i, step in enumerate(flow.steps):
            if step.eqn.effects and not step.per_node:
                self.held.setdefault(step.level, []).append(-i)

    def want_whole(self, atom: Atom) -> None:
        if not isinstance(atom, Var):
            return
        known = atom in self.needed
        self.needed[atom] = min(self.level, self.needed.get(atom, self.level))
        if known:
            return
        state = self.flow.states[atom]
        if isinstance(state.form, Slice):
            self.gathered[atom] = state.form
        if atom in self.given:
            return
        if not isinstance(state.form, Whole) and not state.given:
            self.pending[atom] = None
            return
        step = self.flow.steps[self.position[atom]]
        if step.eqn.effects:  # which keep their order
            return
        release = 0 if state.level == 0 else min(self.earliest.get(var, self.level) for var in step.eqn.outvars)
        if release < self.level:
            self.held.setdefault(release, []).append(-self.position[atom])
        else:
            heapq.heappush(self.waiting, -self.position[atom])

    def want_batched(self, atom: Atom) -> None:
        """Wants a batched value for all nodes at once."""
        if isinstance(atom, Var) and atom not in self.given:
            if self.flow.states[atom].given:
                gathered = self.gathered.get(atom)
                self.want_whole(atom)
                if gathered is None:
                    self.gathered.pop(atom, None)
            else:
                self.collect(atom)

    def collect(self, atom: Var) -> None:
        known = atom in self.needed
        self.needed[atom] = min(self.level, self.needed.get(atom, self.level))
        if not known:
            self.pending[atom] = None

    def run(self) -> list[Stage]:
        flow = self.flow
        for atom in flow.program.outputs:
            if not isinstance(flow.state(atom).form, Slice):
                self.want_whole(atom)
            elif flow.state(atom).given:
                self.want_batched(atom)
            elif isinstance(atom, Var):
                self.pending[atom] = None
        stages: list[Stage] = []
        while self.level >= 0:
            nodes = None
            if any(flow.states[var].level == self.level for var in self.pending) or any(
                step.level == self.level for step in self.effects
            ):
                moved, nodes = self.make_pass()
                if moved:
                    stages[-1] = Stage((*moved, *stages[-1].once), stages[-1].nodes)
            stages.append(Stage(self.once(), nodes))
            self.level -= 1
        stages.reverse()
        while stages and not stages[-1].once and stages[-1].nodes is None:
            stages.pop()
        return stages

    def once(self) -> tuple[Evaluation, ...]:
        """Everything wanted so far that is evaluated once, on whole values: as late as those who want it allow."""
        actions: list[Evaluation] = []
        for position in self.held.pop(self.level, ()):
            heapq.heappush(self.waiting, position)
        while self.waiting:
            position = heapq.heappop(self.waiting)
            while self.waiting and self.waiting[0] == position:
                heapq.heappop(self.waiting)
            if position in self.evaluated:
                continue
            self.evaluated.add(position)
            step = self.flow.steps[-position]
            wanted = [
                var in self.needed and (isinstance(form, Whole) or step.nested)
                for var, form in zip(step.eqn.outvars, step.results, strict=True)
            ]
            self.made.update((var, self.level) for var in step.eqn.outvars)
            actions.append(self.whole(step, wanted))
        actions.reverse()
        return tuple(actions)

    def whole(self, step: Step, needed: Sequence[bool]) -> Evaluation:
        """The evaluation of an equation on whole values, its operands wanted."""
        if step.nested:
            inner = tuple(divided(flow, self.accumulate_dtype, self.keeping) for flow in step.bodies)
            for atom, form in zip(step.eqn.invars, step.operands, strict=True):
                if isinstance(form, Slice) and isinstance(self.flow.state(atom).form, Slice):
                    self.want_batched(atom)
                else:
                    self.want_whole(atom)
            return Evaluation(step, step.operands, step.results, schedules=inner)
        if step.per_node and step.region is not None:
            action = evaluation(step, needed, self.node_size)
        else:
            action = Evaluation(
                step, (WHOLE,) * len(step.eqn.invars), tuple(WHOLE if need else None for need in needed)
            )
        for atom, form in zip(step.eqn.invars, action.operands, strict=True):
            if form is not None:
                self.want_whole(atom)
        return action

    def make_pass(self) -> tuple[list[Evaluation], Pass]:
        """The pass of a level, with the equations that are better evaluated once, right after it."""
        flow, level = self.flow, self.level
        moved: list[Evaluation] = []
        completed: list[Var] = []
        ready = {var: None for var in self.pending if self.may_wait_for(var, level)}  # in order: so is the program
        postponed = self.postponed(ready, self.forced([var for var in ready if flow.states[var].level == level]))
        ready = {var: None for var in ready if var not in postponed}
        collected = {var: form for var in ready if isinstance(form := flow.states[var].form, Slice)}
        self.level += 1  # what is moved behind the pass is evaluated at the next level
        if any(isinstance(flow.states[var].form, Partial) for var in ready):
            for step in reversed(flow.steps):
                if step.level > level or not step.per_node or self.pending.keys().isdisjoint(step.eqn.outvars):
                    continue
                late = [v for v in step.eqn.outvars if v in self.pending and isinstance(flow.states[v].form, Partial)]
                late = [v for v in late if v not in postponed and (v in ready or self.may_wait_for(v, level))]
                if not late:
                    continue
                ready.update(dict.fromkeys(late))
                if self.moves_once(step, late):
                    moved.append(self.whole(step, [var in late for var in step.eqn.outvars]))
                else:
                    completed += late
                for var in late:
                    del self.pending[var]
        self.level = level
        moved.reverse()
        self.made.update((var, level + 1) for var in ready)
        effects = [s for s in self.effects if s.level == level or (s.level < level and not answered(s))]
        self.effects = [step for step in self.effects if step not in effects]
        self.pending = {var: None for var in self.pending if var not in ready}
        states = flow.states
        requests: list[tuple[Atom, Form]] = [(var, states[var].form) for var in completed]
        requests += collected.items()

        made = recipe(flow, requests, self.node_size, is_leaf=self.is_leaf, effects=effects)
        accumulators = []
        for var in completed:
            form = states[var].form
            assert isinstance(form, Partial)
            dtype = accumulator_dtype(var.aval.dtype, form.monoid, self.accumulate_dtype)
            accumulators.append(Accumulator(var, form.monoid, dtype, self.rounded.get(var)))
        for var, form in made.leaves:
            if isinstance(form, Whole):
                self.want_whole(var)
            else:
                self.want_batched(var)
        return moved, Pass(level, made, tuple(accumulators), tuple(collected.items()))

    def is_leaf(self, var: Var, form: Form) -> bool:
        """Whether nodes are given a value in the current pass: whole ones are, and what is kept from earlier passes."""
        if isinstance(form, Whole):
            return var not in self.known and not self.only_layout(var)
        state = self.flow.states[var]
        kept = state.level < self.level and (
            var in self.given_kept or self.decided.get(var, self.level + 1) <= self.level
        )
        return form == state.form and (state.given or kept)

    def only_layout(self, var: Var) -> bool:
        """Whether a whole value is another with its dimensions changed: nodes make it where they use it.

        Kept for the whole loop, the transpose of an embedding would take as much memory as the embedding.
        """
        if var not in self.position:
            return False
        step = self.flow.steps[self.position[var]]
        if step.per_node or step.eqn.effects or step.region is not None or len(step.eqn.invars) != 1:
            return False
        (atom,) = step.eqn.invars
        description = self.flow.program.describe(step.eqn)
        if description is None or not description.movement or description.emit is not None or description.whole:
            return False
        return isinstance(atom, Var) and size_of(var) >= size_of(atom)

    def forced(self, values: Sequence[Var]) -> Recipe:
        """What makes the values that no other pass can make; decides what the pass is given that earlier ones kept."""
        requests = [(var, self.flow.states[var].form) for var in values]
        self.given_kept = set()
        anew = recipe(self.flow, requests, self.node_size, is_leaf=self.is_leaf)
        if self.level == 0:
            return anew
        before: set[Step] = set()
        for var in self.pieces(anew):
            before |= self.extra(var, before, self.is_whole)
        for var in self.pending:
            if self.flow.states[var].level < self.level and not self.may_wait_for(var, self.level):
                before |= self.extra(var, before, self.is_whole)
        again = before & evaluated(anew)
        if not work(again):
            return anew
        self.given_kept = self.worth_keeping(values, again)
        given = recipe(self.flow, requests, self.node_size, is_leaf=self.is_leaf)
        if work(evaluated(given)) > 0.95 * work(evaluated(anew)):
            self.given_kept = set()  # not for a loss or two
            return anew
        self.kept.update(dict.fromkeys(var for var in self.flow.position if var in self.given_kept))
        return given

    def worth_keeping(self, values: Sequence[Var], again: set[Step]) -> set[Var]:
        """What the pass that makes `values` is given, lest it compute the steps `again` that earlier ones evaluate."""
        states = self.flow.states
        waiting = {var for var in self.kept if var in self.pending and states[var].level < self.level}
        allowed: set[Var] | None = None

        def memory(var: Var) -> float | None:
            state = states[var]
            if var in waiting:
                return 0.0
            if not isinstance(state.form, Slice) or state.level >= self.level or size_of(var) > self.room:
                return None
            return self.keeping.price * size_of(var) if allowed is None or var in allowed else None

        def cost(step: Step) -> float:
            return float(step.flops) if step in again and step.per_node else 0.0

        def choice() -> set[Var]:
            return cheapest(self.flow, values, lambda var: self.is_leaf(var, states[var].form), memory, cost)

        found = choice()
        written = {var for var in self.kept if var in self.pending and states[var].level == self.level}
        held = waiting | written  # while the pass reads what it is given
        if self.keeping.bounded and sum(map(size_of, found | held)) > self.room:
            allowed, room = set(), self.room - sum(map(size_of, held))
            for var in sorted(found - waiting, key=self.position.__getitem__):
                if size_of(var) <= room:
                    allowed.add(var)
                    room -= size_of(var)
            found = choice()  # what is worth it without those that have no room
        return found

    def postponed(self, ready: Iterable[Var], base: Recipe) -> set[Var]:
        """Those of the values that could be made in the current pass that are better made in an earlier one.

        What must be made decides what a pass computes anyway. A value comes along where it adds least to that: the
        numerator of a masked mean with the gradients, not with the count of the mask; the gradients not with a
        statistic of losses that an earlier pass keeps. It also comes along if it adds next to nothing.
        """
        states = self.flow.states
        others = [var for var in ready if states[var].level < self.level]
        if not others:
            return set()
        here = evaluated(base)
        before: set[Step] = set()
        for var in self.pieces(base):
            before |= self.extra(var, before, self.is_whole)
        little = work(here) // 20
        late: set[Var] = set()
        for var in sorted(others, key=lambda v: self.position.get(v, -1)):
            more = self.extra(var, here, self.is_leaf)
            cost = work(more)
            comes = (var, states[var].form) not in base.leaves and (
                cost <= little or cost <= work(self.extra(var, before, self.is_whole))
            )
            if comes:
                here |= more
            else:
                late.add(var)
                before |= self.extra(var, before, self.is_whole)
        return late

    def pieces(self, made: Recipe) -> list[Var]:
        """What earlier passes complete or keep so that `made` is given what it reads."""
        found: list[Var] = []
        seen: set[Var] = set()
        stack: list[Atom] = [var for var, _ in made.leaves]
        while stack:
            var = stack.pop()
            if not isinstance(var, Var) or var in seen or var not in self.position:
                continue
            seen.add(var)
            if self.is_whole(var, self.flow.states[var].form):
                stack += self.flow.steps[self.position[var]].eqn.invars
            else:
                found.append(var)
        return found

    def is_whole(self, var: Var, form: Form) -> bool:
        """Whether no pass has to make a value."""
        return isinstance(form, Whole) or self.flow.states[var].given

    def extra(self, var: Var, done: set[Step], is_leaf: Callable[[Var, Form], bool]) -> set[Step]:
        """The steps that nodes would evaluate besides `done` for a value."""
        extra: set[Step] = set()
        stack: list[Atom] = [var]
        while stack:
            atom = stack.pop()
            if not isinstance(atom, Var) or atom not in self.position:
                continue
            step = self.flow.steps[self.position[atom]]
            if step not in done and step not in extra and not is_leaf(atom, self.flow.states[atom].form):
                extra.add(step)
                stack += step.eqn.invars
        return extra

    def may_wait_for(self, var: Var, level: int) -> bool:
        """Whether a value can be completed in the pass of a level: it is possible by then, and not needed before."""
        made = self.flow.states[var].level
        return made == level or (made < level < self.earliest.get(var, level + 1))

    def moves_once(self, step: Step, late: Sequence[Var]) -> bool:
        """Whether a linear equation of partial values is better evaluated once, on completed operands."""
        if step.location is not None or step.region is not None or step.description is None:
            return False
        if any(isinstance(form, Varying) for form in step.operands):
            return False  # each node's piece has a factor of its own
        partial = {
            atom: None
            for atom in step.eqn.invars
            if isinstance(atom, Var) and isinstance(self.flow.states[atom].form, Partial)
        }
        if not self.widened.isdisjoint(late):
            return True
        cost = sum(size_of(atom) for atom in partial if atom not in self.needed)
        gain = sum(size_of(var) for var in late) - cost
        return bool(partial) and (gain > 0 if step.description.movement else gain >= 0)


def known_values(flow: Flow) -> set[Var]:
    """Whole values that depend on no argument and cost next to nothing, such as zeros or an iota.

    Nodes make them where they use them: handed to a loop, they are no longer known to every compiler, and what one of
    them simplifies another does not.
    """
    known: set[Var] = set()
    for step in flow.steps:
        eqn = step.eqn
        if step.per_node or eqn.effects or step.region is not None or len(eqn.outvars) != 1:
            continue
        if any(isinstance(atom, Var) and atom not in known for atom in eqn.invars):
            continue
        if step.flops <= math.prod(getattr(eqn.outvars[0].aval, "shape", ())):
            known.add(eqn.outvars[0])
    return known


def repeated_work(stages: Sequence[Stage]) -> dict[int, int]:
    """For every pass the scalar operations of equations that an earlier pass has evaluated already."""
    first: set[Step] = set()
    repeated: dict[int, int] = {}
    for stage in stages:
        for action in stage.nodes.recipe.actions if stage.nodes else ():
            if isinstance(action, Conversion) or not action.step.per_node:
                continue
            if action.step in first:
                level = stage.nodes.level if stage.nodes else 0
                repeated[level] = repeated.get(level, 0) + action.step.flops
            first.add(action.step)
    return repeated


def calls_host(step: Step) -> bool:
    """Whether nodes call host code that may do something else the second time (debugging output may come twice)."""
    return step.per_node and any("IO" in type(effect).__name__ for effect in step.eqn.effects)


def answered(step: Step) -> bool:
    """Whether nodes call host code for its results: in the first pass that can, so that it is called once."""
    return calls_host(step) and bool(step.eqn.outvars)


def answers(flow: Flow) -> dict[Var, int]:
    """What host code returned for batched values: kept for later passes, each with the first that could read it."""
    return {
        var: step.level + 1
        for step in flow.steps
        if calls_host(step)
        for var, form in zip(step.eqn.outvars, step.results, strict=True)
        if isinstance(form, Slice)
    }


def check_calls(stages: Sequence[Stage]) -> None:
    """Refuses to call host code in several passes.

    Raises:
      CouplingError: a later pass would call it again.
    """
    called: set[Step] = set()
    for stage in stages:
        for step in evaluated(stage.nodes.recipe) if stage.nodes else ():
            if step in called and calls_host(step):
                raise CouplingError(
                    layout_message(
                        f"the step needs the result of {step.eqn.primitive.name!r} in several passes, and calling host "
                        "code again may give another.",
                        where=where(step.eqn),
                        facts=[signature(step.eqn)],
                        remedies=[
                            "use jax.pure_callback if the code gives the same for the same operands",
                            "or call it in a step of its own and pass its results to this one",
                        ],
                    )
                )
        called |= evaluated(stage.nodes.recipe) if stage.nodes else set()


def evaluated(made: Recipe) -> set[Step]:
    return {action.step for action in made.actions if isinstance(action, Evaluation)}


def work(steps: Iterable[Step]) -> int:
    """Scalar operations of nodes; what is evaluated once counts for nothing beside them."""
    return sum(step.flops for step in steps if step.per_node)


def nbytes(var: Var) -> int:
    return math.prod(getattr(var.aval, "shape", ())) * itemsize(var)


def size_of(var: Var) -> int:
    """Bytes of an accumulator of `var`."""
    return math.prod(var.aval.shape) * max(4, itemsize(var))
