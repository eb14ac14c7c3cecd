"""The number of virtual nodes that fits in memory.

Knows how to compile a step for every number of nodes by hand, and what the compiler then says. Must not know how the
search goes. The references are these compilations, and, for the search alone, looking at every candidate.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from tests.ahead import program
from tests.rounding import assert_same
from tests.test_virtual_step import compilations
from vnode.plan.nodes.device_memory import byte_count, device_memory, program_memory
from vnode.plan.nodes.node_search import Trial, candidates, search, smallest_fitting
from vnode.step.executor import Executor
from vnode.step.virtual import with_nodes

BATCH = 16
LENGTH = 32
WIDTH = 16
DEVICES = 2


def wide(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step whose activations are much larger than its state."""

    def mean(w: jax.Array) -> jax.Array:
        h = x
        for _ in range(2):
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    loss, slope = jax.value_and_grad(mean)(w)
    return w - 0.1 * slope, loss


def light(w: jax.Array, x: jax.Array) -> jax.Array:
    """A step that compiles soon."""
    return w + x.sum((0, 1))


def arguments(batch: int = BATCH) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return tuple(random.standard_normal(s, np.float32) for s in ((WIDTH, WIDTH), (batch, LENGTH, WIDTH)))


def by_hand(fun: Any, nodes: int, devices: Any, *args: Any) -> int:
    """Bytes on each device, from the compiler's own figures."""
    found = vnode.virtualize(fun, virtual_nodes=nodes).on(devices).lower(*args).compile().memory_analysis()
    sizes = found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes
    return sum(sizes) - found.alias_size_in_bytes


@pytest.fixture(scope="module")
def table() -> dict[int, int]:
    """What every number of nodes that divides the batch needs on two devices."""
    devices = jax.devices()[:DEVICES]
    return {nodes: by_hand(wide, nodes, devices, *arguments()) for nodes in (2, 4, 8, 16)}


def automatic(memory: Any, fun: Any = wide, **options: Any) -> Any:
    return vnode.virtualize(fun, virtual_nodes="auto", memory=memory, **options).on(jax.devices()[:DEVICES])


# The search


def trials(sizes: list[int], limit: int) -> tuple[Any, list[int]]:
    asked: list[int] = []

    def measure(index: int) -> Trial:
        asked.append(index)
        return Trial(index, 1, 1, sizes[index], sizes[index] <= limit)

    return measure, asked


@hypothesis.given(
    down=st.sets(st.integers(0, 10_000), max_size=60),
    up=st.sets(st.integers(0, 10_000), max_size=60),
    limit=st.integers(0, 10_000),
)
def test_finds_the_first_that_fits_where_memory_falls_and_then_rises(down, up, limit) -> None:
    sizes = [*sorted(down, reverse=True), *sorted(up - down)] or [0]
    lowest = sizes.index(min(sizes))
    hypothesis.assume(sizes[lowest:] == sorted(sizes[lowest:]))
    measure, asked = trials(sizes, limit)
    assert smallest_fitting(len(sizes), measure) == next((i for i, size in enumerate(sizes) if size <= limit), None)
    assert len(asked) == len(set(asked)) <= 4 * math.log2(len(sizes)) + 4


@hypothesis.given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=40), limit=st.integers(0, 9))
def test_what_is_found_fits_and_the_two_before_it_do_not(sizes, limit) -> None:
    measure, asked = trials(sizes, limit)
    found = smallest_fitting(len(sizes), measure)
    assert len(asked) == len(set(asked))
    if found is None:
        assert all(sizes[i] > limit for i in (0, len(sizes) - 1))
    else:
        assert sizes[found] <= limit
        assert all(size > limit for size in sizes[max(found - 2, 0) : found])


@hypothesis.given(batch=st.integers(1, 5000), unit=st.integers(1, 64), least=st.integers(1, 64))
def test_candidates(batch, unit, least) -> None:
    found = candidates(batch, unit, least)
    assert found == sorted(set(found)) and all(nodes % unit == 0 and nodes >= least for nodes in found)
    everything = candidates(batch, unit)
    assert found == [nodes for nodes in everything if nodes >= least] or (everything[-1] < least and len(found) == 1)
    assert everything[0] == unit
    assert math.ceil(batch / everything[-1]) == 1 and all(math.ceil(batch / nodes) > 1 for nodes in everything[:-1])
    assert all(b <= 2 * a for a, b in itertools.pairwise(everything))
    assert {nodes for nodes in range(unit, batch + 1, unit) if batch % nodes == 0} <= set(everything)


