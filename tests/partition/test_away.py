"""What loops keep for later loops on the host: the same bits, chosen, predicted and compared where a plan needs it.

Knows steps, machines, plans, and what compilers say of memory. References are the program and the step that keep all on
the device, and of the integer program all choices that there are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Literal, Var
from jax.sharding import Mesh, PartitionSpec

import vnode
from tests.ahead import said
from tests.budget import examples
from tests.partition.test_again import arguments, train
from tests.rounding import assert_same
from vnode.analysis.program import Program, bind, inline
from vnode.operators.control_flow import region_of
from vnode.operators.host_transfer import aside_p
from vnode.operators.memory_spaces import is_on_host
from vnode.partition import Machine, Plan, search
from vnode.partition.plan.candidates import MeshSearch
from vnode.partition.plan.memory_plan import (
    MemoryPlanner,
    StackedValue,
    StackLocation,
    solve_integer_program,
    stacked_of,
)
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import on_nodes, subject_of, with_recomputation
from vnode.remat.apply_memory_plan import apply_memory_plan
from vnode.remat.offload import offload_residuals, offloadable_residuals
from vnode.remat.residual_remat import loop_residuals
from vnode.step.virtual import VirtualStep

P = PartitionSpec
ONE = Machine.tpu("v5e:1x1")


def shapes(*sizes: int) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments(*sizes))


# Programs


def evaluated(program: Program, values: Sequence[Any]) -> list[Any]:
    """What a program makes of its inputs, equation by equation, turn by turn; what is moved is what it was."""
    env: dict[Var, Any] = {**program.constants, **dict(zip(program.inputs, values, strict=True))}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in program.equations:
        operands, loop = [read(atom) for atom in eqn.invars], region_of(eqn)
        if loop is not None and loop.stacks:
            (body,) = program.bodies(eqn)
            fixed, carried = operands[: loop.carried.start], operands[loop.carried.start : loop.carried.stop]
            turns = [*range(loop.run_count)][:: -1 if eqn.params["reverse"] else 1]
            kept: dict[int, list[Any]] = {}
            for t in turns:
                made = evaluated(body, [*fixed, *carried, *(operands[i][t] for i in loop.scanned)])
                carried, kept[t] = made[: len(carried)], made[len(carried) :]
            ends = [np.stack([kept[t][j] for t in sorted(kept)]) for j in range(len(eqn.outvars) - len(carried))]
            env.update(zip(eqn.outvars, [*carried, *ends], strict=True))
        else:
            env.update(zip(eqn.outvars, operands if eqn.primitive is aside_p else bind(eqn, operands), strict=True))
    return [read(atom) for atom in program.outputs]


@functools.cache
def written() -> tuple[Program, list[Any], list[Any]]:
    leaves, tree = jax.tree.flatten(arguments(3, 4, 4))
    traced = jax.make_jaxpr(lambda *leaves: jax.tree.leaves(train(*jax.tree.unflatten(tree, leaves))))(*leaves)
    program = inline(traced.jaxpr, traced.consts)
    return program, leaves, evaluated(program, leaves)


@pytest.mark.thorough
@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_a_program_computes_what_it_did(data: st.DataObject) -> None:
    """Whatever is on the host, and whatever else is computed again; nothing that is chosen is kept on the device."""
    program, leaves, plain = written()
    where = {made: data.draw(st.sampled_from(["device", "host", "again"])) for made in sorted(loop_residuals(program))}
    away = {made for made, place in where.items() if place == "host"} & offloadable_residuals(program)
    again = {made for made, place in where.items() if place == "again"}
    less = apply_memory_plan(program, again, [len(leaves) - 1], away)
    for got, expected in zip(evaluated(less, leaves), plain, strict=True):
        np.testing.assert_array_equal(got, expected)
    there = [var for eqn in less.equations for var in eqn.outvars if is_on_host(var.aval)]
    assert len(there) == len(away)
    gone = {program.equations[k].outvars[j] for k, j in away}
    assert not gone & {atom for eqn in less.equations for atom in (*eqn.invars, *eqn.outvars) if isinstance(atom, Var)}


def test_what_cannot_be_there_is_refused() -> None:
    program, *_ = written()
    kept = loop_residuals(program)
    rows = {made for made in kept if len(program.equations[made[0]].outvars[made[1]].aval.shape) == 3}
    assert offloadable_residuals(program) == {
        (k, j) for k, j in rows if program.equations[k].outvars[j].aval.shape[-1] > 1
    }, "arrays of several rows go there, and nothing else"
    (scan, _), *_ = sorted(kept)
    with pytest.raises(vnode.PartitionError, match=rf"\[\({scan}, 0\)\] are not residuals of a loop"):
        offload_residuals(program, [(scan, 0)])
    with pytest.raises(vnode.PartitionError, match=rf"\({scan}, 99\) is not a residual of a loop"):
        apply_memory_plan(program, [], [], [(scan, 99)])
    with pytest.raises(vnode.PartitionError, match="both recomputed and offloaded"):
        apply_memory_plan(program, [min(kept)], [], [min(kept)])
    with pytest.raises(vnode.PartitionError, match="equations, none numbered"):
        apply_memory_plan(program, [], [], [(len(program.equations), 0)])


# Steps


@pytest.mark.sampled(0, thorough=1)
@pytest.mark.parametrize("reduction", ["fast", "invariant"])
@pytest.mark.parametrize(
    ("shape", "partition"),
    [((1,), {}), pytest.param((2,), {}, marks=pytest.mark.sweep), ((2, 4), {"up$": P(None, None, "model")})],
    ids=str,
)
def test_the_bits_are_those_of_a_step_that_keeps_all(shape: tuple[int, ...], partition: Any, reduction: str) -> None:
    """With all on the host; some, and the rest computed again; and what turns begin with, and all else again."""
    state, batch = arguments()
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("vnode", "model")[: len(shape)])
    options = {"partition": partition} if partition else {}
    placement = vnode.Placement(4, mesh=mesh)
    step = vnode.virtualize(train, virtual_nodes=4, reduction=reduction, placement=placement, **options)
    plain = step(step.put(state), batch)
    subject = subject_of(step, (state, batch))
    can = sorted(offloadable_residuals(subject.schedule.flow.program))
    assert len(can) > 6
    for again, away in (((), can), (can[::2], can[1::2]), (subject.kept, [(can[0][0], 0)])):
        less = VirtualStep(with_recomputation(step, again, away).spec, step.placement)
        got = less(less.put(state), batch)
        assert_same(got, jax.jit(train), state, batch)
        jax.tree.map(np.testing.assert_array_equal, got, plain)


@pytest.fixture(scope="module")
def on_two() -> Any:
    """A step that keeps all, compiled once."""
    return vnode.virtualize(train, virtual_nodes=2, placement=vnode.Placement(2, jax.devices()[:2]))


@pytest.mark.sweep
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 3**12))
def test_the_bits_are_the_same_whichever_are_chosen(on_two: Any, seed: int) -> None:
    state, batch = arguments()
    step = on_two
    program = subject_of(step, (state, batch)).schedule.flow.program
    draws = np.random.default_rng(seed).integers(0, 3, len(offloadable_residuals(program)))
    places = dict(zip(sorted(offloadable_residuals(program)), draws, strict=True))
    again, away = ([made for made, place in places.items() if place == wanted] for wanted in (1, 2))
    less = VirtualStep(with_recomputation(step, again, away).spec, step.placement)
    jax.tree.map(np.testing.assert_array_equal, less(less.put(state), batch), step(step.put(state), batch))


# The choice


@st.composite
def several_stacked(draw: st.DrawFn) -> list[StackedValue]:
    """Few results of loops; some are what others need to be computed again."""
    found = []
    for i in range(draw(st.integers(1, 6))):
        begins = tuple(k for k, each in enumerate(found) if each.seconds in (None, 0.0) and draw(st.booleans()))
        optional = i == 0 and draw(st.booleans())
        seconds = 0.0 if optional else draw(st.sampled_from([None, 1.0, 3.0, 7.0]))
        way = draw(st.sampled_from([None, 2.0, 5.0]))
        part = draw(st.integers(1, 2))
        needs = begins if seconds else ()
        found.append(StackedValue(part * draw(st.integers(2, 5)), part, seconds, way, needs, optional))
    if all(each.optional for each in found):
        found.append(StackedValue(6, 1, 2.0, 3.0, (0,)))
    return found


def cost_of(several: Sequence[StackedValue], places: Sequence[StackLocation], share: float) -> float | None:
    """The seconds that a choice takes; None if it is none."""
    whole = sum(each.bytes for each in several if not each.optional)
    held = seconds = 0.0
    for each, place in zip(several, places, strict=True):
        taken = {
            StackLocation.DEVICE: 0.0,
            StackLocation.HOST: each.transfer_seconds,
            StackLocation.NOWHERE: each.seconds,
        }[place]
        if taken is None:
            return None
        if place is StackLocation.NOWHERE and any(places[n] is StackLocation.NOWHERE for n in each.begins):
            return None
        seconds += taken
        held += {StackLocation.DEVICE: each.bytes, StackLocation.HOST: each.part, StackLocation.NOWHERE: 0}[place]
    return seconds if held <= share * whole + 1e-9 else None


@settings(max_examples=80, deadline=None)
@given(several_stacked(), st.sampled_from([1.0, 0.8, 0.6, 0.4, 0.2]))
def test_the_programme_finds_the_best_of_all_choices(several: list[StackedValue], share: float) -> None:
    found = solve_integer_program({}, several, share, 10.0)
    costs = [cost_of(several, places, share) for places in itertools.product(StackLocation, repeat=len(several))]
    possible = [cost for cost in costs if cost is not None]
    assert (found is None) == (not possible)
    if found is not None:
        cost = cost_of(several, found[1], share)
        assert cost is not None and cost <= 1.03 * min(possible) + 1e-3


def test_what_turns_begin_with_can_be_on_the_host_while_the_rest_is_computed_again() -> None:
    """Every residual is computed from what its turn begins with, which is then all that is kept."""
    step = on_nodes(train, 2, {"reduction": "fast"})
    subject = subject_of(step, shapes(8, 32, 2048))
    kind = ONE.kinds[0]
    found = stacked_of(subject.late_reads, subject.kept, kind, True)
    assert not any(each.transfer_seconds for each in stacked_of(subject.late_reads, subject.kept, kind, False).values())
    begins = [made for made, each in found.items() if each.optional or each.seconds is None]
    assert len(begins) == 1 and found[begins[0]].bytes == 8 * 2048 * 32 * 4
    assert found[begins[0]].transfer_seconds == pytest.approx(
        2 * (8 * 2048 * 32 * 4 / kind.host_bandwidth + 8 * kind.host_latency)
    )
    keeping = MemoryPlanner(subject, ONE, "tpu")
    again, away = keeping.plan_at_level(keeping.levels(True), 10.0)
    assert away == tuple(begins) and {*again} <= subject.kept.keys() - {*begins}
    left = sum(each.bytes for made, each in subject.kept.items() if made not in again)
    assert left < 0.01 * sum(each.bytes for each in subject.kept.values())
    assert not MemoryPlanner(subject, ONE, "cpu").plan_at_level(keeping.levels(True), 10.0).offloaded


# Plans


@functools.cache
def plans() -> tuple[Plan, Plan, Any]:
    """One with enough memory, one without, and arguments: layers enough that what they begin with does not fit."""
    args = shapes(64, 128, 8192)
    options = {"reduction": "fast", "donate_argnums": (0,)}
    step = on_nodes(train, 2, options)
    free, again = (
        plan_of(on.candidate("data parallel", on.undivided), 1 << 34)
        for less in ((), subject_of(step, args).kept)
        for subject in [subject_of(with_recomputation(step, less), args)]
        for on in [MeshSearch(subject, ONE, {"vnode": 1}, "tpu", None)]
    )
    limit = again.figures.memory - BEGINS // 2
    return free, search(train, args, ONE, memory=limit, virtual_nodes=2, **options), args


BEGINS = 64 * 4096 * 128 * 4
"""Bytes of what the turns of 64 layers begin with, of one node."""


@pytest.mark.thorough
def test_a_plan_has_on_the_host_what_does_not_fit_though_all_is_computed_again(tmp_path: Any) -> None:
    free, tight, args = plans()
    assert not free.offloaded and not free.recomputed and tight.offloaded and tight.recomputed and not tight.host
    figures = tight.figures
    assert figures.memory <= tight.limit < free.figures.memory
    assert figures.aside == BEGINS and figures.back == 2 * figures.aside
    kind = ONE.kinds[0]
    assert figures.transfer == pytest.approx(2 * (figures.back / kind.host_bandwidth + 2 * 64 * kind.host_latency))
    assert figures.seconds < figures.compute + figures.transfer
    assert "128.0 MiB of residuals, in 1 value" in str(tight) and "on the host" not in str(free)
    assert "of residuals" in tight._repr_html_() and "of residuals" in str(tight.explain())

    tight.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", train, args, reduction="fast", donate_argnums=0)
    assert (loaded.offloaded, loaded.recomputed, loaded.figures) == (tight.offloaded, tight.recomputed, tight.figures)


@pytest.mark.thorough
def test_a_planned_step_has_the_bits_of_one_that_keeps_all() -> None:
    args = shapes(8, 32, 2048)
    step = on_nodes(train, 2, {"reduction": "fast"})
    machine, keeping = ONE, MemoryPlanner(subject_of(step, args), ONE, "tpu")
    made = []
    for level in (0, keeping.levels(True)):
        subject = subject_of(with_recomputation(step, *keeping.plan_at_level(level, 10.0)), args)
        on = MeshSearch(subject, machine, {"vnode": 1}, "tpu", None)
        made.append(plan_of(on.candidate("data parallel", on.undivided), 1 << 34))
    assert made[1].offloaded and made[1].figures.aside and not made[0].figures.aside
    state, batch = arguments(8, 32, 2048)
    results = [each(each.put(state), batch) for each in (plan.step(jax.devices()[:1]) for plan in made)]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_loops_with_passes_of_their_own_keep_residuals_on_the_device() -> None:
    """Layers that normalize over the batch: what a node would send to the host, a later pass reads."""

    def loss(w: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            h = h @ w
            return jnp.tanh(h - h.mean(0)), None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(loss)(w, x)

    args = jax.ShapeDtypeStruct((4, 64, 64), np.float32), jax.ShapeDtypeStruct((256, 64), np.float32)
    base = on_nodes(step, 2, {"recompute_budget": 10.0})
    subject = subject_of(base, args)
    keeping = MemoryPlanner(subject, ONE, "tpu")
    assert not keeping.plan_at_level(keeping.levels(True), 1.0, True).offloaded
    forced = min(offloadable_residuals(subject.schedule.flow.program))
    with pytest.raises(vnode.PartitionError, match="passes of its own"):
        subject_of(with_recomputation(base, (), (forced,)), args)


# What compilers make of it


def test_a_host_that_is_not_apart_is_told() -> None:
    """CPUs compute in their host's memory: a plan for TPUs, compiled for one, has nothing on the host."""
    _, tight, _ = plans()
    report = tight.accept(jax.devices()[:1])
    assert not report.accepted and not report.host_accepted and report.compiled.host == 0
    assert any(
        "on the host 0 B of residuals, 0 B read; planned: 128.0 MiB of residuals, 256.0 MiB read" in why
        for why in report.reasons
    )
    assert "from the host" in str(report) and any("compile it for tpu" in what for what in report.advice)


@pytest.mark.tpu
@pytest.mark.parametrize("reduction", ["fast", pytest.param("invariant", marks=pytest.mark.sweep)])
def test_memory_of_a_tpu_falls_and_that_of_its_host_is_taken(reduction: str) -> None:
    """By the TPU compiler: what is kept, computed again, with beginnings on the host, and all on the host."""
    found = said("offload_on_tpus", reduction, hasty=True)
    again, begun = found[-3:-1] if reduction == "fast" else found
    layers = 8 * 8192 * 512 * 4
    assert (
        again[1] == 0
        and again[0] - begun[0] > 0.8 * layers  # a turn holds its own part
        and begun[1:3] == [layers, layers]
        and begun[3:5] == [2 * layers] * 2
    )
    for *_, error, exchanged in found:
        assert exchanged and abs(error) <= 0.4, error
    if reduction == "fast":
        kept, *_, away = found
        assert kept[1] == 0 and kept[0] > 7 * again[0] and away[0] < kept[0] / 4
        assert away[1] == away[2] > 0.9 * kept[0] and away[3] == away[4] == 2 * away[1]
