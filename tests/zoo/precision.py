"""Item 10 of the zoo: numbers of fewer bits.

Knows bfloat16, float16, float8, integers, loss scaling. Must not know vnode beyond the names of its options. Most steps
here name their types, so that they run in float32 only; what is rounded to 16 bits is compared at that precision.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from . import Program, case, kit

WIDTH = 6
CLASSES = 4


def _batch(batch: int = 16) -> dict[str, jax.Array]:
    return {"x": kit.normal(batch, WIDTH), "y": kit.integers(CLASSES, batch)}


class Mixed(nn.Module):
    """Computes in `dtype`, keeps parameters in float32."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm(dtype=self.dtype)(nn.Dense(8, dtype=self.dtype)(x))
        return nn.Dense(CLASSES, dtype=self.dtype)(nn.gelu(x)).astype(jnp.float32)


def _mixed(dtype: Any, batch: int = 16, **options: Any) -> Program:
    model = Mixed(dtype)
    tx = optax.adamw(1e-2)

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, opt_state = state

        def loss_fn(params: Any) -> jax.Array:
            return kit.cross_entropy(model.apply({"params": params}, batch["x"]), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    data = _batch(batch)
    params = kit.init(model, data["x"])["params"]
    return Program(step, ((params, kit.warm(tx.init(params))), data), options)


# A gradient rounded to 8 bits of mantissa (bfloat16) after it was summed in another order.
@case(item=10, float64=False, coarsest="bfloat16")
def bfloat16_compute() -> Program:
    return _mixed(jnp.bfloat16)


@case(item=10, batch=12, float64=False, coarsest="float16")
def float16_compute() -> Program:
    return _mixed(jnp.float16, 12)


@case(item=10, float64=False, coarsest="bfloat16")
def bfloat16_compute_with_float32_accumulators() -> Program:
    return _mixed(jnp.bfloat16, accumulate_dtype=jnp.float32)


@case(item=10, batch=12)
def float64_accumulators() -> Program:
    """Wider accumulators than the values."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    return Program(step, (kit.dense(WIDTH, 8, CLASSES), _batch(12)), {"accumulate_dtype": kit.real()})


@case(item=10, batch=24, exact=True, nodes=(24,))
def sum_in_wider_accumulators() -> Program:
    """Ones added to 2**24 are lost in float32; accumulators over nodes in float64 keep them (where enabled)."""

    def step(state: None, x: jax.Array) -> jax.Array:
        return jnp.sum(x)

    def exact(nodes: int) -> Any:
        return lambda state, x: jnp.sum(x.astype(kit.real())).astype(jnp.float32)

    first = 2.0**24 if kit.real() == jnp.float64 else 2.0**20
    x = jnp.ones(24, jnp.float32).at[0].set(first)
    return Program(step, (None, x), {"accumulate_dtype": kit.real()}, reference=exact)


@case(item=10, batch=24, float64=False, exact=True, nodes=(1, 2, 8, 24))
def sum_of_bfloat16_does_not_lose_small_terms() -> Program:
    """256 and many ones: a bfloat16 accumulator would stay at 256. The whole batch adds in float32 (as XLA does)."""

    def step(state: None, x: jax.Array) -> jax.Array:
        return jnp.sum(x)

    values = np.ones(24, np.float32)
    values[0] = 256.0
    return Program(step, (None, jnp.asarray(values, jnp.bfloat16)))


@case(item=10, float64=False, coarsest="bfloat16")
def parameters_in_bfloat16() -> Program:
    """Everything in bfloat16, masters in the optimizer's state in float32."""

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, masters = state

        def loss_fn(params: Any) -> jax.Array:
            logits = kit.mlp(params, batch["x"].astype(jnp.bfloat16))
            return kit.cross_entropy(logits.astype(jnp.float32), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        masters = kit.sgd(masters, jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        return (jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters), masters), loss

    masters = kit.dense(WIDTH, 8, CLASSES)
    params = jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters)
    return Program(step, ((params, masters), _batch()))


def _scaled_loss(half: Any, batch: dict[str, jax.Array], scale: jax.Array) -> jax.Array:
    logits = kit.mlp(half, batch["x"].astype(jnp.float16)).astype(jnp.float32)
    return kit.cross_entropy(logits, batch["y"]).mean() * scale


def _half(params: Any) -> Any:
    return jax.tree.map(lambda p: p.astype(jnp.float16), params)


def _scaled_gradients(params: Any, batch: dict[str, jax.Array], scale: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(lambda p: _scaled_loss(_half(p), batch, scale))(params)
    return loss / scale, jax.tree.map(lambda g: g / scale, grads)


def _added_gradients(params: Any, batch: dict[str, jax.Array], scale: jax.Array) -> Any:
    """Those of four microbatches in float16, unscaled and added up in float32."""

    def turn(total: Any, part: dict[str, jax.Array]) -> Any:
        found = jax.value_and_grad(_scaled_loss)(_half(params), part, scale)
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32) / scale / 4, total, found), None

    parts = jax.tree.map(lambda x: x.reshape(-1, 4, *x.shape[1:]).swapaxes(0, 1), batch)
    return jax.lax.scan(turn, (jnp.float32(0), jax.tree.map(jnp.zeros_like, params)), parts)[0]


