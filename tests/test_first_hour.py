"""What people meet in their first hour: a refused step tried again, a path with `~`, a mistake that a message explains.

Knows the public interface. Must not know how anything is done. References: plain loops, and what a message must name.
"""

import functools
import json
import os
import traceback
import warnings
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


def train(folder: Path, steps: int, **options: Any) -> Any:
    step = vnode.virtualize(normalized, **{"virtual_nodes": 2, "recompute_budget": 1, **options}).on(ONE)
    return run(step, STATE, DATA, steps=steps, checkpoint=folder)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_the_remedy_of_a_refused_first_step_works_in_the_same_folder(tmp_path: Path, donated: Any) -> None:
    with pytest.raises(vnode.CouplingError):
        train(tmp_path, 4, coupling="error", donate_argnums=donated)
    result = train(tmp_path, 4, coupling={"BatchNorm": "exact"}, donate_argnums=donated)
    assert result.step == 4
    same(result.state, 4)


def test_a_checkpoint_from_before_the_first_step_is_of_no_kind_of_step(tmp_path: Path) -> None:
    """With ``steps=0`` there is a checkpoint; another number of nodes or another step may begin with it."""
    train(tmp_path, 0)
    result = train(tmp_path, 2, virtual_nodes=4)
    assert (result.resumed, result.step) == (0, 2)
    same(result.state, 2)
    with pytest.raises(vnode.elastic.CheckpointError, match="virtual_nodes: 4 then, 2 now"):
        train(tmp_path, 3)


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
    assert vnode.partition.Cache("~/kernels").folder == tmp_path / "kernels"
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
    told(vnode.VnodeError, lambda: go(training), "must return only metrics", "as in training")
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


# Messages, each by the mistake that it is for.


def descend(state: Any, batch: Any) -> Any:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grad}, {"loss": loss}


LINE: dict[str, Any] = {"w": np.ones(3, np.float32)}
BATCH: dict[str, Any] = {"x": np.ones((8, 3), np.float32)}


def step_of(fun: Any = descend, virtual_nodes: int = 2, **options: Any) -> Any:
    return vnode.virtualize(fun, virtual_nodes=virtual_nodes, **options).on(ONE)


def test_state_and_batch_the_other_way_round() -> None:
    swapped = ("KeyError: 'w'", "the first argument is state, the second batch")
    told(vnode.BatchError, lambda: step_of()(BATCH, LINE), "the two swapped", *swapped)
    told(vnode.BatchError, lambda: run(step_of(), BATCH, [LINE], steps=1), "the two swapped", *swapped)
    with pytest.raises(KeyError):  # wrong either way: the error is the step's own
        step_of()({"v": 1.0}, BATCH)


def test_leaves_that_are_no_arrays_are_named_where_they_are_in_the_way() -> None:
    step = step_of(lambda state, batch: (state, {"n": batch["x"].sum() + batch["name"]}))
    error = raised(lambda: step(LINE, {**BATCH, "name": "train"}))
    assert isinstance(error, TypeError)
    assert "batch['name'] is a str" in "".join(error.__notes__)
    step = step_of(lambda state, batch: (state, {"n": batch["x"].sum() * (2 if batch["name"] == "train" else 1)}))
    assert step(LINE, {**BATCH, "name": "train"})[1]["n"] == 48


def test_arguments_that_make_a_trace_fail_are_named() -> None:
    def decide(state: Any, batch: Any, train: bool) -> Any:
        return (descend(state, batch) if train else (state, {}))[0]

    def joined(state: Any, batch: Any) -> Any:
        return state, batch["x"] + batch["y"]

    error = raised(lambda: step_of(decide)(LINE, BATCH, True))
    assert "vnode.virtualize(..., static_argnames='train')" in "".join(error.__notes__)
    step_of(decide, static_argnames="train")(LINE, BATCH, True)  # the remedy
    error = raised(lambda: step_of(joined)(LINE, {**BATCH, "y": np.ones((4, 3))}))
    assert "batch['x'] has 8, batch['y'] has 4" in "".join(error.__notes__)


