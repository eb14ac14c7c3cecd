"""The smallest number of virtual nodes whose program fits in memory, with fewer lanes if these may be fewer.

Knows how to ask a step for its compiled program at a number of nodes. Must not know jaxprs, or what a device holds.

Memory is that of one node's activations, which shrinks as nodes become more, and of accumulators, of which a tree needs
one more with each doubling of the nodes of a device. So it falls first and may rise at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from vnode.placement.placement import MOST_NODES, Placement
from vnode.plan.nodes.device_memory import memory_refusal, program_memory
from vnode.show.units import several, size
from vnode.step.virtual import VirtualStep, with_nodes


@dataclasses.dataclass(frozen=True)
class Trial:
    """One number of nodes that was compiled.

    Attributes:
      virtual_nodes: V.
      waves: nodes that the fullest device computes one after another.
      node_size: examples of a node.
      bytes: what the program needs on each device; None where the compiler refused it and did not say.
      fits: whether it is within the limit.
      lanes: how many there are; None: as many as nodes.
    """

    virtual_nodes: int
    waves: int
    node_size: int
    bytes: int | None
    fits: bool
    lanes: int | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class NodeSearch:
    """A search for the smallest number of nodes that fits; `str` of it is a table.

    Attributes:
      limit: bytes that a device may hold.
      trials: what was compiled, in this order.
      chosen: the smallest V that fits, or None.
    """

    limit: int
    trials: tuple[Trial, ...]
    chosen: int | None

    @property
    def lines(self) -> tuple[str, ...]:
        """The table, a line each."""
        head = (f"{'V':>8}  {'waves':>6}  {'a node':>8}  {'a device':>10}",)
        return head + tuple(
            f"{t.virtual_nodes:>8}  {t.waves:>6}  {t.node_size:>8}  {'?' if t.bytes is None else size(t.bytes, 2):>10}"
            + ("" if not t.fits else "  chosen" if t.virtual_nodes == self.chosen else "  fits")
            + ("" if t.fits else "  too much")
            + lanes_text(t.lanes)
            for t in sorted(self.trials, key=lambda t: t.virtual_nodes)
        )

    @property
    def verdict(self) -> str:
        """The outcome in a few words."""
        limit = f"in the {size(self.limit, 2)} of a device"
        if self.chosen is None:
            return f"no V fits {limit}"
        lanes = next((t.lanes for t in self.trials if t.fits and t.virtual_nodes == self.chosen), None)
        return f"V = {self.chosen}{lanes_text(lanes)}, the smallest that fits {limit}"

    @property
    def floor(self) -> str:
        """The number of nodes that needs least, of those tried, in a few words; empty if none is known."""
        known = [(trial.bytes, trial.virtual_nodes) for trial in self.trials if trial.bytes is not None]
        return f"of those tried V = {min(known)[1]} needs least, {size(min(known)[0], 2)}" if known else ""

    def __str__(self) -> str:
        return "\n".join([self.verdict, *self.lines])

    def __repr__(self) -> str:
        return f"NodeSearch({self.verdict}; {len(self.trials)} tried)"


def lanes_text(lanes: int | None) -> str:
    """A number of lanes as a suffix; empty if there are as many lanes as nodes.

    >>> lanes_text(4), lanes_text(1), lanes_text(None)
    (' in 4 lanes', ' in 1 lane', '')
    """
    return "" if lanes is None else f" in {several(lanes, 'lane')}"


def candidates(batch: int, unit: int, least: int = 1) -> list[int]:
    """Numbers of nodes that make sense, ascending.

    They are multiples of `unit` that divide the batch, so that nothing is padded; and, so that no two neighbours are
    more than twice apart, others whose last nodes are padded. The last one has one example per node, or is as large as
    there may be.

    Args:
      batch: examples of the global batch.
      unit: nodes that there are on all devices together in a wave.
      least: the smallest number of nodes allowed.

    Returns:
      The numbers, at least one.

    Example:
      >>> candidates(64, 4)
      [4, 8, 16, 32, 64]
      >>> candidates(2 * 47, 1)
      [1, 2, 4, 8, 16, 32, 47, 94]
      >>> candidates(10, 4)
      [4, 8, 12]
    """
    most = max(min(-(-batch // unit), MOST_NODES // unit), 1)
    divisors = [w for w in range(1, most + 1) if batch % (w * unit) == 0]
    waves = [1]
    for w in [*divisors, most]:
        while 2 * waves[-1] < w:
            waves.append(2 * waves[-1])
        if w > waves[-1]:
            waves.append(w)
    allowed = [w * unit for w in waves if w * unit >= least]
    return allowed or [-(-least // unit) * unit]


def smallest_fitting(count: int, measure: Callable[[int], Trial]) -> int | None:
    """The first of some candidates that fits, looking at few of them.

    Doubles the index until one fits, then halves the interval to the last that does not. If none fits on the way,
    memory may have fallen and risen again in between: the valley is searched. Where memory is not as smooth as that,
    the result is one that fits while neither of the two before it does.

    Args:
      count: how many candidates there are, at least 1.
      measure: asks one, by its index.

    Returns:
      Its index, or None: none fits.

    Example:
      >>> asked = []
      >>> def measure(i):
      ...     asked.append(i)
      ...     return Trial(i, 1, 1, 1000 // (i + 1), 1000 // (i + 1) <= 100)
      >>> smallest_fitting(100, measure), asked
      (9, [0, 1, 3, 7, 15, 11, 9, 8])
    """
    seen: dict[int, Trial] = {}

    def fits(index: int) -> bool:
        if index not in seen:
            seen[index] = measure(index)
        return seen[index].fits

    index = 0
    while not fits(index) and index < count - 1:
        index = min(2 * index + 1, count - 1)
    high = index if fits(index) else search_valley(seen, fits)
    if high is None:
        return None
    while True:
        low = max((i for i, trial in seen.items() if i < high and not trial.fits), default=-1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        if high < 2 or not fits(high - 2):
            return high
        high -= 2


def search_valley(seen: dict[int, Trial], fits: Callable[[int], bool]) -> int | None:
    """An index that fits between those that were seen and do not, where memory falls and then rises; or None."""

    def size(index: int) -> float:
        needed = seen[index].bytes
        return float("inf") if needed is None else needed

    while True:
        lowest = min(seen, key=lambda i: (size(i), -i))
        left = max((i for i in seen if i < lowest), default=lowest)
        right = min((i for i in seen if i > lowest), default=lowest)
        if max(lowest - left, right - lowest) <= 1:
            return None
        probe = (left + lowest) // 2 if lowest - left >= right - lowest else (lowest + right + 1) // 2
        if fits(probe):
            return probe


Need = tuple[bool, int | None]
"""Whether the compiler refused a program, and the bytes that it needs on a device, if that is known."""


def own_need(need: Need) -> Need:
    """The answer of a single process."""
    return need


def search(
    step: VirtualStep,
    template: Placement,
    limit: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    settle: Callable[[Need], Need] = own_need,
    fewer_lanes: bool = False,
) -> tuple[NodeSearch, Any]:
    """Finds the smallest number of nodes of a step that fits.

    Args:
      step: on whatever number of nodes.
      template: the devices, and the nodes that they hold in a wave.
      limit: bytes that a device may hold.
      args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s.
      kwargs: keyword arguments of the step.
      settle: makes one answer of those that several processes find, for which the search must go the same way.
      fewer_lanes: whether a number of nodes that does not fit is tried with as many lanes as there are devices, too:
        then no sum waits for another on a device.

    Returns:
      The search, and the step on the number found, with its compiled program; None if there is none.
    """
    batch = step.spec.call(args, kwargs).size
    numbers = candidates(batch, template.virtual_nodes, step.options.lanes or 1)  # one for each lane
    trials: list[Trial] = []
    fitting: dict[int, Any] = {}

    def measure(index: int) -> Trial:
        for lanes in [step.options.lanes, *([template.size] if fewer_lanes and numbers[index] > template.size else [])]:
            here = with_nodes(with_lanes(step, lanes), numbers[index], template)
            trials.append(try_step(here, batch, limit, args, kwargs, settle))
            if trials[-1].fits:
                fitting[index] = here
                break
        return trials[-1]

    index = smallest_fitting(len(numbers), measure)
    found = None if index is None else fitting[index]
    return NodeSearch(limit, tuple(trials), None if index is None else numbers[index]), found


def with_lanes(step: VirtualStep, lanes: int | None) -> VirtualStep:
    """A step whose nodes are in so many lanes."""
    options = dataclasses.replace(step.options, lanes=lanes)
    return VirtualStep(dataclasses.replace(step.spec, options=options), None)


def try_step(
    step: VirtualStep,
    batch: int,
    limit: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    settle: Callable[[Need], Need] = own_need,
) -> Trial:
    """Compiles a step and reads what it needs."""
    placement = step.placement
    refused, needed = False, None
    try:
        needed = program_memory(step.executor.compile_for(args, kwargs, together=True))
    except Exception as error:
        refused, needed = memory_refusal(error)
        if not refused:
            raise
    refused, needed = settle((refused, needed))
    node_size = -(-batch // placement.virtual_nodes)
    fits = not refused and needed is not None and needed <= limit
    lanes = step.options.lanes
    return Trial(placement.virtual_nodes, placement.waves, node_size, needed, fits, lanes)
