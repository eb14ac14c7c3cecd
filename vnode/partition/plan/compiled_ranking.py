"""Candidates of a search -> the best one as compiled; only the most promising ones are compiled.

    ranking = CompiledRanking(machine, limit, target, until)
    best = ranking.best(pool)         # None if nothing that was compiled fits

The cost model is wrong by some tens of per cent, by a similar factor for plans of one kind. So a few candidates are
compiled, the most promising first, two at a time. After each pair, the model's figures of the other candidates are
corrected by the errors found. Candidates that nearly fit by the model, and would be faster, are compiled too. The order
depends on figures alone; time decides only where it stops.

Knows candidates, figures and compilers. Must not know how candidates are found.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence

from vnode.errors import VnodeError
from vnode.partition.compiler.pool import CORES, CompileJob, CompilePool
from vnode.partition.machine import Machine
from vnode.partition.plan.candidates import EXPERTS, Candidate
from vnode.partition.plan.compiled_figures import figures_as_compiled
from vnode.partition.plan.plan import Plan
from vnode.partition.plan.predict import Figures
from vnode.partition.plan.remedies import plan_title
from vnode.show.units import size

TOGETHER = 2
"""Number of candidates that are compiled before the next ones are chosen."""

LEAST, MOST = 3, 6
"""The fewest candidates that are compiled, if the compiler estimates times, and the most."""

NEAR = 1.5
"""The factor on the limit up to which a candidate's modelled memory lets it be compiled, before any correction."""

CLOSE = 1.1
"""The same once the model's figures are corrected."""

HOPELESS = 2.0
"""An expert's candidate is compiled in any case up to this factor on the best candidate's time, both by the model: the
model's error may differ for it."""


@dataclasses.dataclass(eq=False)
class Entry:
    """A candidate that may be compiled.

    Attributes:
      candidate: the candidate.
      plan: makes its plan.
      job: its compilation, if begun.
      figures: its figures as compiled, once known.
    """

    candidate: Candidate
    plan: Callable[[], Plan]
    job: CompileJob | None = None
    figures: Figures | None = None

    @property
    def kind(self) -> str:
        """The candidate's kind: its name, without the sharding of the state over replicas."""
        return kind_of(self.candidate.name)

    @property
    def title(self) -> str:
        """Its name and mesh."""
        return plan_title(self.candidate.name, self.candidate.mesh)


