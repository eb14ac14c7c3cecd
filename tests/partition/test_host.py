"""A state of which a part lies in the host's memory: the same bits, in its place before and after each step.

Knows steps, machines, plans and orders of work. Must not know how programs are emitted.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vnode
from tests.ahead import said
from tests.rounding import assert_same
from vnode.partition import Machine, Plan, search
from vnode.partition.plan.candidates import MeshSearch
from vnode.partition.plan.search_subject import on_nodes, subject_of
from vnode.placement.transfer import to_placement
from vnode.runtime import host_prefetch
from vnode.runtime.host_prefetch import Task
from vnode.step.virtual import VirtualStep

P = PartitionSpec
ONE = Machine.gpus("P100", hosts=1, per_host=1)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
SLOTS = ("/mu/", "/nu/")


def train(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((jax.nn.gelu(batch @ params["up"]) @ params["down"] - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, slots = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": slots}, value


def arguments(width: int = 32, hidden: int = 64) -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (width, hidden)) / 8,
        "down": jax.random.normal(keys[1], (hidden, width)) / 8,
    }
    return {"params": params, "opt": OPTIMIZER.init(params)}, jax.random.normal(keys[2], (16, width))


def kinds(state: Any) -> dict[str, str]:
    """The memory of each leaf, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.memory_kind
        for path, leaf in leaves
        if isinstance(leaf, jax.Array)
    }


@pytest.mark.thorough
@pytest.mark.sampled(1, thorough=2)
@pytest.mark.parametrize("reduction", ["invariant", "fast"])
@pytest.mark.parametrize(
    ("shape", "partition"),
    [
        ((1,), None),
        ((3,), None),
        ((2, 4), {"up$": P(None, "model"), "down$": P("model")}),
        ((4,), {"[mn]u/": P("vnode")}),
    ],
    ids=str,
)
def test_the_bits_are_those_of_a_state_on_the_devices(
    shape: tuple[int, ...], partition: Any, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_prefetch, "PIECE", 1 << 10)  # so that arrays come in several pieces
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = Mesh(np.array(devices).reshape(shape), ("vnode", "model")[: len(shape)])
    near = vnode.virtualize(
        train,
        virtual_nodes=8,
        reduction=reduction,
        placement=vnode.Placement(8, mesh=mesh),
        **({"partition": partition} if partition else {}),
        donate_argnums=0,
    )
    far = VirtualStep(
        dataclasses.replace(near.spec, plan=dataclasses.replace(near.spec.plan, host=SLOTS)), near.placement
    )
    state, batch = jax.tree.map(np.asarray, arguments())
    results = []
    for step in (near, far):
        now = step.put(state)
        for _ in range(3):
            now, loss = step(now, batch)
        results.append((now, loss))
    before, after = ({**kinds(step.put(state))} for step in (near, far))
    assert {name for name in after if before[name] != after[name]} == {n for n in after if "/mu/" in n or "/nu/" in n}
    assert kinds(results[1][0]) == after
    jax.tree.map(np.testing.assert_array_equal, *[jax.tree.map(np.asarray, result) for result in results])


def test_a_state_may_be_put_there_by_hand() -> None:
    """What comes on the host goes back there, and the step is equal to the plain one."""
    state, batch = arguments()
    step = vnode.virtualize(train, virtual_nodes=4, placement=vnode.Placement(4, jax.devices()[:2]))
    there = NamedSharding(step.placement.mesh, P(), memory_kind="pinned_host")
    placed = step.put(state)
    placed["opt"] = jax.tree.map(lambda leaf: jax.device_put(leaf, there) if leaf.ndim else leaf, placed["opt"])
    got = step(placed, batch)
    assert kinds(got[0]) == kinds(placed)
    near = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)), got)
    assert_same(near, jax.jit(train), state, batch)


LIMITS = {"all on the device": 64, "some on the host": 38}
"""MiB. Two weights of 4 MiB, two slots of each, gradients, and what nodes compute."""


@functools.cache
def plan_for(limit: int) -> tuple[Plan, Any]:
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments(512, 2048))
    options = {"virtual_nodes": 4, "reduction": "fast", "donate_argnums": 0}
    return search(train, args, ONE, memory=limit << 20, **options), args


def test_a_plan_moves_slots_where_memory_does_not_suffice() -> None:
    enough, tight = (plan_for(limit)[0] for limit in LIMITS.values())
    assert not enough.host and tight.host
    assert all("/mu/" in name or "/nu/" in name for name in tight.host)
    assert tight.figures.memory <= tight.limit < enough.figures.memory
    sizes = {"up": 4 << 20, "down": 4 << 20}
    moved = sum(sizes[name.rpartition("/")[2]] for name in tight.host)
    assert tight.figures.host == moved
    kind = ONE.kinds[0]
    expected = 2 * (moved / kind.host_bandwidth + len(tight.host) * kind.host_latency)
    assert tight.figures.seconds - enough.figures.seconds == pytest.approx(expected)
    assert "on the host" in str(tight)


