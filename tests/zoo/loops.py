"""Item 6 of the zoo: loops and branches.

Knows ``lax.scan``, ``lax.map``, ``lax.while_loop``, ``lax.cond``, and recurrent networks. Must not know vnode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax

from . import Program, case, kit

WIDTH = 4
HIDDEN = 5
LENGTH = 6


def _lstm_params(seed: int = 0) -> dict[str, jax.Array]:
    return {
        "x": kit.normal(WIDTH, 4 * HIDDEN, seed=seed, scale=0.4),
        "h": kit.normal(HIDDEN, 4 * HIDDEN, seed=seed + 1, scale=0.4),
        "b": kit.normal(4 * HIDDEN, seed=seed + 2, scale=0.1),
    }


def _lstm_cell(params: Any, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
    h, c = carry
    i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"] + params["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _gru_cell(params: Any, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    r, z = jnp.split(jax.nn.sigmoid(x @ params["x"][:, : 2 * HIDDEN] + h @ params["h"][:, : 2 * HIDDEN]), 2, axis=-1)
    candidate = jnp.tanh(x @ params["x"][:, 3 * HIDDEN :] + r * (h @ params["h"][:, 3 * HIDDEN :]))
    h = (1 - z) * h + z * candidate
    return h, h


def _train(loss_fn: Callable[[Any, jax.Array], Any], params: Any, x: jax.Array, in_axis: int = 0) -> Program:
    def step(params: Any, x: jax.Array) -> tuple[Any, Any]:
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x)
        return kit.sgd(params, grads), (loss, aux)

    return Program(step, (params, x), {"in_axes": (None, in_axis)})


@case(item=6)
def lstm_batch_major() -> Program:
    def loss_fn(params: Any, x: jax.Array) -> Any:
        zeros = jnp.zeros((x.shape[0], HIDDEN), x.dtype)
        carry, outputs = lax.scan(lambda c, x: _lstm_cell(params, c, x), (zeros, zeros), jnp.swapaxes(x, 0, 1))
        return jnp.mean(outputs**2), carry

    return _train(loss_fn, _lstm_params(), kit.normal(16, LENGTH, WIDTH))


@case(item=6, batch=12)
def lstm_time_major() -> Program:
    def loss_fn(params: Any, x: jax.Array) -> Any:
        zeros = jnp.zeros((x.shape[1], HIDDEN), x.dtype)
        _, outputs = lax.scan(lambda c, x: _lstm_cell(params, c, x), (zeros, zeros), x)
        return jnp.mean(jnp.sum(outputs[-1] ** 2, axis=-1)), outputs

    return _train(loss_fn, _lstm_params(), kit.normal(LENGTH, 12, WIDTH), in_axis=1)


@case(item=6)
def gru_with_variable_lengths() -> Program:
    """The carry stops where a sequence ends; the loss is a mean over real steps."""

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> Any:
            def body(h: jax.Array, inputs: Any) -> Any:
                x, valid = inputs
                new, _ = _gru_cell(params, h, x)
                h = jnp.where(valid[:, None] > 0, new, h)
                return h, h

            h0 = jnp.broadcast_to(params["h0"], (batch["x"].shape[0], HIDDEN))
            last, outputs = lax.scan(body, h0, (batch["x"].swapaxes(0, 1), batch["mask"].T))
            errors = jnp.sum(outputs**2, axis=-1) * batch["mask"].T
            return errors.sum() / batch["mask"].sum(), last

        (loss, last), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), (loss, last)

    batch = {"x": kit.normal(16, LENGTH, WIDTH), "mask": kit.lengths_mask(16, LENGTH)}
    return Program(step, ({**_lstm_params(), "h0": kit.normal(HIDDEN)}, batch))


@case(item=6)
def gru_unrolled_and_rematerialized() -> Program:
    def loss_fn(params: Any, x: jax.Array) -> Any:
        cell = jax.checkpoint(lambda h, x: _gru_cell(params, h, x))
        h = jnp.zeros((x.shape[0], HIDDEN), x.dtype)
        h, outputs = lax.scan(cell, h, jnp.moveaxis(x, 1, 0), unroll=2)
        return jnp.mean(outputs.sum(axis=0) ** 2), h

    return _train(loss_fn, _lstm_params(), kit.normal(16, LENGTH, WIDTH))


@case(item=6, batch=12)
def bidirectional() -> Program:
    def loss_fn(params: Any, x: jax.Array) -> Any:
        zeros = jnp.zeros((x.shape[0], HIDDEN), x.dtype)
        time_major = jnp.swapaxes(x, 0, 1)
        _, a = lax.scan(lambda h, x: _gru_cell(params["forward"], h, x), zeros, time_major)
        _, b = lax.scan(lambda h, x: _gru_cell(params["backward"], h, x), zeros, time_major, reverse=True)
        outputs = jnp.swapaxes(jnp.concatenate([a, b], axis=-1), 0, 1)
        return jnp.mean(outputs**3), outputs[:, 0]

    params = {"forward": _lstm_params(), "backward": _lstm_params(5)}
    return _train(loss_fn, params, kit.normal(12, LENGTH, WIDTH))


@case(item=6)
def flax_lstm_with_lengths() -> Program:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, lengths: jax.Array) -> jax.Array:
            cell = nn.OptimizedLSTMCell(HIDDEN, param_dtype=kit.real())
            outputs = nn.Bidirectional(nn.RNN(cell), nn.RNN(nn.GRUCell(HIDDEN, param_dtype=kit.real())))(
                x, seq_lengths=lengths
            )
            return nn.Dense(1)(outputs)[..., 0]

    model = Model()

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            outputs = model.apply({"params": params}, batch["x"], batch["lengths"])
            valid = jnp.arange(LENGTH) < batch["lengths"][:, None]
            return jnp.mean(outputs**2, where=valid)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    batch = {"x": kit.normal(16, LENGTH, WIDTH), "lengths": 1 + kit.integers(LENGTH, 16)}
    return Program(step, (kit.init(model, batch["x"], batch["lengths"])["params"], batch))


@case(item=6, batch=12)
def haiku_gru_dynamic_unroll() -> Program:
    def forward(x: jax.Array) -> jax.Array:
        core = hk.GRU(HIDDEN)
        h0 = jax.tree.map(lambda h: h.astype(kit.real()), core.initial_state(x.shape[0]))
        outputs, _ = hk.dynamic_unroll(core, jnp.swapaxes(x, 0, 1), h0)
        return hk.Linear(1)(outputs)[..., 0]

    model = hk.without_apply_rng(hk.transform(forward))

    def loss_fn(params: Any, x: jax.Array) -> Any:
        outputs = model.apply(params, x)
        return jnp.mean(outputs**2), outputs

    x = kit.normal(12, LENGTH, WIDTH)
    params = kit.fill(jax.eval_shape(lambda: model.init(jax.random.key(0), x)))
    return _train(loss_fn, params, x)


@case(item=6)
def map_over_examples() -> Program:
    """``lax.map`` over the batch: a loop over what is to be split."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        losses = lax.map(lambda row: jnp.sum(jnp.tanh(kit.mlp(params, row)) ** 2), x)
        return losses.mean(), losses

    return _train(loss_fn, kit.dense(WIDTH, HIDDEN, 2), kit.normal(16, WIDTH))


