"""Every step of the zoo, virtualized, against the step as the user wrote it.

Knows which combinations of nodes, devices and precisions are run. The whole matrix is numbers of nodes {1, 2, 8, B} by
numbers of devices {1, 2, 3, 8} in float64, and a pair of each in float32; it runs with VNODE_TEST_ALL=1. Otherwise a
sample is run that is the same on every machine: every case that is not rare in float64 on one pair, some in
float32 too (more of those that draw random numbers: bits differ between the precisions), and all pairs over the whole
set, the ones with more nodes than one more often.
"""

from __future__ import annotations

import os

import pytest

from tests import zoo
from tests.zoo.compare import check

DEVICES = (1, 2, 3, 8)
RANDOM = 5


def nodes_of(case: zoo.Case) -> tuple[int, ...]:
    """The numbers of nodes for a case: one, two, eight, as many as examples."""
    return case.nodes or tuple(sorted({1, 2, 8, case.batch}))


def precisions_of(case: zoo.Case) -> tuple[str, ...]:
    return ("float64", "float32") if case.float64 else ("float32",)


def matrix(case: zoo.Case, index: int) -> list[tuple[int, int, str]]:
    """Everything there is to run for a case."""
    nodes = nodes_of(case)
    first, *rest = precisions_of(case)
    pairs = [(v, d, first) for v in nodes for d in DEVICES]
    return pairs + [(nodes[(index + i) % len(nodes)], d, p) for p in rest for i, d in enumerate(DEVICES)]


def sample(case: zoo.Case, index: int) -> list[tuple[int, int, str]]:
    """The combinations of a case that always run."""
    if case.rare:
        return []
    nodes = nodes_of(case)
    several = nodes if index % 7 == 0 else tuple(v for v in nodes if v > 1) or nodes
    first, *rest = precisions_of(case)
    chosen = [(several[index % len(several)], DEVICES[(index // len(several)) % len(DEVICES)], first)]
    if rest and index % (3 if case.item == RANDOM else 18) == 0:
        chosen.append((several[(index + 1) % len(several)], DEVICES[(index + 1) % len(DEVICES)], rest[0]))
    return chosen


def runs() -> list[object]:
    choose = matrix if os.environ.get("VNODE_TEST_ALL") == "1" else sample
    return [
        pytest.param(
            case,
            *combination,
            id=f"{case.name}-V{combination[0]}-D{combination[1]}-{combination[2]}",
            marks=[*([pytest.mark.newest] if index % 8 == 0 else []), *([pytest.mark.thorough] if index % 5 else [])],
        )
        for index, case in enumerate(zoo.cases())
        for combination in choose(case, index)
    ]


@pytest.mark.parametrize(("case", "nodes", "devices", "precision"), runs())
def test_step(case: zoo.Case, nodes: int, devices: int, precision: str) -> None:
    check(case, nodes, devices, precision)


def test_sample_covers_every_pair() -> None:
    cases = zoo.cases()
    kinds = {1: "1", 2: "2", 8: "8"}
    seen = {(kinds.get(v, "B"), d) for i, case in enumerate(cases) for v, d, _ in sample(case, i)}
    assert seen == {(v, d) for v in ("1", "2", "8", "B") for d in DEVICES}


def test_every_item_has_cases() -> None:
    assert {case.item for case in zoo.cases()} == set(range(1, 16))
