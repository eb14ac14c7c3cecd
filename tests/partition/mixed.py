"""Machines of unlike devices, made of one whose devices are alike.

Knows kinds of devices. Must not know steps, plans, nor what they are compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vnode.partition import Machine
from vnode.partition.machine import Kind


def slower(machine: Machine, name: str, times: float) -> Kind:
    """The kind of a machine's devices so many times slower, memory too: small steps are work for it."""
    (kind,) = machine.kinds
    peak = {dtype: rate / times for dtype, rate in kind.peak.items()}
    return dataclasses.replace(kind, name=name, peak=peak, vector=kind.vector / times, bandwidth=kind.bandwidth / times)


def mixed(machine: Machine, kinds: Sequence[Kind]) -> Machine:
    """A machine with a kind for each of its devices."""
    devices = [dataclasses.replace(device, kind=kind) for device, kind in zip(machine.devices, kinds, strict=True)]
    return Machine("mixed", tuple(devices), machine.networks)
