"""Turns the arrays of a state into entries of a checkpoint's metadata, by path, and compares the two.

Knows pytrees, and what makes an array the one it was. Must not know files.

An array goes by its path through the state: dictionary keys, attributes and positions, each as text. So a state that
is read back without its classes is nested dictionaries, and a `TrainState` with ``params`` matches a dictionary with
``"params"``. Where such paths are ambiguous or would be no names of files, and for a single array, all go
by what `jax.tree_util.keystr` says, with their positions if two arrays have one name there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vnode.errors import CheckpointError, layout_message, limit_lines
from vnode.placement.host_copy import abstract, is_key, is_weak
from vnode.placement.static_scalars import array_leaves, map_arrays
from vnode.step.stored_blocks import Blocks, known_blocks, remember_blocks

Path = tuple[str, ...]
"""Where an array is in a state."""


class Leaf(NamedTuple):
    """An array of a state: what messages call it (`jax.tree_util.keystr`), and itself."""

    label: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Entry:
    """The metadata of one array in a checkpoint.

    Attributes:
      label: what messages call it.
      type: dtype and shape, as messages have them.
      shape: of what is stored, which for typed keys is their data.
      dtype: of the same.
      weak: whether it is weakly typed, as Python numbers are.
      key: the implementation of typed keys, of which it says their data.
      checksum: of its content (`vnode.elastic.integrity.checksums`), if there is one.
      blocks: mesh axes, and the number of blocks of each device along them, if devices have different numbers.
    """

    label: str
    type: str
    shape: tuple[int, ...]
    dtype: str
    weak: bool = False
    key: str | None = None
    checksum: str | None = None
    blocks: Blocks | None = None

    @classmethod
    def from_leaf(cls, leaf: Leaf, checksum: str) -> Entry:
        """The entry of an array."""
        key = is_key(leaf.value)
        data = jax.eval_shape(jax.random.key_data, leaf.value) if key else leaf.value
        implementation = str(jax.random.key_impl(leaf.value)) if key else None
        shape, dtype, weak = tuple(data.shape), str(data.dtype), is_weak(leaf.value)
        return cls(
            leaf.label, type_of(leaf.value), shape, dtype, weak, implementation, checksum, known_blocks(leaf.value)
        )

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Entry:
        """An entry as JSON has it."""
        axes, counts = said.get("blocks") or ((), ())
        return cls(**{**said, "shape": tuple(said["shape"]), "blocks": (tuple(axes), tuple(counts)) if axes else None})

    def to_json(self) -> dict[str, Any]:
        """The entry for JSON; `blocks` only if there are any: earlier versions do not know them."""
        said = dataclasses.asdict(self)
        return said if self.blocks else {name: value for name, value in said.items() if name != "blocks"}

    def remember_blocks(self, array: Any) -> None:
        """Remembers how an array that was read is stored."""
        if self.blocks:
            remember_blocks(array, self.blocks)

    @property
    def size(self) -> int:
        """The number of elements stored."""
        return int(np.prod(self.shape, dtype=object))


def arrays_by_path(state: Any) -> dict[Path, Leaf]:
    """The arrays of a state by path.

    Example:
      >>> list(arrays_by_path({"params": [1.0, 2.0], "name": "mlp"}))
      [('params', '0'), ('params', '1')]
      >>> list(arrays_by_path({"a": {"b": 1}, "a.b": 2}))  # one name where these are put together
      [("['a']['b']",), ("['a.b']",)]
    """
    arrays = array_leaves(state)
    leaves = [entry for entry, array in zip(jax.tree.leaves_with_path(state), arrays, strict=True) if array]
    labels = [jax.tree_util.keystr(path) for path, _ in leaves]
    if len(set(labels)) < len(labels):  # of keys that print alike, or a class that gives two parts one name
        labels = [f"{label} ({i})" for i, label in enumerate(labels)]
    paths = [path_text(path) for path, _ in leaves]
    awkward = () in paths or not {"", ".", ".."}.isdisjoint(part for path in paths for part in path)
    if awkward or len({".".join(path) for path in paths}) < len(paths):
        paths = [(label or "state",) for label in labels]
    return {path: Leaf(label, leaf) for path, label, (_, leaf) in zip(paths, labels, leaves, strict=True)}


def path_text(path: Iterable[Any]) -> Path:
    """A path of jax, each of its parts as text."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def stored_arrays(state: Any) -> Any:
    """The arrays of a state that are written, those with elements, in the structure of the state.

    So a reader that has the same structure reads it as it is. Other leaves are None.
    """
    arrays = {path: leaf.value for path, leaf in arrays_by_path(state).items() if leaf.value.size}
    if not arrays:
        return {"state": None}
    leaves, treedef = jax.tree.flatten_with_path(state)
    written = [array and leaf.size > 0 for (_, leaf), array in zip(leaves, array_leaves(state), strict=True)]
    if all(path_text(path) in arrays for (path, _), wanted in zip(leaves, written, strict=True) if wanted):
        kept = [leaf if wanted else None for (_, leaf), wanted in zip(leaves, written, strict=True)]
        return jax.tree.unflatten(treedef, kept)
    return {path[0]: array for path, array in arrays.items()}


