"""What is in memory when, by hand, for programs with loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Var

from tests.partition.search.test_steps import Counted
from vnode.analysis.program import Program, inline
from vnode.partition.searches.flattened_program import FlatProgram, flatten
from vnode.partition.searches.ilp_formulation import Search, as_problem
from vnode.partition.searches.problem_memory import DecidedBy, Span, spans_of
from vnode.spmd.layout import Axes, Layout, replicated

pytestmark = pytest.mark.quickly

AXES: Axes = {"x": 4}


def of(step: Callable[..., Any], *shapes: tuple[int, ...]) -> Program:
    jaxpr = jax.make_jaxpr(step)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    return inline(jaxpr.jaxpr, jaxpr.consts)


def spans(program: Program, replaced: tuple[int, ...] = ()) -> tuple[FlatProgram, dict[Var, Span]]:
    """Spans of everything that nodes make and others read."""
    listed = flatten(program, AXES)
    made = {var: n for n, node in enumerate(listed.nodes) for var in node.eqn.outvars}
    found = spans_of(listed, made, [program.outputs[i] for i in replaced if isinstance(program.outputs[i], Var)])
    assert len({span.var for span in found}) == len(found)
    return listed, {span.var: span for span in found}


def layers(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Three layers of which each keeps what it is given."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(h @ w), h

    h, kept = lax.scan(layer, x, weights)
    return jnp.sum(kept) + jnp.sum(h)  # the order of these two is that of the program


def test_a_loop_has_its_slices_and_stacks_while_it_runs() -> None:
    program = of(layers, (3, 8, 8), (2, 8))
    listed, found = spans(program)
    assert [node.eqn.primitive.name for node in listed.nodes[:2]] == ["dot_general", "tanh"]
    (loop,) = listed.parts
    slices, (carried,) = loop.scanned, loop.carried
    (weights,) = slices
    span = found[weights]
    assert (span.turns, span.first, span.last, span.beside) == (3, 0, 1, program.inputs[0])
    assert (found[carried].first, found[carried].last, found[carried].beside) == (0, 1, None)
    readers = {var: n for n, node in enumerate(listed.nodes) for var in node.eqn.invars if isinstance(var, Var)}
    h, kept = loop.makes
    assert (found[h].first, found[h].last) == (1, readers[h])
    assert (found[kept].first, found[kept].last) == (0, readers[kept])


def by_nodes(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Four nodes, each of which goes through the layers."""
    return lax.scan(lambda total, part: (total + layers(weights, part), None), jnp.float32(0), x)[0]


def test_copies_for_a_loop_inside_are_made_once_before_the_loop_around_it() -> None:
    program = of(by_nodes, (3, 8, 8), (4, 2, 8))
    listed, found = spans(program)
    inner, outer = listed.parts
    (weights,) = inner.scanned
    span = found[weights]
    assert (span.first, span.last) == (outer.first, outer.last) and span.last > inner.last
    assert span.copied is program.inputs[0] and span.turns == 3
    (passed,) = [var for var, source in outer.reads.items() if source is program.inputs[0]]
    assert found[passed].counts is DecidedBy.NONE and span.beside is passed


def made_first(weights: jax.Array, x: jax.Array) -> jax.Array:
    """What nodes read is made before them, and nobody else's."""
    doubled = 2 * weights
    return lax.scan(lambda total, part: (total + jnp.sum(part @ doubled), None), jnp.float32(0), x)[0]


def test_what_only_a_loop_reads_is_counted_once() -> None:
    program = of(made_first, (8, 8), (4, 2, 8))
    listed, found = spans(program)
    (loop,) = listed.parts
    doubled = listed.nodes[0].eqn.outvars[0]
    (inside,) = [var for var, source in loop.reads.items() if source is doubled]
    assert (found[doubled].first, found[doubled].last) == (0, 0)  # until the loop begins
    assert (found[inside].first, found[inside].beside) == (1, None) and found[inside].counts is DecidedBy.READERS


def test_what_takes_the_place_of_an_argument_is_not_counted_again() -> None:
    program = of(lambda w, x: (w - 0.1 * (x.T @ x), jnp.sum(w)), (64, 64), (32, 64))
    (_, kept), (_, given) = spans(program), spans(program, replaced=(0,))
    assert kept.keys() - given.keys() == {program.outputs[0]}


def most(search: Search, var: Var) -> dict[Layout, float]:
    """For each layout of a value the bytes that it counts for, when that is most."""
    k = next(k for k, value in enumerate(search.values) if value.var is var)
    held = search.problem.memory[search.groups[len(search.clusters) + k]]
    return dict(zip(search.values[k].layouts, held.max(axis=0).tolist(), strict=True))


def test_a_loops_stack_is_counted_whole() -> None:
    """What three layers keep, in float32: whole, or a quarter of it."""
    search = as_problem(of(layers, (3, 64, 64), (32, 64)), AXES, Counted(axes=AXES), tied=False)
    (loop,) = search.flat.parts
    stack = 4 * 3 * 32 * 64
    assert most(search, loop.makes[1]) == {
        layout: stack if layout == replicated(3) else stack / 4 for layout in most(search, loop.makes[1])
    }
    assert len(most(search, loop.makes[1])) == 3  # undivided, by examples, by units


def test_weights_that_are_gathered_for_layers_in_nodes_are_counted() -> None:
    """Divided in the state, and read whole by layers in a scan: the other three quarters of them are a copy."""
    program = of(by_nodes, (3, 64, 64), (4, 2, 64))
    search = as_problem(program, AXES, Counted(axes=AXES), tied=False)
    inner, _ = search.flat.parts
    (slices,) = inner.scanned
    weights = 4 * 3 * 64 * 64
    for layout, held in most(search, program.inputs[0]).items():
        assert held == (weights if layout == replicated(3) else weights / 4)
    for layout, held in most(search, slices).items():
        assert held == (0.75 * weights if layout == replicated(2) else 0)


def masks(x: jax.Array) -> jax.Array:
    """Loops in a loop that read what is made of nothing, which the outer one reads as well."""
    ones = jnp.ones((8, 8))

    def outer(total: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        inside, _ = lax.scan(lambda h, row: (h @ ones, row), part, ones)
        return total + jnp.sum(inside), jnp.sin(ones) * jnp.sum(part)

    total, kept = lax.scan(outer, jnp.float32(0), x)
    return total + jnp.sum(kept)


def test_what_is_made_of_nothing_is_not_counted_in_loops_either() -> None:
    program = of(masks, (4, 8, 8))
    search = as_problem(program, AXES, Counted(axes=AXES), tied=False)  # a plan is found
    inner, outer = search.flat.parts
    (ones,) = [var for var, source in outer.reads.items() if source is None and var not in outer.carried]
    of_ones = {ones, *[var for var, source in inner.reads.items() if source is ones]}
    assert len(of_ones) == 3
    _, found = spans(program)
    assert not of_ones & found.keys() and not of_ones & {span.beside for span in found.values()}
