"""Collectives of a program -> bytes by kind and by size of a group, whatever is combined.

Knows collectives. Must not know who planned or compiled them.
"""

from __future__ import annotations

from collections.abc import Sequence

from vnode.partition.accept import Acceptance
from vnode.partition.hlo import Collective, bytes_by_kind


def bytes_by_group(several: Sequence[Collective]) -> dict[int, dict[str, int]]:
    """Bytes of one device's arrays in all runs, by the number of devices that exchange and by kind."""
    sizes = {each.devices for each in several}
    return {n: bytes_by_kind(each for each in several if each.devices == n) for n in sizes}


def assert_as_planned(found: Acceptance) -> None:
    """No tolerance: the compiled program has the planned kinds, bytes and groups."""
    assert bytes_by_group(found.compiled.collectives) == bytes_by_group(found.collectives), str(found)