def _scaled_step(state: Any, batch: dict[str, jax.Array], gradients: Any = _scaled_gradients) -> Any:
    """Dynamic loss scaling: an update is skipped, and the scale halved, if any gradient is not finite."""
    params, scale, good_steps = state
    loss, grads = gradients(params, batch, scale)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    params = jax.tree.map(lambda p, new: jnp.where(finite, new, p), params, kit.sgd(params, grads))
    good_steps = jnp.where(finite, good_steps + 1, 0)
    grow = good_steps >= 2
    scale = jnp.where(finite, jnp.where(grow, scale * 2.0, scale), scale / 2.0)
    return (params, scale, jnp.where(grow, 0, good_steps)), {"loss": loss, "finite": finite}


@case(item=10, float64=False, coarsest="float16")
def loss_scaling_updating() -> Program:
    state = (kit.dense(WIDTH, 8, CLASSES), jnp.asarray(64.0, jnp.float32), jnp.asarray(1))
    return Program(_scaled_step, (state, _batch()))


@case(item=10, batch=12, float64=False, coarsest="float16")
def loss_scaling_skipping() -> Program:
    """One example overflows float16, so nobody's update is applied."""
    state = (kit.dense(WIDTH, 8, CLASSES), jnp.asarray(64.0, jnp.float32), jnp.asarray(1))
    batch = _batch(12)
    return Program(_scaled_step, (state, {**batch, "x": batch["x"].at[7].set(7e4)}))


@case(item=10, float64=False, coarsest="float16")
def loss_scaling_of_microbatches() -> Program:
    state = (kit.dense(WIDTH, 8, CLASSES), jnp.asarray(64.0, jnp.float32), jnp.asarray(1))
    return Program(functools.partial(_scaled_step, gradients=_added_gradients), (state, _batch()))


@case(item=10, float64=False, coarsest="float16")
def recurrent_in_float16() -> Program:
    """The gradients of weights that all times share are added in float16, in the carry of a loop."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss_fn(half: Any) -> jax.Array:
            def cell(h: jax.Array, x: jax.Array) -> Any:
                return jnp.tanh(x @ half[0]["w"] + h @ half[1]["w"] + half[1]["b"]), None

            h, _ = jax.lax.scan(cell, jnp.zeros((x.shape[0], 8), jnp.float16), x.astype(jnp.float16).swapaxes(0, 1))
            return (h.astype(jnp.float32) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(_half(params))
        return kit.sgd(params, jax.tree.map(lambda g: g.astype(jnp.float32), grads)), loss

    return Program(step, (kit.dense(WIDTH, 8, 8), kit.normal(16, 5, WIDTH)))


@case(item=10)
def all_finite_over_the_batch() -> Program:
    """Finiteness of per-example values, skipped by ``lax.cond``."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        losses = kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"])
        grads = jax.grad(lambda p: kit.cross_entropy(kit.mlp(p, batch["x"]), batch["y"]).mean())(params)
        finite = jnp.isfinite(losses).all()
        return jax.lax.cond(finite, lambda: kit.sgd(params, grads), lambda: params), finite, jnp.isnan(losses).any()

    batch = _batch()
    return Program(step, (kit.dense(WIDTH, 8, CLASSES), {**batch, "x": batch["x"].at[3, 2].set(jnp.inf)}))


