"""States sharded over the axis of the nodes (ZeRO): collectives of the compiled step, its bits, and what cannot be cut.

Knows meshes and compiled programs. Must not know how a step is divided. Results are compared with the step as written.
"""

from __future__ import annotations

import collections
import functools
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vnode
from tests.rounding import assert_same
from vnode.runtime import node_loops, one_pass
from vnode.spmd import resharding_collectives

ALL = os.environ.get("VNODE_TEST_ALL") == "1"

WIDTH, HIDDEN = 48, 192
NAMES = {"in": (WIDTH, HIDDEN), "bias": (HIDDEN,), "out": (HIDDEN, WIDTH)}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"] - x) ** 2)


def trained_by(optimizer: Any) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss_fn)(state["params"], x)
        updates, slots = optimizer.update(grads, state["slots"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "slots": slots}

    return step


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, eps=1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3)),
    "every second step": optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 2).gradient_transformation(),
    "lamb": optax.lamb(1e-2, eps=1e-3),
    "minima": optax.sm3(1e-1),
    "if finite": optax.apply_if_finite(optax.adam(1e-2, eps=1e-3), 3),
    "in turns": optax.stateless_with_tree_map(lambda g, _: in_turns(g)),
    "orthogonal": optax.stateless_with_tree_map(lambda g, _: orthogonal(g) if g.ndim == 2 else -0.1 * g),
    "quotients": optax.stateless_with_tree_map(lambda g, _: quotient(g)),
    "products": optax.stateless_with_tree_map(
        lambda g, _: (g @ g.T)[:1, :1] * g - 0.1 * g if g.ndim == 2 else -0.1 * g
    ),
}


def quotient(grad: jax.Array) -> jax.Array:
    """By one number, in a branch and outside of it."""
    norm = jnp.linalg.norm(grad)
    return jax.lax.cond(norm > 1e-3, lambda g: -0.1 * g / norm, lambda g: -0.1 * g, grad) / (norm + 1)


def in_turns(grad: jax.Array) -> jax.Array:
    """Single elements, in a loop."""
    return jax.lax.fori_loop(0, 3, lambda _, u: 1.5 * u + 0.3 * jnp.tanh(grad) * u**2, -0.1 * grad)


def orthogonal(grad: jax.Array) -> jax.Array:
    """Rows and columns together, in a loop, as in Muon."""
    return jax.lax.fori_loop(
        0, 3, lambda _, u: 1.5 * u - 0.5 * u @ u.T @ u, -0.1 * grad / (jnp.linalg.norm(grad) + 1e-3)
    )


def mesh_of(nodes: int, model: int) -> jax.sharding.Mesh:
    shape, names = ((nodes, model), ("data", "model")) if model > 1 else ((nodes,), ("data",))
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[: nodes * model])


def spec_of(name: str, layout: str) -> PartitionSpec:
    if len(NAMES[name]) == 1:
        return PartitionSpec("data")
    match layout:
        case "rows":
            return PartitionSpec("data", None)
        case "columns":
            return PartitionSpec(None, "data")
        case "both":
            return PartitionSpec("data", "model") if name == "in" else PartitionSpec("model", "data")
        case "together":
            return PartitionSpec(("data", "model"), None) if name == "in" else PartitionSpec(("model", "data"), None)
    raise AssertionError(layout)


def sharded(state: Any, layout: str, over: jax.sharding.Mesh, stage: int = 3) -> Any:
    """ZeRO's third stage shards parameters and the optimizer's slots, its first only these."""

    def put(path: Any, leaf: Any) -> Any:
        keys = [getattr(entry, "key", None) for entry in path]
        name = next((key for key in reversed(keys) if key in NAMES), None)
        whole = name is None or leaf.shape != NAMES[name] or (stage == 1 and keys[0] == "params")
        sharding = NamedSharding(over, PartitionSpec() if whole else spec_of(name, layout))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree_util.tree_map_with_path(put, state)


