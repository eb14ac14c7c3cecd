"""The search for a plan: meshes, and on each the best way to divide a node's computation.

Knows candidates, budgets and memory limits. Must not know how one candidate is found, or shown.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, SupportsFloat, TypeVar

from vnode.errors import MemoryLimitError, PartitionError, UnsupportedPrimitiveError, layout_message, with_remedies
from vnode.partition.cost.times import Times
from vnode.partition.machine import Machine
from vnode.partition.plan.candidates import (
    BESIDE,
    HOPELESS,
    MEGATRON,
    SEARCHED,
    UNEQUAL,
    Candidate,
    OnMesh,
    fitting,
    pace_of,
)
from vnode.partition.plan.compiled import fits_as_compiled
from vnode.partition.plan.keep import SOLVING, Keeping, Less
from vnode.partition.plan.meshes import meshes
from vnode.partition.plan.plan import Plan
from vnode.partition.plan.predict import NODES, Figures, platform_of
from vnode.partition.plan.remedies import Remedies, placed
from vnode.partition.plan.subject import Subject, check_args, computing_again, on_nodes, subject_of
from vnode.placement.context import with_jit
from vnode.placement.placement import MOST_NODES
from vnode.plan.nodes.memory import byte_count
from vnode.show.progress import display
from vnode.show.units import several, size
from vnode.step.virtual import VirtualStep

GAP = 0.01
"""How far above the best a search on one mesh may end."""

TRIES = 4
"""How often at most a mesh is searched, with less memory where the prediction is above the limit."""

ALMOST = 1.001
"""So many times the least memory by a search's own account are searched for at least: sums of bytes are rounded."""

FLATTEST = 0.2
"""By what share at least a prediction is taken to be lower of what is less by a search's own account."""

LEFT_OUT = 8
"""How many stages of branches are left out at most, one after another, to see whether that is faster."""

SLOWER = 1.5
"""So many times the seconds of a candidate on another mesh are too many: the ratio of what is predicted to the search's
own cost varied by 1.4 over the meshes of a machine (a transformer on v5e and P100)."""

MORE = 0.5
"""So much of the budget is spent once more, where nothing fits, on what would."""

LONGEST = 1e9
"""Seconds of a budget without end."""

T = TypeVar("T")

Ways = Generator[tuple[Subject, list[Candidate]], None, T]
"""Steps with their candidates, and what comes of them."""


