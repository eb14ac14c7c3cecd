"""Fused operations in an order -> the bytes that are live while each runs.

    a = x @ x; b = a @ x; c = b.sum()   ->   a; a and b; b

Knows what each operation reads, writes, and holds besides. Must not know equations, nor arguments and results.

A value is live from the operation that writes it to its last reader. Two orders are tried: the program's, and a greedy
one that next runs the operation that frees the most. The order with the lower peak is taken.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import Var


@dataclasses.dataclass(frozen=True)
class Operation:
    """The memory effects of an operation.

    Attributes:
      writes: the values that it allocates, with their bytes.
      reads: the values that it reads, of those that operations write or that may be overwritten.
      scratch_bytes: bytes that it needs while it runs; negative if the chip itself holds so many of the live bytes.
      in_place: pairs of a result and an operand that the result may overwrite.
      needs: the numbers of the operations that must run before it.
    """

    writes: Mapping[Var, int]
    reads: frozenset[Var]
    scratch_bytes: int
    in_place: tuple[tuple[Var, Var], ...]
    needs: frozenset[int]


Moment = tuple[int, int, dict[Var, int]]
"""The number of an operation, the bytes live while it runs, and the live values with their bytes."""


def liveness_in_best_order(operations: Sequence[Operation], kept: frozenset[Var] = frozenset()) -> list[Moment]:
    """The live values while each operation runs, in the better of two orders; `kept` ones are live to the end."""
    orders = range(len(operations)), memory_greedy_order(operations, kept)
    several = [[(k, now, dict(sizes)) for k, now, sizes in liveness(operations, order, kept)] for order in orders]
    return min(several, key=peak_bytes)


def peak_bytes(moments: Sequence[Moment]) -> int:
    """The most bytes that are live at a time."""
    return max((now for _, now, _ in moments), default=0)


def liveness(operations: Sequence[Operation], order: Sequence[int], kept: frozenset[Var]) -> Iterator[Moment]:
    """The live values while each operation runs, in a given order."""
    last: dict[Var, int] = {}
    for place, k in enumerate(order):
        last.update(dict.fromkeys((*operations[k].reads, *operations[k].writes), place))
    last.update(dict.fromkeys(kept, len(order)))
    sizes: dict[Var, int] = {}
    now = 0
    for place, k in enumerate(order):
        own = operations[k]
        free = {var for var in own.reads if last[var] == place}
        taken = set[Var]()
        for var, need in own.writes.items():
            below = next((v for result, v in own.in_place if result is var and v in free - taken), None)
            if below is None:
                sizes[var] = need
                now += need
            else:
                taken.add(below)
                sizes[var] = sizes.pop(below, 0)  # arguments count nothing
        yield k, max(now + own.scratch_bytes, 0), sizes
        for var in {*free, *(v for v in own.writes if last[v] == place)}:
            now -= sizes.pop(var, 0)


def memory_greedy_order(operations: Sequence[Operation], kept: frozenset[Var]) -> list[int]:
    """A greedy order: of the operations that can run, always the one that adds the fewest live bytes."""
    left: dict[Var, int] = {}
    readers: dict[Var, list[int]] = {}
    following: list[list[int]] = [[] for _ in operations]
    missing = [len(each.needs) for each in operations]
    sizes = {var: need for each in operations for var, need in each.writes.items()}
    for k, each in enumerate(operations):
        for var in each.reads:
            left[var] = left.get(var, 0) + 1
            readers.setdefault(var, []).append(k)
        for n in each.needs:
            following[n].append(k)
    ready: list[tuple[int, int]] = []
    known: dict[int, int] = {}

    def offer(k: int) -> None:
        own = operations[k]
        freed = sum(sizes.get(v, 0) for v in own.reads if left[v] == 1 and v not in kept)
        more = sum(own.writes.values()) - freed
        if known.get(k) != more:
            known[k] = more
            heapq.heappush(ready, (more, k))

    for k, n in enumerate(missing):
        if not n:
            offer(k)
    order, ran = list[int](), set[int]()
    while ready:
        more, k = heapq.heappop(ready)
        if k in ran or known[k] != more:
            continue
        ran.add(k)
        order.append(k)
        for n in following[k]:
            missing[n] -= 1
            if not missing[n]:
                offer(n)
        for var in operations[k].reads:
            left[var] -= 1
            if left[var] == 1:
                for n in readers[var]:
                    if n not in ran and not missing[n]:
                        offer(n)
    return order
