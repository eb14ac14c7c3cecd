"""Ways to carry out a program: on nodes; divided as layouts at random ask for; as a plan says, at random or searched.

Knows vnode's public names, and how layouts and plans are drawn. Must not know what a program is made of, nor what it
should compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import vnode
from benchmarks.partition import possible
from tests.partition.mixed import mixed, slower
from tests.random_programs.program import Argument, Program
from tests.random_programs.training import plain
from tests.spmd.reference import layout_of
from vnode.analysis.tracing import trace
from vnode.partition import Machine
from vnode.partition.plan.candidates import MeshSearch
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import on_nodes, subject_of
from vnode.spmd.sharded_program import flow_over_mesh
from vnode.spmd.sharding_flow import follow


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to carry out a program.

    Attributes:
      of: from a program and its function, or a train step made of it, to a function that should compute the same.
      trains: whether it is a train step.
    """

    of: Callable[[Program, Callable[..., Any]], Callable[..., Any]]
    trains: bool = False


LAYOUTS = ({"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 4}, {"x": 2, "y": 2, "z": 2})
PLANS = (
    {"vnode": 2, "model": 2},
    {"vnode": 1, "model": 2, "model2": 2},
    {"vnode": 2, "model": 3},
    {"vnode": 1, "model": 4},
    {"vnode": 2, "model": 2, "model2": 2},
    {"vnode": 4, "model": 2},
)
"""Axes of meshes: nodes' first, where there are nodes."""

TPUS = {4: "v5e:2x2", 8: "v5e:2x4"}


def options(program: Program) -> dict[str, Any]:
    return {"in_axes": program.in_axes, "reduction": program.reduction, "recompute_budget": float("inf")}


def virtualized(program: Program, step: Callable[..., Any]) -> Callable[..., Any]:
    """On the program's nodes and devices."""
    virtual = vnode.virtualize(step, virtual_nodes=program.virtual_nodes, **options(program))
    return virtual.on(jax.devices()[: program.devices], counts=program.counts)


def in_several_batches(program: Program, step: Callable[..., Any]) -> Callable[..., Any]:
    """On nodes, with most arguments as batches of whatever sizes they have along one of their dimensions."""
    rng = np.random.default_rng(program.seed)

    def axis(argument: Argument) -> int | None:
        if argument.axis is not None or not argument.shape or 0 in argument.shape or rng.random() < 0.2:
            return argument.axis
        return int(rng.integers(len(argument.shape)))

    whole, batched = ([axis(argument) for argument in some] for some in (program.whole, program.batched))
    in_axes: Any = (*whole, *batched)
    if program.bundle:
        named = (zip(program.whole, whole, strict=True), zip(program.batched, batched, strict=True))
        in_axes = tuple({argument.name: found for argument, found in several} for several in named)
    chosen = {**options(program), "in_axes": in_axes}
    virtual = vnode.virtualize(step, virtual_nodes=program.virtual_nodes, **chosen)
    return virtual.on(jax.devices()[: program.devices], counts=program.counts)


def laid_out(program: Program, step: Callable[..., Any]) -> Callable[..., Any]:
    """Without nodes, over a mesh: arguments, some results, and some values on the way lie at random."""
    rng = np.random.default_rng(program.seed)
    axes = LAYOUTS[rng.integers(len(LAYOUTS))]
    mesh = Mesh(np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values()), tuple(axes))

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        traced = trace(lambda *given: jax.tree.leaves(step(*jax.tree.unflatten(structure, given))), *leaves)
        flow = follow(
            traced.program,
            [layout_of(np.shape(leaf), axes, rng) for leaf in leaves],
            axes,
            outputs=[
                layout_of(atom.aval.shape, axes, rng) if rng.random() < 0.4 else None for atom in traced.program.outputs
            ],
            wishes={
                var: layout_of(var.aval.shape, axes, rng)
                for eqn in traced.program.equations
                for var in eqn.outvars
                if hasattr(var.aval, "shape") and rng.random() < 0.15
            },
        )
        results = jax.jit(flow_over_mesh(flow, mesh))(*leaves)
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(step, *args)), results)

    return run


