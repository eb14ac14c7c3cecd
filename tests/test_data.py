"""Batches depend on the step number only, reach the devices that need them, and are loaded ahead without a trace.

Knows the public interface of `vnode.data`, the prefetch, and grain. Must not know the driver. References: Philox
written from its paper, nodes counted out one by one, and the data read directly.
"""

import sys
import threading
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

import vnode
from tests.rounding import assert_same
from tests.test_invariance import digest
from tests.test_virtual_step import compilations
from vnode.data.batch_order import Order, permutation
from vnode.data.batches import Batches
from vnode.data.forms import Parts
from vnode.data.prefetch import Prefetch
from vnode.data.source import loader
from vnode.errors import BatchError
from vnode.placement.sharded import ShardedBatch, is_sharded_batch

sizes = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.booleans()).map(
    lambda drawn: (max(drawn[:2]), min(drawn[:2]), *drawn[2:])
)
"""Examples, as many or fewer in a batch, seed, shuffle."""


def philox(seed: int, epoch: int, count: int) -> list[int]:
    """Philox4x64 with ten rounds as in Salmon et al., section 2.2; NumPy counts from one."""
    mask, numbers = (1 << 64) - 1, []
    for block in range(1, count // 4 + 2):
        x, key = [block, 0, 0, 0], [seed, epoch]
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [(b >> 64) ^ x[1] ^ key[0], b & mask, (a >> 64) ^ x[3] ^ key[1], a & mask]
            key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
        numbers += x
    return numbers[:count]


@given(st.integers(1, 40), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_permutation(examples: int, seed: int, epoch: int) -> None:
    """The order is that of the paper's random numbers, in whatever version of NumPy."""
    numbers = philox(seed, epoch, examples)
    assert permutation(examples, seed, epoch).tolist() == sorted(range(examples), key=numbers.__getitem__)


@given(sizes)
def test_wrapped_epochs(size: tuple[int, int, int, bool]) -> None:
    """Batch after batch, each epoch has every example once."""
    examples, batch_size, seed, shuffle = size
    order = Order(examples, batch_size, seed, shuffle)
    stream = np.concatenate([order.rows(step) for step in range(3 * examples // batch_size + 1)])
    assert order.dropped == 0
    for epoch in range(len(stream) // examples):
        mine = stream[epoch * examples : (epoch + 1) * examples]
        assert sorted(mine) == list(range(examples))
        assert shuffle or mine.tolist() == list(range(examples))


@given(sizes)
def test_dropped_examples(size: tuple[int, int, int, bool]) -> None:
    """Whole batches only, no example twice in an epoch; what is left out is counted."""
    examples, batch_size, seed, shuffle = size
    order = Order(examples, batch_size, seed, shuffle, last="drop")
    assert order.steps_per_epoch == examples // batch_size
    for epoch in range(2):
        first = epoch * (examples // batch_size)
        rows = np.concatenate([order.rows(first + i) for i in range(examples // batch_size)])
        assert len({*rows.tolist()}) == len(rows) == examples - order.dropped


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(30, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


class Counting:
    """Numbers, with a record of which are asked for."""

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.examples

    def take(self, rows: np.ndarray) -> Any:
        self.asked.append(rows.tolist())
        return {"x": rows.astype(np.float32)[:, None] * np.ones(3, np.float32), "nested": (rows.astype(np.int32),)}


def placements() -> list[vnode.Placement]:
    devices = jax.devices()
    mesh = Mesh(np.array(devices[:8]).reshape(2, 4), ("model", "vnode"))
    return [
        *(vnode.Placement(8, devices[:count]) for count in (1, 2, 3, 8)),
        vnode.Placement(8, devices[:2], counts=(5, 3)),
        vnode.Placement(8, mesh=mesh),
    ]


@pytest.mark.parametrize("placement", placements(), ids=str)
@pytest.mark.parametrize("batch_size", [16, 13])
def test_each_device_loads_its_examples(placement: vnode.Placement, batch_size: int) -> None:
    """A device is given the examples of its nodes, and no others are read for it. Once, one is also read by itself."""
    examples = Counting(50)
    batches = Batches(examples, batch_size, seed=1)
    batches.load(3, placement)
    assert examples.asked[0] == Order(50, batch_size, seed=1).rows(3)[:1].tolist()
    examples.asked.clear()
    loaded = batches.load(4, placement)
    asked, rows = examples.asked, Order(50, batch_size, seed=1).rows(4)
    np.testing.assert_array_equal(loaded["x"], rows[:, None] * np.ones(3))
    np.testing.assert_array_equal(loaded["nested"][0], rows)
    node_size = -(-batch_size // 8)
    nodes = [rows[i * node_size : (i + 1) * node_size].tolist() for i in range(8)]
    device_nodes = np.split(np.arange(8), np.cumsum(placement.counts)[:-1])
    shares = [[row for node in mine for row in nodes[node]] for mine in device_nodes]
    if batch_size % 8:  # the last example stands for those that nodes miss
        room = [2 * len(mine) for mine in device_nodes]
        shares = [share + [rows[-1]] * (n - len(share)) for share, n in zip(shares, room, strict=True)]
    assert sorted(asked) == sorted(share for share in shares if share)  # each once, however many devices share it
    first = loaded["nested"][0]
    held = first.parts[0] if isinstance(first, ShardedBatch) else first
    for shard in held.addressable_shards:
        place = np.argwhere(placement.mesh.devices == shard.device)[0][placement.mesh.axis_names.index("vnode")]
        assert np.asarray(shard.data).reshape(-1).tolist()[: len(shares[place])] == shares[place]


def update(w: Any, batch: Any) -> Any:
    """A step that returns something of every example, has several passes, and draws."""
    x, (n,) = batch["x"], batch["nested"]
    noise = jax.random.normal(jax.random.key(3), x.shape)
    y = jnp.sin(x + noise) - jnp.sin(x).mean(0)
    loss, grad = jax.value_and_grad(lambda w: ((y @ w) ** 2).mean() + (n % 7).sum())(w)
    return w - 0.1 * grad, {"loss": loss, "each": y, "sorted": jnp.sort(n), "batch": batch}


def unequal() -> list[vnode.Placement]:
    d = jax.devices()
    return [
        vnode.Placement(8, d[:3]),
        vnode.Placement(8, d[:2], counts=(7, 1)),
        vnode.Placement(8, d[:4], counts=(0, 5, 0, 3)),
        vnode.Placement(8, mesh=Mesh(np.array(d[:8]).reshape(2, 4), ("model", "vnode")), counts=(1, 3, 2, 2)),
        vnode.Placement(8, groups=[d[:2], d[2:3]], counts=(3, 2, 3)),
        vnode.Placement(8, groups=[d[:2], d[2:3]], counts=(2, 2, 4)),
        vnode.Placement(8, groups=[d[:1], d[1:2], d[2:5]], counts=(6, 0, 1, 1, 0)),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("batch_size", [13, *(pytest.param(n, marks=pytest.mark.sweep) for n in (16, 3, 1))])
def test_a_step_on_shares(batch_size: int) -> None:
    """A step on a batch in shares gives the bits of the step on the batch itself, on one device."""
    step = vnode.virtualize(update, virtual_nodes=8, recompute_budget=9.0)
    batches = Batches(Counting(50), batch_size, seed=1)
    weights = jnp.arange(3.0)
    expected = step.on(jax.devices()[:1])(weights, batches.batch(2))
    for placement in unequal():
        loaded = batches.load(2, placement)
        assert all(isinstance(leaf, ShardedBatch) for leaf in jax.tree.leaves(loaded, is_leaf=is_sharded_batch))
        actual = step.on(placement)(weights, loaded)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        assert jax.tree.map(np.shape, actual) == jax.tree.map(np.shape, expected)


@pytest.mark.thorough
@pytest.mark.quickly  # that shares give the bits of the batch, the test above says
def test_shares_of_another_placement() -> None:
    """Wherever a batch was loaded for, the step has the same result; also inside `jax.jit` and differentiated."""
    step = vnode.virtualize(update, virtual_nodes=8, recompute_budget=9.0)
    batches = Batches(Counting(50), 13, seed=1)
    weights = jnp.arange(3.0)
    expected = step.on(jax.devices()[:1])(weights, batches.batch(2))
    d = jax.devices()
    homes = [
        vnode.Placement(8, d[:3]),
        vnode.Placement(8, d[:3], counts=(1, 5, 2)),
        vnode.Placement(8, d[3:5]),
        unequal()[4],
    ]
    others = [*homes[:3], vnode.Placement(8, mesh=Mesh(np.array(d[:4]), ("vnode",)))]
    for i, placement in enumerate(homes):
        loaded = batches.load(2, placement)
        for other in (others[i - 1], others[i - 2]):
            assert digest(step.on(other)(weights, loaded)) == digest(expected)
    loaded, here = batches.load(2, homes[0]), step.on(homes[0])
    assert digest(jax.jit(here)(here.put(weights), loaded)) == digest(expected)
    gradient = jax.grad(lambda w: here(w, loaded)[1]["loss"])(weights)
    assert_same(gradient, jax.grad(lambda w, batch: update(w, batch)[1]["loss"]), weights, batches.batch(2))


@pytest.mark.quickly
def test_shares_are_prepared() -> None:
    """A program prepared for another placement is that for a batch as it will be loaded there."""
    d = jax.devices()
    batches = Batches(Counting(50), 16, seed=1)
    homes = [vnode.Placement(8, d[:3]), vnode.Placement(8, d[:4]), vnode.Placement(8, d[:4], counts=(1, 2, 3, 2))]
    for first in homes:
        one = vnode.virtualize(update, virtual_nodes=8, recompute_budget=9.0)
        one.on(first)(one.on(first).put(jnp.ones(3)), batches.load(0, first))
        for other in homes:
            one.prepare(other).wait()
            with compilations("update") as compiled:
                one.on(other)(one.on(other).put(jnp.ones(3)), batches.load(1, other))
            assert not compiled, (first, other)


@pytest.mark.sampled(3)
@pytest.mark.newest
@pytest.mark.parametrize(
    ("placement", "batch_size"), [*((p, 16) for p in placements()), (placements()[3], 13)], ids=str
)
def test_no_resharding(placement: vnode.Placement, batch_size: int) -> None:
    """A batch lies where the compiler, left to choose, wants it."""

    def fun(w: Any, batch: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: ((batch["x"] @ w) ** 2).mean() + batch["nested"][0].sum())(w)
        return w - grad, loss

    step = vnode.virtualize(fun, virtual_nodes=8, in_axes=(None, 0)).on(placement)
    batches = Batches(Counting(50), batch_size)
    weights, batch = step.put(jnp.ones(3)), batches.load(0, placement)
    unplaced = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    free = step.lower(weights, unplaced).compile()
    wanted = free.input_shardings[0][1]
    taken = step.lower(weights, batch).compile().input_shardings[0][1]
    for leaf, want, take in zip(*map(jax.tree.leaves, (batch, wanted, taken)), strict=True):
        assert leaf.sharding.is_equivalent_to(take, leaf.ndim)
        if placement.size == len(placement.devices):
            assert leaf.sharding.is_equivalent_to(want, leaf.ndim)


def test_data_sets() -> None:
    """Arrays, trees of them, and sequences of examples give the same batches."""
    x = np.arange(20.0).reshape(10, 2)
    rows = Order(10, 4, seed=2).rows(5)
    for data in (x, jnp.asarray(x), [*x], {"x": x}, (x,)):
        (batch,) = jax.tree.leaves(Batches(data, 4, seed=2).batch(5))
        np.testing.assert_array_equal(batch, x[rows])


def test_refused_data() -> None:
    for data, message in (
        ({"x": np.ones((3, 2)), "y": np.ones(4)}, r"\['y'\]: shape \(4,\)"),
        ({}, "no array"),
        (iter([1]), "examples by number"),
        ([], "are too few for a batch"),
    ):
        with pytest.raises(BatchError, match=message):
            Batches(data, 2)

    class Short(Counting):
        def take(self, rows: np.ndarray) -> Any:
            return rows[1:]

    with pytest.raises(BatchError, match="asked for 2 examples"):
        Batches(Short(5), 2).batch(0)
    with pytest.raises(ValueError, match="last"):
        Batches([1], 1, last="pad")
    with pytest.raises(BatchError, match="shuffle=False"):
        Order(1 << 40, 2)


class Parted:
    """Examples whose form depends on which rows are read at once: below 8 it is another one."""

    def __init__(self, low: Any, high: Any) -> None:
        self.forms = low, high

    def __len__(self) -> int:
        return 16

    def take(self, rows: np.ndarray) -> Any:
        return jax.tree.map(lambda leaf: np.stack([leaf] * len(rows)), self.forms[int(rows.max() >= 8)])


@pytest.mark.parametrize("by_row", [True, False], ids=["records", "take"])
@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        ({"x": 1.0, "n": None}, {"x": 1.0, "n": 777.0}, "different structures"),
        ({"x": 1.0}, {"a": 777.0, "x": 1.0}, "different structures"),
        ({"x": 1}, {"x": 0.5}, r"different dtypes .*\['x'\]"),
        ({"x": np.zeros(3)}, {"x": np.zeros(4)}, r"different shapes .*\['x'\]"),
    ],
)
def test_examples_of_other_forms(low: Any, high: Any, message: str, devices: int, by_row: bool) -> None:
    """They are refused on any number of devices, whether or not the same device reads them."""
    data = [low if number < 8 else high for number in range(16)] if by_row else Parted(low, high)
    batches = Batches(data, 16, shuffle=False)
    with pytest.raises(BatchError, match=message):
        batches.load(0, vnode.Placement(8, jax.devices()[:devices]))


@pytest.mark.parametrize("readable", [True, False])
def test_other_processes_have_the_form_of_the_first_example(readable: bool) -> None:
    """A process that does not read a batch's first example compares its own with it, if it can read it."""

    class Half:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, number: int) -> Any:
            assert number >= 8 or readable, "another process's"
            return {"x": 1.0} if number < 8 else {"x": 1.0, "n": 777.0}

    batches, parts = Batches(Half(), 16, shuffle=False), Parts()
    rows = batches.rows(0)
    batches.read_first(rows, np.arange(8, 16), parts)
    if readable:
        with pytest.raises(BatchError, match="different structures"):
            parts.check(batches.take(rows[8:]))
    else:
        parts.check(batches.take(rows[8:]))


def test_dtypes_that_jax_does_not_tell_apart() -> None:
    """Python's float and float32 are one dtype on devices, and the same batch on any number of them."""
    data = [{"x": 0.5 if number < 8 else np.float32(0.25)} for number in range(16)]
    for devices in (1, 2, 3):
        loaded = Batches(data, 16, shuffle=False).load(0, vnode.Placement(8, jax.devices()[:devices]))
        np.testing.assert_array_equal(loaded["x"], np.float32([0.5] * 8 + [0.25] * 8))


def test_arrays_that_devices_cannot_hold() -> None:
    """The leaf is named wherever it comes from, before the step."""

    class Tensor:
        """As tensors of other libraries are: an array, but jax does not take it."""

        shape, dtype = (8,), "float32"

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise TypeError("Got unsupported ScalarType BFloat16")

        def __len__(self) -> int:
            return 8

        def take(self, rows: Any) -> Any:
            raise TypeError("must be Tensor")

    gaps = np.ma.array(np.ones(8, np.float32), mask=[0] * 7 + [1])
    refused = (
        (gaps, r"x.* masked array(.|\n)*filled"),
        (np.ones(8, [("a", "f4")]), r"x.* dtype (.|\n)*x.dtype.names"),
        (np.ones(8, np.longdouble), r"x.* dtype float128(.|\n)*astype\(np.float64\)"),
        (np.array(["a"] * 8), r"x.* dtype <U1"),
        (Tensor(), r"x.* is a .*Tensor, which jax does not take(.|\n)*x.numpy\(\)"),
    )
    placement = vnode.Placement(4, jax.devices()[:2])
    for array, message in refused:
        for load in (
            lambda array=array: Batches({"x": array}, 4),
            lambda array=array: Batches([{"x": array}] * 8, 4).batch(0),
            lambda array=array: loader(lambda step: {"x": array}, 1)(0, placement),
            lambda array=array: vnode.data.local_batch({"x": array}, 8, placement),
        ):
            with pytest.raises(BatchError, match=message):
                load()
    with pytest.raises(BatchError, match="masked array"):
        Batches(gaps, 4)
    swapped = np.arange(8).astype(">f4")
    with pytest.raises(BatchError, match=r"x.* dtype >f4(.|\n)*astype\(np.float32\)"):  # a copy may be large
        Batches({"x": swapped}, 4)
    whole = np.ma.array(np.arange(8, dtype=np.float32), mask=False)
    for data in ({"x": whole}, [{"x": x} for x in swapped], [{"x": x} for x in whole]):
        assert Batches(data, 8, shuffle=False).batch(0)["x"].tolist() == [*range(8)]
    with pytest.raises(BatchError, match="Tensor"):
        Batches(Tensor(), 4)


def test_lists_as_a_data_set() -> None:
    """The error is short however many numbers there are, and says what to do with lists."""
    with pytest.raises(BatchError, match=r"and 4992 more(.|\n)*make arrays of lists") as caught:
        Batches({"x": np.zeros((1000, 5)).tolist()}, 16)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("examples", [2**53 + 1, 2**60, sys.maxsize])
def test_fingerprint_of_endless_data(examples: int) -> None:
    """Its sample has only numbers of examples, the last one among them, however many there are."""
    data = Counting(0)
    data.examples = examples
    Batches(data, 8, shuffle=False).fingerprint()
    assert data.asked[0] == sorted({*data.asked[0]})
    assert data.asked[0][0] == 0 and data.asked[0][-1] == examples - 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), max_size=20), st.integers(0, 4))
def test_prefetch_is_invisible(asked: list[tuple[int, int]], depth: int) -> None:
    """Whatever is asked for, in whatever order, comes as if it were loaded then; errors belong to their step."""

    def load(step: int, placement: int) -> tuple[int, int]:
        if step == 5:
            raise KeyError(step)
        return step, placement

    with Prefetch(load, depth=depth, stop=8) as feed:
        for step, placement in asked:
            if step == 5:
                with pytest.raises(KeyError):
                    feed.get(step, placement)
            else:
                assert feed.get(step, placement) == (step, placement)
    assert not any(thread.name == "vnode-prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [1, 3])
def test_prefetch_is_bounded(depth: int) -> None:
    """No more than `depth` wait and one is made; nothing is loaded past the end, nor twice."""
    loads: list[int] = []
    full = threading.Event()
    taken = [0]

    def load(step: int, placement: Any) -> int:
        loads.append(step)
        assert step <= taken[0] + depth
        if len(loads) == depth + 1:
            full.set()
        return step

    with Prefetch(load, depth=depth, stop=6) as feed:
        feed.get(0, None)
        assert full.wait(60)  # it did load ahead, unasked
        for step in range(1, 6):
            taken[0] = step
            assert feed.get(step, None) == step
    assert loads == list(range(6))


def test_closed() -> None:
    feed = Prefetch(lambda step, placement: step)
    assert feed.get(0, None) == 0
    feed.close()
    with pytest.raises(RuntimeError, match="closed"):
        feed.get(1, None)


def test_grain() -> None:
    """A `MapDataset` in its own order, its random transforms drawn anew in each epoch; and a data source."""
    source = grain.MapDataset.range(10).seed(5).shuffle().map(lambda x: {"x": np.full(2, x)})
    batches = Batches(vnode.grain.dataset(source), 4, shuffle=False)
    for step in (0, 2, 7):
        want = np.stack([source[i]["x"] for i in range(4 * step, 4 * step + 4)])
        np.testing.assert_array_equal(batches.batch(step)["x"], want)

    drawn = grain.MapDataset.range(8).seed(1).random_map(lambda x, rng: (x, rng.integers(1 << 30)))
    batches = Batches(vnode.grain.dataset(drawn, threads=1), 8, seed=4)
    (x0, draw0), (x1, draw1) = batches.batch(0), batches.batch(1)
    assert sorted(x0) == sorted(x1) == list(range(8))
    assert not set(draw0.tolist()) & set(draw1.tolist())
    assert [drawn[8 + x][1] for x in x1.tolist()] == draw1.tolist()

    class Source:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, number: int) -> Any:
            assert 0 <= number < 6
            return {"x": np.float32(number)}

    assert isinstance(Source(), grain.sources.RandomAccessDataSource)
    batches = Batches(vnode.grain.dataset(Source()), 4, seed=1)
    np.testing.assert_array_equal(batches.batch(3)["x"], Order(6, 4, seed=1).rows(3))
    placed = batches.load(3, vnode.Placement(4, jax.devices()[:4]))
    np.testing.assert_array_equal(placed["x"], batches.batch(3)["x"])


def test_grain_refused() -> None:
    filtered = grain.MapDataset.range(6).filter(lambda x: x % 2 == 0)
    with pytest.raises(BatchError, match="no example 1, 3"):
        Batches(vnode.grain.dataset(filtered), 4, shuffle=False).batch(0)
    with pytest.raises(BatchError, match="before to_iter_dataset"):
        vnode.grain.dataset(filtered.to_iter_dataset())
