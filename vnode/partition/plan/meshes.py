"""Which meshes a machine's devices can be: one axis for nodes, and none, one or two for what a row divides.

Knows numbers of devices. Must not know machines, steps nor costs.
"""

from __future__ import annotations

from collections.abc import Iterator

INNER = ("model", "model2")
"""The axes over which a row divides a node's computation."""


def meshes(devices: int, most_rows: int, nodes: str) -> Iterator[dict[str, int]]:
    """All meshes, those that divide a node's computation least first, and those with more axes last.

    Args:
      devices: how many there are.
      most_rows: how many rows there may be.
      nodes: the axis over which rows are numbered.

    >>> list(meshes(4, 4, "vnode"))[:3]
    [{'vnode': 4}, {'vnode': 2, 'model': 2}, {'vnode': 1, 'model': 4}]
    >>> list(meshes(4, 4, "vnode"))[3:]
    [{'vnode': 1, 'model': 2, 'model2': 2}]
    """
    rows = [n for n in range(devices, 0, -1) if devices % n == 0 and n <= most_rows]
    for n in rows:
        yield {nodes: n, **({INNER[0]: devices // n} if devices // n > 1 else {})}
    for n in rows:
        rest = devices // n
        for first in range(rest // 2, 1, -1):
            if rest % first == 0 and rest // first <= first:
                yield {nodes: n, INNER[0]: first, INNER[1]: rest // first}
