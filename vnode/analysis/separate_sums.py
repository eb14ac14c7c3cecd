"""Splits a pass that sums many large gradients into passes that sum some each, from operands that nodes keep.

Knows schedules and descriptions. Must not know devices or how anything is evaluated.

Before, the one pass of a step has a gradient per layer, and as many more of each as sums wait in tree order::

    pass: for node: forward, backward; dw1 += x1^T g1; dw2 += x2^T g2; ...

After, the pass keeps the operands of the products. They are small if a node has few examples. Each following pass sums
some of the gradients::

    pass: for node: forward, backward; keep x1, g1, x2, g2, ...
    pass: for node: dw1 += x1^T g1
    pass: for node: dw2 += x2^T g2

So the pending sums of the tree exist for some gradients at a time. A very large gradient is summed in several passes, a
part in each (`vnode.analysis.sums_in_parts`). The stacked gradients of a loop over layers are one such gradient
(`vnode.analysis.products_after_loops`). Nothing is computed twice. The split depends on the program and on the
number of nodes, not on devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax.extend.core import Var

from vnode.analysis.forms import WHOLE, Form, Partial, Slice
from vnode.analysis.passes import Accumulator, Pass, Schedule, Stage, nbytes
from vnode.analysis.products_after_loops import products_after_loops
from vnode.analysis.recipe import Conversion, Evaluation, build_recipe
from vnode.analysis.schedule import merge_stages
from vnode.analysis.states import Flow
from vnode.analysis.sums_in_parts import DividedSum, Makers, divide_sum, replace_divided_sums
from vnode.operators import Monoid, Role

Operand = tuple[Var, Slice]
"""A batched value that nodes keep, with its form."""

MIN_SUM_BYTES = 128 << 10
"""The least bytes of a sum that gets a pass of its own. Such a sum also gets an all-reduce of its own."""

MAX_PARTS = 8
"""The largest number of parts, of about equal bytes, into which sums are divided; each part has a pass."""


def separate_sums(made: Schedule, pending: int, in_parts: bool = True) -> Schedule:
    """A schedule whose passes sum fewer gradients at a time, where that takes less memory.

    Args:
      made: the schedule.
      pending: the number of pending sums for each accumulator, on a device that has all nodes.
      in_parts: whether single sums may be divided.
    """
    if not pending:
        return made
    flow, stages, read = made.flow, list[Stage](), partials_read(made.passes)
    for stage in made.stages:
        flow, several = divide_stage(
            flow, separate_nested_sums(stage, pending, in_parts), pending, read if in_parts else None
        )
        stages += several
    return dataclasses.replace(made, flow=flow, stages=tuple(merge_stages(stages)))


def separate_nested_sums(stage: Stage, pending: int, in_parts: bool) -> Stage:
    """A stage in which the nested schedules of loops and branches have separate sums."""
    once = [
        dataclasses.replace(
            action, schedules=tuple(separate_sums(inner, pending, in_parts) for inner in action.schedules)
        )
        if action.schedules
        else action
        for action in stage.once_actions
    ]
    return Stage(tuple(once), stage.node_pass)


def partials_read(passes: Iterable[Pass]) -> set[Var]:
    """The partial values that equations read."""
    found: set[Var] = set()
    for action in (action for nodes in passes for action in nodes.recipe.actions):
        if isinstance(action, Conversion):
            found |= {action.var} if isinstance(action.source, Partial) else set()
        else:
            atoms = zip(action.step.eqn.invars, action.operands, strict=True)
            found |= {atom for atom, form in atoms if isinstance(atom, Var) and isinstance(form, Partial)}
    return found


def divide_stage(flow: Flow, stage: Stage, pending: int, read: set[Var] | None) -> tuple[Flow, list[Stage]]:
    """Divides a stage into several, with a pass each; returns the flow of the rewritten program, and the stages.

    Args:
      flow: batch flow of the program.
      stage: a stage of it.
      pending: the number of pending sums for each accumulator.
      read: the partial values that equations read, in any pass; None if no sum is to be divided.
    """
    nodes = stage.node_pass
    if nodes is None or any(isinstance(a, Evaluation) and a.step.eqn.effects for a in nodes.recipe.actions):
        return flow, [stage]
    before, large = (
        flow,
        [a for a in nodes.accumulators if a.bytes >= MIN_SUM_BYTES and jnp.issubdtype(a.dtype, jnp.inexact)],
    )
    if read is not None:
        after = products_after_loops(flow, {a.var for a in large} - read)
        smaller = large_products(after, nodes, large, partial_makers(after), pending)
        flow = products_after_loops(flow, smaller.keys() - read)  # only those that are worth it
    makers = partial_makers(flow)
    products = large_products(flow, nodes, large, makers, pending)
    large = [a for a in large if a.var in products]
    divided = {} if read is None else divide_sums(flow, large, makers, read)
    groups = group_sums([each for a in large for each in sum_parts(a, divided)])
    if len(groups) < 2:
        return before, [stage]
    kept = {key: None for a in large for key in products[a.var]}
    made = [key for key in kept if key not in nodes.recipe.leaves]
    saved = pending * (sum(a.bytes for a in large) - max(sum(a.bytes for a in group) for group in groups))
    if 2 * sum(nbytes(var) for var, _ in made) > saved:
        return before, [stage]
    flow = replace_divided_sums(flow, list(divided.values())) if divided else flow
    joins = {
        part: Evaluation(step, step.operands, step.results)
        for each in divided.values()
        for part, step in zip(each.parts, each.joins, strict=True)
    }
    rest = [a for a in nodes.accumulators if a.var not in products]
    first = sum_pass(flow, nodes, rest, [*nodes.collected, *(key for key in made if key not in nodes.collected)], set())
    stages = [Stage(stage.once_actions, first if first.recipe.requests else None)]
    for group in groups:
        stages.append(Stage((), sum_pass(flow, nodes, group, [], set(kept))))
        stages.append(Stage(tuple(joins[a.var] for a in group if a.var in joins), None))
    return flow, stages


def partial_makers(flow: Flow) -> Makers:
    """The per-node evaluation that makes each partial value."""
    return {
        step.eqn.outvars[0]: Evaluation(step, step.operands, step.results, step.description, step.location)
        for step in flow.steps
        if step.per_node and step.description is not None and isinstance(step.results[0], Partial)
    }


def large_products(
    flow: Flow, nodes: Pass, large: Sequence[Accumulator], makers: Makers, pending: int
) -> dict[Var, list[Operand]]:
    """The large sums that are products of smaller batched values, with these values.

    Examples are a product of two activations, or a scatter-add of rows into a table. The products may be transposed and
    added.
    """

    def operands_of(var: Var) -> list[Operand] | None:
        action = makers.get(var)
        if action is None or action.description is None:
            return None
        found: list[Operand] = []
        sums = action.location is not None and action.description.reduced.get(action.location.factor) is Monoid.SUM
        for i, (atom, form) in enumerate(zip(action.step.eqn.invars, action.operands, strict=True)):
            several: list[Operand] | None = None
            if not isinstance(atom, Var):
                pass
            elif isinstance(form, Partial):
                several = operands_of(atom)
            elif isinstance(form, Slice) and flow.states[atom].form == form:
                several = [(atom, form)] if sums else None
            elif form == WHOLE and flow.states[atom].zero and i in action.description.role(Role.ONCE):
                several = []
            if several is None:
                return None
            found += several
        return found

    found = {a: operands for a in large if (operands := operands_of(a.var))}

    def is_smaller(a: Accumulator) -> bool:
        made = {key for key in found[a] if key not in nodes.recipe.leaves}
        return 2 * sum(nbytes(var) for var, _ in made) <= pending * a.bytes

    return {a.var: keys for a, keys in found.items() if is_smaller(a)}


def divide_sums(flow: Flow, sums: Sequence[Accumulator], makers: Makers, read: set[Var]) -> dict[Var, DividedSum]:
    """Divides each sum that is larger than one of `MAX_PARTS` equal parts, if that is possible.

    Divides none if such parts would have less than `MIN_SUM_BYTES` bytes: more passes take longer, and save little.
    """
    most = sum(a.bytes for a in sums) // MAX_PARTS
    if most < MIN_SUM_BYTES:
        return {}
    counts = {a.var: round(a.bytes / most) for a in sums if a.var not in read}
    found = {var: divide_sum(flow, makers, var, count) for var, count in counts.items() if count > 1}
    return {var: divided for var, divided in found.items() if divided is not None}


def sum_parts(a: Accumulator, divided: dict[Var, DividedSum]) -> list[Accumulator]:
    """A sum, or its parts."""
    if a.var not in divided:
        return [a]
    return [dataclasses.replace(a, var=part, divided_value=a.var) for part in divided[a.var].parts]


def group_sums(sums: list[Accumulator]) -> list[list[Accumulator]]:
    """Groups sums, in order, into groups of about equal bytes."""
    most = max(max((a.bytes for a in sums), default=0), sum(a.bytes for a in sums) // MAX_PARTS)
    groups: list[list[Accumulator]] = []
    for a in sums:
        if groups and sum(each.bytes for each in groups[-1]) + a.bytes <= most:
            groups[-1].append(a)
        else:
            groups.append([a])
    return groups


def sum_pass(
    flow: Flow, nodes: Pass, sums: list[Accumulator], collected: Sequence[Operand], given: set[Operand]
) -> Pass:
    """A pass over some of the sums of another pass.

    Args:
      flow: batch flow of the program.
      nodes: the other pass; its inputs are inputs of this one too.
      sums: accumulators of the new pass.
      collected: values that it keeps.
      given: further inputs: values that an earlier pass has kept.
    """
    requests: list[tuple[Var, Form]] = [(a.var, flow.states[a.var].form) for a in sums]

    def is_leaf(var: Var, form: Form) -> bool:
        return (var, form) in given or (var, form) in nodes.recipe.leaves

    made = build_recipe(flow, [*requests, *collected], flow.node_sizes, is_leaf=is_leaf)
    return Pass(nodes.level, made, tuple(sums), tuple(collected), bool(given))
