"""The examples of step t, by t and the seed only; and each device given just those of its nodes.

Knows arrays, orders of examples, placements. Must not know steps, nor threads (`vnode.data.prefetch` does).

The order within an epoch sorts the examples by random numbers of NumPy's Philox generator (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011), keyed by seed and epoch. NumPy promises the raw numbers of a bit
generator for all time (NEP 19), which it does not for `Generator.permutation`; and a key needs no history, so any
step's examples are found without those before it.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from vnode.data.source import check_dtype, owned
from vnode.errors import BatchError, layout_message
from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch, in_equal_shards, node_size

LASTS = ("wrap", "drop", "keep")
SAMPLE = 16
"""Examples whose values stand for those of all in a fingerprint."""
LARGEST_SHUFFLE = 1 << 33
"""Examples from which on an order in memory (8 bytes each) is refused."""


class Examples(Protocol):
    """What examples are read from: anything that knows how many it has, and can be asked for some of them."""

    def __len__(self) -> int:
        """How many examples there are."""
        ...

    def take(self, rows: np.ndarray) -> Any:
        """The examples with these numbers (int64), as a pytree of arrays with one row for each.

        The arrays are copied, so the next call may fill them again.
        """
        ...


class Arrays:
    """Examples in memory (or memory-mapped): a pytree of arrays whose first dimension counts them.

    Raises:
      BatchError: the arrays disagree about how many examples there are.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        sizes = {
            f"{jax.tree_util.keystr(path)}: shape {np.shape(leaf)}": np.shape(leaf)[:1]
            for path, leaf in jax.tree.leaves_with_path(tree)
        }
        if len(set(sizes.values())) != 1 or () in sizes.values():
            raise BatchError(
                layout_message(
                    "the arrays of a data set need one first dimension, which counts the examples.",
                    facts=list(sizes) or ["there is no array"],
                    remedies=["leave out what belongs to no example", "check the order of dimensions"],
                )
            )
        for path, leaf in jax.tree.leaves_with_path(tree):
            check_dtype(path, leaf, "the data set")
        self.count = next(iter(sizes.values()))[0]

    def __len__(self) -> int:
        return self.count

    def take(self, rows: np.ndarray) -> Any:
        return jax.tree.map(lambda leaf: leaf[rows], self.tree)


class Records:
    """Examples of a sequence: ``len(sequence)``, and ``sequence[i]``, a pytree, for one of them."""

    def __init__(self, sequence: Any) -> None:
        self.sequence = sequence

    def __len__(self) -> int:
        return len(self.sequence)

    def take(self, rows: np.ndarray) -> Any:
        return stacked([self.sequence[int(row)] for row in rows])


def stacked(examples: Sequence[Any]) -> Any:
    """Examples, pytrees of equal shapes, as one pytree of arrays with a row for each.

    Raises:
      BatchError: their shapes or structures differ.
    """

    def stack(path: Any, *leaves: Any) -> np.ndarray:
        shapes = sorted({np.shape(leaf) for leaf in leaves})
        if len(shapes) > 1:
            raise BatchError(
                layout_message(
                    f"examples of different shapes do not make up a batch: "
                    f"{jax.tree_util.keystr(path) or 'the example'}.",
                    facts=[f"shapes {', '.join(map(str, shapes[:4]))}"],
                    remedies=["pad to one length, with a mask of what is real"],
                )
            )
        array = np.stack(leaves)
        check_dtype(path, array, "an example")
        return array

    structures = {jax.tree.structure(example) for example in examples}
    if len(structures) > 1:
        raise BatchError(
            layout_message(
                "examples of different structures do not make up a batch.", facts=sorted(map(str, structures))[:4]
            )
        )
    return jax.tree_util.tree_map_with_path(stack, *examples)


def examples_of(data: Any) -> Examples:
    """A data set as `Examples`.

    Args:
      data: something with ``take`` and a length; a dictionary, a tuple or an array: a pytree of arrays; any other
        sequence: its elements are the examples.

    Raises:
      BatchError: it is none of these.
    """
    if isinstance(data, np.ndarray | jax.Array | Mapping | tuple):
        return Arrays(jax.tree.map(np.asarray, data) if not isinstance(data, np.ndarray) else data)
    if hasattr(data, "take") and hasattr(data, "__len__"):
        return data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Records(data)
    raise BatchError(
        layout_message(
            f"{type(data).__name__} is no data set: examples must be found by number.",
            remedies=[
                "give a pytree of arrays, a sequence of examples, or an object with __len__ and take(rows)",
                "read a stream into memory, or wrap it in a sequence, first",
            ],
        )
    )


