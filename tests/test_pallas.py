"""Steps with Pallas kernels against the same steps as written: interpreted on CPUs, and compiled ahead for TPUs.

Knows kernels that split in many ways. `tests/operators/test_pallas.py` has the parts of single calls.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vnode
from tests import pallas_steps as steps
from tests.ahead import printed, program
from vnode.analysis.fingerprint import fingerprint
from vnode.errors import UnsupportedPrimitiveError


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.RandomState(seed).randn(*shape) * 0.3).astype(np.float32)


def parameters(*sizes: int | None) -> dict[str, np.ndarray]:
    shapes = steps.weights(*sizes)  # type: ignore[arg-type]
    return {name: array(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}


def assert_near(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def assert_same_bits(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.quickly
def test_a_transformer_of_kernels() -> None:
    """In a scan over layers, with derivatives, the last node padded; 18 rows of a node in blocks of eight."""
    step = steps.transformer(steps.attend, 8, True)
    w, x = parameters(4, 2, 4, 2), array(7, 6, 4)
    virtual = vnode.virtualize(step, virtual_nodes=3).on(jax.devices()[:2])
    report = virtual.explain(w, x)
    assert len(report.passes) == 1 and not report.couplings and not report.gathered
    assert_near(virtual(w, x), jax.jit(step)(w, x))


def over_heads(step: Callable[..., Any], w: dict[str, Any], x: Any) -> tuple[Any, str]:
    """What a step gives whose parameters are divided by heads, and its program."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = {name: PartitionSpec(*(None,) * (len(v.shape) - 3 + (name != "o")), "model") for name, v in w.items()}
    placed = {name: jax.device_put(v, NamedSharding(mesh, spec[name])) for name, v in w.items()}
    virtual = vnode.virtualize(step, virtual_nodes=4, placement=vnode.Placement(4, mesh=mesh, axis="data"))
    return virtual(placed, x), virtual.lower(placed, x).as_text()


@pytest.mark.quickly
def test_heads_over_a_mesh_axis() -> None:
    step = steps.transformer(steps.attend, 8, True)
    w, x = parameters(4, 2, 5, 2), array(8, 6, 4)
    made, text = over_heads(step, w, x)
    assert_near(made, jax.jit(step)(w, x))
    assert "tensor<2x1x6x5xf32>" in text and "tensor<2x2x6x5xf32>" not in text  # two examples, one of two heads


