"""Programs split by hand, compiled for a TPU that is not there: which collectives are in them.

Knows the programs, how their arguments lie on a mesh of ``data x model``, and the TPU compiler. `python -m
tests.thorough.tpu_programs` prints a JSON line for each. Must not know what is expected.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import hlo, tpu
from tests.spmd.reference import layouts_of
from vnode.analysis.program import inline
from vnode.spmd import factor_blocks
from vnode.spmd.layout import Layout, from_spec
from vnode.spmd.resharding_collectives import convert
from vnode.spmd.sharded_program import as_spec_layout, flow_over_mesh, long_axes, spec_of
from vnode.spmd.sharding_flow import follow
from vnode.spmd.uneven_blocks import Share

BATCH, LENGTH, WIDTH, HIDDEN, HEADS, IMAGE, CHANNELS = 16, 256, 512, 2048, 8, 64, 128


@dataclasses.dataclass(frozen=True)
class Split:
    """A function, the shapes of its arguments, and how each lies."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[PartitionSpec, ...]


def p(*entries: Any) -> PartitionSpec:
    return PartitionSpec(*entries)


def perceptron(w: Any, v: Any, x: Any) -> Any:
    return jnp.square(jnp.tanh(x @ w) @ v).sum()


def attention(q: Any, k: Any, v: Any, o: Any, x: Any) -> Any:
    queries, keys, values = (jnp.einsum("bsd,dhk->bhsk", x, w) for w in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bhsk,bhtk->bhst", queries, keys))
    mixed = jnp.einsum("bhst,bhtk->bshk", weights, values)
    return jnp.square(jnp.einsum("bshk,hkd->bsd", mixed, o)).sum()


def convolution(kernel: Any, x: Any) -> Any:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def normalization(scale: Any, bias: Any, x: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return jnp.square(centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6) * scale + bias).sum()


HEAD = WIDTH // HEADS
SPLITS = {
    "perceptron": Split(
        jax.value_and_grad(perceptron, (0, 1)),
        ((WIDTH, HIDDEN), (HIDDEN, WIDTH), (BATCH * LENGTH, WIDTH)),
        (p(None, "model"), p("model"), p("data")),
    ),
    "attention": Split(
        jax.value_and_grad(attention, (0, 1, 2, 3)),
        (*[(WIDTH, HEADS, HEAD)] * 3, (HEADS, HEAD, WIDTH), (BATCH, LENGTH, WIDTH)),
        (*[p(None, "model")] * 3, p("model"), p("data")),
    ),
    "convolution": Split(
        convolution,
        ((3, 3, CHANNELS, CHANNELS), (BATCH, IMAGE, IMAGE, CHANNELS)),
        (p(), p("data", "model")),
    ),
    "convolution's gradient": Split(
        jax.grad(lambda kernel, x: jnp.square(convolution(kernel, x)).sum()),
        ((3, 3, CHANNELS, CHANNELS), (BATCH, IMAGE, IMAGE, CHANNELS)),
        (p(), p("data", "model")),
    ),
    "normalization": Split(
        jax.value_and_grad(normalization, (0, 1)),
        ((WIDTH,), (WIDTH,), (BATCH, LENGTH, WIDTH)),
        (p(), p(), p("data", "model")),
    ),
}


def compiled(split: Split, mesh: Mesh) -> list[hlo.Collective]:
    """The collectives of a program as the TPU compiler makes it."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in split.shapes]
    closed = jax.make_jaxpr(split.function)(*shapes)
    program, axes = inline(closed.jaxpr, closed.consts), long_axes(mesh)
    layouts = [from_spec(spec, x.shape, axes) for spec, x in zip(split.specs, shapes, strict=True)]
    given = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for spec, x in zip(split.specs, shapes, strict=True)
    ]
    text = jax.jit(flow_over_mesh(follow(program, layouts, axes), mesh)).lower(*given).compile().as_text()
    return hlo.collectives(hlo.parse(text))


def in_blocks(counts: tuple[int, ...], mesh: Mesh) -> dict[str, Any]:
    """The perceptron's gradients with hidden units in blocks of 256, in different numbers along the model axis."""
    hidden, axes = 256 * sum(counts), long_axes(mesh)
    split = SPLITS["perceptron"]
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((WIDTH, hidden), (hidden, WIDTH), split.shapes[2])]
    closed = jax.make_jaxpr(split.function)(*arguments)
    made = factor_blocks.in_blocks(inline(closed.jaxpr, closed.consts), Share(("model",), counts), {0: 1})
    flow = follow(made.program, layouts_of(made, axes, {2: split.specs[2]}), axes)
    given = [
        jax.ShapeDtypeStruct(
            var.aval.shape, var.aval.dtype, sharding=NamedSharding(mesh, spec_of(as_spec_layout(layout, axes)))
        )
        for var, layout in zip(made.program.inputs, flow.inputs, strict=True)
    ]
    module = hlo.parse(jax.jit(flow_over_mesh(flow, mesh)).lower(*given).compile().as_text())
    return {
        "collectives": [dataclasses.asdict(c) for c in hlo.collectives(module)],
        "turns": hlo.trip_counts(module),
        "cycles of a block": hlo.cycles(module, {}, in_loops=True),
    }


AXES = {"data": 2, "model": 4}
ALONG = tuple(AXES)
TEXTS = 256, 1024, 2 * WIDTH
EXAMPLES, POSITIONS = (from_spec(spec, TEXTS, AXES) for spec in (p(ALONG), p(None, ALONG)))


def by_us(x: Any, start: Layout, end: Layout) -> Any:
    return convert(x, start, end, TEXTS, AXES)


def by_hand(x: Any, start: Layout, end: Layout) -> Any:
    split, joined = (1, 0) if start == EXAMPLES else (0, 1)
    return lax.all_to_all(x, ALONG, split, joined, tiled=True)


def to_and_fro(exchange: Callable[[Any, Layout, Layout], Any], mesh: Mesh) -> int:
    """Bytes of temporary memory of the gradient of two layers that divide positions, then examples, and so on."""

    def loss(weights: Any, x: Any) -> Any:
        x = exchange(x, EXAMPLES, POSITIONS)
        for w, v in weights:
            centered = x - x.mean(-1, keepdims=True)
            normal = centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)
            hidden = jnp.tanh(exchange(normal @ w, POSITIONS, EXAMPLES) @ v)
            x += exchange(hidden, EXAMPLES, POSITIONS)
        return jnp.square(x).sum()

    manual = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(p(), p(ALONG)), out_specs=p(), check_vma=False)
    weight, x = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((2 * WIDTH, 2 * WIDTH), p()), (TEXTS, p(ALONG)))
    )
    return jax.jit(manual).lower([(weight, weight)] * 2, x).compile().memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    mesh = Mesh(np.array(tpu.topology("v5e:2x4")).reshape(*AXES.values()), tuple(AXES))
    for counts in ((5, 3, 2, 2), (11, 3, 1, 1)):
        print(json.dumps({"name": f"blocks {counts}", **in_blocks(counts, mesh)}))
    for name, exchange in (("by us", by_us), ("by hand", by_hand)):
        print(json.dumps({"name": f"to and fro {name}", "temporary": to_and_fro(exchange, mesh)}))
    for name, split in SPLITS.items():
        print(json.dumps({"name": name, "collectives": [dataclasses.asdict(c) for c in compiled(split, mesh)]}))
