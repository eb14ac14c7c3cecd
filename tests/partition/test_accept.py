"""Predictions beside what XLA compiles: bytes of collectives in its text, and memory in its own analysis.

XLA is the reference here, on eight CPU devices; `tests/thorough/test_costs_on_tpus.py` has the TPU compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.budget import examples
from tests.partition.exchanged import assert_as_planned
from vnode.analysis.program import Program, inline
from vnode.errors import ProfileError
from vnode.partition import Machine
from vnode.partition.accept import Acceptance, accept
from vnode.partition.compiler.stats import CompiledStats
from vnode.partition.cost.lower_to_device import device_program
from vnode.partition.cost.program_memory import Memory
from vnode.partition.cost.split_cost import program_cost
from vnode.partition.hlo import Collective, find_collectives, parse
from vnode.spmd.layout import from_spec
from vnode.spmd.sharded_program import flow_over_mesh
from vnode.spmd.sharding_flow import follow

AXES = {"data": 2, "model": 4}
MACHINE = Machine.tpu("v5e:2x4")


def mlp_step(a: Any, b: Any, c: Any, x: Any, y: Any) -> Any:
    def loss(a: Any, b: Any, c: Any) -> Any:
        h = jax.nn.gelu(x @ a) @ b
        return jnp.mean((jnp.tanh(h + x) @ c - y) ** 2)

    value, grads = jax.value_and_grad(loss, (0, 1, 2))(a, b, c)
    return *(w - 0.1 * g for w, g in zip((a, b, c), grads, strict=True)), value


def mlp(width: int, batch: int) -> Program:
    shapes = (width, 4 * width), (4 * width, width), (width, width), (batch, width), (batch, width)
    traced = jax.make_jaxpr(mlp_step)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return inline(traced.jaxpr, traced.consts)


def compared(program: Program, specs: Sequence[P], donated: Sequence[int] = ()) -> tuple[Acceptance, Any]:
    """A program as it is compiled for eight CPU devices, beside its prediction."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), tuple(AXES))
    layouts = [from_spec(s, v.aval.shape, AXES) for s, v in zip(specs, program.inputs, strict=True)]
    outputs = [*layouts[: len(donated)], *[None] * (len(program.outputs) - len(donated))]
    flow = follow(program, layouts, AXES, outputs=outputs)
    run = jax.jit(flow_over_mesh(flow, mesh), donate_argnums=tuple(donated), keep_unused=True)
    compiled = run.lower(*(var.aval for var in program.inputs)).compile()
    device = device_program(flow, AXES, platform="cpu", donated=donated)
    cost = program_cost(device, MACHINE, MACHINE.mesh(AXES), platform="cpu")
    return accept(compiled, cost), (compiled, cost)


WIDTH, BATCH = 256, 256
MEGATRON = P(None, "model"), P("model"), P(), P("data"), P("data")


def test_a_step_is_accepted_and_another_is_not() -> None:
    found, (compiled, cost) = compared(mlp(WIDTH, BATCH), MEGATRON, donated=(0, 1, 2))
    assert found.accepted, str(found)
    assert str(found).startswith("accepted") and not found.reasons and not found.advice
    # Three gradients over the data axis (one of them whole), two activations over the model axis, the loss.
    gradients, activations = 3 * WIDTH * WIDTH * 4, BATCH // 2 * WIDTH * 4
    assert found.found == {"all-reduce": gradients + activations + 4}
    assert_as_planned(found)

    fewer = accept(compiled, dataclasses.replace(cost, collectives=()))
    assert not fewer.accepted and fewer.memory_accepted and not fewer.exchange_accepted
    assert str(fewer).startswith("not accepted") and "; planned: 0 B" in fewer.reasons[0] and fewer.advice

    more = accept(compiled, dataclasses.replace(cost, collectives=3 * cost.collectives))
    assert not more.exchange_accepted and more.sent == (3 * found.sent[0], found.sent[1])
    assert f"{found.found['all-reduce'] - 3 * found.planned['all-reduce']:,}" in str(more)

    other = dataclasses.replace(cost, memory=dataclasses.replace(cost.memory, temporaries=cost.memory.temporaries * 5))
    refused = accept(compiled, other)
    assert not refused.memory_accepted and refused.exchange_accepted and not refused.accepted
    assert accept(compiled, other, tolerance=4.0).accepted


PLACES = P(), P("model"), P(None, "model"), P("data"), P(None, "data"), P("data", "model"), P("model", "data")
SPECS = st.sampled_from(PLACES)


@given(st.tuples(SPECS, SPECS, SPECS, st.sampled_from([P("data"), P(("data", "model")), P(), P(None, "model")])))
@settings(max_examples=examples(9), deadline=None)
def test_collectives_of_any_plan_are_those_that_are_compiled(specs: tuple[P, P, P, P]) -> None:
    assert_as_planned(compared(mlp(32, 16), (*specs, specs[3]))[0])


