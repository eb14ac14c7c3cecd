"""Programs as problems: whatever is chosen, the program carried out so gives the plain step's values."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import Mesh

from benchmarks.partition import DRAWN, plans, possible
from benchmarks.partition_models.lstm import lstm
from benchmarks.program_seconds import seconds_of
from vnode.analysis.program import inline
from vnode.errors import SearchError
from vnode.operators import Algebra
from vnode.partition.cost.lower_to_device import device_program
from vnode.partition.searches import exact
from vnode.partition.searches.experts import experts
from vnode.partition.searches.ilp_formulation import Search, as_problem
from vnode.spmd.layout import Axes, Layout
from vnode.spmd.op_sharding import FactorSharding, OpSharding
from vnode.spmd.resharding import plan_resharding
from vnode.spmd.sharded_program import flow_over_mesh
from vnode.spmd.sharding_flow import Flow, Step

pytestmark = pytest.mark.quickly

AXES = {"x": 2, "y": 4}


class Counted:
    """A device that does a thousand operations while it sends one element: even small programs are worth splitting.

    Args:
      price: of sending an element, in operations.
      axes: of the mesh.
    """

    def __init__(self, price: float = 1e-3, axes: Axes = AXES) -> None:
        self.price, self.axes = price, axes

    def compute_time(self, eqn: JaxprEqn, choice: OpSharding) -> float:
        devices = math.prod(self.axes[name] for way in choice.ways for name in way.axes)
        return (choice.description.flops + 1) / devices

    def move_time(self, start: Layout, end: Layout, shape: Sequence[int], dtype: Any) -> float:
        return self.price * sum(
            move.elements_sent(self.axes) for move in plan_resharding(start, end, shape, self.axes, dtype)
        )

    def bytes(self, layout: Layout, shape: Sequence[int], dtype: Any) -> float:
        return 4.0 * math.prod(layout.local_shape(shape, self.axes))


def mlp(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        h = jnp.tanh(x @ params["w1"] + params["b1"])
        h = jax.nn.relu(h @ params["w2"])
        return jnp.mean((h @ params["w3"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def attention(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        h = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * params["scale"]
        q, k, v = (jnp.einsum("bth,hnd->btnd", h, params[name]) for name in ("q", "k", "v"))
        scores = jnp.einsum("btnd,bsnd->bnts", q, k)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores), v)
        out = x + jnp.einsum("btnd,ndh->bth", mixed, params["o"])
        out = out + jax.nn.gelu(out @ params["up"]) @ params["down"]
        return jnp.mean((out - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def convolutions(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        h = x
        for name, stride in (("c1", 1), ("c2", 2)):
            h = jax.lax.conv_general_dilated(
                h, params[name], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = jax.nn.relu(h)
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = h.reshape(h.shape[0], -1) @ params["w"]
        return jnp.mean((logits - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def layers(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return h + jnp.tanh(h @ p["up"]) @ p["down"], None

        h, _ = jax.lax.scan(layer, x, params)
        return jnp.mean((h - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def recurrent(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """Weights whose gradients a loop adds up from turn to turn, beginning with zeros."""

    def loss(params: Any) -> jax.Array:
        def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = carry
            gates = x @ params["input"] + h @ params["hidden"] + params["bias"]
            i, f = jnp.split(gates, 2, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(i)
            return (jnp.tanh(c), c), c

        zeros = jnp.zeros((x.shape[1], params["hidden"].shape[0]))
        _, made = jax.lax.scan(cell, (zeros, zeros), x)
        return jnp.mean((made @ params["out"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def branches(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """A loop that stops by what it computes, and a branch by what that gives."""

    def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, n = state
        return jnp.tanh(h @ params["w"]), n + 1

    h, n = jax.lax.while_loop(lambda state: (jnp.sum(state[0] ** 2) > 1e-3) & (state[1] < 4), turn, (x, 0))
    h = jax.lax.cond(jnp.sum(h) > 0, lambda h: h @ params["u"], lambda h: jnp.sin(h) - y, h)
    return {"w": params["w"] + jnp.sum(h), "u": params["u"] * n}, jnp.mean(h)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def steps() -> dict[str, tuple[Callable[..., Any], Any]]:
    t = {
        "scale": normal(16),
        "q": normal(16, 4, 4),
        "k": normal(16, 4, 4),
        "v": normal(16, 4, 4),
        "o": normal(4, 4, 16),
    }
    t |= {"up": normal(16, 32) / 4, "down": normal(32, 16) / 4}
    c = {"c1": normal(3, 3, 4, 8) / 6, "c2": normal(3, 3, 8, 8) / 8, "w": normal(32, 8) / 6}
    return {
        "mlp": (
            mlp,
            (
                {"w1": normal(16, 32), "b1": normal(32), "w2": normal(32, 16), "w3": normal(16, 8)},
                normal(8, 16),
                normal(8, 8),
            ),
        ),
        "attention": (attention, (t, normal(8, 8, 16), normal(8, 8, 16))),
        "convolutions": (convolutions, (c, normal(8, 8, 8, 4), normal(8, 8))),
        "recurrent": (
            recurrent,
            (
                {"input": normal(8, 16), "hidden": normal(8, 16) / 3, "bias": normal(16), "out": normal(8, 8)},
                normal(3, 8, 8),
                normal(3, 8, 8),
            ),
        ),
        "branches": (branches, ({"w": normal(8, 8) / 3, "u": normal(8, 8)}, normal(16, 8), normal(16, 8))),
        "layers": (
            layers,
            ({"up": normal(3, 16, 32) / 4, "down": normal(3, 32, 16) / 4}, normal(8, 16), normal(8, 16)),
        ),
    }


STEPS = steps()


def searched(name: str, model: Counted | None = None, **options: Any) -> tuple[Search, list[Any], list[np.ndarray]]:
    """The problem of a step, the arrays that it is called with, and what it gives plainly."""
    step, arguments = STEPS[name]
    jaxpr = jax.make_jaxpr(step)(*arguments)
    flat = jax.tree.leaves(arguments)
    carried = {i: i for i in range(len(jax.tree.leaves(arguments[0])))}
    program = inline(jaxpr.jaxpr, jaxpr.consts)
    search = as_problem(program, AXES, model or Counted(), carried=carried, **options)
    return search, flat, [np.asarray(v) for v in jax.tree.leaves(jax.jit(step)(*arguments))]


def assert_carried_out(search: Search, strategies: Any, arguments: list[Any], plain: list[np.ndarray]) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), tuple(AXES))
    made = jax.jit(flow_over_mesh(search.flow(strategies), mesh))(*arguments)
    for have, want in zip(made, plain, strict=True):
        np.testing.assert_allclose(np.asarray(have), want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", STEPS)
def test_the_best_strategies_give_the_steps_values(name: str) -> None:
    search, arguments, plain = searched(name)
    best = exact(search.problem)
    assert best.gap == 0 and split(search.flow(best.strategies))
    assert_carried_out(search, best.strategies, arguments, plain)


def split(flow: Flow) -> list[tuple[str, tuple[FactorSharding, ...]]]:
    """The contractions of a flow, loops' too, that axes divide."""
    found = [
        (step.eqn.primitive.name, step.choice.ways)
        for step in flow.steps
        if step.choice is not None and step.choice.ways and step.choice.description.has(Algebra.CONTRACTS)
    ]
    return found + [each for step in flow.steps for body in step.bodies for each in split(body)]


