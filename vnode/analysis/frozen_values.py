"""Decisions: values that a later pass must not compute again, because it would have to find the very same bits.

Knows batch flow and descriptions. Must not know passes' contents, devices or how anything is evaluated.

A compiler may round one computation differently in two programs, so a pass that computes a value again gets it up to
rounding. That is harmless, unless the value is held against what became of it when it was first computed. An example
is the worst of the batch if its loss *equals* the greatest loss; a token that was counted for one expert must not go
to another one. Two kinds of decisions are found:

- A reduction that picks (``max`` over examples, or the whole batch at once for a sort or an argmax), where a later
  pass holds what was picked against what it was picked from.
- A reduction of discrete values (a count of tokens above a threshold, a number of examples per class), where a later
  pass reads those values as well.

In both cases what the reduction picked from, or counted, is kept from the first computation: by walking back from the
reduced operand over equations that give the same bits whatever the compiler does.
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
    """Batched values to be kept, each with the first pass that must be given it.

    Args:
      flow: batch flow of the step.
      steps: those of its steps that are `living`.
      reads: their `first_reads`.

    Returns:
      For every such value the level of a pass. Earlier passes may compute it.
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
    """The equations that a result or an effect depends on, in order."""
    wanted = {atom for atom in flow.program.outputs if isinstance(atom, Var)}
    steps: list[Step] = []
    for step in reversed(flow.steps):
        if step.eqn.effects or not wanted.isdisjoint(step.eqn.outvars):
            wanted.update([atom for atom in step.eqn.invars if isinstance(atom, Var)])
            steps.append(step)
    return steps[::-1]


def first_read_levels(flow: Flow, steps: Sequence[Step]) -> dict[Var, int]:
    """For every value that nodes read completed, or something made of it once: the level of the first that do."""
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
    """The batched values that a value consists of, bit for bit, or that fix its discrete elements."""
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
    """Whether equal operands give equal results in every program: nothing is rounded, or only what was picked."""
    description = step.description
    if not step.per_node or description is None:
        return False
    picks = bool(description.reduced) and all(monoid in SELECTING_MONOIDS for monoid in description.reduced.values())
    return description.has(Algebra.MOVES) or picks or not any(map(is_inexact, step.eqn.invars))


def is_inexact(atom: Atom) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", jnp.int32), jnp.inexact)


def is_compared_with_source(flow: Flow, steps: Sequence[Step], origin: list[Var], picked: Var) -> bool:
    """Whether an equation that is not continuous reads both what was picked and what it was picked from.

    A softmax over the batch does not: it subtracts the greatest logit, and a last bit more or less does not matter.
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
    """Whether a last bit more or less may change an equation's results altogether."""
    return not (description.has(Algebra.MOVES | Algebra.CONTINUOUS) or description.linear or description.reduced)


def may_select(description: OperatorDescription) -> bool:
    """Whether elements of an equation's results may be those of its operands, or each depend on few of them."""
    return not description.has(Algebra.CONTRACTS) and all(
        monoid in SELECTING_MONOIDS for monoid in description.reduced.values()
    )
