"""The order in which a sum over nodes is formed: a fixed tree over their numbers, whatever the devices.

Knows numbers of leaves and ranges of them. Must not know values, devices or programs.

The tree has four branches at every level (`ARITY`), which are added one after another: of sixteen leaves it is
``(((a + b) + c) + d)``, where ``a`` is ``(((0 + 1) + 2) + 3)``. Leaves that are taken one after another then need one
pending sum for each level but the lowest, half of those of a binary tree; and of a range of ``4**k`` leaves, beginning
at a multiple of that, one sum remains. So does one of the beginning of such a range; of its middle and its end there
remain up to three for each level, because their sums have to be added after the beginning's.

A range of leaves stands for their sum if the tree forms it: if it is a whole block (one leaf, four, sixteen, ... from a
multiple of as many, or what there is of these), or the first two or three of the four that make a block. Ranges that
come one after another are added with a stack: a whole block joins the beginning of the next larger one, if that is on
top of the stack, and so on with what that gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

ARITY = 4
"""Branches of the tree. Two would make devices with two nodes, eight, ... send one sum in place of two; but a device
with all of V nodes would hold log2(V) pending sums in place of log4(V)."""

Range = tuple[int, int]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Fold:
    """How ranges of leaves that come one after another are added.

    Attributes:
      merges: for every range how many of those before join it, one at a time.
      rest: the ranges that remain, ``(first leaf, the one after the last)``, in order.
      depth: entries that the stack needs, at least one.
    """

    merges: tuple[int, ...]
    rest: tuple[Range, ...]
    depth: int

    def of(self, values: Iterable[T], add: Callable[[T, T], T]) -> list[T]:
        """The values of the remaining ranges, from those of the ranges that come.

        Example:
          >>> Tree(6).fold([(i, i + 1) for i in range(6)]).of("abcdef", "({} + {})".format)
          ['((((a + b) + c) + d) + (e + f))']
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
      run: leaves of a block of the lowest level.
    """

    leaves: int
    run: int = ARITY

    def size(self, level: int) -> int:
        """Leaves of a block: one, a run, four runs, sixteen, ..."""
        return self.run * ARITY ** (level - 1) if level else 1

    def larger(self, start: int, stop: int) -> int | None:
        """Where the block begins that a whole block is the next part of; None if this is none, or the first part."""
        level = 0
        while start % self.size(level + 1) == 0 and self.size(level) < self.leaves:
            level += 1
        if stop != min(start + self.size(level), self.leaves) or not start:
            return None
        return start - start % self.size(level + 1)

    def fold(self, ranges: Iterable[Range]) -> Fold:
        """How to add consecutive ranges, each beginning where the one before ends.

        Example:
          >>> Tree(16).fold([(i, i + 1) for i in range(2, 12)])
          Fold(merges=(0, 0, 0, 1, 1, 1, 0, 1, 1, 1), rest=((2, 3), (3, 4), (4, 8), (8, 12)), depth=4)
        """
        stack: list[Range] = []
        merges: list[int] = []
        depth = 0
        for start, stop in ranges:
            joined = 0
            while stack and self.larger(start, stop) == stack[-1][0]:
                start, _ = stack.pop()
                joined += 1
            merges.append(joined)
            stack.append((start, stop))
            depth = max(depth, len(stack))
        return Fold(tuple(merges), tuple(stack), depth)

    def runs(self, start: int, stop: int) -> list[Range]:
        """A range as the beginnings of lowest blocks, each as long as possible, and single leaves where none begins.

        Example:
          >>> Tree(16).runs(2, 11)
          [(2, 3), (3, 4), (4, 8), (8, 11)]
        """
        found = []
        while start < stop:
            after = start + 1 if start % self.run else min(start + self.run, stop)
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
          >>> own, across = Tree(16).folds([8, 8])
          >>> [fold.rest for fold in own], across.merges
          ([((0, 8),), ((8, 12), (12, 16))], (0, 1, 1))
        """
        own = []
        for count in counts:
            own.append(self.fold(self.runs(start, start + count)))
            start += count
        return own, self.fold([each for fold in own for each in fold.rest])
