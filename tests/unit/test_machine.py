"""Machines, against figures of other sources, worked examples of a textbook, brute force and lower bounds.

Knows how chips are built, and the text "How to scale your model" (Austin and others, 2025), cited as "the book".
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import types
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.paper_clusters import k80, p100
from tests.ahead import program
from vnode.errors import MachineError
from vnode.partition import Axis, Device, Kind, Link, Machine, Switch, Torus
from vnode.partition.machine.collective_times import COLLECTIVES
from vnode.partition.machine.known_kinds import JAX_NAMES, KINDS, kind_named
from vnode.partition.machine.machine_builders import NVLINK

GIB = 2**30
TOY = Kind("toy", {"float32": 1e12}, vector=1e11, memory=GIB, bandwidth=1e11, host_bandwidth=1e10)
SLOW = Kind("slow", {"float32": 1e11}, vector=1e10, memory=GIB // 2, bandwidth=1e10, host_bandwidth=1e9)


# Kinds.

CHIPS = {
    # units x operations of a unit in a cycle x GHz, by dtype; memory: bits x Gb/s of a pin
    "A100-40GB": ({"bfloat16": 432 * 512 * 1.41, "float64": 432 * 32 * 1.41}, 6912 * 2 * 1.41, 5120 * 2.43),
    "A100-80GB": ({"float32": 432 * 256 * 1.41, "int8": 432 * 1024 * 1.41}, 6912 * 2 * 1.41, 5120 * 3.186),
    "H100-SXM": ({"bfloat16": 528 * 1024 * 1.83, "float8": 528 * 2048 * 1.83}, 16896 * 2 * 1.98, 5120 * 5.234),
    "H100-PCIe": ({"bfloat16": 456 * 1024 * 1.62, "float32": 456 * 512 * 1.62}, 14592 * 2 * 1.755, 5120 * 3.125),
    "H200": ({"float16": 528 * 1024 * 1.83, "float32": 528 * 512 * 1.83}, 16896 * 2 * 1.98, 6144 * 6.25),
    "V100-16GB": ({"float16": 640 * 128 * 1.53, "float32": 5120 * 2 * 1.53}, 5120 * 2 * 1.53, 4096 * 1.752),
    "V100-32GB": ({"float64": 2560 * 2 * 1.53}, 5120 * 2 * 1.53, 4096 * 1.752),
    "P100": ({"float16": 3584 * 4 * 1.48, "float64": 1792 * 2 * 1.48}, 3584 * 2 * 1.48, 4096 * 1.43),
    "K80": ({"float32": 2496 * 2 * 0.875, "float64": 832 * 2 * 0.875}, 2496 * 2 * 0.875, 384 * 5.0),
    "TPU v4": ({"bfloat16": 8 * 128**2 * 2 * 1.05}, 2 * 8 * 128 * 2 * 1.05, None),
    "TPU v5e": ({"bfloat16": 4 * 128**2 * 2 * 1.5}, 8 * 128 * 4 * 1.5, None),
    "TPU v5p": ({"bfloat16": 8 * 128**2 * 2 * 1.75}, 2 * 8 * 128 * 4 * 1.75, None),
    "TPU v6e": ({}, None, None),
}
"""How chips are built, by architecture papers."""

BOOK = {
    # GB of memory, bytes/s of it, operations/s in bfloat16 and int8, bytes/s of a link
    "TPU v4": (32, 1.2e12, 2.75e14, 2.75e14),
    "TPU v5p": (96, 2.8e12, 4.59e14, 9.18e14),
    "TPU v5e": (16, 8.1e11, 1.97e14, 3.94e14),
    "TPU v6e": (32, 1.6e12, 9.20e14, 1.84e15),
    "A100-80GB": (80, 2.0e12, 3.1e14, 6.2e14),
    "H100-SXM": (80, 3.4e12, 9.9e14, 2.0e15),
    "H200": (141, 4.8e12, 9.9e14, 2.0e15),
    "V100-32GB": (32, 9.0e11, None, None),
}
"""The tables of the book, chapters on TPUs and GPUs."""


@pytest.mark.parametrize("name", KINDS)
def test_rates_follow_from_how_chips_are_built(name):
    peak, vector, pins = CHIPS[name]
    kind = KINDS[name]
    for dtype, rate in peak.items():
        assert kind.peak[dtype] == pytest.approx(rate * 1e9, rel=0.02), dtype
    if vector is not None:
        assert kind.vector == pytest.approx(vector * 1e9, rel=0.02)
    if pins is not None:
        assert kind.bandwidth == pytest.approx(pins / 8 * 1e9, rel=0.01)


@pytest.mark.parametrize("name", BOOK)
def test_figures_agree_with_the_book(name):
    gigabytes, bandwidth, bfloat16, int8 = BOOK[name]
    kind = KINDS[name]
    assert 0.93 * gigabytes * GIB < kind.memory <= gigabytes * GIB  # less what compiler or driver reserve
    assert kind.bandwidth == pytest.approx(bandwidth, rel=0.03)
    if bfloat16 is not None:
        assert kind.peak["bfloat16"] == pytest.approx(bfloat16, rel=0.01)
        assert kind.peak["int8"] == pytest.approx(int8, rel=0.02)


def test_every_kind_is_in_one_of_the_tables_and_has_a_source():
    assert set(CHIPS) == set(KINDS) and {"TPU v6e"} <= set(BOOK)
    assert all(kind.source for kind in KINDS.values())
    assert set(JAX_NAMES.values()) == set(KINDS)


def test_kinds_are_found_by_several_names():
    assert kind_named("h100-sxm") is kind_named("NVIDIA H100 80GB HBM3") is KINDS["H100-SXM"]
    assert kind_named("v5p") is kind_named("TPU v5") is KINDS["TPU v5p"]
    with pytest.raises(MachineError, match="A100-40GB") as error:
        kind_named("H300")
    assert "Kind(" in str(error.value) and "measure=True" in str(error.value)


def test_missing_rates_are_those_of_wider_formats():
    v100, k80 = KINDS["V100-16GB"], KINDS["K80"]
    assert v100.rate("bfloat16") == v100.peak["float32"]
    assert v100.rate(jax.numpy.float8_e5m2) == v100.peak["float16"]
    assert k80.rate("float16") == k80.peak["float32"]
    assert k80.rate(np.int32) == k80.rate("bool") == k80.vector
    assert KINDS["TPU v5e"].rate(np.complex64) == KINDS["TPU v5e"].peak["float32"]
    with pytest.raises(MachineError, match="dtype"):
        k80.rate("float7")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"peak": {"float32": math.nan}}, "peak.float32"),
        ({"peak": {"float33": 1.0}}, "peak"),
        ({"peak": [1.0]}, "peak"),
        ({"vector": 0}, "vector"),
        ({"vector": math.inf}, "vector"),
        ({"memory": 0}, "memory"),
        ({"memory": 1e9}, "memory"),
        ({"memory": 2**60}, "memory"),
        ({"memory": True}, "memory"),
        ({"bandwidth": -1.0}, "bandwidth"),
        ({"bandwidth": "fast"}, "bandwidth"),
        ({"host_bandwidth": 1e30}, "host_bandwidth"),
        ({"host_latency": 2.0}, "host_latency"),
        ({"host_latency": 10**400}, "host_latency"),
        ({"source": 3}, "source"),
    ],
)
def test_absurd_figures_are_refused(change, place):
    with pytest.raises(MachineError) as error:
        dataclasses.replace(TOY, **change)
    assert error.value.place == place


# What the book works out.


def test_all_gather_on_a_line():
    """Of 34 MB over an axis of a 4x4 slice of v5e: 3 hops of 8.4 MB at 45 GB/s, 560 us (the book, on sharding)."""
    machine = Machine.tpu("v5e:4x4")
    cost = machine.collective("all_gather", machine.mesh({"x": 4, "y": 4}).groups("y"))
    assert cost.per_byte * 34e6 == pytest.approx(3 * 8.4e6 / 4.5e10, rel=0.02)
    assert cost.latency == pytest.approx(3e-6)


def test_all_gather_on_rings():
    """Bfloat16[1024, 4096] on a 4x4x4 slice of v4: 23 us over one axis, 46 us over two, about 2 us of little."""
    machine = Machine.tpu("v4:4x4x4")
    mesh = machine.mesh({"x": 4, "y": 4, "z": 4})
    whole = 2 * 1024 * 4096
    one, two = (machine.collective("all_gather", mesh.groups(*axes)) for axes in ("x", "xy"))
    assert one.per_byte * whole / 4 == pytest.approx(23e-6, rel=0.02)
    # The book has the limit of long axes, whose first phases vanish; of 4 and 4 they are a quarter of the last.
    assert 46e-6 < two.per_byte * whole < 1.26 * 46.7e-6
    assert one.seconds(256) == pytest.approx(2e-6, rel=0.01)


def test_all_to_all_is_a_quarter_of_an_all_gather():
    machine = Machine.tpu("v5e:16x16")
    groups = machine.mesh({"x": 16, "y": 16}).groups("x")
    gather, exchange = (machine.collective(name, groups) for name in ("all_gather", "all_to_all"))
    assert exchange.per_byte * 1.0 / 16 == pytest.approx(gather.per_byte / 4)  # a device holds a 16th of the array


def test_all_gather_in_a_host_of_h100():
    """Bf16[4096, 65536] on eight: 1.04 ms (the book, on GPUs)."""
    cost = Machine.gpus("h100-sxm").collective("all_gather", [range(8)])
    assert cost.per_byte * 4096 * 65536 * 2 == pytest.approx(1.04e-3, rel=0.01)


def test_links_agree_with_the_book():
    for topology, link in {"v4:2x2x1": 4.5e10, "v5p:2x2x1": 9e10, "v5e:2x2": 4.5e10, "v6e:2x2": 9e10}.items():
        assert Machine.tpu(topology).networks[0].bandwidth == link
    for name, links, speed in [("P100", 4, 20), ("V100-16GB", 6, 25), ("A100-80GB", 12, 25), ("H200", 18, 25)]:
        assert Machine.gpus(name).networks[0].bandwidth == pytest.approx(links * speed * 1e9)
    assert Machine.gpus("h200", hosts=2).networks[-1].bandwidth == 50e9  # eight of them: 400 GB/s from host to host


@pytest.mark.parametrize(
    ("topology", "wrap"),
    [
        ("v5e:8x16", (False, True)),  # all of these are examples of the book
        ("v5e:4x4", (False, False)),
        ("v6e:16x16", (True, True)),
        ("v5p:2x2x2", (False,) * 3),
        ("v4:2x2x4", (False,) * 3),
        ("v4:4x4x8", (True,) * 3),
    ],
)
def test_which_axes_wrap(topology, wrap):
    (torus,) = Machine.tpu(topology).networks
    assert tuple(axis.wrap for axis in torus.axes) == wrap


@pytest.mark.parametrize(
    "topology", ["v5e:4", "v5e:3x4", "v5e:32x8", "v4:4x4", "v7:2x2", "v5e:0x4", "v5e", "", 8, "v4:64x64x64", "v5e:-2x2"]
)
def test_there_are_no_such_slices(topology):
    with pytest.raises(MachineError):
        Machine.tpu(topology)


# Costs, against formulas and brute force.


@given(
    size=st.integers(2, 9),
    alpha=st.floats(1e-7, 1e-3),
    bandwidth=st.floats(1e6, 1e12),
    count=st.integers(1, 10**9),
)
def test_rings_take_what_the_formulas_say(size, alpha, bandwidth, count):
    """Thakur and others 2005: (p - 1) a + (p - 1) / p n b; Patarasuk and Yuan 2009: twice that for an all-reduce."""
    machine = Machine("ring", (Device(TOY),) * size, (Switch("s", tuple((i,) for i in range(size)), bandwidth, alpha),))
    found = {name: machine.collective(name, [range(size)]).seconds(count) for name in COLLECTIVES}
    expected = (size - 1) * alpha + (size - 1) / size * count / bandwidth
    assert found["all_gather"] == pytest.approx(expected)
    assert found["reduce_scatter"] == pytest.approx(expected)
    assert found["all_reduce"] == pytest.approx(2 * expected)
    assert found["all_to_all"] == pytest.approx(expected)
    assert found["permute"] == pytest.approx(alpha + count / bandwidth)


def test_hierarchical_collectives():
    """Four hosts of two: over the network each card carries 3/4 of the array, then each device half of it."""
    machine = Machine.gpus(
        TOY, hosts=4, per_host=2, within=Link("near", 1e9, 1e-6), between=Link("far", 1e8, 1e-5, of="host")
    )
    everyone = machine.collective("all_gather", [range(8)])
    assert everyone.latency == pytest.approx(3 * 1e-5 + 1e-6)
    assert everyone.per_byte == pytest.approx(3 / 4 / 1e8 + 1 / 2 / 1e9)
    # The groups of a mesh axis across hosts share the cards: together they send twice as much.
    rails = machine.collective("all_gather", [range(0, 8, 2), range(1, 8, 2)])
    assert rails.latency == pytest.approx(3 * 1e-5)
    assert rails.per_byte == pytest.approx(2 * 3 / 4 / 1e8)
    assert machine.collective("all_gather", [range(0, 8, 2)]).per_byte == pytest.approx(rails.per_byte / 2)
    # Of what each device sends, 6 of 8 parts leave the host, those of both devices over one card.
    exchange = machine.collective("all_to_all", [range(8)])
    assert exchange.per_byte == pytest.approx(2 * 6 / 8 / 1e8)
    # A group of three devices in two hosts goes around one ring.
    odd = machine.collective("all_gather", [(0, 1, 2)])
    assert odd.latency == pytest.approx(2 * 1e-5)
    assert odd.per_byte == pytest.approx(2 / 3 / 1e8)


def test_several_slices():
    machine = Machine.tpu("v5e:4x4", slices=2)
    mesh = machine.mesh({"slice": 2, "x": 4, "y": 4})
    assert all(group[1] - group[0] == 16 for group in mesh.groups("slice"))
    far, near = (machine.collective("all_reduce", mesh.groups(axis)) for axis in ("slice", "y"))
    assert far.per_byte == pytest.approx(2 * 4 * (1 / 2) / 25e9)  # four chips share the card of a host
    assert near.per_byte == pytest.approx(2 * (3 / 4) / 4.5e10)
    assert len({device.host for device in machine.devices}) == 8


def neighbours(torus: Torus, point: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Points next to one on a grid, whose ends may be joined."""
    found = []
    for i, axis in enumerate(torus.axes):
        for way in (1, -1):
            along = point[i] + way
            if axis.wrap:
                along %= axis.size
            if 0 <= along < axis.size:
                found.append((*point[:i], along, *point[i + 1 :]))
    return found


