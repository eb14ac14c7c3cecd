"""The search for a plan: forms of a step, and of each the best way to divide a node's computation, on any mesh.

Knows how many nodes there may be, in which lanes, and that less may be kept for the backward pass. Must not know how
the meshes of a machine are searched, nor how one candidate is found, or shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

from vnode.errors import MemoryLimitError, PartitionError, PlacementError
from vnode.partition.compiler.pool import CompilePool
from vnode.partition.compiler.target import compile_target
from vnode.partition.cost.time_sources import Times
from vnode.partition.machine import Machine
from vnode.partition.plan.budget import Budget
from vnode.partition.plan.candidates import (
    BESIDE,
    EXPERTS,
    MEGATRON,
    SEARCHED,
    UNEQUAL,
    Candidate,
    fitting_first,
)
from vnode.partition.plan.compiled_ranking import DRAFT, FULL, CompiledRanking, Entry
from vnode.partition.plan.memory_plan import SOLVING, MemoryPlan, MemoryPlanner
from vnode.partition.plan.mesh_search import MeshesSearch
from vnode.partition.plan.nothing_fits import nothing_fits_error
from vnode.partition.plan.plan import Plan
from vnode.partition.plan.predict import Figures, platform_of
from vnode.partition.plan.search_subject import Subject, check_args, on_nodes, subject_of, with_recomputation
from vnode.partition.searches.methods import method_named
from vnode.placement.placement import MOST_NODES, device_list
from vnode.placement.trace_context import with_jit
from vnode.plan.nodes.device_memory import byte_count
from vnode.show.progress import display
from vnode.show.units import several, size
from vnode.step.virtual import VirtualStep
from vnode.tracebacks import api_boundary

BISECTIONS = 4
"""Most steps of the bisection over memory plans."""

LONGEST = 1e9
"""Longest budget, in seconds."""

COMPILES = "VNODE_COMPILE_PLANS"
"""Environment variable; with 0, searches compile nothing unless devices are given."""

SEARCHING = 0.4
"""Largest share of the budget that is spent before candidates are compiled."""

LEAST_SECONDS = 0.1
"""Least seconds of a search."""

LESS = 0.95
"""Factor on the allowed memory, if nothing fits as compiled."""


@with_jit
@api_boundary
def search(
    step: Callable[..., Any],
    args: Sequence[Any],
    machine: Machine | str,
    *,
    virtual_nodes: int | str = "auto",
    memory: int | str | None = None,
    budget: float = 60.0,
    times: Times | None = None,
    progress: bool | None = None,
    method: str = "exact",
    compiled_for: Sequence[Any] | None = None,
    **options: Any,
) -> Plan:
    """Finds how a step runs fastest on a machine, within its memory.

    The search tries every mesh of the machine's devices whose first axis is the nodes' axis. On each mesh an integer
    program (`vnode.partition.searches.exact`) divides the node's computation and the state over the other axes. Data
    parallelism, with a replicated state or a sharded one (FSDP, ZeRO), is always a candidate. So are the experts' other
    layouts (Megatron, sequence, context and expert parallelism), while there is time. Then the search places
    independent branches on different devices, where that is predicted to be faster. Ctrl-C ends the search with the
    best plan so far.

    Args:
      step: a train step as `vnode.virtualize` takes it, or a `VirtualStep`.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      machine: the machine to run on; for a TPU slice its name suffices, ``"v5e:2x4"``.
      virtual_nodes: V; ``"auto"`` for the fewest nodes with which a plan fits. A `VirtualStep` has its own.
      memory: bytes that one device may hold, or a string such as ``"12GiB"``; by default the memory of its kind.
      budget: seconds for the whole search, compilations included. Nothing is begun that would take longer, judged by
        earlier durations. A compilation for GPUs or TPUs of this process that has begun ends even beyond `budget`. The
        plan's notes list everything that was not tried for lack of time.
      times: source of the times of fused operations (`vnode.partition.Times`), perhaps measured; by default the
        roofline, calibrated for the kind of device. Times are measured once and kept (`vnode.partition.Cache`); a
        measurement that has begun ends after its mesh, even beyond `budget`.
      progress: whether to show a progress bar; by default in notebooks and on terminals.
      method: the search that divides a node's computation on each mesh: ``"exact"`` (elimination and an integer
        program, with a proof of how far from the best the result can be), ``"walk"`` (FlexFlow's Markov chain over
        simulated timelines), ``"bisection"`` (Tofu's recursive partitioning) or ``"exhaustive"`` (small graphs only).
      compiled_for: devices to compile for, in the order of the machine's. By default those of the TPU topology that the
        machine is named for (with the extra ``tpu-aot``; no TPU is needed), or the devices of this process, if they are
        what the machine consists of. The best candidates are compiled, three to six of them, and compared by the
        compiler's figures; for TPUs up to six are compiled with few optimizations first (drafts), and then up to three
        in full. ``()``, or ``VNODE_COMPILE_PLANS=0`` in the environment: nothing is compiled, and all figures are
        estimates. Answers are kept on disk.
      **options: of `vnode.virtualize`, if the step is not virtualized yet. ``lanes="auto"``: as many as nodes if that
        fits with the state on the devices, otherwise as many as the machine has devices.

    Returns:
      The plan.

    Raises:
      MemoryLimitError: nothing fits: by how much, and what would help.
      PlacementError: `compiled_for` are not as many devices as the machine has.
      PartitionError: the machine or an option is invalid.
      VnodeError: the step cannot be virtualized.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.partition import Machine, search
      >>> def train_step(state, x):
      ...     loss = lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
      ...     return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))
      >>> state = {"up": jnp.ones((64, 512)), "down": jnp.ones((512, 64))}
      >>> args = state, jnp.ones((32, 64))
      >>> plan = search(train_step, args, Machine.tpu("v5e:2x2"), virtual_nodes=8, compiled_for=())
      >>> plan.memory.value <= plan.limit, plan.memory.source, sorted(plan.specs)
      (True, 'estimated', ['down', 'up'])
    """
    machine = Machine.tpu(machine) if isinstance(machine, str) else machine
    if not isinstance(machine, Machine):
        raise PartitionError(
            f"a plan is searched for a vnode.partition.Machine, not for {machine!r:.80}.",
            remedies=[
                "Machine.here(devices) for devices that are there, all by default",
                "Machine.tpu('v5e:2x4'), or that name alone",
                "Machine.gpus(...), Machine.load('machine.json')",
            ],
        )
    if isinstance(budget, str | bool) or not isinstance(budget, SupportsFloat) or not budget > 0:
        raise PartitionError(f"budget: expected seconds, not {budget!r}")
    budget = float(min(budget, LONGEST))
    if not (times is None or hasattr(times, "slowest")):
        raise PartitionError(f"times: expected vnode.partition.Times, not {times!r}")
    by = method_named(method)
    check_args(args)
    try:
        limit = min(kind.memory for kind in machine.kinds) if memory is None else byte_count(memory)
    except ValueError as error:
        raise PartitionError(str(error)) from None

    check_devices(machine, compiled_for)
    target, reason = None, "nothing was compiled, as was asked for"
    if len(compiled_for) if compiled_for is not None else os.environ.get(COMPILES) != "0":
        target, reason = compile_target(machine, compiled_for)
    until = time.monotonic() + budget
    with display(progress, 0, 1000) as shown, contextlib.ExitStack() as stack:
        ranking = None
        if target is not None:
            pool = stack.enter_context(CompilePool(target))
            ranking = CompiledRanking(machine, limit, pool, until)
        allowed = limit
        while True:
            share = 1.0 if ranking is None else SEARCHING
            left = max(share * (until - time.monotonic()), LEAST_SECONDS)
            over_meshes = MeshesSearch(machine, platform_of(machine), allowed, times, Budget(left), shown, method=by)
            found = _Search(step, args, over_meshes, options, limit)
            if ranking is not None and not ranking.is_answered:
                over_meshes.early = functools.partial(found.begin, ranking)
            found.explore(virtual_nodes)
            if found.budget.interrupted:
                reason = "the search was interrupted"
            if ranking is None or found.budget.interrupted:
                return found.plan((f"estimates only: {reason}",))
            shown.update(1000, "compiling the best")
            best = ranking.best([found.entry(each) for each in found.found])
            if best is not None:
                return found.plan(tuple(ranking.said), best)
            if ranking.interrupted and found.chosen is None:
                raise KeyboardInterrupt
            if not ranking.is_answered or ranking.interrupted:
                late = () if ranking.interrupted else ("estimates only: nothing was compiled in time",)
                return found.plan((*late, *ranking.said))
            less = min(ranking.memory_allowed(), math.ceil(LESS * allowed))
            if ranking.is_finished or less < 1 or found.chosen is None:
                raise nothing_compiled_fits(limit, ranking, found)
            allowed = less


def check_devices(machine: Machine, compiled_for: Sequence[Any] | None) -> None:
    """Checks that the number of devices to compile for is that of the machine, or zero.

    Raises:
      PlacementError: the numbers differ.
    """
    wanted, given = len(machine.devices), 0 if compiled_for is None else len(compiled_for)
    if given and len(device_list(compiled_for)) != wanted:
        raise PlacementError(
            f"compiled_for: the plan is for {several(wanted, 'device')}, and there are {given}.",
            facts=[f"machine: {machine.name}"],
            remedies=[
                f"give as many devices as the machine has: {wanted}, in its order",
                "or leave it out; compiled_for=() compiles nothing",
            ],
        )


def nothing_compiled_fits(limit: int, ranking: CompiledRanking, found: _Search) -> MemoryLimitError:
    """The error if no compiled plan fits."""
    return MemoryLimitError(
        f"no plan fits in {size(limit)} a device as it is compiled, of {several(len(ranking.tried), 'plan')}.",
        facts=ranking.said,
        remedies=[
            "more memory, more devices, or more virtual nodes",
            *[f"more time: {several(len(found.budget.untried), 'thing')} not tried"][: len(found.budget.untried)],
            "or take a plan by the model's estimate: compiled_for=()",
        ],
    )


class _Search:
    """One search over forms of a step (number of nodes, lanes, memory plan), each on all meshes.

    Args:
      step: the step, as for `search`.
      args: its arguments.
      over_meshes: the search over the meshes of the machine; its limit is what candidates may hold by the model.
      options: options of `virtualize`.
      memory: bytes that one device may hold.
    """

    def __init__(
        self, step: Any, args: Sequence[Any], over_meshes: MeshesSearch, options: dict[str, Any], memory: int
    ) -> None:
        self.given, self.args, self.over_meshes, self.memory = step, args, over_meshes, memory
        self.machine, self.limit, self.budget = over_meshes.machine, over_meshes.limit, over_meshes.budget
        self.fewer_lanes = options.get("lanes") == "auto"
        self.options = {name: value for name, value in options.items() if not (name == "lanes" and self.fewer_lanes)}
        self.smallest: Candidate | None = None
        self.fitted: dict[MemoryPlan, bool] = {}  # of those tried for the step that is looked at
        self.found: list[Candidate] = []
        self.chosen: Candidate | None = None  # the fastest that fits by the model
        self.entries: dict[Candidate, Entry] = {}
        self.last: Subject | None = None  # the step that was looked at last

    def explore(self, virtual_nodes: int | str) -> None:
        """Finds candidates, with more and more nodes until something fits.

        Args:
          virtual_nodes: V, or ``"auto"``.
        """
        searched = virtual_nodes == "auto" and not isinstance(self.given, VirtualStep)
        nodes = len(self.machine.devices) if searched else virtual_nodes
        while True:  # fewer nodes are fewer turns, each of more examples
            self.last = subject = subject_of(on_nodes(self.given, nodes, self.options), self.args)
            self.search_lanes(subject) if self.fewer_lanes else self.search_memory_plans(subject)
            nodes = 2 * subject.virtual_nodes
            over = not searched or nodes > min(subject.examples, MOST_NODES) or self.budget.lacks()
            plain = False
            if self.chosen is not None:
                plan = self.chosen.on.subject.step.spec.plan
                plain = not (self.chosen.uses_host or plan.recomputed or plan.offloaded)
            if over or plain:  # else more nodes may need neither the host nor more work
                return

    def entry(self, candidate: Candidate) -> Entry:
        """A candidate that may be compiled."""
        if candidate not in self.entries:
            self.entries[candidate] = Entry(candidate, functools.cache(lambda: plan_of(candidate, self.memory)))
        return self.entries[candidate]

    def begin(self, ranking: CompiledRanking, candidate: Candidate) -> None:
        """Begins to compile a candidate while others are searched; of the first step that is looked at."""
        if all(candidate.on.subject is each.on.subject for each in self.entries):
            ranking.begin(self.entry(candidate))

    def plan(self, said: tuple[str, ...], best: Entry | None = None) -> Plan:
        """The plan of the best candidate as compiled, or else by the model.

        Args:
          said: notes about candidates that were not compiled, or do not fit.
          best: the best candidate as compiled.

        Raises:
          MemoryLimitError: nothing fits.
        """
        chosen = self.chosen if best is None else best.candidate
        if chosen is None:
            assert self.smallest is not None and self.last is not None
            raise nothing_fits_error(self.over_meshes, self.last, self.smallest)
        compiled: dict[Candidate, Figures] = {}
        if best is not None:
            source = FULL if FULL in best.known else DRAFT  # drafts compare with drafts only
            compiled = {each: entry.known[source] for each, entry in self.entries.items() if source in entry.known}
        beside, notes = self.other_plan_figures(chosen, compiled), (*said, *self.budget.untried)
        made = plan_of(chosen, self.memory)
        return dataclasses.replace(made, beside=beside, compiled=compiled.get(chosen), notes=notes)

    def other_plan_figures(self, chosen: Candidate, compiled: Mapping[Candidate, Figures]) -> dict[str, Figures]:
        """The figures of other plans of the same step, by name: compiled ones where they are known."""
        beside: dict[str, Figures] = {}
        others = (SEARCHED,) if BESIDE in chosen.name or UNEQUAL in chosen.name else ()
        for name in (*EXPERTS[:3], f"{MEGATRON} + ZeRO", *EXPERTS[3:], *others):
            alike = [each for each in self.found if each.name == name and each.on.subject is chosen.on.subject]
            figures = [compiled.get(each, each.figures) for each in alike]
            figures.sort(key=lambda each: (each.memory > self.memory, each.source == "model", each.seconds))
            if figures and name != chosen.name:
                beside[name] = figures[0]
        return beside

    def search_lanes(self, subject: Subject) -> None:
        """A step with as many lanes as nodes; if no candidate fits, the forms with as many lanes as devices."""
        devices = len(self.machine.devices)
        if subject.virtual_nodes > devices and subject.step.options.reduction == "invariant":
            if self.fits(subject):
                return
            options = dataclasses.replace(subject.step.options, lanes=devices)
            step = VirtualStep(dataclasses.replace(subject.step.spec, options=options), None)
            subject = subject_of(step, self.args)
        self.search_memory_plans(subject)

    def search_memory_plans(self, subject: Subject) -> None:
        """A step with its candidates; if none fits with its state on the devices, also steps with fewer residuals.

        A bisection finds how many residuals to give up: first by recomputation alone, and if that does not suffice also
        by offloading to the host.
        """
        if self.fits(subject):
            return
        keeping = MemoryPlanner(subject, self.machine, self.over_meshes.platform)
        self.fitted = {MemoryPlan(): False}
        level = self.bisect(keeping, False)
        if keeping.host and level is None:
            self.bisect(keeping, True)
        elif keeping.host and level is not None:  # what is dear to compute again may be cheaper there
            self.fits_at_level(keeping, level, True)

    def bisect(self, keeping: MemoryPlanner, host: bool) -> int | None:
        """Tries steps with fewer and fewer residuals, until one fits.

        Args:
          keeping: the planner of the step's memory plans.
          host: whether residuals may be offloaded to the host.

        Returns:
          The lowest level of `keeping` that fits, of those tried; None if none fits.
        """
        low, high = 0, keeping.levels(host)
        count, level = high, None
        for _ in range(BISECTIONS):
            if count == low:
                break
            fits = self.fits_at_level(keeping, count, host)
            if fits is None or (count == keeping.levels(host) and not fits):
                break
            level = count if fits else level
            low, high = (low, count) if fits else (count, high)
            count = (low + high) // 2
        return level

    def fits_at_level(self, keeping: MemoryPlanner, level: int, host: bool) -> bool | None:
        """Whether the step with the memory plan of a level fits; None if time is over, or Ctrl-C ended the search.

        Args:
          keeping: the planner of the step's memory plans.
          level: the level: the higher, the fewer residuals.
          host: whether residuals may be offloaded to the host.
        """
        if self.budget.lacks():
            self.budget.leave_out("keeping less for the backward pass: not tried further")
            return None
        try:
            several = keeping.plan_at_level(level, min(SOLVING, self.budget.left), host)
        except KeyboardInterrupt:
            self.budget.interrupt()
            return None
        if several not in self.fitted:
            less = subject_of(with_recomputation(keeping.subject.step, *several), self.args)
            self.fitted[several] = self.fits(less)
        return self.fitted[several]

    def fits(self, subject: Subject) -> bool:
        """Finds all candidates of a step; returns whether one fits with its state on the devices."""
        several = self.over_meshes.candidates(subject)
        self.found += several
        self.smallest = min(filter(None, [self.smallest, *several]), key=lambda each: each.figures.memory)
        fits = fitting_first(several, self.limit)
        self.chosen = min(filter(None, [self.chosen, *fits[:1]]), key=lambda each: each.figures.seconds, default=None)
        return any(not each.uses_host for each in fits)


def plan_of(chosen: Candidate, limit: int) -> Plan:
    """The plan of a candidate; `limit` is the number of bytes that one device may hold."""
    return Plan(
        chosen.on.subject,
        chosen.on.machine,
        limit,
        chosen.name,
        chosen.mesh,
        chosen.counts,
        chosen.specs,
        chosen.records,
        chosen.prediction,
        {},
        chosen.gap,
        chosen.divisions,
        chosen.host,
        chosen.host_sums,
    )
