"""What operators, exchanges and programs take, against counts by hand, brute force and published rates."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Var
from jax.sharding import PartitionSpec as P

from vnode.analysis.program import Program, inline
from vnode.errors import ProfileError
from vnode.operators import describe
from vnode.operators.cost import Cost
from vnode.partition import Machine, calibrate
from vnode.partition.cost.cache import Cache
from vnode.partition.cost.calibration import Calibration, entries
from vnode.partition.cost.collective_cost import Transfer, transfer_of, transfers_of_route
from vnode.partition.cost.fusion import fuse_program
from vnode.partition.cost.liveness import Operation, liveness, liveness_in_best_order, memory_greedy_order, peak_bytes
from vnode.partition.cost.lower_to_device import DeviceProgram, device_program, simplify
from vnode.partition.cost.measured_times import Measured
from vnode.partition.cost.program_memory import memory_of
from vnode.partition.cost.simplify_loops import hoist_invariants, inline_single_iterations
from vnode.partition.cost.split_cost import program_cost
from vnode.partition.cost.time_sources import Roofline, Time, Times
from vnode.partition.cost.timed_pieces import TimedOp, copy_of, program_op, timed_op_of, traced_op
from vnode.partition.machine import Kind
from vnode.partition.machine.known_kinds import kind_named
from vnode.spmd.layout import Layout, cut_of, from_spec
from vnode.spmd.op_sharding import OperandSharding, choose
from vnode.spmd.resharding import plan_resharding
from vnode.spmd.resharding_collectives import convert
from vnode.spmd.sharding_flow import follow

pytestmark = pytest.mark.quickly

CPU, TPU = Calibration(), Calibration(recomputes=True)
TOY = Kind("toy", {"float32": 1e12}, vector=1e11, memory=2**30, bandwidth=1e11, host_bandwidth=1e10)


def program_of(function: Any, *args: Any) -> Program:
    traced = jax.make_jaxpr(function)(*args)
    return inline(traced.jaxpr, traced.consts)


def ones(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


# Pieces


def test_a_fused_piece_reads_and_writes_at_its_border() -> None:
    piece = traced_op(lambda x, y: jnp.exp(x) * y + x, ones(8, 16), ones(8, 16))
    assert len(piece.equations) == 3
    assert piece.cost == Cost(vector=3 * 128, transcendental=128, read=2 * 128 * 4, written=128 * 4)


def test_of_what_is_looked_up_in_only_what_is_found_is_read() -> None:
    piece = traced_op(lambda t, i: jnp.tanh(t.at[i].get(mode="clip")), ones(1000, 16), ones(8, dtype=jnp.int32))
    found = 8 * 16 * 4
    assert piece.cost.written == found
    assert found <= piece.cost.read <= found + 2 * 8 * 4  # and the indices; never the table of 64,000 bytes


def test_a_piece_computes_what_it_stands_for() -> None:
    piece = traced_op(lambda a, b: jnp.tanh(a @ b).sum(0), ones(4, 8), ones(8, 16))
    a, b = np.random.default_rng(0).random((4, 8)), np.random.default_rng(1).random((8, 16))
    (found,) = piece.function(jnp.float32(a), jnp.float32(b))
    np.testing.assert_allclose(found, np.tanh(a @ b).sum(0), rtol=1e-5)


def test_keys_tell_computations_apart_and_nothing_else() -> None:
    def key(function: Any, *args: Any) -> str:
        return traced_op(function, *args).key

    same = key(lambda x: x * 2.0, ones(4)), key(lambda y: y * 2.0, ones(4))
    assert same[0] == same[1]
    others = [
        key(lambda x: x * 3.0, ones(4)),
        key(lambda x: x * 2.0, ones(5)),
        key(lambda x: x * jnp.bfloat16(2.0), ones(4, dtype=jnp.bfloat16)),
        key(lambda x: x + 2.0, ones(4)),
        key(lambda x: x.sum(0), ones(4, 4)),
        key(lambda x: x.sum(1), ones(4, 4)),
        key(lambda x, y: x - y, ones(4), ones(4)),
        key(lambda x, y: y - x, ones(4), ones(4)),
        key(lambda x: lax.scan(lambda c, _: (c * 2.0, None), x, None, length=3)[0], ones(4)),
        key(lambda x: lax.scan(lambda c, _: (c * 3.0, None), x, None, length=3)[0], ones(4)),
    ]
    assert len({*same, *others}) == 1 + len(others)


@given(st.sampled_from([(2, 1), (1, 2), (2, 2), (4, 2)]), st.sampled_from([(8, 16, 4), (16, 8, 8)]), st.integers(0, 2))
@settings(max_examples=20, deadline=None)
def test_copies_of_a_product_share_its_operations(mesh: tuple[int, int], sizes: tuple[int, int, int], cut: int) -> None:
    i, j, k = sizes
    axes = {name: n for name, n in zip("xy", mesh, strict=True) if n > 1}
    (eqn,) = program_of(lambda a, b: a @ b, ones(i, j), ones(j, k)).equations
    specs = [(P("x", "y"), P("y")), (P("x"), P(None, "y")), (P(None, "x"), P("x", "y"))][cut]
    given_ = [OperandSharding(from_spec(s, v.aval.shape, axes)) for s, v in zip(specs, eqn.invars, strict=True)]
    description = describe(eqn)
    assert description is not None
    choice = choose(eqn, description, given_, axes, [None])
    divided = np.prod([axes[name] for way in choice.ways for name in way.axes], initial=1)
    assert copy_of(eqn, choice).cost.matrix == {"float32": 2 * i * j * k // divided}


# Sources of times


def test_roofline_is_bound_by_what_is_slowest() -> None:
    bare = Roofline(launch=0.0)
    assert bare.seconds(Cost(matrix={"float32": 4 * 10**9}, read=10**6), TOY) == pytest.approx(4e-3)
    assert bare.seconds(Cost(matrix={"float32": 10**6}, read=3 * 10**8, written=10**8), TOY) == pytest.approx(4e-3)
    assert bare.seconds(Cost(vector=2 * 10**8), TOY) == pytest.approx(2e-3)
    assert bare.seconds(Cost(), TOY) == 0 == Roofline().seconds(Cost(), TOY)
    assert Roofline(launch=1e-3).seconds(Cost(vector=2 * 10**8), TOY) == pytest.approx(3e-3)


def test_roofline_of_a_published_figure() -> None:
    """ "How to scale your model", chapter "All about rooflines": a product in bfloat16 on a v5e is bound by its
    operations from a batch of about 240 on (1.97e14 / 8.2e11)."""
    kind = Machine.tpu("v5e:2x2").kinds[0]
    ratios = []
    for batch in (200, 280):
        piece = traced_op(
            lambda a, b: a @ b, ones(batch, 8192, dtype=jnp.bfloat16), ones(8192, 8192, dtype=jnp.bfloat16)
        )
        memory = (piece.cost.read + piece.cost.written) / kind.bandwidth
        ratios.append(Roofline(launch=0, calibrated=False).seconds(piece.cost, kind) / memory)
    assert ratios[0] == 1.0 < ratios[1]


class _Fixed:
    """A source that knows pieces of one equation."""

    def time(self, piece: TimedOp, kind: Kind) -> Time | None:
        return Time(1.0, "measured") if len(piece.equations) == 1 else None


def test_the_first_source_that_knows_is_asked() -> None:
    times = Times((_Fixed(), Roofline()))
    assert times.time(traced_op(jnp.tanh, ones(4)), TOY).source == "measured"
    assert times.time(traced_op(lambda x: jnp.tanh(x) + x, ones(4)), TOY).source == "roofline"
    slow = Kind("slow", {}, vector=1e3, memory=2**30, bandwidth=1e3, host_bandwidth=1e3)
    piece = traced_op(lambda x: jnp.tanh(x) + x, ones(4))
    assert times.slowest(piece, (TOY, slow)) == Roofline().time(piece, slow)


def test_a_measured_time_is_measured_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = traced_op(lambda a: a @ a, ones(64, 64))
    kind = Machine.here(jax.devices()[:1]).kinds[0]
    first = Measured(cache=Cache(tmp_path), batches=3).time(piece, kind)
    assert first is not None and first.source == "measured" and first.seconds > 0 and first.noise >= 0
    again = Measured(cache=Cache(tmp_path))
    monkeypatch.setattr(again, "measure", lambda _: pytest.fail("measured a second time"))
    assert again.time(piece, kind) == first
    other = traced_op(lambda a: a @ a, ones(64, 64, dtype=jnp.bfloat16))
    assert again.cache.get(again.key(other)) is None
    assert again.time(piece, TOY) is None, "another kind of device"
    again.cache.put(again.key(other), {"seconds": "fast", "noise": 0.0})
    with pytest.raises(pytest.fail.Exception):
        again.time(other, kind)
    keys = traced_op(jax.random.key_data, jax.eval_shape(jax.random.key, 0))
    assert again.time(keys, kind) is None


def test_a_loop_is_measured_as_a_whole_unless_it_exchanges() -> None:
    def turns(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ x) + c, None), x, None, length=5)[0]

    def sums(x: Any) -> Any:
        return lax.scan(lambda c, _: (lax.psum(jnp.tanh(c), "x"), None), x, None, length=5)[0]

    machine = Machine.tpu("v5e:2x2")
    mesh = machine.mesh({"x": 4})
    known = Times((_Fixed(), Roofline()))
    for function, seconds, pieces in ((turns, 1.0, 1.0), (sums, 5.0, None)):
        device = DeviceProgram(over(function, ones(8, 8), x=4), {"x": 4})
        cost = program_cost(device, machine, mesh, times=known, platform="cpu")
        assert cost.compute == pytest.approx(seconds), function
        assert pieces is None or cost.sources == {"measured": pieces}
        plain = program_cost(device, machine, mesh, platform="cpu")
        assert set(plain.sources) == {"roofline"}


# The cache


def test_damaged_and_foreign_files_count_as_none(tmp_path: Any) -> None:
    cache, key = Cache(tmp_path), {"piece": "a"}
    cache.put(key, {"seconds": 1.5, "noise": 0.0})
    path = cache.path(key)
    good = json.loads(path.read_text())
    spoiled: list[Any] = [
        "",
        "{",
        "[]",
        "null",
        {**good, "format": "other"},
        {**good, "version": 99},
        {**good, "key": {"piece": "b"}},
        {**good, "value": {"seconds": -1}},
        {**good, "value": 3},
        {"format": good["format"]},
    ]
    for content in spoiled:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        assert Cache(tmp_path).get(key) is None, content
    path.write_bytes(b"\xff\xfe\x00")
    assert Cache(tmp_path).get(key) is None
    Cache(tmp_path).put(key, {"seconds": 2.0})
    assert Cache(tmp_path).get(key) == {"seconds": 2.0}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        Cache(tmp_path / "file" / "folder").put({"a": "b"}, {"seconds": 1.0})


def test_writers_and_readers_at_once_never_see_half_an_entry(tmp_path: Any) -> None:
    key = {"piece": "x" * 10_000}
    seen: list[Any] = []

    def work(number: int) -> None:
        for _ in range(30):
            Cache(tmp_path).put(key, {"seconds": float(number)})
            seen.append(Cache(tmp_path).get(key))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found is not None and found["seconds"] in range(4) for found in seen) and len(seen) == 120
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "nothing is left behind"


# Fused operations


def kernels(function: Any, *args: Any, recomputes: bool = False) -> list[str]:
    return [str(kernel.timed_op) for kernel in fuse_program(program_of(function, *args), recomputes).fused_ops]


def test_what_is_evaluated_inside_of_what() -> None:
    x, w = ones(8, 16), ones(16, 16)
    assert kernels(lambda x: (jnp.tanh(x) * 2 + 1).sum(0), x) == ["tanh + mul + add + reduce_sum"]
    assert len(kernels(lambda x: x - x.sum(0), x)) == 2, "a reduction writes its result"
    shared = lambda f: lambda x: (lambda y: (y.sum(0), y.sum(1)))(f(x))  # noqa: E731
    assert len(kernels(shared(jnp.tanh), x)) == 3, "dear: evaluated once"
    assert len(kernels(shared(jnp.tanh), x, recomputes=True)) == 2
    assert len(kernels(shared(lambda x: x * 2), x)) == 2, "cheap: evaluated in both"
    both = lambda x, y: (lambda z: (z.sum(0), z.sum(1)))(x * y)  # noqa: E731
    assert len(kernels(both, x, x, recomputes=True)) == 3, "made of two arrays: written once"
    fused = lambda x, w: jnp.tanh((x * 2) @ w)  # noqa: E731
    assert kernels(fused, x, w) == ["mul", "dot_general", "tanh"]
    assert kernels(fused, x, w, recomputes=True) == ["mul + dot_general + tanh"]
    assert kernels(lambda x: x.reshape(16, 8), x) == [], "another name"
    assert kernels(lambda x, w: x.T @ w, ones(16, 8), w) == ["transpose + dot_general"]
    half = lambda x, w: x @ w.astype(jnp.bfloat16)  # noqa: E731
    assert kernels(half, ones(8, 16, dtype=jnp.bfloat16), w) == ["convert_element_type + dot_general"]


def test_only_what_is_needed_of_a_reshaped_slice_is_read() -> None:
    cut = lambda x, i: lax.dynamic_slice(x.reshape(64, 8, 8), (i, 0, 0), (4, 8, 8)) * 2  # noqa: E731
    (kernel,) = fuse_program(program_of(cut, ones(64, 64), jnp.int32(3)), True).fused_ops
    assert kernel.timed_op.cost.read == pytest.approx(4 * 64 * 4, rel=0.05)
    assert kernel.timed_op.cost.written == 4 * 64 * 4


def test_every_equation_that_is_wanted_is_in_an_operation() -> None:
    """They can run in that order, and give the result."""

    def loss(w: Any, x: Any) -> Any:
        h = jax.nn.gelu(x @ w)
        h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
        return (jax.nn.softmax(h @ w.T, -1) ** 2).sum()

    program = simplify(program_of(jax.grad(loss), ones(16, 32), ones(8, 16)))
    for recomputes in (False, True):
        found = fuse_program(program, recomputes)
        rng = np.random.default_rng(0)
        values = [jnp.asarray(rng.random(v.aval.shape), jnp.float32) for v in program.inputs]
        there: dict[Var, Any] = dict(zip(program.inputs, values, strict=True)) | program.constants
        for kernel in found.fused_ops:
            operands = [there[found.buffer_of(var)].reshape(var.aval.shape) for var in kernel.timed_op.reads]
            there.update(zip(kernel.timed_op.writes, kernel.timed_op.function(*operands), strict=True))
        (end,) = program.outputs
        assert isinstance(end, Var)
        np.testing.assert_allclose(there[found.buffer_of(end)], jax.grad(loss)(*values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: jnp.tanh(x * 2 + 1) * 3,
        lambda x, w: x @ w,
        lambda x, w: (x * x).sum(1),
        lambda x, w: jnp.tanh(x @ w) @ w,
        lambda x, w: jax.grad(lambda w: (jax.nn.relu(x @ w) @ w).sum())(w),
    ],
)
def test_operations_and_bytes_are_those_that_xla_counts(function: Any) -> None:
    """Its analysis of the compiled program; it counts a `tanh` apart, and fuses a little more, or less."""
    x, w = ones(256, 512), ones(512, 512)
    program = simplify(program_of(function, x, w))
    costs = [kernel.timed_op.cost for kernel in fuse_program(program, False).fused_ops]
    said = jax.jit(function).lower(x, w).compile().cost_analysis()
    assert sum(c.flops for c in costs) == pytest.approx(said["flops"] + said.get("transcendentals", 0), rel=0.02)
    assert sum(c.read + c.written for c in costs) == pytest.approx(said["bytes accessed"], rel=0.3)


def over(function: Any, *args: Any, **axes: int) -> Program:
    traced = jax.make_jaxpr(function, axis_env=list(axes.items()))(*args)
    return simplify(inline(traced.jaxpr, traced.consts))


def test_reductions_that_do_not_wait_for_each_other_are_sent_together() -> None:
    def several(a: Any, b: Any, c: Any) -> Any:
        first, second = lax.psum(a, "x"), lax.psum(b, "x")
        third = lax.psum(first * 2, "x")  # waits for the first
        return first, second, third, lax.psum(c, ("x", "y")), lax.pmax(c, "x")

    program = over(several, ones(4), ones(8), ones(2), x=2, y=2)
    found = [k for k in fuse_program(program, False).fused_ops if k.root.primitive.name in ("psum", "pmax")]
    assert sorted(len(k.timed_op.equations) for k in found) == [1, 1, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=14))
@settings(max_examples=60, deadline=None)
def test_kernels_sent_together_never_wait_in_a_circle(steps: list[tuple[int, bool]]) -> None:
    def chain(x: Any) -> list[Any]:
        values = [x]
        for source, axis in steps:
            values.append(lax.psum(values[source % len(values)] * 1.5, "x" if axis else "y"))
        return values

    program = over(chain, ones(4), x=2, y=2)
    found = fuse_program(program, True)
    there = {*program.inputs}
    for kernel in found.fused_ops:
        assert {found.buffer_of(var) for var in kernel.timed_op.reads} <= there
        there.update(kernel.timed_op.writes)
    count = sum(kernel.root.primitive.name == "psum" for kernel in found.fused_ops)
    longest = {program.inputs[0]: (0, 0)}  # how many of either axis follow each other at most
    for eqn in program.equations:
        x, y = longest[eqn.invars[0]]
        own = eqn.params.get("axes")
        longest[eqn.outvars[0]] = (x + (own == ("x",)), y + (own == ("y",)))
    assert count >= max(x + y for x, y in longest.values())


def test_what_does_not_change_is_computed_before_loops() -> None:
    """With the same result, and as often as it has to be; and loops of one turn are none."""

    def turns(n: int) -> Any:
        def nested(w: Any, x: Any) -> Any:
            def outer(c: Any, y: Any) -> Any:
                inner, _ = lax.scan(lambda d, _: (d + jnp.tanh(w).sum() * y, None), c, None, length=2)
                return inner, jnp.tanh(w) * 2

            return lax.scan(outer, x[0], x[:n])

        return nested

    w, x = jnp.arange(4.0), jnp.arange(12.0).reshape(3, 4)
    for n in (1, 3):
        program = program_of(turns(n), w, x)
        made = simplify(hoist_invariants(simplify(inline_single_iterations(program))))
        assert [e.primitive.name for e in made.equations].count("tanh") == 1, "once, before both loops"
        assert sum(e.primitive.name == "scan" for e in made.equations) == 1
        for found, expected in zip(program_op(made).function(w, x), turns(n)(w, x), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)


# Exchange


def test_bytes_sent_by_hand() -> None:
    mesh = {"x": 4, "y": 2}

    def all_kinds(a: Any) -> Any:
        return (
            lax.psum(a, ("x", "y")),
            lax.all_gather(a, "x", axis=0, tiled=True),
            lax.psum_scatter(a, "x", scatter_dimension=0, tiled=True),
            lax.all_to_all(a, "x", split_axis=0, concat_axis=1, tiled=True),
            lax.ppermute(a, "x", [(0, 1), (1, 2), (2, 3)]),
        )

    program = over(all_kinds, ones(8, 8), **mesh)
    found = [transfer for eqn in program.equations if (transfer := transfer_of(eqn, mesh)) is not None]
    n = 8 * 8 * 4
    assert {t.kind: (t.bytes, t.bytes_sent) for t in found} == {
        "all-reduce": (n, 2 * n * 7 / 8),
        "all-gather": (4 * n, 3 * n),
        "reduce-scatter": (n, n * 3 / 4),
        "all-to-all": (n, n * 3 / 4),
        "permute": (n, n),
    }
    assert next(t for t in found if t.kind == "permute").pairs == ((0, 1), (1, 2), (2, 3))


def test_times_of_exchange_by_hand() -> None:
    """Rings over a switch: each step takes the latency, each byte the bandwidth (Thakur and others, 2005)."""
    machine = Machine.gpus("h100-sxm")
    mesh = machine.mesh({"x": 8})
    latency, bandwidth, n = 1.9e-6, 450e9, 1 << 30
    gather = Transfer("all-gather", ("x",), n, 8)
    assert gather.cost(machine, mesh).seconds(gather.bytes) == pytest.approx(7 * latency + 7 / 8 * n / bandwidth)
    reduce = Transfer("all-reduce", ("x",), n, 8)
    assert reduce.cost(machine, mesh).seconds(reduce.bytes) == pytest.approx(14 * latency + 14 / 8 * n / bandwidth)
    shift = Transfer("permute", ("x",), n, 8, tuple((i, i + 1) for i in range(7)))
    assert shift.cost(machine, mesh).seconds(shift.bytes) == pytest.approx(latency + n / bandwidth)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], axes: dict[str, int]) -> Layout:
    dims: list[list[str]] = [[] for _ in shape]
    for name in draw(st.permutations(list(axes))):
        d = draw(st.integers(-1, len(shape) - 1))
        if d >= 0:
            dims[d].append(name)
    return Layout(
        tuple(cut_of(tuple(names), 1, n, n, axes) if names else None for names, n in zip(dims, shape, strict=True))
    )


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_route_is_what_is_sent(data: st.DataObject) -> None:
    axes, shape = {"x": 2, "y": 4}, (8, 16)
    start, end = data.draw(layouts(shape, axes)), data.draw(layouts(shape, axes))
    local = jax.ShapeDtypeStruct(start.local_shape(shape, axes), jnp.float32)
    program = over(lambda a: convert(a, start, end, shape, axes), local, **axes)
    sent = [transfer for eqn in program.equations if (transfer := transfer_of(eqn, axes)) is not None]
    assert list(transfers_of_route(plan_resharding(start, end, shape, axes, "float32"), 4, axes)) == sent


# Memory


def naive_peak(operations: Sequence[Operation], order: Sequence[int], kept: frozenset[Var]) -> int:
    """Values held at each place, one by one."""
    most = 0
    for now, k in enumerate(order):
        bytes_ = operations[k].scratch_bytes
        for maker, each in enumerate(operations):
            for var, need in each.writes.items():
                ends = [place for place, reader in enumerate(order) if var in operations[reader].reads]
                last = len(order) if var in kept else max([order.index(maker), *ends])
                bytes_ += need if order.index(maker) <= now <= last else 0
        most = max(most, bytes_)
    return most


@st.composite
def graphs(draw: st.DrawFn, most: int = 6) -> tuple[list[Operation], frozenset[Var]]:
    n = draw(st.integers(1, most))
    made = [Var(jax.core.ShapedArray((), jnp.float32)) for _ in range(n)]
    needs = [frozenset(draw(st.sets(st.integers(0, k - 1), max_size=3)) if k else ()) for k in range(n)]
    sizes, inside = (draw(st.lists(st.integers(0, top), min_size=n, max_size=n)) for top in (9, 5))
    operations = [
        Operation({made[k]: sizes[k]}, frozenset(made[i] for i in needs[k]), inside[k], (), needs[k]) for k in range(n)
    ]
    return operations, frozenset(made[i] for i in draw(st.sets(st.integers(0, n - 1))))


def orders(operations: Sequence[Operation]) -> list[tuple[int, ...]]:
    """All orders in which operations can run."""
    every = itertools.permutations(range(len(operations)))
    return [o for o in every if all(operations[k].needs <= {*o[:t]} for t, k in enumerate(o))]


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_the_peak_of_an_order_is_what_counting_gives(graph: tuple[list[Operation], frozenset[Var]]) -> None:
    operations, kept = graph
    every = {order: naive_peak(operations, order, kept) for order in orders(operations)}
    for order, most in list(every.items())[:20]:
        assert max(now for _, now, _ in liveness(operations, order, kept)) == most
    assert tuple(memory_greedy_order(operations, kept)) in every
    best = peak_bytes(liveness_in_best_order(operations, kept))
    assert min(every.values()) <= best <= every[tuple(range(len(operations)))]


@given(graphs(5), st.data())
@settings(max_examples=60, deadline=None)
def test_writing_in_place_takes_no_more(graph: tuple[list[Operation], frozenset[Var]], data: st.DataObject) -> None:
    operations, kept = graph
    sizes = {var: need for each in operations for var, need in each.writes.items()}
    pairs = [[(v, r) for v, n in each.writes.items() for r in each.reads if sizes[r] == n] for each in operations]
    over_ = [tuple(pair for pair in several if data.draw(st.booleans())) for several in pairs]
    changed = [dataclasses.replace(each, in_place=own) for each, own in zip(operations, over_, strict=True)]
    for order in orders(operations)[:10]:
        most = [max(now for _, now, _ in liveness(each, order, kept)) for each in (changed, operations)]
        assert most[0] <= most[1]


def device_of(function: Any, *args: Any, donated: Sequence[int] = ()) -> DeviceProgram:
    return DeviceProgram(simplify(program_of(function, *args)), {}, frozenset(donated))


N = 16 * 16 * 4


def test_memory_by_hand() -> None:
    x = ones(16, 16)
    assert memory_of(device_of(lambda x: jnp.tanh(x) * 2, x), CPU).temporaries == 0, "fused into the result"
    found = memory_of(device_of(lambda x: ((x @ x) @ x) @ x, x), CPU)
    assert (found.arguments, found.outputs, found.temporaries, found.total) == (N, N, 2 * N, 4 * N)
    # tanh writes over the product that nobody else reads
    assert memory_of(device_of(lambda x: jnp.tanh(x @ x) @ x, x), CPU).temporaries == N
    assert memory_of(device_of(lambda x: jnp.tanh(x @ x) @ x, x), Calibration(on_chip=N // 2)).temporaries == N // 2
    # kept for later: both products of the forward pass
    assert memory_of(device_of(lambda x: (lambda y: (y @ x) @ y)(x @ x), x), CPU).temporaries == 2 * N
    assert memory_of(device_of(lambda x, y: (x + 1, y @ x), x, x, donated=[0]), CPU).aliased == N
    assert memory_of(device_of(lambda x, y: (x + 1, y @ x), x, x, donated=[0, 1]), CPU).aliased == 2 * N
    assert memory_of(device_of(lambda x: x.sum(), x, donated=[0]), CPU).aliased == 0


def test_memory_of_loops_by_hand() -> None:
    x = ones(16, 16)

    def turns(x: Any) -> Any:
        return (lax.scan(lambda c, _: (c @ x, None), x @ x, None, length=5)[0] @ x).sum()

    # The carry, which begins as the product, and beside it the next one; then what follows.
    assert memory_of(device_of(turns, x), CPU).temporaries == 2 * N

    def stacked(x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            c = jnp.tanh(c)  # in place of what is carried
            return c, c * 2  # in its place in the stack

        return lax.scan(body, x @ x, None, length=5)[1].sum()

    assert memory_of(device_of(stacked, x), CPU).temporaries == 6 * N
    branches = device_of(lambda i, x: lax.cond(i, lambda x: (x @ x) @ x, lambda x: x, x), ones(dtype=jnp.bool_), x)
    assert memory_of(branches, CPU).temporaries == pytest.approx(N, abs=64), "and the number of the branch"


def layers(w: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w) + h, None

    return jax.grad(lambda w: jnp.sum(lax.scan(layer, x, w)[0] ** 2))(w)


def kept_less(w: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(jnp.tanh(h @ w) @ w) + h, None

    return jax.grad(lambda w: jnp.sum(lax.scan(jax.checkpoint(layer), x, w)[0] ** 2))(w)


def attention(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        q, k, v = x @ w[0], x @ w[1], x @ w[2]
        return jnp.sum((jax.nn.softmax(q @ k.T) @ v) ** 2)

    return jax.grad(loss)(w)


@pytest.mark.parametrize("function", [layers, kept_less, attention])
def test_memory_is_about_what_xla_compiles(function: Any) -> None:
    """Within 35%, of gradients through loops, with and without rematerialization, and of attention."""
    w, x = ones(6, 256, 256), ones(512, 256)
    compiled: Any = jax.jit(function).lower(w, x).compile().memory_analysis()
    found = memory_of(device_of(function, w, x), CPU)
    total = compiled.argument_size_in_bytes + compiled.output_size_in_bytes + compiled.temp_size_in_bytes
    assert found.total == pytest.approx(total, rel=0.35)


# Calibration


def test_a_fit_finds_the_rates_of_a_device_that_is_made_up() -> None:
    kind = kind_named("v5e")
    reached = Calibration(products=0.8, passes=0.6, launch=3e-6)

    def seconds(piece: TimedOp) -> float:
        cost = piece.cost
        if cost.matrix:
            return sum(n / kind.rate(t) for t, n in cost.matrix.items()) / reached.products + reached.launch
        return (cost.read + cost.written) / (kind.bandwidth * reached.passes) + reached.launch

    found = calibrate.fit_entry(kind, seconds, Calibration(recomputes=True))
    for name in ("products", "passes", "launch"):
        assert getattr(found, name) == pytest.approx(getattr(reached, name), rel=1e-3)
    assert found.recomputes


def test_an_entry_is_of_a_kind_with_the_figures_of_its_data_sheet() -> None:
    kind = kind_named("v5e")
    assert Calibration.for_kind(kind) == entries()["TPU v5e"]
    assert Calibration.for_kind(dataclasses.replace(kind, bandwidth=kind.bandwidth / 2)) == Calibration()
    piece, plain = traced_op(lambda a: a + 1, ones(64, 4096)), Roofline(launch=0, calibrated=False)
    assert Roofline(launch=0).time(piece, kind).seconds == pytest.approx(
        plain.time(piece, kind).seconds / Calibration.for_kind(kind).passes
    )


# Programs


def mlp(width: int = 32, batch: int = 16) -> tuple[Program, dict[str, Any]]:
    def step(a: Any, b: Any, x: Any, y: Any) -> Any:
        def loss(a: Any, b: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ a) @ b - y) ** 2)

        value, grads = jax.value_and_grad(loss, (0, 1))(a, b)
        return a - 0.1 * grads[0], b - 0.1 * grads[1], value

    shapes = ones(width, 4 * width), ones(4 * width, width), ones(batch, width), ones(batch, width)
    return program_of(step, *shapes), {"width": width, "batch": batch}


def test_a_program_by_hand() -> None:
    """Two products, the units between them over four devices, as in Megatron: one all-reduce of activations."""
    program, sizes = mlp()
    axes = {"model": 4}
    specs = P(None, "model"), P("model"), P(), P()
    flow = follow(program, [from_spec(s, v.aval.shape, axes) for s, v in zip(specs, program.inputs, strict=True)], axes)
    machine = Machine.gpus("h100-sxm", per_host=4)
    cost = program_cost(flow, machine, machine.mesh(axes), donated=(0, 1), platform="gpu")
    activations = sizes["batch"] * sizes["width"] * 4
    assert cost.bytes == {"all-reduce": activations}
    assert cost.sent == activations * 2 * 3 / 4
    bandwidth, latency = 450e9, 1.9e-6
    assert cost.exchange == pytest.approx(6 * latency + 1.5 * activations / bandwidth)
    assert cost.memory.aliased == 2 * sizes["width"] ** 2 * 4
    total = cost.compute + cost.exchange
    assert cost.compute == pytest.approx(sum(cost.sources.values()))
    assert not cost.unknown and not cost.open_loops
    # Everything waits for the one exchange or is waited for by it: nothing is gained beside it but what it can hide.
    assert max(cost.compute, cost.exchange) - 1e-9 <= cost.seconds <= total + 1e-9


def test_loops_count_by_their_turns_and_branches_by_the_longest() -> None:
    def turns(n: int) -> Any:
        return lambda x: lax.scan(lambda c, _: (lax.psum(c @ c, "x"), None), x, None, length=n)[0]

    machine = Machine.tpu("v5e:2x2")
    mesh = machine.mesh({"x": 4})
    costs = []
    for n in (1, 7):
        device = DeviceProgram(over(turns(n), ones(128, 128), x=4), {"x": 4})
        costs.append(program_cost(device, machine, mesh))
    assert costs[1].bytes["all-reduce"] == 7 * 128 * 128 * 4
    for name in ("compute", "exchange"):
        assert getattr(costs[1], name) == pytest.approx(7 * getattr(costs[0], name))
    assert costs[1].seconds == pytest.approx(7 * costs[0].seconds, rel=1e-6)

    def branch(i: Any, x: Any) -> Any:
        return lax.cond(i, lambda x: lax.psum(x @ x @ x, "x"), lambda x: x @ x, x)

    device = DeviceProgram(over(branch, ones(dtype=jnp.bool_), ones(128, 128), x=4), {"x": 4})
    longest = program_cost(device, machine, mesh)
    assert longest.bytes == {"all-reduce": 128 * 128 * 4}
    open_loop = over(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ c, x), ones(128, 128), x=4)
    assert program_cost(DeviceProgram(open_loop, {"x": 4}), machine, mesh).open_loops == 1


def test_exchange_runs_beside_what_does_not_need_it() -> None:
    def beside(a: Any, b: Any) -> Any:
        return lax.psum(a, "x"), b @ b @ b

    def after(a: Any) -> Any:
        b = lax.psum(a, "x")
        return b @ b @ b

    machine = Machine.tpu("v5e:2x2")
    mesh = machine.mesh({"x": 4})
    free = program_cost(DeviceProgram(over(beside, ones(1024, 1024), ones(1024, 1024), x=4), {"x": 4}), machine, mesh)
    bound = program_cost(DeviceProgram(over(after, ones(1024, 1024), x=4), {"x": 4}), machine, mesh)
    assert free.seconds == pytest.approx(max(free.compute, free.exchange))
    assert bound.seconds == pytest.approx(bound.compute + bound.exchange)


def test_equal_exchanges_behind_barriers_are_made_once() -> None:
    """Of XLA's own program: barriers of the same are one, too."""

    def twice(a: jax.Array) -> tuple[jax.Array, ...]:
        first, second = (lax.optimization_barrier(lax.psum(lax.optimization_barrier(a), "x")) for _ in range(2))
        return first, lax.psum(first * 2, "x"), lax.psum(second * 2, "x") + 1

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    manual = jax.shard_map(twice, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    text = jax.jit(manual).lower(ones(2, 2)).compile().as_text()
    planned = over(twice, ones(2, 2), x=2).equations
    made = sum("all-reduce(" in line for line in text.splitlines())
    assert sum(eqn.primitive.name == "psum" for eqn in planned) == made == 2


def test_the_device_program_does_not_show_the_mesh_that_is_set() -> None:
    rows, columns = (from_spec(spec, (8, 8), {"x": 2}) for spec in (P("x"), P(None, "x")))
    traced = jax.make_jaxpr(jnp.sin)(ones(8, 8))
    flow = follow(inline(traced.jaxpr, traced.consts), [rows], {"x": 2}, outputs=[columns])
    alone = device_program(flow, {"x": 2}).program
    with jax.set_mesh(jax.make_mesh((2,), ("x",))):
        inside = device_program(flow, {"x": 2}).program
    names = [[eqn.primitive.name for eqn in each.equations] for each in (alone, inside)]
    assert names[0] == names[1] and "all_to_all" in names[0]


def test_the_device_program_of_a_flow_has_local_sizes() -> None:
    program, _ = mlp()
    axes = {"data": 2, "model": 4}
    specs = P(None, "model"), P("model"), P("data"), P("data")
    flow = follow(program, [from_spec(s, v.aval.shape, axes) for s, v in zip(specs, program.inputs, strict=True)], axes)
    device = device_program(flow, axes)
    assert [v.aval.shape for v in device.program.inputs] == [(32, 32), (32, 32), (8, 32), (8, 32)]
    assert all(isinstance(timed_op_of([eqn]).cost, Cost) for eqn in device.program.equations)
