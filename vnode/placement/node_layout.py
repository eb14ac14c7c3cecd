"""The number of virtual nodes per device, for devices that need not exist.

Knows numbers of nodes and devices. Must not know real devices or steps.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    """Nodes on devices, by numbers alone; a `vnode.Placement` is the same for real devices.

    Attributes:
      counts: nodes on each device, contiguous ranges in order.
      together: devices that compute a node together; device numbers then count such groups.

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
        """Names of the devices."""
        return [f"{'device' if self.together == 1 else 'row'} {d}" for d in range(len(self.counts))]
