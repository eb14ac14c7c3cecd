"""The most memory that one device needs at a time: liveness of what is in memory, over kernels in an order.

Knows kernels, loops and branches. Must not know machines, times, or who reports the figure.

Arguments are there all the time, and so is room for results that do not take the memory of donated arguments; what is
temporary may be there until the result is written, if it fits. In between, a value is held from the kernel that writes
it to the last that reads it, under whatever name. A kernel that goes element by element may write over what nobody
reads after it, if it is as large. A loop holds what it carries and what it stacks once, and beside them what its body
holds at most; branches the largest of theirs.

What lies in the host's memory is counted apart: all that loops of a program, or of a body, stack there, beside what
their bodies do. What comes from there is asked for before anything else of a turn runs, and held from then on; what
goes there is held to the end of the turn, when that is waited for (seen of the TPU compiler).

TPUs hold temporary arrays in memory on the chip as far as they fit there (`Target.on_chip`), short-lived ones first.

Where a compiler chooses the order of kernels so that little is held, this takes the best of three that XLA tries
(``hlo_memory_scheduler.cc``): one that runs next what frees most, and two that follow operands from the results on, in
the order of operands, or those first that most others read. They are compared as XLA compares them: results have room
of their own, and arguments are not copied yet. Where gathers are hidden (`Target.hides_gathers`), another order is
found from that one. On CPUs kernels run as soon as they can (`Target.breadth`).
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Program, where
from vnode.operators import Algebra, describe
from vnode.operators.control import Region, region_of
from vnode.operators.cost import all_bytes, nbytes
from vnode.operators.spaces import on_host
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.device import DeviceProgram, bodies_of
from vnode.partition.cost.kernels import (
    BESIDE,
    Kernel,
    Kernels,
    Shape,
    Target,
    kernels_of,
    multiplied_inside,
    room_for,
    rounded_ends,
    shape_of,
    slides,
    sums_last,
)
from vnode.partition.cost.sums import adds
from vnode.partition.cost.tiles import in_tiles
from vnode.show.units import size

IN_PLACE = {Shape.EACH, Shape.UPDATED, Shape.SAME}
"""What may write over its operand."""

GOES_BY_EACH = {Shape.EACH, Shape.SAME, Shape.MOVED}
"""What goes element by element, so that it reads in any order; what is another name for its operand is no kernel."""

SLICED = {Shape.EACH, Shape.REDUCED, Shape.UPDATED}
"""What reads a slice of an array that a loop goes through without a copy of it."""


@dataclasses.dataclass(frozen=True)
class Held:
    """Something that is in memory at the peak.

    Attributes:
      bytes: of it.
      type: its type.
      where: the source line that makes it.
    """

    bytes: int
    type: str
    where: str


@dataclasses.dataclass(frozen=True)
class Level:
    """What is held while a kernel runs.

    Attributes:
      bytes: of temporary arrays.
      what: the kernel.
      depth: in how many loops or branches it is; of several turns one is shown, of branches the one that holds most.
    """

    bytes: int
    what: str
    depth: int = 0


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one device holds.

    Attributes:
      arguments: bytes of the inputs.
      outputs: bytes of the outputs.
      aliased: bytes of outputs that take the memory of donated inputs.
      temporaries: bytes of everything else, at the moment at which that is most.
      held: what these are then, the largest first.
      on_chip: bytes of what would be temporary too, but is on the chip, and counts nowhere here.
      host: bytes of what is temporary in the host's memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    held: tuple[Held, ...] = ()
    on_chip: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """The peak."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def __str__(self) -> str:
        lines = [
            f"{size(self.total)} a device: arguments {size(self.arguments)}, results {size(self.outputs)} "
            f"({size(self.aliased)} in place), temporary {size(self.temporaries)}"
        ]
        if self.on_chip:
            lines[0] += f", on the chip {size(self.on_chip)}"
        if self.host:
            lines[0] += f", on the host {size(self.host)}"
        lines += [f"  {size(each.bytes)} {each.type} of {each.where}" for each in self.held[:5]]
        return "\n".join(lines)


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
      early: copies of arguments that are made before all else.
      vacant: arguments of which there is a copy: their bytes, who reads them themselves, and the kernel that brings a
        result there, if it is not the last. In between others may be where they were.
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
    early: frozenset[Var] = frozenset()
    vacant: tuple[tuple[int, frozenset[int], int | None], ...] = ()

    def lodged(self, moments: Sequence[tuple[int, Mapping[Var, int]]], away: Sequence[Collection[object]]) -> set[Var]:
        """What is where an argument was, as long as it is held: the largest first, in the smallest place that fits.

        Args:
          moments: kernels in their order, and what is held while each runs.
          away: for each of these what is on the chip.
        """
        if not self.vacant:
            return set()
        place = {k: i for i, (k, _) in enumerate(moments)}
        places = [  # bytes, from when to when
            (need, max((place[k] for k in readers), default=-1) + 1, len(moments) if end is None else place[end])
            for need, readers, end in self.vacant
        ]
        spans: dict[Var, list[int]] = {}
        for i, (_, sizes) in enumerate(moments):
            for var, need in sizes.items():
                if need and var not in away[i] and var not in self.kept and var not in self.early:
                    spans.setdefault(var, [i, i, need])[1] = i
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

    def overlapped(
        self, order: Sequence[int], seconds: Mapping[int, float], beside: Collection[int]
    ) -> tuple[list[int], dict[int, int]]:
        """Another order, in which transfers run beside computation, one at a time, as XLA's scheduler finds it.

        (``latency_hiding_scheduler.cc``.) It goes from the end to the beginning. As soon as all that reads what is
        transferred has its place, the transfer ends there; what else can run is put before that until it takes as long
        as the transfer, which begins there, or until nothing is left that can. Of what can, that comes first that waits
        for transfers that take longest, so that those of arguments come early in the program; then what does not need
        more in memory before it than it brings there, then what has most time before it.

        Args:
          order: of the kernels, by which it is settled what else is not.
          seconds: how long each takes; what is not among them hides nothing.
          beside: those that are such transfers.

        Returns:
          The order, and for transfers that begin before their place in it, where that is.
        """
        place = {k: i for i, k in enumerate(order)}
        missing = [0] * len(self.after)  # who has no place yet and needs it
        for needs in self.after:
            for n in needs:
                missing[n] += 1
        depth: dict[int, float] = {}  # seconds of transfers that come before the end of each, one after another
        path: dict[int, float] = {}  # and of all of these that come before it
        for k in order:
            own = seconds.get(k, 0.0) if k in beside else 0.0
            depth[k] = max((depth[n] for n in self.after[k]), default=0.0) + own
            path[k] = max((path[n] for n in self.after[k]), default=0.0) + seconds.get(k, 0.0)
        sizes = {var: need for written in self.written for var, need in written}
        ready: list[tuple[float, float, int, int]] = []  # what can run, by when that is wanted
        ending: list[tuple[float, float, int, int]] = []  # transfers that can end
        live, backwards, started = set[Var](), list[int](), dict[int, int]()

        def free(several: Iterable[int]) -> None:
            for k in several:
                if not missing[k]:
                    heapq.heappush(ending if k in beside else ready, (-depth[k], -path[k], -place[k], k))

        def done(k: int) -> None:
            for n in self.after[k]:
                missing[n] -= 1
            free(n for n in self.after[k] if not missing[n])

        def raises(k: int) -> bool:
            """Whether more is held before a kernel than after it."""
            return sum(sizes.get(v, 0) for v in self.read[k] - live) > self.made_by(k)

        def wanted() -> int:
            """Of what can run, what follows most transfers, raises nothing, follows most of all."""
            equal = [heapq.heappop(ready)]
            while ready and raises(equal[-1][-1]) and ready[0][0] == equal[0][0]:
                equal.append(heapq.heappop(ready))
            best = equal.pop() if not raises(equal[-1][-1]) else equal.pop(0)
            for each in equal:
                heapq.heappush(ready, each)
            return best[-1]

        free(order)
        flying: int | None = None
        left = 0.0
        while True:
            if flying is None and ending:
                flying = heapq.heappop(ending)[-1]
                left = seconds.get(flying, 0.0)
                backwards.append(flying)
            elif flying is not None and (left <= 0 or not ready):
                started[flying] = len(backwards)
                done(flying)
                flying = None
            elif ready:
                k = wanted()
                backwards.append(k)
                left -= seconds.get(k, 0.0)
                live.update(self.read[k])
                done(k)
            else:
                break
        count = len(order)
        found = backwards[::-1]
        places = {k: i for i, k in enumerate(found)}
        return found, {k: count - n for k, n in started.items() if count - n < places[k]}

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
        if target.breadth:
            return self.breadth_first()
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


