"""Where in a step an effect stands, and how often it then happens.

Knows callbacks in loops, branches, passes, on uneven placements and under outer loops. Must not know how a step is
emitted. `tests.test_callbacks` has the simple places; here each number of calls follows from the place: once per step
for what the nodes share, once per node for their examples, times the iterations of loops around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import vnode
from tests.rounding import assert_same, eighths

pytestmark = pytest.mark.quickly

BATCH = 8
NODES = 4
PLACES = ([4], [2, 2], [3, 1], [1, 0, 3])


class Log:
    """Collects the operands of callbacks."""

    def __init__(self) -> None:
        self.calls: list[tuple[np.ndarray, ...]] = []

    def __call__(self, *values: Any) -> None:
        self.calls.append(tuple(np.array(value) for value in values))


def arguments() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(eighths(rng.standard_normal(3))), jnp.asarray(eighths(rng.standard_normal((BATCH, 3))))


def run(step: Callable[..., Any], counts: list[int] = PLACES[1], *args: Any, **options: Any) -> Any:
    """What a step returns on a placement, after its callbacks; equal to what the step as written returns."""
    placement = vnode.Placement(sum(counts), jax.devices()[: len(counts)], counts=counts)
    virtual = vnode.virtualize(step, virtual_nodes=sum(counts), placement=placement, recompute_budget=100.0, **options)
    out = virtual(*(args or arguments()))
    jax.block_until_ready(out)
    jax.effects_barrier()
    return out


@pytest.mark.parametrize("counts", PLACES, ids=str)
def test_values_of_all_kinds_together(counts: list[int]) -> None:
    mixed, nothing = Log(), Log()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(mixed, w, x, x.sum(0))
        jax.debug.callback(nothing)
        return (x @ w).sum()

    w, x = arguments()
    run(step, counts)
    assert len(nothing.calls) == 1
    assert len(mixed.calls) == NODES
    for whole, _, reduced in mixed.calls:
        np.testing.assert_array_equal(whole, w)
        np.testing.assert_array_equal(reduced, x.sum(0))
    rows = np.concatenate([examples for _, examples, _ in mixed.calls])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, np.asarray(x).tolist()))


@pytest.mark.parametrize("counts", PLACES, ids=str)
def test_examples_in_a_loop(counts: list[int]) -> None:
    log = Log()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, i: jax.Array) -> Any:
            jax.debug.callback(log, i, x)
            return 2.0 * x, None

        return lax.scan(body, x, jnp.arange(3))[0]

    _, x = arguments()
    np.testing.assert_array_equal(run(step, counts), 8.0 * x)
    assert sorted(int(i) for i, _ in log.calls) == sorted([0, 1, 2] * NODES)
    for k in range(3):
        total = sum(examples.sum(0) for i, examples in log.calls if i == k)
        np.testing.assert_array_equal(total, 2.0**k * x.sum(0))


def test_loop_of_passes_over_the_batch() -> None:
    """Each iteration reads a mean over the batch, so it has passes of its own."""
    means, examples = Log(), Log()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> Any:
            jax.debug.callback(means, x.mean())
            jax.debug.callback(examples, x)
            return x - x.mean(), None

        return lax.scan(body, x, None, length=3)[0]

    _, x = arguments()
    np.testing.assert_allclose(run(step), x - x.mean(), atol=1e-6)
    assert len(means.calls) == 3
    assert len(examples.calls) == 3 * NODES
    found = sorted((abs(float(mean)) for (mean,) in means.calls), reverse=True)
    np.testing.assert_allclose(found, [abs(float(x.mean())), 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("reads", ["own examples", "another example"])
def test_only_the_branch_that_is_taken_once_per_node(reads: str) -> None:
    """A branch that reads another example has passes of its own."""
    taken, other = Log(), Log()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def yes() -> jax.Array:
            jax.debug.callback(taken, x)
            return x * (x[0, 0] if reads == "another example" else 2.0)

        def no() -> jax.Array:
            jax.debug.callback(other, x)
            return -x

        return lax.cond(jnp.sum(w**2) > 0, yes, no)

    _, x = arguments()
    np.testing.assert_array_equal(run(step), x * (x[0, 0] if reads == "another example" else 2.0))
    assert len(taken.calls) == NODES and other.calls == []


def test_examples_one_after_another_in_their_order() -> None:
    """A running average over the batch goes through it once, in order."""
    log = Log()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(average: jax.Array, row: jax.Array) -> Any:
            jax.debug.callback(log, row)
            return 0.9 * average + 0.1 * row, None

        return lax.scan(body, jnp.zeros(3), x)[0]

    _, x = arguments()
    want = np.zeros(3)
    for row in np.asarray(x):
        want = 0.9 * want + 0.1 * row
    np.testing.assert_allclose(run(step), want, rtol=1e-5)
    assert len(log.calls) == BATCH


def test_per_example_callback_under_vmap() -> None:
    log = Log()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.vmap(lambda row: jax.debug.callback(log, row))(x)
        return x.sum()

    run(step)
    _, x = arguments()
    assert sorted(tuple(row.tolist()) for (row,) in log.calls) == sorted(map(tuple, np.asarray(x).tolist()))


def test_callbacks_of_forward_and_backward_pass() -> None:
    """The forward pass of a checkpoint runs twice, under jit as on nodes."""
    log, plain = Log(), Log()

    def step_with(log: Log) -> Callable[..., Any]:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            y = x @ w
            jax.debug.callback(log, y)
            return jnp.sin(y).sum()

        return jax.grad(lambda w, x: jax.checkpoint(loss)(w, x))

    run(step_with(log))
    jax.block_until_ready(jax.jit(step_with(plain))(*arguments()))
    jax.effects_barrier()
    assert len(log.calls) == NODES * len(plain.calls)


def test_more_nodes_than_examples() -> None:
    """Nodes without an example of their own repeat the last."""
    log = Log()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(log, x)
        return x.sum(0)

    _, x = arguments()
    out = run(step, [3, 2], *(0.0, x[:3]))
    np.testing.assert_array_equal(out, x[:3].sum(0))
    assert len(log.calls) == 5
    assert {tuple(rows[0].tolist()) for (rows,) in log.calls} == {tuple(row.tolist()) for row in np.asarray(x[:3])}


def test_a_step_that_returns_nothing() -> None:
    log = Log()
    run(lambda w, x: jax.debug.callback(log, x))
    assert len(log.calls) == NODES


def test_in_a_loop_of_steps() -> None:
    log = Log()

    def step(w: jax.Array, x: jax.Array) -> Any:
        loss = jnp.mean((x @ w) ** 2)
        jax.debug.callback(log, loss)
        return 0.5 * w, loss

    virtual = vnode.virtualize(step, virtual_nodes=NODES).on(jax.devices()[:2])
    w, x = arguments()
    _, losses = jax.jit(lambda w: lax.scan(lambda w, _: virtual(w, x), w, None, length=3))(w)
    jax.effects_barrier()
    np.testing.assert_allclose(sorted(float(loss) for (loss,) in log.calls), np.sort(losses), rtol=1e-6)


# Host code whose result is used


@pytest.mark.parametrize("counts", PLACES, ids=str)
@pytest.mark.parametrize("call", ["io_callback", "pure_callback"])
@pytest.mark.parametrize("of", ["parameters", "loss"])
def test_host_code_of_what_nodes_share_runs_once(of: str, call: str, counts: list[int]) -> None:
    seen: list[float] = []

    def host(value: Any) -> np.ndarray:
        seen.append(float(np.asarray(value)))
        return np.float32(2.0) * np.asarray(value)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        value = w.sum() if of == "parameters" else (x @ w).sum()
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        doubled = io_callback(host, shape, value) if call == "io_callback" else jax.pure_callback(host, shape, value)
        return x * doubled

    w, x = arguments()
    value = float(w.sum() if of == "parameters" else (x @ w).sum())
    np.testing.assert_array_equal(run(step, counts), 2.0 * value * x)
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], value)


def test_host_code_with_effects_that_is_given_the_whole_batch_is_not_given_parts() -> None:
    """Nothing says that it treats examples one by one, nor how often it is wanted."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return io_callback(lambda values: np.sort(values, axis=0), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(vnode.UnsupportedPrimitiveError, match=r"(?s)'io_callback'.*test_effects\.py:\d+"):
        run(step)


