"""Plans of steps whose examples meet, or that hand on values of each example, beside what XLA compiles of them.

The un-virtualized step is the reference for values, XLA's text and its analysis of memory for what devices exchange and
hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.partition import possible
from tests.partition.exchanged import assert_as_planned
from tests.partition.test_plan import V5E, normal
from tests.rounding import assert_same
from vnode.partition import Machine, Plan
from vnode.partition.plan.candidates import MEGATRON, MeshSearch
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import on_nodes, subject_of

GIB = 2**30
Params = dict[str, jax.Array]


def encoded(params: Params, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def updated(loss: Callable[[Params], Any], params: Params, has_aux: bool = False) -> Any:
    told, grads = jax.value_and_grad(loss, has_aux=has_aux)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), told


def all_pairs(params: Params, batch: tuple[jax.Array, jax.Array]) -> Any:
    """Each example beside all others, twice encoded."""
    x, y = batch

    def loss(params: Params) -> Any:
        a, b = encoded(params, x), encoded(params, y)
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(a @ b.T)))

    return updated(loss, params)


def ranked(params: Params, batch: tuple[jax.Array, jax.Array]) -> Any:
    """Sorted over the batch, with its gradient."""
    x, y = batch
    return updated(lambda params: jnp.mean((jnp.sort(encoded(params, x), 0) - y) ** 2), params)


def of_each(params: Params, batch: tuple[jax.Array, jax.Array]) -> Any:
    """Handed on for each example."""
    x, y = batch

    def loss(params: Params) -> Any:
        found = encoded(params, x)
        return jnp.mean((found - y) ** 2), found

    return updated(loss, params, has_aux=True)


def beside_the_least(params: Params, batch: tuple[jax.Array, jax.Array]) -> Any:
    """An argument that is read whole, and by example."""
    x, y = batch
    return updated(lambda params: jnp.mean((encoded(params, x - jnp.sort(x, 0)[:1]) - y) ** 2), params)


def fixed_point(params: Params, batch: tuple[jax.Array, jax.Array]) -> Any:
    """Sought until the whole batch is near it: a value of each example goes through a loop."""
    x, y = batch

    def loss(params: Params) -> Any:
        def turn(carry: Any) -> Any:
            return jnp.tanh(0.1 * encoded(params, carry[0]) + x), carry[0], carry[2] + 1

        def far(carry: Any) -> Any:
            return (jnp.max(jnp.abs(carry[0] - carry[1])) > 1e-4) & (carry[2] < 9)

        found = jax.lax.stop_gradient(jax.lax.while_loop(far, turn, (x, x + 1, 0))[0])
        return jnp.mean((jnp.tanh(0.1 * encoded(params, found) + x) - y) ** 2)

    return updated(loss, params)


STEPS = {step.__name__: step for step in (all_pairs, ranked, of_each, beside_the_least, fixed_point)}
MESHES = {
    "8": {"vnode": 8},
    "1x2": {"vnode": 1, "model": 2},
    "4x2": {"vnode": 4, "model": 2},
    "2x2x2": {"vnode": 2, "model": 2, "model2": 2},
}


def planned(args: Any, name: str, mesh: str, kind: str, reduction: str, nodes: int) -> Plan:
    subject = subject_of(on_nodes(STEPS[name], nodes, {"reduction": reduction}), args)
    sizes = MESHES[mesh]
    machine = Machine.gpus("P100", hosts=1, per_host=math.prod(sizes.values()))
    on = MeshSearch(subject, machine, sizes, "cpu", None)
    match kind:
        case "Megatron":
            made = on.with_sharded_state(on.expert(MEGATRON))
        case "searched":
            solution = on.solution(GIB, 20, 0.01)
            assert solution is not None
            made = on.searched(solution)
        case _:
            made = on.candidate(kind, on.undivided, shard_state=kind == "FSDP")
    return plan_of(made, GIB)


def arguments(batch: int) -> tuple[Params, tuple[jax.Array, jax.Array]]:
    d, h = 64, 128
    return {"up": normal(1, d, h), "down": normal(2, h, d)}, (normal(3, batch, d), normal(4, batch, d))


EVERY = [
    (name, mesh, kind, reduction, nodes, batch)
    for name in STEPS
    for mesh, kind, reduction, nodes, batch in [
        ("8", "FSDP", "invariant", 16, 128),
        ("8", "data parallel", "fast", 12, 120),  # some devices have two nodes, some one
        ("4x2", "Megatron", "fast", 16, 128),
        ("4x2", "searched", "invariant", 16, 125),  # the last node is not full
        ("2x2x2", "searched", "fast", 16, 128),
    ]
]


@pytest.mark.sampled(0, thorough=5)
@pytest.mark.parametrize(("name", "mesh", "kind", "reduction", "nodes", "batch"), EVERY)
def test_what_is_needed_of_all_examples_is_exchanged_as_planned(
    name: str, mesh: str, kind: str, reduction: str, nodes: int, batch: int
) -> None:
    args = arguments(batch)
    plan = planned(args, name, mesh, kind, reduction, nodes)
    found = plan.accept()
    assert_as_planned(found)
    assert found.predicted.arguments == found.compiled.arguments, "of what is split among nodes a device has its part"
    step = plan.step()
    actual, expected = step(step.put(args[0]), args[1]), STEPS[name](*args)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.sampled(0, thorough=2)
@pytest.mark.parametrize("batch", [128, 125])
@pytest.mark.parametrize("name", ["all_pairs", "ranked", "fixed_point"])
def test_bits_do_not_depend_on_how_many_devices_put_values_together(name: str, batch: int) -> None:
    """With the same split of what nodes compute, on two devices and on eight."""
    args = arguments(batch)
    results = []
    for mesh, devices in (("1x2", 2), ("4x2", 8)):
        step = planned(args, name, mesh, "Megatron", "invariant", 16).step(jax.devices()[:devices])
        results.append(step(step.put(args[0]), args[1]))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)


def by_words(params: Params, batch: tuple[jax.Array, jax.Array]) -> Any:
    """Examples and their words are one dimension, of which something is needed whole."""
    x, y = batch

    def loss(params: Params) -> Any:
        each = ((encoded(params, x) - y) ** 2).mean(-1).reshape(-1)
        return each.mean(), each

    params, (value, each) = updated(loss, params, has_aux=True)
    return params, (value, jnp.sort(each), each * each.max())


@pytest.mark.sampled(1)
@pytest.mark.quickly
@pytest.mark.parametrize(
    ("sizes", "nodes", "batch", "seed"),
    [
        ({"vnode": 2, "model": 4}, 3, 16, 0),  # one row has two nodes, the other one
        ({"vnode": 2, "model": 4}, 4, 15, 1),  # the last node is not full
        ({"vnode": 2, "model": 2, "model2": 2}, 4, 16, 2),
    ],
)
def test_parts_of_nodes_are_put_together_that_are_divided_along_their_examples(
    sizes: dict[str, int], nodes: int, batch: int, seed: int
) -> None:
    """A node's examples do not count as the whole batch's do: neither are all, nor are they padded alike."""
    args = {"up": normal(1, 12, 24), "down": normal(2, 24, 8)}, (normal(3, batch, 6, 12), normal(4, batch, 6, 8))
    subject = subject_of(on_nodes(by_words, nodes, {}), args)
    on = MeshSearch(subject, V5E, sizes, "cpu", None)
    drawn = possible(on.search.problem, np.random.default_rng(seed))
    plan = plan_of(on.candidate("random", on.search.flow(drawn)), GIB)
    assert_same(plan.step()(*args), jax.jit(by_words), *args)


def in_one_branch(params: Params, batch: tuple[jax.Array, jax.Array]) -> Any:
    """What one branch computes of each example, another has zeros for."""
    x, y = batch

    def centred(h: jax.Array) -> Any:
        h = h - h.mean(0)
        return h, jnp.sum(h**2, 1)

    def as_it_is(h: jax.Array) -> Any:
        return h * 0.5, jnp.zeros(len(h))

    h = x @ params["up"]
    h, more = jax.lax.cond(h.mean() > params["above"], centred, as_it_is, h)
    loss = jnp.mean((h @ params["down"] - y) ** 2) + more.mean()
    return {**params, "above": params["above"] + loss}, (loss, more)


@pytest.mark.sampled(1, thorough=2)
@pytest.mark.quickly
@pytest.mark.parametrize("above", [-9.0, 9.0])
@pytest.mark.parametrize(("sizes", "nodes"), [({"vnode": 2, "model": 4}, 5), ({"vnode": 4, "model": 2}, 4)])
def test_zeros_in_the_place_of_what_another_branch_computes_of_each_example(
    sizes: dict[str, int], nodes: int, above: float
) -> None:
    """Branches hand on alike what only one of them has in parts: where rows differ their own part, else shards."""
    params = {"up": normal(1, 12, 24), "down": normal(2, 24, 8), "above": jnp.asarray(np.float32(above))}
    args = params, (normal(3, 16, 12), normal(4, 16, 8))
    subject = subject_of(on_nodes(in_one_branch, nodes, {}), args)
    on = MeshSearch(subject, V5E, sizes, "cpu", None)
    for seed in range(2):
        drawn = possible(on.search.problem, np.random.default_rng(seed))
        plan = plan_of(on.candidate("random", on.search.flow(drawn)), GIB)
        assert_same(plan.step()(*args), jax.jit(in_one_branch), *args)


def in_turn(params: Params, batch: tuple[jax.Array, jax.Array]) -> Any:
    """One example after another, each with what those before left; and what all of them are needed for beside it."""
    x, y = batch

    def loss(params: Params) -> Any:
        h = encoded(params, x)
        after, seen = jax.lax.scan(lambda c, row: (jnp.tanh(0.5 * c + row), c.sum()), jnp.zeros(8), h)
        return jnp.mean((h - y) ** 2) + after.mean(), seen

    return updated(loss, params, has_aux=True)


@pytest.mark.quickly
@pytest.mark.parametrize(("sizes", "nodes"), [({"vnode": 2, "model": 4}, 3), ({"vnode": 4, "model": 2}, 8)])
def test_examples_in_turn_are_read_whole(sizes: dict[str, int], nodes: int) -> None:
    """Where rows have different numbers of nodes, too."""
    args = {"up": normal(1, 12, 24), "down": normal(2, 24, 8)}, (normal(3, 16, 12), normal(4, 16, 8))
    subject = subject_of(on_nodes(in_turn, nodes, {}), args)
    on = MeshSearch(subject, V5E, sizes, "cpu", None)
    plan = plan_of(on.candidate("whole", on.undivided), GIB)
    assert_same(plan.step()(*args), jax.jit(in_turn), *args)


def whole_and_its_double(params: Params, x: jax.Array) -> Any:
    """A result of each example beside a weight of the same shape, which it does not succeed."""
    return {"w": params, "each": x * params.sum()}


def other_parts_inside(params: Params, x: jax.Array) -> Any:
    """Two examples are one in the step, not in the loop that they go through until all of them are near zero."""
    halves, _ = jax.lax.while_loop(lambda s: jnp.max(s[0]) > 0.1, lambda s: (0.5 * s[0], s[1] + 1), (jnp.abs(x), 0))
    return params, (halves, x.reshape(-1, 2, *x.shape[1:]).sum(1) * params.sum())


def other_parts_in_a_loop(params: Params, x: jax.Array) -> Any:
    """Examples three times one after another in a loop, in parts that are none of the step's."""

    def turn(c: jax.Array, p: jax.Array) -> Any:
        tripled = jnp.concatenate([x, x[::-1], x])
        return jnp.tanh(c + tripled.reshape(len(x), 3, -1).sum(1)) * p, c.sum()

    return jax.lax.scan(turn, x, params)