def memory_of(device: DeviceProgram, target: Target, seconds: Sequence[float] = ()) -> Memory:
    """The peak of one device's program.

    Args:
      device: the program.
      target: what the compiler takes together.
      seconds: how long its kernels take, so that transfers begin early enough to run beside others.

    Returns:
      The memory.
    """
    program = device.program
    kernels, buffers, own, aliased = outer_buffers(device, target)
    most, at, when, on_chip = 0, -1, frozenset[Var](), 0
    moments, away = placed(kernels, buffers, own, program, target, seconds=seconds)
    lodged = buffers.lodged(moments, away)
    for place, (k, sizes) in enumerate(moments):
        near = away[place]
        left = {var: need for var, need in sizes.items() if var not in near and var not in lodged}
        inside = 0 if k in near else buffers.inside[k]
        now = sum(left.values()) + inside - in_results(left, own, kernels)
        if now > most or at < 0:
            most, at, when = now, k, frozenset(left)
        there = sum(need for var, need in sizes.items() if var in near)
        on_chip = max(on_chip, there + buffers.inside[k] - inside)
    definitions = program.definitions
    held = [
        Held(kernels.nbytes(var), var.aval.str_short(short_dtypes=True), where(definitions[var]))
        for var in when
        if var in definitions and var not in own
    ]
    if at >= 0 and buffers.inside[at] and most:
        held.append(Held(buffers.inside[at], "in a loop or branch", where(kernels.kernels[buffers.of[at]].root)))
    held.sort(key=lambda each: -each.bytes)
    arguments = sum(room_for(var.aval, target.tiles) for var in program.inputs)
    outputs = sum(room_for(atom.aval, target.tiles) for atom in program.outputs)
    return Memory(arguments, outputs, aliased, most, tuple(held), on_chip, host_bytes(program))


