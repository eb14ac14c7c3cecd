"""Searches that compile what they find: memory is the compiler's, read from what jax says of the compiled step.

Predictions are made too low on purpose, as they may be for a compiler that nobody has modelled.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

import vnode
from tests.partition.test_plan_accept import V5E, example
from vnode.partition import Plan, search
from vnode.partition.plan import candidates

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


def test_nothing_fits_as_compiled(too_low: None) -> None:
    least = found(None).figures.memory
    with pytest.raises(vnode.MemoryLimitError) as error:
        for _ in range(20):  # less and less, until all that fits as predicted is refused as compiled
            least = int(0.8 * least)
            found(least, compiled_for=jax.devices()[:8])
    assert re.search(r"no plan fits in .* as it is compiled(.|\n)*predicted .*, compiled .*", str(error.value))


def test_other_devices_than_the_machine_has() -> None:
    with pytest.raises(vnode.PlacementError, match="8 devices"):
        found(None, compiled_for=jax.devices()[:3])
