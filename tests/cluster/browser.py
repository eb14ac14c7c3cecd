"""A headless Chromium that is told what to do over a pipe, by its own protocol (DevTools).

with Browser(folder) as browser:
    browser.open(url)
    browser.ask("document.title")
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class Browser:
    """A browser with one page.

    Args:
      folder: for its profile.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None and shutil.which("bash") is not None
        pipes = [os.pipe(), os.pipe()]
        # Chromium reads 3 and writes 4, so the pipes must have other numbers.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (pipes[0][0], pipes[1][1])]
        with_pipes = ["bash", "-c", f'exec 3<&{theirs[0]} 4>&{theirs[1]}; exec "$@"', "bash"]
        self._process = subprocess.Popen(
            [*with_pipes, CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=theirs,
            env={**os.environ, "HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (pipes[0][0], pipes[1][1], *theirs):
            os.close(fd)
        self._to, self._from = os.fdopen(pipes[0][1], "wb"), os.fdopen(pipes[1][0], "rb")
        self._rest, self._asked, self._session = b"", 0, ""
        self.said: list[dict[str, Any]] = []
        """Events, such as exceptions of scripts and what the console was told."""
        target = next(t for t in self.tell("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.tell("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.tell(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._to.close()  # it ends with the pipe
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._from.close()

    def tell(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and waits for what it returns."""
        self._asked += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._asked, "method": method, "params": arguments, **session}
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._asked:
                assert "error" not in answer, answer
                return answer["result"]
            self.said.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._from.fileno(), 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Goes to an address."""
        self.tell("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, what it comes to."""
        answer = self.tell("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Waits until an expression is true."""
        self.ask(
            f"new Promise((found) => {{ const look = () => ({expression}) ? found() : setTimeout(look, 20); look() }})"
        )

    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions of scripts, and what the browser refused or could not load."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event for event in self.said if event.get("method") in kinds]
