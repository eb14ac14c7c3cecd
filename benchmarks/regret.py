"""Searched plans and experts' plans, all as compiled: `python -m benchmarks.regret run|table`.

    python -m benchmarks.regret run --models llama,mamba --machine v5e:2x4 --out before.json
    python -m benchmarks.regret table before.json after.json

`run` searches a plan of each model and compiles it, then compiles what experts would write: data parallel, FSDP,
Megatron's splits, these with ZeRO. Machines are slices of TPUs, compiled for ahead of time, or `cpu:8`, of which only
memory is compared. A build is kept in a folder and a result in the file as soon as it is there, so that a run can be
stopped and taken up again. `table` compares two runs: regret is how much longer the plan of the second one takes than
the best that was compiled in either.

Seconds of a step are the compiler's estimated cycles by the clock, and after them the compiled collectives on the
machine's links. Of two plans, each in time for the other's exchange to hide behind computation, the order may differ.

This file knows models, plans and compiled programs. It must not know how a plan is found.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tpu
from benchmarks.report import Sheet

MIB = 1 << 20
BUDGET = 60.0

WORDS = {"batch": 32, "length": 512, "vocabulary": 8192, "width": 1024, "heads": 16}
SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "alexnet": ("alexnet", {"batch": 1024}),
    "lstm": ("lstm-4k", {"batch": 512}),
    "transformer": ("transformer", {**WORDS, "layers": 2}),
    "transformer-scan": ("transformer-scan", {**WORDS, "layers": 24}),
    "nmt": ("nmt", {"batch": 128}),
    "experts": ("experts", {"batch": 32, "length": 256, "vocabulary": 8192, "layers": 2, "width": 512, "hidden": 2048}),
    "wresnet-50": ("wresnet-50", {"batch": 128}),
    "inception-v3": ("inception-v3", {"batch": 128}),
    "resnet-101": ("resnet-101", {"batch": 128}),
}
"""Models of papers: their names in `benchmarks.partition_models`, and what is changed of the papers' sizes."""

BFLOAT16 = ("transformer-scan", "experts")
"""Those that compute in bfloat16; the others do so in float32."""


def models() -> dict[str, Callable[[], Any]]:
    """All train steps by name, the realistic ones first."""
    import jax.numpy as jnp

    from benchmarks.partition_models import MODELS
    from benchmarks.partition_models.realistic import REALISTIC

    def of_paper(name: str) -> Any:
        known, sizes = SIZES[name]
        return MODELS[known]("paper", jnp.bfloat16 if name in BFLOAT16 else jnp.float32, **sizes)

    return {**REALISTIC, **{name: functools.partial(of_paper, name) for name in SIZES}}


def machine_and_devices(name: str) -> tuple[Any, list[Any]]:
    """A machine, and devices to compile for in its order.

    Args:
        name: A slice of TPUs, or `cpu:N`.
    """
    import jax

    from vnode.partition import Machine

    if name.startswith("cpu:"):
        devices = jax.devices()[: int(name[4:])]
        return Machine.here(devices), devices
    return Machine.tpu(name), list(tpu.topology(name))


def compiled_figures(compiled: Any, over_nodes: int) -> dict[str, Any]:
    """What a compiler says of a program, in numbers that can be written down.

    Args:
        compiled: A `jax.stages.Compiled`.
        over_nodes: How often loops over a device's nodes run, whose length the text does not tell.
    """
    from vnode.partition.compiler.stats import compiled_stats

    stats = compiled_stats(compiled, over_nodes)
    return {
        "memory": stats.memory,
        "gaps": stats.gaps,
        "cycles": stats.cycles,
        "collectives": [[c.kind, c.bytes, c.devices, c.runs, c.groups] for c in stats.collectives if c.runs],
    }


def built(plan: Any, devices: Sequence[Any], folder: Path) -> dict[str, Any]:
    """Compiles a plan, or reads what the same compiler said of the same program before.

    Returns:
        As `compiled_figures`, with the seconds that it took; or `refused`, the compiler's message.
    """
    import jax

    lowered = plan.step(devices).executor.lower_for(plan.args, {})
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("jaxlib", "libtpu") if installed(name)]
    about = [lowered.as_text(), str(devices[0].device_kind), *packages, str(max(plan.counts))]
    file = folder / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]}.json"
    if file.exists():
        return json.loads(file.read_text())
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found: dict[str, Any] = {"refused": first_line(error)}
    else:
        found = compiled_figures(compiled, max(plan.counts))
    found["compile_seconds"] = round(time.perf_counter() - began, 1)
    written(file, found)
    return found


def installed(package: str) -> bool:
    """Whether a package is installed."""
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without paths, up to 200 characters."""
    return re.sub(r"/\S+", "", str(error).splitlines()[0] if str(error) else type(error).__name__)[:200]


def written(file: Path, content: Any, indent: int | None = None) -> None:
    """Writes JSON in the place of a file at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(content, indent=indent) + "\n" * (indent is not None))
    beside.replace(file)


