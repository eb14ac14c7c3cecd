"""What kernels hold while they run one after another, and in which order they run.

Knows what each kernel reads, writes, and takes besides. Must not know equations, what kernels compute, nor platforms
beyond how they choose an order.

A value is held from the kernel that writes it to the last that reads it, under whatever name.

Where a compiler chooses the order of kernels so that little is held, this takes the best of three that XLA tries
(``hlo_memory_scheduler.cc``): one that runs next what frees most, and two that follow operands from the results on, in
the order of operands, or those first that most others read. They are compared as XLA compares them: results have room
of their own, and arguments are not copied yet. On CPUs kernels run as soon as they can (`Target.breadth`).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from jax.extend.core import Var

from vnode.partition.cost.target import Target


@dataclasses.dataclass(frozen=True)
class Vacant:
    """Where an argument is, and later others may be.

    Attributes:
      bytes: of it.
      readers: the kernels that read it there.
      end: the kernel that brings a result there; None if that is after all others.
      copy: of it, if it is copied before all else, and nothing reads it there.
    """

    bytes: int
    readers: frozenset[int]
    end: int | None = None
    copy: Var | None = None


@dataclasses.dataclass(frozen=True)
class Buffers:
    """What kernels write and read, for an order of them.

    Attributes:
      written: for each kernel the values it brings into memory, with their bytes.
      read: for each kernel the values that it reads, of those that any kernel wrote or that may be written over.
      inside: for each kernel the bytes that it holds while it runs.
      over: for each kernel the pairs of a value that it writes and one over which it may do so.
      kept: values that are held to the end.
      after: for each kernel those that must have run before it.
      of: for each kernel, which of the program's it is, or is a part of.
      last: kernels that run after others that could run as soon.
      first: kernels that are begun before all others: what comes from the host's memory.
      ends: kernels of which the program's results are, in the order of these.
      operands: for each kernel those that it needs, in the order in which it reads their results.
      made: for each kernel the bytes of all that it makes, wherever that is.
      results: for each kernel the results that it brings where arguments are, with their bytes.
      early: copies of arguments that are made before all else, in order.
      vacant: arguments where other arrays may be for a while.
    """

    written: tuple[tuple[tuple[Var, int], ...], ...]
    read: tuple[frozenset[Var], ...]
    inside: tuple[int, ...]
    over: tuple[tuple[tuple[Var, Var], ...], ...]
    kept: frozenset[Var]
    after: tuple[frozenset[int], ...]
    of: tuple[int, ...]
    last: frozenset[int] = frozenset()
    first: frozenset[int] = frozenset()
    ends: tuple[int, ...] = ()
    operands: tuple[tuple[int, ...], ...] = ()
    made: tuple[int, ...] = ()
    results: tuple[tuple[tuple[Var, int], ...], ...] = ()
    early: tuple[Var, ...] = ()
    vacant: tuple[Vacant, ...] = ()

    def lodged(self, moments: Sequence[tuple[int, Mapping[Var, int]]], away: Sequence[Collection[object]]) -> set[Var]:
        """What is where an argument was, as long as it is held: the largest first, in the smallest place that fits.

        Args:
          moments: kernels in their order, and what is held while each runs.
          away: for each of these what is on the chip.
        """
        if not self.vacant:
            return set()
        place = {k: i for i, (k, _) in enumerate(moments)}
        before = {var: i - len(self.early) for i, var in enumerate(self.early)}  # copies, one after another
        places = [  # bytes, from when to when
            (
                each.bytes,
                max([-1, *(place[k] for k in each.readers)] if each.copy is None else [before[each.copy]]) + 1,
                len(moments) if each.end is None else place[each.end],
            )
            for each in self.vacant
        ]
        spans: dict[Var, list[int]] = {}
        for i, (_, sizes) in enumerate(moments):
            for var, need in sizes.items():
                if need and var not in away[i] and var not in self.kept:
                    spans.setdefault(var, [before.get(var, i), i, need])[1] = i
        found = set[Var]()
        taken: list[list[tuple[int, int]]] = [[] for _ in places]
        for var, (start, end, need) in sorted(spans.items(), key=lambda item: -item[1][2]):
            for n in sorted(range(len(places)), key=lambda n: places[n][0]):
                room, first, last = places[n]
                if need <= room and first <= start and end <= last and all(b < start or end < a for a, b in taken[n]):
                    taken[n].append((start, end))
                    found.add(var)
                    break
        return found

    def held(
        self,
        order: Sequence[int],
        begun: Mapping[int, int] = MappingProxyType({}),
        taken_first: Collection[Var] = (),
    ) -> Iterator[tuple[int, int, Mapping[Var, int]]]:
        """For each kernel in an order: its number, the bytes held while it runs, and what is held, with its bytes.

        Args:
          order: of the kernels.
          begun: for some of them the place in the order at which they are begun, with room for what they write.
          taken_first: variables for which there is room from the first of these places on.
        """
        early: dict[int, list[tuple[Var, int]]] = {}
        for k, place in begun.items():
            early.setdefault(place, []).extend(self.written[k])
        first, there = min(begun.values(), default=len(order)), set[Var]()
        for place, k in enumerate(order):
            if place > first and k not in begun:
                several = [each for each in self.written[k] if each[0] in taken_first]
                early[first] += several
                there.update(var for var, _ in several)
        last: dict[Var, int] = {}
        for place, k in enumerate(order):
            last.update(dict.fromkeys(self.read[k], place))
            for var, _ in self.written[k]:
                last[var] = place
        last.update(dict.fromkeys(self.kept, len(order)))
        sizes: dict[Var, int] = {}
        now = 0
        for place, k in enumerate(order):
            for var, need in early.get(place, ()):
                sizes[var] = need
                now += need
            free = {var for var in self.read[k] if last[var] == place}
            taken = set[Var]()
            for var, need in () if k in begun else [each for each in self.written[k] if each[0] not in there]:
                place_of = next((o for v, o in self.over[k] if v is var and o in free - taken), None)
                if place_of is not None:
                    taken.add(place_of)
                    sizes[var] = sizes.pop(place_of, 0)  # of what was there before, nothing is counted
                else:
                    sizes[var] = need
                    now += need
            yield k, now + self.inside[k], sizes
            for var in {*free, *(v for v, _ in self.written[k] if last[v] == place)}:
                now -= sizes.pop(var, 0)

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes held at a time."""
        return max((now for _, now, _ in self.held(order)), default=0)

    def visited(self, order: Callable[[int], Sequence[int]]) -> list[int]:
        """Kernels after those they need, from the results on, with those they need in an order of their own."""
        wanted = set(range(len(self.after))).difference(*self.after)
        done, found = set[int](), list[int]()
        for end in dict.fromkeys((*self.ends, *sorted(wanted))):
            pending = [(end, False)]
            while pending:
                k, ready = pending.pop()
                if ready:
                    found.append(k)
                elif k not in done:
                    done.add(k)
                    pending.append((k, True))
                    pending += [(n, False) for n in reversed(order(k))]
        return found

    def needed(self, k: int) -> Sequence[int]:
        """The kernels that one needs, in the order in which it reads their results."""
        return self.operands[k] if self.operands else sorted(self.after[k])

    def made_by(self, k: int) -> int:
        """Bytes of what a kernel makes, wherever it is."""
        return self.made[k] if self.made else sum(need for _, need in self.written[k])

    def post_order(self) -> list[int]:
        """Kernels after those they need, from the results on, first operands first."""
        return self.visited(self.needed)

    def depth_first(self) -> list[int]:
        """Kernels after those they need, from the results on: first those with most other readers above, or bytes."""
        users = [0] * len(self.after)
        for needs in self.after:
            for n in needs:
                users[n] += 1
        bytes_ = [self.made_by(k) for k in range(len(self.after))]
        most = sum(bytes_)
        weight: dict[int, tuple[int, int]] = {}
        for k in self.post_order():
            above = [weight[n] for n in self.after[k]]
            others = max(users[k] - 1, 0) + sum(each for each, _ in above)
            weight[k] = min(others, len(users)), min(bytes_[k] + sum(each for _, each in above), most)
        return self.visited(lambda k: sorted(self.needed(k), key=weight.__getitem__, reverse=True))

    def freeing(self) -> list[int]:
        """Of the kernels that can run, always the one after which least more is held, single numbers before all."""
        left: dict[Var, int] = {}
        readers: dict[Var, list[int]] = {}
        for k, reads in enumerate(self.read):
            for var in reads:
                left[var] = left.get(var, 0) + 1
                readers.setdefault(var, []).append(k)
        sizes = {var: need for written in self.written for var, need in written}
        following: list[list[int]] = [[] for _ in self.after]
        missing = [len(needs) for needs in self.after]
        for k, needs in enumerate(self.after):
            for n in needs:
                following[n].append(k)
        ready: list[tuple[float, int, int, int]] = []
        known: dict[int, tuple[float, int]] = {}
        turn = itertools.count()

        def offer(k: int) -> None:
            freed = sum(sizes.get(v, 0) for v in self.read[k] if left[v] == 1 and v not in self.kept)
            alone = len(self.written[k]) == 1 and self.written[k][0][0].aval.size == 1
            key = (-math.inf if alone else self.made_by(k) - freed), -len(following[k])
            if known.get(k) != key:
                known[k] = key
                heapq.heappush(ready, (*key, -next(turn), k))

        for k in reversed(range(len(missing))):
            if not missing[k]:
                offer(k)
        order, ran = list[int](), set[int]()
        while ready:
            *key, _, k = heapq.heappop(ready)
            if k in ran or known[k] != tuple(key):
                continue
            ran.add(k)
            order.append(k)
            for n in following[k]:
                missing[n] -= 1
                if not missing[n]:
                    offer(n)
            for var in self.read[k]:
                left[var] -= 1
                if left[var] == 1:
                    for n in readers[var]:
                        if n not in ran and not missing[n]:
                            offer(n)
        return order

    def breadth_first(self) -> list[int]:
        """Kernels as soon as what they need has run, first come first served."""
        following: list[list[int]] = [[] for _ in self.after]
        missing = [len(needs) for needs in self.after]
        for k, needs in enumerate(self.after):
            for n in needs:
                following[n].append(k)
        order = [k for k, n in enumerate(missing) if n == 0]
        for k in order:
            for n in sorted(following[k], key=self.last.__contains__):
                missing[n] -= 1
                if missing[n] == 0:
                    order.append(n)
        return order

    def under(self, target: Target) -> list[int]:
        """The order of a compiler, or the best that is tried."""
        return self.breadth_first() if target.breadth else self.least_held

    @functools.cached_property
    def least_held(self) -> list[int]:
        """The best of the three orders that XLA tries."""
        several = self.freeing(), self.depth_first(), self.post_order()
        ordered = (sorted(order, key=lambda k: k not in self.first) for order in several)
        return min(ordered, key=self.before_places().peak)

    def before_places(self) -> Buffers:
        """The same as it is when orders are chosen: results are not yet where arguments are, nor arguments copied."""
        if not any(self.results) and not self.early:
            return self
        written = [
            (*(each for each in own if each[0] not in self.early), *results)
            for own, results in itertools.zip_longest(self.written, self.results, fillvalue=())
        ]
        kept = self.kept | {var for results in self.results for var, _ in results}
        return dataclasses.replace(self, written=tuple(written), kept=kept)