def shape_of(value: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def sorted_and_scaled(method: str) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def one(row: jax.Array) -> jax.Array:
            def host(row: Any, w: Any) -> np.ndarray:
                return np.sort(row, -1) * np.asarray(w)

            return jax.pure_callback(host, shape_of(row), row, w, vmap_method=method)

        y = jax.jit(jax.vmap(one))(x)
        return y - y.mean(0)

    return step


def every_pair(method: str) -> Callable[..., Any]:
    """Two dimensions that vmap added; the examples are the second or the first."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def one(scale: jax.Array, row: jax.Array) -> jax.Array:
            def host(scale: Any, row: Any) -> np.ndarray:
                return np.asarray(scale)[..., None] * np.asarray(row)

            return jax.pure_callback(host, shape_of(row), scale, row, vmap_method=method)

        return (
            jax.vmap(lambda v: jax.vmap(lambda row: one(v, row))(x))(w).sum(0),
            jax.vmap(lambda row: jax.vmap(lambda v: one(v, row))(w))(x),
        )

    return step


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all"])
@pytest.mark.parametrize("make", [sorted_and_scaled, every_pair])
def test_host_code_that_vmap_gives_all_examples(make: Callable[[str], Any], method: str) -> None:
    step = make(method)
    w, x = arguments()
    for got, want in zip(jax.tree.leaves(run(step, [3, 2])), jax.tree.leaves(jax.jit(step)(w, x)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("place", ["no vmap", "vmap of something else", "traced before vmap"])
def test_host_code_without_proof_that_examples_are_apart_is_given_all(place: str) -> None:
    """The promise of ``vmap_method`` is about the dimensions that vmap adds, and holds of no other."""
    seen: set[int] = set()

    def call(value: jax.Array) -> jax.Array:
        def host(value: Any) -> np.ndarray:
            seen.add(np.shape(value)[-2 if place == "vmap of something else" else 0])
            return np.sort(value, axis=0)

        return jax.pure_callback(host, shape_of(value), value, vmap_method="expand_dims")

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        if place == "no vmap":
            return call(x)
        if place == "vmap of something else":
            return jax.vmap(lambda v: call(x) * v)(w)
        return jax.vmap(jax.jit(call))(x)

    np.testing.assert_array_equal(run(step), step(*arguments()))
    assert seen == {BATCH}


@pytest.mark.parametrize("passes", [1, 2])
def test_host_code_with_effects_is_called_once_for_every_example(passes: int) -> None:
    """Also where nodes have room for more examples than there are, and where a later pass reads what it returned."""
    log = Log()

    def host(row: Any) -> np.ndarray:
        log(row)
        return 2.0 * np.asarray(row)

    def step(w: jax.Array, x: jax.Array) -> Any:
        y = jax.vmap(lambda row: io_callback(host, shape_of(row), row))(x)
        return (y - y.mean(0) if passes == 2 else y), y.sum(0) + w

    w, x = arguments()
    each, total = run(step, [3, 2])
    np.testing.assert_array_equal(each, 2 * (x - x.mean(0)) if passes == 2 else 2 * x)
    np.testing.assert_array_equal(total, 2 * x.sum(0) + w)
    assert sorted(tuple(row.tolist()) for (row,) in log.calls) == sorted(map(tuple, np.asarray(x).tolist()))


@pytest.mark.parametrize("reduced", [True, False])
def test_ordered_effects_need_a_single_device(reduced: bool) -> None:
    """Of what the nodes share; those of single examples are refused on any."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum() if reduced else w.sum(), ordered=True)
        return w + x.sum(0)

    virtual = vnode.virtualize(step, virtual_nodes=NODES)
    w, x = arguments()
    np.testing.assert_array_equal(virtual.on(jax.devices()[:1])(w, x), w + x.sum(0))
    with pytest.raises(vnode.PlacementError, match=r"(?s)'debug_print'.*2 devices.*test_effects\.py.*ordered=False"):
        virtual.on(jax.devices()[:2])(w, x)


# Arrays mutated in place


def written_by_shared_values(w: jax.Array, x: jax.Array) -> Any:
    store = jax.new_ref(w)
    before = store[...]
    store[...] = x.mean(0)
    mean = store[...]
    products = (x - mean) * before
    store[...] = products.sum(0)
    return store[...], before, mean, (products**2).sum()


def written_for_each_example(w: jax.Array, x: jax.Array) -> Any:
    def one(row: jax.Array) -> jax.Array:
        store = jax.new_ref(jnp.zeros(3))
        store[...] += row * w
        store[0] = row[1]

        def turn(i: jax.Array, count: jax.Array) -> jax.Array:
            store[i % 2] += row.sum()
            store[1:3] *= 2.0
            return count

        lax.fori_loop(0, 3, turn, 0)
        return store[...]

    y = jax.vmap(one)(x)
    return y.sum(0), y


def written_example_by_example(w: jax.Array, x: jax.Array) -> Any:
    total = jax.new_ref(w)

    def add(i: jax.Array, count: jax.Array) -> jax.Array:
        total[...] += x[i]
        return count

    lax.fori_loop(0, BATCH, add, 0)
    return total[...]


def written_in_branch_and_while(w: jax.Array, x: jax.Array) -> Any:
    store = jax.new_ref(x)

    def twice() -> jax.Array:
        store[...] = store[...] * 2.0
        return store[0] + 1.0

    first = lax.cond(w.sum() > 0, twice, lambda: store[0])

    def turn(count: jax.Array) -> jax.Array:
        store[...] = store[...] + w
        return count + 1

    lax.while_loop(lambda count: count < 3, turn, 0)
    store[:, jnp.array([0, 2])] *= 3.0
    return jax.freeze(store), first


def written_by_a_jitted_function(w: jax.Array, x: jax.Array) -> Any:
    @jax.jit
    def push(log: Any, i: jax.Array, value: jax.Array) -> None:
        log[i] = value

    def loss(w: jax.Array) -> Any:
        log = jax.new_ref(jnp.zeros((2, BATCH)))
        h = x
        for i in range(2):
            h = jnp.tanh(h * w)
            push(log, i, h.mean(-1))
        return (log[...] ** 2).sum(), log[::2]

    (value, log), grads = jax.value_and_grad(loss, has_aux=True)(w)
    return value, log, grads


@pytest.mark.parametrize(
    "step",
    [
        written_by_shared_values,
        written_for_each_example,
        written_example_by_example,
        written_in_branch_and_while,
        written_by_a_jitted_function,
    ],
)
def test_arrays_mutated_in_place(step: Callable[..., Any]) -> None:
    w, x = arguments()
    assert_same(run(step, [3, 2]), jax.jit(step), w, x)
