"""Turns connections of this user to a socket into requests, and answers into replies; and finds a scheduler's socket.

Knows sockets, and where they are. Must not know what is asked for.

    $XDG_RUNTIME_DIR/vnode/clusters/1f3a9c.sock   of mode 0600, in a folder of mode 0700
    $XDG_RUNTIME_DIR/vnode/clusters/1f3a9c.json   which file it belongs to
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vnode.cluster.live.event_store import holder
from vnode.errors import ClusterError, WorkerError
from vnode.workers import job_registry
from vnode.workers.wire import Channel, WireError, connections, frame

VARIABLE = "VNODE_CLUSTER"
"""Names the file of the scheduler that commands ask, if they name none."""

LONGEST = 80
"""Bytes of the path of a folder of sockets: with its name, that of a socket may have some 100."""

ANSWER = 30
"""Seconds that an answer may take."""

Reply = Callable[[dict[str, Any]], None]


def folder() -> Path:
    """The folder of this user's sockets; made if it is not there.

    Raises:
      ClusterError: somebody else could read or write it.
    """
    try:
        found = job_registry.private(job_registry.home().parent, "clusters")
        if len(os.fsencode(found)) > LONGEST:
            found = job_registry.private(Path("/tmp") / f"vnode-{job_registry.user()}", "clusters")
        return found
    except WorkerError as error:
        raise ClusterError(str(error)) from error


def socket_of(state: Path) -> Path:
    """The socket of the scheduler that has a file."""
    return folder() / f"{hashlib.sha256(os.fsencode(os.path.realpath(state))).hexdigest()[:16]}.sock"


class Door:
    """The socket of a scheduler. Others of this user may ask for something there.

    Args:
      state: the scheduler's file, which nobody else has.
      take: called with each request and with what takes the answer, from threads of connections.

    Raises:
      ClusterError: the socket cannot be made.
    """

    def __init__(self, state: Path, take: Callable[[dict[str, Any], Reply], None]) -> None:
        self.path, self.take = socket_of(state), take
        self.listener = socket.socket(socket.AF_UNIX)
        try:
            self.path.unlink(missing_ok=True)  # of a scheduler that was killed: the file's lock says that none is there
            before = os.umask(0o177)
            try:
                self.listener.bind(str(self.path))
            finally:
                os.umask(before)
            self.listener.listen(64)
            said = {"state": os.path.realpath(state), "pid": os.getpid(), "started": job_registry.started(os.getpid())}
            self.path.with_suffix(".json").write_text(json.dumps(said), encoding="utf-8")
        except OSError as error:
            self.listener.close()
            raise ClusterError(f"the scheduler's socket {self.path} cannot be made: {error}") from error
        threading.Thread(target=self.accept, name="vnode door", daemon=True).start()

    def accept(self) -> None:
        """Takes connections in."""
        for sock in connections(self.listener):
            threading.Thread(target=self.serve, args=(sock,), name="vnode request", daemon=True).start()

    def serve(self, sock: socket.socket) -> None:
        """Passes on the requests of a connection, one after the other."""
        channel = Channel(sock)
        answered = threading.Event()

        def reply(answer: dict[str, Any]) -> None:
            try:
                channel.send(answer)
            except WireError as error:
                with contextlib.suppress(WireError):
                    channel.send({"kind": "error", "text": str(error)})
            answered.set()

        with contextlib.suppress(WireError, TimeoutError):
            while True:
                request = channel.receive(ANSWER)
                answered.clear()
                self.take(request, reply)
                answered.wait(ANSWER)
        channel.close()

    def close(self) -> None:
        """Ends it."""
        self.listener.close()
        for path in (self.path, self.path.with_suffix(".json")):
            path.unlink(missing_ok=True)


def schedulers() -> list[dict[str, Any]]:
    """The schedulers of this user that run: state, pid, socket."""
    found = []
    for path in sorted(folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(path.read_text(encoding="utf-8"))
            if job_registry.started(said["pid"]) == said["started"] is not None:
                found.append({**said, "socket": str(path.with_suffix(".sock"))})
    return found


def find(state: str | None) -> dict[str, Any]:
    """The scheduler that is meant.

    Args:
      state: its file; None for that of `VARIABLE`, or for the only one that there is.

    Raises:
      ClusterError: none runs, or there are several.
    """
    if wanted := state or os.environ.get(VARIABLE):
        whole = Path(os.path.realpath(wanted))
        if (said := holder(whole)) and "socket" in said:
            return {"state": str(whole), **said}
        raise ClusterError(
            f"no scheduler runs with the file {wanted}.",
            facts=["jobs that run go on without one" if whole.exists() else "there is no such file"],
            remedies=[f"start it: vnode cluster serve --state {wanted} --devices N"],
        )
    running = schedulers()
    if not running:
        raise ClusterError(
            "no scheduler runs.", remedies=["start one: vnode cluster serve --state cluster.db --devices N"]
        )
    if len(running) > 1:
        raise ClusterError(
            f"{len(running)} schedulers run.",
            facts=[f"{each['state']} (process {each['pid']})" for each in running],
            remedies=[f"name one: --state {running[0]['state']}", f"or set {VARIABLE}"],
        )
    return running[0]


def request(kind: str, state: str | None = None, **facts: Any) -> dict[str, Any]:
    """Asks a scheduler.

    Args:
      kind: of the request.
      state: the scheduler's file, if there are several.
      facts: its particulars.

    Returns:
      The answer.

    Raises:
      ClusterError: it refuses, does not answer, or there is none; or the request is too large.
    """
    scheduler = find(state)
    try:
        frame({"kind": kind, **facts})
    except WireError as error:
        raise ClusterError(
            "the request cannot be sent to the scheduler.",
            facts=[str(error)],
            remedies=["give the job fewer or shorter arguments and variables; put large texts into a file"],
        ) from error
    try:
        channel = Channel.connect(scheduler["socket"], ANSWER)
        try:
            channel.send({"kind": kind, **facts})
            answer = channel.receive(ANSWER)
        finally:
            channel.close()
    except (OSError, WireError) as error:
        raise ClusterError(
            "the scheduler does not answer.",
            facts=[f"process {scheduler['pid']}, {scheduler['state']}", f"{type(error).__name__}: {error}"],
            remedies=["try again; vnode queue shows the jobs that it knows"],
        ) from error
    if answer["kind"] == "error":
        raise ClusterError(answer["text"])
    return answer