@case(item=6, batch=12)
def map_over_chunks_of_examples() -> Program:
    def loss_fn(params: Any, x: jax.Array) -> Any:
        losses = lax.map(lambda row: jnp.sum(kit.mlp(params, row) ** 2), x, batch_size=4)
        return losses.mean(), losses

    return _train(loss_fn, kit.dense(WIDTH, HIDDEN, 2), kit.normal(12, WIDTH))


@case(item=6)
def scan_over_examples_without_carry() -> Program:
    def loss_fn(params: Any, x: jax.Array) -> Any:
        def body(carry: None, row: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
            out = kit.mlp(params, row)
            return None, (out, jnp.sum(out**2))

        _, (outputs, losses) = lax.scan(body, None, x)
        return losses.mean(), outputs

    return _train(loss_fn, kit.dense(WIDTH, HIDDEN, 2), kit.normal(16, WIDTH))


@case(item=6)
def scan_over_examples_with_sum_in_carry() -> Program:
    """Accumulation over examples, as written by hand."""

    def step(params: Any, x: jax.Array) -> Any:
        def body(carry: Any, row: jax.Array) -> tuple[Any, jax.Array]:
            total, grads = carry
            loss, g = jax.value_and_grad(lambda p: jnp.sum(kit.mlp(p, row) ** 2))(params)
            return (total + loss, jax.tree.map(jnp.add, grads, g)), loss

        carry = (jnp.zeros((), x.dtype), jax.tree.map(jnp.zeros_like, params))
        (total, grads), losses = lax.scan(body, carry, x)
        return kit.sgd(params, grads, 0.1 / x.shape[0]), total, losses

    return Program(step, (kit.dense(WIDTH, HIDDEN, 2), kit.normal(16, WIDTH)))


@case(item=6, batch=12)
def scan_over_examples_with_order_in_carry() -> Program:
    """Online learning: every example sees the parameters that the ones before it left."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def body(w: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            error = row @ w - 1.0
            return w - 0.05 * error * row, error

        return lax.scan(body, w, x)

    return Program(step, (kit.normal(WIDTH), kit.normal(12, WIDTH)))


@case(item=6)
def while_loop_per_example() -> Program:
    """Newton's iteration under vmap: examples stop at different times."""

    def step(scale: jax.Array, x: jax.Array) -> Any:
        def root(a: jax.Array) -> tuple[jax.Array, jax.Array]:
            def going(state: Any) -> jax.Array:
                y, i = state
                return (jnp.abs(y * y - a) > 1e-3) & (i < 30)

            def body(state: Any) -> Any:
                y, i = state
                return 0.5 * (y + a / y), i + 1

            return lax.while_loop(going, body, (jnp.asarray(10.0, a.dtype), 0))

        roots, iterations = jax.vmap(root)(scale * jnp.abs(x) + 0.1)
        return roots, iterations, roots.mean(), iterations.max()

    return Program(step, (jnp.asarray(2.0, kit.real()), kit.normal(16)))


@case(item=6, batch=13)
def while_loop_with_sums_and_positions() -> Program:
    """What the loop does depends on which examples it does it for: their numbers, and how many are there."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def body(state: Any) -> Any:
            i, y, total = state
            y = jnp.sin(y * w[i] + jnp.arange(x.shape[0])[:, None])
            return i + 1, y, total + y.sum(0)

        return lax.while_loop(lambda state: state[0] < 3, body, (0, x, jnp.zeros(WIDTH, x.dtype)))

    return Program(step, (kit.normal(3, WIDTH), kit.normal(13, WIDTH)))


@case(item=6, batch=12)
def while_loop_until_all_converge() -> Program:
    """The whole batch iterates until the last example is there: how long is a reduced value."""

    def step(scale: jax.Array, x: jax.Array) -> Any:
        target = scale * jnp.abs(x) + 0.1

        def going(state: Any) -> jax.Array:
            y, i = state
            return jnp.any(jnp.abs(y * y - target) > 1e-3) & (i < 30)

        def body(state: Any) -> Any:
            y, i = state
            return 0.5 * (y + target / y), i + 1

        return lax.while_loop(going, body, (jnp.full_like(x, 10.0), 0))

    return Program(step, (jnp.asarray(2.0, kit.real()), kit.normal(12)))


@case(item=6)
def fori_loop_with_update_by_index() -> Program:
    """A loop of fixed length that writes its results into an array, one column at a time."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        def body(i: jax.Array, out: jax.Array) -> jax.Array:
            column = lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False)
            return out.at[:, i].set(kit.mlp(params, column)[:, 0] + out[:, i - 1])

        outputs = lax.fori_loop(0, LENGTH, body, jnp.zeros(x.shape[:2], x.dtype))
        return jnp.mean(outputs**2), outputs

    return _train(loss_fn, kit.dense(WIDTH, HIDDEN, 1), kit.normal(16, LENGTH, WIDTH))


