"""The order in which a sum over nodes is formed: a fixed binary tree over their numbers, whatever the devices.

Knows numbers of leaves and ranges of them. Must not know values, devices or programs.

Block ``(k, j)`` of a tree over n leaves stands for the leaves from ``j * 2**k`` up to ``(j + 1) * 2**k`` or n. Its
value is that of its left half plus that of its right half, or that of its left half where the right one is beyond n. A
range of leaves that are taken one after another is added with a stack: the blocks on it that are left halves to a new
one join it, the last one first, and what that gives is put on the stack. What remains are the largest blocks within the
range, in order; the remaining blocks of one range after another, taken the same way, give what all leaves taken one
after another give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Block = tuple[int, int]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Fold:
    """How blocks that come one after another are added.

    Attributes:
      merges: for every block how many of those before join it, one at a time.
      rest: the blocks that remain, in order.
      depth: entries that the stack needs: log2 of the leaves of a full tree, but at least one.
    """

    merges: tuple[int, ...]
    rest: tuple[Block, ...]
    depth: int

    def of(self, values: Iterable[T], add: Callable[[T, T], T]) -> list[T]:
        """The values of the remaining blocks, from those of the blocks that come.

        Example:
          >>> fold(4, [(0, i) for i in range(4)]).of("abcd", "({} + {})".format)
          ['((a + b) + (c + d))']
        """
        stack: list[T] = []
        for value, merges in zip(values, self.merges, strict=True):
            for _ in range(merges):
                value = add(stack.pop(), value)
            stack.append(value)
        return stack


def fold(leaves: int, blocks: Iterable[Block]) -> Fold:
    """How to add consecutive blocks.

    Args:
      leaves: of the tree.
      blocks: of the tree, each beginning where the one before ends.

    Returns:
      The fold.

    Example:
      >>> fold(8, [(0, i) for i in range(3, 8)])
      Fold(merges=(0, 0, 1, 0, 2), rest=((0, 3), (2, 1)), depth=3)
    """
    stack: list[Block] = []
    merges: list[int] = []
    depth = 0
    for level, index in blocks:
        joined = 0
        while True:
            if index % 2 and stack and stack[-1] == (level, index - 1):
                stack.pop()
                joined += 1
            elif index % 2 or index == 0 or (index + 1) << level < leaves:
                break
            level, index = level + 1, index // 2
        merges.append(joined)
        stack.append((level, index))
        depth = max(depth, len(stack))
    return Fold(tuple(merges), tuple(stack), depth)


def folds(leaves: int, counts: Sequence[int], start: int = 0) -> tuple[list[Fold], Fold]:
    """How devices add the leaves that they hold, and how what remains on each is added across them.

    Args:
      leaves: of the tree.
      counts: leaves of each device, in order.
      start: the first of them.

    Returns:
      A fold per device, and the fold of their remaining blocks, device by device.

    Example:
      >>> own, across = folds(8, [4, 4])
      >>> [fold.rest for fold in own], across.merges
      ([((2, 0),), ((2, 1),)], (0, 1))
    """
    own = []
    for count in counts:
        own.append(fold(leaves, [(0, i) for i in range(start, start + count)]))
        start += count
    return own, fold(leaves, [block for each in own for block in each.rest])
