"""AccPar's unequal shares of two groups -> a program that carries them out in blocks, as far as possible.

Knows programs as problems, strategies and shares, and programs in blocks. Must not know how shares are found, nor how
blocks are evaluated.

Each operator divides one dimension between two groups: samples, or a dimension of parameters. Operators that are free
in it, or reduce it, are carried out as a loop over blocks, with different trip counts for the groups. Operators in the
body of a loop, with a window along the dimension, or that need it whole are left unchanged, and labelled as simulated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

from vnode.analysis.program import Program
from vnode.errors import PartitionError, SearchError
from vnode.partition.searches.ilp_formulation import Search
from vnode.partition.searches.strategies import PIECES
from vnode.partition.uneven_shares.accpar import Shared
from vnode.spmd.factor_blocks import InBlocks, equations_in_blocks
from vnode.spmd.layout import Axes, replicated
from vnode.spmd.sharding_flow import Flow, follow, with_cut
from vnode.spmd.uneven_blocks import Share

MOST = 32
"""Most blocks of a dimension: every block is a loop iteration, and small ones leave units idle."""


@dataclasses.dataclass(frozen=True)
class DividedDimension:
    """A dimension that some operators divide between groups.

    Attributes:
      size: its length.
      operators: number of operators that divide it.
      operations: scalar operations of these operators.
      wanted: the first group's share, as found.
      share: the blocks of each group; None where it is only simulated.
      why: the reason why it is only simulated.
    """

    size: int
    operators: int
    operations: float
    wanted: float
    share: Share | None
    why: str = ""

    def __str__(self) -> str:
        named = f"{self.size} in {self.operators} operators, share {self.wanted:.3f}"
        if self.share is None:
            return f"{named}: simulated ({self.why})"
        first, second = self.share.counts
        return f"{named}: carried out, {first} and {second} blocks"


@dataclasses.dataclass(frozen=True, eq=False)
class CarriedOut:
    """A program divided between two groups.

    Attributes:
      program: the program, with loops over blocks.
      dimensions: the divided dimensions, the one with most operations first.
      splits: the splits of the dimensions that are carried out, in the order in which they apply.
      alone: the share of all operations that is not divided.
      axis: the mesh axis of the groups.
    """

    program: Program
    dimensions: tuple[DividedDimension, ...]
    splits: tuple[InBlocks, ...]
    alone: float
    axis: str

    def flow(self, axes: Axes) -> Flow:
        """Layouts through the program; inputs without blocks are replicated."""
        layouts = [replicated(len(var.aval.shape)) for var in self.program.inputs]
        for split in self.splits:
            for number, dim in enumerate(split.inputs):
                if dim is not None:
                    room = self.program.inputs[number].aval.shape[dim]
                    layouts[number] = with_cut(dim, split.share.cut(room, axes), layouts[number])
        return follow(self.program, layouts, axes)

    def put(self, values: Sequence[Any]) -> list[Any]:
        """The program's inputs, from inputs in the user's shapes."""
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
    blocks: int | None = None,
) -> CarriedOut:
    """A program in which two groups have the shares that were found, as far as whole blocks allow.

    Args:
      search: the result of `vnode.partition.searches.between`.
      shared: the strategies and the share.
      axis: the mesh axis of the groups; its first index is the first group.
      blocks: number of blocks of every dimension; by default the best of at most 32, for each dimension.

    Raises:
      SearchError: the strategies belong to another program.

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
                split = equations_in_blocks(program, share, {numbers[key]: factor for key, factor in factors.items()})
                program = split.program
                splits.append(split)
            except PartitionError as error:
                share, why = None, " ".join(line.strip() for line in str(error).splitlines()[:2])
        size = max(sizes, default=0)
        dimensions.append(DividedDimension(size, len(several[name]), work[name], shared.share, share, why))
    whole = alone / (alone + sum(work.values()) or 1.0)
    return CarriedOut(program, tuple(dimensions), tuple(splits), whole, axis)


def operations(search: Search, cluster: int) -> float:
    """Scalar operations of a cluster in a step."""
    nodes = [search.flat.nodes[n] for n in search.clusters[cluster].nodes]
    return sum(node.times * node.description.flops for node in nodes if node.description is not None)


def factors_of(search: Search, name: Hashable, clusters: Sequence[int]) -> tuple[dict[int, int], list[int], str]:
    """The factor of each equation, by id, that is a named dimension; the factors' sizes; and the reason for failure."""
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
    """The smallest number of blocks that comes nearest to a share.

    >>> best_divisor([96, 48], 0.3), best_divisor([7], 0.3)
    (24, 7)
    """
    common = math.gcd(*sizes)
    possible = [b for b in range(2, min(common, MOST) + 1) if common % b == 0] or [common]
    return min(possible, key=lambda b: (round(abs(round(share * b) / b - share), 3), b))
