"""Parameters that are sharded themselves: over a model axis, over the node axis (ZeRO), over both.

Knows meshes, shardings and the placement over one axis of a mesh. Must not know how a pass is emitted. Outputs are
compared with the step as written on one device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vnode
from tests.rounding import assert_same, compare, references

OPTIMIZER = optax.adamw(1e-2, eps=1e-3)
WIDTHS = (4, 8, 4)
SPECS = {
    "model": {"in": PartitionSpec(None, "model"), "out": PartitionSpec("model", None)},
    "zero": {"in": PartitionSpec("data", None), "out": PartitionSpec("data", None)},
    "both": {"in": PartitionSpec("data", "model"), "out": PartitionSpec("model", "data")},
}


def step(state: Any, x: jax.Array) -> Any:
    def loss_fn(params: Any) -> Any:
        y = jnp.tanh(x @ params["in"]) @ params["out"]
        return jnp.mean((y - x) ** 2), y

    (loss, y), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, slots = OPTIMIZER.update(grads, state["slots"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, loss, y


def arguments(batch: int = 12) -> tuple[Any, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (WIDTHS[:2], WIDTHS[1:], (batch, WIDTHS[0]))
    first, second, x = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    params = {"in": first, "out": second}
    return {"params": params, "slots": OPTIMIZER.init(params)}, x


def mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def sharded(state: Any, specs: dict[str, PartitionSpec], where: jax.sharding.Mesh) -> Any:
    """Parameters and the optimizer's moments laid out by `specs`, the rest replicated."""

    def put(path: Any, leaf: jax.Array) -> jax.Array:
        name = path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else ""
        return jax.device_put(leaf, NamedSharding(where, specs.get(name, PartitionSpec())))

    return jax.tree_util.tree_map_with_path(put, state)


@pytest.fixture(scope="module")
def two_steps() -> Any:
    """What the step as written returns the first and the second time, and by how much rounding moves that."""
    state, x = arguments()
    once = jax.jit(step)
    return references(once, state, x), references(lambda state, x: once(once(state, x)[0], x), state, x)


@pytest.mark.sampled(3)
@pytest.mark.quickly
@pytest.mark.parametrize("nodes", [4, 6], ids=lambda n: f"V{n}")
@pytest.mark.parametrize("layout", SPECS)
def test_sharded_state(layout: str, nodes: int, two_steps: Any) -> None:
    """Two steps in a row; the second is given what the first returned."""
    state, x = arguments()
    placement = vnode.Placement(nodes, mesh=mesh(), axis="data")
    virtual = vnode.virtualize(step, virtual_nodes=nodes, placement=placement)
    first = virtual(sharded(state, SPECS[layout], mesh()), x)
    compare(first, *two_steps[0])
    compare(virtual(first[0], x), *two_steps[1])


@pytest.mark.quickly
@pytest.mark.parametrize("layout", SPECS)
def test_what_was_sharded_stays_sharded(layout: str) -> None:
    """Or a state that only fits in parts would not fit after the first step."""
    state, x = arguments()
    given = sharded(state, SPECS[layout], mesh())
    placement = vnode.Placement(4, mesh=mesh(), axis="data")
    out, *_ = vnode.virtualize(step, virtual_nodes=4, placement=placement)(given, x)
    for name, spec in SPECS[layout].items():
        for tree in (out["params"], out["slots"][0].mu, out["slots"][0].nu):
            assert tree[name].sharding.is_equivalent_to(NamedSharding(mesh(), spec), ndim=2), name


@pytest.mark.quickly
def test_sharded_batch_is_read_where_it_is(two_steps: Any) -> None:
    state, x = arguments()
    x = jax.device_put(x, NamedSharding(mesh(), PartitionSpec("data")))
    virtual = vnode.virtualize(step, virtual_nodes=4, placement=vnode.Placement(4, mesh=mesh(), axis="data"))
    compare(virtual(sharded(state, SPECS["model"], mesh()), x), *two_steps[0])