@with_jit
def search(
    step: Callable[..., Any],
    args: Sequence[Any],
    machine: Machine,
    *,
    virtual_nodes: int | str = "auto",
    memory: int | str | None = None,
    budget: float = 60.0,
    times: Times | None = None,
    progress: bool | None = None,
    compiled_for: Sequence[Any] | None = None,
    **options: Any,
) -> Plan:
    """Finds how a step runs fastest on a machine, within its memory.

    Every mesh of the machine's devices is tried whose first axis is that of the nodes: on each, an integer programme
    (`vnode.partition.searches.exact`) divides what a node computes, and the state, over the other axes. Data parallel,
    with the state on every device or sharded over all (FSDP, ZeRO), and Megatron's splits are candidates in any case.
    With the time that is left, branches of what a node computes that do not wait for each other are put on devices of
    their own, side by side along an axis, where that is predicted to be faster.
    Ctrl-C ends the search with the best so far.

    Args:
      step: a train step as `vnode.virtualize` takes it, or a `VirtualStep`.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      machine: what it shall run on.
      virtual_nodes: V; ``"auto"`` for the fewest nodes with which something fits. Of a `VirtualStep`, its own.
      memory: what one device may hold: bytes, or a string such as ``"12GiB"``; by default what its kind has.
      budget: seconds after which it ends.
      times: of kernels, from measurements or the TPU compiler (`vnode.partition.Times`); by default passes and tiles as
        the compiler counts them for TPUs v4 to v6e, and of other kinds the roofline. Kernels that are measured or
        compiled first, once and for all (`vnode.partition.Cache`), are so until a mesh is done, whatever `budget` says.
      progress: a bar; by default in notebooks and on terminals.
      compiled_for: devices in the order of the machine's, for which plans are compiled until one fits in `memory` by
        the compiler's own account, each search allowing as much less as the prediction before was too low, or a quarter
        more than `memory` where nothing is predicted to fit in that; `budget` is
        for each of them, and compiling takes time besides. Devices of a TPU topology that is not there will do. By
        default what is predicted to fit is taken, and `Plan.accept` tells whether it does.
      **options: of `vnode.virtualize`, if the step is not virtualized yet. ``lanes="auto"``: as many as nodes if that
        fits with the state on the devices, otherwise as many as the machine has devices.

    Returns:
      The plan.

    Raises:
      MemoryLimitError: nothing fits: by how much, and what would help.
      PlacementError: `compiled_for` are not as many devices as the machine has.
      PartitionError: the machine or the options are not what they should be.
      VnodeError: the step cannot be virtualized.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.partition import Machine, search
      >>> def train_step(state, x):
      ...     loss = lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
      ...     return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))
      >>> state = {"up": jnp.ones((64, 512)), "down": jnp.ones((512, 64))}
      >>> plan = search(train_step, (state, jnp.ones((32, 64))), Machine.tpu("v5e:2x2"), virtual_nodes=8)
      >>> plan.figures.memory <= plan.memory, sorted(plan.specs)
      (True, ['down', 'up'])
    """
    if not isinstance(machine, Machine):
        raise PartitionError(f"a plan is searched for a vnode.partition.Machine, not {machine!r}")
    if isinstance(budget, str) or not isinstance(budget, SupportsFloat) or not budget > 0:
        raise PartitionError(f"budget: expected seconds, not {budget!r}")
    budget = float(min(budget, LONGEST))
    if not (times is None or hasattr(times, "slowest")):
        raise PartitionError(f"times: expected vnode.partition.Times, not {times!r}")
    check_args(args)
    try:
        limit = min(kind.memory for kind in machine.kinds) if memory is None else byte_count(memory)
    except ValueError as error:
        raise PartitionError(str(error)) from None

    def within(limit: int) -> Plan:
        run = _Search(step, args, machine, limit, time.monotonic() + budget, budget, times, options)
        with display(progress, 0, 1000) as shown:
            run.shown = shown
            return run.plan(virtual_nodes)

    return within(limit) if compiled_for is None else fits_as_compiled(within, limit, compiled_for)


