"""Values that depend on no argument -> NumPy constants.

Knows the equations by which index arrays are commonly made: an iota, broadcast, normalised, reshaped. A value is kept
at size one along every dimension that it does not vary along, so that folding the positions ``[B, T, 1]`` of a batch
costs ``B``. Must not know what the values are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

Atom = Var | Literal

LIMIT = 1 << 24
"""Elements of the largest constant that is folded; larger ones count as unknown."""

DEPTH = 50
"""The most equations in a chain that is folded; index arrays take few, and models have thousands."""

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "name": lambda x: x,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "optimization_barrier": lambda x: x,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "select_n": lambda which, *cases: np.choose(which.astype(np.intp), cases),
    "sign": np.sign,
    "stop_gradient": lambda x: x,
    "sub": np.subtract,
}
"""Equations that NumPy evaluates at size one along dimensions of constant values."""


FOLDED = {*ELEMENTWISE, "broadcast_in_dim", "iota", "reshape", "slice", "squeeze", "transpose"}


def shrink(value: np.ndarray) -> np.ndarray:
    """Shrinks `value` to size one along the dimensions that it does not vary along."""
    for axis, n in enumerate(value.shape):
        if n > 1:
            first = value[(slice(None),) * axis + (slice(0, 1),)]
            if np.array_equal(np.broadcast_to(first, value.shape), value):
                value = first
    return value


def fold(eqn: JaxprEqn, operands: Sequence[np.ndarray]) -> np.ndarray | None:
    """The result of an equation (one of `FOLDED`) of known operands, or None if it cannot be kept small."""
    name, params = eqn.primitive.name, eqn.params
    shape = eqn.outvars[0].aval.shape
    if len(eqn.outvars) != 1:
        return None
    if name == "iota":
        axis = params["dimension"]
        return np.arange(shape[axis]).reshape(tuple(n if d == axis else 1 for d, n in enumerate(shape)))
    if name in ELEMENTWISE:
        return ELEMENTWISE[name](*operands)
    if name == "broadcast_in_dim":
        known = dict(zip(params["broadcast_dimensions"], operands[0].shape, strict=True))
        return operands[0].reshape(tuple(known.get(d, 1) for d in range(len(shape))))
    if name == "reshape":
        before = eqn.invars[0].aval.shape
        if params["dimensions"] is not None or [n for n in before if n != 1] != [n for n in shape if n != 1]:
            return None
        kept = iter([k for n, k in zip(before, operands[0].shape, strict=True) if n != 1])
        return operands[0].reshape(tuple(1 if n == 1 else next(kept) for n in shape))
    if name == "squeeze":
        return operands[0].squeeze(tuple(params["dimensions"]))
    if name == "transpose":
        return operands[0].transpose(params["permutation"])
    if name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        return operands[0][
            tuple(slice(*b) if k != 1 else slice(None) for b, k in zip(bounds, operands[0].shape, strict=True))
        ]
    return None


def known_value(
    atom: Atom, definition: Callable[[Var], JaxprEqn | None], constant: Callable[[Var], Any]
) -> np.ndarray | None:
    """The value of `atom` if it depends on no argument.

    Args:
      atom: a variable or literal of a jaxpr.
      definition: the equation that defines a variable, or None.
      constant: the value of a variable that the jaxpr closes over, or None.

    Returns:
      The value, at size one along dimensions that it does not vary along, or None if it is not known.
    """
    memo: dict[Var, np.ndarray | None] = {}

    def start(atom: Atom) -> np.ndarray | None:
        value = atom.val if isinstance(atom, Literal) else constant(atom)
        dtype = getattr(atom.aval, "dtype", None)
        if value is None or not isinstance(dtype, np.dtype) or dtype.kind not in "biuf":
            return None
        return None if np.size(value) > LIMIT else shrink(np.asarray(value, dtype))

    def visit(atom: Atom, depth: int) -> np.ndarray | None:
        if isinstance(atom, Literal):
            return start(atom)
        if atom not in memo:
            eqn = definition(atom)
            memo[atom] = start(atom) if eqn is None else evaluate(eqn, depth)
        return memo[atom]

    def evaluate(eqn: JaxprEqn, depth: int) -> np.ndarray | None:
        dtype = getattr(eqn.outvars[0].aval, "dtype", None)
        if eqn.primitive.name not in FOLDED or depth == 0 or not isinstance(dtype, np.dtype):
            return None
        if dtype.kind not in "biuf":
            return None
        operands = []
        for operand in eqn.invars:
            value = visit(operand, depth - 1)
            if value is None:
                return None
            operands.append(value)
        with np.errstate(all="ignore"):
            result = fold(eqn, operands)
            return None if result is None else np.asarray(result).astype(dtype)

    return visit(atom, DEPTH)


def truncated_division(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Division of integers towards zero; undefined where the divisor is zero."""
    safe = np.where(y == 0, 1, y)
    return np.sign(x) * np.sign(safe) * (np.abs(x) // np.abs(safe))


OF_INTEGERS = {**ELEMENTWISE, "div": truncated_division}
"""Equations that NumPy evaluates."""


def tabulated(
    atom: Any, equations: Sequence[JaxprEqn], program_ids: Sequence[Var], axes: Sequence[int], grid: Sequence[int]
) -> np.ndarray | None:
    """The value of an atom for all program ids of some axes, int64 ``[size of each axis]``; None if it is not known."""
    shape = tuple(grid[axis] for axis in axes)
    known: dict[Var, np.ndarray] = {}
    for k, axis in enumerate(axes):
        along = np.arange(grid[axis], dtype=np.int32)
        known[program_ids[axis]] = along.reshape(tuple(-1 if d == k else 1 for d in range(len(axes))))

    def read(i: Any) -> np.ndarray | None:
        return np.asarray(i.val, i.aval.dtype) if isinstance(i, Literal) else known.get(i)

    for eqn in equations:
        operands = [read(i) for i in eqn.invars]
        if eqn.primitive.name not in OF_INTEGERS or any(value is None for value in operands) or len(eqn.outvars) != 1:
            continue
        with np.errstate(all="ignore"):
            value = OF_INTEGERS[eqn.primitive.name](*operands)
        known[eqn.outvars[0]] = np.asarray(value).astype(eqn.outvars[0].aval.dtype)
    found = read(atom)
    return None if found is None else np.broadcast_to(found, shape).astype(np.int64)
