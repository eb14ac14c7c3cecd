"""Train steps as users write them today, by name: parameters in float32, products in bfloat16.

Knows which models there are. Must not know what is in them.
"""

from collections.abc import Callable, Mapping

from benchmarks.partition_models.dit import dit
from benchmarks.partition_models.dlrm import dlrm
from benchmarks.partition_models.gnn import gnn
from benchmarks.partition_models.llama import llama
from benchmarks.partition_models.mamba import mamba
from benchmarks.partition_models.model import Model
from benchmarks.partition_models.moe import moe
from benchmarks.partition_models.muon import muon
from benchmarks.partition_models.t5 import t5
from benchmarks.partition_models.unet import unet
from benchmarks.partition_models.vit import vit

REALISTIC: Mapping[str, Callable[..., Model]] = {
    "llama": llama,
    "mamba": mamba,
    "vit": vit,
    "moe": moe,
    "dlrm": dlrm,
    "muon": muon,
    "gnn": gnn,
    "unet": unet,
    "t5": t5,
    "dit": dit,
}
"""Each takes single sizes to change."""
