"""`vnode logs ID`, `vnode priority ID N`, `vnode cancel ID`: what is done with one job.

Knows the command line, and files of output. Must not know how a job ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from vnode.cluster.live.arguments import add_state
from vnode.cluster.live.cluster_view import look_at
from vnode.cluster.live.socket_server import VARIABLE, find, request
from vnode.errors import ClusterError

LOOK = 0.3
"""Seconds between two looks at a job's output."""


def add_parser(commands: Any) -> None:
    """Adds the commands to the command line."""
    logs = commands.add_parser("logs", help="what a job has printed")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until it ends")
    logs.add_argument("job", metavar="ID", help="or its name")
    logs.set_defaults(execute=execute_logs)
    priority = commands.add_parser("priority", help="give a job another priority")
    priority.add_argument("job", metavar="ID", help="or its name")
    priority.add_argument("priority", type=float, metavar="N", help="its weight")
    priority.set_defaults(execute=execute_priority)
    cancel = commands.add_parser("cancel", help="end a job, with a checkpoint")
    cancel.add_argument("job", metavar="ID", help="or its name")
    cancel.add_argument("--now", action="store_true", help="kill it, without a checkpoint")
    cancel.set_defaults(execute=execute_cancel)
    for parser in (logs, priority, cancel):
        add_state(parser)


def execute_priority(chosen: argparse.Namespace) -> int:
    """Runs `priority`: 0, or 1 if that cannot be."""
    return send_request(lambda: request("priority", chosen.state, job=chosen.job, priority=chosen.priority))


def execute_cancel(chosen: argparse.Namespace) -> int:
    """Runs `cancel`: 0, or 1 if that cannot be."""
    return send_request(lambda: request("cancel", chosen.state, job=chosen.job, now=chosen.now))


def send_request(request: Any) -> int:
    """Makes a request; prints what is wrong with it."""
    try:
        request()
    except ClusterError as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 1
    return 0


def execute_logs(chosen: argparse.Namespace) -> int:
    """Runs `logs`: 0, or 1 if there is no such job."""
    try:
        state = chosen.state or os.environ.get(VARIABLE) or find(None)["state"]
        job = look_at(state, chosen.job)
        files = {Path(job["folder"]) / "out": sys.stdout, Path(job["folder"]) / "err": sys.stderr}
        places = dict.fromkeys(files, 0)
        while True:
            over = job["ended"] is not None  # before the files: after the end nothing is added
            for path, stream in files.items():
                places[path] += copy(path, places[path], stream)
            if over or not chosen.follow:
                return 0
            time.sleep(LOOK)
            with contextlib.suppress(ClusterError):  # the scheduler is killed just now, say: the job goes on
                job = look_at(state, job["id"])
    except ClusterError as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def copy(path: Path, place: int, stream: Any) -> int:
    """Copies what is new in a file to a stream; returns how many bytes that were."""
    try:
        with open(path, "rb") as file:
            file.seek(place)
            new = file.read()
    except OSError:  # it has not begun
        return 0
    stream.buffer.write(new)
    stream.flush()
    return len(new)
