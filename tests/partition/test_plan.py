"""Plans: found, carried out, saved, and refused, against the step as written.

Knows steps, machines and plans. Must not know how a plan is searched for.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import pickle
import re
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vnode
from benchmarks.partition import possible
from tests.budget import examples
from tests.rounding import assert_same
from vnode.cluster.live.command_submit import planned as planned_seconds
from vnode.partition import Machine, Plan, search
from vnode.partition.plan.budget import Budget
from vnode.partition.plan.candidates import MEGATRON, SEARCHED, MeshSearch
from vnode.partition.plan.mesh_search import FURTHER, MeshesSearch, in_turn
from vnode.partition.plan.plan_file import checksum
from vnode.partition.plan.plan_report import state_tables
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import on_nodes, subject_of
from vnode.spmd.flow_record import RecordedFlow

V5E = Machine.tpu("v5e:2x4")
FOUR = Machine.tpu("v5e:2x2")
"""Searched in a third of the time."""
OPTIMIZER = optax.adam(1e-2)


def updated(loss: Any, state: Any, batch: Any) -> Any:
    params, slots = state
    value, grads = jax.value_and_grad(loss)(params, *batch)
    updates, slots = OPTIMIZER.update(grads, slots, params)
    return (optax.apply_updates(params, updates), slots), value


def normal(key: int, *shape: int) -> jax.Array:
    """By numpy: jax would compile a program for each shape, in every process that collects the tests."""
    return jnp.asarray(np.random.default_rng(key).normal(size=shape) / np.sqrt(shape[0]), jnp.float32)


def mlp(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - y) ** 2)


def layers(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Blocks with attention over 8 positions, in a scan over layers."""

    def block(h: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        q, k, v = jnp.einsum("btd,cdhe->cbthe", h, layer["qkv"])
        weights = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k))
        h = h + jnp.einsum("bhts,bshe,hed->btd", weights, v, layer["out"])
        return h + jax.nn.gelu(h @ layer["up"]) @ layer["down"], None

    out, _ = jax.lax.scan(block, x, params)
    return jnp.mean((out - y) ** 2)


