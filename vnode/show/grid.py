"""Numbers of nodes per device -> a grid with rows of devices and columns of waves.

Knows numbers of nodes, devices and examples. Must not know placements, or how a grid is drawn.

Few nodes are shown one by one. Otherwise each device is one bar, and devices with equally many nodes form one row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from vnode.show.units import number_range, several

MOST_ROWS = 64
"""The most rows with one device each."""

MOST_CELLS = 1024
"""The most slots that are shown one by one."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A device's nodes, or those of several devices with equally many.

    Attributes:
      name: the device's name, or the first and last names.
      device: the device's number; of several, the first one's.
      first: the first node.
      count: the number of nodes per device.
      devices: the number of devices.
    """

    name: str
    device: int
    first: int
    count: int
    devices: int = 1

    @property
    def nodes(self) -> str:
        """The row's nodes in words."""
        if not self.count:
            return "no node"
        held = number_range(self.first, self.first + self.count * self.devices - 1)
        return f"node{'s' * (self.count * self.devices > 1)} {held}" + (
            f", {self.count} on each" if self.devices > 1 else ""
        )


@dataclasses.dataclass(frozen=True)
class Grid:
    """Nodes by device and wave.

    Attributes:
      devices: one row per device.
      batch: size of the global batch, if known.
      node_size: examples per node, padding included.
      each: the noun for a row: device, or another word for several.

    Example:
      >>> grid = Grid.from_counts([3, 2], ["cpu:0", "cpu:1"], batch=9, node_size=2)
      >>> grid.waves, grid.idle, list(grid.slots(grid.devices[1]))
      (3, 1, [3, 4, None])
      >>> grid.note(4), grid.padded(4)
      ('node 4: example 8, 1 of padding', True)
    """

    devices: tuple[Row, ...]
    batch: int | None = None
    node_size: int = 0
    each: str = "device"

    @property
    def waves(self) -> int:
        """The number of columns: nodes that the fullest device computes one after another."""
        return max(row.count for row in self.devices)

    @property
    def virtual_nodes(self) -> int:
        """V."""
        return sum(row.count * row.devices for row in self.devices)

    @property
    def idle(self) -> int:
        """The number of slots without a node."""
        return self.waves * sum(row.devices for row in self.devices) - self.virtual_nodes

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, devices without nodes merged; if there are more than `MOST_ROWS`, all equal devices are merged."""
        rows: list[Row] = []
        many = len(self.devices) > MOST_ROWS
        for count, run in itertools.groupby(self.devices, key=lambda row: row.count):
            alike = list(run)
            if len(alike) > 2 and (many or not count):
                first, last = alike[0], alike[-1]
                alike = [Row(f"{first.name} … {last.name}", first.device, first.first, count, len(alike))]
            rows += alike
        return tuple(rows)

    @property
    def shown(self) -> tuple[Row, ...]:
        """The rows that are shown."""
        return self.rows if len(self.rows) <= MOST_ROWS else self.rows[: MOST_ROWS - 1]

    @property
    def rest(self) -> str:
        """The rows that are not shown, in words."""
        left = self.rows[len(self.shown) :]
        if not left:
            return ""
        devices, nodes = sum(row.devices for row in left), sum(row.devices * row.count for row in left)
        return f"… {several(devices, f'more {self.each}')} with {several(nodes, 'node')}"

    @property
    def cells(self) -> bool:
        """Whether nodes are few enough to be shown one by one."""
        single = all(row.devices == 1 or not row.count for row in self.rows)
        return single and not self.rest and self.waves * len(self.rows) <= MOST_CELLS

    def slots(self, row: Row) -> Iterator[int | None]:
        """The node of every wave, None where the device is idle."""
        for wave in range(self.waves):
            yield row.first + wave if wave < row.count else None

    def padded(self, node: int) -> bool:
        """Whether the node has fewer examples than it has room for."""
        return self.batch is not None and (node + 1) * self.node_size > self.batch

    def note(self, node: int) -> str:
        """A node and its examples in words."""
        if self.batch is None:
            return f"node {node}"
        first, stop = node * self.node_size, min((node + 1) * self.node_size, self.batch)
        if first >= stop:
            return f"node {node}: padding only"
        examples = f"example{'s' * (stop - first > 1)} {number_range(first, stop - 1)}"
        padding = self.node_size - (stop - first)
        return f"node {node}: {examples}" + (f", {padding} of padding" if padding else "")

    @property
    def padded_nodes(self) -> int:
        """The number of nodes with padding."""
        return 0 if self.batch is None else self.virtual_nodes - self.batch // self.node_size

    @property
    def padding(self) -> str:
        """The nodes with padding, in words."""
        count, last = self.padded_nodes, self.virtual_nodes - 1
        if not count:
            return ""
        more = f"; node{'s' * (count > 2)} {number_range(last - count + 2, last)}: padding only" if count > 1 else ""
        return f"room for more examples than there are: {self.note(last - count + 1)}{more}"

    @staticmethod
    def from_counts(
        counts: Sequence[int],
        names: Sequence[str],
        batch: int | None = None,
        node_size: int = 0,
        each: str = "device",
    ) -> Grid:
        """The grid of contiguous ranges of nodes.

        Args:
          counts: nodes on each device.
          names: the devices' names.
          batch: size of the global batch, if known.
          node_size: examples per node, padding included.
          each: the noun for a row: device, or another word for several.

        Returns:
          The grid.
        """
        starts = itertools.accumulate(counts, initial=0)
        rows = [Row(name, d, first, n) for d, (name, first, n) in enumerate(zip(names, starts, counts, strict=False))]
        return Grid(tuple(rows), batch, node_size, each)