class _Search:
    """One search."""

    def __init__(
        self,
        step: Any,
        args: Sequence[Any],
        machine: Machine,
        limit: int,
        until: float,
        budget: float,
        times: Times | None,
        options: dict[str, Any],
    ) -> None:
        self.given, self.args, self.machine, self.limit = step, args, machine, limit
        self.until, self.budget, self.times = until, budget, times
        self.fewer_lanes = options.get("lanes") == "auto"
        self.options = {name: value for name, value in options.items() if not (name == "lanes" and self.fewer_lanes)}
        self.platform = platform_of(machine)
        self.shown: Any = None
        self.smallest: Candidate | None = None
        self.undivided = ""  # why nothing but the batch may be divided: an effect, which each device would have
        self.cut_short = False  # whether something was not tried for want of time
        self.more = MORE
        self.fitted: dict[Less, bool] = {}  # of the step that is looked at

    def interrupted(self) -> None:
        """Ends the search with what was found so far; what would fit where nothing does is not tried either."""
        self.until, self.more = time.monotonic(), 0.0

    def plan(self, virtual_nodes: int | str) -> Plan:
        searched = virtual_nodes == "auto" and not isinstance(self.given, VirtualStep)
        nodes = len(self.machine.devices) if searched else virtual_nodes
        best: tuple[Subject, Candidate, list[Candidate]] | None = None
        while True:  # fewer nodes are fewer turns, each of more examples
            subject = subject_of(on_nodes(self.given, nodes, self.options), self.args)
            for one, found in self.in_lanes(subject) if self.fewer_lanes else self.ways(subject):
                chosen = fitting(found, self.limit)[:1]
                if chosen and (best is None or chosen[0].figures.seconds < best[1].figures.seconds):
                    best = one, chosen[0], found
            nodes = 2 * subject.virtual_nodes
            over = not searched or nodes > min(subject.examples, MOST_NODES) or time.monotonic() > self.until
            plain = best is not None and not (
                best[1].uses_host or best[0].step.options.again or best[0].step.options.away
            )
            if best is not None and (over or plain):  # else more nodes may need neither the host nor more work
                return self.made(*best)
            if over:
                raise self.nothing_fits(subject)

    def in_lanes(self, subject: Subject) -> Ways[None]:
        """A step with as many lanes as nodes; where that does not fit, the ways of that with as many as devices."""
        devices = len(self.machine.devices)
        if subject.virtual_nodes > devices and subject.step.options.reduction == "invariant":
            found = self.candidates(subject)
            yield subject, found
            if any(not each.uses_host for each in fitting(found, self.limit)):
                return
            options = dataclasses.replace(subject.step.options, lanes=devices)
            step = VirtualStep(dataclasses.replace(subject.step.spec, options=options), None)
            subject = subject_of(step, self.args)
        yield from self.ways(subject)

    def ways(self, subject: Subject) -> Ways[None]:
        """A step with its candidates; where none fits with its state on the devices, also the step that keeps less.

        How little is kept for the backward pass is found by bisection: first by computing again alone, then, where
        that does not suffice, also with the host.
        """
        found = self.candidates(subject)
        yield subject, found
        if any(not each.uses_host for each in fitting(found, self.limit)):
            return
        keeping = Keeping.of(subject, self.machine, self.platform)
        tried = {Less()}
        self.fitted.clear()
        level = yield from self.bisected(subject, keeping, False, tried)
        if keeping.host and level is None:
            yield from self.bisected(subject, keeping, True, tried)
        elif keeping.host and level is not None:  # what is dear to compute again may be cheaper there
            yield from self.keeping_less(subject, keeping, level, True, tried)

    def bisected(self, subject: Subject, keeping: Keeping, host: bool, tried: set[Less]) -> Ways[int | None]:
        """A step that keeps less and less, until it fits.

        Args:
          subject: the step.
          keeping: what it could keep.
          host: whether also on the host.
          tried: choices that were tried.

        Returns:
          How little of those tried suffices, as a level of `keeping`; None if nothing does.
        """
        low, high = 0, keeping.levels(host)
        count, level = high, None
        for _ in range(TRIES):
            if count == low:
                break
            fits = yield from self.keeping_less(subject, keeping, count, host, tried)
            if fits is None or (count == keeping.levels(host) and not fits):
                break
            level = count if fits else level
            low, high = (low, count) if fits else (count, high)
            count = (low + high) // 2
        return level

    def keeping_less(
        self, subject: Subject, keeping: Keeping, level: int, host: bool, tried: set[Less]
    ) -> Ways[bool | None]:
        """A step that keeps less, if that was not tried.

        Args:
          subject: the step.
          keeping: what it could keep.
          level: how little it keeps.
          host: whether also on the host.
          tried: choices that were tried; this one is added.

        Returns:
          Whether it fits with its state on the devices; None if time is over, or Ctrl-C ended the search.
        """
        left = self.until - time.monotonic()
        if left < 0:
            self.cut_short = True
            return None
        try:
            several = keeping.chosen(level, min(SOLVING, left), host)
        except KeyboardInterrupt:
            self.interrupted()
            return None
        if several not in tried:
            tried.add(several)
            less = subject_of(computing_again(subject.step, *several), self.args)
            found = self.candidates(less)
            yield less, found
            self.fitted[several] = any(not each.uses_host for each in fitting(found, self.limit))
        return self.fitted.get(several, False)

    def candidates(self, subject: Subject) -> list[Candidate]:
        """All that were found in time."""
        found: list[Candidate] = []
        pace = pace_of(subject, self.machine, self.platform, self.times)
        try:
            waiting = self.on_meshes(subject, pace, found)
            divided = self.predicted(waiting, found)
            for _, _, on in divided if pace else ():
                self.unequally(on, found, pace)
            for _, took, on in divided:
                if self.side_by_side(on, found, took):
                    break
        except KeyboardInterrupt:
            self.interrupted()
            if not found:
                raise
        least = min(found, key=lambda c: c.figures.memory)
        if self.smallest is None or least.figures.memory < self.smallest.figures.memory:
            self.smallest = least
        return found

    def on_meshes(
        self, subject: Subject, pace: Mapping[str, float], found: list[Candidate]
    ) -> list[tuple[float, float, OnMesh]]:
        """Adds what divides the batch alone, and searches the other meshes as far as there is time.

        Returns:
          Meshes with seconds of the best on them, by the search's own cost, and those that it took; the best first.
        """
        waiting: list[tuple[float, float, OnMesh]] = []
        took = predicting = 0.0
        for sizes in meshes(len(self.machine.devices), subject.virtual_nodes, NODES):
            began, inner = time.monotonic(), len(sizes) - 1
            if inner and self.undivided:
                break
            if (found or waiting) and (self.until - began < took + predicting or self.until <= began):
                self.cut_short = True
                break
            self.say(sizes, found)
            try:
                on, *others = self.on_mesh(subject, sizes, pace)
                solution = on.solution(float(self.limit), max((self.until - began) / 2, 1.0), GAP) if inner else None
            except UnsupportedPrimitiveError as error:
                if not found and not waiting:  # fewer nodes than devices: there is no mesh of nodes alone
                    devices = len(self.machine.devices)
                    more = f"or take {devices} virtual nodes or more, as there are devices"
                    raise UnsupportedPrimitiveError(with_remedies(str(error), more)) from None
                self.undivided = str(error)
                break
            except KeyboardInterrupt:
                if not waiting:
                    raise
                self.interrupted()
                break
            if inner == 0:
                for each in (on, *others):
                    found.append(each.candidate("data parallel", each.whole))
                    predicting = time.monotonic() - began
                    if each.rows > 1:
                        found.append(each.candidate("FSDP", each.whole, over_rows=True))
                self.with_host(found, found)
                continue
            cost, took = math.inf if solution is None else solution.cost, time.monotonic() - began
            waiting.append((cost, took, on))
            if solution is not None and solution.interrupted:
                self.interrupted()
                break
        return sorted(waiting, key=lambda each: each[0])

    def predicted(
        self, waiting: Sequence[tuple[float, float, OnMesh]], found: list[Candidate]
    ) -> list[tuple[float, float, OnMesh]]:
        """Adds experts' splits and what was found on meshes that were searched, as far as there is time.

        Returns:
          The meshes, with seconds of the best on them as predicted, and those that they took; the best first.
        """
        divided: list[tuple[float, float, OnMesh]] = []
        took = 0.0
        for _, before, on in waiting:
            began, known = time.monotonic(), len(found)
            late = self.until - began < took or self.until <= began
            if found and late and (divided or self.more):  # after Ctrl-C the best mesh all the same
                self.cut_short = True
                break
            self.say(on.sizes, found)
            for expert in on.megatron(self.most(MEGATRON, found)):
                self.add(on, expert, found)
            over = self.searched(on, found)
            took = time.monotonic() - began
            best = min((c.figures.seconds for c in found[known:]), default=math.inf)
            divided.append((best, before + took, on))
            if over:
                return []
            self.with_host(found[known:], found)
        return sorted(divided, key=lambda each: each[0])

    def with_host(self, several: Sequence[Candidate], found: list[Candidate]) -> None:
        """Adds some candidates with as much on the host as they need, where nothing fits otherwise."""
        if not fitting(found, self.limit):
            found += filter(None, [each.with_host(self.machine, self.limit) for each in [*several]])

    def on_mesh(self, subject: Subject, sizes: Mapping[str, int], pace: Mapping[str, float]) -> list[OnMesh]:
        """One mesh, with shares by speed and with equal ones; first that on which the undivided step is faster."""
        made = functools.partial(OnMesh, subject, self.machine, sizes, self.platform, self.times, pace)
        several = [made()]
        if len({*several[0].shares.counts}) > 1 and len(self.machine.kinds) > 1:
            several.append(made(even=True))
            several.sort(key=lambda on: on.candidate("", on.whole).figures.seconds)
        return several

    def searched(self, on: OnMesh, found: list[Candidate]) -> bool:
        """Adds the best on one mesh, searched again with less memory where its prediction is above the limit.

        A search's own account of memory is of the same kind as the prediction, but not the same: where nothing fits by
        it, that is looked at which needs no limit. How much less is asked for next is how much less is to be predicted,
        by the ratio of the two in the last two tries; the last one is the fastest that takes least by that account.

        Returns:
          Whether Ctrl-C ended it.
        """
        allowed, tried, least = float(self.limit), list[tuple[float, int]](), 0.0

        def left() -> float:
            return max(self.until - time.monotonic(), 1.0)

        while len(tried) < TRIES:
            if (tried or (self.more and fitting(found, self.limit))) and time.monotonic() > self.until:
                self.cut_short = True
                break
            if on.solution(allowed, left(), GAP) is None:
                if tried or allowed == math.inf:
                    break
                allowed = math.inf
                continue
            known = len(found)
            candidate, interrupted = on.searched(allowed, left(), GAP, self.most(SEARCHED, found))
            if candidate is not None:
                self.add(on, candidate, found)
            if interrupted:
                self.interrupted()
            if interrupted or candidate is None:
                return interrupted
            predicted = min(each.figures.memory for each in found[known:])
            tried.append((candidate.account, predicted))
            if predicted <= self.limit or candidate.account <= ALMOST * least:
                break
            least = least or on.least(left())
            allowed = max(less(tried, self.limit), ALMOST * least) if len(tried) < TRIES - 1 else ALMOST * least
        return False

    def most(self, name: str, found: Sequence[Candidate]) -> float:
        """Seconds by searches' own cost beyond which a candidate is not predicted: one of its name that fits is faster.

        Predictions know of more, and take longer, but do not turn such an order round.
        """
        return SLOWER * min(
            (c.estimate for c in fitting(found, self.limit) if c.name.startswith(name)), default=math.inf
        )

    def unequally(self, on: OnMesh, found: list[Candidate], pace: Mapping[str, float]) -> None:
        """Adds the best of a mesh, and Megatron's split, with more for those devices along its axis that are faster."""
        if len(on.axes) != 1 or on.subject.step.options.away or time.monotonic() > self.until:
            return
        evens = [each for each in found if each.mesh == on.sizes and each.records and "+" not in each.name]
        self.say(on.sizes, found)
        found += on.unequal(self.machine, pace, sorted(evens, key=by_seconds), self.limit, self.until)

    def side_by_side(self, on: OnMesh, found: list[Candidate], took: float) -> bool:
        """Adds the best with branches on devices of their own, along each axis, without the stages that do not pay.

        Args:
          on: a mesh.
          found: so far.
          took: seconds that the search on it took without branches.

        Returns:
          Whether time is over, or Ctrl-C ended it.
        """
        without = fastest(found, self.limit)
        for axis in on.axes if on.stages else ():
            kept, best = on.stages, list[Candidate]()
            for left_out in (None, *on.by_balance(axis)[:LEFT_OUT]):
                stages = [stage for stage in kept if stage is not left_out]
                hopeless = left_out is not None and fastest(best, self.limit) > HOPELESS * without
                began = time.monotonic()
                if not stages or hopeless or began + took > self.until:
                    break
                tried: list[Candidate] = []
                self.say(on.sizes, found)
                if self.searched(on.side_by_side(axis, stages), tried):
                    found += tried
                    return True
                if fastest(tried, self.limit) < fastest(best, self.limit):
                    kept, best = stages, tried
                took = time.monotonic() - began
            found += best
        return time.monotonic() > self.until

    def add(self, on: OnMesh, candidate: Candidate, found: list[Candidate]) -> None:
        """Adds a candidate; one that does not fit also with its state sharded over the rows, which takes exchanges."""
        found.append(candidate)
        if on.rows > 1 and candidate.figures.memory > self.limit:
            found.append(on.over_rows(candidate))

    def say(self, sizes: Any, found: Sequence[Candidate]) -> None:
        """Shows how far the search is."""
        done = 1 - max(self.until - time.monotonic(), 0.0) / self.budget
        best = fitting(found, self.limit)
        mesh = " x ".join(f"{name} {n}" for name, n in sizes.items())
        self.shown.update(round(1000 * done), f"{mesh}; best {best[0].figures.seconds:.3g} s" if best else mesh)

    def made(self, subject: Subject, chosen: Candidate, found: Sequence[Candidate]) -> Plan:
        """The plan."""
        beside: dict[str, Figures] = {}
        others = (SEARCHED,) if BESIDE in chosen.name or UNEQUAL in chosen.name else ()
        for name in ("data parallel", "FSDP", MEGATRON, f"{MEGATRON} + ZeRO", *others):
            alike = sorted((c for c in found if c.name == name), key=lambda c: c.figures.seconds)
            fits = fitting(alike, self.limit) or alike
            if fits and fits[0] is not chosen:
                beside[name] = fits[0].figures
        return plan_of(subject, chosen, self.machine, self.limit, beside)

    def nothing_fits(self, subject: Subject) -> MemoryLimitError:
        """The error for when nothing fits, with what would: as far as a share of the budget, `MORE`, reaches."""
        least = self.smallest
        assert least is not None
        kept, devices = least.figures, len(self.machine.devices)
        away = least.all_on_host(self.machine)
        self.until = time.monotonic() + self.more * self.budget
        self.shown.update(1000, "nothing fits; what would?")

        def divided(on: OnMesh) -> list[Candidate]:
            found: list[Candidate] = []
            for expert in on.megatron():
                self.add(on, expert, found)
            self.searched(on, found)
            return found

        tries = Remedies(subject, least, self.machine, self.limit, self.platform, self.times, divided, self.until)
        try:
            fits = tries.found()
        except KeyboardInterrupt:
            fits = None
        help_ = [f"what would fit: {fits.said(tries.nodes, devices)}"] if fits else []
        if not fits:
            untried = {tries.kind(change) for change in tries.left}
            if ("donated",) in untried:
                help_.append(f"the state given away, donate_argnums: about {size(min(kept.state, kept.results))} less")
            if ("nodes",) in untried:
                help_.append(f"more virtual nodes: there are {subject.virtual_nodes} for {subject.examples:,} examples")
            if ("lanes",) in untried:
                help_.append(f"fewer lanes, lanes={devices}: about {size(kept.pending)} less")
            if ("fast",) in untried:
                help_.append(f'sums in any order, reduction="fast": about {size(kept.pending)} less')
            if ("devices",) in untried and kept.state > 0:
                help_.append(f"about {-(-kept.memory // self.limit) * devices} devices")
        if self.cut_short:
            help_.insert(0, f"more time: not everything was tried in budget={self.budget:g} seconds")
        failed = ", ".join(each.said(tries.nodes, devices) for each in tries.failed())
        return MemoryLimitError(
            layout_message(
                f"no plan fits in {size(self.limit)} a device.",
                facts=[
                    f"the smallest found takes {size(kept.memory)}, {size(kept.memory - self.limit)} too much: "
                    + placed(least.name, least.mesh),
                    f"of that {size(kept.state)} are state, {size(kept.pending)} sums that wait for others",
                    *[f"{size(away.memory)} with {away.on_host}"][: bool(away.on_host)],
                    *[f"not enough, as predicted: {failed}"][: bool(failed)],
                    *["only the batch was divided: " + " ".join(self.undivided.split("What to do")[0].split())][
                        : bool(self.undivided)
                    ],
                    f"machine: {self.machine.name}, {several(devices, 'device')}",
                ],
                remedies=help_ or ["devices with more memory"],
            )
        )