@pytest.mark.sampled(4, thorough=8)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STEPS)
def test_any_strategies_give_the_steps_values(name: str, seed: int) -> None:
    """Drawn at random among those that can be."""
    search, arguments, plain = searched(name, tied=bool(seed % 2))
    generator = np.random.default_rng(seed)
    assert_carried_out(search, possible(search.problem, generator), arguments, plain)


def test_strategies_that_cannot_be_chosen_together_are_refused() -> None:
    """Pieces of a sum that nobody makes are no way to read a value."""
    search, _, _ = searched("recurrent")
    problem = search.problem
    drawn = possible(problem, np.random.default_rng(0))
    edge = next(e for e in problem.edges if np.isinf(e.seconds).any())
    drawn[edge.start], drawn[edge.end] = np.argwhere(np.isinf(edge.seconds))[0]
    with pytest.raises(SearchError, match=f"operators {edge.start} and {edge.end}\\b"):
        search.flow(drawn)


@pytest.mark.thorough
def test_all_plans_that_the_benchmark_draws_can_be_carried_out() -> None:
    """Of a loop that adds up gradients, too: most of what is drawn for each operator by itself cannot be."""
    model = lstm("small", batch=8, length=2, vocabulary=16, units=8, layers=1)
    drawn = list(itertools.islice(plans(model), 12))
    assert {plan.name.split(" at random ")[0] for plan in drawn} >= set(DRAWN)
    for plan in drawn:
        assert device_program(plan.flow, plan.axes, platform="cpu").program.equations


