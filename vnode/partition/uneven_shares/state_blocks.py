"""A step and a dimension -> the leaves of its state that can be stored in uneven blocks along it, and their specs.

Knows steps, names of leaves, tied dimensions, and layouts of leaves. Must not know machines, costs, nor how many blocks
are best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from vnode.errors import PartitionError
from vnode.partition.plan.search_subject import Subject
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.runtime.mesh_function import UnevenValues
from vnode.spmd.dimension_propagation import propagate_dimension
from vnode.spmd.op_sharding import itemsize
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

    def nbytes(i: int) -> int:
        aval = program.inputs[i].aval
        return math.prod(aval.shape) * itemsize(aval.dtype)

    for i in sorted(seeds, key=lambda i: (-nbytes(i), i)):
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
