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
    MEGATRON,
    SEARCHED,
    Candidate,
    MeshSearch,
    fitting_first,
    kind_of,
    pace_of,
)
from vnode.partition.plan.meshes import NODES, mesh_text, meshes
from vnode.partition.plan.search_subject import Subject
from vnode.partition.searches.methods import METHODS, Method

GAP = 0.03
"""The search on one mesh may end with a solution that is above the best by this share."""

TRIES = 4
"""A mesh is searched at most this often, each time with less memory if the prediction exceeds the limit."""

ALMOST = 1.001
"""Factor on the least possible memory that a search is allowed at least, as sums of bytes are rounded."""

PREDICTED = 2
"""Number of predictions for which time is left after the meshes are searched: one solution and one expert's split."""

LEAST = 0.1
"""Least seconds for one search on a mesh."""

NEAR = 1.25
"""A candidate is not predicted if its cost exceeds that of one of its name on another mesh by this factor: the ratio of
predictions to costs differed by up to 1.3 from mesh to mesh (nine models on v5e), and was smaller on meshes with more
replicas, which are cheaper as a rule."""

OUTDONE = 2.0
"""An expert's split, other than Megatron's, is predicted up to this factor on the cost of the mesh's solution."""

FURTHER = 0.999
"""A candidate is predicted on a mesh with more axes if its cost is below this share of that on fewer axes."""


