"""What counts as equal to the step as written: equal up to what rounding does to the step itself.

Knows arrays. Must not know vnode, nor any test.

The error of a leaf is measured in units of what rounding can do to that leaf: one unit in the last place of its
greatest value, and what the step itself makes of arguments that are moved by one unit each. What is zero in exact
arithmetic, and is rounding noise in both results, moves with the arguments as much as it differs; so no tolerance is
fitted to a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROUNDINGS = 50
"""How many times what one rounding does a result may be off. The greatest sums in tests have some thousand terms, whose
roundings add up like the square root of their number."""

FEW = 4
"""The same where a step rounds to 16 bits or fewer: nothing is added up in such types."""

MOVED = 3
"""How many times the arguments are moved, each element up or down by chance."""


def assert_same(got: Any, step: Callable[..., Any], *args: Any) -> None:
    """Asserts that a result is what a step makes of arguments, in structure, shapes, types and values.

    Args:
      got: the result.
      step: the reference, a pure function.
      *args: its arguments.

    Raises:
      AssertionError: it is not.
    """
    compare(got, *references(step, *args))


def assert_close(got: Any, want: Any) -> None:
    """The same for a reference that is there already, whose sums are exact or do not cancel: see `eighths`."""
    compare(got, jax.tree.map(host, want), [], unit_of(want))


def references(step: Callable[..., Any], *args: Any) -> tuple[Any, list[Any], float]:
    """What a step makes of arguments, what it makes of them where they are moved, and by which unit they are."""
    rng = np.random.default_rng(0)
    want = step(*args)
    size = unit_of((args, want))
    moved = [step(*moved_by(args, size, rng)) for _ in range(MOVED)]
    return *(jax.tree.map(host, tree) for tree in (want, moved)), size


def unit_of(tree: Any) -> float:
    """The unit in the last place of the coarsest type in a tree."""
    types = [leaf.dtype for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return max([float(jnp.finfo(dtype).eps) for dtype in types if jnp.issubdtype(dtype, jnp.inexact)], default=0.0)


def eighths(values: Any) -> np.ndarray:
    """Small numbers as multiples of 1/8, in float32: their sums are exact in any order, as are those of products."""
    return (np.round(np.asarray(values) * 8) / 8).astype(np.float32)


def moved_by(args: Any, size: float, rng: np.random.Generator) -> Any:
    """Arguments whose fractions are moved by `size`, relatively; whole numbers (masks, counts) were never rounded."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        wide = np.asarray(x).astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)
        fraction = np.isfinite(wide) & (wide != np.rint(wide))
        signs = rng.choice([-1.0, 1.0], wide.shape)
        return jnp.asarray(np.multiply(wide, 1.0 + size * signs, out=wide, where=fraction).astype(x.dtype))

    return jax.tree.map(leaf, args)


def compare(got: Any, want: Any, moved: Sequence[Any], size: float) -> None:
    """Asserts that two trees are equal up to rounding, in structure, shapes, types and values.

    Args:
      got: the result.
      want: what it is compared with.
      moved: the same as `want` for arguments moved by a unit of rounding.
      size: that unit.

    Raises:
      AssertionError: they differ, with each leaf that does.
    """
    got_structure, want_structure = jax.tree.structure(got), jax.tree.structure(want)
    assert got_structure == want_structure, f"structure: {got_structure} instead of {want_structure}"
    problems = []
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), *map(jax.tree.leaves, moved), strict=True
    )
    for (path, w), g, *others in leaves:
        problem = difference(host(g), w, others, size)
        if problem:
            problems.append(f"{jax.tree_util.keystr(path) or 'result'}: {problem}")
    assert not problems, "\n".join(problems)


def host(leaf: Any) -> Any:
    """A numpy array of a leaf, key data for keys; leaves that are no arrays stay as they are."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int):
        return leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def difference(got: Any, want: Any, moved: Sequence[Any], size: float) -> str | None:
    """What is different, in words, or None."""
    if not isinstance(want, np.ndarray):
        return None if got is want or got == want else f"{got!r} instead of {want!r}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = int(np.sum(got != want))
        return f"{wrong} of {want.size} elements differ: {_head(got)} instead of {_head(want)}" if wrong else None
    wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    size = max(size, float(jnp.finfo(want.dtype).eps)) if size else 0.0
    got, want, kind = got.astype(wide), want.astype(wide), want.dtype.name
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return f"NaN or infinity: {_head(got)} instead of {_head(want)}"
    got, want = np.where(finite, got, 0.0), np.where(finite, want, 0.0)
    error = np.max(np.abs(got - want)[finite], initial=0.0)
    shifts = [np.abs(other.astype(wide) - want)[finite] for other in moved]
    noise = size * np.max(np.abs(want[finite]), initial=0.0) + np.max(shifts, initial=0.0, where=np.isfinite(shifts))
    if error > (FEW if size > 1e-4 else ROUNDINGS) * noise:
        times = error / noise if noise else np.inf
        return f"off by {error:.1e}, {times:.1f} roundings, in {kind}: {_head(got)} instead of {_head(want)}"
    return None


def _head(values: np.ndarray) -> str:
    return np.array2string(values.ravel()[:6], precision=6, separator=",")
