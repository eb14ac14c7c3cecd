"""Batch flow -> for every value, the set of per-node steps that it is computed from.

Knows batch flow. Must not know passes, nor their inputs.

Sets are bits of an integer: with steps ``a = f(x)``, ``b = g(y)``, ``c = a + b`` the ancestors of c are ``0b111``.
They are computed for all values in one sweep. Otherwise every pass of a deep network would walk the whole network, and
a network may have as many passes as layers.
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
    """Sets of the steps that values are computed from.

    Args:
      flow: batch flow of the program.
      is_whole: whether a value exists without any pass: a whole value, or an argument.
    """

    def __init__(self, flow: Flow, is_whole: Callable[[Var], bool]) -> None:
        self.flow = flow
        self.is_whole = is_whole

    @functools.cached_property
    def ancestors(self) -> dict[Var, Steps]:
        """The per-node steps behind every value, in whichever passes they run.

        For a whole value, the per-node steps behind its operands.
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
        """The steps of a pass, for every value.

        Args:
          is_leaf: whether a value, in a form, is an input of the pass.

        Returns:
          Two sets for every value: the steps that the pass evaluates for it, and the steps behind the inputs it reads.
        """
        states, position = self.flow.states, self.flow.position
        found: dict[Var, tuple[Steps, Steps]] = {}
        own: dict[Var, tuple[Steps, Steps]] = {}  # the same for a node's own estimate of a whole value

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
        """Per-node scalar operations of every step, float64 ``[steps]``; 0 for steps that run once."""
        return np.array([step.flops if step.per_node else 0 for step in self.flow.steps], np.float64)

    def per_node_flops(self, steps: Steps) -> float:
        """Per-node scalar operations of a set of steps."""
        if not steps:
            return 0.0
        size = (steps.bit_length() + 7) // 8
        bits = np.unpackbits(np.frombuffer(steps.to_bytes(size, "little"), np.uint8), bitorder="little")
        return float(self.flops[: bits.size] @ bits[: self.flops.size])

    def union(self, values: Iterable[Var], sets: dict[Var, Steps]) -> Steps:
        """The union of the sets of some values; a value without a set adds nothing."""
        found = 0
        for var in values:
            found |= sets.get(var, 0)
        return found

    def contains(self, steps: Steps, step: Step) -> bool:
        """Whether a set contains a step. The step must have a result."""
        return bool(steps >> self.flow.position[step.eqn.outvars[0]] & 1)


def merge_operand_sets(position: int, read: Iterable[tuple[Steps, Steps]]) -> tuple[Steps, Steps]:
    """The union of the operands' sets, with the step itself added to the evaluated ones.

    Args:
      position: of the step in the flow.
      read: for each operand, the steps evaluated for it and the steps behind the inputs read for it.
    """
    makes, reads = 1 << position, 0
    for evaluated, behind in read:
        makes |= evaluated
        reads |= behind
    return makes, reads
