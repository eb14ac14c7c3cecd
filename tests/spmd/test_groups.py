"""Branches on devices of their own: values, gradients and bits, and what depends on each other is refused.

Knows the programs and how they are grouped. The reference for values is jax on one device.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Var, jaxprs_in_params
from jax.sharding import PartitionSpec as P

from tests.rounding import assert_same
from tests.spmd.reference import COLLECTIVES, collectives, mesh_of
from vnode.analysis.program import Program, inline
from vnode.errors import PartitionError
from vnode.spmd.branch_groups import Group, by_scope, group_equations
from vnode.spmd.layout import from_spec, replicated
from vnode.spmd.sharded_program import flow_over_mesh
from vnode.spmd.sharding_flow import Flow, follow

pytestmark = pytest.mark.quickly

MESHES = {"2": {"g": 2}, "2x2": {"g": 2, "m": 2}, "2x4": {"g": 2, "m": 4}, "4x2": {"m": 4, "g": 2}}


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def inception(params: Any, x: jax.Array) -> jax.Array:
    """Towers of different widths and depths, one after the other joined along the channels, twice."""
    for block in params:
        with jax.named_scope("narrow"):
            a = jax.nn.relu(conv(x, block["narrow"]))
        with jax.named_scope("deep"):
            b = jax.nn.relu(conv(jnp.tanh(conv(x, block["first"])), block["second"]))
            b = b - b.mean()
        x = jnp.concatenate([a, b], axis=-1)
    return (x**2).mean()


def towers(params: Any, x: jax.Array) -> jax.Array:
    """Two encoders of different shapes, compared."""
    users, items = x[:, :6], x[:, 6:]
    with jax.named_scope("users"):
        u = jax.nn.gelu(users @ params["users"]) @ params["out"]
    with jax.named_scope("items"):
        i, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), items, params["items"])
        i = i @ params["last"]
    logits = u @ i.T
    return -(jax.nn.log_softmax(logits) * jnp.eye(len(x))).sum()


def cases() -> Iterator[Any]:
    blocks = [
        {"narrow": numbers(1, 1, 4, 8), "first": numbers(3, 3, 4, 8), "second": numbers(3, 3, 8, 4)},
        {"narrow": numbers(1, 1, 12, 4), "first": numbers(1, 3, 12, 4), "second": numbers(3, 1, 4, 8)},
    ]
    spatial = P(None, "m", None, None)
    yield pytest.param(
        inception, blocks, numbers(4, 8, 8, 4), spatial, {}, {"narrow": 0, "deep": 1}, id="inception-over-space"
    )
    split = {"first": P(None, None, None, "m"), "second": P(None, None, "m", None), "narrow": P(None, None, None, "m")}
    yield pytest.param(
        inception, blocks, numbers(4, 8, 8, 4), P(), split, {"narrow": 0, "deep": 1}, id="inception-over-channels"
    )
    params = {
        "users": numbers(6, 16),
        "out": numbers(16, 8),
        "items": numbers(3, 4, 4),
        "last": numbers(4, 8),
    }
    megatron = {"users": P(None, "m"), "out": P("m", None), "items": P(None, "m", None), "last": P(None, "m")}
    for name, scopes in {"towers": {"users": 0, "items": 1}, "towers-swapped": {"users": 1, "items": 0}}.items():
        yield pytest.param(towers, params, numbers(8, 10), P(), megatron, scopes, id=name)
    yield pytest.param(towers, params, numbers(8, 10), P("m"), {}, {"users": 0, "items": 1}, id="towers-by-examples")


def program_of(function: Callable[..., Any], *args: Any) -> Program:
    closed = jax.make_jaxpr(function)(*args)
    return inline(closed.jaxpr, closed.consts)


def conditionals(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from conditionals(inner)


def axes_of_collectives(jaxpr: Any) -> set[str]:
    """The axes over which a jaxpr has collectives."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in COLLECTIVES:
            named = eqn.params.get("axes", eqn.params.get("axis_name"))
            found |= set(named if isinstance(named, tuple) else (named,))
        for inner in jaxprs_in_params(eqn.params):
            found |= axes_of_collectives(inner)
    return found