def distances(torus: Torus, start: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    """Links between a point and all others, by breadth-first search."""
    found, queue = {start: 0}, deque([start])
    while queue:
        point = queue.popleft()
        for other in neighbours(torus, point):
            if other not in found:
                found[other] = found[point] + 1
                queue.append(other)
    return found


def torus_of(axes: tuple[Axis, ...], bandwidth: float = 1e9, latency: float = 1e-6) -> Torus:
    points = tuple(itertools.product(*(range(axis.size) for axis in axes)))
    return Torus("t", axes, tuple(range(len(points))), points, bandwidth, latency)


AXES = st.lists(st.builds(Axis, st.integers(1, 5), st.booleans()), min_size=1, max_size=3).map(tuple)


@given(axes=AXES, data=st.data())
def test_routes_are_shortest_paths(axes, data):
    torus = torus_of(axes)
    source, target = (data.draw(st.sampled_from(torus.devices)) for _ in range(2))
    here, there = torus.at[source], torus.at[target]
    links, steps = list(torus.links), torus.route(source, target)
    assert len(steps) == distances(torus, here)[there]
    for start, end in (ends_of(torus, links[step]) for step in steps):
        assert start == here and end in neighbours(torus, here)
        here = end
    assert here == there


def ends_of(torus: Torus, link: tuple[tuple[int, ...], int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The points that a link goes from and to."""
    start, axis, way = link
    end = list(start)
    end[axis] = (end[axis] + way) % torus.axes[axis].size
    return start, tuple(end)


def spread_by_hand(size: int, wrap: bool) -> tuple[dict[tuple[int, int], int], int]:
    """An all-gather on a ring or line, step by step: in each step neighbours are sent the part that is newest to one.

    Returns:
      How many parts each link carried, and the steps it took.
    """
    newest = {(i, way): i for i in range(size) for way in (1, -1)}  # what a device passes on, by direction
    held = {i: {i} for i in range(size)}
    carried = {}
    steps = 0
    while any(len(parts) < size for parts in held.values()):
        steps += 1
        arriving = {}
        for (i, way), part in newest.items():
            to = (i + way) % size
            if (wrap or to == i + way) and part is not None:
                carried[i, to] = carried.get((i, to), 0) + 1
                held[to].add(part)
                arriving[to, way] = part
        newest = arriving
    return carried, steps


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 16])
def test_gathering_along_an_axis_carries_what_passing_parts_on_does(size, wrap):
    carried, steps = spread_by_hand(size, wrap)
    cost = Machine("t", (Device(TOY),) * size, (torus_of((Axis(size, wrap),)),)).collective("all_gather", [range(size)])
    assert cost.latency == pytest.approx(steps * 1e-6)
    assert cost.per_byte == pytest.approx(max(carried.values()) / size / 1e9)


@pytest.mark.parametrize(
    ("wrap", "groups", "ring"),
    [
        (False, [(0, 2, 4, 6), (1, 3, 5, 7)], False),
        (True, [(0, 2, 4, 6), (1, 3, 5, 7)], True),
        (True, [(0, 2, 4, 6)], True),
        (True, [(0, 1, 2, 3), (4, 5, 6, 7)], False),
        (True, [(0, 2, 4), (1, 3, 5)], False),
        (False, [(1, 3), (2, 4)], False),
    ],
)
def test_groups_that_lie_between_each_other_share_links(wrap, groups, ring):
    """A part that goes on to the next of its group passes the devices between them."""
    torus = torus_of((Axis(8, wrap),))
    size, stride = len(groups[0]), groups[0][1] - groups[0][0]
    carried, steps = spread_by_hand(size, ring)
    loads = {}
    for group in groups:
        for (a, b), parts in carried.items():
            way = 1 if b - a in (1, 1 - size) else -1
            here = group[a]
            for _ in range(stride):
                loads[here, way] = loads.get((here, way), 0) + parts
                here = (here + way) % 8
    cost = Machine("t", (Device(TOY),) * 8, (torus,)).collective("all_gather", groups)
    assert cost.latency == pytest.approx(steps * stride * 1e-6)
    assert cost.per_byte == pytest.approx(max(loads.values()) / size / 1e9)


def test_groups_that_are_no_box_go_around_a_ring():
    """Three corners of a square: in each of two steps a third of the array over the two links from one corner."""
    cost = Machine("t", (Device(TOY),) * 4, (torus_of((Axis(2), Axis(2))),)).collective("all_gather", [(3, 0, 1)])
    assert cost.latency == pytest.approx(2 * 2e-6)
    assert cost.per_byte == pytest.approx(2 / 3 / 1e9)
    # So do devices that are unequally far apart: from the last back to the first it is three links.
    cost = Machine("t", (Device(TOY),) * 5, (torus_of((Axis(5),)),)).collective("all_gather", [(0, 1, 3)])
    assert cost.latency == pytest.approx(2 * 3e-6)
    assert cost.per_byte == pytest.approx(2 / 3 / 1e9)


def test_links_between_all_pairs_are_used_at_once():
    cost = p100().collective("all_gather", [range(4)])
    assert cost.per_byte == pytest.approx(1 / 4 / 20e9)
    assert cost.latency == NVLINK


@given(axes=AXES.filter(lambda axes: math.prod(a.size for a in axes) > 1))
def test_an_exchange_loads_links_as_its_messages_do(axes):
    """Message by message, where no message has two ways that are as short."""
    axes = tuple(Axis(axis.size, axis.wrap and axis.size % 2 == 1) for axis in axes)
    torus = torus_of(axes)
    loads = dict.fromkeys(range(len(torus.links)), 0)
    for source, target in itertools.permutations(torus.devices, 2):
        for resource in torus.route(source, target):
            loads[resource] += 1
    size = len(torus.devices)
    cost = Machine("t", (Device(TOY),) * size, (torus,)).collective("all_to_all", [range(size)])
    assert cost.per_byte == pytest.approx(max(loads.values()) / size / 1e9)


@given(axes=AXES.filter(lambda axes: math.prod(a.size for a in axes) > 1))
def test_nothing_is_faster_than_links_allow(axes):
    """Lower bounds (Chan and others 2007): all must arrive over a device's links, and from the farthest one."""
    torus = torus_of(axes)
    size = len(torus.devices)
    machine = Machine("t", (Device(TOY),) * size, (torus,))
    gather, exchange = (machine.collective(name, [range(size)]) for name in ("all_gather", "all_to_all"))
    into = dict.fromkeys(torus.points, 0)
    for link in torus.links:
        into[ends_of(torus, link)[1]] += 1
    assert gather.per_byte >= (size - 1) / size / (min(into.values()) * 1e9) * (1 - 1e-9)
    farthest = max(max(distances(torus, point).values()) for point in torus.points)
    for cost in (gather, exchange):
        assert cost.latency >= farthest * 1e-6 * (1 - 1e-9)
    # Through the middle of an axis half of the devices send half of what they have.
    for axis in axes:
        if axis.size % 2 == 0:
            across = (2 if axis.wrap else 1) * size // axis.size
            assert exchange.per_byte >= size / 2 / 2 / (across * 1e9) * (1 - 1e-9)


# Properties of all machines.


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Hosts of one or several kinds, joined within and between in various ways; or a torus, or two of them."""
    bandwidth = st.floats(1e6, 1e12)
    latency = st.floats(0, 1e-2)
    kind = st.sampled_from([TOY, SLOW, KINDS["P100"]])
    if draw(st.booleans()):
        sides = draw(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=2))
        torus = torus_of(tuple(Axis(*side) for side in sides), draw(bandwidth), draw(latency))
        count = len(torus.devices)
        if draw(st.booleans()):
            other = dataclasses.replace(torus, devices=tuple(range(count, 2 * count)))
            ports = (torus.devices, other.devices)
            joint = Switch("between", ports, draw(bandwidth), draw(latency))
            return Machine("tori", (Device(TOY, 0),) * count + (Device(SLOW, 1),) * count, (torus, other, joint))
        return Machine("torus", tuple(Device(draw(kind), i // 2) for i in range(count)), (torus,))
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    devices = tuple(Device(each, host) for host, n in enumerate(counts) for each in [draw(kind)] for _ in range(n))
    hosts = [tuple(i for i, device in enumerate(devices) if device.host == host) for host in range(len(counts))]
    networks: list[Any] = []
    for host in hosts:
        if len(host) > 1 and (len(hosts) == 1 or draw(st.booleans())):
            networks.append(Switch("near", tuple((i,) for i in host), draw(bandwidth), draw(latency)))
    if len(hosts) > 1:
        ports = tuple(hosts) if draw(st.booleans()) else tuple((i,) for i in range(len(devices)))
        networks.append(Switch("far", ports, draw(bandwidth), draw(latency)))
    return Machine(
        draw(st.text(st.characters(categories=["L", "Nd"]), min_size=1, max_size=9)), devices, tuple(networks)
    )


@st.composite
def groups_of(draw: st.DrawFn, machine: Machine) -> tuple[tuple[int, ...], ...]:
    """Groups of equally many devices, in any order."""
    order = draw(st.permutations(range(len(machine.devices))))
    size = draw(st.integers(1, len(order)))
    count = draw(st.integers(1, len(order) // size))
    return tuple(tuple(order[i * size : (i + 1) * size]) for i in range(count))


def changed(machine: Machine, **by: float) -> Machine:
    """A machine with all networks slower or faster."""
    networks = tuple(
        dataclasses.replace(network, **{name: getattr(network, name) * factor for name, factor in by.items()})  # pyright: ignore
        for network in machine.networks
    )
    return Machine(machine.name, machine.devices, networks)


@given(data=st.data())
def test_costs_are_monotone(data):
    machine = data.draw(machines())
    groups = data.draw(groups_of(machine))
    name = data.draw(st.sampled_from(COLLECTIVES))
    cost = machine.collective(name, groups)
    assert math.isfinite(cost.latency) and math.isfinite(cost.per_byte) and cost.latency >= 0
    few, many = sorted(data.draw(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9))))
    assert cost.seconds(few) <= cost.seconds(many)
    if len(groups[0]) == 1:
        assert cost.seconds(many) == 0
        return
    assert cost.per_byte > 0
    assert changed(machine, latency=2).collective(name, groups).latency == pytest.approx(2 * cost.latency)
    assert changed(machine, bandwidth=0.5).collective(name, groups).per_byte == pytest.approx(2 * cost.per_byte)
    alone = machine.collective(name, groups[:1])
    assert alone.latency <= cost.latency * (1 + 1e-9) and alone.per_byte <= cost.per_byte * (1 + 1e-9)


@given(data=st.data())
def test_how_collectives_relate(data):
    machine = data.draw(machines())
    groups = data.draw(groups_of(machine))
    found = {name: machine.collective(name, groups) for name in COLLECTIVES}
    count = data.draw(st.integers(1, 10**9))
    gather, scatter, reduce = (found[name].seconds(count) for name in ("all_gather", "reduce_scatter", "all_reduce"))
    assert reduce == pytest.approx(gather + scatter)
    # Nowhere does it take longer that devices send their part to one other than that they send it to all.
    size = len(groups[0])
    if size > 1 and all(isinstance(network, Switch) for network in machine.networks):
        assert machine.collective("permute", groups).latency <= found["all_gather"].latency * (1 + 1e-9)


@given(data=st.data())
def test_permuting_a_part_is_cheaper_than_gathering_all(data):
    """Where devices are in the order of their ring."""
    axes = data.draw(AXES.filter(lambda axes: axes[-1].size > 1))
    machine = Machine("t", (Device(TOY),) * math.prod(a.size for a in axes), (torus_of(axes),))
    groups = np.arange(len(machine.devices)).reshape(-1, axes[-1].size)
    size, count = axes[-1].size, data.draw(st.integers(1, 10**9))
    gather, permute = (machine.collective(name, groups.tolist()) for name in ("all_gather", "permute"))
    assert permute.seconds(count / size) <= gather.seconds(count) * (1 + 1e-9)


def test_a_permute_that_does_not_go_around():
    machine = Machine.tpu("v5e:4x4")
    groups = machine.mesh({"x": 4, "y": 4}).groups("x")

    def shift(offset: int):
        return machine.collective("permute", groups, pairs=[(i, i + offset) for i in range(4 - offset)])

    halo, around = shift(1), machine.collective("permute", groups)
    assert halo.latency == pytest.approx(1e-6) and around.latency == pytest.approx(3e-6)
    assert halo.per_byte == pytest.approx(1 / 4.5e10)
    assert shift(0).seconds(1e9) == shift(4).seconds(1e9) == 0
    assert shift(2).per_byte == pytest.approx(2 / 4.5e10)


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ([], "all_gather"),
        ([[]], "all_gather"),
        ([[0, 1], [2]], "all_gather"),
        ([[0, 0]], "all_gather"),
        ([[0], [0]], "all_gather"),
        ([[0, 16]], "all_gather"),
        ([[-1, 0]], "all_gather"),
        ([[0.5, 1]], "all_gather"),
        (3, "all_gather"),
        ([[0, 1]], "broadcast"),
    ],
)
def test_there_are_no_such_groups(groups, name):
    with pytest.raises(MachineError):
        Machine.tpu("v5e:4x4").collective(name, groups)


# Meshes.


@given(data=st.data())
def test_groups_of_a_mesh(data):
    machine = data.draw(machines())
    left, sizes = len(machine.devices), {}
    for name in ("a", "b", "c"):
        sizes[name] = data.draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        left //= sizes[name]
    sizes["d"] = left
    mesh = machine.mesh(sizes)
    assert mesh.shape == sizes
    for axes in [("a",), ("b", "d"), tuple("abcd")]:
        groups = mesh.groups(*axes)
        assert sorted(itertools.chain(*groups)) == list(range(len(machine.devices)))
        assert {len(group) for group in groups} == {math.prod(sizes[axis] for axis in axes)}
    for one, other in itertools.product(mesh.groups("a", "b"), mesh.groups("c", "d")):
        assert len(set(one) & set(other)) == 1
    order = np.array(mesh.groups(*"abcd")[0]).reshape(tuple(sizes.values()))
    assert (order == mesh.devices).all()


@pytest.mark.parametrize(
    ("topology", "sizes", "along"),
    [
        ("v5e:4x8", {"data": 8, "model": 4}, {"data": 1, "model": 1}),
        ("v5e:4x8", {"data": 4, "model": 8}, {"data": 1, "model": 1}),
        ("v4:4x4x8", {"data": 8, "model": 16}, {"data": 1, "model": 2}),
        ("v5p:2x2x4", {"data": 4, "fsdp": 2, "model": 2}, {"data": 1, "fsdp": 1, "model": 1}),
    ],
)
def test_axes_of_a_mesh_follow_those_of_the_torus(topology, sizes, along):
    machine = Machine.tpu(topology)
    mesh, (torus,) = machine.mesh(sizes), machine.networks
    for name, axes in along.items():
        for group in mesh.groups(name):
            points = np.array([torus.at[device] for device in group])
            assert int((points.min(0) != points.max(0)).sum()) == axes
            assert math.prod(points.max(0) - points.min(0) + 1) == len(group)


@pytest.mark.parametrize("sizes", [{}, {"a": 3}, {"a": 16, "b": 0}, {"a": True, "b": 16}, {"a": 4.0, "b": 4}, [4, 4]])
def test_there_is_no_such_mesh(sizes):
    with pytest.raises(MachineError):
        Machine.tpu("v5e:4x4").mesh(sizes)


def test_there_is_no_such_axis():
    mesh = Machine.tpu("v5e:4x4").mesh({"a": 16})
    for axes in [(), ("b",), ("a", "a")]:
        with pytest.raises(MachineError):
            mesh.groups(*axes)


# Machines that cannot be.


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: Machine("", (Device(TOY),)), "name"),
        (lambda: Machine("m", ()), "devices"),
        (lambda: Machine("m", (TOY,)), "devices[0]"),
        (lambda: Machine("m", (Device(TOY), Device(TOY))), "networks"),
        (lambda: Machine("m", (Device(TOY), Device(dataclasses.replace(SLOW, name="toy")))), "devices[1].kind"),
        (lambda: Machine("m", (Device(TOY),) * 2, (Switch("p", ((0,), (2,)), 1e9, 0),)), "networks[0]"),
        (lambda: Machine("m", (Device(TOY),) * 2, ("PCIe",)), "networks[0]"),
        (
            lambda: Machine(
                "m",
                (Device(TOY),) * 3,
                tuple(Switch("p", tuple((n,) for n in members), 1e9, 0) for members in [(0, 1), (1, 2), (0, 1, 2)]),
            ),
            "networks[1]",
        ),
        (lambda: Machine("m", (Device(TOY),) * 3, (Switch("p", ((0,), (1,)), 1e9, 0),)), "networks"),
        (lambda: Switch("s", ((0,), (1,)), 0, 0), "bandwidth"),
        (lambda: Switch("s", ((0,), (0,)), 1e9, 0), "ports"),
        (lambda: Switch("s", ((0,), ()), 1e9, 0), "ports[1]"),
        (lambda: Switch("s", ((0,), (1.5,)), 1e9, 0), "ports[1][0]"),
        (lambda: Switch("s", ((0,), (1,)), 1e9, -1), "latency"),
        (lambda: Torus("t", (Axis(2),), (0, 1), ((0,), (2,)), 1e9, 0), "points[1][0]"),
        (lambda: Torus("t", (Axis(2),), (0, 1), ((0,), (0,)), 1e9, 0), "points"),
        (lambda: Torus("t", (Axis(2),), (0, 1), ((0,),), 1e9, 0), "points"),
        (lambda: Torus("t", (Axis(2),), (0, 1), ((0, 0), (1, 0)), 1e9, 0), "points[0]"),
        (lambda: Torus("t", (2,), (0, 1), ((0,), (1,)), 1e9, 0), "axes[0]"),
        (lambda: Torus("t", (Axis(60000), Axis(60000)), (0,), ((0, 0),), 1e9, 0), "axes"),
        (lambda: Axis(0), "size"),
        (lambda: Axis(2, 1), "wrap"),  # pyright: ignore
        (lambda: Device(TOY, -1), "host"),
        (lambda: Link("l", 1e9, 0, of="rack"), "of"),  # pyright: ignore
        (lambda: Machine.gpus(TOY), ""),
        (lambda: Machine.gpus("h200", hosts=0), "hosts"),
        (lambda: Machine.gpus("h200", per_host=1.5), "per_host"),  # pyright: ignore
        (lambda: Machine.tpu("v5e:2x2", slices=0), "slices"),
    ],
)
def test_machines_that_cannot_be(make, place):
    with pytest.raises(MachineError) as error:
        make()
    assert error.value.place == place


# Files.

EXAMPLES = {
    "tpu": lambda: Machine.tpu("v5e:2x4"),
    "slices": lambda: Machine.tpu("v4:2x2x1", slices=2),
    "gpus": lambda: Machine.gpus("a100-40gb", hosts=2, per_host=2),
    "single": lambda: Machine("one", (Device(TOY, 3),)),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machine=machines())
def test_a_saved_machine_is_loaded_again(machine, tmp_path):
    path = tmp_path / "machine.json"
    machine.save(path)
    assert Machine.load(path) == machine


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_loaded_again(name, tmp_path):
    machine = EXAMPLES[name]()
    machine.save(tmp_path / "machine.json")
    again = Machine.load(tmp_path / "machine.json")
    assert again == machine and str(again) == str(machine)
    json.loads((tmp_path / "machine.json").read_text())


def leaves(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of a JSON value that hold something, the containers included."""
    found = [path] if path else []
    if isinstance(content, dict | list):
        for key in content if isinstance(content, dict) else range(len(content)):
            found += leaves(content[key], (*path, key))
    return found


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from(
        [0.5, 1e300, -1e-9, 10**30, "", "x" * 400, "P100", "torus", "\ud800", "a\nb", [], {}, [[]], [0, 1]]
    ),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-1, 9), max_size=3),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused_or_mean_what_they_say(data, tmp_path):
    path = tmp_path / "machine.json"
    EXAMPLES[data.draw(st.sampled_from(sorted(EXAMPLES)))]().save(path)
    content = json.loads(path.read_text())
    place = data.draw(st.sampled_from(leaves(content)))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    action = data.draw(st.sampled_from(["replace", "drop", "add"]))
    if action == "replace":
        inner[place[-1]] = data.draw(JUNK)
    elif action == "drop":
        del inner[place[-1]]
    elif isinstance(inner, dict):
        inner["extra"] = data.draw(JUNK)
    else:
        inner.append(data.draw(JUNK))
    path.write_text(json.dumps(content))
    try:
        machine = Machine.load(path)
    except MachineError as error:
        assert error.place.startswith(str(path))
        assert "Traceback" not in str(error)
        return
    assert meaning(machine) == said(content)


def meaning(machine: Machine) -> Any:
    """A machine in plain values."""
    return (
        machine.name,
        [({**dataclasses.asdict(device.kind)}, device.host) for device in machine.devices],
        [(type(network).__name__.lower(), dataclasses.asdict(network)) for network in machine.networks],  # pyright: ignore
    )


def said(content: Any) -> Any:
    """The same from the text of a file."""

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    defaults = {"source": "", "host_latency": 1e-5}
    rows = [
        ({"name": row["kind"], **defaults, **content["kinds"][row["kind"]]}, row["host"])
        for row in content["devices"]
        for _ in range(row.get("count", 1))
    ]
    networks = []
    for network in content["networks"]:
        entry = {key: tuples(value) for key, value in network.items() if key != "type"}
        if network["type"] == "torus":
            entry["axes"] = tuple({"wrap": False, **axis} for axis in network["axes"])
        networks.append((network["type"], entry))
    return content["name"], rows, networks


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_are_refused(data, tmp_path):
    path = tmp_path / "machine.json"
    Machine.gpus("p100", hosts=2, per_host=2).save(path)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 3))
    path.write_bytes(whole[:cut] + data.draw(st.binary(max_size=4)))
    with pytest.raises(MachineError, match=re.escape(str(path))):
        Machine.load(path)