@dataclasses.dataclass
class CompiledRanking:
    """Compiles candidates and compares them by the compiler's figures.

    Attributes:
      machine: the machine.
      limit: bytes that one device may hold.
      pool: the pool of compilations.
      until: the deadline, by `time.monotonic`.
      tried: the entries whose compilation was begun, in order.
      said: a line for each entry that was not compiled, or does not fit.
      early: the entries that are compiled during the search.
      interrupted: whether Ctrl-C ended it.
    """

    machine: Machine
    limit: int
    pool: CompilePool
    until: float
    tried: list[Entry] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)
    early: list[Entry] = dataclasses.field(default_factory=list)
    interrupted: bool = False

    def best(self, entries: Sequence[Entry]) -> Entry | None:
        """The fastest that fits as compiled; None if none does.

        Args:
          entries: the entries that may be compiled.
        """
        waiting = [each for each in entries if each not in self.early]
        first, self.early = self.early, []
        while batch := [*first, *(each for each in self.batch(waiting) if each not in first)]:
            first = []
            try:
                self.compile(batch)
            except KeyboardInterrupt:
                self.interrupted = True
                self.said.append("compiling was interrupted")
                break
            waiting = [each for each in waiting if each not in batch]
            if any(each.job is None or not each.job.done for each in batch):
                break  # time is over
        return self.fastest()

    @property
    def is_finished(self) -> bool:
        """Whether there is no time left, or enough was compiled."""
        return time.monotonic() >= self.until or len(self.tried) >= MOST

    def memory_allowed(self) -> int:
        """The modelled bytes up to which candidates fit as compiled."""
        known = [each for each in self.tried if each.figures is not None]
        shares = [each.candidate.figures.memory / each.figures.memory for each in known if each.figures]
        return int(self.limit * max(shares, default=1.0))

    def begin(self, each: Entry) -> None:
        """Begins to compile an expert's candidate during the search, if there are cores for both."""
        if each.candidate.figures.memory <= NEAR * self.limit and (os.cpu_count() or 1) > CORES:
            self.early.append(each)
            self.submit(each)

    def fastest(self) -> Entry | None:
        """The best so far."""
        fits = [each for each in self.tried if each.figures is not None and each.figures.memory <= self.limit]
        return min(fits, key=lambda each: each.figures.seconds if each.figures else math.inf, default=None)

    def batch(self, waiting: Sequence[Entry]) -> list[Entry]:
        """The next entries to compile; empty if none can be better than the best so far.

        Args:
          waiting: the entries that were not compiled.
        """
        compiled = [each for each in self.tried if each.figures is not None]
        best = self.fastest()
        slack = CLOSE if compiled else NEAR
        near = [each for each in waiting if self.memory(each) <= slack * self.limit]
        near.sort(key=lambda each: (self.seconds(each), self.memory(each)))
        if len(self.tried) >= MOST or not near:
            return []
        if not self.tried:
            # the fastest that fits by the model, and one that would be faster if it fitted, or an expert's: the model
            # may be wrong about what it ranks first
            fits = [each for each in near if self.memory(each) <= self.limit]
            others = [each for each in near if fits and each.kind != fits[0].kind and each.kind in EXPERTS]
            return list(dict.fromkeys([*fits[:1], *near[:1], *others[:1], *near[1:2]]))[:TOGETHER]
        if best is None or best.figures is None:
            return near[:TOGETHER]
        enough = HOPELESS * best.candidate.figures.seconds
        known = {each.kind for each in self.tried}
        of_kind: dict[str, Entry] = {}
        for each in near:
            if each.kind in EXPERTS and each.kind not in known and each.candidate.figures.seconds <= enough:
                of_kind.setdefault(each.kind, each)
        experts = [*of_kind.values()]
        better = [each for each in near if self.seconds(each) < best.figures.seconds]
        if not best.figures.timed:  # times are the model's: only candidates that it has as faster can be better
            return better[:TOGETHER]
        wanted = [*experts, *better, *near[: max(LEAST - len(self.tried), 0)]]
        return list(dict.fromkeys(wanted))[:TOGETHER]

    def compile(self, batch: Collection[Entry]) -> None:
        """Compiles candidates while there is time."""
        for each in batch:
            self.tried.append(each)
            if each.job is None:
                self.submit(each)
        self.pool.wait([each.job for each in batch if each.job is not None], self.until)
        for each in batch:
            job = each.job
            if job is None:
                continue
            if job.stats is not None:
                order = self.machine.mesh(each.candidate.mesh).devices
                each.figures = figures_as_compiled(each.candidate.figures, job.stats, self.machine, order)
                if each.figures.memory > self.limit:
                    self.said.append(f"{each.title}: compiled {size(each.figures.memory)}")
            elif job.refused:
                needed = max(job.needed or 0, self.limit + 1)
                each.figures = dataclasses.replace(
                    each.candidate.figures, temporary=needed, arguments=0, results=0, source="compiled"
                )
                self.said.append(f"{each.title}: {job.outcome}")
            else:
                self.said.append(f"{each.title}: {job.outcome}")

    def submit(self, each: Entry) -> None:
        """Begins to compile a candidate."""
        try:
            plan = each.plan()
            lowered = plan.step(self.pool.target.devices).executor.lower_for(plan.args, {})
        except VnodeError as error:
            self.said.append(f"{each.title}: {str(error).splitlines()[0]}")
            return
        each.job = self.pool.submit(lowered, each.candidate.prediction.iterations)

    def ratio(self, each: Entry, what: Callable[[Figures], float]) -> float:
        """The median ratio of compiled to modelled figures of candidates of one name, else of all; 1 without any."""
        known = [entry for entry in self.tried if entry.figures is not None]
        alike = [entry for entry in known if entry.candidate.name == each.candidate.name] or known
        pairs = [(what(entry.figures), what(entry.candidate.figures)) for entry in alike if entry.figures]
        return statistics.median([a / b for a, b in pairs if b > 0] or [1.0])

    def memory(self, each: Entry) -> float:
        """Bytes of a candidate by the corrected model."""
        return each.candidate.figures.memory * self.ratio(each, lambda figures: figures.memory)

    def seconds(self, each: Entry) -> float:
        """Seconds of a candidate by the corrected model."""
        return each.candidate.figures.seconds * self.ratio(each, lambda figures: figures.seconds)


def kind_of(name: str) -> str:
    """A candidate's kind: its name, without the sharding of the state over replicas.

    >>> kind_of("Megatron-style + ZeRO")
    'Megatron-style'
    """
    return name.split(" + ")[0]
