"""A weighted acyclic graph -> stages with parallel branches, between a fork and a join.

Knows directed graphs without cycles, whose nodes are numbers with weights. Must not know equations, devices, nor who
evaluates what.

    0 -> 1 -> 2 -> 5                branches {1, 2} and {3, 4}
    0 -> 3 -> 4 -> 5

Only heavy nodes define branches. A node that depends on all heavy nodes, or that all depend on, ends a stage: a fork, a
join, or the loss between a forward and a backward pass. Dangling heavy nodes, whose results join no other node's
(gradients of weights), are ignored there. Otherwise a backward pass would be a single stage. Among definitions of
"dangling", the one that saves most weight is taken. The heavy nodes of a stage form branches by their connected
components. A light node belongs to a branch if it is related to heavy nodes of that branch only.

Source: decomposition of partial orders into series and parallel compositions (Valdes, Tarjan, Lawler, "The recognition
of series parallel digraphs", SIAM J. Comput. 11, 1982), of which here only stages and branches are looked for.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Collection, Iterator, Sequence

HEAVY_SHARE = 0.95
"""Heavy nodes are the heaviest ones that have this share of all weight."""

MIN_BRANCH_SHARE = 0.1
"""The least share of the heaviest branch's weight that a branch has."""

Branches = tuple[frozenset[int], ...]
"""Numbers of the nodes of each branch of a stage; the branch with the first node comes first."""


def parallel_branches(reads: Sequence[Collection[int]], weights: Sequence[float]) -> list[Branches]:
    """Finds branches that are independent of each other, and worth evaluating in parallel.

    Args:
      reads: for each node, in topological order, the nodes that it depends on: smaller numbers.
      weights: of the nodes, not negative; 0 for a node that is never heavy.

    Returns:
      For each stage with several branches, these branches, in order. No node is in two branches. No path leads from one
      branch to another of its stage, and none leaves a branch and returns.

    Example:
      >>> fork, join = [[]], [2, 4]
      >>> parallel_branches([*fork, [0], [1], [0], [3], join], [0, 2, 2, 3, 0, 0])
      [(frozenset({1, 2}), frozenset({3, 4}))]
    """
    found = _Graph(reads, weights).stages(range(len(reads)))
    return sorted(found, key=lambda branches: min(branches[0]))


