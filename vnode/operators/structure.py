"""Operators that return their operands, or make values from nothing.

Knows identities with a side effect (placement, ordering, memory) and buffers. Must not know the purpose of that effect.
A copy on a part of the value keeps the effect where the parameters do not describe the whole value's layout; otherwise
it is the plain identity.
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
    """Emits a copy as the identity: a layout of the whole value does not apply to a part."""
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
    """The parameters of one operand's identity: entry `index` of those that are tuples."""
    return {name: (value[index],) if isinstance(value, tuple) else value for name, value in params.items()}


@rule("optimization_barrier")
def identity(eqn: JaxprEqn) -> OperatorDescription:
    return identities(eqn)


@rule("layout_constraint")
def layout(eqn: JaxprEqn) -> OperatorDescription:
    return identities(eqn, pass_through)


@rule("device_put")
def device_put(eqn: JaxprEqn) -> OperatorDescription:
    """A move to a memory space applies to each part; one to devices concerns the whole value."""
    places = (*eqn.params["devices"], *eqn.params["srcs"])
    whole_value = any(isinstance(place, jax.sharding.Sharding | jax.Device) for place in places)
    return identities(eqn, pass_through if whole_value else None)


@rule("nonbatchable", "nondifferentiable_backward", "nontraceable")
def assertion(eqn: JaxprEqn) -> OperatorDescription:
    """Equinox's assertions about a value, which jax checked during the trace."""
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
    """The index of the platform that the program is compiled for."""
    return OperatorDescription(factors=(), operands=(), results=((),), algebra=Algebra.MOVES)
