"""Programs for a v5e that hold arrays at once: memory by its compiler, and as predicted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import tpu
from vnode.analysis.program import inline
from vnode.partition.cost import Target, device_program
from vnode.partition.cost.kernels import kernels_of
from vnode.partition.cost.shapes import Shape
from vnode.partition.cost.tiles import in_tiles
from vnode.spmd.flow import follow
from vnode.spmd.layout import from_spec
from vnode.spmd.program import over_mesh

axes = {"x": 8}
mesh = Mesh(np.array(tpu.topology("v5e:2x4")), ("x",))
found = {}


def given(shapes, specs):
    return [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))
        for s, spec in zip(shapes, specs, strict=True)
    ]


def float32(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


# The room for arguments, one by one.
shapes = float32((), (64,), (1000,), (1500,), (4096, 1000), (3, 5), (11, 11, 3, 64), (5, 5, 64, 192), (16, 28, 28, 3))
compiled = jax.jit(lambda *a: sum(x.sum() for x in a), keep_unused=True).lower(*given(shapes, [P()] * 9)).compile()
found["room"] = [compiled.memory_analysis().argument_size_in_bytes, sum(4 * in_tiles(s.shape) for s in shapes)]


# Sums over devices that are sent together.
def sums(x):
    return [lax.psum(jnp.tanh(x * k), "x") for k in range(1, 41)]


one = float32((8192, 1024))
split = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=P("x"), out_specs=[P()] * 40))
text = split.lower(*given(one, [P("x")])).compile().as_text()
lines = [line for line in text.splitlines() if " all-reduce(" in line]
found["compiled sums"] = sorted(line.split(" all-reduce(")[0].count("f32[1024,1024]") for line in lines)
traced = jax.make_jaxpr(sums, axis_env=[("x", 8)])(*float32((1024, 1024)))
kernels = kernels_of(inline(traced.jaxpr, traced.consts), Target.on("tpu")).kernels
found["planned sums"] = sorted(len(k.piece.writes) for k in kernels if k.shape is Shape.COLLECTIVE)


# Convolutions whose results are cut off at zero: these are kept in bfloat16, and where they were above it.
def step(kernels, bias, pictures):
    def convolved(x, k):
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(kernels, bias):
        return jnp.mean(convolved(jax.nn.relu(convolved(pictures, kernels[0]) + bias), kernels[1]) ** 2)

    value, (grads, moved) = jax.value_and_grad(loss, (0, 1))(kernels, bias)
    return [a - b for a, b in zip(kernels, grads, strict=False)], bias - moved, value


shapes = float32((3, 3, 128, 256), (3, 3, 256, 64), (256,), (2048, 28, 28, 128))
specs = [P(), P(), P(), P("x")]
traced = jax.make_jaxpr(lambda a, b, c, d: jax.tree.leaves(step([a, b], c, d)))(*shapes)
program = inline(traced.jaxpr, traced.consts)
layouts = [from_spec(s, v.aval.shape, axes) for s, v in zip(specs, program.inputs, strict=False)]
flow = follow(program, layouts, axes, outputs=[*layouts[:3], None])
compiled = jax.jit(over_mesh(flow, mesh), donate_argnums=(0, 1, 2)).lower(*given(shapes, specs)).compile()
lines = compiled.as_text().split("ENTRY ")[1].splitlines()
typed = [line.split(" = ")[1].split(")" if " = (" in line else " ")[0] for line in lines if " = " in line]
names = {"bf16": jnp.bfloat16, "pred": np.bool_, "f32": np.float32}
found["compiled arrays"] = {name: sum(f"{name}[256,28,28,256]" in each for each in typed) > 0 for name in names}
device = device_program(flow, axes, donated=(0, 1, 2))
made = kernels_of(device.program, Target.on("tpu"))
whole = [(v, v in made.narrow) for k in made.kernels for v in k.piece.writes if v.aval.shape == (256, 28, 28, 256)]
kinds = {jnp.dtype("bfloat16" if half else v.aval.dtype) for v, half in whole}
found["planned arrays"] = {name: jnp.dtype(kind) in kinds for name, kind in names.items()}
print(json.dumps(found))
