"""A program for a v5e of as many rows as argument 1 says: its temporary memory, with gaps and without."""

import itertools
import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from benchmarks import tpu
from benchmarks.partition import plans
from benchmarks.partition_cost import mlp
from vnode.placement.temporary import temporary_of
from vnode.plan.nodes.device_memory import compiler_planned_bytes
from vnode.spmd.sharded_program import as_spec_layout, flow_over_mesh, spec_of

devices = tpu.topology("v5e:2x4")
(plan,) = itertools.islice(plans(mlp(2048, int(sys.argv[1]))), 13, 14)
mesh = Mesh(np.array(devices).reshape(tuple(plan.axes.values())), tuple(plan.axes))
given = [
    jax.ShapeDtypeStruct(
        v.aval.shape, v.aval.dtype, sharding=NamedSharding(mesh, spec_of(as_spec_layout(layout, plan.axes)))
    )
    for v, layout in zip(plan.flow.program.inputs, plan.flow.inputs, strict=False)
]
compiled = jax.jit(flow_over_mesh(plan.flow, mesh)).lower(*given).compile()
memory, temporary = compiled.memory_analysis(), temporary_of(compiled)
borders = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
print(
    json.dumps([compiler_planned_bytes(devices[0]), borders, memory.temp_size_in_bytes, temporary.held, temporary.gaps])
)