def test_collectives_in_loops_count_by_their_turns() -> None:
    def step(w: Any, x: Any) -> Any:
        def body(h: Any, layer: Any) -> Any:
            return jnp.tanh(h @ layer[0]) @ layer[1], None

        return lax.scan(body, x, w)[0]

    w = jnp.ones((5, 64, 128)), jnp.ones((5, 128, 64))
    traced = jax.make_jaxpr(step)(w, jnp.ones((16, 64)))
    found, _ = compared(inline(traced.jaxpr, traced.consts), (P(None, None, "model"), P(None, "model"), P("data")))
    assert found.found == {"all-reduce": 5 * 8 * 64 * 4} == found.planned


def test_memory_of_what_is_exchanged_along_another_dimension() -> None:
    """Gathers of columns for a product, and moves from rows to columns: copied before or after."""

    def step(x: Any, w: Any) -> Any:
        return jnp.sum((jnp.tanh(x @ w) @ w) ** 2, axis=0)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 512), (512, 512))]
    traced = jax.make_jaxpr(step)(*shapes)
    for specs in ((P(None, ("data", "model")), P()), (P(("data", "model")), P(None, ("data", "model")))):
        found, _ = compared(inline(traced.jaxpr, traced.consts), specs)
        assert found.accepted, str(found)


def test_parts_of_an_all_reduce_send_as_much_as_it_does() -> None:
    """Half of it for either, so that twice as much is sent where the compiler sums for everybody what is scattered."""
    nothing = Memory(0, 0, 0, 0)
    whole = Collective("all-reduce", 1024, 4, 3)
    parts = Collective("reduce-scatter", 1024, 4, 3), Collective("all-gather", 1024, 4, 3)
    assert whole.sent == 3 * 2 * 768 and all(each.sent == 3 * 768 for each in parts)
    for planned, compiled in (((whole,), parts), (parts, (whole,))):
        found = Acceptance(nothing, planned, CompiledStats(0, 0, 0, 0, collectives=compiled), tolerance=0.0)
        assert found.accepted and found.planned != found.found, str(found)
        assert "all-gather" in str(found) and "all-reduce" in str(found), "kinds are shown"
    other = Acceptance(nothing, parts[:1], CompiledStats(0, 0, 0, 0, collectives=(whole,)))
    assert not other.accepted and other.sent == (2304, 4608)


class _Silent:
    def memory_analysis(self) -> None:
        return None

    def as_text(self) -> str:
        return ""


def test_a_compiler_that_says_nothing_is_refused() -> None:
    _, (_, cost) = compared(mlp(8, 8), MEGATRON)
    with pytest.raises(ProfileError, match="reports no memory"):
        accept(_Silent(), cost)


TEXT = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%step.1 (u: f32[8]) -> f32[32] {
  %u = f32[8]{0} parameter(0)
  ROOT %g.1 = f32[32]{0} all-gather(%u), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
}

%step.2 (u.2: f32[8]) -> f32[32] {
  %u.2 = f32[8]{0} parameter(0)
  ROOT %g.2 = f32[32]{0:T(128)S(1)} all-gather(%u.2), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %r)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  %n = s32[] constant(6)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %l = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (w: f32[8], v: bf16[4,2]) -> f32[8] {
  %w = f32[8]{0} parameter(0)
  %v = bf16[4,2]{1,0} parameter(1)
  %z = s32[] constant(0)
  %s = (bf16[4,2]{1,0}, bf16[16,2]{1,0}) all-gather-start(%v), replica_groups=[1,4]<=[4], dimensions={0}
  %d = bf16[16,2]{1,0} all-gather-done(%s)
  %rs = f32[2]{0} reduce-scatter(%w), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  %cp = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%w), source_target_pairs={{0,1},{1,0}}
  %cd = f32[8]{0} collective-permute-done(%cp)
  %alone = f32[8]{0} all-reduce(%w), replica_groups={{0},{1},{2},{3}}, to_apply=%add
  %two = (f32[8]{0}, f32[2]{0}) all-reduce(%w, %rs), replica_groups={{0,2},{1,3}}, to_apply=%add
  %half = f32[8]{0} all-reduce(%w), replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(0,2,1)) {'b':(2)2}
  %most = f32[8]{0} all-reduce(%w), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1':(1)2}
  %f.1 = f32[32]{0} fusion(%w), kind=kCustom, calls=%step.1
  %f.2 = f32[32]{0} fusion(%w), kind=kCustom, calls=%step.2
  %init = (s32[], f32[8]{0}) tuple(%z, %cd)
  %loop = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def test_collectives_are_read_off_the_text() -> None:
    found = [(each.kind, each.bytes, each.devices, each.runs) for each in find_collectives(parse(TEXT))]
    assert found == [
        ("all-gather", 64, 4, 1),  # s
        ("reduce-scatter", 32, 4, 1),  # rs
        ("collective-permute", 32, 0, 1),  # cp
        ("all-reduce", 32 + 8, 2, 1),  # two
        ("all-reduce", 32, 2, 1),  # half
        ("all-reduce", 32, 4, 1),  # most
        ("all-gather", 128, 4, 1),  # g.1, of which g.2 is a part
        ("all-reduce", 32, 2, 6),  # r
    ]


