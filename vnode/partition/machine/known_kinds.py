"""Names of kinds of devices -> their figures and clocks, with sources.

Knows data sheets. Must not know machines that are made of such devices.

All rates are for dense operands; ``float64`` has one where the hardware computes it. A TPU has the memory that its
compiler plans with. A GPU has its data sheet's, whose "GB" are 2**30 bytes (an A100 of "80 GB" reports 81,920 MiB); an
H200 has 139 of its 141, as its driver reports.

`host_bandwidth` is that of the bus in one direction: PCI Express 3, 4 and 5 with 16 lanes carry 15.75, 31.5 and 63 GB/s
(PCI-SIG: 8, 16, 32 GT/s a lane, 128 of 130 bits used); for TPUs it is the figure of "How to scale your model"
(Austin and others, 2025), chapter "How to think about TPUs". No data sheet has `host_latency`: 10 us is assumed, the
order of a small copy's.

`vector` of a TPU is derived: lanes of the vector units x arithmetic units of each x clock. Lanes and units are those of
"How to scale your model", appendix on TPU internals (8 x 128 lanes, 2 units of each on v4, 4 from v5 on). The clock
follows from the peak of the matrix units (operations a second / (units x rows x columns x 2)).
"""

from __future__ import annotations

from vnode.errors import MachineError
from vnode.partition.machine.device_kind import Kind
from vnode.plan.nodes.device_memory import TPU_HBM
from vnode.show.units import several

GIB = 1 << 30
T = 1e12

PCIE3, PCIE4, PCIE5 = 15.75e9, 31.5e9, 63e9
"""Bytes a second in one direction over 16 lanes."""


def tpu(
    name: str, jax: tuple[str, int], peak: float, int8: float, vector: float, bandwidth: float, host: float
) -> Kind:
    """A TPU chip, in T operations and GB; `jax.numpy` rounds float32 to bfloat16, which its units multiply."""
    rates = {"float32": peak * T, "bfloat16": peak * T, "int8": int8 * T}
    source = f"Google Cloud documentation, {name}, system architecture; memory: libtpu 0.0.42; vector: derived"
    return Kind(name, rates, vector * T, int(TPU_HBM[jax] * GIB), bandwidth * 1e9, host * 1e9, source=source)


def gpu(
    name: str, peak: dict[str, float], vector: float, gib: float, bandwidth: float, host: float, source: str
) -> Kind:
    """A GPU; figures in T operations, GiB, GB."""
    rates = {dtype: rate * T for dtype, rate in peak.items()}
    return Kind(name, rates, vector * T, int(gib * GIB), bandwidth * 1e9, host, source=source)


A100 = {"float64": 19.5, "float32": 156.0, "bfloat16": 312.0, "float16": 312.0, "int8": 624.0, "int4": 1248.0}
H100 = {"float64": 66.9, "float32": 494.7, "bfloat16": 989.4, "float16": 989.4, "float8": 1978.9, "int8": 1978.9}
H100_PCIE = {"float64": 51.2, "float32": 378.0, "bfloat16": 756.0, "float16": 756.0, "float8": 1513.0, "int8": 1513.0}
V100 = {"float64": 7.8, "float32": 15.7, "float16": 125.0}
A100_SOURCE = "NVIDIA A100 data sheet, 2021 (SXM); float32: TF32"
H100_SOURCE = "NVIDIA H100 architecture white paper, 2022, table of peak rates; float32: TF32"
V100_SOURCE = "NVIDIA V100 data sheet, 2020 (SXM2); no matrix units for float32"

