"""Pieces and whole programs for a v5e: times and memory by its compiler, and as predicted."""

import dataclasses
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import tpu
from vnode.analysis.program import inline
from vnode.partition import Cache, Compiler, Machine, accept, program_cost
from vnode.partition.cost import DeviceProgram, Target, Windows
from vnode.partition.cost.device import compiled_as
from vnode.partition.cost.pieces import traced_piece
from vnode.partition.machine.table import kind_named
from vnode.spmd.flow import follow
from vnode.spmd.layout import from_spec
from vnode.spmd.program import over_mesh

machine, axes = Machine.tpu("v5e:2x4"), {"data": 2, "model": 4}
kind = machine.kinds[0]
found = {}
with tempfile.TemporaryDirectory() as folder:
    a = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    piece = traced_piece(lambda a, b: a @ b, a, a)
    time = Compiler(Cache(folder)).time(piece, kind)
    again = Compiler(Cache(folder))
    again.cycles = None  # from the cache
    found["product"] = [time.source, time.seconds, again.time(piece, kind).seconds]
    found["other"] = Compiler(Cache(folder)).time(piece, Machine.gpus("v100-16gb").kinds[0]) is None

    # Passes and tiles beside the compiler's own estimates.
    wide, long = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 8192), (8192, 4096)))
    square, few = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8192, 8192), (64, 8192)))
    pair, between = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 4096, 4096), (4096, 2, 4096)))
    several = {
        "a pass": (lambda a: a * 2 + 1, wide),
        "three operands": (lambda a, b, c: a + b * c, wide, wide, wide),
        "a reduction": (lambda a: jnp.sum(a * a, 0), wide),
        "alone": (jnp.tanh, wide),
        "turned": (lambda a: a.T, wide),
        "turned and added": (lambda a, b: jnp.transpose(a, (2, 0, 1)) + b, pair, between),
        "a product": (lambda a, b: a @ b, wide, long),
        "tiles": (lambda a, b: a @ b, square, square),
        "few rows": (lambda a, b: jnp.tanh(a @ b), few, square),
    }
    found["passes"], compiler = {}, Compiler(Cache(folder))
    for name, (function, *given) in several.items():
        piece = traced_piece(function, *given)
        for chip in map(kind_named, ("v4", "v5e", "v5p", "v6e")):
            # a v4 chip has room for one operand of 128 MiB, which its compiler has fetched before
            near = frozenset(piece.reads[:1] if name == "a product" and chip.name == "TPU v4" else ())
            time = Windows().time(dataclasses.replace(piece, near=near), chip)
            found["passes"][f"{name}, {chip.name}"] = time.seconds / compiler.time(piece, chip).seconds

n, batch = 4096, 8192


def step(a, b, x, y):
    def loss(a, b):
        return jnp.mean((jnp.tanh(x @ a) @ b - y) ** 2)

    value, grads = jax.value_and_grad(loss, (0, 1))(a, b)
    return a - 0.1 * grads[0], b - 0.1 * grads[1], value


shapes = (n, 2 * n), (2 * n, n), (batch, n), (batch, n)
traced = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
program = inline(traced.jaxpr, traced.consts)
specs = P(None, "model"), P("model"), P("data"), P("data")
layouts = [from_spec(s, v.aval.shape, axes) for s, v in zip(specs, program.inputs, strict=False)]
flow = follow(program, layouts, axes, outputs=[*layouts[:2], None])
mesh = Mesh(np.array(tpu.topology("v5e:2x4")).reshape(2, 4), tuple(axes))
given = [
    jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=NamedSharding(mesh, s))
    for v, s in zip(program.inputs, specs, strict=False)
]
compiled = jax.jit(over_mesh(flow, mesh), donate_argnums=(0, 1)).lower(*given).compile()
cost = program_cost(flow, machine, machine.mesh(axes), donated=(0, 1))
report = accept(compiled, cost)
found["error"], found["report"] = report.memory_error, str(report)

