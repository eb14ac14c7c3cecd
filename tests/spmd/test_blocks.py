"""Blocks of a factor in different numbers: values, gradients and updates; what is computed where; what is refused.

Knows the programs and how many blocks each device has. The reference for values is jax on one device.
"""

from __future__ import annotations

import collections
import dataclasses
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

from tests.rounding import assert_same
from tests.spmd.reference import collectives, mesh_of
from tests.spmd.test_groups import axes_of_collectives, conv, numbers, program_of
from vnode.errors import PartitionError
from vnode.spmd import run
from vnode.spmd.blocks import InBlocks, in_blocks, some_in_blocks
from vnode.spmd.exchange import index_along
from vnode.spmd.flow import follow
from vnode.spmd.layout import Layout, from_spec
from vnode.spmd.program import over_mesh
from vnode.spmd.shares import Share, restored, stored
from vnode.spmd.tied import tied

pytestmark = pytest.mark.quickly


def layouts_of(split: InBlocks, axes: Mapping[str, int], specs: Mapping[int, P]) -> list[Layout]:
    """Inputs in blocks lie along the share's axes, others as they are asked to."""
    found = []
    for number, (var, dim) in enumerate(zip(split.program.inputs, split.inputs, strict=True)):
        layout = from_spec(specs.get(number, P()), var.aval.shape, axes)
        if dim is not None:
            cut = split.share.cut(var.aval.shape[dim], axes)
            layout = Layout((*layout.dims[:dim], cut, *layout.dims[dim + 1 :]))
        found.append(layout)
    return found


def carried_out(
    split: InBlocks, axes: Mapping[str, int], specs: Mapping[int, P] | None = None
) -> Callable[..., list[Any]]:
    """A function of the program's inputs in the user's shapes, over a mesh."""
    flow = follow(split.program, layouts_of(split, axes, specs or {}), axes)
    function = jax.jit(over_mesh(flow, mesh_of(axes)))
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

    @property
    def flat(self) -> tuple[list[Any], Callable[..., list[Any]]]:
        """Arguments, and the step of them, as lists."""
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


TOKENS = np.random.default_rng(3).integers(0, 24, (2, 3, 5))
KEY = np.array([3, 5], np.uint32)
MLP = {"a": numbers(6, 24), "b": numbers(24), "c": numbers(24, 6)}
HEADS = {**{name: numbers(6, 12, 2) for name in "qkv"}, "o": numbers(12, 2, 6)}
MERGED = {**{name: numbers(6, 24) for name in "qkv"}, "o": numbers(24, 6)}
IMAGES = {"a": numbers(3, 3, 2, 12), "scale": numbers(12), "b": numbers(3, 3, 12, 2)}
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


@pytest.mark.parametrize("name", list(CASES))
@given(st.data())
@settings(max_examples=3, deadline=None)
def test_a_train_step_is_what_it_was(name: str, data: st.DataObject) -> None:
    case, (axes, along) = CASES[name], MESHES[data.draw(st.sampled_from(list(MESHES)))]
    share = data.draw(shares(along, int(np.prod([axes[a] for a in along])), case.size))
    values, step = case.flat
    split = in_blocks(program_of(step, *values), share, dict([case.seed]))
    count = len(jax.tree.leaves(case.params))
    assert split.inputs[: 2 * count] == split.outputs[: 2 * count]  # a state goes in as it comes out
    examples = {2 * count: P("d")} if "d" in axes and data.draw(st.booleans()) else {}
    assert_same(carried_out(split, axes, examples)(*values), jax.jit(step), *values)


def stepped(share: Share) -> tuple[InBlocks, list[Any], Callable[..., list[Any]]]:
    values, step = CASES["hidden units"].flat
    return in_blocks(program_of(step, *values), share, {0: 1}), values, step


def test_work_is_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device takes as many turns as it has blocks, counted while they run; a device without blocks takes none."""
    turns: collections.Counter[int] = collections.Counter()
    taken = run.block_at

    def counted(value: Any, dim: int, k: Any, blocks: int) -> Any:
        jax.debug.callback(lambda device, _: turns.update([int(device)]), index_along(("x",)), k)
        return taken(value, dim, k, blocks)

    monkeypatch.setattr(run, "block_at", counted)
    a, c, x = numbers(6, 24), numbers(24, 6), numbers(4, 6)
    split = in_blocks(program_of(lambda a, c, x: jnp.tanh(x @ a) @ c, a, c, x), Share(("x",), (5, 0, 1, 2)), {0: 1})
    carried_out(split, {"x": 4})(a, c, x)
    jax.effects_barrier()
    assert turns == {0: 2 * 5, 2: 2 * 1, 3: 2 * 2}  # two weights of which blocks are taken


def test_nothing_is_read_behind_a_devices_blocks() -> None:
    split, values, step = stepped(Share(("x",), (5, 1, 0, 2)))
    axes = {"x": 4}
    function = jax.jit(over_mesh(follow(split.program, layouts_of(split, axes, {}), axes), mesh_of(axes)))
    poisoned = [
        x if d is None else jnp.where(stored(jnp.ones(v.shape), d, split.share) > 0, x, jnp.nan)
        for x, v, d in zip(split.put(values), values, split.inputs, strict=True)
    ]
    assert_same(split.get(function(*poisoned)), step, *values)


def test_two_loops_a_train_step_and_sums_over_devices_between() -> None:
    """Megatron's one sum forward (Shoeybi et al. 2019, section 3); as the data have no gradient, none backward."""
    split, values, _ = stepped(Share(("x",), (5, 3)))
    assert [eqn.primitive.name for eqn in split.program.equations].count("in_blocks") == 2
    axes = {"x": 2}
    function = over_mesh(follow(split.program, layouts_of(split, axes, {}), axes), mesh_of(axes))
    jaxpr = jax.make_jaxpr(function)(*split.put(values)).jaxpr
    assert collections.Counter(collectives(jaxpr)) == {"psum": 1}
    assert not any(set(axes_of_collectives(inner.params["body_jaxpr"].jaxpr)) for inner in loops(jaxpr))