@pytest.mark.parametrize(
    ("change", "place", "match"),
    [
        (("version",), "version", "1"),
        (("format",), "format", "vnode machine"),
        (("kinds", "P100", "memory"), 'kinds["P100"].memory', "bytes"),
        (("kinds", "P100", "peak", "float32"), 'kinds["P100"].peak.float32', "operations a second"),
        (("devices", 1, "kind"), "devices[1].kind", "P100"),
        (("devices", 1, "count"), "devices[1].count", "devices"),
        (("networks", 0, "type"), "networks[0].type", "switch or torus"),
        (("networks", 2, "bandwidth"), "networks[2].bandwidth", "bytes a second"),
        (("networks", 2, "ports", 1, 0), "networks[2].ports[1][0]", "device"),
    ],
)
def test_errors_say_where(change, place, match, tmp_path):
    path = tmp_path / "machine.json"
    Machine.gpus("p100", hosts=2, per_host=2).save(path)
    content = json.loads(path.read_text())
    inner = content
    for key in change[:-1]:
        inner = inner[key]
    inner[change[-1]] = "junk"
    path.write_text(json.dumps(content))
    with pytest.raises(MachineError, match=match) as error:
        Machine.load(path)
    assert error.value.place == f"{path}: {place}"


def test_what_json_would_let_pass(tmp_path):
    path = tmp_path / "machine.json"
    Machine("one", (Device(TOY),)).save(path)
    text = path.read_text()
    for damaged in (
        text.replace('"version": 1', '"version": 1, "version": 1'),
        text.replace('"version": 1', '"version": true'),
        text.replace('"vector": 100000000000.0', '"vector": NaN'),
        text.replace('"vector": 100000000000.0', '"vector": 1e999'),
        text.replace('"vector": 100000000000.0', '"vector": ' + "9" * 5000),
        "[" * 100_000,
        "[]",
        "",
    ):
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(MachineError, match=re.escape(str(path))):
            Machine.load(path)
    with pytest.raises(MachineError, match="No such file"):
        Machine.load(tmp_path / "none.json")