def divided(
    function: Callable[..., Any],
    params: Any,
    x: Any,
    spec: P,
    specs: Mapping[str, P],
    scopes: Any,
    axes: dict[str, int],
) -> tuple[Any, Flow, int]:
    """A function with its gradient over a mesh, its branches side by side; with how many groups there are."""
    run = jax.value_and_grad(function)
    program = program_of(run, params, x)
    groups = by_scope(program, "g", scopes)
    flat, _ = jax.tree_util.tree_flatten_with_path((params, x))
    layouts = []
    for path, leaf in flat:
        name = getattr(path[-1], "key", None)
        mine = specs.get(name, P()) if path[0].idx == 0 else spec
        layouts.append(from_spec(mine, leaf.shape, axes))
    flow = follow(
        group_equations(program, groups),
        layouts,
        axes,
        outputs=[replicated(len(a.aval.shape)) for a in program.outputs],
    )
    return flow_over_mesh(flow, mesh_of(axes)), flow, len(groups)


@pytest.mark.sampled(1, thorough=5)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("function", "params", "x", "spec", "specs", "scopes"), list(cases()))
def test_values_and_gradients(function: Any, params: Any, x: Any, spec: P, specs: Any, scopes: Any, mesh: str) -> None:
    split, _, groups = divided(function, params, x, spec, specs, scopes, MESHES[mesh])
    flat = jax.tree.leaves((params, x))
    jaxpr = jax.make_jaxpr(split)(*flat).jaxpr
    found = list(conditionals(jaxpr))
    assert groups == len(found) == (4 if function is inception else 2)  # of each, forward and backward
    inside = [axes_of_collectives(branch.jaxpr) for eqn in found for branch in eqn.params["branches"]]
    assert set().union(*inside) <= {"m"} and "g" in axes_of_collectives(jaxpr)
    tree = jax.tree.structure((params, x))

    def plain(*values: Any) -> list[Any]:
        return jax.tree.leaves(jax.value_and_grad(function)(*jax.tree.unflatten(tree, values)))

    assert_same(jax.jit(split)(*flat), plain, *flat)


def test_what_a_backward_pass_alone_needs_stays_where_it_is() -> None:
    """Added up over devices is what others read, and nothing that was kept for the branch's own backward pass."""
    params = {"users": numbers(6, 16), "out": numbers(16, 8), "items": numbers(3, 4, 4), "last": numbers(4, 8)}
    split, flow, _ = divided(towers, params, numbers(8, 10), P(), {}, {"users": 0, "items": 1}, {"g": 2})
    groups = [step for step in flow.steps if step.branches is not None]
    here = {var: step.branches.maker(i) for step in groups for i, var in enumerate(step.eqn.outvars) if step.branches}
    others = {atom for atom in flow.program.outputs if isinstance(atom, Var)}
    for step in flow.steps:
        for i, atom in enumerate(step.eqn.invars):
            known = set() if step.branches is None else {n for n, r in enumerate(step.branches.operands) if i in r}
            if isinstance(atom, Var) and known != {here.get(atom)}:
                others.add(atom)
    read, kept = (sum((var in others) is which for var in here) for which in (True, False))
    found = collections.Counter(collectives(jax.make_jaxpr(split)(*jax.tree.leaves((params, numbers(8, 10)))).jaxpr))
    assert found == {"psum": read} and kept > 0


def test_bits_do_not_depend_on_where_a_branch_is() -> None:
    case = next(p for p in cases() if p.id == "towers")
    function, params, x, spec, specs, _ = case.values
    results = []
    for scopes in ({"users": 0, "items": 1}, {"users": 1, "items": 0}):
        split, _, _ = divided(function, params, x, spec, specs, scopes, MESHES["2x4"])
        results.append(jax.jit(split)(*jax.tree.leaves((params, x))))
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)
        assert len({shard.data.tobytes() for shard in one.addressable_shards}) == 1


