"""Blocks of a factor in different numbers: values, gradients and updates; what is computed where; what is refused.

Knows the programs and how many blocks each device has. The reference for values is jax on one device.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from tests.budget import examples
from tests.rounding import assert_same
from tests.spmd.reference import collectives, layouts_of, mesh_of
from tests.spmd.test_groups import axes_of_collectives, conv, numbers, program_of
from vnode.errors import PartitionError
from vnode.spmd import device_program
from vnode.spmd.factor_blocks import InBlocks, in_blocks
from vnode.spmd.layout import from_spec
from vnode.spmd.resharding_collectives import index_along
from vnode.spmd.sharded_program import flow_over_mesh
from vnode.spmd.sharding_flow import follow
from vnode.spmd.uneven_blocks import Share, restore, store

pytestmark = pytest.mark.quickly


def carried_out(
    split: InBlocks, axes: Mapping[str, int], specs: Mapping[int, P] | None = None
) -> Callable[..., list[Any]]:
    """A function of the program's inputs in the user's shapes, over a mesh."""
    flow = follow(split.program, layouts_of(split, axes, specs or {}), axes)
    function = jax.jit(flow_over_mesh(flow, mesh_of(axes)))
    return lambda *values: split.get(function(*split.put(values)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, its parameters and data; a parameter with its dimension that is cut, and how many indices it has."""

    loss: Callable[..., Any]
    params: Any
    data: Any
    seed: tuple[int, int]
    size: int

    def step(self, params: Any, velocity: Any, data: Any) -> Any:
        loss, grads = jax.value_and_grad(self.loss)(params, data)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity, loss

    @functools.cached_property
    def flat(self) -> tuple[list[Any], Callable[..., list[Any]]]:
        """Arguments, and the step of them, as lists; always the same, so that `jax.jit` compiles it once."""
        arguments = self.params, jax.tree.map(np.zeros_like, self.params), self.data
        values, tree = jax.tree.flatten(arguments)
        return values, lambda *flat: jax.tree.leaves(self.step(*jax.tree.unflatten(tree, flat)))


def perceptron(params: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ params["a"] + params["b"])
    return jnp.mean((hidden @ params["c"] - x) ** 2)


def attention(params: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhk->bhsk", x, params[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bhsk,bhtk->bhst", q, k) / 2 + jnp.tril(jnp.ones((4, 4))) * 3)
    mixed = jnp.einsum("bhst,bhtk->bshk", weights, v)
    return jnp.square(jnp.einsum("bshk,hkd->bsd", mixed, params["o"]) - x).mean()


def merged_attention(params: Any, x: Any) -> Any:
    """Heads as parts of a dimension."""
    b, s, _ = x.shape
    q, k, v = ((x @ params[name]).reshape(b, s, -1, 2) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
    mixed = jnp.einsum("bhst,bthk->bshk", weights, v).reshape(b, s, -1)
    return jnp.square(mixed @ params["o"] - x).mean()


def channels(params: Any, x: Any) -> Any:
    """Two convolutions with a batch normalization between: sums over examples of what is cut."""
    h = conv(x, params["a"])
    h = (h - h.mean((0, 1, 2))) * lax.rsqrt(h.var((0, 1, 2)) + 1e-3) * params["scale"]
    return jnp.square(conv(jax.nn.relu(h), params["b"])).mean()


def words(params: Any, data: Any) -> Any:
    """An embedding that is the last layer's weight as well, and a loss that looks up and takes maxima over words."""
    tokens, targets = data
    h = jnp.tanh(params["embedding"][tokens] @ params["w"])
    logits = h @ params["embedding"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -picked.mean()


def dropped(params: Any, data: Any) -> Any:
    """Hidden units that are dropped by a key, and numbers that the function closed over."""
    x, key = data
    h = jnp.maximum(x @ params["a"], 0) * np.linspace(0.5, 1, 24, dtype=np.float32)
    h = jnp.where(jax.random.bernoulli(jax.random.wrap_key_data(key), 0.7, h.shape), h, 0)
    return jnp.square(h @ params["c"]).sum() + jnp.square(h.max(1)).sum()


def perceptron16(params: Any, x: Any) -> Any:
    return jnp.square(jnp.tanh(x @ params["a"]) @ params["c"]).astype(jnp.float32).mean()


def layers(params: Any, x: Any) -> Any:
    """Perceptrons one after the other, in a loop, each of which is computed again in the backward pass."""

    @jax.checkpoint
    def layer(h: Any, weights: Any) -> Any:
        a = jax.nn.gelu(h @ weights["a"] + weights["b"])
        return h + a @ weights["c"], jnp.square(a).sum(1)

    h, squares = lax.scan(layer, x, params)
    return (jnp.square(h).mean() + squares.mean()).astype(jnp.float32)


def lstm(params: Any, x: Any) -> Any:
    """Units that each read all others of the moment before; x: [time, examples, features]."""

    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        gates = jnp.einsum("bd,dgh->gbh", x, params["x"]) + jnp.einsum("bk,kgh->gbh", h, params["h"])
        i, f, o = jax.nn.sigmoid(gates[:3])
        c = f * c + i * jnp.tanh(gates[3])
        h = o * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[1], params["h"].shape[0]), x.dtype)
    (h, _), every = lax.scan(cell, (zeros, zeros), x)
    return jnp.square(every @ params["out"] - x).mean() + jnp.square(h).mean()


