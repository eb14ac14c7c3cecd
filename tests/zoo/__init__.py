"""The zoo: train, evaluation and inference steps as users write them, for the whole batch on one device.

Knows what a case is and keeps the list. Must not know vnode: a step here is ordinary JAX code that has never heard of
virtual nodes, and its reference is itself under `jax.jit`.

A file per item of the promise (frameworks, vision, language, ...), a function per case::

    @case(item=4, batch=12)
    def masked_mean():
        def step(state, batch): ...
        return Program(step, (state, batch))

The function runs once per precision, with float64 on or off; `kit.real()` is the precision at hand.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

FAMILIES = (
    "frameworks",
    "frameworks_nnx",
    "vision",
    "language",
    "losses",
    "randomness",
    "loops",
    "batchnorm",
    "contrastive",
    "research",
    "precision",
    "metrics",
    "inference",
    "pmap_style",
    "effects",
    "views",
    "repositories",
    "semisupervised",
)

Outer = Callable[[Callable[..., Any]], Callable[..., Any]]


def unchanged(step: Callable[..., Any]) -> Callable[..., Any]:
    return step


@dataclasses.dataclass(frozen=True)
class Program:
    """A step with arguments for it.

    Attributes:
      step: the user's function.
      args: what it is called with.
      options: keyword arguments of `vnode.virtualize`, except the number of nodes.
      outer: what the user does to the step from outside (`jax.grad`, a `lax.scan` over steps); done to both the
        original and the virtualized step.
      jit: compiles the original step.
      reference: for steps whose result is meant to differ from the original, the number of nodes to the function
        that is right for it.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    outer: Outer = unchanged
    jit: Callable[..., Any] = jax.jit
    reference: Callable[[int], Callable[..., Any]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One entry of the zoo.

    Attributes:
      name: the function's name.
      item: which item of the promise it stands for.
      batch: the number of examples B.
      make: builds the program.
      float64: whether it runs in float64 too; not a step that names its own precision.
      coarsest: the coarsest type that the step computes in, if that is not the precision of the run.
      exact: nothing is rounded, the results are equal.
      expect: for steps that must be refused: the name of an error class of `vnode`, and a pattern in its message.
      nodes: numbers of nodes that make sense, if not all.
      lines: how many lines it prints on so many nodes.
      rare: runs with the whole matrix only.
      nnx: the step mutates flax.nnx modules in place and goes through `vnode.nnx.virtualize`.
    """

    name: str
    item: int
    batch: int
    make: Callable[[], Program]
    float64: bool = True
    coarsest: str | None = None
    exact: bool = False
    expect: tuple[str, str] | None = None
    nodes: tuple[int, ...] | None = None
    lines: Callable[[int], int] = lambda nodes: 0
    rare: bool = False
    nnx: bool = False


_cases: dict[str, Case] = {}


def case(*, item: int, batch: int = 16, **attributes: Any) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Adds the program that a function builds to the zoo; see `Case` for the attributes."""

    def add(make: Callable[[], Program]) -> Callable[[], Program]:
        name = make.__name__
        if name in _cases:
            raise ValueError(f"two cases are called {name}")
        _cases[name] = Case(name=name, item=item, batch=batch, make=make, **attributes)
        return make

    return add


def cases() -> tuple[Case, ...]:
    """Every case, in the order of the files."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
    return tuple(_cases.values())
