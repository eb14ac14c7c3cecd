"""A machine -> a machine with twice the devices, connected in the same way.

Knows machines and their networks. Must not know which sizes are sold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vnode.partition.machine.machine import Machine
from vnode.partition.machine.machine_builders import Device, Link, hosts_of
from vnode.partition.machine.networks import Network, Pairs, Switch
from vnode.partition.machine.torus import Torus


def double_machine(machine: Machine) -> Machine:
    """Doubles a machine.

    The network that joins all devices joins the new ones too: a switch gets twice the ports, a torus twice the length
    along its shortest axis. A single device without a network is joined to the second one through the host.

    Raises:
      MachineError: the machine, or a network of its kind, cannot have so many devices.

    Example:
      >>> double_machine(Machine.gpus("h100-sxm", hosts=2)).networks == Machine.gpus("h100-sxm", hosts=4).networks
      True
      >>> double_machine(Machine.tpu("v5e:2x4")).networks[0].axes
      (Axis(size=4, wrap=False), Axis(size=4, wrap=False))
    """
    count, hosts = len(machine.devices), 1 + max(device.host for device in machine.devices)
    more = (dataclasses.replace(device, host=device.host + hosts) for device in machine.devices)
    devices = (*machine.devices, *more)
    inner = machine.networks[:-1]
    last = double_network(machine.networks[-1], count) if machine.networks else host_network(devices)
    return Machine(f"2 x ({machine.name})", devices, (*inner, *(shift_network(each, count) for each in inner), last))


def host_network(devices: Sequence[Device]) -> Network:
    """The network through the hosts, for devices that no other network joins."""
    kind = devices[0].kind
    return Link("host", kind.host_bandwidth, kind.host_latency).network(hosts_of(devices))


def shift_network(network: Network, by: int) -> Network:
    """The same network with all device numbers increased by `by`."""
    if isinstance(network, Switch):
        return dataclasses.replace(network, ports=tuple(tuple(i + by for i in port) for port in network.ports))
    assert isinstance(network, Pairs | Torus)
    return dataclasses.replace(network, devices=tuple(i + by for i in network.devices))


def double_network(network: Network, by: int) -> Network:
    """The same network with twice the devices; the new ones have numbers increased by `by`."""
    other = shift_network(network, by)
    if isinstance(network, Switch):
        assert isinstance(other, Switch)
        return dataclasses.replace(network, ports=(*network.ports, *other.ports))
    assert isinstance(network, Pairs | Torus) and isinstance(other, Pairs | Torus)
    devices = (*network.devices, *other.devices)
    if isinstance(network, Pairs):
        return dataclasses.replace(network, devices=devices)
    sizes = [axis.size for axis in network.axes]
    k = sizes.index(min(sizes))
    axes = tuple(dataclasses.replace(a, size=2 * a.size) if i == k else a for i, a in enumerate(network.axes))
    further = (tuple(x + sizes[k] * (i == k) for i, x in enumerate(point)) for point in network.points)
    return dataclasses.replace(network, axes=axes, devices=devices, points=(*network.points, *further))
