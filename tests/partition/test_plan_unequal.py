"""Plans for devices that differ along the axis that divides a model: faster ones have more blocks of it.

References are the step as written, every other choice of counts, and what XLA compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import vnode
from tests.partition.exchanged import assert_as_planned
from tests.partition.test_plan import layers
from tests.partition.test_plan_accept import GIB, example
from tests.rounding import assert_same
from vnode.errors import PartitionError, PlacementError
from vnode.partition import Machine, Plan, search
from vnode.partition.machine import Kind
from vnode.partition.plan.candidates import MEGATRON, Candidate, MeshSearch, pace_of
from vnode.partition.plan.replica_shares import fastest_counts
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import Subject, on_nodes, subject_of
from vnode.partition.uneven_shares.state_blocks import block_numbers, divided_state, tied_inputs
from vnode.partition.uneven_shares.uneven_plans import UnevenCandidate, UnevenSearch, is_unequal

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
"""Sums over all of a state, and slots like parameters."""


def slower(kind: Kind, name: str, times: float) -> Kind:
    """A kind of device that computes more slowly, and whose memory is as fast."""
    peak = {dtype: rate / times for dtype, rate in kind.peak.items()}
    return dataclasses.replace(kind, name=name, peak=peak, vector=kind.vector / times)


@functools.cache
def machine(devices: int, times: float, *, along: str = "model", work: float = 1.0) -> Machine:
    """GPUs of which every other one is slower, along one of the two axes of a mesh.

    Args:
      devices: how many.
      times: by how much.
      along: the axis along which they differ, of a mesh with two or three devices along ``"model"``.
      work: by how much all are slower, so that small steps are work for them.
    """
    alike = Machine.gpus("a100-80gb", hosts=1, per_host=devices)
    (kind,) = alike.kinds
    fast, slow = slower(kind, "fast", work), slower(kind, "slow", work * times)
    columns = devices if devices < 4 else 2
    order = alike.mesh({"vnode": devices // columns, "model": columns}).devices
    found = list(alike.devices)
    for (row, column), d in np.ndenumerate(order):
        found[d] = dataclasses.replace(found[d], kind=slow if (column if along == "model" else row) % 2 else fast)
    return Machine("mixed", tuple(found), alike.networks)


def normal(key: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(key), shape) / np.sqrt(shape[0])


def perceptron(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"] - x) ** 2)


def trained(loss: Any) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        params, slots = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, slots = OPTIMIZER.update(grads, slots, params)
        return (optax.apply_updates(params, updates), slots), value

    return step


STEP = trained(perceptron)
PARAMS = {"up": normal(1, 16, 32), "bias": jnp.zeros(32), "down": normal(2, 32, 16)}
STATE, X = (PARAMS, OPTIMIZER.init(PARAMS)), normal(3, 64, 16)
WORK = 1e6


@functools.cache
def found(**options: Any) -> Plan:
    """For two devices, of which one is three times as slow; there is one node, so that nodes cannot be shared out."""
    return search(STEP, (STATE, X), machine(2, 3.0, work=WORK), virtual_nodes=1, **options)


def shares_of(plan: Plan | Candidate) -> set[tuple[int, ...]]:
    return {spec.blocks for spec in plan.specs.values() if isinstance(spec, vnode.UnevenSpec)}


def shares(subject: Subject, where: Machine, sizes: dict[str, int], platform: str = "gpu") -> UnevenSearch:
    return UnevenSearch(subject, where, sizes, platform, None, pace_of(subject, where, platform, None))


@pytest.mark.quickly
class TestFound:
    def test_faster_devices_have_more(self) -> None:
        plan = found()
        assert plan.name.endswith("unequal shares")
        (counts,) = shares_of(plan)
        assert counts[0] == pytest.approx(3 * counts[1], rel=0.3)
        said = str(plan)
        assert f"{', '.join(map(str, counts))} of {sum(counts)} blocks along model" in said
        assert "1 of fast, 1 of slow" in said
        lengths = ", ".join(str(32 // sum(counts) * n) for n in counts)
        assert f"dimension 1 over model: {lengths}" in said
        assert lengths in plan._repr_html_()
        assert plan.figures.seconds < plan.beside["Megatron-style"].seconds
        assert plan.figures.seconds < plan.beside["searched"].seconds

    @pytest.mark.thorough
    def test_between_all_fast_and_all_slow(self) -> None:
        alike = [search(STEP, (STATE, X), machine(2, 1.0, work=w), virtual_nodes=1) for w in (WORK, 3 * WORK)]
        assert not any(map(shares_of, alike))
        assert alike[0].figures.seconds <= found().figures.seconds <= alike[1].figures.seconds

    def test_where_rows_differ_nodes_are_shared_out(self) -> None:
        """All devices along the axis that divides a model are alike."""
        subject = subject_of(on_nodes(STEP, 4, {}), (STATE, X))
        where = machine(4, 3.0, along="vnode", work=WORK)
        pace = pace_of(subject, where, "gpu", None)
        on = MeshSearch(subject, where, {"vnode": 2, "model": 2}, "gpu", None, pace)
        megatron = [on.expert(name) for name in on.expert_splits if name == MEGATRON]
        assert on.unequal(megatron, GIB, float("inf")) == []

    @pytest.mark.thorough
    def test_what_does_not_fit_is_not_chosen(self) -> None:
        """The fullest device needs room for more than half of the state."""
        plan = found()
        limit = plan.figures.memory - 1
        less = found(memory=limit)
        assert less.figures.memory <= limit and less.figures.seconds >= plan.figures.seconds

    def test_explained(self) -> None:
        """Sums over nodes take the room in which they are stored."""
        plan = found()
        (counts,) = shares_of(plan)
        report = plan.explain().report
        sizes = sorted(a.bytes for p in report.passes for a in p.accumulators)
        room = 32 // sum(counts) * max(counts)
        assert sizes[-2:] == [4 * 16 * room] * 2


@pytest.mark.quickly
class TestCarriedOut:
    def test_values_over_several_steps(self, tmp_path: Path) -> None:
        plan = found()
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json", STEP, (STATE, X))
        assert loaded.specs == plan.specs and loaded.counts == plan.counts and str(loaded) == str(plan)
        step = loaded.step(jax.devices()[:2])
        state = step.put(STATE)
        for _ in range(3):
            state, loss = step(state, X)

        def thrice(state: Any, x: Any) -> Any:
            for _ in range(2):
                state, _ = STEP(state, x)
            return STEP(state, x)

        assert_same((step.get(state), loss), jax.jit(thrice), STATE, X)

    def test_devices_have_their_blocks_only(self) -> None:
        plan = found()
        (counts,) = shares_of(plan)
        up = plan.step(jax.devices()[:2]).put(STATE)[0]["up"]
        assert {shard.data.shape for shard in up.addressable_shards} == {(16, 32 // sum(counts) * max(counts))}

    def test_devices_of_different_kinds(self) -> None:
        """They have no program in common."""

        @dataclasses.dataclass(frozen=True)
        class Other:
            device_kind: str
            platform: str = "gpu"

        devices = [Other("A100"), Other("V100")]
        with pytest.raises(PlacementError, match="devices of different kinds cannot share one"):
            found().step(devices)


@pytest.mark.quickly
@pytest.mark.thorough
def test_heads_and_hidden_units_of_layers_in_a_scan() -> None:
    """In the same proportions, as far as whole heads allow."""
    d, h = 16, 32
    layer = {"qkv": normal(1, 3, d, 4, 4), "out": normal(2, 4, 4, d), "up": normal(3, d, h), "down": normal(4, h, d)}
    params = jax.tree.map(lambda w: jnp.stack([w] * 3), layer)
    step = trained(lambda params, x: layers(params, x, x))
    state, x = (params, OPTIMIZER.init(params)), normal(5, 8, 8, d)
    subject = subject_of(on_nodes(step, 2, {}), (state, x))
    where = machine(4, 3.0, work=WORK)
    made = candidate(subject, where, {"vnode": 2, "model": 2}, 4, (3, 1), "gpu")
    assert {name: spec.counts for name, spec in made.specs.items() if name.startswith("0/")} == {
        "0/qkv": (3, 1),
        "0/out": (3, 1),
        "0/up": (24, 8),
        "0/down": (24, 8),
    }
    planned = plan_of(made, GIB).step(jax.devices()[:4])
    found, loss = planned(planned.put(state), x)
    assert_same((planned.get(found), loss), jax.jit(step), state, x)


@pytest.mark.thorough
def test_bits_do_not_depend_on_the_devices_that_nodes_are_spread_over() -> None:
    """For fixed counts."""
    subject = subject_of(on_nodes(STEP, 4, {}), (STATE, X))
    where = machine(4, 3.0, work=WORK)
    made = candidate(subject, where, {"vnode": 2, "model": 2}, 4, (3, 1), "gpu")
    step = plan_of(made, GIB).step(jax.devices()[:4])
    one = step.on(Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("vnode", "model")))
    results = []
    for each in (step, one):
        state = each.put(STATE)
        for _ in range(2):
            state, loss = each(state, X)
        results.append(jax.tree.map(np.asarray, (each.get(state), loss)))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_factor_in_one_dimension_with_the_examples_is_not_shared_out(nodes: int) -> None:
    """A search asks for that, and goes on without it."""

    def step(state: dict[str, jax.Array], x: jax.Array) -> Any:
        seen = jnp.tanh(x @ state["w"])
        return {"w": state["w"] - seen.mean()}, seen.T.reshape(-1)

    args = {"w": jnp.ones((4, 6))}, jnp.ones((10, 4))
    several = shares(subject_of(on_nodes(step, 2, {}), args), machine(2 * nodes, 2.0), {"vnode": nodes, "model": 2})
    assert several.with_counts({0: 1}, (2, 1)) is None
    assert several.with_counts({0: 1}, (1, 1)) is not None


def candidate(
    subject: Subject, where: Machine, sizes: dict[str, int], blocks: int, counts: tuple[int, ...], platform: str
) -> Candidate:
    """Megatron's split with other counts."""
    several = shares(subject, where, sizes, platform)
    on = MeshSearch(subject, where, sizes, platform, None, pace_of(subject, where, platform, None))
    seeds = divided_state(on.expert(MEGATRON).flow, subject, "model")
    shared = several.with_counts(tied_inputs(subject, seeds, blocks), counts)
    assert shared is not None
    return on.shared("unequal", shared, several.across.counts)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("reduction", "sizes", "counts"),
    [("invariant", {"vnode": 2, "model": 2}, (5, 3)), ("fast", {"vnode": 1, "model": 4}, (3, 2, 2, 1))],
)
def test_accepted_by_the_compiler(reduction: str, sizes: dict[str, int], counts: tuple[int, ...]) -> None:
    """Collectives are as planned, and memory within 10 %."""
    step, args = example("mlp")
    subject = subject_of(on_nodes(step, 8, {"reduction": reduction, "donate_argnums": (0,)}), args)
    where = machine(4, 5 / 3)
    made = candidate(subject, where, sizes, 8, counts, "cpu")
    accepted = plan_of(made, GIB).accept(jax.devices()[:4])
    assert accepted.accepted, str(accepted)
    assert_as_planned(accepted)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5)), min_size=1, max_size=3), st.integers(1, 8))
