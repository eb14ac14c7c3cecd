"""Sends the state of a run from the workers that hold it to those that need it, as checksummed bytes over sockets.

Knows sockets, and states as boxes of bytes (`vnode.elastic.state_boxes`). Must not know generations, nor who needs
what.

Each worker has a server. A worker that needs a state asks the holders for their manifests (the arrays, and which boxes
each holder has). Then it fetches a share of the boxes from every holder, all at once. A holder that dies, or does not
answer in time, is an error that names it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import secrets
import socket
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from vnode.elastic.state_boxes import Box, HeldState, Leaf, Request, part_of
from vnode.errors import ProcessError, layout_message
from vnode.placement.leaves import bytes_of
from vnode.threads import background

STALL = 10.0
"""Seconds without a byte after which a holder counts as gone."""

OFFER = 30.0
"""Seconds within which a holder must offer the state that it was said to have."""


class Handover:
    """This worker's server, from which other workers fetch the parts of the state that it holds.

    Args:
      interface: the address at which other workers reach it.
      token: which they must know.
      past: gives the metrics of the steps so far, as plain data.

    Attributes:
      address: ``host:port``.
      types: the arrays of the state as this worker trains with them; none while it does not train.
    """

    def __init__(self, interface: str, token: str, past: Callable[[], list[Any]] = list) -> None:
        self.token, self.past = token, past
        self.offers: dict[int, HeldState] = {}
        self.types: tuple[Leaf, ...] = ()
        self.changed = threading.Condition()
        self.server = socket.create_server((interface, 0), backlog=64)
        self.address = f"{interface}:{self.server.getsockname()[1]}"
        self.closed = False
        background(self.serve, "vnode-handover")

    def offer(self, generation: int, held: HeldState) -> None:
        """Offers a state, with which a generation is to begin; earlier offers are withdrawn."""
        with self.changed:
            self.offers = {generation: held}
            self.changed.notify_all()

    def withdraw(self) -> None:
        """Withdraws the offer, so that the arrays may be freed."""
        with self.changed:
            self.offers = {}

    def serve(self) -> None:
        """The thread that accepts connections."""
        while not self.closed:
            try:
                line, _ = self.server.accept()
            except OSError:
                return
            background(lambda line=line: self.answer(line), "vnode-handover")

    def answer(self, line: socket.socket) -> None:
        """The thread of a connection."""
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError),
            line,
            line.makefile("rb") as stream,
        ):
            line.settimeout(STALL)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (text := stream.readline(64 << 20)) != b"":
                asked = json.loads(text)
                if not secrets.compare_digest(str(asked.get("token")), self.token):
                    return
                line.settimeout(STALL)
                if asked["kind"] == "types":
                    send_line(line, {"leaves": [leaf.to_json() for leaf in self.types]})
                    continue
                if asked["kind"] == "past":
                    send_line(line, {"past": self.past()})
                    continue
                held = self.await_offer(int(asked["generation"]))
                if held is None:
                    send_line(line, {"error": "it does not offer that state"})
                elif asked["kind"] == "manifest":
                    send_line(line, manifest_of(held))
                else:
                    for i, box in asked["boxes"]:
                        send_box(line, extract_box(held, i, tuple((start, stop) for start, stop in box)))

    def await_offer(self, generation: int) -> HeldState | None:
        """The state that is offered to a generation; waits until there is one."""
        with self.changed:
            self.changed.wait_for(lambda: generation in self.offers or self.closed, OFFER)
            return self.offers.get(generation)

    def close(self) -> None:
        """Ends the server."""
        self.closed = True
        with self.changed:
            self.offers = {}
            self.changed.notify_all()
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


def manifest_of(held: HeldState) -> dict[str, Any]:
    """The manifest of a held state: step, arrays and boxes, without the bytes."""
    return {
        "step": held.step,
        "leaves": [leaf.to_json() for leaf in held.leaves],
        "boxes": [[[list(cut) for cut in box] for box in parts] for parts in held.parts],
    }


def extract_box(held: HeldState, i: int, box: Box) -> np.ndarray:
    """Cuts a box of an array out of a held one that contains it.

    Raises:
      KeyError: it is not.
    """
    part = part_of(held.parts[i], box)
    if part is None:
        raise KeyError(box)
    return part


def send_line(line: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends JSON and the end of the line."""
    line.sendall(json.dumps(message).encode() + b"\n")


def send_box(line: socket.socket, value: np.ndarray) -> None:
    """Sends the bytes of a box, behind their number and their checksum."""
    data = bytes_of(value)
    send_line(line, {"bytes": data.nbytes, "crc": zlib.crc32(data)})
    line.sendall(data)