def product(x: Any, w: Any, o: Any, total: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        o[...] = total[...].astype(o.dtype)


def multiply(x: Any, w: Any) -> Any:
    """A product of matrices in blocks of two rows, and two of what is summed."""
    return pl.pallas_call(
        product,
        jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype),
        grid=(x.shape[0] // 2, x.shape[1] // 2),
        in_specs=[pl.BlockSpec((2, 2), lambda i, k: (i, k)), pl.BlockSpec((2, w.shape[1]), lambda i, k: (k, 0))],
        out_specs=pl.BlockSpec((2, w.shape[1]), lambda i, k: (i, 0)),
        scratch_shapes=[pltpu.VMEM((2, w.shape[1]), jnp.float32)],
        interpret=True,
    )(x, w)


dense = jax.custom_vjp(multiply)
dense.defvjp(lambda x, w: (multiply(x, w), (x, w)), lambda xw, g: (multiply(g, xw[1].T), multiply(xw[0].T, g)))


@pytest.mark.quickly
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_weights_are_summed_over_nodes(dtype: Any) -> None:
    """By a kernel whose steps add up blocks of examples; the last node has four, two of them padding."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(dense(jnp.tanh(dense(x, w[0])), w[1]).astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)(w)

    w, x = [jnp.asarray(array(4, 4, seed=k), dtype) for k in (1, 2)], jnp.asarray(array(10, 4), dtype)
    virtual = vnode.virtualize(step, virtual_nodes=3)
    report = virtual.explain(w, x)
    assert len(report.passes) == 1 and not report.couplings
    limit = 2e-5 if dtype == jnp.float32 else 2e-2
    for a, b in zip(jax.tree.leaves(virtual(w, x)), jax.tree.leaves(jax.jit(step)(w, x)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=limit, atol=limit / 10)


def scale_forward(x: Any, s: Any, o: Any) -> None:
    o[...] = x[...] * jax.lax.rsqrt((x[...] ** 2).mean(-1, keepdims=True) + 1e-3) * s[...]


def scale_backward(x: Any, s: Any, g: Any, dx: Any, ds: Any) -> None:
    """The gradient of rows, and, added up over blocks, of what all are scaled by."""

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        ds[...] = jnp.zeros_like(ds)

    r, dy = jax.lax.rsqrt((x[...] ** 2).mean(-1, keepdims=True) + 1e-3), g[...] * s[...]
    dx[...] = r * dy - x[...] * r**3 * (x[...] * dy).mean(-1, keepdims=True)
    ds[...] += (g[...] * x[...] * r).sum(0, keepdims=True)


def in_pairs(kernel: Callable[..., None], shapes: list[Any], *operands: Any) -> Any:
    """A kernel of two rows at a time, beside what all rows have in common."""
    rows, shared = pl.BlockSpec((2, 4), lambda i: (i, 0)), pl.BlockSpec((1, 4), lambda i: (0, 0))
    ins, outs = ([rows if x.shape[0] > 1 else shared for x in each] for each in (operands, shapes))
    grid = (operands[0].shape[0] // 2,)
    return pl.pallas_call(kernel, shapes, grid=grid, in_specs=ins, out_specs=outs, interpret=True)(*operands)


@jax.custom_vjp
def scaled_rows(x: Any, s: Any) -> Any:
    return in_pairs(scale_forward, [jax.ShapeDtypeStruct(x.shape, x.dtype)], x, s)[0]


def scaled_rows_backward(residuals: tuple[Any, Any], g: Any) -> tuple[Any, Any]:
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in residuals]
    return tuple(in_pairs(scale_backward, types, *residuals, g))


scaled_rows.defvjp(lambda x, s: (scaled_rows(x, s), (x, s)), scaled_rows_backward)


@pytest.mark.quickly
def test_gradients_of_rows_and_of_their_scale_by_one_kernel() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda w: jnp.mean((scaled_rows(x @ w[0], w[1]) @ w[0]) ** 2))(w)

    w, x = [array(4, 4), 1 + array(1, 4, seed=1)], array(10, 4, seed=2)
    virtual = vnode.virtualize(step, virtual_nodes=3).on(jax.devices()[:2])
    report = virtual.explain(w, x)
    assert len(report.passes) == 1 and not report.couplings
    assert_near(virtual(w, x), jax.jit(step)(w, x))


def centred(x: Any, o: Any) -> None:
    o[...] = x[...] - x[...].mean(0)


def weighted(x: Any, o: Any) -> None:
    o[...] = x[...] * (1 + pl.program_id(0))


def descended(p: Any, g: Any, o: Any) -> None:
    o[...] = p[...] - 0.1 * g[...]


def descend(p: Any, g: Any) -> Any:
    """An optimizer's kernel, in place."""
    block = pl.BlockSpec((2, 4), lambda i: (i, 0))
    grid, result = (p.shape[0] // 2,), jax.ShapeDtypeStruct(p.shape, p.dtype)
    options: Any = {"input_output_aliases": {0: 0}, "interpret": True}
    return pl.pallas_call(descended, result, grid=grid, in_specs=[block] * 2, out_specs=block, **options)(p, g)


@pytest.mark.quickly
@pytest.mark.parametrize("kernel", [centred, weighted])
def test_kernels_that_need_the_whole_batch(kernel: Callable[..., None]) -> None:
    """Of the whole, and of a place in the batch: collected, run once; what they give is divided again."""
    block = pl.BlockSpec((1, 4), lambda i: (i, 0))
    blocks: Any = {} if kernel is centred else {"grid": (6,), "in_specs": [block], "out_specs": block}

    def step(w: Any, x: Any) -> Any:
        y = x @ w
        z = pl.pallas_call(kernel, jax.ShapeDtypeStruct(y.shape, y.dtype), interpret=True, **blocks)(y)
        return descend(w, z.T @ x), (z**2).mean()

    w, x = array(4, 4), array(6, 4, seed=1)
    want = jax.jit(step)(w, x)
    for count in (1, 2):
        virtual = vnode.virtualize(step, virtual_nodes=3, recompute_budget=1.0).on(jax.devices()[:count])
        assert_near(virtual(w, x), want)
    (coupling, *_) = map(str, virtual.explain(w, x).couplings)
    assert "pallas_call needs the whole batch at once" in coupling
    assert ("along axis 0 of its grid, the kernel uses its program id" in coupling) == (kernel is weighted)


def scaled(n: Any, x: Any, y: Any, o: Any) -> None:
    o[...] = x[...] * n[0] + y[...]


@pytest.mark.quickly
def test_kernels_of_scalars_under_vmap_are_a_loop_over_examples() -> None:
    """`jax.vmap` makes a loop of them that numbers the examples; it takes no pass of its own."""

    def of_one(n: Any, x: Any, y: Any) -> Any:
        block = pl.BlockSpec((2, 4), lambda i, n: (i, 0))
        grid: Any = pltpu.PrefetchScalarGridSpec(1, (2,), [block] * 2, block)
        return pl.pallas_call(scaled, jax.ShapeDtypeStruct(x.shape, x.dtype), grid_spec=grid, interpret=True)(n, x, y)

    def step(w: Any, x: Any) -> Any:
        numbers = jnp.arange(7, dtype=jnp.int32)[:, None]
        y = jax.vmap(of_one, (0, 0, None))(numbers, x[:, :, None] * x[:, None, :], w)
        return w - y.sum(0), (y**2).mean()

    w, x = array(4, 4), array(7, 4, seed=1)
    virtual = vnode.virtualize(step, virtual_nodes=3)
    report = virtual.explain(w, x)
    assert len(report.passes) == 1 and not report.couplings
    assert_near(virtual(w, x), jax.jit(step)(w, x))


def test_kernels_with_effects() -> None:
    """One that says it has side effects is run once, on the whole batch; one interpreted with effects is refused."""
    block = pl.BlockSpec((1, 4), lambda i: (i, 0))

    def step(options: dict[str, Any], w: Any, x: Any) -> Any:
        y = pl.pallas_call(centred, x, grid=(4,), in_specs=[block], out_specs=block, **options)(x)
        return (y @ w).sum()

    def explained(**options: Any) -> str:
        virtual = vnode.virtualize(functools.partial(step, options), virtual_nodes=2)
        return virtual.explain(array(4, 4), array(4, 4))._repr_html_()

    effects: Any = pltpu.CompilerParams(has_side_effects=True)
    assert "the kernel has side effects" in explained(compiler_params=effects)
    with pytest.raises(UnsupportedPrimitiveError, match="InterpretParams"):
        explained(interpret=pltpu.InterpretParams())


def test_index_maps_are_part_of_a_steps_identity() -> None:
    def step(last: int, x: Any) -> Any:
        block = pl.BlockSpec((1, 4), lambda i: (last - i if last else i, 0))
        out = pl.BlockSpec((1, 4), lambda i: (i, 0))
        return pl.pallas_call(centred, x, grid=(6,), in_specs=[block], out_specs=out, interpret=True)(x)

    x = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    forward, backward, again = (fingerprint(functools.partial(step, last), x) for last in (0, 5, 0))
    assert forward == again and forward != backward


# JAX's own kernels ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param("flash", marks=pytest.mark.sweep), "splash"])
def test_attention_as_jax_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, in a scan over layers, forward and backward, with a padded node, over devices and over heads."""
    interpreted = dict(vars(pl)) | {"pallas_call": functools.partial(pl.pallas_call, interpret=True)}
    monkeypatch.setattr(flash_attention, "pl", type("pl", (), {k: staticmethod(v) for k, v in interpreted.items()}))
    attend = steps.flash_attend if name == "flash" else steps.splash_attend(4, 128, interpret=True)
    step = steps.transformer(attend, 512, True)
    w, x = parameters(16, 4, 8, 2), array(7, 128, 16)
    want, made = jax.jit(step)(w, x), []
    for count in (1, 3):
        made.append(vnode.virtualize(step, virtual_nodes=3).on(jax.devices()[:count])(w, x))
        assert_near(made[-1], want)
    assert_same_bits(*made)
    x = array(8, 128, 16)
    made, text = over_heads(step, w, x)
    assert_near(made, jax.jit(step)(w, x))
    assert ("tensor<2x4x128x8xf32>" in text) == (name == "splash")  # whose results have scratch that heads share


@pytest.mark.tpu
@pytest.mark.sampled(0, thorough=2)
@pytest.mark.parametrize("name", ["splash", "heads", "paged", "flash"])
def test_kernels_are_in_the_loop_over_nodes_at_the_nodes_size(name: str) -> None:
    """Compiled by the TPU compiler: in two loops, of the tree and of a run of nodes, with the results of a node."""
    lines = printed(*program("kernels_on_tpus"), name, hasty=True)
    found = [json.loads(line) for line in lines if line.startswith("[")]
    assert found
    examples, heads, rows = (3, 4, 1024) if name == "splash" else (2, 2 if name == "heads" else 4, 512)
    whole = [examples, heads, 256, 128]
    normal = [2, [[rows, 256]]]
    for kernels in found:
        if name == "paged":  # a loop over the examples of a node, too
            assert kernels == [[3, [[1, 8, 1, 128], [1, 8, 1, 1], [1, 8, 1, 1]]]]
            continue
        once = [shapes for loops, shapes in kernels if loops == 0]  # whole, on each device: no compiler divides them
        assert once == ([[[512, 256]]] * 4 if name == "flash" else [])
        attention = [each for each in kernels if each != normal and each[0] > 0]
        assert len(kernels) - len(attention) - len(once) == 1  # the input has no derivative
        assert [loops for loops, _ in attention] == [2] * 3
        forward = 2 if name == "splash" else 3  # with what the backward pass needs; then of queries, of keys and values
        assert sorted(shapes.count(whole) for _, shapes in attention) == sorted([forward, 1, 2])
