"""Whatever happens to the devices, the state and the metrics are those of the undisturbed run, bit by bit.

Knows the driver's public interface. Must not know how it copies, saves or moves a state. The reference is a bare loop
over the step on one device, with batches from the host.
"""

import functools
import hashlib
import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

import vnode
from tests.test_virtual_step import compilations
from vnode.elastic.metrics import metrics_line
from vnode.elastic.run import run
from vnode.elastic.run_devices import Devices, remaining_placement, responds
from vnode.errors import CheckpointError, DeviceLost, PlacementError, VnodeError
from vnode.placement.host_copy import HostCopy, abstract

pytestmark = pytest.mark.quickly

STEPS = 12
OPTIMIZER = optax.adamw(1e-2)
GENERATOR = np.random.default_rng(0)
DATA = {
    "x": GENERATOR.normal(size=(37, 4)).astype(np.float32),
    "y": GENERATOR.normal(size=37).astype(np.float32),
}
BATCHES = vnode.data.Batches(DATA, 16, seed=3)
COUNTS = (1, 3, 5, 8)
"""Numbers of devices on which the step is compiled; all tests use the first ones, so that they share programs."""


@functools.partial(vnode.virtualize, virtual_nodes=8, donate_argnums=0)
def step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    key, draw = jax.random.split(state["key"])

    def loss_fn(params: dict[str, Any]) -> Any:
        hidden = state["activation"](batch["x"] @ params["kernel"] + params["bias"].astype(jnp.float32))
        kept = jax.random.bernoulli(draw, 0.8, hidden.shape)
        return jnp.mean((jnp.where(kept, hidden, 0).sum(-1) * state["scale"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, slots = OPTIMIZER.update(grads, state["slots"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return state | {"params": params, "slots": slots, "key": key, "count": state["count"] + 1}, {"loss": loss}


def initial() -> dict[str, Any]:
    """AdamW's slots, a typed key, a bfloat16 leaf, Python numbers, an empty array, and a leaf that is no array."""
    params = {"kernel": jax.random.normal(jax.random.key(1), (4, 3)), "bias": jnp.zeros(3, jnp.bfloat16)}
    return {
        "params": params,
        "slots": OPTIMIZER.init(params),
        "key": jax.random.key(7),
        "count": 0,
        "scale": 0.5,
        "none": jnp.zeros((0, 2)),
        "activation": jnp.tanh,
    }


def sha256(state: Any) -> str:
    """A fingerprint of all arrays of a state: names, dtypes, weak types, shapes, bits; and of its other leaves."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(state):
        kind = f"{jax.tree_util.keystr(path)} {getattr(leaf, 'dtype', id(leaf))} {getattr(leaf, 'weak_type', None)}"
        digest.update(kind.encode())
        if isinstance(leaf, jax.Array):
            bits = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            digest.update(f"{bits.shape}".encode() + np.asarray(bits).tobytes())
    return digest.hexdigest()


@functools.cache
def undisturbed() -> tuple[list[str], list[float]]:
    """After each number of steps of a bare loop on one device, the state's hash; and the loss of each step."""
    alone = step.on(jax.devices()[:1])
    state = alone.put(initial())
    hashes, losses = [sha256(state)], []
    for number in range(STEPS):
        state, metrics = alone(state, BATCHES.batch(number))
        hashes.append(sha256(state))
        losses.append(float(metrics["loss"]))
    return hashes, losses


def check(result: vnode.elastic.Result, steps: int = STEPS, first: int = 0) -> None:
    """The result is that of the undisturbed run, and its history has each step once."""
    hashes, losses = undisturbed()
    assert result.step == steps
    assert sha256(result.state) == hashes[steps]
    assert [(number, float(m["loss"])) for number, m in result.history] == list(enumerate(losses))[first:steps]


class Events:
    """Calls something once at each of some steps, from the data, from `devices`, or from the callback."""

    def __init__(
        self, data: dict[int, Callable[[], Any]] | None = None, **others: dict[int, Callable[[], Any]]
    ) -> None:
        self.left = {"data": dict(data or {})} | {place: dict(events) for place, events in others.items()}

    def happen(self, where: str, number: int) -> None:
        event = self.left.get(where, {}).pop(number, None)
        if event is not None:
            event()

    def load(self, number: int, placement: vnode.Placement) -> Any:
        self.happen("data", number)
        return BATCHES.load(number, placement)

    def devices(self, number: int) -> None:
        self.happen("devices", number)

    def callback(self, number: int, metrics: Any) -> None:
        self.happen("callback", number)


def raising(error: BaseException) -> Callable[[], Any]:
    def throw() -> None:
        raise error

    return throw


@pytest.mark.newest
@settings(max_examples=12)
@given(st.dictionaries(st.integers(0, STEPS - 1), st.sampled_from((*COUNTS, "uneven")), max_size=4))
def test_resizes(schedule: dict[int, Any]) -> None:
    """Devices that change before any steps do not show in the result."""
    uneven = vnode.Placement(8, jax.devices()[:3], counts=(1, 5, 2))

    def devices(number: int) -> Any:
        wanted = schedule.get(number)
        return uneven if wanted == "uneven" else None if wanted is None else jax.devices()[:wanted]

    result = run(step.on(jax.devices()[:1]), initial(), BATCHES, steps=STEPS, devices=devices)
    check(result)
    changes = [(n, schedule[n]) for n in sorted(schedule)]
    wanted = [1 if not changes or changes[0][0] else changes.pop(0)[1], *(w for _, w in changes)]
    assert len(result.resizes) == sum(a != b for a, b in itertools.pairwise(wanted))
    assert all(str(change.after.size) in str(change) and not change.lost for change in result.resizes)


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(0, STEPS - 1), st.sampled_from(["data", "devices", "callback"])), max_size=2),
    st.integers(1, STEPS + 1),
    st.integers(0, 3),
)
def test_lost_devices(losses: list[tuple[int, str]], keep_every: int, prefetch: int) -> None:
    """Devices that are lost at any step, found out in any place, cost steps that are run again and no bit."""
    everything, groups = jax.devices(), [(3, 4), (1, 2)]  # of five devices: three are left, then one
    events, gone = Events(devices={}, callback={}), []

    def lose() -> None:
        lost = [everything[i] for i in groups[len(gone)]]
        gone.append(lost)
        raise DeviceLost(lost)

    for number, where in losses:
        events.left[where][number] = lose
    expected = sum(map(len, events.left.values()))
    result = run(
        step.on(everything[:5]),
        initial(),
        events,
        steps=STEPS,
        devices=events.devices,
        callback=events.callback,
        keep_every=keep_every,
        prefetch=prefetch,
    )
    check(result)
    at_once = "devices" in {where for number, where in losses if number == 0}  # before there is a state to move
    assert [list(change.lost) for change in result.resizes] == gone[at_once:]
    assert len(gone) == expected
    assert all(change.step % keep_every == 0 and change.repeated <= keep_every for change in result.resizes)
    left = {d for leaf in jax.tree.leaves(result.state) if isinstance(leaf, jax.Array) for d in leaf.devices()}
    assert left == set(everything[:5]) - {device for group in gone for device in group}


@pytest.mark.parametrize("number", [2, 7])
def test_lost_with_checkpoints_only(number: int, tmp_path: Path) -> None:
    """Without a copy on the host the last checkpoint serves, where there is one."""
    events = Events({number: raising(DeviceLost(jax.devices()[1:3]))})
    options: dict[str, Any] = {"steps": STEPS, "checkpoint": tmp_path, "checkpoint_every": 3, "keep_every": None}
    if number < 3:
        with pytest.raises(VnodeError, match="no copy of the state") as caught:
            run(step.on(jax.devices()[:3]), initial(), events, **options)
        assert "keep_every" in str(caught.value)
        assert isinstance(caught.value.__cause__, DeviceLost)
    else:
        result = run(step.on(jax.devices()[:3]), initial(), events, **options)
        check(result)
        assert [(change.step, change.repeated) for change in result.resizes] == [(6, 1)]


def test_error_of_a_device() -> None:
    """An error of the runtime that names no device: each is asked, those that do not answer are lost."""
    everything, dead = jax.devices(), set()

    def die() -> None:
        dead.update(everything[3:5])
        raise JaxRuntimeError("INTERNAL: the device is gone")

    result = run(step, initial(), Events({5: die}), steps=STEPS, devices=everything[:5], alive=lambda d: d not in dead)
    check(result)
    assert result.resizes[0].lost == tuple(everything[3:5])
    assert "the device is gone" in result.resizes[0].error


def test_devices_respond() -> None:
    assert all(map(responds, jax.devices()))


@pytest.mark.parametrize("keep_every", [1, 4, None])
def test_a_bug_surfaces_as_itself(keep_every: int | None) -> None:
    """A step that fails on healthy devices is tried once more from the same copy, not for ever.

    What a callback raises surfaces as an error of the runtime, as that of a device does.
    """
    calls = []

    def refuse(x: Any, number: Any) -> Any:
        if number == 5:
            calls.append(number)
            raise ArithmeticError("five is right out")
        return x

    @functools.partial(vnode.virtualize, virtual_nodes=1)
    def broken(number: Any, batch: Any) -> Any:
        return number + 1, jax.pure_callback(refuse, jax.ShapeDtypeStruct((), batch.dtype), batch.sum(), number)

    with pytest.raises((JaxRuntimeError, ValueError), match="five is right out"):
        run(
            broken.on(jax.devices()[:1]),
            jnp.int32(0),
            lambda number: np.ones(4, np.float32),
            steps=9,
            keep_every=keep_every,
        )
    assert len(calls) == (1 if keep_every is None else 2)


def test_a_passing_error_is_forgiven() -> None:
    """An error that does not come again costs a few steps."""
    error = JaxRuntimeError("UNAVAILABLE: try again")
    result = run(
        step.on(jax.devices()[:1]), initial(), Events({5: raising(error), 9: raising(error)}), steps=STEPS, keep_every=4
    )
    check(result)
    assert [(change.step, change.lost) for change in result.resizes] == [(4, ()), (8, ())]


def test_errors_of_data_surface_at_their_step() -> None:
    seen = []
    with pytest.raises(KeyError, match="no such file"):
        run(
            step.on(jax.devices()[:1]),
            initial(),
            Events({7: raising(KeyError("no such file"))}),
            steps=STEPS,
            callback=lambda number, metrics: seen.append(number),
            metrics_every=2,
            prefetch=4,
        )
    assert seen == [number for number in (0, 2, 4, 6) if number in seen]


def test_no_device_left() -> None:
    for number, lost in ((4, jax.devices()[:3]), (0, jax.devices()[:3])):
        with pytest.raises(PlacementError, match="no device is left") as caught:
            run(step.on(jax.devices()[:3]), initial(), Events({number: raising(DeviceLost(lost))}), steps=STEPS)
        assert isinstance(caught.value.__cause__, DeviceLost)


def test_lost_device_stays_away() -> None:
    """A lost device that is asked for again is left out."""
    events = Events({2: raising(DeviceLost(jax.devices()[3:5]))})
    result = run(
        step,
        initial(),
        events,
        steps=STEPS,
        devices=lambda number: jax.devices()[: {6: 1, 9: 5}.get(number, 0)] or None if number else jax.devices()[:5],
        keep_every=2,
    )
    check(result)
    assert [change.after.size for change in result.resizes] == [3, 1, 3]


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_lost_device_of_a_mesh(shape: tuple[int, int]) -> None:
    """Of a mesh with other axes, what is left are the slices along the nodes' axis without a lost device."""
    devices = np.array(jax.devices()[:8]).reshape(shape)
    for axis in (0, 1):
        names = ("vnode", "model") if axis == 0 else ("model", "vnode")
        placement = vnode.Placement(8, mesh=Mesh(devices, names))
        left = remaining_placement(placement, {devices[1, 1]})
        assert left.devices.tolist() == np.delete(devices, 1, axis).tolist()
        assert left.axis_names == names


def peculiar() -> dict[str, Any]:
    """A state of what is easily lost: kinds of keys, small floats, weak types, arrays without elements, partitions."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("vnode", "model"))

    def over(*spec: Any) -> Any:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    return {
        "key": jax.random.key(1, impl="rbg"),
        "keys": jax.device_put(jax.random.split(jax.random.key(2), 6), over()),
        "old key": jax.random.PRNGKey(3),
        "a/b.c['d']": jnp.arange(4, dtype=jnp.float8_e4m3fn),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "weak": [jax.device_put(0.1), jnp.stack([jax.device_put(0.1), jax.device_put(-0.0)])],
        "nan": np.array([np.nan, -0.0, np.inf], np.float32),
        "large": np.arange(1 << 16, dtype=np.int32),
        "by model": jax.device_put(np.arange(8.0, dtype=np.float32), over("model")),
        "by node": jax.device_put(np.arange(8), over("vnode")),
        "other": (len, "name", None, True),
    }


@pytest.mark.parametrize("way", ["host", "checkpoint"])
def test_copies(way: str, tmp_path: Path) -> None:
    """A state comes back as it was, on other devices; twice from the same copy, though the first may be overwritten."""
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("vnode", "model"))
    state, smaller = step.on(vnode.Placement(8)).put(peculiar()), vnode.Placement(8, mesh=mesh)
    state |= {name: peculiar()[name] for name in ("by model", "by node")}
    want = sha256(state)
    if way == "host":
        copy = HostCopy.from_state(state)
        restore = functools.partial(copy.place_on, smaller)
    else:
        from vnode.elastic.checkpoints import Checkpoints

        checkpoints = Checkpoints(tmp_path, keep=1)
        checkpoints.save(5, state, {"note": [1]})
        assert checkpoints.latest == 5
        assert checkpoints.facts(5) == {"note": [1]}
        restore = functools.partial(checkpoints.restore, 5, jax.tree.map(abstract, state), smaller)
    overwrite = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    for _ in range(2):
        back = restore()
        assert sha256(back) == want
        arrays = [leaf for leaf in jax.tree.leaves(back) if isinstance(leaf, jax.Array)]
        assert all(leaf.sharding.device_set == set(smaller.devices) for leaf in arrays)
        assert back["by model"].sharding.spec == state["by model"].sharding.spec
        assert back["by node"].sharding.is_fully_replicated  # three devices do not divide eight elements
        overwrite([leaf for leaf in arrays if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)])
    if way == "checkpoint":
        checkpoints.close()


@pytest.fixture
def handler() -> Any:
    """The handler of SIGINT before a test, which must be there again after it.

    It is Python's own: a process that a shell has put into the background begins with the signal ignored.
    """
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, found)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_stop_and_resume(tmp_path: Path, handler: Any) -> None:
    """Ctrl-C ends after the current step, with a checkpoint; the next run goes on, on other devices."""
    path = tmp_path / "new" / "folder"
    stopped = run(
        step.on(jax.devices()[:3]),
        initial(),
        BATCHES,
        steps=STEPS,
        devices=Events(devices={6: interrupt}).devices,
        checkpoint=path,
    )
    assert stopped.stopped
    check(stopped, steps=7)
    resumed = run(step.on(jax.devices()[:5]), initial(), BATCHES, steps=STEPS, checkpoint=path, checkpoint_every=2)
    assert not resumed.stopped
    assert resumed.resumed == 7
    check(resumed, first=7)
    assert sorted(int(p.name) for p in path.iterdir()) == [8, 10, 12]  # the last three stay
    again = run(step.on(jax.devices()[:1]), initial(), BATCHES, steps=STEPS, checkpoint=path)
    assert again.resumed == STEPS
    check(again, first=STEPS)


def test_second_signal_interrupts(handler: Any) -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        run(step.on(jax.devices()[:1]), initial(), BATCHES, steps=STEPS, devices=Events(devices={3: twice}).devices)


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        events = Events(devices={3: interrupt})
        check(run(step.on(jax.devices()[:1]), initial(), BATCHES, steps=STEPS, devices=events.devices))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_a_thread(handler: Any) -> None:
    results = []
    thread = threading.Thread(
        target=lambda: results.append(run(step.on(jax.devices()[:1]), initial(), BATCHES, steps=STEPS))
    )
    thread.start()
    thread.join()
    check(results[0])


def test_changed_by_signals_and_threads() -> None:
    """`Devices` may be changed from a signal handler and from another thread."""
    devices = Devices(jax.devices()[:1])
    before = signal.signal(signal.SIGUSR1, lambda *_: devices.change(jax.devices()[:3]))

    def from_thread() -> None:
        thread = threading.Thread(target=devices.change, args=(jax.devices()[:3],), kwargs={"counts": (1, 5, 2)})
        thread.start()
        thread.join()

    events = Events({3: lambda: os.kill(os.getpid(), signal.SIGUSR1), 8: from_thread})
    try:
        result = run(step, initial(), events, steps=STEPS, devices=devices, prefetch=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    check(result)
    assert [(change.step, change.after.counts) for change in result.resizes] == [(4, (3, 3, 2)), (9, (1, 5, 2))]


@pytest.mark.parametrize("counts", [None, [5, 3], "groups"])
def test_warmed_up_while_training_goes_on(counts: Any) -> None:
    """The program that ran in the background is the one that the run goes on with."""
    there: Any = vnode.Placement(8, jax.devices()[:2], counts=[5, 3] if counts else None)
    if counts == "groups":
        there = vnode.Placement(8, groups=[jax.devices()[:1], jax.devices()[1:2]])

    def where(number: int) -> Any:
        for thread in threading.enumerate() if number == STEPS - 2 else ():
            if thread.name.startswith("vnode-prepare"):
                thread.join()
        return there if number >= 3 else None

    with compilations("step") as compiled:
        result = run(
            step.on(jax.devices()[:1]), initial(), BATCHES, steps=STEPS, devices=where, compile_ahead="warm_up"
        )
    check(result)
    (change,) = result.resizes
    assert change.step > 3
    assert change.after == there
    assert counts == "groups" or len(compiled) <= 2  # each placement once


def test_compiled_ahead_or_not() -> None:
    with pytest.raises(ValueError, match="False, True or \"warm_up\", not 'later'"):
        run(step.on(jax.devices()[:1]), initial(), BATCHES, steps=1, compile_ahead="later")


def test_compiled_while_training_goes_on() -> None:
    """The change comes when the program is there, at the latest before the last step is waited for."""
    devices = Devices(jax.devices()[:1])
    slow = threading.Event()

    def batch(number: int) -> Any:
        if number == 3:
            devices.change(jax.devices()[:2])
        if number == STEPS - 2:  # by now the program must have been asked for
            (preparation,) = [t for t in threading.enumerate() if t.name.startswith("vnode-prepare")] or [None]
            if preparation is not None:
                preparation.join()
            slow.set()
        return BATCHES.batch(number)

    with compilations("step") as compiled:
        result = run(step, initial(), batch, steps=STEPS, devices=devices, compile_ahead=True, prefetch=0)
    check(result)
    (change,) = result.resizes
    assert slow.is_set()
    assert 4 <= change.step < STEPS
    assert len(compiled) <= 2  # each placement once
    assert change.after.devices == jax.devices()[:2]


def test_refuses_other_checkpoints(tmp_path: Path) -> None:
    """A checkpoint of another state, or made with other data, is refused with what differs."""
    alone = step.on(jax.devices()[:1])
    run(alone, initial(), BATCHES, steps=2, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="seed: 3 then, 4 now"):
        run(alone, initial(), vnode.data.Batches(DATA, 16, seed=4), steps=3, checkpoint=tmp_path)
    other = initial()
    other["more"] = other.pop("scale")
    other["params"]["bias"] = jnp.zeros(3)
    with pytest.raises(CheckpointError) as caught:
        run(alone, other, BATCHES, steps=3, checkpoint=tmp_path)
    message = str(caught.value)
    assert "['scale']: only in the checkpoint" in message
    assert "['more']: not in the checkpoint" in message
    assert "['params']['bias']: bfloat16[3] in the checkpoint, float32[3] in the state" in message


def test_refuses_what_it_cannot_run() -> None:
    alone = step.on(jax.devices()[:1])
    with pytest.raises(VnodeError, match="batches by step number"):
        run(alone, initial(), iter([]), steps=2)
    with pytest.raises(PlacementError, match="sequence of devices"):
        run(alone, initial(), BATCHES, steps=2, devices="cpu")
    with pytest.raises(ValueError, match="keep_every"):
        run(alone, initial(), BATCHES, steps=2, keep_every=0)
    plain = vnode.virtualize(lambda w, x: w + x.sum(), virtual_nodes=1)
    with pytest.raises(VnodeError, match="its state and its metrics"):
        run(plain.on(jax.devices()[:1]), jnp.float32(0), [np.ones(2, np.float32)], steps=1)


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """The bar is off where there is no terminal; asked for, it counts steps and tells of changes."""
    change = {4: jax.devices()[:3]}
    for wanted in (None, True):
        run(step.on(jax.devices()[:1]), initial(), BATCHES, steps=STEPS, devices=change.get, progress=wanted)
        printed = capsys.readouterr().err
        assert ("step 4: 1 -> 3 devices" in printed) == ("12/12" in printed) == (wanted is True)
    assert metrics_line({"loss": np.float32(1.5), "all": np.ones(3)}, step.on(jax.devices()[:3]).placement) == (
        "loss 1.5  3 devices x 3/2 nodes"
    )
