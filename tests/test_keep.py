"""What passes keep for later ones: the choice, the memory it takes, and what `explain` says of it.

Knows steps that normalize over the batch, and how to try every choice. Must not know how the choice is found.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, Var

import vnode
from tests.zoo import kit
from vnode.analysis.ancestry import Ancestry
from vnode.analysis.batch_flow import Follower
from vnode.analysis.forms import WHOLE, Batch, Partial, Slice
from vnode.analysis.min_cut import cheapest_cut
from vnode.analysis.pass_cut import KEEP_POLICIES, PassCut, cheap_constants
from vnode.analysis.recipe import build_recipe, evaluated_steps
from vnode.analysis.states import State
from vnode.analysis.tracing import trace

FLOAT = 4
BATCH, WIDTH, LAYERS, NODES = 4096, 64, 3, 8
ACTIVATION = FLOAT * BATCH * WIDTH


def normalized(x: jax.Array) -> jax.Array:
    mean = x.mean(0)
    return (x - mean) * jax.lax.rsqrt((x**2).mean(0) - mean**2 + 1e-5)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.maximum(normalized(x @ w), 0.0)


def network(weights: jax.Array, x: jax.Array) -> jax.Array:
    for w in weights:
        x = layer(x, w)
    return jnp.mean(x**3)


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
    return jnp.mean(x**3)


def step_of(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(weights: jax.Array, x: jax.Array) -> Any:
        value, slope = jax.value_and_grad(loss)(weights, x)
        return weights - 0.1 * slope, value

    return step


def arguments(batch: int = BATCH, width: int = WIDTH) -> tuple[jax.Array, jax.Array]:
    return kit.normal(LAYERS, width, width, scale=width**-0.5), kit.normal(batch, width)


def temporaries(step: Any, *args: Any) -> int:
    return step.lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.thorough
def test_a_normalized_network_needs_less_memory_than_the_plain_step() -> None:
    """Although the products of all layers are kept, as computing them again would exceed the budget: but those only."""
    step, args = step_of(network), arguments()
    virtual = vnode.virtualize(step, virtual_nodes=NODES)
    one, three = (temporaries(virtual.on(jax.devices()[:n]), *args) for n in (1, 3))
    plain = temporaries(jax.jit(step), *args)
    assert one < 0.85 * plain and three < 0.5 * plain
    report = virtual.on(jax.devices()[:1]).explain(*args)
    # Two or three products, what the backward pass before made of one, and what this one makes of the next.
    assert report.kept_between <= min(7 * ACTIVATION, one)


@pytest.mark.thorough
def test_what_is_kept_takes_memory_from_the_pass_on_that_keeps_it() -> None:
    """A mean, then the variance about it, are two passes for every layer; nothing that comes later is there before.

    By hand: while a pass writes the gradient of a layer's product, that product and those before it are held.
    """

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        for w in weights:
            x = x @ w
            x = x - x.mean(0)
            x = jnp.maximum(x * jax.lax.rsqrt((x**2).mean(0) + 1e-5), 0.0)
        return jnp.mean(x**3)

    step, args = step_of(loss), arguments()
    virtual = vnode.virtualize(step, virtual_nodes=NODES).on(jax.devices()[:1])
    of_a_node = temporaries(jax.jit(step), args[0], args[1][: BATCH // NODES])
    held = virtual.explain(*args).kept_between
    taken = temporaries(virtual, *args)
    assert taken < 0.9 * temporaries(jax.jit(step), *args)
    assert held <= taken < held + 2 * of_a_node


def test_more_is_kept_where_less_may_be_computed_again() -> None:
    step = step_of(lambda w, x: jnp.mean(layer(x, w) ** 3))
    args = kit.normal(40, 40), kit.normal(BATCH, 40)
    little, much = (
        vnode.virtualize(step, virtual_nodes=NODES, recompute_budget=budget).on(jax.devices()[:1]).explain(*args)
        for budget in (1.0, 0.5)
    )
    assert little.kept_between < FLOAT * BATCH * 40 <= much.kept_between
    assert much.recomputed <= 0.5 * much.flops < little.recomputed <= little.flops


def test_what_is_kept_is_said() -> None:
    """Of a layer that is dearer than its result, that; of one whose result is larger than the batch, nothing."""

    def one(w: jax.Array, x: jax.Array) -> Any:
        return jax.grad(lambda w: jnp.mean(normalized(x @ w) ** 3))(w)

    virtual = vnode.virtualize(one, virtual_nodes=NODES, recompute_budget=100.0)
    x = kit.normal(BATCH, 512)
    report = virtual.on(jax.devices()[:3]).explain(kit.normal(512, 16), x)
    (kept,) = report.between
    assert kept.bytes == FLOAT * BATCH * 16 and "test_keep.py" in kept.where
    assert report.kept_between == FLOAT * BATCH * 16 * 3 // NODES  # the fullest device has 3 of 8 nodes
    (line,) = [line for line in str(report).splitlines() if "kept for later passes" in line]
    assert "96.0 KiB of memory on a device" in line
    report = virtual.explain(kit.normal(512, 1024), x)
    assert not report.between and "kept for later passes" not in str(report)


def test_what_loops_around_passes_hold_is_said() -> None:
    """By hand: the scan carries the examples, and stacks for the backward one what that reads."""
    report = vnode.virtualize(step_of(scanned), virtual_nodes=NODES, recompute_budget=100.0).explain(*arguments())
    stacked = sum(line.bytes for line in report.around if f"[{LAYERS},{BATCH},{WIDTH}]" in line.what)
    jaxpr = jax.make_jaxpr(jax.grad(scanned))(*arguments()).jaxpr
    forward, _ = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    residuals = [var.aval for var in forward.outvars if var.aval.shape == (LAYERS, BATCH, WIDTH)]
    assert stacked == sum(aval.size * aval.dtype.itemsize for aval in residuals) > LAYERS * ACTIVATION
    assert "held around loops" in str(report)


@pytest.mark.thorough
def test_devices_share_what_loops_hold_also_if_they_hold_different_numbers_of_nodes() -> None:
    step, args = step_of(scanned), arguments()
    virtual = vnode.virtualize(step, virtual_nodes=NODES, recompute_budget=100.0)
    one, three = (temporaries(virtual.on(jax.devices()[:n]), *args) for n in (1, 3))
    assert three < 0.6 * one


@pytest.mark.thorough
def test_loops_give_the_same_bits_where_devices_hold_different_numbers_of_nodes() -> None:
    """Carries, stacked results, a branch inside, and two views of the batch one after another."""

    def step(weights: jax.Array, x: jax.Array, flip: jax.Array) -> Any:
        def body(views: jax.Array, w: jax.Array) -> Any:
            views = jax.lax.cond(flip, lambda v: normalized(v[::1] @ w), lambda v: layer(v, w), views)
            return views, views.sum(1)

        views, sums = jax.lax.scan(body, jnp.concatenate([x, jnp.sin(x)]), weights)
        return views, sums, jax.lax.scan(lambda c, s: (c + s * (s - s.mean()), c), jnp.zeros_like(sums[0]), sums)

    args = (*arguments(13, 5), jnp.array(False))
    want = jax.jit(step)(*args)
    virtual = vnode.virtualize(step, virtual_nodes=4, in_axes=(None, 0, None), recompute_budget=100.0)
    one, three = (jax.tree.map(np.asarray, virtual.on(jax.devices()[:n])(*args)) for n in (1, 3))
    jax.tree.map(np.testing.assert_array_equal, one, three)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, want)


@dataclasses.dataclass(eq=False)
class FakeStep:
    eqn: JaxprEqn


@dataclasses.dataclass
class FakeFlow:
    steps: list[Any]
    position: dict[Var, int]


def random_program(rng: np.random.Generator) -> Any:
    """Equations that each read one or two earlier values."""

    def fun(x: jax.Array) -> jax.Array:
        values = [x]
        for _ in range(7):
            a, b = rng.integers(len(values), size=2)
            values.append(jnp.sin(values[a]) if a == b else values[a] * values[b])
        return values[-1] - values[-2]

    return jax.make_jaxpr(fun)(1.0).jaxpr


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_costs_less(seed: int) -> None:
    """Every set of values that could be kept, tried one by one. Some steps, and in half of the cases some values, are
    free: what no pass computes twice, and what is kept for another one in any case."""
    rng = np.random.default_rng(seed)
    jaxpr = random_program(rng)
    flow: Any = FakeFlow([FakeStep(eqn) for eqn in jaxpr.eqns], {eqn.outvars[0]: i for i, eqn in enumerate(jaxpr.eqns)})
    free = seed % 2 / 2
    work = {step: float(rng.integers(0, 20)) * (rng.random() >= free) for step in flow.steps}
    prices = {var: float(rng.integers(1, 20)) * (rng.random() >= free) for var in flow.position}
    memory = {var: price if rng.random() < 0.7 else None for var, price in prices.items()}
    wanted = [var for var in jaxpr.outvars if isinstance(var, Var)]

    def price(kept: set[Var]) -> float:
        stack, done = [var for var in wanted if var not in kept], set()
        while stack:
            var = stack.pop()
            if var in flow.position and var not in done:
                done.add(var)
                stack += [a for a in flow.steps[flow.position[var]].eqn.invars if isinstance(a, Var) and a not in kept]
        return sum(memory[var] or 0.0 for var in kept) + sum(work[flow.steps[flow.position[var]]] for var in done)

    may_be = [var for var, bytes_of in memory.items() if bytes_of is not None]
    choices = itertools.chain.from_iterable(itertools.combinations(may_be, k) for k in range(len(may_be) + 1))
    found = cheapest_cut(flow, wanted, lambda var: False, memory.__getitem__, work.__getitem__)
    assert price(found) == min(price(set(kept)) for kept in choices)


@pytest.mark.thorough
def test_more_than_the_batch_is_kept_only_where_the_step_would_be_refused_otherwise() -> None:
    """Layers that are wider than the input, as those of every convolutional network: the step as written holds them."""
    args = kit.normal(64, 512, scale=0.1), kit.normal(512, 512, scale=0.04), kit.normal(1024, 64)

    def step(first: jax.Array, second: jax.Array, x: jax.Array) -> Any:
        return jax.grad(lambda w: jnp.mean(layer(layer(layer(x, w[0]), w[1]), w[1]) ** 3))((first, second))

    def virtual(budget: float) -> Any:
        options: dict[str, Any] = {"in_axes": (None, None, 0), "recompute_budget": budget}
        return vnode.virtualize(step, virtual_nodes=NODES, **options).on(jax.devices()[:1])

    within, without = virtual(0.5).explain(*args), virtual(100.0).explain(*args)
    assert within.recomputed <= 0.5 * within.flops < without.recomputed
    assert {line.bytes for line in within.between} == {FLOAT * 1024 * 512} and not without.between
    assert "more than the batch takes" in str(within) and "more than the batch takes" not in str(without)
    got, want = virtual(0.5)(*args), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), got, want)


def test_what_is_refused_is_refused_for_its_memory() -> None:
    """Layers of six by six cost too little to be worth keeping, where less than a forward pass may be repeated."""
    args = kit.normal(LAYERS, 6, 6), kit.normal(BATCH, 6)
    with pytest.raises(vnode.CouplingError, match=r"keeping more .* would save fewer than 10 operations per byte"):
        vnode.virtualize(step_of(network), virtual_nodes=NODES, recompute_budget=0.3).explain(*args)


@pytest.mark.parametrize("seed", range(5))
def test_sets_of_steps_are_those_of_a_walk(seed: int) -> None:
    """What a pass evaluates if it is given nothing, of every value, against a recipe for that value alone."""
    rng = np.random.default_rng(seed)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        values = [x]
        for _ in range(4):
            a, b = (values[i] for i in rng.integers(len(values), size=2))
            values.append(layer(a, w) + b if rng.random() < 0.6 else jnp.sin(a) * b.mean(0))
        return jnp.mean(values[-1] ** 3)

    traced = trace(lambda w, x: jax.tree.leaves(jax.value_and_grad(loss)(w, x)), jnp.ones((4, 4)), jnp.ones((8, 4)))
    states = [State(WHOLE, model=True), State(Slice(Batch(8), 0, 1, Fraction(1)), materialized=True)]
    flow = Follower(Batch(8), 4, lambda eqn: "exact").follow(traced.program, states)
    choice = PassCut(flow, KEEP_POLICIES[0], {}, cheap_constants(flow))
    choice.level = 99
    ancestry = Ancestry(flow, choice.is_whole)
    makes, _ = ancestry.pass_ancestry(choice.is_leaf)
    for var in flow.position:
        if isinstance(flow.states[var].form, Slice | Partial):
            made = build_recipe(flow, [(var, flow.states[var].form)], flow.node_sizes, is_leaf=choice.is_leaf)
            divided = {
                step for step in evaluated_steps(made) if step.location is not None
            }  # no clones of what is whole
            assert divided == {s for s in flow.steps if s.location is not None and ancestry.contains(makes[var], s)}