def state_of(optimizer: Any) -> Any:
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32) for name, shape in NAMES.items()}
    return {"params": params, "slots": optimizer.init(params)}


def examples() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(48, WIDTH)), jnp.float32)


@pytest.mark.sampled(2)
@pytest.mark.quickly
@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("adamw", "rows"),
        ("clipped", "columns"),
        ("every second step", "both"),
        ("lamb", "together"),
        ("if finite", "both"),
        ("in turns", "rows"),
        ("orthogonal", "columns"),
    ],
)
def test_updates_of_shards(optimizer: str, layout: str) -> None:
    """As written; what comes back is sharded as it came."""
    chosen, over = OPTIMIZERS[optimizer], mesh_of(4, 2 if layout in ("both", "together") else 1)
    step, state, x = trained_by(chosen), state_of(chosen), examples()
    virtual = vnode.virtualize(step, virtual_nodes=8, placement=vnode.Placement(8, mesh=over, axis="data"))
    given = sharded(state, layout, over)
    made = virtual(given, x)
    assert_same(made, step, state, x)
    for before, after in zip(jax.tree.leaves(given), jax.tree.leaves(made), strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)


@pytest.mark.sampled(1, thorough=1)
@pytest.mark.parametrize("layout", ["rows", "columns", "both", "together"])
def test_what_is_made_of_all_shards_keeps_its_bits(layout: str) -> None:
    """Sums over dimensions that are sharded, products, running sums: on 1, 2, 4 and 8 devices, or 1, 2 and 4 by 2."""

    def step(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss_fn)(params, x)
        moved = jax.tree.map(lambda p, g: p - 0.1 * jnp.tanh(g), params, grads)
        norms = [jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))) for tree in (grads, moved)]
        rows = [jnp.sqrt(jnp.sum(moved["in"] ** 2, axis)) for axis in (0, 1)]
        whole = jnp.round(1000 * moved["in"]).astype(jnp.int32)
        counts = jnp.sum(moved["in"] > 0), jnp.all(jnp.isfinite(moved["out"])), whole.max(0), whole.sum(1), whole.min()
        products = moved["in"] @ moved["out"], (grads["in"] @ grads["in"].T)[0]
        return norms, rows, products, jnp.cumsum(grads["bias"]), jnp.max(moved["out"]), counts

    model, x = 2 if layout in ("both", "together") else 1, examples()
    params, seen = state_of(OPTIMIZERS["adamw"])["params"], []
    for nodes in (1, 2, 4, 8)[: 4 if model == 1 else 3]:
        over = mesh_of(nodes, model)
        virtual = vnode.virtualize(step, virtual_nodes=8, placement=vnode.Placement(8, mesh=over, axis="data"))
        made = virtual(sharded({"params": params}, layout, over)["params"], x)
        if nodes == 1:
            assert_same(made, step, params, x)
        seen.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(made)])
    assert all(bits == seen[0] for bits in seen)


LAYOUTS = (("rows", 3), ("columns", 1), ("both", 3))
USUAL = {
    *(("adamw", "columns"), ("clipped", "both"), ("every second step", "rows"), ("lamb", "rows")),
    *(
        ("if finite", "rows"),
        ("in turns", "columns"),
        ("orthogonal", "rows"),
        ("products", "rows"),
        ("quotients", "rows"),
        ("minima", "both"),
    ),
}
"""Each optimizer once, each layout at least once: norms of all leaves over both axes, of each leaf over one."""


