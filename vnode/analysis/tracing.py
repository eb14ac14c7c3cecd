"""A Python function -> its program.

    def f(w, x): return jit(g)(w, x)   ->   Program: inputs w, x; the equations of g; no meshes, references, or calls

Knows the order: trace, remove the mesh, discharge references, clamp the starts of slices, inline calls, remove unused
results. Must not know batches or devices.
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
from vnode.analysis.unused_results import remove_unused_results
from vnode.analysis.wide_types import has_wide_values, own_type, wide_context
from vnode.errors import UnsupportedPrimitiveError, VnodeError


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function.

    Attributes:
      program: of the flattened arguments and, after them, the captured tracers.
      captured: tracers that the function closed over. An outer `jax.grad`, `jax.vmap` or `jax.jit` must see them as
        arguments.
      function: a function of all these, with the derivative rules of the user's function.
      wide: whether it has 64-bit values. The program is traced further in a `wide_context` only.
    """

    program: Program
    captured: list[Any]
    function: Callable[..., list[Any]]
    wide: bool


def trace(fun: Callable[..., Any], *args: Any) -> Traced:
    """Traces `fun` abstractly, removes meshes, references and unused results, and inlines calls.

    Args:
      fun: any function of pytrees of arrays.
      *args: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The traced function.

    Raises:
      VnodeError: the step is written for `jax.pmap`.
      UnsupportedPrimitiveError: it has a `jax.shard_map` that cannot be rewritten on whole values.
    """
    closed, jaxpr = trace_meshless(fun, *args)
    traced = [isinstance(value, jax.core.Tracer) for value in closed.consts]
    captured = [value for value, is_traced in zip(closed.consts, traced, strict=True) if is_traced]
    count = len(closed.jaxpr.invars)

    def function(*values: Any) -> list[Any]:
        outer = iter(values[count:])
        consts = [next(outer) if is_traced else value for value, is_traced in zip(closed.consts, traced, strict=True)]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*values[:count])

    wide = has_wide_values(closed.jaxpr)
    with wide_context(wide):
        plain = discharge_references(ClosedJaxpr(jaxpr, closed.consts))
        program = remove_unused_results(inline(clamp_slice_starts(plain.jaxpr), plain.consts))
        return Traced(program, captured, function, wide)


def meshless_function(fun: Callable[..., Any], *args: Any) -> Callable[..., list[Any]]:
    """Traces a function in the caller's mesh, to be called outside of it.

    Args:
      fun: any function of arrays.
      *args: arrays of the shapes and dtypes with which it will be called.

    Returns:
      A function of such arrays, without meshes; its results are flattened.

    Raises:
      VnodeError: as `trace`.
    """
    closed, jaxpr = trace_meshless(fun, *args)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))


def with_trees(fun: Callable[..., Any], on_trees: Callable[..., Any], treedef: Any) -> Callable[..., Any]:
    """Marks a function of flat arrays to be traced as one of pytrees, so that jax's messages name its arguments.

    Args:
      fun: a function of arrays.
      on_trees: the same as a function of pytrees.
      treedef: the structure of its ``(args, kwargs)``.
    """
    functools.update_wrapper(fun, on_trees)
    fun.on_trees = on_trees, treedef  # pyright: ignore[reportFunctionMemberAccess]
    return fun


def make_jaxpr(fun: Callable[..., Any], args: Sequence[Any]) -> ClosedJaxpr:
    """The jaxpr of a function of arrays, traced by its function of pytrees if it has one (`with_trees`)."""
    args = [*map(own_type, args)]
    if not hasattr(fun, "on_trees"):
        return jax.make_jaxpr(fun)(*args)
    on_trees, treedef = fun.on_trees  # pyright: ignore[reportFunctionMemberAccess]
    trees, named = jax.tree.unflatten(treedef, args)
    return jax.make_jaxpr(on_trees)(*trees, **named)


def trace_jaxpr(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """The jaxpr of a function, with explicit mesh axes treated as automatic ones where that is possible.

    With explicit axes jax writes reshards into derivatives, and a resharded constant becomes an operand of a loop. The
    step would differ from the same step outside of the mesh. A function that names explicit axes itself
    (`jax.sharding.reshard`) is traced with explicit axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and AxisType.Explicit in mesh.axis_types and AxisType.Manual not in mesh.axis_types:
        automatic = AbstractMesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))
        with contextlib.suppress(Exception), jax.sharding.use_abstract_mesh(automatic):
            return make_jaxpr(fun, args)  # other errors are raised below
    return make_jaxpr(fun, args)


def trace_meshless(fun: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Jaxpr]:
    """The closed jaxpr of a function, and its open jaxpr without meshes; raises as `trace`."""
    try:
        closed = trace_jaxpr(fun, *args)
        jaxpr = remove_mesh(closed.jaxpr)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise VnodeError(
            "the step names an axis that does not exist: it still has collectives of jax.pmap.",
            where=source_line_of_error(error),
            facts=[str(error).partition(". ")[0]],
            remedies=[
                "remove them: a step for vnode is written for the whole batch (docs/migrating-from-pmap.md)",
                "or keep its meaning per replica: virtualize jax.vmap(step, axis_name=...), as that page says",
            ],
        ) from error
    except PmapFound as found:
        raise VnodeError(
            message_about(
                found.eqn,
                "the step calls jax.pmap: its replicas, one for each device, make the result depend on the devices.",
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
                f"the {found.eqn.primitive.name} has a body that vnode cannot analyze.",
                remedies=["write it for the whole batch: vnode divides the examples itself"],
                facts=[str(found)],
            )
        ) from found
    return closed, jaxpr
