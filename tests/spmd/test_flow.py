"""Which collectives programs come to that experts know how to split: counted in what is traced, before any compiler.

Knows the programs and their splits over one axis. The reference for values is jax on one device; for collectives, what
the splits are known to need.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.rounding import assert_same
from tests.spmd.reference import collectives, mesh_of
from vnode.analysis.program import inline
from vnode.operators import Monoid, OperatorDescription, describe, register
from vnode.operators.description import Factors
from vnode.spmd.layout import Layout, from_spec
from vnode.spmd.op_sharding import OperandSharding, build_sharding, choose
from vnode.spmd.sharded_program import flow_over_mesh
from vnode.spmd.sharding_backprop import find_wishes
from vnode.spmd.sharding_flow import follow

pytestmark = pytest.mark.quickly

AXES = {"x": 4}


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def check(function: Callable[..., Any], *given: tuple[np.ndarray, P], outputs: Any = None, **expected: int) -> None:
    """Splits a function of arrays that lie so; it must give the same, by so many collectives."""
    values = [value for value, _ in given]
    closed = jax.make_jaxpr(function)(*values)
    program = inline(closed.jaxpr, closed.consts)
    asked = [from_spec(outputs, atom.aval.shape, AXES) for atom in program.outputs] if outputs is not None else None
    flow = follow(program, [from_spec(spec, x.shape, AXES) for x, spec in given], AXES, outputs=asked)
    split = flow_over_mesh(flow, mesh_of(AXES))
    assert dict(collections.Counter(collectives(jax.make_jaxpr(split)(*values).jaxpr))) == expected
    assert_same(jax.jit(split)(*values), lambda *xs: jax.tree.leaves(function(*xs)), *values)


COLUMNS, ROWS = P(None, "x"), P("x")


def test_sums_in_pieces_are_added_before_they_are_combined() -> None:
    a, b = (numbers(3, 8), COLUMNS), (numbers(8, 5), ROWS)
    c, d = (numbers(3, 12), COLUMNS), (numbers(12, 5), ROWS)
    check(lambda a, b, c, d: (a @ b + 2 * (c @ d)).T, a, b, c, d, psum=1)


def test_pieces_that_are_read_in_two_shapes_are_combined_once() -> None:
    """Where a search leaves them in pieces in both, as `follow` does not."""

    def function(a: Any, b: Any) -> Any:
        y = a @ b / 5
        return jnp.sin(y[:, :, None]), jnp.sin(y)

    values = numbers(3, 8), numbers(8, 5)
    closed = jax.make_jaxpr(function)(*values)
    program = inline(closed.jaxpr, closed.consts)
    layouts = [from_spec(spec, x.shape, AXES) for x, spec in zip(values, (COLUMNS, ROWS), strict=True)]
    flow = follow(program, layouts, AXES)
    _, divided, repeated, *_ = flow.steps
    (pieces,) = divided.made
    choice = build_sharding(
        repeated.eqn, program.describe(repeated.eqn), (), [OperandSharding(pieces)], AXES, pieces.partial
    )
    assert choice is not None and pieces.partial
    steps = {
        id(divided): dataclasses.replace(divided, results=divided.made),
        id(repeated): dataclasses.replace(
            repeated, operands=choice.operands, made=choice.results, results=choice.results, choice=choice
        ),
    }
    flow = dataclasses.replace(flow, steps=tuple(steps.get(id(step), step) for step in flow.steps))
    split = flow_over_mesh(flow, mesh_of(AXES))
    assert [*collectives(jax.make_jaxpr(split)(*values).jaxpr)] == ["psum"]
    assert_same(jax.jit(split)(*values), lambda *xs: list(function(*xs)), *values)


@pytest.mark.parametrize("function", [lambda y: (y * y, 3 * y), lambda y: (3 * y, y * y), lambda y: (y, -y, y > 0)])
def test_pieces_that_some_equation_needs_combined_are_combined_once(function: Callable[..., Any]) -> None:
    check(lambda a, b: function(a @ b), (numbers(3, 8), COLUMNS), (numbers(8, 5), ROWS), psum=1)


def test_pieces_are_combined_rather_than_what_they_meet_put_together() -> None:
    """A product's pieces, times something cut over the same axis: combining the small one lets the large one be."""
    a, b, c = (numbers(3, 8), COLUMNS), (numbers(8, 4), ROWS), (numbers(4, 4000), COLUMNS)
    check(lambda a, b, c: (a @ b) @ c, a, b, c, outputs=COLUMNS, psum=1)


def test_pieces_are_combined_into_blocks() -> None:
    check(lambda a, b: a @ b, (numbers(8, 8), COLUMNS), (numbers(8, 5), ROWS), outputs=ROWS, reduce_scatter=1)


def test_a_vocabulary_in_parts() -> None:
    """Rows are looked up where they are, and added up."""
    tokens = np.random.default_rng(0).integers(0, 30, (2, 6))
    check(lambda table, tokens: table[tokens], (numbers(32, 8), ROWS), (tokens, P()), psum=1)