def placed(
    kernels: Kernels,
    buffers: Buffers,
    own: Collection[Var],
    program: Program,
    target: Target,
    *,
    again: bool = False,
    seconds: Sequence[float] = (),
) -> tuple[list[tuple[int, dict[Var, int]]], list[set[object]]]:
    """The kernels in their order, with what is held while each runs, and for each what is on the chip.

    Args:
      kernels: of the program.
      buffers: what they write and read.
      own: what is where results belong.
      program: whose.
      target: how much room the chip has.
      again: whether what is fetched of temporary arrays in memory is there, too.
      seconds: how long kernels take; gathers then begin before them.
    """
    order = buffers.under(target)
    begun: dict[int, int] = {}
    if target.hides_gathers and len(seconds):
        order, begun = beside_computation(kernels, buffers, order, seconds)
    moments = [(k, dict(sizes)) for k, _, sizes in buffers.held(order, begun, begun_empty(kernels) if begun else ())]
    fetched = [arguments_of(kernels.kernels[buffers.of[k]], program, kernels) for k, _ in moments]
    loops = [place for place, (k, _) in enumerate(moments) if kernels.kernels[buffers.of[k]].shape is Shape.REGION]
    reads: list[dict[Var, int]] = []
    for place, (k, sizes) in enumerate(moments if again else ()):
        kernel = kernels.kernels[buffers.of[k]]
        several = set() if kernel.shape is Shape.REGION else set(map(kernels.memory_of, kernel.piece.reads))
        reads.append({var: sizes[var] for var in several & sizes.keys() if sizes[var] and var not in fetched[place]})
    return moments, on_the_chip(moments, fetched, buffers.inside, own, target.on_chip, loops, reads)


def is_gather(kernel: Kernel) -> bool:
    """Whether a kernel gathers over devices."""
    return kernel.shape is Shape.COLLECTIVE and KINDS[kernel.root.primitive.name] == "all-gather"


def beside_computation(
    kernels: Kernels, buffers: Buffers, order: Sequence[int], seconds: Sequence[float]
) -> tuple[list[int], dict[int, int]]:
    """An order in which gathers run beside computation, which other exchanges do not, and where they begin."""
    own = [kernels.kernels[k] for k in buffers.of]
    gathers = [k for k in order if is_gather(own[k])]
    lengths = {k: seconds[buffers.of[k]] for k in order if own[k].shape is not Shape.COLLECTIVE or is_gather(own[k])}
    if not gathers:
        return [*order], {}
    return buffers.overlapped(order, lengths, {*gathers})


def begun_empty(kernels: Kernels) -> set[Var]:
    """What loops add up, from constants: TPUs' compiler has room for it before gathers begin."""
    empty, found = made_of_nothing(kernels), set[Var]()
    for kernel in kernels.kernels:
        region = region_of(kernel.root) if kernel.shape is Shape.REGION else None
        if region is None or not region.carried or region.tests:
            continue
        (body,) = bodies_of(kernel.root)
        makers = body.definitions
        for var, i, end in zip(kernel.root.outvars, region.carried, body.outputs, strict=False):
            total, begin = makers.get(end) if isinstance(end, Var) else None, kernel.root.invars[i]
            if total is None or not adds(total) or not isinstance(begin, Var) or begin not in empty:
                continue
            if any(atom is body.inputs[i] for atom in total.invars):
                found.add(var)
    return found


def near_of(device: DeviceProgram, target: Target) -> tuple[Kernels, list[frozenset[Var]]]:
    """The kernels of a program, and for each of them what it reads or writes on the chip."""
    kernels, buffers, own, _ = outer_buffers(device, target)
    found: list[frozenset[Var]] = [frozenset() for _ in kernels.kernels]
    if not target.on_chip:
        return kernels, found
    moments, away = placed(kernels, buffers, own, device.program, target, again=True)
    for place, (k, _) in enumerate(moments):
        on_chip = {each[1] if isinstance(each, tuple) else each for each in away[place]}
        piece = kernels.kernels[buffers.of[k]].piece
        found[buffers.of[k]] |= {var for var in (*piece.reads, *piece.writes) if kernels.memory_of(var) in on_chip}
    return kernels, found


def host_bytes(program: Program) -> int:
    """Bytes of what a program's loops stack in the host's memory, beside the most that their bodies have there.

    >>> import jax, jax.numpy as jnp
    >>> from vnode.analysis.program import inline
    >>> turn = lambda c, x: (c, jax.device_put(c * x, jax.memory.Space.Host))
    >>> traced = jax.make_jaxpr(lambda x: jax.lax.scan(turn, x[0], x)[0])(jnp.ones((4, 3)))
    >>> host_bytes(inline(traced.jaxpr, traced.consts))
    48
    """
    own = inner = 0
    for eqn in program.equations:
        if region_of(eqn) is not None:
            own += sum(all_bytes(var.aval) for var in eqn.outvars if on_host(var.aval))
            inner = max([inner, *map(host_bytes, bodies_of(eqn))])
    return own + inner