class Source:
    """A connection to one holder.

    Args:
      name: what errors call it.
      address: of its server, ``host:port``.
      token: which it asks for.
      generation: the state of which generation is wanted.
    """

    def __init__(self, name: str, address: str, token: str, generation: int) -> None:
        self.name, self.token, self.generation = name, token, generation
        host, port = address.rsplit(":", 1)
        try:
            self.line = socket.create_connection((host, int(port)), timeout=STALL)
        except OSError as error:
            raise self.failed(error) from error
        self.line.settimeout(OFFER + STALL)
        self.stream = self.line.makefile("rb", buffering=1 << 20)

    def request(self, kind: str, boxes: Sequence[Request] = ()) -> None:
        """Asks for a manifest, or for boxes."""
        send_line(self.line, {"token": self.token, "generation": self.generation, "kind": kind, "boxes": list(boxes)})

    def types(self) -> list[Leaf]:
        """The arrays of the state as the worker trains with them; none if it does not train.

        Raises:
          ProcessError: it does not answer.
        """
        try:
            self.request("types")
            return [Leaf.from_json(leaf) for leaf in json.loads(self.stream.readline())["leaves"]]
        except (OSError, ValueError, KeyError) as error:
            raise self.failed(error) from error

    def manifest(self) -> tuple[int, list[Leaf], list[list[Box]]]:
        """The step, the arrays, and the boxes of each that the holder has.

        Raises:
          ProcessError: it does not answer.
        """
        try:
            self.request("manifest")
            said = json.loads(self.stream.readline())
            if "error" in said:
                raise ValueError(said["error"])
            leaves = [Leaf.from_json(leaf) for leaf in said["leaves"]]
            boxes = [[tuple((a, b) for a, b in box) for box in parts] for parts in said["boxes"]]
        except (OSError, ValueError, KeyError) as error:
            raise self.failed(error) from error
        return said["step"], leaves, boxes

    def past_metrics(self) -> list[Any]:
        """The metrics of the steps so far, as plain data.

        Raises:
          ProcessError: the holder does not answer.
        """
        try:
            self.request("past")
            return json.loads(self.stream.readline())["past"]
        except (OSError, ValueError, KeyError) as error:
            raise self.failed(error) from error

    def boxes(self, leaves: Sequence[Leaf], requests: Sequence[Request]) -> dict[Request, np.ndarray]:
        """Fetches boxes.

        Raises:
          ProcessError: the holder does not answer, or the bytes are damaged.
        """
        found: dict[Request, np.ndarray] = {}
        try:
            self.line.settimeout(STALL)
            self.request("boxes", requests)
            for i, box in requests:
                value = np.empty([stop - start for start, stop in box], jnp.dtype(leaves[i].dtype))
                data = bytes_of(value)
                said = json.loads(self.stream.readline())
                if said.get("bytes") != data.nbytes:
                    raise ValueError(said.get("error", f"{said.get('bytes')} bytes for {data.nbytes}"))
                fill(self.stream, data)
                if zlib.crc32(data) != said["crc"]:
                    raise ValueError(f"the checksum of state{leaves[i].path} differs from the sender's")
                found[i, box] = value
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise self.failed(error) from error
        return found

    def failed(self, error: Exception) -> ProcessError:
        """The error of a holder that does not send its boxes."""
        return ProcessError(
            layout_message(f"the state cannot be fetched from {self.name}.", facts=[f"{type(error).__name__}: {error}"])
        )

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self.stream.close()
            self.line.close()


def fill(stream: Any, data: memoryview) -> None:
    """Reads bytes into a buffer until it is full.

    Raises:
      EOFError: there are not so many.
    """
    done = 0
    while done < data.nbytes:
        count = stream.readinto(data[done:])
        if not count:
            raise EOFError("the connection has ended")
        done += count


def fetch_boxes(
    sources: Mapping[str, Source], leaves: Sequence[Leaf], asked: Mapping[str, Sequence[Request]]
) -> dict[Request, np.ndarray]:
    """Fetches boxes from several holders at once.

    Args:
      sources: the connections, by name.
      leaves: the arrays of the state.
      asked: for each holder, the boxes to fetch from it.

    Raises:
      ProcessError: one of the holders does not send its boxes.
    """
    if not asked:
        return {}
    with concurrent.futures.ThreadPoolExecutor(len(asked), "vnode-fetch") as pool:
        futures = [pool.submit(sources[name].boxes, leaves, requests) for name, requests in asked.items()]
        parts = [future.result() for future in futures]
    return {request: value for part in parts for request, value in part.items()}
