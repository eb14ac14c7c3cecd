"""A connection from each process to process 0, by which any end of a process is known at once.

Knows sockets, and the board to which ends are told. Must not know what processes do.

A killed process says nothing, and jax's service misses it after 100 seconds only, whereupon jax aborts all others. But
the operating system closes the connections of a process that ends. So each process has a connection to process 0, over
which both send a byte now and then, and nothing else. So a silent process, too, is known before jax misses it. Where no
connection can be made (by a firewall between the hosts, say), everything works as without it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import selectors
import socket
import time
import weakref
from typing import Any

from vnode.placement.failure_board import SERVICE_GONE, Board, Notice
from vnode.stopped import Resident
from vnode.threads import background

KEY = "vnode/lifeline"

EVERY = 2.0
"""Seconds between two signs of life."""

SILENT = 60.0
"""Seconds of silence after which a process counts as silent: jax aborts all processes after 70 to 100."""

STOPPED = 10.0
"""As `SILENT`, for a stopped process of the same host: the kernel knows it, so no call of C can be the cause."""

LINGER = 10.0
"""Seconds after which the regular end of a process is told to those still running."""

SIGN, GOODBYE = b".", b"E"
KILLED = "without a word: it was killed, or its host has failed"


class Lifeline:
    """This process's end of the connections.

    Args:
      client: a client of the service.
      index: this process's number.
      count: the number of processes.
      address: the service's address, ``host:port``.
      board: the board for notices.
    """

    def __init__(self, client: Any, index: int, count: int, address: str, board: Board) -> None:
        self.client, self.index, self.count, self.board = client, index, count, board
        self.host = address.rsplit(":", 1)[0].strip("[]")
        self.closing = False
        self.sockets: list[socket.socket] = []
        LINES.add(self)
        background(self.serve if index == 0 else self.hold, "vnode-lifeline")

    def serve(self) -> None:
        """The thread of process 0: accepts the others, and watches them."""
        token = secrets.token_hex(8)
        try:
            server = socket.create_server((bind_host(self.host), 0), family=family(self.host), backlog=self.count)
            port = server.getsockname()[1]
            self.client.key_value_set(KEY, json.dumps([self.host, port, token, Resident.this_process()]))
        except Exception:  # errors of sockets, host names, the service
            with contextlib.suppress(Exception):
                self.client.key_value_set(KEY, "null")
            return
        self.sockets.append(server)
        with selectors.DefaultSelector() as selector:
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ)
            Watch(self, selector, server, token).run()

    def hold(self) -> None:
        """The thread of another process: holds its connection, and sees the end of process 0."""
        try:
            said = json.loads(self.client.blocking_key_value_get(KEY, 600_000))
            if said is None:
                return
            host, port, token, where = said
            line = socket.create_connection((host, port), timeout=30)
            self.sockets.append(line)
            line.settimeout(EVERY)
            line.sendall(json.dumps([token, self.index, Resident.this_process()]).encode() + b"\n")
        except Exception:
            return
        heard = tick = time.monotonic()
        silence = ""
        while not self.closing:
            try:
                data = line.recv(64)
            except TimeoutError:
                data = None
            except OSError:
                data = b""
            now = time.monotonic()
            heard += max(0.0, now - tick - 3 * EVERY)  # this process itself was stopped for a while
            tick = now
            if data == b"" or (data and GOODBYE in data):
                if not self.closing:
                    self.board.note(Notice(0, "ended", text="" if data else SERVICE_GONE, lost=not data))
                return
            heard = now if data else heard
            before, silence = silence, why_silent(now - heard, Resident(*where))
            if bool(before) != bool(silence):
                self.board.note(sign_of_life(0, silence))
            if data is None or now - tick > EVERY:
                with contextlib.suppress(OSError):
                    line.sendall(SIGN)

    def close(self, linger: float = 0) -> None:
        """Says goodbye; the others then do not take the end of this process for a failure.

        Args:
          linger: seconds that process 0 waits for the others to end first.
        """
        end = time.monotonic() + linger
        while self.index == 0 and len(self.sockets) > 1 and time.monotonic() < end:
            time.sleep(0.02)
        self.closing = True
        for line in self.sockets:
            with contextlib.suppress(OSError):
                line.setblocking(False)
                line.sendall(GOODBYE)

    def forget(self) -> None:
        """Closes a forked process's copies of the connections: it may outlive this process."""
        for line in self.sockets:
            with contextlib.suppress(OSError):
                os.close(line.fileno())
        self.sockets = []


