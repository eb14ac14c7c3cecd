"""`vnode workers runs/7 5`: asks a running job for another number of workers.

Knows the command's arguments. Must not know how it is done.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vnode.errors import WorkerError
from vnode.workers.job_registry import find
from vnode.workers.supervisor_client import request


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser("workers", help="ask a running job for another number of workers")
    parser.add_argument("job", metavar="FOLDER|PID", help="its folder of checkpoints, or its process number")
    parser.add_argument("workers", type=int, metavar="N", help="the number of workers that should train")
    parser.set_defaults(execute=execute)


def execute(chosen: argparse.Namespace) -> int:
    """Runs the command: 0, or 1 if the job refuses or is not there."""
    try:
        answer = request(find(chosen.job), "resize", workers=chosen.workers)
    except WorkerError as error:
        print(f"vnode: {error}", file=sys.stderr)
        return 1
    print(f"workers that train: {len(answer['workers'])}; asked for: {chosen.workers}")
    return 0