class _Graph:
    """The transitive dependencies of a graph; sets of nodes are bits of an integer."""

    def __init__(self, reads: Sequence[Collection[int]], weights: Sequence[float]) -> None:
        self.weights = weights
        self.before = [0] * len(reads)
        self.after = [0] * len(reads)
        for node, sources in enumerate(reads):
            for source in sources:
                self.before[node] |= self.before[source] | 1 << source
        for node in reversed(range(len(reads))):
            for source in reads[node]:
                self.after[source] |= self.after[node] | 1 << node

    def stages(self, nodes: Sequence[int]) -> Iterator[Branches]:
        """Branches among some nodes. No path may leave the nodes and return."""
        heavy, inside = self.heavy(nodes), to_bits(nodes)
        lasting = [
            node for node in heavy if self.after[node] & to_bits(heavy) or not self.is_dangling(node, heavy, inside)
        ]
        joined = [node for node in heavy if not self.is_dangling(node, heavy, inside)]
        ways = [
            [self.branches(stage, heavy, some) for stage in self.split_into_stages(nodes, heavy, some)]
            for some in (lasting, joined, heavy)
        ]
        several = max(ways[:2], key=self.saved_weight)
        several = several if self.saved_weight(several) else ways[2]
        for branches in several:
            if len(branches) > 1:
                yield branches
            elif branches and len(branches[0]) < len(nodes):
                yield from self.stages(sorted(branches[0]))

    def saved_weight(self, stages: Sequence[Branches]) -> float:
        """The weight off the critical path, if the branches of each stage are evaluated in parallel."""
        takes = [[self.weight(branch) for branch in branches] for branches in stages if branches]
        return sum(sum(each) - max(each) for each in takes)

    def heavy(self, nodes: Sequence[int]) -> list[int]:
        """The heaviest nodes, which have `HEAVY_SHARE` of the weight together, with ties."""
        weights = sorted((self.weights[node] for node in nodes), reverse=True)
        sums = [*itertools.accumulate(weights)]
        least = weights[bisect.bisect_left(sums, HEAVY_SHARE * sums[-1])] if weights else 0.0
        return [node for node in nodes if self.weights[node] >= least and self.weights[node] > 0]

    def is_dangling(self, node: int, heavy: Sequence[int], inside: int) -> bool:
        """Whether a heavy node's result never joins that of an independent heavy node."""
        others = to_bits(heavy) & ~(self.before[node] | 1 << node | self.after[node])
        return all(not self.before[reader] & others for reader in bit_positions(self.after[node] & inside))

    def split_into_stages(self, nodes: Sequence[int], heavy: Sequence[int], joined: Sequence[int]) -> list[list[int]]:
        """Splits nodes into stages. A node ends a stage if it is related to all heavy nodes, or to all joined ones.

        The latter counts only where the stage has joined nodes. Otherwise the nodes in between dangle, and have
        branches of their own.
        """
        needed, every = to_bits(joined), to_bits(heavy)
        ends: list[int] = []
        for node in nodes:
            knows = self.before[node] | self.after[node] | 1 << node
            if ends and not self.before[node] >> ends[-1] & 1:
                continue
            since = (self.before[node] | 1 << node) & (self.after[ends[-1]] if ends else -1)
            if every & ~knows == 0 or (needed & ~knows == 0 and needed & since):
                ends.append(node)
        ending = to_bits(ends)
        found: dict[int, list[int]] = {}
        for node in nodes:
            if not ending >> node & 1:
                found.setdefault((self.before[node] & ending).bit_count(), []).append(node)
        return [found[key] for key in sorted(found)]

    def branches(self, stage: Sequence[int], heavy: Sequence[int], joined: Sequence[int]) -> Branches:
        """The branches of a stage, without those that are too light."""
        inside = to_bits(stage)
        several = self.connected_components(to_bits(joined) & inside)
        for node in bit_positions(to_bits(heavy) & ~to_bits(joined) & inside):
            found = self.overlapping(several, 1 << node | self.before[node] | self.after[node])
            for light in bit_positions(self.before[node] & inside & ~to_bits(heavy)):  # a sibling
                near = self.overlapping(several, self.before[light] | self.after[light])
                found |= near if len(near) == 1 else set()
            if not found:
                several.append(1 << node)
            elif len(found) == 1:
                several[found.pop()] |= 1 << node
        own = [[*bit_positions(each)] for each in several]
        taken = functools.reduce(operator.or_, several, 0)
        for node in stage:
            mine = self.overlapping(several, self.before[node] | self.after[node])
            if len(mine) == 1 and not taken >> node & 1:
                own[mine.pop()].append(node)
        for k, mine in enumerate(own):  # drop light nodes that precede nodes of another branch
            others = to_bits([node for each in own[:k] + own[k + 1 :] for node in each])
            own[k] = [node for node in mine if not self.after[node] & others]
        for mine in own:  # add nodes between two nodes of the branch
            there = to_bits(mine)
            mine += [n for n in stage if not there >> n & 1 and self.before[n] & there and self.after[n] & there]
        most = max((self.weight(each) for each in own), default=0.0)
        return tuple(sorted((frozenset(each) for each in own if self.weight(each) >= MIN_BRANCH_SHARE * most), key=min))

    def connected_components(self, nodes: int) -> list[int]:
        """The connected components of a set of nodes."""
        several: list[int] = []
        left = nodes
        while left:
            reached = new = left & -left
            while new:
                near = 0
                for node in bit_positions(new):
                    near |= self.before[node] | self.after[node]
                new = near & nodes & ~reached
                reached |= new
            several.append(reached)
            left &= ~reached
        return several

    @staticmethod
    def overlapping(several: Sequence[int], nodes: int) -> set[int]:
        """The numbers of the sets that have a node of another set."""
        return {k for k, each in enumerate(several) if each & nodes}

    def weight(self, nodes: Collection[int]) -> float:
        return sum(self.weights[node] for node in nodes)


def to_bits(nodes: Collection[int]) -> int:
    """A set as bits."""
    found = 0
    for node in nodes:
        found |= 1 << node
    return found


def bit_positions(several: int) -> Iterator[int]:
    """The numbers of the bits that are set.

    >>> [*bit_positions(0b1010)]
    [1, 3]
    """
    while several:
        lowest = several & -several
        yield lowest.bit_length() - 1
        several ^= lowest
