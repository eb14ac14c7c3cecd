"""The cost model from data sheets, and ways that cannot be carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn

from benchmarks.program_seconds import seconds_of
from vnode.analysis.program import Program, inline
from vnode.errors import PartitionError
from vnode.operators import Monoid
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.split_cost import program_cost
from vnode.partition.cost.time_sources import TRANSCENDENTAL, Roofline, Time, Times
from vnode.partition.cost.timed_pieces import TimedOp
from vnode.partition.machine import Kind, Machine
from vnode.partition.searches.search_costs import Estimate, fetched
from vnode.spmd.layout import Cut, Layout, replicated
from vnode.spmd.op_sharding import FactorSharding, OpSharding
from vnode.spmd.sharding_flow import RequestedSharding, follow

AXES = {"x": 2, "y": 4}
MACHINE = Machine.tpu("v5e:2x4")
KIND = MACHINE.devices[0].kind


def traced(function: Callable[..., Any], *arguments: Any) -> Program:
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return inline(jaxpr.jaxpr, jaxpr.consts)


def test_a_product_takes_its_operations_or_its_bytes() -> None:
    model = Estimate(MACHINE, MACHINE.mesh(AXES), Times((Roofline(launch=0, calibrated=False),)))
    for m, n in ((4096, 4096), (8, 8192)):
        program = traced(jnp.dot, jnp.zeros((m, n), jnp.bfloat16), jnp.zeros((n, n), jnp.bfloat16))
        rows = Layout((Cut(("y",), 1, m), None))
        flow = follow(program, [rows, replicated(2)], AXES)
        choice = flow.steps[0].choice
        assert choice is not None
        by_hand = max(2 * m / 4 * n * n / KIND.rate("bfloat16"), 2 * (n * n + 2 * m / 4 * n) / KIND.bandwidth)
        assert model.compute_time(program.equations[0], choice) == pytest.approx(by_hand)


def test_what_is_fused_takes_its_operations_or_what_it_writes() -> None:
    model, reached = Estimate(MACHINE, AXES), Calibration.for_kind(KIND).passes
    program = traced(lambda x: jnp.exp(x) + x, jnp.zeros((64, 128)))
    flow = follow(program, [Layout((Cut(("y",), 1, 64), None))], AXES)
    for step, operations in zip(flow.steps, (TRANSCENDENTAL, 1), strict=True):
        assert step.choice is not None
        by_hand = 64 * 128 / 4 * max(operations / KIND.vector, 4 / (KIND.bandwidth * reached))
        assert model.compute_time(step.eqn, step.choice) == pytest.approx(by_hand)


def test_times_of_kernels_are_asked_for_at_local_sizes() -> None:
    asked: list[TimedOp] = []

    class Told:
        def time(self, piece: TimedOp, kind: Kind) -> Time:
            asked.append(piece)
            return Time(0.25, "measured")

    model = Estimate(MACHINE, MACHINE.mesh(AXES), Times((Told(),)))
    program = traced(lambda a, b: jnp.tanh(a @ b), jnp.zeros((64, 32)), jnp.zeros((32, 16)))
    flow = follow(program, [Layout((Cut(("y",), 1, 64), None)), replicated(2)], AXES)
    times = [model.compute_time(step.eqn, step.choice) for step in flow.steps * 2 if step.choice is not None]
    assert times[0] == times[2] == 0.25 and times[1] < 1e-3  # what is fused is not asked for
    assert [[s.shape for s in piece.shapes] for piece in asked] == [[(16, 32), (32, 16)]]


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("case", ["conv", "strided", "pool", "cumsum", "roll"])
def test_what_neighbours_send_is_what_the_devices_program_sends(case: str, dimension: int) -> None:
    """Against the traced program of one device, whose collectives are explicit."""

    def conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)

    step = {
        "conv": lambda x, w: conv(x, w, 1),
        "strided": lambda x, w: conv(x, w, 2),
        "pool": lambda x, w: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
        "cumsum": lambda x, w: jnp.cumsum(x, axis=1),
        "roll": lambda x, w: jnp.roll(x, 3, axis=2),
    }[case]
    shape = (8, 16, 32, 4)
    program = traced(step, jnp.zeros(shape), jnp.zeros((5, 5, 4, 8)))
    lies = Layout(tuple(Cut(("y",), 1, n) if d == dimension else None for d, n in enumerate(shape)))
    flow = follow(program, [lies, replicated(4)], AXES)

    class Sent(Estimate):
        def compute_time(self, eqn: JaxprEqn, choice: OpSharding) -> float:
            return sum(each.bytes_sent for each in fetched(eqn, choice, self.axes))

        def move_time(self, start: Layout, end: Layout, shape: Sequence[int], dtype: Any) -> float:
            return sum(each.bytes_sent for each in self.transfers(start, end, shape, dtype))

    mesh = MACHINE.mesh(AXES)
    expected = program_cost(flow, MACHINE, mesh).sent
    assert seconds_of(flow, Sent(MACHINE, mesh)) == pytest.approx(expected)
    assert (expected > 0) == (dimension == (2 if case == "roll" else 1 if case == "cumsum" else dimension) > 0)


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
    twice = (FactorSharding(lead, split, ("x",)), FactorSharding(lead, split, ("y",)))
    with pytest.raises(PartitionError, match="cumsum"):
        follow(program, [replicated(1)], AXES, asked={(number,): RequestedSharding(twice, (replicated(2),))})
