"""Turns the records of a scheduler into the result of a run, as of a simulation, and into jobs that can be simulated.

Knows records and results. Must not know policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vnode.cluster.events import Event
from vnode.cluster.job_figures import Result
from vnode.cluster.jobs import Job
from vnode.cluster.live.estimates import speeds_of
from vnode.cluster.live.event_log import Record
from vnode.cluster.live.event_store import read_records
from vnode.cluster.live.job_book import Book, LiveJob
from vnode.cluster.resize_costs import VNODE
from vnode.cluster.speeds import Speeds
from vnode.cluster.traces.job_trace import Trace


def result_of(records: Sequence[Record]) -> Result:
    """The events of a cluster, for figures and pictures. Times count from the first submission."""
    book = Book(records)
    jobs = list(book.jobs.values())
    first = min((job.submitted for job in jobs), default=0.0)
    events: list[Event] = []
    again = Book()
    for record in records:
        before = {job.id: len(job.devices) for job in again.active()}
        shares = {job.id: job.share for job in again.active()}
        again.add(record)
        at = record.time - first
        if record.kind == "decided":
            for name, share in record.facts["shares"].items():
                if share != shares.get(name, 0):
                    events.append(Event(at, "share", again.jobs[name].number, share))
            continue
        if record.job is None:
            continue
        job = again.jobs[record.job]
        if record.kind == "submitted":
            events.append(Event(at, "arrived", job.number))
        if record.kind == "ended":
            events.append(Event(at, "ended", job.number))
        elif record.kind == "trains":
            events.append(Event(at, "runs", job.number, job.trains))
        elif record.kind == "pending":
            events.append(Event(at, "runs", job.number, 0))
        elif record.kind == "starting" and job.submission.rigid:
            events.append(Event(at, "runs", job.number, len(job.devices)))
        if len(job.devices) != before.get(job.id, 0):
            events.append(Event(at, "holds", job.number, len(job.devices)))
    most = max(len(book.devices), 1)
    return Result([simulated(job, first, most) for job in jobs], most, events, book.policy)


def simulated(job: LiveJob, first: float, most: int) -> Job:
    """A job as a simulator takes it: with the speeds that were measured. A rigid one lasts as long as it did."""
    low, high = job.submission.range
    if job.submission.rigid:
        lasted = max((job.ended or job.submitted) - (job.started or job.submitted), 1e-3)
        speeds, work, high = Speeds((0.0,) * low + (1.0,)), lasted, low
    else:
        high = max(min(high, job.limit, most), 1)
        speeds, work = speeds_of(job, high), float(max(job.steps or job.step, 1))
    arrival, called = job.submitted - first, {"name": job.submission.title, "state": job.state}
    options = {"minimum": min(low, high), "priority": job.priority, "facts": called}
    if job.submission.rigid:
        options["start"] = 0.0
    return Job(id=job.id, arrival=arrival, work=work, speeds=speeds, demand=high, **options)


def trace_of(path: Path) -> Trace:
    """The jobs of a scheduler's file, to be simulated by other policies."""
    result = result_of(read_records(path))
    return Trace(list(result.jobs), result.devices, VNODE)
