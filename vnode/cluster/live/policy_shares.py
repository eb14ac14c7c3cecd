"""Turns the jobs of a book into shares by a policy, with a reason for each change.

Knows policies and their tables. Must not know how shares are carried out.

A decision depends on the book, the policy and the time alone: `replay` makes all decisions of a log again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vnode.cluster.jobs import PENDING, RESIZING, RUNNING, STARTING, Job, Jobs
from vnode.cluster.live.estimates import remaining_of, speeds_of
from vnode.cluster.live.event_log import Record
from vnode.cluster.live.job_book import Book, LiveJob, counts_of, least
from vnode.cluster.policies import POLICIES, named
from vnode.cluster.resize_costs import VNODE
from vnode.cluster.simulator import Decision, Policy, as_array, table_of, time_of
from vnode.errors import ClusterError

STATES = {"pending": PENDING, "starting": STARTING, "running": RUNNING, "resizing": RESIZING}


@dataclasses.dataclass(frozen=True)
class Decided:
    """A decision.

    Attributes:
      shares: devices by job, of all jobs that have not ended.
      again: when to decide again, if nothing happens before; in seconds since 1970.
    """

    shares: Mapping[str, int]
    again: float | None = None


def policy_of(name: str, options: Mapping[str, Any]) -> Policy:
    """The policy of a scheduler, made anew for each decision: it remembers nothing.

    Raises:
      ClusterError: there is none of that name, or it is not for one kind of device.
    """
    inner = options.get("inner", "goodput")
    if bad := [each for each in (name, inner) if each not in POLICIES and not (each == name == "guarantee")]:
        raise ClusterError(
            f"a scheduler has no policy {bad[0]!r}.",
            facts=["it has devices of one kind"],
            remedies=[f"use one of {', '.join([*POLICIES, 'guarantee'])}"],
        )
    return named(name, costs=VNODE, factor=options.get("factor", 1.1), inner=inner)


def decide(book: Book, policy: Policy, time: float) -> Decided:
    """Asks a policy.

    Rigid jobs keep their devices once they have them: the policy shares the others. A job that needs more than these
    waits. A share that a job cannot use, as it needs more or the scheduler has other counts, is changed (`usable`).

    Args:
      book: the jobs.
      policy: decides.
      time: in seconds since 1970.

    Raises:
      ClusterError: the policy fails, or decides what cannot be.
    """
    active = book.active()
    shares = {job.id: len(job.devices) if job.keeps else 0 for job in active}
    there = len(book.devices) - sum(shares.values())
    asked = [job for job in active if not job.keeps and not job.cancel and least(book, job) <= there]
    if not asked or there < 1:
        return Decided(shares)
    assert book.epoch is not None
    try:
        jobs = table(book, asked, time)
        jobs.look_back = lambda: table(book, list(book.jobs.values()), time)
        found = policy(time - book.epoch, jobs, there)
        again = None
        if isinstance(found, Decision):
            found, again = found.shares, time_of(found.again)
        given = as_array(found, jobs)
        if given.sum() > there or (given < 0).any():
            raise ValueError(f"it gives {given.tolist()} of {there} devices")
    except Exception as error:
        raise ClusterError(f"the policy fails: {type(error).__name__}: {error}") from error
    wanted = {job.id: share for job, share in zip(asked, given.tolist(), strict=True) if share}
    shares |= usable(book, wanted, there)
    again = None if again is None else again + book.epoch
    return Decided(shares, again if again is not None and again > time else None)


def usable(book: Book, given: Mapping[str, int], devices: int) -> dict[str, int]:
    """Fits the shares of a policy to the numbers of devices that jobs can use.

    Each job that is given something gets the least that it needs, as far as there are devices: those that run first,
    then by priority and arrival. The devices that are left raise them to the policy's shares. Nothing changes where all
    jobs can use their shares.

    Args:
      book: the jobs.
      given: devices by job; none of them is 0.
      devices: how many there are.
    """
    jobs = sorted((book.jobs[name] for name in given), key=lambda job: (not job.share, -job.priority, job.number))
    found, left = {}, devices
    for job in jobs:
        needed = least(book, job)
        found[job.id] = needed if needed <= left else 0
        left -= found[job.id]
    for job in jobs:
        if found[job.id]:
            counts = [count for count in counts_of(book, job) if count <= min(given[job.id], found[job.id] + left)]
            more = max([found[job.id], *counts[-1:]])
            left -= more - found[job.id]
            found[job.id] = more
    return found


def table(book: Book, jobs: Sequence[LiveJob], time: float) -> Jobs:
    """The table of jobs that a policy reads, in the order of submission."""
    most = len(book.devices)
    assert book.epoch is not None
    asked = []
    for job in jobs:
        low = min(job.submission.range[0], job.limit, most)
        demand = max(min(job.submission.range[1], job.limit, most), 1)
        asked.append(
            Job(
                id=job.id,
                arrival=job.submitted - book.epoch,
                work=float(max(job.steps or 0, job.step + remaining_of(job))),
                speeds=speeds_of(job, demand),
                demand=demand,
                minimum=max(low, 1),
                priority=job.priority,
            )
        )
    found = table_of(asked, VNODE, {"": most})
    found.rank[:] = [job.number for job in jobs]
    found.share[:] = [min(job.share, each.demand) for job, each in zip(jobs, asked, strict=True)]
    found.state[:] = [STATES.get(job.state, PENDING) for job in jobs]
    found.remaining[:] = [remaining_of(job) for job in jobs]
    ended = [np.nan if job.ended is None else job.ended - book.epoch for job in jobs]
    found.ended[:] = ended
    return found


def reasons(book: Book, shares: Mapping[str, int], causes: Iterable[str]) -> dict[str, str]:
    """Why shares change, by job, for people.

    Args:
      book: with the shares before.
      shares: after.
      causes: what has happened since the last decision.
    """
    cause = "; ".join(dict.fromkeys(causes)) or "time has passed"
    found = {}
    for name, share in shares.items():
        before = book.jobs[name].share
        if share != before:
            gone = "stops" if book.jobs[name].devices else "waits"
            word = "starts on" if not before else gone if not share else "grown" if share > before else "shrunk"
            change = f"{word} {share}" if not before else word if not share else f"{word} {before} -> {share}"
            found[name] = f"{change}: {cause}"
    return found


def replay(records: Iterable[Record], policy: Policy | None = None) -> Iterator[tuple[Record, Decided]]:
    """Makes the decisions of a log again.

    Args:
      records: of a scheduler.
      policy: the function that decided, if it was none of vnode's.

    Yields:
      Each record of a decision, with the decision that the same policy makes in its place.
    """
    book = Book()
    for record in records:
        if record.kind == "decided":
            yield record, decide(book, policy or policy_of(book.policy, book.options), record.time)
        book.add(record)
