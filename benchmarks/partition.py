"""Plans as they are predicted, beside what the compiler makes of them: `python -m benchmarks.partition`.

Thirty plans for each of four train steps on eight devices: what experts do on three meshes, layouts of the state at
random, and strategies of all operators at random (with a seed). Each is compiled, once, and what the compiler says is
kept in a folder (`--builds`), so that a run can be stopped and taken up again; then it is compared with the prediction:

  tpu      compiled ahead of time for TPU v5e:2x4: bytes of collectives by kind, memory, cycles of computation
  cpu      compiled for eight CPU devices: bytes of collectives by kind, memory
  one-device   not plans: times of kernels measured one by one on a CPU device, and their sum beside the whole step's
  ranks    measured times of plans on eight CPU devices in turns, beside those predicted

This file knows models, plans and tables. It must not know how a cost is found, nor how a search works.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks import tpu
from benchmarks.report import Sheet

MESHES: tuple[dict[str, int], ...] = ({"x": 2, "y": 4}, {"x": 8}, {"x": 2, "y": 2, "z": 2})
PLANS = 30
EXPERTS = ("data parallel", "FSDP", "Megatron over", "one weird trick")
"""Of what experts do, what is among the plans."""
DRAWN = ("state", "a tenth", "operators")
"""What is drawn at random: how the state lies; the strategies of a tenth of an expert's operators; those of all."""
TOPOLOGY = "v5e:2x4"


