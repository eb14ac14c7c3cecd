"""A number of devices -> its possible meshes: an axis for nodes, and up to two axes that divide a node's computation.

Knows numbers of devices. Must not know machines, steps nor costs.
"""

from __future__ import annotations

from collections.abc import Iterator

INNER = ("model", "model2")
"""The axes over which a replica divides a node's computation."""


def meshes(devices: int, most_replicas: int, nodes: str) -> Iterator[dict[str, int]]:
    """All meshes, those that divide a node's computation least first, and those with more axes last.

    Args:
      devices: the number of devices.
      most_replicas: the most replicas.
      nodes: the name of the nodes' axis.

    >>> list(meshes(4, 4, "vnode"))[:3]
    [{'vnode': 4}, {'vnode': 2, 'model': 2}, {'vnode': 1, 'model': 4}]
    >>> list(meshes(4, 4, "vnode"))[3:]
    [{'vnode': 1, 'model': 2, 'model2': 2}]
    """
    replicas = [n for n in range(devices, 0, -1) if devices % n == 0 and n <= most_replicas]
    for n in replicas:
        yield {nodes: n, **({INNER[0]: devices // n} if devices // n > 1 else {})}
    for n in replicas:
        rest = devices // n
        for first in range(rest // 2, 1, -1):
            if rest % first == 0 and rest // first <= first:
                yield {nodes: n, INNER[0]: first, INNER[1]: rest // first}
