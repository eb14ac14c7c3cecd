"""What a virtualized step becomes: its loops, what is in them, at which sizes, and what is outside.

Knows jaxprs of the virtualized step and the compiled text. Must not know how they are made: every assertion is about
the program that comes out, and holds for any way of making one that is as good.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vnode
from vnode.runtime import small_sums

pytestmark = pytest.mark.quickly

BATCH = 24
NODES = 4
COLLECTIVES = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_to_all", "reduce_scatter", "ppermute"}


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), dtype)


def program(step: Any, *args: Any, nodes: int = NODES, devices: int = 2, **options: Any) -> Any:
    """The jaxpr of a virtualized step; unless said otherwise that of the plain loop, without a tree."""
    options = {"reduction": "fast", **options}
    virtual = vnode.virtualize(step, virtual_nodes=nodes, **options).on(jax.devices()[:devices])
    return jax.make_jaxpr(virtual)(*args).jaxpr


def equations(jaxpr: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every equation at any depth, with the names of the equations around it."""
    for eqn in jaxpr.eqns:
        yield path, eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, (*path, eqn.primitive.name))


def in_node(path: tuple[str, ...]) -> bool:
    """Whether an equation is evaluated by nodes: in a loop on the devices."""
    return "shard_map" in path and bool({"scan", "while"} & set(path[path.index("shard_map") :]))


def loops(jaxpr: Any) -> list[Any]:
    """The loops over nodes, in order."""
    return [
        eqn
        for path, eqn in equations(jaxpr)
        if eqn.primitive.name in ("scan", "while") and path and path[-1] == "shard_map"
    ]


