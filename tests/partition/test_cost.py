"""What operators, exchanges and programs take, against counts by hand, brute force and published rates."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
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
from vnode.partition import Machine
from vnode.partition.cost import (
    Cache,
    DeviceProgram,
    Measured,
    Piece,
    Roofline,
    Target,
    Time,
    Times,
    Transfer,
    Windows,
    copy_of,
    device_program,
    memory_of,
    program_cost,
    transfer_of,
    transfers_of_route,
)
from vnode.partition.cost.buffers import Buffers, Vacant
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.device import bodies_of, compiled_as, simplified
from vnode.partition.cost.kernels import kernels_of
from vnode.partition.cost.loops import after_loops, before_loops
from vnode.partition.cost.narrow import rounded_ends
from vnode.partition.cost.overlap import Backwards
from vnode.partition.cost.pieces import piece_of, program_piece, traced_piece
from vnode.partition.cost.shapes import Shape
from vnode.partition.cost.sums import added_before, parts_first
from vnode.partition.cost.windows import COUNTS, counted
from vnode.partition.machine import Kind
from vnode.partition.machine.table import kind_named
from vnode.spmd.choice import Given, choose
from vnode.spmd.exchange import convert
from vnode.spmd.flow import follow
from vnode.spmd.layout import Layout, cut_of, from_spec
from vnode.spmd.route import route

pytestmark = pytest.mark.quickly

CPU, TPU = Target.on("cpu"), Target.on("tpu")
TOY = Kind("toy", {"float32": 1e12}, vector=1e11, memory=2**30, bandwidth=1e11, host_bandwidth=1e10)


def program_of(function: Any, *args: Any) -> Program:
    traced = jax.make_jaxpr(function)(*args)
    return inline(traced.jaxpr, traced.consts)


def ones(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


# Pieces


def test_a_fused_piece_reads_and_writes_at_its_border() -> None:
    piece = traced_piece(lambda x, y: jnp.exp(x) * y + x, ones(8, 16), ones(8, 16))
    assert len(piece.equations) == 3
    assert piece.cost == Cost(vector=3 * 128, transcendental=128, read=2 * 128 * 4, written=128 * 4)


def test_of_what_is_looked_up_in_only_what_is_found_is_read() -> None:
    piece = traced_piece(lambda t, i: jnp.tanh(t.at[i].get(mode="clip")), ones(1000, 16), ones(8, dtype=jnp.int32))
    found = 8 * 16 * 4
    assert piece.cost.written == found
    assert found <= piece.cost.read <= found + 2 * 8 * 4  # and the indices; never the table of 64,000 bytes


def test_a_piece_computes_what_it_stands_for() -> None:
    piece = traced_piece(lambda a, b: jnp.tanh(a @ b).sum(0), ones(4, 8), ones(8, 16))
    a, b = np.random.default_rng(0).random((4, 8)), np.random.default_rng(1).random((8, 16))
    (found,) = piece.function(jnp.float32(a), jnp.float32(b))
    np.testing.assert_allclose(found, np.tanh(a @ b).sum(0), rtol=1e-5)


def test_keys_tell_computations_apart_and_nothing_else() -> None:
    def key(function: Any, *args: Any) -> str:
        return traced_piece(function, *args).key

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
    given_ = [Given(from_spec(s, v.aval.shape, axes)) for s, v in zip(specs, eqn.invars, strict=True)]
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
        piece = traced_piece(
            lambda a, b: a @ b, ones(batch, 8192, dtype=jnp.bfloat16), ones(8192, 8192, dtype=jnp.bfloat16)
        )
        memory = (piece.cost.read + piece.cost.written) / kind.bandwidth
        ratios.append(Roofline(launch=0).seconds(piece.cost, kind) / memory)
    assert ratios[0] == 1.0 < ratios[1]


class _Fixed:
    """A source that knows pieces of one equation."""

    def time(self, piece: Piece, kind: Kind) -> Time | None:
        return Time(1.0, "measured") if len(piece.equations) == 1 else None


def test_the_first_source_that_knows_is_asked() -> None:
    times = Times((_Fixed(), Roofline()))
    assert times.time(traced_piece(jnp.tanh, ones(4)), TOY).source == "measured"
    assert times.time(traced_piece(lambda x: jnp.tanh(x) + x, ones(4)), TOY).source == "roofline"
    slow = Kind("slow", {}, vector=1e3, memory=2**30, bandwidth=1e3, host_bandwidth=1e3)
    piece = traced_piece(lambda x: jnp.tanh(x) + x, ones(4))
    assert times.slowest(piece, (TOY, slow)) == Roofline().time(piece, slow)


def test_a_measured_time_is_measured_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = traced_piece(lambda a: a @ a, ones(64, 64))
    kind = Machine.here(jax.devices()[:1]).kinds[0]
    first = Measured(cache=Cache(tmp_path), batches=3).time(piece, kind)
    assert first is not None and first.source == "measured" and first.seconds > 0 and first.noise >= 0
    again = Measured(cache=Cache(tmp_path))
    monkeypatch.setattr(again, "measure", lambda _: pytest.fail("measured a second time"))
    assert again.time(piece, kind) == first
    other = traced_piece(lambda a: a @ a, ones(64, 64, dtype=jnp.bfloat16))
    assert again.cache.get(again.key(other)) is None
    assert again.time(piece, TOY) is None, "another kind of device"
    keys = traced_piece(jax.random.key_data, jax.eval_shape(jax.random.key, 0))
    assert again.time(keys, kind) is None


def test_a_noisy_measurement_is_made_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = traced_piece(lambda a: a @ a, ones(8, 8))
    for said, least in (
        ([(2.0, 1.0), (1.0, 0.01), (3.0, 0.0)], (1.0, 0.01)),  # quiet at the second try
        ([(1.0, 0.5), (2.0, 0.4), (3.0, 0.9), (1.0, 0.0)], (2.0, 0.4)),  # the quietest of three
    ):
        left = iter(said)
        measured = Measured(cache=Cache(tmp_path))
        monkeypatch.setattr(measured, "measure_once", lambda _, left=left: next(left))
        assert measured.measure(piece) == least


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
        assert set(plain.sources) == {"windows"}, "of TPUs"
    gpus = Machine.gpus("a100-40gb", per_host=4)
    assert set(program_cost(device, gpus, gpus.mesh({"x": 4}), platform="gpu").sources) == {"roofline"}


def test_what_was_seen_of_a_chip_is_no_figure_of_another() -> None:
    """Nor of one that was measured: its bandwidth is what passes reach."""
    piece, kind = traced_piece(lambda a: a + 1, ones(64, 4096)), kind_named("v4")
    others = dataclasses.replace(kind, bandwidth=kind.bandwidth / 2), dataclasses.replace(kind, name="TPU mine")
    for other in others:
        assert Times().time(piece, other) == Roofline().time(piece, other)
    smaller = dataclasses.replace(kind, memory=kind.memory // 2)
    assert Times().time(piece, smaller) == Times().time(piece, kind) == Windows().time(piece, kind)


def test_only_pieces_that_are_alike_share_a_time() -> None:
    """Against what each takes if nothing is known of others."""
    kind, a, b = kind_named("v5e"), ones(64, 4096), ones(64, 4096)
    sums = traced_piece(lambda a, b: (a + b) * b, a, b)
    (first, second), (product,) = sums.reads, sums.writes
    (added, _) = sums.equations
    matrix = traced_piece(lambda a, b: a @ b, a, ones(4096, 512))
    several = [
        sums,
        traced_piece(lambda a, b: (a + b) * (a + b), a, b),
        traced_piece(lambda a, b: (a + b) * b, ones(64, 8192), ones(64, 8192)),
        dataclasses.replace(sums, writes=(product, added.outvars[0])),
        dataclasses.replace(sums, reads=(first, second, *matrix.reads)),
        dataclasses.replace(sums, near=frozenset({first})),
        dataclasses.replace(sums, near=frozenset({first, product})),
        matrix,
        dataclasses.replace(matrix, near=frozenset(matrix.reads[:1])),
        dataclasses.replace(matrix, near=frozenset(matrix.reads[1:])),
        dataclasses.replace(matrix, narrow=frozenset(matrix.reads[1:])),
    ]
    alone = [counted(piece, kind, COUNTS[kind.name]) for piece in several]
    assert len({time.seconds for time in alone}) > 6
    for _ in range(2):
        assert [Windows().time(piece, kind) for piece in several] == alone
    same = traced_piece(lambda a, b: (a + b) * b, a, b)
    assert same.alike == sums.alike and len({piece.alike for piece in several}) == len(several)


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
        {**good, "value": {"seconds": "x"}},
        {**good, "value": 3},
        {"format": good["format"]},
    ]
    for content in spoiled:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        assert Cache(tmp_path).numbers(key) is None, content
    path.write_bytes(b"\xff\xfe\x00")
    assert Cache(tmp_path).numbers(key) is None
    Cache(tmp_path).put(key, {"seconds": 2.0})
    assert Cache(tmp_path).get(key) == {"seconds": 2.0}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be kept"):
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


# Kernels


def kernels(function: Any, *args: Any, target: Target = CPU) -> list[str]:
    return [str(kernel.piece) for kernel in kernels_of(program_of(function, *args), target).kernels]


def test_what_is_computed_inside_of_what() -> None:
    x, w = ones(8, 16), ones(16, 16)
    assert kernels(lambda x: (jnp.tanh(x) * 2 + 1).sum(0), x) == ["tanh + mul + add + reduce_sum"]
    # A reduction's result is in memory, and what depends on it starts anew.
    assert len(kernels(lambda x: x - x.sum(0), x)) == 2
    # Dear and read by two that are not the same kernel: computed once. Cheap: computed twice.
    shared = lambda f: lambda x: (lambda y: (y.sum(0), y.sum(1)))(f(x))  # noqa: E731
    assert len(kernels(shared(jnp.tanh), x)) == 3
    assert len(kernels(shared(lambda x: x * 2), x)) == 2
    # Contractions: alone on CPU, with what is element by element on TPU.
    fused = lambda x, w: jnp.tanh((x * 2) @ w)  # noqa: E731
    assert kernels(fused, x, w) == ["mul", "dot_general", "tanh"]
    assert kernels(fused, x, w, target=TPU) == ["mul + dot_general + tanh"]
    # A reshape is a name, a transposition of a product is written by it.
    assert kernels(lambda x: x.reshape(16, 8), x) == []
    assert kernels(lambda x, w: (x @ w).T, x, w) == ["dot_general"]
    assert kernels(lambda x, w: x.T @ w, ones(16, 8), w) == ["transpose + dot_general"]


def test_kernels_with_several_results() -> None:
    x = ones(64, 64)
    several = lambda x: (x.sum(0), x.max(1), jnp.tanh(x))  # noqa: E731
    (kernel,) = kernels_of(program_of(several, x), TPU).kernels
    assert kernel.piece.cost.read == 64 * 64 * 4 and kernel.piece.cost.written == (64 + 64 + 64 * 64) * 4
    assert len(kernels(several, x)) == 3, "not on CPUs"
    # With what writes it; not with what waits for the whole of a sum, nor around something that runs between.
    assert len(kernels(lambda x: (lambda y: (y, y.sum(0)))(jnp.tanh(x)), x, target=TPU)) == 1
    assert len(kernels(lambda x: x - x.sum(0), x, target=TPU)) == 2
    assert len(kernels(lambda x: x * jnp.sort(x.sum(0)), x, target=TPU)) == 3


def test_products_of_tpus_are_computed_once() -> None:
    x, w = ones(64, 64), ones(64, 64)
    multiplied = {"float32": 2 * 64**3}

    def made(function: Any, *args: Any) -> list[Any]:
        return [kernel.piece for kernel in kernels_of(program_of(function, *args), TPU).kernels]

    (both,) = made(lambda x, w: (lambda y: (y.sum(0), y.max(1)))(x @ w), x, w)
    assert both.cost.matrix == multiplied and both.cost.written == 2 * 64 * 4, "what only they read is not written"
    parts = made(lambda x, w: [jnp.tanh(part) for part in jnp.split(x @ w + 1, 4)], x, w)
    assert [piece.cost.matrix for piece in parts if piece.cost.matrix] == [multiplied]
    several = made(lambda x, w: (x @ w) * jnp.tanh(x @ w.T), x, w)
    assert [piece.cost.matrix for piece in several if piece.cost.matrix] == [multiplied] * 2
    slice_, product = made(lambda x, i, w: lax.dynamic_slice(x, (i, 0), (4, 64)) @ w, x, jnp.int32(3), w)
    assert not slice_.cost.matrix and product.cost.matrix, "a place that is known at run time only, and no whole tiles"
    (product,) = made(lambda x, i, w: lax.dynamic_slice(x, (i, 0), (8, 64)) @ w, x, jnp.int32(3), w)
    assert product.cost.matrix, "whole tiles"


def test_only_what_is_needed_of_a_reshaped_slice_is_read() -> None:
    cut = lambda x, i: lax.dynamic_slice(x.reshape(64, 8, 8), (i, 0, 0), (4, 8, 8)) * 2  # noqa: E731
    (kernel,) = kernels_of(program_of(cut, ones(64, 64), jnp.int32(3)), TPU).kernels
    assert kernel.piece.cost.read == pytest.approx(4 * 64 * 4, rel=0.05)
    assert kernel.piece.cost.written == 4 * 64 * 4


def test_what_a_tpu_does_not_write() -> None:
    table, places, values = ones(64, 512), ones(8, dtype=jnp.int32), ones(8, 512)

    def part(width: int) -> Any:
        def put(i: Any, v: Any) -> Any:
            filled = jnp.zeros(table.shape).at[i].add(v, mode="promise_in_bounds")
            return jnp.exp(lax.dynamic_slice(filled, (0, 64), (64, width)))

        return put

    assert sum("scatter-add" in kernel for kernel in kernels(part(128), places, values, target=TPU)) == 1
    assert "scatter-add" not in kernels(part(128), places, values, target=TPU), "made inside of its reader"
    assert any(kernel.endswith("scatter-add") for kernel in kernels(part(512), places, values, target=TPU))
    # One place in each row: the compiler compares positions instead.
    chosen = lambda x, i: jnp.exp(jnp.take_along_axis(x, i[:, None], axis=1)).sum()  # noqa: E731
    given = lambda x, i: x + jax.grad(chosen)(x, i)  # noqa: E731
    assert len(kernels(given, table, ones(64, dtype=jnp.int32), target=TPU)) == 1
    assert len(kernels(given, table, ones(64, dtype=jnp.int32), target=CPU)) > 1
    x = ones(128, 128)
    chain = device_of(lambda x: ((x @ x) @ x).sum(), x)
    assert memory_of(chain, CPU).temporaries == 0, "a library sums the product as it makes it"
    exact = device_of(lambda x: (jnp.dot(jnp.dot(x, x), x, precision="highest")).sum(), x)
    assert memory_of(exact, TPU).temporaries > memory_of(chain, TPU).temporaries


def test_a_tpu_writes_what_would_be_read_more_often_otherwise() -> None:
    weights = ones(64, 32), ones(64, 32), ones(64, 32)

    def products(x: Any, *w: Any) -> Any:  # of the same, which none of them can be computed in alone
        return [lax.dot(x, each, precision="highest") for each in w]

    one = kernels(lambda a, *w: products(jnp.tanh(a), *w), ones(64, 64), *weights, target=TPU)
    assert not any(name == "tanh" for name in one), "each product reads a, and computes its tanh"
    # Of four arrays of n bytes three products read 12 n; a sum that is written moves 4 n + n + 3 n.
    parts = [ones(64, 64)] * 4
    four = kernels(lambda a, b, c, d, *w: products(a * b + c * d, *w), *parts, *weights, target=TPU)
    two = kernels(lambda a, b, *w: products(a * b, *w[:2]), *parts[:2], *weights, target=TPU)
    assert any("add" in each and "dot" not in each for each in four), four
    assert not any("mul" in each and "dot" not in each for each in two), "4 n, and 2 n + n + 2 n if it is written"


def convolved(x: Any, k: Any) -> Any:
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize(("places", "packed"), [(28, True), (40, False)])
def test_a_tpu_keeps_where_a_convolution_was_cut_off(places: int, packed: bool) -> None:
    """Where a word holds the bits of a row: then the rest is rounded, unless a sum over devices is between them."""

    def step(a: Any, k: Any, bias: Any, last: Any, devices: bool = False) -> Any:
        def loss(k: Any, last: Any) -> Any:
            x = lax.psum(convolved(a, k), "x") if devices else convolved(a, k)
            return jnp.sum(convolved(jax.nn.relu(x + bias), last) ** 2)

        return jax.grad(loss, (0, 1))(k, last)

    given = ones(8, places, places, 4), ones(3, 3, 4, 16), ones(16), ones(3, 3, 16, 4)
    shape = (8, places, places, 16)

    def written(devices: bool) -> set[tuple[str, bool]]:
        traced = jax.make_jaxpr(lambda *args: step(*args, devices), axis_env=[("x", 2)])(*given)
        found = kernels_of(simplified(inline(traced.jaxpr, traced.consts)), TPU)
        several = [kernel for kernel in found.kernels if kernel.shape is not Shape.COLLECTIVE]
        forward = next(kernel for kernel in several if any(var.aval.shape == shape for var in kernel.piece.writes))
        return {(var.aval.dtype.name, var in found.narrow) for var in forward.piece.writes}

    assert written(False) == ({("float32", True), ("bool", False)} if packed else {("float32", False)})
    assert written(True) == {("float32", False)}


def test_what_a_tpu_sends_together_is_no_more_than_it_does() -> None:
    """Of three sums of 50 MiB two, whose operands are 100 MiB of 120."""
    x = jax.ShapeDtypeStruct((50, 1 << 18), jnp.float32)
    traced = jax.make_jaxpr(lambda *xs: [lax.psum(x, "x") for x in xs], axis_env=[("x", 2)])(x, x, x)
    found = kernels_of(inline(traced.jaxpr, traced.consts), TPU).kernels
    assert [len(kernel.piece.writes) for kernel in found] == [2, 1]


def test_arrays_take_whole_tiles_of_a_tpus_memory() -> None:
    made = device_of(lambda a, b: (a * 2, b + 1), ones(5, 5, 64, 192), ones(9, 200), donated=(0,))
    tiles = 5 * 5 * 64 * 256 * 4, 16 * 256 * 4
    found = memory_of(made, TPU)
    assert (found.arguments, found.aliased, found.outputs) == (sum(tiles), tiles[0], sum(tiles))
    assert memory_of(made, CPU).arguments == (5 * 5 * 64 * 192 + 9 * 200) * 4


def test_what_lives_shortest_is_on_the_chip() -> None:
    a, w = ones(64, 64), ones(64, 64)  # 16 KiB each

    def chain(a: Any, w: Any) -> Any:
        x = jnp.sort(a)
        y = lax.cumsum(x, 0)
        z = lax.cumsum(jnp.sort(y + w), 1)
        return (jnp.sort(z) + lax.cumsum(x, 1)).sum()

    made = device_of(chain, a, w)
    whole = memory_of(made, dataclasses.replace(TPU, on_chip=0))
    none = memory_of(made, dataclasses.replace(TPU, on_chip=(16 << 10) - 1))
    part = memory_of(made, dataclasses.replace(TPU, on_chip=32 << 10))
    everything = memory_of(made, dataclasses.replace(TPU, on_chip=1 << 30))
    assert none.temporaries == whole.temporaries > part.temporaries >= everything.temporaries == 0
    assert part.on_chip <= 32 << 10


def test_every_equation_that_is_wanted_is_in_a_kernel() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = jax.nn.gelu(x @ w)
        h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
        return (jax.nn.softmax(h @ w.T, -1) ** 2).sum()

    program = simplified(program_of(jax.grad(loss), ones(16, 32), ones(8, 16)))
    for target in (CPU, TPU):
        found = kernels_of(program, target)
        made = {id(eqn) for kernel in found.kernels for eqn in kernel.piece.equations}
        names = {var for eqn in program.equations for var in eqn.outvars if var in found.names}
        assert all(id(eqn) in made or eqn.outvars[0] in names for eqn in program.equations)
        # They can run in that order, and give the result.
        rng = np.random.default_rng(0)
        values = [jnp.asarray(rng.random(v.aval.shape), jnp.float32) for v in program.inputs]
        held: dict[Var, Any] = dict(zip(program.inputs, values, strict=True)) | program.constants
        shapes = {v: v.aval.shape for eqn in program.equations for v in eqn.outvars}
        for kernel in found.kernels:
            operands = []
            for var in kernel.piece.reads:
                value = held[found.memory_of(var)]
                moved = value.T if value.shape != var.aval.shape and value.T.shape == var.aval.shape else value
                operands.append(moved.reshape(var.aval.shape))
            held.update(zip(kernel.piece.writes, kernel.piece.function(*operands), strict=True))
        (end,) = program.outputs
        assert isinstance(end, Var)
        result = held[found.memory_of(end)]
        result = result.T if result.shape != shapes[end] else result
        np.testing.assert_allclose(result, jax.grad(loss)(*values), rtol=1e-4, atol=1e-5)


def over(function: Any, *args: Any, **axes: int) -> Program:
    traced = jax.make_jaxpr(function, axis_env=list(axes.items()))(*args)
    return simplified(inline(traced.jaxpr, traced.consts))


def test_collectives_that_do_not_wait_for_each_other_are_sent_together() -> None:
    def several(a: Any, b: Any, c: Any) -> Any:
        first, second = lax.psum(a, "x"), lax.psum(b, "x")
        third = lax.psum(first * 2, "x")  # waits for the first
        return first, second, third, lax.psum(c, ("x", "y")), lax.pmax(c, "x")

    program = over(several, ones(4), ones(8), ones(2), x=2, y=2)
    found = [k for k in kernels_of(program, TPU).kernels if k.root.primitive.name in ("psum", "pmax")]
    assert sorted(len(k.piece.equations) for k in found) == [1, 1, 1, 2]
    alone = kernels_of(program, Target(combines=frozenset())).kernels
    assert sum(k.root.primitive.name in ("psum", "pmax") for k in alone) == 5
    small = kernels_of(program, Target(together=40)).kernels  # 16 and 32 bytes are too many together
    assert all(len(k.piece.equations) == 1 for k in small if k.root.primitive.name == "psum")


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=14))
@settings(max_examples=60, deadline=None)
def test_kernels_sent_together_never_wait_in_a_circle(steps: list[tuple[int, bool]]) -> None:
    def chain(x: Any) -> list[Any]:
        values = [x]
        for source, axis in steps:
            values.append(lax.psum(values[source % len(values)] * 1.5, "x" if axis else "y"))
        return values

    program = over(chain, ones(4), x=2, y=2)
    found = kernels_of(program, TPU)
    there = {*program.inputs}
    for kernel in found.kernels:
        assert {found.memory_of(var) for var in kernel.piece.reads} <= there
        there.update(kernel.piece.writes)
    count = sum(kernel.root.primitive.name == "psum" for kernel in found.kernels)
    longest = {program.inputs[0]: (0, 0)}  # how many of either axis follow each other at most
    for eqn in program.equations:
        x, y = longest[eqn.invars[0]]
        own = eqn.params.get("axes")
        longest[eqn.outvars[0]] = (x + (own == ("x",)), y + (own == ("y",)))
    assert count >= max(x + y for x, y in longest.values())


def test_loops_without_what_is_taken_out_give_the_same() -> None:
    """What does not change comes before; sums over devices that are only added up come after: as often as they need."""

    def turns(w: Any, x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            total, turned, h = carry
            whole = lax.all_gather(w, "x", axis=0, tiled=True)  # the same at every turn
            h = jnp.tanh(h @ whole + row)
            return (total + lax.psum(h, "x"), turned + lax.psum(h * 2, "x").T.reshape(2, 16), h), h.sum()

        return lax.scan(body, (jnp.zeros((4, 8)), jnp.zeros((2, 16)), jnp.ones((4, 8))), x)

    plain = over(turns, ones(4, 8), ones(5, 4, 8), x=2)
    (loop,) = (eqn for eqn in plain.equations if eqn.primitive.name == "scan")
    assert names_of(loop) == {"all_gather", "psum"}
    before, after = simplified(before_loops(plain)), simplified(after_loops(plain))
    for program, inside, outside in ((before, {"psum"}, "all_gather"), (after, {"all_gather"}, "psum")):
        count = {"all_gather": 1, "psum": 2}[outside]
        (loop,) = (eqn for eqn in program.equations if eqn.primitive.name == "scan")
        assert names_of(loop) == inside
        assert [eqn.primitive.name for eqn in program.equations].count(outside) == count
    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.random(v.aval.shape), jnp.float32)[None].repeat(2, 0) for v in plain.inputs]
    run = lambda program: jax.vmap(program_piece(program).function, axis_name="x")(*values)  # noqa: E731
    for other in (before, after, after_loops(before)):
        for a, b in zip(run(plain), run(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_on_tpus_only_what_does_not_grow_comes_before_loops() -> None:
    def turns(w: Any, x: Any) -> Any:
        def body(h: Any, row: Any) -> Any:
            pieces = lax.all_to_all(jnp.exp(w), "x", 0, 1, tiled=True)  # as large as what it is made of
            whole = lax.all_gather(w, "x", axis=1, tiled=True)  # twice that
            return jnp.tanh((h @ pieces + whole[:4])[:, :8] + row), h.sum()

        return lax.scan(body, jnp.ones((4, 8)), x)

    plain = over(turns, ones(16, 16), ones(5, 4, 8), x=2)
    made = simplified(before_loops(plain, growing=False))
    (loop,) = (eqn for eqn in made.equations if eqn.primitive.name == "scan")
    assert names_of(loop) == {"all_gather"}
    assert [name for eqn in made.equations if (name := eqn.primitive.name) in ("exp", *KINDS)] == ["exp", "all_to_all"]
    same_on_devices(plain, made)


def test_what_a_loop_is_given_twice_is_one() -> None:
    """Equal rows, and equal values that do not change: what is exchanged of them is exchanged once, as XLA does it."""

    def turns(w: Any, x: Any) -> Any:
        start = lax.axis_index("x")

        def body(h: Any, rows: Any) -> Any:
            one, other = rows
            first = lax.dynamic_slice(jnp.sin(h), (start * 2, 0), (4, 8))
            second = lax.dynamic_slice(jnp.sin(h), (start * 2, 0), (4, 8))
            gathered = lax.all_gather(first, "x", axis=0, tiled=True) * lax.all_gather(second, "x", axis=0, tiled=True)
            rows = lax.all_gather(one, "x", axis=0, tiled=True) + lax.all_gather(other, "x", axis=0, tiled=True)
            return jnp.tanh(h @ w + gathered + rows), h.sum()

        return lax.scan(body, jnp.ones((8, 8)), (x, x))

    given = ones(8, 8), ones(5, 4, 8)
    plain = over(turns, *given, x=2)
    made = compiled_as(plain, CPU)
    (loop,) = (eqn for eqn in made.equations if eqn.primitive.name == "scan")
    (body,) = bodies_of(loop)
    planned = [eqn.primitive.name for eqn in body.equations].count("all_gather")
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    run = jax.shard_map(turns, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    text = jax.jit(run).lower(*given).compile().as_text()
    assert planned == text.count(" all-gather(") == 2
    same_on_devices(plain, made)


def test_parts_of_sums_that_loops_add_up_are_taken_after() -> None:
    """Whole sums, from zero; what a loop begins with otherwise is added then."""

    def turns(x: Any, begin: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            total, other = carry
            first = lax.psum(lax.psum_scatter(row, "x", scatter_dimension=1, tiled=True), "y")
            second = lax.psum_scatter(lax.psum(jnp.sin(row), "y"), "x", scatter_dimension=1, tiled=True)
            return (total + second, other + first), row.sum()

        return lax.scan(body, (jnp.zeros((8, 4)), begin), x)[0]

    plain = over(turns, ones(5, 8, 8), ones(8, 4), x=2, y=2)
    whole = simplified(parts_first(after_loops(plain)))
    (loop,) = (eqn for eqn in whole.equations if eqn.primitive.name == "scan")
    assert names_of(loop) == {"reduce_scatter"}, "parts come first, and the sums of these after the loop"
    same_on_devices(plain, whole, y=2)

    def added(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            part = lax.psum_scatter(row, "x", scatter_dimension=1, tiled=True)
            return (carry[0] + part.T, carry[1] + lax.psum(row[:1], "x").sum(0)), row.sum()

        return lax.scan(body, (jnp.zeros((4, 8)), jnp.zeros(8)), x)[0]

    plain = over(added, ones(5, 8, 8), x=2)
    after = simplified(after_loops(plain))
    (loop,) = (eqn for eqn in after.equations if eqn.primitive.name == "scan")
    assert not names_of(loop), "also where dimensions of one element are summed"
    shapes = [eqn.invars[0].aval.shape for eqn in after.equations if eqn.primitive.name == "reduce_scatter"]
    assert shapes == [(8, 8)], "the whole, turned"
    same_on_devices(plain, after)


def same_on_devices(plain: Program, other: Program, **more: int) -> None:
    """Two programs give the same on devices along an axis of two, and on as many for each of others."""
    rng = np.random.default_rng(0)
    count = 2 * math.prod(more.values())
    values = [jnp.asarray(rng.random((count, *v.aval.shape)), jnp.float32) for v in plain.inputs]

    def run(program: Program) -> Any:
        function = jax.vmap(program_piece(program).function, axis_name="x")
        several = [v.reshape(2, count // 2, *v.shape[1:]) for v in values] if more else values
        for name in more:
            function = jax.vmap(function, in_axes=1, axis_name=name)
        return function(*several)

    for a, b in zip(run(plain), run(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_sums_from_zero_are_done_once() -> None:
    made = added_before(over(lambda a, b: 0 + lax.psum(a, "x") + lax.psum(b, "x"), 1.0, 2.0, x=2))
    assert [eqn.primitive.name for eqn in made.equations] == ["add", "psum"]


def test_equal_exchanges_in_other_shapes_are_made_once() -> None:
    def twice(x: Any) -> Any:
        a = lax.all_to_all(x, "x", 0, 1, tiled=True)
        return a * 2, lax.all_to_all(x[:, None], "x", 0, 2, tiled=True) + 1

    plain = compiled_as(over(twice, ones(4, 8), x=2), TPU)
    assert [eqn.primitive.name for eqn in plain.equations].count("all_to_all") == 1
    values = jnp.arange(64.0).reshape(2, 4, 8)
    for a, b in zip(
        jax.vmap(twice, axis_name="x")(values),
        jax.vmap(program_piece(plain).function, axis_name="x")(values),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_what_loops_stack_for_products_is_in_memory_in_half_of_its_bytes() -> None:
    """Hidden states that later loops and products multiply, and that the loop itself carries on to its product."""

    def layers(w: Any, v: Any, x: Any) -> Any:
        def cell(carry: Any, row: Any) -> Any:
            h, c = carry
            c = jnp.tanh(h @ w + row) + c
            h = lax.all_gather(jnp.tanh(c[:, :32]), "x", axis=1, tiled=True)
            return (h, c), (h, c)

        zeros = jnp.zeros((16, 64))
        _, (hidden, cells) = lax.scan(cell, (zeros, zeros), x)
        _, again = lax.scan(lambda total, h: (total + h @ v, total.sum()), jnp.zeros((16, 64)), hidden)
        return hidden @ v, cells.sum(), again

    program = over(layers, ones(64, 64), ones(64, 64), ones(8, 16, 64), x=2)
    found = kernels_of(program, TPU)
    (loop,) = (kernel for kernel in found.kernels if len(kernel.root.outvars) == 4)
    hidden, cells = loop.root.outvars[2:]
    assert 2 * found.nbytes(hidden) == found.nbytes(cells) >= 8 * 16 * 64 * 4
    (body,) = bodies_of(loop.root)
    inner = kernels_of(body, TPU, rounded_ends(loop.root, body, found))
    (sent,) = (kernel for kernel in inner.kernels if kernel.root.primitive.name == "all_gather")
    assert sent.piece.narrow == {*sent.piece.reads, *sent.piece.writes}
    read = over(lambda *a: (*layers(*a), layers(*a)[0]), ones(64, 64), ones(64, 64), ones(8, 16, 64), x=2)
    assert kernels_of(read, TPU).narrow, "the same with more results"
    plain = kernels_of(program, CPU)
    assert not plain.narrow


def test_sums_that_a_loop_reads_stay_inside() -> None:
    def turns(x: Any) -> Any:
        def body(total: Any, row: Any) -> Any:
            summed = lax.psum(row, "x")
            return total + summed, summed * 2  # read by another

        return lax.scan(body, jnp.zeros(8), x)

    plain = over(turns, ones(5, 8), x=2)
    (loop,) = (eqn for eqn in after_loops(plain).equations if eqn.primitive.name == "scan")
    assert names_of(loop) == {"psum"}


@given(st.lists(st.tuples(st.sampled_from("pss"), st.booleans()), min_size=2, max_size=5), st.randoms())
@settings(max_examples=25, deadline=None)
def test_sums_that_are_added_are_done_once(terms: list[tuple[str, bool]], order: Any) -> None:
    """Whole sums and parts of them, of which some are read by others too; the axes are added in any order."""

    def total(*values: Any) -> Any:
        found, also = [], []
        for (kind, shared), value in zip(terms, values, strict=True):
            each = lax.psum(value, "x")[:2] if kind == "p" else lax.psum_scatter(value, "x", tiled=True)
            found.append(each)
            also += [each * 2] * shared
        while len(found) > 1:
            k = order.randrange(len(found) - 1)
            found[k : k + 2] = [found[k] + found[k + 1]]
        return found[0], also

    plain = over(total, *[ones(4)] * len(terms), x=2)
    fewer = added_before(plain)
    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.random((2, 4)), jnp.float32) for _ in terms]
    run = lambda program: jax.vmap(program_piece(program).function, axis_name="x")(*values)  # noqa: E731
    for a, b in zip(run(plain), run(fewer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    scatters = lambda program: [e.primitive.name for e in program.equations].count("reduce_scatter")  # noqa: E731
    assert scatters(plain) - scatters(fewer) <= max(sum(each == ("s", False) for each in terms) - 1, 0)
    if set(terms) == {("s", False)}:
        assert scatters(fewer) == 1


@pytest.mark.parametrize(("other", "sums"), [(0, 1), (1, 2)])
def test_sums_that_are_cut_alike_are_added_before(other: int, sums: int) -> None:
    def total(a: Any, b: Any, at: Any) -> Any:
        def part(value: Any, at: Any) -> Any:
            return lax.dynamic_slice(lax.psum(value, "x").reshape(2, 1, 2), (at, 0, 0), (1, 1, 2)).T

        return part(a, at) + part(b, at + other if other else at)

    plain = over(total, ones(4), ones(4), 0, x=2)
    fewer = added_before(plain)
    values = jnp.arange(8.0).reshape(2, 4), jnp.ones((2, 4)), jnp.zeros(2, jnp.int32)
    run = lambda program: jax.vmap(program_piece(program).function, axis_name="x")(*values)  # noqa: E731
    np.testing.assert_allclose(run(plain)[0], run(fewer)[0], rtol=1e-6)
    assert [e.primitive.name.startswith("psum") for e in fewer.equations].count(True) == sums


def test_sums_over_several_axes_are_added_before_both() -> None:
    def total(a: Any, b: Any) -> Any:
        first, second = (lax.psum_scatter(lax.psum_scatter(v, "x", tiled=True), "y", tiled=True) for v in (a, b))
        return first + second

    def different(a: Any, b: Any) -> Any:
        return lax.psum(a, "x") + lax.psum(b, "y")

    for function, count in ((total, 2), (different, 2)):
        names = [e.primitive.name for e in added_before(over(function, ones(8), ones(8), x=2, y=2)).equations]
        assert sum(name in ("psum", "reduce_scatter") for name in names) == count, function


def test_what_is_turned_back_is_the_same() -> None:
    def turned(x: Any, order: tuple[int, ...]) -> Any:
        return jnp.transpose(jnp.transpose(x, (1, 2, 0)), order) * 2

    x = jnp.arange(24.0).reshape(2, 3, 4)
    for order, left in (((2, 0, 1), 0), ((1, 2, 0), 2)):
        program = simplified(program_of(lambda x, order=order: turned(x, order), x))
        assert [e.primitive.name for e in program.equations].count("transpose") == left
        np.testing.assert_array_equal(program_piece(program).function(x)[0], turned(x, order))


def test_what_only_products_read_is_in_memory_in_half_of_its_bytes() -> None:
    """The kernel that reads it computes the same up to bfloat16, of half of the bytes."""
    a, b, c = (jnp.asarray(np.random.default_rng(k).random((16, 16)), jnp.float32) for k in range(3))
    writes, reads = kernels_of(program_of(lambda a, b, c: jnp.dot(jnp.dot(a, b), c).sum(0), a, b, c), TPU).kernels[:2]
    (between,) = writes.piece.writes
    assert writes.piece.narrow == {between} and between in reads.piece.narrow
    (made,) = writes.piece.function(a, b)
    assert made.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(made, np.float32), np.asarray(a) @ np.asarray(b), rtol=1e-2)
    values = [made if var is between else c for var in reads.piece.reads]
    assert [v.dtype for v in reads.piece.shapes] == [v.dtype for v in values]
    expected = np.asarray(a) @ np.asarray(b) @ np.asarray(c)
    (found,) = reads.piece.function(*values)
    np.testing.assert_allclose(found, expected if found.ndim == 2 else expected.sum(0), rtol=2e-2)
    size = 16 * 16 * 4
    assert writes.piece.cost.written == size // 2 and reads.piece.cost.read == size // 2 + size
    whole = dataclasses.replace(writes.piece, narrow=frozenset())
    assert whole.cost.written == size and whole.key != writes.piece.key


def test_what_only_products_read_is_sent_in_half_of_its_bytes() -> None:
    """On TPUs, in the default precision: once, however many read it, and whatever part of it they read."""
    machine = Machine.tpu("v5e:2x2")

    def sent(function: Any, platform: str = "tpu") -> dict[str, int]:
        device = DeviceProgram(over(function, ones(64, 64), ones(16, 64), x=4), {"x": 4})
        return program_cost(device, machine, machine.mesh({"x": 4}), platform=platform).bytes

    whole = 64 * 64 * 4

    def gathered(w: Any) -> Any:
        return lax.all_gather(w, "x", axis=0, tiled=True)

    def twice(x: Any, w: Any) -> Any:
        return x @ gathered(w), x @ gathered(w).T

    def part(x: Any, w: Any) -> Any:
        return x[:32] @ lax.dynamic_slice(gathered(w), (0, lax.axis_index("x") * 32), (64, 32))

    def also(x: Any, w: Any) -> Any:
        return x @ gathered(w), gathered(w) * 2

    assert sent(twice) == sent(part) == {"all-gather": whole // 2}
    assert sent(also) == sent(twice, "cpu") == {"all-gather": whole}


def names_of(loop: Any) -> set[str]:
    """The collectives in a loop's body."""
    (body,) = bodies_of(loop)
    return {eqn.primitive.name for eqn in body.equations if eqn.primitive.name in KINDS}


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
    assert {t.kind: (t.bytes, t.sent) for t in found} == {
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
    assert gather.seconds(machine, mesh) == pytest.approx(7 * latency + 7 / 8 * n / bandwidth)
    reduce = Transfer("all-reduce", ("x",), n, 8)
    assert reduce.seconds(machine, mesh) == pytest.approx(14 * latency + 14 / 8 * n / bandwidth)
    shift = Transfer("permute", ("x",), n, 8, tuple((i, i + 1) for i in range(7)))
    assert shift.seconds(machine, mesh) == pytest.approx(latency + n / bandwidth)


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
    local = jax.ShapeDtypeStruct(start.local(shape, axes), jnp.float32)
    program = over(lambda a: convert(a, start, end, shape, axes), local, **axes)
    sent = [transfer for eqn in program.equations if (transfer := transfer_of(eqn, axes)) is not None]
    assert list(transfers_of_route(route(start, end, shape, axes, "float32"), 4, axes)) == sent


# Memory


def naive_peak(buffers: Buffers, order: Sequence[int]) -> int:
    """For each kernel in order, whatever has been written and is still to be read, counted from scratch."""
    most = 0
    for now in range(len(order)):
        held = 0
        for earlier in range(now + 1):
            for var, need in buffers.written[order[earlier]]:
                later = any(var in buffers.read[order[t]] for t in range(now, len(order)))
                if later or earlier == now or var in buffers.kept:
                    held += need
        most = max(most, held + buffers.inside[order[now]])
    return most


@st.composite
def graphs(draw: st.DrawFn, most: int = 6) -> Buffers:
    n = draw(st.integers(1, most))
    made = [Var(jax.core.ShapedArray((), jnp.float32)) for _ in range(n)]
    sizes = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    after = [frozenset(draw(st.sets(st.integers(0, k - 1), max_size=3)) if k else ()) for k in range(n)]
    return Buffers(
        written=tuple(((made[k], sizes[k]),) for k in range(n)),
        read=tuple(frozenset(made[i] for i in after[k]) for k in range(n)),
        inside=tuple(draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))),
        over=((),) * n,
        kept=frozenset(made[i] for i in draw(st.sets(st.integers(0, n - 1)))),
        after=tuple(after),
        of=tuple(range(n)),
    )


