"""Residual networks (He et al., CVPR 2016), and wide ones as Tofu's (Wang et al., EuroSys 2019): all channels times k.

Knows the network's layers, and how filters are split. Must not know how it is trained.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.partition_models.model import Model, Published, Size, sized
from benchmarks.partition_models.vision import classifier


@dataclass(frozen=True)
class Sizes:
    """Batch, pixels on a side, blocks of the four stages, channels of the first, their factor, classes."""

    batch: int = 256
    image: int = 224
    blocks: tuple[int, ...] = (3, 4, 23, 3)
    channels: int = 64
    width: int = 1
    classes: int = 1000


SMALL = Sizes(batch=8, image=32, blocks=(1, 1, 2, 1), channels=4, classes=16)
SIZES_101 = {"paper": Sizes(), "small": SMALL}
SIZES_50 = {"paper": Sizes(batch=128, blocks=(3, 4, 6, 3)), "small": Sizes(8, 32, (1, 1, 1, 1), 4, classes=16)}

RESNET_101 = Published(
    44_549_160, "torchvision's table of weights, ResNet101_Weights.IMAGENET1K_V1 (7.80 GFLOPS)", macs=7.80e9
)
RESNET_50 = Published(
    25_557_032,
    "torchvision's table of weights, ResNet50_Weights.IMAGENET1K_V1 (4.09 GFLOPS)",
    sizes={"width": 1},
    macs=4.09e9,
)

FILTERS = {
    r"Conv_\d+/kernel": P(None, None, None, "model"),
    r"BatchNorm_\d+/(scale|bias|mean|var)": P("model"),
    r"head/kernel": P("model", None),
}
"""Filters of every convolution are split, and with them what belongs to a channel; images are gathered before each
(Dryden et al., "Channel and filter parallelism for large-scale CNN training", SC 2019)."""


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut; the window of 3 x 3 has the stride, as in most implementations."""

    channels: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.channels, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.channels, (3, 3), self.stride, 1)(y)))
        y = norm()(conv(4 * self.channels, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.channels, (1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks of which each but the first halves the image, and a dense layer."""

    blocks: tuple[int, ...]
    channels: int
    classes: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.channels, (7, 7), 2, 3, use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = Bottleneck(self.channels * 2**stage, stride, self.dtype)(x, train)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x.mean((1, 2)))


def _resnet(name: str, s: Sizes, dtype: Any, placements: Any, published: Published) -> Model:
    module = ResNet(s.blocks, s.channels * s.width, s.classes, dtype)
    return classifier(name, module, s.batch, s.image, s.classes, placements, published)


def resnet_101(size: Size = "paper", dtype: Any = jnp.float32, **changed: Any) -> Model:
    """ResNet-101 on ImageNet. Experts split its batch only.

    Args:
        size: "paper" or "small", which has fewer blocks.
        dtype: What is computed in; parameters and statistics are float32.
        **changed: Fields of `Sizes`.

    Raises:
        ValueError: There is no such size.
    """
    return _resnet("ResNet-101", sized(SIZES_101, size, changed), dtype, {}, RESNET_101)


def wide_resnet_50(size: Size = "paper", dtype: Any = jnp.float32, **changed: Any) -> Model:
    """WResNet-50 on ImageNet, by default of the usual width, which is ResNet-50.

    Args:
        size: "paper" or "small", which has fewer blocks.
        dtype: What is computed in; parameters and statistics are float32.
        **changed: Fields of `Sizes`; `width` is the factor of all channels, 4 or 8 in the tables.

    Raises:
        ValueError: There is no such size.
    """
    s = sized(SIZES_50, size, changed)
    return _resnet(f"WResNet-50 x{s.width}", s, dtype, FILTERS, RESNET_50)