def test_candidates_end_where_nodes_do() -> None:
    """Whose numbers are such as a placement takes, however many examples there are."""
    assert vnode.Placement(candidates(10**9, 8)[-1]).virtual_nodes <= candidates(10**9, 8)[-2] * 2
    assert candidates(10**9, 2**20) == [2**20]


# The number that is found


@pytest.mark.thorough
def test_the_smallest_number_that_fits(table: dict[int, int]) -> None:
    assert table[2] > table[4] > table[8] > table[16]  # or a limit would not tell them apart
    step = automatic(table[8])
    report = step.explain(*arguments())
    assert report.virtual_nodes == step.placement.virtual_nodes == 8
    tried = {trial.virtual_nodes: trial for trial in step.search.trials}
    assert {n: (t.bytes, t.fits) for n, t in tried.items()} == {n: (table[n], n >= 8) for n in tried}
    assert {4, 8} <= set(tried)
    assert "V = 8, the smallest that fits" in str(report)
    assert sum(line.endswith("too much") for line in str(report).splitlines()) == sum(n < 8 for n in tried)


@pytest.mark.thorough
def test_the_number_stays_and_so_do_the_bits(table: dict[int, int]) -> None:
    step, (state, x) = automatic(table[4]), arguments()
    elsewhere = step.on(jax.devices()[:1])  # before there is a number
    state = step.put(state)
    with compilations("wide") as compiled:
        first, _ = step(state, x)
        step(first, x)
    assert len(compiled) == len(step.search.trials) == 2  # what was tried, and nothing more for the calls
    assert elsewhere.placement.counts == (4,) and step.on(jax.devices()[:3]).placement.counts == (2, 1, 1)
    # A device alone needs more for the whole batch; the number is not chosen again.
    second, loss = elsewhere(first, x)
    fixed = vnode.virtualize(wide, virtual_nodes=4).on(jax.devices()[:4])
    expected = fixed(fixed(arguments()[0], x)[0], x)
    assert np.asarray(second).tobytes() == np.asarray(expected[0]).tobytes()
    assert np.asarray(loss).tobytes() == np.asarray(expected[1]).tobytes()
    assert step.on(jax.devices()[:1]) is step.on(jax.devices()[:1]) is elsewhere.on(jax.devices()[:1])


def test_what_would_change_elsewhere_says_how_the_number_was_found() -> None:
    answer = vnode.explain(automatic("1MiB", light), *arguments(), devices=[1, 4])
    assert [report.waves * len(report.counts) for report in answer.reports] == [2, 2, 4]
    assert all("search" in str(report) and "1.00 MiB" in str(report) for report in answer.reports)


def test_within_jit() -> None:
    state, x = jax.tree.map(jnp.asarray, arguments())
    limit = by_hand(light, 4, jax.devices()[:DEVICES], state, x)
    step = automatic(limit, light)
    doubled = jax.jit(lambda state, x: 2.0 * step(state * 1.0, x))(state, x)
    assert_same(doubled, lambda state, x: 2.0 * light(state, x), state, x)
    assert by_hand(light, step.placement.virtual_nodes, jax.devices()[:DEVICES], state, x) <= limit


def test_a_placement_says_how_few_and_in_which_proportions() -> None:
    template = vnode.Placement(3, jax.devices()[:2], counts=[2, 1])
    step = vnode.virtualize(light, virtual_nodes="auto", memory="1GiB", placement=template)
    assert step.explain(*arguments(12)).placement == template
    # Scaled, and rounded where a number of nodes is no multiple.
    assert with_nodes(step.pattern, 12, template).placement.counts == (8, 4)
    assert step.on(jax.devices()[:3]).placement.counts == (1, 1, 1)


def test_lanes_are_the_fewest_nodes() -> None:
    step = automatic("1GiB", light, lanes=4)
    step.lower(*arguments())
    assert step.placement.virtual_nodes == 4