@pytest.mark.sampled(1, thorough=3)
@pytest.mark.parametrize(
    ("optimizer", "layout", "stage"),
    [
        pytest.param(name, *each, marks=[] if (name, each[0]) in USUAL else pytest.mark.sweep)
        for name in OPTIMIZERS
        for each in LAYOUTS
    ],
)
def test_updates_keep_their_bits(optimizer: str, layout: str, stage: int) -> None:
    """Several steps, as slots are zero in the first; on up to 8 devices, or up to 4 by 2, sharded and not."""
    chosen, model, x, seen = OPTIMIZERS[optimizer], 2 if layout == "both" else 1, examples(), []
    several = (1, 2, 3, 4, 8) if ALL else (1, 3, 8) if model == 1 else (1, 3, 4)
    cases = [(nodes, True) for nodes in several if nodes * model <= 8]
    for nodes, cut in [*cases, *([(n, False) for n in ((1, 4) if ALL else (4,))] if model == 1 else [])]:
        over = mesh_of(nodes, model)
        placement = vnode.Placement(8, mesh=over, axis="data")
        virtual = vnode.virtualize(trained_by(chosen), virtual_nodes=8, placement=placement)
        state = sharded(state_of(chosen), layout, over, stage) if cut else state_of(chosen)
        for _ in range(3):
            state = virtual(state, x)
        seen.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)])
    assert all(bits == seen[0] for bits in seen)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("optimizer", "width", "results"),
    [(optax.contrib.dadapt_adamw(1.0), 8, 8), (optax.lamb(1e-2, weight_decay=0.1), 6, 24)],
    ids=["dadapt", "lamb"],
)
def test_sums_of_what_is_computed_and_kept_have_their_bits(
    optimizer: optax.GradientTransformation, width: int, results: int
) -> None:
    """A sum of a slot's new values, or of updates: one device reads them, others gather what they come from."""
    rng, shapes = np.random.default_rng(0), {"in": (width, 24), "out": (24, results)}
    params = {name: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(size=(4, 24, width)), jnp.float32)
    y = x if results == width else jnp.asarray(rng.normal(size=(4, 24, results)), jnp.float32)

    def step(state: Any, batch: Any) -> Any:
        x, y = batch
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - y) ** 2))(state["params"])
        updates, slots = optimizer.update(grads, state["slots"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "slots": slots}

    seen = []
    for nodes, entries in ((1, (None, "data")), (2, (None, "data")), (2, ()), (1, ())):
        over = NamedSharding(mesh_of(nodes, 1), PartitionSpec(*entries))
        virtual = vnode.virtualize(step, virtual_nodes=8, placement=vnode.Placement(8, mesh=over.mesh, axis="data"))
        state = {"params": params, "slots": optimizer.init(params)}
        state = jax.tree.map(lambda leaf, to=over: jax.device_put(leaf, to) if leaf.ndim else leaf, state)
        for batch in zip(x, y, strict=True):
            state = virtual(state, batch)
        seen.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)])
    assert all(bits == seen[0] for bits in seen)


def test_a_factored_slot_divided_over_the_nodes_has_its_bits() -> None:
    """Adafactor's statistic of columns, whose mean scales the update; the matrix is divided over another axis as well.

    One device along the nodes does not divide the slot, and must not add it up otherwise for that.
    """

    def step(state: Any, x: jax.Array) -> Any:
        weights, _ = state
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
        slot = jnp.mean(grads**2, axis=0)
        return (weights - 0.1 * grads * jnp.mean(slot), slot), jnp.mean(slot)

    rng, x, seen = np.random.default_rng(1), examples(), []
    draws = [(jnp.asarray(rng.normal(size=(WIDTH, 16)), jnp.float32), jnp.zeros(16)) for _ in range(6)]
    for nodes in (1, 2):
        virtual = vnode.virtualize(
            step,
            virtual_nodes=8,
            placement=vnode.Placement(8, mesh=mesh_of(nodes, 4), axis="data"),
            partition={"^0$": PartitionSpec("data", "model"), "^1$": PartitionSpec("data")},
        )
        made = [virtual(virtual.put(state), x) for state in draws]
        seen.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(made)])
    assert seen[0] == seen[1]
    np.testing.assert_allclose(made[0][1], step(draws[0], x)[1], rtol=1e-5)


LENGTHS = (8, 16, 24, 64, 72, 256, 1000, 4096)
FUNCTIONS = (
    *(jnp.tanh, jnp.exp, jnp.log1p, jnp.expm1, jnp.sin, jnp.cbrt, jnp.arctan, jax.lax.rsqrt),
    *(jax.nn.gelu, jax.nn.sigmoid, jax.scipy.special.erf, lambda v: v**1.7),
)


