"""Item 1 of the zoo: steps in the shape that public training code gives them.

Knows flax, equinox, haiku, optax and diffrax. Must not know vnode. What a case stands for is a habit: where such code
jits, what it carries along, where its randomness comes from, what it does in a loop. The models are as small as that
allows, and written here.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import flax.linen as nn
import flax.struct
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from flax.training.train_state import TrainState
from jax import lax

from . import Program, case, kit


def _arrays(module: Any) -> Any:
    """The model with other arrays: plausible ones, in the precision of the run."""
    arrays, rest = eqx.partition(module, lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    return eqx.combine(kit.fill(arrays), rest)


# Flax


@case(item=1, rare=True)
def flax_jitted_gradient_and_jitted_update() -> Program:
    """The image classifier of many tutorials: two jitted functions that a step calls one after the other."""

    class Cnn(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.avg_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), strides=(2, 2))
            return nn.Dense(3)(nn.relu(nn.Dense(8)(x.reshape((x.shape[0], -1)))))

    @jax.jit
    def apply_model(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, images)
            one_hot = jax.nn.one_hot(labels, 3)
            return jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot)), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return grads, loss, jnp.mean(jnp.argmax(logits, -1) == labels)

    @jax.jit
    def update_model(state: TrainState, grads: Any) -> TrainState:
        return state.apply_gradients(grads=grads)

    def step(state: TrainState, batch: dict[str, jax.Array]) -> Any:
        grads, loss, accuracy = apply_model(state, batch["image"] / 255.0, batch["label"])
        return update_model(state, grads), {"loss": loss, "accuracy": accuracy}

    model = Cnn()
    images = 255 * kit.uniform(16, 6, 6, 1)
    params = kit.init(model, images)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))
    return Program(step, (state, {"image": images, "label": kit.integers(3, 16)}))


class Attention(nn.Module):
    """Causal attention with rotary positions and as many keys as queries."""

    heads: int = 2

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        *_, length, width = x.shape
        size = width // self.heads
        q, k, v = (nn.DenseGeneral((self.heads, size), use_bias=False, name=n)(x) for n in ("wq", "wk", "wv"))
        angles = jnp.arange(length)[:, None] / 100.0 ** (jnp.arange(size // 2) / (size // 2))

        def rotate(u: jax.Array) -> jax.Array:
            a, b = jnp.split(u, 2, -1)
            cos, sin = jnp.cos(angles)[:, None].astype(u.dtype), jnp.sin(angles)[:, None].astype(u.dtype)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        bias = jnp.where(jnp.tril(jnp.ones((length, length), bool)) & mask[:, None, None, :], 0.0, -1e9).astype(x.dtype)
        out = nn.dot_product_attention(rotate(q), rotate(k), v, bias=bias)
        return nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, name="wo")(out)


class Language(nn.Module):
    """Blocks with gated feed-forward layers, each rematerialized."""

    vocabulary: int = 7

    @nn.compact
    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array) -> jax.Array:
                x = x + Attention()(nn.RMSNorm()(x), mask)
                h = nn.RMSNorm()(x)
                gate, up = nn.Dense(12, use_bias=False)(h), nn.Dense(12, use_bias=False)(h)
                return x + nn.Dense(x.shape[-1], use_bias=False)(nn.silu(gate) * up)

        x = nn.Embed(self.vocabulary, 8)(tokens)
        for _ in range(2):
            x = nn.remat(Block)()(x)
        return nn.Dense(self.vocabulary, use_bias=False)(nn.RMSNorm()(x))


@case(item=1, batch=12, rare=True)
def language_model_with_loss_masks_and_rng_names() -> Program:
    """A generator of named keys, log-probabilities in float32, a loss mask, decay by regular expression, clipping."""

    class RngNames:
        def __init__(self, key: jax.Array) -> None:
            self.key = key

        def __call__(self, names: tuple[str, ...]) -> dict[str, jax.Array]:
            self.key, *keys = jax.random.split(self.key, len(names) + 1)
            return dict(zip(names, keys, strict=True))

    def decays(params: Any) -> Any:
        flat = traverse_util.flatten_dict(params, sep="/")
        return traverse_util.unflatten_dict({k: "scale" not in k and "Embed" not in k for k in flat}, sep="/")

    schedule = optax.join_schedules([optax.linear_schedule(0.0, 1e-2, 3), optax.cosine_decay_schedule(1e-2, 9)], [3])
    tx = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decays),
    )
    model = Language()

    def step(state: TrainState, key: jax.Array, batch: dict[str, jax.Array]) -> Any:
        names = RngNames(key)

        def loss_and_accuracy(params: Any) -> Any:
            logits = state.apply_fn(
                {"params": params}, batch["input"], batch["mask"] > 0, rngs=names(("params", "dropout"))
            )
            valid = batch["mask"].astype(jnp.promote_types(jnp.float32, logits.dtype))
            length = jnp.maximum(jnp.sum(valid, -1), 1e-10)
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["target"][..., None], -1)[..., 0]
            loss = -jnp.mean(jnp.sum(jnp.where(valid > 0, picked, 0.0), -1) / length)
            right = jnp.where(valid > 0, jnp.argmax(logits, -1) == batch["target"], False)
            return loss, jnp.mean(jnp.sum(right, -1) / length)

        (loss, accuracy), grads = jax.value_and_grad(loss_and_accuracy, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        metrics = {
            "loss": loss,
            "accuracy": accuracy,
            "learning_rate": schedule(state.step),
            "gradient_norm": optax.tree.norm(grads),
            "param_norm": optax.tree.norm(state.params),
        }
        return state, names.key, metrics

    tokens = kit.integers(7, 12, 5)
    batch = {"input": tokens, "target": jnp.roll(tokens, -1, 1), "mask": kit.lengths_mask(12, 5)}
    params = kit.init(model, tokens, batch["mask"] > 0)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return Program(step, (state, jax.random.key(0), batch), {"in_axes": (None, None, 0)})


@case(item=1, batch=24)
def text_to_image_with_a_loop_over_minibatches() -> Program:
    """Gradients of minibatches are added in a ``fori_loop`` that slices the batch; labels are smoothed."""

    class State(TrainState):
        dropout_rng: Any = None
        train_samples: Any = 0

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, text: jax.Array, image: jax.Array, train: bool) -> jax.Array:
            memory = nn.Embed(6, 8)(text).mean(1, keepdims=True)
            x = nn.Embed(9, 8)(image) + memory
            x = nn.Dropout(0.2, deterministic=not train)(nn.gelu(nn.Dense(8)(nn.LayerNorm(use_bias=False)(x))))
            return nn.Dense(9, use_bias=False)(x)

    steps = 2

    def step(state: State, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any, minibatch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
            shifted = jnp.pad(minibatch["labels"], ((0, 0), (1, 0)), constant_values=8)[:, :-1]
            logits = state.apply_fn({"params": params}, minibatch["ids"], shifted, True, rngs={"dropout": rng})
            smooth = optax.smooth_labels(jax.nn.one_hot(minibatch["labels"], 9), 0.1)
            return optax.softmax_cross_entropy(logits, smooth).mean()

        gradient = jax.value_and_grad(loss_fn)
        size = batch["labels"].shape[0] // steps

        def one(i: Any, rng: jax.Array) -> Any:
            minibatch = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size, 0), batch)
            rng, _ = jax.random.split(rng)
            return *gradient(state.params, minibatch, rng), rng

        def body(i: jax.Array, carry: Any) -> Any:
            loss, grads, rng = carry
            new_loss, new_grads, rng = one(i, rng)
            return loss + new_loss, jax.tree.map(jnp.add, grads, new_grads), rng

        zeros = jnp.zeros((), kit.real()), jax.tree.map(jnp.zeros_like, state.params), state.dropout_rng
        loss, grads, rng = lax.fori_loop(0, steps, body, zeros)
        loss, grads = jax.tree.map(lambda x: x / steps, (loss, grads))
        state = state.apply_gradients(
            grads=grads, dropout_rng=rng, train_samples=state.train_samples + batch["labels"].shape[0]
        )
        return state, {"loss": loss, "gradients": jax.tree.map(jnp.linalg.norm, grads)}

    model = Decoder()
    batch = {"ids": kit.integers(6, 24, 3), "labels": kit.integers(9, 24, 4, seed=1)}
    params = kit.init(model, batch["ids"], batch["labels"], True)["params"]
    state = State.create(apply_fn=model.apply, params=params, tx=optax.adafactor(1e-2), dropout_rng=jax.random.key(2))
    return Program(step, (state, batch))


@case(item=1, rare=True)
def diffusion_with_averaged_parameters_and_guidance() -> Program:
    """Noise levels by a cosine, labels dropped at random, parameters averaged every second step."""

    @flax.struct.dataclass
    class State:
        step: jax.Array
        params: Any
        ema_params: Any
        opt_state: Any

    class Denoiser(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, time: jax.Array, label: jax.Array) -> jax.Array:
            angles = time[:, None] * 10.0 ** jnp.linspace(0, 1, 3, dtype=x.dtype)
            emb = nn.Dense(6)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)) + nn.Embed(4, 6)(label)
            h = nn.Conv(6, (3, 3))(x)
            scale, shift = jnp.split(nn.Dense(12)(nn.swish(emb)), 2, -1)
            h = nn.GroupNorm(2)(h) * (1 + scale[:, None, None]) + shift[:, None, None]
            return nn.Conv(x.shape[-1], (3, 3))(nn.swish(h))

    model = Denoiser()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(state: State, batch: dict[str, jax.Array], seed: jax.Array) -> Any:
        time_key, noise_key, drop_key = jax.random.split(jax.random.fold_in(seed, state.step), 3)
        x = batch["image"]
        time = jax.random.uniform(time_key, (x.shape[0],), x.dtype)
        noise = jax.random.normal(noise_key, x.shape, x.dtype)
        alpha, sigma = jnp.cos(time * jnp.pi / 2), jnp.sin(time * jnp.pi / 2)
        noisy = alpha[:, None, None, None] * x + sigma[:, None, None, None] * noise
        label = jnp.where(jax.random.bernoulli(drop_key, 0.3, (x.shape[0],)), 3, batch["label"])

        def loss_fn(params: Any) -> jax.Array:
            error = jnp.square(model.apply({"params": params}, noisy, time, label) - noise)
            weight = jnp.minimum((alpha / jnp.maximum(sigma, 1e-3)) ** 2, 5.0)
            return jnp.mean(weight * jnp.mean(error, (1, 2, 3)))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = lax.cond(
            state.step % 2 == 0,
            lambda: optax.incremental_update(params, state.ema_params, 0.05),
            lambda: state.ema_params,
        )
        return State(state.step + 1, params, ema, opt_state), {"loss": loss}

    batch = {"image": kit.normal(16, 4, 4, 2), "label": kit.integers(3, 16)}
    params = kit.init(model, batch["image"], kit.uniform(16), batch["label"])["params"]
    state = State(jnp.asarray(4), params, params, kit.warm(tx.init(params)))
    return Program(step, (state, batch, jax.random.key(5)))


@case(item=1, batch=12, rare=True)
def masked_autoencoder_with_shuffled_patches() -> Program:
    """Patches of each image are shuffled by sorting noise, most are dropped, and put back for the decoder."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, patches: jax.Array) -> Any:
            batch, count, width = patches.shape
            keep = count // 2
            noise = jax.random.uniform(self.make_rng("noise"), (batch, count))
            order = jnp.argsort(noise, axis=1)
            restore = jnp.argsort(order, axis=1)
            mask = jnp.take_along_axis(jnp.ones((batch, count)).at[:, :keep].set(0), restore, axis=1)
            x = nn.Dense(8)(patches) + self.param("position", nn.initializers.normal(), (1, count, 8))
            x = jnp.take_along_axis(x, order[:, :keep, None], axis=1)
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            token = self.param("token", nn.initializers.normal(), (1, 1, 8))
            x = jnp.concatenate([x, jnp.tile(token, (batch, count - keep, 1)).astype(x.dtype)], axis=1)
            x = jnp.take_along_axis(x, restore[..., None], axis=1)
            return nn.Dense(width)(nn.LayerNorm()(x)), mask

    model = Model()

    def step(state: TrainState, images: jax.Array, key: jax.Array) -> Any:
        b, h, w, c = images.shape
        patches = images.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, 4 * c)
        target = (patches - patches.mean(-1, keepdims=True)) / jnp.sqrt(patches.var(-1, keepdims=True) + 1e-6)

        def loss_fn(params: Any) -> jax.Array:
            predicted, mask = state.apply_fn({"params": params}, patches, rngs={"noise": key})
            return (((predicted - target) ** 2).mean(-1) * mask).sum() / mask.sum()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    shapes = jax.eval_shape(
        lambda: model.init({"params": jax.random.key(0), "noise": jax.random.key(1)}, jnp.zeros((1, 9, 12)))
    )
    state = TrainState.create(apply_fn=model.apply, params=kit.fill(shapes)["params"], tx=optax.lion(1e-3))
    return Program(step, (state, kit.normal(12, 6, 6, 3), jax.random.key(3)), {"in_axes": (None, 0, None)})


