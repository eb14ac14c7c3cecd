"""The order in which a sum over nodes is formed: a fixed tree over their numbers, whatever the devices.

Knows numbers of leaves and ranges of them. Must not know values, devices or programs.

A block of the tree is the sum of some blocks of the level below, which are added one after another: with four branches
it is ``(((a + b) + c) + d)``. Leaves that are taken one after another need one pending sum for each level above the
lowest. So levels should be few, and their branches many; but where a device's leaves begin within a block, the blocks
below it that the device has remain apart, to be added to those before, and each is held and sent by itself. How many
branches a level has may depend on the number of leaves alone; `branches_for` says how many, and why.

A range of leaves stands for their sum if the tree forms it: if it is a whole block (from a multiple of the leaves of
such a block as many of them, or what there is), or the beginning of one, up to where one of its parts ends. Ranges that
come one after another are added with a stack: a whole block joins the beginning of the next larger one, if that is on
top of the stack, and so on with what that gives.
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
    """How many branches each level of a tree has, the lowest first.

    Two at the bottom, so that two leaves on each device leave one sum there, not two. Fours at the top, as many as
    leave no more than eight for one level between: so halves and quarters of the leaves are whole blocks, also of 24 or
    40. Of up to 16 leaves it is a two at the top, and where eight are left the top takes these, (2, 4, 8) for 64: or
    devices with eight leaves each would keep four sums. One device then holds two sums for up to 8 leaves, three for up
    to 64, four for up to 256.

    With two branches everywhere a device with 2**n leaves of a power of two holds n sums and sends one. None holds more
    here; but it sends two with a half of a block of four (4 leaves of 8 or 16, 16 of 32), four with a half of one of
    eight (32 of 64). Averaged over all numbers of leaves up to 128 and 1, 2, 4, ... devices, the most that a device
    sends is as with two branches (2.48 for 2.51), and what it holds is less (3.31 for 3.78).

    Args:
      leaves: of the tree, at least one.

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
    """How ranges of leaves that come one after another are added.

    Attributes:
      merges: for every range how many of those before join it, one at a time.
      rest: the ranges that remain, ``(first leaf, the one after the last)``, in order.
      depth: how many wait, at most, while another comes.
    """

    merges: tuple[int, ...]
    rest: tuple[Range, ...]
    depth: int

    def count_crossings(self, lowest: int) -> tuple[int, int]:
        """How often one of so many at the bottom of the stack is put there, and how often one is taken from there.

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
        """The values of the remaining ranges, from those of the ranges that come.

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
      leaves: how many there are.
      branches: of a block of each level, the lowest first; their product is at least the leaves.
    """

    leaves: int
    branches: tuple[int, ...]

    @staticmethod
    def from_lanes(leaves: int, lane: int = 1) -> Tree:
        """The tree over so many leaves, of which each `lane` make a block of the lowest level, if that is not one."""
        return Tree(leaves, (lane, *branches_for(-(-leaves // lane))) if lane > 1 else branches_for(leaves))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Leaves of a block of each level: one, ..., all or more."""
        return tuple(itertools.accumulate(self.branches, operator.mul, initial=1))

    def parent_start(self, start: int, stop: int) -> int | None:
        """Where the block begins that a whole block is the next part of; None if this is none, or the first part."""
        level = 0
        while self.sizes[level] < self.leaves and start % self.sizes[level + 1] == 0:
            level += 1
        if stop != min(start + self.sizes[level], self.leaves) or not start:
            return None
        return start - start % self.sizes[level + 1]

    def fold(self, ranges: Iterable[Range]) -> Fold:
        """How to add consecutive ranges, each beginning where the one before ends.

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
        """A range as the beginnings of lowest blocks, each as long as possible, and single leaves where none begins.

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
        """How devices add the leaves that they hold, and how what remains on each is added across them.

        Args:
          counts: leaves of each device, in order.
          start: the first of them.

        Returns:
          A fold per device, over its `runs`, and the fold of their remaining ranges, device by device.

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
