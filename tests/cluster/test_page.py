"""The status page, as an HTTP client and as a browser see it: a scheduler is a dictionary that the test changes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import re
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster.browser import CHROMIUM, Browser
from vnode.cluster.live import status_page as module
from vnode.cluster.live.status_page import Page
from vnode.errors import ClusterError

HOSTILE = "<img src=x onerror=\"document.documentElement.dataset.pwned='1'\"></script><script>pwned()</script>"


def job(number: int, folder: Path, **others: Any) -> dict[str, Any]:
    return {
        "id": str(number),
        "name": f"job-{number}",
        "state": "running",
        "priority": 5.0,
        "workers": [1, 4],
        "rigid": False,
        "share": 1,
        "devices": [str(number - 1)],
        "training": 1,
        "step": 120,
        "steps": 1000,
        "steps_per_second": 2.5,
        "metrics": {"loss": 0.25},
        "submitted": 1700000001.0,
        "started": 1700000009.0,
        "ended": None,
        "code": None,
        "why": "",
        "command": ["python", "train.py"],
        "folder": str(folder / str(number)),
        **others,
    }


class Served:
    """A page, the snapshot that it shows, and an HTTP client.

    Args:
      folder: for files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.snapshot: dict[str, Any] = {
            "cluster": {
                "devices": ["0", "1", "2", "3"],
                "free": ["2", "3"],
                "policy": "goodput",
                "state": "/srv/cluster.db",
                "pid": 4711,
                "began": 1700000000.0,
                "now": 1700000360.0,
            },
            "jobs": [job(1, folder), job(2, folder)],
            "decisions": [{"time": 1700000009.0, "job": "1", "from": 0, "to": 1, "why": "started 0 -> 1"}],
            "history": [{"job": n, "time": 1700000009.0, "devices": 1} for n in ("1", "2")],
        }
        self.page = Page(self.source, token_file=folder / "token")
        address = urlsplit(self.page.url)
        self.port, self.token = int(address.port or 0), address.query.removeprefix("token=")
        self.opened: list[http.client.HTTPConnection | http.client.HTTPResponse] = []

    def source(self) -> dict[str, Any]:
        return self.snapshot

    def ask(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> http.client.HTTPResponse:
        """Sends a request with just these headers; if there are none, with the right ones."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        right = {"Host": f"127.0.0.1:{self.port}", "Authorization": f"Bearer {self.token}"}
        for name, value in (right if headers is None else headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        self.opened += [connection, answer := connection.getresponse()]
        return answer

    def close(self) -> None:
        """Stops the page and closes the client's connections."""
        self.page.stop()
        for one in self.opened:
            one.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    served.page.start()
    yield served
    served.close()


ROUTES = ("/", "/snapshot", "/events", "/logs/1?stream=out")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:PORT", "Authorization": "Bearer TOKEN"}, 200),
        ({"Host": "localhost:9999", "Authorization": "bearer TOKEN"}, 200),  # ssh -L 9999:...
        ({"Host": "[::1]:9999", "Authorization": "Bearer TOKEN", "Origin": "http://[::1]:9999"}, 200),
        ({"Host": "127.0.0.1:PORT"}, 401),
        ({"Host": "127.0.0.1:PORT", "Authorization": "Bearer "}, 401),
        ({"Host": "127.0.0.1:PORT", "Authorization": "Bearer TOKENx"}, 401),
        ({"Host": "127.0.0.1:PORT", "Authorization": "Bearer t\xf6ken"}, 401),
        ({"Host": "127.0.0.1:PORT", "Authorization": "Basic TOKEN"}, 401),
        ({"Host": "attacker.example:PORT", "Authorization": "Bearer TOKEN"}, 400),
        ({"Host": "127.0.0.1.attacker.example", "Authorization": "Bearer TOKEN"}, 400),
        ({"Host": "localhost:x@attacker.example", "Authorization": "Bearer TOKEN"}, 400),
        ({"Host": "localhost:1", "Authorization": "Bearer TOKEN", "Origin": "http://localhost:2"}, 403),
        ({"Host": "localhost:1", "Authorization": "Bearer TOKEN", "Origin": "https://localhost:1"}, 403),
        ({"Host": "localhost:1", "Authorization": "Bearer TOKEN", "Origin": "null"}, 403),
    ],
)
def test_who_is_let_in(served: Served, headers: dict[str, str], status: int) -> None:
    headers = {
        name: value.replace("PORT", str(served.port)).replace("TOKEN", served.token) for name, value in headers.items()
    }
    for route in ROUTES:
        answer = served.ask(route, headers)
        assert answer.status == status, route
        if status != 200:
            assert b"job-1" not in answer.read()