@pytest.mark.thorough
def test_elements_are_rounded_alike_in_parts_of_any_length() -> None:
    """Products that are added, quotients, functions, narrow types; of vectors short and long, whole and in shards."""
    rng = np.random.default_rng(0)
    params = {str(n): jnp.asarray(rng.normal(size=n), jnp.float32) for n in LENGTHS}
    slots = {name: jnp.asarray(rng.normal(size=leaf.shape) ** 2, jnp.float32) for name, leaf in params.items()}
    x = jnp.asarray(rng.normal(size=(16, 3)), jnp.float32)

    def moved(p: jax.Array, g: jax.Array, second: jax.Array) -> jax.Array:
        value = p
        for function in FUNCTIONS:
            value = value * 0.37 + function(jnp.abs(value) + 0.1) * g * 1.1 - p * second / (jnp.sqrt(second) + 1e-3)
        return (value * 0.3 + 0.2).astype(jnp.bfloat16).astype(jnp.float32) * 1.1 + p * g

    def step(state: Any, x: jax.Array) -> Any:
        params, slots = state
        grads = jax.grad(lambda p: sum(jnp.mean(jnp.sin(x[:, :1] * v * 3.3)) for v in p.values()))(params)
        slots = jax.tree.map(lambda m, g: m * 0.9 + 0.1 * g * g, slots, grads)
        return jax.tree.map(moved, params, grads, slots), slots

    seen = []
    for nodes in (1, 2, 4, 8) if ALL else (1, 2, 8):
        over = mesh_of(nodes, 1)
        virtual = vnode.virtualize(step, virtual_nodes=8, placement=vnode.Placement(8, mesh=over, axis="data"))
        for spec in (PartitionSpec(), PartitionSpec("data")):
            state = jax.device_put((params, slots), NamedSharding(over, spec))
            for _ in range(2):
                state = virtual(state, x)
            seen.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)])
    assert all(bits == seen[0] for bits in seen)


def of_constants(state: Any, x: jax.Array) -> Any:
    """What is added to gradients is computed of nothing, or of what the step holds itself."""
    held = np.random.default_rng(3).normal(size=(WIDTH, HIDDEN)).astype(np.float32)

    def noise(name: str, g: jax.Array) -> jax.Array:
        counted = jnp.arange(g.size, dtype=g.dtype).reshape(g.shape)
        if name == "in":
            return 0.0137 * jnp.tanh(held) + 0.01 * jax.lax.erf_inv(0.9 * jnp.sin(counted * 0.77))
        return 0.1137 * jax.lax.broadcasted_iota(g.dtype, g.shape, g.ndim - 1) + 0.3331 * g + 1e-3 * counted

    grads = jax.grad(loss_fn)(state, x)
    return {name: p - 0.1 * (grads[name] + noise(name, grads[name])) for name, p in state.items()}


def of_gradients(state: Any, x: jax.Array) -> Any:
    """Functions of gradients alone, whose last bits are those of what comes back."""
    grads = jax.grad(loss_fn)(state, x)
    return {name: p - 0.1 * jnp.sin(grads[name] * 7) * jnp.exp(grads[name]) for name, p in state.items()}


