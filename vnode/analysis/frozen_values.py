"""Batch flow -> the values that later passes must be given, because recomputation may not return the same bits.

Knows batch flow and descriptions. Must not know passes' contents, devices or how anything is evaluated.

    pass 0: loss = f(x);  worst = max(loss)        keep loss: pass 1 compares it with worst
    pass 1: hit = (loss == worst)

A compiler may round one computation differently in two programs. A pass that recomputes a value returns it up to
rounding. That matters only where the value is compared with a result of its first computation. Two cases are found:

- A selecting reduction (``max`` over examples, or the whole batch for a sort or an argmax), whose result a later pass
  compares with its operand.
- A reduction of discrete values (a count of tokens per expert), which a later pass reads as well.

In both cases the operand is kept from the first computation. It is found by walking back from the reduced operand over
equations that are bitwise exact with any compiler.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax.extend.core import Var

from vnode.analysis.forms import Partial, Slice, Whole
from vnode.analysis.program import Atom
from vnode.analysis.states import Flow, Step
from vnode.operators import Algebra, Monoid, OperatorDescription

SELECTING_MONOIDS = (Monoid.MAX, Monoid.MIN)


def find_frozen_values(flow: Flow, steps: Sequence[Step], reads: Mapping[Var, int]) -> dict[Var, int]:
    """The batched values to keep, each with the first pass that must be given it.

    Args:
      flow: batch flow of the step.
      steps: the flow's `live_steps`.
      reads: the `first_read_levels` of these steps.

    Returns:
      For every such value the level of that pass. Earlier passes may compute the value.
    """
    given = set(flow.program.inputs) | set(flow.program.constants)
    sources: dict[Var, list[Var]] = {}
    kept: dict[Var, int] = {}

    def keep(var: Var, level: int) -> None:
        kept[var] = min(level, kept.get(var, level))

    picked: list[Var] = [var for var in flow.gathered if not flow.states[var].materialized]
    for step in steps:
        if not step.per_node or step.description is None:
            continue
        for result, form in zip(step.eqn.outvars, step.results, strict=True):
            if not isinstance(form, Partial) or result not in reads:
                continue
            sliced = [a for a, f in zip(step.eqn.invars, step.operands, strict=True) if isinstance(f, Slice)]
            sources[result] = [var for atom in sliced for var in bitwise_sources(flow, given, atom)]
            if form.monoid in SELECTING_MONOIDS:
                picked.append(result)
            elif not any(map(is_inexact, sources[result])):
                for var in sources[result]:
                    keep(var, reads[result])
    for var in picked:
        if var not in reads:
            continue
        found = sources[var] if var in sources else list(bitwise_sources(flow, given, var))
        held = is_compared_with_source(flow, steps, found, var)
        for origin in found:
            if held or not is_inexact(origin):
                keep(origin, reads[var])
    return kept


def live_steps(flow: Flow) -> list[Step]:
    """The steps that an output or an effect depends on, in order."""
    wanted = {atom for atom in flow.program.outputs if isinstance(atom, Var)}
    steps: list[Step] = []
    for step in reversed(flow.steps):
        if step.eqn.effects or not wanted.isdisjoint(step.eqn.outvars):
            wanted.update([atom for atom in step.eqn.invars if isinstance(atom, Var)])
            steps.append(step)
    return steps[::-1]


def first_read_levels(flow: Flow, steps: Sequence[Step]) -> dict[Var, int]:
    """For every value that nodes read completed, directly or through steps that run once, the level of the first read.

    Args:
      flow: batch flow of the step.
      steps: the flow's `live_steps`.
    """
    reads: dict[Var, int] = {}
    for step in reversed(steps):
        behind = min([reads[var] for var in step.eqn.outvars if var in reads], default=math.inf)
        if not step.per_node and behind == math.inf:
            continue
        for atom, form in zip(step.eqn.invars, step.operands, strict=True):
            if not isinstance(atom, Var):
                continue
            own = flow.states[atom]
            completed = isinstance(form, Whole) or (isinstance(form, Slice) and not isinstance(own.form, Slice))
            completed = completed and not own.estimated
            level = step.level if step.per_node and completed else math.inf
            if not step.per_node or isinstance(form, Partial):
                level = min(level, behind)
            if level < math.inf:
                reads[atom] = min(int(level), reads.get(atom, int(level)))
    return reads


def bitwise_sources(flow: Flow, given: set[Var], atom: Atom) -> Iterator[Var]:
    """The batched values from which bitwise exact equations compute a value."""
    seen: set[Var] = set()
    stack = [atom]
    while stack:
        var = stack.pop()
        if not isinstance(var, Var) or var in seen or var in given:
            continue
        seen.add(var)
        state = flow.states[var]
        if not isinstance(state.form, Slice) or state.materialized:
            continue
        step = flow.steps[flow.position[var]]
        if is_bitwise_exact(step):
            stack += step.eqn.invars
        else:
            yield var


def is_bitwise_exact(step: Step) -> bool:
    """Whether equal operands give equal bits in every program: the equation moves, selects, or is discrete."""
    description = step.description
    if not step.per_node or description is None:
        return False
    picks = bool(description.reduced) and all(monoid in SELECTING_MONOIDS for monoid in description.reduced.values())
    return description.has(Algebra.MOVES) or picks or not any(map(is_inexact, step.eqn.invars))


def is_inexact(atom: Atom) -> bool:
    """Whether an array is of floating-point or complex numbers."""
    return jnp.issubdtype(getattr(atom.aval, "dtype", jnp.int32), jnp.inexact)


def is_compared_with_source(flow: Flow, steps: Sequence[Step], origin: list[Var], picked: Var) -> bool:
    """Whether a discontinuous equation reads both a selected value and what it was selected from.

    A softmax over the batch does not: it subtracts the greatest logit, where one ulp does not matter.

    Args:
      flow: batch flow of the step.
      steps: the flow's `live_steps`.
      origin: the values that `picked` was selected from.
      picked: the selected value.
    """
    sources, results = set(origin), {picked}
    for step in steps:
        reads_source = reads_result = False
        for atom, form in zip(step.eqn.invars, step.operands, strict=True):
            if isinstance(atom, Var):
                whole = isinstance(form, Whole) or not isinstance(flow.states[atom].form, Slice)
                reads_result |= atom in results and (whole or atom is not picked)
                reads_source |= atom in sources and not whole
        if not reads_source and not reads_result:
            continue
        description = step.description or flow.program.describe(step.eqn)
        if reads_source and reads_result and (description is None or may_be_discontinuous(description)):
            return True
        if description is None or may_select(description):
            outputs = [var for var in step.eqn.outvars if var is not picked]
            sources.update(outputs if reads_source else ())
            results.update(outputs if reads_result else ())
    return False


def may_be_discontinuous(description: OperatorDescription) -> bool:
    """Whether one ulp in an operand may change an equation's results by more than rounding."""
    return not (description.has(Algebra.MOVES | Algebra.CONTINUOUS) or description.linear or description.reduced)


def may_select(description: OperatorDescription) -> bool:
    """Whether an equation's results may be elements of its operands, or elementwise functions of them."""
    return not description.has(Algebra.CONTRACTS) and all(
        monoid in SELECTING_MONOIDS for monoid in description.reduced.values()
    )