@pytest.mark.quickly
def test_nodes_over_the_minor_axis(two_steps: Any) -> None:
    state, x = arguments()
    over = jax.make_mesh((2, 4), ("model", "data"), axis_types=(AxisType.Auto,) * 2)
    virtual = vnode.virtualize(step, virtual_nodes=6, placement=vnode.Placement(6, mesh=over, axis="data"))
    compare(virtual(sharded(state, SPECS["both"], over), x), *two_steps[0])


@pytest.mark.quickly
@pytest.mark.parametrize("layout", SPECS)
def test_explicit_axes(layout: str, two_steps: Any) -> None:
    """`jax.make_mesh` makes them by default: shardings are then part of types."""
    explicit = mesh(AxisType.Explicit)
    state, x = arguments()
    virtual = vnode.virtualize(step, virtual_nodes=4, placement=vnode.Placement(4, mesh=explicit, axis="data"))
    x = jax.device_put(x, NamedSharding(explicit, PartitionSpec("data")))
    first = virtual(sharded(state, SPECS[layout], explicit), x)
    compare(first, *two_steps[0])
    compare(virtual(first[0], x), *two_steps[1])


@pytest.mark.quickly
def test_on_a_mesh_with_the_same_axis(two_steps: Any) -> None:
    state, x = arguments()
    small = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    virtual = vnode.virtualize(step, virtual_nodes=4, placement=vnode.Placement(4, mesh=mesh(), axis="data"))
    smaller = virtual.on(small)
    assert smaller.placement.counts == (2, 2) and smaller is virtual.on(small)
    compare(smaller(sharded(state, SPECS["model"], small), x), *two_steps[0])


@pytest.mark.quickly
def test_from_a_mesh_to_devices_without_one(two_steps: Any) -> None:
    """The sharded state of a large mesh goes on on two devices."""
    state, x = arguments()
    virtual = vnode.virtualize(step, virtual_nodes=4, placement=vnode.Placement(4, mesh=mesh(), axis="data"))
    first = virtual(sharded(state, SPECS["both"], mesh()), x)
    compare(virtual.on(vnode.Placement(4, jax.devices()[:2]))(first[0], x), *two_steps[1])


