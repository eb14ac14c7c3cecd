"""Every equation, cut along every way over meshes, against the equation evaluated whole.

The equations are those of the operators' examples. Operands lie in all manner of layouts beforehand, so that moves
between layouts are exercised too; the whole equation, evaluated by jax on one device, is the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, Var
from jax.sharding import Mesh, PartitionSpec

from tests.operators.brute_force import Array, Instance, assert_same, instances, tolerance
from tests.operators.examples import EXAMPLES
from vnode.analysis.program import Program
from vnode.operators import OperatorDescription, Shifted, describe
from vnode.spmd.choice import Choice, Given, Way, carried_out
from vnode.spmd.exchange import convert
from vnode.spmd.flow import Flow, Step
from vnode.spmd.layout import Layout, cut_of, replicated
from vnode.spmd.run import run

pytestmark = pytest.mark.quickly

MESHES = {"4": (("x", 4),), "2x4": (("x", 2), ("y", 4)), "2x2x2": (("x", 2), ("y", 2), ("z", 2))}


@pytest.fixture(autouse=True)
def wide_numbers() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def layouts_of(shape: Sequence[int], axes: dict[str, int], seed: int) -> Layout:
    """Some layout: axes on dimensions at random."""
    generator = np.random.default_rng(seed)
    dims: list[list[str]] = [[] for _ in shape]
    for name in generator.permutation(list(axes)):
        d = int(generator.integers(-1, len(shape))) if shape else -1
        if d >= 0 and shape[d] > 1:
            dims[d].append(str(name))
    return Layout(
        tuple(cut_of(tuple(names), 1, n, n, axes) if names else None for names, n in zip(dims, shape, strict=True))
    )


def choices(
    eqn: JaxprEqn, d: OperatorDescription, axes: dict[str, int], seed: int
) -> Iterator[tuple[list[Given], Choice]]:
    """Every way over the first axis with others idle; over several axes at once; two ways over different axes."""
    names = list(axes)
    ways = [(lead, split) for lead, split in d.leads if any(d.sizes[f] > 1 for f in lead) or isinstance(split, Shifted)]
    several = [(Way(lead, split, (names[-1],)),) for lead, split in ways]
    if len(names) > 1:
        several += [(Way(lead, split, tuple(names[:2])),) for lead, split in ways]
        pairs = list(itertools.permutations(ways, 2))
        np.random.default_rng(seed).shuffle(pairs)  # type: ignore[arg-type]
        several += [(Way(*first, (names[0],)), Way(*second, (names[1],))) for first, second in pairs[:4]]
    for number, made in enumerate(several):
        given = [Given(layouts_of(atom.aval.shape, axes, seed + 7 * number + i)) for i, atom in enumerate(eqn.invars)]
        choice = carried_out(eqn, d, made, given, axes, ())
        if choice is not None:
            yield given, choice


def check_over(instance: Instance, mesh: Mesh, seed: int) -> int:
    """Evaluates all choices in one program; each must give the whole results."""
    eqn = instance.eqn.replace(invars=[Var(atom.aval) for atom in instance.eqn.invars])
    axes = dict(mesh.shape)
    d = describe(eqn)
    assert d is not None
    found = list(choices(eqn, d, axes, seed))
    if not found:
        return 0

    def on_each_device(*operands: Any) -> list[list[Any]]:
        results = []
        for given, choice in found:
            inputs = [
                convert(value, replicated(value.ndim), each.layout, value.shape, axes)
                for value, each in zip(operands, given, strict=True)
            ]
            program = Program(list(eqn.invars), {}, [eqn], list(eqn.outvars))
            step = Step(eqn, choice.operands, choice.results, choice)
            ends = tuple(replicated(len(layout.dims)) for layout in choice.results)
            flow = Flow(program, tuple(each.layout for each in given), (step,), ends)
            results.append(run(flow, inputs, axes, "cpu"))
        return results

    spmd = jax.shard_map(
        on_each_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    made = jax.jit(spmd)(*instance.operands)
    want = jax.jit(lambda *xs: eqn.primitive.bind(*xs, **eqn.params))(*instance.operands)
    want = list(want) if eqn.primitive.multiple_results else [want]
    limit = tolerance(d, [as_array(x) for x in (*instance.operands, *want)])
    for (_, choice), results in zip(found, made, strict=True):
        for got, whole in zip(results, want, strict=True):
            context = f"{eqn.primitive.name} by {choice.ways} from {[str(o) for o in choice.operands]}"
            assert_same(as_array(got).data, as_array(whole).data, limit, context)
    return len(found)


def as_array(x: Any) -> Array:
    """As one factor per dimension."""
    return Array.of(x, [(k,) for k in range(x.ndim)], x.shape)


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_equation(example: Any, shape: str) -> None:
    sizes = dict(MESHES[shape])
    count = int(np.prod(list(sizes.values())))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))
    checked: dict[str, int] = {}
    for instance in instances(example.fun, *example.args, of=example.of):
        if instance.signature not in checked:
            checked[instance.signature] = check_over(instance, mesh, len(checked))