def exchange_seconds(collectives: Sequence[Sequence[Any]], machine: Any, mesh: Mapping[str, int]) -> float:
    """Seconds that compiled collectives take on a machine's links, one after another.

    Args:
        collectives: As `compiled_figures` has them; groups that are not listed are of neighbours.
        machine: A `vnode.partition.Machine`.
        mesh: Sizes of the axes, in whose order the program counts devices.
    """
    from vnode.partition.hlo import Collective
    from vnode.partition.plan import compiled_figures as links

    order = machine.mesh(mesh).devices
    several = [Collective(kind, size, devices, runs, groups) for kind, size, devices, runs, groups in collectives]
    return sum(links.exchange_seconds(each, machine, order) for each in several)


def row(plan: Any, devices: Sequence[Any], folder: Path) -> dict[str, Any]:
    """A plan's name and what is said of it, beside what the compiler makes of it."""
    from vnode.partition.machine.known_kinds import CLOCKS

    figures, machine = plan.figures, plan.machine
    found = built(plan, devices, folder)
    made: dict[str, Any] = {
        "name": plan.name,
        "mesh": "x".join(map(str, plan.mesh.values())),
        "nodes": plan.virtual_nodes,
        "said": {
            "memory": figures.memory,
            "seconds": figures.seconds,
            "compute": figures.compute,
            "exchange": figures.exchange,
        },
        "on_host": figures.host + figures.aside + figures.far,
        "transfer": figures.transfer,
        "compile_seconds": found["compile_seconds"],
    }
    if "refused" in found:
        return {**made, "refused": found["refused"]}
    moved: dict[str, int] = {}
    for kind, size, _, runs, _ in found["collectives"]:
        moved[kind] = moved.get(kind, 0) + size * runs
    made |= {"memory": found["memory"], "gaps": found["gaps"], "collectives": moved}
    clock = CLOCKS.get(machine.kinds[0].name)
    if clock and found["cycles"]:
        compute, exchange = found["cycles"] / clock, exchange_seconds(found["collectives"], machine, plan.mesh)
        made |= {"compute": compute, "exchange": exchange, "seconds": compute + exchange + figures.transfer}
    return made


