"""Item 1 of the zoo: frameworks and optimizers.

Knows flax linen, equinox, haiku and optax. Must not know vnode. Steps on flax.nnx are in `frameworks_nnx`, because they
mutate their arguments. The models are small on purpose: what differs from case to case is the shape of the step.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import flax.struct
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from . import Program, case, kit

CLASSES = 5
WIDTH = 6


class Mlp(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(CLASSES)(x)


def _batch(size: int = 16, seed: int = 0) -> dict[str, jax.Array]:
    return {"x": kit.normal(size, WIDTH, seed=seed), "y": kit.integers(CLASSES, size, seed=seed)}


def _linen_state(tx: optax.GradientTransformation, model: nn.Module | None = None) -> TrainState:
    model = model or Mlp()
    params = kit.init(model, _batch()["x"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return state.replace(opt_state=kit.warm(state.opt_state))


def _after_an_update(state: TrainState) -> TrainState:
    return jax.jit(lambda state: state.apply_gradients(grads=state.params))(state)


def _linen_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({"params": params}, batch["x"])
        return kit.cross_entropy(logits, batch["y"]).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["y"])
    metrics = {"loss": loss, "accuracy": accuracy, "grad_norm": optax.tree.norm(grads)}
    return state.apply_gradients(grads=grads), metrics


@case(item=1)
def linen_adamw() -> Program:
    return Program(_linen_step, (_linen_state(optax.adamw(1e-2)), _batch()))


@case(item=1, batch=12)
def linen_clip_by_global_norm() -> Program:
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    return Program(_linen_step, (_linen_state(tx), _batch(12)))


@case(item=1)
def linen_schedule() -> Program:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=2, decay_steps=10)
    tx = optax.chain(optax.adaptive_grad_clip(0.05), optax.sgd(schedule, momentum=0.9, nesterov=True))
    state = _linen_state(tx)
    return Program(_linen_step, (_after_an_update(state), _batch()))


@case(item=1)
def linen_injected_hyperparameters() -> Program:
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.0, 5))
    return Program(_linen_step, (_linen_state(tx), _batch()))


# optax.MultiSteps adds gradients up in float32, whatever their type.
@case(item=1, coarsest="float32")
def linen_multi_steps() -> Program:
    """Accumulation inside the step: the mini step before the update, and (the next case) the one with it."""
    tx = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2)
    return Program(_linen_step, (_linen_state(tx), _batch()))


@case(item=1, batch=24, coarsest="float32")
def linen_multi_steps_updating() -> Program:
    tx = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), every_k_schedule=2)
    state = _linen_state(tx)
    return Program(_linen_step, (_after_an_update(state), _batch(24)))


@case(item=1)
def linen_exponential_moving_average() -> Program:
    class State(TrainState):
        average: Any = None

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Any]:
        state, metrics = _linen_step(state, batch)
        return state.replace(average=optax.incremental_update(state.params, state.average, 0.01)), metrics

    plain = _linen_state(optax.adamw(1e-2))
    state = State.create(apply_fn=plain.apply_fn, params=plain.params, tx=plain.tx, average=plain.params)
    return Program(step, (state.replace(opt_state=kit.warm(state.opt_state)), _batch()))


@case(item=1, batch=12)
def linen_masked_weight_decay_per_group() -> Program:
    """Groups of parameters with their own optimizer; kernels decay, biases do not."""

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)

    def decays(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    tx = optax.chain(
        optax.multi_transform({"kernel": optax.adam(1e-2), "bias": optax.sgd(0.1)}, labels),
        optax.add_decayed_weights(1e-3, mask=decays),
    )
    return Program(_linen_step, (_linen_state(tx), _batch(12)))


@case(item=1)
def linen_optimizers_with_norms_and_factors() -> Program:
    """Optimizers that reduce over parameters: trust ratios, factored moments."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    tx = optax.chain(factored, optax.scale_by_trust_ratio(), optax.scale(-0.01))
    return Program(_linen_step, (_linen_state(tx), _batch()))


@case(item=1)
def linen_muon() -> Program:
    tx = optax.contrib.muon(1e-2)
    return Program(_linen_step, (_linen_state(tx), _batch()))


@case(item=1)
def linen_apply_if_finite() -> Program:
    tx = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3)
    return Program(_linen_step, (_linen_state(tx), _batch()))


