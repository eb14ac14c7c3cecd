"""Reshardings for a v5e: the collectives that its compiler makes of them."""

import json

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from vnode.partition.hlo import find_collectives, parse
from vnode.spmd.layout import from_spec
from vnode.spmd.resharding_collectives import convert

axes, shape = {"x": 2, "y": 4}, (1024, 2048)
devices = np.array(topologies.get_topology_desc("v5e:2x4", "tpu").devices)
mesh = Mesh(devices.reshape(2, 4), tuple(axes))
pairs = (P(("x", "y")), P(("y", "x"))), (P("x"), P("y")), (P(("x", "y")), P("y", "x")), (P("x", "y"), P("y", "x"))
found = []
for start, end in pairs:

    def moved(x):
        return convert(x, from_spec(start, shape, axes), from_spec(end, shape, axes), shape, axes)

    program = jax.jit(jax.shard_map(moved, mesh=mesh, in_specs=start, out_specs=end, check_vma=False))
    text = program.lower(jax.ShapeDtypeStruct(shape, np.float32)).compile().as_text()
    found.append([(each.kind, each.bytes) for each in find_collectives(parse(text))])
print(json.dumps(found))