KINDS = {
    kind.name: kind
    for kind in (
        tpu("TPU v4", ("TPU v4", 2), 275, 275, 4.3, 1200, 15),
        tpu("TPU v5e", ("TPU v5 lite", 1), 197, 393, 6.2, 819, 15),
        tpu("TPU v5p", ("TPU v5", 2), 459, 918, 14.3, 2765, 15),  # int8: "How to scale your model"
        tpu("TPU v6e", ("TPU v6 lite", 1), 918, 1836, 7.2, 1638, 32),
        gpu("A100-40GB", A100, 19.5, 40, 1555, PCIE4, A100_SOURCE),
        gpu("A100-80GB", A100, 19.5, 80, 2039, PCIE4, A100_SOURCE),
        gpu("H100-SXM", H100, 66.9, 80, 3350, PCIE5, H100_SOURCE + "; bandwidth: NVIDIA H100 data sheet, 2023"),
        gpu("H100-PCIe", H100_PCIE, 51.2, 80, 2000, PCIE5, H100_SOURCE),
        gpu("H200", H100, 66.9, 139, 4800, PCIE5, "NVIDIA H200 data sheet, 2023; rates: those of the H100 SXM"),
        gpu("V100-16GB", V100, 15.7, 16, 900, PCIE3, V100_SOURCE),
        gpu("V100-32GB", V100, 15.7, 32, 900, PCIE3, V100_SOURCE),
        gpu(
            *("P100", {"float64": 5.3, "float32": 10.6, "float16": 21.2}, 10.6, 16, 732, PCIE3),
            source="NVIDIA Tesla P100 data sheet, 2016 (SXM2); no matrix units",
        ),
        # A card holds two dies, each of which is a device: the card's figures halved. Its data sheet has 8.74 and 2.91
        # T operations a second with boost, 24 GB, 480 GB/s. The dies share the card's 16 lanes.
        gpu(
            *("K80", {"float64": 1.455, "float32": 4.37}, 4.37, 12, 240, PCIE3),
            source="NVIDIA Tesla K80 board specification, 2015, halved: a device is one of two GK210 dies; with boost",
        ),
    )
}
"""Every known kind, by its name."""

CLOCKS = {
    # "How to scale your model", appendix on TPU internals: units of 128 x 128 (256 x 256 on v6e); two cores a chip on
    # v4 and v5p, whose peak is that of both.
    "TPU v4": 275e12 / (2 * 4 * 128 * 128 * 2),
    "TPU v5e": 197e12 / (4 * 128 * 128 * 2),
    "TPU v5p": 459e12 / (2 * 4 * 128 * 128 * 2),
    "TPU v6e": 918e12 / (4 * 256 * 256 * 2),
}
"""Cycles a second, by the name of a kind.

The compiler writes ``estimated_cycles`` at every fused operation of a scheduled program (`vnode.partition.hlo`). They
hold no transfer over links and no time of a launch.
"""

JAX_NAMES = {
    "TPU v4": "TPU v4",
    "TPU v5 lite": "TPU v5e",
    "TPU v5e": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v5p": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "TPU v6e": "TPU v6e",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "A100-SXM4-80GB": "A100-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H200": "H200",
    "Tesla V100-SXM2-16GB": "V100-16GB",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "Tesla P100-SXM2-16GB": "P100",
    "Tesla K80": "K80",
}
"""Names of kinds by `jax.Device.device_kind`."""


def kind_named(name: Kind | str) -> Kind:
    """A known kind of device.

    Args:
      name: a name in `KINDS` in any case, with or without "TPU", or jax's name. A `Kind` is returned as it is.

    Raises:
      MachineError: the kind is not known.

    Example:
      >>> kind_named("a100-80gb").memory // 2**30, kind_named("v5e").name
      (80, 'TPU v5e')
    """
    if isinstance(name, Kind):
        return name
    wanted = str(name).strip().lower()
    for known, kind in KINDS.items():
        if wanted in (known.lower(), known.lower().removeprefix("tpu ")):
            return kind
    for called, known in JAX_NAMES.items():
        if wanted == called.lower():
            return KINDS[known]
    raise MachineError(
        f"there is no known kind of device {name!r}.",
        remedies=[
            f"name one of {several(len(KINDS), 'known kind')}: {', '.join(KINDS)}",
            "or describe it: Kind('mine', {'bfloat16': 1e14}, vector=1e13, memory=2**35, bandwidth=1e12, "
            "host_bandwidth=1.5e10)",
            "or measure it on its host: Machine.here(measure=True)",
        ],
    )
