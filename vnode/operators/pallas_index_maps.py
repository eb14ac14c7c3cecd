"""Index maps of a Pallas call -> for each dimension of a block, the grid axes that number it, and how.

Knows index maps: small programs from program ids, and scalars that are there before the kernel, to block indices. Must
not know kernels, nor which axis is split.

::

    lambda b, i: (b, i // 2, 0)      on a grid of (4, 6), blocks of (1, 8, 128)

    dimension 0: axis 0, stride 1    dimension 1: axis 1 divided by 2, stride 1    dimension 2: no axis

An axis is one digit, or two where a map divides it: ``i // k`` is its major digit, ``i % k`` its minor one. A dimension
is numbered by digits as a number is: ``b * heads + h`` has two, of which `b` is the leading one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.operators.constant_folding import OF_INTEGERS, tabulated
from vnode.operators.control_flow import Body, body_of, call_of

MOST = 1 << 16
"""The most block indices that are evaluated; a map of more axes together counts as unknown."""


@dataclasses.dataclass(frozen=True)
class Digit:
    """A grid axis, or the major or minor part of one.

    Attributes:
      axis: of the grid.
      size: how many values it has.
      within: the product of the parts below it: 1 for a whole axis, and for a minor part.
      leading: whether it is all of its axis, or the major part.
    """

    axis: int
    size: int
    within: int = 1
    leading: bool = True


@dataclasses.dataclass(frozen=True)
class Component:
    """A block index along one dimension, as a function of program ids.

    Attributes:
      axes: grid axes that it depends on, those excepted that only number scalars.
      values: its value for all program ids of these axes, in ascending order of axes; None if that is not known.
    """

    axes: tuple[int, ...]
    values: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Read:
    """A read of scalars: the axis whose program id indexes each dimension; None for any other index."""

    scalars: int
    axes: tuple[int | None, ...]


def components(index_map: Any, grid: Sequence[int]) -> tuple[list[Component], list[Read]] | None:
    """The block index along each dimension, and how scalars are read.

    Args:
      index_map: the jaxpr, from program ids and references to scalars to block indices.
      grid: the size of every axis; 0 where it is not known.

    Returns:
      A component for each dimension, and the reads; None if the map does more than to compute.
    """
    body = body_of(index_map)
    if body.constants:
        return None
    program_ids = list(body.jaxpr.invars[: len(grid)])
    scalars = {var: k for k, var in enumerate(body.jaxpr.invars[len(grid) :])}
    equations: list[JaxprEqn] = []
    names: dict[Var, Any] = {}
    if not flatten(body, names, equations):
        return None
    depends: dict[Var, frozenset[int]] = {var: frozenset((axis,)) for axis, var in enumerate(program_ids)}
    unknown: set[Var] = set()
    reads: list[Read] = []
    for eqn in equations:
        if eqn.primitive.name == "get" and eqn.invars[0] in scalars:
            indices = read_indices(eqn)
            axes = tuple(program_ids.index(i) if i in program_ids else None for i in indices or ())
            reads.append(Read(scalars[eqn.invars[0]], axes))
            loose = [i for i in eqn.invars[1:] if isinstance(i, Var) and i not in program_ids]
            unknown.update(eqn.outvars)
        else:
            loose = [i for i in eqn.invars if isinstance(i, Var)]
            if unknown.intersection(loose) or eqn.primitive.name not in OF_INTEGERS or any(i in scalars for i in loose):
                unknown.update(eqn.outvars)
        depends.update(dict.fromkeys(eqn.outvars, frozenset().union(*(depends.get(i, frozenset()) for i in loose))))
    made: list[Component] = []
    for atom in body.jaxpr.outvars:
        atom = names.get(atom, atom) if isinstance(atom, Var) else atom
        axes = () if isinstance(atom, Literal) else tuple(sorted(depends.get(atom, ())))
        count = math.prod(grid[axis] for axis in axes)
        known = not isinstance(atom, Var) or atom not in unknown
        values = tabulated(atom, equations, program_ids, axes, grid) if known and 0 < count <= MOST else None
        made.append(Component(axes, values))
    return made, reads


def flatten(body: Body, env: dict[Var, Any], equations: list[JaxprEqn]) -> bool:
    """Appends a body's equations, calls inlined; False if one has an effect other than a read.

    Args:
      body: what to add.
      env: what the body's variables are among those equations; extended.
      equations: extended.
    """
    for eqn in body.jaxpr.eqns:
        operands = [env.get(i, i) if isinstance(i, Var) else i for i in eqn.invars]
        call = call_of(eqn)
        if call is not None:
            inner = dict(zip(call.body.jaxpr.invars, (operands[i] for i in call.operands), strict=True))
            if call.body.constants or not flatten(call.body, inner, equations):
                return False
            results = [inner.get(i, i) if isinstance(i, Var) else i for i in call.body.jaxpr.outvars]
            env.update(zip(eqn.outvars, results, strict=True))
            continue
        if eqn.primitive.name == "program_id" or (eqn.effects and eqn.primitive.name != "get"):
            return False
        fresh = [Var(var.aval) for var in eqn.outvars]  # a call's body may be that of several calls
        equations.append(eqn.replace(invars=operands, outvars=fresh))
        env.update(zip(eqn.outvars, fresh, strict=True))
    return True


def read_indices(eqn: JaxprEqn) -> list[Any] | None:
    """The index of a ``get`` of a single element, one atom for each dimension; None if it reads more than one."""
    transforms = jax.tree.unflatten(eqn.params["tree"], eqn.invars[1:])
    if len(transforms) != 1 or not hasattr(transforms[0], "indices"):
        return None
    indices = list(transforms[0].indices)
    return indices if all(isinstance(i, Var | Literal) and i.aval.shape == () for i in indices) else None


def divisors(found: Sequence[Component], grid: Sequence[int]) -> dict[int, int]:
    """For each axis that index maps divide, the divisor, if all of them divide it by the same number."""
    parts: dict[int, set[int]] = {}
    for component in found:
        if component.values is None:
            continue
        for k, axis in enumerate(component.axes):
            line = component.values[(0,) * k + (slice(None),) + (0,) * (len(component.axes) - k - 1)]
            steps = np.diff(line)
            breaks = np.flatnonzero(steps != steps[0]) if len(steps) else []
            if len(breaks):
                parts.setdefault(axis, set()).add(int(breaks[0]) + 1)
    return {axis: min(k) for axis, k in parts.items() if len(k) == 1 and grid[axis] % min(k) == 0}


def digits_of(grid: Sequence[int], divisor: Mapping[int, int]) -> dict[int, list[Digit]]:
    """The digits of every axis, major to minor."""
    return {
        axis: [Digit(axis, size // divisor[axis], divisor[axis]), Digit(axis, divisor[axis], 1, False)]
        if axis in divisor
        else [Digit(axis, size)]
        for axis, size in enumerate(grid)
    }


def numbering(component: Component, digits: Mapping[int, list[Digit]]) -> list[Digit] | None:
    """The digits that number the blocks along a dimension, leading one first, as a number is written.

    Returns:
      Digits of more than one value; None if the blocks are not numbered so, each once.
    """
    if component.values is None:
        return None
    own = [digit for axis in component.axes for digit in digits[axis]]
    values = component.values.reshape(tuple(digit.size for digit in own))
    if values.size and values[(0,) * values.ndim] != 0:
        return None
    strides = {}
    total = np.zeros(values.shape, np.int64)
    for k, digit in enumerate(own):
        if digit.size < 2:
            continue
        strides[digit] = int(values[tuple(int(d == k) for d in range(len(own)))])
        total += strides[digit] * np.arange(digit.size).reshape(tuple(-1 if d == k else 1 for d in range(len(own))))
    if not np.array_equal(total, values):
        return None
    order = sorted((digit for digit in strides if strides[digit]), key=lambda digit: -strides[digit])
    below = 1
    for digit in reversed(order):
        if strides[digit] != below:
            return None
        below *= digit.size
    return order
