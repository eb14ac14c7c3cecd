"""A compiler, or a device -> its entry in ``cost/calibration.json``: `python -m vnode.partition.calibrate v5e`.

    products of 512 to 4,096, passes over 1 to 64 MiB   ->   the parts of the peak rates that they reach
    small train steps, divided in three ways            ->   compiled / estimated memory and time

For a TPU, libtpu compiles the programs and estimates their cycles; no TPU is needed. ``here`` times the same programs
on the first device of this machine. `Machine.here` measures the rates of CPUs, so for CPUs only memory is fitted.
Entries must be written again when a compiler changes.

Knows a handful of programs, compiled programs and devices. Must not know how searches use an entry.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vnode.analysis.program import inline
from vnode.partition.compiler.stats import compiled_stats
from vnode.partition.compiler.target import Topology
from vnode.partition.cost.cache import Cache
from vnode.partition.cost.calibration import FILE, Calibration, Quantiles, entries
from vnode.partition.cost.measured_times import Measured
from vnode.partition.cost.split_cost import program_cost
from vnode.partition.cost.timed_pieces import TimedOp, traced_op
from vnode.partition.machine import Kind, Machine
from vnode.partition.machine.known_kinds import CLOCKS, KINDS, kind_named
from vnode.spmd.layout import from_spec
from vnode.spmd.sharded_program import as_spec_layout, flow_over_mesh, spec_of
from vnode.spmd.sharding_flow import follow

TOPOLOGIES = {"v4": "v4:2x2x2", "v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}
"""TPU topologies of eight devices."""

SIZES = (512, 1024, 2048, 4096)
"""The dimensions of matrix products."""

ROWS = (256, 1024, 4096, 16_384)
"""The numbers of rows, of 1,024 numbers each, of passes over memory."""

SHARES = (0.1, 0.5, 0.9)
"""The quantiles that an entry has of the programs' ratios."""

Seconds = Callable[[TimedOp], float]


def products() -> list[TimedOp]:
    """Matrix products, in the two dtypes that models compute in."""
    shapes = [jax.ShapeDtypeStruct((n, n), dtype) for n in SIZES for dtype in (jnp.bfloat16, jnp.float32)]
    return [traced_op(jnp.dot, shape, shape) for shape in shapes]


def passes() -> list[TimedOp]:
    """Fused element-wise operations and reductions."""

    def update(x: Any, y: Any) -> Any:
        return x * 0.9 + jnp.tanh(y) * 0.1

    shapes = [jax.ShapeDtypeStruct((n, 1024), jnp.float32) for n in ROWS]
    return [traced_op(f, *args) for x in shapes for f, args in ((update, (x, x)), (lambda x: x.sum(1), (x,)))]


def compiled_seconds(device: Any, kind: Kind) -> Seconds:
    """A function that gives the seconds of a timed op by the TPU compiler's estimated cycles."""
    place = jax.sharding.SingleDeviceSharding(device)

    def seconds(piece: TimedOp) -> float:
        given = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place) for each in piece.shapes]
        compiled = jax.jit(piece.function, out_shardings=place).lower(*given).compile()
        return compiled_stats(compiled).cycles / CLOCKS[kind.name]

    return seconds


def fit_entry(kind: Kind, seconds: Seconds, before: Calibration) -> Calibration:
    """A calibration entry with fitted rates.

    The time of a pass is a launch plus its bytes over a bandwidth: a line, fitted by least squares of relative errors.
    The rate of products is the median of the larger half.
    """
    several = passes()
    moved = np.array([(piece.cost.read + piece.cost.written) / kind.bandwidth for piece in several])
    taken = np.array([seconds(piece) for piece in several])
    columns = np.stack([moved / taken, 1 / taken], 1)
    (slope, launch), *_ = np.linalg.lstsq(columns, np.ones(len(several)), rcond=None)
    reached = []
    for piece in products()[len(SIZES) :]:
        ideal = sum(n / kind.rate(dtype) for dtype, n in piece.cost.matrix.items())
        reached.append(ideal / max(seconds(piece) - launch, ideal))
    share = min(1 / slope, 1.0)
    return dataclasses.replace(
        before, products=float(np.median(reached)), passes=float(share), launch=max(float(launch), 0.0)
    )


