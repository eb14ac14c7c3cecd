"""What is predicted of split train steps, beside what XLA makes of them.

`python -m benchmarks.partition_cost mlp transformer` compiles small steps for eight CPU devices, and prints for each
whether the collectives are those that were planned, and how far the predicted memory is off. With `--tpu v5e:2x4`
the steps are of useful sizes, compiled ahead of time by the TPU compiler, and the cycles that it estimates for the
whole step are compared with the sum over fused operations: by the roofline as calibrated, and by the data sheet.

This file knows models and the cost of programs. It must not know how a cost is found.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks import tpu
from benchmarks.partition_models.model import Model, specs

AXES = {"data": 2, "model": 4}


def models(size: str) -> dict[str, Callable[[], Model]]:
    """The steps, small ones for CPU devices or useful ones for TPUs."""
    from benchmarks.partition_models.alexnet import alexnet
    from benchmarks.partition_models.lstm import lstm
    from benchmarks.partition_models.resnet import resnet_101
    from benchmarks.partition_models.transformer import transformer
    from benchmarks.partition_models.transformer_scan import transformer_scan

    if size == "small":
        return {
            "mlp": lambda: mlp(512, 256),
            "transformer": lambda: transformer("small"),
            "scan": lambda: transformer_scan("small"),
            "lstm": lambda: lstm("small"),
            "alexnet": lambda: alexnet("small"),
            "resnet": lambda: resnet_101("small"),
        }
    sizes: dict[str, Any] = {"batch": 32, "length": 512, "vocabulary": 8192, "layers": 2}
    return {
        "mlp": lambda: mlp(4096, 16384),
        "transformer": lambda: transformer("paper", **sizes),
        "scan": lambda: transformer_scan("paper", **sizes),
        "alexnet": lambda: alexnet("paper"),
        "resnet": lambda: resnet_101("paper", batch=64, blocks=(1, 1, 1, 1)),
    }


def mlp(width: int, batch: int) -> Model:
    """Two blocks of two dense layers each, as in Megatron, and plain gradient descent."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from benchmarks.partition_models.model import Published

    def initial(key: jax.Array) -> Any:
        shapes = {"wi": (width, 4 * width), "wo": (4 * width, width)}
        return {
            "params": {
                block: {name: 0.02 * jax.random.normal(key, shape) for name, shape in shapes.items()}
                for block in ("one", "two")
            }
        }

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            h = jnp.tanh(batch["x"] @ params["one"]["wi"]) @ params["one"]["wo"] + batch["x"]
            return jnp.mean((jax.nn.gelu(h @ params["two"]["wi"]) @ params["two"]["wo"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], grads)}, {"loss": value}

    def examples(key: jax.Array) -> Any:
        return {"x": jax.random.normal(key, (batch, width)), "y": jax.random.normal(key, (batch, width))}

    placements = {"wi": P(None, "model"), "wo": P("model", None)}
    return Model("mlp", step, initial, examples, placements, Published(16 * width**2, "by hand"))


def compare(name: str, model: Model, topology: str | None) -> None:
    """Prints what is predicted and found of one step."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from vnode.analysis.program import inline
    from vnode.partition import Machine, Roofline, Times, accept, program_cost
    from vnode.partition.cost.lower_to_device import device_program
    from vnode.partition.machine.known_kinds import CLOCKS
    from vnode.spmd.layout import from_spec
    from vnode.spmd.sharded_program import as_spec_layout, flow_over_mesh, spec_of
    from vnode.spmd.sharding_flow import follow

    flat, tree = jax.tree.flatten((model.state, model.batch))
    traced = jax.make_jaxpr(lambda *a: jax.tree.leaves(model.step(*jax.tree.unflatten(tree, a))))(*flat)
    program = inline(traced.jaxpr, traced.consts)
    held = jax.tree.leaves(specs(model.state, model.placements), is_leaf=lambda x: isinstance(x, PartitionSpec))
    asked = [*held, *[PartitionSpec("data")] * (len(flat) - len(held))]
    layouts = [from_spec(s, v.aval.shape, AXES) for s, v in zip(asked, program.inputs, strict=True)]
    donated = range(len(held))
    outputs = [*layouts[: len(held)], *[None] * (len(program.outputs) - len(held))]
    flow = follow(program, layouts, AXES, outputs=outputs)

    platform = "cpu" if topology is None else "tpu"
    devices = jax.devices()[:8] if topology is None else tpu.topology(topology)
    mesh = Mesh(np.array(devices).reshape(tuple(AXES.values())), tuple(AXES))
    given = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=NamedSharding(mesh, spec_of(as_spec_layout(x, AXES))))
        for v, x in zip(program.inputs, layouts, strict=True)
    ]
    start = time.perf_counter()
    run = jax.jit(flow_over_mesh(flow, mesh), donate_argnums=tuple(donated), keep_unused=True)
    compiled = run.lower(*given).compile()
    compiling = time.perf_counter() - start

    machine = Machine.tpu(topology or "v5e:2x4")
    start = time.perf_counter()
    device = device_program(flow, AXES, platform=platform, donated=donated)
    cost = program_cost(device, machine, machine.mesh(AXES), platform=platform)
    costing = time.perf_counter() - start
    report = accept(compiled, cost)
    temporary = report.predicted.temporaries / max(report.compiled.temporary, 1) - 1
    print(f"{name}: {len(device.program.equations)} equations, cost in {costing:.2f} s, compiled in {compiling:.1f} s")
    print(f"  {report}".replace("\n", "\n  "))
    print(f"  temporary memory off by {temporary:+.1%}")
    if topology is not None:
        whole = report.compiled.cycles / CLOCKS[machine.kinds[0].name]
        bare = program_cost(device, machine, machine.mesh(AXES), times=Times((Roofline(0, False),))).compute
        off = f"calibrated {cost.compute / whole - 1:+.1%}, data sheet {bare / whole - 1:+.1%}"
        print(f"  compute: whole step {whole:.4g} s by the compiler, {off}")


def main(argv: list[str] | None = None) -> None:
    """Compares all steps that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--tpu", help="a topology such as v5e:2x4")
    options = parser.parse_args(argv)
    known = models("small" if options.tpu is None else "paper")
    for name in options.models or known:
        compare(name, known[name](), options.tpu)


if __name__ == "__main__":
    os.environ.update(tpu.ENVIRONMENT)
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
    main()
