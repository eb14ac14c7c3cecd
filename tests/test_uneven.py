"""Steps whose state is shared out unevenly along an axis of the mesh: values, bits, memory, and what is refused.

Knows steps and what they return. The reference is the step itself on one device.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, PartitionSpec

import vnode
import vnode.partition
from tests.rounding import assert_same
from tests.spmd.test_groups import numbers
from vnode.placement.patterns import name_of

NODES = 8


def mesh_of(nodes: int, model: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: nodes * model]).reshape(nodes, model), ("data", "model"))


def on(
    step: Callable[..., Any],
    partition: Mapping[str, Any],
    nodes: int,
    model: int = 2,
    counts: Sequence[int] | None = None,
    **options: Any,
) -> vnode.VirtualStep[..., Any]:
    options = {"recompute_budget": 1.0, **options}
    placement = vnode.Placement(NODES, mesh=mesh_of(nodes, model), counts=counts, axis="data")
    return vnode.virtualize(step, virtual_nodes=NODES, placement=placement, partition=partition, **options)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3))
"""Sums over all of a state, and slots like parameters."""


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        params, slots = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, slots = OPTIMIZER.update(grads, slots, params)
        return (optax.apply_updates(params, updates), slots), {"loss": value, "norm": optax.tree.norm(grads)}

    return step


def state_of(params: Any) -> Any:
    return params, OPTIMIZER.init(params)


def perceptron(params: Any, x: Any) -> Any:
    return jnp.square(jax.nn.gelu(x @ params["wi"] + params["b"]) @ params["wo"] - x).astype(jnp.float32).mean()


def layers(params: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        return h + jax.nn.gelu(h @ w["wi"] + w["b"]) @ w["wo"], None

    return jnp.square(lax.scan(layer, x, params)[0] - 1).mean()


def lstm(params: Any, x: Any) -> Any:
    """x: [examples, time, features]."""

    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        gates = jnp.einsum("bd,dgh->gbh", x, params["x"]) + jnp.einsum("bk,kgh->gbh", h, params["h"])
        c = jax.nn.sigmoid(gates[0]) * c + jax.nn.sigmoid(gates[1]) * jnp.tanh(gates[2])
        h = jax.nn.sigmoid(gates[3]) * jnp.tanh(c)
        return (h, c), h @ params["out"]

    zeros = jnp.zeros((x.shape[0], params["h"].shape[0]), x.dtype)
    return jnp.square(lax.scan(cell, (zeros, zeros), x.swapaxes(0, 1))[1] - 1).mean()


def normalized(params: Any, x: Any) -> Any:
    """Statistics of hidden units over all examples: two passes, and what is cut is read again in the second."""
    h = x @ params["wi"]
    h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-3) * params["b"]
    return jnp.square(jax.nn.relu(h) @ params["wo"] - x).mean()


def attention(params: Any, x: Any) -> Any:
    """Heads, and hidden units, in the same proportions. x: [examples, words, features]."""
    q, k, v = (jnp.einsum("bsd,dhk->bhsk", x, params["heads"][name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bhsk,bhtk->bhst", q, k) / 2)
    return perceptron(params, x + jnp.einsum("bhst,bhtk,hkd->bsd", weights, v, params["heads"]["o"]))


WI, WO = vnode.UnevenSpec(1, "model", (10, 6)), vnode.UnevenSpec(0, "model", (10, 6))


def contrastive(params: Any, x: Any) -> Any:
    """Every example meets every other one: a value that a pass collects in blocks is read whole between passes."""
    a, b = x @ params["wi"], x @ params["wo"].T
    return jnp.mean((a @ b.T) ** 2 + (a @ a.T) ** 2) / 100 + jnp.mean(jnp.abs(a[:, None] - b))


MLP = {"wi": numbers(4, 16), "b": 1 + numbers(16), "wo": numbers(16, 4)}
HEADS = {**{name: numbers(4, 8, 2) for name in "qkv"}, "o": numbers(8, 2, 4)}
STACK = {"wi": numbers(3, 4, 16), "b": numbers(3, 16), "wo": numbers(3, 16, 4)}
RECURRENT = {"x": numbers(4, 4, 16) / 2, "h": numbers(16, 4, 16) / 4, "out": numbers(16, 4)}
CASES: dict[str, tuple[Callable[..., Any], Any, Any, Mapping[str, Any]]] = {
    "perceptron": (perceptron, MLP, numbers(16, 4), {"wi": WI, "b$": WO, "wo": WO}),
    "one weight is named": (perceptron, MLP, numbers(16, 4), {"wi": WI}),
    "16 bits": (perceptron, jax.tree.map(jnp.bfloat16, MLP), jnp.bfloat16(numbers(16, 4)), {"wi": WI, "wo": WO}),
    "layers": (
        layers,
        STACK,
        numbers(16, 4),
        {"wi": vnode.UnevenSpec(2, "model", (10, 6)), "b$|wo": vnode.UnevenSpec(1, "model", (10, 6))},
    ),
    "lstm": (lstm, RECURRENT, numbers(16, 3, 4), {"/x|/h": vnode.UnevenSpec(2, "model", (10, 6)), "out": WO}),
    "sharded over nodes, too": (perceptron, MLP, numbers(16, 4), {"wi": WI, "b$|wo": PartitionSpec("data")}),
    "heads": (
        attention,
        {"heads": HEADS, **MLP},
        numbers(16, 3, 4),
        {
            "heads/o": vnode.UnevenSpec(0, "model", (5, 3)),
            "heads": vnode.UnevenSpec(1, "model", (5, 3)),
            "wi": WI,
            "b$|wo": WO,
        },
    ),
    "contrastive": (contrastive, {name: MLP[name] for name in ("wi", "wo")}, numbers(16, 4), {"wi": WI}),
    "normalized": (normalized, MLP, numbers(16, 4), {"wi": WI, "b$": WO, "wo": WO}),
}


OPTIMIZED = {"perceptron", "lstm", "16 bits"}
"""Bits are what optimizations may change; those of the others are compared without, which takes less."""


@pytest.mark.sampled(1, thorough=4)
@pytest.mark.parametrize(
    "name",
    [n if n in OPTIMIZED else pytest.param(n, marks=pytest.mark.quickly) for n in CASES],
)
def test_a_step_is_what_it_was_with_the_same_bits_on_any_number_of_devices(name: str) -> None:
    loss, params, x, partition = CASES[name]
    step, bits = trained(loss), []
    for nodes, counts in ((1, None), (2, (5, 3)), (4, None))[: 3 if name == "perceptron" else 2]:
        made = on(step, partition, nodes, counts=counts)
        state = state_of(params)
        state, _ = made(state, x)
        state, metrics = made(state, x)
        bits.append(jax.tree.map(np.asarray, (made.get(state), metrics)))

    def twice(params: Any, x: Any) -> Any:
        return step(step(state_of(params), x)[0], x)

    assert_same(bits[0], jax.jit(twice), params, x)
    for other in bits[1:]:
        assert jax.tree.map(lambda a: a.tobytes(), other) == jax.tree.map(lambda a: a.tobytes(), bits[0])


def gathered(jaxpr: Any) -> list[tuple[int, ...]]:
    """Shapes of what a jaxpr gathers along the axis of unequal devices."""
    found = [
        eqn.invars[0].aval.shape
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "all_gather" and "model" in eqn.params["axis_name"]
    ]
    return found + [shape for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params) for shape in gathered(inner)]


def jaxpr_of(made: Any, *args: Any) -> Any:
    """The program of a step for arguments that are in place; `jax.make_jaxpr` would not know how they lie."""
    executor = made.executor
    return executor._jit.trace(executor._surroundings(None, args), *args).jaxpr.jaxpr


def programs(jaxpr: Any) -> list[Any]:
    """What each device runs by itself."""
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    return found + [each for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params) for each in programs(inner)]


@pytest.mark.quickly
@pytest.mark.parametrize("name", ["perceptron", "layers", "lstm"])
def test_one_name_is_enough_to_find_all_leaves(name: str) -> None:
    """Those that have a dimension of 16: no other one is as long."""
    loss, params, x, _ = CASES[name]
    step, state = trained(loss), state_of(params)
    weight, dim = {"perceptron": ("wi", 1), "layers": ("wo", 1), "lstm": ("out", 0)}[name]
    specs = vnode.partition.uneven(step, (state, x), {f"^0/{weight}": dim}, (5, 3), "model")
    leaves = {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    assert {n for n, leaf in leaves.items() if 16 in leaf.shape} == {n for n in leaves if re.search("|".join(specs), n)}
    made = on(step, specs, 2)
    stored = jax.tree.leaves(made.put(state))
    assert all(20 in leaf.shape for leaf, own in zip(stored, jax.tree.leaves(state), strict=True) if 16 in own.shape)


@pytest.mark.quickly
def test_no_device_has_another_ones_part() -> None:
    """Neither for nodes nor for the update is anything gathered."""
    loss, params, x, partition = CASES["perceptron"]
    made = on(trained(loss), partition, 2)
    state = made.put(state_of(params))
    assert {shard.data.shape for shard in state[0]["wi"].addressable_shards} == {(4, 10)}
    assert state[1][1][0].mu["wo"].sharding.spec == PartitionSpec("model")
    assert not gathered(jaxpr_of(made, state, x))
    assert {shard.data.shape for shard in made(state, x)[0][0]["wi"].addressable_shards} == {(4, 10)}


@pytest.mark.thorough
@pytest.mark.quickly
def test_a_state_is_taken_to_other_devices_and_given_away() -> None:
    loss, params, x, partition = CASES["perceptron"]
    step = trained(loss)
    made = on(step, partition, 2, donate_argnums=0)
    state, _ = made(state_of(params), x)
    before = state[0]["wi"]
    state, _ = made(state, x)
    assert before.is_deleted()
    state, _ = made.on(mesh_of(4, 2))(state, x)
    assert state[0]["wi"].shape == (4, 20)
    alike = made.on(vnode.Placement(NODES, jax.devices()[:2]))  # no unequal devices, and nothing stored for them
    alike.prepare(alike.placement).wait()
    state, _ = alike(alike.put(state), x)
    assert state[0]["wi"].shape == (4, 16)
    state, metrics = made(state, x)
    assert state[0]["wi"].shape == (4, 20)

    def steps(params: Any, x: Any) -> Any:
        state = state_of(params)
        for _ in range(4):
            state, _ = step(state, x)
        return step(state, x)

    assert_same((made.get(state), metrics), jax.jit(steps), params, x)


@pytest.mark.quickly
def test_three_devices_of_which_one_has_nothing() -> None:
    loss, params, x, _ = CASES["perceptron"]
    partition = {"wi": vnode.UnevenSpec(1, "model", (12, 0, 4)), "b$|wo": vnode.UnevenSpec(0, "model", (12, 0, 4))}
    made = on(trained(loss), partition, 2, model=3, reduction="fast")
    state, metrics = made(state_of(params), x)
    assert state[0]["wo"].shape == (36, 4)
    assert_same((made.get(state), metrics), jax.jit(lambda p, x: trained(loss)(state_of(p), x)), params, x)


@pytest.mark.quickly
@pytest.mark.parametrize("counts", [None, (5, 3)])
def test_what_is_made_of_a_state_comes_in_its_own_shape(counts: Any) -> None:
    """Gradients are no state, though they have its shapes; nor is what the step does not return as it was given.

    What is returned of each example every device has its own blocks of.
    """
    loss, params, x, partition = CASES["perceptron"]

    def step(params: Any, x: Any) -> Any:
        return jax.grad(loss)(params, x)["wi"] * 2, params["wo"].sum(1), jnp.tanh(x @ params["wi"])

    got = on(step, partition, 2, counts=counts)(params, x)
    assert [leaf.shape for leaf in got] == [(4, 16), (16,), (16, 16)]
    assert_same(got, step, params, x)


@pytest.mark.quickly
def test_what_is_kept_for_another_pass_is_kept_in_blocks() -> None:
    """A product that is too dear to be computed again."""
    params, x, partition = {"wi": numbers(96, 16), "b": numbers(16), "wo": numbers(16, 96)}, numbers(16, 96), {"wi": WI}
    step = trained(normalized)
    made = on(step, partition | {"b$|wo": WO}, 2, recompute_budget=0.3)
    state = made.put(state_of(params))
    jaxpr = jaxpr_of(made, state, x)
    kept = {var.aval.shape for eqn in programs(jaxpr) for var in eqn.outvars if len(var.aval.shape) == 3}
    assert kept == {(NODES, 2, 20)}
    assert not gathered(jaxpr)
    state, metrics = made(state, x)
    assert_same((made.get(state), metrics), jax.jit(lambda p, x: step(state_of(p), x)), params, x)


@pytest.mark.quickly
def test_what_has_an_effect_is_given_a_gradient_in_one_piece() -> None:
    loss, params, x, partition = CASES["perceptron"]
    seen: list[Any] = []

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        jax.debug.callback(seen.append, grads["wi"])
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    jax.block_until_ready(on(step, partition, 2)(params, x))
    jax.effects_barrier()
    assert seen
    assert_same(seen[0], lambda p, x: jax.grad(loss)(p, x)["wi"], params, x)


@pytest.mark.quickly
def test_a_state_that_was_restored_may_be_the_only_value_beside_constants() -> None:
    """A sum of constants alone takes its rounding from the state's bits. The axis does not divide the 15 indices."""

    def step(w: Any, x: Any) -> Any:
        jax.debug.callback(lambda w: None, w)  # restores it
        return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).mean())(w), jnp.sin(jnp.arange(6.0)).sum()

    w, x = numbers(4, 15), numbers(16, 4)
    made = on(step, {"": vnode.UnevenSpec(1, "model", (10, 5))}, 2)
    state, total = made(w, x)
    assert_same((made.get(state), total), jax.jit(step), w, x)


