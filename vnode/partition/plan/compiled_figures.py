"""A model's figures of a plan -> the compiler's: memory and collectives, and time if the compiler estimates cycles.

    figures_as_compiled(figures, stats, machine, order, "compiled")   # Figures with source="compiled"

Memory is the compiler's. Seconds of computation are its estimated cycles over the clock rate of the kind, if it
estimates any, and the model's otherwise. Seconds of exchange are those of the compiled collectives on the machine's
links. The share of the two that overlaps is the model's.

Knows figures, compiled programs and machines. Must not know how a program is compiled, or plans compared.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vnode.partition.compiler.stats import CompiledStats
from vnode.partition.cost.collective_cost import NAMES
from vnode.partition.hlo import Collective, bytes_by_kind
from vnode.partition.machine import Machine
from vnode.partition.machine.known_kinds import CLOCKS
from vnode.partition.plan.predict import Figures

OPCODES = NAMES | {
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "all_gather",
}
"""`Machine.collective`'s names of the opcodes of HLO."""


def figures_as_compiled(
    figures: Figures, stats: CompiledStats, machine: Machine, order: np.ndarray, source: str
) -> Figures:
    """The figures of a step as compiled.

    Args:
      figures: the model's figures.
      stats: the compiler's figures of the program.
      machine: the machine that it runs on.
      order: the numbers of the machine's devices, in the order in which the program counts them.
      source: ``"compiled"``, or ``"draft"`` where the program was compiled with few optimizations.

    Returns:
      The figures.
    """
    clock = CLOCKS.get(machine.kinds[0].name, 0.0) if len(machine.kinds) == 1 else 0.0
    timed = bool(stats.cycles and clock)
    compute = stats.cycles / clock if timed else figures.compute
    exchange = sum(exchange_seconds(each, machine, order) for each in stats.collectives)
    seconds = compute + exchange * exposed_share(figures) + figures.transfer if timed else figures.seconds
    return dataclasses.replace(
        figures,
        seconds=seconds,
        compute=compute,
        exchange=exchange if timed else figures.exchange,
        sent=sum(each.sent for each in stats.collectives),
        arguments=stats.arguments,
        results=stats.outputs - stats.aliased,
        temporary=stats.temporary,
        collectives=bytes_by_kind(stats.collectives),
        source=source,
        timed=timed,
    )


def exposed_share(figures: Figures) -> float:
    """The share of the exchange that no computation hides, by the model's timeline."""
    if not figures.exchange:
        return 1.0
    alone = figures.seconds - figures.compute - figures.transfer
    return min(max(alone / figures.exchange, 0.0), 1.0)


def exchange_seconds(each: Collective, machine: Machine, order: np.ndarray) -> float:
    """Seconds that compiled collectives take on the links of a machine; groups that are not listed are neighbours."""
    numbers = order.ravel()
    if each.kind == "collective-permute":
        groups, pairs = [[int(n) for n in numbers]], [(a, b) for a, b in each.groups] or None
    else:
        size = max(each.devices, 1)
        listed = each.groups or [tuple(range(i, i + size)) for i in range(0, len(numbers), size)]
        groups, pairs = [[int(numbers[i]) for i in group] for group in listed], None
    cost = machine.collective(OPCODES[each.kind], groups, pairs=pairs)
    return each.runs * cost.seconds(each.bytes)