# The machine that is here.


def fake(kind: str, index: int, **more: Any) -> Any:
    """A device of which jax would say this."""
    memory = more.pop("memory", None)
    stats = None if memory is None else {"bytes_limit": memory}
    return types.SimpleNamespace(
        **{
            "platform": "gpu",
            "device_kind": kind,
            "id": index,
            "process_index": 0,
            "memory_stats": lambda: stats,
            **more,
        }
    )


def test_known_kinds_are_looked_up():
    devices = [fake("NVIDIA H200", i, memory=10**11, slice_index=i // 2, process_index=i) for i in range(4)]
    machine = Machine.here(devices)
    assert machine.kinds == (dataclasses.replace(KINDS["H200"], memory=10**11),)
    expected = Machine.gpus("h200", hosts=2, per_host=2)
    assert machine.networks == expected.networks and machine.hosts == expected.hosts


def test_kinds_meet_over_the_slower_network():
    devices = [fake("Tesla K80", i, process_index=0) for i in range(2)]
    devices += [fake("NVIDIA H200", 2 + i, process_index=1) for i in range(2)]
    machine = Machine.here(devices)
    assert [kind.name for kind in machine.kinds] == ["K80", "H200"]
    assert [network.name for network in machine.networks] == ["PCI Express", "NVLink", "InfiniBand"]
    assert machine.networks[-1].bandwidth == Machine.gpus("k80", hosts=2).networks[-1].bandwidth
    assert machine.hosts == ((0, 1), (2, 3))


def test_what_cannot_be_measured_from_here():
    with pytest.raises(MachineError, match="this process has no device of it"):
        Machine.here([fake("abacus", 0, process_index=7)])
    with pytest.raises(MachineError):
        Machine.here([])


@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:16x16", "v5p:2x4x4"])
def test_slices_are_recognized(topology):
    expected = Machine.tpu(topology)
    (torus,) = expected.networks
    called = {known: name for name, known in JAX_NAMES.items()}[expected.kinds[0].name]
    devices = [
        fake(called, i, platform="tpu", core_on_chip=0, coords=(*torus.at[i], 0, 0)[:3], process_index=device.host)
        for i, device in enumerate(expected.devices)
    ]
    machine = Machine.here(devices)
    assert machine.networks[0] == torus
    assert machine.devices == expected.devices


def test_a_part_of_a_slice_is_a_smaller_one():
    whole = Machine.tpu("v5e:4x4")
    upper = [i for i in range(16) if whole.networks[0].at[i][1] >= 2]
    devices = [
        fake("TPU v5 lite", i, platform="tpu", core_on_chip=0, coords=(*whole.networks[0].at[i], 0)) for i in upper
    ]
    (torus,) = Machine.here(devices).networks
    assert torus.axes == (Axis(4), Axis(2))
    for a, b in itertools.permutations(range(8), 2):
        assert len(torus.route(a, b)) == len(whole.networks[0].route(upper[a], upper[b]))


@pytest.mark.tpu
def test_slices_are_those_of_the_tpu_compiler():
    from benchmarks import tpu

    names = ["v5e:2x2", "v5e:2x4", "v5e:4x8", "v5e:16x16", "v6e:4x4", "v4:2x2x1", "v4:4x4x8", "v5p:2x2x2", "v5p:2x4x4"]
    done = subprocess.run(
        [*program("tpu_topologies"), *names],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **tpu.ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr
    rows = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert list(rows) == names
    for name, found in rows.items():
        machine = Machine.tpu(name)
        (torus,) = machine.networks
        assert len(machine.devices) == len(found)
        for i, (coords, process, core, kind) in enumerate(found):
            assert (*torus.at[i], 0, 0)[:3] == tuple(coords)
            assert machine.devices[i].host == process and core == 0
            assert kind_named(kind) == machine.devices[i].kind


# What is shown.


def test_flexflow():
    """Its experimental setup: 4 nodes of 4 P100 on 100 Gb/s, 16 of 4 K80 on 56 Gb/s."""
    pascal, kepler = p100(), k80()
    assert [len(host) for host in pascal.hosts] == [4] * 4 and [len(host) for host in kepler.hosts] == [4] * 16
    assert pascal.networks[-1].bandwidth * 8 == 100e9 and kepler.networks[-1].bandwidth * 8 == 56e9
    for machine, pair, name in ((pascal, {0, 3}, "NVLink"), (kepler, {4, 5}, "PCI Express of a card")):
        assert next(network for network in machine.networks if pair <= network.members).name == name
    other = next(network for network in kepler.networks if {4, 6} <= network.members)
    assert other.name == "PCI Express" and other.ports == ((4, 5), (6, 7))


def test_printed():
    machine = k80()
    assert repr(machine) == "Machine(FlexFlow's K80 cluster: 64 devices in 16 hosts)"
    text = str(machine)
    assert "2 devices, 32 times" in text and "16 ports of 4 devices" in text and "7.0 GB/s" in text
    for other in (machine, Machine.tpu("v5p:4x4x4", slices=2), Machine.gpus("h100-sxm", hosts=4)):
        assert max(map(len, str(other).splitlines())) <= 80
    assert "<table" in machine._repr_html_()
