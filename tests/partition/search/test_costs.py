"""The cost model from data sheets, and ways that cannot be carried out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vnode.analysis.program import inline
from vnode.errors import PartitionError
from vnode.operators import Monoid
from vnode.partition.machine import Machine
from vnode.partition.search.costs import Estimate
from vnode.spmd.choice import Way
from vnode.spmd.flow import follow
from vnode.spmd.layout import Cut, Layout, replicated

AXES = {"x": 2, "y": 4}
MACHINE = Machine.tpu("v5e:2x4")
KIND = MACHINE.devices[0].kind


def test_a_product_takes_its_operations_or_its_bytes() -> None:
    model = Estimate(MACHINE, AXES)
    for m, n in ((4096, 4096), (8, 8192)):
        jaxpr = jax.make_jaxpr(jnp.dot)(jnp.zeros((m, n), jnp.bfloat16), jnp.zeros((n, n), jnp.bfloat16))
        program = inline(jaxpr.jaxpr, jaxpr.consts)
        rows = Layout((Cut(("y",), 1, m), None))
        flow = follow(program, [rows, replicated(2)], AXES)
        choice = flow.steps[0].choice
        assert choice is not None
        by_hand = max(2 * m / 4 * n * n / KIND.rate("bfloat16"), 2 * (n * n + 2 * m / 4 * n) / KIND.bandwidth)
        assert model.compute_time(program.equations[0], choice) == pytest.approx(by_hand)


def test_moves_take_what_the_machine_says_of_their_collectives() -> None:
    model, mesh = Estimate(MACHINE, AXES), MACHINE.mesh(AXES)
    cut, shape = Layout((Cut(("y",), 1, 64), None)), (64, 128)
    gather = MACHINE.collective("all_gather", mesh.groups("y")).seconds(64 * 128 * 4)
    assert model.move_time(cut, replicated(2), shape, np.dtype("float32")) == pytest.approx(gather)
    pieces = Layout((None, None), (("x", Monoid.SUM),))
    reduce = MACHINE.collective("all_reduce", mesh.groups("x")).seconds(64 * 128 * 4)
    assert model.move_time(pieces, replicated(2), shape, np.dtype("float32")) == pytest.approx(reduce)


def test_ways_of_another_equation_are_refused() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jnp.cumsum(x.reshape(4, 6), axis=1))(jnp.zeros(24))
    program = inline(jaxpr.jaxpr, jaxpr.consts)
    number = next(k for k, eqn in enumerate(program.equations) if eqn.primitive.name == "cumsum")
    description = program.describe(program.equations[number])
    assert description is not None
    (lead, split), *_ = description.leads
    twice = (Way(lead, split, ("x",)), Way(lead, split, ("y",)))
    with pytest.raises(PartitionError, match="cumsum"):
        follow(program, [replicated(1)], AXES, ways={(number,): twice})
