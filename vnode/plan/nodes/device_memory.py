"""A device -> its memory limit; a compiled program -> the memory that it needs.

Knows devices, and what compilers say of a program. Must not know steps, nodes, or how a number of nodes is found.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vnode.errors import MemoryLimitError
from vnode.placement.temporary import temporary_of

UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 2**i for p, i in zip("KMGT", (10, 20, 30, 40), strict=True)},
}

TPU_HBM = {
    ("TPU v2", 1): 7.48,
    ("TPU v3", 1): 15.48,
    ("TPU v4", 1): 15.25,
    ("TPU v4", 2): 30.75,
    ("TPU v5 lite", 1): 15.75,
    ("TPU v5", 2): 95.74,
    ("TPU v6 lite", 1): 31.25,
    ("TPU7x", 1): 94.75,
}
"""GiB that the TPU compiler plans with, by kind and cores of what jax counts as a device.

The figures are the compiler's own (libtpu 0.0.42): it names them where it refuses a program that is too large, as
``tests/test_fit.py`` has it do again. They are what chips have by their data sheets (https://cloud.google.com/tpu/docs/v5e
and its siblings), divided by the devices of a chip, less what is reserved.
"""

REFUSAL = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMGT])")
"""The TPU compiler's words for the memory that a refused program needs."""


def byte_count(memory: Any) -> int:
    """A number of bytes, from an integer or a string with a unit.

    Args:
      memory: bytes, or such as ``"16GiB"`` (2**30 bytes each) or ``"16 GB"`` (10**9 bytes each).

    Returns:
      Bytes.

    Raises:
      ValueError: it is neither.

    Example:
      >>> byte_count("1.5KiB"), byte_count("2 kB"), byte_count(100)
      (1536, 2000, 100)
    """
    found = None
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]+)\s*", memory)
        if match and match[2].upper() in UNITS and re.fullmatch(r"\d+\.?\d*|\.\d+", match[1]):
            found = int(float(match[1]) * UNITS[match[2].upper()])
    elif isinstance(memory, int | float | np.integer) and not isinstance(memory, bool) and math.isfinite(memory):
        found = int(memory)
    if found is None or found < 1:
        raise ValueError(f"memory must be bytes per device, or a string such as '16GiB' or '16 GB', not {memory!r}")
    return found


def device_memory(devices: Sequence[Any]) -> int:
    """The memory of the smallest of some devices.

    Args:
      devices: as jax counts them; those of a topology description too.

    Returns:
      Bytes: what the device reports (``memory_stats()["bytes_limit"]``, the whole of what jax may use there), else what
      the TPU compiler plans with for its kind.

    Raises:
      MemoryLimitError: a device reports no limit, as CPUs do, and is no TPU of a kind that is known.
    """
    limits = {device: reported_bytes(device) or compiler_planned_bytes(device) for device in devices}
    unknown = [device for device, limit in limits.items() if not limit]
    if unknown:
        raise MemoryLimitError(
            "the memory limit of a device is not known.",
            facts=[f"{unknown[0]} reports none" + (", as no CPU does" if unknown[0].platform == "cpu" else "")],
            remedies=[
                "give the limit: memory='16GiB'",
                "choose the number of virtual nodes yourself",
            ],
        )
    return min(limits.values())


def reported_bytes(device: Any) -> int:
    """Bytes that a device reports, or 0."""
    try:
        return int((device.memory_stats() or {}).get("bytes_limit", 0))
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # a device of another process, or of no machine at all
        return 0


def compiler_planned_bytes(device: Any) -> int:
    """Bytes that the TPU compiler plans with for a device, or 0."""
    return int(TPU_HBM.get((device.device_kind, getattr(device, "num_cores", 1) or 1), 0) * 2**30)


def program_memory(compiled: Any) -> int:
    """Bytes that a compiled program needs on each device while it runs.

    Arguments, results and temporaries all live at once; what results take over from donated arguments counts once.
    Gaps between temporary arrays count as they are (`vnode.placement.temporary`).

    Args:
      compiled: what ``lower(...).compile()`` returned.

    Returns:
      Bytes.

    Raises:
      MemoryLimitError: the compiler does not say.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> shape = jax.ShapeDtypeStruct((256,), jnp.float32)
      >>> program_memory(jax.jit(lambda x: x + 1).lower(shape).compile())
      2048
      >>> program_memory(jax.jit(lambda x: x + 1, donate_argnums=0).lower(shape).compile())
      1024
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise MemoryLimitError("the compiler reports no memory for a program: choose virtual_nodes yourself")
    temporary = temporary_of(compiled)
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + temporary.held
        + temporary.gaps
    )


def memory_refusal(error: Exception) -> tuple[bool, int | None]:
    """Whether an error is a compiler's refusal of a program that is too large for the device.

    Args:
      error: what compiling raised.

    Returns:
      Whether it is; and the bytes that the program would need, if the compiler says.

    Example:
      >>> memory_refusal(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 18.5G of 15.75G hbm."))
      (True, 19864223744)
    """
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in str(error):
        return False, None
    match = REFUSAL.search(str(error))
    return True, int(float(match[1]) * UNITS[f"{match[2]}IB"]) if match else None
