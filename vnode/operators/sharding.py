"""Operators that request a layout over a mesh: a sharding constraint, a change of sharding, a cast between meshes.

Knows how jax writes such a request into an equation, also into one that computes something (``out_sharding``). Must not
know the axes at the place of evaluation: a copy asks jax.

A request applies to every copy of the equation, by axis names: over the axes that the partitioner has there, and those
of them that divide the value. The dimension that a copy has a part of is left free: the step does not decide where
examples lie.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from vnode.operators.description import Algebra, Factors, OperatorDescription, Positions, Sizes
from vnode.operators.registry import rule

ASKED = ("sharding", "dst_sharding")
"""Parameters of sharding constraints that hold the request."""

ASIDE = ("out_sharding", "sharding")
"""Parameters of other equations that hold a request."""


FAMILY = ("sharding_constraint", "reshard", "mesh_cast")


@rule(*FAMILY)
def constraint(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape)
    asked = next((eqn.params[name] for name in ASKED if name in eqn.params), None)
    return OperatorDescription(
        factors=f.all,
        operands=(dims,),
        results=(dims,),
        linear=(frozenset({0}),),
        algebra=Algebra.MOVES,
        layout=axes_of(asked, len(dims), eqn.params.get("unconstrained_dims", ())),
        emit=emit_constraint,
    )


def axes_of(asked: Any, ndim: int, free: Any = ()) -> tuple[tuple[str, ...] | None, ...]:
    """The requested mesh axes of each dimension; None where the partitioner may choose."""
    spec = asked.spec if isinstance(asked, NamedSharding) else asked
    if not isinstance(spec, PartitionSpec):  # of devices, which are not the step's to choose
        return (None,) * ndim
    entries = [*spec, *[None] * (ndim - len(spec))]
    return tuple(
        None
        if entry is PartitionSpec.UNCONSTRAINED or d in free
        else () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for d, entry in enumerate(entries)
    )  # fmt: skip


def emit_constraint(
    d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
) -> list[Any]:
    """Emits a copy with the request restricted to the partitioner's axes."""
    (value,) = operands
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Auto
    }
    assert d.layout is not None
    kept = [
        () if positions.keys() & set(dim) else axes and tuple(name for name in axes if name in automatic)
        for axes, dim in zip(d.layout, d.results[0], strict=True)
    ]
    if not any(kept):
        return [value]
    fitting = [
        PartitionSpec.UNCONSTRAINED if axes is None or n % math.prod(automatic[name] for name in axes) else axes
        for axes, n in zip(kept, value.shape, strict=True)
    ]
    return [lax.with_sharding_constraint(value, PartitionSpec(*fitting))]


def without_mesh(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Removes the mesh from an equation's parameters: the computation, then a constraint with the request.

    Args:
      eqn: any equation, typed for no mesh.

    Returns:
      Equations that together have its operands and its results.
    """
    family = eqn.primitive.name in FAMILY
    name = next((n for n in (ASKED if family else ASIDE) if isinstance(eqn.params.get(n), Sharding)), None)
    if name is None:
        return [eqn]
    axes = axes_of(eqn.params[name], eqn.outvars[0].aval.ndim, eqn.params.get("unconstrained_dims", ()))
    operands: list[Any] = eqn.invars
    asked = any(axes)
    computed = []
    if not family:
        operands = [Var(eqn.outvars[0].aval)] if asked else eqn.outvars
        computed = [eqn.replace(outvars=operands, params={**eqn.params, name: None})]
    if not family and not asked:
        return computed
    constraint = constraint_equation(axes)
    return [*computed, constraint.replace(invars=operands, outvars=eqn.outvars, source_info=eqn.source_info)]


@functools.lru_cache
def constraint_equation(axes: tuple[tuple[str, ...] | None, ...]) -> JaxprEqn:
    """A template of a sharding constraint by axis names; sizes do not matter."""
    named = tuple({name: None for entry in axes for name in entry or ()}) or ("any",)
    mesh = AbstractMesh((1,) * len(named), named, axis_types=(AxisType.Auto,) * len(named))
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED if entry is None else entry for entry in axes])

    def constrain(value: Any) -> Any:
        return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

    return jax.make_jaxpr(constrain)(jax.ShapeDtypeStruct((1,) * len(axes), "float32")).jaxpr.eqns[0]
