"""Turns a pytree of metrics into a dictionary by name, a line of text, or plain data.

Knows pytrees of metrics. Must not know which step they are of, nor who is told.
"""

from __future__ import annotations

import base64
import collections
import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from vnode.placement.placement import Placement
from vnode.show.units import several


def by_name(metrics: Any, prefix: str = "") -> dict[str, Any]:
    """Metrics as writers take them: a flat dictionary, scalars as numbers of Python.

    Args:
      metrics: a pytree of arrays on the host; one without names is called ``"loss"``. Those whose names would be equal
        have the names of `jax.tree_util.keystr`.
      prefix: of each name.

    Example:
      >>> by_name({"loss": np.float32(0.5), "layers": [np.ones(2), 3]}, "evaluate/")
      {'evaluate/layers/0': array([1., 1.]), 'evaluate/layers/1': 3, 'evaluate/loss': 0.5}
      >>> by_name({"a": {"b": 1}, "a/b": 2, "c": 3})
      {"['a']['b']": 1, "['a/b']": 2, 'c': 3}
    """
    paths = [path for path, _ in jax.tree.leaves_with_path(metrics)]
    names = [keystr(path, simple=True, separator="/") or "loss" for path in paths]
    times, named = collections.Counter(names), {}
    names = [name if times[name] == 1 else keystr(path) for path, name in zip(paths, names, strict=True)]
    if len(set(names)) < len(names):  # such a name is another one's, or two keys print alike
        names = [f"{keystr(path)} ({i})" for i, path in enumerate(paths)]
    for name, leaf in zip(names, jax.tree.leaves(metrics), strict=True):
        named[prefix + name] = leaf.item() if isinstance(leaf, np.ndarray | np.generic) and np.ndim(leaf) == 0 else leaf
    return named


def scalar_metrics(metrics: Any) -> dict[str, float]:
    """The metrics that are single numbers, by name.

    >>> scalar_metrics({"loss": 0.5, "by class": np.zeros(3)})
    {'loss': 0.5}
    """
    return {name: float(value) for name, value in by_name(metrics).items() if isinstance(value, bool | int | float)}


def pack_metrics(metrics: Any) -> list[list[Any]]:
    """Metrics on the host as plain data: type, shape and bytes of each leaf.

    >>> pack_metrics({"loss": np.float32(0.5)})
    [['float32', [], 'AAAAPw==']]
    """
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(metrics)]
    return [[str(each.dtype), [*each.shape], base64.b64encode(each.tobytes()).decode()] for each in arrays]


def unpack_metrics(said: Sequence[Sequence[Any]], like: Any) -> Any:
    """The reverse of `pack_metrics`.

    Args:
      said: what it gave.
      like: metrics of the same structure.
    """
    parts = [np.frombuffer(base64.b64decode(data), jnp.dtype(kind)).reshape(shape) for kind, shape, data in said]
    return jax.tree.unflatten(jax.tree.structure(like), parts)


def are_computed(metrics: Any) -> bool:
    """Whether metrics are computed."""
    return all(leaf.is_ready() for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array))


def not_finite(named: dict[str, Any]) -> list[str]:
    """The names of metrics with infinities or NaN; only the loss is looked at, if there is one of that name."""
    found = []
    for name, value in ({"loss": named["loss"]} if "loss" in named else named).items():
        with contextlib.suppress(TypeError):  # not a kind of number
            found += [] if np.isfinite(value).all() else [name]
    return found


def scalars(metrics: Any) -> str:
    """The first scalar metrics in a few words."""
    named = by_name(metrics)
    numbers = {name: value for name, value in named.items() if isinstance(value, bool | int | float)}
    return "  ".join(f"{name.replace('/', '.')} {value:.4g}" for name, value in list(numbers.items())[:4])


def metrics_line(metrics: Any, placement: Placement) -> str:
    """Scalar metrics and the placement, in a few words."""
    counts = sorted(set(placement.counts), reverse=True)
    return "  ".join([scalars(metrics), f"{several(placement.size, 'device')} x {'/'.join(map(str, counts))} nodes"])