def turned_in_one_branch(params: Params, x: jax.Array) -> Any:
    """Examples are one dimension of what one branch returns, and another one of what the other does."""
    pairs = x[:, :2].T.reshape(2, 2, 2)
    found = jax.lax.cond(
        x.sum() > 0, lambda: pairs.transpose(1, 0, 2), lambda: jnp.broadcast_to(pairs[:-1], pairs.shape)
    )
    return params, found


def alike_passes(params: Params, x: jax.Array) -> Any:
    """Two passes begin with a product of the same shape, one of them in a loop, by a number."""
    squares = x * x
    total = jnp.tanh((squares.T @ squares).sum())
    near, _ = jax.lax.while_loop(lambda s: jnp.any(s[0] > 0.3 * total), lambda s: (s[0] * 0.7, s[1] + 1), (x, 0))
    return params + total, near


def whole_at_first(params: Params, x: jax.Array) -> Any:
    """A loop begins with a mean over the batch, of the batch's length, and goes on with a value of each example."""

    def turn(s: Any) -> Any:
        return 0.5 * s[0] + 0.5 * jnp.tanh(x[:, 0]), s[1] + 1

    found, turns = jax.lax.while_loop(lambda s: (s[1] < 4) & (jnp.abs(s[0]).max() > 0.2), turn, (x.mean(0), 0))
    return params, (found, turns)


