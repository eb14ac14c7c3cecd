"""A step and a description of devices -> the numbers of virtual nodes that fit in their memory, by compilation alone.

Knows topologies and limits. Must not know how a step is compiled, or how the search goes.

The TPU compiler runs on machines without a TPU: `jax.experimental.topologies` describes devices to compile for.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from vnode.errors import PlacementError, VnodeError
from vnode.placement.placement import Placement, device_list
from vnode.plan.nodes.device_memory import byte_count, device_memory
from vnode.plan.nodes.node_search import NodeSearch, Trial, search, try_step
from vnode.step.argument_checks import check_tuple
from vnode.step.protocol import Step
from vnode.step.virtual import with_nodes
from vnode.tracebacks import api_boundary

TOPOLOGIES = ("v3:2x2", "v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
"""Eight devices of each kind of TPU."""

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables that libtpu reads when it starts: the kind of machine, which it would ask a metadata server
for, and that several processes may compile. They are set on machines without a TPU only, if they are not set yet."""


@dataclasses.dataclass(frozen=True, repr=False)
class KindFit:
    """The numbers of nodes that fit on one kind of device.

    Attributes:
      name: of the topology.
      kind: of its devices, as jax calls it.
      devices: how many there are.
      search: for the smallest number of nodes.
      given: the step's own number of nodes, if it has one.
    """

    name: str
    kind: str
    devices: int
    search: NodeSearch
    given: Trial | None

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.devices} x {self.kind}: {self.search.verdict}"]
        if self.given is not None:
            lines[0] += f"; the step's own {self.given.virtual_nodes} " + ("fit" if self.given.fits else "are too much")
        return "\n".join([*lines, *("  " + line for line in self.search.lines)])

    def __repr__(self) -> str:
        return f"KindFit({self.name}: {self.devices} x {self.kind}: {self.search.verdict})"


class Fit(Mapping[str, KindFit]):
    """The answer of `fit`, by topology; `str` of it is a table."""

    def __init__(self, entries: Sequence[KindFit]) -> None:
        self._entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> KindFit:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def smallest(self) -> dict[str, int | None]:
        """The smallest V that fits, by topology; None where none does."""
        return {name: entry.search.chosen for name, entry in self._entries.items()}

    def __str__(self) -> str:
        return "\n".join(map(str, self._entries.values()))

    def __repr__(self) -> str:
        found = [f"{name}: {'none' if v is None else f'V = {v}'}" for name, v in self.smallest.items()]
        return f"Fit({', '.join(found)})"


@api_boundary
def fit(
    step: Step, args: Sequence[Any], *, devices: Any = None, memory: int | str | None = None, topology: Any = None
) -> Fit:
    """Says which numbers of virtual nodes fit in the memory of devices, by compiling for them; nothing is run.

    Args:
      step: what `virtualize` returned. Where it has a number of nodes already, that is reported too.
      args: a tuple of the step's arguments, arrays or `jax.ShapeDtypeStruct`s.
      devices: the name of a TPU topology, such as ``"v5e:2x4"``, or several; by default eight devices of every kind of
        TPU. These need the TPU compiler (the extra ``tpu-aot``), and no TPU: the environment variables with which it
        runs alone are set, where they are not set yet and there is no TPU. Or a sequence of devices (a number for the
        first so many). Or a `Placement`, whose mesh may have further axes over which the state is sharded; its number
        of nodes is the fewest that are tried.
      memory: what a device may hold, bytes or such as ``"16GiB"``; by default what it has.
      topology: as `devices`; its name in earlier versions.

    Returns:
      A `Fit`; print it, or ask ``fit(...).smallest``.

    Raises:
      VnodeError: the TPU compiler is not installed.
      MemoryLimitError: `memory` is not given, and is not known of the devices.
      PlacementError: `devices` are none.

    Example:
      >>> import jax, jax.numpy as jnp, vnode
      >>> step = vnode.virtualize(lambda w, x: w - (jnp.tanh(x) @ w).mean(), virtual_nodes=4)
      >>> args = jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((64, 3), jnp.float32)
      >>> vnode.fit(step, args, devices=1, memory="1MiB").smallest
      {'cpu:1': 1}
    """
    check_tuple(args, "vnode.fit")
    limit = None if memory is None else byte_count(memory)
    entries = []
    with step.resolved(args, {}, choose=False) as here:
        pattern, given = here.step, here.step.options.virtual_nodes if here.chosen else None
        for name, template in target_placements(devices if topology is None else topology, pattern.placement.axis):
            those = template.devices
            allowed = device_memory(those) if limit is None else limit
            found, _ = search(pattern, template, allowed, here.args, here.kwargs)
            own = None
            if given is not None:
                batch = pattern.spec.call(here.args, here.kwargs).size
                same = [t for t in found.trials if t.virtual_nodes == given]
                own = (
                    same[0]
                    if same
                    else try_step(with_nodes(pattern, given, template), batch, allowed, here.args, here.kwargs)
                )
            entries.append(KindFit(name, those[0].device_kind, len(those), found, own))
    return Fit(entries)


def target_placements(topology: Any, axis: str) -> list[tuple[str, Placement]]:
    """Names of topologies, and one node on each of their devices.

    Raises:
      PlacementError: these are no topologies.
    """
    if isinstance(topology, Placement):
        return [(f"{topology.devices[0].platform}:{len(topology.devices)}", topology)]
    if topology is None:
        topology = TOPOLOGIES
    if isinstance(topology, int):
        topology = device_list(topology)
    if isinstance(topology, str):
        topology = [topology]
    entries = list(topology) if isinstance(topology, Sequence) else []
    if entries and all(isinstance(entry, str) for entry in entries):
        described = [(name, described_devices(name)) for name in entries]
        return [(name, Placement(len(devices), devices, axis=axis)) for name, devices in described]
    if entries and all(hasattr(entry, "platform") for entry in entries):
        return [(f"{entries[0].platform}:{len(entries)}", Placement(len(entries), entries, axis=axis))]
    raise PlacementError(
        f"devices must be a name such as 'v5e:2x4', names, a sequence of devices or a Placement, not {topology!r}"
    )


def described_devices(name: str) -> list[Any]:
    """The devices of a TPU topology. They can be compiled for and not run on.

    Args:
      name: ``"v5e:2x4"``: a kind, and the chips along each dimension.

    Returns:
      The devices. A chip of a v4 is one, as on Cloud TPU.

    Raises:
      VnodeError: the TPU compiler is not installed.
      PlacementError: there is no such topology.
    """
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise VnodeError(
            f"compiling for {name} needs the TPU compiler, which is not installed.",
            remedies=["pip install 'vnode[tpu-aot]' (x86-64 Linux only)", "give devices instead of a topology"],
        )
    if jax.default_backend() != "tpu":
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    options = {"chip_config_name": "megacore"} if name.startswith("v4:") else {}
    try:
        return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise PlacementError(
            f"there is no TPU topology {name!r}.",
            facts=[str(error).splitlines()[0]],
            remedies=[f"a kind and the chips along each dimension, such as {', '.join(TOPOLOGIES)}"],
        ) from None
