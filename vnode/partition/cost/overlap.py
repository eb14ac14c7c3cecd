"""The order in which a TPU's compiler runs kernels, so that gathers run beside computation.

Knows kernels, what they write and read, and how long each takes. Must not know machines, nor what the chip holds.

XLA's scheduler (``latency_hiding_scheduler.cc``) goes from the end of the program to the beginning. A gather is two
things to it: its end, which what reads it waits for, and its beginning. `Backwards` has its rules, as far as they
matter to programs that do not come near the device's memory. One gather runs at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from jax.extend.core import Var

from vnode.partition.cost.buffers import Buffers
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.places import is_gather
from vnode.partition.cost.shapes import Kernel, Kernels, Shape
from vnode.partition.cost.tiles import LANES, SUBLANES

TILE = 4 * LANES * SUBLANES
"""Bytes of a tile, whatever its type."""

BESIDE_SUMS = {"all-reduce": 0.5, "reduce-scatter": 1.0}
"""The part of the time of a sum over devices for which TPUs' compiler expects that a gather runs beside it."""


def beside_computation(
    kernels: Kernels, buffers: Buffers, order: Sequence[int], seconds: Sequence[float]
) -> tuple[list[int], dict[int, int]]:
    """An order in which gathers run beside computation, which other exchanges do not, and where they begin.

    They run beside a sum over devices as well, for as long as a gather of what is summed would take: half as long as
    the sum, unless each device keeps a part (seen on v5e of 4 to 128 MiB). What runs beside other exchanges alone is
    gathered where it would end.

    Args:
      kernels: of the program.
      buffers: what they write and read.
      order: by which it is settled what else is not.
      seconds: that each kernel takes.

    Returns:
      The order, and for gathers that begin before their place in it, where that is.
    """
    own = [kernels.kernels[k] for k in buffers.of]
    exchanges = {k: KINDS[own[k].root.primitive.name] for k in order if own[k].shape is Shape.COLLECTIVE}
    gathers = {k for k in exchanges if is_gather(own[k]) and fills_a_tile(own[k])}
    if not gathers:
        return [*order], {}
    others = {k: kind for k, kind in exchanges.items() if k not in gathers}
    lengths = [0.0 if n in others else seconds[k] for n, k in enumerate(buffers.of)]
    alone = {k: BESIDE_SUMS.get(kind, 0.0) * seconds[buffers.of[k]] for k, kind in others.items()}
    chained = {k: seconds[buffers.of[k]] for k, kind in others.items() if kind == "permute"}
    known = {k for k in gathers if not is_reshaped(own[k])}
    found, begun = Backwards(buffers, order, lengths, gathers, alone, chained, known).ordered()
    place = {k: i for i, k in enumerate(found)}
    computes = [k not in exchanges and lengths[k] > 0 for k in found]
    return found, {k: start for k, start in begun.items() if any(computes[start : place[k]])}


def fills_a_tile(gather: Kernel) -> bool:
    """Whether what a gather gives fills a tile: less is gathered where it is read (seen of every gather on v5e)."""
    return gather.piece.cost.written >= TILE


def is_reshaped(gather: Kernel) -> bool:
    """Whether what devices give to a gather does not fill a tile: the result is then reshaped before it is read."""
    return all(var.aval.size < LANES * SUBLANES for var in gather.piece.reads)


def apart(kernels: Kernels, buffers: Buffers, order: Sequence[int], begun: Mapping[int, int]) -> Buffers:
    """The buffers, where sums over devices are not written over what is computed while something is gathered.

    On TPUs one kernel then computes and gathers, and has both as results.
    """
    place = {k: i for i, k in enumerate(order)}
    beside = {k for gather, start in begun.items() for k in order[start : place[gather]]}
    several = {var for k in beside for var, _ in buffers.written[k]}
    over = [
        tuple(pair for pair in pairs if pair[1] not in several) if own.shape is Shape.COLLECTIVE else pairs
        for pairs, own in zip(buffers.over, (kernels.kernels[k] for k in buffers.of), strict=True)
    ]
    return dataclasses.replace(buffers, over=tuple(over))