@dataclasses.dataclass
class MeshesSearch:
    """A search over the meshes of a machine.

    Attributes:
      machine: the machine.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      limit: bytes that one device may hold.
      times: source of the times of fused operations.
      budget: the time budget.
      shown: the progress bar.
      early: called with each candidate that divides the batch alone, as soon as it is found.
      method: the search method for one mesh.
      undivided: the reason why only the batch may be divided (an effect that each device would repeat); or empty.
    """

    machine: Machine
    platform: str
    limit: int
    times: Times | None
    budget: Budget
    shown: Any = None
    early: Callable[[Candidate], None] | None = None
    undivided: str = ""
    method: Method = METHODS["exact"]

    def candidates(self, subject: Subject) -> list[Candidate]:
        """All candidates that are found in time."""
        found: list[Candidate] = []
        pace = pace_of(subject, self.machine, self.platform, self.times)
        try:
            searched = self.on_meshes(subject, pace, found)
            if self.predicted(searched, found):
                return found
            searched.sort(key=lambda on: fastest([each for each in found if each.mesh == on.sizes], self.limit))
            for on in searched if pace else ():
                self.unequally(on, found)
            for on in searched:
                if self.side_by_side(on, found):
                    break
        except KeyboardInterrupt:
            self.budget.interrupt()
            if not found:
                raise
        return found

    def on_meshes(self, subject: Subject, pace: Mapping[str, float], found: list[Candidate]) -> list[MeshSearch]:
        """Adds the candidates that divide the batch alone, and searches the other meshes while there is time."""
        waiting: list[MeshSearch] = []
        took = 0.0
        every = [*meshes(len(self.machine.devices), subject.virtual_nodes)]
        for number, sizes in enumerate(every):
            began, inner = time.monotonic(), len(sizes) - 1
            if inner and self.undivided:
                break
            if inner > 1 and not self.is_worth_further_axes(sizes, waiting):
                continue
            if (found or waiting) and self.budget.lacks(took, predictions=PREDICTED):
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
                        self.early(candidate)
                self.with_host(found, found)
                continue
            took = time.monotonic() - began
            if solution is not None and solution.cut_short:
                gap = f", at most {solution.gap:.1%} above the best by its own cost" if solution.lower_bound else ""
                self.budget.leave_out(f"{mesh_text(sizes)}: not searched to the end{gap}")
            waiting.append(on)
            if solution is not None and solution.interrupted:
                self.budget.interrupt()
                break
        return waiting

    def is_worth_further_axes(self, sizes: Mapping[str, int], searched: Sequence[MeshSearch]) -> bool:
        """Whether a mesh with several axes may be better than those searched.

        It is searched if the solution with as many replicas on one axis comes near the best: a further axis saved at
        most 13 % (nine models on v5e).
        """
        least = min((on.cost for on in searched), default=math.inf)
        alike = [on.cost for on in searched if on.replicas == sizes[NODES]]
        return not alike or alike[0] <= NEAR * least

    def divided(self, on: MeshSearch) -> list[Candidate]:
        """The solution and the experts' candidates on one mesh, as far as there is time."""
        found: list[Candidate] = []
        on.solution(float(self.limit), max(self.budget.left, LEAST), GAP)
        self.predicted([on], found)
        return found

    def predicted(self, searched: Sequence[MeshSearch], found: list[Candidate]) -> bool:
        """Adds the solutions and the experts' candidates on searched meshes, while there is time.

        Each kind of candidate is predicted where the search's cost model has it fastest, and on further meshes as long
        as none fits, or where it comes near.

        Returns:
          Whether Ctrl-C ended it.
        """
        began = len(found)
        for name, on, cost in in_turn(searched):
            if cost > self.slowest_worth_predicting(name, found):
                continue
            # after Ctrl-C the best mesh all the same
            if found and self.budget.lacks() and (len(found) > began or self.budget.more):
                self.budget.leave_out(f"{mesh_text(on.sizes)}: {name} is not predicted")
                continue
            self.say(on.sizes, found)
            known = len(found)
            if name != SEARCHED:
                self.add(on, on.expert(name), found)
            elif self.searched(on, found):
                return True
            self.with_host(found[known:], found)
        return False

    def slowest_worth_predicting(self, name: str, found: Sequence[Candidate]) -> float:
        """Seconds by the search's cost model beyond which a candidate is not predicted, as one of its name is faster.

        Predictions are finer and take longer, but do not reverse so large a difference.
        """
        fits = (c.estimate for c in fitting_first(found, self.limit) if kind_of(c.name) == name)
        return NEAR * min(fits, default=math.inf)

    def with_host(self, several: Sequence[Candidate], found: list[Candidate]) -> None:
        """Adds some candidates with as much on the host as they need, where nothing fits otherwise."""
        if not fitting_first(found, self.limit):
            found += filter(None, [each.with_host(self.limit) for each in [*several]])

    def on_mesh(self, subject: Subject, sizes: Mapping[str, int], pace: Mapping[str, float]) -> list[MeshSearch]:
        """One mesh, with shares by speed and with equal ones; first that on which the undivided step is faster."""
        made = functools.partial(
            MeshSearch, subject, self.machine, sizes, self.platform, self.times, pace, method=self.method
        )
        several = [made()]
        if len({*several[0].spread.counts}) > 1 and len(self.machine.kinds) > 1:
            several.append(made(even=True))
            several.sort(key=lambda on: on.candidate("", on.undivided).figures.seconds)
        return several

    def searched(self, on: MeshSearch, found: list[Candidate]) -> bool:
        """Adds the best candidate on one mesh; searches again with less memory if its prediction exceeds the limit.

        The search's model of memory is coarser than the prediction. If nothing fits by that model, the search runs
        without a limit. The next limit is lower by the predicted excess, then by twice the excess. The last try asks
        for the fastest candidate among those with the least memory by the search's model.

        Returns:
          Whether Ctrl-C ended it.
        """
        allowed, least = float(self.limit), 0.0
        for tried in range(1, TRIES + 1):
            again = tried > 1 or (self.budget.more and fitting_first(found, self.limit))
            if again and self.budget.lacks():
                self.budget.leave_out(f"{mesh_text(on.sizes)}: not searched with less memory")
                break
            solution = on.solution(allowed, max(self.budget.left, LEAST), GAP)
            if solution is None and tried == 1:
                solution = on.solution(math.inf, max(self.budget.left, LEAST), GAP)
            if solution is None or (tried > 1 and solution.cost > self.slowest_worth_predicting(SEARCHED, found)):
                break
            known = len(found)
            candidate = on.searched(solution)
            self.add(on, candidate, found)
            if solution.interrupted:
                self.budget.interrupt()
                return True
            excess = min(each.figures.memory for each in found[known:]) - self.limit
            if excess <= 0 or candidate.account <= ALMOST * least:
                break
            least = least or on.least(max(self.budget.left, LEAST))
            allowed = max(candidate.account - tried * excess if tried < TRIES - 1 else 0.0, ALMOST * least)
        return False

    def unequally(self, on: MeshSearch, found: list[Candidate]) -> None:
        """Adds the best candidates of a mesh with larger shares for the faster devices along its axis."""
        if len(on.axes) != 1 or on.subject.step.spec.plan.offloaded or self.budget.lacks():
            return
        evens = [each for each in found if each.mesh == on.sizes and each.records and "+" not in each.name]
        self.say(on.sizes, found)
        found += on.unequal(sorted(evens, key=lambda each: each.figures.seconds), self.limit, self.budget.until)

    def side_by_side(self, on: MeshSearch, found: list[Candidate]) -> bool:
        """Adds candidates with branches side by side along each axis.

        A branch is not divided along that axis, so devices with shorter branches wait. Stages are taken as long as the
        least computation on this mesh and these waits, without any exchange, are shorter than the best step so far.

        Returns:
          True if time is over, or Ctrl-C ended the search.
        """
        took = on.took
        compute = min((each.figures.compute for each in found if each.mesh == on.sizes), default=math.inf)
        for axis in on.axes:
            stages = on.stages_within(axis, fastest(found, self.limit) - compute) if compute < math.inf else []
            if not stages:
                continue
            if self.budget.lacks(took):
                self.budget.leave_out(f"{mesh_text(on.sizes)}: branches side by side not tried further")
                return self.budget.is_spent
            began = time.monotonic()
            self.say(on.sizes, found)
            tried: list[Candidate] = []
            if self.searched(on.side_by_side(axis, stages), tried):
                return True
            found += tried
            took = time.monotonic() - began
        return self.budget.is_spent

    def add(self, on: MeshSearch, candidate: Candidate, found: list[Candidate]) -> None:
        """Adds a candidate, and if it does not fit also the one with its state sharded over the replicas."""
        self.keep(candidate, found)
        if on.replicas == 1 or candidate.figures.memory <= self.limit:
            return
        if fitting_first(found, self.limit) and self.budget.lacks():
            self.budget.leave_out(f"{mesh_text(on.sizes)}: {candidate.name} with ZeRO is not predicted")
            return
        self.keep(on.with_sharded_state(candidate), found)

    def keep(self, candidate: Candidate, found: list[Candidate]) -> None:
        """Adds a candidate, and records how long its prediction took."""
        found.append(candidate)
        self.budget.predictions.append(candidate.prediction_seconds)

    def say(self, sizes: Any, found: Sequence[Candidate]) -> None:
        """Shows the progress."""
        done = 1 - max(self.budget.left, 0.0) / self.budget.seconds
        best = fitting_first(found, self.limit)
        mesh = mesh_text(sizes)
        self.shown.update(round(1000 * done), f"{mesh}; best {best[0].figures.seconds:.3g} s" if best else mesh)


