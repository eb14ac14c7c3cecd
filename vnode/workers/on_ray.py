"""Turns numbers of workers into actors of Ray, each of which starts a worker's process on its node.

Knows Ray. Must not know which workers train.

    RAY_ADDRESS not set    ->  a Ray of this host alone, on loopback, which ends with the supervisor
    spawn(2, environment)  ->  an actor; while it is pending, Ray's autoscaler sees what it needs
    handle.poll()          ->  None; the exit code; -9 if the actor or its node is gone

The process is the actor's child, so that JAX and signals work in it as they do under `vnode.workers.child_processes`.
The actor yields what the process prints; `poll` takes what has arrived, and waits for nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vnode.errors import WorkerError
from vnode.stopped import Resident
from vnode.workers import INTERFACE, JOB, TOKEN_FILE
from vnode.workers.child_processes import Processes, of_worker
from vnode.workers.job_registry import write_privately

LOOK = 0.03
"""Seconds between two looks of an actor at its process."""

PART = 1 << 16
"""Bytes of output that an actor sends at once."""

LEAVE_SECONDS = 10
"""Seconds that an actor outlives its process, so that the supervisor hears the exit code."""

STORE_BYTES = 100 << 20
"""The object store of a Ray that the supervisor starts; next to nothing goes through it."""

FORWARDED = ("JAX_", "XLA_", "PYTHONPATH")
"""Prefixes of the variables that workers on other hosts get from the supervisor's environment."""

LEASH = 'read ended || kill -s KILL -- "-$0"; rm -rf -- "$1"'
"""A shell's program: when the pipe of its input breaks, it ends a session, given by number, and deletes its folder."""


class Starter:
    """The actor: starts one worker's process on its node. The process does not outlive it."""

    def run(
        self,
        number: int,
        command: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        token: str,
        reachable: bool,
    ) -> Iterator[tuple[str, Any]]:
        """Starts the process, and follows it.

        Args:
          number: of the worker.
          command: its command line, without Python.
          folder: where the supervisor is.
          environment: variables of the worker; in their values a folder of this node takes the place of the job's.
          token: of the job.
          reachable: whether the worker shall listen at this node's address; else, at that of the supervisor.

        Yields:
          `("place", where the process is)`, then `(file of the job, bytes to add)`, then `("code", its exit code)`.
        """
        import ray  # pyright: ignore[reportMissingImports]

        if os.path.isdir(folder):
            os.chdir(folder)
        own = Path(tempfile.mkdtemp(prefix="vnode-ray-"))
        variables = {name: value.replace(environment[JOB], str(own)) for name, value in environment.items()}
        write_privately(Path(variables[TOKEN_FILE]), token)
        if reachable:
            variables[INTERFACE] = ray.util.get_node_ip_address()
        child = Processes([sys.executable, *command], own).spawn(number, variables)
        leash = subprocess.Popen(
            ["sh", "-c", LEASH, str(child.pid), str(own)], stdin=subprocess.PIPE, start_new_session=True
        )

        def end() -> None:
            """Ends the actor some time after its process: the supervisor may be gone."""
            while child.poll() is None:
                time.sleep(1)
            time.sleep(LEAVE_SECONDS)
            with contextlib.suppress(OSError, ValueError):  # it has been told
                leash.communicate(b"ended\n")
            os._exit(0)

        threading.Thread(target=end, name="vnode end", daemon=True).start()
        yield "place", tuple(child.place)
        with contextlib.ExitStack() as stack:
            outputs = {
                name: stack.enter_context(open(own / name, "rb"))
                for name in (f"worker-{number}.out", f"worker-{number}.err")
            }
            code = None
            while code is None:
                time.sleep(LOOK)
                code = child.poll()  # before the files: after the end nothing is added
                for name, file in outputs.items():
                    while part := file.read(PART):
                        yield name, part
        if (own / "result.json").exists():
            yield "result.json", (own / "result.json").read_bytes()
        leash.communicate(b"ended\n")
        yield "code", code