def test_no_other_counts_are_done_earlier(times: list[tuple[float, float]], blocks: int) -> None:
    """Against all of them."""

    def last(counts: tuple[int, ...]) -> float:
        return max(fixed + n * block for n, (fixed, block) in zip(counts, times, strict=True))

    every = (c for c in itertools.product(range(blocks + 1), repeat=len(times)) if sum(c) == blocks)
    counts = fastest_counts(times, blocks)
    assert sum(counts) == blocks and last(counts) == pytest.approx(min(map(last, every)))


@pytest.mark.thorough
@pytest.mark.quickly
@pytest.mark.parametrize(
    ("devices", "most", "times"), [(2, 8, 5 / 3), (2, 8, 4.0), pytest.param(3, 4, 2.0, marks=pytest.mark.thorough)]
)
def test_no_other_counts_are_predicted_to_be_faster(devices: int, most: int, times: float) -> None:
    """Against all of them, each with a prediction of its own."""
    subject = subject_of(on_nodes(STEP, 1, {}), (STATE, X))
    several = shares(subject, machine(devices, times, work=WORK), {"vnode": 1, "model": devices})
    numbers = [blocks for blocks in block_numbers([32]) if blocks <= most]

    def seconds(shared: UnevenCandidate | None) -> float:
        assert shared is not None
        return shared.prediction.figures.seconds

    best, every = [], []
    for blocks in numbers:
        dims = tied_inputs(subject, {subject.names.index("0/up"): 1}, blocks)
        one = several.best(dims, blocks)
        best += [seconds(one)] if one is not None else []
        counts = (c for c in itertools.product(range(blocks + 1), repeat=devices) if sum(c) == blocks)
        every += [seconds(several.with_counts(dims, c)) for c in counts if is_unequal(c)]
    assert min(best) == min(every)


