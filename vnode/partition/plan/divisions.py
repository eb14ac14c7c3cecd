"""Flows through nodes' programs -> the sharding of their expensive operations, in words.

Knows flows through the program of a replica. Must not know machines, costs, nor who shows it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from vnode.analysis.program import source_line
from vnode.operators import Algebra, Free, Reduced, Windowed
from vnode.partition.plan.replica import NodeFlow
from vnode.spmd.op_sharding import FactorSharding, OpSharding
from vnode.spmd.sharding_flow import Flow, Step


@dataclasses.dataclass(frozen=True)
class DividedOperation:
    """The sharding of an operation of the step.

    Attributes:
      where: its source line.
      operation: its name.
      count: number of equations of all passes that are equal in this.
      cut: layouts of its operands and results.
      axes: the part that each mesh axis divides, one of `PARTS`; or the branch that contains the operation, by its
        index along the axis (``"branch 0"``). Other axes are left out.
    """

    where: str
    operation: str
    count: int
    cut: str
    axes: Mapping[str, str] = dataclasses.field(default_factory=dict)


PARTS = {
    "batch": (270, "a dimension that all operands and the result have"),
    "left": (150, "a dimension of the result that the first operand has alone"),
    "right": (90, "a dimension of the result that the second operand has alone"),
    "sum": (30, "what is summed: the result is in pieces"),
    "space": (330, "a dimension that windows slide along"),
    "blocks": (180, "nothing: each device computes its own blocks in turn, and the sizes are those of one block"),
    "branch": (60, "nothing: the operation is in a branch that is evaluated at one index only"),
    "other": (0, "indices that are looked up, shifted, or run along"),
}
"""The parts of an operation that a mesh axis can divide: a hue in degrees, and an explanation."""


def divisions_of(flows: Iterable[NodeFlow]) -> tuple[DividedOperation, ...]:
    """The products and windows of nodes' programs, the most expensive first; equal ones of one line count as one."""
    found: dict[Alike, list[float]] = collections.defaultdict(list)
    for each in flows:
        _collect(dataclasses.replace(each.body, steps=each.steps), 1, found, {})
    order = sorted(found.items(), key=lambda item: -sum(item[1]))
    return tuple(DividedOperation(line, name, len(costs), cut, dict(axes)) for (line, name, cut, axes), costs in order)


Alike = tuple[str, str, str, tuple[tuple[str, str], ...]]
"""The key of operations that are shown as one: line, name, layouts, and divided parts."""


def _collect(flow: Flow, times: int, found: dict[Alike, list[float]], at: Mapping[str, str]) -> None:
    for step in flow.steps:
        for number, body in enumerate(step.bodies):
            inside = at if step.branches is None else {**at, step.branches.axis: f"branch {number}"}
            if step.loop is not None:
                inside = {**at, **dict.fromkeys(step.loop.share.axes, "blocks")}
            _collect(body, times * (step.region.run_count if step.region is not None else 1), found, inside)
        description = None if step.region is not None else flow.program.describe(step.eqn)
        if description is None or not description.has(Algebra.CONTRACTS):
            continue
        choice = step.choice
        parts = {} if choice is None else {axis: part_of(choice, way) for way in choice.ways for axis in way.axes}
        axes = tuple(sorted({**at, **parts}.items()))
        found[source_line(step.eqn), step.eqn.primitive.name, in_words(step), axes].append(times * description.flops)


def part_of(choice: OpSharding, way: FactorSharding) -> str:
    """The part that the axes of a factor sharding divide."""
    if isinstance(way.split, Reduced):
        return "sum"
    if isinstance(way.split, Windowed):
        return "space"
    if not isinstance(way.split, Free):
        return "other"
    has = [any(f in way.lead for dim in dims for f in dim) for dims in choice.description.operands]
    return "batch" if all(has) else "left" if has[0] else "right"


def in_words(step: Step) -> str:
    """The layouts of an equation's operands and results, in words."""
    choice = step.choice
    operands, results = (step.operands, step.results) if choice is None else (choice.operands, choice.results)
    return f"{' x '.join(map(str, operands))} -> {', '.join(map(str, results))}"
