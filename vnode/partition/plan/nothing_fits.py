"""A step that fits on no mesh -> the error: how many bytes are missing, and changes with which the step fits.

Knows steps, machines, and predictions on single meshes. Must not know how meshes are searched.

Every change is predicted on the mesh with the least memory, with the state sharded over all devices; with more devices,
the nodes' axis or another one is longer. So a change that is reported to fit does fit there. A change that does not fit
there could still fit on another mesh. The cheapest change that fits is reported.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from vnode.errors import MemoryLimitError, VnodeError
from vnode.partition.machine import Device, Link, Machine
from vnode.partition.machine.machine_builders import hosts_of
from vnode.partition.plan.candidates import Candidate, MeshSearch, pace_of
from vnode.partition.plan.memory_plan import SOLVING, MemoryPlan, MemoryPlanner
from vnode.partition.plan.mesh_search import MeshesSearch
from vnode.partition.plan.meshes import INNER, NODES
from vnode.partition.plan.predict import Figures
from vnode.partition.plan.search_subject import Subject, subject_of, with_recomputation
from vnode.show.units import several, size
from vnode.step.virtual import VirtualStep

DOUBLINGS = 4
"""Most doublings of the number of devices."""


def nothing_fits_error(search: MeshesSearch, subject: Subject, least: Candidate) -> MemoryLimitError:
    """The error for a step that no plan fits, with changes that would fit, as far as the budget for them allows."""
    limit, kept, away = search.limit, least.figures, least.all_on_host
    search.budget.extend()
    search.shown.update(1000, "nothing fits; what would?")
    remedies = Remedies(search, subject, least)
    try:
        found = remedies.found()
    except KeyboardInterrupt:
        found = None
    help_ = [f"what would fit: {found}"] if found else []
    if not found:
        about = {
            "donated": f"the state given away, donate_argnums: about {size(min(kept.state, kept.results))} less",
            "nodes": f"more virtual nodes: there are {subject.virtual_nodes} for {subject.examples:,} examples",
            "lanes": f"fewer lanes, lanes={remedies.devices}: about {size(kept.pending)} less",
            "fast": f'sums in any order, reduction="fast": about {size(kept.pending)} less',
            "devices": f"about {-(-kept.memory // limit) * remedies.devices} devices" * (kept.state > 0),
        }
        untried = [tuple(remedies.parts(change)) for change in remedies.left]
        help_ += [text for kind, text in about.items() if text and (kind,) in untried]
    if search.budget.untried:
        help_.insert(0, f"more time: {several(len(search.budget.untried), 'thing')} not tried within the budget")
    failed = ", ".join(f"{', '.join(kinds.values())} ({size(n)})" for n, kinds in remedies.failed.values())
    only_batch = " ".join(search.undivided.split("What to do")[0].split())
    return MemoryLimitError(
        f"no plan fits in {size(limit)} a device.",
        facts=[
            f"the smallest found takes {size(kept.memory)}, {size(kept.memory - limit)} too much: " + least.title,
            f"of these {size(kept.state)} are state, {size(kept.pending)} pending sums",
            *[f"{size(away.memory)} with {away.on_host}"][: bool(away.on_host)],
            *[f"not enough, as predicted: {failed}"][: bool(failed)],
            *[f"only the batch was divided: {only_batch}"][: bool(only_batch)],
            f"machine: {search.machine.name}, {several(remedies.devices, 'device')}",
        ],
        remedies=help_ or ["devices with more memory"],
    )


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the search.

    Attributes:
      virtual_nodes: V.
      donated: arguments that are donated in addition.
      fast: whether sums are formed in any order.
      lanes: number of lanes, if changed.
      doublings: number of doublings of the devices.
    """

    virtual_nodes: int
    donated: tuple[int, ...] = ()
    fast: bool = False
    doublings: int = 0
    lanes: int | None = None