@pytest.mark.sampled(2, thorough=4)
@pytest.mark.parametrize("given", ["as it is", "sharded", "by patterns"])
@pytest.mark.parametrize("step", [of_constants, of_gradients])
@pytest.mark.parametrize("model", [1, 2])
def test_one_device_along_the_nodes_computes_as_several(step: Any, given: str, model: int) -> None:
    """An axis of one device divides nothing, and XLA does not name it; and one device sees all of a constant."""
    params, x, seen = state_of(OPTIMIZERS["adamw"])["params"], examples(), []
    for nodes in (1, 2, 8 // model):
        over = mesh_of(nodes, model)
        placement = vnode.Placement(8, mesh=over, axis="data")
        specs = {"in": PartitionSpec("data", None), "bias": PartitionSpec("data"), "out": PartitionSpec(None, "data")}
        virtual = vnode.virtualize(
            step, virtual_nodes=8, placement=placement, partition={} if given == "sharded" else specs
        )
        state = params
        if given == "sharded":
            state = {name: jax.device_put(leaf, NamedSharding(over, specs[name])) for name, leaf in params.items()}
        elif given == "by patterns":
            state = virtual.put(params)
        for _ in range(3):
            state = virtual(state, x)
        assert {name: leaf.sharding.spec for name, leaf in state.items()} == specs
        seen.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)])
    assert all(bits == seen[0] for bits in seen)


@pytest.mark.quickly
@pytest.mark.parametrize("order", [("model", "data"), ("data", "model")], ids=str)
def test_concatenated_and_cut_over_two_axes(order: tuple[str, ...]) -> None:
    """Blocks of 8 that are moved: along the other axis they are cut by elements, and along the nodes' further."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(x * params["short"]) @ params["long"].reshape(8, 2)) ** 2)

        grads = jax.grad(loss)(params)
        both = jnp.concatenate([grads["short"], grads["long"]])
        both = both * jnp.tanh(both)
        return {"short": params["short"] - both[:8], "long": params["long"] - both[8:]}

    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=n), jnp.float32) for name, n in (("short", 8), ("long", 16))}
    x = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    placement = vnode.Placement(8, mesh=mesh_of(2, 2), axis="data")
    virtual = vnode.virtualize(
        step, virtual_nodes=8, placement=placement, partition={"short|long": PartitionSpec(order)}
    )
    assert_same(virtual(virtual.put(params), x), jax.jit(step), params, x)


def collectives(compiled: Any) -> dict[str, list[int]]:
    """Elements of the results of a compiled program's collectives, by kind; of more than a hundred each."""
    found = collections.defaultdict(list)
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    for types, kind in re.findall(rf"= (.*?) ({kinds})\(", compiled.as_text()):
        for dims in re.findall(r"f32\[([\d,]*)\]", types):
            elements = int(np.prod([int(n) for n in dims.split(",") if n]))
            if elements > 100:
                found[kind].append(elements)
    return {kind: sorted(sizes) for kind, sizes in found.items()}


@pytest.mark.parametrize("name", ["adamw", "every second step"])  # the latter in a branch
@pytest.mark.parametrize("stage", [1, 3])
def test_collectives_are_reduce_scatter_and_gather(stage: int, name: str) -> None:
    """With sums in any order: gradients are added into shards, updates are of shards, parameters are gathered."""
    optimizer, over = OPTIMIZERS[name], mesh_of(8, 1)
    state = sharded(jax.eval_shape(functools.partial(state_of, optimizer)), "rows", over, stage)
    x = jax.ShapeDtypeStruct((48, WIDTH), jnp.float32)
    virtual = vnode.virtualize(
        trained_by(optimizer), virtual_nodes=8, placement=vnode.Placement(8, mesh=over, axis="data"), reduction="fast"
    )
    found = collectives(virtual.lower(state, x).compile())
    matrix = WIDTH * HIDDEN
    assert found.pop("reduce-scatter") == [matrix // 8] * 2
    gathered = found.pop("all-gather")
    assert [n for n in gathered if n >= matrix] == [matrix] * 2
    assert found.pop("all-reduce", []) in ([], [HIDDEN])  # of the bias, which is too small to be worth a scatter
    assert not found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("nodes", "name"), [(8, "adamw"), (8, "every second step"), (8, "if finite"), (6, "")])