@pytest.mark.quickly
class TestAbsent:
    """What cannot be computed in blocks leaves even plans."""

    def check(self, loss: Any, params: Any) -> None:
        step, args = trained(loss), ((params, OPTIMIZER.init(params)), X)
        subject = subject_of(on_nodes(step, 1, {}), args)
        seeds = {subject.names.index("0/up"): 1}
        assert not any(tied_inputs(subject, seeds, blocks) for blocks in block_numbers([32]))
        plan = search(step, args, machine(2, 3.0, work=WORK), virtual_nodes=1)
        spec = plan.specs["0/up"]
        assert not isinstance(spec, vnode.UnevenSpec) or spec.dim != 1

    @pytest.mark.thorough
    def test_a_dimension_that_is_needed_whole(self) -> None:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean((jnp.sort(x @ params["up"], 1) @ params["down"] - x) ** 2)

        self.check(loss, {"up": PARAMS["up"], "down": PARAMS["down"]})

    @pytest.mark.thorough
    def test_a_scan_along_the_dimension(self) -> None:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            def unit(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(carry + x @ w), None

            return jnp.mean(jax.lax.scan(unit, jnp.zeros(x.shape[0]), params["up"].T)[0] ** 2)

        self.check(loss, {"up": PARAMS["up"]})


@pytest.mark.quickly
class TestFiles:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        found().save(tmp_path / "plan.json")
        return tmp_path / "plan.json"

    def test_of_another_step(self, path: Path) -> None:
        with pytest.raises(PartitionError, match="is for another step"):
            Plan.load(path, STEP, (STATE, X[:32]))

    def test_what_is_not_shared_out(self) -> None:
        assert found().specs["1/1/0/count"] == PartitionSpec()
