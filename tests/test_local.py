"""What ``coupling="local"`` means: statistics of each node's own examples, and nothing else estimated.

Knows the public interface. The references are plain jax: the step as it stands where nothing may be estimated; else
the same formula written for groups of examples, one group for each node. Must not know how estimates are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

import vnode
from tests.budget import examples
from tests.rounding import assert_same

pytestmark = pytest.mark.quickly

BATCH, WIDTH, EXPERTS, NODES = 16, 6, 4, 4
Loss = Callable[[Any, Any], jax.Array]


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


PARAMS = {
    "w": draw(0, WIDTH, WIDTH),
    "router": draw(1, WIDTH, EXPERTS),
    "experts": draw(2, EXPERTS, WIDTH, WIDTH),
    "scale": jnp.float32(1.7),
    "layers": draw(3, 2, WIDTH, WIDTH) * 0.5,
}
MASK = jnp.asarray([1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1], jnp.float32)
DATA = {
    "x": draw(4, BATCH, WIDTH),
    "mask": MASK,
    "y": jnp.asarray(np.random.default_rng(5).integers(0, EXPERTS, BATCH)),
}


def gradient(loss: Loss) -> Callable[[Any, Any], Any]:
    return lambda params, data: jax.value_and_grad(loss)(params, data)


def local(loss: Loss, nodes: int = NODES, **options: Any) -> Any:
    options = {"coupling": "local", "recompute_budget": 20.0, **options}
    return vnode.virtualize(gradient(loss), virtual_nodes=nodes, **options).on(jax.devices()[:2])


# Examples put something somewhere, and find it again: nothing may be estimated.


def routed(params: Any, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of every example the greatest gate, its expert, and its place in the expert's buffer."""
    gate = jax.nn.softmax(h @ params["router"])
    first = jax.nn.one_hot(gate.argmax(-1), EXPERTS)
    place = ((first.cumsum(0) - first) * first).sum(-1).astype(jnp.int32)
    return gate.max(-1), gate.argmax(-1), place


def experts(params: Any, buffers: jax.Array) -> jax.Array:
    return jax.nn.gelu(jnp.einsum("ecm,emh->ech", buffers, params["experts"]))


def combine_of(params: Any, h: jax.Array) -> jax.Array:
    gate, expert, place = routed(params, h)
    return gate[:, None, None] * jax.nn.one_hot(expert, EXPERTS)[..., None] * jax.nn.one_hot(place, BATCH)[:, None]


def mixture(params: Any, h: jax.Array) -> jax.Array:
    combine = combine_of(params, h)
    buffers = jnp.einsum("sec,sm->ecm", (combine > 0).astype(h.dtype), h)
    return jnp.einsum("sec,ech->sh", combine, experts(params, buffers))


def mixture_without_products(params: Any, h: jax.Array) -> jax.Array:
    combine = combine_of(params, h)[..., None]
    return (combine * experts(params, (combine * h[:, None, None]).sum(0))).sum((1, 2))


def mixture_by_index(params: Any, h: jax.Array) -> jax.Array:
    gate, expert, place = routed(params, h)
    buffers = jnp.zeros((EXPERTS, BATCH, WIDTH)).at[expert, place].add(h)
    return gate[:, None] * experts(params, buffers)[expert, place]


def of_layer(layer: Callable[[Any, jax.Array], jax.Array]) -> Loss:
    return lambda params, data: (layer(params, data["x"] @ params["w"]) ** 2).mean()


def in_a_loop(params: Any, data: Any) -> jax.Array:
    return (lax.scan(lambda h, w: (h + mixture(params, h @ w), None), data["x"], params["layers"])[0] ** 2).mean()


def hidden(params: Any, data: Any) -> jax.Array:
    return data["x"] @ params["w"]


def centres_of_classes(params: Any, data: Any) -> jax.Array:
    h = hidden(params, data)
    sums, counts = (jax.ops.segment_sum(v, data["y"], EXPERTS) for v in (h, jnp.ones(BATCH)))
    return ((h - (sums / jnp.maximum(counts, 1)[:, None])[data["y"]]) ** 2).mean()


def sums_of_classes(params: Any, data: Any) -> jax.Array:
    h, of_class = hidden(params, data), jax.nn.one_hot(data["y"], EXPERTS)
    return (of_class @ jnp.tanh(of_class.T @ h) * h).mean()


def chosen_by_where(params: Any, data: Any) -> jax.Array:
    h, here = hidden(params, data), (data["y"][:, None] == jnp.arange(EXPERTS))[..., None]
    sums = jnp.where(here, h[:, None], 0.0).sum(0)
    return (jnp.where(here, jnp.tanh(sums), 0.0).sum(1) * h).mean()


def one_by_one(params: Any, data: Any) -> jax.Array:
    h = hidden(params, data)
    sums = jax.vmap(lambda i, v: jnp.zeros((EXPERTS, WIDTH)).at[i].set(v))(data["y"], h).sum(0)
    return (jax.vmap(lambda i: jnp.tanh(sums)[i])(data["y"]) * h).mean()