def test_no_more_than_needed_goes_there() -> None:
    """With one leaf less, the prediction is above the limit."""
    args = plan_for(LIMITS["some on the host"])[1]
    step = on_nodes(train, 4, {"reduction": "fast", "donate_argnums": 0})
    on = MeshSearch(subject_of(step, args), ONE, {"vnode": 1}, "gpu", None)
    made = on.candidate("data parallel", on.undivided)
    assert list(made.slots.inputs_by_name) == [
        f"opt/1/0/{slot}/{name}" for slot in ("mu", "nu") for name in ("down", "up")
    ]
    memory = [made.slots.figures(made.figures, ONE, count).memory for count in range(5)]
    assert memory[0] == made.figures.memory and memory == sorted(memory, reverse=True)
    for count in range(1, 5):
        moved = made.with_host(memory[count])
        assert moved is not None and memory[len(moved.host)] == memory[count] < memory[len(moved.host) - 1]
    assert made.with_host(memory[4] - 1) is None


def test_it_is_carried_out_saved_and_loaded(tmp_path: Any) -> None:
    plan, args = plan_for(LIMITS["some on the host"])
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", train, args, reduction="fast", donate_argnums=0)
    assert loaded.host == plan.host and loaded.figures == plan.figures
    state, batch = jax.tree.map(np.asarray, arguments(512, 2048))
    results = []
    for each in (loaded, plan_for(LIMITS["all on the device"])[0]):
        step = each.step(jax.devices()[:1])
        placed = step.put(state)
        away_now = {name for name, kind in kinds(placed).items() if kind == "pinned_host"}
        assert away_now == set(each.host)
        results.append(step(placed, batch))
    jax.tree.map(np.testing.assert_array_equal, *[jax.tree.map(np.asarray, result) for result in results])


def test_an_error_says_what_the_host_would_save() -> None:
    with pytest.raises(vnode.MemoryLimitError, match=r"with 16.0 MiB of the state on the host"):
        plan_for(8)


# Orders of work


@st.composite
def works(draw: st.DrawFn) -> tuple[list[Task], list[int], list[int]]:
    """Works that read what was made before, values that are away, and outputs."""
    given_, made = list(range(5)), []
    for k in range(draw(st.integers(1, 12))):
        there = [*given_, *range(5, 5 + k)]
        made.append(Task(draw(st.lists(st.sampled_from(there), max_size=3)), [5 + k]))
    outputs = draw(st.lists(st.integers(5, 4 + len(made)), max_size=4))
    return made, given_[: draw(st.integers(0, 5))], outputs


def graph_of(several: list[Task]) -> Any:
    graph = networkx.DiGraph()
    for work in several:
        graph.add_edges_from((read, made) for read in work.reads for made in work.makes)
        graph.add_nodes_from(work.makes)
    return graph


@given(works())
def test_an_order_by_outputs_is_an_order(case: Any) -> None:
    several, gone, outputs = case
    order = host_prefetch.order_by_output(several, outputs, gone)
    assert sorted(order) == list(range(len(several)))
    place = {made: i for i, k in enumerate(order) for made in several[k].makes}
    assert all(place[a] < place[b] for a, b in graph_of(several).edges if a in place)


@given(works())
def test_what_can_wait_is_what_nobody_wants_early(case: Any) -> None:
    several, gone, wanted = case
    graph = graph_of(several)
    there = set(graph)

    def needs(var: int) -> bool:
        return bool(({var} | networkx.ancestors(graph, var)) & set(gone))

    early = set(wanted) | {var for work in several for var in work.makes if not needs(var)}
    pinned = early.union(*(networkx.ancestors(graph, var) for var in early & there))
    expected = {k for k, work in enumerate(several) if needs(work.makes[0]) and work.makes[0] not in pinned}
    assert host_prefetch.deferrable(several, wanted, gone) == expected


@pytest.mark.tpu
def test_arrays_come_from_the_host_of_a_tpu_one_after_another() -> None:
    """By the TPU compiler: eight slots as large as their weights, beside gradients; they are not there at once."""
    one = 2048 * 2048 * 4
    assert said("host_slots_on_tpus") < (8 + 4) * one


@pytest.mark.parametrize("spec", [P(), P("vnode")], ids=str)
@pytest.mark.parametrize("count", [1, 2, 8])
def test_what_is_on_the_host_goes_to_other_devices(spec: P, count: int) -> None:
    """jax does not change the memory and the devices of an array at once."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("vnode",))
    value = np.arange(8.0, dtype=np.float32)
    leaf = jax.device_put(value, NamedSharding(mesh, spec, memory_kind="pinned_host"))
    placement = vnode.Placement(8, jax.devices()[:count])
    found = to_placement(leaf, placement)
    assert found.sharding.device_set == set(jax.devices()[:count])
    assert found.sharding.memory_kind == jax.devices()[0].default_memory().kind
    np.testing.assert_array_equal(found, value)
