"""A torus, as TPU chips are wired -> the routes, latencies and loads of transfers and collectives on it.

Knows grids, rings and lines. Must not know kinds of devices, or other networks of a machine.

The times of collectives are those of "How to scale your model" (Austin and others, 2025), chapter "Sharded matrices and
how to multiply them". Parts of the array go around a ring both ways, whole parts at a time, so that p devices need
floor(p / 2) steps. A line, whose ends are not joined, needs p - 1. Over several axes the array is cut into as many
pieces as there are axes. Each piece goes along the axes in an order of its own, so that all links are in use.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from vnode.errors import MachineError
from vnode.partition.machine.description_checks import (
    MOST_DEVICES,
    device_numbers,
    error_context,
    nonempty_list,
    whole_number,
    wrong_value,
)
from vnode.partition.machine.networks import Network, Phase, check_network

Point = tuple[int, ...]

MOST_AXES = 8


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a torus.

    Attributes:
      size: number of devices along it.
      wrap: whether the last device is joined to the first.
    """

    size: int
    wrap: bool = False

    def __post_init__(self) -> None:
        whole_number(self.size, "size", "devices along an axis", 1, MOST_DEVICES)
        if not isinstance(self.wrap, bool):
            raise wrong_value("wrap", "true or false", self.wrap)


