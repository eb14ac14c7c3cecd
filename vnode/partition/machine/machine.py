"""Kinds of devices and the networks between them -> a machine: the times of computation and of moving bytes.

Knows kinds and networks. Must not know steps, splits or plans.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vnode import files
from vnode.errors import MachineError
from vnode.partition.machine import machine_builders
from vnode.partition.machine.collective_times import (
    COLLECTIVES,
    Cost,
    Fabric,
    checked_groups,
    checked_pairs,
)
from vnode.partition.machine.description_checks import MOST_DEVICES, error_context, one_line, wrong_value
from vnode.partition.machine.description_checks import nonempty_list as some
from vnode.partition.machine.device_kind import Kind
from vnode.partition.machine.machine_builders import Device, Link
from vnode.partition.machine.machine_mesh import MachineMesh, lay_out_mesh
from vnode.partition.machine.networks import Network, Switch
from vnode.partition.machine.torus import Torus
from vnode.show.drawable import Drawn
from vnode.show.page import Cell, Column, Page, Table
from vnode.show.units import number, seconds, several, size


@dataclasses.dataclass(frozen=True, repr=False)
class Machine(Drawn):
    """Devices and the networks that join them; print it.

    Attributes:
      name: the machine's name, for people.
      devices: the devices; in the order of `jax.devices()` if the machine is this one.
      networks: the networks, from the nearest to the farthest. Two devices use the first network that joins both.
        Networks are nested or disjoint, and the last one joins all devices.

    Raises:
      MachineError: the description is not consistent.

    Example:
      >>> from vnode.partition import Machine
      >>> machine = Machine.tpu("v5e:4x4")
      >>> machine
      Machine(TPU v5e:4x4: 16 devices in 4 hosts)
      >>> mesh = machine.mesh({"data": 4, "model": 4})
      >>> cost = machine.collective("all_gather", mesh.groups("model"))
      >>> round(cost.seconds(34e6) * 1e6)  # of 34 MB; "How to scale your model" has 560 us
      570
    """

    name: str
    devices: tuple[Device, ...]
    networks: tuple[Network, ...] = ()

    def __post_init__(self) -> None:
        one_line(self.name, "name")
        devices = tuple(some(self.devices, "devices", "devices"))
        networks = tuple(some(self.networks, "networks", "networks")) if self.networks != () else ()
        if len(devices) > MOST_DEVICES:
            raise MachineError(f"expected at most {MOST_DEVICES} devices, not {len(devices)}", place="devices")
        for i, device in enumerate(devices):
            if not isinstance(device, Device):
                raise wrong_value(f"devices[{i}]", "a Device", device)
        kinds: dict[str, Kind] = {}
        for i, device in enumerate(devices):
            if kinds.setdefault(device.kind.name, device.kind) != device.kind:
                raise MachineError(f"two kinds are called {device.kind.name!r}", place=f"devices[{i}].kind")
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "networks", networks)
        everyone = frozenset(range(len(devices)))
        for i, network in enumerate(networks):
            if not isinstance(network, Network):
                raise wrong_value(f"networks[{i}]", "a Switch or a Torus", network)
            with error_context(f"networks[{i}]"):
                if not network.members <= everyone:
                    raise MachineError(
                        f"it joins device {max(network.members)}, but there are {several(len(devices), 'device')}"
                    )
                for k, nearer in enumerate(networks[:i]):
                    if not (nearer.members <= network.members or nearer.members.isdisjoint(network.members)):
                        raise MachineError(f"it joins some devices of networks[{k}] and not all of them")
        if len(devices) > 1 and not (networks and networks[-1].members == everyone):
            raise MachineError("the last network must join all devices", place="networks")

    # Ways to make a machine.

    @staticmethod
    def here(devices: Sequence[Any] | None = None, *, measure: bool = False) -> Machine:
        """The machine that this program runs on.

        A known kind (`vnode.partition.machine.known_kinds`) has the figures of its data sheet, and the memory that the
        device itself reports. Other kinds are measured, which takes some seconds:

        - rates of matrix products by dtype, rates of element-wise operations, and memory bandwidth, with all devices
          of a kind working at once (CPU devices that share cores share their rate);
        - bandwidth and latency from host to device, and between devices, as medians of interleaved repetitions.

        Args:
          devices: devices of this machine; all of `jax.devices()` by default.
          measure: whether to measure known kinds too, and the links between them within this process.

        Returns:
          The machine; its devices have the numbers of their positions in `devices`.

        Raises:
          MachineError: a kind is not known, and has no device in this process to measure; or the network between hosts
            is not known.

        Example:
          >>> from vnode.partition import Machine
          >>> import jax
          >>> machine = Machine.here(jax.devices()[:1])
          >>> machine.devices[0].kind.rate("float32") > 0
          True
        """
        from vnode.partition.machine.here import this_machine

        return Machine(*this_machine(devices, measure))

    @staticmethod
    def tpu(topology: str, *, slices: int = 1) -> Machine:
        """A slice of TPU chips, or several; each chip is one device.

        A v4 or v5p chip has two cores, which jax shows as one device. Hosts have 2x2 chips. Devices are in the order of
        `jax.experimental.topologies`. On v5e and v6e, axes of 16 chips wrap around. On v4 and v5p all axes do, if each
        is a multiple of 4. (Sources: `vnode.partition.machine.machine_builders`.)

        Args:
          topology: the generation and the chips along each axis: ``"v5e:4x4"``, ``"v5p:2x2x2"``, ``"v4:..."``,
            ``"v6e:..."``.
          slices: the number of slices, joined by the network of the data center.

        Returns:
          The machine.

        Raises:
          MachineError: there is no such slice.

        Example:
          >>> from vnode.partition import Machine
          >>> Machine.tpu("v4:4x4x8").networks[0].axes[2]
          Axis(size=8, wrap=True)
        """
        return Machine(*machine_builders.tpu(topology, slices))

    @staticmethod
    def gpus(
        kind: Kind | str,
        *,
        hosts: int = 1,
        per_host: int = 8,
        within: Link | None = None,
        between: Link | None = None,
    ) -> Machine:
        """Hosts with GPUs.

        By default they are joined as in NVIDIA's own hosts of that kind (sources:
        `vnode.partition.machine.machine_builders`). NVLink without a switch (P100, V100) counts as if it had one. That
        is right for rings, which use all links of a GPU at once, and too fast for one pair of GPUs.

        Args:
          kind: a kind, or the name of a known one.
          hosts: the number of hosts.
          per_host: the number of devices in each host.
          within: the link between the devices of a host.
          between: the link between hosts.

        Returns:
          The machine.

        Raises:
          MachineError: the kind is not known, or its links are not.

        Example:
          >>> from vnode.partition import Machine
          >>> Machine.gpus("a100-80gb", hosts=2).networks[-1].name
          'InfiniBand'
        """
        return Machine(*machine_builders.gpus(kind, hosts, per_host, within, between))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file that people can read and change; `load` reads it.

        Args:
          path: the path of the file.

        Raises:
          MachineError: the file cannot be written.
        """
        from vnode.partition.machine.machine_file import machine_to_json

        files.write_text(path, machine_to_json(self.name, self.devices, self.networks), MachineError)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Machine:
        """Reads a file that `save`, or a person, wrote.

        Bandwidths are in bytes a second in each direction, latencies in seconds, rates in operations a second. A row of
        ``devices`` stands for ``count`` of them (1 by default), in order; networks name them by number, from 0.
        `vnode.partition.machine.machine_file` shows an example.

        Args:
          path: the path of the file.

        Raises:
          MachineError: the file is missing, damaged, of another version, or does not describe a machine; the message
            says where.
        """
        from vnode.partition.machine.machine_file import machine_from_json

        said = files.read_text(path, MachineError, ["machines are written by machine.save(path), or by hand"])
        try:
            return Machine(*machine_from_json(said))
        except MachineError as error:
            place = f"{path}: {error.place}" if error.place else str(path)
            raise MachineError(error.problem, place=place, remedies=error.remedies) from None

    # Queries.

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of its devices, each once, in the order of the devices."""
        return tuple({device.kind.name: device.kind for device in self.devices}.values())

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the devices of each host."""
        return tuple(map(tuple, machine_builders.hosts_of(self.devices)))

    @functools.cached_property
    def _collectives(self) -> Callable[..., Cost]:
        return functools.cache(Fabric(self.networks).collective)

    def collective(
        self,
        name: str,
        groups: Sequence[Sequence[int]],
        *,
        pairs: Sequence[tuple[int, int]] | None = None,
    ) -> Cost:
        """The cost of a collective that groups of devices run at the same time.

        `vnode.partition.machine.collective_times` has the formulas and their sources. Bytes are those of one device's
        array: the result of an all-gather, the operand of the other collectives.

        Args:
          name: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"`` or ``"permute"``.
          groups: groups of equally many devices, as `MachineMesh.groups` gives them.
          pairs: for a permute: (sender, receiver) pairs, by place in each group; by default each device sends to the
            next, and the last to the first.

        Returns:
          The cost; zero if a group has one device.

        Raises:
          MachineError: there is no such collective, or the groups or pairs are wrong.

        Example:
          >>> from vnode.partition import Machine
          >>> cost = Machine.gpus("h100-sxm").collective("all_gather", [range(8)])
          >>> round(cost.seconds(4096 * 65536 * 2) * 1e3, 2)  # ms; "How to scale your model" has 1.04
          1.06
        """
        if name not in COLLECTIVES:
            raise MachineError(f"collectives are {', '.join(COLLECTIVES)}, not {name!r}")
        found = checked_groups(groups, len(self.devices))
        if name != "permute":
            return self._collectives(name, found)
        size = len(found[0])
        sent = tuple((i, (i + 1) % size) for i in range(size)) if pairs is None else checked_pairs(pairs, size)
        return self._collectives(name, found, sent)

    def mesh(self, sizes: Mapping[str, int]) -> MachineMesh:
        """The machine's devices as a mesh, whose axes follow those of a torus where the sizes allow it.

        Args:
          sizes: the size of each axis; their product is the number of devices.

        Returns:
          The mesh. On this machine, ``np.array(jax.devices())[mesh.devices]`` are the devices themselves.

        Raises:
          MachineError: the sizes do not fit.

        Example:
          >>> from vnode.partition import Machine
          >>> Machine.tpu("v5e:2x4").mesh({"data": 2, "model": 4}).groups("model")
          ((0, 2, 4, 6), (1, 3, 5, 7))
        """
        return lay_out_mesh(sizes, self.networks, len(self.devices))

    def page(self) -> Page:
        """The report: tables of kinds and networks."""
        subtitle = f"{several(len(self.devices), 'device')} in {several(len(self.hosts), 'host')}"
        return Page(self.name, subtitle, (self._kinds_table(), *([self._networks_table()] if self.networks else [])))

    def _kinds_table(self) -> Table:
        def row(kind: Kind) -> tuple[Cell, ...]:
            count = sum(device.kind.name == kind.name for device in self.devices)
            rates = {**kind.peak, "all but matrix products": kind.vector}
            note = ", ".join(f"{name} {number(rate)}op/s" for name, rate in rates.items())
            return (
                Cell(f"{count:,} x {kind.name}", kind.source),
                *(Cell(f"{number(kind.rate(dtype))}op/s", note) for dtype in ("float32", "bfloat16")),
                Cell(size(kind.memory)),
                Cell(f"{number(kind.bandwidth)}B/s"),
                Cell(f"{number(kind.host_bandwidth)}B/s", f"after {seconds(kind.host_latency)}"),
            )

        numbers = ("float32", "bfloat16", "memory", "bandwidth", "to host")
        columns = (Column("devices"), *(Column(name, right=True) for name in numbers))
        return Table("kinds", columns, tuple(map(row, self.kinds)))

    def _networks_table(self) -> Table:
        columns = Column("network"), Column("joins", wide=True), Column("bandwidth", right=True)
        rows = list[tuple[Cell, ...]]()
        for (name, joins, bandwidth, latency), alike in itertools.groupby(self.networks, key=in_words):
            times = len(list(alike))
            said = Cell(f"{joins}, {times} times" if times > 1 else joins)
            rows.append((Cell(name), said, Cell(f"{number(bandwidth)}B/s"), Cell(seconds(latency))))
        note = "from the nearest to the farthest; bandwidth of a link in one direction"
        return Table("networks", (*columns, Column("latency", right=True)), tuple(rows), note)


def in_words(network: Network) -> tuple[str, str, float, float]:
    """A network's kind, extent, bandwidth and latency, for the report."""
    match network:
        case Torus():
            joins = "neighbours in " + " x ".join(str(axis.size) for axis in network.axes)
            wrapped = [str(i + 1) for i, axis in enumerate(network.axes) if axis.wrap]
            if wrapped:
                joins += (
                    ", all wrapped" if len(wrapped) == len(network.axes) else f", wrapped along {', '.join(wrapped)}"
                )
        case Switch():
            most = max(map(len, network.ports))
            joins = f"{several(len(network.ports), 'port')}" + (f" of {several(most, 'device')}" if most > 1 else "")
        case _:
            joins = several(len(network.members), "device")
    return network.name, joins, network.bandwidth, network.latency
