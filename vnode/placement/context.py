"""The mesh that a caller has set (`jax.set_mesh`): a step is understood in it, and runs outside of it.

Knows jax's mesh contexts. Must not know steps.

Within a mesh context a bare `PartitionSpec` has a meaning, arrays are typed by it where its axes are explicit, and
`jax.jit` compiles for its devices. The first two belong to what the user wrote; the last is the placement's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from vnode.errors import PlacementError, layout_message
from vnode.placement.placement import Placement
from vnode.placement.transfer import tracing

NO_MESH = AbstractMesh((), ())
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
def in_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Sets a mesh, or none, also while jax traces.

    Args:
      mesh: what `jax.set_mesh` takes; None: no mesh.

    Example:
      >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))), in_mesh(None):
      ...     print(current_mesh())
      None
    """
    with jax.core.eval_context():
        context = jax.set_mesh(mesh)
    with context:
        yield


def under(mesh: Mesh | None, fun: Callable[..., T], *args: Any) -> T:
    """Calls a function in a mesh context, if there is one, in another thread than the one that has it, say."""
    if mesh is None:  # not within "no mesh", which is another context to jax
        return fun(*args)
    with in_mesh(mesh):
        return fun(*args)


def is_typed(leaf: Any) -> bool:
    """Whether a leaf is an array whose type can hold a sharding."""
    return isinstance(leaf, jax.Array) and hasattr(jax.typeof(leaf), "sharding")


def check_context(placement: Placement, leaves: Sequence[Any]) -> None:
    """Refuses to become part of a program that runs elsewhere.

    Args:
      placement: where the nodes live.
      leaves: arguments of the step.

    Raises:
      PlacementError: jax traces for each shard of a mesh, or for a mesh of another size, or for arguments that are
        typed by one with explicit axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    facts = [f"it is traced for {mesh}", f"its nodes live on {placement!r}"]
    if mesh.manual_axes:
        raise PlacementError(
            layout_message(
                "a virtualized step is called inside jax.pmap or jax.shard_map, for each device anew.",
                facts=facts,
                remedies=[
                    "call it outside: it divides the batch over the devices itself",
                    "a step that was written for jax.pmap: docs/migrating-from-pmap.md",
                ],
            )
        )
    if any(AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types for leaf in leaves if is_typed(leaf)):
        raise PlacementError(
            layout_message(
                "a virtualized step is part of a program whose values are typed by a mesh with explicit axes.",
                facts=facts,
                remedies=[
                    "call it outside of jax.jit, jax.grad and jax.vmap: it is a compiled program itself",
                    "or make the mesh with AxisType.Auto, for which shardings are no types",
                ],
            )
        )
    if not mesh.empty and mesh.size != placement.mesh.size:
        raise PlacementError(
            layout_message(
                "a virtualized step is part of a program for a mesh of another size.",
                facts=facts,
                remedies=[
                    "call it outside of jax.jit: it is a compiled program itself, and leaves jax.set_mesh by itself",
                    "or put it on the devices of the mesh: step.on(list(mesh.devices.flat))",
                ],
            )
        )
