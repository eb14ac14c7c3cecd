"""Turns snapshots of a scheduler into a live web page on this machine.

Knows HTTP, server-sent events and the files of the page. Must not know how the scheduler decides, or keeps its state.

    Page(scheduler.snapshot, token_file=Path("cluster.token")) -> http://127.0.0.1:41733/?token=...
    GET /events              -> data: {"cluster": {...}, "jobs": [...], ...} whenever something has changed
    GET /logs/7?stream=err   -> the last lines that job 7 wrote to stderr

The page's own files hold no text of jobs. The script puts such text into the document as text, never as HTML.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from vnode.cluster.live.status_data import to_json
from vnode.cluster.live.token_guard import guard_application
from vnode.cluster.svg import COLOURS
from vnode.errors import ClusterError

PERIOD = 0.4
"""Seconds between two looks at the scheduler, at least."""

HEARTBEAT = 5.0
"""Seconds after which a page is told that nothing has changed."""

READERS, PATIENCE = 64, 10.0
"""Connections at a time, and seconds that each has to ask for something."""

LINES, TAIL = 200, 256 * 1024
"""Lines of a job's output that are shown, and the bytes at its end in which they are looked for."""


class Page:
    """A page that shows what a scheduler does, for who has the token.

    Args:
      source: returns the scheduler's state as plain data: ``cluster``, ``jobs``, ``decisions``, ``history``. It is
        called in the page's thread.
      port: of 127.0.0.1; 0 takes a free one.
      token_file: is written anew, for its owner's eyes only.

    Attributes:
      url: the address, with the token.

    Raises:
      ClusterError: the port is in use, the token cannot be written, or a package is missing.
    """

    def __init__(self, source: Callable[[], dict[str, Any]], *, port: int = 0, token_file: Path) -> None:
        try:
            import uvicorn
        except ImportError as why:
            raise missing_package(why) from why
        self._source = source
        token = secrets.token_urlsafe(32)
        self._html, policy = document()
        config = uvicorn.Config(
            guard_application(self._application(), token, policy),
            loop="asyncio",
            http=limited_protocol(),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None
        self._looked_at, self._look = -math.inf, Look("", "", "", "0")
        self._socket = listen(port)
        try:  # not before: the token of a page that has the port stays
            write_secret(token_file, token)
        except BaseException:
            self._socket.close()
            raise
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/?token={token}"

    def start(self) -> None:
        """Answers from now on, in a thread that ends with the process."""
        # Not of the main thread, uvicorn leaves signals alone.
        self._thread = threading.Thread(target=self._serve, name="vnode status page", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the streams, closes the port."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout=10)
        self._socket.close()

    def _serve(self) -> None:
        asyncio.run(self._answer())

    async def _answer(self) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda *_: None
        )  # what a reader does is not the scheduler's log
        await self._server.serve(sockets=[self._socket])

    def _application(self) -> Any:
        try:
            from starlette.applications import Starlette
            from starlette.requests import Request
            from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
            from starlette.routing import Route
        except ImportError as why:
            raise missing_package(why) from why

        async def page(_: Request) -> Response:
            return HTMLResponse(self._html)

        async def snapshot(_: Request) -> Response:
            look = self._latest()
            return Response(look.data, 200 if look.event == "message" else 503, media_type="application/json")

        async def events(request: Request) -> Response:
            if request.method == "HEAD":
                return Response(media_type="text/event-stream")
            return StreamingResponse(self._stream(), media_type="text/event-stream")

        async def logs(request: Request) -> Response:
            stream, job = request.query_params.get("stream", "out"), request.path_params["job"]
            if stream not in ("out", "err"):
                return PlainTextResponse("stream is out or err.\n", 400)
            folders = [entry["folder"] for entry in self._source()["jobs"] if entry["id"] == job]
            if not folders:
                return PlainTextResponse("There is no such job.\n", 404)
            return PlainTextResponse(last_lines(Path(folders[0]) / stream))

        routes = {"/": page, "/snapshot": snapshot, "/events": events, "/logs/{job}": logs}
        return Starlette(routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()])

    def _latest(self) -> Look:
        """A look at the scheduler that is at most a moment old: several readers cost as much as one."""
        if time.monotonic() - self._looked_at >= PERIOD / 2:
            try:
                self._look = look_at(self._source())
            except Exception as why:  # the page outlives it: the next look may succeed
                data = to_json({"trouble": f"{type(why).__name__}: {why}"})
                self._look = Look("trouble", data, data, "0")
            self._looked_at = time.monotonic()
        return self._look

    async def _stream(self) -> AsyncIterator[str]:
        """The scheduler's state whenever it has changed, and signs of life between."""
        told, told_at = "", -math.inf
        while not self._server.should_exit:
            look = self._latest()
            due = time.monotonic() - told_at >= HEARTBEAT
            if look.state != told or (due and look.event == "trouble"):
                yield f"event: {look.event}\ndata: {look.data}\n\n"
                told, told_at = look.state, time.monotonic()
            elif due:
                # Scripts are not told of comments, and are to notice a scheduler that is stopped.
                yield f": heartbeat\nevent: alive\ndata: {look.now}\n\n"
                told_at = time.monotonic()
            await asyncio.sleep(PERIOD)