@case(item=6)
def power_iteration_on_parameters() -> Program:
    """A loop that has nothing to do with the batch: spectral normalization."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        w = params["w"]

        def body(_: int, v: jax.Array) -> jax.Array:
            v = w.T @ (w @ v)
            return v / jnp.linalg.norm(v)

        v = lax.stop_gradient(lax.fori_loop(0, 5, body, jnp.ones(HIDDEN, w.dtype)))
        sigma = jnp.linalg.norm(w @ v)
        outputs = jnp.tanh(x @ (w / sigma))
        return jnp.mean(outputs**2), sigma

    return _train(loss_fn, {"w": kit.normal(WIDTH, HIDDEN)}, kit.normal(16, WIDTH))


@case(item=6, batch=12)
def cond_on_invariant() -> Program:
    """A warm-up phase with another loss, chosen by the step counter."""

    def step(state: Any, x: jax.Array) -> Any:
        params, count = state

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            outputs = kit.mlp(params, x)
            losses = lax.cond(count < 5, lambda o: jnp.sum(o**2, axis=-1), lambda o: jnp.abs(o).sum(axis=-1), outputs)
            return losses.mean(), losses

        (_, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return (kit.sgd(params, grads), count + 1), losses

    return Program(step, ((kit.dense(WIDTH, HIDDEN, 2), jnp.asarray(5)), kit.normal(12, WIDTH)))


@case(item=6)
def switch_on_invariant_with_reductions_inside() -> Program:
    """Branches that reduce over the batch, with parameters in their closures."""

    def step(state: Any, x: jax.Array) -> Any:
        params, which = state

        def loss_fn(params: Any) -> jax.Array:
            branches = [
                lambda x: jnp.mean(kit.mlp(params, x) ** 2),
                lambda x: jnp.sum(jnp.abs(kit.mlp(params, x))) / x.shape[0],
                lambda x: jnp.zeros((), x.dtype),
            ]
            return lax.switch(which, branches, x)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return (kit.sgd(params, grads), (which + 1) % 3), loss

    return Program(step, ((kit.dense(WIDTH, HIDDEN, 2), jnp.asarray(1)), kit.normal(16, WIDTH)))


@case(item=6)
def cond_on_reduced_update() -> Program:
    """The update is skipped when the loss or the gradient is not finite, or too great."""

    def step(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(kit.mlp(p, x) ** 2))(params)
        good = jnp.isfinite(loss) & (loss < 100.0)
        params = lax.cond(good, lambda p, g: kit.sgd(p, g), lambda p, g: p, params, grads)
        return params, loss, good

    return Program(step, (kit.dense(WIDTH, HIDDEN, 2), kit.normal(16, WIDTH)))


@case(item=6, batch=12)
def cond_on_reduced_with_batched_operand() -> Program:
    """Which branch the examples take depends on a statistic of the batch."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        hard = jnp.mean(batch["difficulty"]) > 0.0

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            x = lax.cond(hard, lambda x: 0.5 * x, lambda x: x + 1.0, batch["x"])
            losses = jnp.sum(kit.mlp(params, x) ** 2, axis=-1)
            return losses.mean(), losses

        (_, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), losses, hard

    batch = {"x": kit.normal(12, WIDTH), "difficulty": kit.normal(12, seed=3)}
    return Program(step, (kit.dense(WIDTH, HIDDEN, 2), batch))


