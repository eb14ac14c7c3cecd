"""The tree over nodes, against its definition: what is added to what must not depend on how leaves are cut up.

Knows `vnode.runtime.tree`. The reference writes out the sum of a block as text, by recursion.
"""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st

from vnode.runtime.tree import Fold, fold, folds


def written_out(leaves: int, level: int, index: int) -> str:
    """The value of a block as its definition has it."""
    if level == 0:
        return str(index)
    left = written_out(leaves, level - 1, 2 * index)
    if (2 * index + 1) << (level - 1) >= leaves:
        return left
    return f"({left}+{written_out(leaves, level - 1, 2 * index + 1)})"


def whole_tree(leaves: int) -> str:
    return written_out(leaves, (leaves - 1).bit_length(), 0)


def carried_out(plan: Fold, pieces: list[str]) -> list[str]:
    """What remains when pieces are added as a fold says, with a stack no deeper than it says."""
    stack: list[str] = []
    for piece, merges in zip(pieces, plan.merges, strict=True):
        for _ in range(merges):
            piece = f"({stack.pop()}+{piece})"
        stack.append(piece)
        assert len(stack) <= plan.depth
    return stack


@hypothesis.given(st.integers(1, 70), st.data())
def test_any_cut_of_the_leaves_gives_the_same_sum(leaves: int, data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, 9))
    cuts = sorted(data.draw(st.integers(0, leaves)) for _ in range(devices - 1))
    counts = [stop - start for start, stop in zip([0, *cuts], [*cuts, leaves], strict=True)]
    own, across = folds(leaves, counts)
    rest: list[str] = []
    start = 0
    for plan, count in zip(own, counts, strict=True):
        kept = carried_out(plan, [str(i) for i in range(start, start + count)])
        assert len(kept) == len(plan.rest) <= max(1, 2 * count.bit_length())
        rest += kept
        start += count
    assert carried_out(across, rest) == [whole_tree(leaves)]


@hypothesis.given(st.integers(0, 10))
def test_a_full_tree_needs_as_many_buffers_as_levels(levels: int) -> None:
    plan = fold(2**levels, [(0, i) for i in range(2**levels)])
    assert plan.depth == max(levels, 1)
    assert plan.rest == ((levels, 0),)


@hypothesis.given(st.integers(0, 5), st.integers(0, 3))
def test_devices_with_aligned_ranges_keep_one_block_each(levels: int, more: int) -> None:
    own, across = folds(2 ** (levels + more), [2**levels] * 2**more)
    assert [plan.rest for plan in own] == [((levels, d),) for d in range(2**more)]
    assert sum(across.merges) == 2**more - 1