@pytest.mark.quickly
def test_a_loop_with_passes_of_its_own_is_given_a_state_in_one_piece() -> None:
    """Two minibatches, one after the other, each with an update."""
    loss, params, x, partition = CASES["perceptron"]
    step = trained(loss)

    def epoch(state: Any, x: Any) -> Any:
        return lax.scan(lambda state, i: step(state, x.reshape(2, 8, 4)[i]), state, jnp.arange(2))

    made = on(epoch, partition, 2)
    state, metrics = made(state_of(params), x)
    assert state[0]["wi"].shape == (4, 20)
    assert_same((made.get(state), metrics), jax.jit(lambda p, x: epoch(state_of(p), x)), params, x)


@pytest.mark.quickly
def test_an_update_that_needs_a_dimension_whole() -> None:
    loss, params, x, partition = CASES["perceptron"]

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * jnp.sort(g, axis=-1), params, grads)

    made = on(step, partition, 2)
    state = made(params, x)
    assert state["wi"].shape == (4, 20)
    assert_same(made.get(state), jax.jit(step), params, x)


@pytest.mark.quickly
def test_check_compares_a_state_in_its_own_shapes() -> None:
    loss, params, x, partition = CASES["perceptron"]
    made = on(trained(loss), partition, 2)
    assert vnode.check(made, (state_of(params), x), devices=[mesh_of(1, 2), mesh_of(2, 2)]).ok


