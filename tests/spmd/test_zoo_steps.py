"""Every step of the zoo as the user wrote it, without nodes, over meshes.

Arguments lie at random, and so do some results, and some values on the way, as if a plan said so.

Knows which meshes and layouts are tried. What counts as equal is the zoo's own bound; a step may be refused by a
`VnodeError` instead only where `REFUSED` says so, and why. A sample is run always, every step with VNODE_TEST_ALL=1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests import zoo
from tests.rounding import MOVED, compare, host, moved_by
from tests.spmd.reference import MESHES, layout_of, mesh_of
from tests.zoo.compare import QUICKLY, build, running_in, unit
from vnode import VnodeError
from vnode.analysis.tracing import trace
from vnode.spmd.sharded_program import flow_over_mesh
from vnode.spmd.sharding_flow import follow

EFFECT = "has an effect, which would happen on every device of a mesh that splits more than the batch"

REFUSED: Mapping[str, str] = {
    "debug_print_of_invariant_reduced_and_batched": EFFECT,
    "debug_callback_in_a_loop": EFFECT,
    "ordered_effect_of_batched_value_is_refused": EFFECT,
    "ordered_print_of_batched_value_is_refused": EFFECT,
}
"""Steps that are refused, with a pattern of the reason."""

FEW = 16
"""One of so many steps is run always."""


def pure(step: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step on objects of flax.nnx as a function of their arrays, and these."""
    from flax import nnx

    structure, state = nnx.split(tuple(args))

    def on_arrays(arrays: Any) -> Any:
        own = nnx.merge(structure, arrays)
        result = step(*own)
        return result, jax.tree.leaves(nnx.state(own))

    return on_arrays, (state,)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced; plain numbers, which choose branches in some steps, are not."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def on_leaves(case: zoo.Case, program: zoo.Program) -> tuple[Callable[..., Any], list[Any]]:
    """A step as a function of the arrays among its arguments that gives the arrays it returns, and its arguments."""
    outer = zoo.unchanged if case.name.startswith("checkify") else program.outer  # which raises errors, outside of jax
    step, args = outer(program.step), tuple(program.args)
    if case.nnx:
        step, args = pure(step, args)
    static = program.options.get("static_argnums", ())
    static = (static,) if isinstance(static, int) else static
    leaves, structure = jax.tree.flatten([None if i in static else arg for i, arg in enumerate(args)])
    traced = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def function(*arrays: Any) -> list[Any]:
        made = dict(zip(traced, arrays, strict=True))
        given = jax.tree.unflatten(structure, [made.get(i, leaf) for i, leaf in enumerate(leaves)])
        result = step(*(args[i] if i in static else arg for i, arg in enumerate(given)))
        return [leaf for leaf in jax.tree.leaves(result) if is_array(leaf)]

    return function, [leaves[i] for i in traced]


def check(case: zoo.Case, shape: str, seed: int) -> None:
    """Runs a step over a mesh."""
    precision = "float64" if case.float64 else "float32"
    with running_in(precision):
        program = build(case, precision)
        function, given = on_leaves(case, program)
        mesh, generator = mesh_of(MESHES[shape]), np.random.default_rng(seed)
        axes = dict(mesh.shape)
        traced = trace(function, *given)
        layouts = [layout_of(np.shape(value), axes, generator) for value in given]
        outputs = [
            layout_of(atom.aval.shape, axes, generator) if generator.random() < 0.3 else None
            for atom in traced.program.outputs
        ]
        wishes = {
            var: layout_of(var.aval.shape, axes, generator)
            for eqn in traced.program.equations
            for var in eqn.outvars
            if hasattr(var.aval, "shape") and generator.random() < 0.02
        }
        flow = follow(traced.program, layouts, axes, outputs=outputs, wishes=wishes)
        quickly = functools.partial(jax.jit, compiler_options=QUICKLY)
        made = quickly(flow_over_mesh(flow, mesh))(*given)
        for value in made:
            same_everywhere(value)
        size = unit(case, precision)
        if program.reference is not None:  # only what virtual nodes make of the step is exact
            size = size or float(np.finfo(np.float32).eps)
        rng = np.random.default_rng(0)
        several = [given] + [moved_by(given, size, rng) for _ in range(MOVED)]
        want, *moved = ([host(leaf) for leaf in quickly(function)(*args)] for args in several)
        compare([host(leaf) for leaf in made], want, moved, size)


def same_everywhere(value: jax.Array) -> None:
    """Every device that has the same part of a value has the same bits."""
    parts: dict[str, bytes] = {}
    for shard in value.addressable_shards:
        bits = np.asarray(host(shard.data)).tobytes()
        assert parts.setdefault(str(shard.index), bits) == bits, f"{value.aval} differs among devices"


def runs() -> list[Any]:
    """Every step, on one of the meshes, or by turns."""
    shapes = ("2x4", "2x2x2")
    return [
        pytest.param(
            case,
            shape,
            id=f"{case.name}-{shape}",
            marks=[] if number % FEW == 0 and (number // FEW + k) % 2 == 0 and not case.rare else [pytest.mark.sweep],
        )
        for number, case in enumerate(zoo.cases())
        for k, shape in enumerate(shapes)
    ]


@pytest.mark.sampled(3, thorough=9)
@pytest.mark.parametrize(("case", "shape"), runs())
def test_step(case: zoo.Case, shape: str) -> None:
    if case.name in REFUSED:
        with pytest.raises(VnodeError, match=REFUSED[case.name]):
            check(case, shape, 0)
        return
    check(case, shape, len(case.name) + case.batch)


def test_refusals_are_of_steps_that_there_are() -> None:
    assert set(REFUSED) <= {case.name for case in zoo.cases()}
    assert all(re.compile(pattern) for pattern in REFUSED.values())
