"""How many virtual nodes each device would hold, of devices that need not exist.

Knows numbers of nodes and devices. Must not know real devices or steps.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    """Nodes on devices by their numbers alone; a `vnode.Placement` is the same for devices that are there.

    Attributes:
      counts: nodes on each device, contiguous ranges in order.
      together: devices that compute a node together; then a number is that of such a group.

    Example:
      >>> layout = Layout((3, 3, 2))
      >>> layout.virtual_nodes, layout.names
      (8, ['device 0', 'device 1', 'device 2'])
    """

    counts: tuple[int, ...]
    together: int = 1

    @property
    def virtual_nodes(self) -> int:
        """V."""
        return sum(self.counts)

    @property
    def names(self) -> list[str]:
        """What to call the devices."""
        return [f"{'device' if self.together == 1 else 'row'} {d}" for d in range(len(self.counts))]