@case(item=1, rare=True)
def image_text_pairs_with_a_sigmoid_loss() -> Program:
    """Two towers in one module, a learned temperature and bias, metrics measured by ``jax.tree`` reductions."""

    class Towers(nn.Module):
        @nn.compact
        def __call__(self, image: jax.Array, text: jax.Array) -> Any:
            z_image = nn.Dense(5)(nn.gelu(nn.Dense(8, name="image")(image.reshape(image.shape[0], -1))))
            z_text = nn.Dense(5)(nn.Embed(9, 8, name="text")(text).max(axis=1))
            scale = self.param("t", nn.initializers.constant(np.log(10.0)), (1,))
            bias = self.param("b", nn.initializers.constant(-10.0), (1,))
            return *(z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (z_image, z_text)), jnp.exp(scale), bias

    model = Towers()
    tx = optax.chain(optax.scale_by_adam(b2=0.95), optax.add_decayed_weights(1e-3), optax.scale(-1e-2))

    def step(params: Any, opt: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> Any:
            z_image, z_text, t, b = model.apply({"params": params}, batch["image"], batch["labels"])
            logits = jnp.dot(z_image, z_text.T) * t + b
            signs = 2 * jnp.eye(z_image.shape[0], dtype=logits.dtype) - 1
            losses = -jnp.sum(jax.nn.log_sigmoid(signs * logits), axis=-1)
            return jnp.mean(losses), {"accuracy": jnp.mean(jnp.argmax(logits, -1) == jnp.arange(len(logits)))}

        (loss, extra), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        new = optax.apply_updates(params, updates)
        squares = jax.tree.map(lambda u: jnp.vdot(u, u), (grads, updates, new))
        norms = {k: jnp.sqrt(sum(jax.tree.leaves(v))) for k, v in zip(("g", "u", "p"), squares, strict=True)}
        return new, opt, {"loss": loss, **extra, **norms}

    batch = {"image": kit.normal(16, 3, 3), "labels": kit.integers(9, 16, 4)}
    params = kit.init(model, batch["image"], batch["labels"])["params"]
    args = (params, kit.warm(tx.init(params)), batch)
    return Program(step, args, {"in_axes": (None, None, 0)})


# Plain jax, haiku, optax


@case(item=1, rare=True)
def autoencoder_with_an_epoch_in_the_step() -> Program:
    """Functions in pairs of ``init`` and ``apply``; an epoch is a loop over slices of what is given."""

    def apply(layers: Any, x: jax.Array) -> jax.Array:
        *hidden, (w, b) = layers
        for v, c in hidden:
            x = jax.nn.relu(x @ v + c)
        return x @ w + b

    def bound(key: jax.Array, params: Any, images: jax.Array) -> jax.Array:
        encoder, decoder = params
        mean, log_variance = jnp.split(apply(encoder, images), 2, axis=-1)
        divergence = -0.5 * jnp.sum(1.0 + log_variance - mean**2 - jnp.exp(log_variance))
        z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape, mean.dtype)
        logits = apply(decoder, z)
        return -jnp.sum(jnp.logaddexp(0.0, jnp.where(images, -1.0, 1.0) * logits)) - divergence

    tx = optax.adam(1e-3)

    def run_epoch(state: Any, images: jax.Array, rng: jax.Array) -> Any:
        size = images.shape[0] // 2

        def body(i: jax.Array, state: Any) -> Any:
            elbo_rng, data_rng = jax.random.split(jax.random.fold_in(rng, i))
            chosen = lax.dynamic_slice_in_dim(images, i * size, size)
            binarized = jax.random.bernoulli(data_rng, chosen, chosen.shape)
            params, opt = state
            grads = jax.grad(lambda params: -bound(elbo_rng, params, binarized) / size)(params)
            updates, opt = tx.update(grads, opt)
            return optax.apply_updates(params, updates), opt

        state = lax.fori_loop(0, 2, body, state)
        test = jax.random.bernoulli(jax.random.key(9), images)
        return state, bound(rng, state[0], test) / images.shape[0]

    layers = tuple([(p["w"], p["b"]) for p in kit.dense(*widths)] for widths in ((6, 5, 4), (2, 5, 6)))
    state = (layers, kit.warm(tx.init(layers)))
    args = (state, kit.uniform(16, 6), jax.random.key(4))
    return Program(run_epoch, args, {"in_axes": (None, 0, None)})


