"""Plans of virtualized steps beside what XLA compiles of them, on eight CPU devices: collectives, and memory.

XLA's text and its analysis of memory are the reference; `tests/thorough/test_plans_on_tpus.py` has the TPU compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import vnode
from tests.partition.exchanged import assert_as_planned
from tests.partition.test_plan import OPTIMIZER, V5E, layers, normal, planned, updated
from vnode.partition import Plan
from vnode.partition.accept import TOLERANCE
from vnode.partition.plan.candidates import MEGATRON, Candidate, MeshSearch
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import on_nodes, subject_of
from vnode.runtime import one_pass
from vnode.spmd.layout import from_spec
from vnode.spmd.sharding_flow import Flow, follow

GIB = 2**30


def perceptron(params: Any, x: Any, y: Any) -> Any:
    hidden = jax.nn.relu(x @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - y) ** 2)


@functools.cache
def example(name: str) -> tuple[Any, Any]:
    """Steps in which the state, the sums over nodes, or what is kept for the backward pass takes most memory."""
    if name == "mlp":
        loss, d, h = perceptron, 512, 2048
        params = {"up": normal(1, d, h), "bias": jnp.zeros(h), "down": normal(2, h, d)}
        batch = normal(3, 64, d), normal(4, 64, d)
    else:
        loss, d, h, t = layers, 128, 512, 32
        layer = {
            "qkv": normal(1, 3, d, 4, 32),
            "out": normal(2, 4, 32, d),
            "up": normal(3, d, h),
            "down": normal(4, h, d),
        }
        params = jax.tree.map(lambda w: jnp.stack([w] * 4), layer)
        batch = normal(5, 32, t, d), normal(6, 32, t, d)

    def step(state: Any, batch: Any) -> Any:
        return updated(loss, state, batch)

    return step, ((params, OPTIMIZER.init(params)), batch)


def candidate(name: str, reduction: str, sizes: dict[str, int], kind: str, nodes: int = 8) -> Candidate:
    step, args = example(name)
    subject = subject_of(on_nodes(step, nodes, {"reduction": reduction, "donate_argnums": (0,)}), args)
    on = MeshSearch(subject, V5E, sizes, "cpu", None)
    match kind:
        case "searched":
            found = on.solution(GIB, 20, 0.01)
            assert found is not None
            return on.searched(found)
        case "Megatron":
            return on.expert(MEGATRON)
    return on.candidate(kind, on.undivided, shard_state=kind == "FSDP")


MESHES = {"8": {"vnode": 8}, "2x4": {"vnode": 2, "model": 4}, "1x8": {"vnode": 1, "model": 8}}
KINDS = [
    ("8", "data parallel"),
    ("8", "FSDP"),
    ("2x4", "Megatron"),
    ("2x4", "searched"),
    ("1x8", "Megatron"),
    ("1x8", "searched"),
]
QUICK = {("mlp", "invariant", "FSDP"), ("mlp", "fast", "data parallel"), ("layers", "invariant", "Megatron")}
TURNS = {("invariant", mesh, kind) for mesh, kind in KINDS[1::2]} | {("fast", mesh, kind) for mesh, kind in KINDS[::2]}
"""Of layers, which take long to compile, each kind in one order of sums: sums over nodes are the perceptron's too."""


def mark(name: str, reduction: str, mesh: str, kind: str) -> Any:
    if (name, reduction, kind) in QUICK and mesh != "1x8":
        return ()
    return pytest.mark.sweep if name == "layers" and (reduction, mesh, kind) not in TURNS else pytest.mark.thorough


EVERY = [
    pytest.param(name, reduction, mesh, kind, marks=mark(name, reduction, mesh, kind))
    for name in ("mlp", "layers")
    for reduction in ("invariant", "fast")
    for mesh, kind in KINDS
]


