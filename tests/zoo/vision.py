"""Item 2 of the zoo: images.

Knows convolutions, pooling, augmentation, vision transformers. Must not know vnode. Images have 8 by 8 pixels or fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import Program, case, kit

CLASSES = 4


def _images(batch: int, size: int = 8, channels: int = 3) -> dict[str, jax.Array]:
    return {"image": kit.normal(batch, size, size, channels), "label": kit.integers(CLASSES, batch)}


def _train(
    model: nn.Module,
    batch: int = 16,
    size: int = 8,
    channels: int = 3,
    augment: Callable[[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]] | None = None,
    **options: Any,
) -> Program:
    """Classification with momentum; targets may be soft after augmentation."""
    tx = optax.sgd(0.1, momentum=0.9)
    data = _images(batch, size, channels)

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        params, opt_state, key = state
        key, use = jax.random.split(key)
        batch = {**batch, "target": jax.nn.one_hot(batch["label"], CLASSES, dtype=batch["image"].dtype)}
        if augment is not None:
            batch = augment(use, batch)

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = model.apply({"params": params}, batch["image"])
            return optax.softmax_cross_entropy(logits, batch["target"]).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        accuracy = (logits.argmax(-1) == batch["label"]).mean()
        return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss, "accuracy": accuracy}

    params = kit.init(model, data["image"])["params"]
    return Program(step, ((params, tx.init(params), jax.random.key(2)), data), options)


class Head(nn.Module):
    """Mean over the pixels, a dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