@functools.lru_cache(maxsize=4)
def permutation(examples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the examples in an epoch, int64; the same in every version of NumPy."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(examples)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order


@dataclasses.dataclass(frozen=True)
class Order:
    """Which examples are in the batch of which step.

    Args:
      examples: how many there are.
      batch_size: examples of a batch.
      seed: of the order, at least 0.
      shuffle: a new random order in each epoch; else the examples' own.
      last: what becomes of the ``examples % batch_size`` examples at the end of an epoch. ``"wrap"``: the batch is
        filled with the first of the next epoch, so that each example is used once in each epoch. ``"drop"``: they
        are left out, other ones in every epoch if these are shuffled; `dropped` says how many. ``"keep"``: the last
        batch of an epoch is smaller, which is for evaluation: it is another program.

    Raises:
      ValueError: an option is not one of those named above.
      BatchError: there are no examples, or fewer than a batch takes.

    Example:
      >>> import numpy as np
      >>> order = Order(examples=10, batch_size=4, shuffle=False)
      >>> [order.rows(step).tolist() for step in range(3)]
      [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
      >>> Order(examples=10, batch_size=4, shuffle=False, last="drop").rows(2).tolist()
      [0, 1, 2, 3]
    """

    examples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    last: str = "wrap"

    def __post_init__(self) -> None:
        if self.last not in LASTS:
            raise ValueError(f"last must be one of {', '.join(LASTS)}, not {self.last!r}")
        if not is_whole(self.batch_size) or self.batch_size < 1:
            raise ValueError(f"batch_size must be a whole number, at least 1, not {self.batch_size!r}")
        if not is_whole(self.seed) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, not {self.seed!r}")
        if not isinstance(self.shuffle, bool | np.bool_):
            raise ValueError(f"shuffle must be True or False, not {self.shuffle!r}")
        for name in ("batch_size", "seed", "shuffle"):  # numbers of Python, which checkpoints can keep
            value = getattr(self, name)
            object.__setattr__(self, name, bool(value) if name == "shuffle" else int(value))
        if self.examples < self.batch_size:
            raise BatchError(
                layout_message(
                    f"{self.examples} examples do not make up a batch of {self.batch_size}.",
                    remedies=[f"batch_size={self.examples}, or less"] if self.examples else ["check the path"],
                )
            )
        if self.shuffle and self.examples > LARGEST_SHUFFLE:
            raise BatchError(
                layout_message(
                    f"an order of {self.examples} examples does not fit into memory.",
                    remedies=["shuffle=False, and a data set that shuffles itself"],
                )
            )

    @property
    def dropped(self) -> int:
        """Examples that each epoch leaves out."""
        return self.examples % self.batch_size if self.last == "drop" else 0

    @property
    def steps_per_epoch(self) -> float:
        """Batches of an epoch; a whole number unless the last is filled from the next."""
        batches = (self.examples - self.dropped) / self.batch_size
        return float(-(-self.examples // self.batch_size)) if self.last == "keep" else batches

    def positions(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batch of a step: for each example the epoch, and its number among the examples; int64[batch_size]."""
        used = self.examples - self.dropped
        if self.last == "keep":
            epoch, batch = divmod(step, int(self.steps_per_epoch))
            offsets = np.arange(batch * self.batch_size, min((batch + 1) * self.batch_size, used))
            epochs = np.full_like(offsets, epoch)
        else:
            epochs, offsets = np.divmod(step * self.batch_size + np.arange(self.batch_size), used)
        if self.shuffle:
            rows = np.empty_like(offsets)
            for epoch in np.unique(epochs):
                here = epochs == epoch
                rows[here] = permutation(self.examples, self.seed, int(epoch))[offsets[here]]
            offsets = rows
        return epochs, offsets

    def rows(self, step: int) -> np.ndarray:
        """The numbers of the examples in the batch of a step, int64[batch_size]."""
        return self.positions(step)[1]


class Batches:
    """The batches of a data set, one for each step number; dimension 0 counts the examples.

    Args:
      data: the examples: a pytree of arrays, a sequence of examples, something with ``__len__`` and ``take(rows)``, or
        what `vnode.grain.dataset` makes of a grain data set.
      batch_size: examples of a batch.
      seed: of the order; at least 0.
      shuffle: a new random order in each epoch; else the data's own.
      last: ``"wrap"``, ``"drop"`` or ``"keep"``: what becomes of examples that do not fill a batch at the end of an
        epoch, see `Order`.

    Raises:
      BatchError: the data are no data set, or hold too few examples.
      ValueError: an option is not one of those named above.

    Example:
      >>> import jax, numpy as np, vnode
      >>> batches = vnode.data.Batches({"x": np.arange(10)}, batch_size=4, seed=1)
      >>> batches.batch(7)["x"].tolist() == batches.batch(7)["x"].tolist()
      True
      >>> placed = batches.load(7, vnode.Placement(4, jax.devices()[:1]))
      >>> placed["x"].shape
      (4,)
    """

    def __init__(self, data: Any, batch_size: int, *, seed: int = 0, shuffle: bool = True, last: str = "wrap") -> None:
        self.examples = examples_of(data)
        self.order = Order(len(self.examples), batch_size, seed, shuffle, last)

    def __repr__(self) -> str:
        options = dataclasses.asdict(self.order)
        return f"Batches({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def describe(self) -> dict[str, Any]:
        """What the batches depend on besides the step number and the examples themselves, fit for JSON."""
        return dataclasses.asdict(self.order)

    def fingerprint(self) -> str:
        """A checksum (CRC-32) of the values of a fixed sample of the examples, with their dtypes and shapes."""
        count = self.order.examples
        sample = self.take(np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int64)))
        checksum = 0
        for path, leaf in jax.tree.leaves_with_path(sample):
            array = np.ascontiguousarray(leaf)
            name = f"{jax.tree_util.keystr(path)} {array.dtype}{array.shape}"
            checksum = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), checksum))
        return f"{checksum:08x}"

    def batch(self, step: int) -> Any:
        """The batch of a step on the host, a pytree of NumPy arrays."""
        return self.take(self.rows(step))

    def load(self, step: int, placement: Placement) -> Any:
        """The batch of a step on a placement's devices.

        Args:
          step: the step number.
          placement: where the step's nodes live.

        Returns:
          A pytree. Every device is given the examples of its nodes, and only those are read for it, in this process.
          If the shares are equal, the leaves are global arrays; otherwise `vnode.data.ShardedBatch`, which a step on
          this placement takes as they are.
        """
        rows = self.rows(step)

        def take(positions: np.ndarray) -> Any:
            if len(positions):
                return self.take(rows[positions])
            return jax.tree.map(lambda leaf: np.asarray(leaf)[:0], self.take(rows[:1]))

        return loaded(len(rows), placement, take)

    def rows(self, step: int) -> np.ndarray:
        """The numbers that the data are asked for, int64[batch_size]."""
        epochs, rows = self.order.positions(step)
        if getattr(self.examples, "endless", False):  # example i of epoch e has the number e * length + i
            rows = epochs * self.order.examples + rows
        return rows

    def take(self, rows: np.ndarray) -> Any:
        """Some examples; checks that there is a row for each.

        Raises:
          BatchError: there is not.
        """
        taken = self.examples.take(rows)
        wrong = [
            f"{jax.tree_util.keystr(path) or 'the result'}: shape {np.shape(leaf)}"
            for path, leaf in jax.tree.leaves_with_path(taken)
            if np.shape(leaf)[:1] != (len(rows),)
        ]
        if wrong or not jax.tree.leaves(taken):
            raise BatchError(
                layout_message(
                    f"asked for {len(rows)} examples, the data gave something else.",
                    facts=wrong or ["there is no array"],
                    remedies=["take(rows) must return a pytree of arrays with one row for each of rows"],
                )
            )
        return taken if isinstance(self.examples, Arrays | Records) else owned(taken, "what the data gave")


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, and no boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def loaded(size: int, placement: Placement, take: Callable[[np.ndarray], Any]) -> Any:
    """A batch on a placement's devices.

    Args:
      size: of the batch, B.
      placement: where to.
      take: gives rows of the batch by their numbers, a pytree of host arrays. It is asked for those of this process's
        nodes; and for none of them where there are no such nodes, to learn what the arrays are.

    Returns:
      A pytree of global arrays if the shares are equal, otherwise of `ShardedBatch`.
    """
    if in_equal_shards(placement, size):
        sharding = placement.sharding(placement.axis)
        if placement.size == 1 and sharding.is_fully_addressable:
            return jax.device_put(take(np.arange(size)), sharding)  # the same as below, by a shorter way
        leaves, treedef = spread(sharding, size, lambda start, stop: take(np.arange(start, stop)))
        return jax.tree.unflatten(treedef, leaves)
    n = node_size(placement, size)

    def nodes(group: Placement, slot: int, stop: int) -> Any:
        """The nodes of the device whose slots begin with `slot`; None if it has none."""
        device = slot // group.waves
        if slot == stop:
            return jax.tree.map(lambda leaf: np.zeros((0, n, *np.shape(leaf)[1:]), leaf.dtype), take(np.arange(0)))
        count = group.counts[device]
        if not count:
            return None
        mine = np.minimum(np.arange(count * n) + group.starts[device] * n, size - 1)

        def divided(leaf: Any) -> np.ndarray:
            room = np.zeros((group.waves, n, *np.shape(leaf)[1:]), np.asarray(leaf).dtype)
            room[:count] = np.reshape(leaf, (count, *room.shape[1:]))
            return room

        return jax.tree.map(divided, take(mine))

    made = [
        spread(group.sharding(group.axis), group.size * group.waves, functools.partial(nodes, group))
        for group in placement.working
    ]
    parts = zip(*(leaves for leaves, _ in made), strict=True)
    return jax.tree.unflatten(made[0][1], [ShardedBatch(each, size, placement) for each in parts])


def local_batch(local: Any, batch_size: int, placement: Placement) -> Any:
    """A batch of which this process has only its own rows, on a placement's devices.

    Each process calls it with the rows that `vnode.Placement.local_examples` names; together they are the batch. No
    example travels between processes.

    Args:
      local: a pytree of host arrays ``[n, ...]``, one row for each of ``placement.local_examples(batch_size)``.
      batch_size: examples of the whole batch, B.
      placement: where the step's nodes live, ``step.placement``.

    Returns:
      A pytree for a step on this placement: of global arrays ``[B, ...]`` if the shares are equal, otherwise of
      `ShardedBatch`.

    Raises:
      BatchError: there are more or fewer rows.

    Example:
      >>> import jax, numpy as np, vnode
      >>> placement = vnode.Placement(4, jax.devices()[:1])
      >>> images = np.arange(6.0)
      >>> vnode.data.local_batch(images[placement.local_examples(6)], 6, placement).shape
      (6,)
    """
    wanted = placement.local_examples(batch_size)
    wrong = [
        f"{jax.tree_util.keystr(path) or 'the batch'}: shape {np.shape(leaf)}"
        for path, leaf in jax.tree.leaves_with_path(local)
        if np.shape(leaf)[:1] != (len(wanted),)
    ]
    if wrong or not jax.tree.leaves(local):
        raise BatchError(
            layout_message(
                f"process {jax.process_index()} must give {len(wanted)} of the batch's {batch_size} rows.",
                facts=wrong or ["there is no array"],
                remedies=["give the rows placement.local_examples(batch_size), in this order"],
            )
        )
    local = jax.tree.map(np.asarray, local)
    return loaded(
        batch_size,
        placement,
        lambda positions: jax.tree.map(lambda leaf: leaf[np.searchsorted(wanted, positions)], local),
    )


def spread(sharding: NamedSharding, length: int, rows: Callable[[int, int], Any]) -> tuple[Sequence[jax.Array], Any]:
    """Arrays of which each device is given its rows.

    Args:
      sharding: of their dimension 0.
      length: of that.
      rows: makes a range of it, a pytree of host arrays; or None, for what will not be read. Asked for an empty range,
        it tells their dtypes and further dimensions.

    Returns:
      The global arrays, and the structure of the pytree.
    """
    indices = sharding.addressable_devices_indices_map((length,))
    shares = {device: index[0].indices(length)[:2] for device, index in indices.items() if index is not None}
    parts = {share: rows(*share) for share in dict.fromkeys(shares.values())}
    given = next((part for part in parts.values() if part is not None), None)
    if given is None:
        empty = rows(0, 0)
        start, stop = next(iter(parts), (0, 0))
        given = jax.tree.map(lambda leaf: np.zeros((stop - start, *np.shape(leaf)[1:]), leaf.dtype), empty)
    parts = {share: jax.tree.map(np.zeros_like, given) if part is None else part for share, part in parts.items()}
    leaves = {share: jax.tree.leaves(part) for share, part in parts.items()}
    like, treedef = jax.tree.flatten(given)
    pieces = jax.device_put(
        [leaves[share][i] for i in range(len(like)) for share in shares.values()], list(shares) * len(like)
    )
    made = [
        jax.make_array_from_single_device_arrays(
            (length, *np.shape(leaf)[1:]),
            sharding,
            pieces[i * len(shares) : (i + 1) * len(shares)],
            dtype=jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype),
        )
        for i, leaf in enumerate(like)
    ]
    return made, treedef