@pytest.mark.parametrize(("name", "reduction", "mesh", "kind"), EVERY)
def test_plans_are_accepted(name: str, reduction: str, mesh: str, kind: str) -> None:
    made = candidate(name, reduction, MESHES[mesh], kind)
    small = (name, reduction, kind) == ("mlp", "fast", "FSDP")  # in which order gradients are summed is half of it
    found = plan_of(made, GIB).accept(tolerance=0.6 if small else TOLERANCE)
    assert found.accepted, str(found)
    assert_as_planned(found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("optimizer", "reduction", "mesh"),
    [("every second step", "invariant", "8"), ("if finite", "fast", "8"), ("if finite", "invariant", "2x4")],
)
def test_exchanges_of_an_update_in_a_branch_are_as_planned(optimizer: str, reduction: str, mesh: str) -> None:
    """Of shards, as outside of branches, or of a Megatron-style split: XLA adds nothing."""
    _, ((params, _), batch) = example("mlp")
    adam = optax.adam(1e-2)
    tx = optax.MultiSteps(adam, 2) if optimizer == "every second step" else optax.apply_if_finite(adam, 3)

    def step(state: Any, batch: Any) -> Any:
        params, slots = state
        loss, grads = jax.value_and_grad(perceptron)(params, *batch)
        updates, slots = tx.update(grads, slots, params)
        return (optax.apply_updates(params, updates), slots), loss

    options = {"reduction": reduction, "donate_argnums": (0,)}
    subject = subject_of(on_nodes(step, 8, options), ((params, tx.init(params)), batch))
    on = MeshSearch(subject, V5E, MESHES[mesh], "cpu", None)
    made = on.candidate("FSDP", on.undivided, shard_state=True) if mesh == "8" else on.expert(MEGATRON)
    assert_as_planned(plan_of(made, GIB).accept())


def forward(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["up"]) @ params["down"]


def adversarial(generator: Any, critic: Any, x: Any) -> Any:
    """Two networks whose leaves have the same names, and other shapes."""

    def fooled(generator: Any) -> Any:
        return jnp.mean((forward(critic, forward(generator, x[:, :16])) - 1) ** 2)

    def told(critic: Any) -> Any:
        return jnp.mean(forward(critic, forward(generator, x[:, :16])) ** 2) + jnp.mean((forward(critic, x) - 1) ** 2)

    loss, grads = jax.value_and_grad(fooled)(generator)
    other, others = jax.value_and_grad(told)(critic)
    descend = functools.partial(jax.tree.map, lambda w, g: w - 0.1 * g)
    return descend(generator, grads), descend(critic, others), loss + other


def by_a_target(params: Any, target: Any, x: Any) -> Any:
    """A network and an earlier one of the same names and shapes, which is read only."""
    wanted = 0.9 * forward(target, x + 1)
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((forward(params, x) - wanted) ** 2))(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


@pytest.mark.sampled(2)
@pytest.mark.quickly
@pytest.mark.parametrize("over_rows", [False, True])
@pytest.mark.parametrize("step", [adversarial, by_a_target])
def test_leaves_of_one_name_in_several_arguments_lie_as_planned(step: Any, over_rows: bool) -> None:
    """They were whole on every device where they did not lie alike, and took more memory than there may be."""
    wide = {"up": normal(1, 64, 512), "down": normal(2, 512, 64)}
    first = {"up": normal(3, 16, 510), "down": normal(4, 510, 64)} if step is adversarial else wide
    second = {"up": normal(5, 64, 512), "down": normal(6, 512, 1 if step is adversarial else 64)}
    args = first, second, normal(7, 16, 64)
    subject = subject_of(on_nodes(step, 4, {"in_axes": (None, None, 0)}), args)
    on = MeshSearch(subject, V5E, {"vnode": 2, "model": 2, "model2": 2}, "cpu", None)
    solution = on.solution(GIB, 20, 0.01)
    assert solution is not None
    made = on.searched(solution)
    plan = plan_of(on.with_sharded_state(made) if over_rows else made, GIB)
    virtual = plan.step()
    placed = virtual.put(first), virtual.put(second)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    assert held <= 1.1 * (plan.figures.arguments - args[2].nbytes // 2)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), virtual(*placed, args[2]), step(*args)
    )
    assert_as_planned(plan.accept())


def test_rows_with_different_numbers_of_nodes_are_accepted() -> None:
    made = candidate("mlp", "invariant", {"vnode": 4, "model": 2}, "Megatron", nodes=6)
    plan = plan_of(made, GIB)
    assert plan.step().placement.counts == (2, 2, 1, 1)
    found = plan.accept()
    assert found.accepted, str(found)
    assert_as_planned(found)


@pytest.mark.thorough
def test_small_gradients_of_a_sharded_state_are_not_gathered_to_be_clipped() -> None:
    """Every device has them whole anyway, so that their norm needs no gather, of which there is one for large ones."""
    # with the usual `eps`, Adam would divide gradients near zero, which are differences of large terms, by their size
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))

    def step(state: Any, x: Any, y: Any) -> Any:
        params, slots = state

        def loss(params: Any) -> Any:
            return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] @ params["small"] - y) ** 2)

        updates, slots = optimizer.update(jax.grad(loss)(params), slots, params)
        return optax.apply_updates(params, updates), slots

    params = {"up": normal(1, 256, 1024), "down": normal(2, 1024, 256), "small": normal(3, 256, 8)}
    args = (params, optimizer.init(params)), normal(4, 64, 256), normal(5, 64, 8)
    subject = subject_of(on_nodes(step, 8, {"donate_argnums": (0,)}), args)
    on = MeshSearch(subject, V5E, {"vnode": 4, "model": 2}, "cpu", None)
    plan = plan_of(on.with_sharded_state(on.expert(MEGATRON)), GIB)
    assert all("vnode" in str(spec) for name, spec in plan.specs.items() if "small" in name)
    assert_as_planned(plan.accept())
    state = plan.step().put(args[0])
    want = jax.jit(step)(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), plan.step()(state, *args[1:]), want
    )


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def clipped(state: Any, x: Any, labels: Any) -> Any:
    """A step with arrays of many shapes, whose gradients are clipped."""
    params, slots = state

    def loss(params: Any) -> Any:
        hidden = jax.nn.gelu(x @ params["first"])
        hidden += jax.nn.gelu(hidden @ params["up"]) @ params["down"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["logits"], labels).mean()

    loss_, grads = jax.value_and_grad(loss)(params)
    updates, slots = CLIPPED.update(grads, slots, params)
    return (optax.apply_updates(params, updates), slots), loss_


