"""`python -m vnode.workers.detached FOLDER`: a supervisor that outlives the process which has started it.

Knows the file that describes the job. Must not know who has written it.

    FOLDER/spec.json   ->   a supervisor, whose own folder is FOLDER/job

Its output is that of the job. It holds no connection to the process that started it: that finds it again by its folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from vnode import files
from vnode.errors import WorkerError
from vnode.files import is_no_room
from vnode.workers.command_run import handle_signals
from vnode.workers.start_job import Spec

SPEC = "spec.json"
"""The job to run: fields of `Spec` (`spec`), the job's variables (`env`) and its folder (`directory`)."""

OWN = "job"
"""The supervisor's own folder."""

LATER = 75
"""The exit code of a supervisor that could not begin for want of room, as EX_TEMPFAIL of sysexits.h."""

REFUSED = "refused.txt"
"""Why nothing could be run, if so it was."""


def main(folder: Path) -> int:
    """Runs a job to its end.

    Args:
      folder: has `SPEC`.

    Returns:
      The job's exit code; 2 if it cannot be started.
    """
    facts = json.loads((folder / SPEC).read_text(encoding="utf-8"))
    spec = {**facts["spec"], "command": tuple(facts["spec"]["command"]), "devices": tuple(facts["spec"]["devices"])}
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[attr-defined]
    try:
        os.chdir(facts["directory"])
        os.environ.clear()  # its own would change what Python this process is
        os.environ.update(facts["env"])
        supervisor = Spec(**spec).supervisor(folder=folder / OWN)
    except (OSError, ValueError, WorkerError) as error:  # ValueError: a text that the system does not take
        if is_no_room(error):
            return LATER
        text = str(error) if isinstance(error, WorkerError) else f"the job cannot run in {facts['directory']}: {error}"
        text = text.encode(errors="backslashreplace").decode()  # names of files need not be UTF-8
        files.write_text(folder / REFUSED, text, WorkerError)
        print(f"vnode: {text}", file=sys.stderr)
        return 2
    handle_signals(supervisor)
    return supervisor.run()


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
