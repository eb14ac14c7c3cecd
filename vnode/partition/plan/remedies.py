"""What would fit where nothing does: changes of what was searched for, the cheapest first, each predicted.

Knows steps, machines, and predictions on single meshes. Must not know how meshes are searched, nor how errors read.

Every change is looked at on the mesh on which the least memory was found, with the nodes' axis or another one longer if
there are more devices, and with the state over all devices. So what is said to fit does fit, there; what does not fit
there could still fit on another mesh.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from vnode.errors import VnodeError
from vnode.partition.cost.time_sources import Times
from vnode.partition.machine import Machine
from vnode.partition.machine.doubled import double_machine
from vnode.partition.plan.candidates import Candidate, MeshSearch, pace_of
from vnode.partition.plan.memory_plan import SOLVING, MemoryPlan, MemoryPlanner
from vnode.partition.plan.meshes import INNER
from vnode.partition.plan.predict import NODES, Figures
from vnode.partition.plan.search_subject import Subject, subject_of, with_recomputation
from vnode.show.units import size
from vnode.step.call import wrap
from vnode.step.virtual import VirtualStep

DOUBLINGS = 4
"""How often the devices are doubled at most."""

STEP = 0.05
"""By which share of the limit memory has to differ for one change to be better than another."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Another search.

    Attributes:
      virtual_nodes: V.
      donated: the arguments that are given away besides those that are.
      fast: whether sums are formed in any order.
      lanes: how many there are, if that is changed.
      doublings: of the devices.
    """

    virtual_nodes: int
    donated: tuple[int, ...] = ()
    fast: bool = False
    doublings: int = 0
    lanes: int | None = None


@dataclasses.dataclass(frozen=True)
class TriedChange:
    """What came of a change.

    Attributes:
      change: what was changed.
      figures: of what fits; or of what takes least memory, perhaps with all that may lie on the host there.
      name: what such a plan is called.
      mesh: sizes of its axes.
      fits: whether it does.
    """

    change: Change
    figures: Figures
    name: str
    mesh: Mapping[str, int]
    fits: bool

    def as_text(self, nodes: int, devices: int) -> str:
        """The change, and what comes of it.

        Args:
          nodes: how many there were before.
          devices: how many there were before.
        """
        change, figures = self.change, self.figures
        parts = [f"virtual_nodes={change.virtual_nodes}"] if change.virtual_nodes != nodes else []
        parts += [f"donate_argnums={change.donated}"] if change.donated else []
        parts += [f"lanes={change.lanes}"] if change.lanes else []
        parts += ['reduction="fast"'] if change.fast else []
        parts += [f"{devices * 2**change.doublings} devices"] if change.doublings else []
        takes = [size(figures.memory)]
        if self.fits:
            takes += [figures.on_host] if figures.on_host else []
            takes += [plan_title(self.name, self.mesh)]
        return f"{', '.join(parts)} ({', '.join(takes)})"


class Remedies:
    """Changes, tried one after another until one fits.

    Args:
      subject: the step for which nothing fits.
      least: what takes least memory.
      machine: on which.
      memory: bytes that a device may hold.
      platform: what is compiled for.
      times: of fused ops.
      divided: candidates on a mesh that divides what a node computes.
      until: when to stop, by `time.monotonic`.
    """

    def __init__(
        self,
        subject: Subject,
        least: Candidate,
        machine: Machine,
        memory: int,
        platform: str,
        times: Times | None,
        divided: Callable[[MeshSearch], Sequence[Candidate]],
        until: float,
    ) -> None:
        self.subject, self.least, self.machine, self.memory = subject, least, machine, memory
        self.platform, self.times, self.divided, self.until = platform, times, divided, until
        self.nodes = sum(least.counts)
        self.left = [*self.with_donation(), *self.more_nodes(), *self.more_devices()]
        self.tried: list[TriedChange] = []

    def found(self) -> TriedChange | None:
        """The first change with which something fits; None if there is none, or not in time: `left` are not tried."""
        slowest = 0.0
        while self.left:
            began = time.monotonic()
            if began + slowest > self.until:
                return None
            change = self.left.pop(0)
            best = min(self.tried, key=self.size, default=None)
            several = [change]
            if change.doublings and best is not None:  # together with what has helped most, too
                several.append(dataclasses.replace(best.change, doublings=change.doublings))
            for each in dict.fromkeys(several):
                result = self.result(each)
                if result is None and self.is_over:
                    if each == change:  # else it was tried itself, and only together with another it was not
                        self.left.insert(0, change)
                    return None
                if result is not None:
                    self.tried.append(result)
                    if result.fits:
                        return result
            slowest = max(slowest, time.monotonic() - began)
        return None

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() > self.until

    def kind(self, change: Change) -> tuple[str, ...]:
        """What a change changes: ``"donated"``, ``"nodes"``, ``"lanes"``, ``"fast"``, ``"devices"``, or several."""
        changed = {
            "donated": change.donated,
            "nodes": change.virtual_nodes != self.nodes,
            "lanes": change.lanes,
            "fast": change.fast,
            "devices": change.doublings,
        }
        return tuple(name for name, there in changed.items() if there)

    def failed(self) -> list[TriedChange]:
        """What did not suffice: of changes of one kind that which saves most."""
        several = [each for each in self.tried if not each.fits]
        kinds = dict.fromkeys(self.kind(each.change) for each in several)
        return [min((x for x in several if self.kind(x.change) == kind), key=self.size) for kind in kinds]

    def size(self, tried: TriedChange) -> tuple[int, int]:
        """What orders changes by what they save: steps of memory, then nodes, of which many save little more."""
        return int(tried.figures.memory / (STEP * self.memory)), tried.change.virtual_nodes

    def with_donation(self) -> Iterator[Change]:
        """The state, where it is not given away: what is written then takes the place of what was there."""
        step = self.subject.step
        given, _ = step.spec.with_static(self.subject.args, {})
        placed = tuple(wrap(arg, 0, i) for i, arg in enumerate(given))
        argument = [path[0].idx for path, _ in jax.tree.leaves_with_path(placed)]
        several = {argument[i] for i in self.subject.state} - {*step.spec.donate_argnums}
        if several:
            yield Change(self.nodes, donated=tuple(sorted(several)))

    def more_nodes(self) -> Iterator[Change]:
        """Fewer lanes, sums in any order, more nodes, and both; nothing where the state alone is too large.

        With as many lanes as devices the bits are the same on up to as many.
        """
        if self.state > self.memory:
            return
        before, devices = self.subject.step.options.lanes, len(self.machine.devices)
        order: list[dict[str, Any]] = []
        if self.least.figures.pending > 0:
            order += [{"lanes": devices}] if (before or self.nodes) > devices > 1 else []
            order += [{"fast": True}]
        yield from (Change(self.nodes, **how) for how in order)
        for how in ({}, *order):
            nodes = self.nodes
            while (nodes := 2 * nodes) <= self.subject.examples:
                yield Change(nodes, **how)

    def more_devices(self) -> Iterator[Change]:
        """Twice as many, and so on, but not so few that their parts of the state alone are too large."""
        for k in range(1, DOUBLINGS + 1):
            if self.state / 2**k <= self.memory:
                yield Change(self.nodes, doublings=k)

    @property
    def state(self) -> int:
        """Bytes of one device's part of the state, before and after a step; without what may lie on the host."""
        several = self.least.figures, self.least.all_on_host(self.machine)
        return min(each.state + each.results for each in several)

    def result(self, change: Change) -> TriedChange | None:
        """What fits with a change, or else takes least; None if there is nothing, or not all was looked at in time."""
        least: TriedChange | None = None
        try:
            for machine, candidate in self.candidates(change):
                fits = candidate.figures.memory <= self.memory
                fitting = candidate if fits else candidate.with_host(machine, self.memory)
                if fitting is not None:
                    return TriedChange(change, fitting.figures, fitting.name, fitting.mesh, True)
                figures = min(candidate.figures, candidate.all_on_host(machine), key=lambda each: each.memory)
                if least is None or figures.memory < least.figures.memory:
                    least = TriedChange(change, figures, candidate.name, candidate.mesh, False)
                if self.is_over:
                    return None
        except VnodeError:  # the step cannot be virtualized so, or there is no such machine
            pass
        return least

    def candidates(self, change: Change) -> Iterator[tuple[Machine, Candidate]]:
        """Ways to carry out a change, and on which machine."""
        machine = self.machine
        for _ in range(change.doublings):
            machine = double_machine(machine)
        for subject in self.subjects(change):
            pace = pace_of(subject, machine, self.platform, self.times)
            for sizes in self.meshes(change, len(machine.devices)):
                on = MeshSearch(subject, machine, sizes, self.platform, self.times, pace)
                if on.axes:
                    several = self.divided(on)
                else:
                    several = [
                        on.candidate("FSDP" if on.replicas > 1 else "data parallel", on.undivided, on.replicas > 1)
                    ]
                yield from ((machine, candidate) for candidate in several)

    def subjects(self, change: Change) -> Iterator[Subject]:
        """The step with a change; then so that it keeps as little as it can for its backward pass."""
        step = self.subject.step
        reduction = "fast" if change.fast else step.options.reduction
        options = dataclasses.replace(
            step.options,
            virtual_nodes=change.virtual_nodes,
            reduction=reduction,
            lanes=change.lanes or step.options.lanes,
            automatic=False,
            again=(),
            away=(),
        )
        donated = (*step.spec.donate_argnums, *change.donated)
        spec = dataclasses.replace(step.spec, options=options, donate_argnums=donated)
        subject = subject_of(VirtualStep(spec, None), self.subject.args)
        yield subject
        keeping = MemoryPlanner.for_subject(subject, self.machine, self.platform)
        several = [keeping.plan_at_level(keeping.levels(host), SOLVING, host) for host in sorted({False, keeping.host})]
        for less in dict.fromkeys(several):
            if less != MemoryPlan():
                yield subject_of(with_recomputation(subject.step, *less), self.subject.args)

    def meshes(self, change: Change, devices: int) -> list[dict[str, int]]:
        """All devices along the nodes' axis; and the smallest mesh, with more replicas or a longer other axis."""
        before, more = dict(self.least.mesh), 2**change.doublings
        replicas = {**before, NODES: before[NODES] * more}
        longer = {**before, INNER[0]: before.get(INNER[0], 1) * more}
        several = [{NODES: devices}, replicas, *([longer] if more > 1 else [])]
        found = {tuple(each.items()): each for each in several if each[NODES] <= change.virtual_nodes}
        return list(found.values())


def plan_title(name: str, mesh: Mapping[str, int]) -> str:
    """A plan and its mesh.

    >>> plan_title("FSDP", {"vnode": 8})
    'FSDP on vnode 8'
    """
    return f"{name} on {' x '.join(f'{axis} {n}' for axis, n in mesh.items())}"
