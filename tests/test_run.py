"""What is asked of a run is done or refused, what identifies it is noticed, and nothing is lost when it ends.

Knows the public interface of `vnode.elastic` and `vnode.data`. Must not know the driver. References: a bare loop on one
device, NumPy, the files that were written.
"""

import functools
import json
import logging
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.errors import JaxRuntimeError

import vnode
from tests.rounding import assert_same
from tests.test_elastic import BATCHES, DATA, STEPS, check, initial, interrupt, step
from vnode import threads
from vnode.analysis.fingerprint import fingerprint
from vnode.elastic import Evaluation, JsonLines, TensorBoard, run
from vnode.elastic.driver import AHEAD
from vnode.elastic.run_identity import compare, identity
from vnode.elastic.signals import Stop
from vnode.errors import BatchError, CheckpointError, PlacementError, VnodeError
from vnode.placement.host_copy import HostCopy

pytestmark = pytest.mark.quickly  # as `tests.test_elastic`, whose step is compiled once for both

ALONE = step.on(jax.devices()[:1])


def mean_step(rate: float = 0.1, **options: Any) -> Any:
    """A step that is quick to compile: linear regression, on one device."""

    def descend(w: Any, batch: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(w)
        return w - rate * grad, {"loss": loss}

    return vnode.virtualize(descend, **{"virtual_nodes": 2} | options).on(jax.devices()[:1])


SMALL = mean_step()
WEIGHTS = np.ones(4, np.float32)


def bare(steps: int, batch: Callable[[int], Any] = BATCHES.batch) -> Any:
    """The state after a bare loop."""
    w = jnp.asarray(WEIGHTS)
    for number in range(steps):
        w, _ = SMALL(w, batch(number))
    return w


# Data.


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_one_buffer_filled_again(prefetch: int) -> None:
    """Data may fill and return the same arrays: in a function, in a sequence, and as examples of `Batches`."""
    buffer = {"x": np.zeros((16, 4), np.float32), "y": np.zeros(16, np.float32)}

    def fill(batch: Any) -> Any:
        for name in buffer:
            buffer[name][:] = batch[name]
        return buffer

    class Sequence:
        def __getitem__(self, number: int) -> Any:
            return fill(BATCHES.batch(number))

    class Examples:
        def __len__(self) -> int:
            return 37

        def take(self, rows: np.ndarray) -> Any:
            taken = fill({name: np.resize(DATA[name][rows], buffer[name].shape) for name in buffer})
            return {name: taken[name][: len(rows)] for name in taken}

    for data in (lambda n: fill(BATCHES.batch(n)), Sequence(), vnode.data.Batches(Examples(), 16, seed=3)):
        result = run(SMALL, WEIGHTS, data, steps=7, prefetch=prefetch)
        np.testing.assert_array_equal(result.state, bare(7))


def test_last_batch_kept() -> None:
    """`last="keep"`: each example once in an epoch, the last batch smaller."""
    batches = vnode.data.Batches({"x": np.arange(10)}, 4, last="keep", seed=1)
    assert batches.order.steps_per_epoch == 3
    assert [len(batches.batch(n)["x"]) for n in range(6)] == [4, 4, 2, 4, 4, 2]
    for epoch in (0, 1):
        assert sorted(np.concatenate([batches.batch(3 * epoch + n)["x"] for n in range(3)])) == list(range(10))
    assert batches.load(2, vnode.Placement(4, jax.devices()[:3]))["x"].shape == (2,)


# What is wrong is refused, and named.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -3}, "steps must be a whole number, at least 0, not -3"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"start": 4}, "start=4 is beyond steps=3"),
        ({"keep_every": 0}, "keep_every"),
        ({"prefetch": -1}, "prefetch"),
        ({"prefetch": None}, "prefetch"),
        ({"checkpoint_every": 2}, "checkpoint_every does nothing without checkpoint"),
        ({"checkpoint_seconds": 2}, "checkpoint_seconds does nothing without checkpoint"),
        ({"checkpoints_kept": 2}, "checkpoints_kept does nothing without checkpoint"),
        ({"checkpoints_kept": 0}, "checkpoints_kept must be a whole number, at least 1"),
        ({"checkpoint": "run", "checkpoint_seconds": math.nan}, "checkpoint_seconds must be a positive time"),
        ({"metrics_every": 0}, "metrics_every"),
        ({"history_kept": -1}, "history_kept"),
        ({"evaluate_every": 2}, "evaluate_every does nothing without evaluate"),
        ({"evaluate": 3}, "evaluate must be callable"),
        ({"callback": 3}, "callback must be callable"),
        ({"writers": print}, "writers must be a list"),
        ({"on_nan": "panic"}, "on_nan"),
        ({"on_nan": "stop", "keep_every": None}, "it needs keep_every"),
        ({"compile_ahead": "later"}, "compile_ahead"),
        ({"progress": "yes"}, "progress"),
    ],
    ids=str,
)
def test_refused_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(SMALL, WEIGHTS, BATCHES, **{"steps": 3} | wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"batch_size": 38}, BatchError, "37 examples are too few for a batch of 38"),
        ({"batch_size": 2.0}, ValueError, "batch_size must be a whole number"),
        ({"batch_size": True}, ValueError, "batch_size must be a whole number"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 0.5}, ValueError, "seed"),
        ({"shuffle": "no"}, ValueError, "shuffle must be True or False"),
        ({"last": "pad"}, ValueError, "last"),
        ({"data": {"x": np.array([[1], [1, 2]], object)}}, BatchError, r"\['x'\] of the data set has dtype object"),
        ({"data": {"name": np.array(["a", "b"])}}, BatchError, r"\['name'\] of the data set has dtype <U1"),
    ],
    ids=str,
)
def test_refused_batches(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vnode.data.Batches(**{"data": DATA, "batch_size": 2} | wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": SMALL.__wrapped__}, "descend is not virtualized"),
        ({"step": jax.jit(SMALL.__wrapped__)}, "not virtualized"),
        ({"data": DATA}, r"this is one dict.*\n.*\['x'\]: shape \(37, 4\)"),
        ({"data": DATA["x"]}, "this is one ndarray"),
        ({"data": [BATCHES.batch(0)]}, "batches for 1 of 3 steps"),
        ({"data": iter([])}, "no batches by step number"),
        (
            {"data": lambda n: {"x": np.array([[1], [1, 2]], object)}},
            r"\['x'\] of the batch of step 0 has dtype object",
        ),
        ({"step": vnode.virtualize(lambda w, b: ({"loss": b["x"].sum()}, w), virtual_nodes=1)}, "its state first"),
        ({"step": vnode.virtualize(lambda w, b: (w, b["x"].sum(), 0), virtual_nodes=1)}, "its state and its metrics"),
        (
            {"state": {"w": jax.jit(lambda w: w, donate_argnums=0)}},
            r"(?s)deleted.*\n  state\['w'\]\n.*result\.state",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_use(change: dict[str, Any], message: str) -> None:
    """What is passed in the wrong place, or in the wrong form, is named, before or at the first step."""
    if isinstance(change.get("state"), dict):
        gone = jnp.ones(4)
        change["state"]["w"](gone)
        change = {"state": {"w": gone}}
    arguments = {"step": SMALL, "state": WEIGHTS, "data": BATCHES} | change
    with pytest.raises(VnodeError, match=message):
        run(*arguments.values(), steps=3, prefetch=0)


def test_ragged_examples_are_named() -> None:
    with pytest.raises(BatchError, match=r"different shapes.*\['x'\]"):
        vnode.data.Batches([{"x": np.ones(2)}, {"x": np.ones(3)}], 2).batch(0)


@pytest.mark.parametrize(
    ("missing", "extra", "use"),
    [
        ("orbax", "elastic", "vnode.elastic.run(step, 0.0, [], steps=0, checkpoint='x')"),
        ("rich", "show", "vnode.elastic.run(step, 0.0, [], steps=0, progress=True)"),
        ("tensorboardX", "tensorboard", "vnode.elastic.TensorBoard('x')"),
        ("grain", "grain", "vnode.grain"),
        ("flax", "flax", "vnode.nnx"),
        ("orbax", "elastic", "vnode.elastic.restore('x')"),
    ],
)
def test_missing_extras(missing: str, extra: str, use: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What needs a library that is not there says how to install it."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in sys.modules if n.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("vnode.elastic.checkpoints", "vnode.elastic.reader", "vnode.data.grain", "vnode.integrations.nnx"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"pip install 'vnode\[{extra}\]'"):
        exec(use, {"vnode": vnode, "step": SMALL})


# Who goes on with whose checkpoint.


def resumed(folder: Path, step: Any = SMALL, data: Any = BATCHES, steps: int = 6) -> Any:
    return run(step, WEIGHTS, data, steps=steps, checkpoint=folder)


@pytest.mark.parametrize(
    ("step", "difference"),
    [
        (mean_step(virtual_nodes=4), "virtual_nodes: 2 then, 4 now"),
        (mean_step(lanes=1), "nodes in a lane: 1 then, 2 now"),
        (mean_step(reduction="fast"), "reduction: 'invariant' then, 'fast' now"),
        (mean_step(coupling="local"), "coupling: 'exact' then, 'local' now"),
        (mean_step(accumulate_dtype=jnp.bfloat16), "accumulate_dtype: None then, 'bfloat16' now"),
    ],
)
def test_another_kind_of_step_is_refused(step: Any, difference: str, tmp_path: Path) -> None:
    resumed(tmp_path, steps=2)
    for steps in (2, 6):  # if there is nothing left to do, too
        with pytest.raises(CheckpointError, match=difference):
            resumed(tmp_path, step, steps=steps)


def test_warnings_of_another_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A changed learning rate or example is said, with the line; the same program on other devices is not."""
    resumed(tmp_path, steps=2)
    caplog.set_level(logging.INFO, "vnode")
    resumed(tmp_path, mean_step().on(jax.devices()[:2]), steps=3)
    assert "resumed from step 2" in caplog.text
    assert not [r for r in caplog.records if r.name == "vnode" and r.levelno >= logging.WARNING]
    resumed(tmp_path, mean_step(0.25), steps=3)  # which returns what another step made
    assert "step with another computation" in caplog.text
    caplog.clear()
    resumed(tmp_path, mean_step(0.25), steps=4)
    assert "step with another computation" in caplog.text
    assert "now:  mul(0.25, float32[4]) -> float32[4] at " in caplog.text and "test_run.py:" in caplog.text
    assert "then: mul(0.1, float32[4])" in caplog.text
    caplog.clear()
    resumed(tmp_path, mean_step(0.25), vnode.data.Batches(DATA | {"y": DATA["y"] * 2}, 16, seed=3), steps=5)
    assert "other examples" in caplog.text and "computes" not in caplog.text
    caplog.clear()
    resumed(tmp_path, mean_step(0.25), BATCHES.batch, steps=6)
    assert "do not describe themselves" in caplog.text


@pytest.mark.parametrize(("nodes", "differs"), [(4, False), (8, True)])
def test_warnings_of_another_order_of_sums(nodes: int, differs: bool) -> None:
    """Earlier versions added in a tree of two branches everywhere, and did not say so: of four nodes it is the same."""
    run = identity(mean_step(virtual_nodes=nodes), BATCHES, WEIGHTS, None)
    before = {name: fact for name, fact in run.facts.items() if name != "order of sums"}
    assert differs == any("adds in another order" in warning for warning in compare(before, run, "checkpoint 3"))
    assert not compare(run.facts, run, "checkpoint 3")


def test_fingerprints() -> None:
    """Equal in another process and for equal functions; different for any number, wiring or constant."""

    def loop(x: Any, factor: float = 1.5, swap: bool = False, table: Any = (0, 1, 2)) -> Any:
        first, second = jnp.sin(x), jnp.cos(x)
        out, _ = jax.lax.scan(lambda c, _: (c * factor, None), first - second, length=3)
        return jax.jit(lambda y: y + np.array(table))(second - first if swap else out), first - second

    def digest(**changes: Any) -> str:
        return fingerprint(functools.partial(loop, **changes), jax.ShapeDtypeStruct((3,), jnp.float32)).digest

    changed = [{}, {"factor": 1.25}, {"swap": True}, {"table": (0, 1, 3)}]
    assert len({digest(**change) for change in changed}) == 4
    assert digest() == digest(factor=1.5, table=(0, 1, 2))
    code = "import jax, numpy, jax.numpy as jnp; from vnode.analysis.fingerprint import fingerprint; "
    code += "print(fingerprint(lambda x: jnp.sin(x) * 3 + numpy.arange(3), jnp.ones(3)).digest)"
    flags = {"XLA_FLAGS": "", "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(vnode.__file__).parents[1])}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | flags)
    here = fingerprint(lambda x: jnp.sin(x) * 3 + np.arange(3), jnp.ones(3)).digest
    assert there.stdout.strip() == here, there.stderr


def test_fingerprints_of_host_functions() -> None:
    """The same after calls that change what the function counts; another for other code, or other numbers around it."""

    def scaling(by: float, power: int = 1) -> Any:
        calls = 0

        def scaled(x: Any) -> Any:
            nonlocal calls
            calls += 1
            return np.asarray(x) * by**power

        return scaled

    def halved(x: Any) -> Any:
        return helper(x) / np.float32(2)

    def helper(x: Any) -> Any:
        return np.asarray(x)

    def digest(host: Any, call: Any = jax.pure_callback) -> str:
        shape = jax.ShapeDtypeStruct((3,), jnp.float32)
        return fingerprint(lambda x: call(host, shape, x), shape).digest

    scaled = scaling(2.0)
    before = digest(scaled)
    for _ in range(20):  # Python specializes the code of what is called often
        scaled(np.ones(3, np.float32))
    assert digest(scaled) == before == digest(scaling(2.0))
    others = [
        scaling(3.0),
        scaling(2.0, 2),
        halved,
        np.sin,
        np.cos,
        functools.partial(np.add, 1),
        functools.partial(np.add, 2),
    ]
    assert len({before, *map(digest, others)}) == 1 + len(others)
    told = [fingerprint(lambda x, h=h: jax.debug.callback(h, x), jnp.ones(3)).digest for h in (scaling(1), scaling(2))]
    assert told[0] == told[1]  # it computes nothing, and may write to a file of its own process


def test_steps_and_checkpoints(tmp_path: Path) -> None:
    """A run cannot end before its checkpoint, nor begin after it."""
    resumed(tmp_path, steps=4)
    with pytest.raises(CheckpointError, match=r"checkpoint 4 in .* is beyond steps=3"):
        resumed(tmp_path, steps=3)
    with pytest.raises(CheckpointError, match="is before start=5"):
        run(SMALL, WEIGHTS, BATCHES, steps=6, start=5, checkpoint=tmp_path)
    assert resumed(tmp_path, steps=4).step == 4


def test_start() -> None:
    """A loop that was begun by hand is gone on with."""
    result = run(SMALL, bare(3), BATCHES, steps=7, start=3)
    np.testing.assert_array_equal(result.state, bare(7))
    assert [number for number, _ in result.history] == [3, 4, 5, 6]


def test_number_of_nodes_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """With "auto" a run that resumes has the number of nodes that it had, though another one would fit."""
    auto = functools.partial(vnode.virtualize, SMALL.__wrapped__, virtual_nodes="auto", memory="1GiB")
    resumed(tmp_path, mean_step(virtual_nodes=4), steps=2)
    resumed(tmp_path, auto(), steps=4)
    resumed(tmp_path, mean_step(virtual_nodes=4), steps=5)


def test_lanes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """With lanes="auto", too; who asks for others is refused."""
    auto = functools.partial(vnode.virtualize, SMALL.__wrapped__, virtual_nodes="auto", memory="1GiB")
    resumed(tmp_path, mean_step(virtual_nodes=4, lanes=2), steps=2)
    resumed(tmp_path, auto(lanes="auto"), steps=4)
    resumed(tmp_path, mean_step(virtual_nodes=4, lanes=2), steps=5)
    with pytest.raises(CheckpointError, match="lane"):
        resumed(tmp_path, auto(), steps=6)


def test_the_copy_on_the_host_is_saved_when_no_device_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last copy becomes a checkpoint, by way of the CPU, from which another run goes on.

    The first fake device plays the CPU; nothing can be put on the others once they are dead.
    """
    devices, put, dead = jax.devices()[1:4], HostCopy.place_on, set()

    def batch(number: int) -> Any:
        if number == 7 and not dead:
            dead.update(devices)
            raise JaxRuntimeError("INTERNAL: the device is gone")
        return BATCHES.batch(number)

    def on(copy: HostCopy, placement: vnode.Placement) -> Any:
        if dead & set(placement.devices):
            raise JaxRuntimeError("INTERNAL: the device is gone")
        return put(copy, placement)

    monkeypatch.setattr(HostCopy, "place_on", on)
    options: dict[str, Any] = {"steps": 9, "keep_every": 4, "checkpoint": tmp_path}
    with pytest.raises(PlacementError, match="no device is left") as caught:
        run(SMALL.on(devices), WEIGHTS, batch, alive=lambda d: d not in dead, **options)
    assert caught.value.__notes__ == ["The state after 4 steps was saved before; the same call goes on from there."]
    result = run(SMALL, WEIGHTS, batch, **options)
    assert result.resumed == 4
    np.testing.assert_array_equal(result.state, bare(9))


# Callbacks, writers, evaluations.


@pytest.mark.parametrize("steps", [0, 3, STEPS - 2])
def test_stop_by_a_callback(steps: int) -> None:
    """True ends the run: at once with the state, a fixed number of steps later without."""
    states = {}

    def with_state(number: int, metrics: Any, state: Any) -> Any:
        states[number] = np.asarray(state)
        return np.bool_(number == steps)

    result = run(SMALL, WEIGHTS, BATCHES, steps=STEPS, callback=with_state)
    assert (result.step, result.stopped) == (steps + 1, True)
    assert f"asked for it at step {steps}" in result.reason
    for number, state in states.items():
        np.testing.assert_array_equal(state, bare(number + 1))
    for slow in (False, True):  # however far the loop has got

        def callback(number: int, metrics: Any, slow: bool = slow) -> Any:
            time.sleep(0.01 * slow)
            return number == steps or "anything else is no request"

        result = run(SMALL, WEIGHTS, BATCHES, steps=STEPS, callback=callback)
        assert result.step == min(steps + 1 + AHEAD, STEPS)
        np.testing.assert_array_equal(result.state, bare(result.step))


def test_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An evaluation is the mean over its examples; it follows the devices, is written, and may end the run."""

    def error(w: Any, batch: Any) -> Any:
        return {"mse": jnp.mean((batch["x"] @ w - batch["y"]) ** 2)}

    held_out = vnode.data.Batches(DATA, 16, shuffle=False, last="keep")
    evaluation = Evaluation(vnode.virtualize(error, virtual_nodes=3), held_out)
    told = []

    def callback(number: int, metrics: Any) -> bool:
        told.append(number)
        return number == 9

    caplog.set_level(logging.INFO, "vnode")
    with JsonLines(tmp_path / "metrics.jsonl") as write:
        result = run(
            SMALL,
            WEIGHTS,
            BATCHES,
            steps=STEPS,
            devices={4: jax.devices()[:2]}.get,
            evaluate=evaluation,
            evaluate_every=3,
            evaluate_callback=callback,
            writers=[write],
        )
    assert result.step == 9
    assert [number for number, _ in result.evaluations] == told == [3, 6, 9]
    for number, metrics in result.evaluations:
        weights = jnp.asarray(bare(number))
        assert_same(
            np.float32(metrics["mse"]), lambda w, x, y: jnp.mean((x @ w - y) ** 2), weights, DATA["x"], DATA["y"]
        )
    assert "evaluated after 6 steps: mse" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["evaluate/mse"] for line in lines if "loss" not in line} == {
        number: float(metrics["mse"]) for number, metrics in result.evaluations
    }
    assert {line["step"]: line["loss"] for line in lines if "loss" in line} == {
        number: float(metrics["loss"]) for number, metrics in result.history
    }
    assert str(result).startswith("Result(step=9, stopped: the callback asked") and len(repr(result)) < 200
    plain = run(SMALL, WEIGHTS, BATCHES, steps=2, evaluate=lambda w: {"norm": jnp.sum(w)})
    assert [n for n, _ in plain.evaluations] == [2]
    with pytest.raises(BatchError, match="count twice"):
        Evaluation(SMALL, BATCHES)
    with pytest.raises(VnodeError, match="donated the state"):
        run(SMALL, WEIGHTS, BATCHES, steps=1, evaluate=lambda w: w.delete() or {}, evaluate_every=1)


def test_json_lines(tmp_path: Path) -> None:
    """What is no number in JSON becomes a string, arrays lists; a torn line goes when the file is opened again."""
    path = tmp_path / "new" / "metrics.jsonl"
    values = {"nan": math.nan, "inf": -math.inf, "array": np.array([1.5, np.inf]), "int": 3, "true": True}
    with JsonLines(path) as write:
        write(1, values)
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    with JsonLines(path) as write:
        write(2, {"bfloat16": np.ones(2, jnp.bfloat16), "none": None})

    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 1, "nan": "NaN", "inf": "-Infinity", "array": [1.5, "Infinity"], "int": 3, "true": True},
        {"step": 2, "bfloat16": [1.0, 1.0], "none": None},
    ]


@pytest.mark.thorough
def test_tensorboard(tmp_path: Path) -> None:
    """The file has the records of TensorBoard: lengths, and events with the values."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with TensorBoard(tmp_path) as write:
        run(SMALL, WEIGHTS, BATCHES, steps=3, writers=[write])
    (file,) = tmp_path.iterdir()
    content, found = file.read_bytes(), {}
    while content:  # length, its checksum, the event, its checksum
        (length,) = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12 : 12 + length])
        found |= {
            (event.step, value.tag): value.simple_value
            for value in event.summary.value
            if not value.tag.startswith("time/")
        }
        content = content[16 + length :]
    losses = {(n, "loss"): float(SMALL(bare(n), BATCHES.batch(n))[1]["loss"]) for n in range(3)}
    assert found == losses


@pytest.mark.parametrize("keep_every", [1, 4, 100])
@pytest.mark.parametrize("metrics_every", [1, 3])
def test_loss_that_is_no_number(keep_every: int, metrics_every: int, caplog: pytest.LogCaptureFixture) -> None:
    """With "stop" the last good state is there; with "continue" a warning."""

    def poisoned(number: int) -> Any:
        batch = BATCHES.batch(number)
        return batch if number != 6 else batch | {"y": batch["y"] * np.float32(np.nan)}

    options = {"steps": STEPS, "metrics_every": metrics_every, "keep_every": keep_every}
    result = run(SMALL, WEIGHTS, poisoned, on_nan="stop", **options)
    assert (result.step, result.stopped) == (6, True)
    assert "loss of step" in result.reason or "holds numbers that are none" in result.reason
    np.testing.assert_array_equal(result.state, bare(6))
    assert [number for number, _ in result.history] == list(range(0, 6, metrics_every))
    result = run(SMALL, WEIGHTS, poisoned, **options)
    assert result.step == STEPS and np.isnan(result.state).all()
    assert caplog.text.count("is not finite; the run goes on") == 1


def test_history_is_bounded() -> None:
    result = run(SMALL, WEIGHTS, BATCHES, steps=STEPS, history_kept=3)
    assert [number for number, _ in result.history] == [STEPS - 3, STEPS - 2, STEPS - 1]
    assert run(SMALL, WEIGHTS, BATCHES, steps=3, history_kept=0).history == []


# Nothing is lost.


@pytest.mark.parametrize("where", ["step", "data", "callback", "writer", "exit"])
def test_an_exception_saves_first(where: str, tmp_path: Path) -> None:
    """Whatever raises, the next run goes on from the last state there was; the error says so."""

    def fail(number: int) -> None:
        if number == 5:
            raise SystemExit(3) if where == "exit" else ArithmeticError("five is right out")

    def data(number: int) -> Any:
        fail(number if where == "data" else 0)
        return BATCHES.batch(number) if number != 5 or where != "step" else {"x": BATCHES.batch(5)["x"]}

    options: dict[str, Any] = {"writers": [lambda n, m: fail(n)]} if where == "writer" else {}
    if where in ("callback", "exit"):
        options["callback"] = lambda n, m: fail(n)
    with pytest.raises((ArithmeticError, SystemExit, KeyError)) as caught:
        run(ALONE, initial(), data, steps=STEPS, checkpoint=tmp_path, **options)
    assert "was saved" in "".join(caught.value.__notes__)
    result = run(ALONE, initial(), BATCHES, steps=STEPS, checkpoint=tmp_path)
    assert result.resumed is not None and result.resumed >= 5
    check(result, first=result.resumed)


def test_checkpoints_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `checkpoint_every` there is one when so many seconds have passed, by default ten minutes."""
    clock = [0.0]

    def batch(number: int) -> Any:
        clock[0] += 250.0
        return BATCHES.batch(number)

    monkeypatch.setattr("vnode.elastic.driver.time.monotonic", lambda: clock[0])
    run(SMALL, WEIGHTS, batch, steps=8, checkpoint=tmp_path, checkpoints_kept=9, prefetch=0)
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()) == [3, 6, 8]


def test_terminated(tmp_path: Path) -> None:
    """SIGTERM is a stop signal by default; a second one does no harm."""
    before = signal.getsignal(signal.SIGTERM)

    def twice(number: int) -> None:
        for _ in range(2 * (number == 6)):
            os.kill(os.getpid(), signal.SIGTERM)

    result = run(ALONE, initial(), BATCHES, steps=STEPS, devices=twice, checkpoint=tmp_path)
    assert (result.step, result.reason) == (7, "signal SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is before
    check(run(ALONE, initial(), BATCHES, steps=STEPS, checkpoint=tmp_path), first=7)


def test_second_interrupt_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C a second time, while a checkpoint is written, interrupts when it is whole."""
    from vnode.elastic.checkpoints import Checkpoints

    save, found = Checkpoints.save, signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        interrupt()
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Checkpoints, "save", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            devices = {4: interrupt}
            run(
                ALONE,
                initial(),
                BATCHES,
                steps=STEPS,
                devices=lambda n: devices[n]() if n in devices else None,
                checkpoint=tmp_path,
            )
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, found)
    monkeypatch.undo()
    result = run(ALONE, initial(), BATCHES, steps=STEPS, checkpoint=tmp_path)
    assert result.resumed == 5
    check(result, first=5)


def test_shelter() -> None:
    """Within a shelter the second Ctrl-C waits; two shelters are one."""
    with Stop.catch([signal.SIGINT]) as stop:
        stop.handle(signal.SIGTERM, None)
        stop.handle(signal.SIGTERM, None)
        assert stop.asked and stop.name == "SIGTERM"
        inner = []
        with pytest.raises(KeyboardInterrupt), stop.deferred_interrupts():
            with stop.deferred_interrupts():
                stop.handle(signal.SIGINT, None)
            inner.append("went on")
        assert inner
        with stop.deferred_interrupts():  # it interrupts once
            pass


def test_signal_while_data_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop signal ends a run whose data do not come."""
    monkeypatch.setattr("vnode.data.prefetch.GRACE", 0.1)
    released, found = threading.Event(), signal.signal(signal.SIGINT, signal.default_int_handler)

    def stuck(number: int) -> Any:
        if number == 5:
            threading.Timer(0.2, interrupt).start()
            released.wait(60)
        return BATCHES.batch(number)

    try:
        threading.Timer(2, released.set).start()  # or the end would wait for it a little longer
        result = run(ALONE, initial(), stuck, steps=STEPS)
    finally:
        released.set()
        signal.signal(signal.SIGINT, found)
    check(result, steps=5)
    assert result.stopped


@pytest.mark.skipif(threads.glibc() is None, reason="elsewhere the process waits, which the next test shows")
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(3)", 3, ""),
        pytest.param("pass", 0, "", marks=pytest.mark.sweep),
        pytest.param("raise ValueError('mine')", 1, "ValueError: mine", marks=pytest.mark.sweep),
        pytest.param(
            "signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt", marks=pytest.mark.sweep
        ),
    ],
)
def test_the_process_ends_while_a_program_is_compiled(end: str, status: int, said: str) -> None:
    """It does not wait for XLA, nor is it aborted by it; all else that is done at the end is done."""
    code = f"""
import atexit, signal, sys, threading, time
atexit.register(print, "registered first, called last")
import jax, jax.numpy as jnp
from vnode.step.compile_ahead import WORKER

def slow(x):
    for i in range(300):
        x = jnp.sin(x @ x + i) * jnp.cos(x[::-1] + i)
    return x

lowered, begun = jax.jit(slow).lower(jnp.ones((17, 17))), threading.Event()
WORKER.submit(lambda: (begun.set(), lowered.compile(), print("compiled")))
WORKER.submit(lambda: print("not dropped"))
begun.wait()
time.sleep(0.5)
{end}
"""
    environment = os.environ | {"PYTHONPATH": str(Path(vnode.__file__).parents[1]), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout) == (status, "registered first, called last\n"), done.stderr
    assert done.stderr.strip().splitlines()[-1:] == [said] * bool(said)


def test_what_is_under_way_is_waited_for_where_a_process_cannot_leave_it() -> None:
    """With a C library that is not glibc."""
    code = """
import threading, time
from vnode import threads
threads.glibc = lambda: None
from vnode.step.compile_ahead import WORKER
begun = threading.Event()
WORKER.submit(lambda: (begun.set(), time.sleep(0.5), print("done", flush=True)))
WORKER.submit(lambda: print("not dropped", flush=True))
begun.wait()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(vnode.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# Objects.


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(jnp.tanh(self.hidden(x))).sum(-1)


def objects() -> tuple[Network, nnx.Optimizer]:
    network = Network(nnx.Rngs(0))
    return network, nnx.Optimizer(network, optax.adam(0.1), wrt=nnx.Param)


def object_step(network: Network, optimizer: nnx.Optimizer, batch: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda n: jnp.mean((n(batch["x"]) - batch["y"]) ** 2))(network)
    optimizer.update(network, grads)
    return {"loss": loss}


def test_objects(tmp_path: Path) -> None:
    """nnx objects go in as they are, are updated in place, and go on from a checkpoint."""
    virtual = vnode.nnx.virtualize(object_step, virtual_nodes=4, in_axes=(None, None, 0)).on(jax.devices()[:1])
    trained = objects()
    run(virtual, objects(), BATCHES, steps=3, checkpoint=tmp_path)
    result = run(virtual, trained, BATCHES, steps=6, checkpoint=tmp_path)
    assert result.state is trained and result.resumed == 3
    plain = nnx.jit(object_step)

    def as_written(batches: Any) -> Any:
        reference = objects()
        losses = [plain(*reference, batch)["loss"] for batch in batches]
        return losses[3:], reference[0].hidden.kernel[...]

    losses = [np.float32(m["loss"]) for _, m in result.history]
    assert_same((losses, trained[0].hidden.kernel[...]), as_written, [BATCHES.batch(number) for number in range(6)])
    assert int(trained[1].step[...]) == 6