@dataclasses.dataclass(frozen=True)
class Walk:
    """The devices of a group along one axis: `count` of them, `stride` apart, around a ring or along a line."""

    axis: int
    start: int
    count: int
    stride: int
    ring: bool

    @property
    def steps(self) -> int:
        """The number of steps until all devices have a part."""
        return self.stride * (self.count // 2 if self.ring else self.count - 1)

    def gathered(self) -> tuple[list[float], list[float]]:
        """Loads of each link of an all-gather, upwards and downwards, in p-ths of the gathered array."""
        if self.ring:
            both = [self.count // 2 / self.count] * self.count
            return both, both
        up = [(i + 1) / self.count for i in range(self.count - 1)]
        return up, up[::-1]

    def exchanged(self) -> tuple[list[float], list[float]]:
        """Loads of each link of an all-to-all, upwards and downwards, in p-ths of the array."""
        size = self.count
        if self.ring:  # by the shorter way; if both ways are equally short, half of it each way
            both = [(size * size // 4) / 2 / size] * size
            return both, both
        both = [(i + 1) * (size - 1 - i) / size for i in range(size - 1)]
        return both, both


@dataclasses.dataclass(frozen=True)
class Torus(Network):
    """Devices at points of a grid.

    Attributes:
      name: the network's name.
      axes: the axes, with sizes and wrap-around.
      devices: numbers of its devices.
      points: the point of each device, a number for each axis.
      bandwidth: bytes a second of a link between neighbours, in each direction.
      latency: seconds over a link.

    Raises:
      MachineError: an attribute is wrong.

    Example:
      >>> from vnode.partition import Axis, Torus
      >>> network = Torus("ICI", (Axis(4, wrap=True),), range(4), [(0,), (1,), (2,), (3,)], 45e9, 1e-6)
      >>> [list(network.links)[number] for number in network.route(0, 3)]
      [((0,), 0, -1)]
    """

    name: str
    axes: tuple[Axis, ...]
    devices: tuple[int, ...]
    points: tuple[Point, ...]
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        axes = tuple(nonempty_list(self.axes, "axes", "axes"))
        for i, axis in enumerate(axes):
            if not isinstance(axis, Axis):
                raise wrong_value(f"axes[{i}]", "an Axis", axis)
        if len(axes) > MOST_AXES or math.prod(axis.size for axis in axes) > MOST_DEVICES:
            raise MachineError(f"expected at most {MOST_AXES} axes and {MOST_DEVICES} points", place="axes")
        found = device_numbers(self.devices, "devices")
        points = nonempty_list(self.points, "points", "points")
        if len(points) != len(found):
            raise MachineError(f"expected a point for each of {len(found)} devices, not {len(points)}", place="points")
        with error_context("points"):
            checked = tuple(point(place, axes, f"[{i}]") for i, place in enumerate(points))
            if len(set(checked)) != len(checked):
                raise MachineError("two devices are at one point")
        for name, value in {"axes": axes, "devices": found, "points": checked}.items():
            object.__setattr__(self, name, value)
        check_network(self)

    @functools.cached_property
    def members(self) -> frozenset[int]:
        """The devices of the torus."""
        return frozenset(self.devices)

    @functools.cached_property
    def at(self) -> dict[int, Point]:
        """The point of each device."""
        return dict(zip(self.devices, self.points, strict=True))

    @functools.cached_property
    def links(self) -> dict[tuple[Point, int, int], int]:
        """Numbers of the links out of a point along an axis, upwards (1) or downwards (-1)."""
        found = dict[tuple[Point, int, int], int]()
        for place in itertools.product(*(range(axis.size) for axis in self.axes)):
            for i, axis in enumerate(self.axes):
                for way in (1, -1):
                    if axis.size > 1 and (axis.wrap or 0 <= place[i] + way < axis.size):
                        found[place, i, way] = len(found)
        return found

    def _step(self, place: Point, axis: int, way: int) -> Point:
        return (*place[:axis], (place[axis] + way) % self.axes[axis].size, *place[axis + 1 :])

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """The route along one axis after another, each in the shorter direction."""
        here, there, found = self.at[source], self.at[target], list[int]()
        for i, axis in enumerate(self.axes):
            distance = there[i] - here[i]
            if axis.wrap and abs(distance) * 2 > axis.size:
                distance -= axis.size if distance > 0 else -axis.size
            for _ in range(abs(distance)):
                way = 1 if distance > 0 else -1
                found.append(self.links[here, i, way])
                here = self._step(here, i, way)
        return tuple(found)

    def delay(self, source: int, target: int) -> float:
        """Seconds of a transfer without bytes: that of all links on the route."""
        return sum(self.latency for _ in self.route(source, target))

    def gather(self, group: Sequence[int]) -> tuple[Phase, ...]:
        """The phases of an all-gather along the axes of a box, in as many pieces as axes; else a ring."""
        walks = self.walks(group)
        if walks is None:
            return super().gather(sorted(group, key=lambda device: self.at[device]))
        done, phases = [1] * len(walks), list[Phase]()
        for t in range(len(walks)):
            phases.append(Phase())
            for piece in range(len(walks)):
                walk = walks[(piece + t) % len(walks)]
                done[piece] *= walk.count
                phase = self._along(group, walk, *walk.gathered())
                phases[-1].join(phase, share=done[piece] / len(group) / len(walks))
        return tuple(phases)

    def exchange(self, parts: Sequence[Sequence[int]]) -> Phase:
        """In a box, each message goes along one axis after the other; no message waits for another to be sent."""
        group = [device for part in parts for device in part]
        walks = self.walks(group) if len(parts) == len(group) else None
        if walks is None:
            return super().exchange(parts)
        found = Phase()
        for walk in walks:
            found.join(self._along(group, walk, *walk.exchanged()), share=len(group))
        found.latency = sum(walk.steps for walk in walks) * self.latency
        return found

    def walks(self, group: Sequence[int]) -> list[Walk] | None:
        """The axes along which a group extends, if it is all points of a (possibly spread out) box; else None."""
        places = [self.at[device] for device in group]
        found, size = list[Walk](), 1
        for i, axis in enumerate(self.axes):
            along = sorted({place[i] for place in places})
            if len(along) == 1:
                continue
            strides = {b - a for a, b in itertools.pairwise(along)}
            if len(strides) > 1:
                return None
            (stride,) = strides
            ring = axis.wrap and stride * len(along) == axis.size
            found.append(Walk(i, along[0], len(along), stride, ring))
            size *= len(along)
        return found if size == len(group) else None

    def _along(self, group: Sequence[int], walk: Walk, up: Sequence[float], down: Sequence[float]) -> Phase:
        """The phase along an axis, given the loads between neighbours on each line of the group."""
        size, found = self.axes[walk.axis].size, Phase(walk.steps * self.latency)
        for place in {self.at[device] for device in group}:
            if place[walk.axis] != walk.start:
                continue
            for i, (above, below) in enumerate(zip(up, down, strict=True)):
                for k in range(walk.stride):
                    low = (walk.start + i * walk.stride + k) % size
                    here = (*place[: walk.axis], low, *place[walk.axis + 1 :])
                    found.add([self.links[here, walk.axis, 1]], above)
                    found.add([self.links[self._step(here, walk.axis, 1), walk.axis, -1]], below)
        return found


def point(value: Any, axes: Sequence[Axis], place: str) -> Point:
    """Checks a point of a grid; raises `MachineError`."""
    numbers = nonempty_list(value, place, f"{len(axes)} numbers, one for each axis")
    if len(numbers) != len(axes):
        raise wrong_value(place, f"{len(axes)} numbers, one for each axis", value)
    found = zip(numbers, axes, strict=True)
    return tuple(
        whole_number(n, f"{place}[{i}]", "a place along the axis", 0, a.size - 1) for i, (n, a) in enumerate(found)
    )
