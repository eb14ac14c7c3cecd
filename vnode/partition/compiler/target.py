"""A machine -> the compiler that serves it: devices to lower for, and how another process finds the same ones.

    target, reason = compile_target(Machine.tpu("v5e:2x4"))
    target.devices      # eight devices of a topology that need not be there
    target, reason = compile_target(Machine.gpus("h100-sxm"))
    target, reason      # None, "no compiler here builds for H100-SXM"

Knows jax's devices, TPU topologies and machines. Must not know programs, or what is compiled.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from vnode.partition.machine import Machine
from vnode.partition.machine.known_kinds import JAX_NAMES
from vnode.placement.world import is_local

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables of the environment that change what a compiler does."""

NO_METADATA_SERVER = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""Environment variables that stop libtpu from asking a metadata server which machine this is."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A TPU topology, as ``jax.experimental.topologies`` names it.

    Attributes:
      name: such as ``"v5e:2x4"``.
      slices: how many such slices.
    """

    name: str
    slices: int = 1

    def devices(self) -> tuple[Any, ...]:
        """Its devices, as targets to compile for; no hardware is needed. Loads libtpu.

        Raises:
          RuntimeError: libtpu does not know the topology.
        """
        from jax.experimental import topologies

        for key, value in NO_METADATA_SERVER.items():
            os.environ.setdefault(key, value)
        options: dict[str, Any] = {}
        if self.name.startswith("v4"):
            options["chip_config_name"] = "megacore"  # cores as one device
        if self.slices > 1:
            options["num_slices"] = self.slices
        return tuple(topologies.get_topology_desc(self.name, platform="tpu", **options).devices)


@dataclasses.dataclass(frozen=True)
class CompileTarget:
    """Devices to compile for.

    Attributes:
      devices: jax devices, in the order of the machine's.
      topology: their TPU topology, if they are not on this host.
    """

    devices: tuple[Any, ...]
    topology: Topology | None = None

    @property
    def platform(self) -> str:
        """``"tpu"``, ``"cpu"`` or ``"gpu"``."""
        return str(self.devices[0].platform)

    @property
    def separate(self) -> bool:
        """Whether another process can compile for them: local accelerators belong to this process."""
        return self.topology is not None or self.platform == "cpu"

    @property
    def has_drafts(self) -> bool:
        """Whether a program compiles much faster with few optimizations. The TPU compiler needs a fifth of the time."""
        return self.platform == "tpu"

    @property
    def key(self) -> dict[str, str]:
        """The part of a cache key that identifies the compiler: its versions, devices and flags."""
        versions = {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}
        if self.platform == "tpu" and importlib.util.find_spec("libtpu"):
            versions["libtpu"] = importlib.metadata.version("libtpu")
        return {
            **versions,
            **{name: os.environ.get(name, "") for name in FLAGS},
            "device": str(self.devices[0].device_kind),
            "devices": str(len(self.devices)),
            "topology": "" if self.topology is None else f"{self.topology.name} x {self.topology.slices}",
        }

    def environment(self) -> Mapping[str, str]:
        """Additional environment variables of a process that compiles for the same devices."""
        found = {"JAX_PLATFORMS": "cpu"}
        if self.topology is not None:
            return {**found, **NO_METADATA_SERVER}
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            found["JAX_NUM_CPU_DEVICES"] = str(1 + max(device.id for device in self.devices))
        return found


def compile_target(machine: Machine, devices: Sequence[Any] | None = None) -> tuple[CompileTarget | None, str]:
    """Finds the compiler that serves a machine.

    Args:
      machine: the machine to compile for.
      devices: the devices to compile for, in the machine's order. By default those of the TPU topology that the machine
        is named for, if libtpu is installed; or this process's devices, if the machine consists of them.

    Returns:
      The target, or None and the reason in words.
    """
    topology = topology_of(machine)
    if devices is not None:
        here = devices[0] in jax.devices() if devices[0].platform == jax.default_backend() else False
        return CompileTarget(tuple(devices), None if here else topology), ""
    if topology is not None:
        if importlib.util.find_spec("libtpu") is None:
            return None, "the TPU compiler is not installed: pip install 'vnode[tpu-aot]'"
        try:
            return CompileTarget(topology.devices(), topology), ""
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return None, f"the TPU compiler knows no {topology.name}: {str(error).splitlines()[0]}"
    found = jax.devices()
    names = [JAX_NAMES.get(device.device_kind, device.device_kind) for device in found]
    wanted = [device.kind.name for device in machine.devices]
    if names == wanted or [device.device_kind for device in found] == wanted:
        if all(map(is_local, found)):
            return CompileTarget(tuple(found)), ""
        return None, "devices of several processes compile together"
    return None, f"no compiler here builds for {machine.name}"


def topology_of(machine: Machine) -> Topology | None:
    """The TPU topology that a machine is named for; None if it is none.

    >>> topology_of(Machine.tpu("v5e:2x4")), topology_of(Machine.tpu("v5p:2x2x2", slices=2)).slices
    (Topology(name='v5e:2x4', slices=1), 2)
    """
    named = re.fullmatch(r"TPU (v\w+:[\dx]+?)(?: x (\d+))?", machine.name)
    if named is None:
        return None
    return Topology(named[1], int(named[2] or 1))
