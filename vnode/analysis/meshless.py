"""A jaxpr traced in a mesh -> the same jaxpr without a mesh: types without shardings, `shard_map` on whole values.

Knows jaxprs and how a mesh shows in them. Must not know what a step computes, nor where it will run.

    y: f32[8@data] = sin x     ->   y: f32[8] = sin x

In a mesh context jax writes the mesh into the type of every value. Such a jaxpr cannot run on other devices. The user's
sharding constraints stay, as equations of their own.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params, new_jaxpr_eqn, no_effects

from vnode.analysis.rewriting import Rewriter
from vnode.operators import manual, sharding

Atom = Var | Literal

NO_MESH = jax.sharding.AbstractMesh((), ())


class UnsupportedShardMap(Exception):
    """A `jax.shard_map` that cannot be rewritten on whole values."""

    def __init__(self, eqn: JaxprEqn, why: str) -> None:
        super().__init__(why)
        self.eqn = eqn


class PmapFound(Exception):
    """A call of `jax.pmap`, whose arguments have a leading dimension of the number of devices."""

    def __init__(self, eqn: JaxprEqn) -> None:
        super().__init__()
        self.eqn = eqn


def remove_mesh(jaxpr: Jaxpr) -> Jaxpr:
    """Removes the mesh from a jaxpr.

    Args:
      jaxpr: an open jaxpr, traced in any mesh context.

    Returns:
      An open jaxpr with new variables, or `jaxpr` if it mentions no mesh.

    Raises:
      UnsupportedShardMap: a program per shard cannot be followed.
      PmapFound: the step holds a `jax.pmap`.
    """
    if not shows_mesh(jaxpr):
        return jaxpr
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return MeshRemover().rewrite(jaxpr)


def remove_mesh_closed(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Removes the mesh from a closed jaxpr, and keeps its constants, which jax 0.12 would lose; see `remove_mesh`."""
    return ClosedJaxpr(remove_mesh(closed.jaxpr), closed.consts)


def shows_mesh(jaxpr: Jaxpr) -> bool:
    """Whether any equation was traced for a mesh, at any depth."""
    return any(
        not eqn.ctx.cur_abstract_mesh.empty
        or any(has_mesh_type(var.aval) for var in eqn.outvars)
        or any(map(shows_mesh, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def has_mesh_type(aval: Any) -> bool:
    """Whether a type has a sharding over a mesh."""
    return isinstance(aval, ShapedArray) and not aval.sharding.mesh.empty


def strip_mesh(aval: Any) -> Any:
    """A type without its sharding."""
    return ShapedArray(aval.shape, aval.dtype, aval.weak_type) if has_mesh_type(aval) else aval


class MeshRemover(Rewriter):
    """Removes the mesh from a jaxpr and from the jaxprs in its equations."""

    def __init__(self) -> None:
        super().__init__()
        self._contexts: dict[Any, Any] = {}

    def rewrite_jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        env: dict[Var, Atom] = {}

        def var(old: Var) -> Var:
            env[old] = new = Var(strip_mesh(old.aval))
            return new

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return Literal(np.asarray(atom.val), strip_mesh(atom.aval)) if has_mesh_type(atom.aval) else atom
            return env[atom]

        constants, inputs = [var(v) for v in jaxpr.constvars], [var(v) for v in jaxpr.invars]
        equations: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in manual.CASTS:
                env.update(zip(eqn.outvars, operands, strict=True))
                continue
            equations += self._equations(eqn.replace(invars=operands, outvars=[var(v) for v in eqn.outvars]))
        outputs = [read(atom) for atom in jaxpr.outvars]
        return jaxpr.replace(constvars=constants, invars=inputs, eqns=equations, outvars=outputs)

    def _equations(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        if manual.replicates(eqn):
            raise PmapFound(eqn)
        eqn = eqn.replace(params=self.rewrite_params(eqn.params), ctx=self._context(eqn))
        if eqn.primitive.name == manual.NAME:
            try:
                call = manual.call_on_whole_values(eqn, eqn.params["jaxpr"])
            except Exception as error:
                raise UnsupportedShardMap(eqn, str(error)) from error
            return [call.replace(params=self.rewrite_params(call.params))]
        return sharding.without_mesh(manual.without_varying_types(eqn))

    def _context(self, eqn: JaxprEqn) -> Any:
        if eqn.ctx not in self._contexts:
            with eqn.ctx.manager, jax.sharding.use_abstract_mesh(NO_MESH):
                self._contexts[eqn.ctx] = new_jaxpr_eqn([], [], eqn.primitive, {}, no_effects).ctx
        return self._contexts[eqn.ctx]
