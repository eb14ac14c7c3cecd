"""What a program exchanges -> bytes by kind of collective and size of a group, whatever is combined.

Knows collectives. Must not know who planned or compiled them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from vnode.partition.accept import Acceptance
from vnode.partition.hlo import Collective


def bytes_by_group(several: Iterable[Collective]) -> dict[tuple[str, int], int]:
    """Bytes of one device's arrays in all runs, by kind and by the number of devices that exchange."""
    found: collections.Counter[tuple[str, int]] = collections.Counter()
    for each in several:
        found[each.kind.removeprefix("collective-"), each.devices] += each.bytes * each.runs
    return dict(found)


def assert_as_planned(found: Acceptance) -> None:
    """No tolerance: the compiled program has the planned kinds, bytes and groups."""
    assert bytes_by_group(found.compiled.collectives) == bytes_by_group(found.collectives), str(found)
