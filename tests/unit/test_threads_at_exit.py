"""Threads that the end of the process waits for, and what they hold when they end.

Knows `vnode.threads`. Must not know what threads do.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vnode import threads

HELD: contextvars.ContextVar[object] = contextvars.ContextVar("held")


class Held:
    """Says when it goes."""

    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def __del__(self) -> None:
        self.told.append(self.name)


def wait(go: threading.Event, held: object) -> None:
    assert go.wait(30)


def test_what_a_thread_holds_goes_before_its_protection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work, and its context: either may hold the last client of XLA, whose end is no place to be cut off."""
    told: list[str] = []

    @contextmanager
    def parked() -> Iterator[None]:
        yield
        told.append("open")

    monkeypatch.setattr(threads, "parked", parked)

    def begin() -> threading.Thread:
        go = threading.Event()
        token = HELD.set(Held(told, "context"))
        thread = threads.background(functools.partial(wait, go, Held(told, "work")), "vnode-test")
        HELD.reset(token)
        go.set()
        return thread

    begin().join(10)
    assert sorted(told[:2]) == ["context", "work"] and told[2:] == ["open"]


def test_the_end_waits_for_a_thread_and_says_so_if_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not for ever: then it is left where it is."""
    go = threading.Event()
    monkeypatch.setattr(threads, "TELL_SECONDS", 0.01)
    thread = threads.background(functools.partial(wait, go, None), "vnode-test", awaited=True)
    with caplog.at_level(logging.WARNING, "vnode"):
        threads.await_threads(0.05)
        assert thread.is_alive() and "when vnode-test has ended" in caplog.text
        go.set()
        threads.await_threads(30)
        assert not thread.is_alive()
