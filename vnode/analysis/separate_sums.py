"""Splits a pass that sums many large gradients into passes that sum some each, from operands that nodes keep.

Knows schedules and descriptions. Must not know devices or how anything is evaluated.

Before, the one pass of a step has a gradient per layer, and as many more of each as sums wait in tree order::

    pass: for node: forward, backward; dw1 += x1^T g1; dw2 += x2^T g2; ...

After, the pass keeps the operands of the products, which are small where a node has few examples, and each following
pass sums some of the gradients::

    pass: for node: forward, backward; keep x1, g1, x2, g2, ...
    pass: for node: dw1 += x1^T g1
    pass: for node: dw2 += x2^T g2

So sums wait for one part of the gradients at a time. Nothing is computed twice. The split depends on the program and on
the number of nodes, not on devices.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.extend.core import Var

from vnode.analysis.forms import Form, Partial, Slice
from vnode.analysis.passes import Accumulator, Pass, Schedule, Stage, nbytes
from vnode.analysis.recipe import Evaluation, Key, recipe
from vnode.analysis.states import Flow
from vnode.operators import Algebra

LEAST = 128 << 10
"""Bytes from which a sum is formed in a pass of its own: such a sum is sent by itself, too."""

PARTS = 8
"""Passes into which sums are divided, at most."""


def separate_sums(made: Schedule, pending: int) -> Schedule:
    """A schedule whose passes sum fewer gradients at a time, where that takes less memory.

    Args:
      made: the schedule.
      pending: how many sums wait for each that is formed, on a device that has all nodes.
    """
    if not pending:
        return made
    stages = [each for stage in made.stages for each in divided_stage(made.flow, inside(stage, pending), pending)]
    return dataclasses.replace(made, stages=tuple(stages))


def inside(stage: Stage, pending: int) -> Stage:
    """A stage whose loops and branches with passes of their own have these divided."""
    once = [
        dataclasses.replace(action, schedules=tuple(separate_sums(inner, pending) for inner in action.schedules))
        if action.schedules
        else action
        for action in stage.once
    ]
    return Stage(tuple(once), stage.nodes)


def divided_stage(flow: Flow, stage: Stage, pending: int) -> list[Stage]:
    """A stage, or several with a pass each in its place."""
    if stage.nodes is None or any(
        isinstance(action, Evaluation) and action.step.eqn.effects for action in stage.nodes.recipe.actions
    ):
        return [stage]
    products = products_of(flow, stage.nodes)
    groups = in_groups([a for a in stage.nodes.accumulators if a.var in products])
    if len(groups) < 2:
        return [stage]
    kept = {key: None for group in groups for a in group for key in products[a.var]}
    made = [key for key in kept if key not in stage.nodes.recipe.leaves]
    total = sum(a.bytes for group in groups for a in group)
    saved = pending * (total - max(sum(a.bytes for a in group) for group in groups))
    if 2 * sum(nbytes(var) for var, _ in made) > saved:
        return [stage]
    later = {a.var for group in groups for a in group}
    first = part(
        flow,
        stage.nodes,
        [a for a in stage.nodes.accumulators if a.var not in later],
        [*stage.nodes.collected, *(key for key in made if key not in stage.nodes.collected)],
        set(),
    )
    return [Stage(stage.once, first), *(Stage((), part(flow, stage.nodes, group, [], set(kept))) for group in groups)]


def products_of(flow: Flow, nodes: Pass) -> dict[Var, list[tuple[Var, Slice]]]:
    """The large sums whose pieces are products of batched values, transposed and added maybe, with these values."""
    makers = {
        var: action
        for action in nodes.recipe.actions
        if isinstance(action, Evaluation) and action.description is not None
        for var, form in action.made
        if isinstance(form, Partial)
    }

    def operands_of(var: Var) -> list[tuple[Var, Slice]] | None:
        action = makers.get(var)
        if action is None or action.description is None:
            return None
        found: list[tuple[Var, Slice]] = []
        for atom, form in zip(action.step.eqn.invars, action.operands, strict=True):
            if isinstance(atom, Var) and isinstance(form, Partial):
                several = operands_of(atom)
            elif isinstance(atom, Var) and isinstance(form, Slice) and flow.states[atom].form == form:
                several = [(atom, form)] if action.description.has(Algebra.CONTRACTS) else None
            else:
                several = None
            if several is None:
                return None
            found += several
        return found

    large = [a for a in nodes.accumulators if a.bytes >= LEAST and jnp.issubdtype(a.dtype, jnp.inexact)]
    return {a.var: found for a in large if (found := operands_of(a.var))}


def in_groups(sums: list[Accumulator]) -> list[list[Accumulator]]:
    """Sums in order, in groups of about the same bytes."""
    most = max(max((a.bytes for a in sums), default=0), sum(a.bytes for a in sums) // PARTS)
    groups: list[list[Accumulator]] = []
    for a in sums:
        if groups and sum(each.bytes for each in groups[-1]) + a.bytes <= most:
            groups[-1].append(a)
        else:
            groups.append([a])
    return groups


def part(flow: Flow, nodes: Pass, sums: list[Accumulator], collected: list[tuple[Var, Slice]], given: set[Key]) -> Pass:
    """The pass of some sums, in which nodes are given what they were, and more."""
    requests: list[tuple[Var, Form]] = [(a.var, flow.states[a.var].form) for a in sums]

    def is_leaf(var: Var, form: Form) -> bool:
        return (var, form) in given or (var, form) in nodes.recipe.leaves

    made = recipe(flow, [*requests, *collected], flow.node_sizes, is_leaf=is_leaf)
    return Pass(nodes.level, made, tuple(sums), tuple(collected), bool(given))
