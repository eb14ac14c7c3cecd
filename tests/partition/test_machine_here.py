"""The machine that is here: its figures are measured."""

from __future__ import annotations

import math
import os

import jax
import pytest

from vnode.partition import Kind, Machine


def figures(kind: Kind) -> list[float]:
    return [*kind.peak.values(), kind.vector, kind.memory, kind.bandwidth, kind.host_bandwidth, kind.host_latency]


@pytest.mark.thorough
def test_here():
    """Of eight CPU devices everything is measured, and can be saved and asked."""
    machine = Machine.here()
    assert len(machine.devices) == len(jax.devices()) and len(machine.kinds) == len(machine.hosts) == 1
    (kind,), (network,) = machine.kinds, machine.networks
    assert {"float32", "bfloat16", "float16", "int8"} <= set(kind.peak)
    assert all(math.isfinite(n) and n > 0 for n in [*figures(kind), network.bandwidth, network.latency])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert kind.memory * len(machine.devices) == pytest.approx(memory, rel=1e-6)
    assert machine.collective("all_reduce", [range(8)]).seconds(1e6) > 0