@pytest.mark.quickly
class TestErrors:
    def test_counts_that_do_not_add_up(self) -> None:
        loss, params, x, _ = CASES["perceptron"]
        with pytest.raises(vnode.PlacementError, match=r"has 16 indices along dimension 1, where 18 are divided"):
            on(trained(loss), {"wi": vnode.UnevenSpec(1, "model", (12, 6))}, 2)(state_of(params), x)

    def test_a_dimension_as_long_as_what_is_stored(self) -> None:
        """Of 16 indices as 12 would be stored: 4 of them would be forgotten."""
        loss, params, _, _ = CASES["perceptron"]
        with pytest.raises(vnode.PlacementError, match="has the stored length"):
            on(trained(loss), {"wi": vnode.UnevenSpec(1, "model", (8, 4))}, 2).put(state_of(params))

    def test_another_mesh(self) -> None:
        loss, params, x, partition = CASES["perceptron"]
        with pytest.raises(vnode.PartitionError, match=r"2 counts, \(10, 6\), do not fit the mesh"):
            on(trained(loss), partition, 2, model=4)(state_of(params), x)
        with pytest.raises(vnode.PartitionError, match=r"3 counts, \(8, 8, 0\), do not fit the mesh"):
            on(trained(loss), {"wi": vnode.UnevenSpec(1, "model", (8, 8, 0))}, 2)(state_of(params), x)

    def test_an_axis_that_the_mesh_has_not(self) -> None:
        """Beside one that it has: the axis is what is wrong, and no proportions."""
        with pytest.raises(vnode.PlacementError, match="'modle', which the mesh does not have"):
            on(perceptron, {"wi": vnode.UnevenSpec(1, "modle", (10, 6)), "wo": WO}, 2)

    def test_the_nodes_axis(self) -> None:
        loss, params, x, _ = CASES["perceptron"]
        with pytest.raises(vnode.PlacementError, match="divides the nodes"):
            on(trained(loss), {"wi": vnode.UnevenSpec(1, "data", (10, 6))}, 2)(state_of(params), x)

    def test_other_proportions(self) -> None:
        partition = {"wi": WI, "wo": vnode.UnevenSpec(0, "model", (8, 8))}
        with pytest.raises(ValueError, match=r"same proportions, not \(10, 6\) along 'model', \(8, 8\)"):
            on(perceptron, partition, 2)

    def test_a_state_that_is_stored_with_other_counts(self, tmp_path: Path) -> None:
        """Of the same shape and sharding: counts are remembered, in checkpoints too, or seen in the padding."""
        rows = {name: dataclasses.replace(spec, counts=(6, 10)) for name, spec in (("wi", WI), ("wo", WO))}
        params, x = {"wi": MLP["wi"], "wo": MLP["wo"]}, numbers(16, 4)

        def step(params: Any, x: Any) -> Any:
            grads = jax.grad(lambda params: jnp.square(x @ params["wi"] @ params["wo"] - x).mean())(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {}

        one, other = on(step, {"wi": WI, "wo": WO}, 2), on(step, rows, 2)
        stored = one.put(params)
        halves = jax.tree.map(lambda leaf: leaf / 2, stored)
        assert jax.eval_shape(lambda: one.get(halves))["wi"].shape == (4, 16)  # within another program, too
        made = one(halves, x)[0]  # its padding says that it is stored so
        assert_same(one.get(made), lambda *args: step(*args)[0], jax.tree.map(lambda leaf: leaf / 2, params), x)
        folder = tmp_path / "run"
        result = vnode.elastic.run(one, stored, [x] * 2, steps=1, progress=False, checkpoint=folder)
        read = vnode.elastic.restore(folder, like=stored)
        for state, why in (
            (stored, r"stored in blocks of \(5, 3\)"),
            (made, r"stored in blocks of \(5, 3\)"),
            (read, r"stored in blocks of \(5, 3\)"),
            (jax.tree.map(lambda leaf: leaf * 2, result.state), "its padding is not zeros"),
        ):
            for use in (other.put, other.get, lambda state: other(state, x)):
                with pytest.raises(vnode.PlacementError, match=rf"not stored with the counts \(6, 10\)(?s:.*){why}"):
                    use(state)
        copies = {**jax.tree.map(jnp.copy, stored), "wo": jnp.zeros_like(stored["wo"])}
        with pytest.raises(vnode.PlacementError, match=r"'wi' (?s:.*)counts \(6, 10\)"):
            other.get(copies)
        assert one.get(copies)["wo"].shape == (16, 4)  # an error marks nothing
        with pytest.raises(vnode.PlacementError, match=r"counts \(6, 10\)"):
            vnode.elastic.run(other, other.put(params), [x] * 2, steps=2, progress=False, checkpoint=folder)
        with pytest.raises(vnode.VnodeError, match=r"blocks of \(5, 3\) along model in the checkpoint"):
            vnode.elastic.restore(folder, like=other.put(params))

    def test_what_cannot_be_computed_in_blocks(self) -> None:
        def loss(params: Any, x: Any) -> Any:
            return jnp.square(jnp.sort(x @ params["wi"], 1)).mean()

        with pytest.raises(vnode.PartitionError, match=r"needs all of its indices at once(?s:.*)test_uneven.py"):
            on(loss, {"wi": WI}, 2)(MLP, numbers(16, 4))

    def test_derivatives(self) -> None:
        loss, params, x, _ = CASES["perceptron"]
        made = on(loss, {"wi": vnode.UnevenSpec(1, "model", (8, 8))}, 2)
        with pytest.raises(vnode.VnodeError, match="cannot be differentiated from outside"):
            jax.grad(made)(made.put(params), x)

    def test_what_is_not_known_to_be_stored(self) -> None:
        """Within another program, in the host's memory, and where no device is unequal."""
        loss, params, x, partition = CASES["perceptron"]
        made = on(loss, partition, 2)
        stored = made.put(params)
        host, alike = jax.tree.map(np.asarray, stored), made.on(vnode.Placement(NODES, jax.devices()[:2]))
        for use in (
            lambda: jax.jit(lambda *args: made(*args))(stored, x),
            lambda: made(host, x),
            lambda: made.get(host),
            lambda: alike(host, x),
            lambda: alike.put(host),
        ):
            with pytest.raises(vnode.PlacementError, match="is not known to be sharded along 'model'"):
                use()

    @pytest.mark.parametrize(
        "spec", [(0, "model", (1,)), (-1, "model", (4, 4)), (0, "model", (2.0, 2)), (0, 1, (2, 2)), (0, "model", 4)]
    )
    def test_no_such_shares(self, spec: Any) -> None:
        with pytest.raises(ValueError, match="UnevenSpec takes a dimension"):
            vnode.UnevenSpec(*spec)

    @pytest.mark.parametrize(
        ("dims", "counts", "message"),
        [
            ({"w9": 1}, (5, 3), r"'w9' matches no leaf of the state(?s:.*)0/wi"),
            ({"(": 1}, (5, 3), "is not a regular expression"),
            (["wi"], (5, 3), "dims maps patterns"),
            ({"wi": "1"}, (5, 3), "dims: expected integers, not "),
            ({"wi": 1}, (5.0, 3.0), r"counts: expected integers, not \(5.0, 3.0\)"),
            ({"wi": 1}, "53", "counts: expected integers"),
            ({"wi": 1}, (4, 3), r"0/wi of shape \(4, 16\) has no dimension 1 of 7 equal blocks"),
        ],
    )
    def test_no_leaves_that_are_tied(self, dims: Any, counts: Any, message: str) -> None:
        args = state_of(MLP), numbers(16, 4)
        with pytest.raises(vnode.PartitionError, match=message):
            vnode.partition.uneven(trained(perceptron), args, dims, counts, "model")

    def test_counts_of_numpy(self) -> None:
        assert vnode.UnevenSpec(1, "model", np.array([10, 6])) == vnode.UnevenSpec(1, "model", (10, 6))  # type: ignore[arg-type]