@functools.cache
def once(name: str, price: float) -> Search:
    return searched(name, Counted(price))[0]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("price", [1e-3, 10.0])
def test_the_predicted_cost_is_that_of_what_is_carried_out(name: str, price: float) -> None:
    search, model = once(name, price), Counted(price)
    best = exact(search.problem)
    carried = seconds_of(search.flow(best.strategies), model)
    assert best.cost * 0.98 <= carried <= best.cost * (1 + 1e-9)


@pytest.mark.parametrize("name", STEPS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_prediction_is_that_of_what_is_carried_out_but_for_values_that_are_already_there(
    name: str, seed: int
) -> None:
    """The one difference: a value that somebody has brought into a layout need not be brought there again."""
    search, model = once(name, 0.1), Counted(0.1)
    drawn = possible(search.problem, np.random.default_rng(seed))
    flow, predicted = search.flow(drawn), search.problem.cost(drawn)
    assert apart(search, flow, model) == pytest.approx(predicted, rel=1e-9)
    assert seconds_of(flow, model) <= predicted * (1 + 1e-9)


def apart(search: Search, flow: Flow, model: Counted) -> float:
    """Seconds of a flow in which each cluster brings what it reads where it needs it, whatever others brought there."""
    cluster = {search.flat.nodes[n].path: k for k, each in enumerate(search.clusters) for n in each.nodes}

    def priced(flow: Flow, at: tuple[int, ...]) -> float:
        lies: dict[Any, tuple[Hashable, Layout, Layout]] = {}  # who made it, how, and how it is for others
        brought: dict[tuple[Any, Hashable], set[Layout]] = {}

        def read(atom: Any, want: Layout, reader: Hashable) -> float:
            if isinstance(atom, Literal) or atom not in lies:
                return 0.0
            maker, made, result = lies[atom]
            start = made if reader == maker else result
            there = brought.setdefault((atom, reader), {start})
            seconds = 0.0 if want in there else model.move_time(start, want, atom.aval.shape, atom.aval.dtype)
            there.add(want)
            return seconds

        def moved(step: Step, before: Sequence[Layout], after: Sequence[Layout]) -> float:
            several = zip(step.eqn.outvars, before, after, strict=True)
            return sum(model.move_time(a, b, v.aval.shape, v.aval.dtype) for v, a, b in several)

        lies.update((v, ("given", x, x)) for v, x in zip(flow.program.inputs, flow.inputs, strict=True))
        total = 0.0
        for number, step in enumerate(flow.steps):
            path = (*at, number)
            if step.materializable:
                continue
            reader = cluster.get(path, path)
            total += sum(read(*each, reader) for each in zip(step.eqn.invars, step.operands, strict=True))
            if step.choice is not None:
                total += model.compute_time(step.eqn, step.choice) + moved(step, step.choice.results, step.made)
            if step.region is not None:
                bodies = sum(priced(body, (*path, k)) for k, body in enumerate(step.bodies))
                total += step.region.run_count * bodies
            total += moved(step, step.made, step.results)
            several = zip(step.eqn.outvars, step.made, step.results, strict=True)
            lies.update((var, (reader, made, result)) for var, made, result in several)
        ends = zip(flow.program.outputs, flow.outputs, strict=True)
        return total + sum(read(*each, ("end", k)) for k, each in enumerate(ends))

    return priced(flow, ())


@pytest.mark.parametrize("name", STEPS)
def test_experts_are_right_and_never_better_than_the_best(name: str) -> None:
    search, arguments, plain = searched(name)
    number = len(search.program.inputs)
    found = experts(search, [number - 2, number - 1])
    best = exact(search.problem, candidates=list(found.values()))
    for strategies in found.values():
        assert search.problem.cost(strategies) >= best.cost
    assert_carried_out(search, found["FSDP"], arguments, plain)
    assert_carried_out(search, found["Megatron over y"], arguments, plain)


def test_what_experts_do() -> None:
    search, _, _ = searched("mlp")
    inputs = search.program.inputs  # b1, w1, w2, w3, x, y
    found = experts(search, [4, 5])
    flows = {name: search.flow(strategies) for name, strategies in found.items()}

    def lies(name: str) -> list[str]:
        return [str(layout) for layout in flows[name].inputs]

    assert lies("data parallel") == ["[-]", "[-, -]", "[-, -]", "[-, -]", "[x*y, -]", "[x*y, -]"]
    assert all(len(layout.cut_axes) == 2 for layout in flows["FSDP"].inputs)
    columns, rows, _ = lies("Megatron over y")[1:4]
    assert columns == "[-, y]" and rows == "[y, -]" and lies("Megatron over y")[4] == "[x, -]"
    products = [step for step in flows["Megatron over y"].steps if step.eqn.primitive.name == "dot_general"]
    first, second = products[0].choice, products[1].choice
    assert first is not None and second is not None and len(inputs) == 6
    assert [monoid.value for axis, monoid in second.results[0].partial if axis == "y"] == ["sum"]
    assert not first.results[0].partial


def mixture(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """Experts of which each takes some tokens: GShard's einsums."""

    def loss(params: Any) -> jax.Array:
        gates = jax.nn.softmax(x @ params["router"])
        place = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1])
        order = jnp.cumsum(place, axis=1) * place - 1
        send = jax.nn.one_hot(order.astype(int), 4) * place[..., None]  # [batch, tokens, experts, capacity]
        buffers = jnp.einsum("btec,bth->ebch", send, x)
        hidden = jax.nn.relu(jnp.einsum("ebch,ehf->ebcf", buffers, params["up"]))
        made = jnp.einsum("ebcf,efh->ebch", hidden, params["down"])
        mixed = jnp.einsum("btec,ebch->bth", send * jnp.max(gates, -1)[..., None, None], made)
        return jnp.mean((mixed - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def exchanges(flow: Flow) -> dict[str, int]:
    """How many collectives of each kind one device takes part in."""
    found: dict[str, int] = {}
    for eqn in device_program(flow, AXES).program.equations:
        name = eqn.primitive.name
        if name in ("psum", "all_gather", "reduce_scatter", "all_to_all"):
            found[name] = found.get(name, 0) + 1
    return found


def test_megatron_with_sequence_parallelism_divides_what_is_between_its_products_along_the_sequence() -> None:
    """Its sums over the model's axis become gathers, and sums of which each keeps a part (Korthikanti et al. 2023)."""
    search, arguments, plain = searched("attention")
    found = experts(search, [7, 8])
    plain_one, strategies = (found[f"{name} over y"] for name in ("Megatron", "Megatron with sequence parallelism"))
    flow = search.flow(strategies)
    assert_carried_out(search, strategies, arguments, plain)
    norms = [step for step in flow.steps if step.eqn.primitive.name == "rsqrt"]
    assert [str(step.made[0]) for step in norms] == ["[x, y, -]"]
    assert [str(s.made[0]) for s in search.flow(plain_one).steps if s.eqn.primitive.name == "rsqrt"] == ["[x, -, -]"]
    assert flow.inputs == search.flow(plain_one).inputs[:-2] + flow.inputs[-2:], "weights lie as Megatron's"
    before, after = exchanges(search.flow(plain_one)), exchanges(flow)
    assert after["reduce_scatter"] >= 2 > before.get("reduce_scatter", 0) and after["psum"] < before["psum"]


def test_context_parallelism_divides_all_by_the_sequence_and_gathers_keys_and_values() -> None:
    search, arguments, plain = searched("attention")
    strategies = experts(search, [7, 8])["context parallel over y"]
    flow = search.flow(strategies)
    assert_carried_out(search, strategies, arguments, plain)
    products = [
        step for step in flow.steps if step.choice is not None and step.choice.description.has(Algebra.CONTRACTS)
    ]
    lies = [{str(layout) for layout in step.choice.operands} for step in products if step.choice is not None]
    assert all("y" in " ".join(several) for several in lies), "every product is divided"
    assert all(layout.is_whole for layout in flow.inputs[:7]), "weights are everywhere"
    assert exchanges(flow)["all_gather"] >= 2, "keys and values are gathered"


def test_random_keys_of_examples_are_no_sequence() -> None:
    def step(w: jax.Array, x: jax.Array, keys: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(jax.random.bernoulli)(keys)[:, None] * jnp.tanh(x @ w) @ w.T)

    traced = jax.make_jaxpr(step)(normal(8, 16), normal(8, 8), jax.random.split(jax.random.key(0), 8))
    search = as_problem(inline(traced.jaxpr, traced.consts), AXES, Counted())
    assert {"FSDP", "Megatron over y"} <= experts(search, [1, 2]).keys()


@pytest.mark.thorough
def test_expert_parallelism_divides_experts_and_exchanges_tokens() -> None:
    d, f, e = 8, 16, 4
    params = {"router": normal(d, e), "up": normal(e, d, f), "down": normal(e, f, d)}
    args = (params, normal(8, 8, d), normal(8, 8, d) / 2)
    traced = jax.make_jaxpr(lambda *a: jax.tree.leaves(mixture(*jax.tree.unflatten(jax.tree.structure(args), a))))(
        *jax.tree.leaves(args)
    )
    search = as_problem(inline(traced.jaxpr, traced.consts), AXES, Counted(), carried={0: 0, 1: 1, 2: 2})
    strategies = experts(search, [3, 4])["expert parallel over y"]
    flow = search.flow(strategies)  # down, router, up, x, y
    plain = [np.asarray(leaf) for leaf in jax.tree.leaves(mixture(*args))]
    assert_carried_out(search, strategies, jax.tree.leaves(args), plain)
    assert [str(layout) for layout in flow.inputs[:3]] == ["[y, -, -]", "[-, -]", "[y, -, -]"]
    assert str(flow.inputs[3]) == "[x*y, -, -]", "all else is divided by examples"
    assert exchanges(flow)["all_to_all"] >= 2, "tokens go to their experts, and back"


def test_one_weird_trick_divides_examples_in_convolutions_and_units_in_dense_layers() -> None:
    search, _, _ = searched("convolutions")
    flow = search.flow(experts(search, [3, 4])["one weird trick"])
    for step in flow.steps:
        if step.choice is None or not step.choice.description.has(Algebra.CONTRACTS):
            continue
        cut = {d for layout in step.choice.operands for d, each in enumerate(layout.dims) if each is not None}
        if step.eqn.primitive.name == "conv_general_dilated":
            assert cut and all(len(way.axes) == 2 for way in step.choice.ways)
    dense = flow.inputs[2]
    assert str(dense) == "[-, x*y]" and all(layout.is_whole for layout in flow.inputs[:2])


def test_ties_shrink_the_problem_and_keep_its_costs() -> None:
    def deep(params: Any, x: jax.Array) -> Any:
        for p in params:
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return x

    params = [{"up": np.ones((16, 32), np.float32), "down": np.ones((32, 16), np.float32)}] * 6
    jaxpr = jax.make_jaxpr(deep)(params, np.ones((8, 16), np.float32))
    program = inline(jaxpr.jaxpr, jaxpr.consts)
    free, tied = (as_problem(program, AXES, Counted(1.0), tied=t) for t in (False, True))
    assert tied.problem.operators < free.problem.operators / 2
    chosen = exact(tied.problem).strategies
    assert free.problem.cost(chosen[list(tied.groups)]) == pytest.approx(tied.problem.cost(chosen))
    assert exact(free.problem).cost <= exact(tied.problem).cost * (1 + 1e-9)


def test_a_loops_body_counts_as_often_as_it_turns() -> None:
    def repeated(x: jax.Array, w: jax.Array, turns: int) -> jax.Array:
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=turns)[0]

    def least(turns: int) -> float:
        shapes = np.ones((8, 16), np.float32), np.ones((16, 16), np.float32)
        jaxpr = jax.make_jaxpr(lambda x, w: repeated(x, w, turns))(*shapes)
        return exact(as_problem(inline(jaxpr.jaxpr, jaxpr.consts), AXES, Counted(0.0)).problem).cost

    assert least(30) == pytest.approx(10 * least(3))


def test_memory_leads_to_shards() -> None:
    search, arguments, plain = searched("mlp", Counted(50.0))
    free = exact(search.problem)
    limited, _, _ = searched("mlp", Counted(50.0), memory=free.footprint * 0.7)
    best = exact(limited.problem)
    assert best.footprint <= free.footprint * 0.7 and best.cost >= free.cost
    assert_carried_out(limited, best.strategies, arguments, plain)


def test_gradients_that_a_loop_adds_up_are_summed_over_devices_once() -> None:
    """What the way back carries of a weight's gradient is in pieces until the loop ends."""
    search, arguments, plain = searched("recurrent", Counted(50.0))
    best = exact(search.problem)
    back = [step for step in search.flow(best.strategies).steps if step.region is not None][-1]
    pieces = {step.aval.shape for step, layout in zip(back.eqn.invars, back.operands, strict=True) if layout.partial}
    assert pieces & {(8, 16), (16,)}
    assert_carried_out(search, best.strategies, arguments, plain)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mlp", "attention", "recurrent"])
def test_meshes_of_three_axes(name: str) -> None:
    """Equations are divided along two dimensions at most; what one merged axis can do is not lost."""
    step, arguments = STEPS[name]
    jaxpr = jax.make_jaxpr(step)(*arguments)
    program = inline(jaxpr.jaxpr, jaxpr.consts)
    carried = {i: i for i in range(len(jax.tree.leaves(arguments[0])))}
    axes, merged = {"a": 2, "b": 2, "c": 2}, {"all": 8}
    search, one = (as_problem(program, each, Counted(axes=each), carried=carried) for each in (axes, merged))
    best = exact(search.problem)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(axes))
    made = jax.jit(flow_over_mesh(search.flow(best.strategies), mesh))(*jax.tree.leaves(arguments))
    for have, want in zip(made, jax.tree.leaves(jax.jit(step)(*arguments)), strict=True):
        np.testing.assert_allclose(np.asarray(have), np.asarray(want), rtol=2e-4, atol=2e-5)
    assert best.cost <= exact(one.problem).cost * 1.05  # exchanges over three axes follow one another


def counted(x: jax.Array) -> jax.Array:
    """A loop adds the same to what it carries in each turn, which is made of nothing."""
    return jax.lax.scan(lambda total, row: (total + jnp.ones((2, 8)).mean() + row.sum(), None), jnp.float32(0), x)[0]


def test_what_is_made_of_nothing_is_not_read_in_pieces() -> None:
    axes = {"x": 2, "y": 2}
    jaxpr = jax.make_jaxpr(counted)(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    search = as_problem(inline(jaxpr.jaxpr, jaxpr.consts), axes, Counted(axes=axes), tied=False)
    for seed in range(20):
        search.flow(possible(search.problem, np.random.default_rng(seed)))  # and is not refused
