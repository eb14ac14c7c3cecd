"""AccPar's shares carried out: values are the plain step's, and what is not carried out is labelled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.partition.search.test_steps import STEPS
from tests.rounding import assert_same
from tests.spmd.reference import mesh_of
from tests.unit.test_unequal_searches import twice_the_speed
from vnode.analysis.program import inline
from vnode.errors import SearchError
from vnode.partition.machine.known_kinds import kind_named
from vnode.partition.uneven_shares.accpar import Shared, shared
from vnode.partition.uneven_shares.carried_shares import CarriedOut, carried_out
from vnode.partition.uneven_shares.unequal_groups import Group, between
from vnode.spmd.sharded_program import flow_over_mesh

pytestmark = pytest.mark.quickly

AXES = {"groups": 2}


def found(name: str, bandwidth: float, blocks: int | None = None) -> CarriedOut:
    """A step of the zoo between a group and one three times as fast."""
    step, arguments = STEPS[name]
    closed = jax.make_jaxpr(step)(*arguments)
    leaves = len(jax.tree.leaves(arguments[0]))
    kind = twice_the_speed(kind_named("v5e"), 1.0)
    groups = [Group(kind, 1, bandwidth), Group(twice_the_speed(kind, 3.0), 1, bandwidth)]
    search, cut = between(inline(closed.jaxpr, closed.consts), groups, carried={i: i for i in range(leaves)})
    return carried_out(search, shared(cut), blocks=blocks)


def check(plan: CarriedOut, name: str) -> None:
    step, arguments = STEPS[name]
    values, tree = jax.tree.flatten(arguments)

    def plain(*flat: Any) -> list[Any]:
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, flat)))

    function = jax.jit(flow_over_mesh(plan.flow(AXES), mesh_of(AXES)))
    assert_same(plan.get(function(*plan.put(values))), jax.jit(plain), *values)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["mlp", "convolutions", "attention"])
@pytest.mark.parametrize("bandwidth", [1e30, 1e12])
def test_values_are_the_plain_steps(name: str, bandwidth: float) -> None:
    plan = found(name, bandwidth)
    told = [str(each) for each in plan.dimensions]
    assert len(plan.splits) == sum("carried out" in each for each in told) >= 1
    for each in plan.dimensions:
        if each.share is None:
            assert "simulated (" in str(each)
        else:  # as near as any number of blocks comes
            assert abs(each.share.counts[0] / each.share.blocks - each.wanted) <= 0.5 / each.share.blocks + 1e-9
            assert each.size % each.share.blocks == 0
    check(plan, name)


def test_what_is_in_a_loop_is_simulated() -> None:
    plan = found("layers", 1e30)
    assert any("in the body of a loop" in str(each) for each in plan.dimensions)
    check(plan, "layers")


def test_the_labels_say_what_is_divided() -> None:
    """One product, by hand: a quarter of the samples, or of the columns, on the slower group."""
    a, b = np.ones((4096, 64), np.float32), np.ones((64, 4096), np.float32)
    closed = jax.make_jaxpr(lambda a, b: jnp.sort(a, 1) @ b)(a, b)
    kind = twice_the_speed(kind_named("v5e"), 1.0)  # none that is calibrated, as the other
    groups = [Group(kind, 1, 1e30), Group(twice_the_speed(kind, 3.0), 1, 1e30)]
    search, cut = between(inline(closed.jaxpr, closed.consts), groups)
    plan = carried_out(search, shared(cut))
    shares = {each.share.counts[0] / each.share.blocks for each in plan.dimensions if each.share is not None}
    assert shares and all(share == pytest.approx(0.25, abs=0.02) for share in shares)
    assert "carried out" in str(plan) and "on both groups" in str(plan)


def test_strategies_of_another_program() -> None:
    step, arguments = STEPS["mlp"]
    closed = jax.make_jaxpr(step)(*arguments)
    groups = [Group(kind_named("v5e"), 1, 1e9)] * 2
    search, _ = between(inline(closed.jaxpr, closed.consts), groups)
    with pytest.raises(SearchError, match="3 strategies, of a program with"):
        carried_out(search, Shared(np.zeros(3, int), 0.5, 1.0, 1.0))
