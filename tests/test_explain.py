"""What `explain` says of well-known steps, against numbers counted by hand.

Knows the report and its text. Must not know how passes are found. Every expected number stands with its count: bytes of
float32 values, scalar operations of products (two per multiplication and addition), passes that the mathematics of the
step needs.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vnode
from vnode.report.sources import display_path
from vnode.show.units import size

pytestmark = pytest.mark.quickly

FLOAT = 4
LARGE = {"recompute_budget": 10.0}


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


def explain(step: Any, *args: Any, nodes: int = 4, devices: int = 4, **options: Any) -> Any:
    return vnode.virtualize(step, virtual_nodes=nodes, **options).on(jax.devices()[:devices]).explain(*args)


def words(thing: Any) -> str:
    """Its text, wherever lines are broken."""
    return " ".join(str(thing).split())


def sizes(lines: Any) -> list[int]:
    return sorted(line.bytes for line in lines)


def sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


# A multilayer perceptron: one pass

B, IN, HIDDEN, OUT = 16, 32, 64, 8


def mlp(params: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] + params["b2"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return sgd(params, grads), loss


def mlp_arguments(batch: int = B) -> tuple[Any, Any]:
    params = {"w1": normal(IN, HIDDEN), "b1": normal(HIDDEN), "w2": normal(HIDDEN, OUT), "b2": normal(OUT)}
    return params, {"x": normal(batch, IN), "y": normal(batch, OUT)}


def test_mlp_is_one_pass_with_an_accumulator_per_parameter_and_loss() -> None:
    report = explain(mlp, *mlp_arguments())
    (only,) = report.passes
    assert sizes(only.accumulators) == sorted(FLOAT * n for n in (IN * HIDDEN, HIDDEN, HIDDEN * OUT, OUT, 1))
    assert not only.collected and not report.couplings and not report.gathered and not report.nested
    assert report.recomputed == 0


def test_mlp_splits_both_arrays_of_the_batch() -> None:
    report = explain(mlp, *mlp_arguments())
    assert sizes(report.inputs) == sorted(FLOAT * n for n in (B * IN, B * OUT))
    assert (report.batch, report.virtual_nodes, report.node_size, report.padding) == (B, 4, 4, 0)


def test_mlp_work_is_that_of_its_products() -> None:
    """Forward two products, backward three: the gradient by the input of the first layer is not wanted."""
    report = explain(mlp, *mlp_arguments())
    products = 2 * B * (2 * IN * HIDDEN + 3 * HIDDEN * OUT)
    assert products < report.passes[0].flops < 1.1 * products
    assert report.passes[0].flops <= report.flops < 1.15 * products


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_bytes_sent_are_those_of_a_ring(devices: int) -> None:
    total = FLOAT * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT + 1)
    report = explain(mlp, *mlp_arguments(), nodes=2 * devices, devices=devices)
    assert report.passes[0].sent == 2 * (devices - 1) * total // devices


def test_bytes_sent_of_the_second_half_of_a_block() -> None:
    """The sums of nodes 4, 5 and of 6, 7 are added to that of 0 to 3 one by one: the second device sends both."""
    total = FLOAT * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT + 1)
    assert explain(mlp, *mlp_arguments(), nodes=8, devices=2).passes[0].sent == (2 + 1) * total // 2


def test_bytes_sent_by_devices_that_hold_several_blocks() -> None:
    """Of 7 nodes on two devices the first has 0..3, the second 4..5 and 6, which are added to them one by one."""
    total = FLOAT * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT + 1)
    args = mlp_arguments(14)
    step = vnode.virtualize(mlp, virtual_nodes=7)
    devices = jax.devices()[:2]
    assert step.on(devices).explain(*args).passes[0].sent == 3 * total // 2
    # 3 is to be added to 2 first: the second device has 3, 4..5, and 6.
    assert step.on(devices, counts=[3, 4]).explain(*args).passes[0].sent == 4 * total // 2


@pytest.mark.parametrize(
    ("options", "devices", "text", "pending", "cheaper"),
    [
        ({"reduction": "fast"}, 1, "fast each device in node order, then across devices in any order", 0, ""),
        ({}, 8, "invariant in the order of a tree over the nodes", 0, ""),
        ({"lanes": 1}, 1, "invariant in the order of a tree over 1 lanes of 16", 0, ""),
        (
            {},
            1,
            "invariant in the order of a tree over the nodes",
            2,
            "none with lanes=1, which keeps the bits of one device only; 1 on 2 devices",
        ),
        (
            {"lanes": 8},
            4,
            "invariant in the order of a tree over 8 lanes of 2",
            1,
            "none with lanes=4, which keeps the bits of up to 4 devices; none on 8 devices",
        ),
    ],
)
def test_reduction_is_said(options: dict[str, Any], devices: int, text: str, pending: int, cheaper: str) -> None:
    """Of 16 nodes: two, or the two of a lane, are added as they come, but such sums one after another."""
    total = FLOAT * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT + 1)
    step = vnode.virtualize(mlp, virtual_nodes=16, **options).on(jax.devices()[:devices])
    said = words(step.explain(*mlp_arguments(16)))
    assert f"sums over nodes {text} " in said, said
    assert (f"{size(pending * total)} of pending sums of the tree" in said) == bool(pending), said
    always = 'none with reduction="fast"'
    assert (f"pending sums: {always}; {cheaper}" in said) == ("pending sums: " in said) == bool(cheaper), said


def test_sharded_states_that_xla_divides_are_excepted() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("vnode",))
    sharded = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("vnode")))
    step = vnode.virtualize(lambda s, x: s["w"] + x.sum(), virtual_nodes=2).on(jax.devices()[:2])
    assert "but not" not in str(step.explain({"w": sharded}, jnp.ones((4, 3))))
    step = vnode.virtualize(lambda s, x: s["w"] + x.sum(), virtual_nodes=2, partition="xla").on(jax.devices()[:2])
    assert "but not of what the step makes of arguments" in words(step.explain({"w": sharded}, jnp.ones((4, 3))))
    assert "s['w']" in words(step.explain({"w": sharded}, jnp.ones((4, 3))))
    assert "but not" not in str(step.explain({"w": jnp.ones(4)}, jnp.ones((4, 3))))


def test_padding_and_uneven_devices_are_said() -> None:
    report = explain(mlp, *mlp_arguments(14), devices=3)
    assert (report.node_size, report.padding) == (4, 2)
    text = words(report)
    assert "mlp 14 examples on 4 virtual nodes of 4, 3 devices, 2 waves" in text
    assert "padding 2 examples at the end" in text and "3 with 1 to 2 nodes each" in text


def test_work_does_not_depend_on_nodes_and_devices() -> None:
    reports = [explain(mlp, *mlp_arguments(), nodes=v, devices=d) for v, d in ((1, 1), (4, 1), (8, 4), (16, 8))]
    assert len({(r.flops, len(r.passes), *sizes(r.passes[0].accumulators)) for r in reports}) == 1


def test_shapes_are_enough() -> None:
    shapes = jax.eval_shape(mlp_arguments)
    assert str(explain(mlp, *shapes)) == str(explain(mlp, *mlp_arguments()))


# A masked mean: the first pass touches the mask only


def test_masked_mean_counts_the_mask_first() -> None:
    length = 6

    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            losses = jnp.tanh(batch["x"] @ params["w"]).sum(-1)
            return (losses * batch["mask"]).sum() / batch["mask"].sum()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return sgd(params, grads), loss

    params = {"w": normal(IN, OUT)}
    report = explain(step, params, {"x": normal(B, length, IN), "mask": jnp.ones((B, length))})
    counting, model = report.passes
    assert sizes(counting.accumulators) == [FLOAT]
    assert counting.flops == B * length  # one addition per element of the mask
    assert sizes(model.accumulators) == [FLOAT, FLOAT * IN * OUT]
    assert report.recomputed == 0
    (coupling,) = report.couplings
    assert coupling.what == "pass 1: reduce_sum reads a sum over the batch"


# Tied embeddings: one accumulator


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_share_an_accumulator(tied: bool) -> None:
    words, width, length = 11, 5, 3

    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            table = params["embed"] if tied else params["unembed"]
            logits = jnp.tanh(params["embed"][batch["tokens"]]) @ table.T
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return sgd(params, grads), loss

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, words, (B, length)), jnp.int32)
    params = {"embed": normal(words, width)} | ({} if tied else {"unembed": normal(words, width)})
    (only,) = explain(step, params, {"tokens": tokens, "next": tokens}).passes
    assert sizes(only.accumulators) == [FLOAT] + [FLOAT * words * width] * len(params)


# Batch normalization


def batch_norm(params: Any, x: jax.Array) -> Any:
    def loss_fn(params: Any) -> Any:
        hidden = x @ params["w"]
        with jax.named_scope("BatchNorm_0"):
            mean = hidden.mean(0)
            variance = (hidden**2).mean(0) - mean**2
            hidden = (hidden - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"]
        return jnp.mean(hidden**3), (mean, variance)

    (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return sgd(params, grads), loss, statistics


def batch_norm_arguments() -> Any:
    return {"w": normal(IN, OUT), "scale": normal(OUT)}, normal(B, IN)


def test_exact_batch_norm_takes_three_passes() -> None:
    """Statistics; sums of the gradient over the batch, which the statistics' own gradients are; the rest."""
    report = explain(batch_norm, *batch_norm_arguments(), **LARGE)
    statistics, sums, rest = report.passes
    assert sizes(statistics.accumulators) == [FLOAT * OUT] * 2  # of x and of its square
    assert max(sizes(sums.accumulators)) == FLOAT * OUT
    assert max(sizes(rest.accumulators)) == FLOAT * IN * OUT
    assert all(not p.collected for p in report.passes) and not report.gathered
    # The product with w is computed in each pass.
    assert report.recomputed >= 2 * (2 * B * IN * OUT)
    assert any(line.where.endswith(" in BatchNorm_0") for line in report.couplings)
    assert all("test_explain.py" in line.where for line in report.couplings)


