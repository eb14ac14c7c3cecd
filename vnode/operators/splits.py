"""An equation's factor and some of its indices -> the operands and results of a copy on these indices.

    y[i] = x[i] + x[i + 1], i of 4, cut into 2 parts   ->   part 0: y[0:2] from x[0:3];  part 1: y[2:4] from x[2:5]

Knows index arithmetic: windows, shifts, looked-up places. Must not know primitives, nor who cuts. Batch flow cuts into
ranges of examples, without communication. The partitioner cuts into blocks over a mesh axis, with collectives.

A factor has one of these splits. Alone: `Free`, `Reduced`, `LookedUp`, `Prefix`, `Whole`. Tied to others, so that a
range of one needs some range of another: `Windowed`, `Shifted`. A cut needs `Split.leads` (factors that are cut
together), `Split.parts` (the indices of each part), and `Split.partial` (how the parts' results combine). Free and
reduced factors are those of Tofu (Wang et al., EuroSys 2019, section 4), where all others are opaque.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from vnode.operators.monoid import Monoid

Lead = tuple[int, ...]
"""Factors that are cut together, each into blocks of its own."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """The indices of a factor in each of several parts.

    Element j of part i is index ``(starts[i] + j * stride) / spread``. Where that is no integer, or no index of the
    factor, the element is undefined.

    Attributes:
      starts: one start per part.
      length: number of elements of every part.
      stride: distance between elements.
      spread: distance between neighbouring indices.

    Example:
      >>> Interval((-1, 1), 4).indices(0, 4).tolist()  # two blocks of two, with a halo of one
      [-1, 0, 1, 2]
      >>> Interval((0, 3), 3, spread=2).indices(1, 3).tolist()  # every other place is empty
      [-1, 2, -1]
    """

    starts: tuple[int, ...]
    length: int
    stride: int = 1
    spread: int = 1

    def indices(self, part: int, size: int) -> np.ndarray:
        """The index of every element of a part, int64 of shape ``[length]``; -1 where there is none."""
        places = self.starts[part] + self.stride * np.arange(self.length)
        index = places // self.spread
        return np.where((places % self.spread == 0) & (index >= 0) & (index < size), index, -1)


def blocks(size: int, count: int) -> Interval:
    """Equal blocks of consecutive indices, the last ones reaching beyond the end where `count` does not divide.

    >>> blocks(10, 4)
    Interval(starts=(0, 3, 6, 9), length=3, stride=1, spread=1)
    """
    length = -(-size // count)
    return Interval(tuple(i * length for i in range(count)), length)


class Split:
    """The ways in which a copy of an equation may have some of a factor's indices."""

    alone: ClassVar[bool] = True
    """Whether a range of the factor concerns no other factor."""

    def leads(self, factor: int) -> tuple[Lead, ...]:
        """The ways to cut, given one of the factors that have this split."""
        return ((factor,),)

    def concerned(self, lead: Lead) -> frozenset[int]:
        """The factors of which parts have some of the indices only."""
        return frozenset(lead)

    def partial(self, lead: Lead) -> Monoid | None:
        """The monoid by which the parts' results combine where they lack the factor; None if they are independent."""
        return None

    def parts(self, lead: Lead, count: int, sizes: Sequence[int]) -> Mapping[int, tuple[Interval, ...]] | None:
        """The indices of every factor concerned that each of `count` parts has.

        Args:
          lead: one of `leads`.
          count: how many parts.
          sizes: the size of every factor of the equation.

        Returns:
          For each factor one interval, or several consecutive ones. None if parts would differ in more than their
          starts.
        """
        return {factor: (blocks(sizes[factor], count),) for factor in lead}


@dataclasses.dataclass(frozen=True)
class Free(Split):
    """Each index is computed for itself."""


@dataclasses.dataclass(frozen=True)
class Reduced(Split):
    """The factor vanishes: a copy on some indices gives a partial result.

    Attributes:
      monoid: combines partial results.
      fill: the value that takes an index out of the reduction when every operand that has the factor is overwritten
        with it there; by default the identity of the monoid.
    """

    monoid: Monoid
    fill: Any = None

    def partial(self, lead: Lead) -> Monoid | None:
        return self.monoid


