"""`vnode cluster report` and `vnode cluster replay`: what has happened on a cluster, and its decisions made again.

Knows the command line. Must not know how a policy decides.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from vnode.cluster.live.socket_server import VARIABLE, find
from vnode.errors import ClusterError


def add_parser(commands: Any) -> None:
    """Adds the commands to the command line."""
    report = commands.add_parser("report", help="figures and pictures of what has happened")
    report.add_argument("--out", metavar="FOLDER", help="write a page with the table and pictures")
    report.add_argument("--json", action="store_true", help="print all figures as JSON")
    report.set_defaults(execute=execute_report)
    replay = commands.add_parser("replay", help="make all decisions again, and compare them with those of the log")
    replay.set_defaults(execute=execute_replay)
    for parser in (report, replay):
        parser.add_argument("--state", metavar="FILE", help="the scheduler's file, also of one that has ended")


def path_of(state: str | None) -> Path:
    """The file that is meant."""
    named = state or os.environ.get(VARIABLE)
    return Path(named if named and os.path.isfile(named) else find(state)["state"])


def execute_report(chosen: argparse.Namespace) -> int:
    """Runs `report`: 0, or 1 if it cannot be."""
    from vnode.cluster.command_simulate import table
    from vnode.cluster.live.event_store import read_records
    from vnode.cluster.live.history import result_of
    from vnode.cluster.result_page import write

    try:
        result = result_of(read_records(path_of(chosen.state)))
        if not any(event.kind == "ended" for event in result.events):
            raise ClusterError("no job has ended yet; there is nothing to report.")
        figures = {result.policy: result.figures()}
        if chosen.out:
            print(f"written: {write(Path(chosen.out), {result.policy: result}, table(figures), {})}", file=sys.stderr)
    except (ClusterError, OSError) as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=1) if chosen.json else table(figures))
    if other := sum(job.facts["state"] in ("failed", "cancelled") for job in result.jobs):
        print(f"jobs that failed or were cancelled, whose times are counted, too: {other}", file=sys.stderr)
    if open_jobs := sum(job["jct"] is None for job in figures[result.policy]["jobs"]):
        print(f"jobs that have not ended, and count only where devices are counted: {open_jobs}", file=sys.stderr)
    return 0


def execute_replay(chosen: argparse.Namespace) -> int:
    """Runs `replay`: 0; 1 if a decision differs, or it cannot be."""
    from vnode.cluster.live.event_store import read_records
    from vnode.cluster.live.policy_shares import replay

    count = differing = 0
    try:
        for record, decided in replay(read_records(path_of(chosen.state))):
            count += 1
            logged, made = dict(record.facts["shares"]), dict(decided.shares)
            if made != logged:
                print(f"decision {count}: shares {logged} in the log, {made} when made again")
            if decided.again != record.facts["again"]:
                print(
                    f"decision {count}: next one at {record.facts['again']} in the log, {decided.again} when made again"
                )
            differing += made != logged or decided.again != record.facts["again"]
    except ClusterError as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 1
    print(f"{count} decisions, {differing} differ")
    return 1 if differing else 0
