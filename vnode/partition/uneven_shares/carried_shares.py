"""What of AccPar's unequal shares is carried out, and what is only simulated.

Knows programs as problems, the strategies and the share that were found, and programs in blocks. Must not know how
shares are found, nor how blocks are evaluated.

Each operator divides one dimension between two groups: samples, or a dimension of parameters. Those whose equations are
free in it, or reduce it, are carried out: a loop over blocks of it, with different numbers for the groups. What is in
the body of a loop, slides a window along the dimension or needs it whole is not: it is left as it was, and labelled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from vnode.analysis.program import Program
from vnode.errors import PartitionError, SearchError
from vnode.partition.searches.ilp_formulation import Search
from vnode.partition.searches.strategies import PIECES
from vnode.partition.uneven_shares.accpar import Shared
from vnode.spmd.factor_blocks import InBlocks, some_in_blocks
from vnode.spmd.layout import Axes, replicated
from vnode.spmd.sharding_flow import Flow, along, follow
from vnode.spmd.uneven_blocks import Share

MOST = 32
"""Blocks of a dimension at most: every block is a turn of a loop, and small ones leave units idle."""


@dataclasses.dataclass(frozen=True)
class DividedDimension:
    """A dimension that some operators divide between groups.

    Attributes:
      kind: ``"samples"`` or ``"parameters"``.
      size: how many indices it has.
      operators: how many operators divide it.
      operations: of these.
      wanted: the first group's share, as it was found.
      share: the blocks of each group; None where it is simulated.
      why: why it is.
    """

    kind: str
    size: int
    operators: int
    operations: float
    wanted: float
    share: Share | None
    why: str = ""

    def __str__(self) -> str:
        named = f"{self.kind}, {self.size} in {self.operators} operators, share {self.wanted:.3f}"
        if self.share is None:
            return f"{named}: simulated ({self.why})"
        first, second = self.share.counts
        return f"{named}: carried out, {first} and {second} blocks"


@dataclasses.dataclass(frozen=True, eq=False)
class CarriedOut:
    """Operators between two groups.

    Attributes:
      program: with loops over blocks.
      dimensions: what is divided, that with most operations first.
      splits: of each dimension that is carried out, one after the other applied to the program.
      alone: the part of all operations that no group divides.
      axis: of the mesh, along which groups are.
    """

    program: Program
    dimensions: tuple[DividedDimension, ...]
    splits: tuple[InBlocks, ...]
    alone: float
    axis: str

    def flow(self, axes: Axes) -> Flow:
        """How the program's values lie on a mesh, inputs that are in no blocks on every device."""
        layouts = [replicated(len(var.aval.shape)) for var in self.program.inputs]
        for split in self.splits:
            for number, dim in enumerate(split.inputs):
                if dim is not None:
                    room = self.program.inputs[number].aval.shape[dim]
                    layouts[number] = along(dim, split.share.cut(room, axes), layouts[number])
        return follow(self.program, layouts, axes)

    def put(self, values: Sequence[Any]) -> list[Any]:
        """Inputs as the program takes them, of inputs in the user's shapes."""
        for split in self.splits:
            values = split.put(values)
        return list(values)

    def get(self, values: Sequence[Any]) -> list[Any]:
        """Outputs in the user's shapes."""
        for split in reversed(self.splits):
            values = split.get(values)
        return list(values)

    def __str__(self) -> str:
        total = sum(each.operations for each in self.dimensions) or 1.0
        lines = [f"  {each.operations / total * (1 - self.alone):6.1%}  {each}" for each in self.dimensions]
        return "\n".join([f"operations, divided along {self.axis!r}:", *lines, f"  {self.alone:6.1%}  on both groups"])