@case(item=10, batch=12, float64=False)
def float8_inputs() -> Program:
    """Examples stored in eight bits, unpacked inside the step."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        x = batch["x"].astype(jnp.float32) * batch["scale"][:, None]

        def loss_fn(params: Any) -> jax.Array:
            return kit.cross_entropy(kit.mlp(params, x), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss, x.astype(jnp.float8_e5m2)

    x = np.asarray(kit.normal(12, WIDTH)).astype(ml_dtypes.float8_e4m3fn)
    batch = {"x": jnp.asarray(x), "scale": kit.uniform(12, low=0.5), "y": kit.integers(CLASSES, 12)}
    return Program(step, (kit.dense(WIDTH, 8, CLASSES), batch))


@case(item=10)
def integer_inputs() -> Program:
    """Pixels in bytes, and counts in small integers, that are normalized inside the step."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        x = batch["pixels"].astype(kit.real()) / 127.5 - 1.0
        counts = jnp.log1p(batch["counts"].astype(kit.real()))

        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((kit.mlp(params, x)[:, 0] - counts) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        totals = batch["counts"].sum(dtype=jnp.int32), batch["pixels"].max(), batch["pixels"].astype(jnp.uint32).sum()
        return kit.sgd(params, grads), loss, totals

    batch = {
        "pixels": kit.integers(256, 16, WIDTH, dtype=np.uint8),
        "counts": kit.integers(100, 16, dtype=np.int16),
    }
    return Program(step, (kit.dense(WIDTH, 8, 1), batch))


@case(item=10, batch=12, float64=False)
def quantized_training() -> Program:
    """Weights and activations rounded to integers, straight-through gradients, an integer matrix product."""

    @jax.custom_vjp
    def rounded(x: jax.Array) -> jax.Array:
        return jnp.round(x)

    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))

    def step(params: jax.Array, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(w: jax.Array) -> Any:
            scale = jax.lax.stop_gradient(jnp.abs(w).max() / 7.0)
            logits = batch["x"] @ (rounded(w / scale) * scale)
            return kit.cross_entropy(logits, batch["y"]).mean(), scale

        (loss, scale), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        levels = jnp.clip(jnp.round(batch["x"] * 20), -127, 127).astype(jnp.int8)
        weights = jnp.round(params / scale).astype(jnp.int8)
        product = jax.lax.dot(levels, weights, preferred_element_type=jnp.int32)
        return params - 0.1 * grads, loss, product

    return Program(step, (kit.normal(WIDTH, CLASSES), _batch(12)))


@case(item=10)
def complex_numbers() -> Program:
    """Spectra of the examples, complex parameters, a real loss."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            filtered = jnp.fft.irfft(jnp.fft.rfft(x, axis=-1) * params, n=x.shape[-1], axis=-1)
            return jnp.mean(jnp.sum((filtered - x) ** 2, axis=-1)), jnp.fft.fft(x, axis=-1).sum(axis=0)

        (loss, spectrum), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return params - 0.1 * jnp.conj(grads), loss, spectrum

    n = WIDTH // 2 + 1
    return Program(step, (jax.lax.complex(kit.normal(n), kit.normal(n, seed=1)), kit.normal(16, WIDTH)))
