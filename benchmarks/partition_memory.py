"""A model that does not fit, planned and compiled: `python -m benchmarks.partition_memory`.

A transformer (24 layers in a scan, each computed again going backward; AdamW, bfloat16) whose train step takes at
least four times the memory of the one TPU v5e that it is planned for:

  whole     the step as written, compiled for it: the compiler refuses, and says what it would take
  plan      what `vnode.partition.search` finds within its memory, beside what it finds with memory without end, and
            what the compiler makes of it: the memory that the compiled program takes on the device and on the host
  scan      32 layers with a norm in a scan (float32, width 512, 16,384 examples, two nodes), planned within less and
            less memory: what is computed again and what is on the host, beside what the compiler makes of it
  devices   a model on one chip and on several, invariant, 8 nodes: what each device holds by the compiler, of a plan
            that is searched within 1.15 times its share of what one device holds, and compiled until it does

Nothing is run; the compiler is libtpu's, ahead of time. This file knows models, plans and the compiler. It must not
know how a plan is found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import tpu
from vnode.placement.temporary import temporary_of

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
    """GiB of a compiled program on the device, without gaps between arrays, and on its host.

    Those for results in place of arguments count once.
    """
    said = compiled.memory_analysis()
    parts = {
        where: sum(sign * getattr(said, f"{where}{part}_size_in_bytes") for part, sign in PARTS)
        for where in ("", "host_")
    }
    parts[""] += temporary_of(compiled).held - said.temp_size_in_bytes
    return {"device, GiB": parts[""] / GIB, "host, GiB": parts["host_"] / GIB}


PARTS = (("argument", 1), ("output", 1), ("alias", -1), ("temp", 1))


def figures(plan: Any) -> dict[str, Any]:
    """What a plan predicts."""
    said = plan.figures
    return {
        "seconds": said.seconds,
        "of transfers": said.transfer,
        "device, GiB": said.memory / GIB,
        "host, GiB": (said.host + said.aside) / GIB,
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


LIMITS = "64GiB", "2GiB", "1300MiB"
"""What one device may hold, of layers in a scan."""


def scanned(layers: int = 32, width: int = 512, examples: int = 16384) -> tuple[Any, Any]:
    """Layers with a norm in a scan, and shapes of their arguments."""
    import jax
    import jax.numpy as jnp

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            def layer(h: Any, w: Any) -> Any:
                n = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
                return h + jax.nn.gelu(n @ w["up"]) @ w["down"], None

            return jnp.mean((jax.lax.scan(layer, batch, weights)[0] - batch) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    sizes = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
    weights = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    return step, (weights, jax.ShapeDtypeStruct((examples, width), jnp.float32))


def of_scan(compiling: bool) -> Iterator[dict[str, Any]]:
    """Plans of layers in a scan, for one device with so much memory, and what is compiled of them."""
    from vnode.partition import Machine, search

    step, args = scanned()
    for limit in LIMITS:
        plan = search(
            step, args, Machine.tpu(MACHINE), virtual_nodes=2, reduction="fast", donate_argnums=0, memory=limit
        )
        parts = {"again": len(plan.recomputed), "on the host": len(plan.offloaded), "seconds": plan.figures.seconds}
        parts["of transfers"] = plan.figures.transfer
        parts["predicted"] = {"device, GiB": plan.figures.memory / GIB, "host, GiB": plan.figures.aside / GIB}
        if compiling:
            report = plan.accept(tpu.topology(tpu.TOPOLOGIES[0])[:1])
            parts["compiled"] = {"device, GiB": report.memory / GIB, "host, GiB": report.compiled.host / GIB}
            parts["fetched, GiB"] = [n / GIB for n in (report.fetched, report.compiled.fetched)]
            parts["accepted"] = report.accepted
        yield {"memory": limit, **parts}


SLICES = {
    "v5e": (("v5e:2x4", 1), ("v5e:2x2", 4), ("v5e:2x4", 8)),
    "v5p": (("v5p:2x2x1", 1), ("v5p:2x2x1", 4), ("v5p:2x2x2", 8)),
}
"""Of each kind of chip what is compiled for, and how many of its devices are taken."""


def on_devices(name: str, chip: str, budget: float, changed: dict[str, int]) -> Iterator[dict[str, Any]]:
    """What each of several devices holds, times their number, beside what one holds, by the compiler."""
    import jax

    import vnode
    from benchmarks.partition import models
    from benchmarks.partition_models import MODELS
    from vnode.partition import Machine, search

    smaller = models("tpu")
    made = smaller[name]() if name in smaller else MODELS[name]("paper", **changed)
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (made.state, made.batch))
    options: dict[str, Any] = {"virtual_nodes": 8, "donate_argnums": 0}
    base = 0.0
    for slice_, count in SLICES[chip]:
        devices = list(tpu.topology(slice_))[:count]
        if count == 1:
            alone = vnode.virtualize(made.step, placement=vnode.Placement(8, devices), **options)
            base = memory(alone.lower(*args).compile())["device, GiB"]
            yield {"devices": 1, "GiB": base}
            continue
        limit = int(1.15 * base * GIB / count)
        try:
            plan = search(
                made.step, args, Machine.tpu(slice_), memory=limit, budget=budget, compiled_for=devices, **options
            )
        except vnode.VnodeError as error:
            yield {"devices": count, "refused": " ".join(str(error).split("\n")[:4])}
            continue
        held = plan.memory.value / GIB
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
        found = {"GiB": held, "of its share": held * count / base, "plan": f"{plan.name} on {mesh}"}
        yield {"devices": count, **found, "seconds": plan.figures.seconds, "on the host": plan.figures.on_host}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("whole", "plan", "scan", "devices"))
    parser.add_argument("--model", default="lstm", help="for devices: as in partition or partition_models")
    parser.add_argument("--chip", default="v5e", choices=[*SLICES], help="for devices")
    parser.add_argument("--changed", nargs="*", default=[], metavar="SIZE=N", help="for devices: of the paper's sizes")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--nodes", default="auto", help="virtual nodes; a number, or auto")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of the search")
    parser.add_argument("--no-compile", action="store_true", help="only what is predicted")
    args = parser.parse_args()
    os.environ.update(tpu.ENVIRONMENT)
    made = model({name: getattr(args, name) for name in SIZES})
    found: Any
    if args.what == "whole":
        found = whole(made)
    elif args.what == "plan":
        nodes = args.nodes if args.nodes == "auto" else int(args.nodes)
        found = planned(made, nodes, args.budget, not args.no_compile)
    else:
        scan = args.what == "scan"
        found = []
        changed = {name: int(size) for name, size in (each.split("=") for each in args.changed)}
        for row in of_scan(not args.no_compile) if scan else on_devices(args.model, args.chip, args.budget, changed):
            print(json.dumps(row), flush=True)
            found.append(row)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
