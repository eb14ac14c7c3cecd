"""A model that does not fit, planned and compiled: `python -m benchmarks.partition_memory`.

A transformer (24 layers in a scan, each computed again going backward; AdamW, bfloat16) whose train step takes at
least four times the memory of the one TPU v5e that it is planned for:

  whole     the step as written, compiled for it: the compiler refuses, and says what it would take
  plan      what `vnode.partition.search` finds within its memory, beside what it finds with memory without end, and
            what the compiler makes of it: the memory that the compiled program takes on the device and on the host

Nothing is run; the compiler is libtpu's, ahead of time. This file knows models, plans and the compiler. It must not
know how a plan is found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from typing import Any

from benchmarks import tpu

MACHINE = "v5e:1x1"
GIB = 1 << 30
SIZES = {"layers": 24, "width": 1792, "heads": 14, "vocabulary": 32_768, "length": 1024, "batch": 160}


def model(sizes: dict[str, int]) -> Any:
    """The transformer."""
    import jax.numpy as jnp

    from benchmarks.partition_models.transformer_scan import transformer_scan

    return transformer_scan("small", jnp.bfloat16, **sizes)


def whole(made: Any) -> dict[str, Any]:
    """What the compiler says of the step as it is written, on one device."""
    import jax

    device = jax.sharding.SingleDeviceSharding(tpu.topology(tpu.TOPOLOGIES[0])[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), (made.state, made.batch)
    )
    lowered = jax.jit(made.step, donate_argnums=0).lower(*shapes)
    start = time.perf_counter()
    try:
        taken = memory(lowered.compile())
    except jax.errors.JaxRuntimeError as error:
        taken = {"refused": str(error).splitlines()[0]}
        said = re.search(r"([\d.]+)G\) exceeds|Used ([\d.]+)G of", str(error))
        if said:
            taken["GiB of temporaries" if said[1] else "GiB"] = float(said[1] or said[2])
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.state))
    return {"state, GiB": state / GIB, **taken, "seconds of compiling": time.perf_counter() - start}


def memory(compiled: Any) -> dict[str, float]:
    """GiB of a compiled program on the device and on its host, those for results in place of arguments once."""
    said = compiled.memory_analysis()
    parts = {
        where: sum(sign * getattr(said, f"{where}{part}_size_in_bytes") for part, sign in PARTS)
        for where in ("", "host_")
    }
    return {"device, GiB": parts[""] / GIB, "host, GiB": parts["host_"] / GIB}


PARTS = (("argument", 1), ("output", 1), ("alias", -1), ("temp", 1))


def figures(plan: Any) -> dict[str, Any]:
    """What a plan predicts."""
    said = plan.figures
    return {
        "seconds": said.seconds,
        "of transfers": said.transfer,
        "device, GiB": said.memory / GIB,
        "host, GiB": said.host / GIB,
        "nodes": plan.virtual_nodes,
    }


def planned(made: Any, nodes: Any, budget: float, compiling: bool) -> dict[str, Any]:
    """The plan within the device's memory, that without a limit, and what is compiled of the former."""
    from vnode.partition import Machine, search

    machine = Machine.tpu(MACHINE)
    options = {"virtual_nodes": nodes, "budget": budget, "reduction": "fast", "donate_argnums": 0}
    plan = search(made.step, (made.state, made.batch), machine, **options)
    print(plan, flush=True)
    free = search(made.step, (made.state, made.batch), machine, memory="10TiB", **options)
    found: dict[str, Any] = {"planned": figures(plan), "without a limit": figures(free)}
    found["times"] = plan.figures.seconds / free.figures.seconds
    print(json.dumps(found), flush=True)
    if compiling:
        step = plan.step(tpu.topology(tpu.TOPOLOGIES[0])[:1])
        start = time.perf_counter()
        lowered = step.lower(made.state, made.batch)
        found["compiled"] = memory(lowered.compile())
        found["seconds of compiling"] = time.perf_counter() - start
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("whole", "plan"))
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--nodes", default="auto", help="virtual nodes; a number, or auto")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of the search")
    parser.add_argument("--no-compile", action="store_true", help="only what is predicted")
    args = parser.parse_args()
    os.environ.update(tpu.ENVIRONMENT)
    made = model({name: getattr(args, name) for name in SIZES})
    if args.what == "whole":
        found = whole(made)
    else:
        nodes = args.nodes if args.nodes == "auto" else int(args.nodes)
        found = planned(made, nodes, args.budget, not args.no_compile)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
