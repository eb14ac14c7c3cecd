"""Values that are ready in a pass -> those it computes, and the inputs kept for it from earlier passes.

Knows batch flow, levels, and what values weigh and equations cost. Must not know what passes accumulate, nor in which
order whole values are evaluated.

    pass 0: h = f(x);  s = sum(h)                pass 0: ...; keep h
    pass 1: h = f(x);  g = sum(h * s)      ->    pass 1: g = sum(h * s)        if h is cheaper to keep than to recompute
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Mapping, Sequence

from jax.extend.core import Var

from vnode.analysis.ancestry import Ancestry, Steps
from vnode.analysis.forms import Form, Slice, Whole
from vnode.analysis.min_cut import cheapest_cut
from vnode.analysis.passes import accumulator_bytes
from vnode.analysis.program import Atom
from vnode.analysis.recipe import Recipe, build_recipe, evaluated_steps
from vnode.analysis.states import Flow, Step
from vnode.operators import Algebra
from vnode.operators.memory_spaces import is_on_host


@dataclasses.dataclass(frozen=True)
class KeepPolicy:
    """The values that may be kept for a later pass, rather than recomputed.

    Attributes:
      price: the price of a kept byte, in scalar operations.
      bounded: whether all kept values together take at most the bytes of the batched arguments.
      bounded_each: whether each kept value takes at most the bytes of the batched arguments.
    """

    price: float
    bounded: bool
    bounded_each: bool = True


KEEP_POLICIES = (KeepPolicy(50, True), KeepPolicy(50, False), KeepPolicy(10, False))
"""From least memory to least recomputation. A device computes about 50 operations while it writes and reads a byte."""

BUDGET_POLICIES = (KeepPolicy(50, False, False), KeepPolicy(10, False, False), KeepPolicy(1, False, False))
"""Policies for a step that would be refused otherwise. They keep values larger than the arguments, as the layers of a
convolutional network, and at last values that are cheap for their size, as narrow layers. The plain step holds all."""


class PassCut:
    """The values that passes compute and those they are given, decided from the last pass to the first.

    Args:
      flow: batch flow of the program.
      keeping: which values may be kept for a later pass.
      decided: values that must be kept, each with the first pass that is given it.
      known: whole values that nodes compute where they use them.

    Attributes:
      level: of the current pass.
      kept_inputs: values that the current pass is given, because an earlier pass computes them anyway.
      kept: the kept inputs of all passes so far.
    """

    def __init__(self, flow: Flow, keeping: KeepPolicy, decided: Mapping[Var, int], known: Container[Var]) -> None:
        self.flow = flow
        self.position = flow.position
        self.keeping = keeping
        self.decided = decided
        self.known = known
        self.level = 0
        self.kept_inputs: set[Var] = set()
        self.kept: dict[Var, None] = {}
        self.ancestry = Ancestry(flow, self.is_whole)
        self.mandatory_sets: tuple[frozenset[Var], dict[Var, Steps], dict[Var, Steps]] | None = None
        self.capacity_bytes = sum(
            accumulator_bytes(var) for var in flow.program.inputs if isinstance(flow.states[var].form, Slice)
        )

    def postponed_values(
        self, level: int, ready: Iterable[Var], pending: Container[Var], earlier: Sequence[Var]
    ) -> set[Var]:
        """Decides about a pass, and returns the ready values that an earlier pass should compute.

        Some values can be computed in this pass only. Each other one is computed in the pass to which it adds least
        work: the numerator of a masked mean with the gradients, not with the count of the mask. A value that adds next
        to nothing stays in this pass.

        Args:
          level: of the pass.
          ready: values that it could compute.
          pending: values that it or an earlier pass computes.
          earlier: pending values that only an earlier pass can compute.
        """
        self.level = level
        states = self.flow.states
        base = self.required_recipe([var for var in ready if states[var].level == level], pending, earlier)
        others = [var for var in ready if states[var].level < level]
        if not others:
            return set()
        here = evaluated_steps(base)
        behind = self.ancestry.ancestors
        before = self.ancestry.union((var for var, _ in base.leaves), behind)
        little = steps_flops(here) // 20
        late: set[Var] = set()
        for var in sorted(others, key=lambda v: self.position.get(v, -1)):
            if (var, states[var].form) not in base.leaves:
                anew = behind.get(var, 0) & ~before
                more = self.extra_steps(var, here, max(little, self.ancestry.per_node_flops(anew)))
                if more is not None:
                    here |= more
                    continue
            late.add(var)
            before |= behind.get(var, 0)
        return late

    def is_leaf(self, var: Var, form: Form) -> bool:
        """Whether a value is an input of the current pass: a whole value, an argument, or a kept value."""
        if isinstance(form, Whole):
            return var not in self.known and not self.only_layout(var)
        state = self.flow.states[var]
        kept = state.level < self.level and (
            var in self.kept_inputs or self.decided.get(var, self.level + 1) <= self.level
        )
        return form == state.form and (state.materialized or kept)

    def only_layout(self, var: Var) -> bool:
        """Whether a whole value only rearranges another one. Nodes compute such a value where they use it.

        Held during the whole pass, the transpose of an embedding would take as much memory as the embedding.
        """
        if var not in self.position:
            return False
        step = self.flow.steps[self.position[var]]
        if step.per_node or step.eqn.effects or step.region is not None or len(step.eqn.invars) != 1:
            return False
        (atom,) = step.eqn.invars
        description = self.flow.program.describe(step.eqn)
        if (
            description is None
            or not description.has(Algebra.MOVES)
            or description.emit is not None
            or description.whole
        ):
            return False
        return isinstance(atom, Var) and accumulator_bytes(var) >= accumulator_bytes(atom)

    def required_recipe(self, values: Sequence[Var], pending: Container[Var], earlier: Sequence[Var]) -> Recipe:
        """The recipe for values that no other pass can compute. Sets `kept_inputs`.

        Args:
          values: to compute in this pass.
          pending: values that it or an earlier pass computes.
          earlier: pending values that only an earlier pass can compute.
        """
        requests = [(var, self.flow.states[var].form) for var in values]
        self.kept_inputs = set()
        alone = 0
        if self.level > 0:
            makes, reads = self.mandatory_ancestry()
            alone = self.ancestry.union(values, makes)
            again = alone & (self.ancestry.union(values, reads) | self.ancestry.union(earlier, self.ancestry.ancestors))
            if self.ancestry.per_node_flops(again):
                kept = {var: self.flow.states[var].level for var in self.kept if var in pending}
                waiting = {var for var, level in kept.items() if level < self.level}
                written = {var for var, level in kept.items() if level == self.level}
                self.kept_inputs = self.values_worth_keeping(values, again, waiting, written)
        given = build_recipe(self.flow, requests, self.flow.node_sizes, is_leaf=self.is_leaf)
        if not self.kept_inputs:
            return given
        if steps_flops(evaluated_steps(given)) > 0.95 * self.ancestry.per_node_flops(alone):
            self.kept_inputs = set()  # the inputs save next to nothing
            return build_recipe(self.flow, requests, self.flow.node_sizes, is_leaf=self.is_leaf)
        self.kept.update(dict.fromkeys(sorted(self.kept_inputs, key=self.position.__getitem__)))
        return given

    def mandatory_ancestry(self) -> tuple[dict[Var, Steps], dict[Var, Steps]]:
        """`Ancestry.pass_ancestry` of the current pass, if it is given no kept values besides `decided`."""
        must = frozenset(var for var, level in self.decided.items() if self.is_leaf(var, self.flow.states[var].form))
        if self.mandatory_sets is None or self.mandatory_sets[0] != must:
            self.mandatory_sets = must, *self.ancestry.pass_ancestry(self.is_leaf)
        return self.mandatory_sets[1:]

    def values_worth_keeping(
        self, values: Sequence[Var], again: Steps, waiting: set[Var], written: set[Var]
    ) -> set[Var]:
        """The values to keep for the pass, so that it does not recompute steps of earlier passes.

        Args:
          values: that the pass computes.
          again: steps that the pass would recompute.
          waiting: values that are kept for a later pass in any case.
          written: values that this pass keeps for a later one; they are held at the same time.
        """
        states = self.flow.states
        allowed: set[Var] | None = None

        def memory(var: Var) -> float | None:
            state = states[var]
            if var in waiting:
                return 0.0
            if not isinstance(state.form, Slice) or state.level >= self.level or is_on_host(var.aval):
                return None
            if self.keeping.bounded_each and accumulator_bytes(var) > self.capacity_bytes:
                return None
            return self.keeping.price * accumulator_bytes(var) if allowed is None or var in allowed else None

        def cost(step: Step) -> float:
            return float(step.flops) if step.per_node and self.ancestry.contains(again, step) else 0.0

        def choice() -> set[Var]:
            return cheapest_cut(self.flow, values, lambda var: self.is_leaf(var, states[var].form), memory, cost)

        found = choice()
        held = waiting | written
        if self.keeping.bounded and sum(map(accumulator_bytes, found | held)) > self.capacity_bytes:
            allowed, room = set(), self.capacity_bytes - sum(map(accumulator_bytes, held))
            for var in sorted(found - waiting, key=self.position.__getitem__):
                if accumulator_bytes(var) <= room:
                    allowed.add(var)
                    room -= accumulator_bytes(var)
            found = choice()  # again, among the values that fit
        return found

    def is_whole(self, var: Var) -> bool:
        """Whether a value exists without any pass: it is whole, or an argument."""
        state = self.flow.states[var]
        return isinstance(state.form, Whole) or state.materialized

    def extra_steps(self, var: Var, done: set[Step], most: float) -> set[Step] | None:
        """The further steps that the current pass would evaluate for a value; None if they cost more than `most`.

        Args:
          var: the value.
          done: the steps that the pass evaluates anyway.
          most: scalar operations.
        """
        extra: set[Step] = set()
        stack: list[Atom] = [var]
        cost = 0
        while stack:
            atom = stack.pop()
            if not isinstance(atom, Var) or atom not in self.position:
                continue
            step = self.flow.steps[self.position[atom]]
            if step not in done and step not in extra and not self.is_leaf(atom, self.flow.states[atom].form):
                extra.add(step)
                cost += step.flops if step.per_node else 0
                if cost > most:
                    return None
                stack += step.eqn.invars
        return extra


def cheap_constants(flow: Flow) -> set[Var]:
    """Whole values that depend on no argument and cost at most an operation per element, such as zeros or an iota.

    Nodes compute them where they use them. As operands of a loop they would no longer be constants to the compiler.
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


def steps_flops(steps: Iterable[Step]) -> int:
    """Scalar operations of the per-node steps; steps that run once cost nothing beside them."""
    return sum(step.flops for step in steps if step.per_node)
