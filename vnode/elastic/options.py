"""The options of a run, checked before anything begins.

Knows options and their allowed values. Must not know how they are carried out.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import operator
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from vnode.errors import layout_message

CHECKPOINT_SECONDS = 600.0
"""Between two checkpoints, where nothing else is asked for."""
CHECKPOINTS_KEPT = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The arguments of `vnode.elastic.run`.

    Raises:
      ValueError: an option is not what it must be, or has no effect without another one.
    """

    steps: int
    start: int
    devices: Any
    compile_ahead: bool | Literal["warm_up"]
    prefetch: int
    keep_every: int | None
    checkpoint: str | os.PathLike[str] | None
    checkpoint_every: int | None
    checkpoint_seconds: float | None
    checkpoints_kept: int | None
    callback: Callable[..., Any] | Sequence[Callable[..., Any]] | None
    metrics_every: int
    history_kept: int
    evaluate: Callable[..., Any] | None
    evaluate_every: int | None
    evaluate_callback: Callable[..., Any] | Sequence[Callable[..., Any]] | None
    best_metric: str | None
    best_mode: Literal["min", "max"]
    peak_flops: float | None
    writers: Sequence[Callable[[int, dict[str, Any]], Any]]
    on_nan: Literal["continue", "stop"]
    stop_signals: Iterable[signal.Signals]
    alive: Callable[[Any], bool]
    progress: bool | None

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not (value is None and name in MAY_BE_NONE):
                object.__setattr__(self, name, check_integer(name, value, least))
        seconds = self.checkpoint_seconds
        if seconds is not None and not (isinstance(seconds, numbers.Real) and 0 < seconds < math.inf):
            raise ValueError(f"checkpoint_seconds must be a positive time, or None, not {seconds!r}")
        if self.start > self.steps:
            raise ValueError(f"start={self.start} is beyond steps={self.steps}, which counts from the very first step")
        self._one_of("compile_ahead", (False, True, "warm_up"), 'False, True or "warm_up"')
        self._one_of("on_nan", ("continue", "stop"), '"continue" or "stop"')
        self._one_of("progress", (None, False, True), "None, False or True")
        self._needs("checkpoint", "checkpoint_every", "checkpoint_seconds", "checkpoints_kept")
        self._needs("evaluate", "evaluate_every", "evaluate_callback", "best_metric")
        self._needs("checkpoint", "best_metric")
        self._one_of("best_mode", ("min", "max"), '"min" or "max"')
        if self.best_mode == "max" and self.best_metric is None:
            raise ValueError("best_mode does nothing without best_metric")
        if self.best_metric is not None and not isinstance(self.best_metric, str):
            raise ValueError(f"best_metric must be the name of a metric of evaluations, not {self.best_metric!r}")
        peak = self.peak_flops
        if peak is not None and not (isinstance(peak, numbers.Real) and 0 < peak < math.inf):
            raise ValueError(f"peak_flops must be operations a second of one device, or None, not {peak!r}")
        for name in ("callback", "evaluate_callback"):
            value = getattr(self, name)
            if not all(map(callable, callables(value))):
                raise ValueError(f"{name} must be callable, or several of them, not {value!r}")
        if self.on_nan == "stop" and self.keep_every is None and self.checkpoint is None:
            raise ValueError('on_nan="stop" goes back to a good state: it needs keep_every, or checkpoint')
        for name in ("evaluate", "alive"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ValueError(f"{name} must be callable, not {value!r}")
        if callable(self.writers) or not all(map(callable, self.writers)):
            raise ValueError(f"writers must be a list of callables, not {self.writers!r}")

    @property
    def save_seconds(self) -> float:
        """Seconds after which a checkpoint is due."""
        if self.checkpoint_seconds is not None:
            return self.checkpoint_seconds
        return CHECKPOINT_SECONDS if self.checkpoint_every is None else math.inf

    @property
    def callbacks(self) -> tuple[Callable[..., Any], ...]:
        """Those of steps."""
        return callables(self.callback)

    @property
    def evaluate_callbacks(self) -> tuple[Callable[..., Any], ...]:
        """Those of evaluations."""
        return callables(self.evaluate_callback)

    def _one_of(self, name: str, allowed: tuple[Any, ...], words: str) -> None:
        value = getattr(self, name)
        if not any(value is entry for entry in allowed if not isinstance(entry, str)) and not (
            isinstance(value, str) and value in allowed
        ):
            raise ValueError(f"{name} must be {words}, not {value!r}")

    def _needs(self, needed: str, *names: str) -> None:
        """Refuses options that do nothing without another."""
        given = [name for name in names if getattr(self, name) is not None]
        if getattr(self, needed) is None and given:
            raise ValueError(
                layout_message(
                    f"{given[0]} does nothing without {needed}.",
                    facts=[f"{name}={getattr(self, name)!r}" for name in given],
                    remedies=[f"give {needed}=... too", f"or leave out {', '.join(given)}"],
                )
            )


LEAST = {
    "steps": 0,
    "start": 0,
    "prefetch": 0,
    "keep_every": 1,
    "checkpoint_every": 1,
    "checkpoints_kept": 1,
    "metrics_every": 1,
    "history_kept": 0,
    "evaluate_every": 1,
}
"""Options that are whole numbers, and the least that they may be."""

MAY_BE_NONE = ("keep_every", "checkpoint_every", "checkpoints_kept", "evaluate_every")


def check_integer(name: str, value: Any, least: int) -> int:
    """Checks that an option is a whole number.

    Raises:
      ValueError: it is none, or too small.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        none = ", or None" if name in MAY_BE_NONE else ""
        raise ValueError(f"{name} must be a whole number, at least {least}{none}, not {value!r}")
    return number


def callables(given: Callable[..., Any] | Sequence[Callable[..., Any]] | None) -> tuple[Callable[..., Any], ...]:
    """One callable, several or none, as several."""
    if given is None or callable(given):
        return () if given is None else (given,)
    return tuple(given) if isinstance(given, list | tuple) else (given,)  # pyright: ignore[reportReturnType]


def takes(function: Callable[..., Any], arguments: int) -> bool:
    """Whether a function must be called with at least so many positional arguments.

    Those with a default value do not count: they hold what the function is to remember.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a built-in that does not tell
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional) >= arguments
