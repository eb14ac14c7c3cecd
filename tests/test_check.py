"""`vnode.check` and `vnode doctor`: they say what is true, of steps that are right and of steps that are not.

Knows steps whose answer is known beforehand, and NumPy. Must not know how the check is done.
"""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from vnode import cli
from vnode.plan.check import arrays, plain
from vnode.runtime.rounding_noise import with_rounding_noise

pytestmark = pytest.mark.quickly


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


def attention(state: Any, batch: jax.Array) -> Any:
    """The gradient of the keys' bias is zero in exact arithmetic, and Adam divides by its size."""

    def loss_fn(params: Any) -> jax.Array:
        queries = batch @ params["query"]
        keys = batch @ params["key"] + params["key_bias"]
        weights = jax.nn.softmax(queries @ keys.swapaxes(1, 2))
        return jnp.mean((weights @ batch) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    square = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g**2, state["square"], grads)
    params = jax.tree.map(lambda p, g, s: p - 0.1 * g / (jnp.sqrt(s) + 1e-8), state["params"], grads, square)
    return {"params": params, "square": square}, loss


def attention_arguments() -> tuple[Any, jax.Array]:
    params = {"query": normal(8, 8), "key": normal(8, 9)[:, :8], "key_bias": normal(8)}
    return {"params": params, "square": jax.tree.map(jnp.zeros_like, params)}, normal(10, 5, 8)


def test_a_right_step_is_ok_and_its_state_stays() -> None:
    """Even where it is donated, and where rounding is all that there is of an update."""
    args = attention_arguments()
    before = jax.tree.map(np.array, args)
    step = vnode.virtualize(attention, virtual_nodes=4, donate_argnums=0)
    answer = vnode.check(step, args, devices=[1, 3])
    assert answer.ok and answer.equal and answer.same_bits and answer.promised and answer.repeatable
    assert jax.tree.all(jax.tree.map(np.array_equal, before, args))
    assert answer.places == ("1 cpu device", "3 cpu devices")
    leaves = {leaf.path: leaf for leaf in answer.leaves}
    assert set(leaves) == {
        *(f"0/{slot}/{name}" for slot in ("params", "square") for name in ("query", "key", "key_bias")),
        "1",
    }
    got = step.on(jax.devices()[:1])(jax.tree.map(jnp.copy, args[0]), args[1])[0]["params"]["key"]
    want = np.asarray(jax.jit(attention)(*args)[0]["params"]["key"])
    by_hand = np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()
    assert leaves["0/params/key"].relative == pytest.approx(by_hand)
    text = str(answer)
    assert text.startswith("attention: ok\n") or "attention: ok   " in text
    assert max(map(len, text.splitlines())) <= 80 and "key_bias" in text
    assert len(repr(answer).splitlines()) == 1 and "key_bias" in answer._repr_html_()


def batch_norm(w: jax.Array, x: jax.Array) -> jax.Array:
    def loss_fn(w: jax.Array) -> jax.Array:
        hidden = x @ w
        return jnp.mean(((hidden - hidden.mean(0)) * jax.lax.rsqrt(hidden.var(0) + 1e-5)) ** 3)

    return w - 0.1 * jax.grad(loss_fn)(w)


def test_a_step_that_differs_is_not_ok() -> None:
    """Statistics of each node instead of the batch's, as if they were meant to be the same."""
    args = normal(6, 4), normal(16, 6)
    local = vnode.check(vnode.virtualize(batch_norm, virtual_nodes=4, coupling="local"), args, devices=[1])
    assert not local.ok and not local.equal
    (leaf,) = local.leaves
    assert leaf.verdict == "DIFFERENT" and leaf.wrong > leaf.size / 2
    assert "NOT equal to the plain step in 1 of 1 array" in " ".join(str(local).split())
    assert "coupling='local' is not meant to equal the plain step" in str(local)
    exact = vnode.virtualize(batch_norm, virtual_nodes=4, recompute_budget=9.0)
    assert vnode.check(exact, args, devices=[1]).ok


def test_other_bits_are_found() -> None:
    """Those that NumPy finds."""
    args = normal(40, 30), normal(64, 40)
    step = vnode.virtualize(lambda w, x: w + jnp.tanh(x @ w).sum(0) * 1e3, virtual_nodes=16, reduction="fast")
    results = [np.asarray(step.on(jax.devices()[:n])(*args)) for n in (1, 3)]
    answer = vnode.check(step, args, devices=[1, 3])
    assert answer.equal and not answer.promised
    assert answer.same_bits == (results[0].tobytes() == results[1].tobytes())
    assert [leaf.bits for leaf in answer.leaves] == [(True, results[0].tobytes() == results[1].tobytes())]


@pytest.mark.parametrize(("change", "wrong"), [(0.0, 0), (1e-7, 0), (1e-3, 1), (np.nan, 1), (np.inf, 1)])
def test_one_wrong_element_is_counted(change: float, wrong: int) -> None:
    want = np.linspace(1, 2, 100, dtype=np.float32)
    got = want.copy()
    got[7] += np.float32(change)
    spread = np.full(100, 1e-7)
    leaf = arrays.compare_leaf("w", got, want, spread, (True,), True)
    assert leaf.wrong == wrong and (leaf.verdict == "DIFFERENT") == bool(wrong)
    assert (leaf.verdict == "same bits") == (got.tobytes() == want.tobytes())