@case(item=6)
def cond_per_example() -> Program:
    """Branches under vmap become selections, and stay branches inside a map."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        def one(row: jax.Array) -> jax.Array:
            return lax.cond(row[0] > 0, lambda r: jnp.sum(kit.mlp(params, r)), lambda r: jnp.sum(r) ** 2, row)

        a, b = jax.vmap(one)(x), lax.map(one, x)
        return jnp.mean(a * b), (a, b)

    return _train(loss_fn, kit.dense(WIDTH, HIDDEN, 2), kit.normal(16, WIDTH))


@case(item=6)
def associative_scan_over_time() -> Program:
    """A linear recurrence (a state-space layer) in parallel over time."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        decay = jax.nn.sigmoid(x @ params["gate"])
        inputs = x @ params["in"]

        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        _, h = lax.associative_scan(combine, (decay, inputs), axis=1)
        return jnp.mean(h**2), h[:, -1]

    params = {"gate": kit.normal(WIDTH, HIDDEN), "in": kit.normal(WIDTH, HIDDEN, seed=1)}
    return _train(loss_fn, params, kit.normal(16, LENGTH, WIDTH))


@case(item=6, batch=12)
def fixed_point_with_implicit_gradient() -> Program:
    """A deep equilibrium layer: a while loop forward, a custom rule that solves a linear system backward."""

    def layer(params: Any, x: jax.Array, z: jax.Array) -> jax.Array:
        return jnp.tanh(z @ params["w"] + x @ params["u"])

    @jax.custom_vjp
    def solve(params: Any, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 8, lambda _, z: layer(params, x, z), jnp.zeros((x.shape[0], HIDDEN), x.dtype))

    def forward(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        z = solve(params, x)
        return z, (params, x, z)

    def backward(saved: Any, cotangent: jax.Array) -> Any:
        params, x, z = saved
        _, pull_z = jax.vjp(lambda z: layer(params, x, z), z)
        u = lax.fori_loop(0, 8, lambda _, u: cotangent + pull_z(u)[0], cotangent)
        _, pull = jax.vjp(lambda p, x: layer(p, x, z), params, x)
        return pull(u)

    solve.defvjp(forward, backward)

    def loss_fn(params: Any, x: jax.Array) -> Any:
        z = solve(params, x)
        return jnp.mean(z**2), z

    params = {"w": kit.normal(HIDDEN, HIDDEN, scale=0.15), "u": kit.normal(WIDTH, HIDDEN, seed=1)}
    return _train(loss_fn, params, kit.normal(12, WIDTH))


@case(item=6)
def nested_scans() -> Program:
    """A scan over layers around a scan over time; the weights' gradient is stacked by one and summed by the other."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        def layer(x: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array]:
            def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                h = jnp.tanh(x + h @ p)
                return h, h

            last, outputs = lax.scan(cell, jnp.zeros(x.shape[1:], x.dtype), x)
            return outputs, last

        outputs, lasts = lax.scan(layer, jnp.moveaxis(x, 1, 0), params)
        return jnp.mean(outputs**2), lasts

    return _train(loss_fn, kit.normal(2, WIDTH, WIDTH, scale=0.4), kit.normal(16, LENGTH, WIDTH))


@case(item=6, batch=12)
def truncated_backpropagation() -> Program:
    """The hidden states are part of the batch: carried from step to step, with an update per chunk of time."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def chunk(carry: Any, x: jax.Array) -> Any:
            params, h = carry

            def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
                last, outputs = lax.scan(lambda h, x: _gru_cell(params, h, x), h, jnp.swapaxes(x, 0, 1))
                return jnp.mean(outputs**2), last

            (loss, h), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
            return (kit.sgd(params, grads), h), loss

        chunks = jnp.moveaxis(batch["x"].reshape(-1, 2, LENGTH // 2, WIDTH), 1, 0)
        (params, h), losses = lax.scan(chunk, (params, batch["h"]), chunks)
        return params, h, losses

    batch = {"x": kit.normal(12, LENGTH, WIDTH), "h": kit.normal(12, HIDDEN)}
    return Program(step, (_lstm_params(), batch))


@case(item=6)
def loop_over_time_with_a_mean_over_the_batch() -> Program:
    """A loop around passes of its own; one of its results leaves as it is, nodes work on the other."""

    def step(scale: jax.Array, x: jax.Array) -> Any:
        def center(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jnp.tanh(x - x.mean(axis=0) + 0.1 * carry)
            return jnp.where(x.sum() > 0, carry, x), x[:, ::-1]

        zeros = jnp.zeros((x.shape[0], WIDTH), x.dtype)
        last, outputs = lax.scan(center, zeros, jnp.minimum(jnp.sqrt(scale), jnp.swapaxes(x, 0, 1)))
        return jnp.swapaxes(last, 0, 1) * 2, outputs

    return Program(step, (kit.normal(1) ** 2, kit.normal(16, LENGTH, WIDTH)), {"recompute_budget": 10.0})
