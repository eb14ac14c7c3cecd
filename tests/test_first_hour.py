"""What people meet in their first hour: a refused step tried again, a path with `~`, a mistake that a message explains.

Knows the public interface. Must not know how anything is done. References: plain loops, and what a message must name.
"""

import json
import os
import traceback
from collections.abc import Callable, Iterator
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
        run(
            vnode.virtualize(normalized, coupling="error", **options).on(ONE), STATE, DATA, steps=4, checkpoint=tmp_path
        )
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
    """With ``steps=0`` there is a checkpoint; another number of nodes or another step may begin with it."""
    run(
        vnode.virtualize(normalized, virtual_nodes=2, recompute_budget=1).on(ONE),
        STATE,
        DATA,
        steps=0,
        checkpoint=tmp_path,
    )
    result = run(
        vnode.virtualize(normalized, virtual_nodes=4, recompute_budget=1).on(ONE),
        STATE,
        DATA,
        steps=2,
        checkpoint=tmp_path,
    )
    assert (result.resumed, result.step) == (0, 2)
    same(result.state, 2)
    with pytest.raises(vnode.elastic.CheckpointError, match="virtual_nodes: 4 then, 2 now"):
        run(
            vnode.virtualize(normalized, virtual_nodes=2, recompute_budget=1).on(ONE),
            STATE,
            DATA,
            steps=3,
            checkpoint=tmp_path,
        )


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


# What a run is given.


def told(error: type[Exception], action: Any, *words: str) -> None:
    """The message of what an action raises has some words, in order."""
    with pytest.raises(error) as caught:
        action()
    said, start = str(caught.value), 0
    for word in words:
        assert word in said[start:], f"{word!r} is not in, or not in this order: {said}"
        start = said.index(word, start) + len(word)


def test_evaluate_is_a_function_of_the_state_or_an_evaluation() -> None:
    step = vnode.virtualize(lambda state, batch: (state, {"loss": batch.mean()}), virtual_nodes=2).on(ONE)
    error = vnode.virtualize(lambda state, batch: {"loss": batch.mean()}, virtual_nodes=2).on(ONE)

    def go(evaluate: Any) -> Any:
        return run(step, STATE, DATA, steps=1, evaluate=evaluate)

    def two(state: Any, batch: Any) -> Any:
        raise AssertionError("is not called")

    told(vnode.VnodeError, lambda: go(error), "is a virtualized step", "vnode.elastic.Evaluation(step,")
    told(ValueError, lambda: go(two), "evaluate=two", "with the state alone", "batch", "vnode.elastic.Evaluation(step,")
    training = vnode.elastic.Evaluation(step, DATA)
    told(vnode.VnodeError, lambda: go(training), "must return metrics alone", "as training does")
    told(vnode.VnodeError, lambda: vnode.elastic.Evaluation(two, DATA), "two is not virtualized")
    assert go(vnode.elastic.Evaluation(error, DATA)).evaluations[0][1]["loss"] == pytest.approx(np.mean(DATA), rel=1e-4)
    assert go(lambda state, factor=3: {"three": factor}).evaluations == [(1, {"three": 3})]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: {**s, "a": s["a"][:, :3]}, ["state['a'] was float32[3,4]", "float32[3,3]"]),
        (lambda s: {**s, "b": s["b"].astype(jnp.bfloat16)}, ["state['b'] was float32[4,1]", "bfloat16[4,1]"]),
        (lambda s: {**s, "n": s["n"] + 0.5}, ["state['n'] was int32[], and is float32[]"]),
        (lambda s: {**s, "c": s["a"]}, ["state['c'] is new, float32[3,4]"]),
        (lambda s: {"a": s["a"], "n": s["n"]}, ["state['b'] was float32[4,1], and is gone"]),
        (lambda s: {**s, "n": (s["n"],)}, ["state['n'] was int32[], and is gone", "state['n'][0] is new"]),
        (lambda s: {**s, "t": [*s["t"]]}, ["a tuple in it is now a list"]),
    ],
)
def test_a_state_keeps_its_types(change: Any, words: list[str]) -> None:
    """As in `jax.lax.scan`; a Python number may become an array of its type."""
    step = vnode.virtualize(lambda s, x: (change({**s, "n": s["n"] + 1}), {"mean": x.mean()}), virtual_nodes=2)
    state = {**STATE, "n": 0, "t": (np.float32(1),)}
    told(vnode.VnodeError, lambda: run(step.on(ONE), state, DATA, steps=3), "jax.lax.scan", *words, "What to do")