def shuffled_by_matrix(params: Any, data: Any) -> jax.Array:
    order = jnp.eye(BATCH)[np.random.default_rng(3).permutation(BATCH)]
    return (order @ jnp.tanh(order.T @ hidden(params, data)) ** 2).mean()


def reversed_by_index(params: Any, data: Any) -> jax.Array:
    h, back = hidden(params, data), jnp.arange(BATCH)[::-1]
    return (jnp.tanh(jnp.zeros((BATCH, WIDTH)).at[back].add(h))[back] * h).mean()


def a_scaled_count(params: Any, data: Any) -> jax.Array:
    """The number of tokens times a parameter is a number of tokens: no node may put its own in the place."""
    losses = (hidden(params, data) ** 2).sum(1)
    return (losses * data["mask"]).sum() / (params["scale"] * data["mask"].sum())


PICKED: dict[str, Loss] = {
    "mixture": of_layer(mixture),
    "mixture_recomputed": of_layer(lambda params, h: jax.checkpoint(mixture)(params, h)),
    "mixture_without_products": of_layer(mixture_without_products),
    "mixture_by_index": of_layer(mixture_by_index),
    "mixture_in_a_loop": in_a_loop,
    "centres_of_classes": centres_of_classes,
    "sums_of_classes": sums_of_classes,
    "chosen_by_where": chosen_by_where,
    "one_by_one": one_by_one,
    "shuffled_by_matrix": shuffled_by_matrix,
    "reversed_by_index": reversed_by_index,
    "a_scaled_count": a_scaled_count,
}


@pytest.mark.sampled(1, thorough=2)
@pytest.mark.parametrize("name", PICKED)
def test_what_examples_put_somewhere_is_not_estimated(name: str) -> None:
    assert_same(local(PICKED[name])(PARAMS, DATA), gradient(PICKED[name]), PARAMS, DATA)


# Statistics: the reference is the same formula for groups. `groups` says how many, 1 being the step as written.


def grouped(value: jax.Array, groups: int) -> jax.Array:
    return value.reshape(groups, -1, *value.shape[1:])


def normalized(h: jax.Array, groups: int) -> jax.Array:
    h = grouped(h, groups)
    h = (h - h.mean(1, keepdims=True)) * lax.rsqrt(h.var(1, keepdims=True) + 0.1)
    return h.reshape(-1, WIDTH)


def masked(params: Any, data: Any, groups: int = 1, layers: int = 1) -> jax.Array:
    """Statistics of the examples that count, over the number of these; the loss is a mean over all that count."""
    h, m = grouped(data["x"], groups), grouped(data["mask"], groups)[..., None]
    for _ in range(layers):
        h = jnp.tanh(h @ params["w"])
        count = m.sum(1, keepdims=True)
        mean = (m * h).sum(1, keepdims=True) / count
        h = (h - mean) * lax.rsqrt((m * h * h).sum(1, keepdims=True) / count - mean**2 + 0.1)
    losses = (h.reshape(BATCH, WIDTH) ** 3).mean(1)
    return (losses * data["mask"]).sum() / data["mask"].sum()


def masked_whole_numbers(params: Any, data: Any, groups: int = 1) -> jax.Array:
    h, m = grouped(hidden(params, data), groups), grouped(data["mask"], groups) > 0
    mean = jnp.where(m[..., None], h, 0.0).sum(1) / m.sum(1)[:, None]
    return ((h - mean[:, None]) ** 3).mean()


def soft_slots(params: Any, data: Any, groups: int = 1) -> jax.Array:
    """Weighted means of examples, the weights a softmax over them."""
    h = grouped(hidden(params, data), groups)
    logits = h @ params["router"]
    weights = jnp.exp(logits)
    slots = jnp.tanh(jnp.einsum("gbe,gbm->gem", weights / weights.sum(1, keepdims=True), h))
    return (jnp.einsum("gbe,gem->gbm", jax.nn.softmax(logits), slots) ** 2).mean()


def load(params: Any, data: Any, groups: int = 1) -> jax.Array:
    """The share of examples of every expert, times its mean gate: a penalty."""
    gate = grouped(jax.nn.softmax(hidden(params, data) @ params["router"]), groups)
    shares = jax.nn.one_hot(gate.argmax(-1), EXPERTS).mean(1)
    return EXPERTS * (shares * gate.mean(1)).sum(-1).mean()


def mixture_behind(params: Any, data: Any, groups: int = 1) -> jax.Array:
    return (mixture(params, normalized(hidden(params, data), groups)) ** 2).mean()


def all_pairs_behind(params: Any, data: Any, groups: int = 1) -> jax.Array:
    h = normalized(hidden(params, data), groups)
    return jax.nn.softplus(h @ h.T).mean()


def mixed_examples(params: Any, data: Any, groups: int = 1) -> jax.Array:
    """Each example mixed with another one, labels too."""
    other = (jnp.arange(BATCH) * 3 + 1) % BATCH
    x = 0.3 * data["x"] + 0.7 * data["x"][other]
    h = normalized(x @ params["w"], groups)
    return -(jax.nn.one_hot(data["y"][other], EXPERTS) * jax.nn.log_softmax(h @ params["router"])).mean()


