"""Plans with branches on devices of their own: found, carried out, written down and refused.

Knows steps, machines and plans. The reference for values and gradients is plain jax; for collectives what XLA compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vnode
from benchmarks.partition import possible
from tests.budget import examples
from tests.partition.test_plan import V5E, normal
from tests.rounding import assert_same
from vnode.analysis.program import scope
from vnode.partition import Machine, Plan, search
from vnode.partition.plan import budget
from vnode.partition.plan.candidates import BESIDE, MeshSearch
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import on_nodes, subject_of
from vnode.show.units import size
from vnode.spmd.flow_record import RecordedFlow

MESHES = {"2x4": {"vnode": 2, "model": 4}, "2x2x2": {"vnode": 2, "model": 2, "model2": 2}}


def towers(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Two encoders of different widths and depths, and what is made of both."""

    def encoded(name: str) -> jax.Array:
        with jax.named_scope(name):
            return functools.reduce(lambda h, w: jnp.tanh(h @ w), params[name], x)

    both = jnp.concatenate([encoded("wide"), encoded("deep")], axis=1)
    return jnp.mean((both @ params["head"] - y) ** 2)


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def inception(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """A stem, and towers with kernels of several sizes."""
    x = jax.nn.relu(conv(x, params["stem"]))
    several = []
    for name in ("one", "three", "five"):
        with jax.named_scope(name):
            h = conv(x, params[f"{name} in"]) if f"{name} in" in params else x
            several.append(jax.nn.relu(conv(h, params[name])))
    return jnp.mean((jnp.concatenate(several, axis=-1).mean((1, 2)) @ params["head"] - y) ** 2)


def experts(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Experts of different kinds, mixed as a gate says."""
    gate = jax.nn.softmax(x @ params["gate"])
    up, scan, low = params["up"], params["scan"], params["low"]
    with jax.named_scope("dense"):
        dense = jax.nn.gelu(x @ up[0]) @ up[1]
    with jax.named_scope("deep"):
        deep, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, scan)
    with jax.named_scope("narrow"):
        narrow = (x @ low[0]) @ low[1]
    mixed = sum(g[:, None] * each for g, each in zip(gate.T, (dense, deep, narrow), strict=True))
    return jnp.mean((mixed - y) ** 2)


def cases() -> dict[str, tuple[Any, Any, Any]]:
    x, y = normal(1, 16, 12), normal(2, 16, 4)
    two = {
        "wide": [normal(3, 12, 32), normal(4, 32, 16)],
        "deep": [normal(5, 12, 16), normal(6, 16, 16), normal(7, 16, 8)],
        "head": normal(8, 24, 4),
    }
    sizes = {"stem": (3, 3, 4, 8), "one": (1, 1, 8, 8), "three in": (1, 1, 8, 4), "three": (3, 3, 4, 8)}
    sizes |= {"five in": (1, 1, 8, 2), "five": (5, 5, 2, 4)}
    kernels = {
        name: jnp.asarray(np.asarray(normal(10 + k, *shape)) / 3) for k, (name, shape) in enumerate(sizes.items())
    }
    mixture = {
        "gate": normal(20, 12, 3),
        "up": [normal(21, 12, 48), normal(22, 48, 12)],
        "scan": normal(23, 3, 12, 12),
        "low": [normal(24, 12, 8), normal(25, 8, 12)],
    }
    return {
        "towers": (towers, two, (x, y)),
        "inception": (inception, {**kernels, "head": normal(9, 20, 4)}, (normal(26, 16, 6, 6, 4), y)),
        "experts": (experts, mixture, (x, normal(27, 16, 12))),
    }


CASES = cases()


def example(name: str) -> tuple[Any, Any]:
    """A step that returns its gradients as well, and its arguments."""
    loss, params, batch = CASES[name]

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, grads)

    return step, (params, batch)


@functools.cache
def on_mesh(name: str, mesh: str, nodes: int = 4, donated: bool = False) -> MeshSearch:
    step, args = example(name)
    subject = subject_of(on_nodes(step, nodes, {"donate_argnums": (0,)} if donated else {}), args)
    return MeshSearch(subject, V5E, MESHES[mesh], "cpu", None)


def planned(name: str, mesh: str, seed: int, axis: str = "model", stages: int = -1, nodes: int = 4) -> Plan:
    """A plan at random, with some of the stages side by side: those whose bits are set."""
    on = on_mesh(name, mesh, nodes)
    some = [stage for k, stage in enumerate(on.stages) if stages >> k & 1]
    made = on.side_by_side(axis, some)
    drawn = possible(made.search.problem, np.random.default_rng(seed))
    return plan_of(made.candidate("random", made.search.flow(drawn)), 2**30)


def groups_of(plan: Plan) -> list[Any]:
    return [group for record in plan.records.values() for group in record.groups]


def run(plan: Plan, name: str) -> Any:
    _, (params, batch) = example(name)
    step = plan.step()
    return step(step.put(jax.tree.map(jnp.copy, params)), batch)  # what is put may be given away


SCOPES = {"towers": ("wide", "deep"), "inception": ("one", "three", "five"), "experts": ("dense", "deep", "narrow")}


@pytest.mark.parametrize("name", CASES)
def test_branches_are_found_forward_and_backward(name: str) -> None:
    """All products of a scope are in one branch of a stage, and those of another in another; so is the way back."""
    on = on_mesh(name, "2x2x2")
    (program,) = [node.written for node in on.replica.nodes]
    (_, forward), (_, backward) = on.stages
    for stage, back in ((forward, False), (backward, True)):
        homes = []
        for wanted in SCOPES[name]:
            kernels = {"dot_general", "conv_general_dilated", "scan"}
            products = {
                number
                for number, eqn in enumerate(program.equations)
                if eqn.primitive.name in kernels and wanted in scope(eqn) and ("transpose" in scope(eqn)) is back
            }
            assert products
            homes += [k for k, branch in enumerate(stage) if products <= branch]
        assert len(homes) == len(set(homes)) == len(SCOPES[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("towers", "2x2x2"),
        pytest.param("towers", "2x4", marks=pytest.mark.thorough),
        pytest.param("inception", "2x2x2", marks=pytest.mark.thorough),
        ("inception", "2x4"),
        ("experts", "2x2x2"),
        pytest.param("experts", "2x4", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.quickly
def test_values_and_gradients(name: str, mesh: str) -> None:
    step, args = example(name)
    plan = planned(name, mesh, 0)
    assert len(groups_of(plan)) == 2
    assert_same(run(plan, name), jax.jit(step), *args)


@pytest.mark.thorough
@pytest.mark.quickly
@settings(max_examples=examples(5), deadline=None)
@given(
    st.sampled_from(sorted(CASES)),
    st.sampled_from([("2x4", "model"), ("2x2x2", "model"), ("2x2x2", "model2")]),
    st.integers(0, 10_000),
    st.integers(1, 3),
    st.sampled_from([3, 4, 16]),
)
def test_random_choices(name: str, where: tuple[str, str], seed: int, stages: int, nodes: int) -> None:
    step, args = example(name)
    mesh, axis = where
    plan = planned(name, mesh, seed, axis, stages, nodes)
    assert len(groups_of(plan)) == stages.bit_count()
    assert_same(run(plan, name), jax.jit(step), *args)


@pytest.mark.thorough
def test_bits_do_not_depend_on_the_devices_along_the_nodes() -> None:
    _, (params, batch) = example("towers")
    wide = planned("towers", "2x2x2", 3).step()
    devices = np.array(jax.devices())[:4].reshape(1, 2, 2)
    narrow = wide.on(jax.sharding.Mesh(devices, tuple(MESHES["2x2x2"])))
    one, other = (each(each.put(params), batch) for each in (wide, narrow))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.quickly
@pytest.mark.thorough
def test_derivatives_from_outside() -> None:
    step, (params, batch) = example("towers")
    planned_step = planned("towers", "2x2x2", 0).step()
    placed = planned_step.put(jax.tree.map(jnp.copy, params))
    got = jax.jit(jax.grad(lambda params: planned_step(params, batch)[1][0]))(placed)
    assert_same(got, jax.grad(lambda params, batch: step(params, batch)[1][0]), params, batch)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("towers", "2x2x2"), *[pytest.param(n, "2x4", marks=pytest.mark.thorough) for n in ("towers", "experts")]],
)
def test_a_plan_is_accepted_and_comes_back_from_a_file(name: str, mesh: str, tmp_path: Path) -> None:
    step, (params, batch) = example(name)
    on = on_mesh(name, mesh, donated=True)
    beside = on.side_by_side("model", on.stages)
    solution = beside.solution(2**30, 20, 0.01)
    assert solution is not None
    made = beside.searched(solution)
    assert made.name == BESIDE and made.gap is None
    plan = plan_of(made, 2**30)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json", step, (params, batch), donate_argnums=(0,))
    assert str(again) == str(plan) and groups_of(again) == groups_of(plan) != []
    found = again.accept()
    assert found.accepted, str(found)
    assert_same(run(again, name), jax.jit(step), params, batch)


def test_what_is_printed_says_which_branches_run_where() -> None:
    plan = planned("towers", "2x2x2", 1)
    for said in (str(plan), str(plan.explain()), plan._repr_html_()):
        assert all(text in said for text in ("branches side by side", "branch 0", "branch 1"))
        assert "2 along model" in said
    at = {each.axes.get("model") for each in plan.divisions}
    assert {"branch 0", "branch 1"} <= at


def test_other_branches_than_were_written_down_are_refused() -> None:
    """Not one of them may be carried out in silence: values would be of another device's branch."""
    plan = planned("towers", "2x2x2", 1)
    ((digest, record),) = plan.records.items()
    first, second = record.groups

    def refused(groups: Any, match: str, **changes: Any) -> None:
        other = dataclasses.replace(record, groups=tuple(groups), **changes)
        with pytest.raises(vnode.PartitionError, match=match):
            run(dataclasses.replace(plan, records={digest: other}, _steps={}), "towers")

    swapped = dataclasses.replace(second, branches=second.branches[::-1])
    refused([first, swapped], "does not fit it")
    refused([first], "belongs to another program")
    refused([first, dataclasses.replace(first)], "in two branches")
    beyond = dataclasses.replace(second, branches=(*second.branches[:1], frozenset({10_000})))
    refused([first, beyond], "equation 10000, of a program")
    again = RecordedFlow.from_json(json.loads(json.dumps(record.to_json())))
    assert dataclasses.astuple(again) == dataclasses.astuple(record)


def two_encoders(width: int, times: int) -> tuple[Any, Any]:
    """Recurrent encoders, one kernel after another on little: neither axes nor examples divide that well."""
    params = {name: normal(30 + k, width, width) for k, name in enumerate(("one", "other"))}
    params["head"] = normal(50, 2 * width, 1)

    def step(params: Any, x: Any) -> Any:
        def encoded(w: Any) -> Any:
            return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), x[:, 0], x.swapaxes(0, 1))[0]

        def loss(params: Any) -> Any:
            both = [encoded(params[name]) for name in ("one", "other")]
            return jnp.mean((jnp.concatenate(both, 1) @ params["head"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (params, normal(51, 4, times, width))


@pytest.mark.thorough
def test_the_search_takes_branches_where_splits_are_worse() -> None:
    step, args = two_encoders(37, 16)
    machine = vnode.partition.Machine.tpu("v5e:2x2")
    plan = search(step, args, machine, virtual_nodes=2, budget=1200)
    assert plan.name == BESIDE and groups_of(plan)
    assert {"Megatron-style", "searched"} <= set(plan.beside)  # two nodes are no data parallel on four devices
    assert all(plan.figures.seconds < each.seconds for each in plan.beside.values())
    made = plan.step(jax.devices()[:4])
    assert_same(made(made.put(args[0]), args[1]), jax.jit(step), *args)


def test_the_search_keeps_splits_where_they_are_better() -> None:
    """One wide layer after another, and a light branch beside: nothing is gained by devices that wait."""
    params = {"up": normal(60, 256, 2048), "down": normal(61, 2048, 256), "side": normal(62, 256, 256)}

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] + jnp.tanh(x @ params["side"])) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    plan = search(step, (params, normal(63, 512, 256)), V5E, virtual_nodes=8, budget=1200)
    assert plan.name != BESIDE and not groups_of(plan)


@pytest.mark.sweep
def test_the_smallest_that_is_named_where_nothing_fits_may_have_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the smallest of all that are looked at, whatever a search thinks of them."""
    made: list[tuple[int, str]] = []
    honest = MeshSearch.candidate

    def seen(self: MeshSearch, *args: Any, **options: Any) -> Any:
        found = honest(self, *args, **options)
        made.append((found.figures.memory, found.name))
        return found

    monkeypatch.setattr(MeshSearch, "candidate", seen)
    monkeypatch.setattr(budget, "MORE", 0.0)  # nothing is looked at that would fit
    with pytest.raises(vnode.MemoryLimitError) as error:
        machine = Machine.tpu("v5e:2x2")
        search(*example("experts"), machine, virtual_nodes=2, memory=100, budget=1200, progress=False)
    memory, _ = min(made)
    assert f"the smallest found takes {size(memory)}, " in str(error.value)
