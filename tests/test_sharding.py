"""Steps that speak of meshes themselves: sharding constraints, explicit axes, mesh contexts, programs per shard.

Knows meshes and how steps are written for them. Must not know how a trace is freed of its mesh. Results are compared
with the step as written, run without vnode, or with the same step without a word about meshes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import vnode
from tests.rounding import assert_same
from vnode.errors import PlacementError, VnodeError

pytestmark = pytest.mark.quickly

BATCH = 16


def mesh(shape: tuple[int, ...], kind: AxisType = AxisType.Auto, names: tuple[str, ...] = ("data", "model")) -> Any:
    names = names[: len(shape)]
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def arguments() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(4, 8)), jnp.float32), jnp.asarray(rng.normal(size=(BATCH, 4)), jnp.float32)


def step_with(constrain: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    """A training step whose hidden layer, a function of examples and weights, is laid out by the user."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(constrain(x, w)) ** 2))(w)
        return w - grad, loss

    return step


SPEC = P("data", "model")
STEPS: dict[str, tuple[AxisType | None, Callable[[jax.Array, jax.Array], jax.Array]]] = {
    "NamedSharding": (None, lambda x, w: lax.with_sharding_constraint(x @ w, NamedSharding(mesh((4, 2)), SPEC))),
    "PartitionSpec": (AxisType.Auto, lambda x, w: lax.with_sharding_constraint(x @ w, SPEC)),
    "reshard": (AxisType.Explicit, lambda x, w: jax.sharding.reshard(x @ w, SPEC)),
    "out_sharding": (AxisType.Explicit, lambda x, w: jnp.einsum("bi,ij->bj", x, w, out_sharding=SPEC)),
    "asks for the mesh": (
        AxisType.Auto,
        lambda x, w: (x @ w) * (1.0 if "model" in jax.sharding.get_abstract_mesh().axis_names else jnp.nan),
    ),
    "nothing": (AxisType.Auto, lambda x, w: x @ w),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("devices", [1, (2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_constraints(name: str, devices: Any) -> None:
    """In the user's own mesh of 4 x 2, whatever the placement."""
    kind, constrain = STEPS[name]
    nodes = 4
    if devices == 1:
        placement = vnode.Placement(nodes, jax.devices()[:1])
    else:
        placement = vnode.Placement(nodes, mesh=mesh(devices), axis="data")
    w, x = arguments()
    virtual = vnode.virtualize(step_with(constrain), virtual_nodes=nodes, placement=placement)
    with jax.set_mesh(mesh((4, 2), kind)) if kind else contextlib.nullcontext():
        first = virtual(w, x)
        second = virtual(first[0], x)
    plain = step_with(lambda x, w: x @ w)
    assert_same(first, plain, w, x)
    assert_same(second, lambda w, x: plain(plain(w, x)[0], x), w, x)


def test_legacy_mesh_context() -> None:
    w, x = arguments()
    placement = vnode.Placement(4, mesh=mesh((4, 2)), axis="data")
    virtual = vnode.virtualize(step_with(STEPS["PartitionSpec"][1]), virtual_nodes=4, placement=placement)
    with pytest.warns(DeprecationWarning), mesh((4, 2)):
        got = virtual(w, x)
    assert_same(got, step_with(lambda x, w: x @ w), w, x)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_arguments_typed_by_explicit_axes(devices: int) -> None:
    w, x = arguments()
    explicit = mesh((4, 2), AxisType.Explicit)
    step = step_with(lambda x, w: x @ w)
    virtual = vnode.virtualize(step, virtual_nodes=4).on(jax.devices()[:devices])
    with jax.set_mesh(explicit):
        got = virtual(jax.device_put(w, P(None, "model")), jax.device_put(x, P("data", None)))
    assert_same(got, step, w, x)


@pytest.mark.parametrize("name", ["nothing", "PartitionSpec"])
def test_checked_in_the_mesh_context(name: str) -> None:
    """The plain step runs on one device, but is understood in the mesh."""
    kind = AxisType.Explicit if name == "nothing" else AxisType.Auto
    w, x = arguments()
    virtual = vnode.virtualize(step_with(STEPS[name][1]), virtual_nodes=4).on(jax.devices()[:2])
    with jax.set_mesh(mesh((4, 2), kind)):
        answer = vnode.check(virtual, (jax.device_put(w, P(None, "model")), jax.device_put(x, P("data", None))))
    assert answer.ok and answer.leaves


def test_compiled_ahead_in_the_mesh_context() -> None:
    """`prepare` compiles in another thread, which has no mesh context of its own."""
    w, x = arguments()
    traces = []

    def constrain(x: jax.Array, w: jax.Array) -> jax.Array:
        traces.append(1)
        return lax.with_sharding_constraint(x @ w, SPEC)

    virtual = vnode.virtualize(step_with(constrain), virtual_nodes=4).on(jax.devices()[:2])
    with jax.set_mesh(mesh((4, 2))):
        virtual.prepare([virtual.placement], w, x).wait()
        ahead = len(traces)
        got = virtual(w, x)
    assert ahead and len(traces) == ahead
    assert_same(got, step_with(lambda x, w: x @ w), w, x)


def test_explain_says_what_is_kept() -> None:
    w, x = arguments()

    def constrain(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = lax.with_sharding_constraint(x @ w, SPEC)
        foreign = NamedSharding(mesh((2,), names=("elsewhere",)), P(None, "elsewhere"))
        return lax.with_sharding_constraint(hidden, foreign)

    virtual = vnode.virtualize(
        step_with(constrain),
        virtual_nodes=4,
        placement=vnode.Placement(4, mesh=mesh((4, 2)), axis="data"),
        partition="xla",
    )
    with jax.set_mesh(mesh((4, 2))):
        report = virtual.explain(w, x)
        lowered = virtual.lower(w, x).as_text()
    said = [line.what for line in report.layouts]
    assert any("over data dropped: carries the examples; model kept inside a node" in what for what in said)
    assert any("over elsewhere dropped: no axis of the placement" in what for what in said)
    assert all("test_sharding.py" in line.where for line in report.layouts) and "asked for by the step" in str(report)
    inside = [line for line in lowered.splitlines() if "sharding_constraint" in line and '"model"' in line]
    assert inside and not any('"data"' in line for line in inside)


@pytest.mark.parametrize("spec", [P(None, "model"), P("model"), P("data", "model"), P("data")], ids=str)
def test_state_comes_back_in_the_same_shards(spec: Any) -> None:
    """Also where the compiler, left alone, would do otherwise: zeros, sums of everything."""
    where = mesh((2, 4))

    def step(state: Any, x: jax.Array) -> Any:
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return {"w": state["w"] - grad, "zero": jnp.zeros_like(state["zero"]), "n": state["n"] + 1}, grad.sum()

    w, x = arguments()
    state = {"w": w, "zero": w, "n": jnp.float32(0)}
    placed = {k: jax.device_put(v, NamedSharding(where, spec if v.ndim else P())) for k, v in state.items()}
    placement = vnode.Placement(4, mesh=where, axis="data")
    out, total = vnode.virtualize(step, virtual_nodes=4, placement=placement)(placed, x)
    for name, given in placed.items():
        assert out[name].sharding.is_equivalent_to(given.sharding, given.ndim), name
    assert_same((out, total), step, state, x)


# Steps as written elsewhere


def language_model(constrain: Callable[[jax.Array, Any], jax.Array], remat: bool) -> tuple[Any, Any, Any]:
    """A small decoder with layers in a scan, its parameters and tokens."""
    rng = np.random.default_rng(1)
    vocabulary, width, layers = 16, 8, 2

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

    params = {
        "embed": normal(vocabulary, width),
        "qkv": normal(layers, width, 3 * width),
        "up": normal(layers, width, 2 * width),
        "down": normal(layers, 2 * width, width),
    }

    def layer(hidden: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        hidden = constrain(hidden, P(("data", "fsdp"), None, None))
        q, k, v = jnp.split(hidden @ weights["qkv"], 3, -1)
        scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), q @ k.mT / np.sqrt(width), -1e9)
        hidden = hidden + jax.nn.softmax(scores) @ v
        inner = constrain(jax.nn.gelu(hidden @ weights["up"]), P(("data", "fsdp"), None, "model"))
        return hidden + inner @ weights["down"], None

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer) if remat else layer
        layers = {name: params[name] for name in ("qkv", "up", "down")}
        hidden, _ = lax.scan(body, params["embed"][tokens[:, :-1]], layers)
        logits = constrain(hidden @ params["embed"].T, P(("data", "fsdp"), None, "model"))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
        real = tokens[:, 1:] > 0
        return -(picked * real).sum() / real.sum()

    def step(params: Any, tokens: jax.Array) -> Any:
        tokens = constrain(tokens, P(("data", "fsdp")))
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, 0.1 / norm)
        new = jax.tree.map(lambda p, g: p - scale * g, params, grads)
        return jax.tree.map(lambda p: constrain(p, P(*[None] * (p.ndim - 1), "model")), new), {"loss": loss}

    return step, params, jnp.asarray(rng.integers(0, vocabulary, (BATCH, 6)))


@pytest.mark.parametrize("style", ["EasyLM", "MaxText"])
def test_language_model(style: str) -> None:
    """EasyLM constrains by names where a mesh is set; MaxText by its own mesh, with layers remade in a scan."""
    names = ("data", "fsdp", "model")
    where = mesh((2, 1, 2), names=names)

    def by_name(value: jax.Array, spec: Any) -> jax.Array:
        known = set(jax.sharding.get_abstract_mesh().axis_names) >= set(names)
        return lax.with_sharding_constraint(value, spec) if known else value

    def by_mesh(value: jax.Array, spec: Any) -> jax.Array:
        return lax.with_sharding_constraint(value, NamedSharding(where, spec))

    constrain = by_name if style == "EasyLM" else by_mesh
    step, params, tokens = language_model(constrain, remat=style == "MaxText")
    plain, *_ = language_model(lambda value, spec: value, remat=style == "MaxText")
    sharded = jax.tree.map(
        lambda p: jax.device_put(p, NamedSharding(where, P(*[None] * (p.ndim - 1), "model"))), params
    )
    virtual = vnode.virtualize(
        step, virtual_nodes=2, recompute_budget=0.5, placement=vnode.Placement(2, mesh=where, axis="data")
    )
    with jax.set_mesh(where):
        got = virtual(sharded, tokens)
    assert_same(got, jax.jit(plain), params, tokens)
    for name, leaf in got[0].items():
        assert leaf.sharding.is_equivalent_to(sharded[name].sharding, leaf.ndim), name


# Programs per shard


def local_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def per_shard(**options: Any) -> Callable[..., Any]:
    options = {"mesh": mesh((4,)), "in_specs": (P(), P("data")), "out_specs": P("data"), **options}
    return lambda f: jax.shard_map(f, **options)


@per_shard(out_specs=(P(), P()))
def gradients(w: jax.Array, x: jax.Array) -> Any:
    loss, grad = jax.value_and_grad(lambda w: lax.pmean(local_loss(w, x), "data"))(w)
    return w - grad, loss


@per_shard(out_specs=(P(), P(), P("data")), check_vma=False)
def replicas(w: jax.Array, x: jax.Array) -> Any:
    """As for pmap: statistics of the replica's own examples, a key of its own, gradients averaged by hand."""
    x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
    loss, grad = jax.value_and_grad(local_loss)(w, x)
    return w - lax.pmean(grad + jax.random.normal(key, grad.shape), "data"), lax.pmean(loss, "data"), x


def differentiated(w: jax.Array, x: jax.Array) -> Any:
    return w - jax.grad(per_shard(out_specs=P())(lambda w, x: lax.pmean(local_loss(w, x), "data")))(w, x)


@per_shard(out_specs=(P("data"),) * 4, check_vma=False)
def exchanges(w: jax.Array, x: jax.Array) -> Any:
    z = x @ w
    everything = lax.all_gather(z, "data", tiled=True)
    moved = lax.ppermute(z, "data", [(i, (i + 1) % 4) for i in range(4)])
    turned = lax.all_to_all(z, "data", 0, 0, tiled=True)
    return jax.nn.softmax(z @ everything.T), moved, turned, lax.psum_scatter(x.T @ x, "data", tiled=True)


@per_shard(mesh=mesh((4, 2)), in_specs=(P(None, "model"), P("data")), out_specs=(P("data"), P(None, "model")))
def two_axes(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> Any:
        y = lax.psum(jnp.tanh(x @ w) @ w.T, "model")
        return lax.pmean(jnp.mean(y**2), "data"), y

    grad, y = jax.grad(loss, has_aux=True)(w)
    return y, w - grad


@per_shard(mesh=mesh((4, 2)), out_specs=P(), axis_names={"data"}, check_vma=False)
def one_axis_of_two(w: jax.Array, x: jax.Array) -> Any:
    x = lax.with_sharding_constraint(x, P(None, "model"))
    return w - lax.pmean(jax.grad(local_loss)(w, x), "data")


@per_shard(out_specs=P(), check_vma=False)
def said_to_agree(w: jax.Array, x: jax.Array) -> Any:
    """Shards differ, against what they say: the first one's result counts."""
    return jnp.mean(x @ w, 0)


PROGRAMS = [gradients, replicas, differentiated, exchanges, two_axes, one_axis_of_two, said_to_agree]
NEWEST = [exchanges]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "program", [pytest.param(p, id=p.__name__, marks=[pytest.mark.newest] * (p in NEWEST)) for p in PROGRAMS]
)
def test_program_per_shard(program: Any) -> None:
    """Means what it means on its own mesh, with the same bits on any devices."""
    w, x = arguments()
    virtual = vnode.virtualize(program, virtual_nodes=4, recompute_budget=2)
    got = [virtual.on(jax.devices()[:n])(w, x) for n in (1, 3)]
    assert_same(got[0], jax.jit(program), w, x)
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(got[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# What cannot be


def pmapped(w: jax.Array, x: jax.Array) -> Any:
    return w - lax.pmean(jax.grad(local_loss)(w, x), "batch")


@pytest.mark.parametrize("how", ["left over", "of pmap", "in pmap"])
def test_pmap_names_the_page(how: str) -> None:
    w, x = arguments()
    run: Any = vnode.virtualize(pmapped, virtual_nodes=4)
    if how == "of pmap":
        run = vnode.virtualize(jax.pmap(pmapped, axis_name="batch", in_axes=(None, 0)), virtual_nodes=4)
    elif how == "in pmap":
        run = jax.pmap(vnode.virtualize(local_loss, virtual_nodes=4), axis_name="batch", in_axes=(None, 0))
    with pytest.raises(VnodeError, match=r"docs/migrating-from-pmap\.md") as raised:
        run(w, x if how == "left over" else x.reshape(8, 2, 4))
    if how == "left over":
        assert "test_sharding.py" in str(raised.value) and "(pmapped)" in str(raised.value)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_part_of_a_program_for_another_mesh(kind: AxisType) -> None:
    w, x = arguments()
    virtual = vnode.virtualize(step_with(lambda x, w: x @ w), virtual_nodes=4).on(jax.devices()[:2])
    with jax.set_mesh(mesh((4, 2), kind)), pytest.raises(PlacementError, match=r"call it outside of jax\.jit"):
        jax.jit(virtual)(w, jax.device_put(x, P("data")))


@pytest.mark.newest
@pytest.mark.parametrize("name", ["nothing", "without a context", "reshard", "out_sharding"])
def test_part_of_a_program_typed_by_explicit_axes(name: str) -> None:
    """A training loop in `jax.jit`: what succeeds the state has its type. The derivative's type is that of `w`."""
    explicit = mesh((4, 2), AxisType.Explicit)
    _, constrain = STEPS.get(name, STEPS["nothing"])
    virtual = vnode.virtualize(
        step_with(constrain), virtual_nodes=4, placement=vnode.Placement(4, mesh=explicit, axis="data")
    )
    w, x = arguments()
    typed = NamedSharding(explicit, P(None, "model"))
    given = jax.device_put(w, typed), jax.device_put(x, NamedSharding(explicit, P("data", None)))

    def train(step: Callable[..., Any], w: jax.Array, x: jax.Array) -> Any:
        return *lax.scan(lambda w, _: step(w, x), w, length=2), jax.grad(lambda w: step(w, x)[1])(w)

    with contextlib.nullcontext() if name == "without a context" else jax.set_mesh(explicit):
        got = jax.jit(partial(train, virtual))(*given)
    assert got[0].sharding == got[2].sharding == typed
    assert_same(got, partial(train, step_with(lambda x, w: x @ w)), w, x)


@pytest.mark.parametrize("how", ["called", "differentiated"])
def test_part_of_a_program_for_more_devices(how: str) -> None:
    """There is no mesh context to say so, only the types of the arguments."""
    w, x = arguments()
    virtual = vnode.virtualize(step_with(lambda x, w: x @ w), virtual_nodes=4).on(jax.devices()[:2])
    run = virtual if how == "called" else jax.grad(lambda w, x: virtual(w, x)[1])
    with pytest.raises(PlacementError, match=r"(?s)mesh of another size.*'data': 4.*call it outside of jax\.jit"):
        jax.jit(run)(w, jax.device_put(x, NamedSharding(mesh((4, 2), AxisType.Explicit), P("data"))))


def test_part_of_a_program_for_the_same_mesh() -> None:
    w, x = arguments()
    placement = vnode.Placement(4, mesh=mesh((4, 2)), axis="data")
    virtual = vnode.virtualize(step_with(STEPS["PartitionSpec"][1]), virtual_nodes=4, placement=placement)
    with jax.set_mesh(mesh((4, 2))):
        got = jax.jit(virtual)(w, x)
    assert_same(got, step_with(lambda x, w: x @ w), w, x)


def test_named_vmap_around() -> None:
    """An axis name that is no mesh's."""
    w, x = arguments()
    step = step_with(lambda x, w: x @ w)
    virtual = vnode.virtualize(step, virtual_nodes=4).on(jax.devices()[:2])
    many = jnp.stack([w, 2 * w])
    got = jax.vmap(partial(virtual), in_axes=(0, None), axis_name="models")(many, x)
    assert_same(got, jax.vmap(step, in_axes=(0, None)), many, x)
