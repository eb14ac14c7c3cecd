"""Item 15 of the zoo: the batch dimension cut up and put together in other ways.

Knows concatenation, reshapes, repeats and gathers along the batch. Must not know vnode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import Program, case, kit

WIDTH = 4
CLASSES = 3
EXACT = {"recompute_budget": 10.0}


def _batch(batch: int) -> dict[str, jax.Array]:
    return {
        "a": kit.normal(batch, WIDTH),
        "b": kit.normal(batch, WIDTH, seed=1),
        "y": kit.integers(CLASSES, batch),
        "index": kit.integers(WIDTH, batch, 2),
        "sequence": kit.normal(batch, 5, WIDTH, seed=2),
        "places": kit.integers(5, batch, 3),
    }


def _train(loss_fn: Callable[[Any, dict[str, jax.Array]], Any], batch: int = 16, **options: Any) -> Program:
    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return kit.sgd(params, grads), loss, aux

    return Program(step, (kit.dense(WIDTH, 6, CLASSES), _batch(batch)), options)


@case(item=15)
def views_concatenated_and_split() -> Program:
    """Two views through the model at once, compared with each other afterwards."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        both = kit.mlp(params, jnp.concatenate([batch["a"], batch["b"]]))
        a, b = jnp.split(both, 2)
        return jnp.mean((a - b) ** 2) + kit.cross_entropy(both, jnp.tile(batch["y"], 2)).mean(), (both, a)

    return _train(loss_fn)


@case(item=15, batch=12)
def views_stacked() -> Program:
    """Two views as a dimension of their own, before and after the batch, then merged with it."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        outer = jnp.stack([batch["a"], batch["b"]]).reshape(-1, WIDTH)
        inner = jnp.stack([batch["a"], batch["b"]], axis=1).reshape(-1, WIDTH)
        x, y = kit.mlp(params, outer), kit.mlp(params, inner)
        return jnp.mean(x**2) + jnp.mean(y.reshape(-1, 2, CLASSES).prod(axis=1)), (x, y)

    return _train(loss_fn, 12)


@case(item=15)
def views_of_different_number() -> Program:
    """Three crops of each example, two of them small: lengths differ, so they are concatenated twice."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        crops = [batch["a"], batch["b"], batch["a"] * batch["b"]]
        out = kit.mlp(params, jnp.concatenate(crops))
        n = batch["a"].shape[0]
        first, rest = out[:n], out[n:].reshape(2, n, CLASSES)
        return jnp.mean((rest - first) ** 2), (first, rest.mean(axis=0))

    return _train(loss_fn)