def orders(buffers: Buffers) -> list[tuple[int, ...]]:
    """All orders in which kernels can run."""
    n = len(buffers.after)

    def fits(order: tuple[int, ...]) -> bool:
        return all(buffers.after[k] <= {*order[:t]} for t, k in enumerate(order))

    return list(filter(fits, itertools.permutations(range(n))))


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_the_peak_of_an_order_is_what_counting_gives(buffers: Buffers) -> None:
    every = {order: naive_peak(buffers, order) for order in orders(buffers)}
    for order, peak in list(every.items())[:20]:
        assert buffers.peak(order) == peak
    for order in (buffers.depth_first(), buffers.freeing(), buffers.breadth_first()):
        assert tuple(order) in every
    assert min(every.values()) <= buffers.peak(buffers.under(Target())) <= every[tuple(range(len(buffers.after)))]


@given(graphs(5), st.data())
@settings(max_examples=60, deadline=None)
def test_writing_in_place_takes_no_more(buffers: Buffers, data: st.DataObject) -> None:
    import dataclasses

    sizes = {var: need for written in buffers.written for var, need in written}
    over_ = tuple(
        tuple((w[0][0], r) for r in reads if sizes[r] == w[0][1] and data.draw(st.booleans()))
        for w, reads in zip(buffers.written, buffers.read, strict=True)
    )
    changed = dataclasses.replace(buffers, over=over_)
    for order in orders(buffers)[:10]:
        assert changed.peak(order) <= buffers.peak(order)