def clipped_on(sizes: dict[str, int], reduction: str) -> MeshSearch:
    shapes = {"first": (64, 256), "up": (256, 1024), "down": (1024, 256), "bias": (256,), "logits": (256, 16)}
    params = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    args = (params, CLIPPED.init(params)), normal(5, 64, 64), jnp.arange(64) % 16
    subject = subject_of(on_nodes(clipped, 8, {"reduction": reduction, "donate_argnums": (0,)}), args)
    return MeshSearch(subject, V5E, sizes, "cpu", None)


def flow_with_specs(on: MeshSearch, spec: Callable[[int, tuple[int, ...]], PartitionSpec]) -> Flow:
    """A flow that the layouts of the state lead, each as `spec` says of a leaf's number and shape."""
    inputs, carried = on.replica.program.inputs, on.subject.carried
    lying = [
        from_spec(spec(i, v.aval.shape) if i in on.subject.state else PartitionSpec(), v.aval.shape, on.axes)
        for i, v in enumerate(inputs)
    ]
    ends = [lying[carried[j]] if j in carried else None for j in range(len(on.replica.program.outputs))]
    return follow(on.replica.program, lying, on.axes, outputs=ends)


@pytest.mark.sampled(0, thorough=2)
@pytest.mark.parametrize("over_rows", [False, True])
@pytest.mark.parametrize(
    ("sizes", "reduction"),
    [({"vnode": 2, "model": 2, "model2": 2}, "invariant"), ({"vnode": 2, "model": 4}, "fast")],
    ids=str,
)
def test_what_is_exchanged_is_planned_however_the_state_lies(
    sizes: dict[str, int], reduction: str, over_rows: bool
) -> None:
    """Parameters lie at random, and their slots as they do."""
    on, generator = clipped_on(sizes, reduction), np.random.default_rng(len(sizes) + over_rows)
    drawn: dict[tuple[int, ...], PartitionSpec] = {}

    def spec(_: int, shape: tuple[int, ...]) -> PartitionSpec:
        if shape not in drawn:
            names = [name for name in on.axes if generator.random() < 0.7 and shape]
            at = generator.integers(len(shape), size=len(names)) if shape else ()
            cuts = [tuple(name for name, k in zip(names, at, strict=True) if k == d) or None for d in range(len(shape))]
            drawn[shape] = PartitionSpec(*cuts)
        return drawn[shape]

    made = on.candidate("at random", flow_with_specs(on, spec), shard_state=over_rows)
    assert_as_planned(plan_of(made, GIB).accept())