def test_loops_over_nodes_run_as_often_as_a_device_has_nodes() -> None:
    """Where the text does not tell how long they are; others of unknown length count once."""
    loop = "while(%init), condition=%condition, body=%body"
    unknown = TEXT.replace("%n = s32[] constant(6)", "%n = s32[] parameter(1)")
    named = unknown.replace(loop, loop + ', metadata={op_name="jit(step)/shard_map/nodes/while"}')

    def runs(text: str, over_nodes: int | None) -> int:
        return find_collectives(parse(text), over_nodes)[-1].runs

    assert [runs(TEXT, 5), runs(unknown, 5), runs(named, None), runs(named, 5)] == [6, 1, 1, 5]


def test_a_report_says_how_far_memory_is_off() -> None:
    report = Acceptance(Memory(100, 0, 0, 0), (), CompiledStats(100, 0, 0, 25), tolerance=0.1)
    assert report.memory_error == -0.2 and not report.accepted
    assert "-20.0%" in str(report) and "it takes 125 B; the prediction is 20% below that" in str(report)
    roomy, tight = (dataclasses.replace(report, limit=limit) for limit in (200, 120))
    assert roomy.advice == ("it still fits in 200 B",)
    assert "memory=96" in tight.advice[0], "as much less as the prediction was too low"
    assert "<table" in report._repr_html_()
    near = dataclasses.replace(report, compiled=CompiledStats(100, 0, 0, 11))
    assert near.accepted and dataclasses.replace(near, limit=111).accepted
    over = dataclasses.replace(near, limit=110)
    assert not over.accepted and over.reasons == ("it takes 111 B, more than the limit of 110 B",)
    loose = dataclasses.replace(near, limit=111, compiled=CompiledStats(100, 0, 0, 11, gaps=50))
    assert loose.accepted and "with gaps between arrays it takes 161 B" in loose.advice[0]


SCATTERED = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%all-reduce-scatter (input: f32[64,128]) -> f32[24,128] {
  %input = f32[64,128]{1,0:T(8,128)S(1)} parameter(0)
  %zero = f32[] constant(0)
  %pad = f32[96,128]{1,0:T(8,128)} pad(%input, %zero), padding=0_32x0_0
  %sum = f32[96,128]{1,0:T(8,128)} all-reduce(%pad), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
  %place = u32[] partition-id()
  %length = u32[] constant(24)
  %start = u32[] multiply(%place, %length)
  %column = u32[] constant(0)
  ROOT %part = f32[24,128]{1,0:T(8,128)} dynamic-slice(%sum, %start, %column), dynamic_slice_sizes={24,128}
}

%whole (input.1: f32[64,128]) -> f32[64,128] {
  %input.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %sum.1 = f32[64,128]{1,0:T(8,128)} all-reduce(%input.1), replica_groups={{0,1},{2,3}}, to_apply=%add
  %start.1 = u32[] constant(0)
  %part.1 = f32[8,128]{1,0:T(8,128)} dynamic-slice(%sum.1, %start.1, %start.1), dynamic_slice_sizes={8,128}
  ROOT %both = (f32[64,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) tuple(%sum.1, %part.1)
}

ENTRY %main (w: f32[64,128]) -> f32[32,128] {
  %w = f32[64,128]{1,0:T(8,128)} parameter(0)
  %fusion = f32[24,128]{1,0:T(8,128)S(1)} fusion(%w), kind=kCustom, calls=%all-reduce-scatter
  %fusion.1 = (f32[64,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) fusion(%w), kind=kCustom, calls=%whole
  %beyond = f32[16,128]{1,0:T(8,128)} slice(%fusion), slice={[8:24], [0:128]}
  %sent = (f32[16,128], f32[16,128], u32[], u32[]) collective-permute-start(%beyond), source_target_pairs={{0,1}}
  %came = f32[16,128]{1,0:T(8,128)} collective-permute-done(%sent)
  %halo = (f32[16,128], f32[16,128], u32[], u32[]) collective-permute-start(%came), source_target_pairs={{0,1}}
  %there = f32[16,128]{1,0:T(8,128)} collective-permute-done(%halo)
  ROOT %all = f32[40,128]{1,0:T(8,128)} concatenate(%there, %fusion), dimensions={0}
}
"""


def test_a_sum_of_which_everybody_keeps_a_part_is_scattered() -> None:
    """Of one that is padded for that, the padding is sent, too."""
    found = [(each.kind, each.bytes) for each in find_collectives(parse(SCATTERED))]
    assert found == [
        ("reduce-scatter", 96 * 128 * 4),
        ("all-reduce", 64 * 128 * 4),
        ("collective-permute", 16 * 128 * 4),
        ("collective-permute", 16 * 128 * 4),
    ]