def test_a_loss_over_a_vocabulary_in_parts() -> None:
    """Shoeybi et al., "Megatron-LM" (2019), section 3: scalars per token are exchanged, no logits."""
    labels = np.random.default_rng(0).integers(0, 32, (6,))

    def loss(logits: Any, labels: Any) -> Any:
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(logits, axis=1) - picked

    check(loss, (numbers(6, 32), COLUMNS), (labels, P()), pmax=1, psum=2)


def test_a_dimension_that_moves_to_another_axis_of_the_array() -> None:
    check(lambda a: jnp.sin(a), (numbers(8, 12), ROWS), outputs=COLUMNS, all_to_all=1)


def test_neighbours_are_fetched_from_both_sides() -> None:
    check(lambda a: a[2:] - a[:-2], (numbers(16, 3), ROWS), outputs=P(), ppermute=1, all_gather=1)


def lies(x: jax.Array, *entries: str | None) -> jax.Array:
    """Asks for a layout."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(AXES), P(*entries)))


def test_products_are_computed_as_their_results_are_asked_for() -> None:
    """By way of what is computed element by element: the factor is gathered that leads there, not the other."""
    x, w, b = (numbers(4, 8), ROWS), (numbers(8, 8), COLUMNS), (numbers(8), ROWS)
    check(lambda x, w, b: lies(jax.nn.relu(x @ w + b), None, "x"), x, w, b, all_gather=1)
    given = (numbers(16, 8), ROWS), (numbers(8, 8), COLUMNS)
    check(lambda x, w: lies((x @ w).T * 2, None, "x"), *given, all_gather=1)  # the rows, of which there are more


def test_sums_become_parts_where_these_are_asked_for() -> None:
    check(lambda a, b: lies(a @ b, "x", None) * 2, (numbers(8, 8), COLUMNS), (numbers(8, 5), ROWS), reduce_scatter=1)


@pytest.mark.parametrize(("asked", "gathers"), [(True, 2), (False, 1)])
def test_what_is_asked_to_lie_in_parts_is_gathered_again_much_later(asked: bool, gathers: int) -> None:
    def function(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = jnp.tanh(x)
        x = lies(x, "x", None) if asked else x
        y = x @ w
        for _ in range(3):
            y = jnp.sin(y)
        return y + x @ v

    wide = (numbers(4, 64), COLUMNS)
    check(function, (numbers(8, 4), ROWS), wide, (numbers(4, 64) + 1, COLUMNS), all_gather=gathers)


def test_scatters_of_which_parts_are_read_are_computed_in_parts() -> None:
    """The gradient of a lookup, added to a sharded table: no device ever has all of it."""

    def function(table: jax.Array, words: jax.Array, g: jax.Array) -> jax.Array:
        return table - jnp.zeros(table.shape).at[words].add(g)

    words = np.random.default_rng(0).integers(0, 16, 5, np.int32)
    given = (numbers(16, 3), ROWS), (words, P()), (numbers(5, 3), P())
    check(function, *given)
    closed = jax.make_jaxpr(function)(*[value for value, _ in given])
    program = inline(closed.jaxpr, closed.consts)
    layouts = [from_spec(spec, value.shape, AXES) for value, spec in given]
    flow = follow(program, layouts, AXES)
    flow = follow(program, layouts, AXES, wishes=find_wishes(flow, AXES))
    (scatter,) = [step for step in flow.steps if step.eqn.primitive.name == "scatter-add"]
    assert str(scatter.results[0]) == "[x, -]"


def test_axes_that_divide_in_another_order_than_the_mesh_has_stay_in_it() -> None:
    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 2 + y

    axes, values = {"x": 2, "y": 2}, (numbers(8, 4), numbers(8, 4))
    closed = jax.make_jaxpr(function)(*values)
    program = inline(closed.jaxpr, closed.consts)
    flow = follow(program, [from_spec(spec, (8, 4), axes) for spec in (P(("y", "x")), P())], axes)
    assert str(flow.outputs[0]) == "[y*x, -]"
    split = flow_over_mesh(flow, mesh_of(axes))
    assert not list(collectives(jax.make_jaxpr(split)(*values).jaxpr))
    assert_same(jax.jit(split)(*values), lambda *xs: jax.tree.leaves(function(*xs)), *values)


def test_what_is_found_of_an_equation_is_not_anothers_whose_rule_describes_both_alike() -> None:
    """A rule that keeps a description for each shape: pieces of a sum pass where nothing is rounded, and only there."""
    made = Primitive("kept_by_shape")
    made.def_abstract_eval(lambda x, *, to: jax.core.ShapedArray(x.shape, to))

    @functools.cache
    def described(shape: tuple[int, ...]) -> OperatorDescription:
        f = Factors()
        dims = f.dims(shape)
        return OperatorDescription(factors=f.all, operands=(dims,), results=(dims,), linear=(frozenset({0}),))

    register(made)(lambda eqn: described(eqn.invars[0].aval.shape))
    pieces, passed = [OperandSharding(Layout((None,), (("x", Monoid.SUM),)))], []
    for to in (jnp.float32, jnp.bfloat16):
        (eqn,) = jax.make_jaxpr(lambda x, to=to: made.bind(x, to=jnp.dtype(to)))(numbers(8)).jaxpr.eqns
        description = describe(eqn)
        assert description is not None
        passed.append(choose(eqn, description, pieces, {"x": 2}, [None]).passed)
    assert passed == [(("x", Monoid.SUM),), ()]
