"""Progress of a run -> a bar: in a terminal by `rich`, in a notebook by the notebook itself.

Knows terminals and notebooks. Must not know steps or devices.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from html import escape
from typing import Any, Protocol, cast

INTERVAL = 0.1
"""Seconds between two updates of the display: more are not seen, and cost time."""


class Display(Protocol):
    """Displays the progress of a run."""

    def update(self, done: int, text: str) -> None:
        """Displays the number of completed steps, and a few words."""
        ...

    def line(self, text: str) -> None:
        """Prints a line above."""
        ...

    @property
    def due(self) -> bool:
        """Whether an update would be displayed now."""
        ...


class NoDisplay:
    """Shows nothing."""

    due = False

    def update(self, done: int, text: str) -> None:
        pass

    def line(self, text: str) -> None:
        pass


class TolerantStream:
    """A stream that may be closed, or whose reader is gone: writing to it never fails."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()


def is_terminal(stream: Any) -> bool:
    """Whether a stream exists, is open, and is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


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


class Output:
    """Output of a notebook cell that is updated. The browser draws it: rich would need `ipywidgets`."""

    def __init__(self, show: Any, done: int, total: int) -> None:
        self.total = total
        self.began = done, time.monotonic()
        self.shown = -INTERVAL
        self.handle = show(self.drawn(done, ""), raw=True, display_id=True)

    @property
    def due(self) -> bool:
        return time.monotonic() - self.shown >= INTERVAL

    def update(self, done: int, text: str) -> None:
        self.shown = time.monotonic()
        self.handle.update(self.drawn(done, text), raw=True)

    def line(self, text: str) -> None:
        print(text)

    def drawn(self, done: int, text: str) -> dict[str, str]:
        """The bar in the formats that a notebook chooses from."""
        first, began = self.began
        words = [f"{done}/{self.total} steps", *([text] if text else [])]
        if first < done < self.total:
            seconds = round((time.monotonic() - began) / (done - first) * (self.total - done))
            words.append(f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left")
        said = "  ".join(words)
        bar = f'<progress value="{done}" max="{self.total}" style="vertical-align:middle;width:20em"></progress>'
        return {"text/plain": said, "text/html": f'<div style="white-space:pre-wrap">{bar}  {escape(said)}</div>'}


def notebook() -> Any:
    """IPython's `display` in a notebook; None elsewhere."""
    if "IPython" not in sys.modules:  # a notebook has imported it
        return None
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    return display if getattr(get_ipython(), "kernel", None) is not None else None


@contextlib.contextmanager
def display(wanted: bool | None, done: int, total: int) -> Iterator[Display]:
    """Displays the progress of a run while the context lasts.

    Args:
      wanted: None for a bar in a notebook, and if standard error is a terminal and rich is installed.
      done: number of steps completed at the start.
      total: number of steps.
    """
    show = None if wanted is False else notebook()
    if show is not None:
        yield Output(show, done, total)
        return
    if wanted is None:
        wanted = is_terminal(sys.stderr) and importlib.util.find_spec("rich") is not None
    if not wanted or sys.stderr is None:
        yield NoDisplay()
        return
    if importlib.util.find_spec("rich") is None:
        raise ImportError("the progress bar needs rich: pip install 'vnode[show]'")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}", markup=False))
    console = Console(file=cast(Any, TolerantStream(getattr(sys.stderr, "rich_proxied_file", sys.stderr))))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        yield Bar(progress, progress.add_task("", total=total, completed=done, text=""))