class Remedies:
    """Changes, tried one after another until one fits.

    Args:
      search: the search over the meshes, which found none; its budget is that of the remedies.
      subject: the step for which nothing fits.
      least: the candidate with the least memory.

    Attributes:
      left: the changes that were not tried.
      failed: of those that do not suffice, by their kinds, the one that saves most: its bytes, and its parts in words.
    """

    def __init__(self, search: MeshesSearch, subject: Subject, least: Candidate) -> None:
        self.search, self.subject, self.least = search, subject, least
        self.nodes, self.devices = sum(least.counts), len(search.machine.devices)
        self.left = [*self.with_donation(), *self.more_nodes(), *self.more_devices()]
        self.failed: dict[tuple[str, ...], tuple[int, dict[str, str]]] = {}

    def found(self) -> str:
        """The first change with which something fits, in words; empty if there is none, or none in time."""
        slowest = 0.0
        while self.left and not self.search.budget.lacks(slowest, predictions=0):
            began, least = time.monotonic(), list[Figures]()
            parts = self.parts(self.left[0])
            for candidate, figures in self.candidates(self.left[0]):
                if figures.memory <= self.search.limit:
                    takes = filter(None, [size(figures.memory), figures.on_host, candidate.title])
                    return f"{', '.join(parts.values())} ({', '.join(takes)})"
                least.append(figures)
                if self.search.budget.is_spent:
                    return ""
            if least:
                result, kinds = (min(each.memory for each in least), parts), tuple(parts)
                self.failed[kinds] = min(self.failed.get(kinds, result), result, key=lambda each: each[0])
            self.left.pop(0)
            slowest = max(slowest, time.monotonic() - began)
        return ""

    def parts(self, change: Change) -> dict[str, str]:
        """The parts of a change in words, by their kinds."""
        found = {
            "nodes": f"virtual_nodes={change.virtual_nodes}" * (change.virtual_nodes != self.nodes),
            "donated": f"donate_argnums={change.donated}" * bool(change.donated),
            "lanes": f"lanes={change.lanes}" * bool(change.lanes),
            "fast": 'reduction="fast"' * change.fast,
            "devices": f"{self.devices * 2**change.doublings} devices" * bool(change.doublings),
        }
        return {kind: text for kind, text in found.items() if text}

    def with_donation(self) -> Iterator[Change]:
        """Donates the state, if it is not donated: the new state then takes the old one's buffers."""
        several = {self.subject.arguments[i] for i in self.subject.state} - {*self.subject.step.spec.donate_argnums}
        if several:
            yield Change(self.nodes, donated=tuple(sorted(several)))

    def more_nodes(self) -> Iterator[Change]:
        """Fewer lanes, sums in any order, more nodes, and both; nothing if the state alone is too large.

        With one lane per device, bits are the same on at most as many devices.
        """
        if self.state > self.search.limit:
            return
        before, devices = self.subject.step.options.lanes, self.devices
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
        """Doubled numbers of devices, from the first for which one device's part of the state is not too large."""
        for k in range(1, DOUBLINGS + 1):
            if self.state / 2**k <= self.search.limit:
                yield Change(self.nodes, doublings=k)

    @property
    def state(self) -> int:
        """Bytes of one device's part of the state, before and after a step, without leaves that can be offloaded."""
        several = self.least.figures, self.least.all_on_host
        return min(each.state + each.results for each in several)

    def candidates(self, change: Change) -> Iterator[tuple[Candidate, Figures]]:
        """The candidates with a change, each with its figures: with as much on the host as it needs, or as helps."""
        machine, search = self.search.machine, self.search
        try:
            for _ in range(change.doublings):
                machine = double_machine(machine)
            for subject in self.subjects(change):
                pace = pace_of(subject, machine, search.platform, search.times)
                for sizes in self.meshes(change, len(machine.devices)):
                    on = MeshSearch(subject, machine, sizes, search.platform, search.times, pace)
                    if on.axes:
                        found = search.divided(on)
                    elif on.replicas > 1:
                        found = [on.candidate("FSDP", on.undivided, shard_state=True)]
                    else:
                        found = [on.candidate("data parallel", on.undivided)]
                    for each in found:
                        fitting = each if each.figures.memory <= search.limit else each.with_host(search.limit)
                        if fitting is not None:
                            yield fitting, fitting.figures
                        else:
                            yield each, min(each.figures, each.all_on_host, key=lambda figures: figures.memory)
        except VnodeError:  # the step cannot be virtualized so, or there is no such machine
            return

    def subjects(self, change: Change) -> Iterator[Subject]:
        """The step with a change; then the same step with the fewest residuals."""
        step = self.subject.step
        reduction = "fast" if change.fast else step.options.reduction
        options = dataclasses.replace(
            step.options,
            virtual_nodes=change.virtual_nodes,
            reduction=reduction,
            lanes=change.lanes or step.options.lanes,
            automatic=False,
        )
        donated = (*step.spec.donate_argnums, *change.donated)
        choices = dataclasses.replace(step.spec.plan, recomputed=(), offloaded=())
        spec = dataclasses.replace(step.spec, options=options, donate_argnums=donated, plan=choices)
        subject = subject_of(VirtualStep(spec, None), self.subject.args)
        yield subject
        keeping = MemoryPlanner(subject, self.search.machine, self.search.platform)
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


def double_machine(machine: Machine) -> Machine:
    """A machine of twice the devices, joined by one network as slow as the slowest: remedies state memory, not time.

    >>> double_machine(Machine.gpus("h100-sxm", hosts=2))
    Machine(2 x (2 x 8 H100-SXM): 32 devices in 4 hosts)
    """
    hosts = 1 + max(device.host for device in machine.devices)
    devices = (*machine.devices, *(Device(device.kind, device.host + hosts) for device in machine.devices))
    kind = machine.devices[0].kind
    bandwidth = min((each.bandwidth for each in machine.networks), default=kind.host_bandwidth)
    latency = max((each.latency for each in machine.networks), default=kind.host_latency)
    network = Link("slowest", bandwidth, latency).network(hosts_of(devices))
    return Machine(f"2 x ({machine.name})", devices, (network,))
