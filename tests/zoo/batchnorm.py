"""Item 7 of the zoo: batch normalization, exactly and with per-node statistics.

Knows batch normalization in flax linen, haiku and equinox, and its ghost variant written by hand, which is the
reference for ``coupling="local"``. Must not know vnode beyond the names of its options.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax

from . import Program, case, kit

CLASSES = 3
WIDTH = 5
EXACT = {"recompute_budget": 10.0}
GHOST_NODES = (1, 2, 4, 8)
"""Divisors of the batch: per-node statistics of slices of different sizes have no counterpart written by hand."""


class Net(nn.Module):
    """Dense layers with batch normalization between them."""

    layers: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = nn.Dense(6, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.8)(x))
        return nn.Dense(CLASSES)(x)


class ConvNet(nn.Module):
    """A convolution with batch normalization over examples and pixels."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, use_fast_variance=False)(x))
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


class GhostNorm(nn.Module):
    """Statistics of every group of examples by itself; running statistics of all examples together."""

    groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (x.shape[-1],))
        running_var = self.variable("batch_stats", "var", jnp.ones, (x.shape[-1],))
        grouped = x.reshape(self.groups, -1, x.shape[-1])
        mean = grouped.mean(axis=1, keepdims=True)
        var = (grouped**2).mean(axis=1, keepdims=True) - mean**2
        normal = (grouped - mean) / jnp.sqrt(var + 1e-5)
        whole_mean = x.mean(axis=0)
        running_mean.value = 0.8 * running_mean.value + 0.2 * whole_mean
        running_var.value = 0.8 * running_var.value + 0.2 * ((x**2).mean(axis=0) - whole_mean**2)
        return normal.reshape(x.shape) * scale + bias


class GhostNet(nn.Module):
    """`Net` with ghost statistics in groups of the batch; the names of its parameters are those of `Net`."""

    groups: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, groups in enumerate(self.groups):
            x = nn.Dense(6, use_bias=False)(x)
            x = nn.relu(GhostNorm(groups, name=f"BatchNorm_{i}")(x))
        return nn.Dense(CLASSES)(x)


