"""The model of goodput, and the simulation that checks it.

Knows what must hold of any such model: the formulas agree with the simulation, which knows none of them; nothing is
lost without losses; more hosts lose more. No times are measured here.
"""

from __future__ import annotations

import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from benchmarks.goodput import (
    CHECKPOINT,
    RATES,
    RESTART,
    SURVIVORS,
    WAYS,
    Costs,
    curves,
    goodput,
    simulated,
    speed,
    variations,
)

FREE = Costs(detect=0, replace=0, start=0, save=1e-9, recover=0, join=0, slower=0, repeat=0)
PAGE = Path(__file__).parent.parent / "docs" / "goodput.md"

CASES = {
    "restart-all of the page": (RESTART, 4096, 0.02, Costs()),
    "survivors of the page": (SURVIVORS, 4096, 0.02, Costs()),
    "many missing": (SURVIVORS, 6, 20.0, Costs(replace=2000, nodes=3)),
    "all missing": (RESTART, 2, 20.0, Costs(replace=2000, nodes=4)),
    "replaced within the stall": (RESTART, 20, 20.0, Costs(replace=50)),
    "replaced at once": (SURVIVORS, 20, 20.0, Costs(replace=0)),
    "checkpoints of the page": (CHECKPOINT, 4096, 0.02, Costs()),
    "checkpoints, a long stall": (CHECKPOINT, 500, 0.1, Costs(replace=2000)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_simulation_agrees_with_the_formulas(case: str) -> None:
    """Within four standard errors, each a few percent of what failures cost."""
    formula = goodput(*CASES[case])
    mean, error = simulated(*CASES[case], seed=1)
    assert error < 0.1 * (1 - formula)
    assert abs(mean - formula) < 4 * error


def test_the_simulation_finds_a_formula_that_is_wrong() -> None:
    """One that leaves out the stalls of joins is far off."""
    way, hosts, per_day, costs = CASES["restart-all of the page"]
    mean, error = simulated(way, hosts, per_day, costs, seed=1)
    without = goodput(SURVIVORS, hosts, per_day, Costs(recover=costs.start, slower=0, join=0))
    assert abs(mean - without) > 10 * error


def test_racks_lose_no_more_hosts() -> None:
    """Losses that come together are fewer stalls of as many hosts; without stalls they cost the same."""
    costs = Costs(detect=0, start=0, recover=0, join=0, slower=0, repeat=0, nodes=64, replace=3600)
    apart, first = simulated(SURVIVORS, 400, 0.5, costs, seed=1)
    together, second = simulated(SURVIVORS, 400, 0.5, costs, seed=2, together=0.2, rack=4)
    assert abs(apart - together) < 4 * (first + second)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_lost_without_losses_or_costs(way: str) -> None:
    for hosts in (1, 2, 4096):
        assert goodput(way, hosts, 0.0, FREE) == pytest.approx(1)
        assert goodput(way, hosts, 0.02, FREE) == pytest.approx(1, abs=1e-4)
    assert goodput(way, 64, 1e3) < 1e-3


@hypothesis.given(st.sampled_from(WAYS), st.integers(1, 11), st.floats(1e-4, 1.0))
@hypothesis.settings(max_examples=50, deadline=None)
def test_more_hosts_and_more_losses_are_worse(way: str, power: int, per_day: float) -> None:
    """Twice as many: with one host more, nodes may be easier to share out (by nine than by eight, with eight each)."""
    here = goodput(way, 2**power, per_day)
    assert goodput(way, 2 ** (power + 1), per_day) <= here
    assert goodput(way, 2**power, 1.1 * per_day) < here


def test_the_slowest_device_decides_the_speed() -> None:
    assert speed(4, 1, 1) == 1 / 2  # four nodes on three hosts
    assert speed(4, 1, 3) == 3 / 4  # twelve on three
    assert speed(9, 1, 8) == 8 / 9
    assert speed(8, 1, 8) == 8 / 10  # 64 on seven
    assert speed(2, 2, 8) == 0


def test_the_page_shows_what_is_computed() -> None:
    text = re.sub(r" +", " ", PAGE.read_text(encoding="utf-8"))
    for sheet in (curves(), variations()):
        for row in sheet.rows:
            assert "| " + " | ".join(row) + " |" in text
    for rate in RATES.values():
        assert f"| {1000 * rate:.1f} |" in text
