"""Operators that give back what they are given, or make values out of nothing.

Knows identities with a side purpose (placement, ordering, memory) and buffers. Must not know what the purpose is good
for: a copy of one of these on a part of the value keeps it where the parameters do not speak of the whole value's
layout, and otherwise lets the value pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from vnode.operators.description import (
    Algebra,
    Factors,
    OperatorDescription,
    Positions,
    Sizes,
    shape_resize,
)
from vnode.operators.registry import rule


def pass_through(
    d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
) -> list[Any]:
    """Emits a copy as the identity: a layout that was asked of the whole value says nothing of a part."""
    return list(operands)


def identities(eqn: JaxprEqn, emit: Any = None, replaced_on: Mapping[str, Any] | None = None) -> OperatorDescription:
    """Operand i to result i; the operands share no factors."""
    f = Factors()
    dims = tuple(f.dims(atom.aval.shape) for atom in eqn.invars)
    return OperatorDescription(
        factors=f.all,
        operands=dims,
        results=dims,
        linear=(frozenset(range(len(dims))),),
        algebra=Algebra.MOVES,
        part=part_of,
        emit=emit,
        replaced_on=replaced_on or {},
    )


def part_of(params: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Parameters of the identity of one operand: those that are tuples have an entry per operand."""
    return {name: (value[index],) if isinstance(value, tuple) else value for name, value in params.items()}


@rule("optimization_barrier")
def identity(eqn: JaxprEqn) -> OperatorDescription:
    return identities(eqn)


@rule("layout_constraint")
def layout(eqn: JaxprEqn) -> OperatorDescription:
    return identities(eqn, pass_through)


@rule("device_put")
def device_put(eqn: JaxprEqn) -> OperatorDescription:
    """A move to a memory space is a move of the parts; one to devices is about the whole value."""
    places = (*eqn.params["devices"], *eqn.params["srcs"])
    whole_value = any(isinstance(place, jax.sharding.Sharding | jax.Device) for place in places)
    return identities(eqn, pass_through if whole_value else None)


@rule("nonbatchable", "nondifferentiable_backward", "nontraceable")
def assertion(eqn: JaxprEqn) -> OperatorDescription:
    """Equinox's promises about a value, which jax checked while it traced the step."""
    return identities(eqn)


@rule("tie")
def tie(eqn: JaxprEqn) -> OperatorDescription:
    """The second operand, ordered after the first."""
    f = Factors()
    first, second = (f.dims(atom.aval.shape) for atom in eqn.invars)
    return OperatorDescription(
        factors=f.all, operands=(first, second), results=(second,), linear=(frozenset({1}),), algebra=Algebra.MOVES
    )


@rule("empty", "empty2")
def empty(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    dims = f.dims(eqn.outvars[0].aval.shape)
    return OperatorDescription(
        factors=f.all,
        operands=(),
        results=(dims,),
        algebra=Algebra.MOVES,
        resize=shape_resize("shape") if dims else None,
    )


@rule("platform_index")
def platform_index(eqn: JaxprEqn) -> OperatorDescription:
    """Which of several platforms the program is compiled for."""
    return OperatorDescription(factors=(), operands=(), results=((),), algebra=Algebra.MOVES)