class Backwards:
    """XLA's scheduler: from the end of a program to its beginning, what can run is put before what already has a place.

    1. A transfer ends as soon as all that reads it has a place, and no other runs. Of several, that which most
       transfers come before, one after another; then that which is later in the order given.
    2. It begins when what has been put before its end takes as long as it does: at once if another waits to end,
       otherwise when nothing that can run has more transfers before it; if none comes before it, as early as can be.
    3. Else, of what can run, what has most transfers before it, in seconds; then what takes as long as the running
       transfer still does, or nearly; then what reads a transferred array; then what lets most others run; then what
       frees more memory than it needs; then what is later in the order given.

    Args:
      buffers: what kernels write and read, and which need which.
      order: of the kernels.
      seconds: how long each takes.
      transfers: those that are transfers.
      alone: other exchanges, of which `seconds` says nothing, and how long a transfer can run beside each.
      chained: exchanges that count as transfers that come before others, though they are not, with their seconds.
      known: transfers whose results are read as they are; by default all.
    """

    def __init__(
        self,
        buffers: Buffers,
        order: Sequence[int],
        seconds: Sequence[float],
        transfers: Collection[int],
        alone: Mapping[int, float] = MappingProxyType({}),
        chained: Mapping[int, float] = MappingProxyType({}),
        known: Collection[int] | None = None,
    ) -> None:
        self.buffers, self.order, self.seconds, self.transfers = buffers, order, seconds, frozenset(transfers)
        self.cost = [alone.get(k, each) for k, each in enumerate(seconds)]
        self.place = {k: i for i, k in enumerate(order)}
        known = self.transfers if known is None else known
        self.reads_transfer = [any(n in known for n in needs) for needs in buffers.after]
        self.sizes = {var: need for written in buffers.written for var, need in written}
        self.before = [0.0] * len(buffers.after)  # seconds of transfers that come before each, one after another
        self.depth = [0.0] * len(buffers.after)  # and before its end
        for k in order:
            own = seconds[k] if k in self.transfers else chained.get(k, 0.0)
            self.before[k] = max((self.depth[n] for n in buffers.after[k]), default=0.0)
            self.depth[k] = self.before[k] + own
        self.missing = [0] * len(buffers.after)  # how many have no place yet of those that need each
        self.asking = [0] * len(buffers.after)  # the sum of their numbers: the last one's number, in the end
        for k, needs in enumerate(buffers.after):
            for n in needs:
                self.missing[n] += 1
                self.asking[n] += k
        self.unlocks = [0] * len(buffers.after)  # how many can run once each has a place
        for n, count in enumerate(self.missing):
            if count == 1:
                self.unlocks[self.asking[n]] += 1
        self.ready: dict[float, set[int]] = {}  # what can run, by its depth
        self.ending: list[int] = []
        self.need = [sum(self.sizes.get(var, 0) for var in read) for read in buffers.read]  # of what is not held yet
        self.readers: dict[Var, list[int]] = {}
        for k, read in enumerate(buffers.read):
            for var in read & self.sizes.keys():
                self.readers.setdefault(var, []).append(k)

    def ordered(self) -> tuple[list[int], dict[int, int]]:
        """The order, and for transfers that begin before their place in it, where that is."""
        self.free([k for k in reversed(self.order) if not self.missing[k]])
        backwards, begun = list[int](), dict[int, int]()
        flying: int | None = None
        left = 0.0
        while True:
            if flying is None and self.ending:
                flying = max(self.ending, key=lambda k: (self.depth[k], self.place[k]))
                self.ending.remove(flying)
                left = self.seconds[flying]
                backwards.append(flying)
                self.hold(flying)
            elif flying is not None and (not self.ready or (left <= 0 and self.begins(flying))):
                begun[flying] = len(backwards)
                self.done(flying)
                flying = None
            elif self.ready:
                k = self.chosen(left if flying is not None and left > 0 else None)
                backwards.append(k)
                left -= self.cost[k]
                self.hold(k)
                self.done(k)
            else:
                break
        count = len(backwards)
        found = backwards[::-1]
        places = {k: i for i, k in enumerate(found)}
        return found, {k: count - n for k, n in begun.items() if count - n < places[k]}

    def free(self, several: Sequence[int]) -> None:
        """Notes what can run, or end."""
        for k in several:
            if k in self.transfers:
                self.ending.append(k)
            else:
                self.ready.setdefault(self.depth[k], set()).add(k)

    def hold(self, k: int) -> None:
        """Notes that what something reads is held before it, so that others need no more for that."""
        for var in self.buffers.read[k]:
            for reader in self.readers.pop(var, ()):
                self.need[reader] -= self.sizes[var]

    def done(self, k: int) -> None:
        """Notes that something has its place, so that what it needs may be put before it."""
        for n in self.buffers.after[k]:
            self.missing[n] -= 1
            self.asking[n] -= k
            if self.missing[n] == 1:
                self.unlocks[self.asking[n]] += 1
        self.free([n for n in self.buffers.after[k] if not self.missing[n]])

    def begins(self, transfer: int) -> bool:
        """Whether a transfer that has run for long enough begins here."""
        if self.ending:
            return True
        before, most = self.before[transfer], max(self.ready)
        if not before or before != most:
            return before > most
        best = max(self.weight(k) for k in self.ready[most])
        return (self.reads_transfer[transfer], self.unlocks[transfer], False, self.place[transfer]) > best

    def weight(self, k: int) -> tuple[bool, int, bool, int]:
        """What else is asked of what can run, once transfers before it, and those that run, have been."""
        return self.reads_transfer[k], self.unlocks[k], self.need[k] < self.buffers.made_by(k), self.place[k]

    def chosen(self, left: float | None) -> int:
        """What comes next of what can run, where a transfer still takes so long, if one does."""
        depth = max(self.ready)
        several: Collection[int] = self.ready[depth]
        if left is not None and len(several) > 1:
            off = {k: abs(left - self.cost[k]) for k in several}
            least = min(off.values())
            several = [k for k, each in off.items() if each == least]
        best = max(several, key=self.weight)
        self.ready[depth].remove(best)
        if not self.ready[depth]:
            del self.ready[depth]
        return best
