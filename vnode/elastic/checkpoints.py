"""Checkpoints of a run's state by `orbax-checkpoint`, written in the background.

Knows orbax and what a state is made of. Must not know steps, nor when a checkpoint is due.

A checkpoint holds the state's arrays by name (`jax.tree_util.keystr`), and as JSON what arrays do not say of
themselves and what the run adds. Orbax writes to a temporary folder and renames it, so that an unfinished checkpoint
is none.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from vnode.errors import CheckpointError, layout_message
from vnode.placement.host import abstract, is_key, is_weak, with_weak_type
from vnode.placement.leaves import is_array
from vnode.placement.placement import Placement
from vnode.placement.transfer import fitting, partition


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Args:
      path: the folder; made if it is not there.
      keep: how many of the last checkpoints stay.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int) -> None:
        self.path = os.path.abspath(path)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self.manager = ocp.CheckpointManager(self.path, options=options)

    @property
    def latest(self) -> int | None:
        """The step number of the last checkpoint; waits for one that is being written."""
        self.manager.wait_until_finished()
        return self.manager.latest_step()

    def save(self, number: int, state: Any, facts: dict[str, Any]) -> None:
        """Saves a state whose arrays are on devices. Returns when they are copied: they may then be donated.

        Args:
          number: the step number: how many steps the state has behind it.
          state: the state.
          facts: what else to save, fit for JSON.
        """
        arrays, described = {}, {}
        for name, leaf in named(state).items():
            key = is_key(leaf)
            data = jax.random.key_data(leaf) if key else leaf
            described[name] = {
                "type": type_of(leaf),
                "bits": list(data.shape),
                "dtype": str(data.dtype),
                "weak": is_weak(leaf),
                "key": str(jax.random.key_impl(leaf)) if key else None,
            }
            if data.size:  # orbax refuses arrays without elements
                arrays[name] = data
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays), run=ocp.args.JsonSave({"leaves": described, "facts": facts})
        )
        self.manager.save(number, args=items)

    def facts(self, number: int) -> dict[str, Any]:
        """What was saved besides the state."""
        return self.description(number)["facts"]

    def description(self, number: int) -> dict[str, Any]:
        return self.manager.restore(number, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]

    def restore(self, number: int, like: Any, placement: Placement) -> Any:
        """Restores a state onto a placement's devices, without a detour over others.

        Args:
          number: the step number.
          like: a state of the same structure. Leaves that are no arrays are taken from it; of its arrays, shapes,
            dtypes, and over which mesh axes they are partitioned.
          placement: where the state is to live.

        Returns:
          The state.

        Raises:
          CheckpointError: the checkpoint is of a state of another structure.
        """
        described, leaves = self.description(number)["leaves"], named(like)
        check(described, leaves, self.path, number)
        targets = {
            name: jax.ShapeDtypeStruct(
                tuple(fact["bits"]),
                np.dtype(jnp.dtype(fact["dtype"])),
                sharding=fitting(placement, tuple(fact["bits"]), partition(leaves[name])),
            )
            for name, fact in described.items()
        }
        saved = {name: target for name, target in targets.items() if np.prod(target.shape, dtype=int)}
        items = ocp.args.Composite(state=ocp.args.StandardRestore(saved))
        arrays = dict(self.manager.restore(number, args=items)["state"]) if saved else {}

        def leaf(name: str, fact: dict[str, Any]) -> Any:
            target = targets[name]
            array = arrays[name] if name in arrays else jnp.zeros(target.shape, target.dtype, device=target.sharding)
            if fact["key"] is not None:
                return jax.random.wrap_key_data(array, impl=fact["key"])
            return with_weak_type(array, target.sharding) if fact["weak"] and array.size else array

        restored = {name: leaf(name, fact) for name, fact in described.items()}
        return jax.tree_util.tree_map_with_path(
            lambda path, old: restored[jax.tree_util.keystr(path)] if is_array(old) else old, like
        )

    def close(self) -> None:
        """Waits until everything is written."""
        self.manager.close()


def named(state: Any) -> dict[str, Any]:
    """The arrays of a state by name."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state) if is_array(leaf)}


def type_of(leaf: Any) -> str:
    """Dtype and shape of an array, as messages and checkpoints have them: ``bfloat16[3, 4]``."""
    leaf = abstract(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def check(described: dict[str, Any], leaves: dict[str, Any], path: str, number: int) -> None:
    """Refuses a checkpoint of a state of another structure.

    Raises:
      CheckpointError: it is.
    """
    facts = [f"{name}: only in the checkpoint" for name in described if name not in leaves]
    facts += [f"{name}: not in the checkpoint" for name in leaves if name not in described]
    for name, fact in described.items():
        if name in leaves and fact["type"] != type_of(leaves[name]):
            facts.append(f"{name}: {fact['type']} in the checkpoint, {type_of(leaves[name])} in the state")
    if facts:
        raise CheckpointError(
            layout_message(
                f"checkpoint {number} in {path} is of another state.",
                facts=facts[:20],
                remedies=["start from the state (model, optimizer) that was saved", "or use another folder"],
            )
        )