@case(item=1, batch=12)
def haiku_with_loss_scale_and_averages() -> Program:
    """A train state in a named tuple, half-precision gradients with a scale, skipped where they are not finite."""

    class State(NamedTuple):
        params: hk.Params
        averages: hk.Params
        opt_state: optax.OptState
        scale: jax.Array

    def forward(x: jax.Array) -> jax.Array:
        x = jax.nn.relu(hk.Conv2D(4, 3, stride=2)(x))
        x = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
        return hk.Linear(3, name="logits")(hk.Flatten()(x))

    model = hk.without_apply_rng(hk.transform(forward))
    tx = optax.chain(optax.trace(0.9), optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10)), optax.scale(-0.1))

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Any]:
        def loss_fn(params: hk.Params) -> Any:
            logits = model.apply(params, batch["images"])
            labels = jax.nn.one_hot(batch["labels"], 3)
            loss = optax.softmax_cross_entropy(logits, labels).mean()
            decay = sum(jnp.vdot(p, p) for m, n, p in hk.data_structures.traverse(params) if n == "w")
            return state.scale * (loss + 1e-3 * decay), loss

        grads, loss = jax.grad(loss_fn, has_aux=True)(state.params)
        grads = jax.tree.map(lambda g: g / state.scale, grads)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        updates, opt_state = tx.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        averages = jax.tree.map(lambda a, p: a + 0.01 * (p - a), state.averages, params)
        kept = jax.tree.map(
            functools.partial(jnp.where, finite),
            (params, averages, opt_state),
            (state.params, state.averages, state.opt_state),
        )
        return State(*kept, jnp.where(finite, state.scale, state.scale / 2)), {"loss": loss, "scale": state.scale}

    images = kit.normal(12, 5, 5, 2)
    params = kit.fill(jax.eval_shape(lambda: model.init(jax.random.key(0), images)))
    state = State(params, params, tx.init(params), jnp.asarray(64.0, kit.real()))
    return Program(step, (state, {"images": images, "labels": kit.integers(3, 12)}))