@case(item=2)
def cnn_with_group_norm() -> Program:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.GroupNorm(num_groups=2)(nn.Conv(4, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
            x = nn.relu(nn.Conv(6, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            x = x.reshape((x.shape[0], -1))
            return nn.Dense(CLASSES)(x)

    return _train(Model())


@case(item=2)
def resnet_with_group_norm() -> Program:
    class Block(nn.Module):
        filters: int
        stride: int = 1

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            strides = (self.stride, self.stride)
            y = nn.Conv(self.filters, (3, 3), strides, use_bias=False)(x)
            y = nn.relu(nn.GroupNorm(num_groups=2)(y))
            y = nn.Conv(self.filters, (3, 3), use_bias=False)(y)
            y = nn.GroupNorm(num_groups=2)(y)
            if y.shape != x.shape:
                x = nn.Conv(self.filters, (1, 1), strides, use_bias=False)(x)
            return nn.relu(x + y)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(4, (3, 3), use_bias=False)(x)
            return Head()(Block(6, 2)(Block(4)(x)))

    return _train(Model())


@case(item=2, batch=12)
def cnn_depthwise_separable() -> Program:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.Conv(4, (1, 1))(x))
            x = nn.relu(nn.Conv(8, (3, 3), feature_group_count=4)(x))
            return Head()(nn.relu(nn.Conv(4, (1, 1))(x)))

    return _train(Model(), 12, 6)


@case(item=2)
def cnn_grouped() -> Program:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Head()(nn.relu(nn.Conv(6, (3, 3), feature_group_count=2, padding="VALID")(x)))

    return _train(Model(), 16, 6, channels=4)


@case(item=2)
def cnn_strided_and_circular() -> Program:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.Conv(4, (3, 3), strides=(2, 2), padding=((1, 0), (2, 1)))(x))
            return Head()(nn.relu(nn.Conv(4, (3, 3), padding="CIRCULAR")(x)))

    return _train(Model(), 16, 7)


@case(item=2, batch=12)
def cnn_dilated() -> Program:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.Conv(4, (3, 3), kernel_dilation=2)(x))
            return Head()(nn.relu(nn.Conv(4, (3, 3), input_dilation=2, padding=1)(x)))

    return _train(Model(), 12, 6)


@case(item=2)
def cnn_transposed_autoencoder() -> Program:
    """Down by strided and up by transposed convolutions, pixels as targets."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.Conv(4, (3, 3), strides=(2, 2))(x))
            return nn.ConvTranspose(3, (3, 3), strides=(2, 2))(x)

    model = Model()

    def step(params: Any, image: jax.Array) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            errors = (model.apply({"params": params}, image) - image) ** 2
            return errors.mean(), errors.sum(axis=(1, 2, 3))

        (loss, errors), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), (loss, errors)

    image = _images(16, 6)["image"]
    return Program(step, (kit.init(model, image)["params"], image))


@case(item=2)
def cnn_channels_first_and_batch_last() -> Program:
    """Layouts other than NHWC, by ``lax.conv_general_dilated``."""

    def step(params: Any, image: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            x = lax.conv_general_dilated(image, params["a"], (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
            x = jnp.transpose(jax.nn.relu(x), (2, 3, 1, 0))
            x = lax.conv_general_dilated(x, params["b"], (2, 2), "VALID", dimension_numbers=("HWCN", "HWIO", "HWCN"))
            return jnp.mean(jnp.sum(x**2, axis=(0, 1, 2)))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads, 0.01), loss

    params = {"a": kit.normal(4, 3, 3, 3, scale=0.2), "b": kit.normal(3, 3, 4, 5, scale=0.2)}
    return Program(step, (params, kit.normal(16, 3, 6, 6)))


@case(item=2, batch=12)
def conv_in_one_and_three_dimensions() -> Program:
    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            sound = nn.Conv(4, (3,), padding="CAUSAL").apply({"params": params["sound"]}, batch["sound"])
            video = nn.Conv(2, (2, 2, 2)).apply({"params": params["video"]}, batch["video"])
            return jnp.mean(jnp.sum(sound**2, (1, 2)) * jnp.sum(jnp.tanh(video), (1, 2, 3, 4)))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    batch = {"sound": kit.normal(12, 9, 2), "video": kit.normal(12, 3, 4, 4, 2)}
    params = {
        "sound": kit.init(nn.Conv(4, (3,)), batch["sound"])["params"],
        "video": kit.init(nn.Conv(2, (2, 2, 2)), batch["video"])["params"],
    }
    return Program(step, (params, batch))


def _pooling(pool: Callable[[jax.Array], jax.Array], batch: int = 16, size: int = 7) -> Program:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Head()(jnp.tanh(pool(nn.Conv(4, (3, 3))(x))))

    return _train(Model(), batch, size)


@case(item=2)
def pool_max_overlapping() -> Program:
    return _pooling(lambda x: nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME"))


@case(item=2, batch=12)
def pool_average_with_padding() -> Program:
    return _pooling(lambda x: nn.avg_pool(x, (3, 3), strides=(2, 2), padding="SAME", count_include_pad=False), 12)


@case(item=2)
def pool_min() -> Program:
    return _pooling(lambda x: -nn.max_pool(-x, (2, 2), strides=(2, 2)))


@case(item=2)
def pool_by_power_sum() -> Program:
    def pool(x: jax.Array) -> jax.Array:
        return nn.pool(x**2, 0.0, lax.add, (2, 2), (2, 2), "VALID") ** 0.5 / 2

    return _pooling(pool)


@case(item=2, batch=12)
def pool_global_maximum_and_mean() -> Program:
    def pool(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x.max(axis=(1, 2), keepdims=True), x.mean(axis=(1, 2), keepdims=True)], axis=-1)

    return _pooling(pool, 12)


@case(item=2)
def pool_cumulative_and_running_maximum() -> Program:
    def pool(x: jax.Array) -> jax.Array:
        return jnp.cumsum(x, axis=1) / 8 + lax.cummax(x, axis=2)

    return _pooling(pool, 16, 5)


@case(item=2)
def pool_of_equinox() -> Program:
    """Unbatched modules under vmap: adaptive, max and average pooling."""

    def model() -> Any:
        keys = jax.random.split(jax.random.key(0), 2)
        layers = [
            eqx.nn.Conv2d(3, 4, 3, key=keys[0]),
            eqx.nn.MaxPool2d(2, 1),
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.AdaptiveAvgPool2d(1),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(4, CLASSES, key=keys[1]),
        ]
        return eqx.nn.Sequential(layers)

    shapes, static = eqx.partition(eqx.filter_eval_shape(model), lambda x: isinstance(x, jax.ShapeDtypeStruct))
    arrays = kit.fill(shapes)

    def step(arrays: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        def loss_fn(arrays: Any) -> jax.Array:
            logits = jax.vmap(eqx.combine(arrays, static))(batch["image"].transpose(0, 3, 1, 2))
            return kit.cross_entropy(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(arrays)
        return kit.sgd(arrays, grads), loss

    return Program(step, (arrays, _images(16, 7)))


class Vit(nn.Module):
    """A vision transformer with one block; patches by a strided convolution or by reshapes."""

    convolution: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, h, w, c = x.shape
        if self.convolution:
            x = nn.Conv(8, (4, 4), strides=(4, 4), padding="VALID")(x).reshape(b, -1, 8)
        else:
            x = x.reshape(b, h // 4, 4, w // 4, 4, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, 16 * c)
            x = nn.Dense(8)(x)
        token = self.param("token", nn.initializers.zeros, (1, 1, 8))
        x = jnp.concatenate([jnp.tile(token, (b, 1, 1)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], 8))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(x[:, 0])


@case(item=2)
def vit_with_convolution() -> Program:
    return _train(Vit())


@case(item=2, batch=12)
def vit_with_reshaped_patches() -> Program:
    return _train(Vit(convolution=False), 12)


class Small(nn.Module):
    """What the augmentation cases train."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Head()(nn.relu(nn.Conv(4, (3, 3))(x)))


@case(item=2)
def augment_crop_and_flip() -> Program:
    """A random crop out of the padded image and a random flip, per example."""

    def augment(key: jax.Array, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def one(key: jax.Array, image: jax.Array) -> jax.Array:
            crop_key, flip_key = jax.random.split(key)
            padded = jnp.pad(image, ((1, 1), (1, 1), (0, 0)), mode="reflect")
            start = jax.random.randint(crop_key, (2,), 0, 3)
            image = lax.dynamic_slice(padded, (start[0], start[1], 0), image.shape)
            return jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)

        keys = jax.random.split(key, batch["image"].shape[0])
        return {**batch, "image": jax.vmap(one)(keys, batch["image"])}

    return _train(Small(), 16, 6, augment=augment)


@case(item=2, batch=12)
def augment_cutout_and_color() -> Program:
    """A square is erased and the brightness changed, with one draw for the whole batch."""

    def augment(key: jax.Array, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        image = batch["image"]
        a, b, c = jax.random.split(key, 3)
        n, size = image.shape[:2]
        corner = jax.random.randint(a, (n, 2, 1), 0, size - 2)
        row, column = (((p := jnp.arange(size)) >= corner[:, i]) & (p < corner[:, i] + 3) for i in range(2))
        image = jnp.where((row[:, :, None] & column[:, None, :])[..., None], 0.0, image)
        gain = jax.random.uniform(b, (n, 1, 1, 1), image.dtype, 0.8, 1.2)
        return {**batch, "image": image * gain + 0.1 * jax.random.normal(c, (n, 1, 1, 3), image.dtype)}

    return _train(Small(), 12, 6, augment=augment)


@case(item=2)
def augment_mixup_by_roll() -> Program:
    """Every example is mixed with its neighbour: a coupling between slices."""

    def augment(key: jax.Array, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        mix = jax.random.uniform(key, dtype=batch["image"].dtype)
        mixed = {k: mix * batch[k] + (1 - mix) * jnp.roll(batch[k], 1, axis=0) for k in ("image", "target")}
        return {**batch, **mixed}

    return _train(Small(), 16, 6, augment=augment)


@case(item=2, batch=12)
def augment_mixup_by_flip() -> Program:
    def augment(key: jax.Array, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        mix = jax.random.beta(key, 0.8, 0.8, dtype=batch["image"].dtype)
        return {**batch, **{k: mix * batch[k] + (1 - mix) * batch[k][::-1] for k in ("image", "target")}}

    return _train(Small(), 12, 6, augment=augment)


@case(item=2)
def augment_mixup_by_permutation() -> Program:
    """Every example is mixed with another one, by its own amount."""

    def augment(key: jax.Array, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        a, b = jax.random.split(key)
        image = batch["image"]
        order = jax.random.permutation(a, image.shape[0])
        mix = jax.random.uniform(b, (image.shape[0], 1, 1, 1), image.dtype)
        target = mix[:, 0, 0] * batch["target"] + (1 - mix[:, 0, 0]) * batch["target"][order]
        return {**batch, "image": mix * image + (1 - mix) * image[order], "target": target}

    return _train(Small(), 16, 6, augment=augment)


@case(item=2, batch=12)
def augment_manifold_mixup() -> Program:
    """Hidden features are mixed across the batch, so that the gradient crosses it too."""
    params = {"a": kit.dense(12, 8), "b": kit.dense(8, CLASSES, seed=1)}

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            hidden = jnp.tanh(kit.mlp(params["a"], batch["image"].reshape(-1, 12)))
            hidden = 0.7 * hidden + 0.3 * jnp.roll(hidden, 3, axis=0)
            losses = kit.cross_entropy(kit.mlp(params["b"], hidden), batch["label"])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    return Program(step, (params, _images(12, 2)), {"recompute_budget": 10.0})


@case(item=2)
def resize_and_bilinear_sampling() -> Program:
    """``jax.image.resize`` and sampling at predicted positions (a spatial transformer)."""

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            image = batch["image"]
            small = jax.image.resize(image, (image.shape[0], 3, 3, 3), "bilinear")
            shift = jnp.tanh(small.reshape(small.shape[0], -1) @ params)
            grid = jnp.stack(jnp.meshgrid(jnp.arange(6), jnp.arange(6), indexing="ij")).astype(image.dtype)

            def sample(image: jax.Array, shift: jax.Array) -> jax.Array:
                coordinates = list(grid + shift[:, None, None])
                return jax.vmap(lambda c: jax.scipy.ndimage.map_coordinates(c, coordinates, 1), -1, -1)(image)

            moved = jax.vmap(sample)(image, shift)
            return jnp.mean((moved - 0.5 * image) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return params - 0.1 * grads, loss

    return Program(step, (kit.normal(27, 2, scale=0.2), _images(16, 6)))


@case(item=2, batch=12)
def segmentation_with_skip_connection() -> Program:
    """A label for every pixel, nearest-neighbour upsampling, a pixel-weighted loss with an ignored class."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            a = nn.relu(nn.Conv(4, (3, 3))(x))
            b = nn.relu(nn.Conv(4, (3, 3))(nn.max_pool(a, (2, 2), (2, 2))))
            b = jnp.repeat(jnp.repeat(b, 2, axis=1), 2, axis=2)
            return nn.Conv(CLASSES, (1, 1))(jnp.concatenate([a, b], axis=-1))

    model = Model()

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            losses = kit.cross_entropy(model.apply({"params": params}, batch["image"]), batch["pixels"])
            valid = (batch["pixels"] != 0).astype(losses.dtype)
            return (losses * valid).sum() / valid.sum()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    batch = {"image": _images(12, 4)["image"], "pixels": kit.integers(CLASSES, 12, 4, 4)}
    return Program(step, (kit.init(model, batch["image"])["params"], batch))