def broad(w: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """A step whose gradients are much larger than its activations."""

    def mean(w: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)

    loss, slopes = jax.value_and_grad(mean)(w)
    return jax.tree.map(lambda w, slope: w - 0.1 * slope, w, slopes), loss


@pytest.mark.thorough
def test_lanes_become_fewer_where_that_is_enough() -> None:
    """With eight nodes one sum waits on each of two devices; of two lanes none does."""
    devices, random = jax.devices()[:2], np.random.default_rng(0)
    weights = {
        "up": random.standard_normal((64, 512), np.float32),
        "down": random.standard_normal((512, 64), np.float32),
    }
    args = weights, random.standard_normal((16, 64), np.float32)
    placement, limit = vnode.Placement(8, devices), 1000 * 1024

    def needs(nodes: int, lanes: int | None) -> int:
        found = vnode.virtualize(broad, virtual_nodes=nodes, lanes=lanes).on(devices).lower(*args).compile()
        memory = found.memory_analysis()
        return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes

    assert needs(8, None) > limit >= max(needs(8, 2), needs(16, None))
    options: dict[str, Any] = {"virtual_nodes": "auto", "memory": limit, "placement": placement}
    fixed, step = (vnode.virtualize(broad, **options, lanes=lanes).chosen(*args) for lanes in (None, "auto"))
    assert (fixed.options.virtual_nodes, fixed.options.lanes) == (16, None)
    assert (step.options.virtual_nodes, step.options.lanes) == (8, 2)
    ample = vnode.virtualize(broad, **{**options, "memory": "1GiB"}, lanes="auto").chosen(*args)
    assert (ample.options.virtual_nodes, ample.options.lanes) == (8, None)
    assert_same(step(*args), broad, *args)
    same = vnode.virtualize(broad, virtual_nodes=8, lanes=2)
    for other in (step.on(devices[:1]), same.on(devices)):
        jax.tree.map(np.testing.assert_array_equal, step(*args), other(*args))
    with pytest.raises(vnode.PlacementError, match="lane"):
        step.on(jax.devices()[:4], counts=[2, 2, 2, 2])
    automatic_ = vnode.virtualize(broad, **options, lanes="auto")
    automatic_(*args)
    assert automatic_.search is not None and automatic_.search.verdict.startswith("V = 8 in 2 lanes, the smallest")


def test_prepare_chooses() -> None:
    step = automatic("1GiB", light)
    with pytest.raises(vnode.BatchError, match="call the step once first"):
        step.prepare([jax.devices()[:1]])
    handle = step.prepare([jax.devices()[:1]], *arguments()).wait()
    assert handle.done() and step.placement.virtual_nodes == DEVICES


def test_a_method() -> None:
    class Trainer:
        @vnode.virtualize(virtual_nodes="auto", memory="1GiB", in_axes=(None, None, 0), static_argnums=0)
        def step(self, w: jax.Array, x: jax.Array) -> Any:
            return w + x.sum()

    np.testing.assert_array_equal(Trainer().step(np.ones(2), np.ones(16)), 17.0 * np.ones(2))


def test_nnx(table: dict[int, int]) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Wide(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.asarray(arguments()[0]))

    def update(model: Any, x: jax.Array) -> jax.Array:
        w, loss = wide(model.w[...], x)
        model.w[...] = w
        return loss

    model, x = Wide(), arguments()[1]
    step = vnode.nnx.virtualize(update, virtual_nodes="auto", memory=table[4]).on(jax.devices()[:DEVICES])
    losses = [step(model, x) for _ in range(2)]
    assert step.placement.virtual_nodes == 4
    reference = jax.jit(wide)

    def twice(w: jax.Array, x: jax.Array) -> Any:
        w, first = reference(w, x)
        w, second = reference(w, x)
        return w, [first, second]

    assert_same((model.w[...], losses), twice, jnp.asarray(arguments()[0]), x)
    before = np.asarray(model.w[...])
    assert vnode.fit(step, (model, x), devices=jax.devices()[:DEVICES], memory="1GiB").smallest == {"cpu:2": DEVICES}
    np.testing.assert_array_equal(model.w[...], before)


def test_nnx_prepare_chooses() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def update(param: Any, x: jax.Array) -> None:
        param[...] = light(param[...], x)

    step = vnode.nnx.virtualize(update, virtual_nodes="auto", memory="1GiB").on(jax.devices()[:DEVICES])
    w, x = arguments()
    handle = step.prepare([jax.devices()[:DEVICES]], nnx.Param(jnp.asarray(w)), x).wait()
    assert handle.done() and step.placement.virtual_nodes == DEVICES


# Errors


def test_nothing_fits() -> None:
    with pytest.raises(vnode.MemoryLimitError, match=r"no V fits in the 1\.00 KiB of a device") as caught:
        automatic("1KiB", light)(*arguments(4))
    nodes, needed = re.search(r"V = (\d+) needs least, ([\d.]+ \w+)", str(caught.value)).groups()  # type: ignore[union-attr]
    rows = [line.split() for line in str(caught.value).splitlines() if "too much" in line]
    table = {row[0]: float(row[3]) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[row[4]] for row in rows}
    assert min(table.values()) == table[nodes] and needed in str(caught.value)
    assert isinstance(caught.value, vnode.VnodeError)
    for said in ("too much", "remat", "donate", "lanes", "ZeRO", "more devices"):
        assert said in str(caught.value)


def test_a_cpu_reports_no_limit() -> None:
    with pytest.raises(vnode.MemoryLimitError, match="memory='16GiB'"):
        automatic(None)(*arguments())


def test_no_placement_before_there_is_a_number() -> None:
    with pytest.raises(vnode.PlacementError, match="chosen by the first call"):
        _ = automatic("1GiB").placement


@pytest.mark.parametrize(
    ("options", "error", "pattern"),
    [
        ({"virtual_nodes": "automatic"}, vnode.PlacementError, "not 'automatic'"),
        ({"virtual_nodes": 4, "memory": "1GiB"}, ValueError, "virtual_nodes='auto'"),
        ({"virtual_nodes": "auto", "memory": "16"}, ValueError, "not '16'"),
        ({"virtual_nodes": "auto", "memory": "1.2.3GiB"}, ValueError, r"not '1\.2\.3GiB'"),
        ({"virtual_nodes": "auto", "memory": -1}, ValueError, "not -1"),
        ({"virtual_nodes": "auto", "memory": True}, ValueError, "not True"),
        ({"virtual_nodes": "auto", "lanes": 0}, ValueError, "not 0"),
        ({"virtual_nodes": 4, "lanes": "auto"}, ValueError, "lanes='auto' is for virtual_nodes='auto'"),
        ({"virtual_nodes": "auto", "lanes": "few"}, ValueError, "not 'few'"),
        ({"virtual_nodes": "auto", "coupling": "exactly"}, ValueError, "'exactly'"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], error: type[Exception], pattern: str) -> None:
    with pytest.raises(error, match=pattern):
        vnode.virtualize(wide, **options)


# What devices hold


class Device:
    """A device that reports something."""

    def __init__(self, stats: Any, kind: str = "GPU", process: int = 0) -> None:
        self.stats, self.device_kind, self.platform, self.process_index = stats, kind, "gpu", process

    def memory_stats(self) -> Any:
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def test_the_least_of_what_devices_report() -> None:
    far = jax.errors.JaxRuntimeError("INVALID_ARGUMENT: MemoryStats is only supported for addressable PjRt devices.")
    assert device_memory([Device({"bytes_limit": 5}), Device({"bytes_limit": 3})]) == 3
    assert device_memory([Device(far, "TPU v5 lite")]) == 15.75 * 2**30
    for unknown in (Device(None), Device({}), Device(far)):
        with pytest.raises(vnode.MemoryLimitError, match="is not known"):
            device_memory([Device({"bytes_limit": 5}), unknown])


@pytest.mark.parametrize(
    ("text", "count"), [("16GiB", 16 * 2**30), ("16 GB", 16 * 10**9), ("0.5MiB", 2**19), ("7b", 7), (1e3, 1000)]
)
def test_byte_count(text: Any, count: int) -> None:
    assert byte_count(text) == count


def test_figures_are_those_of_one_device_and_donated_memory_counts_once() -> None:
    placement = vnode.Placement(8, jax.devices()[:8])
    x = jax.ShapeDtypeStruct((8, 1000), jnp.float32, sharding=placement.sharding("vnode"))
    w = jax.ShapeDtypeStruct((500,), jnp.float32, sharding=placement.sharding())
    for donated, expected in (((), 2 * 4000 + 2 * 2000), ((1,), 2 * 4000 + 2000)):
        compiled = jax.jit(lambda x, w: (x + 1, w + 1), donate_argnums=donated).lower(x, w).compile()
        assert expected <= program_memory(compiled) <= expected + 64  # a table of the results comes on top


def test_a_refusal_of_the_compiler_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_for(executor: Executor, args: Any, kwargs: Any, together: bool) -> Any:
        if executor.placement.virtual_nodes < 4:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 20.0G of 15.75G hbm.")
        return jax.jit(lambda x: x).lower(1.0).compile()

    monkeypatch.setattr(Executor, "compile_for", compile_for)
    placement = vnode.Placement(1, jax.devices()[:1])
    pattern = vnode.virtualize(lambda w, x: w + x.sum(), virtual_nodes=1, placement=placement)
    found, step = search(pattern, placement, 10**12, (1.0, np.ones(8)), {})
    assert found.chosen == step.options.virtual_nodes == 4
    assert [t.bytes for t in found.trials if not t.fits] == [20 * 2**30] * 2
    assert "20.00 GiB  too much" in str(found)


# Devices that are not there


def test_fit_says_what_fits_and_whether_the_given_number_does(table: dict[int, int]) -> None:
    devices, args = jax.devices()[:DEVICES], arguments()
    step = vnode.virtualize(wide, virtual_nodes=8)
    entry = vnode.fit(step, args, devices=devices, memory=table[4])["cpu:2"]
    assert entry.search.chosen == 4
    assert entry.given is not None and (entry.given.virtual_nodes, entry.given.bytes) == (8, table[8])
    assert entry.given.fits and "the step's own 8 fit" in str(entry)


def test_fit_says_that_nothing_fits() -> None:
    found = vnode.fit(vnode.virtualize(light, virtual_nodes=4), arguments(4), devices=jax.devices()[:2], memory=1)
    assert found.smallest == {"cpu:2": None}
    assert "no V fits in the 1 B of a device; the step's own 4 are too much" in str(found)


def test_fit_takes_a_placement() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    step = automatic("1GiB", light)
    template = vnode.Placement(2, mesh=mesh, axis="data")
    assert vnode.fit(step, arguments(), devices=template, memory="1GiB").smallest == {"cpu:4": 2}
    assert step.search is None


def test_fit_refuses_what_is_no_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    step = vnode.virtualize(wide, virtual_nodes=4)
    with pytest.raises(vnode.PlacementError, match="devices must be a name"):
        vnode.fit(step, arguments(), devices={"v5e:2x4": 1})
    with pytest.raises(TypeError, match="a tuple of the step's arguments"):
        vnode.fit(step, {"w": 1})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(vnode.VnodeError, match=r"vnode\[tpu-aot\]"):
        vnode.fit(step, arguments(), devices="v5e:2x4")


@pytest.mark.tpu
def test_tpu_kinds_hold_what_their_compiler_says() -> None:
    root = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    done = subprocess.run(
        program("tpu_kinds"),
        capture_output=True,
        text=True,
        cwd=root,
        env={**environment, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["limits"]) == 7
    for planned, said, devices in found["limits"].values():
        assert devices == 8
        available = float(re.search(r"available HBM \(([\d.]+)G\)", said)[1])
        assert abs(available - planned / 2**30) < 0.011  # as the compiler rounds it
    assert found["kind"] == "TPU v5 lite"
    # A device's batch, and at least one layer of a node's activations.
    sizes = {int(nodes): size for nodes, size in found["sizes"].items()}
    rest = 4 * 1024 * 256
    assert all(size > rest * (4096 // 8 + 4096 // nodes) for nodes, size in sizes.items())
    chosen = found["chosen"]
    assert chosen > 8 and sizes[chosen] <= 1.4 * 2**30 < sizes[chosen // 2]


def test_groups() -> None:
    """On groups the number is not found, and the error says where; once it is found elsewhere, it holds for them."""
    step = vnode.virtualize(lambda w, x: w - (x @ w).mean(), virtual_nodes="auto", memory="1GiB")
    d = jax.devices()
    groups = vnode.Placement(3, groups=[d[:2], d[2:3]])
    w, x = jnp.ones(3), jnp.arange(48.0).reshape(16, 3)
    with pytest.raises(vnode.PlacementError, match=r"chosen\(state, batch\)"):
        step.on(groups)(w, x)
    there = step.on(groups)
    chosen = step.on(d[:1]).chosen(w, x)
    np.testing.assert_array_equal(there(w, x), chosen(w, x))
    assert len(there.placement.groups) == 2