def steps() -> dict[str, tuple[Any, Sequence[Any], Mapping[str, Sequence[PartitionSpec]]]]:
    """Train steps, their arguments, and specs that divide these over ``x``: the batch, the state too, a layer."""
    P = PartitionSpec

    def dense(up: Any, down: Any, x: Any) -> Any:
        def loss(up: Any, down: Any) -> Any:
            return jnp.mean((jax.nn.gelu(x @ up) @ down - x) ** 2)

        grads = jax.grad(loss, (0, 1))(up, down)
        return up - 0.1 * grads[0], down - 0.1 * grads[1]

    def scanned(w: Any, v: Any, x: Any) -> Any:
        def loss(w: Any, v: Any) -> Any:
            @jax.checkpoint
            def layer(x: Any, both: Any) -> tuple[Any, None]:
                w, v = (each.astype(jnp.bfloat16) for each in both)
                return x + jax.nn.relu(x @ w) @ v, None

            return jnp.mean(jax.lax.scan(layer, x.astype(jnp.bfloat16), (w, v))[0].astype(jnp.float32) ** 2)

        grads = jax.grad(loss, (0, 1))(w, v)
        return w - 0.1 * grads[0], v - 0.1 * grads[1]

    def attention(qkv: Any, out: Any, x: Any) -> Any:
        def loss(qkv: Any, out: Any) -> Any:
            q, k, v = jnp.einsum("btd,dshe->sbthe", x, qkv)
            weights = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
            return jnp.mean((jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, out) + x) ** 2)

        grads = jax.grad(loss, (0, 1))(qkv, out)
        return qkv - 0.1 * grads[0], out - 0.1 * grads[1]

    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    batch, whole = P("x"), P()
    return {
        "dense": (
            dense,
            (shape(2048, 8192), shape(8192, 2048), shape(4096, 2048)),
            {"data": (whole, whole, batch), "FSDP": (batch, batch, batch), "model": (P(None, "x"), P("x"), whole)},
        ),
        "scanned": (
            scanned,
            (shape(8, 1024, 4096), shape(8, 4096, 1024), shape(8192, 1024)),
            {
                "data": (whole, whole, batch),
                "FSDP": (P(None, "x"), P(None, "x"), batch),
                "model": (P(None, None, "x"), P(None, "x"), whole),
            },
        ),
        "attention": (
            attention,
            (shape(1024, 3, 16, 64), shape(16, 64, 1024), shape(32, 512, 1024)),
            {
                "data": (whole, whole, batch),
                "FSDP": (batch, P(None, None, "x"), batch),
                "model": (P(None, None, "x"), P("x"), whole),
            },
        ),
    }


def spread(machine: Machine, devices: Sequence[Any]) -> tuple[Quantiles | None, Quantiles | None]:
    """Quantiles of compiled / estimated memory, and of seconds of computation where the compiler estimates them."""
    axes, mesh = {"x": len(devices)}, Mesh(np.array(devices), ("x",))
    platform, clock = devices[0].platform, CLOCKS.get(machine.kinds[0].name)
    memory, time = list[float](), list[float]()
    for step, args, ways in steps().values():
        traced = jax.make_jaxpr(step)(*args)
        program = inline(traced.jaxpr, traced.consts)
        for specs in ways.values():
            layouts = [from_spec(spec, x.shape, axes) for spec, x in zip(specs, args, strict=True)]
            flow = follow(program, layouts, axes, outputs=layouts[:2])
            lies = [NamedSharding(mesh, spec_of(as_spec_layout(each, axes))) for each in layouts]
            given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(args, lies, strict=True)]
            run = jax.jit(flow_over_mesh(flow, mesh), donate_argnums=(0, 1), keep_unused=True)
            found = compiled_stats(run.lower(*given).compile())
            cost = program_cost(flow, machine, machine.mesh(axes), donated=(0, 1), platform=platform)
            memory.append(found.memory / cost.memory.total)
            if clock is not None:
                time.append(found.cycles / clock / cost.compute)
    return quantiles(memory), quantiles(time)


def quantiles(ratios: Sequence[float]) -> Quantiles | None:
    """The quantiles 10%, 50% and 90%; None if there are no ratios."""
    return [round(float(each), 2) for each in np.quantile(ratios, SHARES)] if ratios else None


def write_entry(name: str, entry: Calibration) -> None:
    """Writes an entry into the file."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    content[name] = {
        field.name: round(value, 9) if isinstance(value, float) else value
        for field in dataclasses.fields(entry)
        if (value := getattr(entry, field.name)) != field.default
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(content[key])}" for key in content]
    Path(str(FILE)).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    entries.cache_clear()


def main(argv: Sequence[str] | None = None) -> None:
    """Fits the entry named on the command line, and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=[*TOPOLOGIES, "here"], help="a TPU, or the devices that are here")
    which = parser.parse_args(argv).kind
    if which == "here":
        devices = jax.devices()
        machine = Machine.here(devices)
        kind = machine.kinds[0]
        name = kind.name if kind.name in KINDS else devices[0].platform  # measured rates count as reached
        entry = Calibration.for_platform(devices[0].platform, kind.name)
        if kind.name in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                measured = Measured(devices[0], Cache(folder))
                entry = fit_entry(kind, lambda piece: measured.measure(piece)[0], entry)
    else:
        devices, machine = Topology(TOPOLOGIES[which]).devices(), Machine.tpu(TOPOLOGIES[which])
        kind = kind_named(which)
        name = kind.name
        entry = fit_entry(kind, compiled_seconds(devices[0], kind), Calibration.for_platform("tpu", name))
    write_entry(name, entry)
    memory, time = spread(machine, devices)  # estimated with the new rates
    write_entry(name, dataclasses.replace(entry, memory=memory, time=time))
    print(f"{name}: {entries()[name]}")


if __name__ == "__main__":
    main()
