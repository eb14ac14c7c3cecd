"""Functions of pytrees in blocks: a train step that is called again and again, names, and what is refused.

Knows the step and its arguments. The reference is the step itself on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tests.rounding import assert_close
from vnode.errors import PartitionError, PlacementError
from vnode.partition.uneven_shares.blocked import Blocked, blocked

pytestmark = pytest.mark.quickly

GENERATOR = np.random.default_rng(0)
PARAMS = {"wi": GENERATOR.standard_normal((4, 16)), "wo": GENERATOR.standard_normal((16, 4)), "bias": np.zeros(4)}
STATE = {
    "params": {name: value.astype(np.float32) / 4 for name, value in PARAMS.items()},
    "velocity": {name: np.zeros_like(value, np.float32) for name, value in PARAMS.items()},
}
X = GENERATOR.standard_normal((8, 4)).astype(np.float32)


def train_step(state: Any, x: Any) -> tuple[Any, Any]:
    def loss_fn(params: Any) -> Any:
        return jnp.mean((jax.nn.gelu(x @ params["wi"]) @ params["wo"] + params["bias"] - x) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
    params = jax.tree.map(lambda p, v: p - 0.1 * v, state["params"], velocity)
    return {"params": params, "velocity": velocity}, loss


def mesh_of(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def split(mesh: Mesh, counts: Sequence[int] = (5, 3), **options: Any) -> Blocked:
    return blocked(train_step, (STATE, X), mesh, {"params/wi": 1}, counts, "model", **options)


@pytest.mark.parametrize(
    ("axes", "counts", "partition"),
    [
        ({"model": 2}, (5, 3), {}),
        ({"model": 4}, (1, 0, 2, 1), {}),
        ({"data": 2, "model": 2}, (3, 1), {"^1$": P("data")}),
    ],
)
def test_steps_one_after_the_other(axes: dict[str, int], counts: tuple[int, ...], partition: dict[str, P]) -> None:
    step = split(mesh_of(**axes), counts, partition=partition)
    plain, plain_state = jax.jit(train_step), STATE
    state = step.put(STATE)
    assert state["params"]["wi"].shape == (4, 16 // sum(counts) * max(counts) * len(counts))
    assert state["params"]["wi"].sharding.spec == P(None, "model")
    for number in range(3):
        state, loss = step(state, X + number)
        plain_state, plain_loss = plain(plain_state, X + number)
    assert_close(step.get(state), plain_state)
    assert_close(loss, plain_loss)
    assert_close(step.get(loss, 1), plain_loss)


def test_a_function_that_returns_a_state_alone() -> None:
    """It is result 0, and not what it holds."""
    step = blocked(lambda *args: train_step(*args)[0], (STATE, X), mesh_of(model=2), {"params/wi": 1}, (5, 3), "model")
    assert_close(step.get(step(step.put(STATE), X)), train_step(STATE, X)[0])
    layer = blocked(lambda p, x: x @ p, (PARAMS["wi"], X), mesh_of(model=2), {"0": 1}, (5, 3), "model")
    assert_close(layer.get(layer(layer.put(PARAMS["wi"]), X)), jnp.dot(X, PARAMS["wi"]))


def test_each_device_holds_room_for_the_most_blocks() -> None:
    state = split(mesh_of(model=2)).put(STATE)
    assert {shard.data.shape for shard in state["params"]["wo"].addressable_shards} == {(10, 4)}


def test_a_donated_state_is_updated_in_place() -> None:
    step = split(mesh_of(model=2), donate=(0,))
    state = step.put(STATE)
    before = state["params"]["wi"]
    state, _ = step(state, X)
    assert before.is_deleted()
    assert_close(step.get(state), jax.jit(train_step)(STATE, X)[0])


def test_what_is_in_blocks_is_said() -> None:
    assert str(split(mesh_of(model=2))).splitlines() == [
        "8 blocks over model: 5, 3 a device",
        "  0/params/wi (4, 16): dimension 1, stored as 20",
        "  0/params/wo (16, 4): dimension 0, stored as 20",
        "  0/velocity/wi (4, 16): dimension 1, stored as 20",
        "  0/velocity/wo (16, 4): dimension 0, stored as 20",
    ]


def test_other_axes_that_divide_nothing() -> None:
    mesh = mesh_of(data=2, model=2)
    with pytest.raises(PlacementError, match="over 'dat', which the mesh does not have"):
        split(mesh, partition={"^1$": P("dat")})
    with pytest.raises(ValueError, match="'data' can divide one dimension, not two"):
        split(mesh, partition={"^1$": P("data", "data")})


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(PartitionError, match=r"'w9' matches no argument's name(?s:.*)0/params/wi"):
        blocked(train_step, (STATE, X), mesh_of(model=2), {"w9": 1}, (1, 1), "model")


def test_a_state_that_was_not_put() -> None:
    with pytest.raises(PartitionError, match=r"0/params/wi has shape \(4, 16\), where \(4, 20\) is expected"):
        split(mesh_of(model=2))(STATE, X)


def test_other_arguments() -> None:
    with pytest.raises(PartitionError, match="expected arguments"):
        split(mesh_of(model=2))(X)


def test_counts_for_another_mesh() -> None:
    with pytest.raises(PartitionError, match="do not fit the mesh"):
        split(mesh_of(model=4))


def test_sizes_that_blocks_do_not_divide() -> None:
    with pytest.raises(PartitionError, match=r"0/params/wi of shape \(4, 16\) has no dimension 1 of 7 equal blocks"):
        split(mesh_of(model=2), (4, 3))


def test_a_dimension_that_cannot_be_cut() -> None:
    with pytest.raises(PartitionError, match=r"'sort' needs all of its indices(?s:.*)test_blocks.py"):
        blocked(lambda p, x: jnp.sort(x @ p), (PARAMS["wi"], X), mesh_of(model=2), {"0": 1}, (1, 1), "model")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_within_another_mesh_and_without_jit(kind: AxisType) -> None:
    """Of a mesh that the caller has set nothing is left in the program, which is over a mesh of its own."""
    want = train_step(STATE, X)
    for around in (jax.set_mesh(jax.make_mesh((8,), ("examples",), axis_types=(kind,))), jax.disable_jit()):
        with around:
            step = split(mesh_of(model=2))
            state, loss = step(step.put(STATE), X)
            assert_close((step.get(state), loss), want)


def test_what_was_not_meant_reads_well() -> None:
    step = split(mesh_of(model=2))
    wrong: list[tuple[Any, str]] = [
        (lambda: step.put(STATE["params"]), "argument 0 is another pytree than the function was made for"),
        (lambda: step.put(STATE, 2), "there is no argument 2: they are numbered from 0 to 1"),
        (lambda: step.put(jax.tree.map(lambda leaf: leaf[:2], STATE)), r"0/params/bias has shape \(2,\), where \(4,\)"),
        (lambda: step.get(STATE, 5), "there is no result 5: they are numbered from 0 to 1"),
        (lambda: step(jax.tree.map(jnp.bfloat16, step.put(STATE)), X), "has dtype bfloat16, where float32 is expected"),
        (lambda: split(mesh_of(model=2), (5.0, 3.0)), r"counts: expected integers, not \(5.0, 3.0\)"),  # type: ignore
        (lambda: split(mesh_of(model=2), "53"), "counts: expected integers"),  # type: ignore
        (lambda: blocked(train_step, (STATE, X), mesh_of(model=2), ["wi"], (5, 3), "model"), "dims maps patterns"),  # type: ignore
        (lambda: blocked(train_step, (STATE, X), mesh_of(model=2), {"(": 1}, (5, 3), "model"), "not a regular"),
        (lambda: blocked(train_step, (STATE, X), mesh_of(model=2), {"wi": "1"}, (5, 3), "model"), "dims: expected"),  # type: ignore
        (lambda: blocked(train_step, (STATE, X), mesh_of(model=2), {"wi": 1}, (5, 3), None), "axis: expected the name"),  # type: ignore
    ]
    for use, message in wrong:
        with pytest.raises(PartitionError, match=message):
            use()


def test_what_is_gathered_is_said() -> None:
    """Units that read each other, in a loop: a weight that has them twice is cut along the dimension that is named."""

    def recurrent(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h.sum()), jnp.zeros(8), x)

    w = GENERATOR.standard_normal((8, 8)).astype(np.float32)
    step = blocked(recurrent, (w, w), mesh_of(model=2), {"0": 1}, (5, 3), "model")
    assert str(step).splitlines()[1:] == [
        "  0 (8, 8): dimension 1, stored as 10",
        "  1 (8, 8): dimension 1, stored as 10",
        "  gathered: float32[8]",
    ]
    assert_close(step.get(step(step.put(w), step.put(w, 1))[0]), recurrent(w, w)[0])