def test_a_step_that_does_not_use_the_batch_is_told() -> None:
    def warned(fun: Any, state: Any = LINE, placement: vnode.Placement | None = None) -> str:
        step = step_of(fun) if placement is None else step_of(fun).on(placement)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(state, BATCH)
        return "".join(str(each.message) for each in caught)

    assert "'forget' returns nothing" in warned(forget)
    assert "no result of 'decay' depends on the batch" in warned(decay)
    assert not warned(descend)
    groups = vnode.Placement(2, groups=[jax.devices()[:1], jax.devices()[1:2]])
    assert "no result of 'decay' depends on the batch" in warned(decay, placement=groups)
    counter = jax.new_ref(jnp.zeros(3))
    assert "no result of 'count' depends on the batch" in warned(count, counter)
    assert not warned(lambda state, batch: jax.debug.callback(lambda x: None, batch["x"].sum()))


def forget(state: Any, batch: Any) -> None:
    descend(state, batch)


def count(state: Any, batch: Any) -> None:
    state[...] += 1


def decay(state: Any, batch: Any) -> Any:
    return jax.tree.map(lambda w: 0.9 * w, state), {}


def test_usual_steps_of_nnx() -> None:
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    def update(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for virtualize in (vnode.nnx.virtualize, vnode.virtualize):
        usual = functools.partial(virtualize(update, virtual_nodes=2).on(ONE), model, optimizer, BATCH["x"])
        told(vnode.BatchError, usual, "in_axes=(None, None, 0) for model, optimizer, x")
    step = vnode.nnx.virtualize(update, virtual_nodes=2, in_axes=(None, None, 0)).on(ONE)
    step(model, optimizer, BATCH["x"])


def test_what_is_restored_and_from_where(tmp_path: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def update(model: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), grads))
        return {"loss": loss}

    step = vnode.nnx.virtualize(update, virtual_nodes=2).on(ONE)
    run(step, model, [BATCH["x"]] * 2, steps=2, checkpoint=tmp_path)
    other = nnx.Linear(3, 1, rngs=nnx.Rngs(1))
    error = raised(lambda: vnode.elastic.restore(tmp_path, like=other))
    assert "objects of flax.nnx (Linear)" in str(error)
    recipe = str(error).partition("filled here: ")[2].replace("(model,)", "(other,)")
    exec(recipe, {"nnx": nnx, "vnode": vnode, "folder": tmp_path, "other": other})  # as the message says
    np.testing.assert_array_equal(other.kernel[...], model.kernel[...])

    told(vnode.VnodeError, lambda: vnode.elastic.restore(tmp_path, like=nnx.Linear), "holds no arrays", "model.init")
    one = "one checkpoint, not a folder of checkpoints", f"{str(tmp_path)!r}"
    for action in (
        lambda: vnode.elastic.restore(tmp_path / "2"),
        lambda: vnode.elastic.restore(tmp_path / "2" / "default"),
        lambda: run(step, model, [BATCH["x"]] * 3, steps=3, checkpoint=tmp_path / "2"),
    ):
        told(vnode.elastic.CheckpointError, action, *one, f"restore({str(tmp_path)!r}, step=2)")


def test_steps_that_a_run_cannot_call() -> None:
    nnx = pytest.importorskip("flax.nnx")
    step = step_of(lambda state, batch, key: (state, {}))
    told(vnode.VnodeError, lambda: run(step, LINE, [BATCH], steps=1), "(state, batch)", "(state, batch, key)", "'key'")
    step, model = vnode.nnx.virtualize(lambda model, x: {}, virtual_nodes=2), nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    told(vnode.VnodeError, lambda: run(step, (model, model), [BATCH], steps=1), "(2 objects, and the batch)")
    run(step_of(lambda state, batch, rate=0.1: (state, {})), LINE, [BATCH], steps=1)