@case(item=15, batch=12)
def views_interleaved_unevenly() -> Program:
    """Labelled and unlabelled examples in one array, told apart by position."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        out = kit.mlp(params, batch["a"])
        labelled = jnp.arange(out.shape[0]) % 3 == 0
        losses = jnp.where(labelled, kit.cross_entropy(out, batch["y"]), 0.1 * jnp.sum(out**2, axis=-1))
        return losses.sum() / labelled.sum(), losses

    return _train(loss_fn, 12)


@case(item=15)
def pairs_of_neighbours() -> Program:
    """``reshape(B // 2, 2, ...)``: a preference loss on pairs."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        scores = kit.mlp(params, batch["a"])[:, 0].reshape(-1, 2)
        losses = jax.nn.softplus(scores[:, 1] - scores[:, 0])
        return losses.mean(), (losses, scores)

    return _train(loss_fn)


@case(item=15, batch=12)
def pairs_by_stride() -> Program:
    """Even and odd examples."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        out = kit.mlp(params, batch["a"])
        even, odd = out[::2], out[1::2]
        return jnp.mean(jnp.abs(even - odd)), even

    return _train(loss_fn, 12)


@case(item=15)
def halves_of_the_batch() -> Program:
    """``reshape(2, B // 2, ...)``: the first half against the second."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        out = kit.mlp(params, batch["a"]).reshape(2, -1, CLASSES)
        return jnp.mean((out[0] - out[1]) ** 2), out[0]

    return _train(loss_fn)


@case(item=15)
def groups_of_samples() -> Program:
    """Groups of four answers to one question, their rewards normalized within the group."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        reward = batch["b"].sum(axis=-1).reshape(-1, 4)
        advantage = (reward - reward.mean(axis=1, keepdims=True)) / (reward.std(axis=1, keepdims=True) + 1e-4)
        log_prob = jax.nn.log_softmax(kit.mlp(params, batch["a"]))
        chosen = jnp.take_along_axis(log_prob, batch["y"][:, None], axis=1)[:, 0]
        return -jnp.mean(chosen * advantage.reshape(-1)), advantage

    return _train(loss_fn)


@case(item=15, batch=24)
def minibatches_in_a_scan() -> Program:
    """``reshape(n, B // n, ...)`` and an update per minibatch."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        minibatches = jax.tree.map(lambda x: x.reshape(3, x.shape[0] // 3, *x.shape[1:]), batch)

        def update(params: Any, part: dict[str, jax.Array]) -> Any:
            def loss_fn(params: Any) -> jax.Array:
                return kit.cross_entropy(kit.mlp(params, part["a"]), part["y"]).mean()

            loss, grads = jax.value_and_grad(loss_fn)(params)
            return kit.sgd(params, grads), loss

        return lax.scan(update, params, minibatches)

    return Program(step, (kit.dense(WIDTH, 6, CLASSES), _batch(24)))


@case(item=15, batch=6)
def views_that_are_centred_again_and_again() -> Program:
    """A loop and a branch around passes over three views at once, which only exist whole."""

    def step(weights: jax.Array, batch: dict[str, jax.Array]) -> Any:
        x = jnp.sort(batch["a"], axis=0)
        views = jnp.concatenate([x, x[::-1], x], axis=0)

        def layer(c: jax.Array, w: jax.Array) -> Any:
            c = c + 0.1 * jnp.tanh(c @ w)
            return c - c.mean(0), c.sum(-1)

        c, sums = lax.scan(layer, views, weights)
        _, c = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, layer(s[1], weights[s[0]])[0]), (0, c))
        c = lax.cond(c[0].sum() > 0.01, lambda q: q - q.mean(0), lambda q: q * jnp.square(q).mean(), c)
        z = jnp.tanh(c) * sums.sum(0)[:, None]
        return c, sums, z, z.sum(0), (z[:6] * batch["a"]).sum()

    return Program(step, (kit.normal(3, WIDTH, WIDTH), _batch(6)), EXACT)


@case(item=15)
def accumulation_written_by_hand() -> Program:
    """The user's own accumulation loop, left in place."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)

        def body(carry: Any, part: dict[str, jax.Array]) -> Any:
            loss, grads = jax.value_and_grad(lambda p: kit.cross_entropy(kit.mlp(p, part["a"]), part["y"]).sum())(
                params
            )
            return jax.tree.map(jnp.add, carry, (loss, grads)), loss

        zeros = (jnp.zeros((), kit.real()), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), losses = lax.scan(body, zeros, parts)
        return kit.sgd(params, grads, 0.1 / batch["y"].shape[0]), loss, losses

    return Program(step, (kit.dense(WIDTH, 6, CLASSES), _batch(16)))


@case(item=15, batch=12)
def samples_repeated_per_example() -> Program:
    """Several noisy samples of each example: ``repeat`` before the model, a minimum over the samples after it."""

    def step(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
        x = jnp.repeat(batch["a"], 3, axis=0)
        x = x + 0.1 * jax.random.normal(key, x.shape, x.dtype)
        labels = jnp.repeat(batch["y"], 3)

        def loss_fn(params: Any) -> Any:
            losses = kit.cross_entropy(kit.mlp(params, x), labels).reshape(-1, 3)
            return losses.min(axis=1).mean(), losses

        (loss, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), loss, losses

    return Program(step, (kit.dense(WIDTH, 6, CLASSES), _batch(12), jax.random.key(1)))


@case(item=15)
def samples_tiled() -> Program:
    """The same with ``tile``: the samples are the outer dimension."""

    def step(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
        x = jnp.tile(batch["a"], (2, 1))
        x = x + 0.1 * jax.random.normal(key, x.shape, x.dtype)

        def loss_fn(params: Any) -> Any:
            out = kit.mlp(params, x).reshape(2, -1, CLASSES)
            return jnp.mean(jax.nn.logsumexp(out.sum(axis=-1), axis=0)), out

        (loss, out), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), loss, out

    return Program(step, (kit.dense(WIDTH, 6, CLASSES), _batch(16), jax.random.key(1)))


@case(item=15, batch=12)
def gathers_within_an_example() -> Program:
    """One batched array indexed by another one's values, in every way that numpy indexing has."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        sequence, places = batch["sequence"], batch["places"]
        n = places.shape[0]
        along = jnp.take_along_axis(sequence, places[:, :, None], axis=1)
        older = sequence[jnp.arange(n)[:, None], places]
        mapped = jax.vmap(lambda s, p: s[p])(sequence, places)
        one_hot = jnp.einsum("bkt,btd->bkd", jax.nn.one_hot(places, 5, dtype=sequence.dtype), sequence)
        last = sequence[jnp.arange(n), -1 - places[:, 0]]
        cut = jax.vmap(lambda s, p: lax.dynamic_slice_in_dim(s, p, 2))(sequence, jnp.minimum(places[:, 0], 3))
        out = sum(kit.mlp(params, v).mean(axis=1) for v in (along, older, mapped, one_hot, cut)) + kit.mlp(params, last)
        return kit.cross_entropy(out, batch["y"]).mean(), (along, last, cut)

    return _train(loss_fn, 12)


@case(item=15)
def gathers_of_learned_sequences() -> Program:
    """The same with a gradient through the gathered values: scatter-adds within the example."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        hidden = jnp.tanh(batch["sequence"] @ params[0]["w"])
        n = hidden.shape[0]
        a = jnp.take_along_axis(hidden, batch["places"][:, :, None], axis=1)
        b = hidden[jnp.arange(n)[:, None], batch["places"]]
        c = jax.vmap(lambda h, p: h.at[p].set(0.0))(hidden, batch["places"])
        d = hidden.at[jnp.arange(n), batch["places"][:, 0]].add(1.0)
        e = jnp.zeros((n, 5), hidden.dtype).at[jnp.arange(n)[:, None], batch["places"]].max(a[..., 0])
        return jnp.mean(a * b) + jnp.mean(c**2) + jnp.mean(d**3) + jnp.mean(e), (c, d, e)

    return _train(loss_fn)


@case(item=15, batch=12)
def tables_indexed_by_examples() -> Program:
    """Embedding tables, two of them tied, one updated where the batch points (a sparse update)."""

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        table, usage = state

        def loss_fn(table: jax.Array) -> jax.Array:
            rows = table[batch["index"]]
            return jnp.mean(jnp.sum(rows, axis=1) @ table.T)

        loss, grads = jax.value_and_grad(loss_fn)(table)
        usage = usage.at[batch["index"].reshape(-1)].add(1)
        return (table - 0.1 * grads, usage), loss, usage[batch["index"]]

    return Program(step, ((kit.normal(WIDTH, 3), jnp.zeros(WIDTH, jnp.int32)), _batch(12)))


@case(item=15)
def examples_found_by_other_examples() -> Program:
    """Every example reads another one, which its own index names: the whole batch is needed."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        out = kit.mlp(params, batch["a"])
        partner = (batch["y"] * 5 + jnp.arange(out.shape[0])) % out.shape[0]
        return jnp.mean(out * out[partner]), out[partner]

    return _train(loss_fn)


@case(item=15, batch=12)
def batch_padded_shifted_and_cut() -> Program:
    """``pad``, slices and shifts along the batch: differences of neighbours, everything but the first."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        out = kit.mlp(params, batch["a"])[:, 0]
        difference = jnp.diff(out)
        padded = jnp.pad(out, (1, 2))
        return jnp.mean(difference**2) + jnp.mean(out[1:] * out[:-1]), (difference, padded, out[:3], out[-1])

    return _train(loss_fn, 12)


@case(item=15)
def batch_of_matrices() -> Program:
    """Linear algebra on a matrix per example."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        hidden = jnp.tanh(batch["sequence"] @ params[0]["w"])
        gram = jnp.einsum("bti,btj->bij", hidden, hidden) + jnp.eye(hidden.shape[-1], dtype=hidden.dtype)
        factor = jnp.linalg.cholesky(gram)
        solved = jnp.linalg.solve(gram, hidden.mean(axis=1)[..., None])[..., 0]
        values = jnp.linalg.eigvalsh(lax.stop_gradient(gram))
        triangular = jax.scipy.linalg.solve_triangular(factor, solved[..., None], lower=True)[..., 0]
        return jnp.mean(solved**2) + jnp.mean(jnp.linalg.slogdet(gram)[1]) + jnp.mean(triangular), (factor, values)

    return _train(loss_fn)


@case(item=15, batch=12)
def batch_in_einsums() -> Program:
    """The batch first, last, in the middle, reduced away, in both operands and in one of three."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        w = params[0]["w"]
        a, s = batch["a"] @ w, batch["sequence"]
        first = jnp.einsum("bh,btd,dh->tb", a, s, w)
        second = jnp.einsum("tb,bh->ht", first, a)
        third = jnp.einsum("btd,bsd->tsb", s, s)
        fourth = jnp.einsum("tsb,bh->tsh", third, a) / a.shape[0]
        return jnp.mean(first**2) + 1e-2 * jnp.mean(second * 1.0) + jnp.mean(fourth), (first, second, fourth)

    return _train(loss_fn, 12)


@case(item=15)
def two_batched_arguments_and_two_axes() -> Program:
    """Examples in several arguments, in different dimensions, negative ones too."""

    def step(params: Any, x: jax.Array, y: jax.Array, weights: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            losses = kit.cross_entropy(kit.mlp(params, jnp.moveaxis(x, -1, 0)), y[0])
            return jnp.sum(losses * weights) / jnp.sum(weights), losses

        (loss, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), loss, losses

    args = (kit.dense(WIDTH, 6, CLASSES), kit.normal(WIDTH, 16), kit.integers(CLASSES, 1, 16), kit.uniform(16))
    return Program(step, args, {"in_axes": (None, -1, 1, 0)})