def a_number_of_each_branch(params: Params, x: jax.Array) -> Any:
    """The gradient of a branch is a number, also of the one that takes a mean over all pairs."""

    def loss(first: jax.Array) -> jax.Array:
        return jax.lax.cond(first > 100 * x.max(), lambda w: w, lambda w: jnp.tanh(x @ x.T).mean(), first)

    found, gradient = jax.value_and_grad(loss)(params[0])
    return params - gradient, found


@pytest.mark.sampled(1, thorough=3)
@pytest.mark.quickly
@pytest.mark.parametrize("sizes", [{"vnode": 1, "model": 4}, {"vnode": 2, "model": 2, "model2": 2}], ids=str)
@pytest.mark.parametrize(
    ("step", "examples", "nodes", "size"),
    [
        (whole_and_its_double, 6, 2, None),
        (other_parts_inside, 12, 5, None),
        (other_parts_in_a_loop, 6, 3, None),
        (turned_in_one_branch, 4, 2, None),
        (alike_passes, 9, 6, 2),
        (whole_at_first, 4, 3, 4),
        (a_number_of_each_branch, 6, 3, None),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_values_of_each_example_around_loops_and_branches(
    step: Callable[..., Any], examples: int, nodes: int, size: int | None, sizes: dict[str, int]
) -> None:
    width = 6 if size is None else size
    bare = step is whole_and_its_double
    args = jnp.abs(normal(1, 6)), normal(2, examples) if bare else normal(2, examples, width)
    machine = Machine.gpus("P100", hosts=1, per_host=math.prod(sizes.values()))
    for reduction in ("fast", "invariant"):
        subject = subject_of(on_nodes(step, nodes, {"reduction": reduction, "in_axes": (None, 0)}), args)
        on = MeshSearch(subject, machine, sizes, "cpu", None)
        for seed in range(2):
            drawn = possible(on.search.problem, np.random.default_rng(seed))
            made = on.candidate("random", on.search.flow(drawn), shard_state=bool(seed))
            plan = plan_of(made, GIB)
            assert_same(plan.step(jax.devices()[: len(machine.devices)])(*args), jax.jit(step), *args)
