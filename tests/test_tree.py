"""The tree over nodes, against its definition: what is added to what must not depend on how leaves are cut up.

Knows `vnode.runtime.tree`. Must not know values or devices. The reference writes out the sum of a block as text, by
recursion.
"""

from __future__ import annotations

import functools
import itertools

import hypothesis
import hypothesis.strategies as st

from vnode.runtime.tree import ARITY, Fold, Tree


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


def whole_tree(leaves: int, run: int) -> str:
    """The sum of all leaves: those of a run in order, then four of what there is, in order, until one is left."""
    values, branches = [str(i) for i in range(leaves)], run
    while len(values) > 1:
        values = [functools.reduce(add, values[i : i + branches]) for i in range(0, len(values), branches)]
        branches = 4
    return values[0]


def carried_out(plan: Fold, pieces: list[str]) -> list[str]:
    """What remains when pieces are added as a fold says, with a stack no deeper than it says."""
    stack: list[str] = []
    for piece, merges in zip(pieces, plan.merges, strict=True):
        for _ in range(merges):
            piece = add(stack.pop(), piece)
        stack.append(piece)
        assert len(stack) <= plan.depth
    return stack


@hypothesis.given(st.integers(1, 140), st.integers(2, 9), st.data())
def test_any_cut_of_the_leaves_gives_the_same_sum(leaves: int, run: int, data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, 9))
    cuts = sorted(data.draw(st.integers(0, leaves)) for _ in range(devices - 1))
    bounds = [0, *cuts, leaves]
    tree = Tree(leaves, run)
    own, across = tree.folds([stop - start for start, stop in itertools.pairwise(bounds)])
    rest: list[str] = []
    for plan, start, stop in zip(own, bounds, bounds[1:], strict=False):
        runs = tree.runs(start, stop)
        assert [i for run in runs for i in range(*run)] == list(range(start, stop))
        kept = carried_out(plan, [functools.reduce(add, map(str, range(*run))) for run in runs])
        assert len(kept) == len(plan.rest)
        rest += kept
    assert carried_out(across, rest) == [whole_tree(leaves, run)]


@hypothesis.given(st.integers(1, 6))
def test_a_full_tree_needs_a_pending_sum_for_each_level_above_the_runs(levels: int) -> None:
    tree = Tree(ARITY**levels)
    plan = tree.fold(tree.runs(0, ARITY**levels))
    assert plan.depth == max(levels - 1, 1)
    assert plan.rest == ((0, ARITY**levels),)


@hypothesis.given(st.integers(0, 4), st.integers(0, 2))
def test_devices_with_whole_blocks_keep_one_sum_each(levels: int, more: int) -> None:
    size, devices = ARITY**levels, ARITY**more
    own, across = Tree(size * devices).folds([size] * devices)
    assert [plan.rest for plan in own] == [((d * size, (d + 1) * size),) for d in range(devices)]
    assert sum(across.merges) == devices - 1


@hypothesis.given(st.integers(0, 6), st.integers(0, 6))
def test_of_powers_of_two_no_device_keeps_more_than_two_sums(nodes: int, devices: int) -> None:
    own, _ = Tree(2 ** (nodes + devices)).folds([2**nodes] * 2**devices)
    assert max(len(plan.rest) for plan in own) <= 2


def test_runs_of_a_device_that_begins_within_a_block() -> None:
    """Where a block begins elsewhere, its leaves are to be added to the sum of those before, one by one."""
    assert Tree(12).runs(3, 11) == [(3, 4), (4, 8), (8, 11)]
    assert Tree(12, 6).runs(4, 11) == [(4, 5), (5, 6), (6, 11)]