def nested_dictionaries(arrays: Mapping[Path, Any]) -> dict[str, Any]:
    """Arrays as nested dictionaries.

    Example:
      >>> nested_dictionaries({("params", "w"): 1, ("params", "b"): 2, ("count",): 3})
      {'params': {'w': 1, 'b': 2}, 'count': 3}
    """
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        at = tree
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = array
    return tree


def with_arrays(like: Any, arrays: Mapping[Path, Any]) -> Any:
    """A state with its arrays replaced by others, which go by path."""
    paths = iter(arrays_by_path(like))
    return map_arrays(lambda leaf: arrays[next(paths)], like)


def type_of(leaf: Any) -> str:
    """Dtype and shape of an array, as messages and checkpoints have them: ``bfloat16[3, 4]``."""
    leaf = abstract(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def check(entries: Mapping[Path, Entry], leaves: Mapping[Path, Leaf], where: str) -> None:
    """Refuses a checkpoint of a state of another structure, and one that this process cannot hold.

    Args:
      entries: those of the checkpoint.
      leaves: the arrays that are needed; their shapes and dtypes are compared.
      where: which checkpoint.

    Raises:
      CheckpointError: they differ.
    """

    def shown(blocks: Blocks) -> str:
        return f"blocks of {blocks[1]} along {', '.join(blocks[0])}"

    facts = [f"{entry.label}: only in the checkpoint" for path, entry in entries.items() if path not in leaves]
    facts += [f"{leaf.label}: not in the checkpoint" for path, leaf in leaves.items() if path not in entries]
    for path, entry in entries.items():
        if path in leaves and entry.type != (needed := type_of(leaves[path].value)):
            facts.append(f"{leaves[path].label}: {entry.type} in the checkpoint, {needed} in the state")
        elif (
            path in leaves and entry.blocks and (other := known_blocks(leaves[path].value)) not in (None, entry.blocks)
        ):
            facts.append(f"{entry.label}: {shown(entry.blocks)} in the checkpoint, {shown(other)} in the state")
    if facts:
        lines = limit_lines(facts, 20)
        raise CheckpointError(
            layout_message(
                f"{where} holds another state.",
                facts=lines,
                remedies=[
                    "start from the state (model, optimizer) that was saved",
                    "only for a part of it: vnode.elastic.restore(folder) reads all of it, without like=",
                    "or use another folder",
                ],
            )
        )


def check_width(entries: Iterable[Entry], where: str) -> None:
    """Refuses arrays of 64 bits where jax would cut them to 32.

    Raises:
      CheckpointError: there are such.
    """
    wide = [entry for entry in entries if str(jax.dtypes.canonicalize_dtype(jnp.dtype(entry.dtype))) != entry.dtype]
    if wide:
        raise CheckpointError(
            layout_message(
                f"{where} holds arrays of 64 bits, and jax is set to 32.",
                facts=[f"{entry.label}: {entry.type}" for entry in wide[:20]],
                remedies=['jax.config.update("jax_enable_x64", True) before the state is made'],
            )
        )
