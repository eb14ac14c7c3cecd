"""Turns messages (dicts of plain data) into frames of bytes, and what a socket delivers into messages.

Knows frames and sockets. Must not know what messages mean.

    frame({"kind": "hello"})  ->  b"VNW1", length, crc32, b'{"kind":"hello"}'
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

from vnode.errors import VnodeError, layout_message

Message = dict[str, Any]
"""Plain data with at least `kind`, a text."""

HEADER = struct.Struct(">4sII")
MAGIC = b"VNW1"
"""The first four bytes of each frame; the digit is the version of the format."""

LARGEST = 16 << 20
"""Bytes of the largest body."""

SEND_SECONDS = 5
"""Seconds that a send may wait for a peer that does not read."""


class WireError(VnodeError):
    """A connection carries something that is no message, or takes nothing in. It must be closed."""


class ClosedError(WireError):
    """The other side has closed the connection."""


def frame(message: Message) -> bytes:
    """The bytes of a message.

    Raises:
      WireError: it is too large, or is not plain data.

    Example:
      >>> frame({"kind": "hello"})[:8]
      b'VNW1\\x00\\x00\\x00\\x10'
    """
    try:
        body = json.dumps(message, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"a message of kind {message.get('kind')!r} is not plain data: {error}") from error
    if len(body) > LARGEST:
        raise WireError(f"a message of kind {message.get('kind')!r} has {len(body):,} bytes, more than {LARGEST:,}.")
    return HEADER.pack(MAGIC, len(body), zlib.crc32(body)) + body


class Frames:
    """Cuts a stream of bytes, delivered in any pieces, into messages.

    Attributes:
      largest: bytes of the largest body that is accepted.

    Example:
      >>> frames = Frames()
      >>> sent = frame({"kind": "hello"}) + frame({"kind": "stop"})
      >>> frames.feed(sent[:30]), frames.feed(sent[30:])
      ([{'kind': 'hello'}], [{'kind': 'stop'}])
    """

    def __init__(self, largest: int = LARGEST) -> None:
        self.largest = largest
        self.buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Takes further bytes.

        Returns:
          The messages that are complete now.

        Raises:
          WireError: the bytes are no frames.
        """
        self.buffer += data
        messages = []
        while len(self.buffer) >= HEADER.size:
            magic, length, checksum = HEADER.unpack_from(self.buffer)
            if magic != MAGIC:
                raise damaged(f"a frame begins with {bytes(magic)!r} in place of {MAGIC!r}")
            if length > self.largest:
                raise damaged(f"a frame says that it has {length:,} bytes, more than {self.largest:,}")
            if len(self.buffer) < HEADER.size + length:
                break
            body = bytes(self.buffer[HEADER.size : HEADER.size + length])
            del self.buffer[: HEADER.size + length]
            if zlib.crc32(body) != checksum:
                raise damaged(f"a frame of {length:,} bytes has another checksum than its header says")
            messages.append(parsed(body))
        return messages


def parsed(body: bytes) -> Message:
    """The message in a frame's body."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise damaged(f"a frame holds no JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise damaged("a frame holds no JSON object with a text `kind`")
    return message


def damaged(fact: str) -> WireError:
    """The error of bytes that are no frames."""
    return WireError(
        layout_message(
            "a connection between a supervisor and a worker carries damaged data.",
            facts=[fact],
            remedies=["have all workers use the same version of vnode", "see whether another program uses the port"],
        )
    )


def connections(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections to a listening socket, until that is closed; where there is no room for one, a moment later."""
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            if listener.fileno() < 0:
                return
            time.sleep(0.1)
        else:
            yield sock


class Channel:
    """Messages over a connected socket. Any thread may send; one receives.

    Args:
      sock: the socket; the channel closes it.
      largest: bytes of the largest message that is accepted, as long as nobody sets `frames.largest`.
    """

    def __init__(self, sock: socket.socket, largest: int = LARGEST) -> None:
        self.sock, self.frames = sock, Frames(largest)
        self.waiting: list[Message] = []
        self.lock = threading.Lock()
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        with contextlib.suppress(OSError):  # a pair of local sockets
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, address: str, timeout: float = 10) -> Channel:
        """Opens a connection.

        Args:
          address: ``host:port``, or the path of a socket of this host.
          timeout: seconds that it may take.

        Raises:
          OSError: nobody listens there.
        """
        if address.startswith("/"):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(timeout)
            try:
                sock.connect(address)
            except OSError:
                sock.close()
                raise
            return cls(sock)
        host, _, port = address.rpartition(":")
        return cls(socket.create_connection((host.strip("[]"), int(port)), timeout))

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
          WireError: the other side is gone or takes nothing in.
        """
        data = frame(message)
        try:
            with self.lock:
                self.sock.sendall(data)
        except BlockingIOError as error:  # a part of the frame may be on its way: nothing can follow it
            self.close()
            raise WireError(f"the other side has received nothing for {SEND_SECONDS} s.") from error
        except OSError as error:
            raise ClosedError(f"the connection is closed: {error}") from error

    def receive(self, timeout: float | None = None) -> Message:
        """Waits for the next message.

        Args:
          timeout: seconds; None waits for as long as it takes.

        Raises:
          TimeoutError: none has come in time.
          ClosedError: the other side has closed the connection.
          WireError: what came is no message.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self.waiting:
            try:
                if end is not None:
                    poll = select.poll()
                    poll.register(self.sock, select.POLLIN)
                    if not poll.poll(max(end - time.monotonic(), 0) * 1000):
                        raise TimeoutError
                data = self.sock.recv(1 << 16)
            except TimeoutError:
                raise TimeoutError(f"no message in {timeout} s") from None
            except (OSError, ValueError) as error:  # ValueError: closed by another thread
                raise ClosedError(f"the connection is closed: {error}") from error
            if not data:
                raise ClosedError("the other side has closed the connection.")
            self.waiting += self.frames.feed(data)
        return self.waiting.pop(0)

    def close(self) -> None:
        """Closes the connection; a thread that receives gets a `ClosedError`. Again does nothing."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
