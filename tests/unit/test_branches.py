"""Branches of a graph: those that it was built of are found, and in any graph nothing waits for another branch.

Knows graphs of numbers. The reference is networkx, and what a graph was built of.
"""

from __future__ import annotations

import dataclasses
import itertools

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vnode.analysis.parallel_branches import MIN_BRANCH_SHARE, parallel_branches

pytestmark = pytest.mark.quickly


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], list[float]]:
    """Any graph without cycles, its nodes in an order in which they can be evaluated."""
    count = draw(st.integers(1, 14))
    reads = [draw(st.lists(st.integers(0, n - 1), max_size=3, unique=True)) if n else [] for n in range(count)]
    return reads, [float(draw(st.sampled_from([0, 0, 1, 2, 5]))) for _ in range(count)]


def digraph(reads: list[list[int]]) -> networkx.DiGraph:
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(reads)))
    graph.add_edges_from((source, node) for node, sources in enumerate(reads) for source in sources)
    return graph


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_no_path_leads_from_branch_to_branch(case: tuple[list[list[int]], list[float]]) -> None:
    reads, weights = case
    graph = digraph(reads)
    found = parallel_branches(reads, weights)
    everything = [node for stage in found for branch in stage for node in branch]
    assert len(everything) == len(set(everything))
    for stage in found:
        assert len(stage) > 1 and list(stage) == sorted(stage, key=min)
        takes = [sum(weights[node] for node in branch) for branch in stage]
        assert min(takes) >= MIN_BRANCH_SHARE * max(takes) > 0
        for one, other in itertools.permutations(stage, 2):
            assert not any(networkx.has_path(graph, a, b) for a in one for b in other)
        for branch in stage:  # nor out of one and back
            below = set().union(*(networkx.descendants(graph, node) for node in branch))
            above = set().union(*(networkx.ancestors(graph, node) for node in branch))
            assert below & above <= branch
    together = networkx.quotient_graph(graph, merged(graph, found))
    assert networkx.is_directed_acyclic_graph(together)  # stages do not wait for each other both ways


def merged(graph: networkx.DiGraph, found: list[tuple[frozenset[int], ...]]) -> list[set[int]]:
    """Nodes by the stage that they are in, others alone."""
    stages = [set().union(*stage) for stage in found]
    rest = set(graph) - set().union(*stages)
    return [*stages, *({node} for node in sorted(rest))]


@dataclasses.dataclass
class Network:
    """Nodes as they are added, and the branches that they are meant to be."""

    reads: list[list[int]] = dataclasses.field(default_factory=list)
    weights: list[float] = dataclasses.field(default_factory=list)
    stages: list[set[frozenset[int]]] = dataclasses.field(default_factory=list)
    exact: bool = False

    def add(self, weight: float, *sources: int) -> int:
        self.reads.append(list(sources))
        self.weights.append(weight)
        return len(self.reads) - 1


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Blocks of towers one after another, with their backward passes: masks are kept, weights have gradients.

    Towers are equally heavy in all, in one layer or several; whether there are layers between blocks is drawn.
    """
    blocks = draw(st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=4), min_size=1, max_size=3))
    between = draw(st.booleans())
    net = Network(exact=not between)
    x = net.add(12, net.add(0))
    tape = []
    for towers in blocks:
        kept, ends = [], []
        for layers in towers:
            at, tower, saved = x, set(), []
            for _ in range(layers):
                given_ = at
                at = net.add(12 / layers, at)
                mask = net.add(0, at)
                tower |= {at, mask}
                saved.append((given_, mask))
            kept.append(saved)
            ends.append((at, frozenset(tower)))
        net.stages.append({tower for _, tower in ends})
        joined = net.add(0, *(end for end, _ in ends))
        tape.append((kept, joined))
        x = net.add(12, joined) if between else joined
    cotangent = net.add(12, net.add(0, x))
    for number in reversed(range(len(blocks))):
        kept, joined = tape[number]
        if between:
            net.add(12, cotangent, joined)
            cotangent = net.add(12, cotangent)
        several, sums = set(), []
        for saved in kept:
            at, tower = cotangent, set()
            for given_, mask in reversed(saved):
                at = net.add(0, at, mask)
                tower |= {at, net.add(12 / len(saved), at, given_)}
                at = net.add(12 / len(saved), at)
                tower.add(at)
            several.add(frozenset(tower))
            sums.append(at)
        net.stages.append(several)
        cotangent = sums[0]
        for one in sums[1:]:
            cotangent = net.add(0, cotangent, one)
    net.add(12, cotangent)
    return net


@settings(max_examples=200, deadline=None)
@given(networks())
def test_towers_are_found_forward_and_backward(net: Network) -> None:
    found = [set(stage) for stage in parallel_branches(net.reads, net.weights)]
    if net.exact:
        assert found == net.stages
    else:  # gradients of weights that hang between blocks can be beside towers, too
        assert saved(net, found) >= saved(net, net.stages)


def saved(net: Network, stages: list[set[frozenset[int]]]) -> float:
    """The weight that is not waited for, if branches are evaluated at a time."""
    takes = [[sum(net.weights[node] for node in branch) for branch in stage] for stage in stages]
    return round(sum(sum(each) - max(each) for each in takes), 6)


def test_two_encoders_compared() -> None:
    """No layer is below them: in the backward pass only gradients of weights are left of the first layers."""
    net = Network()
    several = []
    for layers in (1, 2):
        at, tower = net.add(0), []
        for _ in range(layers):
            tower.append((at, net.add(2 / layers, at)))
            at = tower[-1][1]
        several.append(tower)
    cotangent = net.add(0.1, several[0][-1][1], several[1][-1][1])
    (a,), (b, c) = several
    one = net.add(0, cotangent, a[1])
    net.add(2, one, a[0])
    two = net.add(0, cotangent, c[1])
    net.add(1, two, c[0])
    dx = net.add(1, two)
    net.add(1, dx, b[0])
    stages = parallel_branches(net.reads, net.weights)
    assert stages == [
        (frozenset({0, 1}), frozenset({2, 3, 4})),
        (frozenset({one, one + 1}), frozenset({two, two + 1, dx, dx + 1})),
    ]


def test_towers_with_losses_of_their_own_are_branches_of_one_stage() -> None:
    """Nothing joins them but the sum of the losses: forward and backward passes of one are together."""
    net = Network()
    stem = net.add(1.0)
    several = []
    for _ in range(3):
        a = net.add(2.0, stem)
        loss = net.add(0.0, net.add(2.0, a))
        back = net.add(2.0, net.add(0.0, loss))
        several.append((frozenset({a, a + 1, loss, back - 1, back, back + 1}), net.add(2.0, back, a), loss))
    net.add(0.0, *(loss for *_, loss in several))
    (stage,) = parallel_branches(net.reads, net.weights)
    assert stage == tuple(branch for branch, *_ in several)


def test_one_after_another_is_no_branch() -> None:
    assert parallel_branches([[], [0], [1], [0, 2]], [1.0] * 4) == []


def test_what_is_light_beside_others_is_no_branch() -> None:
    assert parallel_branches([[], [0], [0], [1, 2]], [0.0, 100.0, 1.0, 0.0]) == []
    assert parallel_branches([[], [0], [0], [1, 2]], [0.0, 100.0, 20.0, 0.0]) == [(frozenset({1}), frozenset({2}))]
