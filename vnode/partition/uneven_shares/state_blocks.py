"""A step and a dimension -> the leaves of its state that can be stored in uneven blocks along it, and their specs.

Knows steps, names of leaves, tied dimensions, and layouts of leaves. Must not know machines, costs, nor how many blocks
are best, or how they are carried out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from vnode.errors import PartitionError
from vnode.operators.cost import all_bytes
from vnode.partition.plan.search_subject import Subject, on_nodes, subject_of
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.runtime.mesh_function import UnevenValues
from vnode.spmd.dimension_propagation import propagate_dimension
from vnode.spmd.factor_blocks import in_blocks
from vnode.spmd.sharded_program import as_spec_layout
from vnode.spmd.sharding_flow import Flow
from vnode.spmd.uneven_blocks import Share

MOST = 32
"""Most blocks of a dimension: every block is a loop iteration, and small ones leave units idle."""


def divided_state(flow: Flow, subject: Subject, axis: str) -> dict[int, int]:
    """The dimensions of a state that a flow divides over an axis, by the number of the input."""
    found = {}
    for i in subject.state:
        for dim, cut in enumerate(as_spec_layout(flow.inputs[i], {axis: 2}).dims):
            if cut is not None and axis in cut.axes:
                found[i] = dim
    return found


def tied_inputs(subject: Subject, seeds: Mapping[int, int], blocks: int) -> dict[int, int]:
    """The inputs of a step that can be stored in blocks, and the inputs tied to them, with the dimension of each.

    Args:
      subject: the step.
      seeds: the dimension in blocks of some inputs, by number.
      blocks: number of equal blocks.

    Returns:
      The dimension of each such input, by number. Inputs are tried by size, the largest first; an input that prevents
      computing block by block is left out.
    """
    program, found = subject.schedule.flow.program, dict[int, int]()
    for i in sorted(seeds, key=lambda i: (-all_bytes(program.inputs[i].aval), i)):
        if i in found or program.inputs[i].aval.shape[seeds[i]] % blocks:
            continue
        begun = {program.inputs[k]: dim for k, dim in {**found, i: seeds[i]}.items()}
        try:
            several = propagate_dimension(program, begun, blocks).dims
        except PartitionError:
            continue
        pairs = zip(program.inputs, subject.names, strict=False)
        found = {k: several[var] for k, (var, name) in enumerate(pairs) if name is not None and var in several}
    return found


def specs_in_blocks(subject: Subject, dims: Mapping[int, int], share: Share) -> dict[str, UnevenSpec]:
    """The specs of leaves that are stored in blocks, by name.

    Raises:
      PartitionError: two leaves of one name have other dimensions in blocks.
    """
    specs: dict[str, UnevenSpec | None] = {}
    for number, name in enumerate(subject.names):
        if name is None:
            continue
        dim, shape = dims.get(number), subject.inputs[number].aval.shape
        spec = None
        if dim is not None:
            block = shape[dim] // share.blocks
            spec = UnevenSpec(dim, share.axes[0], tuple(n * block for n in share.counts))
        if specs.setdefault(name, spec) != spec:
            raise PartitionError(f"two leaves are called {name!r}, but different dimensions in blocks")
    return {name: spec for name, spec in specs.items() if spec is not None}


def rooms_of_state(subject: Subject, dims: Mapping[int, int], share: Share) -> UnevenValues:
    """The inputs of a step that are stored in blocks, and the outputs that replace them; `dims` is by input."""
    inputs, outputs = range(len(subject.inputs)), range(len(subject.schedule.flow.program.outputs))
    ends = [dims.get(subject.carried[j]) if j in subject.carried else None for j in outputs]
    return UnevenValues(share, [dims.get(i) for i in inputs], ends)


def dims_of(subject: Subject, specs: Mapping[str, PartitionSpec | UnevenSpec]) -> dict[int, int]:
    """The unevenly sharded dimension of each input, by number, from specs by name."""
    named = [(i, specs.get(name)) for i, name in enumerate(subject.names) if name is not None]
    return {i: spec.dim for i, spec in named if isinstance(spec, UnevenSpec)}


def block_numbers(lengths: Sequence[int]) -> list[int]:
    """The numbers of blocks that divide some dimensions, the largest first.

    >>> block_numbers([12, 8])
    [2, 3, 4, 6, 8, 12]
    """
    return sorted({b for n in lengths for b in range(2, MOST + 1) if n % b == 0})


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
            f"{pattern!r} matches no leaf of the state.",
            facts=["the names are", *names],
            remedies=["name one of them"],
        )
    return numbers