def in_turn(searched: Sequence[MeshSearch]) -> list[tuple[str, MeshSearch, float]]:
    """(name, mesh, cost) of the candidates on searched meshes: of each name that of the least cost, then the next ones.

    Args:
      searched: the searches on the meshes.
    """
    kinds: dict[str, list[tuple[float, MeshSearch]]] = {SEARCHED: [(on.cost, on) for on in searched]}
    for on in searched:
        for name, strategies in on.expert_splits.items():
            cost = on.search.problem.cost(strategies)
            if cost <= (math.inf if name == MEGATRON else OUTDONE * on.cost) and math.isfinite(cost):
                kinds.setdefault(name, []).append((cost, on))
    found: list[tuple[int, str, MeshSearch, float]] = []
    for name, several in kinds.items():
        least: dict[int, float] = {}  # by the number of replicas
        kept: list[tuple[float, MeshSearch]] = []
        for cost, on in sorted(several, key=lambda each: len(each[1].axes)):
            if cost <= FURTHER * least.get(on.replicas, math.inf):
                least[on.replicas] = cost
                kept.append((cost, on))
        kept.sort(key=lambda each: each[0])
        found += [(turn, name, on, cost) for turn, (cost, on) in enumerate(kept)]
    return [(name, on, cost) for _, name, on, cost in sorted(found, key=lambda each: each[0])]


def fastest(candidates: Sequence[Candidate], memory: float) -> float:
    """Seconds of the fastest candidate that fits; infinite if none fits."""
    return min((each.figures.seconds for each in fitting_first(candidates, memory)), default=math.inf)
