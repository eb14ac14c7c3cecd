"""`vnode runs`: the jobs of this user on this machine, and what happened to them.

Knows how jobs are shown. Must not know how they run.

    PID   WORKERS  STEP  SINCE                FOLDER
    4711  3        1200  2026-01-01 12:00:00  /home/me/runs/7
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from typing import Any

from vnode.errors import WorkerError
from vnode.workers.job_registry import Found, jobs
from vnode.workers.messages import event_line
from vnode.workers.supervisor_client import request

HEADS = ("PID", "WORKERS", "STEP", "SINCE", "FOLDER")


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser("runs", help="jobs on this machine")
    parser.add_argument("--json", action="store_true", help="as JSON, of those that run")
    parser.add_argument("--events", action="store_true", help="what happened to them; with --json as lines of JSON")
    parser.set_defaults(execute=execute)


def execute(chosen: argparse.Namespace) -> int:
    """Runs the command: 0, or 1 if the folder of jobs cannot be read."""
    try:
        found = jobs()
    except WorkerError as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 1
    if chosen.events:
        for job in reversed(found):
            show_events(job, chosen.json)
    elif chosen.json:
        print(json.dumps([described(job) for job in found if job.runs]))
    else:
        rows = [HEADS, *(row(job) for job in found)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
        for cells in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    return 0


def described(job: Found) -> dict[str, Any]:
    """A running job, as ``vnode runs --json`` lists it."""
    try:
        status = request(job, "status")
    except WorkerError:  # it has just ended, or is stopped
        status = {"step": None, "workers": []}
    workers = [{key: worker[key] for key in ("rank", "pid", "nodes")} for worker in status["workers"]]
    return {"folder": job.name, "pid": job.facts["pid"], "step": status["step"], "workers": workers}


def row(job: Found) -> tuple[str, ...]:
    """A job, as ``vnode runs`` lists it."""
    since = clock(str(job.facts.get("since")))
    if job.runs:
        said = described(job)
        workers, step = str(len(said["workers"])), said["step"]
    else:
        code = job.facts.get("code")
        workers, step = "killed" if code is None else f"ended ({code})", job.facts.get("step")
    return str(job.facts.get("pid")), workers, "" if step is None else str(step), since, job.name


def clock(time: str) -> str:
    """A recorded time as a time of day where it is read.

    >>> clock("never")
    'never'
    """
    try:
        return datetime.datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return time


def show_events(job: Found, as_json: bool) -> None:
    """Prints the events of a job."""
    if not as_json:
        print(f"{job.name} (process {job.facts.get('pid')}, {job.facts.get('script')})")
    for event in job.events():
        if as_json:
            print(json.dumps({"folder": job.name, "pid": job.facts.get("pid"), **event}))
        else:
            clock = datetime.datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S.%f")[:-3]
            print(f"  {clock}  {event_line(event)}")
