"""Steps with JAX's own TPU kernels, compiled by the TPU compiler, and where in the program the kernels are.

``python -m tests.programs.kernels_on_tpus flash`` prints a line of JSON for each placement: how many loops are around
each kernel, and the shapes of its results. Knows topologies and compiled text. Must not know what is expected.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import tpu

os.environ.update(tpu.ENVIRONMENT)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vnode
from benchmarks import hlo
from tests import pallas_steps as steps

WIDTH, HEADS, EACH, LENGTH = 256, 4, 128, 256
NODES = 16
COUNTS = {"flash": (8,), "splash": (1,), "paged": (8,)}
"""Numbers of devices."""


def types(shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def kernels(text: str) -> list[list[Any]]:
    """For each Pallas kernel of a compiled program the loops around it, and the shapes of its results."""
    found = []
    for visit in hlo.parse(text).walk():
        called = visit.instruction
        if called.opcode == "custom-call" and "tpu_custom_call" in called.rest:
            shapes = [[int(n) for n in dims.split(",")] for dims in re.findall(r"\w+\[([\d,]+)\]", called.type)]
            found.append([len(visit.loops), shapes])
    return found


def with_normal_weights(step: Any) -> Any:
    """A step after which a kernel normalizes the parameters, once."""

    def normal(w: Any) -> Any:
        return steps.over_rows(steps.normalize_forward, 256, False, w.reshape(-1, 256)).reshape(w.shape)

    def after(w: Any, x: Any) -> Any:
        w, value = step(w, x)
        return jax.tree.map(normal, w), value

    return after


def main(name: str) -> None:
    devices = tpu.topology("v5e:2x4")
    attend = {"splash": steps.splash_attend(HEADS, LENGTH), "flash": steps.flash_attend, "heads": steps.flash_attend}
    if name == "paged":
        w = types(
            {"q": (WIDTH, 8, 128), "o": (8, 128, WIDTH)} | dict.fromkeys(("keys", "values"), (2, 64, 16, 128)), "f4"
        )
        batch = (jax.ShapeDtypeStruct((32, WIDTH), "f4"), *(jax.ShapeDtypeStruct((32, *n), "i4") for n in ((), (8,))))
        step: Any = steps.paged_step
    else:
        step = steps.transformer(attend[name], 512, False, layers=False)
        step = with_normal_weights(step) if name == "flash" else step
        w = types(steps.weights(WIDTH, HEADS, EACH), jnp.bfloat16)
        batch = jax.ShapeDtypeStruct((47 if name == "splash" else 32, LENGTH, WIDTH), jnp.bfloat16)
    if name == "heads":
        mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
        spec = {key: PartitionSpec("model") if key == "o" else PartitionSpec(None, "model") for key in w}
        w = {
            key: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=NamedSharding(mesh, spec[key]))
            for key, each in w.items()
        }
        placements = [vnode.Placement(NODES, mesh=mesh, axis="data")]
    else:
        placements = [vnode.Placement(NODES, list(devices[:count])) for count in COUNTS[name]]
    for placement in placements:
        virtual = vnode.virtualize(step, virtual_nodes=NODES, placement=placement)
        print(json.dumps(kernels(virtual.lower(w, batch).compile().as_text())))


if __name__ == "__main__":
    main(sys.argv[1])
