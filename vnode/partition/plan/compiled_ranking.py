"""Candidates of a search -> the best one as compiled; only the most promising ones are compiled.

    ranking = CompiledRanking(machine, limit, pool, until)
    best = ranking.best(entries)         # None if nothing that was compiled fits

The cost model is wrong by some tens of per cent, by a similar factor for plans of one kind. So a few candidates are
compiled, and the model's figures of the others are corrected by the errors found. Candidates that nearly fit by the
model, and would be faster, are compiled too. The order depends on figures alone; time decides only where it stops.

Where the compiler is slow (TPUs), the best candidate of each kind is first compiled with few optimizations: a draft.
Drafts of one step compare with each other much as the optimized programs do, so that only the first by its draft, and
those near it, are compiled with all optimizations.

Knows candidates, figures and compilers. Must not know how candidates are found.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence

import jax

from vnode.errors import VnodeError
from vnode.partition.compiler.pool import CORES, CompileJob, CompilePool, usable_cores
from vnode.partition.machine import Machine
from vnode.partition.plan.candidates import EXPERTS, Candidate, kind_of
from vnode.partition.plan.compiled_figures import figures_as_compiled
from vnode.partition.plan.plan import Plan
from vnode.partition.plan.predict import Figures
from vnode.show.units import size

TOGETHER = 2
"""Number of candidates that are compiled before the next ones are chosen."""

LEAST, MOST = 3, 6
"""The fewest candidates that are compiled, if the compiler estimates times, and the most."""

DRAFTS, MOST_AFTER_DRAFTS = 6, 3
"""The most drafts, and the most candidates that are compiled with all optimizations after drafts."""

FULL_TO_DRAFT = 5.0
"""The factor on the seconds of a draft that a compilation with all optimizations takes, for TPUs."""

NEAR = 1.5
"""The factor on the limit up to which a candidate's modelled memory lets it be compiled, before any correction."""

CLOSE = 1.1
"""The same once the model's figures are corrected."""

HOPELESS = 2.0
"""An expert's candidate is compiled in any case up to this factor on the best candidate's time, both by the model: the
model's error may differ for it."""

TRUSTED = 1.25
"""An expert's candidate is compiled first up to this factor on the best candidate's time, both by the model. The search
minimizes the model, so its solution is where the model errs most: 24 layers on eight v5e chips took 1.21 times what the
model said of the solution, and 1.01 times what it said of FSDP. If time ends after one compilation, it is that of a
plan whose figures hold.
"""

ALIKE = 1.15
"""Two times whose ratio is smaller are not told apart by drafts: the ratio of drafts to optimized programs of one step
varied by 5 to 25 % (four models on v5e)."""


FULL, DRAFT = "compiled", "draft"
"""Sources of figures: a compilation with all optimizations, or with few."""


@dataclasses.dataclass(eq=False)
class Entry:
    """A candidate that may be compiled.

    Attributes:
      candidate: the candidate.
      plan: makes its plan.
      jobs: its compilations that were begun, by source: ``"compiled"``, with all optimizations, or ``"draft"``.
      known: its figures by these, once known.
      program: its program, lowered for the devices of the pool, once it is.
    """

    candidate: Candidate
    plan: Callable[[], Plan]
    jobs: dict[str, CompileJob] = dataclasses.field(default_factory=dict)
    known: dict[str, Figures] = dataclasses.field(default_factory=dict)
    program: jax.stages.Lowered | None = None

    @property
    def figures(self) -> Figures | None:
        """Its figures as compiled with all optimizations, once known."""
        return self.known.get(FULL)

    @property
    def draft(self) -> Figures | None:
        """Its figures as its draft has them, once known."""
        return self.known.get(DRAFT)

    @property
    def kind(self) -> str:
        """The candidate's kind: its name, without the sharding of the state over replicas."""
        return kind_of(self.candidate.name)

    @property
    def expected(self) -> Figures:
        """Its figures before it is compiled: those of its draft, or else the model's."""
        return self.draft or self.candidate.figures


