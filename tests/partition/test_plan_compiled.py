"""Searches that compile what they find: memory is the compiler's, read from what jax says of the compiled step.

Predictions are made too low on purpose, as they may be for a compiler that nobody has modelled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vnode
from tests.partition.test_plan_accept import V5E, example
from vnode.partition import Plan, search
from vnode.partition.plan import candidates
from vnode.partition.plan.compiled import fits_as_compiled
from vnode.partition.plan.search import _Search

pytestmark = pytest.mark.thorough


@pytest.fixture
def too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions of a third of what is temporary."""
    honest = candidates.predicted

    def optimistic(*args: Any, **kwargs: Any) -> Any:
        found = honest(*args, **kwargs)
        return dataclasses.replace(
            found, figures=dataclasses.replace(found.figures, temporary=found.figures.temporary // 3)
        )

    monkeypatch.setattr(candidates, "predicted", optimistic)


def compiled_memory(plan: Plan) -> int:
    step = plan.step()
    analysis = step.lower(*plan.args).compile().memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def found(memory: int | None, **options: Any) -> Plan:
    step, args = example("mlp")
    return search(step, args, V5E, virtual_nodes=8, memory=memory, reduction="fast", progress=False, **options)


def test_a_plan_that_fits_by_the_compilers_account(too_low: None) -> None:
    first = found(None)
    memory = compiled_memory(first) - 1
    assert first.figures.memory < memory, "or what is predicted would be refused without a compiler"
    unasked = found(memory)
    assert compiled_memory(unasked) > memory and unasked.acceptance is None
    plan = found(memory, compiled_for=jax.devices()[:8])
    assert compiled_memory(plan) <= memory == plan.memory
    assert plan.acceptance is not None and plan.acceptance.memory == compiled_memory(plan)
    assert "as compiled" in str(plan)
    step, (state, batch) = example("mlp")
    planned = plan.step()
    got, want = planned(planned.put(state), batch), jax.jit(step)(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)


@pytest.mark.sweep
def test_nothing_fits_as_compiled(too_low: None) -> None:
    least = found(None).figures.memory // 2
    with pytest.raises(vnode.MemoryLimitError) as error:
        for _ in range(20):  # less and less, until all that fits as predicted is refused as compiled
            least = int(0.7 * least)
            found(least, compiled_for=jax.devices()[:8])
    assert re.search(r"no plan fits in .* as it is compiled(.|\n)*predicted .*, compiled .*", str(error.value))


def test_other_devices_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Search, "plan", lambda *_: pytest.fail("nothing is searched before"))
    with pytest.raises(vnode.PlacementError, match=r"compiled_for: .* 8 devices, and there are 3") as error:
        found(None, compiled_for=jax.devices()[:3])
    assert "as many devices as the machine has: 8" in str(error.value) and "plan.step" not in str(error.value)


@dataclasses.dataclass(frozen=True)
class Planned:
    """What takes so much as predicted, and so much as compiled."""

    predicted: int
    compiled: int
    memory: int = 0
    acceptance: Any = None
    name: str = "plan"
    mesh: Any = dataclasses.field(default_factory=lambda: {"vnode": 2})

    @property
    def figures(self) -> Any:
        return types.SimpleNamespace(memory=self.predicted)

    def accept(self, devices: Any) -> Any:
        devices.append(self.predicted)
        return types.SimpleNamespace(memory=self.compiled)


def chosen(plans: list[Planned], memory: int, compiled: list[int]) -> Any:
    """What is found of plans of which a search takes the largest that fits; `compiled` says which were compiled."""

    def searched(limit: int) -> Any:
        fits = [each for each in plans if each.predicted <= limit]
        if not fits:
            raise vnode.MemoryLimitError("nothing")
        return max(fits, key=lambda each: each.predicted)

    return fits_as_compiled(searched, memory, compiled)


@given(
    sizes=st.dictionaries(st.integers(50, 1000), st.integers(80, 300), min_size=1, max_size=6),
    memory=st.integers(60, 1000),
)
def test_no_plan_is_compiled_twice_and_the_first_that_fits_is_taken(sizes: dict[int, int], memory: int) -> None:
    plans = {n: Planned(n, n * per_cent // 100) for n, per_cent in sizes.items()}
    compiled: list[int] = []
    with contextlib.suppress(vnode.MemoryLimitError):
        plan = chosen([*plans.values()], memory, compiled)
        assert plan.predicted == compiled.pop() and plan.compiled <= memory
    assert all(plans[n].compiled > memory for n in compiled) and len({*compiled}) == len(compiled) <= 4


def test_a_search_ends_where_no_limit_is_left_in_between() -> None:
    for predicted, memory in ((50, 60), (1, 2), (3, 1)):
        with pytest.raises(vnode.MemoryLimitError):
            chosen([Planned(predicted, 9 * predicted)], memory, [])


def test_a_plan_that_is_far_off_hides_no_other() -> None:
    """The first is compiled to three times its prediction; in a third of the limit nothing fits."""
    compiled: list[int] = []
    plan = chosen([Planned(900, 2700), Planned(700, 800)], 1000, compiled)
    assert plan.predicted == 700 and compiled == [900, 700]


def test_what_is_predicted_to_take_a_little_more_is_compiled_where_nothing_less_is() -> None:
    compiled: list[int] = []
    plan = chosen([Planned(1100, 990), Planned(2000, 500)], 1000, compiled)
    assert plan.predicted == 1100 and compiled == [1100]
    with pytest.raises(vnode.MemoryLimitError, match="nothing"):
        chosen([Planned(2000, 500)], 1000, compiled)
    assert compiled == [1100]


def test_a_plan_as_it_is_predicted_is_advised_only_where_one_fits_so() -> None:
    for plans in ([Planned(1100, 1200)], [Planned(1100, 1200), Planned(900, 1300)]):
        with pytest.raises(vnode.MemoryLimitError) as error:
            chosen(plans, 1000, [])
        fits = any(each.predicted <= 1000 for each in plans)
        assert ("without compiled_for" in str(error.value)) == fits
        assert ("nothing is predicted to fit either" in str(error.value)) != fits