@pytest.mark.quickly
@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")], ids=str)
def test_devices_in_a_row_keep_the_other_axes(axes: tuple[str, str], two_steps: Any) -> None:
    """What is sharded over them stays so: it was whole on each device, without a word."""
    state, x = arguments()
    lengths = {"data": 4, "model": 2}
    placement = vnode.Placement(4, mesh=elsewhere(tuple(lengths[axis] for axis in axes), *axes), axis="data")
    virtual = vnode.virtualize(step, virtual_nodes=4, placement=placement, partition=PATTERNS)
    state, *_ = virtual(state, x)
    for devices, counts in ((jax.devices()[5:1:-1], (2, 2)), (jax.devices()[:6], (2, 1, 1))):
        there = virtual.on(devices)
        assert there.placement.devices == devices and there.placement.counts == counts
        assert dict(there.placement.mesh.shape) == {"data": len(devices) // 2, "model": 2}
        assert tuple(there.placement.mesh.axis_names) == axes
        got = there(state, x)
        compare(got, *two_steps[1])
        assert got[0]["params"]["in"].sharding.shard_shape((4, 8)) == (4, 4)
    assert virtual.on(jax.devices()) is virtual or axes[0] == "model"
    assert virtual.on(jax.devices()[:6], counts=[0, 3, 1]).placement.counts == (0, 3, 1)
    for bad in (jax.devices()[:1], jax.devices()[:7]):
        with pytest.raises(vnode.PlacementError, match=f"2 does not divide {len(bad)}"):
            virtual.on(bad)
    with pytest.raises(vnode.PlacementError, match="only once"):
        virtual.on(jax.devices()[:1] * 2)
    auto = vnode.virtualize(step, virtual_nodes="auto", memory="1GiB", placement=placement, partition=PATTERNS)
    assert auto.on(jax.devices()[:6]).put(state)["params"]["in"].sharding.shard_shape((4, 8)) == (4, 4)


@pytest.mark.quickly
def test_constraints_within_the_step() -> None:
    """A layout that the user asks of activations over the model axis."""

    def constrained(state: Any, x: jax.Array) -> Any:
        hidden = jax.lax.with_sharding_constraint(
            x @ state["params"]["in"], NamedSharding(mesh(), PartitionSpec("data", "model"))
        )
        return jnp.tanh(hidden).sum(0), hidden

    state, x = arguments()
    virtual = vnode.virtualize(constrained, virtual_nodes=4, placement=vnode.Placement(4, mesh=mesh(), axis="data"))

    def written_out(state: Any, x: jax.Array) -> Any:
        hidden = x @ state["params"]["in"]
        return jnp.tanh(hidden).sum(0), hidden

    assert_same(virtual(sharded(state, SPECS["model"], mesh()), x), written_out, state, x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduction", ["fast", "invariant"])
@pytest.mark.parametrize("spec", [PartitionSpec(None, "model"), PartitionSpec("data", "model")])
def test_what_is_exchanged_in_pieces_is_sliced_elsewhere_too(spec: PartitionSpec, reduction: str) -> None:
    """XLA makes slices of what an all-to-all sends: for CPUs it did not compile where the step has equal ones."""
    where = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def rolled_too(w: jax.Array, x: jax.Array, constrain: Any = lambda x: x) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            turned = w.T
            there = constrain(turned) * 1.1
            rolled = jnp.concatenate([turned[:, 2:], turned[:, :2]], 1)
            return jnp.mean(there**2) + jnp.mean(rolled**2) + jnp.mean(x**2)

        value, slope = jax.value_and_grad(loss)(w)
        return w - 0.1 * slope, value

    def constrained(w: jax.Array, x: jax.Array) -> Any:
        columns = NamedSharding(where, PartitionSpec(None, "model"))
        return rolled_too(w, x, lambda turned: jax.lax.with_sharding_constraint(turned, columns))

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 16), (4, 8)))
    placement = vnode.Placement(4, mesh=where, axis="data")
    virtual = vnode.virtualize(
        constrained, virtual_nodes=4, placement=placement, reduction=reduction, partition={"": spec}
    )
    assert_same(virtual(virtual.put(w), x), rolled_too, w, x)


@pytest.mark.parametrize(("reduction", "across"), [("fast", "all-reduce("), ("invariant", "all-gather(")])
def test_collectives_over_the_model_axis_only_within_the_loop(reduction: str, across: str) -> None:
    """Nodes of one device are run one after another without waiting for those of another."""
    state, x = arguments()
    placement = vnode.Placement(8, mesh=mesh(), axis="data")
    virtual = vnode.virtualize(step, virtual_nodes=8, placement=placement, reduction=reduction)
    text = virtual.lower(sharded(state, SPECS["model"], mesh()), x).compile().as_text()
    inside = [line for line in text.splitlines() if "all-reduce(" in line and "/while/" in line]
    outside = [line for line in text.splitlines() if across in line and "/while/" not in line]
    # Devices 0 and 1 share a place along the node axis, 2 and 3, ...: as compilers write that.
    pairs = "[4,2]<=[8]", "{{0,1},{2,3},{4,5},{6,7}}", "mesh['data'=4,'model'=2] {'model'}"
    assert inside and all(any(f"replica_groups={written}" in line for written in pairs) for line in inside)
    assert outside


PATTERNS = {r"\bin$": PartitionSpec(None, "model"), r"\bout$": PartitionSpec("model", None)}


def elsewhere(shape: tuple[int, ...], *names: str) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


