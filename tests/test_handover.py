"""Workers fetch a state from those that hold it: any boxes, any holders, damaged bytes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vnode
from tests.budget import examples
from vnode.elastic import state_handover
from vnode.elastic.state_boxes import HeldState, IncompleteState, build_state, plan_fetches
from vnode.elastic.state_handover import Handover, Source, fetch_boxes
from vnode.errors import ProcessError

TOKEN = "secret"


def state_of(mesh: Mesh, seed: int):
    """A state with what is easily lost on the way: negative zeros, NaNs, keys, weak types, no elements, bfloat16."""
    rng = np.random.default_rng(seed)
    sharded = NamedSharding(mesh, PartitionSpec("vnode"))
    whole = NamedSharding(mesh, PartitionSpec())
    return {
        "w": jax.device_put(rng.standard_normal((24, 5)).astype(np.float32), sharded),
        "bits": jax.device_put(np.array([-0.0, np.nan, np.inf, 1e-45], np.float32), whole),
        "half": jax.device_put(jnp.asarray(rng.standard_normal((3, 24)), jnp.bfloat16), sharded_last(mesh)),
        "empty": jax.device_put(np.zeros((0, 3), np.float32), whole),
        "key": jax.device_put(jax.random.key(seed), whole),
        "count": jax.device_put(jnp.asarray(seed), whole),
        "name": "not an array",
    }


def sharded_last(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(None, "vnode"))


def bits_of(state) -> list[tuple[str, bytes]]:
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return [
        (str(jax.typeof(leaf)).split("@")[0], np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes())
        for leaf in arrays
    ]


def is_key(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def split_among(held: HeldState, holders: list[set[int]]) -> list[HeldState]:
    """Several workers' parts of a state: of the i-th box of each array, those that have i among their numbers."""
    return [
        HeldState(
            held.step,
            held.leaves,
            tuple(
                {box: part for i, (box, part) in enumerate(sorted(parts.items())) if i in own or len(parts) == 1}
                for parts in held.parts
            ),
        )
        for own in holders
    ]


@contextlib.contextmanager
def served(parts: list[HeldState]):
    """Connections to a server for each of some workers."""
    servers = [Handover("127.0.0.1", TOKEN) for _ in parts]
    sources = {}
    try:
        for i, (server, held) in enumerate(zip(servers, parts, strict=True)):
            server.offer(7, held)
            sources[f"worker {i}"] = Source(f"worker {i}", server.address, TOKEN, 7)
        yield sources
    finally:
        for source in sources.values():
            source.close()
        for server in servers:
            server.close()


@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=3),
    st.sets(st.integers(0, 7)),
    st.integers(0, 3),
)
@settings(max_examples=examples(30), deadline=None)
def test_any_holders(before, after, holders, own, seed):
    """A state is made again, bit by bit, of whatever boxes workers hold; or it is said that some are held by nobody."""
    mesh = Mesh(np.array(jax.devices()[:before]), ("vnode",))
    state = state_of(mesh, seed)
    held = HeldState.from_state(5, state)
    mine, *others = split_among(held, [own, *holders])
    placement = vnode.Placement(24, jax.devices()[:after])
    with served(others) as sources:
        manifests = {name: source.manifest() for name, source in sources.items()}
        assert {(step, leaves == list(held.leaves)) for step, leaves, _ in manifests.values()} == {(5, True)}
        boxes = {name: found for name, (_, _, found) in manifests.items()}
        there = set.union(own, *holders) >= set(range(before))
        if not there and before > 1:
            with pytest.raises(IncompleteState, match="no remaining worker holds"):
                plan_fetches(held.leaves, mine, boxes, placement)
            return
        asked = plan_fetches(held.leaves, mine, boxes, placement)
        made = build_state(state, held.leaves, mine, fetch_boxes(sources, held.leaves, asked), placement)
    assert bits_of(made) == bits_of(state)
    assert made["name"] == "not an array"
    assert made["w"].sharding.device_set == set(placement.devices)


def test_large_arrays_come_from_all_holders(monkeypatch):
    """One array is fetched in pieces, about as many bytes from each holder."""
    monkeypatch.setattr("vnode.elastic.state_boxes.PIECE", 1000)
    state = {"w": jnp.arange(4096, dtype=jnp.float32).reshape(64, 64)}
    held = HeldState.from_state(1, state)
    placement = vnode.Placement(8, jax.devices()[:2])
    with served([held, held, held]) as sources:
        asked = plan_fetches(
            held.leaves, None, {name: source.manifest()[2] for name, source in sources.items()}, placement
        )
        sent = [sum((b - a) * 256 for _, ((a, b), _) in requests) for requests in asked.values()]
        assert sum(sent) == 4096 * 4 and max(sent) - min(sent) <= 1000
        made = build_state(state, held.leaves, None, fetch_boxes(sources, held.leaves, asked), placement)
    np.testing.assert_array_equal(made["w"], state["w"])


@pytest.mark.parametrize("damage", ["bytes", "gone", "other token", "no offer"])
def test_damage(monkeypatch, damage):
    """Damaged bytes, a holder that dies, one of another job, and one that has no such state are errors that name it."""
    state = {"w": jnp.ones((8, 8))}
    held = HeldState.from_state(1, state)
    monkeypatch.setattr(state_handover, "OFFER", 0.1)
    if damage == "bytes":
        monkeypatch.setattr("vnode.elastic.state_handover.zlib.crc32", lambda data: id(data))
    with served([held]) as sources:
        (name, source), boxes = next(iter(sources.items())), [(0, ((0, 8), (0, 8)))]
        if damage == "gone":
            source.line.shutdown(2)
        if damage == "other token":
            source.token = "another"
        if damage == "no offer":
            source.generation = 8
        with pytest.raises(ProcessError, match="the state cannot be fetched from worker 0"):
            fetch_boxes(sources, held.leaves, {name: boxes})
