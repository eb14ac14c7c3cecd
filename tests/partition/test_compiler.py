"""Programs that are compiled in processes of their own: the same answers as `jax` gives here, and none left behind."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vnode.partition import Machine
from vnode.partition.compiler.pool import CompilePool
from vnode.partition.compiler.stats import CompiledStats, compiled_stats
from vnode.partition.compiler.target import CompileTarget, Topology, compile_target
from vnode.partition.cost.cache import Cache
from vnode.partition.hlo import Instruction, device_groups, find_collectives, parse


def lowered(width: int, devices: int = 4) -> Any:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    shape = jax.ShapeDtypeStruct((64, width), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "x")))
    return jax.jit(lambda a: jnp.tanh(a @ a.T) @ a).lower(shape)


def target(devices: int = 4) -> CompileTarget:
    return CompileTarget(tuple(jax.devices()[:devices]))


@pytest.mark.thorough
def test_another_process_says_what_this_one_does(tmp_path: Path) -> None:
    """And says it again from disk; a damaged answer there is asked for again."""
    cache = Cache(tmp_path)
    with CompilePool(target(), cache) as pool:
        jobs = [pool.submit(lowered(width)) for width in (128, 256, 512)]
        pool.wait(jobs, time.monotonic() + 120)
        assert [job.stats for job in jobs] == [compiled_stats(lowered(w).compile()) for w in (128, 256, 512)]
        assert {job.outcome for job in jobs} == {"compiled"}
        assert jobs[0].stats is not None and jobs[0].stats.collectives[0].groups == ((0, 1, 2, 3),)
        again = pool.submit(lowered(128))
        assert again.stats == jobs[0].stats
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace('"arguments"', '"argumens"'))
    with CompilePool(target(), Cache(tmp_path)) as pool:
        assert not pool.submit(lowered(128)).done


def test_devices_of_this_process_are_compiled_for_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileTarget, "separate", False)
    widths = (48, 80)
    with CompilePool(target(), Cache(tmp_path)) as pool:
        jobs = [pool.submit(lowered(width)) for width in widths]
        assert not any(job.done for job in jobs), "that would hold up a search"
        pool.wait(jobs, time.monotonic() + 120)
        late = pool.submit(lowered(112))
        pool.wait([late], time.monotonic())
    assert [job.stats for job in jobs] == [compiled_stats(lowered(width).compile()) for width in widths]
    assert late.outcome == "not compiled: time was over" and not pool.queue


def children() -> set[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return {int(pid) for pid in found.stdout.split()}


def test_what_is_not_done_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vnode.partition.compiler.pool.usable_cores", lambda: 16)
    before = children()
    with CompilePool(target(), Cache(tmp_path)) as pool:
        jobs = [pool.submit(lowered(width)) for width in (64, 96, 160)]
        assert len(children() - before) >= 2
        pool.wait(jobs, time.monotonic())
        assert [job.outcome for job in jobs] == ["not compiled: time was over"] * 3
        assert not pool.queue
    ended = time.monotonic() + 20
    while (children() - before) and time.monotonic() < ended:  # ps itself is a child
        time.sleep(0.1)
    assert not {
        pid
        for pid in children() - before
        if Path(f"/proc/{pid}/cmdline").exists()
        and b"compiler.compile_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    assert not [*tmp_path.iterdir()]


def test_a_compilation_ends_with_who_asked_for_it(tmp_path: Path) -> None:
    """A process that is killed leaves nothing behind: its end of the pipe is closed, whatever is being done."""
    os.mkfifo(tmp_path / "request.json")  # nobody writes to it, so that reading it does not end
    worker = [sys.executable, "-m", "vnode.partition.compiler.compile_worker", str(tmp_path)]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.stdin.close()
        assert process.wait(60) == 1


def test_a_compiler_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_no_such_flag=1")
    with CompilePool(target(), Cache(tmp_path)) as pool:
        job = pool.submit(lowered(32))
        pool.wait([job], time.monotonic() + 60)
    assert job.done and job.stats is None and "xla_no_such_flag" in job.outcome
    assert not [*tmp_path.iterdir()], "a failure is not kept"


def test_which_compiler_serves_a_machine() -> None:
    found, reason = compile_target(Machine.gpus("h100-sxm"))
    assert found is None and "no compiler here builds for" in reason
    given_ones, _ = compile_target(Machine.tpu("v5e:2x4"), jax.devices()[:8])
    assert given_ones is not None and given_ones.platform == "cpu" and given_ones.topology is None


@pytest.mark.tpu
def test_a_topology_that_is_not_there(tmp_path: Path) -> None:
    """Cycles and memory of a program for TPUs; one that is too large is refused, with the bytes that it needs."""
    found, _ = compile_target(Machine.tpu("v5e:2x2"))
    assert found is not None and found.topology == Topology("v5e:2x2")
    mesh = Mesh(np.array(found.devices), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    shapes = [jax.ShapeDtypeStruct((n, 4096), jnp.float32, sharding=sharding) for n in (4096, 2**24)]
    programs = [jax.jit(lambda a: (a * 2) @ jnp.ones((4096, 4096))).lower(shape) for shape in shapes]
    with CompilePool(found, Cache(tmp_path)) as pool:
        small, large = [pool.submit(program) for program in programs]
        pool.wait([small, large], time.monotonic() + 200)
    compiled = compiled_stats(programs[0].compile())
    assert small.stats == compiled and compiled.cycles > 0
    assert large.refused and large.needed is not None and large.needed > 2**34


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_groups_in_the_notation_of_counts(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    numbers = np.arange(math.prod(shape)).reshape(shape).transpose(order).ravel()
    width = data.draw(st.sampled_from([n for n in range(1, len(numbers) + 1) if len(numbers) % n == 0]))
    wanted = tuple(map(tuple, numbers.reshape(-1, width).tolist()))
    turned = "" if list(order) == sorted(order) else f"T({','.join(map(str, order))})"
    said = f"%x), replica_groups=[{len(numbers) // width},{width}]<=[{','.join(map(str, shape))}]{turned}, more"
    assert device_groups(Instruction("all-reduce.1", "f32[8]", "all-reduce", said)) == wanted
    listed = ",".join("{" + ",".join(map(str, group)) + "}" for group in wanted)
    said = f"%x), replica_groups={{{listed}}}, use_global_device_ids=true"
    assert device_groups(Instruction("all-reduce.1", "f32[8]", "all-reduce", said)) == wanted


def test_stats_are_the_same_after_json() -> None:
    stats = compiled_stats(lowered(128).compile())
    assert CompiledStats.from_json(dataclasses.asdict(stats)) == stats
    for name, value in itertools.product(("arguments", "temporary"), (-1, "x", None)):
        with pytest.raises((ValueError, TypeError)):
            CompiledStats.from_json({**dataclasses.asdict(stats), name: value})


@pytest.mark.parametrize("axes", [("x",), ("y",), ("x", "z"), ("y", "z"), ("x", "y", "z")])
def test_groups_of_what_is_compiled(axes: tuple[str, ...]) -> None:
    """Whatever notation the compiler chooses, whatever the order of devices: who sums are those along the axes."""
    devices = np.array([jax.devices()[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)])
    mesh = Mesh(devices.reshape(2, 2, 2), ("x", "y", "z"))
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, axes)))
    text = jax.jit(lambda a: a @ a.T).lower(shape).compile().as_text()
    (found,) = (each for each in find_collectives(parse(text or "")) if each.kind == "all-reduce")
    places = np.moveaxis(np.arange(8).reshape(2, 2, 2), [mesh.axis_names.index(a) for a in axes], range(-len(axes), 0))
    assert {frozenset(group) for group in found.groups} == {
        frozenset(row) for row in places.reshape(-1, 2 ** len(axes)).tolist()
    }


def test_groups_along_a_part_of_an_axis() -> None:
    """Of an axis of 8, the middle: numbers that differ in the second of three bits."""
    said = "%x), replica_groups=mesh['a'=8] {'a':(2)2}, use_global_device_ids=true"
    assert device_groups(Instruction("all-reduce.1", "f32[8]", "all-reduce", said)) == ((0, 2), (1, 3), (4, 6), (5, 7))
