"""Runs a job: hands what sockets, processes and clocks deliver to `Decisions`, and does what they say.

Knows sockets, the keeper, output of workers. Must not know which workers train, nor jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from vnode.errors import WorkerError, layout_message
from vnode.workers import CHECKPOINT, DEVICE, JOB, NUMBER, PROTOCOL, RUN, SUPERVISOR, TOKEN_FILE
from vnode.workers.actions import Action, End, EndService, Kill, Record, Send, Spawn, StartService, Terminate
from vnode.workers.child_processes import Backend, Handle
from vnode.workers.granted_devices import Devices
from vnode.workers.job_registry import STOPPED_SECONDS, Entry, marked, started
from vnode.workers.supervision import Decisions
from vnode.workers.wire import LARGEST, Channel, Message, WireError, connections

ALIVE_SECONDS = 1
"""Seconds between signs of life to workers: a host that vanishes closes no connection."""

TICK = 0.05
"""Seconds between two looks at processes, output and deadlines."""

LATE = 1.0
"""Seconds between two events after which this process was stopped, or had no processor: a paused machine, say."""

HELLO_SECONDS = 10
HELLO_BYTES = 1 << 16
GRACE = 5
"""Seconds that workers have to end by themselves, once the job has ended."""

KEEP_ALL = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""Has jax keep all programs: those of a generation are needed again when its workers come back."""

CHATTER = "[Gloo] Rank "
"""The beginning of lines that gloo writes to the output of every program that connects processes."""

OWN_VARIABLES = {name: value for name, value in os.environ.items() if name != RUN}
"""The variables that this process has begun with; those of a job may be others."""

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE", "GLOG_minloglevel": "3"}


@dataclasses.dataclass(eq=False)
class Running:
    """A worker's process and connection."""

    handle: Handle
    channel: Channel | None = None
    closed: bool = False
    stopped_since: float | None = None
    ended_since: float | None = None


AT_ONCE = 1 << 18
"""Bytes of a worker's output that are passed on between two looks at what else has happened."""