def test_dtypes_that_checkpoints_do_not_have_are_refused_before_the_first_step(tmp_path: Path) -> None:
    step = step_of(lambda state, batch: (state, {"n": batch["x"].sum()}))
    state = {"w": jnp.ones(3), "codes": jnp.ones(3, jnp.uint4)}
    told(vnode.VnodeError, lambda: run(step, state, [BATCH], steps=1, checkpoint=tmp_path), "state['codes']: uint4[3]")
    assert run(step, state, [BATCH], steps=1).step == 1


def test_machines_times_and_numbers_of_devices() -> None:
    from vnode.partition import search

    plan = search(descend, (LINE, BATCH), "v5e:2x2", virtual_nodes=2, budget=1)
    assert len(plan.machine.devices) == 4
    told(vnode.MachineError, lambda: search(descend, (LINE, BATCH), "a100x8"), "'a100x8'", "v5e:")
    told(vnode.PartitionError, lambda: search(descend, (LINE, BATCH), ONE), "Machine.here(devices)")  # pyright: ignore
    told(vnode.ProfileError, lambda: vnode.balance({}, 4), "measured times", "vnode.profile(step,")  # pyright: ignore
    told(vnode.PlacementError, lambda: step_of().on([1, 3]), "[jax.devices()[i] for i in", "the first of them")
    here = len(jax.devices())
    told(vnode.PlacementError, lambda: step_of().on(99), f"devices=99 was asked for, and jax.devices() has {here}")
    assert step_of().on(2).placement.devices == jax.devices()[:2]
    assert vnode.Placement(4, 2).devices == jax.devices()[:2]
    assert run(step_of(), LINE, [BATCH], steps=1, devices=1).state["w"].devices() == {*ONE}


# Warnings.