class Watch:
    """Process 0's view of the others' connections.

    Args:
      line: process 0's lifeline.
      selector: waits for data on connections.
      server: the listening socket.
      token: a secret that connecting processes must send.
    """

    def __init__(self, line: Lifeline, selector: selectors.BaseSelector, server: socket.socket, token: str) -> None:
        self.line, self.selector, self.server, self.token = line, selector, server, token
        self.process: dict[socket.socket, int] = {}
        self.hello: dict[socket.socket, bytes] = {}
        self.heard: dict[socket.socket, float] = {}
        self.where: dict[socket.socket, Resident] = {}
        self.silent: set[socket.socket] = set()
        self.ended: dict[int, float] = {}

    def run(self) -> None:
        """Runs until process 0 ends."""
        tick = time.monotonic()
        while not self.line.closing:
            for key, _ in self.selector.select(EVERY / 4):
                self.accept() if key.fileobj is self.server else self.receive(key.fileobj)  # pyright: ignore
            now = time.monotonic()
            if now - tick < EVERY:
                continue
            paused, tick = max(0.0, now - tick - 2 * EVERY), now  # this process itself was stopped for a while
            self.check_silence(now, paused)

    def accept(self) -> None:
        """Accepts a connection."""
        with contextlib.suppress(OSError):
            line, _ = self.server.accept()
            line.setblocking(False)
            self.line.sockets.append(line)
            self.hello[line] = b""
            self.selector.register(line, selectors.EVENT_READ)

    def receive(self, line: socket.socket) -> None:
        """Receives data of a connection, or its end."""
        try:
            data = line.recv(512)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.heard[line] = time.monotonic()
        if line not in self.process:
            self.introduce(line, data)
        elif not data:
            self.report_end(line, KILLED)
        elif GOODBYE in data:
            self.ended[self.process[line]] = time.monotonic()
            self.close_connection(line)

    def introduce(self, line: socket.socket, data: bytes) -> None:
        """Reads a new connection's first message: the process's number."""
        self.hello[line] += data
        if data and b"\n" not in self.hello[line] and len(self.hello[line]) < 512:
            return
        try:
            token, process, (host, pid) = json.loads(self.hello[line].split(b"\n")[0])
        except ValueError:
            token, process, host, pid = "", -1, "", 0
        if token != self.token:
            self.close_connection(line)
        else:
            self.process[line], self.where[line] = int(process), Resident(host, pid)

    def check_silence(self, now: float, paused: float) -> None:
        """Sends signs of life, and finds silent processes."""
        for line, process in list(self.process.items()):
            with contextlib.suppress(OSError):
                line.send(SIGN)
            self.heard[line] += paused
            silence = why_silent(now - self.heard[line], self.where[line])
            if bool(silence) != (line in self.silent):
                (self.silent.add if silence else self.silent.remove)(line)
                self.line.board.post(sign_of_life(process, silence))
        for process, since in list(self.ended.items()):
            if now - since > LINGER:
                del self.ended[process]
                self.line.board.post(Notice(process, "ended"))

    def report_end(self, line: socket.socket, why: str) -> None:
        """Reports the end of a connection without a goodbye."""
        process = self.process[line]
        self.close_connection(line)
        if not self.line.closing:
            self.line.board.post(Notice(process, "ended", text=why, lost=True))

    def close_connection(self, line: socket.socket) -> None:
        """Forgets a connection."""
        self.selector.unregister(line)
        self.process.pop(line, None)
        self.hello.pop(line, None)
        self.where.pop(line, None)
        self.silent.discard(line)
        if line in self.line.sockets:
            self.line.sockets.remove(line)
        line.close()


def why_silent(seconds: float, where: Resident) -> str:
    """Why a process without a sign of life for some seconds counts as silent; empty if it does not.

    >>> why_silent(11, Resident.this_process()), why_silent(61, Resident("", 0))[:26]
    ('', 'no sign of life for 60 s; ')
    """
    if seconds > STOPPED and where.is_stopped():
        return "it is stopped, by SIGSTOP or a debugger"
    return f"no sign of life for {SILENT:.0f} s; it is stopped, or its host has failed" if seconds > SILENT else ""


def sign_of_life(process: int, silence: str) -> Notice:
    """The notice of a silent process with the reason, or of one that is no longer silent."""
    return Notice(process, "silent", text=silence, lost=True) if silence else Notice(process, "heard")


def family(host: str) -> socket.AddressFamily:
    """A host's address family."""
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]


def bind_host(host: str) -> str:
    """The address at which process 0 listens for connections to a host of this name.

    A host may resolve its own name to an address that no other host can reach. Then it listens at all addresses, like
    the service by default.

    >>> bind_host("127.0.0.1"), bind_host("localhost") in ("127.0.0.1", "::1")
    ('127.0.0.1', True)
    """
    address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    alone = ipaddress.ip_address(address).is_loopback and host not in ("localhost", address)
    return "" if alone else address


LINES: weakref.WeakSet[Lifeline] = weakref.WeakSet()
"""This process's lifelines."""


def after_fork() -> None:
    """Closes a forked process's copies of connections: they would outlive a process that was killed."""
    for line in list(LINES):
        line.forget()
        line.closing = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)