def test_the_token_in_the_address(served: Served) -> None:
    host = {"Host": f"127.0.0.1:{served.port}"}
    asked = ["?token={}", "?token=x&token={}", "?token=x", "?token=", "?token=%ff", "?token={:.20}", "?tokens={}"]
    statuses = [served.ask("/snapshot" + query.format(served.token), host).status for query in asked]
    assert statuses == [200, 200, 401, 401, 401, 401, 401]


def test_nothing_but_reading(served: Served) -> None:
    methods = ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"]
    assert {served.ask(route, method=method).status for route in ROUTES for method in methods} == {405}
    for route in ROUTES:  # of /events too, which else never ends
        answer = served.ask(route, method="HEAD")
        assert (answer.status, answer.read()) == (200, b"")


def test_every_answer_is_private_and_runs_only_the_pages_own_script(served: Served) -> None:
    answers = [served.ask(route) for route in (*ROUTES, "/nowhere", "/logs/99")]
    answers += [served.ask("/", method="POST"), served.ask("/", {"Host": "x"}), served.ask("/", {"Host": "localhost"})]
    assert [answer.status for answer in answers] == [200, 200, 200, 200, 404, 404, 405, 400, 401]
    for answer in answers:
        assert answer.headers.get_all("Cache-Control") == ["no-store"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    rules = dict(rule.split(" ", 1) for rule in answers[0].headers["Content-Security-Policy"].split("; "))
    html = answers[0].read()
    for tag in (b"script", b"style"):
        (text,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
        hashed = base64.b64encode(hashlib.sha256(text).digest()).decode()
        assert rules[f"{tag.decode()}-src"] == f"'sha256-{hashed}'"
    assert re.findall(rb"(?:src|href)=\"(.*?)\"|url\((.*?)\)|@import", html) == [(b"data:,", b"")]  # no other files


def events_of(answer: http.client.HTTPResponse) -> Iterator[tuple[list[str], Any]]:
    """The lines before the data of each event, and the data."""
    head: list[str] = []
    for line in iter(lambda: answer.readline().decode().rstrip("\n"), "event: message-that-never-comes"):
        if line.startswith("data: "):
            yield head, json.loads(line.removeprefix("data: "))
            head = []
        elif line:
            head.append(line)
        elif answer.isclosed():
            return


def test_events_tell_changes_and_end_with_the_page(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = served.ask("/events")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = events_of(answer)
    head, first = next(events)
    assert head == ["event: message"] and first == served.snapshot == json.load(served.ask("/snapshot"))
    served.snapshot = {**first, "cluster": {**first["cluster"], "now": 1700000999.0}}  # no change
    monkeypatch.setattr(module, "HEARTBEAT", 0.0)
    head, beat = next(events)
    assert head == [": heartbeat", "event: alive"] and beat in (1700000360.0, 1700000999.0)
    served.snapshot = {**served.snapshot, "jobs": [job(1, served.folder, step=121)]}
    assert next(data for head, data in events if "event: message" in head) == served.snapshot
    served.page.stop()
    assert {tuple(head) for head, _ in events} <= {(": heartbeat", "event: alive")}
    with pytest.raises(ConnectionRefusedError):
        served.ask("/")


def test_numbers_that_json_lacks(served: Served) -> None:
    metrics = {"loss": float("nan"), "best": float("-inf"), "none": None, "fine": 0.5}
    served.snapshot = {**served.snapshot, "jobs": [job(1, served.folder, metrics=metrics)]}
    text = served.ask("/snapshot").read()
    found = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert found["jobs"][0]["metrics"] == {"loss": "nan", "best": "-inf", "none": None, "fine": 0.5}


def test_a_scheduler_whose_state_cannot_be_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, Any]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(module, "HEARTBEAT", 0.0)
    whole = served.page._source
    served.page._source = broken
    events = events_of(served.ask("/events"))
    told = {"trouble": "OSError: the disk is gone"}
    assert [next(events), next(events)] == [(["event: trouble"], told)] * 2  # and never that all is well
    answer = served.ask("/snapshot")
    assert (answer.status, json.load(answer)) == (503, told)
    served.page._source = whole
    assert next(head for head, _ in events if "event: trouble" not in head) == ["event: message"]


def test_logs(served: Served) -> None:
    folder = served.folder / "1"
    folder.mkdir()
    (folder / "out").write_text("".join(f"line {i}\n" for i in range(1000)))
    (folder / "err").write_bytes(b"caf\xe9\nno end")
    (served.folder / "secret").write_text("secret")
    (folder / "secret").write_text("secret")

    def read(path: str) -> tuple[int, str]:
        answer = served.ask(path)
        return answer.status, answer.read().decode()

    assert read("/logs/1?stream=out") == (200, "".join(f"line {i}\n" for i in range(800, 1000)))
    assert read("/logs/1") == read("/logs/1?stream=out")
    assert read("/logs/1?stream=err") == (200, "caf�\nno end")
    assert served.ask("/logs/1").headers["Content-Type"] == "text/plain; charset=utf-8"
    assert read("/logs/2?stream=out") == (200, "")  # it has written nothing yet
    for path in ("/logs/1?stream=secret", "/logs/1?stream=../../secret", "/logs/1?stream=", "/logs/1/../secret"):
        assert read(path)[0] in (400, 404)
    for path in ("/logs/..", "/logs/%2e%2e", "/logs/..%2f1", "/logs/1%2f..%2f1", "/logs/3", "/logs/", "/logs/1%00"):
        assert read(path + "?stream=out")[0] == 404, path


def test_the_end_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    lines = [f"{i:06d} " + "x" * 4000 for i in range(300)]  # 200 of them are more than is read
    for end in ("", "\n"):
        path.write_text("\n".join(lines) + end)
        found = module.last_lines(path).split("\n")
        shown = found[:-1] if end else found
        assert 0 < len(shown) < 100 and shown == lines[-len(shown) :]
    path.write_text("x" * 1_000_000)  # not one end of a line
    assert module.last_lines(path) == "x" * module.TAIL


def test_the_token_file(tmp_path: Path) -> None:
    file, tokens = tmp_path / "token", set()
    file.write_text("old")
    file.chmod(0o644)
    for _ in range(2):
        page = Page(dict, token_file=file)
        page.stop()  # it was never started
        assert file.stat().st_mode & 0o777 == 0o600
        assert page.url.endswith(f"/?token={file.read_text()}") and len(file.read_text()) >= 40
        tokens.add(file.read_text())
    assert len(tokens) == 2 and [*tmp_path.iterdir()] == [file]
    with pytest.raises(ClusterError, match=r"cannot be written to .*nowhere(.|\n)*No such file"):
        Page(dict, token_file=tmp_path / "nowhere" / "token")


def test_a_port_in_use(served: Served) -> None:
    for port in (served.port, 1 << 16):
        with pytest.raises(ClusterError, match=rf"cannot listen on port {port} (.|\n)*What to do:\n  - "):
            Page(served.source, port=port, token_file=served.folder / "token")
    assert (served.folder / "token").read_text() == served.token  # that of the page that has the port
    assert json.load(served.ask("/snapshot")) == served.snapshot


def test_a_port_is_free_once_the_page_is_stopped(tmp_path: Path) -> None:
    first = Served(tmp_path)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    first.page.start()
    reader = socket.create_connection(("127.0.0.1", first.port))  # a client that says nothing, and stays
    assert first.ask("/").status == 200
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    first.close()
    second = Page(first.source, port=first.port, token_file=tmp_path / "token")
    second.stop()
    reader.close()


@pytest.mark.parametrize("package", ["uvicorn", "starlette.applications"])
def test_packages_that_are_missing(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ClusterError, match=r"pip install 'vnode\[cluster\]'"):
        Page(dict, token_file=tmp_path / "token")
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
def test_in_a_browser(served: Served, tmp_path: Path) -> None:
    """Names and output of jobs are text; changes arrive; keys open details; a silent scheduler is told of."""
    ended = [
        job(n, tmp_path, state="failed", ended=1700000100.0 + n, share=0, devices=[], why=f"{HOSTILE}\nValueError: no")
        for n in range(3, 63)
    ]
    hostile = job(2, tmp_path, name=HOSTILE, why=HOSTILE, command=[HOSTILE], metrics={HOSTILE: float("nan")})
    served.snapshot["jobs"] = [job(1, tmp_path), hostile, *ended]
    served.snapshot["decisions"][0]["why"] = HOSTILE
    served.snapshot["cluster"]["policy"] = HOSTILE
    Path(hostile["folder"]).mkdir()
    (Path(hostile["folder"]) / "out").write_text(f"\x1b[31m{HOSTILE}\x1b[0m\n10%\r20%")
    with Browser(tmp_path / "profile") as browser:
        browser.open(served.page.url)
        browser.wait_for("document.querySelector('#connection.live') && document.querySelector('#shares .area')")
        names = "[...document.querySelectorAll('#active .name')].map((name) => name.textContent)"
        first, second = browser.ask(names)
        assert first == "job-1" and HOSTILE.startswith(second.rstrip("…")) and len(second) > 20
        assert browser.ask("[...document.querySelectorAll('#devices li')].map((box) => box.title)") == [
            "device 0: job 1 (job-1)",
            f"device 1: job 2 ({second})",
            "device 2: free",
            "device 3: free",
        ]
        # Details by the keyboard.
        browser.ask("document.querySelectorAll('#active .who')[1].focus()")
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            browser.tell("Input.dispatchKeyEvent", type=kind, **key)
        browser.wait_for("(document.querySelector('.detail pre') || {textContent: ''}).textContent.length > 9")
        assert browser.ask("document.querySelector('.detail pre').textContent") == f"{HOSTILE}\n20%"
        assert HOSTILE in browser.ask("document.querySelector('.detail .why').textContent")
        # Of those that ended, the last 50.
        assert browser.ask("document.querySelectorAll('#ended tr.job').length") == 0
        browser.ask("document.querySelector('#ended-section').open = true")
        browser.wait_for("document.querySelectorAll('#ended tr.job').length === 50")
        assert browser.ask("document.querySelector('#ended .name').textContent") == "job-62"
        assert browser.ask("document.querySelector('#ended .c-why span').textContent") == "ValueError: no"
        # A change arrives, and leaves the focus and the open details where they are.
        changed = [{**served.snapshot["jobs"][0], "state": "succeeded", "ended": 1700000300.0}, hostile, *ended]
        served.snapshot = {**served.snapshot, "jobs": changed}
        browser.wait_for(f"{names}.length === 1")
        assert browser.ask("document.activeElement.className + document.querySelectorAll('.detail').length") == "who1"
        # Nothing of it has become an element or has run, and the browser has refused nothing.
        assert browser.ask("[document.images.length, document.scripts.length]") == [0, 1]
        assert browser.ask("document.documentElement.dataset.pwned") is None
        assert browser.complaints() == []
        served.page.stop()
        browser.wait_for("document.querySelector('#connection.lost')")
        assert "does not answer" in browser.ask("document.querySelector('#connection').textContent")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
def test_the_picture_of_shares(served: Served, tmp_path: Path) -> None:
    """The areas of jobs are those of their shares times seconds, whatever changes at once or before the window."""
    changes = {"1": [(-4000, 3), (-1800, 1), (-900, 0), (-600, 2)], "2": [(-3000, 1), (-1800, 2), (-1800, 3)], "9": []}
    now = served.snapshot["cluster"]["now"] = time.time()
    served.snapshot["history"] = sorted(
        ({"job": name, "time": now + t, "devices": n} for name, steps in changes.items() for t, n in steps),
        key=lambda change: change["time"],
    )
    expected = {}
    for name, steps in changes.items():
        ends = [*[max(t, -3600) for t, _ in steps[1:]], 0]
        expected[name] = sum(n * (end - max(t, -3600)) for (t, n), end in zip(steps, ends, strict=False)) / 3600
    paths = """[...document.querySelectorAll('#shares .area')].map((area) => [
        area.textContent.split(' ')[1], area.getAttribute('d'),
        document.querySelector('#shares .axis').getBBox().width,
        document.querySelector('#shares .axis').getBBox().y - document.querySelector('#shares .total').getBBox().y])"""
    with Browser(tmp_path / "profile") as browser:
        browser.open(served.page.url)
        browser.wait_for("document.querySelector('#shares .area')")
        found = {}
        for name, path, width, height in browser.ask(paths):
            found[name] = area_of(path) / (width * height) * len(served.snapshot["cluster"]["devices"])
    assert found == pytest.approx({name: area for name, area in expected.items() if area}, rel=0.02)


def area_of(path: str) -> float:
    """The area within an SVG path of M, H, V and Z, by the shoelace formula."""
    total, x, y, start = 0.0, 0.0, 0.0, (0.0, 0.0)
    for kind, words in re.findall(r"([MHVZ])([^MHVZ]*)", path):
        before = (x, y)
        if kind == "M":
            x, y = map(float, words.split())
            start = before = (x, y)
        elif kind == "H":
            x = float(words)
        elif kind == "V":
            y = float(words)
        else:
            x, y = start
        total += (before[0] * y - x * before[1]) / 2
    return abs(total)


def test_idle_connections_leave_room(tmp_path: Path) -> None:
    """Of a hundred that ask for nothing, a few dozen are kept; a reader is answered when they are gone."""
    page = Page(lambda: {"cluster": {"now": 0}, "jobs": []}, token_file=tmp_path / "token")
    page.start()
    try:
        address = urlsplit(page.url)
        idle = [socket.create_connection(("127.0.0.1", address.port or 0)) for _ in range(100)]
        ended = 0
        for sock in idle:
            sock.settimeout(0.02)
            with contextlib.suppress(TimeoutError):
                try:
                    ended += sock.recv(1) == b""
                except ConnectionResetError:
                    ended += 1
        assert 30 <= ended < 100
        for sock in idle:
            sock.close()
        end = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                assert urllib.request.urlopen(page.url.replace("/?", "/snapshot?")).status == 200
                break
            assert time.monotonic() < end
    finally:
        page.stop()
