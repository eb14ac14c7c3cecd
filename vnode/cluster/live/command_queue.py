"""`vnode queue` and `vnode status ID`: the jobs of a scheduler, and one of them with what was decided about it.

TIME is that since a job first had devices; of a job that never had any, since it was submitted.

Knows how jobs are shown in a terminal. Must not know how they run.

    ID  NAME  STATE    PRIORITY  WORKERS     STEP      STEPS/S  TIME   WHY
    7   lm    running  5         4 of 1:8    120/1000  2.1      1:04
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Mapping
from typing import Any

from vnode.cluster.live.arguments import add_state
from vnode.cluster.live.cluster_view import look_at, read_cluster
from vnode.cluster.live.status_data import to_json
from vnode.cluster.live.submission import printable
from vnode.errors import ClusterError

HEADS = ("ID", "NAME", "STATE", "PRIORITY", "WORKERS", "STEP", "STEPS/S", "TIME", "WHY")
ENDED = 10
"""Jobs that have ended which the table shows."""

SECONDS = 0.5
"""Between two pictures of `--watch`."""


def add_parser(commands: Any) -> None:
    """Adds the commands to the command line."""
    queue = commands.add_parser(
        "queue", help="the jobs of the scheduler", description="TIME is that since a job first had devices."
    )
    queue.add_argument("--json", action="store_true", help="all that is known, as JSON")
    queue.add_argument("--all", action="store_true", help=f"also those that ended before the last {ENDED}")
    queue.add_argument("--watch", action="store_true", help="go on showing them; needs rich")
    add_state(queue)
    queue.set_defaults(execute=execute_queue)
    status = commands.add_parser("status", help="one job, and what was decided about it")
    status.add_argument("job", metavar="ID", help="or its name")
    status.add_argument("--json", action="store_true", help="as JSON")
    add_state(status)
    status.set_defaults(execute=execute_status)


def execute_queue(chosen: argparse.Namespace) -> int:
    """Runs `queue`: 0, or 1 if there is nothing to ask."""
    try:
        if chosen.watch:
            return watch(chosen.state, chosen.all)
        found, runs = read_cluster(chosen.state, None if chosen.json or chosen.all else ENDED)
    except ClusterError as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(to_json(found))
        return 0
    lines = [HEADS, *(cells(job, found["cluster"]["now"]) for job in listed_jobs(found, chosen.all))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(summary(found, runs), file=sys.stderr)
    return 0


def execute_status(chosen: argparse.Namespace) -> int:
    """Runs `status`: 0, or 1 if there is no such job."""
    try:
        job = look_at(chosen.state, chosen.job)
    except ClusterError as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(to_json(job))
        return 0
    low, high = job["workers"]
    code = "" if job["code"] is None or job["state"] == "cancelled" else f" (exit code {job['code']})"
    facts = [
        ("job", f"{job['id']}  {job['name']}"),
        ("state", f"{job['state']}{code}"),
        ("command", " ".join(job["command"])),
        ("priority", f"{job['priority']:g}"),
        ("workers", f"{len(job['devices'])} of {low}:{high}" + (", rigid" if job["rigid"] else "")),
        ("devices", " ".join(job["devices"]) or "none"),
        ("step", steps(job) or "not known"),
        ("metrics", "  ".join(f"{name} {value:.6g}" for name, value in job["metrics"].items())),
        ("submitted", clock(job["submitted"])),
        ("started", clock(job["started"])),
        ("ended", clock(job["ended"])),
        ("output", job["folder"]),
    ]
    for name, value in facts:
        if value:
            print(f"{name:<10} {printable(value)}")
    for decision in job["decisions"]:
        print(f"  {clock(decision['time'])}  {printable(decision['why'])}")
    if job["why"]:
        print("", *map(printable, job["why"].splitlines()), sep="\n")
    return 0


def listed_jobs(found: Mapping[str, Any], everything: bool) -> list[dict[str, Any]]:
    """The jobs that are listed: those that have not ended, and the last that have."""
    ended = sorted((job for job in found["jobs"] if job["ended"] is not None), key=lambda job: job["ended"])
    kept = {job["id"] for job in (ended if everything else ended[-ENDED:])}
    return [job for job in found["jobs"] if job["ended"] is None or job["id"] in kept]


def cells(job: Mapping[str, Any], now: float) -> tuple[str, ...]:
    """A job as a line of the table."""
    low, high = job["workers"]
    asked = str(low) if low == high else f"{low}:{high}"
    held = f"{len(job['devices'])} of {asked}" if job["ended"] is None else asked
    speed = "" if job["steps_per_second"] is None else f"{job['steps_per_second']:.3g}"
    lines = job["why"].strip().splitlines() or [""]
    why = printable(lines[-1 if any(line.startswith("Traceback") for line in lines) else 0][:60])
    since = (job["ended"] or now) - (job["started"] or job["submitted"])
    return (
        job["id"],
        printable(job["name"]),
        job["state"],
        f"{job['priority']:g}",
        held,
        steps(job),
        speed,
        duration(since),
        why,
    )


def steps(job: Mapping[str, Any]) -> str:
    """The progress of a job.

    >>> steps({"step": 12, "steps": 40}), steps({"step": 12, "steps": None}), steps({"step": None, "steps": 40})
    ('12/40', '12', '')
    """
    if job["step"] is None:
        return ""
    return str(job["step"]) if job["steps"] is None else f"{job['step']}/{job['steps']}"


def duration(seconds: float) -> str:
    """Seconds as people read them.

    >>> duration(64), duration(3_700)
    ('1:04', '1:01:40')
    """
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clock(seconds: float | None) -> str:
    """A time of the day."""
    return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def summary(found: Mapping[str, Any], runs: bool) -> str:
    """A line about all."""
    cluster = found["cluster"]
    used = len(cluster["devices"]) - len(cluster["free"])
    there = "" if runs else f"; no scheduler runs: vnode cluster serve --state {cluster['state']}"
    return f"{used} of {len(cluster['devices'])} devices in use, policy {cluster['policy']}{there}"


def watch(state: str | None, everything: bool) -> int:
    """Shows the jobs until Ctrl-C."""
    try:
        import rich.table
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text
    except ImportError as error:
        raise ClusterError("--watch needs rich: pip install 'vnode[cluster]'") from error
    if not sys.stdout.isatty():
        raise ClusterError("--watch needs a terminal; without one, call vnode queue repeatedly")
    colours = {"running": "green", "resizing": "yellow", "starting": "yellow", "failed": "red", "cancelled": "dim"}
    with Live(screen=False, auto_refresh=False) as live:
        try:
            while True:
                found, runs = read_cluster(state, None if everything else ENDED)
                table = rich.table.Table(*HEADS, box=None, header_style="bold")
                for job in listed_jobs(found, everything):
                    table.add_row(*map(Text, cells(job, found["cluster"]["now"])), style=colours.get(job["state"], ""))
                last = [f"{clock(each['time'])}  job {each['job']}: {each['why']}" for each in found["decisions"][-5:]]
                lines = [summary(found, runs), *last]
                live.update(Group(table, Text("\n".join(lines), style="dim")), refresh=True)
                time.sleep(SECONDS)
        except KeyboardInterrupt:
            return 0
