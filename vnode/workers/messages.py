"""Turns events of a job's workers into messages for people.

Knows which facts help, and what to do. Must not know what is decided because of them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vnode.errors import WorkerError, layout_message

if TYPE_CHECKING:
    from vnode.workers.worker_process import Worker

SAME = (
    "have all workers use the same script, data and versions, and ask for workers again (vnode workers JOB N); "
    "or start the job again: it goes on from its checkpoint"
)
"""The remedy for a worker that differs from the others."""

RUN_ENDED = layout_message(
    "the run has ended; new workers cannot join the rest of the script.",
    remedies=["call vnode.elastic.run once in a script"],
)
"""The message of who asks for workers after the run."""

SHOWN_EVENTS = ("trains", "resize", "lost", "error", "refused", "stop", "left", "leaving", "gave up", "unprepared")
SHOWN_EVENTS += ("all repeated", "all replaced", "no checkpoints", "not replaced", "unsaved")
"""Events that are told while a job runs; all of them are in `vnode runs --events`."""

SHOWN = 8
"""Facts that differ, of which a message tells."""


def not_come(
    ready: int,
    wanted: int,
    missing: Iterable[Worker],
    lost: Mapping[int, int],
    refused: Mapping[int, str],
    start: float,
) -> str:
    """The message of workers that did not come to `run`.

    Args:
      ready: how many did.
      wanted: how many should have.
      missing: those that are there, and did not.
      lost: by number, how often a worker was lost that is not started again.
      refused: by number, why a worker was refused.
      start: seconds that a start may take.
    """
    facts = [
        f"worker {w.number} {w.why or w.doing} ({f'process {w.pid}' if w.pid else 'not connected yet'})"
        for w in missing
    ]
    facts += [f"worker {number} was lost {times} times" for number, times in sorted(lost.items())]
    facts += [f"worker {number} was refused: {why}" for number, why in sorted(refused.items())]
    return layout_message(
        f"Only {ready} of {wanted} workers have called vnode.elastic.run.",
        facts=facts,
        remedies=[
            "see what the workers printed: above, and in worker-*.err of the job's folder",
            f"if their start takes longer than {start:g} s: start_timeout=, --start-timeout",
            "have them use this version of vnode: an older one does not know workers",
        ],
    )


def ended_early(worker: Worker) -> str:
    """The message of a worker that failed before it came to `run`, or within the beginning of it."""
    return layout_message(
        f"Worker {worker.number} {ending(worker.code or 1)} before training began.",
        facts=[one_line(worker.error)] if worker.error else [],
        remedies=["see what it printed: above, and in worker-*.err of the job's folder"],
    )


def never_ran(worker: Worker) -> str:
    """The message of a script that does not call `run`."""
    return layout_message(
        f"Worker {worker.number} ended without a call of vnode.elastic.run.",
        facts=["its script ended with exit code 0"],
        remedies=[
            "call vnode.elastic.run(step, state, data) in the script",
            "or run it without workers; on a cluster: vnode submit --rigid",
        ],
    )


def ending(code: int) -> str:
    """The end of a process, as words that follow the name of its worker.

    >>> ending(-9), ending(1)
    ('was killed by SIGKILL', 'ended with exit code 1')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def one_line(text: str | None) -> str:
    """The first line of a text that is not empty; of a traceback the last, which is the error."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[0] if lines and not lines[0].startswith("Traceback") else lines[-1] if lines else ""


def is_out_of_memory(error: str) -> bool:
    """Whether an error says that there is no memory left, on a device or on the host.

    >>> is_out_of_memory("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory."), is_out_of_memory("ValueError")
    (True, False)
    """
    return "RESOURCE_EXHAUSTED" in error or error.startswith("MemoryError")


def difference(first: Worker, other: Worker) -> str:
    """The message of a worker that differs from the first; empty if it does not."""
    mine, its = ({**w.facts, "virtual_nodes": w.virtual_nodes} for w in (first, other))
    fields = [name for name in mine if name in its and mine[name] != its[name]]  # a fact may not be known to one
    if not fields:
        return ""
    known = f"worker {first.number}" if first.number != other.number else "the one before it"
    return layout_message(
        f"Worker {other.number} differs from {known} in {fields[0]}.",
        facts=[f"{name}: {mine[name]!r} in {known}, {its[name]!r} in it" for name in fields[:SHOWN]],
        remedies=[SAME],
    )


def other_script(worker: Worker) -> str:
    """The message of a worker that runs another script than those that it replaces."""
    return layout_message(
        f"Worker {worker.number} runs another version of the script than the workers before it.",
        remedies=["start the job again: it goes on from its checkpoint, with the script as it is now"],
    )


def too_few_nodes(nodes: int, workers: int) -> str:
    """The message of more workers than virtual nodes."""
    return layout_message(
        f"{workers} workers cannot share {nodes} virtual nodes: each needs at least one.",
        remedies=[f"ask for at most {nodes} workers", "or virtualize the step with more virtual_nodes"],
    )


def check_number(workers: int, most: int | None, nodes: int | None) -> None:
    """Makes sure that a job may have so many workers.

    Args:
      workers: how many are asked for.
      most: how many it may have; None for any number.
      nodes: virtual nodes of its step; None if they are not known yet.

    Raises:
      WorkerError: it may not.
    """
    if workers < 1:
        raise WorkerError(
            f"a job cannot have {workers} workers.",
            remedies=["ask for one or more", "to end the job with a checkpoint: job.stop(), or Ctrl-C"],
        )
    if most is not None and workers > most:
        raise WorkerError(
            f"this job may have {most} workers at most, not {workers}.",
            remedies=["start it with a larger max_workers (--max-workers)"],
        )
    if nodes is not None and workers > nodes:
        raise WorkerError(too_few_nodes(nodes, workers))


def last_unsaved(saver: Worker, folder: str) -> str:
    """The message of a run that has ended without the report of its last checkpoint."""
    return layout_message(
        "The run has ended, but its last checkpoint may be missing.",
        facts=[f"worker {saver.number}, which saves in {folder}, {saver.why}"],
        remedies=["start the job again: it goes on from the newest checkpoint"],
    )


def event_line(event: dict[str, Any]) -> str:
    """An event in a line; of a worker that is refused in several: what differs, and what to do.

    Example:
      >>> event_line({"event": "lost", "worker": 2, "step": 40, "why": "was killed by SIGKILL"})
      'worker 2: lost at step 40: was killed by SIGKILL'
    """
    text = event["event"] if event["worker"] is None else f"worker {event['worker']}: {event['event']}"
    if event["step"] is not None and event["step"] >= 0:
        text += f" at step {event['step']}"
    why = str(event["why"]) if event["event"] == "refused" else one_line(str(event["why"]))
    return f"{text}: {why}" if why else text