def _stepper(model: nn.Module) -> Any:
    """A training step with a masked mean, running statistics, and per-example outputs."""

    def step(variables: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, updated = model.apply({**variables, "params": params}, batch["x"], mutable=["batch_stats"])
            losses, w = kit.cross_entropy(logits, batch["y"]), batch["weight"]
            return (losses * w).sum() / w.sum(), (updated, logits)

        (loss, (updated, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(variables["params"])
        return {"params": kit.sgd(variables["params"], grads), **updated}, {"loss": loss, "logits": logits}

    return step


def _batch(batch: int, *shape: int) -> dict[str, jax.Array]:
    weight = kit.uniform(batch, low=-0.5, high=1.0)
    x, y = kit.normal(batch, *(shape or (WIDTH,))), kit.integers(CLASSES, batch)
    return {"x": x, "y": y, "weight": jnp.maximum(weight, 0.0)}


def _program(model: nn.Module, batch: dict[str, jax.Array], **options: Any) -> Program:
    return Program(_stepper(model), (kit.init(model, batch["x"]), batch), options)


@case(item=7)
def batch_norm_exact() -> Program:
    return _program(Net(), _batch(16), **EXACT)


@case(item=7, batch=12)
def batch_norm_exact_two_layers() -> Program:
    return _program(Net(2), _batch(12), **EXACT)


@case(item=7)
def batch_norm_exact_convolution() -> Program:
    return _program(ConvNet(), _batch(16, 4, 4, 2), **EXACT)


@case(item=7, batch=13)
def batch_norm_exact_batch_that_is_no_multiple() -> Program:
    return _program(Net(), _batch(13), **EXACT)


@case(item=7, batch=12)
def batch_norm_exact_in_haiku() -> Program:
    def forward(x: jax.Array) -> jax.Array:
        norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)
        return hk.Linear(CLASSES)(jax.nn.relu(norm(hk.Linear(6)(x), is_training=True)))

    model = hk.without_apply_rng(hk.transform_with_state(forward))

    def step(carry: Any, batch: dict[str, jax.Array]) -> Any:
        params, state = carry

        def loss_fn(params: Any) -> Any:
            logits, new_state = model.apply(params, state, batch["x"])
            return kit.cross_entropy(logits, batch["y"]).mean(), new_state

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return (kit.sgd(params, grads), state), loss

    batch = _batch(12)
    carry = kit.fill(jax.eval_shape(lambda: model.init(jax.random.key(0), batch["x"])))
    return Program(step, (carry, batch), EXACT)


@case(item=7)
def batch_norm_exact_in_equinox() -> Program:
    """Statistics through a named axis of vmap."""

    def make() -> Any:
        keys = jax.random.split(jax.random.key(0), 2)
        norm = eqx.nn.BatchNorm(6, axis_name="batch", mode="batch")
        return eqx.nn.Linear(WIDTH, 6, key=keys[0]), norm, eqx.nn.Linear(6, CLASSES, key=keys[1])

    (first, norm, last), state = eqx.nn.make_with_state(make)()

    def apply(model: Any, state: Any, x: jax.Array) -> Any:
        first, norm, last = model
        x, state = norm(first(x), state)
        return last(jax.nn.relu(x)), state

    arrays, static = eqx.partition((first, norm, last), eqx.is_inexact_array)
    state_leaves, state_structure = jax.tree.flatten(state)

    def step(carry: Any, batch: dict[str, jax.Array]) -> Any:
        arrays, leaves = carry
        state = jax.tree.unflatten(state_structure, leaves)

        def loss_fn(arrays: Any) -> Any:
            model = eqx.combine(arrays, static)
            over_batch = jax.vmap(apply, in_axes=(None, None, 0), out_axes=(0, None), axis_name="batch")
            logits, new_state = over_batch(model, state, batch["x"])
            return kit.cross_entropy(logits, batch["y"]).mean(), new_state

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(arrays)
        return (kit.sgd(arrays, grads), jax.tree.leaves(state)), loss

    cast = [x.astype(kit.real()) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in state_leaves]
    return Program(step, ((kit.fill(arrays), cast), _batch(16)), EXACT)


@case(item=7, nodes=GHOST_NODES)
def batch_norm_local() -> Program:
    program = _program(Net(), _batch(16), coupling="local")
    return Program(program.step, program.args, program.options, reference=lambda v: _stepper(GhostNet((v,))))


@case(item=7, nodes=GHOST_NODES)
def batch_norm_local_two_layers() -> Program:
    program = _program(Net(2), _batch(16), coupling="local")
    return Program(program.step, program.args, program.options, reference=lambda v: _stepper(GhostNet((v, v))))


@case(item=7, nodes=GHOST_NODES)
def batch_norm_local_deep() -> Program:
    """Per-node statistics cost no extra pass, however deep the network: the default budget is enough."""
    program = _program(Net(4), _batch(16), coupling="local")
    return Program(program.step, program.args, program.options, reference=lambda v: _stepper(GhostNet((v,) * 4)))


@case(item=7, nodes=GHOST_NODES)
def batch_norm_mapped_by_scope() -> Program:
    """Per-node statistics in the first layer, exact ones in the second."""
    program = _program(Net(2), _batch(16), coupling={"BatchNorm_0": "local", ".*": "exact"}, **EXACT)
    return Program(program.step, program.args, program.options, reference=lambda v: _stepper(GhostNet((v, 1))))


DEEP = 4


@case(item=7)
def batch_norm_deep() -> Program:
    """Four narrow layers: their activations are kept from pass to pass."""
    return _program(Net(DEEP), _batch(16))


@case(item=7, expect=("CouplingError", r"(?s)BatchNorm_0.*BatchNorm_1.*BatchNorm_2.*BatchNorm_3.*recompute_budget="))
def batch_norm_deep_is_refused() -> Program:
    """With a budget of less than a forward pass. The error lists every layer."""
    return _program(Net(DEEP), _batch(16), recompute_budget=0.2)


@case(item=7, expect=("CouplingError", r"(?s)batchnorm\.py:\d+.*\d%"))
def batch_norm_deep_is_refused_with_lines_and_costs() -> Program:
    """The error names the user's own lines, with the cost of each coupling."""
    return _program(Net(DEEP), _batch(16), recompute_budget=0.2)


@case(item=7, expect=("CouplingError", r"(?s)coupling='error'.*BatchNorm_0"))
def batch_norm_forbidden_is_refused() -> Program:
    return _program(Net(), _batch(16), coupling="error")


@case(item=7)
def batch_statistics_only_reported() -> Program:
    """Running statistics of inputs, which normalize nothing in this step: no extra pass."""

    def step(state: Any, x: jax.Array) -> Any:
        params, mean, var = state
        new_mean = 0.9 * mean + 0.1 * x.mean(axis=0)
        new_var = 0.9 * var + 0.1 * x.var(axis=0)

        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(kit.mlp(params, (x - mean) * lax.rsqrt(var + 1e-5)) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return (kit.sgd(params, grads), new_mean, new_var), loss

    state = (kit.dense(WIDTH, 6, 1), kit.normal(WIDTH, scale=0.1), kit.uniform(WIDTH, low=0.5, high=1.5))
    return Program(step, (state, kit.normal(16, WIDTH)))


@case(item=7)
def local_statistics_leave_maxima_exact() -> Program:
    """A node's own maximum is no estimate of the batch's: each node subtracts the maximum of all."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        logits = 3 * jnp.tanh(x @ w)
        return jax.nn.logsumexp(logits), (logits == logits.max()).sum()

    return Program(step, (kit.normal(WIDTH), kit.normal(16, WIDTH)), {"coupling": "local"})