def recomputed_loop(params: Any, data: Any, groups: int = 1) -> jax.Array:
    body = jax.checkpoint(lambda h, w: (normalized(jnp.tanh(h @ w), groups), None))
    return (lax.scan(body, hidden(params, data), params["layers"])[0] ** 3).mean()


STATISTICS: dict[str, Callable[..., jax.Array]] = {
    "masked": masked,
    "masked_twice": lambda params, data, groups=1: masked(params, data, groups, layers=2),
    "masked_whole_numbers": masked_whole_numbers,
    "soft_slots": soft_slots,
    "mixture_behind": mixture_behind,
    "all_pairs_behind": all_pairs_behind,
    "mixed_examples": mixed_examples,
    "recomputed_loop": recomputed_loop,
}


@pytest.mark.sampled(1, thorough=4)
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_are_those_of_the_nodes(name: str, nodes: int) -> None:
    loss = STATISTICS[name]
    got = local(loss, nodes)(PARAMS, DATA)
    assert_same(got, gradient(lambda params, data: loss(params, data, nodes)), PARAMS, DATA)
    assert not np.allclose(got[1]["w"], gradient(loss)(PARAMS, DATA)[1]["w"], rtol=1e-3)


def test_a_statistic_over_places_that_no_example_reads_by_place() -> None:
    """The gradient is that of the nodes' loads; what leaves the step is the load of the whole batch."""
    value, grads = local(load)(PARAMS, DATA)
    want = jax.grad(lambda params: load(params, DATA, NODES))(PARAMS)
    np.testing.assert_allclose(grads["router"], want["router"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(value, load(PARAMS, DATA), rtol=1e-6)


def test_counts_are_those_of_the_nodes_though_only_the_sums_were_asked_to_be() -> None:
    """A mask is often counted elsewhere than where the sums are formed."""

    def loss(params: Any, data: Any, groups: int = 1) -> jax.Array:
        h, m = grouped(hidden(params, data), groups), grouped(data["mask"], groups)[..., None]
        with jax.named_scope("Count"):
            count = m.sum(1, keepdims=True)
        with jax.named_scope("Norm"):
            h = h - (m * h).sum(1, keepdims=True) / count
        return (h**3).mean()

    got = local(loss, coupling={"Norm": "local"})(PARAMS, DATA)
    assert_same(got, gradient(lambda params, data: loss(params, data, NODES)), PARAMS, DATA)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=NODES, max_size=NODES))
def test_any_mask(rows: list[list[bool]]) -> None:
    """However many examples count in a node, as long as one does.

    If no node has three, the normalized values cancel, and the loss is all rounding.
    """
    mask = jnp.asarray(rows, jnp.float32).at[:, 1].set(1.0)
    assume(mask.sum(1).max() >= 3)
    data = {**DATA, "mask": mask.reshape(-1)}
    got = local(masked)(PARAMS, data)
    assert_same(got, gradient(lambda params, data: masked(params, data, NODES)), PARAMS, data)


# Loops and branches with passes of their own.


def plain_loop(params: Any, data: Any) -> jax.Array:
    return (lax.scan(lambda h, w: (normalized(jnp.tanh(h @ w), 1), None), data["x"], params["layers"])[0] ** 3).mean()


def plain_branch(params: Any, data: Any) -> jax.Array:
    return (lax.cond(params["scale"] > 0, lambda h: normalized(h, 1), jnp.sin, hidden(params, data)) ** 3).mean()


def counted_outside(params: Any, data: Any) -> jax.Array:
    m = data["mask"][:, None]
    count = m.sum()

    @jax.checkpoint
    def body(h: jax.Array, w: jax.Array) -> Any:
        h = jnp.tanh(h @ w)
        return h - (m * h).sum(0) / count, None

    return (lax.scan(body, data["x"], params["layers"])[0] ** 3).mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [plain_loop, plain_branch, counted_outside])
def test_loops_whose_derivative_would_not_fit_are_refused(loss: Loss) -> None:
    with pytest.raises(vnode.CouplingError, match=r"(?s)coupling='local' cannot be kept.*test_local.py:\d+.*exact"):
        local(loss)(PARAMS, DATA)
    got = local(loss, coupling="exact")(PARAMS, DATA)
    assert_same(got, gradient(loss), PARAMS, DATA)


def test_what_a_loop_returns_may_leave_the_step() -> None:
    """Statistics of every layer, and the network's value, without its derivative."""

    def step(params: Any, data: Any, groups: int = 1) -> Any:
        def body(h: jax.Array, w: jax.Array) -> Any:
            h = jnp.tanh(h @ w)
            return normalized(h, groups), h.mean(0)

        h, means = lax.scan(body, data["x"], params["layers"])
        return (h**3).mean(), means

    got = vnode.virtualize(step, virtual_nodes=NODES, coupling="local", recompute_budget=20.0)(PARAMS, DATA)
    assert_same(got, lambda params, data: step(params, data, NODES), PARAMS, DATA)
