"""A process that saves and restores checkpoints beside others."""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

count, index, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize("localhost:" + port, count, index)
import vnode
from vnode.elastic.checkpoints import Checkpoints

mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("vnode", "model"))
host = np.arange(48, dtype=np.float32).reshape(8, 6)
state = {
    str(spec): jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])
    for spec in (P("model"), P(), P("vnode", "model"))
}
checkpoints = Checkpoints(folder, 2)
if count > 1:
    checkpoints.save(1, state, {})
number = checkpoints.latest
back = checkpoints.restore(number, state, vnode.Placement(4, mesh=mesh))
shards = [shard for array in back.values() for shard in array.addressable_shards]
assert number == 1 and all(np.array_equal(shard.data, host[shard.index]) for shard in shards)
checkpoints.close()
