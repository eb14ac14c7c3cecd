"""A memory limit -> the leaves of the state that are offloaded to the host between updates, and the step's cost.

Knows flows through the program of a replica, and links to hosts. Must not know how layouts were found, nor files.

A leaf of the state that nothing reads before the end of the last pass (an optimizer's slots) is needed only briefly. It
is fetched for the update that reads it, and written back after it (`vnode.runtime.host_prefetch`). A device holds the
leaves of one parameter's update, and the results of the update before; each byte crosses the link twice. The transfers
of a step run in sequence, without overlap. All bytes cost the same, so the largest leaves are offloaded first, until
the rest fits.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.extend.core import Var

from vnode.partition.machine import Machine
from vnode.partition.plan.other_replicas import SUM_OVER_REPLICAS
from vnode.partition.plan.predict import Figures, local_sums
from vnode.partition.plan.search_subject import Subject
from vnode.partition.searches.search_costs import local_bytes
from vnode.runtime.host_prefetch import Task, offloaded_needs, order_by_output
from vnode.spmd.layout import Axes
from vnode.spmd.sharding_flow import Flow


@dataclasses.dataclass(frozen=True, eq=False)
class StateOffload:
    """The leaves of a state that may be offloaded.

    Attributes:
      flow: layouts through the program of a replica.
      works: the program's operations.
      inputs_by_name: for each name its inputs, with their bytes on one device; the largest name first.
      sums: bytes of one device's part of the accumulators.
      donated: numbers of the donated inputs.
    """

    flow: Flow
    works: Sequence[Task]
    inputs_by_name: Mapping[str, Mapping[int, int]]
    sums: int
    donated: frozenset[int]

    @staticmethod
    def from_names(
        subject: Subject, flow: Flow, names: Sequence[str | None], axes: Axes, sharded: Mapping[int, int]
    ) -> StateOffload:
        """The leaves of a replica.

        Args:
          subject: the step.
          flow: layouts through the replica's program.
          names: names of the inputs, None for those that may not be offloaded.
          axes: sizes of the mesh axes other than the nodes', those longer than one.
          sharded: number of parts of inputs that are sharded over the replicas as well.
        """
        inputs, state = flow.program.inputs, subject.state
        works = [Task([v for v in step.eqn.invars if isinstance(v, Var)], step.eqn.outvars) for step in flow.steps]
        bits = {inputs[i]: 1 << n for n, i in enumerate(state)}
        pinned = {atom for atom in flow.program.outputs if isinstance(atom, Var)}
        for step, needs in zip(flow.steps, offloaded_needs(works, [*bits]), strict=True):
            if step.region is not None or step.eqn.primitive is SUM_OVER_REPLICAS:
                pinned.update(var for var, bit in bits.items() if bit & needs)
        read = {var for work in works for var in work.reads} - pinned
        held: dict[str, dict[int, int]] = {}
        for i, name in enumerate(names):
            if name is not None:
                bytes_ = local_bytes(flow.inputs[i], inputs[i].aval, axes) // sharded.get(i, 1)
                held.setdefault(name, {})[i] = bytes_
        late = {i for i in state if inputs[i] in read and math.prod(inputs[i].aval.shape) > 1}
        found = {name: several for name, several in held.items() if several.keys() <= late}
        order = sorted(found, key=lambda name: (-sum(found[name].values()), name))
        sums = local_sums(flow, axes) // (max(sharded.values()) if sharded else 1)
        return StateOffload(flow, works, {name: found[name] for name in order}, sums, subject.donated)

    def offloaded(self, count: int) -> dict[int, int]:
        """The inputs of the first names, with their bytes on one device."""
        return {i: n for name in [*self.inputs_by_name][:count] for i, n in self.inputs_by_name[name].items()}

    def room(self, away: Mapping[int, int]) -> int:
        """The most bytes of two consecutive updates' leaves, which a device holds at a time."""
        inputs = self.flow.program.inputs
        sizes = {inputs[i]: n for i, n in away.items()}
        order = order_by_output(self.works, self.flow.program.outputs, [*sizes])
        reads = [[var for var in self.works[k].reads if var in sizes] for k in order]
        last = {var: place for place, several in enumerate(reads) for var in several}
        now, most, there = 0, 0, set[Var]()
        for place, several in enumerate(reads):
            for var in several:
                if var not in there:
                    there.add(var)
                    now += sizes[var]
            most = max(most, now)
            now -= sum(sizes[var] for var in {*several} if last[var] == place)
        return 2 * most

    def figures(self, without: Figures, machine: Machine, count: int) -> Figures:
        """The figures of a step with the leaves of the first `count` names on the host; `without` has none there."""
        away = self.offloaded(count)
        total = sum(away.values())
        beside = sum(
            n for i, n in away.items() if i not in self.donated
        )  # without donation, the new leaf is a second buffer
        room = max(self.sums + self.room(away) - (without.temporary - without.pending), 0)
        link = min(kind.host_bandwidth for kind in machine.kinds)
        seconds = 2 * (total / link + len(away) * max(kind.host_latency for kind in machine.kinds))
        return dataclasses.replace(
            without,
            seconds=without.seconds + seconds,
            arguments=without.arguments - total,
            results=without.results - beside,
            temporary=without.temporary + room,
            state=without.state - total,
            host=total,
            transfer=without.transfer + seconds,
        )

    def fewest(self, without: Figures, machine: Machine, limit: float) -> tuple[tuple[str, ...], Figures] | None:
        """The fewest names of leaves to offload so that the step fits in `limit` bytes of a device, and its figures.

        None if offloading all leaves does not suffice.
        """
        counts = range(len(self.inputs_by_name) + 1)
        n = bisect.bisect_left(counts, True, key=lambda n: self.figures(without, machine, n).memory <= limit)
        return (tuple([*self.inputs_by_name][:n]), self.figures(without, machine, n)) if n in counts else None