def variables(count: int) -> list[Var]:
    return [*jax.make_jaxpr(lambda *values: values)(*[1.0] * count).jaxpr.invars]


def bare(written: Sequence[Sequence[tuple[Var, int]]], after: Sequence[set[int]], **more: Any) -> Buffers:
    """Kernels that write and wait, and read what those write for which they wait."""
    read = [frozenset(var for n in needs for var, _ in written[n]) for needs in after]
    none = tuple(() for _ in written)
    several = tuple(map(tuple, written)), tuple(read), (0,) * len(read), none
    return Buffers(*several, frozenset(), tuple(map(frozenset, after)), tuple(range(len(read))), **more)


def test_transfers_run_beside_computation_one_at_a_time() -> None:
    """By hand: 0 computes; 1 and 2 transfer what is there from the start, 3 what 0 made; 4, 5, 6 read them."""
    var = variables(8)
    after = [set(), set(), set(), {0}, {3, 1}, {4, 2}, {5}]
    buffers = bare([[(var[k], 1)] for k in range(7)], after)
    seconds = [3.0, 2.0, 2.0, 1.0, 1.5, 0.5, 1.0]
    order, begun = Backwards(buffers, range(7), seconds, {1, 2, 3}).ordered()
    # From the end: 6, 5; transfer 2 ends before 5, and 4 is put beside it; nothing else is left, for 3 and 1 wait for
    # the link. Of these 1, which takes longer, ends next, beside nothing, then 3, and then 0 is left.
    assert order == [0, 3, 1, 4, 2, 5, 6]
    place = {k: i for i, k in enumerate(order)}
    assert all(place[n] < place[k] for k, needs in enumerate(after) for n in needs)
    assert begun == {2: place[4]}