def lstm_by_gates(params: Any, x: Any) -> Any:
    """The same with a weight for each gate, which are seldom told apart by the name of one."""
    whole = {key: jnp.stack([params[f"{key}{gate}"] for gate in "abcd"], 1) for key in "xh"}
    return lstm({**whole, "out": params["out"]}, x)


def branches(params: Any, x: Any) -> Any:
    """Loops in loops, in a branch, as often as the weights say."""

    def body(h: Any, params: Any) -> Any:
        h, _ = lax.scan(lambda h, b: (jnp.tanh(h + b), None), h, params["b"])
        return lax.cond(h.sum() > 0, lambda h: h * params["b"][0], lambda h: h - h.max(1, keepdims=True), h)

    h = jnp.tanh(x @ params["a"])
    there, start = lax.stop_gradient((params, h))
    _, last = lax.while_loop(
        lambda c: (c[0] < 3) & (jnp.abs(c[1]).sum() > 0), lambda c: (c[0] + 1, body(c[1], there)), (0, start)
    )
    again, _ = lax.scan(lambda h, _: (body(h, params), h.sum()), h, None, length=2)
    return jnp.square((again + last) @ params["c"]).mean()


def tied_to_itself(params: Any, x: Any) -> Any:
    """A weight both of whose dimensions are the one that is cut, and units that are multiplied with each other."""
    h = jnp.tanh(x @ params["w"])
    h = jnp.tanh(h @ params["w"] + jnp.einsum("bi,bj->bj", h, h))
    return jnp.square(h - x).mean()


TOKENS = np.random.default_rng(3).integers(0, 24, (2, 3, 5))
KEY = np.array([3, 5], np.uint32)
MLP = {"a": numbers(6, 24), "b": numbers(24), "c": numbers(24, 6)}
HEADS = {**{name: numbers(6, 12, 2) for name in "qkv"}, "o": numbers(12, 2, 6)}
MERGED = {**{name: numbers(6, 24) for name in "qkv"}, "o": numbers(24, 6)}
IMAGES = {"a": numbers(3, 3, 2, 12), "scale": numbers(12), "b": numbers(3, 3, 12, 2)}
STACK = {"a": numbers(3, 6, 12), "b": numbers(3, 12), "c": numbers(3, 12, 6)}
LSTM = {"x": numbers(6, 4, 12) / 2, "h": numbers(12, 4, 12) / 4, "out": numbers(12, 6)}
GATES = {f"{k}{gate}": LSTM[k][:, i] for i, gate in enumerate("abcd") for k in "xh"} | {"out": LSTM["out"]}
BRANCHES = {"a": numbers(6, 12), "b": numbers(3, 12), "c": numbers(12, 6)}
HALVES = [numbers(*shape).astype(jnp.bfloat16) for shape in ((6, 24), (24, 6), (4, 6))]
CASES = {
    "hidden units": Case(perceptron, MLP, numbers(4, 6), (0, 1), 24),
    "hidden units, by the last weight": Case(perceptron, MLP, numbers(4, 6), (2, 0), 24),
    "heads": Case(attention, HEADS, numbers(2, 4, 6), (2, 1), 12),
    "merged heads": Case(merged_attention, MERGED, numbers(2, 4, 6), (2, 1), 12),
    "channels": Case(channels, IMAGES, numbers(2, 4, 4, 2), (0, 3), 12),
    "words": Case(words, {"embedding": numbers(24, 4), "w": numbers(4, 4)}, tuple(TOKENS), (0, 0), 24),
    "dropped": Case(dropped, {"a": numbers(6, 24), "c": numbers(24, 3)}, (numbers(4, 6), KEY), (0, 1), 24),
    "16 bits": Case(perceptron16, {"a": HALVES[0], "c": HALVES[1]}, HALVES[2], (0, 1), 24),
    "layers": Case(layers, STACK, numbers(4, 6), (0, 2), 12),
    "layers of 16 bits": Case(layers, jax.tree.map(jnp.bfloat16, STACK), jnp.bfloat16(numbers(4, 6)), (0, 2), 12),
    "lstm": Case(lstm, LSTM, numbers(5, 4, 6), (0, 2), 12),
    "lstm by gates": Case(lstm_by_gates, GATES, numbers(5, 4, 6), (0, 1), 12),
    "branches": Case(branches, BRANCHES, numbers(4, 6), (0, 1), 12),
    "tied to itself": Case(tied_to_itself, {"w": numbers(12, 12)}, numbers(4, 12), (0, 1), 12),
}