def test_a_state_may_begin_with_numbers_of_python_and_numpy() -> None:
    step = vnode.virtualize(lambda s, x: ({"n": s["n"] + 1, "w": s["w"] * 0.5}, {"mean": x.mean()}), virtual_nodes=2)
    result = run(step.on(ONE), {"n": 0, "w": np.float64(8)}, DATA, steps=3)
    assert (int(result.state["n"]), float(result.state["w"])) == (3, 1.0)


# Errors of the user's own code.


def frames(error: BaseException) -> list[str]:
    """The files of the frames of an error, shortened."""
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


def raised(action: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def mistaken(state: Any, batch: Any) -> Any:
    if batch["x"].sum() > 0:
        return state, {"loss": 0.0}
    return state, {"loss": 1.0}


@pytest.fixture
def filtering() -> Iterator[Callable[[str], None]]:
    before = jax.config.jax_traceback_filtering
    yield lambda mode: jax.config.update("jax_traceback_filtering", mode)
    jax.config.update("jax_traceback_filtering", before)


def test_the_users_own_errors_show_the_users_frames_and_names_as_under_jit(filtering: Callable[[str], None]) -> None:
    filtering("auto")
    state, batch = {"w": jnp.ones(3), "v": jnp.ones(2)}, {"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.float32)}
    step = vnode.virtualize(mistaken, virtual_nodes=2).on(ONE)
    plain = raised(lambda: jax.jit(mistaken)(state, batch))
    for action in (
        lambda: step(state, batch),
        lambda: step.explain(state, batch),
        lambda: jax.jit(step)(state, batch),
        lambda: run(step, state, [batch], steps=1),
    ):
        error = raised(action)
        assert str(error) == str(plain) and "the argument batch['x']" in str(error)
        assert {*frames(error)} == {Path(__file__).name}
        assert any("JAX_TRACEBACK_FILTERING" in note for note in error.__notes__)
    filtering("off")
    assert {"virtual.py", "tracing.py"} <= {*frames(raised(lambda: step(state, batch)))}
    filtering("tracebackhide")
    error = raised(lambda: step(state, batch))
    hidden = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "__tracebackhide__" in frame.f_locals]
    assert {"virtual.py", "tracing.py"} <= {Path(frame.f_code.co_filename).name for frame in hidden}
    assert not any(frame.f_code.co_filename == __file__ for frame in hidden)


def test_own_errors_and_those_of_data_and_callbacks_show_the_users_frames(filtering: Callable[[str], None]) -> None:
    filtering("auto")
    step = vnode.virtualize(lambda w, x: (w - x.mean(0), {}), virtual_nodes=2).on(ONE)

    def data(number: int) -> Any:
        raise KeyError("no such file")

    def callback(number: int, metrics: Any) -> None:
        raise KeyError("no such metric")

    def both(error: BaseException) -> list[str]:
        return frames(error) + (frames(error.__context__) if error.__context__ else [])

    for action in (
        lambda: step(np.ones(3), np.float32(1)),
        lambda: vnode.virtualize(step, virtual_nodes=0),
        lambda: run(step, jnp.ones(3), data, steps=1),
        lambda: run(step, jnp.ones(3), DATA, steps=1, callback=callback),
    ):
        error = raised(action)
        assert not {"run.py", "driver.py", "virtual.py", "executor.py", "transform.py", "prefetch.py"} & {*both(error)}
        noted = any("JAX_TRACEBACK_FILTERING" in note for note in getattr(error, "__notes__", ()))
        assert noted or isinstance(error, vnode.VnodeError)
