"""From a function to its program.

Knows the order of things: trace, take the mesh out, make values of references, move slices into bounds, inline. Must
not know batches or devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType

from vnode.analysis.clamp_slice_starts import clamp_slice_starts
from vnode.analysis.discharge_references import discharge_references
from vnode.analysis.meshless import PmapFound, UnsupportedShardMap, remove_mesh
from vnode.analysis.program import Program, inline, message_about, source_line_of_error
from vnode.errors import UnsupportedPrimitiveError, VnodeError, layout_message


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function as jax traced it.

    Attributes:
      program: over the flattened arguments, and after them the values that the function closed over and jax is tracing.
      captured: those values: an outer `jax.grad`, `jax.vmap` or `jax.jit` must see them as arguments.
      function: the same as a function of all these, with the derivative rules that the user's function has.
    """

    program: Program
    captured: list[Any]
    function: Callable[..., list[Any]]


def trace(fun: Callable[..., Any], *args: Any) -> Traced:
    """Traces `fun` abstractly, takes meshes and references out of it, and inlines its calls.

    Args:
      fun: any function of pytrees of arrays.
      *args: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      What jax traced.

    Raises:
      VnodeError: the step is written for `jax.pmap`.
      UnsupportedPrimitiveError: it holds a program per shard of a mesh that cannot be followed.
    """
    closed, jaxpr = trace_meshless(fun, *args)
    traced = [isinstance(value, jax.core.Tracer) for value in closed.consts]
    captured = [value for value, is_traced in zip(closed.consts, traced, strict=True) if is_traced]
    count = len(closed.jaxpr.invars)

    def function(*values: Any) -> list[Any]:
        outer = iter(values[count:])
        consts = [next(outer) if is_traced else value for value, is_traced in zip(closed.consts, traced, strict=True)]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*values[:count])

    plain = discharge_references(ClosedJaxpr(jaxpr, closed.consts))
    return Traced(inline(clamp_slice_starts(plain.jaxpr), plain.consts), captured, function)


def meshless_function(fun: Callable[..., Any], *args: Any) -> Callable[..., list[Any]]:
    """A function as it is understood in the caller's mesh, to be called outside of it.

    Args:
      fun: any function of arrays.
      *args: arrays like those that it is to be called with.

    Returns:
      A function of such arrays, from which meshes have been taken; its results are flattened.

    Raises:
      VnodeError: as `trace`.
    """
    closed, jaxpr = trace_meshless(fun, *args)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))


def with_trees(fun: Callable[..., Any], on_trees: Callable[..., Any], treedef: Any) -> Callable[..., Any]:
    """A function of flat arrays that is traced as one of pytrees, by whose arguments jax calls what it speaks of.

    Args:
      fun: a function of arrays.
      on_trees: the same as a function of pytrees.
      treedef: the structure of its ``(args, kwargs)``.
    """
    functools.update_wrapper(fun, on_trees)
    fun.on_trees = on_trees, treedef  # pyright: ignore[reportFunctionMemberAccess]
    return fun


def make_jaxpr(fun: Callable[..., Any], args: Sequence[Any]) -> ClosedJaxpr:
    """What jax makes of a function of arrays: of its pytrees, if it says what these are."""
    if not hasattr(fun, "on_trees"):
        return jax.make_jaxpr(fun)(*args)
    on_trees, treedef = fun.on_trees  # pyright: ignore[reportFunctionMemberAccess]
    trees, named = jax.tree.unflatten(treedef, args)
    return jax.make_jaxpr(on_trees)(*trees, **named)


def trace_jaxpr(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """What jax makes of a function, with the axes of the caller's mesh left to the partitioner where that is possible.

    Where axes are explicit, jax writes changes of sharding into derivatives, and what else it does depends on them: a
    constant that is resharded goes into a loop as an operand. The step would be another one than outside of the mesh.
    What speaks of explicit axes itself (`jax.sharding.reshard`) is traced as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and AxisType.Explicit in mesh.axis_types and AxisType.Manual not in mesh.axis_types:
        automatic = AbstractMesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))
        with contextlib.suppress(Exception), jax.sharding.use_abstract_mesh(automatic):
            return make_jaxpr(fun, args)  # what is wrong besides is told below
    return make_jaxpr(fun, args)


def trace_meshless(fun: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Jaxpr]:
    """What jax makes of a function, with meshes and without them; raises what `trace` says."""
    try:
        closed = trace_jaxpr(fun, *args)
        jaxpr = remove_mesh(closed.jaxpr)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise VnodeError(
            layout_message(
                "the step names an axis that is not there: collectives of jax.pmap are left over.",
                where=source_line_of_error(error),
                facts=[str(error).partition(". ")[0]],
                remedies=[
                    "remove them: a step for vnode is written for the whole batch (docs/migrating-from-pmap.md)",
                    "or keep its meaning per replica: virtualize jax.vmap(step, axis_name=...), as that page says",
                ],
            )
        ) from error
    except PmapFound as found:
        raise VnodeError(
            message_about(
                found.eqn,
                "the step is run by jax.pmap: it has a replica for each device, and its result would depend on them.",
                remedies=[
                    "virtualize jax.vmap(step, axis_name=...) in place of jax.pmap (docs/migrating-from-pmap.md)",
                    "or write the step for the whole batch, and remove its collectives",
                ],
            )
        ) from None
    except UnsupportedShardMap as found:
        raise UnsupportedPrimitiveError(
            message_about(
                found.eqn,
                f"the {found.eqn.primitive.name} holds what vnode cannot follow.",
                remedies=["write it for the whole batch: vnode divides the examples itself"],
                facts=[str(found)],
            )
        ) from found
    return closed, jaxpr
