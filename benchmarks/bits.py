"""The price of the same bits over model sizes, numbers of nodes and devices, beside any order and a scan by hand.

`python -m benchmarks.bits` prints a table with one row for each case: a transformer of four layers with so many MiB of
gradients, four examples a node, on so many CPU devices. With `--json`, one JSON line for each case, as it is measured.

| column | meaning |
|---|---|
| `waiting` | partial sums that wait on a device, at most |
| `fast_mib`, `invariant_mib`, `hand_mib` | temporary memory of a device, of each |
| `more` | that of the same bits beyond that of any order, in gradients |
| `fast_written_mib`, `invariant_written_mib` | bytes that a device writes outside of its nodes' computation |
| `lowering`, `lowering_to_hand` | processor time of tracing and lowering, beside any order and beside by hand |
| `compiling`, `compiling_to_hand` | processor time of compiling, once, likewise |
| `time`, `time_to_hand` | processor time of a step, likewise |

Times are medians of ratios within rounds, in which all take turns: other programs disturb them less. All
others come from the compiler, and do not depend on the machine that runs this.

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

WIDTHS = {1: 64, 8: 208, 28: 384, 100: 736}
"""Of the transformer, for so many MiB of gradients."""

EXAMPLES = 4
"""Of a node."""

FACTORIES = {
    "hand": contenders.by_hand,
    "fast": contenders.virtualized,
    "invariant": contenders.invariant,
}
ROUNDS = 5
"""The number of rounds of tracing and lowering; running takes at least three."""

WRITERS = ("copy", "fusion", "all-to-all", "all-gather", "all-reduce", "reduce-scatter", "dynamic-update-slice")


def case(size: int, nodes: int, devices: int, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    model = models.transformer(layers=4, width=WIDTHS[size])
    batch = {name: array[:1].repeat(nodes * EXAMPLES, 0) for name, array in model.batch(1).items()}
    makers = {way: functools.partial(make, model, nodes, jax.devices()[:devices]) for way, make in FACTORIES.items()}
    program, compiling = {}, {}
    for way, make in makers.items():
        made = make()
        low = made.function.lower(made.state, batch)
        start = time.process_time()
        program[way] = low.compile()
        compiling[way] = [time.process_time() - start]
    gradients = sum(x.nbytes for x in jax.tree.leaves(made.state["params"]))
    held = {way: temporary_of(each).held for way, each in program.items()}
    turns = contenders.turns_of_trees(nodes, devices, nodes)
    row: dict[str, Any] = {"gradients_mib": mib(gradients), "nodes": nodes, "devices": devices}
    row["waiting"] = ReductionPlan.from_counts((nodes // devices,) * devices, 1, True).max_depth
    row |= {f"{way}_mib": mib(held[way]) for way in program}
    row["more"] = round((held["invariant"] - held["fast"]) / gradients, 2)
    for way in ("fast", "invariant"):
        row[f"{way}_written_mib"] = mib(written(hlo.parse(program[way].as_text()), turns))
    lowering = lowered(makers, batch)
    row["lowering"], row["lowering_to_hand"] = (round(relative(lowering, to), 2) for to in ("fast", "hand"))
    row["compiling"], row["compiling_to_hand"] = (round(relative(compiling, to), 2) for to in ("fast", "hand"))
    if seconds:
        taken = timed(program, made.state, batch, seconds)
        row["time"], row["time_to_hand"] = (round(relative(taken, to), 3) for to in ("fast", "hand"))
    return row


def relative(taken: Mapping[str, list[float]], to: str) -> float:
    """The time of the same bits relative to another way's, the median over rounds."""
    return statistics.median(b / a for a, b in zip(taken[to], taken["invariant"], strict=True))


def lowered(makers: Mapping[str, Callable[[], contenders.Contender]], batch: Any) -> dict[str, list[float]]:
    """Processor time of tracing and lowering a new step of each way, by rounds."""
    taken: dict[str, list[float]] = {way: [] for way in makers}
    for _ in range(ROUNDS):
        for way, make in makers.items():
            made = make()
            start = time.process_time()
            made.function.lower(made.state, batch)
            taken[way].append(time.process_time() - start)
    return taken


def written(module: hlo.Module, turns: Mapping[tuple[str, ...], float]) -> float:
    """Bytes of all results that a device computes or copies, outside of the loop over its nodes."""
    names = hlo.named_loops(module)
    known = {loop: turns[path] for loop, path in names.items() if path in turns}
    total = 0.0
    for visit in module.walk():
        nodes = any(loop.trips is not None or names.get(loop.name, ("",))[-1] == "run" for loop in visit.loops)
        if not nodes and not visit.fused and visit.instruction.opcode in WRITERS:
            total += sum(visit.instruction.sizes) * hlo.runs(visit, known)
    return total


def timed(program: Mapping[str, Any], state: Any, batch: Any, seconds: float) -> dict[str, list[float]]:
    """Processor time of a step of each way, by rounds."""
    args, taken = {}, {way: [0.0][:0] for way in program}
    for way, each in program.items():
        own, shards = each.input_shardings[0]
        there = jax.tree.map(lambda x, lies: jax.device_put(jnp.array(x, copy=True), lies), state, own)
        args[way] = there, jax.device_put(batch, shards)
    start, order = time.perf_counter(), list(program)
    while time.perf_counter() - start < seconds or len(taken["fast"]) < 3:
        for way in order:
            held, given = args[way]
            began = time.process_time()
            held, _ = jax.block_until_ready(program[way](held, given))
            taken[way].append(time.process_time() - began)
            args[way] = held, given
        order.reverse()
    return taken


def mib(count: float) -> float:
    return round(count / 2**20, 1)


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(WIDTHS), choices=WIDTHS, help="MiB of gradients")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing, at least, for each row; 0 for none")
    parser.add_argument("--json", action="store_true", help="JSON lines in place of a table")
    options = parser.parse_args(argv)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={max(options.devices)}"
    for size in options.sizes:
        for nodes in options.nodes:
            for devices in options.devices:
                row = case(size, nodes, devices, options.seconds)
                if options.json:
                    print(json.dumps(row), flush=True)
                    continue
                if (size, nodes, devices) == (options.sizes[0], options.nodes[0], options.devices[0]):
                    print(f"| {' | '.join(row)} |\n|{'--:|' * len(row)}", flush=True)
                print(f"| {' | '.join(map(str, row.values()))} |", flush=True)


if __name__ == "__main__":
    main()