def test_what_waits_for_transfers_and_lets_others_run_comes_late() -> None:
    """By hand: 0 and 1 are transfers, 2 waits for the longer; 4 lets 5 run; 6 and 7 need 9, which is large."""
    var = variables(10)
    after = [set(), set(), {0}, {1}, {1, 5}, set(), {1, 9}, {1, 9}, {2, 3, 4, 6, 7}, set()]
    buffers = bare([[(var[k], 5 if k == 9 else 1)] for k in range(10)], after)
    seconds = [9.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    order = [0, 1, 9, 2, 3, 4, 5, 6, 7, 8]
    found = [k for k in Backwards(buffers, order, seconds, {0, 1}).ordered()[0] if k in (2, 3, 4, 6, 7, 8)]
    # From the end: 8, then 2. Of 3, 4, 6 and 7, which are alike in what comes before them, first what lets another
    # run; then what frees more than it needs; then, of 6 and 7, the later in the order given.
    assert found == [6, 7, 3, 4, 2, 8]


def test_beside_a_transfer_is_put_what_takes_as_long_as_is_left() -> None:
    """By hand: 0 is a transfer of five seconds; of 2, 3 and 4, which run beside it, 4 takes four, and 2 then one."""
    var = variables(6)
    buffers = bare([[(var[k], 1)] for k in range(6)], [set(), {0}, set(), set(), set(), {1, 2, 3, 4}])
    order, begun = Backwards(buffers, range(6), [5.0, 0.5, 1.0, 3.0, 4.0, 1.0], {0}).ordered()
    assert order == [3, 2, 4, 0, 1, 5] and begun == {0: 0}  # nothing comes before it: it begins first of all
    chained = Backwards(buffers, range(6), [5.0, 0.5, 1.0, 3.0, 4.0, 1.0], {0}, chained={2: 6.0}).ordered()[0]
    assert chained.index(2) > chained.index(1)  # what other exchanges come before counts as what transfers do


@pytest.mark.parametrize(
    ("alone", "another", "place"),
    [({2: 0.0}, True, 1), ({2: 1.0}, True, 2), ({}, True, 2), ({}, False, 0)],
    ids=["an exchange hides nothing", "a sum hides it", "another waits", "none does"],
)
def test_a_transfer_runs_on_until_another_waits(alone: dict[int, float], another: bool, place: int) -> None:
    """By hand: 4 reads 2, which waits for 1, and the transfer 0, which takes as long as either; 3 may be another."""
    var = variables(5)
    buffers = bare([[(var[k], 1)] for k in range(5)], [set(), set(), {1}, set(), {0, 2, 3}])
    transfers = {0, 3} if another else {0}
    _, begun = Backwards(buffers, range(5), [1.0, 1.0, 1.0, 0.5, 1.0], transfers, alone).ordered()
    assert begun[0] == place


def test_orders_are_compared_with_room_for_results() -> None:
    """By hand: what 1 brings where an argument is counts until the end, when orders are compared, and not otherwise."""
    import dataclasses

    var = variables(3)
    buffers = bare([[(var[0], 3)], [], [(var[2], 2)]], [set(), {0}, {0}])
    there = dataclasses.replace(buffers, results=((), ((var[1], 3),), ()))
    assert [buffers.peak(range(3)), there.peak(range(3)), there.before_places().peak(range(3))] == [5, 5, 8]


def test_who_is_where_an_argument_was_is_there_all_the_time() -> None:
    a, b, c, d = variables(4)
    buffers = bare([[(a, 4)], [(b, 3)], [(c, 4)], [(d, 2)], []], [set(), {0}, set(), {1, 2}, {3}])
    moments = [(k, dict(sizes)) for k, _, sizes in buffers.held(range(5))]
    assert [set(sizes) for _, sizes in moments] == [{a}, {a, b}, {b, c}, {b, c, d}, {d}]
    nowhere = [frozenset[Var]()] * 5
    for vacant, expected in [
        (Vacant(4, frozenset({0})), {c}),  # since a is held while kernel 0 reads the argument; c is the largest
        (Vacant(3, frozenset({0})), {b}),  # the largest that fits, and d while that is held no more
        (Vacant(2, frozenset({0}), 3), set()),  # d is held until another has to be there
        (Vacant(4, frozenset()), {a, c}),  # one after the other
    ]:
        of = dataclasses.replace(buffers, vacant=(vacant,))
        assert of.lodged(moments, nowhere) == expected, vacant
    copies = dataclasses.replace(buffers, early=(a, b))  # a is copied, then b
    for copy, expected in ((a, {b}), (b, {d})):
        of = dataclasses.replace(copies, vacant=(Vacant(3, frozenset(), copy=copy),))
        assert of.lodged(moments, nowhere) == expected, "nothing is where it has not been copied from yet"


def device_of(function: Any, *args: Any, donated: Sequence[int] = ()) -> DeviceProgram:
    return DeviceProgram(simplified(program_of(function, *args)), {}, frozenset(donated))


N = 16 * 16 * 4


def test_memory_by_hand() -> None:
    x = ones(16, 16)
    assert memory_of(device_of(lambda x: jnp.tanh(x) * 2, x), CPU).temporaries == 0, "fused into the result"
    found = memory_of(device_of(lambda x: ((x @ x) @ x) @ x, x), CPU)
    # Of the two products on the way the first may be where the result will be.
    assert (found.arguments, found.outputs, found.temporaries, found.total) == (N, N, N, 3 * N)
    # tanh writes over the product that nobody else reads
    assert memory_of(device_of(lambda x: jnp.tanh(x @ x) @ x, x), CPU).temporaries == N
    # kept for later: both products of the forward pass
    both = memory_of(device_of(lambda x: (lambda y: (y @ x) @ y)(x @ x), x), CPU)
    assert both.temporaries == 2 * N
    scalar = memory_of(device_of(lambda x: (((x @ x) @ x) @ x).sum(), x), CPU)
    assert scalar.temporaries == 2 * N
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

    def numbers(x: Any) -> Any:
        return (lax.scan(lambda c, _: (jnp.tanh(c), 1.0), x @ x, None, length=5)[1] @ x[:5]).sum()

    assert memory_of(device_of(numbers, x), CPU).temporaries < 2 * N, "and the numbers"
    branches = device_of(lambda i, x: lax.cond(i, lambda x: (x @ x) @ x, lambda x: x, x), ones(dtype=jnp.bool_), x)
    assert memory_of(branches, CPU).temporaries == N + 64, "and the number of the branch, aligned"


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
    assert cost.total == cost.compute + cost.exchange
    assert cost.compute == pytest.approx(sum(cost.sources.values()))
    assert not cost.unknown and not cost.open_loops
    # Everything waits for the one exchange or is waited for by it: nothing is gained beside it but what it can hide.
    assert max(cost.compute, cost.exchange) - 1e-9 <= cost.seconds <= cost.total + 1e-9
    alone = program_cost(flow, machine, machine.mesh(axes), donated=(0, 1), platform="gpu", overlap=False)
    assert alone.seconds == pytest.approx(cost.total, abs=1e-10)


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


def test_equal_exchanges_are_made_once() -> None:
    program = over(lambda a: (lax.psum(a.reshape(4), "x"), lax.psum(a.reshape(2, 2), "x") * 2), ones(2, 2), x=2)
    assert sum(eqn.primitive.name == "psum" for eqn in program.equations) == 1


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
    assert all(isinstance(piece_of([eqn]).cost, Cost) for eqn in device.program.equations)
