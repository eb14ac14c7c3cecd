"""A step and a dimension that unequal devices share -> the tied leaves of its state, and the lengths of their parts.

Knows steps, names of leaves, and tied dimensions. Must not know machines, nor how shares are found or carried out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vnode.errors import PartitionError, layout_message
from vnode.partition.plan.search_subject import on_nodes, subject_of
from vnode.partition.uneven_shares.state_blocks import specs_in_blocks
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.spmd.factor_blocks import in_blocks
from vnode.spmd.uneven_blocks import Share


def uneven(
    step: Any, args: Sequence[Any], dims: Mapping[str, int], counts: Sequence[int], axis: str, **options: Any
) -> dict[str, UnevenSpec]:
    """Shards a state unevenly: the specs of all leaves tied to a dimension, for ``partition`` of `vnode.virtualize`.

    Args:
      step: a train step as `vnode.virtualize` takes it, or a `VirtualStep`.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      dims: maps patterns, searched in the names of the state's leaves (``params/wi``), to the dimension to divide.
      counts: for each index along `axis`, its number of equal blocks of the dimension.
      axis: the mesh axis.
      **options: options of `vnode.virtualize`, if the step is not virtualized yet; `in_axes` says which arguments are
        not state.

    Returns:
      For each leaf that is tied to the named dimensions, by a pattern of its name: its dimension, and how many indices
      of it each device has.

    Raises:
      PartitionError: an equation cannot be evaluated block by block (source line, why); a pattern matches no name;
        blocks do not divide the dimension.
      VnodeError: the step cannot be virtualized.

    Example:
      >>> from vnode.partition import uneven
      >>> import jax, jax.numpy as jnp
      >>> def train_step(state, x):
      ...     loss = lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
      ...     return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))
      >>> state = {"up": jnp.ones((4, 16)), "down": jnp.ones((16, 4))}
      >>> for name, spec in uneven(train_step, (state, jnp.ones((8, 4))), {"up": 1}, (5, 3), "model").items():
      ...     print(name, spec)
      ^down$ UnevenSpec(dim=0, axis='model', counts=(10, 6))
      ^up$ UnevenSpec(dim=1, axis='model', counts=(10, 6))
    """
    check_numbers(dims, counts)
    subject = subject_of(on_nodes(step, 1, options), args)
    program, share = subject.schedule.flow.program, Share((axis,), tuple(counts))
    named = {number: name for number, name in enumerate(subject.names) if name is not None}
    numbers = list(named)
    asked = {numbers[i]: dim for pattern, dim in dims.items() for i in matching_names(pattern, list(named.values()))}
    several = in_blocks(program, share, asked, names=named).inputs
    cut = {number: dim for number in named if (dim := several[number]) is not None}
    return {f"^{re.escape(name)}$": spec for name, spec in specs_in_blocks(subject, cut, share).items()}


def check_numbers(dims: Any, counts: Any) -> None:
    """Checks dimensions by name, and numbers of blocks.

    Raises:
      PartitionError: `dims` does not map names to dimensions, or a number is not an integer.
    """
    if not isinstance(dims, Mapping):
        raise PartitionError(f"dims maps patterns of names to dimensions, as {{'params/wi': 1}}, not {dims!r}")
    for what, numbers in (("counts", counts), ("dims", [*dims.values()])):
        if isinstance(numbers, str) or not all(isinstance(n, int | np.integer) for n in numbers):
            raise PartitionError(f"{what}: expected integers, not {numbers!r}")


def matching_names(pattern: str, names: Sequence[str]) -> list[int]:
    """The numbers of the names in which a pattern is found."""
    try:
        numbers = [number for number, name in enumerate(names) if re.search(pattern, name)]
    except re.error as error:
        raise PartitionError(f"{pattern!r} is not a regular expression: {error}") from None
    if not numbers:
        raise PartitionError(
            layout_message(
                f"{pattern!r} matches no leaf of the state.",
                facts=["the names are", *names],
                remedies=["name one of them"],
            )
        )
    return numbers