MESHES = {
    "2": ({"x": 2}, ("x",)),
    "4": ({"x": 4}, ("x",)),
    "2x2 along one": ({"d": 2, "x": 2}, ("x",)),
    "2x2 along the first": ({"x": 2, "d": 2}, ("x",)),
    "2x2 along both": ({"x": 2, "y": 2}, ("y", "x")),
}


def loops(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from loops(inner)


@st.composite
def shares(draw: st.DrawFn, axes: tuple[str, ...], devices: int, size: int) -> Share:
    blocks = draw(st.sampled_from([b for b in range(2, size + 1) if size % b == 0]))
    ends = sorted(draw(st.lists(st.integers(0, blocks), min_size=devices - 1, max_size=devices - 1)))
    return Share(axes, tuple(b - a for a, b in zip([0, *ends], [*ends, blocks], strict=True)))


@pytest.mark.sampled(1, thorough=5)
@pytest.mark.parametrize("name", list(CASES))
@given(st.data())
@settings(max_examples=examples(3), deadline=None)
def test_a_train_step_is_what_it_was(name: str, data: st.DataObject) -> None:
    case, (axes, along) = CASES[name], MESHES[data.draw(st.sampled_from(list(MESHES)))]
    share = data.draw(shares(along, int(np.prod([axes[a] for a in along])), case.size))
    values, step = case.flat
    split = in_blocks(program_of(step, *values), share, dict([case.seed]))
    count = len(jax.tree.leaves(case.params))
    assert split.inputs[: 2 * count] == split.outputs[: 2 * count]  # a state goes in as it comes out
    examples = {2 * count: P("d")} if "d" in axes and data.draw(st.booleans()) else {}
    assert_same(carried_out(split, axes, examples)(*values), jax.jit(step), *values)


def stepped(share: Share, name: str = "hidden units") -> tuple[InBlocks, list[Any], Callable[..., list[Any]]]:
    values, step = CASES[name].flat
    return in_blocks(program_of(step, *values), share, dict([CASES[name].seed])), values, step


def test_work_is_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device takes as many turns as it has blocks, counted while they run; a device without blocks takes none."""
    turns: collections.Counter[int] = collections.Counter()
    taken = device_program.block_at

    def counted(value: Any, dim: int, k: Any, blocks: int) -> Any:
        jax.debug.callback(lambda device, _: turns.update([int(device)]), index_along(("x",)), k)
        return taken(value, dim, k, blocks)

    monkeypatch.setattr(device_program, "block_at", counted)
    a, c, x = numbers(6, 24), numbers(24, 6), numbers(4, 6)
    split = in_blocks(program_of(lambda a, c, x: jnp.tanh(x @ a) @ c, a, c, x), Share(("x",), (5, 0, 1, 2)), {0: 1})
    carried_out(split, {"x": 4})(a, c, x)
    jax.effects_barrier()
    assert turns == {0: 2 * 5, 2: 2 * 1, 3: 2 * 2}  # two weights of which blocks are taken


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "counts"), [("hidden units", (5, 1, 0, 2)), ("layers", (3, 0, 1)), ("lstm", (1, 5, 0))]
)
def test_nothing_is_read_behind_a_devices_blocks(name: str, counts: tuple[int, ...]) -> None:
    split, values, step = stepped(Share(("x",), counts), name)
    axes = {"x": len(counts)}
    function = jax.jit(flow_over_mesh(follow(split.program, layouts_of(split, axes, {}), axes), mesh_of(axes)))
    poisoned = [
        x if d is None else jnp.where(store(jnp.ones(v.shape), d, split.share) > 0, x, jnp.nan)
        for x, v, d in zip(split.put(values), values, split.inputs, strict=True)
    ]
    assert_same(split.get(function(*poisoned)), step, *values)


@pytest.mark.parametrize(
    ("name", "exchanged"),
    [("layers", {"psum": [2 * [(4, 6)]]}), ("lstm", {"all_gather": [2 * [(4, 9)]], "psum": [[(4, 9), (4, 3)]]})],
)
def test_what_a_programs_own_loops_exchange(name: str, exchanged: Mapping[str, Any]) -> None:
    """Of layers, one sum forward and one backward. Of recurrent units, of which there are 9 and 3: all units to all
    devices forward; backward again, and a sum for each device's own."""
    split, values, _ = stepped(Share(("x",), (3, 1)), name)
    axes = {"x": 2}
    function = flow_over_mesh(follow(split.program, layouts_of(split, axes, {}), axes), mesh_of(axes))
    found = collections.defaultdict(list)
    (shard_map,) = jax.make_jaxpr(function)(*split.put(values)).jaxpr.eqns
    for eqn in shard_map.params["jaxpr"].eqns:
        if eqn.primitive.name == "scan":
            for each in eqn.params["jaxpr"].eqns:
                if each.primitive.name in ("psum", "all_gather"):
                    found[each.primitive.name].append(each.invars[0].aval.shape)
    assert {key: sorted(shapes) for key, shapes in found.items()} == {k: sorted(v[0]) for k, v in exchanged.items()}


def test_two_loops_a_train_step_and_sums_over_devices_between() -> None:
    """Megatron's one sum forward (Shoeybi et al. 2019, section 3); as the data have no gradient, none backward."""
    split, values, _ = stepped(Share(("x",), (5, 3)))
    assert [eqn.primitive.name for eqn in split.program.equations].count("in_blocks") == 2
    axes = {"x": 2}
    function = flow_over_mesh(follow(split.program, layouts_of(split, axes, {}), axes), mesh_of(axes))
    jaxpr = jax.make_jaxpr(function)(*split.put(values)).jaxpr
    assert collections.Counter(collectives(jaxpr)) == {"psum": 1}
    assert not any(set(axes_of_collectives(inner.params["body_jaxpr"].jaxpr)) for inner in loops(jaxpr))


def test_one_activation_is_handed_on() -> None:
    """The second loop makes gelu and its derivative again of what the first product gave."""
    split, _, _ = stepped(Share(("x",), (5, 3)))
    first, _ = [eqn for eqn in split.program.equations if eqn.primitive.name == "in_blocks"]
    assert sorted(var.aval.shape for var in first.outvars) == [(4, 6), (4, 30)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in CASES if name != "branches"])  # a loop of its own exchanges