@case(item=1, rare=True)
def self_supervised_with_a_target_network() -> Program:
    """Two augmented views, an online network that predicts what a slowly following one makes of the other view."""
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio(), optax.scale(-1e-2))

    def normalized(x: jax.Array) -> jax.Array:
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)

    def step(state: dict[str, Any], images: jax.Array, rng: jax.Array) -> Any:
        def view(key: jax.Array) -> jax.Array:
            flip_key, noise_key = jax.random.split(key)
            flips = jax.random.bernoulli(flip_key, 0.5, (images.shape[0], 1))
            flipped = jnp.where(flips, images[:, ::-1], images)
            return flipped + 0.1 * jax.random.normal(noise_key, images.shape, images.dtype)

        views = [view(key) for key in jax.random.split(rng)]

        def loss_fn(online: Any) -> jax.Array:
            loss = jnp.zeros((), images.dtype)
            for a, b in ((0, 1), (1, 0)):
                predicted = kit.mlp(online["predictor"], kit.mlp(online["encoder"], views[a]))
                target = lax.stop_gradient(kit.mlp(state["target"], views[b]))
                loss += jnp.mean(jnp.sum((normalized(predicted) - normalized(target)) ** 2, -1))
            return loss

        loss, grads = jax.value_and_grad(loss_fn)(state["online"])
        updates, opt = tx.update(grads, state["opt"], state["online"])
        online = optax.apply_updates(state["online"], updates)
        tau = 1 - 0.01 * (jnp.cos(jnp.pi * state["step"] / 10) + 1) / 2
        target = jax.tree.map(lambda t, o: tau * t + (1 - tau) * o, state["target"], online["encoder"])
        return {"online": online, "target": target, "opt": opt, "step": state["step"] + 1}, {"loss": loss, "tau": tau}

    online = {"encoder": kit.dense(6, 8, 4), "predictor": kit.dense(4, 6, 4, seed=1)}
    state = {"online": online, "target": kit.dense(6, 8, 4, seed=2), "opt": kit.warm(tx.init(online)), "step": 3}
    return Program(step, (state, kit.normal(16, 6), jax.random.key(1)), {"in_axes": (None, 0, None)})


