"""Which steps nodes evaluate for a value, whatever pass does it: sets of steps as bits, for all values at once.

Knows batch flow. Must not know passes, nor what any of them is given.

A pass of a deep network would otherwise walk the whole network to learn what it has in common with others, and there
are as many passes as layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np
from jax.extend.core import Var

from vnode.analysis.forms import VARYING, WHOLE, Form, Varying, Whole
from vnode.analysis.program import Atom
from vnode.analysis.states import Flow, Step

Steps = int
"""A set of steps: bit i for the step at position i."""


class Ancestry:
    """Sets of steps behind values.

    Args:
      flow: batch flow of the program.
      is_whole: says of which values no pass has to make anything.
    """

    def __init__(self, flow: Flow, is_whole: Callable[[Var], bool]) -> None:
        self.flow = flow
        self.is_whole = is_whole

    @functools.cached_property
    def ancestors(self) -> dict[Var, Steps]:
        """For every value that nodes hold, the steps that they evaluate for it, in whichever passes.

        For every whole one, those that they evaluate for all that it is made of.
        """
        found: dict[Var, Steps] = {}
        for i, step in enumerate(self.flow.steps):
            inputs = [atom for atom in step.eqn.invars if isinstance(atom, Var)]
            whole = held = 0
            for atom in inputs:
                whole |= found.get(atom, 0)
                held |= 0 if self.is_whole(atom) else found.get(atom, 0)
            for var in step.eqn.outvars:
                found[var] = whole if self.is_whole(var) else held | 1 << i
        return found

    def pass_ancestry(self, is_leaf: Callable[[Var, Form], bool]) -> tuple[dict[Var, Steps], dict[Var, Steps]]:
        """For a pass that is given the values of which `is_leaf` says so.

        Returns:
          For every value the steps that the pass evaluates for it, and the steps behind all that it is given for that.
        """
        states, position = self.flow.states, self.flow.position
        found: dict[Var, tuple[Steps, Steps]] = {}
        own: dict[Var, tuple[Steps, Steps]] = {}  # of what nodes make of their own examples

        def read(atom: Atom, form: Form) -> tuple[Steps, Steps]:
            if not isinstance(atom, Var) or atom not in position:
                return 0, 0
            native = states[atom].form
            if form != native:
                if isinstance(form, Varying):
                    return own[atom]
                if is_leaf(atom, WHOLE):
                    return 0, self.ancestors[atom]
            return found[atom]

        for i, step in enumerate(self.flow.steps):
            pairs = list(zip(step.eqn.invars, step.operands, strict=True))
            both = merge_operand_sets(i, [read(atom, form) for atom, form in pairs])
            for var in step.eqn.outvars:
                state = states[var]
                found[var] = (0, self.ancestors[var]) if is_leaf(var, state.form) else both
                own[var] = found[var]
                if isinstance(state.form, Whole) and state.estimable:
                    estimates = [
                        read(atom, VARYING if self.flow.state(atom).estimable else form) for atom, form in pairs
                    ]
                    own[var] = merge_operand_sets(i, estimates)
        return {var: makes for var, (makes, _) in found.items()}, {var: reads for var, (_, reads) in found.items()}

    @functools.cached_property
    def flops(self) -> np.ndarray:
        """Scalar operations of nodes for every step, float64 ``[steps]``."""
        return np.array([step.flops if step.per_node else 0 for step in self.flow.steps], np.float64)

    def per_node_flops(self, steps: Steps) -> float:
        """Scalar operations of nodes for a set of steps."""
        if not steps:
            return 0.0
        size = (steps.bit_length() + 7) // 8
        bits = np.unpackbits(np.frombuffer(steps.to_bytes(size, "little"), np.uint8), bitorder="little")
        return float(self.flops[: bits.size] @ bits[: self.flops.size])

    def union(self, values: Iterable[Var], sets: dict[Var, Steps]) -> Steps:
        found = 0
        for var in values:
            found |= sets.get(var, 0)
        return found

    def contains(self, steps: Steps, step: Step) -> bool:
        """Whether a step with a result is in a set."""
        return bool(steps >> self.flow.position[step.eqn.outvars[0]] & 1)


def merge_operand_sets(position: int, read: Iterable[tuple[Steps, Steps]]) -> tuple[Steps, Steps]:
    """The sets of a step from those of its operands."""
    makes, reads = 1 << position, 0
    for evaluated, behind in read:
        makes |= evaluated
        reads |= behind
    return makes, reads