def test_a_plan_from_a_file_is_accepted_and_a_changed_one_is_not(tmp_path: Path) -> None:
    step, args = example("mlp")
    made = candidate("mlp", "invariant", MESHES["2x4"], "Megatron")
    plan_of(made, GIB).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json", step, args, donate_argnums=(0,))
    assert plan.prediction.exchanges
    with pytest.raises(vnode.PartitionError, match=r"a plan from a file has no timeline(?s:.*)search again"):
        plan.timeline.chrome_trace(tmp_path / "trace.json")
    found = plan.accept()
    assert found.accepted, str(found)
    assert plan.accept(jax.devices()).memory == found.memory and plan.step() is plan.step(jax.devices())

    fewer = dataclasses.replace(plan.prediction, exchanges=())
    refused = dataclasses.replace(plan, prediction=fewer).accept()
    assert not refused.accepted and refused.memory_accepted and refused.found == found.found

    figures = dataclasses.replace(plan.figures, temporary=plan.figures.temporary // 4)
    less = dataclasses.replace(plan.prediction, figures=figures)
    refused = dataclasses.replace(plan, prediction=less, limit=found.memory - 1).accept()
    assert not refused.accepted and refused.exchange_accepted
    assert f"memory={int((found.memory - 1) * figures.memory / found.memory)}" in refused.advice[0]


def test_a_plan_for_another_kind_of_device_says_so() -> None:
    step, args = example("mlp")
    subject = subject_of(on_nodes(step, 8, {"donate_argnums": (0,)}), args)
    on = MeshSearch(subject, V5E, MESHES["8"], "tpu", None)
    found = plan_of(on.candidate("data parallel", on.undivided), GIB).accept(tolerance=0.01)
    assert not found.accepted, "what is on the chip there is not here"
    assert "compile it for tpu, as predicted, not for cpu: plan.accept(devices)" in " ".join(str(found).split())


def test_a_program_that_the_compiler_refuses_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("mlp", {"vnode": 2, "model": 4}, 1)

    def refuse(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 18.5G of 15.75G hbm.")

    monkeypatch.setattr(type(plan.step().executor), "compile_for", refuse)
    with pytest.raises(vnode.MemoryLimitError, match=r"the compiler refuses the planned step(.|\n)*18\.5 GiB"):
        plan.accept()
    with pytest.raises(vnode.PlacementError, match="the plan is for 8 devices, and there are 4"):
        plan.accept(jax.devices()[:4])


def test_what_axes_divide_is_what_megatron_says() -> None:
    """Shoeybi et al., "Megatron-LM" (2019), section 3: the first weight by columns, the second by rows."""
    made = candidate("mlp", "invariant", MESHES["2x4"], "Megatron")
    forward = [each for each in made.divisions if "test_plan_accept" in each.where]
    by_cut = {each.cut: each.axes for each in forward}
    assert by_cut["[-, -] x [-, model] -> [-, model]"] == {"model": "right"}
    assert {"model": "sum"} in by_cut.values() and {"model": "left"} in by_cut.values()
    plan = plan_of(made, GIB)
    text = str(plan)
    assert "operations by axes" in text and "vnode 2" in text and "model 4" in text
    assert 'class="hue"' in plan._repr_html_() and "--hue:30" in plan._repr_html_()


def test_memory_over_time_ends_where_the_prediction_is() -> None:
    """By hand: state and batch are there always, and what is most is what the compiler was compared with."""
    made = candidate("mlp", "invariant", MESHES["2x4"], "Megatron")
    figures, levels = made.figures, made.prediction.levels
    weights = 4 * (512 * 2048 + 2048 + 2048 * 512) // 4  # a quarter on each device
    batch = 2 * 4 * 64 * 512 // 2  # half of the examples for each row
    assert figures.arguments == 3 * weights + 4 + batch
    assert max(level.bytes for level in levels) == figures.memory
    assert min(level.bytes for level in levels) >= figures.arguments
    plan = plan_of(made, GIB)
    for page in (plan._repr_html_(), plan.explain()._repr_html_()):
        assert 'class="levels"' in page and 'class="timeline"' in page


@pytest.mark.parametrize("name", ["mlp", "layers"])
def test_the_timeline_says_of_loops_what_the_plan_does(name: str) -> None:
    """Of a loop over nodes, with exchanges in it, the device and its links are occupied all the time, and work less."""
    made = candidate(name, "fast", {"vnode": 1, "model": 8}, "Megatron")
    plan = plan_of(made, GIB)
    timeline, figures = plan.timeline, plan.figures
    assert timeline.graph.resources == ("compute", "links", "host link")
    compute, links, moved = timeline.utilization * timeline.seconds
    assert moved == 0
    assert compute == pytest.approx(figures.compute, rel=0.01) and links == pytest.approx(figures.exchange, rel=0.01)
    occupied = timeline.busy / 1e12
    assert occupied[0] > 1.1 * figures.compute and occupied[1] > 1.1 * figures.exchange, "or a loop hides nothing"
    shown = [f"{share:.0%}" for share in (figures.compute / figures.seconds, figures.exchange / figures.seconds)]
    assert re.findall(r">(\d+%)<", timeline.svg()) == shown


@pytest.mark.thorough
def test_explain_needs_no_devices_and_says_what_becomes_of_the_step(tmp_path: Path) -> None:
    """A machine of sixteen devices, where there are eight."""
    step, args = example("mlp")
    machine = vnode.partition.Machine.tpu("v5e:4x4")
    plan = vnode.partition.search(step, args, machine, virtual_nodes=16)
    text = str(plan.explain())
    assert "plan for step" in text and "Accumulated" in text and "beside others" in text
    plan.save(tmp_path / "plan.json")
    assert str(Plan.load(tmp_path / "plan.json", step, args).explain()) == text


def test_devices_that_compute_a_node_together_are_counted_as_devices() -> None:
    """Eight devices as two rows of four: neither are they two, nor is a row one device."""
    made = candidate("mlp", "invariant", {"vnode": 2, "model": 4}, "Megatron", nodes=16)
    plan = plan_of(made, GIB)
    step = plan.step()
    for found in (plan.explain().report, step.explain(*plan.args)):
        text = " ".join(str(found).split())
        assert "16 virtual nodes of 4, 8 devices in 2 rows, 8 waves" in text
        assert "devices 8 in 2 rows with 8 nodes each" in text and "Nodes by row and wave" in text
        assert "lanes=2, which keeps the bits of up to 8 devices in 2 rows" in text
        assert "none on 32 devices in 8 rows" in text, "each with two nodes, of which neither waits"
        assert not re.search(r"\b[28] devices(?! in 2 rows)", text)
    there = vnode.explain(step, *plan.args, devices=2)
    assert [each.devices for each in there.reports] == [8, 2], "two devices are not where it is"
    assert "on 2 devices instead of 8 in 2 rows" in " ".join(str(there).split())
    alone = vnode.virtualize(example("mlp")[0], virtual_nodes=16).on(jax.devices()[:2]).explain(*plan.args)
    assert "16 virtual nodes of 4, 2 devices, 8 waves" in " ".join(str(alone).split())


SENT = {"all-reduce": 2.0, "permute": 2.0}
"""Halves of an array that each of two devices sends; of others one."""


@pytest.mark.parametrize("reduction", ["fast", "invariant"])
def test_explain_counts_sums_over_nodes_as_one_device_has_them(reduction: str) -> None:
    """The compiled program has what two rows exchange, among two devices each; weights are quartered by the others."""
    made = candidate("mlp", reduction, MESHES["2x4"], "Megatron")
    plan = plan_of(made, GIB)
    found = plan.accept()
    assert found.accepted, str(found)
    assert_as_planned(found)
    report = plan.explain().report
    weights, loss = 4 * (512 * 2048 + 2048 + 2048 * 512) // 4, 4
    assert report.accumulated == weights + loss
    over_nodes = [each for each in plan.prediction.exchanges if each.devices == 2]
    sent = sum(each.runs * each.bytes * SENT.get(each.kind, 1.0) / 2 for each in over_nodes)
    assert report.sent == pytest.approx(sent, rel=0 if reduction == "fast" else 0.01)  # small sums: all to all at once
    assert report.planned == plan.figures.sent > report.sent


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["mlp", "layers", "images"])
def test_explain_has_the_sums_that_a_device_is_given_room_for(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes and layouts at random; what is emitted is the reference."""
    plan = planned(name, {"vnode": 2, "model": 4}, seed)
    emitted: list[list[int]] = []
    made = one_pass.sums_of

    def seen(*args: Any) -> Any:
        sums = made(*args)
        emitted.append([s.nbytes for s in sums])
        return sums

    monkeypatch.setattr(one_pass, "sums_of", seen)
    plan.step().executor.lower(plan.args, {})
    monkeypatch.undo()
    said = [[line.bytes for line in each.accumulators] for each in plan.explain().report.passes]
    assert said == emitted
    whole = [[line.bytes for line in each.accumulators] for each in plan.step().explain(*plan.args).passes]
    assert sum(map(sum, said)) < sum(map(sum, whole)), "something is divided"


def test_what_the_test_of_a_loop_exchanges_is_as_planned() -> None:
    """A fixed point that is sought until the whole batch is near it."""

    def step(w: Any, x: Any) -> Any:
        def near(carry: Any) -> Any:
            return (jnp.max(jnp.abs(carry[0] - carry[1])) > 1e-3) & (carry[2] < 20)

        def turn(carry: Any) -> Any:
            return jnp.tanh(carry[0] @ w * 0.1 + x), carry[0], carry[2] + 1

        found, _, turns = jax.lax.while_loop(near, turn, (x, x + 1, 0))
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(found @ w + x) ** 2))(w), turns

    args = normal(1, 16, 16), normal(2, 16, 16)
    subject = subject_of(on_nodes(step, 8, {"recompute_budget": 9.0}), args)
    on = MeshSearch(subject, V5E, {"vnode": 8}, "cpu", None)
    assert_as_planned(plan_of(on.candidate("data parallel", on.undivided), GIB).accept())
