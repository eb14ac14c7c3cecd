"""Number of leaves -> the order in which a sum over nodes is formed: a fixed tree, whatever the devices.

Knows numbers of leaves and ranges of them. Must not know values, devices or programs.

A block of the tree is the sum of some blocks of the level below, added one after another: with four branches ``(((a +
b) + c) + d)``. Leaves added in order need one pending sum per level above the lowest. So levels should be few, and
their branches many. But where a device's leaves begin inside a block, the device's smaller blocks cannot be merged;
each is kept and sent by itself. The branches of a level may depend on the number of leaves alone; see `branches_for`.

A range of leaves stands for their sum if the tree forms it. That is so for a whole block (it begins at a multiple of
its size), and for the beginning of a block up to the end of one of its parts. Consecutive ranges are added with a
stack: a whole block joins the beginning of the next larger block if that is on top, and the result may join in turn.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Range = tuple[int, int]
T = TypeVar("T")


def branches_for(leaves: int) -> tuple[int, ...]:
    """The number of branches of each level of a tree, from the lowest up.

    The lowest level has two branches, so that a device with two leaves keeps one sum. The top levels have four. There
    are as many of them as leave one level between, of at most eight branches. So halves and quarters of the leaves are
    whole blocks, also for 24 or 40 leaves. Two exceptions:

    - For 9 to 16 leaves the top level has two branches.
    - Where the level between would have eight, it has four, and the top level eight: (2, 4, 8) for 64. Otherwise
      devices with eight leaves would keep four sums.

    A single device holds two sums for up to 8 leaves, three for up to 64, four for up to 256. With two branches
    everywhere, a device with 2**n leaves would hold n sums and send one. Here no device holds more. But it may send
    more: two for half of a block of four (4 leaves of 8 or 16, 16 of 32), four for half of a block of eight (32 of 64).
    For 1 to 128 leaves on 1, 2, 4, ... devices, the device that sends most sends 2.5 sums on average with either tree.
    The one that holds most holds 3.3 sums, and would hold 3.8 with two branches everywhere.

    Args:
      leaves: number of leaves, at least one.

    Example:
      >>> {n: branches_for(n) for n in (2, 8, 16, 32, 40, 64, 256)}
      {2: (2,), 8: (2, 4), 16: (2, 4, 2), 32: (2, 4, 4), 40: (2, 5, 4), 64: (2, 4, 8), 256: (2, 4, 4, 8)}
    """
    left, top = -(-leaves // 2), []
    if 4 < left <= 8:
        left, top = -(-left // 2), [2]
    while left > 8:
        left = -(-left // 4)
        top.append(4)
    if left == 8:
        left, top[-1] = 4, 8
    return (2, left, *top) if left > 1 else (2,)


@dataclasses.dataclass(frozen=True)
class Fold:
    """The order in which consecutive ranges of leaves are added.

    Attributes:
      merges: for each range the number of earlier ranges that join it, one at a time.
      rest: the ranges that remain, ``(first leaf, last leaf + 1)``, in order.
      depth: the most ranges that wait while another comes.
    """

    merges: tuple[int, ...]
    rest: tuple[Range, ...]
    depth: int

    def count_crossings(self, lowest: int) -> tuple[int, int]:
        """The number of writes and of reads of the `lowest` entries of the stack.

        Example:
          >>> fold = Tree.from_lanes(64).fold([(i, i + 2) for i in range(0, 64, 2)])
          >>> fold.depth, fold.count_crossings(1), fold.count_crossings(2)
          (2, (10, 10), (31, 31))
        """
        put = taken = height = 0
        for merges in self.merges:
            put += 0 < height <= lowest
            taken += max(min(height, lowest) - (height - merges), 0)
            height += 1 - merges
        return put, taken

    def fold_values(self, values: Iterable[T], add: Callable[[T, T], T]) -> list[T]:
        """Folds the ranges' values; returns the values of the remaining ranges.

        Example:
          >>> Tree.from_lanes(6).fold([(i, i + 1) for i in range(6)]).fold_values("abcdef", "({} + {})".format)
          ['(((a + b) + (c + d)) + (e + f))']
        """
        stack: list[T] = []
        for value, merges in zip(values, self.merges, strict=True):
            for _ in range(merges):
                value = add(stack.pop(), value)
            stack.append(value)
        return stack


@dataclasses.dataclass(frozen=True)
class Tree:
    """The tree over some leaves.

    Attributes:
      leaves: number of leaves.
      branches: branches per level, the lowest first; their product is at least the number of leaves.
    """

    leaves: int
    branches: tuple[int, ...]

    @staticmethod
    def from_lanes(leaves: int, lane: int = 1) -> Tree:
        """The tree over leaves of which each `lane` form a block of the lowest level, if `lane` is not one."""
        return Tree(leaves, (lane, *branches_for(-(-leaves // lane))) if lane > 1 else branches_for(leaves))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Leaves of a block of each level: one, ..., at least all."""
        return tuple(itertools.accumulate(self.branches, operator.mul, initial=1))

    def parent_start(self, start: int, stop: int) -> int | None:
        """The start of the larger block that a whole block continues; None if it is no whole block, or the first
        part."""
        level = 0
        while self.sizes[level] < self.leaves and start % self.sizes[level + 1] == 0:
            level += 1
        if stop != min(start + self.sizes[level], self.leaves) or not start:
            return None
        return start - start % self.sizes[level + 1]

    def fold(self, ranges: Iterable[Range]) -> Fold:
        """The additions that join consecutive ranges, each of which begins where the one before ends.

        Example:
          >>> Tree.from_lanes(32).fold([(i, i + 1) for i in range(5, 16)])
          Fold(merges=(0, 0, 1, 0, 1, 0, 2, 0, 2, 0, 2), rest=((5, 6), (6, 8), (8, 16)), depth=4)
        """
        stack: list[Range] = []
        merges: list[int] = []
        depth = 0
        for start, stop in ranges:
            depth = max(depth, len(stack))
            joined = 0
            while stack and self.parent_start(start, stop) == stack[-1][0]:
                start, _ = stack.pop()
                joined += 1
            merges.append(joined)
            stack.append((start, stop))
        return Fold(tuple(merges), tuple(stack), depth)

    def runs(self, start: int, stop: int) -> list[Range]:
        """Splits a range into beginnings of lowest blocks, as long as possible, and single leaves elsewhere.

        Example:
          >>> Tree.from_lanes(16, 4).runs(2, 11)
          [(2, 3), (3, 4), (4, 8), (8, 11)]
        """
        found = []
        run = self.branches[0]
        while start < stop:
            after = start + 1 if start % run else min(start + run, stop)
            found.append((start, after))
            start = after
        return found

    def folds(self, counts: Sequence[int], start: int = 0) -> tuple[list[Fold], Fold]:
        """The additions of leaves on each device, and of the remaining sums across devices.

        Args:
          counts: number of leaves of each device, in order.
          start: the first leaf.

        Returns:
          One fold per device, over its `runs`, and the fold of their remaining ranges, device by device.

        Example:
          >>> own, across = Tree.from_lanes(16).folds([4] * 4)
          >>> [fold.rest for fold in own[:2]], across.merges
          ([((0, 4),), ((4, 6), (6, 8))], (0, 1, 1, 0, 1, 2))
        """
        own = []
        for count in counts:
            own.append(self.fold(self.runs(start, start + count)))
            start += count
        return own, self.fold([each for fold in own for each in fold.rest])