def test_three_branches_along_four() -> None:
    """Devices that have no branch have nothing; whole numbers and truth values are handed on, too."""

    def function(x: jax.Array, n: jax.Array) -> Any:
        return jnp.sin(x).sum(), n * 3, x[:2] > 0

    x, n = numbers(8, 3), np.arange(5, dtype=np.int32)
    program = program_of(function, x, n)
    names = [eqn.primitive.name for eqn in program.equations]
    first, last = names.index("mul"), next(i for i, name in enumerate(names) if name in ("slice", "gather"))
    branches = frozenset(range(first)), frozenset({first}), frozenset(range(last, len(names)))
    axes = {"g": 4, "m": 2}
    program = group_equations(program, [Group("g", branches)])
    assert [eqn.primitive.name for eqn in program.equations] == ["side_by_side"]
    flow = follow(program, [from_spec(P("m"), x.shape, axes), replicated(1)], axes)
    for got, want in zip(jax.jit(flow_over_mesh(flow, mesh_of(axes)))(x, n), function(x, n), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got.dtype == want.dtype


def test_what_is_joined_is_combined_once() -> None:
    """Pieces of a concatenation are pieces: one sum over the axis, of the joined towers."""

    def function(x: jax.Array) -> jax.Array:
        return 2 * jnp.concatenate([jnp.sin(x), jnp.cos(x), x**2], axis=1)

    x = numbers(4, 6)
    program = program_of(function, x)
    numbers_of = {eqn.primitive.name: frozenset({i}) for i, eqn in enumerate(program.equations)}
    power = numbers_of.get("integer_pow") or numbers_of["square"]
    program = group_equations(program, [Group("g", (numbers_of["sin"], numbers_of["cos"], power))])
    axes = {"g": 4}
    split = flow_over_mesh(follow(program, [replicated(2)], axes), mesh_of(axes))
    assert collections.Counter(collectives(jax.make_jaxpr(split)(x).jaxpr)) == {"psum": 1}
    assert_same(jax.jit(split)(x), lambda x: [function(x)], x)


class TestErrors:
    def program(self) -> Program:
        """Numbers: 0 sin, 1 cos of it, 2 tan of the first, 3 the sum."""

        def function(x: jax.Array) -> jax.Array:
            a = jnp.sin(x)
            return jnp.cos(a) + jnp.tan(a)

        program = program_of(function, numbers(3))
        assert [eqn.primitive.name for eqn in program.equations] == ["sin", "cos", "tan", "add"]
        return program

    def test_a_branch_reads_another(self) -> None:
        with pytest.raises(PartitionError, match=r"Branch 1 along 'g' depends on branch 0\.") as error:
            group_equations(self.program(), [Group("g", (frozenset({0}), frozenset({1})))])
        assert "test_groups.py" in str(error.value) and "split the group" in str(error.value)

    def test_a_branch_waits_for_another_by_way_of_what_is_in_none(self) -> None:
        with pytest.raises(PartitionError, match="depends on branch 0 by way of"):
            group_equations(self.program(), [Group("g", (frozenset({0}), frozenset({3})))])

    def test_a_branch_waits_for_itself(self) -> None:
        with pytest.raises(PartitionError, match="by way of an equation that is in no branch"):
            group_equations(self.program(), [Group("g", (frozenset({0, 3}),))])

    def test_in_two_branches(self) -> None:
        with pytest.raises(PartitionError, match="Equation 1 is in two branches"):
            group_equations(self.program(), [Group("g", (frozenset({1}), frozenset({1, 2})))])

    def test_no_such_equation(self) -> None:
        with pytest.raises(PartitionError, match="equation 9, of a program that has 4"):
            group_equations(self.program(), [Group("g", (frozenset({9}),))])

    def test_groups_that_wait_for_each_other(self) -> None:
        def function(x: jax.Array) -> Any:
            a, b = jnp.sin(x), jnp.cos(x)
            return jnp.tan(b), jnp.exp(a)

        program = program_of(function, numbers(3))
        first, second = Group("g", (frozenset({0}), frozenset({2}))), Group("g", (frozenset({1}), frozenset({3})))
        with pytest.raises(PartitionError, match="wait for each other"):
            group_equations(program, [first, second])

    def test_more_branches_than_the_axis_has(self) -> None:
        program = group_equations(self.program(), [Group("g", (frozenset({1}), frozenset({2})))])
        with pytest.raises(PartitionError, match=r"2 branches .* along 'g', of size 1"):
            follow(program, [replicated(1)], {"m": 4})

    def test_keys_leave_no_branch(self) -> None:
        program = program_of(lambda k: jax.random.split(k), jax.random.key(0))
        everything = frozenset(range(len(program.equations)))
        with pytest.raises(PartitionError, match="random keys"):
            follow(group_equations(program, [Group("g", (everything,))]), [replicated(0)], {"g": 2})

    def test_no_such_scope(self) -> None:
        with pytest.raises(PartitionError, match="no equation's name matches 'tower'"):
            by_scope(self.program(), "g", {"tower": 0})