def models(platform: str) -> dict[str, Callable[[], Any]]:
    """The train steps by name, larger for TPUs than for CPUs."""
    from benchmarks.partition_cost import mlp
    from benchmarks.partition_models.alexnet import alexnet
    from benchmarks.partition_models.lstm import lstm
    from benchmarks.partition_models.transformer import transformer

    if platform == "cpu":
        words: dict[str, Any] = {"batch": 16, "length": 32, "vocabulary": 256, "layers": 2, "width": 64, "heads": 8}
        pictures: dict[str, Any] = {"batch": 32, "channels": (16, 32, 48, 32, 32), "dense": 128, "classes": 16}
        return {
            "mlp": lambda: mlp(256, 128),
            "transformer": lambda: transformer("small", **words),
            "lstm": lambda: lstm("small", batch=32, length=10, vocabulary=256, units=128),
            "alexnet": lambda: alexnet("small", image=64, **pictures),
        }
    words = {"batch": 32, "length": 512, "vocabulary": 8192, "layers": 2, "width": 1024, "heads": 16}
    return {
        "mlp": lambda: mlp(2048, 32768),
        "transformer": lambda: transformer("small", **words),
        "lstm": lambda: lstm("paper", batch=512),
        "alexnet": lambda: alexnet("paper", batch=1024),
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    """A way to divide a step.

    Attributes:
      name: what the table calls it.
      axes: of the mesh.
      flow: layouts through the step.
      donated: how many inputs, the state, are given away.
    """

    name: str
    axes: Mapping[str, int]
    flow: Any
    donated: int


def plans(model: Any, seed: int = 0) -> Iterator[Plan]:
    """Thirty different plans: all that experts would make, then plans drawn at random, by turns of each kind.

    Args:
      model: a `benchmarks.partition_models.Model`.
      seed: of what is drawn.
    """
    import jax

    from vnode.analysis.program import inline
    from vnode.partition import Roofline, Times
    from vnode.partition.machine import Machine
    from vnode.partition.searches import Estimate, as_problem, experts
    from vnode.spmd.layout import from_spec
    from vnode.spmd.sharding_flow import follow

    flat, tree = jax.tree.flatten((model.state, model.batch))
    leaves = len(jax.tree.leaves(model.state))
    traced = jax.make_jaxpr(lambda *a: jax.tree.leaves(model.step(*jax.tree.unflatten(tree, a))))(*flat)
    program = inline(traced.jaxpr, traced.consts)
    generator = np.random.default_rng(seed)
    searches = {}
    seen: set[str] = set()

    def new(flow: Any) -> bool:
        said = repr([flow.inputs, flow.outputs, [(s.choice.ways if s.choice else None) for s in flow.steps]])
        fresh = said not in seen
        seen.add(said)
        return fresh

    for axes in MESHES:
        model_ = Estimate(Machine.tpu(TOPOLOGY), axes, Times((Roofline(),)))  # the list is the same whatever is known
        search = as_problem(program, axes, model_, carried={i: i for i in range(leaves)})
        known = {
            name: strategies
            for name, strategies in experts(search, range(leaves, len(flat))).items()
            if name.startswith(EXPERTS)
        }
        searches[where(axes)] = search, list(known.values())
        for name, strategies in known.items() if axes is MESHES[0] else ():  # those on others divide by as many
            flow = search.flow(strategies)
            if new(flow):
                yield Plan(f"{name} on {where(axes)}", axes, flow, leaves)
    number = 0
    while len(seen) < PLANS:
        kind, axes = number % len(DRAWN), MESHES[number // len(DRAWN) % len(MESHES)]
        search, known = searches[where(axes)]
        if DRAWN[kind] == "state":
            layouts = [
                from_spec(drawn(generator, v.aval.shape, axes, k >= leaves), v.aval.shape, axes)
                for k, v in enumerate(program.inputs)
            ]
            outputs = [*layouts[:leaves], *[None] * (len(program.outputs) - leaves)]
            flow = follow(program, layouts, axes, outputs=outputs)
        else:
            flow = search.flow(possible(search.problem, generator, known if DRAWN[kind] == "a tenth" else ()))
        if new(flow):
            yield Plan(f"{DRAWN[kind]} at random {number // len(DRAWN)} on {where(axes)}", axes, flow, leaves)
        number += 1


def possible(problem: Any, generator: np.random.Generator, starts: Sequence[Any] = ()) -> Any:
    """An assignment drawn at random; what cannot go together, such as other pieces of a sum than there are, is redrawn.

    Args:
      problem: a `vnode.partition.searches.Problem`.
      generator: of what is drawn.
      starts: assignments; of one of them about a tenth is drawn. By default all is.
    """

    def draw(i: int) -> int:
        return generator.choice(np.flatnonzero(np.isfinite(problem.seconds[i])))

    drawn = np.array([draw(i) for i in range(problem.operators)])
    if starts:
        kept = generator.random(len(drawn)) < 0.9
        drawn = np.where(kept, starts[generator.integers(len(starts))], drawn)
    while not np.isfinite(problem.cost(drawn)):
        for i in range(problem.operators):
            own = [each for each in problem.edges if i in (each.start, each.end)]
            terms = [each.seconds[drawn[each.start], drawn[each.end]] for each in own]
            if not np.isfinite([problem.seconds[i][drawn[i]], *terms]).all():
                drawn[i] = draw(i)
    return drawn


def where(axes: Mapping[str, int]) -> str:
    """A mesh in a name: ``"2x4"``."""
    return "x".join(map(str, axes.values()))


def drawn(generator: np.random.Generator, shape: tuple[int, ...], axes: Mapping[str, int], examples: bool) -> Any:
    """A layout at random; of examples the first dimension is divided by as many axes as can."""
    from jax.sharding import PartitionSpec

    cuts: list[list[str]] = [[] for _ in shape]
    for axis, n in axes.items():
        fits = [d for d, size in enumerate(shape) if size % (n * int(np.prod([axes[a] for a in cuts[d]]))) == 0]
        fits = [d for d in fits if d == 0] if examples else fits
        if fits and (examples or generator.random() < 0.5):
            cuts[generator.choice(fits)].append(axis)
    return PartitionSpec(*(tuple(cut) or None for cut in cuts))


@dataclasses.dataclass(frozen=True)
class Build:
    """What a compiler made of a plan, as far as it is compared; looks like a `jax.stages.Compiled`.

    Attributes:
      text: of the compiled program.
      memory: what `memory_analysis` said, by name, but of temporaries what is held, without gaps.
      seconds: that compiling took.
    """

    input_shardings: ClassVar[tuple[()]] = ()
    output_shardings: ClassVar[tuple[()]] = ()
    text: str
    memory: Mapping[str, int]
    seconds: float

    def as_text(self) -> str:
        """The compiled program."""
        return self.text

    def memory_analysis(self) -> Any:
        """The compiler's own account of memory."""
        return argparse.Namespace(**self.memory)


MEMORY = [f"{name}_size_in_bytes" for name in ("argument", "output", "alias", "temp")]


def build(folder: Path, model: str, plan: Plan, platform: str, only_built: bool = False) -> Build | None:
    """Compiles a plan, or reads what was compiled before by the same versions; nothing else if `only_built`."""
    import jax
    from jax.sharding import Mesh, NamedSharding

    from vnode.placement.temporary import temporary_of
    from vnode.spmd.sharded_program import as_spec_layout, flow_over_mesh, spec_of

    devices = jax.devices()[:8] if platform == "cpu" else tpu.topology(TOPOLOGY)
    mesh = Mesh(np.array(devices).reshape(tuple(plan.axes.values())), tuple(plan.axes))
    given = [
        jax.ShapeDtypeStruct(
            v.aval.shape, v.aval.dtype, sharding=NamedSharding(mesh, spec_of(as_spec_layout(layout, plan.axes)))
        )
        for v, layout in zip(plan.flow.program.inputs, plan.flow.inputs, strict=True)
    ]
    run = jax.jit(flow_over_mesh(plan.flow, mesh), donate_argnums=tuple(range(plan.donated)), keep_unused=True)
    lowered = run.lower(*given)
    packages = ["jaxlib"] + ["libtpu"] * (platform == "tpu")
    about = [platform, lowered.as_text(), *(f"{name} {importlib.metadata.version(name)}" for name in packages)]
    file = folder / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]}.json.gz"
    if file.exists():
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            return Build(**json.load(stream))
    if only_built:
        return None
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    memory = {name: getattr(analysis, name) for name in MEMORY} | {"temp_size_in_bytes": temporary_of(compiled).held}
    made = Build(compiled.as_text() or "", memory, seconds)
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    with gzip.open(partial, "wt", encoding="utf-8") as stream:
        json.dump(dataclasses.asdict(made), stream)
    partial.replace(file)
    return made