def images(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Convolutions with batch statistics, which take a pass of their own."""
    h = jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = (h - h.mean((0, 1, 2))) / jnp.sqrt(h.var((0, 1, 2)) + 1e-3)
    return jnp.mean((jax.nn.relu(h).mean((1, 2)) @ params["dense"] - y) ** 2)


def cases() -> dict[str, tuple[Any, Any, Any]]:
    d, h, t = 16, 32, 8
    layer = {
        "qkv": normal(1, 3, d, 4, 4),
        "out": normal(2, 4, 4, d),
        "up": normal(3, d, h),
        "down": normal(4, h, d),
    }
    stacked = jax.tree.map(lambda w: jnp.asarray(np.stack([w, w[::-1]])), layer)
    x, y = normal(5, 16, d), normal(6, 16, d)
    return {
        "mlp": (
            mlp,
            {"up": normal(7, d, h), "bias": jnp.asarray(np.zeros(h, np.float32)), "down": normal(8, h, d)},
            (x, y),
        ),
        "layers": (layers, stacked, (normal(9, 16, t, d), normal(10, 16, t, d))),
        "images": (
            images,
            {"kernel": normal(11, 3, 3, 4, 8), "dense": normal(12, 8, 4)},
            (normal(13, 16, 8, 8, 4), y[:, :4]),
        ),
    }


CASES = cases()
ALL = os.environ.get("VNODE_TEST_ALL") == "1"


def example(name: str) -> tuple[Any, Any]:
    """A step, and its arguments."""
    loss, params, batch = CASES[name]

    def step(state: Any, batch: Any) -> Any:
        return updated(loss, state, batch)

    return step, ((params, OPTIMIZER.init(params)), batch)


@functools.cache
def found(name: str) -> Plan:
    """What is found with all the memory there is."""
    step, args = example(name)
    return search(step, args, FOUR, virtual_nodes=8)


def planned(name: str, sizes: dict[str, int], seed: int, nodes: int = 8, shard_state: bool = False) -> Plan:
    """A plan at random on a mesh, its state sharded over the nodes' axis as well or not."""
    step, args = example(name)
    subject = subject_of(on_nodes(step, nodes, {}), args)
    on = MeshSearch(subject, V5E, sizes, "cpu", None)
    search = on.search
    drawn = possible(search.problem, np.random.default_rng(seed))
    made = on.candidate("random", search.flow(drawn), shard_state=shard_state)
    return plan_of(made, 2**30)


@pytest.mark.sampled(1)
@pytest.mark.quickly
@pytest.mark.parametrize("sizes", [{"vnode": 2, "model": 4}, {"vnode": 1, "model": 4, "model2": 2}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_random_plans_are_carried_out(name: str, sizes: dict[str, int]) -> None:
    step, (state, batch) = example(name)
    for seed in range(3 if ALL else 2):
        planned_step = planned(name, sizes, seed).step()
        got = planned_step(planned_step.put(state), batch)
        assert_same(got, jax.jit(step), state, batch)


@pytest.mark.thorough
@pytest.mark.quickly
@settings(max_examples=examples(6), deadline=None)
@given(st.sampled_from(sorted(CASES)), st.integers(2, 10_000), st.sampled_from([3, 5, 16]))
def test_random_plans_for_any_number_of_nodes(name: str, seed: int, nodes: int) -> None:
    step, (state, batch) = example(name)
    planned_step = planned(name, {"vnode": 2, "model": 4}, seed, nodes).step()
    assert_same(planned_step(planned_step.put(state), batch), jax.jit(step), state, batch)


@pytest.mark.quickly
def test_the_best_plan_is_carried_out_and_its_state_lies_as_planned() -> None:
    step, (state, batch) = example("mlp")
    plan = found("mlp")
    planned_step = plan.step(jax.devices()[:4])
    (params, slots), loss = planned_step(planned_step.put(state), batch)
    assert_same(((params, slots), loss), jax.jit(step), state, batch)
    for name, spec in plan.specs.items():
        if name in ("0/up", "0/down", "0/bias"):
            leaf = params[name[2:]]
            assert leaf.sharding.is_equivalent_to(NamedSharding(leaf.sharding.mesh, spec), leaf.ndim)
    assert set(plan.specs) >= {"0/up", "0/down", "1/0/mu/up"}


@pytest.mark.quickly
def test_a_state_sharded_over_the_nodes_is_carried_out() -> None:
    """As FSDP has it: whole on no device, and in the same shards after the step."""
    step, (state, batch) = example("mlp")
    subject = subject_of(on_nodes(step, 8, {}), (state, batch))
    on = MeshSearch(subject, V5E, {"vnode": 8}, "cpu", None)
    made = on.candidate("FSDP", on.undivided, shard_state=True)
    plan = plan_of(made, 2**30)
    planned_step = plan.step()
    got = planned_step(planned_step.put(state), batch)
    assert_same(got, jax.jit(step), state, batch)
    up = got[0][0]["up"]
    assert up.addressable_shards[0].data.size == up.size // 8


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.quickly
@pytest.mark.parametrize("machine", [V5E, Machine.gpus("P100", hosts=1, per_host=8)], ids=["tpu", "gpu"])
def test_a_plan_for_devices_of_another_kind_is_carried_out(machine: Machine, tmp_path: Path) -> None:
    # What a node computes is written in another way for CPUs: the gradient of a convolution is.
    step, (state, batch) = example("images")
    plan, plain = search(step, (state, batch), machine, virtual_nodes=4, budget=2), jax.jit(step)
    assert plan.mesh["model"] > 1
    plan.save(tmp_path / "plan.json")
    for each in (plan, Plan.load(tmp_path / "plan.json", step, (state, batch))):
        made = each.step()
        assert_same(made(made.put(state), batch), plain, state, batch)


@pytest.mark.thorough
@pytest.mark.sampled(1, thorough=1)
@pytest.mark.parametrize("name", CASES)
def test_random_plans_with_a_state_sharded_over_the_nodes_too(name: str) -> None:
    """ZeRO on top of any split; gradients, and so the slots, have the bits that they have without it."""
    step, (state, batch) = example(name)
    for seed in range(2 if ALL else 1):
        sharded = planned(name, {"vnode": 2, "model": 4}, seed, shard_state=True)
        assert any("vnode" in str(spec) for spec in sharded.specs.values())
        sharded_step, without = sharded.step(), planned(name, {"vnode": 2, "model": 4}, seed).step()
        got = sharded_step(sharded_step.put(state), batch)
        assert_same(got, jax.jit(step), state, batch)
        jax.tree.map(np.testing.assert_array_equal, got[0][1], without(without.put(state), batch)[0][1])


@pytest.mark.thorough
@pytest.mark.quickly
def test_what_fits_only_with_its_state_sharded_over_all_axes() -> None:
    """A quarter of the state on each of four rows; and as little as any candidate takes is found a plan for."""
    wide = {"up": normal(1, 64, 256), "bias": jnp.zeros(256), "down": normal(2, 256, 64)}

    def step(state: Any, batch: Any) -> Any:
        return updated(mlp, state, batch)

    args = (wide, OPTIMIZER.init(wide)), (normal(3, 16, 64), normal(4, 16, 64))
    subject = subject_of(on_nodes(step, 8, {}), args)
    on = MeshSearch(subject, V5E, {"vnode": 4, "model": 2}, "cpu", None)
    expert = on.expert(MEGATRON)
    both = on.with_sharded_state(expert)
    scalar = 4  # the optimizer's count of steps
    assert both.figures.state - scalar == (expert.figures.state - scalar) / 4
    assert both.figures.memory < expert.figures.memory
    roomy = search(step, args, V5E, virtual_nodes=8)
    known = (roomy.figures, *roomy.beside.values())
    least = min(figures.memory for figures in known)
    assert least < roomy.figures.memory  # or nothing would be searched for
    plan = search(step, args, V5E, virtual_nodes=8, memory=least)
    assert plan.figures.memory <= plan.limit == least
    assert plan.figures.seconds <= min(figures.seconds for figures in known if figures.memory <= least) * (1 + 1e-9)


def test_no_plan_is_worse_than_what_experts_do() -> None:
    for name in CASES:
        plan = found(name)
        assert set(plan.beside) | {plan.name} >= {"data parallel", "FSDP", "Megatron-style"}
        fitting = [each.seconds for each in plan.beside.values() if each.memory <= plan.limit]
        assert all(plan.figures.seconds <= seconds * (1 + 1e-9) for seconds in fitting)
        assert plan.figures.memory <= plan.limit


@pytest.mark.thorough
def test_bits_do_not_depend_on_the_devices_along_the_nodes() -> None:
    _, (state, batch) = example("layers")
    plan = planned("layers", {"vnode": 2, "model": 4}, 4)
    wide = plan.step()
    devices = np.array(jax.devices())
    narrow = wide.on(jax.sharding.Mesh(devices[:4].reshape(1, 4), ("vnode", "model")))
    one, other = (each(each.put(state), batch) for each in (wide, narrow))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("budget", [float("inf"), 10**400, np.float32(1e30)], ids=str)
def test_a_budget_without_end(budget: Any) -> None:
    step, args = example("mlp")
    ended = search(step, args, FOUR, virtual_nodes=2, budget=600)  # many times what it takes
    endless = search(step, args, FOUR, virtual_nodes=2, budget=budget)
    assert (endless.name, endless.figures) == (ended.name, ended.figures)


def test_less_memory_is_found_a_plan_for_or_refused_with_figures() -> None:
    step, args = example("mlp")
    free = found("mlp")
    most = max(each.memory for each in (free.figures, *free.beside.values()))
    least = search(step, args, FOUR, virtual_nodes=8, memory=most * 3 // 4)
    assert least.figures.memory <= most * 3 // 4 == least.limit
    with pytest.raises(vnode.MemoryLimitError, match=r"no plan fits in 100 B a device") as caught:
        search(step, args, Machine.tpu("v5e:1x1"), virtual_nodes=8, memory=100)
    assert "the smallest found takes" in str(caught.value) and "devices with more memory" in str(caught.value)


@pytest.mark.thorough
def test_as_few_nodes_as_fit() -> None:
    step, args = example("layers")
    four = search(step, args, FOUR, virtual_nodes="auto")
    assert four.virtual_nodes == 4  # devices
    allowed = four.figures.memory - 1
    more = search(step, args, FOUR, virtual_nodes="auto", memory=allowed)
    assert more.figures.memory <= allowed
    try:  # one number after another
        fewest = search(step, args, FOUR, virtual_nodes=4, memory=allowed).virtual_nodes
    except vnode.MemoryLimitError:
        fewest = search(step, args, FOUR, virtual_nodes=8, memory=allowed).virtual_nodes
    assert more.virtual_nodes == fewest


@pytest.mark.sampled(2, thorough=1)
@pytest.mark.quickly
@pytest.mark.parametrize("around", ["mesh", "leaks", "no jit", "nans", "explicit mesh"])
def test_a_plan_is_found_and_carried_out_within_what_a_caller_sets(around: str) -> None:
    step, args = example("mlp")
    contexts = {
        "mesh": lambda: jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)),
        "explicit mesh": lambda: jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)),
        "leaks": jax.checking_leaks,
        "nans": lambda: jax.debug_nans(True),
        "no jit": jax.disable_jit,
    }
    with contexts[around]():
        plan = search(step, args, FOUR, virtual_nodes=4, budget=1, donate_argnums=0)
        made = plan.step(jax.devices()[:4])
        got = made(made.put(jax.tree.map(jnp.copy, args[0])), args[1])
        assert "mesh" in str(plan.explain())
    assert_same(got, step, *args)


