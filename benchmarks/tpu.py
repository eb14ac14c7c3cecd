"""Compiles steps for Cloud TPU without a TPU, and reads off what the compiler itself says.

`python -m benchmarks.tpu v5e:2x4` prints one JSON line per contender. It needs the package `libtpu`, whose compiler
runs on any x86 Linux machine. Nothing is executed, so there are no times here: memory is the compiler's plan, cycles
are the compiler's estimate for compute (collectives have none), and the collectives are counted in the compiled text.

This file knows topologies and compiled programs. It must not know how a contender splits its step.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Read by libtpu when it starts: do not ask a metadata server which machine this is, and let several processes compile.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
TOPOLOGIES = ("v5e:2x4", "v5e:16x16")


@dataclass(frozen=True)
class Figures:
    """What the TPU compiler says about one compiled step, per device.

    Attributes:
        temp_bytes: Temporary memory in HBM, without gaps between arrays.
        argument_bytes: Arguments in HBM.
        cycles: Estimated cycles of compute, loops counted as often as they run.
        loop_cycles: Those of them that are spent in loops.
        inside: Collectives in a loop.
        outside: Collectives outside every loop.
        outside_bytes: Bytes that a device receives in the latter.
        inside_bytes: Bytes that a device receives in the former, once per turn of the loop.
        loops: Trip counts of the outermost loops; None where they are run-time values.
    """

    temp_bytes: int
    argument_bytes: int
    cycles: int
    loop_cycles: int
    inside: int
    outside: int
    inside_bytes: int
    outside_bytes: int
    loops: list[int | None]


def installed() -> bool:
    """Whether the TPU compiler is here."""
    return importlib.util.find_spec("libtpu") is not None


def topology(name: str) -> list[Any]:
    """The devices of a topology such as `v5e:2x4`; they can be compiled for and not run on."""
    from jax.experimental import topologies

    options = {"chip_config_name": "megacore"} if name.startswith("v4") else {}  # both cores of a chip as one device
    return topologies.get_topology_desc(name, platform="tpu", **options).devices


def figures(compiled: Any, known: Mapping[tuple[str, ...], float]) -> Figures:
    """Reads a compiled step.

    Args:
        compiled: The result of `lowered.compile()`.
        known: Turns of loops of run-time length, by their names: `Contender.turns`.
    """
    from benchmarks import hlo
    from vnode.placement.temporary import temporary_of

    module = hlo.parse(compiled.as_text())
    found = hlo.collectives(module)
    turns = {loop: known[names] for loop, names in hlo.named_loops(module).items() if names in known}
    memory = compiled.memory_analysis()
    return Figures(
        temp_bytes=temporary_of(compiled).held,
        argument_bytes=memory.argument_size_in_bytes,
        cycles=hlo.cycles(module, turns),
        loop_cycles=hlo.cycles(module, turns, in_loops=True),
        inside=sum(c.inside for c in found),
        outside=sum(not c.inside for c in found),
        inside_bytes=sum(c.bytes for c in found if c.inside),
        outside_bytes=sum(c.bytes for c in found if not c.inside),
        loops=hlo.trip_counts(module),
    )


def compile_contender(make: Callable, model: Any, name: str, nodes_per_device: int, examples_per_node: int) -> dict:
    """Compiles one contender for a topology.

    Returns:
        Its figures for one step (cycles of all calls, where a step takes several), the seconds it took, and the text.
    """
    import jax

    devices = topology(name)
    nodes = nodes_per_device * len(devices)
    contender = make(model, nodes, devices)
    pieces = contender.pieces(model.batch(nodes * examples_per_node))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (contender.state, pieces[0]))
    start = time.perf_counter()
    lowered = contender.function.lower(*shapes)
    lowering = time.perf_counter() - start
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    measured = dataclasses.asdict(figures(compiled, contender.turns()))
    measured["cycles"] *= len(pieces)
    return {
        "topology": name,
        "contender": contender.name,
        "nodes": nodes,
        "lower_seconds": lowering,
        "compile_seconds": seconds,
        **measured,
        "held_bytes": contender.held,
        "text": compiled.as_text(),
    }


def main(argv: list[str] | None = None) -> None:
    """Prints one JSON line per topology and contender."""
    from benchmarks import contenders, models

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topologies", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--contenders", default=",".join(contenders.NAMES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--nodes-per-device", type=int, default=8)
    parser.add_argument("--examples-per-node", type=int, default=8)
    parser.add_argument("--dump", help="a folder for the compiled texts")
    options = parser.parse_args(argv)
    if not installed():
        sys.exit("the TPU compiler is not installed: pip install 'vnode[tpu-aot]'")

    import jax.numpy as jnp

    model = models.transformer(
        layers=options.layers,
        width=options.width,
        heads=max(1, options.width // 64),
        length=options.length,
        vocabulary=options.vocabulary,
        dtype=jnp.bfloat16,
    )
    for name in options.topologies:
        for contender in options.contenders.split(","):
            if not contenders.available(contender):
                continue
            row = compile_contender(
                contenders.FACTORIES[contender], model, name, options.nodes_per_device, options.examples_per_node
            )
            text = row.pop("text")
            if options.dump:
                os.makedirs(options.dump, exist_ok=True)
                file = f"{name}-{contender}.hlo".replace(" ", "-").replace(":", "-")
                with open(os.path.join(options.dump, file), "w") as f:
                    f.write(text)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main()
