"""An array and the plain step's -> whether they have the same bits, differ by rounding, or by more.

Knows arrays on the host, and how far each element moves when roundings change. Must not know steps, devices, nor how
anything is drawn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MULTIPLE = 8.0
"""An element may differ from the plain step's by so many times the effect of other roundings."""

EQUAL, ROUNDING, DIFFERENT, UNKNOWN = "same bits", "rounding", "DIFFERENT", "not compared"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array that the step returns.

    Attributes:
      path: of it in what the step returns.
      kind: dtype and shape.
      verdict: beside the plain step's: ``"same bits"``, ``"rounding"`` (within the bound), ``"DIFFERENT"``, or ``"not
        compared"`` where there is no plain step to compare with, or its rounding is unknown.
      relative: the largest difference as a fraction of the leaf's largest value.
      ulps: the largest difference of an element in units in its own last place; large where terms cancel.
      rounding: the largest difference of an element as a multiple of what the plain step's own moves by when its
        roundings change. Up to `MULTIPLE` is rounding.
      wrong: elements that differ by more.
      size: elements.
      bits: for each place, whether the bits are those of the first.
      note: what else there is to say.
    """

    path: str
    kind: str
    verdict: str
    relative: float
    ulps: float
    rounding: float
    wrong: int
    size: int
    bits: tuple[bool, ...]
    note: str = ""


def to_host(leaf: Any) -> np.ndarray:
    """An array on the host; of random keys their data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have the same type, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The distances of elements, float64: 0 where both are the same infinity or NaN, infinity where one is."""
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    with np.errstate(all="ignore"):
        x, y = a.astype(wide), b.astype(wide)
        apart = np.abs(x - y)
        alike = (a == b) | (np.isnan(x) & np.isnan(y))
        return np.where(alike, 0.0, np.where(np.isfinite(apart), apart, np.inf))


def compare_leaf(path: str, got: np.ndarray, want: Any, spread: Any, bits: tuple[bool, ...], known: bool) -> Leaf:
    """Compares an array with the plain step's.

    Args:
      path: of it.
      got: the virtualized step's.
      want: the plain step's, or None.
      spread: how far its elements move with other roundings, or None.
      bits: on each place, whether they are the first's.
      known: whether `spread` is.
    """
    leaf = Leaf(path, f"{got.dtype}{list(got.shape)}".replace(" ", ""), UNKNOWN, 0.0, 0.0, 0.0, 0, got.size, bits)
    if want is None:
        return leaf
    if got.dtype != want.dtype or got.shape != want.shape:
        note = f"{want.dtype}{list(want.shape)} in the plain step"
        return dataclasses.replace(leaf, verdict=DIFFERENT, wrong=got.size, note=note)
    apart = distance(got, want)
    if same_bits(got, want) or not apart.any():
        return dataclasses.replace(leaf, verdict=EQUAL if same_bits(got, want) else ROUNDING)
    magnitude = np.abs(want.astype(np.complex128 if np.iscomplexobj(want) else np.float64))
    finite = np.isfinite(magnitude)
    relative = float(apart.max() / max(magnitude[finite].max(initial=0.0), np.finfo(np.float64).tiny))
    inexact = jnp.issubdtype(want.dtype, jnp.inexact)
    last = 1.0
    if inexact:
        info = jnp.finfo(want.dtype)
        last = np.ldexp(float(info.eps), np.frexp(np.fmax(np.where(finite, magnitude, 1.0), float(info.tiny)))[1] - 1)
    ulps = float((apart / last).max())
    if not known:
        return dataclasses.replace(leaf, relative=relative, ulps=ulps, note="its rounding is unknown: too large")
    allowed = rounding_bound(spread, last) if inexact else spread
    with np.errstate(all="ignore"):
        ratio = np.where(apart > 0, apart / allowed, 0.0)
    wrong = int((ratio > MULTIPLE).sum())
    verdict = DIFFERENT if wrong else ROUNDING
    return dataclasses.replace(
        leaf, verdict=verdict, relative=relative, ulps=ulps, rounding=float(ratio.max()), wrong=wrong
    )


def rounding_bound(spread: np.ndarray, last: Any) -> np.ndarray:
    """The distances that elements move with other roundings, given a few runs.

    An element may have moved little in all of them by chance. So it counts as moved by at least one unit in the last
    place, and by as much as the median of the array.
    """
    finite = spread[np.isfinite(spread)]
    typical = float(np.median(finite)) if finite.size else 0.0
    return np.fmax(np.where(np.isfinite(spread), spread, typical), np.fmax(typical, last))