def shapes(jaxpr: Any) -> list[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    """Where, by what and in which shape every value is made."""
    return [
        (path, eqn.primitive.name, var.aval.shape)
        for path, eqn in equations(jaxpr)
        for var in eqn.outvars
        if hasattr(var.aval, "shape")
    ]


def products(jaxpr: Any) -> list[tuple[bool, tuple[int, ...]]]:
    """For every matrix product whether nodes do it, and its shape."""
    return [(in_node(path), shape) for path, name, shape in shapes(jaxpr) if name == "dot_general"]


def mlp(params: Any, x: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def mlp_arguments(batch: int = BATCH, dtype: Any = jnp.float32) -> Any:
    return {"w1": normal(3, 5, dtype=dtype), "w2": normal(5, 2, dtype=dtype)}, normal(batch, 3, dtype=dtype)


def masked(params: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        losses = jnp.tanh(jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"])
        return (losses.sum(-1) * batch["mask"]).sum() / batch["mask"].sum()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


# Loops


@pytest.mark.parametrize("devices", [1, 2])
def test_one_loop_for_a_step_without_coupling(devices: int) -> None:
    jaxpr = program(mlp, *mlp_arguments(), devices=devices)
    (loop,) = loops(jaxpr)
    assert loop.primitive.name == "scan" and loop.params["length"] == NODES // devices
    assert all(inside for inside, _ in products(jaxpr))


def test_the_loop_over_the_mask_holds_no_product() -> None:
    params, x = mlp_arguments()
    jaxpr = program(masked, params, {"x": x, "mask": jnp.ones(BATCH)}, recompute_budget=10.0)
    counting, model = loops(jaxpr)
    assert "dot_general" not in str(counting.params["jaxpr"])
    assert "dot_general" in str(model.params["jaxpr"])


def test_optimizer_and_clipping_run_once() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(state: Any, x: jax.Array) -> Any:
        params, slots = state
        grads = jax.grad(lambda p: mlp(p, x)[1])(params)
        updates, slots = tx.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots

    params, x = mlp_arguments()
    jaxpr = program(step, (params, tx.init(params)), x)
    roots = [in_node(path) for path, eqn in equations(jaxpr) if eqn.primitive.name == "sqrt"]
    assert roots and not any(roots)
    (loop,) = loops(jaxpr)
    assert loop.params["length"] == NODES // 2


def test_work_on_parameters_alone_is_hoisted() -> None:
    def step(params: Any, x: jax.Array) -> jax.Array:
        w = jnp.linalg.matrix_power(params["w"], 3).astype(jnp.bfloat16)
        return (x.astype(jnp.bfloat16) @ w).sum()

    jaxpr = program(step, {"w": normal(3, 3)}, normal(BATCH, 3))
    per_node = [shape for inside, shape in products(jaxpr) if inside]
    once = [shape for inside, shape in products(jaxpr) if not inside]
    assert per_node == [(BATCH // NODES, 3)]
    assert once and set(once) == {(3, 3)}


@pytest.mark.parametrize("nodes", [2, 4, 8, 12])
def test_programs_for_other_numbers_of_nodes_differ_in_nothing_but_the_loop(nodes: int) -> None:
    def skeleton(nodes: int) -> list[tuple[tuple[str, ...], str]]:
        return [(path, eqn.primitive.name) for path, eqn in equations(program(mlp, *mlp_arguments(), nodes=nodes))]

    def outside(nodes: int) -> list[Any]:
        return [entry for entry in shapes(program(mlp, *mlp_arguments(), nodes=nodes)) if "shard_map" not in entry[0]]

    assert skeleton(nodes) == skeleton(2)
    assert outside(nodes) == outside(2)
    (loop,) = loops(program(mlp, *mlp_arguments(), nodes=nodes))
    assert loop.params["length"] == nodes // 2


def test_a_larger_batch_of_more_nodes_is_the_same_node() -> None:
    """What a device holds at a time depends on the size of a node only."""

    def node_shapes(nodes: int) -> collections.Counter[Any]:
        jaxpr = program(mlp, *mlp_arguments(6 * nodes), nodes=nodes)
        return collections.Counter((name, shape) for path, name, shape in shapes(jaxpr) if in_node(path))

    assert node_shapes(2) == node_shapes(4) == node_shapes(8)


# Sizes


def allowed_whole(jaxpr: Any) -> set[str]:
    """Equations that only pass a batched value on: calls and loops that return one, the order of the nodes' results."""
    return {"jit", "pjit", "shard_map", "custom_jvp_call", "reshape", "transpose", "slice"}


def of_batch_size(jaxpr: Any, batch: int) -> list[Any]:
    """Values that have a dimension of the batch's size or a multiple of it, and are not just passed on."""
    return [
        (path, name, shape)
        for path, name, shape in shapes(jaxpr)
        if name not in allowed_whole(jaxpr) and any(n and n % batch == 0 for n in shape)
    ]


RANDOM_STEPS = {
    "dropout": lambda key, x: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0).sum(0),
    "noise": lambda key, x: x + jax.random.normal(key, x.shape),
    "flat noise": lambda key, x: x + jax.random.normal(key, (x.size,)).reshape(x.shape),
    "a key for each example": lambda key, x: jax.vmap(lambda k, row: row * jax.random.uniform(k, row.shape))(
        jax.random.split(key, x.shape[0]), x
    ),
    "positions": lambda key, x: x * jnp.arange(x.shape[0])[:, None],
    "weights": lambda key, x: (x * (jnp.ones(x.shape[0]) / x.shape[0])[:, None]).sum(0),
    "one-hot positions": lambda key, x: (x * (jnp.arange(x.shape[0]) == 5)[:, None]).sum(0),
    "own elements": lambda key, x: x[jnp.arange(x.shape[0]), jnp.argmax(x, 1)],
    "a mask for layers in a scan": lambda key, x: over_layers(key, x, jnp.where),
    "a mask for layers in scans": lambda key, x: over_layers(key, over_layers(key, x, jnp.where), jnp.where),
    "a mask in a branch": lambda key, x: over_layers(
        key, x, lambda mask, a, b: jax.lax.cond(jax.random.uniform(key) < 2, lambda: jnp.where(mask, a, b), lambda: a)
    ),
    "a mask in a loop while": lambda key, x: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, over_layers(key, c[1], jnp.where)), (0, x)
    )[1],
}


def over_layers(key: jax.Array, x: jax.Array, use: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Layers in a scan that read a mask from around it, the same for all examples."""
    mask = jnp.broadcast_to(jax.random.bernoulli(key, 0.5, x.shape[1:]), x.shape)
    return jax.lax.scan(lambda h, w: (use(mask, jnp.tanh(w * h), h), None), x, jnp.arange(1.0, 4.0))[0]


@pytest.mark.parametrize("name", RANDOM_STEPS)
def test_nothing_is_made_at_the_size_of_the_batch(name: str) -> None:
    batch = 7 * 8  # a multiple of nothing else here
    jaxpr = program(RANDOM_STEPS[name], jax.random.key(0), normal(batch, 3), devices=1)
    assert of_batch_size(jaxpr, batch) == []
    assert any(in_node(path) for path, _, _ in shapes(jaxpr))
    assert_as_plain(RANDOM_STEPS[name], jax.random.key(0), normal(batch, 3))


def test_what_a_loop_reads_whole_and_in_part_is_given_whole() -> None:
    def step(key: jax.Array, x: jax.Array) -> jax.Array:
        return over_layers(key, x, lambda mask, a, b: jnp.where(mask, a, b) * mask[:1].sum())

    assert_as_plain(step, jax.random.key(0), normal(7 * 8, 3))


def assert_as_plain(step: Callable[..., jax.Array], *args: jax.Array) -> None:
    virtual = vnode.virtualize(step, virtual_nodes=7, reduction="fast")
    np.testing.assert_allclose(virtual(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-6)


def test_dropout_of_a_network_is_drawn_per_node() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dropout(0.5, deterministic=False)(nn.relu(nn.Dense(5)(x)))
            return nn.Dropout(0.3, deterministic=False)(nn.Dense(2)(x))

    net = Net()
    batch = 7 * 8
    x = normal(batch, 3)
    params = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def step(state: Any, x: jax.Array) -> Any:
        params, key = state
        grads = jax.grad(lambda p: jnp.mean(net.apply(p, x, rngs={"dropout": key}) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), jax.random.split(key)[0]

    jaxpr = program(step, (params, jax.random.key(2)), x, devices=1)
    assert of_batch_size(jaxpr, batch) == []


def test_the_check_for_sizes_sees_what_is_whole() -> None:
    """A sort over the batch cannot be done in parts: the checks above would not pass it."""
    batch = 7 * 8
    jaxpr = program(lambda w, x: jnp.sort(x, axis=0), 0.0, normal(batch, 3), devices=1)
    assert any(name == "sort" for _, name, _ in of_batch_size(jaxpr, batch))


def test_contrastive_loss_holds_activations_per_node() -> None:
    """Of the whole batch there are embeddings and similarities; never what is between input and embedding."""
    batch, hidden, width = 7 * 8, 11, 3

    def step(params: Any, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            z = jnp.tanh(x @ params["w1"]) @ params["w2"]
            return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(batch)).mean()

        return jax.grad(loss_fn)(params)

    params = {"w1": normal(3, hidden), "w2": normal(hidden, width)}
    jaxpr = program(step, params, normal(batch, 3), recompute_budget=10.0)
    whole = {shape for _, _, shape in of_batch_size(jaxpr, batch)}
    gathered = [shape for _, name, shape in shapes(jaxpr) if name == "all_gather"]
    assert gathered and all(np.prod(shape) == batch * width for shape in gathered) and (batch, batch) in whole
    assert {(batch, width), (width, batch)} & {shape for *_, shape in shapes(jaxpr)}
    assert not any(hidden in shape for shape in whole)


@pytest.mark.parametrize("batch", [16, 14])
def test_contrastive_loss_of_concatenated_views_gathers_embeddings_only(batch: int) -> None:
    """The gradient of the embeddings is divided as the views' activations are: each node's part of both views.

    The last of four nodes has padding if the batch has 14 examples.
    """
    hidden = 11

    def step(params: Any, a: jax.Array, b: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            h = jnp.tanh(jnp.concatenate([a, b]) @ params["w1"])
            z = jnp.tanh(h @ params["w2"]) @ params["w3"]
            labels = jnp.roll(jnp.arange(2 * batch), batch)
            return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    params = {"w1": normal(3, hidden), "w2": normal(hidden, hidden), "w3": normal(hidden, 2)}
    virtual = vnode.virtualize(step, virtual_nodes=NODES)
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, normal(batch, 3), normal(batch, 3) + 1))
        report = virtual.on(jax.devices()[:1]).explain(*args)
        assert report.all_passes == 2 and {line.bytes for line in report.gathered} == {8 * 2 * batch * 2}
        results = [virtual.on(jax.devices()[:devices])(*args) for devices in (1, 3)]
        for one, three, plain in zip(*map(jax.tree.leaves, (*results, jax.jit(step)(*args))), strict=True):
            np.testing.assert_array_equal(one, three)
            np.testing.assert_allclose(one, plain, rtol=1e-12, atol=1e-13)


# Accumulators


def carried(loop: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Dtype and shape of what a loop over nodes carries, for a step that returns nothing per example.

    Its turns are counted, besides.
    """
    turns, *totals = loop.outvars
    assert (turns.aval.dtype, turns.aval.shape) == (np.int32, ())
    return [(var.aval.dtype, var.aval.shape) for var in totals]


@pytest.mark.parametrize(
    ("dtype", "option", "accumulator"),
    [
        (jnp.bfloat16, None, jnp.float32),
        (jnp.float16, None, jnp.float32),
        (jnp.float32, None, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        (jnp.float32, jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, "float32", jnp.float32),
    ],
)
def test_dtype_of_accumulators(dtype: Any, option: Any, accumulator: Any) -> None:
    (loop,) = loops(program(mlp, *mlp_arguments(dtype=dtype), accumulate_dtype=option))
    kinds = {kind for kind, _ in carried(loop)}
    assert kinds == {jnp.dtype(accumulator)}


def test_dtype_of_accumulators_in_float64() -> None:
    with jax.enable_x64(True):
        for dtype, option in ((jnp.float32, jnp.float64), (jnp.float64, None)):
            (loop,) = loops(program(mlp, *mlp_arguments(dtype=dtype), accumulate_dtype=option))
            assert {kind for kind, _ in carried(loop)} == {jnp.dtype(jnp.float64)}


def test_counts_and_extremes_keep_their_dtype() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return (x > 0).sum(), x.max(), (x > 0).any()

    args = normal(3), normal(BATCH, 3, dtype=jnp.bfloat16)
    (loop,) = loops(program(step, *args, accumulate_dtype=jnp.float32))
    assert collections.Counter(kind.name for kind, _ in carried(loop)) == {"int32": 1, "bfloat16": 1, "bool": 1}


def test_results_have_the_dtype_of_the_step() -> None:
    args = mlp_arguments(dtype=jnp.bfloat16)
    got = jax.eval_shape(vnode.virtualize(mlp, virtual_nodes=NODES), *args)
    assert got == jax.eval_shape(mlp, *args)


def test_one_accumulator_for_gradients_that_are_added() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss_fn(w: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(x @ w) @ w.T)

        return w - jax.grad(loss_fn)(w)

    (loop,) = loops(program(step, normal(3, 5), normal(BATCH, 3)))
    assert len(carried(loop)) == 1


@pytest.mark.parametrize(
    ("nodes", "devices", "held"),
    [
        (1, 1, 1),
        (8, 8, 1),
        (8, 4, 1),
        (8, 2, 2),
        (8, 1, 2),
        (16, 1, 3),
        (16, 2, 2),
        (32, 8, 2),
        (64, 1, 3),
        (64, 4, 3),
        (64, 8, 2),
        (256, 1, 4),
    ],
)
def test_sums_that_an_invariant_reduction_holds(
    nodes: int, devices: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by hand: that which is being formed, one for each level above the pairs, and what is to be sent."""
    monkeypatch.setattr(small_sums, "LARGEST", 0)
    params, x = mlp_arguments(2 * nodes)
    jaxpr = program(mlp, params, x, nodes=nodes, devices=devices, reduction="invariant")
    for shape in ((3, 5), (5, 2)):
        found = [kept for _, kept in carried(loops(jaxpr)[0]) if kept[-2:] == shape]
        assert sum(int(np.prod(kept[:-2])) for kept in found) == held


@pytest.mark.parametrize("lanes", [4, 2, 1])
def test_devices_with_a_lane_each_hold_no_pending_sum(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_sums, "LARGEST", 0)
    params, x = mlp_arguments(128)
    jaxpr = program(mlp, params, x, nodes=64, devices=lanes, reduction="invariant", lanes=lanes)
    held = [kept for _, kept in carried(loops(jaxpr)[0]) if kept[-2:] == (3, 5)]
    assert [int(np.prod(kept[:-2])) for kept in held] == [1]  # the sum itself


def test_the_same_bits_take_little_more_memory_than_fast_sums() -> None:
    """Of a step whose memory is its gradients': the running sum, and a pending one on a device with 8 nodes.

    Nodes are small here, so that what one of them makes is small beside the sums.
    """

    def step(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"]))(w)

    width = 128
    w = {name: normal(width, width) for name in "abc"}
    gradients = 3 * width * width * 4
    x = normal(32, width)

    def temporary(**options: Any) -> int:
        virtual = vnode.virtualize(step, virtual_nodes=8, **options).on(jax.devices()[:1])
        return virtual.lower(w, x).compile().memory_analysis().temp_size_in_bytes

    fast, invariant = temporary(reduction="fast"), temporary()
    assert fast < invariant <= fast + 1.2 * gradients
    assert temporary(lanes=1) <= 1.2 * fast


def test_an_invariant_reduction_accumulates_in_the_same_dtypes() -> None:
    args = mlp_arguments(dtype=jnp.bfloat16)
    loop = loops(program(mlp, *args, reduction="invariant", devices=1))[0]
    pieces = 3 * 5 + 5 * 2 + 1  # of a node, side by side: both gradients and the loss
    assert [kind.name for kind, shape in carried(loop) if shape == (pieces,)] == ["float32"]


# Collectives


def crossings(step: Any, *args: Any, counts: list[int], **options: Any) -> list[str]:
    """The compiled program's lines in which devices exchange values."""
    placement = vnode.Placement(sum(counts), jax.devices()[: len(counts)], counts=counts)
    virtual = vnode.virtualize(step, virtual_nodes=sum(counts), placement=placement, **options)
    text = virtual.lower(*args).compile().as_text()
    return [
        line
        for line in text.splitlines()
        if re.search(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(", line)
    ]


@pytest.mark.parametrize("counts", [[2, 2], [3, 1], [4, 0]])
def test_one_reduction_for_each_pass_outside_its_loop(counts: list[int]) -> None:
    params, x = mlp_arguments()
    (line,) = crossings(mlp, params, x, counts=counts, reduction="fast")
    assert "all-reduce" in line and "/while/" not in line
    batch = {"x": x, "mask": jnp.ones(BATCH)}
    lines = crossings(masked, params, batch, counts=counts, reduction="fast", recompute_budget=10.0)
    assert len(lines) == 2 and not any("/while/" in line for line in lines)


def test_no_collective_in_a_loop_whatever_the_reduction() -> None:
    lines = crossings(mlp, *mlp_arguments(), counts=[2, 2, 2, 2], reduction="invariant")
    assert lines and not any("/while/" in line for line in lines)


# Names


def test_name_stacks_and_source_lines_are_kept() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(2, name="head")(jnp.tanh(nn.Dense(5, name="stem")(x)))

    net = Net()
    x = normal(BATCH, 3)
    params = net.init(jax.random.key(0), x)

    def step(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.mean(net.apply(p, x) ** 2))(params)
        with jax.named_scope("update"):
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    virtual = vnode.virtualize(step, virtual_nodes=NODES).on(jax.devices()[:2])
    text = virtual.lower(params, x).compile().as_text()
    names = re.findall(r'op_name="([^"]*)"', text)
    for scope in ("jvp(Net)/stem", "jvp(Net)/head", "transpose(jvp(Net))/head", "update"):
        assert any(scope in name for name in names), scope
    assert any(name.endswith("dot_general") and "/while/body/" in name and "stem" in name for name in names)
    assert not any("/while/" in name and "update" in name.split("/") for name in names)
    lowered = virtual.lower(params, x).as_text(debug_info=True)
    assert f"module @jit_{step.__name__} " in lowered
    assert "test_passes.py" in lowered


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("epochs", [1, 2])
def test_an_epoch_in_the_step_holds_no_copy_of_its_data(devices: int, epochs: int) -> None:
    """A loop that picks minibatches from an argument, around passes of its own, reads it where it lies.

    So it does in a loop of such loops, and where devices hold different numbers of nodes.
    """
    size, rows = 64, 64

    def epoch(w: jax.Array, x: jax.Array) -> jax.Array:
        def update(i: jax.Array, w: jax.Array) -> jax.Array:
            batch = jax.lax.dynamic_slice_in_dim(x, i * rows, rows)
            return w - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)

        return jax.lax.fori_loop(0, x.shape[0] // rows, update, w)

    def train(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, epochs, lambda _, w: epoch(w, x), w) if epochs > 1 else epoch(w, x)

    x = jnp.ones((64 * rows, size))
    step = vnode.virtualize(train, virtual_nodes=8).on(jax.devices()[:devices])
    held = step.lower(jnp.ones((size, 2)), x).compile().memory_analysis().temp_size_in_bytes
    assert held < x.nbytes / 4


@pytest.mark.parametrize(("count", "divided"), [(3, True), (12, False)])
def test_minibatches_of_a_reshaped_batch_are_divided_among_the_nodes(count: int, divided: bool) -> None:
    """They are taken in order, each by all nodes together, unless most of these would have no example of it."""

    def epoch(w: jax.Array, x: jax.Array) -> jax.Array:
        def update(w: jax.Array, part: jax.Array) -> Any:
            return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(part @ w) ** 2))(w), None

        return jax.lax.scan(update, w, x.reshape(count, -1, 5))[0]

    w, x = normal(5, 2), normal(BATCH, 5)
    virtual = vnode.virtualize(epoch, virtual_nodes=NODES).on(jax.devices()[:1])
    assert [len(inner.passes) for inner in virtual.explain(w, x).nested] == [1] * divided
    np.testing.assert_allclose(virtual(w, x), jax.jit(epoch)(w, x), rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "chunks", "nodes", "passes", "rematerialized"),
    [
        (24, 12, 4, 1, True),  # a node has three chunks of two examples
        (24, 6, 4, 1, True),  # two chunks of four examples; the last node has none
        (24, 6, 4, 1, False),
        (9, 12, 3, 1, True),  # four chunks of three quarters of an example
        (12, 3, 4, 3, True),  # fewer chunks than nodes: a chunk's tokens are divided, in passes of its own
    ],
)
def test_chunks_of_several_examples_are_divided(
    batch: int, chunks: int, nodes: int, passes: int, rematerialized: bool
) -> None:
    """A loss is summed over chunks of flattened tokens, and each chunk's share is returned."""
    tokens, features, words = 4, 3, 7

    def step(w: jax.Array, x: jax.Array, y: jax.Array, mask: jax.Array) -> Any:
        def chunk_loss(w: jax.Array, h: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
            logits = h @ w
            chosen = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
            return (mask * (jax.nn.logsumexp(logits, 1) - chosen)).sum()

        part = jax.checkpoint(chunk_loss) if rematerialized else chunk_loss

        def loss_fn(w: jax.Array) -> Any:
            def turn(total: Any, chunk: Any) -> Any:
                loss = part(w, *chunk)
                return total + loss, loss

            chunked = (a.reshape(chunks, -1, *a.shape[2:]) for a in (jnp.sin(x), y, mask))
            return jax.lax.scan(turn, 0.0, tuple(chunked))

        (loss, losses), grad = jax.value_and_grad(loss_fn, has_aux=True)(w)
        return w - 0.1 * grad, loss, losses

    with jax.enable_x64(True):
        rng = np.random.default_rng(batch)
        w, x = rng.standard_normal((features, words)), rng.standard_normal((batch, tokens, features))
        y, mask = rng.integers(0, words, (batch, tokens)), rng.integers(0, 2, (batch, tokens)).astype(float)
        virtual = vnode.virtualize(step, virtual_nodes=nodes)
        report = virtual.on(jax.devices()[:1]).explain(w, x, y, mask)
        assert sum(inner.all_passes for inner in report.nested) + len(report.passes) == passes
        assert report.pass_flops > 0.9 * report.flops
        results = [virtual.on(jax.devices()[:devices])(w, x, y, mask) for devices in (1, 2, 3)]
        for one, two, three, plain in zip(*results, jax.jit(step)(w, x, y, mask), strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, three)
            np.testing.assert_allclose(one, plain, rtol=1e-12, atol=1e-13)


def test_a_loop_over_chunks_stays_whole_where_passes_would_repeat_too_much_of_it() -> None:
    """A loss is divided by a count that its loop carries: with turns of their own, nodes would repeat the loop."""

    def step(w: jax.Array, x: jax.Array, mask: jax.Array) -> Any:
        def loss_fn(w: jax.Array) -> jax.Array:
            def turn(carry: Any, chunk: Any) -> Any:
                x, mask = chunk
                h = x @ w
                loss = (mask * jax.nn.logsumexp(h + jax.nn.softmax(h, 0), 1)).sum()
                return (carry[0] + loss, carry[1] + mask.sum()), None

            (total, count), _ = jax.lax.scan(turn, (0.0, 0.0), (x.reshape(8, 3, 4), mask.reshape(8, 3)))
            return total / count

        loss, grad = jax.value_and_grad(loss_fn)(w)
        return w - 0.1 * grad, loss

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        w, x, mask = rng.standard_normal((4, 5)), rng.standard_normal((24, 4)), rng.uniform(size=24)
        for one, plain in zip(vnode.virtualize(step, virtual_nodes=4)(w, x, mask), step(w, x, mask), strict=True):
            np.testing.assert_allclose(one, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("add", "initial", "split"),
    [
        (lambda sum, term: sum + term.sum(), 0.0, True),  # jax converts the weakly typed sum to its own type
        (lambda sum, term: jax.lax.optimization_barrier(sum) + term, np.zeros(5, np.float32), True),
        (lambda sum, term: sum[::-1] + term, np.zeros(5, np.float32), False),  # the order of the examples matters
    ],
    ids=["weak type", "barrier", "reversal"],
)
def test_a_loop_over_examples_that_carries_a_sum_is_divided(add: Any, initial: Any, split: bool) -> None:
    """Also if the body hands the sum on unchanged before it adds to it."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda sum, row: (add(sum, jnp.tanh(row * w)), None), initial, x)[0]

    w, x = normal(5), normal(BATCH, 5)
    virtual = vnode.virtualize(step, virtual_nodes=NODES)
    assert virtual.on(jax.devices()[:1]).explain(w, x).all_passes == split
    results = [np.asarray(virtual.on(jax.devices()[:devices])(w, x)) for devices in (1, 3)]
    np.testing.assert_array_equal(*results)
    np.testing.assert_allclose(results[0], jax.jit(step)(w, x), rtol=1e-5)


def test_a_sum_that_begins_with_zeros_from_outside_of_the_step_is_one_over_nodes() -> None:
    """As with zeros made in the step: a loop over time that adds up a loss takes one pass."""
    zeros, ones = jnp.zeros(()), jnp.ones(())

    def train(initial: jax.Array) -> Any:
        def step(w: jax.Array, x: jax.Array) -> jax.Array:
            def loss_fn(w: jax.Array) -> jax.Array:
                return jax.lax.scan(
                    lambda sum, part: (sum + jnp.tanh(part @ w).sum(), None), initial, x.swapaxes(0, 1)
                )[0]

            loss, grad = jax.value_and_grad(loss_fn)(w)
            return w - 0.1 * grad, loss

        return step

    w, x = normal(5, 2), normal(BATCH, 3, 5)
    virtual = vnode.virtualize(train(zeros), virtual_nodes=NODES)
    assert virtual.on(jax.devices()[:1]).explain(w, x).all_passes == 1
    results = [virtual.on(jax.devices()[:devices])(w, x) for devices in (1, 3)]
    for one, three, plain in zip(*results, jax.jit(train(zeros))(w, x), strict=True):
        np.testing.assert_array_equal(one, three)
        np.testing.assert_allclose(one, plain, rtol=1e-5)
    loss = vnode.virtualize(train(ones), virtual_nodes=NODES).on(jax.devices()[:1])(w, x)[1]
    np.testing.assert_allclose(loss, jax.jit(train(ones))(w, x)[1], rtol=1e-5)


def scan_of_layers(ws: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss of each layer is computed in a call, and added up after the loop."""

    @jax.jit
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w)
        return h, h.mean() ** 2

    h, losses = jax.lax.scan(layer, x, ws)
    return h, losses.sum()


def scan_in_scan(ws: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both loops carry a sum of losses."""

    def turn(carry: Any, _: None) -> Any:
        def layer(carry: Any, w: jax.Array) -> Any:
            h, loss = carry
            h = jnp.tanh(h @ w)
            return (h, loss + h.mean() ** 2), None

        return jax.lax.scan(layer, carry, ws)[0], None

    return jax.lax.scan(turn, (x, jnp.zeros(())), None, length=2)[0]


def while_loop(ws: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The trip count is known from an argument only."""

    def turn(carry: Any) -> Any:
        i, h, loss = carry
        h = jnp.tanh(h @ ws[i])
        return i + 1, h, loss + h.mean() ** 2

    start = jnp.int32(0), x, jnp.zeros(())
    return jax.lax.while_loop(lambda carry: carry[0] < 2 + (ws[0, 0, 0] > 9), turn, start)[1:]


def branch(ws: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def first(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x @ ws[0]), jnp.zeros(())

    def second(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(x @ ws[1])
        return h / 2, h.mean() ** 2 + jax.nn.softmax(h, 0).max()

    return jax.lax.cond(ws[0, 0, 0] > 9, first, second, x)


@pytest.mark.newest
@pytest.mark.parametrize("model", [scan_of_layers, scan_in_scan, while_loop, branch])
def test_unused_results_of_loops_cost_nothing(model: Any) -> None:
    """A loss that is computed in a loop and not added is not computed, and takes no passes in the loop."""

    def train(weight: float) -> Any:
        def step(ws: jax.Array, x: jax.Array) -> Any:
            def loss_fn(ws: jax.Array) -> Any:
                h, loss = model(ws, x)
                return ((h**2).sum() + weight * loss if weight else (h**2).sum()), h

            if model is while_loop:  # has no derivative in reverse mode
                return loss_fn(ws)
            grad, h = jax.grad(loss_fn, has_aux=True)(ws)
            return ws - 0.1 * grad, h

        return step

    ws, x = normal(2, 5, 5), normal(BATCH, 5)
    virtual = vnode.virtualize(train(0.0), virtual_nodes=NODES)
    without, within = (vnode.virtualize(train(w), virtual_nodes=NODES).explain(ws, x) for w in (0.0, 1.0))
    assert without.all_passes == 1 and not without.couplings and not without.kept_around
    assert without.flops < within.flops and within.couplings
    results = [virtual.on(jax.devices()[:devices])(ws, x) for devices in (1, 3)]
    for one, three, plain in zip(*results, jax.jit(train(0.0))(ws, x), strict=True):
        np.testing.assert_array_equal(one, three)
        np.testing.assert_allclose(one, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.newest
def test_effects_of_unused_results_are_kept() -> None:
    """Also arguments that only an unused result reads stay arguments."""
    seen: list[float] = []

    def step(ws: jax.Array, x: jax.Array, unused: jax.Array) -> Any:
        def layer(carry: Any, w: jax.Array) -> Any:
            h, norm = carry
            norm = norm + (w**2).sum() * unused
            jax.debug.callback(lambda value: seen.append(float(value)), norm)
            return (jnp.tanh(h @ w), norm), norm

        return jax.lax.scan(layer, (x, jnp.zeros(())), ws)[0][0].sum()

    ws, x = normal(2, 5, 5), normal(BATCH, 5)
    found = vnode.virtualize(step, virtual_nodes=NODES).on(jax.devices()[:1])(ws, x, jnp.ones(()))
    jax.effects_barrier()
    np.testing.assert_allclose(sorted(set(seen)), np.cumsum((ws**2).sum((1, 2))), rtol=1e-5)
    np.testing.assert_allclose(found, jax.jit(step)(ws, x, jnp.ones(())), rtol=1e-5)
