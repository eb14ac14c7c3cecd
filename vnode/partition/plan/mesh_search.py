"""The candidates of one form of a step: on every mesh of a machine, as far as there is time.

Knows meshes, candidates, and a limit of memory. Must not know in which forms a step is looked at (how many nodes, what
it keeps for its backward pass), nor how one candidate is found.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vnode.errors import UnsupportedPrimitiveError, with_remedies
from vnode.partition.cost.time_sources import Times
from vnode.partition.machine import Machine
from vnode.partition.plan.budget import Budget
from vnode.partition.plan.candidates import (
    HOPELESS,
    MEGATRON,
    SEARCHED,
    Candidate,
    MeshSearch,
    fitting_first,
    pace_of,
)
from vnode.partition.plan.meshes import meshes
from vnode.partition.plan.predict import NODES
from vnode.partition.plan.search_subject import Subject
from vnode.partition.searches.methods import METHODS, Method

GAP = 0.01
"""How far above the best a search on one mesh may end."""

TRIES = 4
"""How often at most a mesh is searched, with less memory where the prediction is above the limit."""

ALMOST = 1.001
"""So many times the least memory by a search's own account are searched for at least: sums of bytes are rounded."""

FLATTEST = 0.2
"""By what share at least a prediction is taken to be lower of what is less by a search's own account."""

PREDICTED = 2
"""For how many predictions there is to be time when meshes have been searched: the best of one and experts' split."""

MORE_AXES = 2.5
"""So many times as long takes the search on a mesh that divides along one axis more (1.8 to 2.7 were seen)."""

LEAST = 0.1
"""Seconds that one solution of a mesh is given at least."""

SHARES = 12
"""About how many predictions it takes to find unequal shares, for one number of blocks."""

BRANCHES = 0.5
"""The share of the budget that must be left for branches side by side: few models are faster so."""

LEFT_OUT = 8
"""How many stages of branches are left out at most, one after another, to see whether that is faster."""

SLOWER = 1.5
"""So many times the seconds of a candidate on another mesh are too many: the ratio of what is predicted to the search's
own cost varied by 1.4 over the meshes of a machine (a transformer on v5e and P100)."""


