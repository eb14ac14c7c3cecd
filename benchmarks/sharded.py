"""What a device holds of a step whose parameters are split over the model axis, on 1, 2, 4 and 8 CPU devices.

`python -m benchmarks.sharded` compiles the transformer of `benchmarks.partition_models`, split as Megatron does, with
vnode's partitioner and with XLA's (`partition="xla"`), and prints for each the memory of a device, k times that of k
devices beside that of one, and how many collectives of each kind the program has. Labelled: compiler (XLA's
`memory_analysis`), nothing is timed.

This file knows the model and its placements. It must not know how a step is divided.
"""

import argparse
import os
import re
from collections import Counter
from typing import Any

SIZES = {"width": 256, "layers": 2, "length": 64, "vocabulary": 1024, "heads": 8}
NODES = 4
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def compiled(devices: int, partition: str, reduction: str) -> Any:
    """The step for so many devices along the model axis."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import vnode
    from benchmarks.partition_models.model import specs
    from benchmarks.partition_models.transformer import transformer

    model = transformer("small", **SIZES)
    mesh = jax.make_mesh(
        (1, devices), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:devices]
    )

    def placed(leaf: Any, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    step = vnode.virtualize(
        model.step,
        virtual_nodes=NODES,
        placement=vnode.Placement(NODES, mesh=mesh, axis="data"),
        partition=partition,
        reduction=reduction,
        donate_argnums=0,
    )
    state = jax.tree.map(placed, model.state, specs(model.state, model.placements))
    return step.lower(state, model.batch).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print("partition  reduction  devices  MiB a device  times k of one  collectives")
    # XLA 0.10 cannot compile sums in any order over an axis of one device beside one that is left to it.
    for partition, reduction in (("vnode", "invariant"), ("vnode", "fast"), ("xla", "invariant")):
        alone = 0
        for devices in (1, 2, 4, 8):
            program = compiled(devices, partition, reduction)
            a = program.memory_analysis()
            total = a.temp_size_in_bytes + a.argument_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes
            alone = alone or total
            found = Counter(re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", program.as_text()))
            counts = ", ".join(f"{n} {kind}" for kind, n in sorted(found.items())) or "none"
            sizes = f"{devices:7}  {total / 2**20:12.1f}  {total * devices / alone:14.2f}"
            print(f"{partition:9}  {reduction:9}  {sizes}  {counts}", flush=True)


if __name__ == "__main__":
    main()
