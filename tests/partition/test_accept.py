"""Predictions beside what XLA compiles: bytes of collectives in its text, and memory in its own analysis.

XLA is the reference here, on eight CPU devices; `tests/thorough/test_costs_on_tpus.py` has the TPU compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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
from vnode.analysis.program import Program, inline
from vnode.errors import ProfileError
from vnode.partition import Machine
from vnode.partition.accept import REWRITES, ROW, Acceptance, Counts, accept, count_exchanges, match_rewrites
from vnode.partition.cost import Memory, device_program, program_cost
from vnode.partition.cost.collective_cost import Transfer
from vnode.partition.cost.split_cost import PlannedCollective
from vnode.partition.hlo import find_collectives, parse
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
    assert sum(found.combined) >= 3

    fewer = dataclasses.replace(cost, collectives=cost.collectives[1:])
    refused = accept(compiled, fewer)
    assert not refused.accepted and not refused.missing and len(refused.extra) == 1
    assert refused.memory_accepted and "found, not planned" in str(refused)
    assert str(refused).startswith("not accepted") and "that are not planned" in refused.reasons[0] and refused.advice

    more = dataclasses.replace(cost, collectives=(*cost.collectives, cost.collectives[0]))
    refused = accept(compiled, more)
    assert not refused.accepted and not refused.extra and len(refused.missing) == 1
    assert "planned, not found" in str(refused)
    assert "less than planned" in refused.reasons[0] and "not planned" not in refused.reasons[0]

    other = dataclasses.replace(cost, memory=dataclasses.replace(cost.memory, temporaries=cost.memory.temporaries * 5))
    refused = accept(compiled, other)
    assert not refused.memory_accepted and refused.exchange_accepted and not refused.accepted
    assert accept(compiled, other, tolerance=4.0).accepted


PLACES = P(), P("model"), P(None, "model"), P("data"), P(None, "data"), P("data", "model"), P("model", "data")
SPECS = st.sampled_from(PLACES)


@given(st.tuples(SPECS, SPECS, SPECS, st.sampled_from([P("data"), P(("data", "model")), P(), P(None, "model")])))
@settings(max_examples=examples(9), deadline=None)
def test_collectives_of_any_plan_are_those_that_are_compiled(specs: tuple[P, P, P, P]) -> None:
    found, _ = compared(mlp(32, 16), (*specs, specs[3]))
    assert found.exchange_accepted, str(found)


def test_collectives_in_loops_count_by_their_turns() -> None:
    def step(w: Any, x: Any) -> Any:
        def body(h: Any, layer: Any) -> Any:
            return jnp.tanh(h @ layer[0]) @ layer[1], None

        return lax.scan(body, x, w)[0]

    w = jnp.ones((5, 64, 128)), jnp.ones((5, 128, 64))
    traced = jax.make_jaxpr(step)(w, jnp.ones((16, 64)))
    found, _ = compared(inline(traced.jaxpr, traced.consts), (P(None, None, "model"), P(None, "model"), P("data")))
    assert found.found == {"all-reduce": 5 * 8 * 64 * 4} == found.planned
    assert found.exchange_accepted and not found.open_loops


def test_memory_of_what_is_exchanged_along_another_dimension() -> None:
    """Gathers of columns for a product, and moves from rows to columns: copied before or after."""

    def step(x: Any, w: Any) -> Any:
        return jnp.sum((jnp.tanh(x @ w) @ w) ** 2, axis=0)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 512), (512, 512))]
    traced = jax.make_jaxpr(step)(*shapes)
    for specs in ((P(None, ("data", "model")), P()), (P(("data", "model")), P(None, ("data", "model")))):
        found, _ = compared(inline(traced.jaxpr, traced.consts), specs)
        assert found.accepted, str(found)


def test_known_rewrites_are_listed_and_others_are_differences() -> None:
    _, (compiled, cost) = compared(mlp(64, 64), MEGATRON)
    place, planned = next((k, c) for k, c in enumerate(cost.collectives) if c.transfer.bytes > 1024)

    def asked(**changes: Any) -> Acceptance:
        several = list(cost.collectives)
        several[place] = dataclasses.replace(planned, transfer=dataclasses.replace(planned.transfer, **changes))
        return accept(compiled, dataclasses.replace(cost, collectives=tuple(several)))

    kinds = asked(kind="reduce-scatter")
    assert kinds.exchange_accepted and len(kinds.rewritten) == 1
    said = " ".join(str(kinds).split())
    assert "carried out as another" in said and "x reduce-scatter" in said and ", as 1 x all-reduce" in said
    assert asked(bytes=2 * planned.transfer.bytes).exchange_accepted, "half of the bytes: in bfloat16"
    for changes in (
        {"bytes": 3 * planned.transfer.bytes},
        {"kind": "all-gather"},
        {"kind": "all-to-all"},
        {"devices": 8},
    ):
        other = asked(**changes)
        assert not other.exchange_accepted and len(other.missing) == len(other.extra) == 1, changes
    small = match_rewrites(Counts({("all-gather", 1024, 4): 1}), Counts({("all-reduce", 1024, 4): 1}))
    assert not small[0] and not small[1] and len(small[2]) == 1, "parts shorter than a row"
    large = Counts({("all-gather", 2048, 4): 1}), Counts({("all-reduce", 2048, 4): 1})
    assert match_rewrites(*large) == (*large, ())
    assert not asked().rewritten and asked().exchange_accepted


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
    found = {each.name: (each.kind, each.arrays, each.devices, each.runs) for each in find_collectives(parse(TEXT))}
    assert found == {
        "s": ("all-gather", (64,), 4, 1),
        "rs": ("reduce-scatter", (32,), 4, 1),
        "cp": ("collective-permute", (32,), 0, 1),
        "two": ("all-reduce", (32, 8), 2, 1),
        "half": ("all-reduce", (32,), 2, 1),
        "most": ("all-reduce", (32,), 4, 1),
        "r": ("all-reduce", (32,), 2, 6),
        "g.1": ("all-gather", (128,), 4, 1),
    }


def test_loops_over_nodes_run_as_often_as_a_device_has_nodes() -> None:
    """Where the text does not tell how long they are; of others nobody knows."""
    loop = "while(%init), condition=%condition, body=%body"
    unknown = TEXT.replace("%n = s32[] constant(6)", "%n = s32[] parameter(1)")
    named = unknown.replace(loop, loop + ', metadata={op_name="jit(step)/shard_map/nodes/while"}')

    def runs(text: str, over_nodes: int | None) -> tuple[int, bool]:
        found = find_collectives(parse(text), over_nodes)
        return next((each.runs, each.open) for each in found if each.name == "r")

    assert [runs(TEXT, 5), runs(unknown, 5), runs(named, None), runs(named, 5)] == [
        (6, False),
        (1, True),
        (1, True),
        (5, False),
    ]


def test_exchanges_in_another_precision_are_told_from_each_other() -> None:
    """Of two gathers planned in bfloat16 and sent in float32 one may look as the other was planned."""
    planned = Counts({("all-gather", 4096, 8): 2, ("all-gather", 2048, 8): 1})
    found = Counts({("all-gather", 4096, 8): 2, ("all-gather", 8192, 8): 1})
    missing, extra, pairs = match_rewrites(planned, found)
    assert not missing and not extra
    assert [(one.bytes, other.bytes) for one, other in pairs] == [(2048, 4096), (4096, 8192)]
    missing, extra, _ = match_rewrites(planned - found, found - planned)
    assert missing and extra, "without those that are alike nobody knows"


def test_all_exchanges_in_twice_the_bytes_are_paired() -> None:
    """XLA sends bfloat16 as float32 on CPUs: no pair of one half may stand in the way of all the others' doubles."""
    planned = Counts({("all-gather", n, 2): 1 for n in (24576, 98304)})
    found = Counts({("all-gather", n, 2): 1 for n in (49152, 196608)})
    missing, extra, pairs = match_rewrites(planned, found)
    assert not missing and not extra
    assert [(one.bytes, other.bytes) for one, other in pairs] == [(24576, 49152), (98304, 196608)]
    sizes = [64 << k for k in range(6)]
    planned, found = (Counts({("all-reduce", f * n, 4): 3 for n in sizes}) for f in (1, 2))
    missing, extra, pairs = match_rewrites(planned, found)
    assert not missing and not extra, "though all but one of what is planned is there"
    assert [(one.bytes, other.bytes) for one, other in pairs] == [(n, 2 * n) for n in sizes]


