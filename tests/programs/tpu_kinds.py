"""The memory of TPUs of each kind, as their compiler says it."""

import json

import jax
import jax.numpy as jnp

import vnode
from vnode.plan.nodes.device_memory import compiler_planned_bytes
from vnode.plan.nodes.fit import TOPOLOGIES, described_devices

limits = {}
for name in ("v2:2x2", *TOPOLOGIES):
    devices = described_devices(name)
    huge = jax.ShapeDtypeStruct((1 << 19, 1 << 19), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    try:
        jax.jit(lambda x: x + 1).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        limits[name] = compiler_planned_bytes(devices[0]), str(error), len(devices)

from tests.test_fit import wide

step = vnode.virtualize(wide, virtual_nodes="auto", reduction="fast")
args = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((4096, 1024, 256), jnp.float32)
entry = vnode.fit(step, args, topology="v5e:2x4", memory="1.4GiB")["v5e:2x4"]
sizes = {trial.virtual_nodes: trial.bytes for trial in entry.search.trials}
print(json.dumps({"limits": limits, "kind": entry.kind, "chosen": entry.search.chosen, "sizes": sizes}))