COMING = {
    "the same axes, of other lengths": (elsewhere, (2, 4), ("data", "model"), SPECS["model"]),
    "other axes": (elsewhere, (8,), ("fsdp",), {"in": PartitionSpec(None, "fsdp"), "out": PartitionSpec("fsdp")}),
    "whole": (elsewhere, (8,), ("fsdp",), {}),
}


@pytest.mark.sampled(5)
@pytest.mark.quickly
@pytest.mark.parametrize("donated", [(), 0], ids=["kept", "donated"])
@pytest.mark.parametrize("over", ["two axes", "one axis"])
@pytest.mark.parametrize("coming", COMING)
def test_a_state_of_another_mesh_comes_to_the_own(coming: str, over: str, donated: Any, two_steps: Any) -> None:
    """Its first leaf has no pattern: jax reads how results lie by the mesh of the first argument."""
    state, x = arguments()
    make, shape, names, specs = COMING[coming]
    given = sharded(state, specs, make(shape, *names))
    two = over == "two axes"
    placement = vnode.Placement(4, mesh=mesh(), axis="data") if two else vnode.Placement(4)
    partition = {"out$": PartitionSpec("model", None)} if two else {}
    virtual = vnode.virtualize(step, virtual_nodes=4, placement=placement, partition=partition, donate_argnums=donated)
    if donated == ():
        compare(virtual(virtual.put(given), x), *two_steps[0])
    first = virtual(given, x)
    compare(first, *two_steps[0])
    for was, leaf, there in zip(*map(jax.tree.leaves, (given, state, first[0])), strict=True):
        assert there.sharding.mesh == placement.mesh
        assert was.is_deleted() or np.array_equal(was, leaf)
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(given)):
        with pytest.raises(vnode.VnodeError, match=r"the step donates \w+:"):
            virtual(given, x)
    compare(virtual(first[0], x), *two_steps[1])


@pytest.mark.quickly
@pytest.mark.parametrize("names", [("data", "model"), ("model", "data")], ids=str)
def test_a_state_of_another_mesh_is_put_on_the_own(names: tuple[str, str]) -> None:
    """Also where it lies as it shall, but for the mesh's other axes, and where jax compiles nothing."""
    state, _ = arguments()
    virtual = vnode.virtualize(
        step,
        virtual_nodes=4,
        placement=vnode.Placement(4, mesh=elsewhere((1, 8), "data", "model"), axis="data"),
        partition={"in$": PartitionSpec(None, "model")},
    )
    specs = {"in": PartitionSpec(None, "model"), "out": PartitionSpec("data")}
    given = sharded(state, specs, elsewhere((8, 1) if names[0] == "model" else (2, 4), *names))
    with jax.disable_jit():
        there = virtual.put(given)
    assert all(leaf.sharding.mesh == virtual.placement.mesh for leaf in jax.tree.leaves(there))
    assert there["params"]["in"].sharding.shard_shape((4, 8)) == (4, 1)
    jax.tree.map(np.testing.assert_array_equal, there, state)


@pytest.mark.sampled(2)
@pytest.mark.quickly
@pytest.mark.parametrize(
    ("shape", "spec"), [((8, 1), ("a",)), ((4, 2), ("a",)), ((2, 4), ("a", "b")), ((2, 4), (None, "b"))], ids=str
)
def test_a_batch_of_another_mesh_comes_first(shape: tuple[int, int], spec: Any) -> None:
    """And stays split, along the nodes."""
    _, x = arguments(16)
    given = jax.device_put(x, NamedSharding(elsewhere(shape, "a", "b"), PartitionSpec(*spec)))

    def turned(x: jax.Array, state: Any) -> Any:
        return step(state, x)

    virtual = vnode.virtualize(
        turned,
        virtual_nodes=8,
        in_axes=(0, None),
        placement=vnode.Placement(8, mesh=mesh(), axis="data"),
        partition={"out$": PartitionSpec("model", None)},
    )
    state, _ = arguments()
    assert_same(virtual(given, state), turned, x, state)
    assert given.sharding.mesh != virtual.placement.mesh
    split = virtual.lower(given, state).compile().input_shardings[0][0]
    assert split.mesh == virtual.placement.mesh and not split.is_fully_replicated