# Columns that both axes divide: gathered in bfloat16, forward and backward, and parts of sums kept.
specs = P(("data", "model")), P(None, ("data", "model")), P(("data", "model")), P(("data", "model"))
program = inline(
    (
        traced := jax.make_jaxpr(step)(
            *(
                jax.ShapeDtypeStruct(shape, jnp.float32)
                for shape in ((512, 1024), (1024, 512), (1024, 512), (1024, 512))
            )
        )
    ).jaxpr,
    traced.consts,
)
layouts = [from_spec(s, v.aval.shape, axes) for s, v in zip(specs, program.inputs, strict=False)]
flow = follow(program, layouts, axes, outputs=[*layouts[:2], None])
given = [
    jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=NamedSharding(mesh, s))
    for v, s in zip(program.inputs, specs, strict=False)
]
compiled = jax.jit(over_mesh(flow, mesh), donate_argnums=(0, 1)).lower(*given).compile()
report = accept(compiled, program_cost(flow, machine, machine.mesh(axes), donated=(0, 1)))
found["sharded"] = [report.exchange_accepted, report.found.get("all-gather", 0), str(report)]


# What only the compiler's own program tells: what is written whole, what is copied, what takes another's place.
def sliced(w, x, y, z):
    part = jax.lax.dynamic_slice_in_dim(x @ w, jnp.int32(z[0, 0]), 1024)
    return w, z, jnp.sum(jnp.tanh(part) @ w.T) + jnp.sum(y)


def accepted(function, specs, sizes):
    traced = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes))
    program = inline(traced.jaxpr, traced.consts)
    layouts = [from_spec(s, v.aval.shape, axes) for s, v in zip(specs, program.inputs, strict=False)]
    results = (0, 1) if function is step else (0, 3)
    flow = follow(program, layouts, axes, outputs=[*(layouts[i] for i in results), None])
    given = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=NamedSharding(mesh, s))
        for v, s in zip(program.inputs, specs, strict=False)
    ]
    donated = (0, 1) if function is step else (0,)
    compiled = jax.jit(over_mesh(flow, mesh), donate_argnums=donated).lower(*given).compile()
    report = accept(compiled, program_cost(flow, machine, machine.mesh(axes), donated=donated))
    return [report.memory_error, str(report)]


both = ("data", "model")
large = (2048, 8192), (8192, 2048), (32768, 2048), (32768, 2048)
found["memory"] = {
    "a slice of a product": accepted(sliced, [P()] * 4, ((2048, 8192), (32768, 2048), (8, 8), (8, 8))),
    "data parallel": accepted(step, (P(), P(), P(both), P(both)), large),
    "FSDP": accepted(step, (P(None, both), P(both), P(both), P(both)), large),
}


# Loops: what is the same at every turn, what is only added up, what only products read; parts of sums.
def turns(w, x):
    def cell(carry, row):
        hidden, state = carry
        pieces = lax.all_to_all(w, "model", 0, 1, tiled=True)  # the same at every turn
        state = jnp.tanh(hidden @ pieces + row) + state
        hidden = lax.all_gather(jnp.tanh(state[:, :256]), "model", axis=1, tiled=True)
        return (hidden, state), (hidden, jnp.sin(state))

    def back(carry, each):
        total, gradient, d = carry
        hidden, state = each
        d = jnp.tanh(d * state)
        part = lax.psum_scatter(lax.psum(d @ d.T, "data"), "model", scatter_dimension=0, tiled=True)
        whole = lax.psum_scatter(hidden.T @ d, ("data", "model"), scatter_dimension=0, tiled=True)
        return (total + lax.psum(d[:1], "model").sum(0), gradient + whole, d), part

    zeros = jnp.zeros(x.shape[1:])
    _, several = lax.scan(cell, (jnp.zeros((256, 1024)), zeros), x)
    begin = jnp.zeros(x.shape[2]), jnp.zeros((128, x.shape[2])), zeros
    (total, gradient, _), parts = lax.scan(back, begin, several, reverse=True)
    return total, gradient, parts


x, w = jax.ShapeDtypeStruct((16, 256, 1024), jnp.float32), jax.ShapeDtypeStruct((4096, 256), jnp.float32)
traced = jax.make_jaxpr(turns, axis_env=list(axes.items()))(w, x)
device = DeviceProgram(compiled_as(inline(traced.jaxpr, traced.consts), Target.on("tpu")), axes)
whole = NamedSharding(mesh, P())
run = jax.jit(jax.shard_map(turns, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
compiled = run.lower(*(jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=whole) for each in (w, x))).compile()
report = accept(compiled, program_cost(device, machine, machine.mesh(axes)))
found["loops"] = [report.exchange_accepted and not report.rewritten, report.found, str(report)]
print(json.dumps(found))
