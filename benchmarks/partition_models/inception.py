"""Inception-v3 (Szegedy et al., "Rethinking the Inception architecture for computer vision", CVPR 2016), no side head.

Knows the network's layers and branches. Must not know how it is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.partition_models.model import Model, Published, Size, sized
from benchmarks.partition_models.vision import classifier


@dataclass(frozen=True)
class Sizes:
    """Batch, pixels on a side (at least 75), what the published channels are multiplied by, classes."""

    batch: int = 256
    image: int = 299
    width: float = 1.0
    classes: int = 1000


SIZES = {"paper": Sizes(), "small": Sizes(batch=8, image=75, width=1 / 32, classes=16)}

PUBLISHED = Published(
    23_834_568,
    "torchvision's inception_v3 with aux_logits=False (timm's inception_v3: 23.83 M); 5.71 GFLOPS",
    macs=5.71e9,
)


class Inception(nn.Module):
    """A stem, eleven blocks of parallel branches, and a dense layer."""

    width: float
    classes: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        def conv(x: jax.Array, channels: int, window: int | tuple[int, int] = 1, stride: int = 1, pad: str = "SAME"):
            shape = (window, window) if isinstance(window, int) else window
            channels = max(round(channels * self.width), 1)
            x = nn.Conv(channels, shape, stride, "VALID" if stride > 1 else pad, use_bias=False, dtype=self.dtype)(x)
            return nn.relu(nn.BatchNorm(not train, momentum=0.9, epsilon=1e-3, dtype=self.dtype)(x))

        def chain(x: jax.Array, *layers: tuple[Any, ...]) -> jax.Array:
            for layer in layers:
                x = conv(x, *layer)
            return x

        def join(branches: Sequence[jax.Array]) -> jax.Array:
            return jnp.concatenate(branches, axis=-1)

        def pooled(x: jax.Array, channels: int) -> jax.Array:
            return conv(nn.avg_pool(x, (3, 3), (1, 1), "SAME"), channels)

        def forked(x: jax.Array) -> list[jax.Array]:
            return [conv(x, 384, (1, 3)), conv(x, 384, (3, 1))]

        def small_windows(x: jax.Array, channels: int) -> jax.Array:
            return join(
                [
                    conv(x, 64),
                    chain(x, (48,), (64, 5)),
                    chain(x, (64,), (96, 3), (96, 3)),
                    pooled(x, channels),
                ]
            )

        def long_windows(x: jax.Array, c: int) -> jax.Array:
            across, down = (1, 7), (7, 1)
            return join(
                [
                    conv(x, 192),
                    chain(x, (c,), (c, across), (192, down)),
                    chain(x, (c,), (c, down), (c, across), (c, down), (192, across)),
                    pooled(x, 192),
                ]
            )

        def wide(x: jax.Array) -> jax.Array:
            return join([conv(x, 320), *forked(conv(x, 384)), *forked(chain(x, (448,), (384, 3))), pooled(x, 192)])

        def halved(x: jax.Array) -> jax.Array:
            return nn.max_pool(x, (3, 3), (2, 2))

        x = chain(x, (32, 3, 2), (32, 3, 1, "VALID"), (64, 3))
        x = chain(halved(x), (80,), (192, 3, 1, "VALID"))
        x = halved(x)
        for channels in (32, 64, 64):
            x = small_windows(x, channels)
        x = join([conv(x, 384, 3, 2), chain(x, (64,), (96, 3), (96, 3, 2)), halved(x)])
        for channels in (128, 160, 160, 192):
            x = long_windows(x, channels)
        x = join(
            [chain(x, (192,), (320, 3, 2)), chain(x, (192,), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)), halved(x)]
        )
        x = wide(wide(x))
        x = nn.Dropout(0.5, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


def inception_v3(size: Size = "paper", dtype: Any = jnp.float32, **changed: Any) -> Model:
    """Inception-v3 on ImageNet. Experts split its batch only.

    Args:
        size: "paper" or "small".
        dtype: What is computed in; parameters and statistics are float32.
        **changed: Fields of `Sizes`.

    Raises:
        ValueError: There is no such size.
    """
    s = sized(SIZES, size, changed)
    return classifier("Inception-v3", Inception(s.width, s.classes, dtype), s.batch, s.image, s.classes, {}, PUBLISHED)
