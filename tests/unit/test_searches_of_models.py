"""Models of papers: no expert's plan costs less than what is found, and what is found is carried out at its cost."""

from __future__ import annotations

import os

import jax
import pytest

from benchmarks.partition_models import MODELS
from benchmarks.program_seconds import seconds_of
from vnode.analysis.program import inline
from vnode.partition.machine import Machine
from vnode.partition.searches import Estimate, as_problem, exact, experts

QUICK = ["alexnet", "lstm-4k", "transformer-scan"]
"""Looked at in every run; the others with VNODE_TEST_ALL."""

AXES = {"x": 2, "y": 2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS if os.environ.get("VNODE_TEST_ALL") else QUICK)
def test_plans_of_models(name: str) -> None:
    model = MODELS[name]("small")
    jaxpr = jax.make_jaxpr(model.step)(model.state, model.batch)
    cost = Estimate(Machine.tpu("v5e:2x2"), AXES)
    leaves = len(jax.tree.leaves(model.state))
    program = inline(jaxpr.jaxpr, jaxpr.consts)
    search = as_problem(program, AXES, cost, carried={i: i for i in range(leaves)})
    known = experts(search, range(leaves, leaves + len(jax.tree.leaves(model.batch))))
    assert {"data parallel", "FSDP", "Megatron over x, y", "one weird trick"} <= known.keys()
    best = exact(search.problem, gap=0.01, budget=120, candidates=list(known.values()))
    assert best.gap <= 0.01
    assert best.cost <= min(search.problem.cost(each) for each in known.values())
    assert seconds_of(search.flow(best.strategies), cost) == pytest.approx(best.cost, rel=1e-6)
    for each in known.values():  # what is already there need not be brought there again
        assert seconds_of(search.flow(each), cost) <= search.problem.cost(each) * (1 + 1e-9)