@dataclasses.dataclass
class CompiledRanking:
    """Compiles candidates and compares them by the compiler's figures.

    Attributes:
      machine: the machine.
      limit: bytes that one device may hold.
      pool: the pool of compilations.
      until: the deadline, by `time.monotonic`.
      tried: the entries whose compilation with all optimizations was begun, in order.
      drafted: the entries whose draft was begun.
      said: a line for each entry that was not compiled, or does not fit.
      interrupted: whether Ctrl-C ended it.
    """

    machine: Machine
    limit: int
    pool: CompilePool
    until: float
    tried: list[Entry] = dataclasses.field(default_factory=list)
    drafted: list[Entry] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)
    interrupted: bool = False

    def best(self, entries: Sequence[Entry]) -> Entry | None:
        """The fastest that fits as compiled, or as its draft if no candidate was compiled in time; None if none does.

        Args:
          entries: the entries that may be compiled.
        """
        waiting, over = [each for each in entries if each not in self.tried], False
        first = [each for each in waiting if each.jobs and each not in self.drafted]  # begun during the search
        try:
            if self.pool.target.has_drafts:
                near = self.nearly_fitting(waiting)
                others = [each for each in self.promising(near) if DRAFT not in each.jobs] if near else []
                over, first = not self.compile_drafts([*first, *others][:DRAFTS]), []
            while not over and (batch := [*first, *(each for each in self.batch(waiting) if each not in first)]):
                first = []
                self.tried += batch
                over = not self.compile(batch, FULL)
                waiting = [each for each in waiting if each not in batch]
        except KeyboardInterrupt:
            self.interrupted = True
            self.said.append("compiling was interrupted")
        best = self.fastest(FULL)
        if best is None and (over or self.interrupted):
            best = self.fastest(DRAFT)
            if best is not None:
                self.said.append("figures of drafts: no candidate that fits was compiled in full in time")
        return best

    @property
    def is_finished(self) -> bool:
        """Whether there is no time left, or enough was compiled."""
        return time.monotonic() >= self.until or len(self.tried) >= self.most

    @property
    def most(self) -> int:
        """The most candidates that are compiled with all optimizations."""
        return MOST_AFTER_DRAFTS if self.drafted else MOST

    @property
    def is_answered(self) -> bool:
        """Whether the compiler has said anything."""
        return any(each.figures or each.draft for each in (*self.tried, *self.drafted))

    def memory_allowed(self) -> int:
        """The modelled bytes up to which candidates fit as compiled."""
        known = [(each.candidate.figures, each.figures or each.draft) for each in (*self.tried, *self.drafted)]
        shares = [modelled.memory / compiled.memory for modelled, compiled in known if compiled]
        return int(self.limit * max(shares, default=1.0))

    def begin(self, each: Entry) -> None:
        """Begins to compile an expert's candidate during the search, if there are cores for both."""
        if each.candidate.figures.memory <= NEAR * self.limit and usable_cores() > CORES:
            self.submit(each, DRAFT if self.pool.target.has_drafts else FULL)

    def fastest(self, source: str) -> Entry | None:
        """The fastest that fits by figures of a source; None if none fits."""
        began = self.tried if source == FULL else self.drafted
        fits = [each for each in began if source in each.known and each.known[source].memory <= self.limit]
        return min(fits, key=lambda each: each.known[source].seconds, default=None)

    def promising(self, near: Collection[Entry]) -> list[Entry]:
        """The order in which candidates are compiled.

        An expert's that fits and is nearly the fastest by the model, the fastest that fits, the fastest of all, of each
        untried expert the best, then the next ones.

        Args:
          near: the entries that were not compiled and nearly fit; not empty.
        """
        order = sorted(near, key=lambda each: (self.memory(each) > self.limit, self.seconds(each), self.memory(each)))
        faster, most = sorted(near, key=self.seconds)[:1], TRUSTED * self.seconds(order[0])
        fits = [each for each in order if self.memory(each) <= self.limit]
        trusted = [each for each in fits if each.kind in EXPERTS and self.seconds(each) <= most][:1]
        return [*dict.fromkeys([*trusted, order[0], *faster, *self.experts(order), *order])]

    def experts(self, near: Collection[Entry]) -> list[Entry]:
        """Of each kind of expert of which none was compiled the first, unless it is hopeless by the model."""
        least = min(each.candidate.figures.seconds for each in (*near, *self.tried))
        found = {each.kind: each for each in self.tried}
        for each in near:
            if each.kind in EXPERTS and each.candidate.figures.seconds <= HOPELESS * least:
                found.setdefault(each.kind, each)
        return [each for each in found.values() if each not in self.tried]

    def nearly_fitting(self, waiting: Sequence[Entry]) -> list[Entry]:
        """Those of some entries that nearly fit by their corrected memory, the fastest first."""
        near = [each for each in waiting if self.memory(each) <= (CLOSE if self.known(each) else NEAR) * self.limit]
        return sorted(near, key=lambda each: (self.seconds(each), self.memory(each)))

    def batch(self, waiting: Sequence[Entry]) -> list[Entry]:
        """The next entries to compile; empty if none can be better than the best so far.

        Args:
          waiting: the entries that were not compiled.
        """
        near, best = self.nearly_fitting(waiting), self.fastest(FULL)
        if len(self.tried) >= self.most or not near:
            return []
        drafts = [each for each in near if each.draft is not None]
        if drafts:
            least = min(self.seconds(drafts[0]), best.figures.seconds if best and best.figures else math.inf)
            return [each for each in drafts if self.seconds(each) < ALIKE * least][:TOGETHER]
        if best is None or best.figures is None:
            return self.promising(near)[:TOGETHER]
        wanted = [each for each in near if self.seconds(each) < best.figures.seconds]
        if best.figures.timed:  # else times are the model's: only candidates that it has as faster can be better
            wanted = [*self.experts(near), *wanted, *near[: max(LEAST - len(self.tried), 0)]]
        return list(dict.fromkeys(wanted))[:TOGETHER]

    def compile_drafts(self, drafts: Sequence[Entry]) -> bool:
        """Compiles drafts, in order, but leaves time to compile the best one in full; returns whether all have ended.

        If the time is too short for that in any case, it goes into more drafts.
        """
        for start in range(0, len(drafts), TOGETHER):
            began, batch = time.monotonic(), drafts[start : start + TOGETHER]
            self.drafted += batch
            if not self.compile(batch, DRAFT):
                return False
            took = time.monotonic() - began
            rest, left = drafts[start + TOGETHER :], self.until - time.monotonic()
            if rest and left - took < FULL_TO_DRAFT * took / len(batch) <= left:
                self.said += [f"{each.candidate.title}: no draft, for lack of time" for each in rest]
                break
        return True

    def compile(self, batch: Collection[Entry], source: str) -> bool:
        """Compiles candidates, or their drafts, while there is time; returns whether all have an answer."""
        for each in batch:
            if source not in each.jobs:
                self.submit(each, source)
        jobs = [(each, each.jobs[source]) for each in batch if source in each.jobs]
        self.pool.wait([job for _, job in jobs], self.until)
        for each, job in jobs:
            figures = self.figures(each, job, source)
            if figures is not None:
                each.known[source] = figures
            if source == FULL and job.stats is None:
                self.said.append(f"{each.candidate.title}: {job.outcome}")
            elif source == FULL and figures is not None and figures.memory > self.limit:
                self.said.append(f"{each.candidate.title}: compiled {size(figures.memory)}")
        return all(job.done for _, job in jobs)

    def figures(self, each: Entry, job: CompileJob, source: str) -> Figures | None:
        """The figures of a candidate as compiled; None if the compiler gave none."""
        if job.stats is not None:
            order = self.machine.mesh(each.candidate.mesh).devices
            return figures_as_compiled(each.candidate.figures, job.stats, self.machine, order, source)
        if not job.refused:
            return None
        needed = max(job.needed or 0, self.limit + 1)
        return dataclasses.replace(each.candidate.figures, temporary=needed, arguments=0, results=0, source=source)

    def submit(self, each: Entry, source: str) -> None:
        """Begins to compile a candidate, or its draft."""
        try:
            plan, program = each.plan(), each.program
            if program is None:
                program = each.program = plan.step(self.pool.target.devices).executor.lower_for(plan.args, {})
        except VnodeError as error:
            self.said.append(f"{each.candidate.title}: {str(error).splitlines()[0]}")
            return
        each.jobs[source] = self.pool.submit(program, each.candidate.prediction.iterations, draft=source == DRAFT)

    def known(self, each: Entry) -> list[tuple[Figures, Figures]]:
        """Compiled figures with those expected before, of candidates of one name, else of all.

        Those of drafts correct drafts, and those of the model correct the model.
        """
        alike = [entry for entry in self.tried if entry.figures and bool(entry.draft) == bool(each.draft)]
        alike = [entry for entry in alike if entry.candidate.name == each.candidate.name] or alike
        return [(entry.figures, entry.expected) for entry in alike if entry.figures]

    def ratio(self, each: Entry, what: Callable[[Figures], float]) -> float:
        """The median ratio of compiled to expected figures; 1 without any."""
        pairs = [(what(compiled), what(expected)) for compiled, expected in self.known(each)]
        return statistics.median([a / b for a, b in pairs if b > 0] or [1.0])

    def memory(self, each: Entry) -> float:
        """Bytes that a candidate is expected to take, corrected."""
        return each.expected.memory * self.ratio(each, lambda figures: figures.memory)

    def seconds(self, each: Entry) -> float:
        """Seconds that a candidate is expected to take, corrected."""
        return each.expected.seconds * self.ratio(each, lambda figures: figures.seconds)