def test_within_loops_nothing_is_exchanged_along_their_axis(name: str) -> None:
    case, axes = CASES[name], {"d": 2, "x": 2}
    values, step = case.flat
    split = in_blocks(program_of(step, *values), Share(("x",), (3, 1)), dict([case.seed]))
    examples = {2 * len(jax.tree.leaves(case.params)): P("d")}
    function = flow_over_mesh(follow(split.program, layouts_of(split, axes, examples), axes), mesh_of(axes))
    found = list(loops(jax.make_jaxpr(function)(*split.put(values)).jaxpr))
    assert found
    for loop in found:
        assert axes_of_collectives(loop.params["body_jaxpr"].jaxpr) <= {"d"}


@given(st.data())
@settings(max_examples=examples(30), deadline=None)
def test_stored_and_restored(data: st.DataObject) -> None:
    share = data.draw(shares(("x",), data.draw(st.integers(1, 4)), 12))
    shape = data.draw(st.sampled_from([(12,), (2, 12), (24, 3)]))
    dim = next(d for d, n in enumerate(shape) if n % 12 == 0)
    value = numbers(*shape)
    held = np.asarray(store(value, dim, share))
    np.testing.assert_array_equal(np.asarray(restore(held, dim, share)), value)
    pieces, at = np.split(held, len(share.counts), axis=dim), 0
    for piece, have in zip(pieces, share.counts, strict=True):
        own = have * shape[dim] // share.blocks
        np.testing.assert_array_equal(
            np.take(piece, range(own), axis=dim), np.take(value, range(at, at + own), axis=dim)
        )
        assert not np.take(piece, range(own, piece.shape[dim]), axis=dim).any()
        at += own


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=3), st.integers(2, 8))
@settings(max_examples=30, deadline=None)
def test_shares_by_speed_are_the_best(rates: list[float], blocks: int) -> None:
    """Beside every other way to share the blocks out."""
    share = Share(("x",), (1, 1)).from_rates(rates, blocks)
    assert share.blocks == blocks
    every = [counts for counts in np.ndindex(*[blocks + 1] * len(rates)) if sum(counts) == blocks]
    least = min(max(c / r for c, r in zip(counts, rates, strict=True)) for counts in every)
    assert max(c / r for c, r in zip(share.counts, rates, strict=True)) == pytest.approx(least)