@pytest.mark.quickly
def test_patterns_of_names_shard_a_state(two_steps: Any) -> None:
    """A state that comes as numpy arrays, or whole on one device, is placed as the patterns say, slots included."""
    state, x = arguments()
    placement = vnode.Placement(4, mesh=mesh(), axis="data")
    virtual = vnode.virtualize(step, virtual_nodes=4, placement=placement, partition=PATTERNS)
    for given in (state, jax.tree.map(np.asarray, state), virtual.put(state)):
        first = virtual(given, x)
        compare(first, *two_steps[0])
        for tree in (first[0]["params"], first[0]["slots"][0].mu, virtual.put(state)["params"]):
            for name, spec in SPECS["model"].items():
                assert tree[name].sharding.is_equivalent_to(NamedSharding(mesh(), spec), ndim=2), name
    compare(virtual(first[0], x), *two_steps[1])
    compare(virtual.on(vnode.Placement(4, jax.devices()[:2]))(first[0], x), *two_steps[1])  # without the axis


@pytest.mark.quickly
def test_a_step_that_chooses_its_nodes_places_a_state_as_the_patterns_say(two_steps: Any) -> None:
    """It was put whole on every device, before and after the number was chosen."""
    state, x = arguments()
    placement = vnode.Placement(4, mesh=mesh(), axis="data")
    auto = vnode.virtualize(step, virtual_nodes="auto", memory="1GiB", placement=placement, partition=PATTERNS)
    for _ in range(2):
        placed = auto.put(state)
        for tree in (placed["params"], placed["slots"][0].mu):
            for name, spec in SPECS["model"].items():
                assert tree[name].sharding.is_equivalent_to(NamedSharding(mesh(), spec), ndim=2), name
        compare(auto(placed, x), *two_steps[0])
    whole = auto.get(placed)
    jax.tree.map(np.testing.assert_array_equal, whole, state)


@pytest.mark.parametrize(
    ("partition", "error", "message"),
    [
        ({"nowhere": PartitionSpec("model")}, vnode.PlacementError, "'nowhere' matches the name of no leaf"),
        ({"in$": PartitionSpec(None, None, "model")}, vnode.PlacementError, r"divides dimension 2, which no leaf has"),
        ({"in$": PartitionSpec(("data", "model"))}, vnode.PlacementError,
         r"(?s)'params/in' of shape .* 8 does not divide 4.*a mesh with 1 or 2 along 'data'"),
        ({"in$": PartitionSpec(None, "modle")}, vnode.PlacementError, "'modle', which the mesh does not have"),
        ({"in$": PartitionSpec("model", "model")}, ValueError, "'model' can divide one dimension, not two"),
        ({"in$": PartitionSpec(None, unreduced={"model"})}, ValueError, "not as partial sums"),
        ({"in$": PartitionSpec("model", None, None)}, vnode.PlacementError, "for leaves of at least 3 dimensions"),
        ({"in$|out$": PartitionSpec(), "params/in$": PartitionSpec(None, "model")},
         vnode.PlacementError, "never used: every leaf that it matches has an earlier pattern"),
        ({"(": PartitionSpec()}, ValueError, "not a regular expression"),
        ({"in": "model"}, ValueError, "PartitionSpec"),
        ("megatron", ValueError, "one of vnode, xla"),
    ],
)  # fmt: skip
def test_patterns_that_mean_nothing(partition: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        state, x = arguments()
        placement = vnode.Placement(4, mesh=mesh(), axis="data")
        vnode.virtualize(step, virtual_nodes=4, placement=placement, partition=partition)(state, x)


@pytest.mark.quickly
@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ({"in$": PartitionSpec(None, "model"), "i_n": PartitionSpec("model")}, "'i_n' matches the name of no leaf"),
        ({"in$": PartitionSpec(None, None, "model")}, "divides dimension 2, which no leaf has"),
    ],
)
@pytest.mark.parametrize("nodes", [4, "auto"])
def test_a_state_is_not_put_where_patterns_mean_nothing(nodes: Any, partition: Any, message: str) -> None:
    """It was whole on each device, until the call."""
    state, _ = arguments()
    placement = vnode.Placement(4, mesh=mesh(), axis="data")
    with pytest.raises(vnode.PlacementError, match=message):
        vnode.virtualize(
            step,
            virtual_nodes=nodes,
            memory="1GiB" if nodes == "auto" else None,
            placement=placement,
            partition=partition,
        ).put(state)


