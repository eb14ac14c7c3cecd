"""Loops over blocks for a v5e: what a block takes by the compiler's own estimates, and as predicted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import tpu
from tests.spmd.reference import layouts_of
from vnode.analysis.program import inline
from vnode.partition import Machine, program_cost
from vnode.partition.cost.lower_to_device import device_program
from vnode.partition.hlo import parse
from vnode.partition.machine.known_kinds import CLOCKS
from vnode.partition.uneven_shares.uneven_plans import flow_of_device
from vnode.spmd.factor_blocks import in_blocks
from vnode.spmd.sharded_program import flow_over_mesh
from vnode.spmd.sharding_flow import follow
from vnode.spmd.uneven_blocks import Share

machine, axes = Machine.tpu("v5e:2x4"), {"data": 4, "model": 2}
(kind,) = machine.kinds


def step(state, x):
    def loss(state):
        return jnp.mean((jax.nn.gelu(x @ state["wi"]) @ state["wo"] - x).astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), state, grads), value


def shapes(*sizes, spec=None):
    sharding = None if spec is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=sharding)


mesh = Mesh(np.array(tpu.topology("v5e:2x4")).reshape(4, 2), tuple(axes))
closed = jax.make_jaxpr(step)({"wi": shapes(1024, 4096), "wo": shapes(4096, 1024)}, shapes(2048, 1024))
split = in_blocks(inline(closed.jaxpr, closed.consts), Share(("model",), (5, 3)), {0: 1})
flow = follow(split.program, layouts_of(split, axes, {}), axes)
given = shapes(1024, 5120, spec=P(None, "model")), shapes(5120, 1024, spec=P("model")), shapes(2048, 1024, spec=P())
module = parse(jax.jit(flow_over_mesh(flow, mesh), donate_argnums=(0, 1)).lower(*given).compile().as_text())
inside = [each.instruction.cycles for each in module.walk() if each.loops and each.instruction.cycles]


def predicted(blocks):
    program = device_program(flow_of_device(flow, (blocks, 0)), axes, donated=[0, 1])
    return program_cost(program, machine, machine.mesh(axes)).compute * CLOCKS[kind.name]


found = {"kernels": len(inside), "compiled": sum(inside), "predicted": (predicted(5) - predicted(3)) / 2}
print(json.dumps(found))
