"""A number of devices -> its possible meshes: an axis for nodes, and up to two axes that divide a node's computation.

Knows numbers of devices. Must not know machines, steps nor costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

NODES = "vnode"
"""The mesh axis that nodes are spread over."""

INNER = ("model", "model2")
"""The axes over which a replica divides a node's computation."""


def meshes(devices: int, most_replicas: int) -> Iterator[dict[str, int]]:
    """All meshes, those that divide a node's computation least first, and those with more axes last.

    Args:
      devices: the number of devices.
      most_replicas: the most replicas.

    >>> list(meshes(4, 4))[:3]
    [{'vnode': 4}, {'vnode': 2, 'model': 2}, {'vnode': 1, 'model': 4}]
    >>> list(meshes(4, 4))[3:]
    [{'vnode': 1, 'model': 2, 'model2': 2}]
    """
    replicas = [n for n in range(devices, 0, -1) if devices % n == 0 and n <= most_replicas]
    for n in replicas:
        yield {NODES: n, **({INNER[0]: devices // n} if devices // n > 1 else {})}
    for n in replicas:
        rest = devices // n
        for first in range(rest // 2, 1, -1):
            if rest % first == 0 and rest // first <= first:
                yield {NODES: n, INNER[0]: first, INNER[1]: rest // first}


def mesh_text(sizes: Mapping[str, int]) -> str:
    """A mesh in words.

    >>> mesh_text({"vnode": 2, "model": 4})
    'vnode 2 x model 4'
    """
    return " x ".join(f"{name} {n}" for name, n in sizes.items())
