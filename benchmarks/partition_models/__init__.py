"""The models of the papers on partitioning, as users write their train steps, by name.

Knows which models there are. Must not know what is in them.
"""

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.partition_models.alexnet import alexnet
from benchmarks.partition_models.experts import experts
from benchmarks.partition_models.inception import inception_v3
from benchmarks.partition_models.lstm import lstm, lstm_8k
from benchmarks.partition_models.model import Model, Published, name_of, specs
from benchmarks.partition_models.nmt import nmt
from benchmarks.partition_models.resnet import resnet_101, wide_resnet_50
from benchmarks.partition_models.transformer import transformer
from benchmarks.partition_models.transformer_scan import transformer_scan

__all__ = ["MODELS", "Model", "Published", "name_of", "specs"]

MODELS: Mapping[str, Callable[..., Model]] = {
    "alexnet": alexnet,
    "inception-v3": inception_v3,
    "resnet-101": resnet_101,
    "wresnet-50": wide_resnet_50,
    "wresnet-50-x4": partial(wide_resnet_50, width=4),
    "wresnet-50-x8": partial(wide_resnet_50, width=8),
    "lstm-4k": lstm,
    "lstm-8k": lstm_8k,
    "nmt": nmt,
    "transformer": transformer,
    "transformer-scan": transformer_scan,
    "experts": experts,
}
"""Each takes a size, "paper" or "small", the type that is computed in, and single sizes to change."""