def expert_plans(model: Any, machine: Any, nodes: int) -> Iterator[tuple[str, Any]]:
    """What experts would write, by name, with all that is made from it as soon as it is asked for.

    Args:
        model: A `benchmarks.partition_models.Model`.
        machine: A `vnode.partition.Machine`.
        nodes: V.
    """
    import jax

    from vnode.partition.plan.candidates import MEGATRON, Candidate, MeshSearch
    from vnode.partition.plan.meshes import NODES
    from vnode.partition.plan.predict import platform_of
    from vnode.partition.plan.search import plan_of
    from vnode.partition.plan.search_subject import on_nodes, subject_of

    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (model.state, model.batch))
    subject = subject_of(on_nodes(model.step, nodes, {"donate_argnums": 0}), args)
    count, platform = len(machine.devices), platform_of(machine)
    limit = min(kind.memory for kind in machine.kinds)

    def named(candidate: Candidate) -> tuple[str, Any]:
        name = f"{candidate.name} {'x'.join(map(str, candidate.mesh.values()))}"
        return name, plan_of(candidate, limit)

    on = MeshSearch(subject, machine, {NODES: count}, platform, None)
    yield named(on.candidate("FSDP", on.undivided, shard_state=True))
    yield named(on.candidate("data parallel", on.undivided))
    for inner in (2, 4):
        on = MeshSearch(subject, machine, {NODES: count // inner, "model": inner}, platform, None)
        for candidate in [on.expert(MEGATRON)] if MEGATRON in on.expert_splits else ():
            yield named(candidate)
            yield named(on.with_sharded_state(candidate))


def run(name: str, machine_name: str, out: Path, builds: Path, most: int | None, budget: float = BUDGET) -> None:
    """Searches and compiles one model, and adds to a file what is not in it yet."""
    import jax

    from vnode.partition import search

    def keep(**more: Any) -> dict[str, Any]:
        """Adds to the case; other processes may have added to the file meanwhile."""
        content = json.loads(out.read_text()) if out.exists() else {}
        case = content.setdefault(f"{name} {machine_name}", {"experts": {}})
        experts = more.pop("experts", {})
        case |= more
        case["experts"] |= experts
        written(out, rounded(content), indent=1)
        return case

    case = keep()
    machine, devices = machine_and_devices(machine_name)
    model = models()[name]()
    case = keep(parameters=model.parameters)
    if "plan" not in case:
        args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (model.state, model.batch))
        began, used = time.perf_counter(), time.process_time()
        try:
            plan = search(model.step, args, machine, budget=budget, donate_argnums=0, progress=False)
        except Exception as error:  # a model for which nothing is found is a row of the table, too
            keep(plan={"failed": f"{type(error).__name__}: {first_line(error)}"})
            return
        seconds = {"search_seconds": time.perf_counter() - began, "search_cpu_seconds": time.process_time() - used}
        print(name, f"searched in {seconds['search_seconds']:.0f} s", plan.name, plan.mesh, flush=True)
        case = keep(plan={**row(plan, devices, builds), **seconds})
        print(name, case["plan"], flush=True)
    nodes = case["plan"].get("nodes")
    if nodes is None:
        return
    for expert, plan in itertools.islice(expert_plans(model, machine, nodes), most):
        if expert not in case["experts"]:
            case = keep(experts={expert: row(plan, devices, builds)})
            print(name, expert, case["experts"][expert], flush=True)


def rounded(content: Any) -> Any:
    """Numbers to six digits."""
    if isinstance(content, dict):
        return {key: rounded(value) for key, value in content.items()}
    return float(f"{content:.6g}") if isinstance(content, float) else content


def table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sheet:
    """Plans of two runs beside the best expert's.

    Args:
        before: What `run` wrote.
        after: Likewise.
    """
    heads = ["model", "machine", "plan before", "plan now", "best expert", "regret, time", "regret, memory"]
    heads += ["says of memory before", "now", "search before, s", "now, s"]
    rows = []
    for case in dict.fromkeys([*before, *after]):
        found = [run.get(case, {}) for run in (before, after)]
        plans = [each.get("plan", {}) for each in found]
        experts = {name: each for run in found for name, each in run.get("experts", {}).items() if "memory" in each}
        expert = min(experts, key=lambda name: order(experts[name]), default=None)
        best = [*(plan for plan in plans if "memory" in plan), *([experts[expert]] if expert else [])]
        cells = [shown(f"{plan.get('name')} {plan.get('mesh')}", plan) for plan in plans]
        cells.append(shown(expert, experts[expert]) if expert else "")
        model, machine = case.rsplit(" ", 1)
        said = [f"{plan['said']['memory'] / plan['memory'] - 1:+.0%}" if "memory" in plan else "" for plan in plans]
        took = [f"{plan['search_seconds']:.0f}" if "search_seconds" in plan else "" for plan in plans]
        rows.append([model, machine, *cells, *regrets(plans[1], best), *said, *took])
    note = "Time and memory of one device as compiled; the best is the fastest, on CPUs the smallest. "
    note += "Plans that the compiler refuses are left out."
    return Sheet("Plans as compiled", heads, rows, note)


def order(each: Mapping[str, Any]) -> tuple[float, float]:
    """Faster first, then smaller."""
    return each.get("seconds", 0.0), each["memory"]


def shown(name: str, each: Mapping[str, Any]) -> str:
    """A plan in a cell."""
    if "memory" not in each:
        return each.get("failed", each.get("refused", ""))[:80]
    seconds = f"{1e3 * each['seconds']:.2f} ms, " if "seconds" in each else ""
    host = f" + {each['on_host'] / MIB:,.0f} on the host" if each["on_host"] else ""
    return f"{name}: {seconds}{each['memory'] / MIB:,.0f} MiB{host}"


def regrets(plan: Mapping[str, Any], best: Sequence[Mapping[str, Any]]) -> list[str]:
    """By which share a plan takes longer than the fastest, and more memory than that."""
    if "memory" not in plan:
        return ["", ""]
    fastest = min(best, key=order)
    time_ = f"{plan['seconds'] / fastest['seconds'] - 1:+.1%}" if "seconds" in plan else ""
    return [time_, f"{plan['memory'] / fastest['memory'] - 1:+.1%}"]


def main() -> None:
    """Runs, or prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--models", default="all", help="names, with commas between them")
    runs.add_argument("--machine", default="v5e:2x4", help="a slice of TPUs, or cpu:N")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--builds", type=Path, default=Path("out/builds"), help="where builds are kept")
    runs.add_argument("--experts", type=int, help="how many of the experts' plans are compiled; by default all")
    runs.add_argument("--budget", type=float, default=BUDGET, help="seconds of a search, compilations among them")
    tables = commands.add_parser("table")
    tables.add_argument("before", type=Path)
    tables.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        print(table(*(json.loads(file.read_text()) for file in (args.before, args.after))).markdown())
        return
    os.environ.update(tpu.ENVIRONMENT)
    if args.machine.startswith("cpu:"):
        os.environ["JAX_NUM_CPU_DEVICES"] = args.machine[4:]
    names = [*models()] if args.models == "all" else args.models.split(",")
    unknown = set(names) - set(models())
    if unknown:
        parser.error(f"there are no {', '.join(sorted(unknown))}, only {', '.join(models())}")
    for name in names:
        run(name, args.machine, args.out, args.builds, args.experts, args.budget)


if __name__ == "__main__":
    main()