def test_other_types_and_integers_are_different() -> None:
    ints = np.arange(4)
    assert arrays.compare_leaf("n", ints, ints, np.zeros(4), (True,), True).verdict == "same bits"
    assert arrays.compare_leaf("n", ints + (ints == 2), ints, np.zeros(4), (True,), True).wrong == 1
    narrower = arrays.compare_leaf("n", ints.astype(np.int32), ints, np.zeros(4), (True,), True)
    assert narrower.verdict == "DIFFERENT" and "int64[4]" in narrower.note
    assert not arrays.same_bits(np.float32([0.0]), np.float32([-0.0]))


def test_keys_statics_and_keywords() -> None:
    def step(state: Any, x: jax.Array, size: int, *, name: str, scale: jax.Array) -> Any:
        key, draw = jax.random.split(state["key"])
        kept = jax.random.bernoulli(draw, 0.5, x.shape)
        new = state["w"] - 0.1 * scale * (x * kept).reshape(-1, size, 3).sum((0, 1))
        return {"w": new, "key": key, "name": name, "count": state["count"] + 1}

    state = {"w": normal(3), "key": jax.random.key(3), "name": "a", "count": 0}
    virtual = vnode.virtualize(step, virtual_nodes=2, in_axes=(None, 0, None), static_argnums=2)
    answer = vnode.check(virtual, (state, normal(12, 3), 2), {"name": "b", "scale": jnp.float32(2)}, devices=[1, 2])
    assert answer.ok, answer
    assert [leaf.path for leaf in answer.leaves if leaf.kind.startswith("float")] == ["w"]
    assert {leaf.path for leaf in answer.leaves} == {"w", "key", "count"}


def test_nnx_objects_stay_as_they_are() -> None:
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @vnode.nnx.virtualize(virtual_nodes=2, in_axes=(None, None, 0))
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    before = np.array(model.kernel[...])
    answer = vnode.check(step, (model, optimizer, normal(6, 3)), devices=[1, 2])
    assert answer.ok and any("kernel" in leaf.path for leaf in answer.leaves)
    assert np.array_equal(before, model.kernel[...])


def test_a_plain_step_that_does_not_fit_is_said(monkeypatch: Any) -> None:
    step = vnode.virtualize(batch_norm, virtual_nodes=4, recompute_budget=9.0)
    args = normal(6, 4), normal(16, 6)
    monkeypatch.setattr(plain, "reported_bytes", lambda device: 100)
    answer = vnode.check(step, args, devices=[1, 2])
    assert not answer.ok and answer.same_bits and not answer.wrong
    assert "there are 100 B" in answer.plain and "not compared with the plain step" in answer.summary
    assert "not proven" in str(answer)
    assert not vnode.check(step, args, devices=[1], plain=False).equal


def test_devices_and_arguments_that_are_none() -> None:
    step = vnode.virtualize(batch_norm, virtual_nodes=4)
    for devices in ([0], [1, 99], [True], []):
        with pytest.raises(vnode.PlacementError, match="cannot be checked on") as caught:
            vnode.check(step, (normal(6, 4), normal(16, 6)), devices=devices)
        assert (99 in devices) == ("'jax_num_cpu_devices', 99" in str(caught.value))
    with pytest.raises(TypeError, match="tuple"):
        vnode.check(step, normal(6, 4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_that_of_another_order(dtype: str) -> None:
    """Of sums in 64 random orders; not less, but up to ten times as much: a result is moved by a whole unit."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(512), dtype)

    def in_sequence(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.scan(lambda total, one: (total + one, None), jnp.zeros((), x.dtype), x)[0]]

    orders = jnp.stack([jax.random.permutation(jax.random.key(i), x) for i in range(64)])
    sums = np.asarray(jax.jit(jax.vmap(lambda x: in_sequence(x)[0]))(orders), np.float64)
    other = jax.jit(with_rounding_noise(in_sequence))
    moved = np.asarray([other(np.uint32(i), x)[0] for i in range(64)], np.float64)
    assert 0.5 < moved.std() / sums.std() < 10


def test_what_is_exact_is_not_rounded() -> None:
    """Counts, selections, sorted values, the largest one."""
    x = normal(50)
    exact = jax.jit(
        with_rounding_noise(
            lambda n, x: [(n > 2).astype(jnp.float32).sum(), n.sum(), jnp.where(n > 2, 1.0, 0.0), jnp.floor(n * 1.0)]
        )
    )
    n = jnp.arange(10.0)
    got = exact(np.uint32(1), n, x)
    assert [np.asarray(g).tolist() for g in got] == [7.0, 45.0, [0.0] * 3 + [1.0] * 7, list(range(10))]


def test_doctor(capsys: Any) -> None:
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"jax     {jax.__version__}" in said and "train_step: ok" in said
    assert "the same bits on 1, 3 and 8 cpu devices" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80


def test_doctor_in_the_signs_that_there_are(monkeypatch: Any) -> None:
    """It ended in UnicodeEncodeError where standard output is in ASCII."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert cli.main(["doctor", "--no-test"]) == 0
    out.flush()
    assert f"jax     {jax.__version__}" in out.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


def test_the_command_is_the_module() -> None:
    run = [sys.executable, "-m", "vnode", "--version"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == f"vnode {vnode.__version__}\n"