class TestErrors:
    def refused(self, function: Callable[..., Any], *args: Any, dim: int = 0, counts: tuple[int, ...] = (3, 1)) -> str:
        with pytest.raises(PartitionError) as error:
            in_blocks(program_of(function, *args), Share(("x",), counts), {0: dim})
        return str(error.value)

    @pytest.mark.parametrize(
        ("why", "function"),
        [
            ("needs all of its indices at once", lambda x: jnp.sort(x)),
            ("running values", lambda x: jnp.cumsum(x)),
            ("out of one block into another", lambda x: x[::-1]),
            ("out of one block into another", lambda x: lax.pad(x, 0.0, [(1, 1, 0)])),
            ("blocks would lie apart", lambda x: jnp.concatenate([x, x])),
            ("slides a window", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "VALID")),
            ("needs all of its indices at once", lambda x: lax.scan(lambda c, _: (jnp.sort(c), None), x, None, 3)[0]),
            ("goes along it, one index after the other", lambda x: lax.scan(lambda c, e: (c + e, e), 0.0, x)[1]),
            ("has an effect", lambda x: lax.scan(lambda c, _: (c, jax.debug.print("{}", c)), x, None, length=3)[0]),
            ("blocks would lie apart", lambda x: jnp.broadcast_to(x, (3, 8)).reshape(24)),
        ],
    )
    def test_what_is_neither_free_nor_reduced(self, why: str, function: Callable[..., Any]) -> None:
        message = self.refused(lambda x: function(2 * x), numbers(8))
        assert why in message and "test_blocks.py" in message and "What to do" in message

    def test_blocks_that_do_not_divide(self) -> None:
        message = self.refused(jnp.sin, numbers(9))
        assert "4 equal blocks" in message and "3, 9" in message

    def test_blocks_that_do_not_divide_a_part(self) -> None:
        message = self.refused(lambda x: jnp.sin(x.reshape(2, 4)), numbers(8))
        assert "factor of 2 there, which is not 4 equal blocks" in message

    def test_no_such_dimension(self) -> None:
        assert "no dimension 3" in self.refused(jnp.sin, numbers(8), dim=3)

    def test_no_such_input(self) -> None:
        with pytest.raises(PartitionError, match="there is no input 4 to cut: the program has 1"):
            in_blocks(program_of(jnp.sin, numbers(8)), Share(("x",), (1, 1)), {4: 0})

    @pytest.mark.parametrize("counts", [(), (1,), (0, 1), (3, -1)])
    def test_no_shares(self, counts: tuple[int, ...]) -> None:
        with pytest.raises(PartitionError, match="are not shares"):
            Share(("x",), counts)

    @pytest.mark.parametrize("axes", [{"x": 4}, {"y": 2}])
    def test_another_mesh(self, axes: Mapping[str, int]) -> None:
        split = in_blocks(program_of(jnp.sin, numbers(8)), Share(("x",), (3, 1)), {0: 0})
        with pytest.raises(PartitionError, match="do not fit the mesh"):
            follow(split.program, [from_spec(P(), (12,), axes)], axes)

    def test_in_blocks_already(self) -> None:
        split = in_blocks(program_of(jnp.sin, numbers(8)), Share(("x",), (3, 1)), {0: 0})
        with pytest.raises(PartitionError, match="in blocks already"):
            in_blocks(split.program, Share(("x",), (1, 1)), {0: 0})
