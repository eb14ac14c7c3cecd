"""Fails a test of this folder that has a program compiled: it belongs to another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

COMPILED: list[str] = []
COMPILATION = "/jax/core/compile/backend_compile_duration"


def listen(event: str, seconds: float, **facts: Any) -> None:
    """Takes down the name of a program that was compiled."""
    name = str(facts.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
    if event == COMPILATION and not hasattr(jax.lax, name):  # a single operation, of which arrays are made
        COMPILED.append(name)


jax.monitoring.register_event_duration_secs_listener(listen)


@pytest.fixture(autouse=True)
def _compiles_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    COMPILED.clear()
    yield
    if not request.node.get_closest_marker("tpu"):
        assert not COMPILED, "tests of tests/unit compile no programs"
