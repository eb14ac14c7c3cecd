"""The script of `trained_by_workers`, in which something happens to a worker when it comes to a point of vnode's code.

Knows names of vnode's functions, and how they are replaced by others. Must not know jobs. Its argument is that of
`trained_by_workers`, with these keys besides:

    silence  seconds without a sign of life of the supervisor
    marks    a folder: each point leaves a file there (its number in the list) when it is come to; it happens once
    points   a list of {"worker": "1", "at": "module:Class.method", "does": ...}, and what says when:
             "step"   not before the worker has come to this step
             "call"   at this call of those, counted from 1

    kill         SIGKILL of this process
    kill 0 2     SIGKILL of those workers, which have come to this script, or of the `supervisor`; then it goes on
    hang         the main thread stands in C, for good; other threads go on
    freeze       the same, and holds Python's lock: no thread goes on
    wait 3       until another point, of that number, was come to
    memory       XLA's error of a device that has no memory left
    allocate     Python's error of a process that may have no more memory
    forget       the newest state that is computed is not known; the one before it is
    settle       until the last step is computed, here and in the others
    mark         nothing: others wait for it
    sleep 40     so many seconds, in Python
    close        the connection to the supervisor is closed
    silence      messages of the supervisor do not arrive any more, and nobody closes the connection
    mute         neither do those of this worker
"""

import collections
import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from tests.programs import trained_by_workers
from vnode.elastic import membership
from vnode.elastic.recovery import is_intact
from vnode.elastic.worker_loop import WorkerDriver
from vnode.placement.leaves import is_key
from vnode.workers import NUMBER, SUPERVISOR

SECONDS = 60
RECENT: collections.deque[tuple[int, Any]] = collections.deque(maxlen=6)


class Proxy:
    """A proxy between this worker and the supervisor; it may hold back messages of either.

    Args:
      address: of the supervisor, ``host:port``.
    """

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.passes = {"out": threading.Event(), "in": threading.Event()}
        for each in self.passes.values():
            each.set()
        server = socket.create_server((host, 0))
        self.address = f"{host}:{server.getsockname()[1]}"
        self.far = socket.create_connection((host, int(port)))
        threading.Thread(target=self.serve, args=(server,), daemon=True).start()

    def serve(self, server: socket.socket) -> None:
        """Passes both ways."""
        near, _ = server.accept()
        threading.Thread(target=self.copy, args=(near, self.far, self.passes["out"]), daemon=True).start()
        self.copy(self.far, near, self.passes["in"])

    def copy(self, source: socket.socket, target: socket.socket, passes: threading.Event) -> None:
        """Passes one way."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passes.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def does(what: str, marks: Path, proxy: Proxy | None, arguments: tuple[Any, ...]) -> None:
    """Does what a point asks for."""
    word, *others = what.split()
    if word == "kill":
        for other in others:
            pid = os.getppid() if other == "supervisor" else int((marks / f"pid-{other}").read_text())
            os.kill(pid, signal.SIGKILL)
        if not others:
            os.kill(os.getpid(), signal.SIGKILL)
    elif word == "hang":
        ctypes.CDLL(None).sleep(1000)
    elif word == "freeze":
        ctypes.PyDLL(None).sleep(1000)
    elif word == "wait":
        end = time.monotonic() + SECONDS
        while not (marks / others[0]).exists():
            assert time.monotonic() < end, f"nobody has come to point {others[0]}"
            time.sleep(0.005)
    elif word == "memory":
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1099511627776 bytes.")
    elif word == "allocate":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(1 << 40)
    elif word == "forget":
        computed = [(n, state) for n, state in RECENT if is_computed(state)]
        arguments[0].state = None
        arguments[0].recent = collections.deque(computed[-2:-1])
    elif word == "settle":
        jax.block_until_ready(arguments[0].state)
        time.sleep(0.3)
    elif word == "sleep":
        time.sleep(float(others[0]))
    elif word == "close":
        proxy.far.shutdown(socket.SHUT_RDWR)
    elif word in ("silence", "mute"):
        proxy.passes["in"].clear()
        if word == "mute":
            proxy.passes["out"].clear()
    elif word != "mark":
        raise ValueError(what)


def is_computed(state: Any) -> bool:
    return all(is_key(leaf) or leaf.is_ready() for leaf in jax.tree.leaves(state)) and is_intact(state)


def remember() -> None:
    """Has the last states of this worker be known for longer than a driver knows them."""
    take_flags = WorkerDriver.take_flags

    def remembered(driver: WorkerDriver, flags: list[bool]) -> bool:
        RECENT.append((driver.number, driver.state))
        return take_flags(driver, flags)

    WorkerDriver.take_flags = remembered


def install_point(point: dict[str, Any], mark: Path, happens: Callable[[tuple[Any, ...]], None]) -> None:
    """Has something happen before a function is called."""
    module, _, path = point["at"].partition(":")
    *homes, name = path.split(".")
    home = functools.reduce(getattr, homes, __import__(module, fromlist=["_"]))
    function, calls = getattr(home, name), [0]

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        member = membership.Membership.from_environment()
        if member.step >= point.get("step", -1):
            calls[0] += 1
            if calls[0] == point.get("call", 1):
                with contextlib.suppress(FileExistsError):
                    mark.touch(exist_ok=False)
                    happens(args)
        return function(*args, **kwargs)

    setattr(home, name, replaced)


def main(asked: dict[str, Any]) -> None:
    number, marks = os.environ.get(NUMBER, "alone"), Path(asked["marks"])
    (marks / f"pid-{number}").write_text(str(os.getpid()))
    points = [(i, point) for i, point in enumerate(asked["points"]) if point["worker"] == number]
    proxy = None
    if any(point["does"] in ("close", "silence", "mute") for _, point in points):
        proxy = Proxy(os.environ[SUPERVISOR])
        os.environ[SUPERVISOR] = proxy.address
    if any(point["does"] == "forget" for _, point in points):
        remember()
    for i, point in reversed(points):  # the first in the list happens first
        install_point(point, marks / str(i), functools.partial(does, point["does"], marks, proxy))
    membership.SILENCE = asked.get("silence", membership.SILENCE)
    trained_by_workers.main(asked)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
