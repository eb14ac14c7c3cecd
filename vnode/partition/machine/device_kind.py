"""A kind of device: its rates of computation, its memory, and its bandwidth to memory and host.

Knows rates, sizes and names of dtypes. Must not know which kinds there are, or links between devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from vnode.errors import MachineError
from vnode.partition.machine.description_checks import (
    LARGEST,
    SLOWEST,
    error_context,
    one_line,
    positive_number,
    whole_number,
    wrong_value,
)

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8", "int8", "int4")
"""Names under which a kind may have a rate; all formats of eight bits count as ``float8``."""

WIDER = {
    "int4": ("int8",),
    "float8": ("bfloat16", "float16", "float32"),
    "bfloat16": ("float32",),
    "float16": ("float32",),
}
"""The wider dtypes, in order of preference, in which a device computes a dtype that it has no units for."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """The figures of a kind of device.

    Attributes:
      name: the kind's name.
      peak: operations a second of the matrix units by dtype (`DTYPES`); a multiplication with an addition is two.
        ``float32`` has the rate of `jax.numpy`'s default: TF32 on GPUs that have it, one pass in bfloat16 on TPUs.
      vector: operations a second outside of matrix products, in float32.
      memory: bytes that programs can use.
      bandwidth: bytes a second between the device and its memory.
      host_bandwidth: bytes a second between the device and its host, in each direction.
      host_latency: seconds until the first byte arrives.
      source: the source of the figures.

    Raises:
      MachineError: a figure is missing or implausible.

    Example:
      >>> from vnode.partition import Kind
      >>> kind = Kind("toy", {"bfloat16": 4e12}, vector=1e12, memory=2**30, bandwidth=1e11, host_bandwidth=1e10)
      >>> kind.rate("bfloat16"), kind.rate("float8_e4m3fn"), kind.rate("int32")
      (4000000000000.0, 4000000000000.0, 1000000000000.0)
    """

    name: str
    peak: Mapping[str, float] = dataclasses.field(hash=False)
    vector: float
    memory: int
    bandwidth: float
    host_bandwidth: float
    host_latency: float = 1e-5
    source: str = ""

    def __post_init__(self) -> None:
        one_line(self.name, "name")
        if not isinstance(self.peak, Mapping):
            raise wrong_value("peak", "rates by dtype", self.peak)
        for dtype in self.peak:
            if dtype not in DTYPES:
                raise wrong_value("peak", f"dtypes among {', '.join(DTYPES)}", dtype)
        with error_context("peak"):
            peak = {
                dtype: positive_number(rate, str(dtype), "operations a second") for dtype, rate in self.peak.items()
            }
        values = {
            "peak": peak,
            "vector": positive_number(self.vector, "vector", "operations a second"),
            "memory": whole_number(self.memory, "memory", "bytes", 1, LARGEST),
            "bandwidth": positive_number(self.bandwidth, "bandwidth", "bytes a second"),
            "host_bandwidth": positive_number(self.host_bandwidth, "host_bandwidth", "bytes a second"),
            "host_latency": positive_number(self.host_latency, "host_latency", "seconds", SLOWEST, zero=True),
            "source": one_line(self.source, "source", empty=True),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def rate(self, dtype: Any) -> float:
        """Operations a second of matrix products in a dtype.

        Args:
          dtype: the dtype of the operands, or its name.

        Returns:
          The rate of the dtype's matrix units; without them, that of the next wider dtype; else `vector`.

        Raises:
          MachineError: there is no such dtype.
        """
        name = rate_name(dtype)
        for found in (name, *WIDER.get(name, ())):
            if found in self.peak:
                return self.peak[found]
        return self.vector


def rate_name(dtype: Any) -> str:
    """The name of a dtype in `peak`.

    >>> rate_name("float8_e5m2"), rate_name("uint8"), rate_name("complex64"), rate_name("bool")
    ('float8', 'int8', 'float32', 'bool')
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    try:
        name = str(jnp.dtype(dtype).name)
    except TypeError:
        raise MachineError(f"there is no dtype {dtype!r}") from None
    if name.startswith("float8"):
        return "float8"
    return {"uint8": "int8", "uint4": "int4", "complex64": "float32", "complex128": "float64"}.get(name, name)