def test_invariant_sums_are_scattered(nodes: int, name: str) -> None:
    """In the order of the tree: in groups where devices hold full trees, else by chunks; nothing is gathered again."""
    optimizer, over = OPTIMIZERS[name or "adamw"], mesh_of(8 if nodes == 8 else 3, 1)
    if nodes == 6:  # three devices
        names = {"in": (48, 96 * 4)}
        state = {
            "in": jax.ShapeDtypeStruct(names["in"], jnp.float32, sharding=NamedSharding(over, PartitionSpec("data")))
        }

        def step(params: Any, x: jax.Array) -> Any:
            grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["in"]) ** 2))(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        x, matrix = jax.ShapeDtypeStruct((12, 48), jnp.float32), 48 * 96 * 4
    else:
        state = sharded(jax.eval_shape(functools.partial(state_of, optimizer)), "rows", over)
        step, x, matrix = trained_by(optimizer), jax.ShapeDtypeStruct((48, WIDTH), jnp.float32), WIDTH * HIDDEN
    placement = vnode.Placement(nodes, mesh=over, axis="data")
    found = collectives(vnode.virtualize(step, virtual_nodes=nodes, placement=placement).lower(state, x).compile())
    if nodes == 8:
        assert found.pop("reduce-scatter") == [matrix // 2] * 2  # a tree of two, then four branches
        assert sum(found.pop("all-to-all")) == matrix
        assert found.pop("collective-permute") == [matrix // 8] * 2
    else:
        assert sum(found.pop("all-to-all")) == matrix  # in three chunks
    assert [n for n in found.pop("all-gather") if n >= matrix // 2] == [matrix] * (2 if nodes == 8 else 1)
    assert not found


def normalized(x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, 0)
    return (x - mean) * jax.lax.rsqrt(jnp.mean((x - mean) ** 2, 0) + 1e-3)


@pytest.mark.sampled(0, thorough=1)
@pytest.mark.parametrize("model", [1, 2])
@pytest.mark.parametrize("reduction", ["invariant", "fast"])
def test_what_waits_on_tpus_keeps_its_bits(reduction: str, model: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes gather what they read when others have been summed, and have room from then on; run on CPUs here."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            hidden = jax.nn.relu(normalized(jnp.tanh(x @ params["in"])))
            return jnp.mean((normalized(hidden @ params["out"]) @ params["back"] - x) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    rng = np.random.default_rng(0)
    shapes = {"in": (WIDTH, 512), "out": (512, 256), "back": (256, WIDTH)}
    assert min(4 * a * b for a, b in list(shapes.values())[:2]) >= resharding_collectives.MUCH  # others do not wait
    params = {name: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32) for name, shape in shapes.items()}
    x, seen = examples(), {False: set[bytes](), True: set[bytes]()}
    waited: list[int] = []
    convert_after = resharding_collectives.convert_after

    def counted(value: Any, *rest: Any) -> Any:
        waited.append(len(rest[-1]))
        return convert_after(value, *rest)

    monkeypatch.setattr(one_pass, "convert_after", counted)
    for early in (False, True):
        waited.clear()
        monkeypatch.setattr(node_loops, "ROOM_EARLY", frozenset({"cpu"} if early else ()))
        for nodes in (1, 2, 4, 8)[: 4 if model == 1 else 3]:
            over = mesh_of(nodes, model)
            specs = [PartitionSpec("data", "model" if model > 1 else None), PartitionSpec(None, "data")]
            places = dict(zip(shapes, [*specs, PartitionSpec()], strict=True))
            given = {name: jax.device_put(leaf, NamedSharding(over, places[name])) for name, leaf in params.items()}
            placement = vnode.Placement(8, mesh=over, axis="data")
            made = vnode.virtualize(step, virtual_nodes=8, placement=placement, reduction=reduction)(given, x)
            assert_same(made, step, params, x)
            seen[early].add(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(made)))
        assert any(waited) == early
    if reduction == "invariant":
        assert len(seen[False]) == 1 and seen[True] == seen[False]


@pytest.mark.quickly
def test_what_cannot_be_divided_is_computed_whole() -> None:
    """A primitive that nobody has described, and host code, in what is computed once."""

    def step(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss_fn)(params, x)
        shape = jax.ShapeDtypeStruct(params["in"].shape, jnp.float32)
        turned = jax.pure_callback(lambda g: np.sort(np.asarray(g), 0), shape, grads["in"], vmap_method="sequential")
        update = {**grads, "in": turned + jnp.linalg.qr(grads["out"].T)[1]}
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, update)

    def plain(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss_fn)(params, x)
        update = {**grads, "in": jnp.sort(grads["in"], 0) + jnp.linalg.qr(grads["out"].T)[1]}
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, update)

    over, x = mesh_of(4, 2), examples()
    params = state_of(OPTIMIZERS["adamw"])["params"]
    virtual = vnode.virtualize(step, virtual_nodes=8, placement=vnode.Placement(8, mesh=over, axis="data"))
    assert_same(virtual(sharded({"params": params}, "both", over)["params"], x), plain, params, x)


@pytest.mark.quickly
@pytest.mark.parametrize("layout", ["rows", "both"])
@pytest.mark.parametrize("reduction", ["fast", "invariant"])
def test_derivatives_from_outside(reduction: str, layout: str) -> None:
    """Of a maximum over what is sharded, too."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return loss_fn(params, x) * jnp.max(params["in"] ** 2) + jnp.sum(jnp.sin(params["out"])) / 128

    over, x, params = mesh_of(4, 2 if layout == "both" else 1), examples(), state_of(OPTIMIZERS["adamw"])["params"]
    placement = vnode.Placement(8, mesh=over, axis="data")
    virtual = vnode.virtualize(loss, virtual_nodes=8, placement=placement, reduction=reduction)
    given = sharded({"params": params}, layout, over)["params"]
    assert_same(jax.grad(virtual)(given, x), jax.grad(loss), params, x)


DIVISORS = {
    "a row": lambda w, row: jnp.broadcast_to(row[None], w.shape),
    "a norm of columns": lambda w, row: jnp.broadcast_to(jnp.linalg.norm(w, axis=0, keepdims=True), w.shape) + 1e-8,
    "tiles": lambda w, row: jnp.tile(row[None], (len(w), 1)),
    "an outer product": lambda w, row: jnp.outer(jnp.ones(len(w)), row),
    "a number": lambda w, row: jnp.full_like(w, row.sum()),
    "ones times a number": lambda w, row: jnp.ones_like(w) * row.sum(),
    "a number or one": lambda w, row: jnp.where(row[0] > 0, row.sum(), jnp.ones_like(w)),
    "quotients of broadcasts": lambda w, row: sum(
        jnp.broadcast_to(numbers, w.shape) / (row[None] * jnp.ones_like(w)) for numbers in (row[:1], w[:, :1] ** 2 + 1)
    ),
    "a root": lambda w, row: jnp.sqrt(row.sum() ** 2 + jnp.zeros_like(w)),
}


def test_divisors_that_are_broadcasts() -> None:
    """XLA multiplies by the reciprocal of a broadcast that two quotients share, if it sees that it is one."""

    def step(state: Any, x: jax.Array) -> Any:
        return {
            name: w / d + w * w / d
            for name, w in state.items()
            for d in [DIVISORS[name](w, jnp.abs(jnp.tanh(x @ w)).sum(0))]
        }

    x, rng, seen = examples(), np.random.default_rng(0), collections.Counter[bytes]()
    state = {name: rng.normal(size=(WIDTH, 64)).astype(np.float32) for name in DIVISORS}
    for nodes, spec in (
        (1, None),
        (1, PartitionSpec("data")),
        (4, PartitionSpec("data")),
        (2, PartitionSpec(None, "data")),
    ):
        over = mesh_of(nodes, 1)
        given = jax.device_put(state, NamedSharding(over, spec or PartitionSpec()))
        placement = vnode.Placement(8, mesh=over, axis="data")
        made = vnode.virtualize(step, virtual_nodes=8, placement=placement)(given, x)
        seen[b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(made))] += 1
    assert_same(made, step, state, x)
    assert len(seen) == 1