def test_local_batch_norm_takes_one_pass() -> None:
    report = explain(batch_norm, *batch_norm_arguments(), coupling="local")
    (only,) = report.passes
    # Statistics that leave the step are summed over all nodes, beside gradients and the loss.
    assert sizes(only.accumulators) == sorted(FLOAT * n for n in (IN * OUT, OUT, OUT, OUT, 1))
    assert report.recomputed == 0
    assert report.couplings and all("each node's own estimate" in line.what for line in report.couplings)


# A contrastive loss


def test_contrastive_loss_keeps_embeddings_only() -> None:
    width = 3

    def clip(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            images = jnp.tanh(batch["image"] @ params["image"])
            texts = jnp.tanh(batch["text"] @ params["text"])
            logits = images @ texts.T
            labels = jnp.arange(logits.shape[0])
            both = (logits, logits.T)
            return sum(optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean() for scores in both)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return sgd(params, grads), loss

    params = {"image": normal(IN, width), "text": normal(HIDDEN, width)}
    batch = {"image": normal(B, IN), "text": normal(B, HIDDEN)}
    report = explain(clip, params, batch, **LARGE)
    embeddings, gradients = report.passes
    assert sizes(embeddings.collected) == [FLOAT * B * width] * 2
    assert not embeddings.accumulators
    assert sizes(report.gathered) == [FLOAT * B * width] * 2
    assert sizes(a for a in gradients.accumulators if a.bytes > FLOAT) == sorted(
        FLOAT * n * width for n in (IN, HIDDEN)
    )
    assert any("dot_general needs the whole batch" in line.what for line in report.couplings)


# Loops around passes


def test_epochs_of_minibatches_are_described_within_the_report() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def epoch(w: jax.Array, _: None) -> Any:
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            return w - 0.1 * grad, loss

        return jax.lax.scan(epoch, w, None, length=3)

    report = explain(step, normal(IN, OUT), normal(B, IN), **LARGE)
    assert not report.passes
    (inner,) = report.nested
    (only,) = inner.passes
    assert sizes(only.accumulators) == [FLOAT, FLOAT * IN * OUT]
    assert inner.turns == 3 and report.all_passes == 3 and report.sent == 3 * only.sent
    text = words(report)
    assert "Around passes of its own" in text and "3 passes, 3 of them in 3 turns of a loop" in text
    assert "share: of the body's work" in text


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_loop_around_loops_has_their_passes(epochs: int) -> None:
    """All sums are those of one epoch, times the epochs."""

    def epoch(w: jax.Array, x: jax.Array) -> Any:
        def update(w: jax.Array, part: jax.Array) -> Any:
            return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(part @ w) ** 2))(w), None

        order = jax.random.permutation(jax.random.key(0), B)
        return jax.lax.scan(update, w, x[order].reshape(2, -1, IN))[0]

    def train(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.scan(lambda w, _: (epoch(w, x), None), w, None, length=epochs)[0]

    one, report = (explain(step, normal(IN, OUT), normal(B, IN), **LARGE) for step in (epoch, train))
    (outer,) = report.nested
    (inner,) = outer.nested
    assert not outer.passes and (outer.turns, inner.turns) == (epochs, 2)
    assert (report.all_passes, report.sent, report.pass_flops) == tuple(
        epochs * count for count in (one.all_passes, one.sent, one.pass_flops)
    )
    assert report.accumulated == one.accumulated > 0 and report.exchanges == 2 * epochs
    assert f"{2 * epochs} passes, {2 * epochs} of them in {epochs} turns of a loop" in words(report)


# The text


@pytest.mark.parametrize("tied", [False, True])
def test_draws_that_nothing_ties_to_the_examples(tied: bool) -> None:
    """A generator's noise has the batch's length, and meets no example: it is drawn once, 16 x 8 words of 4 bytes."""

    def step(w: Any, x: Any) -> Any:
        noise = jax.random.normal(jax.random.key(0), (len(x), 8))
        fake = jnp.tanh((noise + 0 * x[:, :8] if tied else noise) @ w)
        return w, (fake**2).mean() + x.mean()

    report = explain(step, normal(8, 8), normal(16, 32))
    assert sizes(report.drawn) == ([] if tied else [16 * 8 * 4])
    assert ("Drawn whole" in str(report)) == (not tied)


def test_the_text_says_what_the_report_holds() -> None:
    report = explain(batch_norm, *batch_norm_arguments(), **LARGE)
    text = str(report)
    assert text.startswith("batch_norm   16 examples on 4 virtual nodes of 4, 4 devices, 1 wave\n")
    for p in report.passes:
        reads = f"pass {p.number - 1}" if p.number else ""
        assert re.search(rf"^ +{p.number} +{reads} +{p.equations} .* K?i?B$", text, re.MULTILINE)
    assert "Couplings where one example influences another" in words(report)
    assert re.search(r"sum f32\[(32,8|8,32)\] +1\.0 KiB +w +tests/test_explain\.py:\d+$", text, re.MULTILINE)
    assert f"{report.recomputed / report.flops:.1%} of it computed again" in words(report)
    assert max(map(len, text.splitlines())) <= 80


def test_shares_of_the_work_add_up() -> None:
    for report in (explain(batch_norm, *batch_norm_arguments(), **LARGE), explain(mlp, *mlp_arguments())):
        shares = [float(s) for s in re.findall(r"^ +(?:\d|once) .*flop +([\d.]+)%", str(report), re.MULTILINE)]
        assert len(shares) == len(report.passes) + 1
        assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))