@case(item=1, batch=12)
def linen_sharpness_aware() -> Program:
    """Two gradients, the second at parameters moved by the first."""

    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return kit.cross_entropy(state.apply_fn({"params": params}, batch["x"]), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        norm = optax.tree.norm(grads)
        moved = jax.tree.map(lambda p, g: p + 0.05 * g / (norm + 1e-12), state.params, grads)
        return state.apply_gradients(grads=jax.grad(loss_fn)(moved)), loss

    return Program(step, (_linen_state(optax.adamw(1e-2)), _batch(12)))


@case(item=1)
def linen_setup_and_nested_modules() -> Program:
    class Block(nn.Module):
        width: int

        def setup(self) -> None:
            self.norm = nn.LayerNorm()
            self.wide, self.narrow = nn.Dense(2 * self.width), nn.Dense(self.width)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.narrow(nn.gelu(self.wide(self.norm(x))))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(2):
                x = Block(WIDTH)(x)
            return nn.Dense(CLASSES)(nn.RMSNorm()(x))

    return Program(_linen_step, (_linen_state(optax.adamw(1e-2), Model()), _batch()))


@case(item=1, batch=12)
def plain_params_and_arrays() -> Program:
    """No framework: parameters, a tuple of arrays, a scalar rate."""

    def step(params: Any, batch: tuple[jax.Array, jax.Array], rate: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            x, y = batch
            return jnp.mean((kit.mlp(params, x)[:, 0] - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads, rate), loss

    batch = (kit.normal(12, 4), kit.normal(12, seed=1))
    return Program(step, (kit.dense(4, 8, 1), batch, jnp.asarray(0.1, kit.real())))


@case(item=1)
def plain_named_tuple_state() -> Program:
    class State(NamedTuple):
        params: Any
        opt_state: Any
        step: jax.Array
        key: jax.Array

    tx = optax.adamw(optax.exponential_decay(0.1, 5, 0.9))

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array, jax.Array]:
        key, noise_key = jax.random.split(state.key)

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            noisy = x + 0.1 * jax.random.normal(noise_key, x.shape, x.dtype)
            losses = kit.cross_entropy(kit.mlp(params, noisy), y)
            return losses.mean(), losses

        (loss, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state, state.step + 1, key), loss, losses

    params = kit.dense(WIDTH, 8, CLASSES)
    state = State(params, kit.warm(tx.init(params)), jnp.asarray(3, jnp.int32), jax.random.key(7))
    batch = _batch()
    return Program(step, (state, batch["x"], batch["y"]), {"in_axes": (None, 0, 0)})


@case(item=1)
def plain_struct_state_and_static_argument() -> Program:
    @flax.struct.dataclass
    class State:
        params: Any
        count: jax.Array
        name: str = flax.struct.field(pytree_node=False, default="state")

    def step(state: State, batch: dict[str, jax.Array], power: int) -> tuple[State, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            error = kit.mlp(params, batch["x"]) - jax.nn.one_hot(batch["y"], CLASSES)
            return jnp.mean(jnp.abs(error) ** power)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.replace(params=kit.sgd(state.params, grads), count=state.count + 1), loss

    state = State(kit.dense(WIDTH, 8, CLASSES), jnp.asarray(0))
    args = (state, _batch(), 4)
    return Program(step, args, {"static_argnums": (2,)}, jit=lambda f: jax.jit(f, static_argnums=2))


@case(item=1, batch=12)
def plain_in_axes_prefixes() -> Program:
    """One array has its examples in dimension 1, one is shared by all examples."""

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            scores = kit.mlp(params, batch["x"].T) * batch["weights"]
            losses = jnp.sum((scores - batch["target"]) ** 2, axis=-1)
            return losses.sum() / batch["x"].shape[1], losses

        (_, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), losses

    batch = {"x": kit.normal(4, 12), "target": kit.normal(12, 3), "weights": kit.uniform(3)}
    options = {"in_axes": (None, {"x": 1, "target": 0, "weights": None})}
    return Program(step, (kit.dense(4, 8, 3), batch), options)


@case(item=1)
def plain_two_losses_two_optimizers() -> Program:
    """Two disjoint sets of parameters, each with its own loss and optimizer."""
    tx_a, tx_b = optax.adam(1e-2), optax.rmsprop(1e-2)

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        a, b, opt_a, opt_b = state

        def loss_a(a: Any) -> jax.Array:
            return kit.cross_entropy(kit.mlp(a, batch["x"]), batch["y"]).mean()

        def loss_b(b: Any) -> jax.Array:
            return jnp.mean((kit.mlp(b, jax.lax.stop_gradient(kit.mlp(a, batch["x"]))) - batch["x"]) ** 2)

        value_a, grads_a = jax.value_and_grad(loss_a)(a)
        value_b, grads_b = jax.value_and_grad(loss_b)(b)
        updates_a, opt_a = tx_a.update(grads_a, opt_a, a)
        updates_b, opt_b = tx_b.update(grads_b, opt_b, b)
        new = (optax.apply_updates(a, updates_a), optax.apply_updates(b, updates_b), opt_a, opt_b)
        return new, {"a": value_a, "b": value_b}

    a, b = kit.dense(WIDTH, 8, CLASSES), kit.dense(CLASSES, 8, WIDTH, seed=1)
    return Program(step, ((a, b, kit.warm(tx_a.init(a)), kit.warm(tx_b.init(b))), _batch()))


class EquinoxMlp(eqx.Module):
    """Layers and a callable, which is a leaf that is no array."""

    layers: list[eqx.nn.Linear]
    activation: Any

    def __init__(self, *widths: int) -> None:
        keys = jax.random.split(jax.random.key(0), len(widths) - 1)
        self.layers = [eqx.nn.Linear(m, n, key=k) for (m, n), k in zip(itertools.pairwise(widths), keys, strict=True)]
        self.activation = jax.nn.silu

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def _equinox() -> Any:
    shapes = eqx.filter_eval_shape(EquinoxMlp, WIDTH, 8, CLASSES)
    shapes, static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return eqx.combine(kit.fill(shapes), static)


@case(item=1)
def equinox_adamw() -> Program:
    """The model, callables and all, goes in and out of the step."""
    tx = optax.adamw(1e-2)

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        model, opt_state = state

        @eqx.filter_value_and_grad
        def loss_fn(model: EquinoxMlp) -> jax.Array:
            return kit.cross_entropy(jax.vmap(model)(batch["x"]), batch["y"]).mean()

        loss, grads = loss_fn(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return (eqx.apply_updates(model, updates), opt_state), loss

    model = _equinox()
    state = (model, kit.warm(tx.init(eqx.filter(model, eqx.is_inexact_array))))
    return Program(step, (state, _batch()), jit=eqx.filter_jit)


@case(item=1, batch=12)
def equinox_partitioned() -> Program:
    """The model split into arrays and the rest; the rest is closed over. Dropout takes a key per example."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    dropout = eqx.nn.Dropout(0.5)
    arrays, static = eqx.partition(_equinox(), eqx.is_array)

    def step(arrays: Any, opt_state: Any, key: jax.Array, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        def loss_fn(arrays: Any) -> jax.Array:
            model = eqx.combine(arrays, static)
            keys = jax.random.split(key, batch["x"].shape[0])
            x = jax.vmap(lambda x, k: dropout(x, key=k))(batch["x"], keys)
            return kit.cross_entropy(jax.vmap(model)(x), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(arrays)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(arrays, updates), opt_state, loss

    args = (arrays, kit.warm(tx.init(arrays)), jax.random.key(3), _batch(12))
    return Program(step, args, {"in_axes": (None, None, None, 0)})


@case(item=1)
def equinox_filter_jit_inside() -> Program:
    """The usual ``@eqx.filter_jit`` stays on the step that is virtualized."""

    @eqx.filter_jit
    def step(model: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        @eqx.filter_value_and_grad
        def loss_fn(model: EquinoxMlp) -> jax.Array:
            return kit.cross_entropy(jax.vmap(model)(batch["x"]), batch["y"]).mean()

        loss, grads = loss_fn(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    return Program(step, (_equinox(), _batch()), jit=eqx.filter_jit)


def _haiku_init(model: Any, *args: Any) -> Any:
    return kit.fill(jax.eval_shape(lambda: model.init(jax.random.key(0), *args)))


@case(item=1)
def haiku_adamw() -> Program:
    tx = optax.adamw(1e-2)
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, CLASSES])(x)))

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        params, opt_state = state

        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply(params, batch["x"])
            return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["y"], CLASSES), axis=-1))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = _haiku_init(model, _batch()["x"])
    return Program(step, ((params, kit.warm(tx.init(params))), _batch()))


@case(item=1, batch=12)
def haiku_dropout_and_layer_norm() -> Program:
    def forward(x: jax.Array, training: bool) -> jax.Array:
        x = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(jax.nn.relu(hk.Linear(8)(x)))
        if training:
            x = hk.dropout(hk.next_rng_key(), 0.3, x)
        return hk.Linear(CLASSES)(x)

    model = hk.transform(forward)

    def step(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return kit.cross_entropy(model.apply(params, key, batch["x"], True), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    params = _haiku_init(model, _batch(12)["x"], True)
    return Program(step, (params, _batch(12), jax.random.key(1)))


@case(item=1)
def haiku_with_state() -> Program:
    """A module's own state counts the examples that it has seen, and averages parameters."""

    def forward(x: jax.Array) -> jax.Array:
        seen = hk.get_state("seen", (), jnp.int32, init=jnp.zeros)
        hk.set_state("seen", seen + x.shape[0])
        hidden = hk.Linear(8)(x)
        average = hk.ExponentialMovingAverage(0.9, name="average")(jnp.mean(hidden))
        return hk.Linear(CLASSES)(jax.nn.relu(hidden)) + 0.0 * jax.lax.stop_gradient(average)

    model = hk.without_apply_rng(hk.transform_with_state(forward))

    def step(carry: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        params, state = carry

        def loss_fn(params: Any) -> Any:
            logits, new_state = model.apply(params, state, batch["x"])
            return kit.cross_entropy(logits, batch["y"]).mean(), new_state

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return (kit.sgd(params, grads), state), loss

    return Program(step, (_haiku_init(model, _batch()["x"]), _batch()))