def planned(program: Program, step: Callable[..., Any]) -> Callable[..., Any]:
    """As a plan says in which all strategies are drawn, on nodes; of half of them the state is sharded over these, too.

    Some are for TPUs, and are carried out all the same.
    """
    rng = np.random.default_rng(program.seed)
    sizes = PLANS[rng.integers(len(PLANS))]
    devices = jax.devices()[: math.prod(sizes.values())]
    tpu = TPUS.get(len(devices)) if rng.random() < 0.5 else None
    machine = Machine.gpus("P100", hosts=1, per_host=len(devices)) if tpu is None else Machine.tpu(tpu)
    subject = subject_of(on_nodes(step, program.virtual_nodes, options(program)), program.values())
    on = MeshSearch(subject, machine, sizes, "cpu" if tpu is None else "tpu", None)
    drawn = possible(on.search.problem, rng)
    chosen = on.candidate("random", on.search.flow(drawn), shard_state=bool(rng.random() < 0.5))
    made = plan_of(chosen, 2**30).step(devices)
    return on_rows(program, made, devices, sizes["vnode"])


def on_rows(program: Program, made: Any, devices: list[Any], rows: int) -> Callable[..., Any]:
    """A step that runs on all rows of devices, and on one of them too, if that is to give the same bits."""

    def run(*args: Any) -> Any:
        results = made(*args)
        if program.reduction == "invariant" and rows > 1:
            on_one_row = made.on(devices[: len(devices) // rows])(*args)
            assert bits(results) == bits(on_one_row), "other bits on the devices of one row"
        return results

    return run


def searched(program: Program, step: Callable[..., Any]) -> Callable[..., Any]:
    """As the plan says that a search finds, on equal or mixed devices; the plan is saved and loaded.

    Half of the programs are searched again with less memory than that plan takes, if anything fits in it.
    """
    rng = np.random.default_rng(program.seed)
    machine = MACHINES[rng.integers(len(MACHINES))]()
    devices, args = jax.devices()[: len(machine.devices)], program.values()
    nodes = "auto" if rng.random() < 0.3 else program.virtual_nodes
    chosen: dict[str, Any] = options(program) | ({"lanes": "auto"} if rng.random() < 0.3 else {})

    def search(memory: int | None) -> Any:
        given = {"virtual_nodes": nodes, "memory": memory, "budget": 3, "progress": False}
        return vnode.partition.search(step, args, machine, **given, **chosen)

    plan = search(None)
    if rng.random() < 0.5:
        with contextlib.suppress(vnode.MemoryLimitError):
            plan = search(int(plan.figures.memory * rng.uniform(0.6, 1)) + 1)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan.json")
        made = vnode.partition.Plan.load(f"{folder}/plan.json", step, args, **chosen).step(devices)
    return on_rows(program, made, devices, plan.mesh["vnode"])


def unlike(*times: float) -> Machine:
    """Four TPUs, so many thousand times slower than they are that programs of few elements are work for them."""
    machine = Machine.tpu(TPUS[4])
    kinds = {each: slower(machine, f"TPU slower {each:g} times", 1000 * each) for each in times}
    return mixed(machine, [kinds[each] for each in times])


MACHINES = (
    lambda: Machine.tpu(TPUS[4]),
    lambda: Machine.gpus("P100", hosts=1, per_host=4),
    lambda: unlike(400, 400, 1200, 1200),
    lambda: unlike(1200, 1200, 400, 400),
    lambda: unlike(400, 400, 400, 1200),
)


def bits(results: Any) -> list[bytes]:
    return [np.asarray(plain(leaf)).tobytes() for leaf in jax.tree.leaves(results)]


WAYS: Mapping[str, Way] = {
    "nodes": Way(virtualized),
    "batches": Way(in_several_batches),
    "layouts": Way(laid_out),
    "plans": Way(planned),
    "training": Way(planned, trains=True),
    "searches": Way(searched, trains=True),
}