def plan_of(subject: Subject, chosen: Candidate, machine: Machine, limit: int, beside: Mapping[str, Figures]) -> Plan:
    """A candidate as a plan.

    Args:
      subject: the step.
      chosen: how it is to run.
      machine: on which.
      limit: bytes that one device may hold.
      beside: what others take.
    """
    return Plan(
        subject.step,
        subject.args,
        subject.fingerprint,
        machine,
        limit,
        subject.virtual_nodes,
        chosen.name,
        chosen.mesh,
        chosen.counts,
        chosen.specs,
        chosen.records,
        chosen.prediction,
        beside,
        chosen.gap,
        chosen.divisions,
        chosen.host,
        chosen.far,
    )


def less(tried: Sequence[tuple[float, int]], limit: int) -> float:
    """The account of memory with which a prediction would be a little below a limit.

    Args:
      tried: accounts with the predictions of what they were of, the last one above the limit.
      limit: of the prediction, bytes.

    >>> less([(100.0, 90)], 80), less([(100.0, 90), (80.0, 86)], 80)
    (89.5, 48.5)
    """
    account, predicted = tried[-1]
    before, first = tried[-2] if len(tried) > 1 else (account, predicted)
    steep = (first - predicted) / (before - account) if before > account else 1.0
    return account - 1.05 * (predicted - limit) / min(max(steep, FLATTEST), 1.0)


def by_seconds(candidate: Candidate) -> float:
    """Seconds of a step."""
    return candidate.figures.seconds


def fastest(candidates: Sequence[Candidate], memory: float) -> float:
    """Seconds of the fastest that fits; infinite if none does."""
    return min((each.figures.seconds for each in fitting(candidates, memory)), default=math.inf)