@dataclasses.dataclass(frozen=True)
class Row:
    """A plan's prediction beside what the compiler made of it.

    Attributes:
      plan: its name.
      exact: whether the bytes of each kind of collective are as predicted.
      near: whether the bytes that a device sends are as predicted, up to the tolerance of `accept`.
      bytes: predicted and found, that a device sends.
      memory: predicted and found.
      seconds: of computation, predicted and by the compiler's cycles; 0 on CPUs.
      step: of computation and exchanges one after the other. The compiler says what is sent, and not how long that
        takes, which is what the machine's links take for it on both sides.
    """

    plan: str
    exact: bool
    near: bool
    bytes: tuple[float, float]
    memory: tuple[int, int]
    seconds: tuple[float, float]
    step: tuple[float, float]


def compared(plan: Plan, built: Build, platform: str) -> Row:
    """Predicts what a plan takes, and looks at what was compiled."""
    from vnode.partition import Machine, Roofline, Times, accept, program_cost
    from vnode.partition.cost.lower_to_device import device_program
    from vnode.partition.machine.known_kinds import CLOCKS

    machine = Machine.tpu(TOPOLOGY)
    device = device_program(plan.flow, plan.axes, platform=platform, donated=range(plan.donated))
    times = Times((Roofline(launch=0),))
    cost = program_cost(device, machine, machine.mesh(plan.axes), times=times, platform=platform)
    found = accept(built, cost)
    clock = CLOCKS[machine.kinds[0].name]
    seconds = found.compiled.cycles / clock if platform == "tpu" else 0.0
    return Row(
        plan.name,
        found.planned == found.found,
        found.exchange_accepted,
        found.sent,
        (found.predicted.total, found.memory),
        (cost.compute, seconds),
        (cost.compute + cost.exchange, seconds + cost.exchange),
    )