def on_the_chip(
    moments: Sequence[tuple[int, Mapping[Var, int]]],
    fetched: Sequence[Mapping[Var, int]],
    inside: Sequence[int],
    own: Collection[Var],
    room: int,
    loops: Collection[int] = (),
    again: Sequence[Mapping[Var, int]] = (),
) -> list[set[object]]:
    """What is in memory on the chip, for each kernel in an order: what is held for the fewest kernels comes first.

    So goes XLA's assignment of memory spaces in the main: it weighs the accesses that become fast against the time for
    which room is taken. Arguments take room too: they are fetched while the kernel before runs. Of what is brought
    back there from memory, memory keeps a copy, which counts. What is held while a loop runs is in memory, unless all
    of that fits on the chip: so it was in compiled scans over layers.

    Args:
      moments: kernels in their order, and what is held while each runs.
      fetched: for each of these, the arguments that it reads, with their bytes.
      inside: for each kernel, what it holds beside.
      own: what is where results belong, in memory.
      room: bytes on the chip.
      loops: the places of those that are loops or branches: what is held while one runs is in memory, if not all fits.
      again: for each of the kernels what it reads of temporary arrays: what is in memory is fetched if room is left.

    Returns:
      Variables, and numbers of kernels of which what they hold beside is on the chip.
    """
    found: list[set[object]] = [set() for _ in moments]
    if not room:
        return found
    spans: dict[object, list[int]] = {}
    for place, (k, sizes) in enumerate(moments):
        for var, need in sizes.items():
            if need and var not in own:
                spans.setdefault(var, [place, place, need])[1] = place
        if inside[k]:
            spans[k] = [place, place, inside[k]]
        for var, need in fetched[place].items():
            spans[place, var] = [max(place - 1, 0), place, need]
    crowded = [place for place in loops if sum(moments[place][1].values()) + inside[moments[place][0]] > room]
    free = [room] * len(moments)
    for each, (start, end, need) in sorted(spans.items(), key=lambda item: (item[1][1] - item[1][0], item[1][0])):
        passes = not isinstance(each, int) and any(start <= place <= end for place in crowded)
        if not passes and need <= min(free[start : end + 1]):
            for place in range(start, end + 1):
                free[place] -= need
                found[place].add(each)
    for place, reads in enumerate(again):
        before = max(place - 1, 0)
        for var, need in sorted(reads.items(), key=lambda item: -item[1]):
            if var not in found[place] and need <= min(free[before], free[place]):
                free[place] -= need
                free[before] -= need if before != place else 0
                found[place].add((place, var))
    return found


def arguments_of(kernel: Kernel, program: Program, kernels: Kernels) -> dict[Var, int]:
    """The arguments that a kernel reads, with their bytes; not those of loops, which read a part at a time."""
    if kernel.shape is Shape.REGION:
        return {}
    given = {*program.inputs}
    return {v: kernels.nbytes(v) for v in map(kernels.memory_of, kernel.piece.reads) if v in given}


def levels_over_time(device: DeviceProgram, target: Target) -> list[Level]:
    """What one device's program holds besides arguments and results, kernel after kernel in the order of a compiler.

    What TPUs hold on the chip is among it.

    Args:
      device: the program.
      target: what the compiler takes together.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.analysis.program import inline
      >>> traced = jax.make_jaxpr(lambda x: (jnp.tanh(x @ x) @ x).sum())(jnp.ones((8, 8)))
      >>> device = DeviceProgram(inline(traced.jaxpr, traced.consts), {})
      >>> [(each.what, each.bytes) for each in levels_over_time(device, Target.on("cpu"))]
      [('dot_general', 256), ('tanh', 256), ('dot_general', 512), ('reduce_sum', 256)]
    """
    kernels, buffers, own, _ = outer_buffers(device, target)
    levels: list[Level] = []
    moments = [(k, now, dict(sizes)) for k, now, sizes in buffers.held(buffers.under(target))]
    lodged = buffers.lodged([(k, sizes) for k, _, sizes in moments], [()] * len(moments))
    for k, now, sizes in moments:
        elsewhere = sum(need for var, need in sizes.items() if var in lodged)
        left = {var: need for var, need in sizes.items() if var not in lodged}
        beside = now - buffers.inside[k] - elsewhere - in_results(left, own, kernels)
        levels += levels_of(kernels.kernels[buffers.of[k]], beside, buffers.inside[k], target, kernels)
    return levels


