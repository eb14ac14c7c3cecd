"""What the same bits cost over sizes of models, numbers of nodes and devices, relative to sums in any order.

`python -m benchmarks.bits` prints one JSON line for each case: a transformer of four layers with so many MiB of
gradients, four examples a node, on so many CPU devices.

| column | meaning |
|---|---|
| `waiting` | partial sums that wait on a device, at most |
| `fast_mib`, `invariant_mib` | temporary memory of a device, of each |
| `more` | their difference, in gradients |
| `fast_written_mib`, `invariant_written_mib` | bytes that a device writes outside of its nodes' computation |
| `lowering` | seconds of tracing and lowering, relative |
| `time` | processor time of a step, relative, the median over rounds in which both take turns |

All but the last two come from the compiler, and do not depend on the machine that runs this.

This file knows models and compiled programs. It must not know how sums are formed.
"""

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import contenders, hlo, models
from vnode.placement.temporary import temporary_of
from vnode.runtime.device_reductions import ReductionPlan

WIDTHS = {1: 64, 7: 192, 28: 384, 100: 736}
"""Of the transformer, for so many MiB of gradients."""

EXAMPLES = 4
"""Of a node."""

WAYS = ("fast", "invariant")
WRITERS = ("copy", "fusion", "all-to-all", "all-gather", "all-reduce", "reduce-scatter", "dynamic-update-slice")


def case(size: int, nodes: int, devices: int, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    model = models.transformer(layers=4, width=WIDTHS[size])
    batch = {name: array[:1].repeat(nodes * EXAMPLES, 0) for name, array in model.batch(1).items()}
    make = functools.partial(contenders.virtualized, model, nodes, jax.devices()[:devices])
    made = {way: make(reduction=way) for way in WAYS}
    lowering = {way: lowered(functools.partial(make, reduction=way), batch) for way in WAYS}
    program = {}
    for way in WAYS:
        program[way] = made[way].function.lower(made[way].state, batch).compile()
    gradients = sum(x.nbytes for x in jax.tree.leaves(made["fast"].state["params"]))
    held = {way: temporary_of(each).held for way, each in program.items()}
    turns = contenders.turns_of_trees(nodes, devices, nodes)
    moved = {way: written(hlo.parse(each.as_text()), turns) for way, each in program.items()}
    row: dict[str, Any] = {"gradients_mib": mib(gradients), "nodes": nodes, "devices": devices}
    row["waiting"] = ReductionPlan.from_counts((nodes // devices,) * devices, 1, True).max_depth
    row |= {f"{way}_mib": mib(held[way]) for way in WAYS}
    row["more"] = round((held["invariant"] - held["fast"]) / gradients, 2)
    row |= {f"{way}_written_mib": mib(moved[way]) for way in WAYS}
    row["lowering"] = round(lowering["invariant"] / lowering["fast"], 2)
    if seconds:
        row["time"] = round(timed(program, made["fast"].state, batch, seconds), 3)
    return row


def lowered(make: Callable[[], contenders.Contender], batch: Any) -> float:
    """Seconds of tracing and lowering a new step, the least of three."""
    found = []
    for _ in range(3):
        made = make()
        start = time.process_time()
        made.function.lower(made.state, batch)
        found.append(time.process_time() - start)
    return min(found)


def written(module: hlo.Module, turns: Mapping[tuple[str, ...], float]) -> float:
    """Bytes of all results that a device computes or copies, outside of the loop over its nodes."""
    names = hlo.named_loops(module)
    known = {loop: turns[path] for loop, path in names.items() if path in turns}
    total = 0.0
    for visit in module.walk():
        nodes = any(trips is not None or names.get(loop, ("",))[-1] == "run" for loop, trips in visit.loops)
        if not nodes and not visit.fused and visit.instruction.opcode in WRITERS:
            total += visit.instruction.bytes * visit.times(known)
    return total


def timed(program: Mapping[str, Any], state: Any, batch: Any, seconds: float) -> float:
    """Processor time of a step whose sums have the same bits, relative to that of one in any order."""
    args, taken = {}, {way: [0.0][:0] for way in program}
    for way, each in program.items():
        own, _ = each.input_shardings[0]
        args[way] = jax.tree.map(lambda x, there: jax.device_put(jnp.array(x, copy=True), there), state, own)
    start, order = time.perf_counter(), list(program)
    while time.perf_counter() - start < seconds or len(taken["fast"]) < 3:
        for way in order:
            began = time.process_time()
            args[way], _ = jax.block_until_ready(program[way](args[way], batch))
            taken[way].append(time.process_time() - began)
        order.reverse()
    return statistics.median(b / a for a, b in zip(taken["fast"], taken["invariant"], strict=True))


def mib(count: float) -> float:
    return round(count / 2**20, 1)


def main(argv: list[str] | None = None) -> None:
    """Prints one JSON line per row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 7, 28], choices=WIDTHS, help="MiB of gradients")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing, for each row; 0 for none")
    options = parser.parse_args(argv)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={max(options.devices)}"
    for size in options.sizes:
        for nodes in options.nodes:
            for devices in options.devices:
                print(json.dumps(case(size, nodes, devices, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
