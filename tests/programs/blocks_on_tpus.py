"""Loops over blocks for a v5e: what a block takes by the compiler's own estimates, and as predicted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import tpu
from vnode.partition import Machine, blocked, program_cost
from vnode.partition.cost.compiler import CLOCKS
from vnode.partition.cost.lower_to_device import device_program
from vnode.partition.hlo import parse
from vnode.partition.uneven_shares.uneven_plans import flow_of_device

machine, axes = Machine.tpu("v5e:2x4"), {"data": 4, "model": 2}
(kind,) = machine.kinds


def step(state, x):
    def loss(state):
        return jnp.mean((jax.nn.gelu(x @ state["wi"]) @ state["wo"] - x).astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), state, grads), value


def shapes(*sizes, spec=P()):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


mesh = Mesh(np.array(tpu.topology("v5e:2x4")).reshape(4, 2), tuple(axes))
state, x = {"wi": shapes(1024, 4096), "wo": shapes(4096, 1024)}, shapes(2048, 1024)
split = blocked(step, (state, x), mesh, {"wi": 1}, (5, 3), "model", donate=(0,))
given = shapes(1024, 5120, spec=P(None, "model")), shapes(5120, 1024, spec=P("model")), x
module = parse(split._run.lower(*given).compile().as_text())
inside = [each.instruction.cycles for each in module.walk() if each.loops and each.instruction.cycles]


def predicted(blocks):
    program = device_program(flow_of_device(split.flow, (blocks, 0)), axes, donated=[0, 1])
    return program_cost(program, machine, machine.mesh(axes)).compute * CLOCKS[kind.name]


found = {"kernels": len(inside), "compiled": sum(inside), "predicted": (predicted(5) - predicted(3)) / 2}
print(json.dumps(found))