def outer_buffers(device: DeviceProgram, target: Target) -> tuple[Kernels, Buffers, set[Var], int]:
    """The kernels of a program, what they hold, which of it are results, and how many bytes take arguments' place."""
    program = device.program
    kernels = kernels_of(program, target)
    there = {*program.inputs, *program.constants}
    taken, aliased, elsewhere = set[int](), 0, set(there)
    matched: dict[Var, Var] = {}  # results in place of arguments
    for atom in program.outputs:  # as jax matches what is donated: in order, by type
        for i in sorted(device.donated - taken):
            given = program.inputs[i].aval
            if (given.shape, given.dtype) == (getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None)):
                taken.add(i)
                aliased += room_for(given, target.tiles)
                if isinstance(atom, Var):
                    elsewhere.add(kernels.memory_of(atom))
                    matched[kernels.memory_of(atom)] = program.inputs[i]
                break
    moved = brought_in_place(kernels, program, matched) if target.copies_gathered else {}
    elsewhere -= moved.keys()
    own = {kernels.memory_of(atom) for atom in program.outputs if isinstance(atom, Var)} - elsewhere - moved.keys()
    buffers = buffers_of(kernels, target, elsewhere=elsewhere, written_over=(), kept=own | moved.keys())
    buffers = with_copies(buffers, kernels, moved.values())
    return kernels, turned_first(buffers, kernels, matched) if target.turns_updates else buffers, own, aliased


def turned_first(buffers: Buffers, kernels: Kernels, matched: Mapping[Var, Var]) -> Buffers:
    """The buffers, with copies of arguments that an update reads in the order of their gradients.

    Where an update reads a gradient that was transposed, and does not compute it, TPUs' compiler turns the argument
    before anything else runs, updates the copy, and turns that back.

    Args:
      buffers: of the kernels.
      kernels: of the program.
      matched: the results in place of arguments, with these.
    """
    written, read, vacant = [*buffers.written], [*buffers.read], [*buffers.vacant]
    early = set[Var]()
    for k, kernel in enumerate(kernels.kernels):
        results = [matched.get(kernels.memory_of(var)) for var in kernel.piece.writes]
        given = results[0] if len(results) == 1 else None
        if given is None or given not in kernel.piece.reads or not turns_another(kernel, given):
            continue
        readers = frozenset(
            n for n, own in enumerate(kernels.kernels) if n != k and given in map(kernels.memory_of, own.piece.reads)
        )
        copy = Var(given.aval)
        written[min(readers, default=k)] += ((copy, kernels.nbytes(given)),)
        read[k] |= {copy}
        early.add(copy)
        vacant.append((kernels.nbytes(given), readers, k))
    return dataclasses.replace(
        buffers, written=tuple(written), read=tuple(read), vacant=tuple(vacant), early=frozenset(early)
    )


def turns_another(kernel: Kernel, given: Var) -> bool:
    """Whether a kernel that multiplies nothing turns something as large as an argument that it reads as it is."""
    several = [describe(eqn) for eqn in kernel.piece.equations]
    if any(of is not None and of.has(Algebra.CONTRACTS) for of in several):
        return False
    turned = [eqn for eqn, of in zip(kernel.piece.equations, several, strict=True) if shape_of(eqn, of) is Shape.MOVED]
    sizes = {eqn.invars[0].aval.size for eqn in turned if eqn.params["permutation"][-1] != eqn.invars[0].aval.ndim - 1}
    return given.aval.size in sizes


def brought_in_place(kernels: Kernels, program: Program, matched: Mapping[Var, Var]) -> dict[Var, Var]:
    """The results in place of arguments that are gathered, with these arguments: TPUs' compiler copies both.

    A gather does not write where an argument is; what is brought there in the end is copied, and so is the argument
    before it is read, as long as it is read.
    """
    gathers = {var for kernel in kernels.kernels if is_gather(kernel) for var in kernel.piece.writes}
    return {result: given for result, given in matched.items() if kernels.memory_of(result) in gathers}


def with_copies(buffers: Buffers, kernels: Kernels, given: Collection[Var]) -> Buffers:
    """The buffers, with copies of some arguments from the first kernel that reads them to the last."""
    written, read, vacant = [*buffers.written], [*buffers.read], [*buffers.vacant]
    for var in given:
        copy = Var(var.aval)
        readers = [k for k, own in enumerate(kernels.kernels) if var in map(kernels.memory_of, own.piece.reads)]
        for place, k in enumerate(readers):
            if not place:
                written[k] += ((copy, kernels.nbytes(var)),)
                vacant.append((kernels.nbytes(var), frozenset({k}), None))
            read[k] |= {copy}
    return dataclasses.replace(buffers, written=tuple(written), read=tuple(read), vacant=tuple(vacant))


def in_results(held: Mapping[Var, int], own: Collection[Var], kernels: Kernels) -> int:
    """Bytes of what is held that are where results belong: results are, and what is there until these are written."""
    room = sorted(kernels.nbytes(var) for var in own if var not in held)
    found = sum(kernels.nbytes(var) for var in own if var in held)
    for need in sorted((kernels.nbytes(var) for var in held if var not in own), reverse=True) if room else ():
        fits = bisect.bisect_left(room, need)  # the smallest place that is large enough
        if fits < len(room):
            found += need
            del room[fits]
    return found


def levels_of(kernel: Kernel, beside: int, inside: int, target: Target, outer: Kernels) -> list[Level]:
    """What is held while a kernel runs, beside others: of a loop or branch, kernel after kernel of its body."""
    region = region_of(kernel.root) if kernel.shape is Shape.REGION else None
    found = [] if region is None else max(inner_levels(kernel.root, region, target, outer), key=highest, default=[])
    if not found:
        return [Level(beside + inside, str(kernel.piece))]
    return [dataclasses.replace(each, bytes=each.bytes + beside, depth=each.depth + 1) for each in found]


