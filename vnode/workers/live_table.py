"""Turns the status of a job into a live table in a terminal.

Knows `rich`. Must not know how jobs run.
"""

from __future__ import annotations

import io
import sys
import time
from collections import Counter
from typing import Any, Self, TextIO, cast

import rich.table
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from vnode.workers.messages import SHOWN_EVENTS, event_line

INTERVAL = 0.25


class Above(io.TextIOBase):
    """A stream whose lines appear above the table."""

    def __init__(self, console: Console) -> None:
        self.console, self.rest = console, ""

    def write(self, text: str) -> int:
        """Takes text; prints the lines that are whole."""
        *lines, self.rest = (self.rest + text).split("\n")
        for whole in lines:
            self.console.print(Text(whole), soft_wrap=True)
        return len(text)


class Table:
    """A live table of workers, nodes, steps per second, resizes and losses, on stderr.

    Args:
      title: what runs.

    Attributes:
      out, err: streams for what workers print.
    """

    def __init__(self, title: str) -> None:
        self.title, self.console = title, Console(stderr=True)
        self.live = Live(console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self.err = cast(TextIO, Above(self.console))
        self.out = self.err if sys.stdout.isatty() else sys.stdout
        self.counts: Counter[str] = Counter()
        self.drawn, self.seen = 0.0, (time.monotonic(), 0)
        self.speed = 0.0

    def __enter__(self) -> Self:
        self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.live.__exit__(*error)

    def observe(self, status: dict[str, Any], event: dict[str, Any] | None) -> None:
        """Shows a new status or event."""
        if event is not None:
            self.counts[event["event"]] += 1
            if event["event"] in SHOWN_EVENTS and event["event"] != "trains":
                self.console.print(Text(f"vnode: {event_line(event)}", style="dim"))
        now = time.monotonic()
        if now >= self.drawn + INTERVAL:
            self.drawn = now
            self.live.update(self.draw(status, now), refresh=True)

    def draw(self, status: dict[str, Any], now: float) -> Group:
        """The table, and a line below it."""
        before, step = self.seen
        if now >= before + 1 and status["step"] is not None:
            self.speed = max(status["step"] - step, 0) / (now - before)
            self.seen = now, status["step"]
        table = rich.table.Table(
            "rank", "worker", "pid", "nodes", "doing", title=self.title, title_justify="left", min_width=40
        )
        for worker in status["workers"]:
            table.add_row(*(str(worker[key]) for key in ("rank", "worker", "pid", "nodes", "doing")))
        numbers = " ".join(
            f"{key}={value:.4g}" for key, value in status["metrics"].items() if isinstance(value, int | float)
        )
        starting = f", {status['starting']} starting" if status["starting"] else ""
        below = (
            f"step {status['step'] if status['step'] is not None else '-'}, {self.speed:.1f} steps/s, "
            f"{len(status['workers'])} of {status['wanted']} workers{starting}, {self.counts['resize']} resizes, "
            f"{self.counts['lost']} losses  {numbers}"
        )
        return Group(table, Text(below, style="dim"))