APART = 0.1
"""By how much, of the larger, figures of two plans differ whose ranks are looked at apart: what predictions may err."""


def summary(name: str, rows: Sequence[Row], whole: bool) -> list[str]:
    """A line of the table: errors relative to what was found, and rank correlations."""
    from scipy.stats import kendalltau

    def errors(pairs: Sequence[tuple[float, float]]) -> list[str]:
        off = np.abs([a / b - 1 for a, b in pairs])
        tau = kendalltau(*np.transpose(pairs)).statistic
        signs = [
            math.copysign(1, (p - q) * (a - b))
            for (p, a), (q, b) in itertools.combinations(pairs, 2)
            if abs(a - b) > APART * max(a, b) and p != q
        ]
        return [
            f"{np.mean(off):.1%}",
            f"{np.median(off):.1%}",
            f"{np.max(off):.1%}",
            f"{tau:.2f}",
            f"{np.mean(signs):.2f}",
        ]

    near = sum(abs(a / b - 1) <= 0.1 for a, b in (row.memory for row in rows))
    n = len(rows)
    cells = [name, str(n), f"{sum(r.exact for r in rows)}", f"{sum(r.near for r in rows)}", f"{near}"]
    cells += errors([row.memory for row in rows])
    if whole:
        cells += errors([row.seconds for row in rows]) + errors([row.step for row in rows])
    return cells


def on_one_device(names: Sequence[str], folder: Path) -> Sheet:
    """Times of kernels on one CPU device, measured one by one, and their sum beside the measured whole step."""
    import jax

    from vnode.analysis.program import inline
    from vnode.partition import Cache, Machine, Measured, Roofline, Times, program_cost
    from vnode.partition.cost.lower_to_device import DeviceProgram, simplify
    from vnode.partition.cost.timed_pieces import program_op

    rows = []
    machine = Machine.here(jax.devices()[:1])
    measured = Measured(cache=Cache(folder))
    for name in names:
        model = models("cpu")[name]()
        flat, tree = jax.tree.flatten((model.state, model.batch))
        traced = jax.make_jaxpr(lambda *a, m=model, t=tree: jax.tree.leaves(m.step(*jax.tree.unflatten(t, a))))(*flat)
        program = simplify(inline(traced.jaxpr, traced.consts))
        times = Times((measured, Roofline()))
        device = DeviceProgram(program, {})
        cost = program_cost(device, machine, machine.mesh({"x": 1}), times=times, platform="cpu")
        whole, noise = measured.measure(program_op(program))
        share = cost.sources.get("measured", 0.0) / cost.compute
        figures = [f"{1e3 * x:.2f}" for x in (cost.compute, cost.noise, whole, noise)]
        rows.append([name, f"{share:.0%}", *figures, f"{cost.compute / whole - 1:+.0%}"])
        print("  ".join(rows[-1]), flush=True)
    heads = ["model", "measured", "sum of kernels, ms", "noise, ms", "whole step, ms", "noise, ms", "difference"]
    return Sheet("Sums of kernels on one CPU device", heads, rows)


