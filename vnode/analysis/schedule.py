"""Batch flow of a step -> its schedule: passes, their accumulators, and the equations evaluated once in between.

Knows recipes and levels. Must not know devices or how anything is evaluated.

    g: partial;  u = 0.1 * g;  w' = w - u    ->    pass 0: for node: g += grad       then once: u = 0.1 * g; w' = w - u

A linear equation of partial values can run per node or once, on the completed sums. It runs once if the accumulators do
not grow by that: scaling runs once, while two gradients of a tied weight are added before they are accumulated. A
transpose stays in the pass, where the compiler fuses it into the product before it. A cast to more bits always runs
after the sum.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Var

from vnode.analysis.forms import WHOLE, Form, Partial, Slice, Varying, Whole
from vnode.analysis.frozen_values import find_frozen_values, first_read_levels, live_steps
from vnode.analysis.host_calls import calls_host_for_results, check_host_calls, host_call_results
from vnode.analysis.low_precision_sums import rounded_results, values_after_sums
from vnode.analysis.pass_cut import BUDGET_POLICIES, KEEP_POLICIES, KeepPolicy, PassCut, cheap_constants
from vnode.analysis.passes import Accumulator, Pass, Schedule, Stage, accumulator_bytes, accumulator_dtype
from vnode.analysis.program import Atom
from vnode.analysis.recipe import Evaluation, build_recipe, evaluated_steps, native_evaluation
from vnode.analysis.states import Flow, Step
from vnode.operators import Algebra

MEMORY_RECOMPUTE_LIMIT = 1.0
"""The largest fraction of a step that is recomputed only to save memory."""

FORWARD_SHARE = 1 / 3
"""The share of the forward pass in a step with a gradient. With a smaller budget, values that are cheap for their size
are not kept, so that the error tells what exactness costs."""

ABANDON_LIMIT = 4 * MEMORY_RECOMPUTE_LIMIT
"""The fraction of recomputation at which a sweep is given up: later sweeps would not bring it below the budget."""


def schedule(flow: Flow, accumulate_dtype: Any = None, budget: float = math.inf) -> Schedule:
    """Divides a step into passes, with as few values kept between them as the budget allows.

    Args:
      flow: batch flow of the step.
      accumulate_dtype: the dtype of floating-point accumulators; None for the default.
      budget: the fraction of the step's scalar operations that may be recomputed.

    Returns:
      The schedule. It may exceed the budget, if no schedule meets it.
    """
    limit = min(budget, MEMORY_RECOMPUTE_LIMIT)
    max_recomputed = ABANDON_LIMIT if budget <= ABANDON_LIMIT else math.inf
    made = least_recomputing(flow, accumulate_dtype, KEEP_POLICIES, limit, ABANDON_LIMIT)
    if max_recomputed > ABANDON_LIMIT and not meets_budget(made, limit):
        made = least_recomputing(flow, accumulate_dtype, KEEP_POLICIES, limit, max_recomputed)
    kept = BUDGET_POLICIES if budget >= FORWARD_SHARE else BUDGET_POLICIES[:-1]
    if not meets_budget(made, budget):
        made = least_recomputing(flow, accumulate_dtype, kept, budget, max_recomputed, made)
    return made or divide_into_passes(flow, accumulate_dtype, kept[-1])


def meets_budget(made: Schedule | None, share: float) -> bool:
    """Whether a schedule recomputes at most a share of the step."""
    return made is not None and (share == math.inf or made.recomputed_flops <= share * made.flops)


def least_recomputing(
    flow: Flow,
    accumulate_dtype: Any,
    keepings: Sequence[KeepPolicy],
    enough: float,
    most: float,
    made: Schedule | None = None,
) -> Schedule | None:
    """The first schedule that meets a budget, or else the one that recomputes least.

    Args:
      flow: batch flow of the step.
      accumulate_dtype: as of `schedule`.
      keepings: policies to try, in order.
      enough: the budget, as a share of the step.
      most: the share at which a try is given up.
      made: a schedule to begin with; None if there is none.
    """
    for keeping in keepings:
        try:
            found = divide_into_passes(flow, accumulate_dtype, keeping, most)
        except TooMuchRecomputation:
            continue
        if made is None or found.recomputed_flops < made.recomputed_flops:
            made = found  # otherwise keeping more does not help
        if meets_budget(made, enough):
            break
    return made


class TooMuchRecomputation(Exception):
    """A sweep recomputes more than its limit, and is given up."""


def divide_into_passes(flow: Flow, accumulate_dtype: Any, keeping: KeepPolicy, most: float = math.inf) -> Schedule:
    """Divides a step into passes.

    Raises:
      TooMuchRecomputation: they recompute more than `most` times the step.
    """
    earliest: dict[Var, int] = {}
    decided: dict[Var, int] = {}
    if any(step.level for step in flow.steps):
        steps = live_steps(flow)
        earliest = first_read_levels(flow, steps)
        decided = {**find_frozen_values(flow, steps, earliest), **host_call_results(flow)}
    known = cheap_constants(flow)
    while True:
        sweep = Sweep(flow, accumulate_dtype, keeping, decided, earliest, known, most)
        stages = sweep.run()
        late = {var: stage for var, stage in sweep.first_needed.items() if sweep.available_from.get(var, stage) > stage}
        if not late:
            break
        earliest = {
            var: min(stage, earliest.get(var, stage)) for var, stage in {**earliest, **sweep.first_needed}.items()
        }
    check_host_calls(stages)
    return Schedule(flow, tuple(stages), sweep.gathered)


class Sweep:
    """One sweep from the last level to the first, which collects the values that each level needs of earlier ones.

    A value that a pass completes or collects has a first possible level and a last one. It is `pending` until a pass
    is inevitable. So there are as few passes as possible, and each value is computed in the latest one: a loss is
    summed with the gradients, not in the pass that only counts tokens.

    Attributes:
      first_needed: for every whole value, the first level at which it is needed.
      available_from: the level at which it is computed. If that is later than its first use, another sweep follows,
        with a smaller level in `earliest`.
    """

    def __init__(
        self,
        flow: Flow,
        accumulate_dtype: Any,
        keeping: KeepPolicy,
        decided: dict[Var, int],
        earliest: dict[Var, int],
        known: set[Var],
        most: float,
    ) -> None:
        self.flow = flow
        self.node_sizes = flow.node_sizes
        self.accumulate_dtype = accumulate_dtype
        self.earliest = earliest
        self.given = set(flow.program.inputs) | set(flow.program.constants)
        self.level = 1 + max((step.level for step in flow.steps), default=0)
        self.first_needed: dict[Var, int] = {}
        self.available_from: dict[Var, int] = {}
        self.gathered: dict[Var, Slice] = {}
        self.pending: dict[Var, None] = {}
        self.effects = [step for step in flow.steps if step.per_node and step.eqn.effects]
        self.position = flow.position
        self.waiting: list[int] = []
        self.rounded = rounded_results(flow)
        self.widened = values_after_sums(flow, self.rounded)
        self.evaluated: set[int] = set()
        self.keeping = keeping
        self.pass_cut = PassCut(flow, keeping, decided, known)
        self.max_recomputed = most * sum(step.flops for step in flow.steps) if most < math.inf else most
        self.recomputed_flops = 0
        self.in_passes: set[Step] = set()
        self.deferred: dict[int, list[int]] = {}
        for i, step in enumerate(flow.steps):
            if step.eqn.effects and not step.per_node:
                self.deferred.setdefault(step.level, []).append(-i)

    def want_whole(self, atom: Atom) -> None:
        """Requests a whole value at the current level."""
        if not isinstance(atom, Var):
            return
        known = atom in self.first_needed
        self.first_needed[atom] = min(self.level, self.first_needed.get(atom, self.level))
        if known:
            return
        state = self.flow.states[atom]
        if isinstance(state.form, Slice):
            self.gathered[atom] = state.form
        if atom in self.given:
            return
        if not isinstance(state.form, Whole) and not state.materialized:
            self.pending[atom] = None
            return
        step = self.flow.steps[self.position[atom]]
        if step.eqn.effects:  # effects keep their order
            return
        release = 0 if state.level == 0 else min(self.earliest.get(var, self.level) for var in step.eqn.outvars)
        if release < self.level:
            self.deferred.setdefault(release, []).append(-self.position[atom])
        else:
            heapq.heappush(self.waiting, -self.position[atom])

    def want_batched(self, atom: Atom) -> None:
        """Requests a batched value of all nodes at the current level."""
        if isinstance(atom, Var) and atom not in self.given:
            if self.flow.states[atom].materialized:
                gathered = self.gathered.get(atom)
                self.want_whole(atom)
                if gathered is None:
                    self.gathered.pop(atom, None)
            else:
                self.collect(atom)

    def collect(self, atom: Var) -> None:
        """Requests that a pass collects a batched value of all nodes."""
        known = atom in self.first_needed
        self.first_needed[atom] = min(self.level, self.first_needed.get(atom, self.level))
        if not known:
            self.pending[atom] = None

    def run(self) -> list[Stage]:
        """Sweeps through all levels, and returns the stages in order."""
        flow = self.flow
        for atom in flow.program.outputs:
            if not isinstance(flow.state(atom).form, Slice):
                self.want_whole(atom)
            elif flow.state(atom).materialized:
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
                self.count_recomputed(nodes)
                if moved:
                    stages[-1] = Stage((*moved, *stages[-1].once_actions), stages[-1].node_pass)
            stages.append(Stage(self.evaluate_once(), nodes))
            self.level -= 1
        return merge_stages(reversed(stages))

    def count_recomputed(self, nodes: Pass) -> None:
        """Counts the flops that a pass shares with later passes.

        Raises:
          TooMuchRecomputation: the sum exceeds the limit.
        """
        steps = {step for step in evaluated_steps(nodes.recipe) if step.per_node}
        self.recomputed_flops += sum(step.flops for step in steps & self.in_passes)
        self.in_passes |= steps
        if self.recomputed_flops > self.max_recomputed:
            raise TooMuchRecomputation

    def evaluate_once(self) -> tuple[Evaluation, ...]:
        """The requested equations that are evaluated once at this level: as late as their readers allow."""
        actions: list[Evaluation] = []
        for position in self.deferred.pop(self.level, ()):
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
                var in self.first_needed and (isinstance(form, Whole) or step.nested)
                for var, form in zip(step.eqn.outvars, step.results, strict=True)
            ]
            self.available_from.update((var, self.level) for var in step.eqn.outvars)
            actions.append(self.whole_evaluation(step, wanted))
        actions.reverse()
        return tuple(actions)

    def whole_evaluation(self, step: Step, needed: Sequence[bool]) -> Evaluation:
        """The evaluation of an equation on whole values. Requests its operands."""
        if step.nested:
            inner = tuple(divide_into_passes(flow, self.accumulate_dtype, self.keeping) for flow in step.bodies)
            for atom, form in zip(step.eqn.invars, step.operands, strict=True):
                if isinstance(form, Slice) and isinstance(self.flow.state(atom).form, Slice):
                    self.want_batched(atom)
                else:
                    self.want_whole(atom)
            return Evaluation(step, step.operands, step.results, schedules=inner)
        if step.per_node and step.region is not None:
            action = native_evaluation(step, needed, self.node_sizes)
        else:
            action = Evaluation(
                step, (WHOLE,) * len(step.eqn.invars), tuple(WHOLE if need else None for need in needed)
            )
        for atom, form in zip(step.eqn.invars, action.operands, strict=True):
            if form is not None:
                self.want_whole(atom)
        return action

    def make_pass(self) -> tuple[list[Evaluation], Pass]:
        """The pass of the current level, and the equations moved out of it, which run once right after it."""
        flow, level = self.flow, self.level
        moved: list[Evaluation] = []
        completed: list[Var] = []
        ready = {var: None for var in self.pending if self.can_complete_at(var, level)}  # in order: so is the program
        earlier = [v for v in self.pending if flow.states[v].level < level and not self.can_complete_at(v, level)]
        postponed = self.pass_cut.postponed_values(level, ready, self.pending, earlier)
        ready = {var: None for var in ready if var not in postponed}
        collected = {var: form for var in ready if isinstance(form := flow.states[var].form, Slice)}
        self.level += 1  # equations moved out of the pass run at the next level
        if any(isinstance(flow.states[var].form, Partial) for var in ready):
            waiting = [-self.position[var] for var in self.pending]  # the steps that make them, the last one first
            heapq.heapify(waiting)
            last = None
            while waiting:
                position = heapq.heappop(waiting)
                step = flow.steps[-position]
                if position == last or step.level > level or not step.per_node:
                    continue
                last = position
                late = [v for v in step.eqn.outvars if v in self.pending and isinstance(flow.states[v].form, Partial)]
                late = [v for v in late if v not in postponed and (v in ready or self.can_complete_at(v, level))]
                if not late:
                    continue
                ready.update(dict.fromkeys(late))
                if self.moves_out_of_pass(step, late):
                    moved.append(self.whole_evaluation(step, [var in late for var in step.eqn.outvars]))
                    for atom in step.eqn.invars:
                        if isinstance(atom, Var) and atom in self.pending:
                            heapq.heappush(waiting, -self.position[atom])
                else:
                    completed += late
                for var in late:
                    del self.pending[var]
        self.level = level
        moved.reverse()
        self.available_from.update((var, level + 1) for var in ready)
        effects = [s for s in self.effects if s.level == level or (s.level < level and not calls_host_for_results(s))]
        self.effects = [step for step in self.effects if step not in effects]
        self.pending = {var: None for var in self.pending if var not in ready}
        states = flow.states
        requests: list[tuple[Atom, Form]] = [(var, states[var].form) for var in completed]
        requests += collected.items()

        made = build_recipe(flow, requests, self.node_sizes, is_leaf=self.pass_cut.is_leaf, effects=effects)
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

    def can_complete_at(self, var: Var, level: int) -> bool:
        """Whether a value can be completed in the pass of a level: it is computable by then, and not needed before."""
        made = self.flow.states[var].level
        return made == level or (made < level < self.earliest.get(var, level + 1))

    def moves_out_of_pass(self, step: Step, late: Sequence[Var]) -> bool:
        """Whether a linear equation of partial values runs once, on completed operands (see the module)."""
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
        cost = sum(accumulator_bytes(atom) for atom in partial if atom not in self.first_needed)
        gain = sum(accumulator_bytes(var) for var in late) - cost
        return bool(partial) and (gain > 0 if step.description.has(Algebra.MOVES) else gain >= 0)


def merge_stages(stages: Iterable[Stage]) -> list[Stage]:
    """Merges adjacent stages that have no pass between them, and drops empty stages at the end."""
    found: list[Stage] = []
    for stage in stages:
        if found and found[-1].node_pass is None:
            stage = Stage((*found.pop().once_actions, *stage.once_actions), stage.node_pass)
        found.append(stage)
    while found and not found[-1].once_actions and found[-1].node_pass is None:
        found.pop()
    return found