@case(item=1)
def graphs_as_padded_examples() -> Program:
    """Message passing by segment sums inside every graph of the batch; nodes and edges beyond its own are masked."""

    class Graph(NamedTuple):
        nodes: jax.Array
        senders: jax.Array
        receivers: jax.Array
        n_node: jax.Array
        target: jax.Array

    def network(params: Any, graph: Graph) -> jax.Array:
        count = graph.nodes.shape[0]
        h = kit.mlp(params["embed"], graph.nodes)
        for layer in params["layers"]:
            messages = kit.mlp(layer["edge"], jnp.concatenate([h[graph.senders], h[graph.receivers]], -1))
            weights = jnp.exp(messages[:, :1])
            total = jax.ops.segment_sum(weights, graph.receivers, count)
            messages = messages * weights / (total[graph.receivers] + 1e-6)
            received = jax.ops.segment_sum(messages, graph.receivers, count)
            h = h + kit.mlp(layer["node"], jnp.concatenate([h, received], -1))
        real = (jnp.arange(count) < graph.n_node)[:, None]
        return kit.mlp(params["readout"], jnp.where(real, h, 0).sum(0) / graph.n_node)[0]

    tx = optax.adamw(1e-2)

    def step(params: Any, opt_state: Any, graphs: Graph) -> Any:
        def loss_fn(params: Any) -> Any:
            predicted = jax.vmap(network, in_axes=(None, 0))(params, graphs)
            mask = graphs.n_node > 1
            return jnp.sum(jnp.where(mask, optax.huber_loss(predicted, graphs.target), 0)) / mask.sum(), predicted

        (loss, predicted), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, predicted

    sizes = 1 + kit.integers(5, 16, seed=4)
    ends = [kit.integers(60, 16, 7, seed=seed) % sizes[:, None] for seed in (2, 3)]
    graphs = Graph(kit.normal(16, 5, 3), *ends, sizes, kit.normal(16, seed=1))
    params = {
        "embed": kit.dense(3, 4),
        "layers": [{"edge": kit.dense(8, 5, 4, seed=i), "node": kit.dense(8, 5, 4, seed=i + 2)} for i in range(2)],
        "readout": kit.dense(4, 1, seed=5),
    }
    return Program(step, (params, kit.warm(tx.init(params)), graphs), {"in_axes": (None, None, 0)})