def correlations(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Of features; `jnp.diagonal` is a branch for each platform, whose derivative keeps some of its results."""
    centered = x @ weights - (x @ weights).mean(0)
    covariances = centered.T @ centered
    deviations = jnp.sqrt(jnp.diagonal(covariances))
    return covariances / deviations / deviations[:, None]


@pytest.mark.sampled(1)
@pytest.mark.quickly
@pytest.mark.parametrize("spec", [PartitionSpec(None, "model"), PartitionSpec("model")], ids=str)
def test_a_branch_is_evaluated_for_its_result_and_for_what_its_derivative_keeps(spec: Any) -> None:
    """One after the other: the second time nobody wants the result, and there is none."""

    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient = jax.grad(lambda w: jnp.sin(correlations(w, x)).sum())(weights)
        return weights - gradient, correlations(weights, x)

    rng = np.random.default_rng(0)
    weights, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((6, 4), (24, 6)))
    placement = vnode.Placement(8, mesh=mesh(), axis="data")
    virtual = vnode.virtualize(
        step, virtual_nodes=8, placement=placement, partition={"": spec}, recompute_budget=float("inf")
    )
    for found, expected in zip(virtual(virtual.put(weights), x), step(weights, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [PartitionSpec("model"), vnode.UnevenSpec(0, "model", (3, 2))], ids=str)
def test_an_array_without_a_name_is_called_so(spec: Any) -> None:
    placement = vnode.Placement(4, mesh=mesh(), axis="data")
    by_itself = vnode.virtualize(step, virtual_nodes=4, placement=placement, partition={"": spec})
    with pytest.raises(vnode.PlacementError, match=r"an array by itself of shape \(7,\)"):
        by_itself.put(jnp.ones(7))


@pytest.mark.quickly
@pytest.mark.parametrize("given", [None, "one axis", "on", "auto"])
def test_axes_that_no_placement_has(given: str | None, two_steps: Any) -> None:
    """What was to be divided was whole on each device; on a mesh with the axes, the step is as it should be."""
    state, x = arguments()
    options: Any = {"placement": vnode.Placement(4)} if given == "one axis" else {}
    options |= {"virtual_nodes": "auto", "memory": "1GiB"} if given == "auto" else {"virtual_nodes": 4}
    made = vnode.virtualize(step, partition=PATTERNS, **options)
    virtual = made.on(jax.devices()[:2]) if given == "on" else made
    for use in (virtual.put, lambda state: virtual(state, x)):
        with pytest.raises(vnode.PlacementError, match="'model', which the mesh does not have"):
            use(state)
    there = made.on(vnode.Placement(4, mesh=mesh(), axis="data"))
    assert there.put(state)["params"]["in"].sharding.shard_shape((4, 8)) == (4, 4)
    compare(there(state, x), *two_steps[0])


def test_a_pattern_may_mean_one_of_two_leaves_of_one_name() -> None:
    """Arguments may have leaves of one name; it was looked at the dimensions of the last of them only."""

    def counting(params: Any, counts: Any, x: jax.Array) -> Any:
        grad = jax.grad(lambda params: jnp.mean((x @ params["in"]) ** 2))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grad), {"in": counts["in"] + 1}

    args = {"in": jnp.eye(8)}, {"in": jnp.zeros(())}, jnp.ones((8, 8))
    placement = vnode.Placement(4, mesh=mesh(), axis="data")
    partition = {"in": PartitionSpec(None, "model")}
    made = vnode.virtualize(
        counting, virtual_nodes=4, in_axes=(None, None, 0), placement=placement, partition=partition
    )
    result = made(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), result, counting(*args))
    assert "model" in str(result[0]["in"].sharding.spec)


def clipped(state: Any, x: jax.Array) -> Any:
    """A step whose update reads a sum over all of the gradient."""

    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - x) ** 2)

    grads = jax.grad(loss_fn)(state["params"])
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))
    updates, slots = optimizer.update(grads, state["slots"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "slots": slots}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", SPECS)
def test_bits_on_any_number_of_devices_along_the_nodes(layout: str) -> None:
    """Three steps on meshes of 1, 2 and 4 by 2, the layout over the model axis being the same."""
    rng = np.random.default_rng(0)
    params = {"in": jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)}
    params["out"] = jnp.asarray(rng.normal(size=(64, 32)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(48, 32)), jnp.float32)
    slots = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3)).init(params)
    seen = []
    for nodes in (1, 2, 4):
        over = jax.make_mesh(
            (nodes, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: 2 * nodes]
        )
        virtual = vnode.virtualize(clipped, virtual_nodes=8, placement=vnode.Placement(8, mesh=over, axis="data"))
        state = sharded({"params": params, "slots": slots}, SPECS[layout], over)
        for _ in range(3):
            state = virtual(state, x)
        seen.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)])
    assert seen[0] == seen[1] == seen[2]


def test_gradients_are_summed_where_they_lie() -> None:
    """Of a gradient that is sharded over the model axis no device ever has more than its shard."""
    width, hidden = 64, 512
    placement = vnode.Placement(4, mesh=mesh(), axis="data")
    shapes = {"in": (width, hidden), "out": (hidden, 48)}

    def plain(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), SPECS["model"][name]))
        for name, shape in shapes.items()
    }
    virtual = vnode.virtualize(plain, virtual_nodes=4, placement=placement, donate_argnums=0)
    compiled = virtual.lower(params, jax.ShapeDtypeStruct((16, width), jnp.float32)).compile()
    text, whole = (
        compiled.as_text(),
        [f"[{width},{hidden}]", f"[{hidden},48]", f"[{width * hidden}]", f"[{hidden * 48}]"],
    )
    assert f"[{width},{hidden // 2}]" in text and not [shape for shape in whole if shape in text]


@pytest.mark.quickly
def test_steps_that_xla_divides_instead(two_steps: Any) -> None:
    state, x = arguments()
    placement = vnode.Placement(4, mesh=mesh(), axis="data")
    virtual = vnode.virtualize(step, virtual_nodes=4, placement=placement, partition="xla")
    compare(virtual(sharded(state, SPECS["model"], mesh()), x), *two_steps[0])


@pytest.mark.quickly
@pytest.mark.parametrize("partition", ["vnode", "xla"])
def test_windows_over_space(partition: str) -> None:
    """Split images: right by vnode's partitioner, refused for XLA's, whose gradients of them are wrong."""
    rng = np.random.default_rng(0)
    kernel, x = jnp.asarray(rng.normal(size=(3, 3, 4, 4)), jnp.float32), jnp.asarray(rng.normal(size=(8, 16, 8, 4)))

    def gradient(kernel: jax.Array, x: jax.Array, over: Any = None) -> jax.Array:
        def loss(kernel: jax.Array) -> jax.Array:
            images = x if over is None else jax.lax.with_sharding_constraint(x, over)
            y = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.mean(jnp.tanh(y) ** 2)

        return jax.grad(loss)(kernel)

    space = NamedSharding(mesh(), PartitionSpec("data", "model"))
    placement = vnode.Placement(4, mesh=mesh(), axis="data")
    virtual = vnode.virtualize(
        lambda kernel, x: gradient(kernel, x, space), virtual_nodes=4, placement=placement, partition=partition
    )
    x = x.astype(jnp.float32)
    if partition == "vnode":
        assert_same(virtual(kernel, x), gradient, kernel, x)
        text = virtual.lower(kernel, x).compile().as_text()
        assert "collective-permute" in text  # halos
        return
    with pytest.raises(vnode.PartitionError, match="split over model, of which XLA's partitioner computes wrong"):
        virtual(kernel, x)


@pytest.mark.quickly
@pytest.mark.parametrize("counts", [(4, 0, 0, 0), (2, 1, 1, 0), (1, 1, 1, 1)], ids=str)
def test_halos_where_nodes_are_at_different_places(counts: tuple[int, ...]) -> None:
    """Devices that compute other nodes have more of them, or take another branch: halos wait for the node's own."""
    rng = np.random.default_rng(0)
    kernel, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 3, 4, 4), (8, 16, 8, 4)))

    def loss(kernel: jax.Array, x: jax.Array, over: Any = None) -> jax.Array:
        images = x if over is None else jax.lax.with_sharding_constraint(x, over)

        def convolved(image: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(
                image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        def each(image: jax.Array) -> jax.Array:
            turns = jnp.where(image.sum() > 0, 3, 1)
            final, _ = jax.lax.while_loop(
                lambda state: state[1] < turns, lambda state: (jnp.tanh(convolved(state[0])), state[1] + 1), (image, 0)
            )
            return final

        return jnp.mean(jnp.tanh(convolved(images)) ** 2) + jnp.mean(jax.lax.map(lambda i: each(i[None]), images) ** 2)

    space = NamedSharding(mesh(), PartitionSpec("data", "model"))
    placement = vnode.Placement(4, mesh=mesh(), axis="data", counts=counts)
    virtual = vnode.virtualize(lambda kernel, x: loss(kernel, x, space), virtual_nodes=4, placement=placement)
    assert_same(virtual(kernel, x), loss, kernel, x)


def test_explain_counts_what_goes_along_the_nodes() -> None:
    """And does not say of a mesh with other axes that nothing is sent inside the loop."""
    state, x = arguments()
    virtual = vnode.virtualize(step, virtual_nodes=4, placement=vnode.Placement(4, mesh=mesh(), axis="data"))
    text = " ".join(str(virtual.explain(sharded(state, SPECS["model"], mesh()), x)).split())
    assert "other axes of the mesh is not counted" in text and "never inside it" not in text


@pytest.mark.sampled(2)
@pytest.mark.quickly
@pytest.mark.parametrize("patterns", [None, {"in": PartitionSpec(None, "data")}], ids=["whole", "by name"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_arrays_on_the_same_devices_in_another_order(kind: AxisType, patterns: Any) -> None:
    """As a restored checkpoint has them, or a loader: a mesh of one's own counts devices in an order of its own."""
    state, x = arguments(16)
    placement = vnode.Placement(8, jax.devices()[::-1], axis="data")
    virtual = vnode.virtualize(step, virtual_nodes=8, placement=placement, partition=patterns or {})
    state, given = (
        sharded(state, SPECS["zero"], mesh(kind)),
        jax.device_put(x, NamedSharding(mesh(kind), PartitionSpec("data"))),
    )
    first = virtual(state, given)
    with jax.set_mesh(mesh(kind)):
        put = virtual(virtual.put(state), given)
    virtual.prepare([virtual.placement], state, given).wait()
    lowered = virtual.lower(state, given).compile()  # takes them as the step moves them
    moved = virtual.put(state), jax.device_put(given, lowered.input_shardings[0][1])
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(lowered(*moved)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(put), strict=True):
        np.testing.assert_array_equal(a, b)
    plain, x = arguments(16)
    assert_same(first, step, plain, x)
