"""What people meet in their first hour: a refused step tried again, a path with `~`, a mistake that a message explains.

Knows the public interface. Must not know how anything is done. References: plain loops, and what a message must name.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from vnode.elastic import JsonLines, run

pytestmark = pytest.mark.quickly

ONE = jax.devices()[:1]


def normalized(state: Any, batch: Any) -> Any:
    """Two layers that are normalized over the batch: their statistics take passes of their own."""

    def loss_of(w: Any) -> jax.Array:
        h = batch
        with jax.named_scope("BatchNorm"):
            h = h @ w["a"]
            h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
        return jnp.mean((jnp.tanh(h) @ w["b"]) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grad), {"loss": loss}


STATE = {"a": np.eye(3, 4, dtype=np.float32), "b": np.ones((4, 1), np.float32)}
DATA = [np.random.default_rng(t).standard_normal((8, 3)).astype(np.float32) for t in range(4)]


def plain(steps: int) -> Any:
    """The state after the step as written."""
    state = STATE
    for batch in DATA[:steps]:
        state, _ = jax.jit(normalized)(state, batch)
    return state


def same(state: Any, steps: int) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state, plain(steps))


# A run that has made no step.


@pytest.mark.parametrize("donated", [(), (0,)])
def test_the_remedy_of_a_refused_first_step_works_in_the_same_folder(tmp_path: Path, donated: Any) -> None:
    options: dict[str, Any] = {"virtual_nodes": 2, "donate_argnums": donated}
    with pytest.raises(vnode.CouplingError):
        run(vnode.virtualize(normalized, coupling="error", **options).on(ONE), STATE, DATA, steps=4, checkpoint=tmp_path)
    result = run(
        vnode.virtualize(normalized, coupling={"BatchNorm": "exact"}, recompute_budget=1, **options).on(ONE),
        STATE,
        DATA,
        steps=4,
        checkpoint=tmp_path,
    )
    assert result.step == 4
    same(result.state, 4)


def test_a_checkpoint_from_before_the_first_step_is_of_no_kind_of_step(tmp_path: Path) -> None:
    """With ``steps=0`` there is a checkpoint; another number of nodes, other data and another step may begin with it."""
    run(vnode.virtualize(normalized, virtual_nodes=2, recompute_budget=1).on(ONE), STATE, DATA, steps=0, checkpoint=tmp_path)
    result = run(vnode.virtualize(normalized, virtual_nodes=4, recompute_budget=1).on(ONE), STATE, DATA, steps=2, checkpoint=tmp_path)
    assert (result.resumed, result.step) == (0, 2)
    same(result.state, 2)
    with pytest.raises(vnode.elastic.CheckpointError, match="virtual_nodes: 4 then, 2 now"):
        run(vnode.virtualize(normalized, virtual_nodes=2, recompute_budget=1).on(ONE), STATE, DATA, steps=3, checkpoint=tmp_path)


# Paths.


def test_a_tilde_is_the_home_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    step = vnode.virtualize(normalized, virtual_nodes=2, recompute_budget=1).on(ONE)
    with JsonLines("~/logs/metrics.jsonl") as writer:
        run(step, STATE, DATA, steps=1, checkpoint="~/runs", writers=[writer])
    same(vnode.elastic.restore("~/runs", like=STATE), 1)
    assert json.loads((tmp_path / "logs" / "metrics.jsonl").read_text())["step"] == 0
    profiles = vnode.profile(step, (STATE, DATA[0]), ONE, steps=1, nodes=(1,), path="~/times.json")
    assert vnode.profile(step, (STATE, DATA[0]), ONE, path="~/times.json") == profiles
    profiles.save("~/again.json")
    assert profiles.load("~/again.json") == profiles
    assert {"runs", "logs", "times.json", "again.json"} == set(os.listdir(tmp_path))
