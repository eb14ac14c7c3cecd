"""What a device holds of a step whose parameters are split over the model axis, on 1, 2, 4 and 8 devices.

`python -m benchmarks.sharded` compiles the transformer of `benchmarks.partition_models`, split as Megatron does, with
vnode's partitioner and with XLA's (`partition="xla"`), and prints for each the memory of a device, k times that of k
devices beside that of one, and how many collectives of each kind the program has. `--sequence` asks for what lies
between the layers to be split along the text, too (Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022, section 4.2.2). `--tpu` compiles for chips of a v5e:2x4 that need not be there.
Labelled: compiler (XLA's `memory_analysis`), nothing is timed.

This file knows the model and its placements. It must not know how a step is divided.
"""

import argparse
import contextlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks import tpu

SIZES = {"width": 256, "layers": 2, "length": 64, "vocabulary": 1024, "heads": 8}
NODES = 4
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def between_layers(mesh: Any) -> Any:
    """A context in which the layers' results are asked to be split along the text over the model axis."""
    import flax.linen as nn
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from benchmarks.partition_models.transformer import Transformer

    text, heads, hidden = (
        NamedSharding(mesh, PartitionSpec(None, *entries))
        for entries in (("model", None), (None, "model", None), (None, "model"))
    )
    given = {"out": heads, "down": hidden}
    made = {"query": heads, "key": heads, "value": heads, "up": hidden}

    def split(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, ask = context.module, jax.lax.with_sharding_constraint
        if context.method_name != "__call__" or isinstance(module, Transformer):
            return method(*args, **kwargs)
        if module.name in given:
            args = (ask(args[0], given[module.name]), *args[1:])
        return ask(method(*args, **kwargs), made.get(module.name, text))

    return nn.intercept_methods(split)


def compiled(
    chips: Sequence[Any], partition: str, reduction: str, sizes: dict[str, int], sequence: bool = False
) -> Any:
    """The step for devices along the model axis."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    import vnode
    from benchmarks.partition_models.model import specs
    from benchmarks.partition_models.transformer import transformer

    model = transformer("small", **sizes)
    mesh = Mesh(np.array(chips).reshape(1, -1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    placements = {**model.placements, "positions": PartitionSpec("model", None)} if sequence else model.placements

    def placed(leaf: Any, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def train_step(state: Any, batch: Any) -> Any:
        with between_layers(mesh) if sequence else contextlib.nullcontext():
            return model.step(state, batch)

    step = vnode.virtualize(
        train_step,
        virtual_nodes=NODES,
        placement=vnode.Placement(NODES, mesh=mesh, axis="data"),
        partition=partition,
        reduction=reduction,
        donate_argnums=0,
    )
    state = jax.tree.map(placed, model.state, specs(model.state, placements))
    return step.lower(state, model.batch).compile()


def total(program: Any) -> int:
    """Bytes that a device holds at most."""
    a = program.memory_analysis()
    return a.temp_size_in_bytes + a.argument_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", action="store_true", help="split what lies between the layers, too")
    parser.add_argument("--tpu", action="store_true", help="compile for v5e:2x4")
    parser.add_argument("--only", choices=["vnode", "xla"], help="one of the two partitioners")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in SIZES}
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    chips = tpu.topology("v5e:2x4") if options.tpu else jax.devices()
    print("partition  reduction  devices  MiB a device  times k of one  collectives")
    # XLA 0.10 cannot compile sums in any order over an axis of one device beside one that is left to it.
    for partition, reduction in (("vnode", "invariant"), ("vnode", "fast"), ("xla", "invariant")):
        if options.only not in (None, partition):
            continue
        alone = 0
        for devices in options.devices:
            program = compiled(chips[:devices], partition, reduction, sizes, options.sequence)
            held = total(program)
            alone = alone or held * devices
            found = Counter(re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", program.as_text()))
            counts = ", ".join(f"{n} {kind}" for kind, n in sorted(found.items())) or "none"
            row = f"{devices:7}  {held / 2**20:12.1f}  {held * devices / alone:14.2f}"
            print(f"{partition:9}  {reduction:9}  {row}  {counts}", flush=True)


if __name__ == "__main__":
    main()
