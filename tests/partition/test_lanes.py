"""Plans with fewer lanes where memory is short: found, carried out, and kept in files.

Knows searches, plans and their files. Must not know how a reduction is carried out. The references are the step that
nothing was done to, and that which was virtualized with as many lanes by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import vnode
from tests.partition.test_nothing_fits import arguments, machine_of, step
from tests.rounding import assert_same
from vnode.partition import Plan, search

NODES, MEMORY = 16, 225 * 1024
ARGS = arguments(16, 512, 64)


def found(**options: Any) -> Plan:
    return search(step, ARGS, machine_of(2), virtual_nodes=NODES, donate_argnums=(0,), **options)


def test_lanes_are_as_many_as_nodes_where_that_fits() -> None:
    assert found(lanes="auto", memory=2 * MEMORY).pattern.options.lanes is None


@pytest.mark.thorough
def test_lanes_become_fewer_where_that_is_enough(tmp_path: Path) -> None:
    """Sums that wait are there no more; with as many lanes as nodes something has to be on the host."""
    assert found(memory=MEMORY).host
    plan = found(lanes="auto", memory=MEMORY)
    assert plan.pattern.options.lanes == 2 and not plan.host and plan.figures.memory <= MEMORY
    path = tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(path, step, ARGS, donate_argnums=(0,))
    random = np.random.default_rng(0)
    drawn = lambda: jax.tree.map(lambda x: random.standard_normal(x.shape, x.dtype) / 8, ARGS)  # noqa: E731
    state, batch = drawn()
    same = vnode.virtualize(step, virtual_nodes=NODES, lanes=2, donate_argnums=(0,))
    runs = [plan.step(jax.devices()[:2]), again.step(jax.devices()[:2])]
    results = [jax.tree.map(np.asarray, run(run.put(state), batch)) for run in runs]
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert_same(results[0], step, state, batch)
    assert again.pattern.options.lanes == same.options.lanes


def test_a_file_says_the_options_of_its_step(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found(lanes=4, memory=2 * MEMORY).save(path)

    def load(**options: Any) -> Plan:
        return Plan.load(path, step, ARGS, donate_argnums=(0,), **options)

    assert [load(**options).pattern.options.lanes for options in ({}, {"lanes": "auto"}, {"lanes": 4})] == [4, 4, 4]
    for options, said in (
        ({"lanes": 2}, "lanes then: 4, now: 2"),
        ({"reduction": "fast"}, "reduction then: invariant, now: fast"),
        ({"accumulate_dtype": "bfloat16"}, "accumulate_dtype then: None, now: bfloat16"),
        ({"coupling": "local"}, "coupling then: exact, now: local"),
    ):
        with pytest.raises(vnode.PartitionError, match=said):
            load(**options)