@pytest.mark.sampled(1, thorough=2)
@pytest.mark.quickly  # the programs are the same: so are the bits, however they are compiled
@pytest.mark.parametrize("around", ["explicit mesh", "no jit"])
@pytest.mark.parametrize("name", CASES)
def test_a_plan_from_a_file_is_the_same_within_what_a_caller_sets(name: str, around: str, tmp_path: Path) -> None:
    """Within a mesh of explicit axes jax writes changes of sharding into derivatives; without jit it opens loops."""
    step, (state, batch) = example(name)
    plan = planned(name, {"vnode": 2, "model": 4}, 5)
    plan.save(tmp_path / "plan.json")
    outside = plan.step()(state, batch)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh) if around == "explicit mesh" else jax.disable_jit():
        if around == "explicit mesh":
            batch = jax.device_put(batch, PartitionSpec("a"))  # the types of examples and weights name axes
            state = jax.device_put(state, PartitionSpec())
        again = Plan.load(tmp_path / "plan.json", step, (state, batch))
        made = again.step()
        got = made(made.put(state), batch)
        assert again.explain().report.accumulated == plan.explain().report.accumulated
    for a, b in zip(jax.tree.leaves(outside), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.quickly
def test_outputs_that_are_constants_of_the_step() -> None:
    def step(state: Any, batch: Any) -> Any:
        state, value = example("mlp")[0](state, batch)
        return state, (value, np.int32(len(batch[0])), np.float32(2.5))

    args = example("mlp")[1]
    plan = search(step, args, V5E, virtual_nodes=4, budget=1)
    made = plan.step()
    assert_same(made(made.put(args[0]), args[1]), step, *args)


@pytest.mark.quickly
def test_leaves_of_every_kind(tmp_path: Path) -> None:
    def step(state: Any, batch: Any) -> Any:
        inner, value = example("mlp")[0](state["inner"], batch)
        key, drawn = jax.random.split(state["key"])
        changed = {
            "inner": inner,
            "key": key,
            "raw": jax.random.split(state["raw"])[0],
            "rate": state["rate"] * 1.5,
            "count": state["count"] + 1,
            "flags": ~state["flags"],
            "empty": state["empty"],
            "bytes": state["bytes"] + jnp.uint8(1),
        }
        return {**state, **changed}, (value, jax.random.normal(drawn), state["empty"].sum(), None)

    state, batch = example("mlp")[1]
    more = {
        "key": jax.random.key(1),
        "raw": jax.random.PRNGKey(2),
        "rate": 0.5,  # of Python: weakly typed, as jax.jit takes it
        "count": 3,
        "flags": jnp.array([True, False]),
        "empty": jnp.zeros((0, 4)),
        "bytes": np.arange(8, dtype=np.uint8),
        "nothing": None,
        "none": {},
    }
    args = {"inner": state, **more}, batch
    plan = search(step, args, V5E, virtual_nodes=8, budget=1)
    plan.save(tmp_path / "plan.json")
    for each in (plan, Plan.load(tmp_path / "plan.json", step, args)):
        made = each.step()
        got = made(made.put(args[0]), batch)
        assert_same(got, jax.jit(step), *args)
        weak = {name: got[0][name].weak_type for name in ("rate", "count", "bytes")}
        assert weak["rate"] and weak["count"] and not weak["bytes"]
    assert plan.accept().reasons is not None


SMALL: dict[str, tuple[Any, Any]] = {
    "no hidden units": (
        lambda p, x: jnp.mean((x @ p["a"] @ p["b"] - x) ** 2),
        {"a": np.ones((16, 0), np.float32), "b": np.ones((0, 16), np.float32)},
    ),
    "some of none": (
        lambda p, x: jnp.mean((jnp.concatenate([x @ p["a"], x @ p["z"]], 1) @ p["b"]) ** 2),
        {"a": normal(1, 16, 8), "z": np.ones((16, 0), np.float32), "b": normal(2, 8, 4)},
    ),
    "no layers": (
        lambda p, x: jnp.mean(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, p["w"])[0] ** 2),
        {"w": np.ones((0, 16, 16), np.float32)},
    ),
    "layers of a number": (
        lambda p, x: jnp.mean(jax.lax.scan(lambda c, w: (jnp.tanh(c * w[0, 0]), None), x, p["w"])[0] ** 2),
        {"w": np.full((1, 1, 1), 0.5, np.float32)},
    ),
    "no rows": (
        lambda p, x: jnp.mean((x @ p["a"]) ** 2) + x.reshape(-1, 4, 2, 2)[:, :, :0].sum(),
        {"a": normal(1, 16, 8)},
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.quickly
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("machine", [V5E, Machine.gpus("a100-80gb", hosts=1, per_host=8)], ids=lambda m: m.name)
def test_arrays_with_one_element_or_none(name: str, machine: Machine) -> None:
    loss, params = SMALL[name]

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    x = normal(5, 16, 16)
    made = search(step, (params, x), machine, virtual_nodes=8, budget=1).step()
    assert_same(made(made.put(params), x), jax.jit(step), params, x)


@pytest.mark.sampled(1)
@pytest.mark.quickly
@pytest.mark.parametrize("where", ["of the batch", "of the result", "with a result"])
def test_a_step_with_effects_is_planned_on_meshes_of_nodes(where: str) -> None:
    """Each device of any other mesh would have them; and what has an effect is not computed again."""
    seen: list[float] = []

    def note(value: Any) -> None:
        seen.append(float(value))

    def returned(value: Any) -> np.float32:
        note(value)
        return np.float32(value)

    def step(state: Any, batch: Any) -> Any:
        if where == "of the batch":
            jax.debug.callback(note, batch[0].sum())
        state, value = example("mlp")[0](state, batch)
        if where == "of the result":
            jax.debug.callback(note, value)
        if where == "with a result":
            value = jax.experimental.io_callback(returned, jax.ShapeDtypeStruct((), jnp.float32), value)
        return state, value

    args = example("mlp")[1]
    want = step(*args)
    jax.effects_barrier()
    (expected,) = seen
    free = search(step, args, V5E, virtual_nodes=8, budget=1)
    least = min(figures.memory for figures in (free.figures, *free.beside.values()))
    for plan in (free, search(step, args, V5E, virtual_nodes=8, budget=1, memory=least)):
        assert plan.mesh == {"vnode": 8}
        seen.clear()
        made = plan.step()
        got = made(made.put(args[0]), args[1])
        jax.block_until_ready(got)
        jax.effects_barrier()
        np.testing.assert_allclose(seen, [expected], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    with pytest.raises(vnode.MemoryLimitError, match=r"only the batch was divided: .* has an effect.*test_plan\.py"):
        search(step, args, V5E, virtual_nodes=8, budget=30, memory=least // 2)
    with pytest.raises(vnode.UnsupportedPrimitiveError, match=r"(?s)has an effect.* 8 virtual nodes or more"):
        search(step, args, V5E, virtual_nodes=4, budget=1)


class FakeMesh:
    """A mesh with a straight relation between a search's account of memory and what is predicted.

    Args:
      slope: bytes that are predicted for each byte by the account.
      more: bytes that are predicted besides.
      fewest: by the account.
      free: bytes by the account of what is best without a limit.
    """

    replicas = 1
    sizes: ClassVar[dict[str, int]] = {"vnode": 1}

    def __init__(self, slope: float, more: float, fewest: float, free: float) -> None:
        self.slope, self.more, self.fewest, self.free = slope, more, fewest, free
        self.asked: list[float] = []

    def predicted(self, account: float) -> int:
        return int(self.slope * account + self.more)

    def solution(self, memory: float, *_: Any) -> Any:
        if memory < self.fewest:
            return None
        return types.SimpleNamespace(memory=memory, cost=1.0, interrupted=False)

    def least(self, _: float) -> float:
        return self.fewest

    def searched(self, solution: Any) -> Any:
        self.asked.append(solution.memory)
        account = min(solution.memory, self.free)
        figures = types.SimpleNamespace(memory=self.predicted(account), seconds=1.0)
        return types.SimpleNamespace(
            name="searched", figures=figures, account=account, estimate=1.0, prediction_seconds=0.0
        )


def search_within(limit: int, on: FakeMesh, left: float = 1e6) -> tuple[MeshesSearch, list[Any]]:
    run, found = MeshesSearch(V5E, "tpu", limit, None, Budget(left)), list[Any]()
    assert not run.searched(cast(Any, on), found)
    return run, found


@pytest.mark.parametrize(("left", "solved"), [(1e6, 4), (-1.0, 1)])
def test_a_search_whose_time_is_over_solves_a_mesh_once(left: float, solved: int) -> None:
    """Again with less memory, where that did not fit, only while there is time."""
    on = FakeMesh(0.1, 100, 1, 1000)
    run, _ = search_within(100, on, left)
    assert len(on.asked) == solved and on.asked == sorted(on.asked, reverse=True)
    assert bool(run.budget.untried) == (left < 0)


COSTS = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3)
"""Costs of one kind of candidate on the meshes 2x2x2, 2x4 and 4x2."""


@given(COSTS, COSTS)
@settings(max_examples=50, deadline=None)
def test_each_kind_is_predicted_first_where_its_cost_is_least(solutions: list[float], megatron: list[float]) -> None:
    """And on a mesh with a further axis only if that is cheaper than as many replicas without it."""

    def mesh(replicas: int, axes: int, solution: float, expert: float) -> Any:
        problem = types.SimpleNamespace(cost=lambda _: expert)
        return types.SimpleNamespace(
            replicas=replicas,
            axes=range(axes),
            search=types.SimpleNamespace(problem=problem),
            expert_splits={MEGATRON: None},
            cost=solution,
        )

    meshes = [mesh(*each) for each in zip((2, 2, 4), (2, 1, 1), solutions, megatron, strict=True)]
    order = in_turn(meshes)
    for name, costs in ((SEARCHED, solutions), (MEGATRON, megatron)):
        several = [(meshes.index(at), cost) for each, at, cost in order if each == name]
        assert all(cost == costs[k] for k, cost in several)
        kept = {0, 1, 2} if costs[0] <= FURTHER * costs[1] else {1, 2}
        assert {k for k, _ in several} == kept
        assert [cost for _, cost in several] == sorted(costs[k] for k in kept)
    assert {name for name, *_ in order[:2]} == {SEARCHED, MEGATRON}


@pytest.mark.sampled(3, thorough=9)
@pytest.mark.parametrize("seconds", [26.0, 40.0, 60.0, 90.0])
@pytest.mark.parametrize("memory", [None, "100KiB"], ids=["roomy", "narrow"])
@pytest.mark.parametrize("slow", [None, 0, 1], ids=["steady", "slow first", "slow second"])
def test_a_search_ends_within_its_budget(
    monkeypatch: pytest.MonkeyPatch, seconds: float, memory: str | None, slow: int | None
) -> None:
    """By a clock on which a prediction takes ten seconds, a slow one 25, and a search on a mesh three."""
    now, many, predict, solve = 0.0, 0, MeshSearch.candidate, MeshSearch.solution
    seconds += 15.0 * (slow is not None)

    def candidate(on: MeshSearch, *args: Any, **kwargs: Any) -> Any:
        nonlocal now, many
        took = 25.0 if many == slow else 10.0
        now, many = now + took, many + 1
        return dataclasses.replace(predict(on, *args, **kwargs), prediction_seconds=took)

    def solution(on: MeshSearch, memory: float, *args: Any) -> Any:
        nonlocal now
        now += 0.0 if memory in on.solutions else 3.0
        return solve(on, memory, *args)

    clock = types.SimpleNamespace(monotonic=lambda: now)
    for module in ("budget", "mesh_search", "candidates"):
        monkeypatch.setattr(f"vnode.partition.plan.{module}.time", clock)
    monkeypatch.setattr(MeshSearch, "candidate", candidate)
    monkeypatch.setattr(MeshSearch, "solution", solution)
    state = {"up": normal(0, 32, 128), "bias": jnp.zeros(128), "down": normal(1, 128, 16)}
    args = (state, OPTIMIZER.init(state)), (normal(2, 32, 32), normal(3, 32, 16))
    plan = search(functools.partial(updated, mlp), args, V5E, virtual_nodes=8, memory=memory, budget=seconds)
    assert now <= seconds and plan.figures.memory <= plan.limit
    if seconds >= 90:
        assert {"data parallel", "FSDP", "Megatron-style"} <= {plan.name, *plan.beside}


@settings(max_examples=200, deadline=None)
@given(st.floats(0.3, 2.0), st.integers(-300, 1000), st.floats(10, 900), st.floats(0, 1000), st.integers(100, 2000))
def test_a_search_finds_what_fits_as_predicted_whatever_its_own_account(
    slope: float, more: int, fewest: float, beyond: float, limit: int
) -> None:
    """Where the least by its own account is predicted to fit, something is found that does; nothing is asked twice."""
    on = FakeMesh(slope, more, fewest, fewest + beyond)
    least = 1.002 * fewest  # sums of bytes are rounded
    _, found = search_within(limit, on)
    assert len({*on.asked}) == len(on.asked) <= 4 and all(asked >= fewest for asked in on.asked)
    fits = any(each.figures.memory <= limit for each in found)
    assert fits or on.predicted(min(least, on.free)) > limit


def test_a_job_of_a_cluster_is_as_fast_as_its_best_plan(tmp_path: Path) -> None:
    """By plans themselves, and by their files, which a trace names."""
    step, args = example("mlp")
    plans = {4: search(step, args, FOUR, virtual_nodes=8, budget=1), 8: planned("mlp", {"vnode": 2, "model": 4}, 3)}
    for count, plan in plans.items():
        plan.save(tmp_path / f"{count}.json")
    small, large = (1 / plan.figures.seconds for plan in plans.values())
    expected = (0, 0, 0, 0, *[small] * 4, max(small, large))
    job: dict[str, Any] = {"id": "a", "arrival": 0, "steps": 10, "plans": {"4": "4.json", "8": "8.json"}}
    trace = tmp_path / "jobs.json"
    trace.write_text(json.dumps({"jobs": [job]}))
    (read,) = vnode.cluster.read(trace).jobs
    assert vnode.cluster.Speeds.from_plans(plans).per_second == read.by_kind[""].per_second == expected
    assert (read.minimum, read.demand) == (4, 8)
    declared = planned_seconds({count: str(tmp_path / f"{count}.json") for count in plans})  # of vnode submit --plans
    assert declared == {count: pytest.approx(1 / speed) for count, speed in enumerate(expected) if speed}
    with pytest.raises(ValueError, match="the plan for 2 devices is for 4"):
        vnode.cluster.Speeds.from_plans({2: plans[4]})
    (tmp_path / "damaged.json").write_text((tmp_path / "4.json").read_text().replace('"memory":', '"memory":1'))
    for files, message in [
        ({"2": "4.json"}, r"4\.json: it is for 4 devices, not for 2"),
        ({"2": "damaged.json"}, r"damaged\.json: it was changed after it was written"),
        ({"2": "jobs.json"}, r"jobs\.json: it is not a"),
        ({"2": "none.json"}, r"none\.json' cannot be read"),
    ]:
        trace.write_text(json.dumps({"jobs": [{**job, "plans": files}]}))
        with pytest.raises(vnode.errors.ClusterError, match=message):
            vnode.cluster.read(trace)


@pytest.mark.thorough
@pytest.mark.quickly  # the programs are the same: so are the bits, however they are compiled
def test_a_saved_plan_makes_the_same_step(tmp_path: Path) -> None:
    step, (state, batch) = example("layers")
    plan = planned("layers", {"vnode": 1, "model": 4, "model2": 2}, 3)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json", step, (state, batch))
    assert str(again) == str(plan) and again.specs == plan.specs
    first, second = (each.step() for each in (plan, again))
    for a, b in zip(
        jax.tree.leaves(first(first.put(state), batch)), jax.tree.leaves(second(second.put(state), batch)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    step, args = example("mlp")
    path = tmp_path / "plan.json"
    planned("mlp", {"vnode": 2, "model": 4}, 3).save(path)
    content = json.loads(path.read_text())
    for version in (content["version"] - 1, content["version"] + 1, None):
        changed = {**content, "version": version}
        path.write_text(json.dumps({**changed, "checksum": checksum(changed)}))
        with pytest.raises(vnode.PartitionError, match=rf"of version {version}, and this(?s:.*)search again"):
            Plan.load(path, step, args)


def test_a_plan_for_another_step_is_refused(tmp_path: Path) -> None:
    step, (state, batch) = example("mlp")
    plan = planned("mlp", {"vnode": 2, "model": 4}, 1)
    plan.save(tmp_path / "plan.json")

    def other(state: Any, batch: Any) -> Any:
        return updated(lambda params, x, y: 2 * mlp(params, x, y), state, batch)

    with pytest.raises(vnode.PartitionError, match="is for another step"):
        Plan.load(tmp_path / "plan.json", other, (state, batch))
    shapes = r"(?s)is for another step\.\n  argument 1\S+ then: float32\[\d+, \d+\], now: float32\[8, \d+\]"
    with pytest.raises(vnode.PartitionError, match=shapes):
        Plan.load(tmp_path / "plan.json", step, (state, jax.tree.map(lambda x: x[:8], batch)))
    with pytest.raises(vnode.PartitionError) as error:
        Plan.load(tmp_path / "plan.json", step, (state, jax.tree.map(lambda x: x[:8], batch)))
    facts = [line.strip() for line in str(error.value).split("What to do")[0].splitlines()[1:]]
    assert [fact.split()[0] for fact in facts] == ["argument"] * len(jax.tree.leaves(batch)), "and no equations"
    with pytest.raises(vnode.PartitionError, match="virtual nodes then: 8, now: 4"):
        Plan.load(tmp_path / "plan.json", vnode.virtualize(step, virtual_nodes=4), (state, batch))
    with pytest.raises(vnode.PartitionError, match=r"(?s)virtual nodes then: 8, now: 4.*load\(..., virtual_nodes=8\)"):
        Plan.load(tmp_path / "plan.json", step, (state, batch), virtual_nodes=4)
    for nodes in (8, "auto"):
        assert Plan.load(tmp_path / "plan.json", step, (state, batch), virtual_nodes=nodes).virtual_nodes == 8
    with pytest.raises(vnode.PartitionError, match="does not know one of this step's passes"):
        plan.step()(state, jax.tree.map(lambda x: x[:8], batch))


def test_a_plan_for_other_options_is_refused(tmp_path: Path) -> None:
    """What computes the same may be another step to nodes, or hold its state twice."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(w)
        return w - 0.1 * grad, loss

    args, path = (jnp.eye(8), normal(1, 16, 8)), tmp_path / "plan.json"

    def write(**options: Any) -> None:
        subject = subject_of(on_nodes(step, 4, options), args)
        on = MeshSearch(subject, V5E, {"vnode": 2, "model": 4}, "cpu", None)
        plan_of(on.expert(MEGATRON), 2**30).save(path)

    write(donate_argnums=0)
    assert Plan.load(path, step, args, donate_argnums=0).step().spec.donate_argnums == (0,)
    with pytest.raises(vnode.PartitionError, match=r"donate_argnums then: \[0\], now: \[\]"):
        Plan.load(path, step, args)
    write(donate_argnums=(0,), reduction="fast", coupling="local")
    for one, call in ((step, "Plan.load"), (vnode.virtualize(step, virtual_nodes=4), "vnode.virtualize")):
        with pytest.raises(vnode.PartitionError) as error:
            Plan.load(path, one, args)
        advised = re.search(rf"made with: .*{call}\(\.\.\., (.*)\)", str(error.value))
        assert advised is not None, str(error.value)
        options = eval(f"dict({advised[1]})")
        assert options == {"donate_argnums": (0,), "reduction": "fast", "coupling": "local"}
        if one is step:
            assert Plan.load(path, step, args, **options).figures.memory > 0
        else:
            assert Plan.load(path, vnode.virtualize(step, virtual_nodes=4, **options), args).figures.memory > 0
    write()
    assert Plan.load(path, step, args, donate_argnums=0).step().spec.donate_argnums == (0,)  # takes less
    with pytest.raises(vnode.PartitionError, match=r"(?s)computation differs in 2 passes.*in_axes"):
        Plan.load(path, step, args, in_axes=(None, 1))
    with pytest.raises(vnode.PartitionError, match="args must be a tuple of the step's arguments, not dict"):
        Plan.load(path, step, cast(Any, {"w": args[0]}))


def test_parameters_are_shown_before_slots_and_numbered_names_together(tmp_path: Path) -> None:
    """Parameters are what the loss is a function of, cast and nested; slots are called as comes first."""
    layers = {f"Dense_{i}": {"kernel": normal(i, 8, 8), "w1": normal(i, 8), "w2": normal(i, 8)} for i in range(3)}
    odd = {f"odd{chr(97 + i)}": normal(i, 8) for i in range(26)}

    def step(state: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            h = x.astype(jnp.bfloat16)
            for layer in params["layers"].values():
                h = jnp.tanh(h @ layer["kernel"] + layer["w1"] * layer["w2"])
            return jnp.mean((h + sum(params["odd"].values())).astype(jnp.float32) ** 2)

        grads = jax.grad(loss)(state["params"])
        slots = jax.tree.map(lambda m, g: 0.9 * m + g, state["acc"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], slots)
        return {"acc": slots, "params": params, "t": state["t"] + 1}, loss(state["params"])

    params = {"layers": layers, "odd": odd}
    args = {"acc": jax.tree.map(jnp.zeros_like, params), "params": params, "t": jnp.int32(0)}, normal(9, 16, 8)
    subject = subject_of(on_nodes(step, 4, {}), args)
    on = MeshSearch(subject, V5E, {"vnode": 8}, "cpu", None)
    plan = plan_of(on.candidate("FSDP", on.undivided, shard_state=True), 2**30)
    plan.save(tmp_path / "plan.json")
    for each in (plan, Plan.load(tmp_path / "plan.json", step, args)):
        assert each.subject.parameters == {name for name in each.specs if name.startswith("params/")}
        (table,) = state_tables(each)
        shown = {row[0].text: row[2].text for row in table.rows}
        assert [*shown][: len(odd) + 3] == [
            *(f"params/layers/Dense_*/{name}" for name in ("kernel", "w1", "w2")),
            *(f"params/odd/{name}" for name in odd),
        ]
        assert shown["params/layers/Dense_*/kernel"] == "3" and "more" in table.rest


@pytest.mark.thorough
def test_names_are_taken_as_they_are() -> None:
    """Whatever they say as patterns: a name with a line's end is not the one without."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(state: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ state["w\n"]) @ state["w"] + state["(b)*"] - x) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state)), loss(state)

    args = {"w\n": normal(1, 8, 64), "w": normal(2, 64, 8), "(b)*": normal(3, 8)}, normal(4, 16, 8)
    subject = subject_of(on_nodes(step, 4, {}), args)
    on = MeshSearch(subject, V5E, {"vnode": 2, "model": 4}, "cpu", None)
    virtual = plan_of(on.expert(MEGATRON), 2**30).step()
    placed = virtual.put(args[0])
    assert [placed[name].addressable_shards[0].data.shape for name in ("w\n", "w")] == [(8, 16), (16, 8)]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), virtual(placed, args[1]), step(*args)
    )
    with pytest.raises(vnode.PlacementError, match=r"made for arguments with a leaf 'w'; there is none"):
        virtual({name: leaf for name, leaf in args[0].items() if name != "w"}, args[1])


def test_a_plan_for_other_random_numbers_is_refused(tmp_path: Path) -> None:
    """With which setting jax draws, no equation's parameters tell; other numbers come of it, and other splits."""

    def dropped(state: Any, x: jax.Array) -> Any:
        key, drawn = jax.random.split(state["key"])
        kept = jax.random.bernoulli(drawn, 0.5, x.shape)
        grad = jax.grad(lambda w: jnp.mean(((jnp.where(kept, x, 0.0) @ w) - x) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad, "key": key}, jnp.sum(kept)

    args = {"w": jnp.eye(8), "key": jax.random.key(0)}, jnp.ones((16, 8))
    path = tmp_path / "plan.json"
    search(dropped, args, V5E, virtual_nodes=8, budget=1).save(path)
    Plan.load(path, dropped, args)
    with jax.threefry_partitionable(False):
        with pytest.raises(vnode.PartitionError, match=r"now:  random numbers with jax_threefry_partitionable=False"):
            Plan.load(path, dropped, args)
        search(dropped, args, V5E, virtual_nodes=8, budget=1).save(path)
        loaded = Plan.load(path, dropped, args)
    assert loaded.virtual_nodes == 8
    with pytest.raises(vnode.PartitionError, match=r"then: random numbers with jax_threefry_partitionable=False"):
        Plan.load(path, dropped, args)


def places(content: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a file's content, as keys that lead there."""
    if not isinstance(content, dict | list):
        return [place]
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    return [place] * bool(place) + [each for key, value in pairs for each in places(value, (*place, key))]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A plan's file, and what it held at first."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    planned("mlp", {"vnode": 2, "model": 4}, 1).save(path)
    return path, json.loads(path.read_text())


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_file_of_which_anything_was_changed_is_refused(written: tuple[Path, Any], data: st.DataObject) -> None:
    """A layout that was changed may still be one, of other values; a number that was, print as another."""
    path, good = written
    step, args = example("mlp")
    content = json.loads(json.dumps(good))
    *way, last = data.draw(st.sampled_from(places(good)))
    inner = content
    for key in way:
        inner = inner[key]
    values = [None, True, -1, 0, 1, 2, 1.5, float("nan"), 10**400, "x", "model", [], {}, [1], [[]]]
    change = data.draw(st.sampled_from(["another", "none", "twice"]))
    if change == "another":
        inner[last] = data.draw(st.sampled_from(values))
    elif change == "none" or isinstance(inner, dict):
        del inner[last]
    else:
        inner.insert(last, inner[last])
    if json.dumps(content, sort_keys=True) == json.dumps(good, sort_keys=True):
        return
    path.write_text(json.dumps(content))
    with pytest.raises(vnode.PartitionError, match=r"plan\.json cannot be read"):
        Plan.load(path, step, args)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[" * 100_000, b"[]", b"null", b"NaN"], ids=repr)
def test_files_that_hold_no_plan(content: bytes, tmp_path: Path) -> None:
    step, args = example("mlp")
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(vnode.PartitionError, match=r"plan\.json'? cannot be read"):
        Plan.load(tmp_path / "plan.json", step, args)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    step, args = example("mlp")
    plan = found("mlp")
    path = tmp_path / "missing" / "some.json"
    writes = {
        plan.save: vnode.PartitionError,
        V5E.save: vnode.MachineError,
        plan.timeline.chrome_trace: vnode.VnodeError,
    }
    for write, error in writes.items():
        with pytest.raises(error, match=r"(?s)missing/some\.json' cannot be written.*No such file.*make the folder"):
            write(path)
        with pytest.raises(error, match=r"(?s)cannot be written.*Is a directory.*name a file"):
            write(tmp_path)
    reads = {Machine.load: vnode.MachineError, lambda path: Plan.load(path, step, args): vnode.PartitionError}
    for read, error in reads.items():
        with pytest.raises(error, match=r"(?s)some\.json' cannot be read.*No such file"):
            read(path)
    assert not list(tmp_path.iterdir())
    path.parent.mkdir()
    path.write_bytes("{}".encode("utf-16"))
    for read, error in reads.items():
        with pytest.raises(error, match=r"(?s)some\.json' cannot be read.*no text in UTF-8"):
            read(path)


def test_a_file_is_written_whole_and_links_stay_links(tmp_path: Path) -> None:
    target, link = tmp_path / "machine.json", tmp_path / "link.json"
    target.write_text("before")
    link.symlink_to(target)
    V5E.save(link)
    assert link.is_symlink() and Machine.load(target) == Machine.load(link) == V5E
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "machine.json"]


def test_a_file_may_be_written_by_several_threads_at_once(tmp_path: Path) -> None:
    """Each writes a file of its own first: one that others share is gone when the second puts it in its place."""
    path = tmp_path / f"{'a long name ' * 20}.json"
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(V5E.save, path) for _ in range(200)]:
            done.result()
    assert Machine.load(path) == V5E and list(tmp_path.iterdir()) == [path]


def test_wrong_use_reads_well() -> None:
    step, args = example("mlp")
    with pytest.raises(vnode.VnodeError, match=r"there is no TPU slice 'v5e'(.|\n)*'v5e:4x4'"):
        search(step, args, "v5e", virtual_nodes=8)
    with pytest.raises(vnode.PartitionError, match=r"a vnode\.partition\.Machine, not for 8"):
        search(step, args, cast(Any, 8), virtual_nodes=8)
    for budget in (0, -1, float("nan"), "60", None, True):
        with pytest.raises(vnode.PartitionError, match="budget: expected seconds"):
            search(step, args, V5E, virtual_nodes=8, budget=cast(Any, budget))
    for memory in (0, -1, float("nan"), float("inf"), "12 parsecs", [1]):
        with pytest.raises(vnode.PartitionError, match="memory must be bytes per device"):
            search(step, args, V5E, virtual_nodes=8, memory=cast(Any, memory))
    with pytest.raises(vnode.PartitionError, match=r"times: expected vnode\.partition\.Times, not 'roofline'"):
        search(step, args, V5E, virtual_nodes=8, times=cast(Any, "roofline"))
    with pytest.raises(vnode.PartitionError, match=r"a plan is for a function, .*, not None"):
        search(cast(Any, None), args, V5E, virtual_nodes=8)
    with pytest.raises(vnode.PartitionError, match=r"(?s)with a fixed number of nodes.*give the function itself"):
        search(vnode.virtualize(step, virtual_nodes="auto"), args, V5E)
    with pytest.raises(vnode.PartitionError, match="must be a tuple"):
        search(step, args[0][0], V5E, virtual_nodes=8)
    with pytest.raises(vnode.PartitionError, match="a plan decides about partition"):
        search(step, args, V5E, virtual_nodes=8, partition="xla")
    with pytest.raises(vnode.PartitionError, match="virtualized already: pass"):
        search(vnode.virtualize(step, virtual_nodes=8), args, V5E, reduction="fast")
    with pytest.raises(vnode.PlacementError, match="the plan is for 8 devices, and there are 4"):
        planned("mlp", {"vnode": 2, "model": 4}, 0).step(jax.devices()[:4])
    plan = planned("mlp", {"vnode": 2, "model": 4}, 0)
    with pytest.raises(vnode.PlacementError, match="a device may be named only once"):
        plan.step(jax.devices()[:1] * 8)
    for tolerance in (-1, float("nan"), "10%", None):
        with pytest.raises(vnode.PartitionError, match="tolerance: expected a share"):
            plan.accept(tolerance=cast(Any, tolerance))
    wide = plan.step()
    devices = np.array(jax.devices()).reshape(4, 2)
    with pytest.raises(vnode.PartitionError, match="a mesh with the plan's axes"):
        wide.on(jax.sharding.Mesh(devices, ("vnode", "model")))(*args)


@settings(max_examples=examples(10), deadline=None)
@given(st.sampled_from(sorted(CASES)), st.integers(0, 10_000))
def test_recorded_flows_are_the_flows(name: str, seed: int) -> None:
    plan = planned(name, {"vnode": 2, "model": 4}, seed)
    for record in plan.records.values():
        again = RecordedFlow.from_json(json.loads(json.dumps(record.to_json())))
        assert dataclasses.astuple(again) == dataclasses.astuple(record)


def test_the_page_says_what_is_divided() -> None:
    plan = planned("mlp", {"vnode": 2, "model": 4}, 4)
    text = str(plan)
    assert "vnode 2 x model 4" in " ".join(text.split()) and "beside others" in text and "dot_general" in text
    assert any(spec != PartitionSpec() for spec in plan.specs.values())
    assert "<table" in plan._repr_html_()


@pytest.mark.quickly  # the programs are the same: so are the bits, however they are compiled
def test_a_trivial_plan_compiles_to_the_step_without_a_plan() -> None:
    """Nothing is divided: the same program, so the same time and the same bits."""
    step, (state, batch) = example("layers")
    plan = found("layers")
    whole = dict.fromkeys(plan.specs, PartitionSpec())
    trivial = dataclasses.replace(plan, mesh={"vnode": 4}, counts=(2,) * 4, specs=whole, records={}, _steps={})
    planned, without = trivial.step(jax.devices()[:4]), vnode.virtualize(step, virtual_nodes=8).on(jax.devices()[:4])
    texts = [each.lower(each.put(state), batch).compile().as_text() for each in (planned, without)]
    assert body(texts[0]) == body(texts[1])
    jax.tree.map(np.testing.assert_array_equal, planned(planned.put(state), batch), without(without.put(state), batch))


def body(text: str) -> list[str]:
    """A compiled program without what names files and lines."""
    return [re.sub(r", metadata=\{[^}]*\}", "", line) for line in text.splitlines() if " = " in line]


def test_what_belongs_to_a_process_is_not_pickled_and_its_copies_are_itself() -> None:
    plan = planned("mlp", {"vnode": 2, "model": 4}, 0)
    step = plan.step()
    for held in (plan, plan.explain(), plan.prediction, step, step.placement):
        with pytest.raises(vnode.VnodeError, match=r"(?s)a \w+ cannot be pickled.*What to do"):
            pickle.dumps(held)
        again = copy.deepcopy({"held": held})["held"]
        assert type(again) is type(held) and str(copy.copy(held)) == str(again) == str(held)
    with pytest.raises(vnode.VnodeError, match=r"plan\.save\(path\).*Plan\.load\(path, step, args\)"):
        pickle.dumps(plan)
    assert copy.deepcopy(plan) is plan and copy.deepcopy(step) is step
    for sent in (plan.figures, plan.machine):
        assert pickle.loads(pickle.dumps(sent)) == copy.deepcopy(sent) == sent