@dataclasses.dataclass
class MeshesSearch:
    """A search over the meshes of a machine.

    Attributes:
      machine: the devices.
      platform: what is compiled for.
      limit: bytes that one device may hold.
      times: of fused ops.
      budget: seconds that are left.
      shown: the bar that says how far the search is.
      early: told of each candidate that divides the batch alone, as soon as it is found.
      method: the search of one mesh.
      undivided: why nothing but the batch may be divided, if so: an effect, which each device would have.
    """

    machine: Machine
    platform: str
    limit: int
    times: Times | None
    budget: Budget
    shown: Any = None
    early: Callable[[Subject, Candidate], None] | None = None
    undivided: str = ""
    method: Method = METHODS["exact"]

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
            self.budget.interrupt()
            if not found:
                raise
        return found

    def on_meshes(
        self, subject: Subject, pace: Mapping[str, float], found: list[Candidate]
    ) -> list[tuple[float, float, MeshSearch]]:
        """Adds what divides the batch alone, and searches the other meshes as far as there is time.

        Returns:
          Meshes with seconds of the best on them, by the search's own cost, and those that it took; the best first.
        """
        waiting: list[tuple[float, float, MeshSearch]] = []
        took, before = 0.0, 0
        every = [*meshes(len(self.machine.devices), subject.virtual_nodes, NODES)]
        for number, sizes in enumerate(every):
            began, inner = time.monotonic(), len(sizes) - 1
            if inner and self.undivided:
                break
            took *= MORE_AXES ** max(inner - before, 0)
            unknown = 0.0 if self.budget.predictions else PREDICTED * took  # a prediction takes about as long
            if (found or waiting) and self.budget.lacks(took + unknown, predictions=PREDICTED):
                self.budget.leave_out(*(f"{mesh_text(each)}: not searched" for each in every[number:]))
                break
            self.say(sizes, found)
            try:
                on, *others = self.on_mesh(subject, sizes, pace)
                solution = on.solution(float(self.limit), max(self.budget.left / 2, LEAST), GAP) if inner else None
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
                self.budget.interrupt()
                break
            if inner == 0:
                for each in (on, *others):
                    self.keep(each.candidate("data parallel", each.undivided), found)
                    if each.replicas > 1:
                        self.keep(each.candidate("FSDP", each.undivided, shard_state=True), found)
                if self.early is not None:
                    for candidate in found:
                        self.early(subject, candidate)
                self.with_host(found, found)
                continue
            cost, took, before = math.inf if solution is None else solution.cost, time.monotonic() - began, inner
            if solution is not None and solution.cut_short:
                gap = f", at most {solution.gap:.1%} above the best by its own cost" if solution.lower_bound else ""
                self.budget.leave_out(f"{mesh_text(sizes)}: not searched to the end{gap}")
            waiting.append((cost, took, on))
            if solution is not None and solution.interrupted:
                self.budget.interrupt()
                break
        return sorted(waiting, key=lambda each: each[0])

    def predicted(
        self, waiting: Sequence[tuple[float, float, MeshSearch]], found: list[Candidate]
    ) -> list[tuple[float, float, MeshSearch]]:
        """Adds experts' splits and what was found on meshes that were searched, as far as there is time.

        Returns:
          The meshes, with seconds of the best on them as predicted, and those that they took; the best first.
        """
        done: list[tuple[float, float, MeshSearch]] = []
        for number, (_, before, on) in enumerate(waiting):
            began, known = time.monotonic(), len(found)
            if found and self.budget.lacks() and (done or self.budget.more):  # after Ctrl-C the best mesh all the same
                left = (each.sizes for _, _, each in waiting[number:])
                self.budget.leave_out(
                    *(f"{mesh_text(sizes)}: searched, what was found is not predicted" for sizes in left)
                )
                break
            self.say(on.sizes, found)
            over = self.divided(on, found)
            best = min((c.figures.seconds for c in found[known:]), default=math.inf)
            done.append((best, before + time.monotonic() - began, on))
            if over:
                return []
            self.with_host(found[known:], found)
        return sorted(done, key=lambda each: each[0])

    def divided(self, on: MeshSearch, found: list[Candidate]) -> bool:
        """Adds the best on one mesh, and experts' splits if there is time for them, too.

        Returns:
          Whether Ctrl-C ended it.
        """
        interrupted = self.searched(on, found)
        if not interrupted and self.budget.lacks():
            self.budget.leave_out(f"{mesh_text(on.sizes)}: {MEGATRON} is not predicted")
        elif not interrupted:
            for expert in on.megatron(self.slowest_worth_predicting(MEGATRON, found)):
                self.add(on, expert, found)
            if self.budget.lacks():
                self.budget.leave_out(
                    f"{mesh_text(on.sizes)}: sequence, context and expert parallelism are not predicted"
                )
            else:
                for expert in on.other_experts():
                    self.add(on, expert, found)
        return interrupted

    def with_host(self, several: Sequence[Candidate], found: list[Candidate]) -> None:
        """Adds some candidates with as much on the host as they need, where nothing fits otherwise."""
        if not fitting_first(found, self.limit):
            found += filter(None, [each.with_host(self.machine, self.limit) for each in [*several]])

    def on_mesh(self, subject: Subject, sizes: Mapping[str, int], pace: Mapping[str, float]) -> list[MeshSearch]:
        """One mesh, with shares by speed and with equal ones; first that on which the undivided step is faster."""
        made = functools.partial(
            MeshSearch, subject, self.machine, sizes, self.platform, self.times, pace, method=self.method
        )
        several = [made()]
        if len({*several[0].shares.counts}) > 1 and len(self.machine.kinds) > 1:
            several.append(made(even=True))
            several.sort(key=lambda on: on.candidate("", on.undivided).figures.seconds)
        return several

    def searched(self, on: MeshSearch, found: list[Candidate]) -> bool:
        """Adds the best on one mesh, searched again with less memory where its prediction is above the limit.

        A search's own account of memory is of the same kind as the prediction, but not the same: where nothing fits by
        it, that is looked at which needs no limit. How much less is asked for next is how much less is to be predicted,
        by the ratio of the two in the last two tries; the last one is the fastest that takes least by that account.

        Returns:
          Whether Ctrl-C ended it.
        """
        allowed, tried, least = float(self.limit), list[tuple[float, int]](), 0.0

        def left() -> float:
            return max(self.budget.left, LEAST)

        while len(tried) < TRIES:
            if (tried or (self.budget.more and fitting_first(found, self.limit))) and self.budget.lacks():
                self.budget.leave_out(f"{mesh_text(on.sizes)}: not searched with less memory")
                break
            if on.solution(allowed, left(), GAP) is None:
                if tried or allowed == math.inf:
                    break
                allowed = math.inf
                continue
            known = len(found)
            candidate, interrupted = on.searched(allowed, left(), GAP, self.slowest_worth_predicting(SEARCHED, found))
            if candidate is not None:
                self.add(on, candidate, found)
            if interrupted:
                self.budget.interrupt()
            if interrupted or candidate is None:
                return interrupted
            predicted = min(each.figures.memory for each in found[known:])
            tried.append((candidate.account, predicted))
            if predicted <= self.limit or candidate.account <= ALMOST * least:
                break
            least = least or on.least(left())
            allowed = (
                max(smaller_account(tried, self.limit), ALMOST * least) if len(tried) < TRIES - 1 else ALMOST * least
            )
        return False

    def slowest_worth_predicting(self, name: str, found: Sequence[Candidate]) -> float:
        """Seconds by searches' own cost beyond which a candidate is not predicted: one of its name that fits is faster.

        Predictions know of more, and take longer, but do not turn such an order round.
        """
        return SLOWER * min(
            (c.estimate for c in fitting_first(found, self.limit) if c.name.startswith(name)), default=math.inf
        )

    def unequally(self, on: MeshSearch, found: list[Candidate], pace: Mapping[str, float]) -> None:
        """Adds the best of a mesh, and Megatron's split, with more for those devices along its axis that are faster."""
        if len(on.axes) != 1 or on.subject.step.spec.plan.offloaded or self.budget.lacks(predictions=SHARES):
            return
        evens = [each for each in found if each.mesh == on.sizes and each.records and "+" not in each.name]
        self.say(on.sizes, found)
        found += on.unequal(self.machine, pace, sorted(evens, key=by_seconds), self.limit, self.budget.until)

    def side_by_side(self, on: MeshSearch, found: list[Candidate], took: float) -> bool:
        """Adds those with branches on devices of their own, along each axis; stages that do not pay are left out.

        Args:
          on: a mesh.
          found: so far.
          took: seconds that the search on it took without branches.

        Returns:
          Whether time is over, or Ctrl-C ended it.
        """
        without = fastest(found, self.limit)

        def late() -> bool:
            lacks = self.budget.lacks(took) or self.budget.left < BRANCHES * self.budget.seconds
            if lacks:
                self.budget.leave_out(f"{mesh_text(on.sizes)}: branches side by side not tried further")
            return lacks

        for axis in on.axes if on.stages else ():
            kept, best = on.stages, list[Candidate]()
            for left_out in (None, *on.by_balance(axis)[:LEFT_OUT]):
                stages = [stage for stage in kept if stage is not left_out]
                hopeless = left_out is not None and fastest(best, self.limit) > HOPELESS * without
                began = time.monotonic()
                if not stages or hopeless or late():
                    break
                tried: list[Candidate] = []
                self.say(on.sizes, found)
                interrupted = self.searched(on.side_by_side(axis, stages), tried)
                found += tried
                if interrupted:
                    return True
                if fastest(tried, self.limit) < fastest(best, self.limit):
                    kept, best = stages, tried
                took = time.monotonic() - began
        return self.budget.is_spent

    def add(self, on: MeshSearch, candidate: Candidate, found: list[Candidate]) -> None:
        """Adds a candidate; if it does not fit, also the candidate with its state sharded over the replicas."""
        self.keep(candidate, found)
        if on.replicas == 1 or candidate.figures.memory <= self.limit:
            return
        if fitting_first(found, self.limit) and self.budget.lacks():
            self.budget.leave_out(f"{mesh_text(on.sizes)}: {candidate.name} with ZeRO is not predicted")
            return
        self.keep(on.with_sharded_state(candidate), found)

    def keep(self, candidate: Candidate, found: list[Candidate]) -> None:
        """Adds a candidate, and notes how long it took to predict it."""
        found.append(candidate)
        self.budget.predictions.append(candidate.prediction_seconds)

    def say(self, sizes: Any, found: Sequence[Candidate]) -> None:
        """Shows how far the search is."""
        done = 1 - max(self.budget.left, 0.0) / self.budget.seconds
        best = fitting_first(found, self.limit)
        mesh = mesh_text(sizes)
        self.shown.update(round(1000 * done), f"{mesh}; best {best[0].figures.seconds:.3g} s" if best else mesh)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """A mesh in words.

    >>> mesh_text({"vnode": 2, "model": 4})
    'vnode 2 x model 4'
    """
    return " x ".join(f"{name} {n}" for name, n in sizes.items())


def smaller_account(tried: Sequence[tuple[float, int]], limit: int) -> float:
    """The account of memory with which a prediction would be a little below a limit.

    Args:
      tried: accounts with the predictions of what they were of, the last one above the limit.
      limit: of the prediction, bytes.

    >>> smaller_account([(100.0, 90)], 80), smaller_account([(100.0, 90), (80.0, 86)], 80)
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
    return min((each.figures.seconds for each in fitting_first(candidates, memory)), default=math.inf)