def test_one_activation_is_handed_on() -> None:
    """The second loop makes gelu and its derivative again of what the first product gave."""
    split, _, _ = stepped(Share(("x",), (5, 3)))
    first, _ = [eqn for eqn in split.program.equations if eqn.primitive.name == "in_blocks"]
    assert sorted(var.aval.shape for var in first.outvars) == [(4, 6), (4, 30)]


@pytest.mark.parametrize("name", list(CASES))
def test_within_loops_nothing_is_exchanged_along_their_axis(name: str) -> None:
    case, axes = CASES[name], {"d": 2, "x": 2}
    values, step = case.flat
    split = in_blocks(program_of(step, *values), Share(("x",), (3, 1)), dict([case.seed]))
    examples = {2 * len(jax.tree.leaves(case.params)): P("d")}
    function = over_mesh(follow(split.program, layouts_of(split, axes, examples), axes), mesh_of(axes))
    found = list(loops(jax.make_jaxpr(function)(*split.put(values)).jaxpr))
    assert found
    for loop in found:
        assert axes_of_collectives(loop.params["body_jaxpr"].jaxpr) <= {"d"}


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_stored_and_restored(data: st.DataObject) -> None:
    share = data.draw(shares(("x",), data.draw(st.integers(1, 4)), 12))
    shape = data.draw(st.sampled_from([(12,), (2, 12), (24, 3)]))
    dim = next(d for d, n in enumerate(shape) if n % 12 == 0)
    value = numbers(*shape)
    held = np.asarray(stored(value, dim, share))
    np.testing.assert_array_equal(np.asarray(restored(held, dim, share)), value)
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
    share = Share(("x",), (1, 1)).of(rates, blocks)
    assert share.blocks == blocks
    every = [counts for counts in np.ndindex(*[blocks + 1] * len(rates)) if sum(counts) == blocks]
    least = min(max(c / r for c, r in zip(counts, rates, strict=True)) for counts in every)
    assert max(c / r for c, r in zip(share.counts, rates, strict=True)) == pytest.approx(least)


@given(st.data())
@settings(max_examples=6, deadline=None)
def test_some_equations_in_blocks(data: st.DataObject) -> None:
    """Any of those that have the factor; between them and the others values change their form."""
    values, step = CASES["hidden units"].flat
    program = program_of(step, *values)
    every = tied(program, {program.inputs[0]: 1}, 8).factors
    some = data.draw(st.sets(st.sampled_from(sorted(every)), min_size=1))
    share = data.draw(shares(("x",), 2, 8))
    split = some_in_blocks(program, share, {number: every[number] for number in some})
    assert_same(carried_out(split, {"x": 2})(*values), step, *values)


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
            ("two of its factors at once", lambda x: jnp.outer(x, x)),
            ("is a loop or a branch", lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]),
            ("is a loop or a branch", lambda x: lax.scan(lambda c, e: (c + e, e), 0.0, x)[1]),
            ("blocks would lie apart", lambda x: jnp.broadcast_to(x, (3, 8)).reshape(24)),
        ],
    )
    def test_what_is_neither_free_nor_reduced(self, why: str, function: Callable[..., Any]) -> None:
        message = self.refused(lambda x: function(2 * x), numbers(8))
        assert why in message and "test_blocks.py" in message and "What to do" in message

    def test_a_weight_that_is_tied_to_itself(self) -> None:
        message = self.refused(lambda w, x: jnp.tanh(x @ w) @ w, numbers(8, 8), numbers(2, 8))
        assert "dimensions" in message or "two of its factors" in message

    def test_blocks_that_do_not_divide(self) -> None:
        message = self.refused(jnp.sin, numbers(9))
        assert "4 equal blocks" in message and "3, 9" in message

    def test_blocks_that_do_not_divide_a_part(self) -> None:
        message = self.refused(lambda x: jnp.sin(x.reshape(2, 4)), numbers(8))
        assert "factor of 2 there, which is not 4 equal blocks" in message

    def test_no_such_dimension(self) -> None:
        assert "no dimension 3" in self.refused(jnp.sin, numbers(8), dim=3)

    def test_no_such_input(self) -> None:
        with pytest.raises(PartitionError, match="input 4 is to be cut, of a program that has 1"):
            in_blocks(program_of(jnp.sin, numbers(8)), Share(("x",), (1, 1)), {4: 0})

    @pytest.mark.parametrize("counts", [(), (1,), (0, 1), (3, -1)])
    def test_no_shares(self, counts: tuple[int, ...]) -> None:
        with pytest.raises(PartitionError, match="are no shares"):
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
