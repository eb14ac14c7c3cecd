"""A progress bar for a run, by `rich`.

Knows terminals. Must not know steps or devices: it is told what to show.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

INTERVAL = 0.1
"""Seconds between two changes of what is shown: more are not seen, and cost time."""


class Display(Protocol):
    """Shows how far a run is."""

    def update(self, done: int, text: str) -> None:
        """Shows how many steps are done, and a few words."""
        ...

    def line(self, text: str) -> None:
        """Prints a line above."""
        ...

    @property
    def due(self) -> bool:
        """Whether an update would be seen."""
        ...


class Nothing:
    """Shows nothing."""

    due = False

    def update(self, done: int, text: str) -> None:
        pass

    def line(self, text: str) -> None:
        pass


class Bar:
    """A bar on standard error."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress = progress
        self.task = task
        self.shown = -INTERVAL

    @property
    def due(self) -> bool:
        return time.monotonic() - self.shown >= INTERVAL

    def update(self, done: int, text: str) -> None:
        self.shown = time.monotonic()
        self.progress.update(self.task, completed=done, text=text)

    def line(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def display(wanted: bool | None, done: int, total: int) -> Iterator[Display]:
    """Something that shows how far a run is, for as long as the context lasts.

    Args:
      wanted: None for a bar if standard error is a terminal and rich is installed.
      done: steps that are done at the start.
      total: steps in all.
    """
    if wanted is None:
        wanted = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    if not wanted:
        yield Nothing()
        return
    if importlib.util.find_spec("rich") is None:
        raise ImportError("the progress bar needs rich: pip install 'vnode[show]'")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}", markup=False))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        yield Bar(progress, progress.add_task("", total=total, completed=done, text=""))
