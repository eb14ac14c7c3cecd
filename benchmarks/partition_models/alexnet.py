"""AlexNet on one device, as in Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014).

Knows the network's layers, and the trick: dense layers, which hold nearly all parameters and little of the work, are
split by outputs, convolutions by examples. Must not know how it is trained.
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.partition_models.model import Model, Published, Size, sized
from benchmarks.partition_models.vision import classifier


@dataclass(frozen=True)
class Sizes:
    """Batch, pixels on a side (at least 63), channels of the five convolutions, units of the dense layers, classes."""

    batch: int = 256
    image: int = 224
    channels: tuple[int, ...] = (64, 192, 384, 256, 256)
    dense: int = 4096
    classes: int = 1000


SIZES = {"paper": Sizes(), "small": Sizes(batch=8, image=64, channels=(8, 16, 16, 16, 16), dense=32, classes=16)}

PUBLISHED = Published(
    61_100_840, "torchvision's table of weights, AlexNet_Weights.IMAGENET1K_V1 (0.71 GFLOPS)", macs=0.71e9
)

PLACEMENTS = {r"fc\d/kernel": P(None, "model"), r"fc\d/bias": P("model")}
"""All three dense layers by their outputs, as published. That convolutions also split the batch over `model` is a
matter of values, which names of parameters cannot say."""


class AlexNet(nn.Module):
    """Five convolutions, three of them before pooling, then three dense layers."""

    channels: tuple[int, ...]
    dense: int
    classes: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        windows, strides, padding = (11, 5, 3, 3, 3), (4, 1, 1, 1, 1), (2, 2, 1, 1, 1)
        for i, (channels, window, stride, pad) in enumerate(zip(self.channels, windows, strides, padding, strict=True)):
            conv = nn.Conv(channels, (window, window), stride, pad, dtype=self.dtype, name=f"conv{i + 1}")
            x = nn.relu(conv(x))
            if i in (0, 1, 4):
                x = nn.max_pool(x, (3, 3), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for name in ("fc6", "fc7"):
            x = nn.Dropout(0.5, deterministic=not train)(x)
            x = nn.relu(nn.Dense(self.dense, dtype=self.dtype, name=name)(x))
        return nn.Dense(self.classes, dtype=self.dtype, name="fc8")(x)


def alexnet(size: Size = "paper", dtype: Any = jnp.float32, **changed: Any) -> Model:
    """AlexNet on ImageNet.

    Args:
        size: "paper" or "small".
        dtype: What is computed in; parameters are float32.
        **changed: Fields of `Sizes`.

    Raises:
        ValueError: There is no such size.
    """
    s = sized(SIZES, size, changed)
    module = AlexNet(s.channels, s.dense, s.classes, dtype)
    return classifier("AlexNet", module, s.batch, s.image, s.classes, PLACEMENTS, PUBLISHED)
