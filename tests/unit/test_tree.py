"""The tree over nodes, against its definition: what is added to what must not depend on how leaves are cut up.

Knows `vnode.runtime.tree`. Must not know values or devices. The reference writes out the sum of a block as text, level
by level; what any list of branches costs is counted by adding leaf by leaf.
"""

from __future__ import annotations

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from vnode.runtime.tree import Fold, Tree, branches_for

BRANCHES = st.lists(st.integers(2, 9), min_size=1, max_size=5)


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


def whole_tree(leaves: int, branches: tuple[int, ...]) -> str:
    """The sum of all leaves: those of a lowest block in order, then as many of what there is as the next level says."""
    values = [str(i) for i in range(leaves)]
    for branch in branches:
        values = [functools.reduce(add, values[i : i + branch]) for i in range(0, len(values), branch)]
    (value,) = values
    return value


def carried_out(plan: Fold, pieces: list[str]) -> list[str]:
    """What a machine does with it that has a stack and adds."""
    stack: list[str] = []
    for piece, merges in zip(pieces, plan.merges, strict=True):
        assert len(stack) <= plan.depth
        for _ in range(merges):
            piece = add(stack.pop(), piece)
        stack.append(piece)
    return stack


@hypothesis.given(st.integers(1, 140), BRANCHES, st.data())
def test_any_cut_of_the_leaves_gives_the_same_sum(leaves: int, some: list[int], data: st.DataObject) -> None:
    while math.prod(some) < leaves:
        some.append(data.draw(st.integers(2, 9)))
    devices = data.draw(st.integers(1, 9))
    cuts = sorted(data.draw(st.integers(0, leaves)) for _ in range(devices - 1))
    bounds = [0, *cuts, leaves]
    tree = Tree(leaves, tuple(some))
    own, across = tree.folds([stop - start for start, stop in itertools.pairwise(bounds)])
    rest: list[str] = []
    for plan, start, stop in zip(own, bounds, bounds[1:], strict=False):
        runs = tree.runs(start, stop)
        assert [i for run in runs for i in range(*run)] == list(range(start, stop))
        kept = carried_out(plan, [functools.reduce(add, map(str, range(*run))) for run in runs])
        assert len(kept) == len(plan.rest)
        rest += kept
    assert carried_out(across, rest) == [whole_tree(leaves, tree.branches)]


@hypothesis.given(BRANCHES)
def test_a_full_tree_needs_a_pending_sum_for_each_level_above_the_runs(branches: list[int]) -> None:
    leaves = math.prod(branches)
    tree = Tree(leaves, tuple(branches))
    plan = tree.fold(tree.runs(0, leaves))
    assert plan.depth == len(branches) - 1
    assert plan.rest == ((0, leaves),)


@hypothesis.given(BRANCHES, st.data())
def test_devices_with_whole_blocks_keep_one_sum_each(branches: list[int], data: st.DataObject) -> None:
    level = data.draw(st.integers(0, len(branches)))
    size, devices = math.prod(branches[:level]), math.prod(branches[level:])
    own, across = Tree(size * devices, tuple(branches)).folds([size] * devices)
    assert [plan.rest for plan in own] == [((d * size, (d + 1) * size),) for d in range(devices)]
    assert sum(across.merges) == devices - 1


def costs(leaves: int, sizes: list[int], start: int, stop: int) -> tuple[int, int]:
    """Sums that a device with some leaves holds at most, that which is being formed included, and that it keeps.

    Counted leaf by leaf: a leaf is added to those before of the same lowest block as it comes; every other addition has
    two sums that are held.
    """
    held, sums = 0, list[tuple[int, int]]()
    for leaf in range(start, stop):
        sums.append((leaf, leaf + 1))
        for size, larger in itertools.pairwise(sizes):
            if size > 1:
                held = max(held, len(sums))
            if len(sums) > 1:
                (first, middle), (_, end) = sums[-2:]
                if first % larger == 0 and middle % size == 0 and end == min(middle + size, leaves, first + larger):
                    sums[-2:] = [(first, end)]
        held = max(held, len(sums))
    return held, len(sums)


@pytest.mark.parametrize("leaves", [2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 128, 256])
def test_what_is_held_and_kept(leaves: int) -> None:
    """Never more than with two branches everywhere, where devices of 2**n leaves of a power of two hold n."""
    tree = Tree.from_lanes(leaves)
    sizes = [math.prod(tree.branches[:level]) for level in range(len(tree.branches) + 1)]
    for count in [n for n in range(1, leaves + 1) if leaves % n == 0]:
        own, _ = tree.folds([count] * (leaves // count))
        counted = [costs(leaves, sizes, start, start + count) for start in range(0, leaves, count)]
        assert [(plan.depth + 1, len(plan.rest)) for plan in own] == counted
        held, power = max(held for held, _ in counted), count.bit_length() - 1
        if leaves & (leaves - 1) == 0:
            assert held <= max(1, power)


def test_pairs_on_each_device_keep_one_sum() -> None:
    for leaves in range(2, 300, 2):
        own, _ = Tree.from_lanes(leaves).folds([2] * (leaves // 2))
        assert {len(plan.rest) for plan in own} == {1}


@pytest.mark.parametrize(("leaves", "held"), [(2, 1), (3, 2), (8, 2), (16, 3), (64, 3), (256, 4)])
def test_one_device_holds_few(leaves: int, held: int) -> None:
    tree = Tree.from_lanes(leaves)
    assert tree.fold(tree.runs(0, leaves)).depth + 1 == held


@hypothesis.given(st.integers(1, 5000), st.integers(1, 40))
def test_branches_cover_the_leaves(leaves: int, lane: int) -> None:
    branches = branches_for(leaves)
    assert math.prod(branches) >= leaves
    assert math.prod(branches[:-1]) < max(leaves, 2)  # no level without a use
    assert all(2 <= branch <= 8 for branch in branches)
    tree = Tree.from_lanes(leaves, lane)
    assert math.prod(tree.branches) >= leaves
    assert lane == 1 or tree.branches[0] == lane


def test_runs_of_a_device_that_begins_within_a_block() -> None:
    """Where a block begins elsewhere, its leaves are to be added to the sum of those before, one by one."""
    assert Tree(12, (4, 3)).runs(3, 11) == [(3, 4), (4, 8), (8, 11)]
    assert Tree.from_lanes(12, 6).runs(4, 11) == [(4, 5), (5, 6), (6, 11)]
