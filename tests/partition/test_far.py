"""Plans whose sums wait on the host, where memory is short: found, printed, saved, run with the same bits, and taken.

Knows steps, machines and plans. Must not know how programs are emitted. What compilers make of such plans is TPUs' own:
on CPUs the host's memory is that of the devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from tests.ahead import said
from vnode.partition import Machine, Plan, search
from vnode.partition.plan.candidates import MEGATRON, MeshSearch
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import on_nodes, subject_of
from vnode.runtime import offloaded_accumulators

ONE = Machine.gpus("P100", hosts=1, per_host=1)
GRADIENT = 2 * 256 * 1024 * 4
NODES = 16


def train(w: Any, x: jax.Array) -> Any:
    grads = jax.grad(lambda w: jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2))(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads)


def arguments() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    w = {"up": jax.random.normal(keys[0], (256, 1024)) / 16, "down": jax.random.normal(keys[1], (1024, 256)) / 32}
    return w, jax.random.normal(keys[2], (64, 256))


def searched(memory: int | None = None) -> Plan:
    return search(train, arguments(), ONE, memory=memory, virtual_nodes=NODES, donate_argnums=0, progress=False)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """With all memory; and with too little for one sum that waits, and for both."""
    plain = searched()
    found = [plain]
    for missing in (1, GRADIENT + 1):
        found.append(searched(plain.figures.memory - missing))
    return found


def test_as_many_wait_there_as_need_to(plans):
    plain, *others = plans
    assert plain.far == 0 and plain.figures.pending == 2 * GRADIENT
    assert "on the host" not in str(plain)
    for far, plan in enumerate(others, 1):
        assert plan.far == far and plan.figures.memory <= plan.limit
        assert plan.figures.far == far * GRADIENT and plan.figures.pending == (2 - far) * GRADIENT
        assert plan.figures.seconds == pytest.approx(plan.figures.compute + plan.figures.transfer)
        assert f"{2 * far}.0 MiB of pending sums" in str(plan)
    # Runs of two nodes, and four of these make a block: there and back for seven of eight, or for the lower of the two.
    link = GRADIENT / ONE.kinds[0].host_bandwidth
    assert others[1].figures.transfer == pytest.approx(2 * 7 * link, rel=0.5)
    assert others[0].figures.transfer < others[1].figures.transfer


@pytest.mark.thorough
def test_the_bits_stay(plans):
    wanted = vnode.virtualize(train, virtual_nodes=NODES)(*arguments())
    for plan in plans:
        step = plan.step(jax.devices()[:1])
        found = step(step.put(arguments()[0]), arguments()[1])
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reduced", [False, True])
def test_the_bits_stay_where_nodes_are_divided_too(monkeypatch, reduced):
    """On two rows of four devices, with the state sharded over rows as well or not."""
    monkeypatch.setattr(offloaded_accumulators, "LEAST", 1)
    machine = Machine.gpus("P100", hosts=1, per_host=8)
    subject = subject_of(on_nodes(train, NODES, {}), arguments())
    on = MeshSearch(subject, machine, {"vnode": 2, "model": 4}, "gpu", None)
    expert = on.expert(MEGATRON)
    plan = plan_of(on.with_sharded_state(expert) if reduced else expert, 2**34)
    found = []
    for far in (0, 1, 2):
        step = dataclasses.replace(plan, far=far, _steps={}).step()
        found.append(step(step.put(arguments()[0]), arguments()[1]))
    for a, *others in zip(*map(jax.tree.leaves, found), strict=True):
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for b in others)


def test_a_plan_from_a_file_has_them_there_too(plans, tmp_path):
    path = tmp_path / "plan.json"
    plans[1].save(path)
    loaded = Plan.load(path, train, arguments(), donate_argnums=0)
    assert loaded.far == 1 and loaded.figures == plans[1].figures and str(loaded) == str(plans[1])


@pytest.mark.tpu
def test_on_tpus_the_same_bits_then_take_no_more_than_sums_in_any_order():
    (fast, *_), plain, *others = said("host_sums_on_tpus", hasty=True)
    gradient = 2 * 2048 * 8192 * 4
    for far, (planned, memory, taken, predicted, on_host, accepted) in enumerate(others, 1):
        assert planned == far and predicted == far * gradient
        assert accepted and predicted <= on_host <= 1.02 * predicted
        assert 0 < plain[1] - memory <= far * gradient  # less where a sum is predicted to be on the chip
        assert taken < plain[2]
    assert plain[2] > 1.1 * fast and others[-1][2] <= 1.05 * fast