def limited_protocol() -> type[asyncio.Protocol]:
    """Uvicorn's protocol, limited to few connections that must send a request soon: descriptors are for jobs."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Limited(H11Protocol):
        refused = False

        def connection_made(self, transport: Any) -> None:
            self.refused = len(self.connections) >= READERS
            if self.refused:
                transport.abort()
                return
            super().connection_made(transport)
            self.loop.call_later(PATIENCE, self.end_if_silent)

        def end_if_silent(self) -> None:
            """Ends a connection that has asked for nothing."""
            if self.cycle is None and not self.transport.is_closing():
                self.transport.abort()

        def data_received(self, data: bytes) -> None:
            if not self.refused:
                super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            if not self.refused:
                super().connection_lost(exc)

    return Limited


class Look(NamedTuple):
    """A look at the scheduler.

    Attributes:
      event: its name as a server-sent event: "message", or "trouble" if the scheduler's state could not be had.
      data: JSON.
      state: text that is another one if anything but the time of day has changed.
      now: the scheduler's time of day, as JSON.
    """

    event: str
    data: str
    state: str
    now: str


def look_at(snapshot: dict[str, Any]) -> Look:
    """A look at a scheduler that says this of itself."""
    cluster = snapshot["cluster"]
    others = to_json({key: value for key, value in snapshot.items() if key != "cluster"})
    lasting = to_json({key: value for key, value in cluster.items() if key != "now"})
    data = f'{{"cluster": {to_json(cluster)}, {others[1:]}'
    return Look("message", data, lasting + others, to_json(cluster["now"]))


def last_lines(path: Path) -> str:
    """The last lines of a file, which may still grow; nothing if there is no such file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        lines = file.read(TAIL).split(b"\n")
    if size > TAIL and len(lines) > 1:
        del lines[0]  # its beginning is not there
    ended = lines[-1] == b""
    return b"\n".join(lines[-LINES - ended :]).decode("utf-8", "replace")


def listen(port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1.

    Raises:
      ClusterError: it cannot listen there.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a restart waits for old connections
        listening.bind(("127.0.0.1", port))
        listening.listen()
    except (OSError, OverflowError) as why:
        listening.close()
        raise ClusterError(
            f"The status page cannot listen on port {port} of 127.0.0.1.",
            facts=[(why.strerror if isinstance(why, OSError) else None) or str(why)],
            remedies=["name another port", "port 0 takes a free one"],
        ) from why
    return listening


def write_secret(path: Path, text: str) -> None:
    """Writes a file that only its owner may read, in place of one that was there.

    Raises:
      ClusterError: it cannot be written.
    """
    beside = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}")
    try:
        with open(beside, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
        beside.replace(path)
    except OSError as why:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise ClusterError(
            f"The token of the status page cannot be written to {os.fspath(path)!r}.",
            facts=[why.strerror or str(why)],
            remedies=["name a file in a folder that exists and is writable"],
        ) from why


def document() -> tuple[str, str]:
    """The page, and the policy that lets its own script and style run and nothing else."""
    beside = Path(__file__)
    html, style, script = (beside.with_suffix(kind).read_text(encoding="utf-8") for kind in (".html", ".css", ".js"))
    for mark, text in (("{{style}}", style), ("{{script}}", script), ("{{colours}}", " ".join(COLOURS[:-1]))):
        html = html.replace(mark, text, 1)
    policy = (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def digest(text: str) -> str:
    """The name of a script or a style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def missing_package(why: ImportError) -> ClusterError:
    """The error of a package that is not installed."""
    return ClusterError(
        "The status page needs starlette and uvicorn.",
        facts=[str(why)],
        remedies=["pip install 'vnode[cluster]'"],
    )