class Actor:
    """A worker as the supervisor sees it.

    Attributes:
      pid: of the process; 0 while it is not known, and if it is on another host.
    """

    def __init__(self, ray: Any, number: int, actor: Any, said: Any, folder: Path) -> None:
        self.ray, self.number, self.actor, self.said, self.folder = ray, number, actor, said, folder
        self.pid, self.place, self.code, self.killed = 0, Resident("", 0), None, False

    def poll(self) -> int | None:
        """Writes the output of the process to files. Returns its exit code, or None; -9 if the actor is gone."""
        errors = self.ray.exceptions
        while self.code is None and self.ray.wait([self.said], timeout=0)[0]:
            try:
                kind, value = self.ray.get(next(self.said))
            except StopIteration:
                self.fail(-signal.SIGKILL, "has ended")
            except errors.RayTaskError as error:
                self.fail(1, f"cannot start it: {error}")
            except errors.RayError as error:
                self.fail(-signal.SIGKILL, f"is gone: {error}")
            else:
                self.handle_message(kind, value)
        return self.code

    def handle_message(self, kind: str, value: Any) -> None:
        """Handles one message of the actor."""
        if kind == "place":
            self.place = Resident(*value)
            self.pid = self.place.pid if self.place.host == Resident.this_process().host else 0
        elif kind == "code":
            self.code = value
            self.kill()
        else:
            with contextlib.suppress(OSError), open(self.folder / kind, "ab") as file:  # a full disk stops no training
                file.write(value)

    def fail(self, code: int, why: str) -> None:
        """The actor is not there any more."""
        if not self.killed:
            self.handle_message(f"worker-{self.number}.err", f"vnode: the actor of Ray {why}\n".encode())
        self.code = code
        self.kill()

    def kill(self) -> None:
        """Ends the actor, and with it the process."""
        if not self.killed:
            self.killed = True
            self.ray.kill(self.actor)

    def terminate(self) -> None:
        """Ends the actor: Ray sends no signals."""
        self.kill()

    def is_stopped(self) -> bool:
        """Whether the process is known to be stopped: only one on this host is."""
        return self.code is None and self.pid != 0 and self.place.is_stopped()


class Ray:
    """Starts workers by actors of Ray.

    Args:
      command: the command line of each, Python first; a node's own Python takes its place there.
      folder: of the job; the workers' output is written there.
      environment: variables for all workers.
      resources: of Ray that each worker needs, as ``{"CPU": 2, "TPU": 4}``. By default a CPU, and nothing of a Ray that
        the supervisor starts itself.
      interface: the address at which the supervisor listens.

    Raises:
      WorkerError: Ray does not answer, or has hosts that do not reach that address.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        resources: Mapping[str, float] | None = None,
        interface: str = "127.0.0.1",
    ) -> None:
        self.command, self.folder = list(command[1:]), folder
        forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        self.environment = {"PYTHONUNBUFFERED": "1", **forwarded, **(environment or {})}
        self.reachable = not ipaddress.ip_address(interface).is_loopback
        self.ray, own = connect()
        needs = dict(resources if resources is not None else {"CPU": 0 if own else 1})
        self.needs = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
        if not own and not self.reachable:
            check_one_host(self.ray, interface)

    def spawn(self, number: int, environment: Mapping[str, str]) -> Actor:
        """Asks for an actor; Ray places it when a node has what it needs.

        Raises:
          OSError: Ray does not answer.
        """
        ray = self.ray
        token = Path(environment[TOKEN_FILE]).read_text(encoding="utf-8")
        try:
            # A detached actor outlives a supervisor that is killed, so that its worker can save.
            name = f"vnode {self.folder.name} worker {number} {time.monotonic_ns()}"
            actor = ray.remote(Starter).options(name=name, lifetime="detached", **self.needs).remote()
            run = actor.run.options(num_returns="streaming")
            variables = {**of_worker(self.environment, number), **environment}
            said = run.remote(number, self.command, os.getcwd(), variables, token, self.reachable)
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise OSError(f"Ray does not answer: {error}") from error
        return Actor(ray, number, actor, said, self.folder)


def connect() -> tuple[Any, bool]:
    """Connects to the Ray of ``RAY_ADDRESS``; without it, starts one of this host, which ends with this process.

    Returns:
      The module, which is connected; and whether that Ray is this process's own.

    Raises:
      WorkerError: Ray does not answer.
    """
    address = os.environ.get("RAY_ADDRESS", "local")
    own: dict[str, Any] = {}
    if address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # then all of its ports are on loopback, on Linux, too
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": STORE_BYTES}
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.init(address=address, namespace="vnode", log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # of many kinds: no address, no answer, another version, another token
        raise WorkerError(
            f"Ray at {address!r} does not answer.",
            facts=[f"{type(error).__name__}: {error}"],
            remedies=[
                "set RAY_ADDRESS to the address of a running Ray that this host is a node of, or to 'auto'",
                "or unset it: then the supervisor starts a Ray of this host",
            ],
        ) from error
    return ray, bool(own)


def check_one_host(ray: Any, interface: str) -> None:
    """Checks that a supervisor on loopback is reached by the nodes that there are.

    Raises:
      WorkerError: some are on other hosts.
    """
    names = {node["NodeManagerHostname"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    others = {name: address for name, address in names.items() if name != socket.gethostname()}
    if others:
        raise WorkerError(
            f"other nodes of Ray cannot reach a supervisor that listens at {interface}.",
            facts=[f"{name} is at {address}" for name, address in sorted(others.items())],
            remedies=[f"give the address of this host: --interface {ray.util.get_node_ip_address()}, interface="],
        )
