"""`python -m vnode.workers FD`: the supervisor of `launch`, which reads a `Spec` from its input.

Knows the lines that `launch` writes and reads. Must not know what a supervisor does.

Its input stays open as long as the process that launched it lives; at its end the run is stopped with a checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from vnode.errors import WorkerError
from vnode.workers.command_run import handle_signals
from vnode.workers.start_job import Spec
from vnode.workers.supervisor import Supervisor

STOP_SECONDS = 60
"""Seconds that a run may take to stop when the process that launched it is gone."""


def watch(supervisor: Supervisor) -> None:
    """Stops the run when the input ends."""
    while sys.stdin.buffer.raw.read(1024):  # type: ignore[attr-defined]
        pass
    supervisor.stop("the process that launched it has ended", 143)
    time.sleep(STOP_SECONDS)
    supervisor.kill("it did not stop")


def main(descriptor: int) -> int:
    """Runs a job; tells of its folder, or of an error, in a line of JSON."""
    facts, path = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[attr-defined]
    os.environ.pop("PYTHONPATH", None)
    if path is not None:
        os.environ["PYTHONPATH"] = path
    with open(descriptor, "w", encoding="utf-8") as report:
        try:
            supervisor = Spec(**{**facts, "command": tuple(facts["command"])}).supervisor()
        except WorkerError as error:
            print(json.dumps({"error": str(error)}), file=report)
            return 1
        print(json.dumps({"folder": str(supervisor.entry.folder)}), file=report)
    handle_signals(supervisor)
    threading.Thread(target=watch, args=(supervisor,), name="vnode input", daemon=True).start()
    return supervisor.run()


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