@case(item=1, batch=12, rare=True)
def selective_state_space_by_associative_scan() -> Program:
    """A recurrence whose coefficients depend on the input, evaluated by an associative scan over time."""

    def block(params: Any, x: jax.Array) -> jax.Array:
        length = x.shape[0]
        inner, gate = jnp.split(x @ params["in"], 2, -1)
        padded = jnp.pad(inner, ((2, 0), (0, 0)))
        inner = jax.nn.silu(sum(params["conv"][k] * padded[k : k + length] for k in range(3)))
        delta = jax.nn.softplus(inner @ params["delta"] - 1.0)
        b, c = jnp.split(inner @ params["bc"], 2, -1)
        decay = jnp.exp(-delta[..., None] * jnp.exp(params["log_a"]))
        drive = delta[..., None] * inner[..., None] * b[:, None, :]

        def combine(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, states = lax.associative_scan(combine, (decay, drive))
        y = jnp.einsum("twn,tn->tw", states, c) + params["skip"] * inner
        return x + (y * jax.nn.silu(gate)) @ params["out"]

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, opt_state = state

        @jax.checkpoint
        def model(params: Any, x: jax.Array) -> jax.Array:
            for layer in params["layers"]:
                x = block(layer, x)
            return x @ params["head"]

        def loss_fn(params: Any) -> jax.Array:
            logits = jax.vmap(model, in_axes=(None, 0))(params, batch["x"])
            return kit.cross_entropy(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def layer(seed: int) -> dict[str, jax.Array]:
        shapes = {"in": (4, 12), "conv": (3, 6), "delta": (6, 6), "bc": (6, 4), "log_a": (6, 2), "skip": (6,)}
        return {k: 0.4 * kit.normal(*s, seed=seed) for k, s in {**shapes, "out": (6, 4)}.items()}

    params = {"layers": [layer(0), layer(1)], "head": kit.normal(4, 3)}
    batch = {"x": kit.normal(12, 7, 4), "y": kit.integers(3, 12, 7)}
    return Program(step, ((params, kit.warm(tx.init(params))), batch))


@case(item=1, rare=True)
def schedule_free_with_evaluation_at_the_average() -> Program:
    """An optimizer of `optax.contrib` whose evaluation parameters differ from those that are trained."""
    tx = optax.contrib.schedule_free_adamw(1e-2, warmup_steps=3)

    def step(params: Any, opt_state: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(optax.sigmoid_binary_cross_entropy(kit.mlp(params, batch["x"])[:, 0], batch["y"]))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss, optax.contrib.schedule_free_eval_params(opt_state, params)

    params = kit.dense(5, 8, 1)
    batch = {"x": kit.normal(16, 5), "y": kit.integers(2, 16).astype(kit.real())}
    return Program(step, (params, kit.warm(tx.init(params)), batch), {"in_axes": (None, None, 0)})


@case(item=1, rare=True)
def adversaries_with_two_states() -> Program:
    """Generator and discriminator in states of their own; noise is drawn for the batch at hand."""

    class Generator(nn.Module):
        @nn.compact
        def __call__(self, z: jax.Array) -> jax.Array:
            x = nn.relu(nn.GroupNorm(2)(nn.ConvTranspose(4, (3, 3), strides=(2, 2))(z.reshape(-1, 2, 2, 2))))
            return nn.tanh(nn.ConvTranspose(1, (3, 3))(x))

    class Discriminator(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(1)(nn.leaky_relu(nn.Conv(4, (3, 3), strides=(2, 2))(x), 0.2).reshape(x.shape[0], -1))

    def step(states: tuple[TrainState, TrainState], images: jax.Array, key: jax.Array) -> Any:
        generator, discriminator = states
        z = jax.random.normal(key, (images.shape[0], 8), images.dtype)

        def discriminator_loss(params: Any) -> jax.Array:
            fake = generator.apply_fn({"params": generator.params}, z)
            real_logits = discriminator.apply_fn({"params": params}, images)
            fake_logits = discriminator.apply_fn({"params": params}, fake)
            return jnp.mean(jax.nn.softplus(-real_logits)) + jnp.mean(jax.nn.softplus(fake_logits))

        loss_d, grads = jax.value_and_grad(discriminator_loss)(discriminator.params)
        discriminator = discriminator.apply_gradients(grads=grads)

        def generator_loss(params: Any) -> jax.Array:
            fake = generator.apply_fn({"params": params}, z)
            return jnp.mean(jax.nn.softplus(-discriminator.apply_fn({"params": discriminator.params}, fake)))

        loss_g, grads = jax.value_and_grad(generator_loss)(generator.params)
        return (generator.apply_gradients(grads=grads), discriminator), {"d": loss_d, "g": loss_g}

    images = kit.normal(16, 4, 4, 1)
    states = tuple(
        TrainState.create(
            apply_fn=model.apply, params=(p := kit.init(model, x)["params"]), tx=optax.adam(1e-3, b1=0.5)
        ).replace(opt_state=kit.warm(optax.adam(1e-3, b1=0.5).init(p)))
        for model, x in ((Generator(), kit.normal(1, 8)), (Discriminator(), images))
    )
    args = (states, images, jax.random.key(6))
    return Program(step, args, {"in_axes": (None, 0, None)})


@case(item=1, rare=True)
def policy_optimization_over_unrolls() -> Program:
    """Observations normalized by running statistics, advantages over time-major unrolls, several losses in one."""

    def gae(rewards: jax.Array, values: jax.Array, last: jax.Array, ends: jax.Array) -> Any:
        following = jnp.concatenate([values[1:], last[None]], 0)
        deltas = rewards + 0.97 * (1 - ends) * following - values

        def accumulate(carry: jax.Array, x: Any) -> Any:
            delta, end = x
            carry = delta + 0.97 * 0.95 * (1 - end) * carry
            return carry, carry

        _, advantages = lax.scan(accumulate, jnp.zeros_like(last), (deltas, ends), reverse=True)
        return lax.stop_gradient(advantages), lax.stop_gradient(advantages + values)

    tx = optax.adam(3e-3)

    def step(state: Any, data: dict[str, jax.Array]) -> Any:
        params, opt_state, (count, mean, square) = state
        flat = data["observation"].reshape(-1, 3)
        total = count + flat.shape[0]
        delta = flat - mean
        new_mean = mean + delta.sum(0) / total
        square = square + (delta * (flat - new_mean)).sum(0)
        std = jnp.clip(jnp.sqrt(square / total), 1e-2, 1e2)

        def loss_fn(params: Any) -> Any:
            time_major = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), data)
            observation = (time_major["observation"] - new_mean) / std
            location, raw = jnp.split(kit.mlp(params["policy"], observation[:-1]), 2, -1)
            scale = jax.nn.softplus(raw) + 1e-2
            values = kit.mlp(params["value"], observation)[..., 0]
            log_prob = (-0.5 * ((time_major["action"] - location) / scale) ** 2 - jnp.log(scale)).sum(-1)
            advantages, targets = gae(time_major["reward"], values[:-1], values[-1], time_major["end"])
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            ratio = jnp.exp(log_prob - time_major["log_prob"])
            surrogate = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.7, 1.3) * advantages).mean()
            value = 0.25 * jnp.mean((targets - values[:-1]) ** 2)
            entropy = -1e-2 * jnp.mean(jnp.log(scale).sum(-1))
            return surrogate + value + entropy, {"policy": surrogate, "value": value, "entropy": entropy}

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, (total, new_mean, square)), {"loss": loss, **metrics}

    params = {"policy": kit.dense(3, 6, 4), "value": kit.dense(3, 6, 1, seed=1)}
    statistics = (jnp.asarray(50.0, kit.real()), kit.normal(3), 50 * kit.uniform(3, low=0.5))
    data = {
        "observation": kit.normal(16, 6, 3),
        "action": kit.normal(16, 5, 2),
        "reward": kit.normal(16, 5),
        "end": (kit.uniform(16, 5) > 0.8).astype(kit.real()),
        "log_prob": kit.normal(16, 5, scale=0.1) - 1.0,
    }
    return Program(step, ((params, kit.warm(tx.init(params)), statistics), data))