@dataclasses.dataclass(frozen=True)
class LookedUp(Split):
    """An index operand selects places of the factor that are read or written; a copy has some of the places.

    The copy knows its places (it is evaluated with positions), and skips all others.

    Attributes:
      monoid: for reads, combines the copies' results, where a copy without the place gives the identity; None for
        writes, whose result has the factor.
    """

    monoid: Monoid | None = None

    def partial(self, lead: Lead) -> Monoid | None:
        return self.monoid


@dataclasses.dataclass(frozen=True)
class Prefix(Split):
    """A running reduction: a copy gives the running values within its range alone.

    Attributes:
      combine: an associative function of two arrays, applied to the last running values of all earlier ranges and to
        those of the range.
      around: the monoid whose identity pads a copy beyond the end.
      reverse: it runs from the end, so that "before" means after.
    """

    combine: Callable[[Any, Any], Any]
    around: Monoid
    reverse: bool = False


@dataclasses.dataclass(frozen=True)
class Whole(Split):
    """A copy needs all indices: a sorted dimension, the sides of a matrix that is inverted."""

    def leads(self, factor: int) -> tuple[Lead, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class Windowed(Split):
    """A window slides along an operand's dimension.

    Element k of the window of result t lies at the operand's index ``(stride * t + dilation * k - low) / base``. A
    copy on a range of results, or of the window's elements, is given all of the operand that these windows cover,
    with the neutral value where there is nothing. Its padding (`padding`) is such that all copies are alike.

    Attributes:
      operand: the factor of the operand's dimension.
      result: the factor of the result's dimension.
      extent: the factor of the window's elements, where an operand (a kernel) has them as a dimension.
      window: number of elements of the window.
      stride: distance between windows.
      low: padding before the operand.
      high: padding after it.
      base: distance of the operand's elements.
      dilation: distance of the window's elements.
      monoid: combines results of parts of the window.
      around: for each operand the monoid whose identity pads it; if empty, zeros do.
      back: the factor of a result that has the operand's places again, and collects from all windows that cover one;
        a copy is then cut along it.
    """

    operand: int
    result: int
    extent: int | None
    window: int
    stride: int
    low: int
    high: int
    base: int = 1
    dilation: int = 1
    monoid: Monoid | None = None
    around: tuple[Monoid, ...] = ()
    back: int | None = None

    alone: ClassVar[bool] = False

    def leads(self, factor: int) -> tuple[Lead, ...]:
        if self.back is not None:
            return ((self.back,),)
        return ((self.result,),) if self.extent is None else ((self.result,), (self.extent,))

    def concerned(self, lead: Lead) -> frozenset[int]:
        return frozenset((*lead, self.operand, *(() if self.back is None else (self.result,))))

    def partial(self, lead: Lead) -> Monoid | None:
        return self.monoid if lead == (self.extent,) else None

    def parts(self, lead: Lead, count: int, sizes: Sequence[int]) -> Mapping[int, tuple[Interval, ...]] | None:
        (factor,) = lead
        cut = blocks(sizes[factor], count)
        if factor == self.back:
            return self._parts_back(cut)
        moved = cut.length * (self.stride if factor == self.result else self.dilation)
        if moved % self.base:
            return None
        results = cut.length if factor == self.result else sizes[self.result]
        elements = cut.length if factor == self.extent else self.window
        return {factor: (cut,), self.operand: (self._covered(moved, count, results, elements),)}

    def _covered(self, moved: int, count: int, results: int, elements: int) -> Interval:
        """The interval that `results` windows of `elements` cover, in parts `moved` places apart."""
        first = -(self.low // self.base)  # the first element at or after the first window's start
        last = ((results - 1) * self.stride + (elements - 1) * self.dilation - self.low) // self.base
        step = moved // self.base
        return Interval(tuple(i * step + first for i in range(count)), max(last - first + 1, 1))

    def _parts_back(self, cut: Interval) -> Mapping[int, tuple[Interval, ...]] | None:
        if self.base != 1 or cut.length % self.stride:
            return None
        first = -((self._reach - self.low) // self.stride)  # the first window that covers the first place
        last = (cut.length - 1 + self.low) // self.stride
        windows = Interval(tuple(start // self.stride + first for start in cut.starts), last - first + 1)
        length = (last - first) * self.stride + self._reach + 1
        covered = Interval(tuple(start - self.before for start in cut.starts), length)
        assert self.back is not None
        return {self.back: (cut,), self.result: (windows,), self.operand: (covered,)}

    @property
    def _reach(self) -> int:
        """With `back`: the number of places that a window reaches beyond its first, including uncovered ones after
        it."""
        return max((self.window - 1) * self.dilation, self.stride - 1)

    @property
    def before(self) -> int:
        """With `back`: the number of places that a copy has before its own."""
        return (self._reach - self.low) // self.stride * self.stride + self.low

    def padding(self, sizes: Sequence[int], full: Sequence[int]) -> tuple[int, int]:
        """The padding of a copy with factor sizes `sizes` of an equation with factor sizes `full`."""
        own = [f for f in (self.operand, self.result, self.extent, self.back) if f is not None]
        if all(sizes[f] == full[f] for f in own):
            return self.low, self.high
        if self.back is not None:
            return 0, 0
        low = self.low % self.base
        elements = self.window if self.extent is None else sizes[self.extent]
        end = (sizes[self.result] - 1) * self.stride + (elements - 1) * self.dilation
        return low, end - low - (sizes[self.operand] - 1) * self.base

    def pairs(self, size: int, results: int) -> int:
        """The number of window elements that lie on the operand, not on padding or between dilated elements."""
        if self.base == self.stride == self.dilation == 1 and self.low == self.high == 0:
            return results * self.window
        places = np.arange(results)[:, None] * self.stride - self.low
        return sum(
            int(((part >= 0) & (part % self.base == 0) & (part // self.base < size)).sum())
            for k in range(0, self.window, 4096)
            for part in [places + np.arange(k, min(k + 4096, self.window)) * self.dilation]
        )


@dataclasses.dataclass(frozen=True)
class Move:
    """Index t of a result's factor holds the operand's index ``(t * stride + start) / spread``, where there is one."""

    operand: int
    result: int
    start: int
    stride: int = 1
    spread: int = 1


@dataclasses.dataclass(frozen=True)
class Shifted(Split):
    """Elements move along a dimension: a slice, padding, a concatenation, a reversal.

    A copy on a range of the results' indices gets the elements that move there, in the results' order; others are
    undefined. The copy knows its indices (it is evaluated with positions).

    Attributes:
      moves: the moves, from operands to results.
      unit: a free minor factor beside each of the factors, if elements move in blocks. Cuts then count elements, not
        blocks.
    """

    moves: tuple[Move, ...]
    unit: int | None = None

    alone: ClassVar[bool] = False

    def leads(self, factor: int) -> tuple[Lead, ...]:
        return (tuple(dict.fromkeys(move.result for move in self.moves)),)

    def parts(self, lead: Lead, count: int, sizes: Sequence[int]) -> Mapping[int, tuple[Interval, ...]] | None:
        unit = 1 if self.unit is None else sizes[self.unit]
        if unit != 1:
            raise ValueError("blocks move: ask for the parts of `by_elements`")
        made: dict[int, tuple[Interval, ...]] = {f: (blocks(sizes[f], count),) for f in lead}
        for move in self.moves:
            cut = made[move.result][0]
            starts = tuple(start * move.stride + move.start for start in cut.starts)
            taken = Interval(starts, cut.length, move.stride, move.spread)
            made[move.operand] = (*made.get(move.operand, ()), taken)
        return made

    def concerned(self, lead: Lead) -> frozenset[int]:
        return frozenset(f for move in self.moves for f in (move.operand, move.result))

    def scaled(self, unit: int) -> Shifted:
        """The same split counted in elements, each block having `unit` of them."""
        return Shifted(tuple(dataclasses.replace(move, start=move.start * unit) for move in self.moves), None)


FREE, WHOLE = Free(), Whole()
