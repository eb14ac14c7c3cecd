"""Ways to carry out a program: on nodes; divided as layouts at random ask for; as a plan at random says.

Knows vnode's public names, and how layouts and plans are drawn. Must not know what a program is made of, nor what it
should compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import vnode
from benchmarks.partition import possible
from tests.random_programs.program import Program
from tests.spmd.reference import layout_of
from vnode.analysis.tracing import trace
from vnode.partition import Machine
from vnode.partition.plan.candidates import OnMesh
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.subject import on_nodes, subject_of
from vnode.spmd.flow import follow
from vnode.spmd.program import over_mesh

Way = Callable[[Program, Callable[..., Any]], Callable[..., Any]]
"""From a program and its function to a function that should compute the same."""

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
        results = jax.jit(over_mesh(flow, mesh))(*leaves)
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(step, *args)), results)

    return run


def planned(program: Program, step: Callable[..., Any]) -> Callable[..., Any]:
    """As a plan says in which all strategies are drawn, on nodes; of half of them the state is sharded over these, too.

    Some are for TPUs, and are carried out all the same.

    If the program's bits are to be the same on any number of devices, it runs on those of one row as well.
    """
    rng = np.random.default_rng(program.seed)
    sizes = PLANS[rng.integers(len(PLANS))]
    devices = jax.devices()[: math.prod(sizes.values())]
    tpu = TPUS.get(len(devices)) if rng.random() < 0.5 else None
    machine = Machine.gpus("P100", hosts=1, per_host=len(devices)) if tpu is None else Machine.tpu(tpu)
    subject = subject_of(on_nodes(step, program.virtual_nodes, options(program)), program.values())
    on = OnMesh(subject, machine, sizes, "cpu" if tpu is None else "tpu", None)
    drawn = possible(on.search.problem, rng)
    chosen = on.candidate("random", on.search.flow(drawn), over_rows=bool(rng.random() < 0.5))
    made = plan_of(subject, chosen, machine, 2**30, {}).step(devices)

    def run(*args: Any) -> Any:
        results = made(*args)
        if program.reduction == "invariant" and sizes["vnode"] > 1:
            on_one_row = made.on(devices[: len(devices) // sizes["vnode"]])(*args)
            assert bits(results) == bits(on_one_row), "other bits on the devices of one row"
        return results

    return run


def bits(results: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results)]


WAYS: Mapping[str, Way] = {"nodes": virtualized, "layouts": laid_out, "plans": planned}
