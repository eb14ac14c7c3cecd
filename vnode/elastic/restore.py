"""Gets a state out of a folder of checkpoints, for inference and for other training.

Knows checkpoints and states. Must not know runs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from vnode.errors import VnodeError, layout_message
from vnode.placement.static_scalars import array_leaves
from vnode.tracebacks import api_boundary

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


NNX = "flax.nnx.pytreelib"
"""Where flax defines what its modules, optimizers and metrics inherit from."""


@api_boundary
def restore(folder: str | os.PathLike[str] | ocp.CheckpointManager, like: Any = None, step: int | None = None) -> Any:
    """Restores the state of a checkpoint, of `vnode.elastic.run` or of an `orbax.checkpoint.CheckpointManager`.

    It takes no lock and changes nothing, so it may read the folder of a run that goes on.

    Args:
      folder: the folder, also ``gs://...``, or an orbax manager of one.
      like: a state of the same structure, of arrays or `jax.ShapeDtypeStruct`s of any shardings, or None. The
        restored state has its structure and its leaves that are no arrays; each array goes where its counterpart is, or
        where its sharding says.
        If these are devices of several processes, all must call it; process 0 chooses the checkpoint.
      step: the number of steps that the state has behind it. The newest checkpoint that is good by default; damaged
        ones are named in warnings.

    Returns:
      The state. Without `like`: its arrays in nested dictionaries, by dictionary keys, attribute names and positions
      as text (``state["slots"]["0"]["mu"]``), on jax's default device.

    Raises:
      CheckpointError: there is no such checkpoint, or it is of a state of another structure, shapes or dtypes.
      VnodeError: `like` holds no arrays, or objects of flax.nnx.
      DamagedCheckpointError: it cannot be read, or is not what was saved.
      ImportError: orbax is not installed.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, numpy as np, vnode
      >>> @vnode.virtualize(virtual_nodes=2)
      ... def step(state, x):
      ...     return {"w": state["w"] + x.mean(), "count": state["count"] + 1}, {}
      >>> folder, state = tempfile.mkdtemp(), {"w": jnp.zeros(2), "count": jnp.int32(0)}
      >>> data = [np.ones(4, np.float32)] * 3
      >>> _ = vnode.elastic.run(step, state, data, steps=3, checkpoint=folder, devices=jax.devices()[:1])
      >>> vnode.elastic.restore(folder)["w"].tolist()
      [3.0, 3.0]
      >>> int(vnode.elastic.restore(folder, like=state)["count"])
      3
    """
    try:
        from vnode.elastic.checkpoint_contents import arrays_by_path, nested_dictionaries, with_arrays
        from vnode.elastic.logs import Quiet
        from vnode.elastic.reader import Reader
        from vnode.elastic.shared_reader import SharedReader
        from vnode.errors import CheckpointError
    except ImportError as error:
        raise ImportError("checkpoints need orbax: pip install 'vnode[elastic]'") from error
    check_like(like)
    leaves = None if like is None else arrays_by_path(like)
    goals = [getattr(leaf.value, "sharding", None) for leaf in (leaves or {}).values()]
    shared = any(goal is not None and not goal.is_fully_addressable for goal in goals)
    reader = (SharedReader if shared else Reader)(folder if isinstance(folder, str | os.PathLike) else folder.directory)
    default = SingleDeviceSharding(min(jnp.zeros(()).devices(), key=lambda device: device.id))

    def where(path: tuple[str, ...], shape: tuple[int, ...]) -> Sharding:
        sharding = getattr(leaves[path].value, "sharding", None) if leaves is not None and path in leaves else None
        return default if sharding is None else sharding

    def read(number: int) -> Any:
        arrays = reader.read(number, leaves, where)
        return nested_dictionaries(arrays) if like is None else with_arrays(like, arrays)

    with Quiet():
        if step is not None:
            return read(step)
        found = reader.newest(read)
    if found is None:
        raise CheckpointError(
            layout_message(f"there are no checkpoints in {reader.path}.", remedies=["check the path"])
        )
    return found[1]


def check_like(like: Any) -> None:
    """Refuses what is no state.

    Args:
      like: what a checkpoint is to be restored like; None for anything.

    Raises:
      VnodeError: it holds no arrays, or objects of flax.nnx.
    """
    entries = like if isinstance(like, tuple | list) else (like,)
    objects = [
        entry
        for entry in entries
        if not isinstance(entry, type) and any(base.__module__ == NNX for base in type(entry).__mro__)
    ]
    if objects:
        name = "objects" if isinstance(like, tuple | list) else "model"
        raise VnodeError(
            f"like holds objects of flax.nnx ({type(objects[0]).__name__}), and a checkpoint holds arrays.",
            remedies=[
                "to go on training, call vnode.elastic.run again with the same folder: it fills the objects",
                "to get them filled here: "
                f"arrays = vnode.elastic.restore(folder, like=nnx.to_pure_dict(nnx.state({tuple_of(name)}))); "
                f"state = nnx.state({tuple_of(name)}); nnx.replace_by_pure_dict(state, arrays); "
                f"nnx.update({tuple_of(name)}, state)",
            ],
        )
    if like is not None and not any(array_leaves(like)):
        raise VnodeError(
            f"like={like!r:.80} holds no arrays: its type is {type(like).__name__}.",
            remedies=[
                "give a state with the structure of the run's: like={'params': params, 'opt_state': opt_state}",
                "of a flax.linen module that is model.init(key, x); shapes will do: jax.eval_shape(init, ...)",
            ],
        )


def tuple_of(name: str) -> str:
    """The objects of a run in a message: a tuple, also of one."""
    return name if name == "objects" else f"({name},)"