def test_long_tables_are_cut_and_counted() -> None:
    """Twenty parameters of twenty shapes."""

    def step(params: list[jax.Array], x: jax.Array) -> Any:
        return [p + x[:, : len(p)].sum(0) for p in params]

    report = explain(step, [normal(i + 2) for i in range(20)], normal(B, IN))
    shown = len(re.findall(r"sum f32\[\d+\] ", str(report)))
    (more,) = re.findall(r"… and (\d+) smaller ones", str(report))
    assert shown + int(more) == len(report.passes[0].accumulators) == 20


def repeated_layers(layers: list[Any], x: jax.Array) -> Any:
    def loss_fn(layers: list[Any]) -> jax.Array:
        h = x
        for layer in layers:
            h = jnp.tanh(h @ layer["kernel"] + layer["bias"])
        return jnp.mean(h**2)

    return sgd(layers, jax.grad(loss_fn)(layers))


def test_repeated_layers_are_one_row_with_their_parameters() -> None:
    layers = [{"kernel": normal(IN, IN), "bias": normal(IN)} for _ in range(12)]
    report = explain(repeated_layers, layers, normal(B, IN))
    assert len(report.passes[0].accumulators) == 24
    text = str(report)
    assert re.search(rf"12 x sum f32\[{IN},{IN}\] +{12 * FLOAT * IN * IN // 1024}.0 KiB +0..11/kernel ", text)
    assert re.search(rf"12 x sum f32\[(?:1,)?{IN}\] +{12 * FLOAT * IN / 1024:.1f} KiB +0..11/bias ", text)
    assert text.count(" x sum f32[") == 2


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lion", "adafactor"])
def test_accumulators_have_the_names_of_their_parameters(optimizer: str) -> None:
    """Whatever the optimizer keeps beside them, clipped by the global norm."""
    rules = {"sgd": optax.sgd, "adamw": optax.adamw, "lion": optax.lion, "adafactor": optax.adafactor}
    rule = optax.chain(optax.clip_by_global_norm(1.0), rules[optimizer](1e-3))

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ params["first"]["w"] + params["first"]["b"])
            return jnp.mean((hidden @ params["second"]["w"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, slots = rule.update(grads, state["slots"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, {"loss": loss}

    params = {"first": {"w": normal(IN, HIDDEN), "b": normal(HIDDEN)}, "second": {"w": normal(HIDDEN, OUT)}}
    state = {"params": params, "slots": rule.init(params)}
    (only,) = explain(step, state, {"x": normal(B, IN), "y": normal(B, OUT)}).passes
    wanted = {"first/w": IN * HIDDEN, "first/b": HIDDEN, "second/w": HIDDEN * OUT, "loss": 1}
    found = {line.name.removeprefix("params/"): line.bytes for line in only.accumulators}
    assert found == {name: FLOAT * n for name, n in wanted.items()}


def test_source_lines_are_seen_from_the_working_directory(monkeypatch: Any, tmp_path: Any) -> None:
    """Or from the folder of the package, where they are not in it."""
    report = explain(repeated_layers, [{"kernel": normal(IN, IN), "bias": normal(IN)}], normal(B, IN))
    assert re.search(r" tests/test_explain\.py:\d+", str(report))
    display_path.cache_clear()
    monkeypatch.chdir(tmp_path)
    assert re.search(r" tests/test_explain\.py:\d+", str(report))
    display_path.cache_clear()
    monkeypatch.chdir(Path(__file__).parent)
    assert re.search(r" test_explain\.py:\d+", str(report))
    display_path.cache_clear()
    environment = tmp_path / ".venv/lib/python3.11/site-packages"
    monkeypatch.chdir(tmp_path)
    assert display_path(str(environment / "diffrax/_integrate.py")) == "diffrax/_integrate.py"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert display_path(__file__) == "tests/test_explain.py"


def test_columns_of_a_comparison_are_not_repeated() -> None:
    step = vnode.virtualize(mlp, virtual_nodes=4).on(jax.devices()[:2])
    answer = vnode.explain(step, *mlp_arguments(), devices=[1, 2, 4, 4])
    assert [r.counts for r in answer.others] == [(4,), (2, 2), (1,) * 4, (1,) * 4]
    assert answer.heads == ("now: 2 devices", "1 device", "4 devices")
    assert all(len(row.values) == 3 for row in answer.rows)
    assert "what would change" in str(vnode.explain(step, *mlp_arguments(), devices=2))


def test_which_devices_they_are_shows_in_their_names_only() -> None:
    reports = {
        re.sub(
            r"cpu:\d",
            "cpu",
            str(vnode.virtualize(mlp, virtual_nodes=4).on(jax.devices()[d : d + 2]).explain(*mlp_arguments())),
        )
        for d in (0, 3, 6)
    }
    assert len(reports) == 1


@pytest.mark.parametrize("features", [1, 4, 256])
def test_masked_mean_computes_nothing_twice(features: int) -> None:
    """The numerator is summed with the gradients; the first pass only counts."""

    def step(w: jax.Array, batch: Any) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            losses = (batch["x"] @ w) ** 2
            return (losses * batch["mask"]).sum() / batch["mask"].sum()

        return jax.value_and_grad(loss)(w)

    batch = {"x": normal(B, 5), "mask": jnp.ones((B, 1))}
    report = vnode.virtualize(step, virtual_nodes=4).explain(normal(5, features), batch)
    assert report.recomputed == 0
    assert [len(p.accumulators) for p in report.passes] == [1, 2]
    assert report.passes[0].flops == B


# What would change on other devices


def kib(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count / 1024:.1f} KiB"


def reports_of(step: Any, *args: Any, **options: Any) -> Any:
    return vnode.explain(step, *args, **options).others


def test_without_devices_it_is_the_report_of_the_step() -> None:
    step = vnode.virtualize(mlp, virtual_nodes=4).on(jax.devices()[:2])
    assert vnode.explain(step, *mlp_arguments()) == step.explain(*mlp_arguments())


@pytest.mark.parametrize("options", [{}, {"reduction": "fast"}, {"lanes": 3}])
def test_imagined_devices_are_like_real_ones(options: dict[str, Any]) -> None:
    """All but their names: what a step says of N devices, and what it says on them."""
    step = vnode.virtualize(mlp, virtual_nodes=7, **options).on(jax.devices()[:2])
    args = mlp_arguments(13)
    for devices, imagined in enumerate(reports_of(step, *args, devices=range(1, 9)), 1):
        real = step.on(jax.devices()[:devices]).explain(*args)
        assert imagined.counts == real.placement.counts
        named = dataclasses.replace(imagined, placement=real.placement)
        assert named == real and str(named) == str(real)


def test_the_step_is_traced_once_for_all_devices() -> None:
    traced = []

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        traced.append(x.shape)
        return w + x.sum(0)

    vnode.explain(vnode.virtualize(step, virtual_nodes=4), jnp.ones(3), jnp.ones((8, 3)), devices=[1, 2, 3, 64])
    assert traced == [(8, 3)]


def test_numbers_of_a_comparison_are_those_counted_by_hand() -> None:
    """12 nodes of 4 examples from 4 devices to 1, 5 and 64."""
    batch, parameters = 48, IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT
    step = vnode.virtualize(mlp, virtual_nodes=12).on(jax.devices()[:4])
    answer = vnode.explain(step, *mlp_arguments(batch), devices=[1, 5, 64])
    rows = {row.name: row.values for row in answer.rows}
    assert rows["waves"] == ("3", "12", "3", "1")
    assert rows["step time"] == ("1.00x", "4.00x", "1.00x", "0.33x")
    assert rows["nodes per device"] == ("3", "12", "2 to 3", "0 to 1")
    assert rows["idle slots"] == ("0", "0", "3 (20%)", "52 (81%)")
    example = FLOAT * (IN + OUT)
    assert rows["inputs per device"] == tuple(kib(waves * 4 * example) for waves in (3, 12, 3, 1))
    total = FLOAT * (parameters + 1)
    assert rows["accumulators per device"] == (kib(total),) * 4
    # Of the 12 nodes of one device those of the first half, and of the pairs since then, wait while two are added.
    buffers = dict(zip(("now", 1, 5, 64), rows["buffers per device"], strict=True))
    assert buffers[1] == kib(2 * total)
    assert buffers[64] == "0 B"
    blocks = {4: 2, 1: 1, 64: 1}  # 0..1 and 2; then everything, or a single node
    sent = dict(zip((4, 1, 5, 64), rows["sent per device"], strict=True))
    for devices, held in blocks.items():
        assert sent[devices] == kib(int((devices - 1) / devices * total * (1 + held)))
    assert "kept per device" not in rows


def test_values_that_are_kept_count_where_nodes_are() -> None:
    """Outputs of every example: a device keeps those of its nodes, padding included."""
    step = vnode.virtualize(lambda w, x: jnp.tanh(x * w), virtual_nodes=5).on(jax.devices()[:5])
    answer = vnode.explain(step, jnp.ones(()), jnp.ones((18, 6)), devices=[1, 2])
    (kept,) = [row.values for row in answer.rows if row.name == "kept per device"]
    assert kept == tuple(f"{nodes * 4 * 6 * FLOAT} B" for nodes in (1, 5, 3))


def test_comparisons_say_what_stays() -> None:
    args = mlp_arguments()
    text = {
        mode: str(vnode.explain(vnode.virtualize(mlp, virtual_nodes=4, reduction=mode), *args, devices=3))
        for mode in ("invariant", "fast")
    }
    assert "every bit of it" in text["invariant"] and "4 nodes of 4 examples" in text["invariant"]
    assert "up to rounding" in text["fast"] and "every bit of it" not in text["fast"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("vnode",))
    sharded = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("vnode")))
    step = vnode.virtualize(lambda s, x: s["w"] + x.sum(), virtual_nodes=2, partition="xla").on(jax.devices()[:2])
    assert "s['w']" in str(vnode.explain(step, {"w": sharded}, jnp.ones((4, 3)), devices=1))


def test_comparisons_take_placements_devices_and_meshes() -> None:
    step, args = vnode.virtualize(mlp, virtual_nodes=4).on(jax.devices()[:2]), mlp_arguments()
    devices = jax.devices()
    uneven = vnode.Placement(4, devices[:3], counts=[1, 0, 3])
    assert [r.counts for r in reports_of(step, *args, devices=uneven)] == [(1, 0, 3)]
    assert [r.counts for r in reports_of(step, *args, devices=[uneven, 3])] == [(1, 0, 3), (2, 1, 1)]
    assert [r.counts for r in reports_of(step, *args, devices=devices[:4])] == [(1,) * 4]
    assert [r.counts for r in reports_of(step, *args, devices=np.array([1, 2]))] == [(4,), (2, 2)]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 4), ("vnode", "model"))
    assert [r.counts for r in reports_of(step, *args, devices=mesh)] == [(2, 2)]


@pytest.mark.parametrize("devices", [0, -1, True, 10**9, "8", [], [1, 0], 2.5, {}, [2, "8"], object()])
def test_devices_that_are_none_are_refused(devices: Any) -> None:
    step = vnode.virtualize(mlp, virtual_nodes=4)
    with pytest.raises(vnode.PlacementError):
        vnode.explain(step, *mlp_arguments(), devices=devices)


def test_placements_for_other_steps_are_refused() -> None:
    step = vnode.virtualize(mlp, virtual_nodes=4, lanes=2)
    for placement in (vnode.Placement(5, jax.devices()[:2]), vnode.Placement(4, jax.devices()[:2], counts=[1, 3])):
        with pytest.raises(vnode.PlacementError):
            vnode.explain(step, *mlp_arguments(), devices=placement)


def test_steps_that_are_not_virtualized_are_refused() -> None:
    with pytest.raises(vnode.VnodeError, match=r"takes a virtualized step, not <function mlp"):
        vnode.explain(mlp, *mlp_arguments(), devices=2)


def test_temporary_memory_is_the_compilers() -> None:
    """Where there are as many devices; of others nothing is said."""
    step, args = vnode.virtualize(mlp, virtual_nodes=4).on(jax.devices()[:2]), mlp_arguments()
    answer = vnode.explain(step, *args, devices=64, compile=True)
    measured = step.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert [r.temporary for r in answer.reports] == [measured, None]
    (row,) = [row.values for row in answer.rows if row.name == "temporary memory"]
    assert row[1] == "-" and float(row[0].split()[0]) > 0
    assert "temporary" not in str(vnode.explain(step, *args, devices=64))


def test_methods_and_nnx_steps_can_be_compared() -> None:
    from flax import nnx

    class Trainer:
        rate = 0.1

        @vnode.virtualize(virtual_nodes=4, in_axes=(None, None, 0))
        def step(self, w: jax.Array, x: jax.Array) -> jax.Array:
            return w - self.rate * x.sum(0)

    trainer = Trainer()
    assert [r.waves for r in reports_of(trainer.step, jnp.ones(3), jnp.ones((8, 3)), devices=[1, 2])] == [4, 2]

    @vnode.nnx.virtualize(virtual_nodes=4, in_axes=(None, 0))
    def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    answer = vnode.explain(loss, model, jnp.ones((8, 3)), devices=2, compile=True)
    assert answer.others[0].waves == 2 and answer.others[0].temporary is not None


def test_comparisons_draw_themselves() -> None:
    from tests.test_show import notebook, terminal

    step = vnode.virtualize(mlp, virtual_nodes=4).on(jax.devices()[:2])
    for devices in (3, [1, 64]):
        answer = vnode.explain(step, *mlp_arguments(), devices=devices)
        whole = notebook(answer)
        for text in (terminal(answer, 140), whole.of("div", "vnode")[0]["text"], str(answer)):
            for row in answer.rows:
                assert row.name in text and all(value in text for value in row.values)
    strong = {cell["text"] for cell in whole.of("td", "strong")}
    assert {"4", "1", "2.00x", "0.50x"} <= strong and "1.00x" not in strong


@pytest.mark.parametrize("prompt", ["<stdin>", "<python-input-3>"])
def test_lines_typed_at_a_prompt_are_the_users(prompt: str) -> None:
    """Neither is what a library of theirs does there, nor what a library generated, whose name is like a prompt's."""
    session: dict[str, Any] = {"optax": optax}
    exec(compile("def norm(x):\n    return optax.tree.norm(x)\n", "<generated>", "exec"), session)
    exec(compile("def step(w, x):\n    return w, norm(x @ w)\n", prompt, "exec"), session)
    assert f" {prompt}:2 (step)" in words(explain(session["step"], jnp.ones(3), normal(8, 3)))
