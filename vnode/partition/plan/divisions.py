"""How the dear operations of a step are divided, in words.

Knows flows through the program of a row. Must not know machines, costs, nor who shows it.
"""

from __future__ import annotations

import collections
import dataclasses

from vnode.analysis.program import where
from vnode.operators import Algebra
from vnode.partition.plan.row import RowProgram
from vnode.spmd.flow import Flow, Step


@dataclasses.dataclass(frozen=True)
class Division:
    """How an operation of the step is divided.

    Attributes:
      where: its line.
      operation: its name.
      count: how many equations of all passes are alike in this.
      cut: how operands and results lie while it is computed.
    """

    where: str
    operation: str
    count: int
    cut: str


def divisions_of(row: RowProgram, flow: Flow) -> tuple[Division, ...]:
    """Products and windows in what nodes compute, the dearest first; those of one line that are alike are one."""
    found: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
    for each in row.flows(flow):
        _collect(dataclasses.replace(each.body, steps=each.steps), 1, found)
    order = sorted(found.items(), key=lambda item: -sum(item[1]))
    return tuple(Division(line, name, len(costs), cut) for (line, name, cut), costs in order)


def _collect(flow: Flow, times: int, found: dict[tuple[str, str, str], list[float]]) -> None:
    for step in flow.steps:
        for body in step.bodies:
            _collect(body, times * (step.region.times if step.region is not None else 1), found)
        description = None if step.region is not None else flow.program.describe(step.eqn)
        if description is None or not description.has(Algebra.CONTRACTS):
            continue
        found[where(step.eqn), step.eqn.primitive.name, in_words(step)].append(times * description.flops)


def in_words(step: Step) -> str:
    """How an equation's operands and results lie."""
    choice = step.choice
    operands, results = (step.operands, step.results) if choice is None else (choice.operands, choice.results)
    return f"{' x '.join(map(str, operands))} -> {', '.join(map(str, results))}"