def test_idle_devices_and_padding_are_warned_about_once_at_the_users_line() -> None:
    def warnings_of(step: Any, size: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                step(LINE, {"x": np.ones((size, 3), np.float32)})
        assert all(w.category is vnode.VnodeWarning and w.filename == __file__ for w in caught)
        return [str(w.message) for w in caught]

    def on(nodes: int, devices: Any, **options: Any) -> Any:
        return vnode.virtualize(descend, virtual_nodes=nodes).on(devices, **options)

    (idle,) = warnings_of(on(2, 3), 8)
    assert idle.startswith("1 of 3 devices is idle: 'descend' has 2 virtual nodes.") and "step.on(2)" in idle
    (padding,) = warnings_of(on(8, 1), 9)
    assert padding.startswith(
        "7 of 16 examples that 'descend' computes are padding: 9 examples on 8 virtual nodes of 2"
    )
    for quiet, size in ((on(8, 1), 40), (on(8, 3), 25), (on(4, 2, counts=[4, 0]), 8)):
        assert not warnings_of(quiet, size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(on(2, 3), LINE, [BATCH], steps=1)
    assert [w.filename for w in caught] == [__file__]


# Data.


def test_a_list_with_other_values_is_noticed_and_may_grow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(lambda w, x: (w - x.mean(0), {}))
    run(step, jnp.ones(3), DATA[:2], steps=1, checkpoint=tmp_path)
    run(step, jnp.ones(3), DATA, steps=2, checkpoint=tmp_path)
    assert "other examples" not in caplog.text
    run(step, jnp.ones(3), [DATA[0], DATA[1] + 1, DATA[2]], steps=3, checkpoint=tmp_path)
    assert "other examples" in caplog.text


# How long a run is, who is told, and which checkpoint stays.


def test_epochs_say_how_long() -> None:
    step = step_of(lambda w, x: (w + x.mean(0), {}))
    batches = vnode.data.Batches(np.ones((10, 3), np.float32), batch_size=4)
    assert run(step, jnp.zeros(3), batches, epochs=3).step == 8  # of 4, which are filled from the next epoch
    result = run(step, jnp.zeros(3), DATA[:3], epochs=2)
    assert result.step == 6
    np.testing.assert_allclose(result.state, 2 * np.sum([d.mean(0) for d in DATA[:3]], 0), rtol=1e-5, atol=1e-6)
    told(ValueError, lambda: run(step, jnp.zeros(3), lambda i: DATA[0], epochs=2), "epochs=2", "give steps=")
    told(ValueError, lambda: run(step, jnp.zeros(3), batches, steps=1, epochs=1), "steps=1 or epochs=1, not both")
    told(ValueError, lambda: run(step, jnp.zeros(3), batches), "steps=..., or epochs=...")


def test_several_callbacks_and_the_pace_for_writers() -> None:
    seen: list[Any] = []
    lines: dict[int, Any] = {}
    run(
        step_of(),
        LINE,
        [BATCH] * 4,
        steps=4,
        callback=[lambda n, m: seen.append(n), lambda n, m, s: seen.append(s["w"].shape)],
        writers=[lambda n, m: lines.update({n: m})],
        peak_flops=1e12,
    )
    assert seen == [0, (3,), 1, (3,), 2, (3,), 3, (3,)]
    assert {"loss", "time/seconds"} == {*lines[0]} and lines[0]["time/seconds"] < lines[3]["time/seconds"]
    seconds = lines[3]["time/seconds"] - lines[2]["time/seconds"]
    assert lines[3]["time/examples_per_second"] == pytest.approx(8 / seconds)
    operations = step_of().explain(LINE, BATCH).flops
    assert lines[3]["time/utilization"] == pytest.approx(operations / seconds / 1e12)
    told(ValueError, lambda: run(step_of(), LINE, [BATCH], steps=1, callback=[3]), "callback must be callable")


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    """Of a metric that falls and rises: a parabola around step 3, by a state that counts steps."""
    step = step_of(lambda n, x: (n + 1, {"mean": x.mean()}))
    options: dict[str, Any] = {
        "checkpoint": tmp_path,
        "checkpoint_every": 1,
        "checkpoints_kept": 2,
        "evaluate": lambda n: {"error": (n - 3) ** 2},
        "evaluate_every": 1,
        "best_metric": "error",
    }

    def folders() -> set[str]:
        return {entry for entry in os.listdir(tmp_path) if entry.isdigit()}

    result = run(step, jnp.float32(0), DATA * 3, steps=6, **options)
    assert result.best == (3, 0.0) and folders() == {"3", "5", "6"}
    assert float(vnode.elastic.restore(tmp_path, like=jnp.float32(0), step=3)) == 3
    result = run(step, jnp.float32(0), DATA * 3, steps=9, **options)
    assert (result.resumed, result.best) == (6, (3, 0.0)) and folders() == {"3", "8", "9"}
    result = run(
        step, jnp.float32(0), DATA * 3, steps=10, **{**options, "best_mode": "max", "best_metric": "evaluate/error"}
    )
    assert result.best == (10, 49.0)
    told(
        vnode.VnodeError,
        lambda: run(step, jnp.float32(0), DATA * 3, steps=11, **{**options, "best_metric": "f1"}),
        "error",
    )
    told(ValueError, lambda: run(step, jnp.float32(0), DATA, steps=1, best_metric="error"), "without evaluate")


def test_a_run_leaves_orbaxs_reports_out_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run(step_of(), LINE, [BATCH], steps=1, checkpoint=tmp_path)
    assert "checkpoint of step 1" in caplog.text
    assert not [record for record in caplog.records if record.name == "absl"]


@pytest.mark.parametrize(
    "name", ["vnode", "vnode.data", "vnode.elastic", "vnode.partition", "vnode.operators", "vnode.nnx"]
)
def test_dir_shows_public_names(name: str) -> None:
    module = functools.reduce(getattr, name.split(".")[1:], vnode)
    shown = dir(module)
    assert {*module.__all__} <= {*shown} and not [
        each for each in shown if each.startswith("_") and each != "__version__"
    ]


def test_explain_takes_arguments_as_check_and_fit_do() -> None:
    step = step_of()
    together, apart = vnode.explain(step, (LINE, BATCH)), vnode.explain(step, LINE, BATCH)
    assert str(together) == str(apart) == str(step.explain(LINE, BATCH))
    assert vnode.fit(step, (LINE, BATCH), devices=1, memory="1GiB").smallest == {"cpu:1": 1}
