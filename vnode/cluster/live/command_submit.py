"""`vnode submit -- python train.py`: hands a job to the scheduler, and prints its id.

Knows the command line. Must not know what a scheduler does with a job.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vnode.cluster.live.arguments import add_state, plans, times, workers
from vnode.cluster.live.cluster_view import look_at
from vnode.cluster.live.socket_server import find, request
from vnode.cluster.live.submission import Submission
from vnode.errors import ClusterError

LOOK = 0.3
"""Seconds between two looks at a job that is waited for."""


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "submit",
        help="submit a job to the scheduler of this machine",
        usage="vnode submit [options] -- COMMAND [ARGUMENTS]",
        description="Prints the id of the job, and only that, once the job is on the disk. It runs in this folder with "
        "this environment.",
    )
    parser.add_argument("--name", default="", help="of the job, for people; default: its script's")
    parser.add_argument("--priority", type=float, default=1, metavar="N", help="its weight; default: 1")
    parser.add_argument(
        "--workers", type=workers, default=(1, 1), metavar="MIN:MAX", help="one device each; default: 1"
    )
    parser.add_argument("--rigid", action="store_true", help="no vnode program: runs once, and keeps its N devices")
    parser.add_argument("--restart", action="store_true", default=None, help="replace all workers at each change")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="of checkpoints, if the script names none")
    parser.add_argument("--step-seconds", type=times, default={}, metavar="1=4.0,8=0.7", help="by number of workers")
    parser.add_argument("--plans", type=plans, metavar="1=FILE,4=FILE", help="plans that say how long a step takes")
    parser.add_argument("--steps", type=int, metavar="N", help="of the run, where its workers do not tell")
    parser.add_argument("--wait", action="store_true", help="wait for its end; the exit code is the job's")
    add_state(parser)
    parser.set_defaults(execute=execute)


def execute(chosen: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      0, or with ``--wait`` the exit code of the job; 2 if it cannot be submitted.
    """
    try:
        job = Submission(
            command=chosen.arguments,
            workers=chosen.workers,
            name=chosen.name,
            priority=chosen.priority,
            rigid=chosen.rigid,
            restart=chosen.restart,
            checkpoint=chosen.checkpoint,
            step_seconds=planned(chosen.plans) if chosen.plans else chosen.step_seconds,
            steps=chosen.steps,
        )
        state = find(chosen.state)["state"]  # from now on the same one, whichever others begin or end
        name = request("submit", state, job=job.facts())["answer"]
    except (ClusterError, ValueError, OSError) as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 2
    try:
        print(name, flush=True)
    except OSError as error:
        print(f"vnode: job {name} is submitted, but its id cannot be printed: {error}", file=sys.stderr)
        return 1
    return wait(name, state) if chosen.wait else 0


def planned(files: Mapping[int, str]) -> dict[int, float]:
    """Seconds of a step on each number of workers, by the best plan that there is room for.

    Args:
      files: of plans, by number of workers.

    Raises:
      ClusterError: a file cannot be read.
      ValueError: one is no plan, or is for another number of devices.
    """
    from vnode.cluster.speeds import Speeds
    from vnode.cluster.traces.measured_speeds import plan_seconds

    speeds = Speeds.from_plans({count: plan_seconds(Path(path), count) for count, path in files.items()})
    return {count: 1 / speed for count, speed in enumerate(speeds.per_second) if speed}


def wait(name: str, state: str) -> int:
    """Waits for the end of a job, also of one whose scheduler is started again meanwhile.

    Returns:
      Its exit code; 130 after Ctrl-C, which leaves the job as it is.
    """
    complaint = ""
    try:
        while True:
            try:
                job = look_at(state, name)
                complaint = ""
                if job["ended"] is not None:
                    if job["why"]:
                        print(f"vnode: job {name} {job['state']}: {job['why']}", file=sys.stderr)
                    return 143 if job["code"] is None else job["code"]
            except ClusterError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    print(f"vnode: {complaint}\nvnode: job {name} is waited for all the same", file=sys.stderr)
            time.sleep(LOOK)
    except KeyboardInterrupt:
        print(f"vnode: job {name} goes on; end it: vnode cancel {name}", file=sys.stderr)
        return 130