def carried_out(
    search: Search,
    shared: Shared,
    *,
    axis: str = "groups",
    samples: Mapping[int, int] | None = None,
    blocks: int | None = None,
) -> CarriedOut:
    """A program in which two groups have the shares that were found, as far as blocks can give them.

    Args:
      search: of `vnode.partition.searches.between`.
      shared: strategies and the share.
      axis: of the mesh, the first index for the first group.
      samples: for inputs, by number, the dimension that has the samples: for the label.
      blocks: of every dimension; by default, of each as many of at most 32 as give the share best.

    Raises:
      SearchError: strategies are of another program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.analysis.program import inline
      >>> from vnode.partition.machine.known_kinds import kind_named
      >>> from vnode.partition.searches import Group, between, shared
      >>> traced = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((8192, 4096)), jnp.ones((4096, 4096)))
      >>> groups = [Group(kind_named(name), 4, 1e15) for name in ("v5e", "v5p")]
      >>> search, cut = between(inline(traced.jaxpr, traced.consts), groups)
      >>> print(carried_out(search, shared(cut)).dimensions[0].share)
      Share(axes=('groups',), counts=(5, 11))
    """
    if len(shared.strategies) != search.problem.operators:
        raise SearchError(
            f"{len(shared.strategies)} strategies, of a program with {search.problem.operators} operators"
        )
    flat, given = search.flat, search.program
    batch = {flat.named(given.inputs[number], dim) for number, dim in (samples or {}).items()}
    chosen, _ = search.spread(shared.strategies)
    several: dict[Hashable, list[int]] = {}
    alone = 0.0
    for k, (cluster, strategy) in enumerate(zip(search.clusters, chosen, strict=True)):
        (name,) = cluster.dimensions[strategy]
        if name is None or name == PIECES:
            alone += operations(search, k)
        else:
            several.setdefault(flat.names.find(name), []).append(k)
    program, splits, dimensions = given, list[InBlocks](), list[DividedDimension]()
    work = {name: sum(operations(search, k) for k in clusters) for name, clusters in several.items()}
    for name in sorted(several, key=lambda name: -work[name]):
        factors, sizes, why = factors_of(search, name, several[name])
        share = None
        if not why:
            numbers = {id(eqn): number for number, eqn in enumerate(program.equations)}
            parts = best_divisor(sizes, shared.share) if blocks is None else blocks
            try:
                wanted = round(shared.share * parts)
                share = Share((axis,), (wanted, parts - wanted))
                split = some_in_blocks(program, share, {numbers[key]: factor for key, factor in factors.items()})
                program = split.program
                splits.append(split)
            except PartitionError as error:
                share, why = None, " ".join(line.strip() for line in str(error).splitlines()[:2])
        kind = "samples" if name in batch else "parameters"
        size = max(sizes, default=0)
        dimensions.append(DividedDimension(kind, size, len(several[name]), work[name], shared.share, share, why))
    whole = alone / (alone + sum(work.values()) or 1.0)
    return CarriedOut(program, tuple(dimensions), tuple(splits), whole, axis)


def operations(search: Search, cluster: int) -> float:
    """Scalar operations of a cluster in a step."""
    nodes = [search.flat.nodes[n] for n in search.clusters[cluster].nodes]
    return sum(node.times * node.description.flops for node in nodes if node.description is not None)


def factors_of(search: Search, name: Hashable, clusters: Sequence[int]) -> tuple[dict[int, int], list[int], str]:
    """For equations of clusters (by identity) the factor that is a named dimension, their sizes, and why not."""
    flat, found, sizes = search.flat, dict[int, int](), list[int]()
    for number in [n for k in clusters for n in search.clusters[k].nodes]:
        node = flat.nodes[number]
        if node.description is None:
            continue
        own = [f for f, n in enumerate(node.description.sizes) if n > 1 and flat.factor(number, f) == name]
        if own and len(node.path) > 1:
            return found, [node.description.sizes[own[0]]], "its equations are in the body of a loop or branch"
        if len(own) > 1:
            return (
                found,
                [node.description.sizes[own[0]]],
                "an equation has it as two factors, as windows that slide along it do",
            )
        for factor in own:
            found[id(node.eqn)] = factor
            sizes.append(node.description.sizes[factor])
    if math.gcd(*sizes) < 2:
        return (
            found,
            sizes,
            f"no number of blocks divides all of its factors, {', '.join(map(str, sorted(set(sizes))))}",
        )
    return found, sizes, ""


def best_divisor(sizes: Sequence[int], share: float) -> int:
    """The number of blocks that gives a share best, the smallest one of them.

    >>> best_divisor([96, 48], 0.3), best_divisor([7], 0.3)
    (24, 7)
    """
    common = math.gcd(*sizes)
    possible = [b for b in range(2, min(common, MOST) + 1) if common % b == 0] or [common]
    return min(possible, key=lambda b: (round(abs(round(share * b) / b - share), 3), b))
