"""Kernels of a v5e that write or move arrays: cycles by its compiler, and as predicted; its cache is argument 1."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import tpu
from benchmarks.partition import build, compared, models, plans
from vnode.analysis.program import inline
from vnode.partition import Machine, accept, program_cost
from vnode.partition.cost import DeviceProgram, Target
from vnode.partition.cost.compiler import CLOCKS
from vnode.partition.cost.device import compiled_as
from vnode.partition.hlo import cycles, parse
from vnode.placement.temporary import temporary_of

axes, machine = {"x": 8}, Machine.tpu("v5e:2x4")
mesh = Mesh(np.array(tpu.topology("v5e:2x4")), ("x",))
found = {}


def held(cost, compiled):
    return cost.memory.temporaries, temporary_of(compiled).held


def summed(cost, compiled):
    report = accept(compiled, cost)
    return sum(report.planned.values()), sum(report.found.values())


def timed(cost, compiled):
    return cost.compute, cycles(parse(compiled.as_text()), {}) / CLOCKS["TPU v5e"]


def both(function, shape, what=held, donated=()):
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P()))
    traced = jax.make_jaxpr(function, axis_env=[("x", 8)])(x)
    program = compiled_as(inline(traced.jaxpr, traced.consts), Target.on("tpu"))
    device = DeviceProgram(program, axes, frozenset(donated))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    run = jax.jit(mapped, donate_argnums=donated)
    return what(program_cost(device, machine, machine.mesh(axes)), run.lower(x).compile())


# What is exchanged in pieces of the dimension along which its tiles lie: in other tiles, which are not filled.
def pieces(x):
    return jnp.sum(jnp.sin(lax.all_to_all(jnp.tanh(x), "x", 0, 3, tiled=True)))


found["pieces"] = both(pieces, (1024, 27, 27, 96))


# A softmax of a slice of what is gathered: going back, only its exponentials are there.
def attended(x):
    def loss(x):
        whole = lax.all_gather(jnp.tanh(x), "x", axis=1, tiled=True)
        part = lax.dynamic_slice_in_dim(whole, lax.axis_index("x") * 64, 64, axis=2)
        return jnp.sum(jnp.sin(jax.nn.softmax(part)))

    return jax.grad(loss)(x)


found["rows"] = both(attended, (32, 2, 512, 512))


# What is summed, and cut at a place known at run time, is written once, also where more is computed for the slice.
def cut(x):
    whole = jnp.exp(x)
    rows = jnp.sum(whole, 1)
    part = lax.dynamic_slice_in_dim(whole, lax.axis_index("x") * 1024, 1024, 0)
    return lax.psum(jnp.sin(part + rows[:1024, None] / rows[0]).sum(0), "x")


def cut_and_multiplied(x):
    whole = jnp.exp(x)
    rows = jnp.sum(whole, 1)
    part = lax.dynamic_slice_in_dim(whole * rows[:, None], lax.axis_index("x") * 1024, 1024, 0)
    return lax.psum(part.T @ part, "x")


found["cut"] = both(cut, (8192, 8192))
found["cut and multiplied"] = both(cut_and_multiplied, (8192, 8192))


# What is computed while something is gathered is not written over by its sum over devices.
def beside(x):
    summed = lax.psum(x @ x.T, "x")
    whole = lax.all_gather(jnp.tanh(x[:1024]), "x", axis=0, tiled=True)
    return jnp.sum(jnp.sin(summed) @ whole, 1)


found["beside a gather"] = both(beside, (8192, 2048))


# It is while less than a tile is gathered, for that is gathered where it is read.
def beside_little(x):
    summed = lax.psum(x @ x.T, "x")
    little = lax.all_gather(jnp.tanh(x[:1, :127]), "x", axis=0, tiled=True)
    return jnp.sum(jnp.sin(summed), 1) * jnp.sum(little)


found["beside a small gather"] = both(beside_little, (8192, 2048))


# In bfloat16, as here, where only a product reads it, that is twice as many elements.
def beside_half(x):
    summed = lax.psum(x @ x.T, "x")
    little = lax.all_gather(jnp.tanh(x[:1, :240]), "x", axis=0, tiled=True)
    return jnp.sum(jnp.sin(summed), 1) * jnp.sum(jnp.sin(little @ x[:240]))


found["beside half a gather"] = both(beside_half, (8192, 2048))


# A gather begins as soon as it can, unless another waits for it to end, however soon it is done.
def early(x):
    whole = lax.all_gather(jnp.exp(x[:1024]), "x", axis=0, tiled=True)
    a = jnp.tanh(x @ x)
    rows = jnp.sum((jnp.tanh(a @ x) * a) @ a, 1)
    for _ in range(3):
        rows = jnp.sum(jnp.tanh(x[:4096] * rows) @ x, 0)
    return jnp.sum(jnp.sin(whole * rows), 1)


found["early"] = both(early, (8192, 8192))


# Sums over devices that are cut at one place, and added: one sum.
def parts(x):
    def part(value):
        at = lax.axis_index("x") * 64
        return lax.dynamic_slice(lax.psum(value, "x").reshape(1, 1024, 1, 512), (0, at, 0, 0), (1, 64, 1, 512))

    return jnp.sum(jnp.sin(part(x @ x[:512]) + part(jnp.tanh(x) @ x[:512])))


found["parts"] = both(parts, (1024, 512), summed)


# A sum of which each device keeps a part is in float32, even where only products read it.
def kept(x):
    return jnp.sum(jnp.sin(lax.psum_scatter(x @ x[:512], "x", scatter_dimension=0, tiled=True) @ x[:512]))


found["kept"] = both(kept, (4096, 512), summed)


# What a loop that hands nothing from turn to turn only multiplies is gathered in bfloat16, too.
def mapped(x):
    whole = lax.all_gather(jnp.tanh(x[:512]), "x", axis=0, tiled=True)
    several = lax.map(lambda part: jnp.tanh(part @ whole), x.reshape(8, 512, 4096))
    return jnp.sum(jnp.sin(several))


found["mapped"] = both(mapped, (4096, 4096), summed)


# What is gathered is copied to where the argument was that it replaces, and that before, which takes time.
def replaced(x):
    return lax.all_gather(jnp.tanh(x[:1024]), "x", axis=0, tiled=True)


found["replaced"] = both(replaced, (8192, 8192), timed, donated=(0,))


# A slice of what is gathered, without what pads it, is no part of the kernel that reads it.
def unpadded(x):
    whole = lax.all_gather(jnp.tanh(x), "x", axis=1, tiled=True)[:, :27]
    part = lax.dynamic_slice_in_dim(whole, lax.axis_index("x") * 128, 128, axis=0)
    return jnp.sum(jnp.sin(part), 0)


found["unpadded"] = both(unpadded, (1024, 4, 27, 128), timed)


# What is computed for a slice is in memory for it, and computed again by who reads what it is made of.
def activated(x):
    def loss(x):
        whole = lax.all_gather(2 * x[:1024], "x", axis=0, tiled=True) + x[0]
        several = whole * (1 + jnp.tanh(whole + whole**3))
        part = lax.dynamic_slice_in_dim(several, lax.axis_index("x") * 1024, 1024, axis=0)
        return jnp.sum(jnp.sin(lax.all_gather(part, "x", axis=0, tiled=True)))

    return jax.grad(loss)(x)


found["activated"] = both(activated, (8192, 8192))


# A gather that ends after a sum over devices begins before that, and before nothing else, as the sum takes as long.
def beside_a_sum(x):
    first = lax.all_gather(jnp.tanh(x[:1024]), "x", axis=0, tiled=True)
    second = lax.all_gather(jnp.cos(x[:1024]), "x", axis=0, tiled=True)
    summed = lax.psum(jnp.tanh(x @ x[:8192]) @ x, "x")
    return jnp.sum(jnp.sin(summed) + first * second, 1)


found["beside a sum"] = both(beside_a_sum, (8192, 8192))


# Zeros that a loop begins with are made there, also if others read them.
def zeros(x):
    start = jnp.zeros((8192, 8192))
    total, _ = lax.scan(lambda c, time: (c + jnp.tanh(time * x), None), start, jnp.arange(8.0))
    return jnp.sum(jnp.sin(total)), jnp.sum(jnp.square(start) + jnp.square(total))


found["zeros"] = both(zeros, (8192, 8192))

# Residuals of several arrays are written, and the loss's gradient is not; updates come after products, or at once.
for plan in plans(models("tpu")["mlp"]()):
    if plan.name in ("Megatron over x, y on 2x4", "state at random 7 on 8"):
        found[plan.name] = compared(plan, build(Path(sys.argv[1]), "mlp", plan, "tpu"), "tpu").memory
print(json.dumps(found))