EXCHANGES = st.tuples(
    st.sampled_from(["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]),
    st.sampled_from([96, 192, 384, 768, 2048, 4096]),
    st.sampled_from([2, 4]),
)


def rank(planned: tuple[str, int, int], found: tuple[str, int, int]) -> int | None:
    """As what an exchange is carried out: 0 as planned, else the first of `REWRITES` that says so."""
    if planned == found:
        return 0
    (kind, n, devices), (other, m, others) = planned, found
    whole_rows = kind == "all-gather" and other == "all-reduce" and n % (ROW * devices) == 0
    if devices != others or whole_rows:
        return None
    alike = (k for k, (a, b, factor) in enumerate(REWRITES, 1) if (a, b) == (kind, other) and m == int(n * factor))
    return next(alike, None)


@settings(max_examples=200)
@given(st.lists(EXCHANGES, max_size=4), st.lists(EXCHANGES, max_size=4))
def test_as_many_exchanges_are_paired_as_can_be(
    planned: list[tuple[str, int, int]], found: list[tuple[str, int, int]]
) -> None:
    """Of all pairings, in whichever order, none explains more, and none that explains as many is of lower ranks."""
    best = (0, 0)
    nobody = [None] * len(planned)
    for order in itertools.permutations([*found, *nobody], len(planned)):
        ranks = [rank(one, other) for one, other in zip(planned, order, strict=True) if other is not None]
        made = [each for each in ranks if each is not None]
        best = min(best, (-len(made), sum(made)))
    missing, extra, pairs = match_rewrites(Counts(planned), Counts(found))
    assert len(planned) - missing.total() == len(found) - extra.total() == -best[0]
    rewritten = [(rank((a.kind, a.bytes, a.devices), (b.kind, b.bytes, b.devices)), a.runs, b.runs) for a, b in pairs]
    assert all(a == b and each for each, a, b in rewritten)
    assert sum((each or 0) * runs for each, runs, _ in rewritten) == best[1]
    sent, got = (count_exchanges(side) for side in ([a for a, _ in pairs], [b for _, b in pairs]))
    assert Counts(planned) - missing - sent == Counts(found) - extra - got, "the rest is as planned"


def test_a_report_says_how_far_memory_is_off() -> None:
    zero = Memory(100, 0, 0, 0)
    report = Acceptance({}, {}, (), (), (), zero, 100, 0, 0, 25, tolerance=0.1)
    assert report.memory_error == -0.2 and not report.accepted
    assert "-20.0%" in str(report) and "it takes 125 B; the prediction is 20% below that" in str(report)
    roomy, tight = (dataclasses.replace(report, limit=limit) for limit in (200, 120))
    assert roomy.advice == ("it still fits in 200 B",)
    assert "memory=96:" in tight.advice[0], "as much less as the prediction was too low"
    assert "<table" in report._repr_html_()
    assert dataclasses.replace(report, temporaries=11).accepted is True


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


def test_a_sum_of_which_everybody_keeps_a_part_is_one_however_it_is_padded() -> None:
    found = {each.name: (each.kind, each.arrays, each.added) for each in find_collectives(parse(SCATTERED))}
    assert found == {
        "sum": ("reduce-scatter", (64 * 128 * 4,), False),
        "sum.1": ("all-reduce", (64 * 128 * 4,), False),
        "sent": ("collective-permute", (16 * 128 * 4,), True),
        "halo": ("collective-permute", (16 * 128 * 4,), False),
    }


class _Padded:
    def memory_analysis(self) -> Any:
        names = [f"{name}_size_in_bytes" for name in ("argument", "output", "alias", "temp")]
        return argparse.Namespace(**dict.fromkeys(names, 0))

    def as_text(self) -> str:
        return SCATTERED


def test_what_a_compiler_adds_for_padding_is_listed_and_no_difference() -> None:
    _, (_, cost) = compared(mlp(8, 8), MEGATRON)
    nothing = Memory(0, 0, 0, 0)

    def planned(kind: str, nbytes: int, devices: int) -> PlannedCollective:
        return PlannedCollective(Transfer(kind, ("x",), nbytes, devices), 1, 0.0)

    whole, halo = 64 * 128 * 4, 16 * 128 * 4
    wanted = planned("reduce-scatter", whole, 4), planned("all-reduce", whole, 2), planned("permute", halo, 2)
    found = accept(_Padded(), dataclasses.replace(cost, memory=nothing, collectives=wanted))
    assert found.exchange_accepted and not found.rewritten, str(found)
    assert [(each.kind, each.bytes) for each in found.added] == [("permute", halo)]
    said = " ".join(str(found).split())
    assert "added, for the sake of padding" in said and "1 x permute of 8,192 bytes" in said
    assert found.found == found.planned
    fewer = accept(_Padded(), dataclasses.replace(cost, memory=nothing, collectives=wanted[:2]))
    assert not fewer.exchange_accepted, "the other permute is the plan's or nobody's"
