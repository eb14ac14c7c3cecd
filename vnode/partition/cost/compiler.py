"""A kind of TPU -> its clock; a topology -> its devices as targets to compile for, on hosts without a TPU.

Knows data sheets and libtpu's names. Must not know programs.

The compiler writes ``estimated_cycles`` at every fused operation of a scheduled program (`vnode.partition.hlo`). They
hold no transfer over links and no time of a launch. Cycles become seconds by the clock, which follows from a
chip's peak rate as the documentation has it: operations a second / (units x rows x columns x 2).
"""

from __future__ import annotations

import os
from typing import Any

CLOCKS = {
    # "How to scale your model" (Austin and others, 2025), appendix on TPU internals: units of 128 x 128 (256 x 256 on
    # v6e); two cores a chip on v4 and v5p, whose peak is that of both.
    "TPU v4": 275e12 / (2 * 4 * 128 * 128 * 2),
    "TPU v5e": 197e12 / (4 * 128 * 128 * 2),
    "TPU v5p": 459e12 / (2 * 4 * 128 * 128 * 2),
    "TPU v6e": 918e12 / (4 * 256 * 256 * 2),
}
"""Cycles a second, by the name of a kind."""

NO_METADATA_SERVER = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""Environment variables that stop libtpu from asking a metadata server which machine this is."""


def tpu_topology(name: str, slices: int = 1) -> list[Any]:
    """The devices of a topology, as targets to compile for; no hardware is needed. Loads libtpu.

    Args:
      name: such as ``"v5e:2x4"``.
      slices: how many such slices.

    Raises:
      RuntimeError: libtpu does not know the topology.
    """
    from jax.experimental import topologies

    for key, value in NO_METADATA_SERVER.items():
        os.environ.setdefault(key, value)
    options: dict[str, Any] = {"chip_config_name": "megacore"} if name.startswith("v4") else {}  # cores as one device
    if slices > 1:
        options["num_slices"] = slices
    return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
