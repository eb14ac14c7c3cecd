"""The most memory that one device needs at a time: liveness of what is in memory, over kernels in an order.

Knows kernels, loops and branches. Must not know machines, times, or who reports the figure.

Arguments are there all the time, and so is room for results that do not take the memory of donated arguments; what is
temporary may be there until the result is written, if it fits. In between, a value is held from the kernel that writes
it to the last that reads it, under whatever name.

What lies in the host's memory is counted apart: all that loops of a program, or of a body, stack there, beside what
their bodies do. What comes from there is asked for before anything else of a turn runs, and held from then on; what
goes there is held to the end of the turn, when that is waited for (seen of the TPU compiler).

TPUs hold temporary arrays in memory on the chip as far as they fit there (`Target.on_chip`), short-lived ones first.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Program, where
from vnode.operators.control import Region, region_of
from vnode.operators.cost import all_bytes
from vnode.operators.spaces import on_host
from vnode.partition.cost.buffers import Buffers
from vnode.partition.cost.device import DeviceProgram, bodies_of
from vnode.partition.cost.narrow import rounded_ends
from vnode.partition.cost.overlap import apart, beside_computation
from vnode.partition.cost.places import outer_buffers
from vnode.partition.cost.shapes import Kernel, Kernels, Shape, room_for
from vnode.partition.cost.taken import begun_empty, body_buffers
from vnode.partition.cost.target import Target
from vnode.show.units import size


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
    moments, away = placed(kernels, buffers, own, device, target, seconds=seconds)
    lodged = buffers.lodged(moments, away)

    def in_memory(place: int) -> dict[Var, int]:
        near = away[place]
        return {var: need for var, need in moments[place][1].items() if var not in near and var not in lodged}

    on_chip, beside = 0, list[int]()
    for place, (k, sizes) in enumerate(moments):
        near = away[place]
        inside = 0 if k in near else buffers.inside[k]
        there = sum(need for var, need in sizes.items() if var in near)
        on_chip = max(on_chip, there + buffers.inside[k] - inside)
        beside.append(sum(in_memory(place).values()) + inside)
    most, peak = 0, -1
    for place in sorted(range(len(moments)), key=lambda place: -beside[place]):
        if peak >= 0 and beside[place] < most:  # what is where results belong makes it less
            break
        now = beside[place] - in_results(in_memory(place), own, kernels)
        if peak < 0 or (now, -place) > (most, -peak):
            most, peak = now, place
    at, when = (moments[peak][0], in_memory(peak)) if moments else (-1, {})
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
    outputs += target.pointer * len(program.outputs[1:] and program.outputs)
    return Memory(arguments, outputs, aliased, most, tuple(held), on_chip, host_bytes(program))


def placed(
    kernels: Kernels,
    buffers: Buffers,
    own: Collection[Var],
    device: DeviceProgram,
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
      device: whose.
      target: how much room the chip has.
      again: whether what is fetched of temporary arrays in memory is there, too.
      seconds: how long kernels take; gathers then begin before them.
    """
    order = buffers.under(target)
    begun: dict[int, int] = {}
    if target.hides_gathers and len(seconds):
        order, begun = beside_computation(kernels, buffers, order, seconds)
        buffers = apart(kernels, buffers, order, begun)
    empty = begun_empty(kernels, device.passes) if begun else ()
    moments = [(k, dict(sizes)) for k, _, sizes in buffers.held(order, begun, empty)]
    fetched = [arguments_of(kernels.kernels[buffers.of[k]], device.program, kernels) for k, _ in moments]
    loops = [place for place, (k, _) in enumerate(moments) if kernels.kernels[buffers.of[k]].shape is Shape.REGION]
    reads: list[dict[Var, int]] = []
    for place, (k, sizes) in enumerate(moments if again else ()):
        kernel = kernels.kernels[buffers.of[k]]
        several = set() if kernel.shape is Shape.REGION else set(map(kernels.memory_of, kernel.piece.reads))
        reads.append({var: sizes[var] for var in several & sizes.keys() if sizes[var] and var not in fetched[place]})
    return moments, on_the_chip(moments, fetched, buffers.inside, own, target.on_chip, loops, reads)


def near_of(device: DeviceProgram, target: Target) -> tuple[Kernels, list[frozenset[Var]]]:
    """The kernels of a program, and for each of them what it reads or writes on the chip."""
    kernels, buffers, own, _ = outer_buffers(device, target)
    found: list[frozenset[Var]] = [frozenset() for _ in kernels.kernels]
    if not target.on_chip:
        return kernels, found
    moments, away = placed(kernels, buffers, own, device, target, again=True)
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