# Equinox


class Classifier(eqx.Module):
    """Layers and functions in one list, numbers that Python code reads, dropout that knows whether it is on."""

    layers: list[Any]
    dropout: eqx.nn.Dropout
    depth: int
    scale: float

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=2, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(27, 6, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(6, 3, key=keys[2]),
            jax.nn.log_softmax,
        ]
        self.dropout = eqx.nn.Dropout(0.25)
        self.depth = len(self.layers)
        self.scale = 0.5

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        for i in range(self.depth):
            if i == 4 and self.scale < 1:
                x = self.dropout(x * self.scale, key=key)
            x = self.layers[i](x)
        return x


@case(item=1, rare=True)
def equinox_model_with_numbers_and_dropout() -> Program:
    """The whole model, numbers and functions too, goes in and comes out; only its arrays are differentiated."""
    tx = optax.adamw(3e-3)

    @eqx.filter_jit
    def make_step(model: Classifier, opt_state: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(model: Classifier) -> jax.Array:
            predicted = jax.vmap(model)(x, jax.random.split(key, x.shape[0]))
            return -jnp.mean(jnp.take_along_axis(predicted, jnp.expand_dims(y, 1), axis=1))

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
        quiet = eqx.tree_at(lambda m: m.dropout.inference, model, True)
        accuracy = jnp.mean(jnp.argmax(jax.vmap(lambda x: quiet(x, None))(x), 1) == y)
        return model, opt_state, value, accuracy

    model = _arrays(eqx.filter_eval_shape(Classifier, jax.random.key(0)))
    opt_state = kit.warm(tx.init(eqx.filter(model, eqx.is_array)))
    args = (model, opt_state, jax.random.key(3), kit.normal(16, 1, 7, 7), kit.integers(3, 16))
    return Program(make_step, args, {"in_axes": (None, None, None, 0, 0)}, jit=lambda step: step)


class Stateful(eqx.Module):
    """Layers that keep something between steps."""

    first: eqx.nn.Linear
    spectral: eqx.nn.SpectralNorm
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.first = eqx.nn.Linear(4, 5, key=keys[0])
        layer = eqx.nn.Linear(5, 5, key=keys[1])
        self.spectral = eqx.nn.SpectralNorm(layer=layer, weight_name="weight", key=keys[2])
        self.norm = eqx.nn.BatchNorm(5, axis_name="batch", mode="ema")
        self.last = eqx.nn.Linear(5, 3, key=keys[3])

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        x, state = self.spectral(jnp.tanh(self.first(x)), state)
        x, state = self.norm(x, state)
        return self.last(x), state


@case(item=1, batch=12)
def equinox_layers_with_state() -> Program:
    def step(model: Stateful, state: eqx.nn.State, batch: dict[str, jax.Array]) -> Any:
        def loss(model: Stateful, state: eqx.nn.State) -> Any:
            over = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            logits, state = over(batch["x"], state)
            return kit.cross_entropy(logits, batch["y"]).mean(), state

        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
        return model, state, value

    model, state = eqx.nn.make_with_state(Stateful)(jax.random.key(0))
    model, state = _arrays(model), _arrays(state)
    batch = {"x": kit.normal(12, 4), "y": kit.integers(3, 12)}
    args, options = (model, state, batch), {"in_axes": (None, None, 0), "recompute_budget": 10.0}
    return Program(step, args, options, jit=eqx.filter_jit)


@case(item=1)
def equinox_flow_with_coupled_layers() -> Program:
    """Bijections as modules with ``inverse`` and ``log_det``, folded over a list; a base distribution as a class."""

    class Base(eqx.Module):
        size: int

        def log_prob(self, x: jax.Array) -> jax.Array:
            return -0.5 * jnp.sum(x**2) - 0.5 * self.size * jnp.log(2 * jnp.pi)

    class Coupling(eqx.Module):
        net: eqx.nn.MLP
        flip: bool

        def inverse_and_log_det(self, y: jax.Array) -> Any:
            a, b = jnp.split(y[::-1] if self.flip else y, 2)
            shift, scale = jnp.split(self.net(a), 2)
            scale = jnp.tanh(scale)
            return jnp.concatenate([a, (b - shift) * jnp.exp(-scale)]), -scale.sum()

    class Flow(eqx.Module):
        base: Base
        layers: tuple[Coupling, ...]

        def log_prob(self, x: jax.Array) -> jax.Array:
            total = 0.0
            for layer in self.layers:
                x, log_det = layer.inverse_and_log_det(x)
                total = total + log_det
            return self.base.log_prob(x) + total

    def make(key: jax.Array) -> Flow:
        nets = [eqx.nn.MLP(2, 4, 5, 1, key=k) for k in jax.random.split(key)]
        return Flow(Base(4), tuple(Coupling(net, bool(i)) for i, net in enumerate(nets)))

    def step(flow: Flow, x: jax.Array) -> Any:
        value, grads = eqx.filter_value_and_grad(lambda flow: -jax.vmap(flow.log_prob)(x).mean())(flow)
        return eqx.apply_updates(flow, jax.tree.map(lambda g: -0.05 * g, grads)), value

    return Program(
        step, (_arrays(eqx.filter_eval_shape(make, jax.random.key(0))), kit.normal(16, 4)), jit=eqx.filter_jit
    )


class Field(eqx.Module):
    """The right-hand side of a differential equation."""

    net: eqx.nn.MLP

    def __call__(self, t: Any, y: jax.Array, args: Any) -> jax.Array:
        return self.net(y)


class NeuralOde(eqx.Module):
    """Solved with steps of its own choice for every example."""

    field: Field

    def __call__(self, ts: jax.Array, y0: jax.Array) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(self.field),
            diffrax.Heun(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-2, atol=1e-3),
            saveat=diffrax.SaveAt(ts=ts),
            max_steps=16,
        )
        return solution.ys


