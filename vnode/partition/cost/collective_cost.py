"""A collective, or a route between two layouts -> its bytes and its time on a mesh of devices.

Knows jax's collectives, moves between layouts, and machines. Must not know programs, nor when anything is moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn

from vnode.operators.cost import nbytes
from vnode.partition.hlo import bytes_sent
from vnode.partition.machine import Machine, MachineMesh
from vnode.partition.machine.collective_times import Cost
from vnode.spmd.layout import Axes, count
from vnode.spmd.resharding import Move

KINDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}
"""The field's names of jax's collectives, of all that `vnode.spmd.resharding_collectives` emits."""

NAMES = {kind: kind.replace("-", "_") for kind in KINDS.values()}
"""`Machine.collective`'s names of these kinds."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective, seen by any of its devices.

    Attributes:
      kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"`` or ``"permute"``.
      axes: mesh axes along which devices exchange.
      bytes: size of one device's array: the result of an all-gather, the operand of the other kinds.
      devices: number of devices in a group.
      pairs: of a permute, (sender, receiver) positions in the group.
      among: the groups, as positions along the axes, if only subsets of the devices along them exchange.

    Example:
      >>> Transfer("all-reduce", ("data",), 1024, 4).bytes_sent
      1536.0
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    devices: int
    pairs: tuple[tuple[int, int], ...] = ()
    among: tuple[tuple[int, ...], ...] = ()

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends, by the algorithms that move the least."""
        return bytes_sent(self.kind, self.bytes, self.devices)

    def cost(self, machine: Machine, mesh: MachineMesh) -> Cost:
        """Latency, seconds a byte and links on a machine, all groups of the mesh at once.

        The latency is that of all hops in sequence; a permute has the latency of its most distant pair. The time is
        ``cost.seconds(transfer.bytes)``. Raises `MachineError` if the mesh lacks an axis.
        """
        groups = mesh.groups(*self.axes)
        if self.among:
            groups = [[group[place] for place in places] for group in groups for places in self.among]
        return machine.collective(NAMES[self.kind], groups, pairs=self.pairs)


def transfer_of(eqn: JaxprEqn, axes: Mapping[str, int]) -> Transfer | None:
    """An equation of one device's program as a collective; None if it is none. `axes` are those longer than one."""
    kind = KINDS.get(eqn.primitive.name)
    if kind is None:
        return None
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = tuple(name for name in (named if isinstance(named, tuple | list) else (named,)) if name in axes)
    if not names:
        return None
    atoms = eqn.outvars if kind == "all-gather" else eqn.invars
    pairs = tuple((int(s), int(t)) for s, t in eqn.params.get("perm", ()))
    among = tuple(map(tuple, eqn.params.get("axis_index_groups") or ()))
    devices = len(among[0]) if among else count(names, axes)
    return Transfer(kind, names, sum(nbytes(atom.aval) for atom in atoms), devices, pairs, among)


def transfers_of_route(moves: Sequence[Move], itemsize: int, axes: Axes) -> tuple[Transfer, ...]:
    """The collectives of a route between two layouts (`plan_resharding`), in order; local cuts move nothing.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from vnode.spmd.layout import from_spec
      >>> from vnode.spmd.resharding import plan_resharding
      >>> axes = {"x": 4}
      >>> start, end = (from_spec(spec, (8, 8), axes) for spec in (P("x"), P(None, "x")))
      >>> moves = plan_resharding(start, end, (8, 8), axes, "float32")
      >>> [(t.kind, t.bytes) for t in transfers_of_route(moves, 4, axes)]
      [('all-to-all', 64)]
    """
    found = []
    for move in moves:
        if move.kind != "cut":
            devices = len(move.among[0]) if move.among else count(move.axes, axes)
            gathered = devices if move.kind == "all-gather" else 1
            size = move.elements * itemsize * gathered
            found.append(Transfer(move.kind, move.axes, size, devices, move.pairs, move.among))
    return tuple(found)
