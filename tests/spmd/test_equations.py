"""Every equation, cut along every way over meshes, and its gradient, against what jax computes on one device.

The equations are those of the operators' examples. Operands lie in all manner of layouts beforehand, so that moves
between layouts are exercised too, and every device must have the whole result in the end. Of gradients, the equations
that jax makes of them are followed from random layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, Var
from jax.sharding import Mesh, PartitionSpec

from tests.operators.brute_force import Array, Instance, assert_same, instances, tolerance
from tests.operators.examples import EXAMPLES, Example
from tests.spmd.reference import MESHES, mesh_of, random_layout
from vnode.analysis.program import Program, inline
from vnode.operators import OperatorDescription, Shifted, describe
from vnode.spmd.device_program import run
from vnode.spmd.layout import Layout, replicated
from vnode.spmd.op_sharding import FactorSharding, OperandSharding, OpSharding, build_sharding, reached_layouts
from vnode.spmd.resharding_collectives import convert
from vnode.spmd.sharded_program import flow_over_mesh
from vnode.spmd.sharding_flow import Flow, Step, follow

pytestmark = pytest.mark.quickly


@pytest.fixture(autouse=True)
def wide_numbers() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def layout_of(shape: Sequence[int], axes: dict[str, int], seed: int) -> Layout:
    """Some layout: axes on dimensions at random, of longer dimensions than one."""
    layout = random_layout([(n,) for n in shape], axes, np.random.default_rng(seed))
    return Layout(tuple(cut if n > 1 else None for cut, n in zip(layout.dims, shape, strict=True)))


def choices(
    eqn: JaxprEqn, d: OperatorDescription, axes: dict[str, int], seed: int
) -> Iterator[tuple[list[OperandSharding], OpSharding]]:
    """Every way over one axis with others idle, over two axes in either order, and two ways over different axes."""
    names = list(axes)
    ways = [(lead, split) for lead, split in d.leads if any(d.sizes[f] > 1 for f in lead) or isinstance(split, Shifted)]
    several = [(FactorSharding(lead, split, (names[-1],)),) for lead, split in ways]
    if len(names) > 1:
        several += [
            (FactorSharding(lead, split, (names[k % 2], names[1 - k % 2])),)
            for k, (lead, split) in enumerate(ways, seed)
        ]
        pairs = list(itertools.permutations(ways, 2))
        np.random.default_rng(seed).shuffle(pairs)  # type: ignore[arg-type]
        several += [
            (FactorSharding(*first, (names[0],)), FactorSharding(*second, (names[1],))) for first, second in pairs[:4]
        ]
    for number, made in enumerate(several):
        given = [
            OperandSharding(layout_of(atom.aval.shape, axes, seed + 7 * number + i))
            for i, atom in enumerate(eqn.invars)
        ]
        choice = build_sharding(eqn, d, made, given, axes, ())
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
            made = reached_layouts(eqn, choice)
            step = Step(eqn, choice.operands, made, made, choice)
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
            same_everywhere(got, whole, limit, context)
    return len(found)


def as_array(x: Any) -> Array:
    """As one factor per dimension."""
    return Array.of(x, [(k,) for k in range(x.ndim)], x.shape)


def same_everywhere(got: Any, want: Any, limit: float, context: str) -> None:
    """Every device has what is wanted, or its block of that."""
    want = as_array(want).data
    for shard in got.addressable_shards:
        assert_same(as_array(shard.data).data, want[shard.index], limit, f"{context} on {shard.device}")


def gradient_of(eqn: JaxprEqn) -> Any:
    """A function of an equation's operands and of cotangents that gives the gradients; None if there are none."""
    inexact = [i for i, atom in enumerate(eqn.invars) if jnp.issubdtype(atom.aval.dtype, np.inexact)]
    if not inexact or not all(jnp.issubdtype(var.aval.dtype, np.inexact) for var in eqn.outvars):
        return None

    def gradient(operands: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def of(*some: Any) -> Any:
            given = dict(zip(inexact, some, strict=True))
            results = eqn.primitive.bind(*(given.get(i, x) for i, x in enumerate(operands)), **eqn.params)
            return list(results) if eqn.primitive.multiple_results else [results]

        return jax.vjp(of, *(operands[i] for i in inexact))[1](list(cotangents))

    return gradient


def cotangent(var: Var) -> Any:
    """Different numbers for every element."""
    numbers = 2 * np.cos(np.arange(math.prod(var.aval.shape)) * 1.3 + 0.2).reshape(var.aval.shape)
    return jnp.asarray(numbers).astype(var.aval.dtype)


def check_gradient(instance: Instance, mesh: Mesh, seed: int) -> bool:
    """Follows the equations of an equation's gradient from random layouts; False if it has none."""
    eqn = instance.eqn
    gradient = gradient_of(eqn)
    if gradient is None:
        return False
    given = list(instance.operands), [cotangent(var) for var in eqn.outvars]
    try:
        closed = jax.make_jaxpr(gradient)(*given)
    except (NotImplementedError, TypeError, ValueError):  # jax has none, or not of what was bound without parameters
        return False
    axes = dict(mesh.shape)
    program = inline(closed.jaxpr, closed.consts)
    flow = follow(program, [layout_of(v.aval.shape, axes, seed + i) for i, v in enumerate(program.inputs)], axes)
    made = jax.jit(flow_over_mesh(flow, mesh))(*jax.tree.leaves(given))
    want = jax.jit(gradient)(*given)
    d = describe(eqn)
    assert d is not None
    limit = max(tolerance(d, [as_array(x) for x in (*instance.operands, *want)]), 1e-10)
    context = f"gradient of {eqn.primitive.name} from {[str(layout) for layout in flow.inputs]}"
    for got, whole in zip(made, want, strict=True):
        same_everywhere(got, whole, limit, context)
    return True


def runs(few: int) -> list[Any]:
    """Every example on every mesh, all but one of `few` for the sweep."""
    pairs = itertools.product(EXAMPLES, MESHES)
    return [
        pytest.param(example, shape, id=f"{example.name}-{shape}", marks=[pytest.mark.sweep] if number % few else [])
        for number, (example, shape) in enumerate(pairs)
    ]


@pytest.mark.sampled(24, thorough=24)
@pytest.mark.parametrize(("example", "shape"), runs(10))
def test_equation(example: Example, shape: str) -> None:
    checked: dict[str, int] = {}
    for instance in instances(example.fun, *example.args, of=example.of):
        if instance.signature not in checked:
            checked[instance.signature] = check_over(instance, mesh_of(MESHES[shape]), len(checked))


@pytest.mark.sampled(24, thorough=12)
@pytest.mark.parametrize(("example", "shape"), runs(13))
def test_gradient(example: Example, shape: str) -> None:
    checked: dict[str, bool] = {}
    for instance in instances(example.fun, *example.args, of=example.of):
        if instance.signature not in checked:
            checked[instance.signature] = check_gradient(instance, mesh_of(MESHES[shape]), len(checked))
    if not any(checked.values()):
        pytest.skip("no gradient")