@case(item=1, batch=6, nodes=(3,), rare=True)
def diffrax_neural_ode() -> Program:
    """Adaptive steps and the default adjoint: loops with checkpoints, whose steps are taken again backwards."""
    tx = optax.adabelief(3e-3)

    @eqx.filter_value_and_grad
    def grad_loss(model: NeuralOde, ts: jax.Array, ys: jax.Array) -> jax.Array:
        return jnp.mean((ys - jax.vmap(model, in_axes=(None, 0))(ts, ys[:, 0])) ** 2)

    def make_step(ts: jax.Array, ys: jax.Array, model: NeuralOde, opt_state: Any) -> Any:
        loss, grads = grad_loss(model, ts, ys)
        updates, opt_state = tx.update(grads, opt_state)
        return loss, eqx.apply_updates(model, updates), opt_state

    def make(key: jax.Array) -> NeuralOde:
        return NeuralOde(Field(eqx.nn.MLP(2, 2, 3, 1, activation=jax.nn.softplus, key=key)))

    model = _arrays(eqx.filter_eval_shape(make, jax.random.key(0)))
    opt_state = kit.warm(tx.init(eqx.filter(model, eqx.is_inexact_array)))
    args = (jnp.linspace(0, 1, 3, dtype=kit.real()), kit.normal(6, 3, 2), model, opt_state)
    return Program(make_step, args, {"in_axes": (None, 0)}, jit=eqx.filter_jit)
