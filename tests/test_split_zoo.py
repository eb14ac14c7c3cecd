"""Steps of the zoo with their state sharded at random over axes that nodes are not spread over, against the plain step.

Knows meshes, and which leaves of a case's arguments are not split by nodes. Must not know how steps are divided. A step
is equal to the one that the user wrote, or refused with a `VnodeError` that says why.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vnode
from tests import zoo
from tests.zoo.compare import agrees, build, running_in

MESHES = {"2x4": ((2, 4), ("data", "model")), "2x2x2": ((2, 2, 2), ("data", "rows", "columns"))}
EVERY = 16
"""One step of so many is part of the usual run."""

REFUSED = {
    "debug_print_of_invariant_reduced_and_batched": "has an effect",
}
"""Steps that cannot be divided over further axes, and what the error says."""


def some_spec(shape: tuple[int, ...], axes: dict[str, int], rng: np.random.Generator) -> PartitionSpec:
    """A way to shard an array over some of the axes, evenly."""
    entries: list[tuple[str, ...]] = [() for _ in shape]
    rest = list(shape)
    for name in rng.permutation(list(axes)):
        fitting = [d for d, n in enumerate(rest) if n > 1 and n % axes[name] == 0]
        if fitting and rng.random() < 0.8:
            d = int(rng.choice(fitting))
            entries[d] = (*entries[d], str(name))
            rest[d] //= axes[name]
    return PartitionSpec(*entries)


def sharded(args: tuple[Any, ...], in_axes: Any, mesh: jax.sharding.Mesh, rng: np.random.Generator) -> tuple[Any, ...]:
    """Arguments of which nothing is split by nodes, sharded at random over the other axes."""
    axes = {name: size for name, size in mesh.shape.items() if name != "data"}
    per_argument = in_axes if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray) or getattr(leaf, "ndim", 0) == 0:
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, some_spec(leaf.shape, axes, rng)))

    whole = [i >= len(per_argument) or per_argument[i] is None for i in range(len(args))]
    return tuple(jax.tree.map(put, arg) if whole[i] else arg for i, arg in enumerate(args))


def runs() -> list[Any]:
    cases = [case for case in zoo.cases() if case.expect is None]
    marked = []
    for index, case in enumerate(cases):
        for number, mesh in enumerate(MESHES):
            usual = (index + number * EVERY // 2) % EVERY == 0 and not case.rare
            marked.append(
                pytest.param(case, mesh, id=f"{case.name}-{mesh}", marks=[] if usual else [pytest.mark.sweep])
            )
    return marked


@pytest.mark.sampled(3, thorough=17)
@pytest.mark.parametrize(("case", "mesh"), runs())
def test_step_with_sharded_state(case: zoo.Case, mesh: str) -> None:
    precision = "float64" if case.float64 else "float32"
    nodes = case.nodes[-1] if case.nodes else 2
    over = jax.make_mesh(*MESHES[mesh], axis_types=(AxisType.Auto,) * len(MESHES[mesh][0]))
    rng = np.random.default_rng(zlib.crc32(f"{case.name} {mesh} {os.environ.get('VNODE_TEST_SEED', '')}".encode()))
    with running_in(precision):
        program = build(case, precision)
        virtualize = vnode.nnx.virtualize if case.nnx else vnode.virtualize
        options = {key: value for key, value in program.options.items() if key != "placement"}
        step = virtualize(
            program.step, virtual_nodes=nodes, placement=vnode.Placement(nodes, mesh=over, axis="data"), **options
        )
        args = sharded(program.args, options.get("in_axes", (None, 0)), over, rng)
        try:
            got = program.outer(step)(*args)
        except vnode.VnodeError as error:
            if REFUSED.get(case.name, str(error) + ".") in str(error):
                return
            raise
        agrees(case, got, nodes, precision)