def ranks(names: Sequence[str], count: int, rounds: int, seed: int) -> Sheet:
    """Step times of plans on eight CPU devices, in turns, beside those predicted; pairs within noise left out."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding

    from vnode.partition import Machine, program_cost
    from vnode.spmd.sharded_program import as_spec_layout, flow_over_mesh, spec_of

    machine = Machine.here(jax.devices()[:8])
    rows = []
    for name in names:
        runs, said = [], []
        for plan in itertools.islice(plans(models("cpu")[name](), seed), count):
            mesh = Mesh(np.array(jax.devices()[:8]).reshape(tuple(plan.axes.values())), tuple(plan.axes))
            values = [
                jax.device_put(
                    jnp.ones(v.aval.shape, v.aval.dtype), NamedSharding(mesh, spec_of(as_spec_layout(x, plan.axes)))
                )
                for v, x in zip(plan.flow.program.inputs, plan.flow.inputs, strict=True)
            ]
            run = jax.jit(flow_over_mesh(plan.flow, mesh))
            jax.block_until_ready(run(*values))
            runs.append((run, values))
            cost = program_cost(plan.flow, machine, machine.mesh(plan.axes), platform="cpu")
            said.append(cost.compute + cost.exchange + cost.transfer)
        samples = np.zeros((rounds, len(runs)))
        for row in samples:
            for k, (run, values) in enumerate(runs):
                start = time.perf_counter()
                jax.block_until_ready(run(*values))
                row[k] = time.perf_counter() - start
        middle = np.median(samples, axis=0)
        low, high = np.percentile(samples, [25, 75], axis=0)
        noise = (high - low) / 2
        pairs = [(i, j) for i, j in itertools.combinations(range(len(runs)), 2)]
        apart = [(i, j) for i, j in pairs if abs(middle[i] - middle[j]) > noise[i] + noise[j]]
        right = sum((middle[i] < middle[j]) == (said[i] < said[j]) for i, j in apart)
        tau = 2 * right / max(len(apart), 1) - 1
        between = f"{1e3 * middle.min():.0f} to {1e3 * middle.max():.0f}"
        rows.append([name, str(len(runs)), between, f"{len(apart)} of {len(pairs)}", str(right), f"{tau:.2f}"])
    heads = ["model", "plans", "measured steps, ms", "pairs apart", "in the predicted order", "tau of these"]
    return Sheet("Ranks of plans on eight CPU devices", heads, rows)


def main(argv: list[str] | None = None) -> None:
    """Compiles what is not there yet, and prints the table; with `--only-built` of what is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", choices=["cpu", "tpu", "one-device", "ranks"])
    parser.add_argument("models", nargs="*", help="mlp, transformer, lstm, alexnet; by default all")
    parser.add_argument("--builds", type=Path, default=Path("out/builds"), help="where compiled plans are kept")
    parser.add_argument("--only-built", action="store_true", help="compile nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=PLANS, help="of plans that are ranked")
    parser.add_argument("--rounds", type=int, default=15, help="how often each of them runs")
    options = parser.parse_args(argv)
    if options.platform == "one-device":
        print(on_one_device(options.models or ["mlp", "transformer", "lstm"], options.builds / "measured").markdown())
        return
    if options.platform == "ranks":
        print(ranks(options.models or ["mlp"], options.count, options.rounds, options.seed).markdown())
        return
    known = models(options.platform)
    cells, lines = [], []
    for name in options.models or known:
        rows = []
        for plan in plans(known[name](), options.seed):
            built = build(options.builds, name, plan, options.platform, options.only_built)
            if built is None:
                continue
            row = compared(plan, built, options.platform)
            rows.append(row)
            ratios = [f"{a / max(b, 1e-12) - 1:+.1%}" for a, b in (row.bytes, row.memory, row.seconds)]
            said = "exact" if row.exact else "near" if row.near else "differ"
            lines.append([name, row.plan, said, *ratios[: 3 if options.platform == "tpu" else 2]])
            print("  ".join(lines[-1]), flush=True)
        if rows:
            cells.append(summary(name, rows, options.platform == "tpu"))
    heads = ["model", "plans", "collectives exact", "sent as predicted", "memory within 10%"]
    five = ["mean", "median", "largest", "tau", f"tau of what is {APART:.0%} apart"]
    heads += [f"memory, {x}" for x in five]
    heads += [f"{what}, {x}" for what in ("compute", "step") for x in five] if options.platform == "tpu" else []
    where_ = TOPOLOGY if options.platform == "tpu" else "eight CPU devices"
    print(Sheet(f"Predicted beside compiled for {where_}", heads, cells).markdown())


if __name__ == "__main__":
    os.environ.update(tpu.ENVIRONMENT)
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
    main()
