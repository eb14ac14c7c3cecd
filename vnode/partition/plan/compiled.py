"""A plan that fits as it is compiled: where a prediction was too low, the search goes on with that much less.

Knows plans, and what a compiler makes of them. Must not know how a plan is searched.

A prediction is a model of a compiler, and off by some per cent, for some programs by more. Of the same step on the same
machine it is off by about as much from one plan to the next of its kind, so that one or two more searches do. Where
nothing fits in that much less, it was that plan that was off: the next limit is half-way back. Where nothing is
predicted to fit at all, what is predicted to take a little more is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from vnode.errors import MemoryLimitError, layout_message
from vnode.partition.plan.plan import Plan
from vnode.partition.plan.remedies import placed
from vnode.show.units import several, size

ROUNDS = 4
"""How many plans are compiled at most."""

NEAR = 0.02
"""By which share limits in which nothing and something fits, as predicted, are apart at least for one in between."""

BEYOND = 1.25
"""How many times the limit a plan may be predicted to take that is compiled, where nothing less is."""

LESS = 0.8
"""By which share the limit is lowered where the compiler refuses a program, and does not say what that needs."""


def fits_as_compiled(search: Callable[[int], Plan], memory: int, devices: Sequence[Any]) -> Plan:
    """Searches and compiles until a plan fits.

    Args:
      search: from bytes that one device may hold, as predicted, to a plan.
      memory: bytes that it may hold, as compiled.
      devices: in the order of the machine's; they need not be there, if there is a compiler for them.

    Returns:
      The first plan that fits, with what the compiler made of it (`Plan.acceptance`).

    Raises:
      MemoryLimitError: nothing fits as predicted, or nothing does as compiled.
    """
    allowed = most = memory  # `most`: what may be allowed and gives another plan
    nothing = 0  # in how much nothing fits as predicted
    tried: list[str] = []
    fits = False  # whether one that was compiled is predicted to fit
    first: MemoryLimitError | None = None  # says what would be predicted to fit
    while len(tried) < ROUNDS:
        try:
            plan = search(allowed)
        except MemoryLimitError as error:
            if first is not None and not tried:
                raise first from None
            first = first or error
            nothing = allowed
            if not tried:
                allowed = most = int(BEYOND * memory)
            elif most - nothing <= max(1, NEAR * most):  # 1: there is no whole number in between
                raise MemoryLimitError(refused(memory, tried, fits)) from error
            else:
                allowed = (nothing + most) // 2
            continue
        plan = dataclasses.replace(plan, memory=memory)
        predicted = plan.figures.memory
        most, fits = predicted - 1, fits or predicted <= memory
        said = f"{placed(plan.name, plan.mesh)}: predicted {size(predicted)}, "
        try:
            found = plan.accept(devices)
        except MemoryLimitError:
            tried.append(f"{said}refused by the compiler")
            less = int(LESS * predicted)
        else:
            if found.memory <= memory:
                return dataclasses.replace(plan, acceptance=found)
            tried.append(f"{said}compiled {size(found.memory)}")
            less = min(int(memory * predicted / found.memory), most)
        allowed = less if less > nothing else (nothing + most) // 2
    raise MemoryLimitError(refused(memory, tried, fits))


def refused(memory: int, tried: Sequence[str], fits: bool) -> str:
    """The message for when nothing that was compiled fits.

    Args:
      memory: bytes that a device may hold.
      tried: what was compiled.
      fits: whether some of that is predicted to fit.
    """
    as_predicted = ["or take a plan as it is predicted: without compiled_for"]
    return layout_message(
        f"no plan fits in {size(memory)} a device as it is compiled, of {several(len(tried), 'plan')}.",
        facts=[*tried, *["nothing is predicted to fit either"][: not fits]],
        remedies=["allow more memory, or use more virtual nodes or more devices", *as_predicted[:fits]],
    )
