"""The mesh that a caller has set (`jax.set_mesh`): a step is traced in it, and runs outside of it.

Knows jax's mesh contexts. Must not know steps.

In a mesh context a bare `PartitionSpec` has a meaning, arrays are typed by its explicit axes, and `jax.jit` compiles
for its devices. The first two concern the user's code; the last is decided by the placement.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from vnode.errors import PlacementError
from vnode.placement.placement import Placement
from vnode.placement.transfer import tracing

NO_MESH = AbstractMesh((), ())
P = ParamSpec("P")
T = TypeVar("T")


def current_mesh() -> Mesh | None:
    """The mesh of the innermost ``jax.set_mesh``; None if there is none, or jax is tracing.

    Example:
      >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
      ...     current_mesh().axis_names
      ('data',)
    """
    if tracing():
        return None
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Sets a mesh, or none, also during a trace.

    Args:
      mesh: a mesh for `jax.set_mesh`; None: no mesh.

    Example:
      >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))), use_mesh(None):
      ...     print(current_mesh())
      None
    """
    with jax.core.eval_context():
        context = jax.set_mesh(mesh)
    with context:
        yield


def without_mesh() -> contextlib.AbstractContextManager[None]:
    """Leaves the caller's mesh context: within it jax moves arrays only to its devices, in its order."""
    return contextlib.nullcontext() if current_mesh() is None else use_mesh(None)


def call_in_mesh(mesh: Mesh | None, fun: Callable[..., T], *args: Any) -> T:
    """Calls a function in a mesh context, if there is one; for calls in another thread, for example."""
    if mesh is None:  # not in "no mesh", which jax treats as another context
        return fun(*args)
    with use_mesh(mesh):
        return fun(*args)


def with_jit(fun: Callable[P, T]) -> Callable[P, T]:
    """Makes a function ignore `jax.disable_jit`: a step is a program, and plans are for programs.

    Example:
      >>> @with_jit
      ... def loops(fun, x):
      ...     return jax.make_jaxpr(fun)(x).eqns[0].primitive.name
      >>> with jax.disable_jit():
      ...     loops(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x + i, x), 1)
      'scan'
    """

    @functools.wraps(fun)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not jax.config.jax_disable_jit:
            return fun(*args, **kwargs)
        with jax.disable_jit(False):
            return fun(*args, **kwargs)

    return run


def is_typed(leaf: Any) -> bool:
    """Whether a leaf is an array whose type can hold a sharding."""
    return isinstance(leaf, jax.Array) and hasattr(jax.typeof(leaf), "sharding")


def typed_mesh(leaves: Sequence[Any]) -> AbstractMesh | None:
    """The mesh with explicit axes in the types of a traced program's values; None if there is none."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in leaves if is_typed(leaf))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None) if tracing() else None


def context_mesh(placement: Placement) -> AbstractMesh | None:
    """The mesh with explicit axes that the caller has set, as by ``jax.set_mesh``.

    It is None if there is none, or if its size differs from that of the placement's mesh: then the step is no part of a
    program for it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    there = tracing() and AxisType.Explicit in mesh.axis_types and mesh.size == placement.mesh.size
    return mesh if there else None


def with_automatic_axes(fun: Callable[..., list[Any]], mesh: AbstractMesh) -> Callable[..., list[Any]]:
    """Calls a function of values typed by `mesh` with automatic axes instead; its results are replicated."""
    explicit = tuple(
        axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit
    )

    def run(*values: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(mesh):
            automatic: Any = jax.sharding.auto_axes(fun, axes=explicit, out_sharding=PartitionSpec())
            return automatic(*values)

    return run


def check_context(placement: Placement, leaves: Sequence[Any]) -> None:
    """Raises if the step would become part of a program that runs elsewhere.

    Args:
      placement: where the nodes live.
      leaves: arguments of the step.

    Raises:
      PlacementError: jax traces for each shard of a mesh, or for a mesh of another size.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = typed_mesh(leaves) or mesh
    facts = [f"it is traced for {mesh}", f"its nodes live on {placement!r}"]
    if mesh.manual_axes:
        raise PlacementError(
            "a virtualized step is called inside jax.pmap or jax.shard_map, which calls it for each device.",
            facts=facts,
            remedies=[
                "call it outside: it divides the batch over devices itself",
                "a step that was written for jax.pmap: docs/migrating-from-pmap.md",
            ],
        )
    if not mesh.empty and mesh.size != placement.mesh.size:
        raise PlacementError(
            "a virtualized step is part of a program for a mesh of another size.",
            facts=facts,
            remedies=[
                "call it outside of jax.jit: it is a compiled program itself, and ignores jax.set_mesh",
                "or put it on the devices of the mesh: step.on(list(mesh.devices.flat))",
            ],
        )