def highest(levels: Sequence[Level]) -> int:
    """The most bytes of several levels."""
    return max((each.bytes for each in levels), default=0)


def inner_levels(eqn: JaxprEqn, region: Region, target: Target, outer: Kernels) -> list[list[Level]]:
    """What each body of a loop or branch holds beside its operands and results, kernel after kernel."""
    found = []
    for k, (body, inputs) in enumerate(zip(bodies_of(eqn), region.inputs, strict=True)):
        rounded = rounded_ends(eqn, body, outer) if target.contractions else frozenset[Var]()
        kernels, buffers, slices = body_buffers(body, inputs, region, k < region.tests, target, rounded)
        levels: list[Level] = []
        for n, now, _ in buffers.held(buffers.under(target)):
            own = buffers.inside[n]
            levels += levels_of(kernels.kernels[buffers.of[n]], now - own + slices, own, target, kernels)
        found.append(levels)
    return found


def buffers_of(
    kernels: Kernels,
    target: Target,
    *,
    elsewhere: Collection[Var],
    written_over: Collection[Var],
    kept: Collection[Var] = (),
) -> Buffers:
    """What kernels of a program write and read.

    Args:
      kernels: of the program.
      target: for bodies.
      elsewhere: variables whose memory is not counted here.
      written_over: those of them that may be written over after the last reader.
      kept: variables that are held to the end.
    """
    maker = {kernels.memory_of(var): k for k, each in enumerate(kernels.kernels) for var in each.piece.writes}
    written: list[tuple[tuple[Var, int], ...]] = []
    read: list[frozenset[Var]] = []
    inside, over = list[int](), list[tuple[tuple[Var, Var], ...]]()
    later: list[tuple[int, list[Var], list[tuple[tuple[Var, int], ...]]]] = []  # of kernels what else they do, in order
    counted = set(maker) - set(elsewhere) - (made_in_loops(kernels) if target.sinks else set())
    readers: dict[Var, list[Shape]] = {}
    beside: dict[int, list[Var]] = {}  # for loops what they hold besides their results
    rounded: dict[Var, Var] = {}  # what loops read, as it is made in bfloat16 before the first of them
    for kernel in kernels.kernels:
        for var in kernel.piece.reads:
            readers.setdefault(kernels.memory_of(var), []).append(kernel.shape)
    for k, kernel in enumerate(kernels.kernels):
        if kernel.root.primitive is BESIDE:
            beside.setdefault(maker.get(kernels.memory_of(kernel.piece.reads[0]), k), []).extend(kernel.piece.writes)
    made = list[int]()
    for k, kernel in enumerate(kernels.kernels):
        made.append(sum(kernels.nbytes(var) for var in kernel.piece.writes))
        wrote = [] if kernel.root.primitive is BESIDE else kernel.piece.writes
        outs = [var for var in (*wrote, *beside.get(k, ())) if type(var) is Var]
        reads = dict.fromkeys(map(kernels.memory_of, kernel.piece.reads))  # in order, so that peaks do not vary
        region = region_of(kernel.root) if kernel.shape is Shape.REGION else None
        own = tuple((var, kernels.nbytes(var)) for var in outs if var in counted)
        more = (
            copied(kernel, readers, target, kernels)
            if region is None
            else inside_of(kernel.root, region, target, kernels)
        )
        if more and region is None and "scatter_dimension" not in kernel.root.params:
            pieces = [Var(outs[0].aval)]  # as they come; if there are others, also as they are sent
            if "split_axis" in kernel.root.params:
                pieces.append(Var(outs[0].aval))
            later.append((k, [*pieces], [*[((var, more),) for var in pieces[1:]], own]))
            own, more = ((pieces[0], more),), 0
        written.append(own)
        for var in multiplied_in(kernel, region, kernels) if target.contractions else ():
            if var not in rounded:
                rounded[var] = Var(var.aval)
                written[-1] += ((rounded[var], kernels.nbytes(var) // 2),)
            reads[rounded[var]] = None
        own_copies = {*rounded.values()}
        read.append(frozenset(v for v in reads if v in counted or v in written_over or v in own_copies))
        inside.append(more)
        moved = moved_within(kernel, kernels) if target.ordered else multiplied_within(kernel, kernels)
        pairs = overwritten(kernel, region, kernels, [var for var in reads if var not in moved], target)
        over.append(tuple(sorted(pairs, key=lambda pair: pair[1] not in written_over)))  # where it is wanted, if it can
    of = list(range(len(written)))
    before = list[int]()
    for k, pieces, results in later:
        for place, (var, own) in enumerate(zip(pieces, results, strict=True)):
            before.append(len(written) - 1 if place else k)
            made.append(sum(need for _, need in own))
            for entries, entry in ((written, own), (read, frozenset({var})), (inside, 0), (over, ()), (of, k)):
                entries.append(entry)  # type: ignore[arg-type]
        maker.update((var, len(written) - 1) for var, _ in results[-1])
    several = [[maker[v] for v in map(kernels.memory_of, each.piece.reads) if v in maker] for each in kernels.kernels]
    operands = [*(tuple(dict.fromkeys(each)) for each in several), *((k,) for k in before)]
    results = [kernels.memory_of(atom) for atom in kernels.program.outputs if isinstance(atom, Var)]
    there = [
        tuple((var, kernels.nbytes(var)) for var in each.piece.writes if var in results and var not in counted)
        for each in kernels.kernels
    ]
    after = [*map(frozenset, operands)]
    sent = [kernel for kernel in kernels.kernels if kernel.shape is Shape.AWAY and on_host(kernel.root.outvars[0].aval)]
    last_read = {var for kernel in sent for var in map(kernels.memory_of, kernel.piece.reads) if var in counted}
    ends = frozenset(kernels.memory_of(var) for var in kept) | last_read
    last = {k for k, kernel in enumerate(kernels.kernels) if target.library and by_itself(kernel, kernels.program)}
    fetches = [kernel.shape is Shape.AWAY and not on_host(kernel.root.outvars[0].aval) for kernel in kernels.kernels]
    first = {k for k, fetch in enumerate(fetches) if fetch and not after[k]}
    return Buffers(
        tuple(written),
        tuple(read),
        tuple(inside),
        tuple(over),
        ends,
        tuple(after),
        tuple(of),
        frozenset(last),
        frozenset(first),
        ends=tuple(dict.fromkeys(maker[var] for var in results if var in maker)),
        operands=tuple(operands),
        made=tuple(made),
        results=tuple(there),
    )


def multiplied_in(kernel: Kernel, region: Region | None, kernels: Kernels) -> list[Var]:
    """What a loop is given that is the same at every turn, in float32, and that it only multiplies, in bfloat16.

    (TPUs' compiler rounds it once, before the loop; seen of weights.)
    """
    if region is None or not region.carried:
        return []
    found: dict[Var, bool] = {}
    for body, inputs in zip(bodies_of(kernel.root), region.inputs, strict=True):
        fit = multiplied_inside(body, rounded_ends(kernel.root, body, kernels))
        for i, var in zip(inputs, body.inputs, strict=True):
            atom = kernel.root.invars[i]
            if i in region.fixed and isinstance(atom, Var):
                held = kernels.memory_of(atom)
                found[held] = found.get(held, True) and var in fit
    return [var for var, fits in found.items() if fits and var not in kernels.narrow]


def by_itself(kernel: Kernel, program: Program) -> bool:
    """Whether a kernel is a product that sums over another dimension of its first operand than the last."""
    of = program.describe(kernel.root) if kernel.shape is Shape.CONTRACTED else None
    return of is not None and not slides(kernel.root, program) and not sums_last(of)


def made_of_nothing(kernels: Kernels) -> set[Var]:
    """What is made of constants alone."""
    nothing: set[Var] = set()
    for eqn in kernels.program.equations:
        read = {atom for atom in eqn.invars if isinstance(atom, Var)}
        if region_of(eqn) is None and not eqn.effects and read <= nothing:
            nothing.update(eqn.outvars)
    return nothing


def made_in_loops(kernels: Kernels) -> set[Var]:
    """What is made of constants, and read by loops alone: compilers make it there, bit by bit.

    (``WhileLoopConstantSinking``; seen of broadcasts and masks in programs for TPUs.) What loops carry and begin with
    so is in the place of what they give.
    """
    found = {kernels.memory_of(var) for var in made_of_nothing(kernels)}
    found -= {kernels.memory_of(atom) for atom in kernels.program.outputs if isinstance(atom, Var)}
    for kernel in kernels.kernels:
        region = region_of(kernel.root) if kernel.shape is Shape.REGION else None
        changing = region.scanned if region is not None else ()
        reads = kernel.piece.reads if region is None else [kernel.root.invars[i] for i in changing]
        found -= {kernels.memory_of(atom) for atom in reads if isinstance(atom, Var)}
    return found


def copied(kernel: Kernel, readers: Mapping[Var, Collection[Shape]], target: Target, kernels: Kernels) -> int:
    """The bytes that collectives copy where arrays are exchanged along their first dimension only, in pieces.

    On CPUs; what is gathered along another is put in order by those who read it, if these go element by element. On
    TPUs (`Target.turns`) only what everybody exchanges pieces of: the pieces are then outside of whole tiles.
    """
    if kernel.shape is not Shape.COLLECTIVE or not (target.ordered or target.turns):
        return 0
    total = 0
    for eqn in kernel.piece.equations:
        place = next((eqn.params[name] for name in ALONG if name in eqn.params), None)
        if place is None or ("split_axis" not in eqn.params and not target.ordered):
            continue
        held = max(sum(nbytes(var.aval) for var in several) for several in (eqn.invars, eqn.outvars))
        if target.tiles:
            held = sum(in_pieces(atom.aval, place) for atom in eqn.invars)
            held //= 2 if kernels.narrow.issuperset(eqn.outvars) else 1
        fused = "all_gather_dimension" in eqn.params and {*readers.get(eqn.outvars[0], ())} <= GOES_BY_EACH
        first = fused or math.prod(eqn.outvars[0].aval.shape[:place]) == 1
        total += held if "split_axis" in eqn.params or not first else 0
    return total


def in_pieces(aval: Any, place: int) -> int:
    """Bytes of an array in whole tiles of which none reaches over several indices of one dimension."""
    pieces, rest = aval.shape[place], (*aval.shape[:place], *aval.shape[place + 1 :])
    return pieces * in_tiles(rest) * (nbytes(aval) // max(aval.size, 1))


ALONG = "all_gather_dimension", "scatter_dimension", "split_axis"
"""How collectives call the dimension along which they exchange."""


def overwritten(
    kernel: Kernel, region: Region | None, kernels: Kernels, reads: Collection[Var], target: Target
) -> list[tuple[Var, Var]]:
    """Which results of a kernel may take the memory of which operands."""
    if region is not None:
        pairs = zip(kernel.root.outvars, [kernel.root.invars[i] for i in region.carried], strict=False)
        return [(out, kernels.memory_of(atom)) for out, atom in pairs if isinstance(atom, Var)]
    if kernel.shape is Shape.COLLECTIVE and target.adds_in_place and KINDS[kernel.root.primitive.name] == "all-reduce":
        several = [pair for eqn in kernel.piece.equations for pair in zip(eqn.outvars, eqn.invars, strict=True)]
        pairs = [(out, kernels.memory_of(atom)) for out, atom in several if isinstance(atom, Var)]
        return [(out, var) for out, var in pairs if var in reads and kernels.nbytes(var) == kernels.nbytes(out)]
    if kernel.shape not in IN_PLACE:
        return []
    return [(out, var) for out in kernel.piece.writes for var in reads if kernels.nbytes(var) == kernels.nbytes(out)]


def moved_within(kernel: Kernel, kernels: Kernels) -> set[Var]:
    """What a kernel reads at other places than it writes to, so that it cannot write over it."""
    found = set[Var]()
    for eqn in reversed(kernel.piece.equations):
        of = kernels.program.describe(eqn)
        there = eqn is kernel.root and kernel.shape is Shape.UPDATED
        sizes = {atom.aval.size for atom in (*eqn.invars, *eqn.outvars)}
        moves = of is not None and of.has(Algebra.MOVES) and len(sizes) > 1
        turns = shape_of(eqn, of) is Shape.MOVED
        if not there and (moves or turns or found.intersection(eqn.outvars)):
            found.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return {kernels.memory_of(var) for var in found}


def multiplied_within(kernel: Kernel, kernels: Kernels) -> set[Var]:
    """What a kernel multiplies, all of it for each element that it writes, so that it cannot write over it."""
    found = set[Var]()
    for eqn in reversed(kernel.piece.equations):
        of = kernels.program.describe(eqn)
        if (of is not None and of.has(Algebra.CONTRACTS)) or found.intersection(eqn.outvars):
            found.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return {kernels.memory_of(var) for var in found}


def inside_of(eqn: JaxprEqn, region: Region, target: Target, outer: Kernels) -> int:
    """The most bytes that the bodies of a loop or branch hold beside its operands and results."""
    peaks = [0]
    for k, (body, inputs) in enumerate(zip(bodies_of(eqn), region.inputs, strict=True)):
        rounded = rounded_ends(eqn, body, outer) if target.contractions else frozenset[Var]()
        _, buffers, slices = body_buffers(body, inputs, region, k < region.tests, target, rounded)
        peaks.append(buffers.peak(buffers.under(target)) + slices)
    return max(peaks)


def body_buffers(
    program: Program, inputs: Sequence[int], region: Region, tests: bool, target: Target, rounded: frozenset[Var]
) -> tuple[Kernels, Buffers, int]:
    """The kernels of a body, what they hold beside its loop or branch, and bytes of slices that it copies."""
    kernels = kernels_of(program, target, rounded)
    given: Mapping[int, Var] = dict(zip(inputs, program.inputs, strict=True))
    carried = [given[i] for i in region.carried if i in given]
    ends = [] if tests else program.outputs
    count = len(region.carried)
    elsewhere = {*program.inputs, *program.constants}
    if not region.carried:  # a branch writes its results where they belong
        elsewhere |= {kernels.memory_of(atom) for atom in ends if isinstance(atom, Var)}
    else:
        shapes = {kernels.memory_of(var): each.shape for each in kernels.kernels for var in each.piece.writes}
        read = {var for each in kernels.kernels for var in map(kernels.memory_of, each.piece.reads)} | {*ends}
        for var, atom in zip(carried, ends, strict=False):  # what nobody reads is written over at once
            if isinstance(atom, Var) and var not in read:
                elsewhere.add(kernels.memory_of(atom))
        for atom in ends[count:]:  # stacked: what goes element by element is written in its place
            if isinstance(atom, Var) and shapes.get(kernels.memory_of(atom)) in IN_PLACE:
                elsewhere.add(kernels.memory_of(atom))
    kept = [atom for atom in ends if isinstance(atom, Var) and kernels.memory_of(atom) not in elsewhere]
    buffers = buffers_of(kernels, target, elsewhere=elsewhere, written_over=carried, kept=kept)
    slices = 0
    for i in region.scanned:
        readers = [each for each in kernels.kernels if given[i] in map(kernels.memory_of, each.piece.reads)]
        if any(each.shape not in SLICED for each in readers):
            slices += nbytes(given[i].aval)
    return kernels, buffers, slices