class Tail:
    """Passes on the lines that are added to a file, as they come.

    Args:
      path: of the file.
      take: called with new lines.
    """

    def __init__(self, path: Path, take: Callable[[list[str]], None]) -> None:
        self.path, self.take = path, take
        self.position = 0
        self.rest: list[bytes] = []  # of a line without an end

    def read_lines(self, whole: bool = False) -> None:
        """Passes on new lines, up to `AT_ONCE` bytes; with `whole` all, also a last line without an end."""
        new = self.read()
        while whole and len(new) == AT_ONCE:
            self.pass_on(new)
            new = self.read()
        unended = not new.endswith(b"\n") and (new or self.rest)
        self.pass_on(new + b"\n" if whole and unended else new)

    def read(self) -> bytes:
        """The next bytes of the file; none where it is not there."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                new = file.read(AT_ONCE)
        except OSError:
            return b""
        self.position += len(new)
        return new

    def pass_on(self, new: bytes) -> None:
        """Passes on the lines that end in new bytes."""
        first, *others = new.split(b"\n")
        self.rest += [first] if first else []
        if others:
            lines = [b"".join(self.rest), *others[:-1]]
            self.rest = [others[-1]] if others[-1] else []
            self.take([line.decode(errors="replace") for line in lines])


class Supervisor:
    """Starts workers, and has them train together until the run has come to its end.

    Args:
      backend: starts them.
      decisions: turn events into actions.
      entry: the folder of the job.
      interface: the address at which it and the services listen.
      port: of the supervisor; 0 for any that is free.
      checkpoint: the folder of checkpoints, which workers are told of.
      devices: names of the devices that the job has, one for each worker; None where nobody counts devices.
      out: where the output of the lowest rank goes.
      err: where errors of all workers go, and the supervisor's words.
      observe: called a few times a second with what `Decisions.status` says, and with each event.

    Raises:
      WorkerError: the port is in use.
    """

    def __init__(
        self,
        backend: Backend,
        decisions: Decisions,
        entry: Entry,
        *,
        interface: str = "127.0.0.1",
        port: int = 0,
        checkpoint: str | None = None,
        devices: Sequence[str] | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
        observe: Callable[[dict[str, Any], dict[str, Any] | None], None] | None = None,
    ) -> None:
        self.backend, self.entry, self.interface = backend, entry, interface
        self.out, self.err = out or sys.stdout, err or sys.stderr
        self.observer = observe
        self.checkpoint = checkpoint
        self.devices = None if devices is None else Devices(devices)
        self.waiting: list[int] = []  # workers that are to be started once there is a device for them
        self.decisions = decisions
        self.running: dict[int, Running] = {}
        self.tails: dict[int, list[Tail]] = {}
        self.events: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self.over: End | None = None
        self.killed = False
        self.asked: list[int] = []
        self.newest = 0  # the number of the last wish for workers
        self.looked = self.told = self.seen = 0.0
        self.started = 0
        self.listener = listen(interface, port)
        port = self.listener.getsockname()[1]
        self.address = f"[{interface}]:{port}" if ":" in interface else f"{interface}:{port}"
        entry.save(address=self.address)
        threading.Thread(target=self.accept, name="vnode accept", daemon=True).start()
        self.keeper = self.start_keeper() if decisions.connects else None

    # From other threads, and signal handlers

    def stop(self, why: str, code: int) -> None:
        """Asks the run to end with a checkpoint; asked again, ends all workers at once."""
        self.killed = self.over is not None  # it ends already: now at once
        self.events.put(lambda now: self.stop_now(why, code, now))

    def kill(self, why: str) -> None:
        """Ends all workers at once."""
        self.events.put(lambda now: self.end_now(137, why))

    def grow(self, by: int) -> None:
        """Asks for more workers than were asked for, or fewer."""

        def work(now: float) -> None:
            try:
                self.do(self.decisions.resize(self.decisions.wanted + by, now))
            except WorkerError as error:
                self.log_line(str(error))

        self.events.put(work)

    def accept(self) -> None:
        """Takes connections in."""
        for sock in connections(self.listener):
            threading.Thread(target=self.serve, args=(sock,), name="vnode connection", daemon=True).start()

    def serve(self, sock: socket.socket) -> None:
        """Reads a connection to its end."""
        channel = Channel(sock, HELLO_BYTES)
        try:
            hello = channel.receive(HELLO_SECONDS)
            token = hello.get("token")
            if not isinstance(token, str) or not hmac.compare_digest(token.encode(), self.entry.token.encode()):
                raise WireError("a connection without the token of this job")
        except (WireError, TimeoutError) as error:
            channel.close()
            why = str(error)
            self.events.put(lambda now: self.record(Record("refused", None, None, why)))
            return
        channel.frames.largest = LARGEST
        if hello["kind"] == "control":
            take = self.control
        else:
            self.events.put(lambda now: self.greet(channel, hello, now))
            take = self.hear
        try:
            while True:
                message = channel.receive()
                self.events.put(lambda now, message=message: take(channel, message, now))
        except WireError as error:
            channel.close()
            why = str(error).splitlines()[0]
            self.events.put(lambda now: self.hang_up(channel, why, now))

    # The loop

    def run(self) -> int:
        """Runs the job to its end.

        Returns:
          Its exit code.
        """
        try:
            self.do(self.decisions.begin(time.monotonic()))
            while self.over is None:
                self.turn()
            self.finish(self.over)
        except BaseException as error:  # workers and keeper stay: they see the closed connection, save and end
            self.entry.close(1, f"the supervisor failed: {type(error).__name__}: {error}", None)
            raise
        finally:
            self.listener.close()
            for worker in self.running.values():
                if worker.channel is not None:
                    worker.channel.close()
        for service in self.decisions.services:
            self.tell_keeper(f"end {service}")
        if self.keeper is not None and self.keeper.stdin is not None:
            with contextlib.suppress(OSError):
                self.keeper.stdin.close()
        self.entry.close(self.over.code, self.over.why, self.decisions.status()["step"])
        return self.over.code

    def turn(self) -> None:
        """Waits for an event, or for the next poll of processes and deadlines."""
        now = time.monotonic()
        with contextlib.suppress(queue.Empty):
            event = self.events.get(timeout=max(self.looked + TICK - now, 0))
            while True:
                event(self.awake())
                event = self.events.get_nowait()
        now = self.awake()
        if now >= self.looked + TICK:
            self.looked = now
            self.poll(now)

    def awake(self) -> float:
        """The time; tells the decisions if this process was stopped: messages are still in the sockets then."""
        now = time.monotonic()
        if self.seen and now > self.seen + LATE:
            self.decisions.slept(now - self.seen)
        self.seen = now
        return now

    def poll(self, now: float) -> None:
        """Polls processes, output and deadlines."""
        for number, worker in list(self.running.items()):
            self.look_at(number, worker, now)
        waiting, self.waiting = self.waiting, []
        for number in waiting:
            self.spawn(number)
        if self.devices is not None:
            self.devices.trim(self.decisions.wanted)
        if now >= self.told + ALIVE_SECONDS:
            self.told = now
            self.do([Send(number, {"kind": "alive"}) for number in self.running])
        self.pass_on()
        self.learn_checkpoint()
        if self.keeper is not None and self.keeper.poll() is not None and self.over is None:
            self.over = End(1, "The process that keeps jax's coordination services has ended; see keeper.err.")
        self.do(self.decisions.tick(now))
        self.observe(None)

    def look_at(self, number: int, worker: Running, now: float) -> None:
        """Looks whether a worker's process has ended, or is stopped."""
        code = worker.handle.poll()
        if code is not None:
            worker.ended_since = worker.ended_since or now
            if worker.channel is not None and not worker.closed and now - worker.ended_since < 1:
                return  # what it said last is still on its way
            if self.leaves_processes(number):
                return  # they may still use its device
            self.running.pop(number)
            if worker.channel is not None:
                worker.channel.close()
            for tail in self.tails.get(number, []):
                tail.read_lines(whole=True)
            if self.devices is not None:
                self.devices.free(number)
            self.do(self.decisions.exited(number, code, now))
            self.save_children()
        elif worker.handle.is_stopped():
            worker.stopped_since = worker.stopped_since or now
            if now - worker.stopped_since >= STOPPED_SECONDS:
                self.do(self.decisions.stopped(number, now))
        else:
            worker.stopped_since = None

    def leaves_processes(self, number: int) -> bool:
        """Ends processes that a worker with a device has left; returns whether there were any."""
        left = [] if self.devices is None else marked(f"{self.entry.folder}/{number}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return bool(left)

    def learn_checkpoint(self) -> None:
        """Writes down the folder of checkpoints that the script names itself: the job is found by it, too."""
        first = self.decisions.reference
        if first is not None and first.checkpoint and self.entry.checkpoint is None:
            self.entry.checkpoint = first.checkpoint
            with contextlib.suppress(WorkerError):
                self.entry.save(checkpoint=first.checkpoint)

    def pass_on(self) -> None:
        """Passes on what workers have printed."""
        for tails in self.tails.values():
            for tail in tails:
                tail.read_lines()

    # Events

    def greet(self, channel: Channel, hello: Message, now: float) -> None:
        """A worker has connected."""
        number = hello.get("worker")
        worker = self.running.get(number) if isinstance(number, int) else None
        if hello.get("protocol") != PROTOCOL or worker is None or worker.channel is not None:
            why = f"no worker {number!r} is waited for"
            if (spoken := hello.get("protocol")) != PROTOCOL:
                why = layout_message(
                    f"Worker {number!r} speaks version {spoken!r} of the messages, this supervisor version {PROTOCOL}.",
                    remedies=["have the workers' Python use the same version of vnode as `vnode run`"],
                )
            with contextlib.suppress(WireError):
                channel.send({"kind": "end", "why": why, "code": 1})
            channel.close()
            self.record(Record("refused", None, None, why))
            return
        worker.channel = channel
        assert isinstance(number, int)
        self.do(self.decisions.connected(number, int(hello.get("pid") or worker.handle.pid), now))
        self.save_children()  # a process that Ray has started has its number by now

    def find(self, channel: Channel) -> int | None:
        """The worker that has a connection."""
        return next((number for number, worker in self.running.items() if worker.channel is channel), None)

    def hear(self, channel: Channel, message: Message, now: float) -> None:
        """A worker has said something."""
        if (number := self.find(channel)) is not None:
            self.do(self.decisions.message(number, message, now))

    def hang_up(self, channel: Channel, why: str, now: float) -> None:
        """A connection is closed: usually because its process has ended."""
        if (number := self.find(channel)) is None:
            return
        worker = self.running[number]
        worker.closed = True
        for _ in range(20):  # the system closes sockets first, and tells of the end of the process then
            if worker.handle.poll() is not None:
                self.look_at(number, worker, now)
                return
            time.sleep(0.001)
        self.do(self.decisions.closed(number, f"closed its connection: {why}", now))

    def control(self, channel: Channel, message: Message, now: float) -> None:
        """Someone asks for something."""
        kind = message["kind"]
        try:
            if kind == "resize":
                serial = int(message.get("serial", self.newest))
                if serial >= self.newest:  # an older wish may be taken in later, from another connection
                    self.newest = serial
                    self.resize(int(message["workers"]), message.get("devices", []), now)
            elif kind == "stop":
                if not (message.get("once") and self.decisions.stopping):
                    self.stop_now(str(message.get("why") or "asked for"), 143, now)
            elif kind == "kill":
                self.end_now(137, "killed by request")
            elif kind != "status":
                raise WorkerError(f"a supervisor does not know {kind!r}")
            answer = {"kind": "ok", **self.status()}
        except (WorkerError, KeyError, TypeError, ValueError) as error:
            answer = {"kind": "error", "text": str(error)}
        with contextlib.suppress(WireError):
            channel.send(answer)

    def resize(self, workers: int, devices: Sequence[str], now: float) -> None:
        """Someone asks for another number of workers, and grants devices for them.

        Raises:
          WorkerError: so many cannot be.
        """
        if self.devices is not None:
            self.devices.grant(map(str, devices))
        try:
            self.do(self.decisions.resize(workers, now))
        finally:
            if self.devices is not None:
                self.devices.trim(self.decisions.wanted)

    def status(self) -> dict[str, Any]:
        """The status of the job, and its devices."""
        return {**self.decisions.status(), "devices": None if self.devices is None else self.devices.granted}

    def stop_now(self, why: str, code: int, now: float) -> None:
        """The run shall end."""
        if self.decisions.stopping:
            self.end_now(code, f"{why}, again")
        else:
            self.do(self.decisions.stop(why, code, now))

    def end_now(self, code: int, why: str) -> None:
        """All workers are ended at once."""
        self.killed = True
        self.over = self.over or End(code, f"Ended before its time: {why}.")
        for worker in self.running.values():
            worker.handle.kill()

    # Actions

    def do(self, actions: list[Action]) -> None:
        """Carries out the actions of a decision."""
        for action in actions:
            if isinstance(action, Send):
                worker = self.running.get(action.worker)
                if worker is not None and worker.channel is not None:
                    with contextlib.suppress(WireError):  # the thread that reads it will say so
                        worker.channel.send(action.message)
            elif isinstance(action, Spawn):
                self.spawn(action.worker)
            elif isinstance(action, Kill):
                if action.worker in self.running:
                    self.running[action.worker].handle.kill()
                elif action.worker in self.waiting:
                    self.waiting.remove(action.worker)
                    self.events.put(lambda now, number=action.worker: self.do(self.decisions.exited(number, -9, now)))
            elif isinstance(action, Terminate):
                if action.worker in self.running:
                    self.running[action.worker].handle.terminate()
            elif isinstance(action, StartService):
                self.asked.append(action.generation)
                self.tell_keeper(f"start {self.interface}")
            elif isinstance(action, EndService):
                self.tell_keeper(f"end {action.service}")
            elif isinstance(action, Record):
                self.record(action)
            elif isinstance(action, End):
                self.over = self.over or action

    def spawn(self, number: int) -> None:
        """Starts a worker; later, if all devices are in use."""
        environment = {} if not self.decisions.connects else self.membership(number)
        if self.devices is not None:
            device = self.devices.allocate(number) if self.decisions.connects else ",".join(self.devices.granted)
            if device is None:
                self.waiting.append(number)
                return
            environment |= {DEVICE: device, RUN: f"{self.entry.folder}/{number}"}
        try:
            self.running[number] = Running(self.backend.spawn(number, environment))
        except OSError as error:
            self.over = self.over or End(1, f"Worker {number} cannot be started: {error}")
            return
        if number not in self.tails:
            out = Tail(self.entry.folder / f"worker-{number}.out", lambda lines: self.printed(number, lines))
            err = Tail(self.entry.folder / f"worker-{number}.err", lambda lines: self.log_lines(lines, number))
            self.tails[number] = [out, err]
        self.save_children()

    def membership(self, number: int) -> dict[str, str]:
        """The variables by which a worker finds this supervisor."""
        environment = {
            SUPERVISOR: self.address,
            TOKEN_FILE: str(self.entry.token_file),
            NUMBER: str(number),
            JOB: str(self.entry.folder),
        }
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # of one process: jax does not write whole files at once
            self.started += 1
            programs = f"programs-of-{number}" if self.decisions.keeps_programs else f"programs-{self.started}"
            environment |= {"JAX_COMPILATION_CACHE_DIR": str(self.entry.folder / programs), **KEEP_ALL}
        if self.checkpoint is not None:
            environment[CHECKPOINT] = self.checkpoint
        return environment

    def save_children(self) -> None:
        """Writes down which processes there are: a later supervisor of the same folder waits for them."""
        pids = [worker.handle.pid for worker in self.running.values() if worker.handle.pid]
        with contextlib.suppress(WorkerError):  # a full disk stops no training
            self.entry.save(children=[(pid, started(pid)) for pid in pids])

    def printed(self, number: int, lines: Sequence[str]) -> None:
        """A worker has printed lines."""
        if number == self.decisions.speaker():
            write_lines(self.out, [line for line in lines if not line.startswith(CHATTER)])

    def log_line(self, text: str) -> None:
        """Says something itself."""
        write_lines(self.err, [text])

    def log_lines(self, lines: Sequence[str], number: int) -> None:
        """Passes on lines that a worker has written to its stderr."""
        prefix = f"[worker {number}] " if self.decisions.connects else ""
        write_lines(self.err, [prefix + line for line in lines])

    def record(self, record: Record) -> None:
        """Writes an event down."""
        self.observe(self.entry.event(record))

    def observe(self, event: dict[str, Any] | None) -> None:
        """Calls the observer with the status and an event."""
        if self.observer is not None:
            with contextlib.suppress(OSError):  # nobody reads what it prints
                self.observer(self.decisions.status(), event)

    # The keeper

    def start_keeper(self) -> subprocess.Popen[str]:
        """Starts the process that keeps the services."""
        with open(self.entry.folder / "keeper.err", "ab") as err:
            keeper = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "vnode.workers.coordination_keeper",
                ],  # -P: without modules of the user's folder
                env={**OWN_VARIABLES, **QUIET, "PYTHONPATH": search_path()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        threading.Thread(target=self.read_keeper, args=(keeper.stdout,), name="vnode keeper", daemon=True).start()
        return keeper

    def tell_keeper(self, line: str) -> None:
        """Gives the keeper a command."""
        assert self.keeper is not None and self.keeper.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which `poll` finds
            self.keeper.stdin.write(f"{line}\n")

    def read_keeper(self, lines: TextIO) -> None:
        """Takes the keeper's answers, which come in the order of the questions."""
        for line in lines:
            answer = line.strip()
            self.events.put(lambda now, answer=answer: self.answered(answer, now))

    def answered(self, answer: str, now: float) -> None:
        """A service has started."""
        generation = self.asked.pop(0)
        if answer.startswith("error "):
            self.over = self.over or End(1, f"No coordination service of jax can be started: {answer[6:]}")
        else:
            self.do(self.decisions.service(generation, answer, now))

    # The end

    def finish(self, over: End) -> None:
        """Ends all workers, and waits until they are gone."""
        end = time.monotonic() + (0 if self.killed else GRACE)
        arrived = {number for number, worker in self.decisions.workers.items() if not worker.is_starting}
        for number in arrived & set(self.running):
            self.do([Send(number, {"kind": "end", "why": over.why or "the job has ended", "code": over.code})])
        while self.running:
            now = time.monotonic()
            for number, worker in list(self.running.items()):
                if worker.handle.poll() is not None and not self.leaves_processes(number):
                    del self.running[number]
                elif now > end or number not in arrived:
                    worker.handle.kill()
            if now > end + GRACE:
                break
            self.pass_on()
            time.sleep(0.01)
            if self.killed:
                end = min(end, now)
        for tails in self.tails.values():
            for tail in tails:
                tail.read_lines(whole=True)
        if over.why:
            self.log_line(f"vnode: {over.why}")


def write_lines(stream: TextIO, lines: Sequence[str]) -> None:
    """Writes lines at once, as a worker may print thousands of them. Letters that the stream lacks are replaced."""
    text = "".join(f"{line}\n" for line in lines)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # it is closed, or nobody reads it
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()


def listen(interface: str, port: int) -> socket.socket:
    """A socket that takes connections in.

    Raises:
      WorkerError: the address cannot be used.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((interface, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise WorkerError(
            f"the supervisor cannot listen at {interface}:{port}.",
            facts=[str(error)],
            remedies=[
                "if another process uses the port: leave out port= (--port) to get a free one",
                "if this host has no such address: give interface= (--interface) one of its own",
            ],
        ) from error
    return sock


def search_path() -> str:
    """The variable PYTHONPATH with which a child imports this very vnode."""
    here = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
