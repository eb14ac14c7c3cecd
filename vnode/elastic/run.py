"""Training that goes on when devices come and go: the loop around a virtualized step.

Knows steps as callables with placements, data by step number, copies of the state, signals. Must not know jaxprs, nor
how a state is copied or saved.

Why the result is the same bits whatever happens to the devices: a step's result does not depend on them
(`docs/same-bits.md`), the examples of step t depend on t only, and after a failure the run goes on from a copy of the
state that was complete before it. Steps in between are run again, and give again what they gave.

The copy is in the host's memory. The state on the devices cannot serve: a step that donates it has overwritten it by
the time that an error shows, and what lived on the lost device alone is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from vnode.data.prefetch import Prefetch
from vnode.errors import CheckpointError, DeviceLost, PlacementError, VnodeError, layout_message
from vnode.placement.host import HostCopy, abstract, is_key
from vnode.placement.placement import Placement
from vnode.show.progress import Display, display
from vnode.step.ahead import Preparation

if TYPE_CHECKING:
    from vnode.elastic.checkpoints import Checkpoints

__all__ = ["DeviceLost", "Devices", "Resize", "Result", "responds", "run"]

AHEAD = 4
"""Steps that may be under way before the loop waits for the first of them: enough to keep devices busy, few enough to
bound the memory of their batches."""

STATUS = re.compile("(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|INTERNAL|UNAVAILABLE|DATA_LOSS): ")
"""How messages of a runtime that failed begin (the codes of ``absl::StatusCode`` that a device can be the cause of)."""


class Devices:
    """The devices that a run is to use, changed from wherever the change is known.

    `change` may be called from other threads and from signal handlers; the run follows before its next step.

    Args:
      devices: a sequence of devices or a `Placement`.
      counts: nodes on each device; as even as possible by default.

    Example:
      >>> import jax, signal, vnode
      >>> devices = vnode.elastic.Devices(jax.devices())
      >>> def fewer(*_):
      ...     devices.change(jax.devices()[:1])
      >>> previous = signal.signal(signal.SIGUSR1, fewer)
      >>> signal.raise_signal(signal.SIGUSR1)
      >>> devices.request.devices == (jax.devices()[0],)
      True
      >>> _ = signal.signal(signal.SIGUSR1, previous)
    """

    def __init__(self, devices: Any, *, counts: Sequence[int] | None = None) -> None:
        self.change(devices, counts=counts)

    def change(self, devices: Any, *, counts: Sequence[int] | None = None) -> None:
        """Asks for other devices; the last request counts."""
        self.request = Request.of(devices, counts)  # one assignment: no lock that a signal could find taken


@dataclasses.dataclass(frozen=True)
class Request:
    """Devices that are asked for."""

    devices: Placement | Mesh | tuple[Any, ...]
    counts: tuple[int, ...] | None = None

    @classmethod
    def of(cls, devices: Any, counts: Sequence[int] | None = None) -> Request:
        """A request for a placement, a mesh, or a sequence of devices.

        Raises:
          PlacementError: it is none of them.
        """
        if not isinstance(devices, Placement | Mesh):
            if isinstance(devices, str) or not isinstance(devices, Iterable):
                raise PlacementError(f"devices must be a sequence of devices or a vnode.Placement, not {devices!r}")
            devices = tuple(devices)
        return cls(devices, None if counts is None else tuple(counts))


@dataclasses.dataclass
class Resize:
    """One change of devices.

    Attributes:
      step: the number of the first step on the new devices.
      before: the placement until then.
      after: the placement from then on.
      lost: the devices that failed, if that is why.
      error: what was raised, if the run fell back to a copy of the state.
      repeated: steps that are run again because of it.
      move: seconds until the state was on the new devices.
      compile: seconds until the first call returned: tracing and compiling if the placement is new.
      first: seconds from there until the first result was there.
    """

    step: int
    before: Placement
    after: Placement
    lost: tuple[Any, ...] = ()
    error: str = ""
    repeated: int = 0
    move: float = 0.0
    compile: float = 0.0
    first: float = 0.0

    def __str__(self) -> str:
        why = f"lost {', '.join(map(str, self.lost))}, " if self.lost else "after an error, " if self.error else ""
        again = f", {self.repeated} steps again" if self.repeated else ""
        return (
            f"step {self.step}: {why}{self.before.size} -> {self.after.size} devices {list(self.after.counts)}: "
            f"state moved in {self.move:.3f} s, compiled in {self.compile:.3f} s, first step {self.first:.3f} s{again}"
        )


@dataclasses.dataclass
class Result:
    """What a run leaves.

    Attributes:
      state: the state after the last step.
      step: how many steps the state has behind it, those of earlier runs included.
      history: ``(step number, metrics)`` of the steps of this run, with metrics on the host; each step once.
      resizes: the changes of devices.
      resumed: the step number of the checkpoint that this run began with, if it did.
      stopped: whether a signal ended the run early.
    """

    state: Any
    step: int
    history: list[tuple[int, Any]]
    resizes: list[Resize]
    resumed: int | None
    stopped: bool


def may_be_a_device(error: Exception) -> bool:
    """Whether an error may come from a failed device.

    Errors of the runtime are `JaxRuntimeError`s where a result is waited for, but plain `ValueError`s with a status
    code in front where jax's fast path launches a program.
    """
    return not isinstance(error, ValueError) or STATUS.match(str(error)) is not None


def responds(device: Any) -> bool:
    """Whether a device still computes: asks it for a sum."""
    try:
        return int(jax.device_put(np.int32(20), device) + jax.device_put(np.int32(22), device)) == 42
    except JaxRuntimeError:
        return False


def run(
    step: Any,
    state: Any,
    data: Any,
    *,
    steps: int,
    devices: Any = None,
    compile_ahead: bool | Literal["warm_up"] = False,
    prefetch: int = 2,
    keep_every: int | None = 100,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    checkpoints_kept: int = 3,
    callback: Callable[[int, Any], Any] | None = None,
    metrics_every: int = 1,
    stop_signals: Iterable[signal.Signals] = (signal.SIGINT,),
    alive: Callable[[Any], bool] = responds,
    progress: bool | None = None,
) -> Result:
    """Runs a virtualized step over and over, on devices that may change between any two steps.

    Args:
      step: a `VirtualStep` ``(state, batch) -> (state, metrics)``.
      state: the state before step 0: a pytree of arrays and other leaves, which are passed through. It is the caller's
        no more if the step donates it.
      data: the batch of each step: `vnode.data.Batches`, a function of the step number, a sequence, or something with
        ``batch(step)``. Must depend on nothing else: a step may be asked for again.
      steps: how many steps in all, those before a checkpoint that is resumed from included.
      devices: a sequence of devices, a `Placement`, a `Devices`, or a function of the step number that returns one of
        the first two, or None for no change. The step's own placement by default.
      compile_ahead: whether to go on on the devices that there are until the step is compiled for those that are asked
        for, in a background thread; with "warm_up" until it has also run there once, with copies
        (`VirtualStep.warm_up`). Otherwise they are changed before the next step, which waits for its program.
      prefetch: batches to load ahead in a background thread; 0 for none.
      keep_every: copy the state to the host after so many steps, to fall back to. The loop waits for the devices
        while it copies. None for no copies: a failure then falls back to the last checkpoint.
      checkpoint: a folder for checkpoints. If it has one, the run resumes from it, on whatever devices. Needs
        `orbax-checkpoint`. There is always one of the last step.
      checkpoint_every: further checkpoints after so many steps, written in the background.
      checkpoints_kept: how many of the last checkpoints stay.
      callback: called with a step's number and its metrics on the host, in order, some steps late; again for steps
        that are run again.
      metrics_every: fetch the metrics of every so many steps.
      stop_signals: end the run after the current step, with a checkpoint, when one of these comes; the second one
        interrupts at once. Only in the main thread: elsewhere signals cannot be caught.
      alive: whether a device still works; asked of each after an error that does not say which failed.
      progress: a progress bar; by default if standard error is a terminal and `rich` is installed.

    Returns:
      The final state, and what happened.

    Raises:
      VnodeError: no device is left; a device failed and there is nothing to fall back to; or a step does not return a
        state and metrics.
      CheckpointError: the folder holds checkpoints of another state, or of other data.
      Exception: what the step, the data or the callback raises. An error of jax's runtime is raised if no device is
        to blame and it comes again when the steps since the last copy are run again.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, vnode
      >>> @vnode.virtualize(virtual_nodes=4)
      ... def step(w, batch):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)
      ...     return w - 0.1 * grad, {"loss": loss}
      >>> batches = vnode.data.Batches({"x": np.eye(12, 3, dtype=np.float32)}, batch_size=8)
      >>> result = vnode.elastic.run(step, jnp.ones(3), batches, steps=5, devices=jax.devices()[:1])
      >>> result.step, [number for number, _ in result.history]
      (5, [0, 1, 2, 3, 4])
    """
    for name, value in (("keep_every", keep_every), ("checkpoint_every", checkpoint_every)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, or None, not {value!r}")
    if compile_ahead not in (False, True, "warm_up"):
        raise ValueError(f'compile_ahead must be False, True or "warm_up", not {compile_ahead!r}')
    if metrics_every < 1:
        raise ValueError(f"metrics_every must be at least 1, not {metrics_every!r}")
    with contextlib.ExitStack() as stack:
        saved = (
            None
            if checkpoint is None
            else stack.enter_context(contextlib.closing(open_folder(checkpoint, checkpoints_kept)))
        )
        stop = stack.enter_context(Stop.on(stop_signals))
        feed = stack.enter_context(Prefetch(loader(data), depth=prefetch, stop=steps))
        driver = Driver(step, feed, steps, requests(devices, step), saved)
        driver.keep_every, driver.checkpoint_every, driver.metrics_every = keep_every, checkpoint_every, metrics_every
        driver.compile_ahead = compile_ahead
        driver.callback, driver.alive, driver.facts = callback, alive, {"data": description(data)}
        driver.begin(state)
        del state
        driver.display = stack.enter_context(display(progress, driver.number, steps))
        return driver.run(stop)


class Driver:
    """One run.

    `number` is the step to come. `kept` is the last copy on the host, with its step number. `blamed` is the step number
    of the copy that was gone back to when an error named no device.
    """

    def __init__(
        self,
        step: Any,
        feed: Prefetch,
        steps: int,
        requests: Callable[[int], Request | None],
        checkpoints: Checkpoints | None,
    ) -> None:
        self.step = step
        self.feed = feed
        self.steps = steps
        self.requests = requests
        self.checkpoints = checkpoints
        self.display: Display
        self.keep_every: int | None = None
        self.checkpoint_every: int | None = None
        self.metrics_every = 1
        self.callback: Callable[[int, Any], Any] | None = None
        self.alive: Callable[[Any], bool] = responds
        self.facts: dict[str, Any] = {}
        self.compile_ahead: bool | str = False
        self.compiling: dict[Placement, Preparation] = {}
        self.number = 0
        self.state: Any = None
        self.asked: Request | None = None
        self.lost: set[Any] = set()
        self.kept: tuple[int, HostCopy] | None = None
        self.saved: int | None = None
        self.resumed: int | None = None
        self.blamed: int | None = None
        self.pending: deque[tuple[int, Any]] = deque()
        self.history: list[tuple[int, Any]] = []
        self.resizes: list[Resize] = []
        self.resized: Resize | None = None

    def begin(self, state: Any) -> None:
        """Places the state before the first step, or the one of the last checkpoint."""
        self.like = jax.tree.map(abstract, state)
        found = None if self.checkpoints is None else self.checkpoints.newest(self.resume)
        if found is None:
            self.place(0)
            self.state = self.step.put(state)
        else:
            self.number, self.state = found
            self.resumed = self.saved = self.number
        if self.keep_every is not None:
            self.keep()

    def resume(self, number: int) -> Any:
        """The state of a checkpoint, on the devices that are asked for at its step."""
        self.place(number)
        self.check_data(number)
        return self.restored(number)

    def place(self, number: int) -> None:
        """Goes to the devices that are asked for before the first step."""
        try:
            self.asked = self.requests(number)
        except DeviceLost as error:
            self.lost |= set(error.devices)
        self.step = self.sibling(self.asked or Request(self.step.placement))

    def check_data(self, number: int) -> None:
        """Refuses to go on with other data than a checkpoint was made with.

        Raises:
          CheckpointError: the data describe themselves otherwise.
        """
        assert self.checkpoints is not None
        before, now = self.checkpoints.facts(number).get("data"), self.facts["data"]
        if before is not None and now is not None and before != now:
            differing = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
            raise CheckpointError(
                layout_message(
                    f"checkpoint {number} in {self.checkpoints.path} was made with other batches.",
                    facts=[f"{name}: {before.get(name)!r} then, {now.get(name)!r} now" for name in differing],
                    remedies=["give the data the options that they had", "or use another folder"],
                )
            )

    def run(self, stop: Stop) -> Result:
        """The loop, begun again after each failure."""
        failure: Exception | None = None
        while True:
            try:
                if failure is not None:
                    self.recover(failure)
                    failure = None
                while self.number < self.steps and not stop.asked:
                    self.advance()
                self.finish()
                return Result(
                    self.state, self.number, self.history, self.resizes, self.resumed, self.number < self.steps
                )
            except (DeviceLost, JaxRuntimeError, ValueError) as error:
                if error is failure or not may_be_a_device(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold the state that failed
                failure = error

    def advance(self) -> None:
        """One step, and what is due after it."""
        self.follow(self.requests(self.number))
        batch = self.feed.get(self.number, self.step.placement)
        began = time.perf_counter()
        results = self.step(self.state, batch)
        if not (isinstance(results, tuple) and len(results) == 2):
            raise VnodeError(
                layout_message(
                    "a step must return its state and its metrics.",
                    facts=[f"it returned {type(results).__name__}"],
                    remedies=["return state, {'loss': loss}", "return state, {} where there is nothing to tell"],
                )
            )
        self.state, metrics = results
        if self.resized is not None:
            returned = time.perf_counter()
            jax.block_until_ready(results)
            self.resized.compile, self.resized.first = returned - began, time.perf_counter() - returned
            self.display.line(str(self.resized))
            self.resized = None
        self.pending.append((self.number, metrics))
        self.number += 1
        self.fetch(AHEAD)
        if self.keep_every is not None and self.number % self.keep_every == 0:
            self.keep()
        if self.checkpoint_every is not None and self.number % self.checkpoint_every == 0:
            self.save()

    def follow(self, request: Request | None) -> None:
        """Goes on on other devices if they are asked for."""
        if request is None or request == self.asked:
            return
        step = self.sibling(request)
        if self.compile_ahead and not self.compiled(step.placement):
            return
        self.asked = request
        if step.placement == self.step.placement:
            return
        jax.block_until_ready(self.state)  # or the steps under way would count as moving
        began = time.perf_counter()
        self.state = jax.block_until_ready(step.put(self.state))
        self.changed(step, Resize(self.number, self.step.placement, step.placement, move=time.perf_counter() - began))

    def compiled(self, placement: Placement) -> bool:
        """Whether the program for a placement is there, or cannot be had; it is compiled in the background if not."""
        warming_up = self.compile_ahead == "warm_up"
        if placement == self.step.placement or self.number == (self.resumed or 0):
            return True  # nothing can be compiled before the first step has told shapes
        if len(placement.groups) > 1 and not warming_up:
            return True
        if placement not in self.compiling:
            self.compiling[placement] = (
                self.step.warm_up(placement, self.state, self.feed.aside(self.number, placement))
                if warming_up
                else self.step.prepare(placement)
            )
        return self.compiling[placement].done()

    def changed(self, step: Any, change: Resize) -> None:
        """Takes note of a change of devices; the next step tells how long it took."""
        self.step = step
        self.resizes.append(change)
        self.resized = change

    def sibling(self, request: Request) -> Any:
        """The step on the devices of a request, less those that were lost.

        Raises:
          PlacementError: there are none.
        """
        if isinstance(request.devices, Placement | Mesh):
            step = self.step.on(request.devices, counts=request.counts)
        else:
            left = tuple(device for device in request.devices if device not in self.lost)
            if request.devices and not left:
                raise none_left(self.lost)
            step = self.step.on(left, counts=request.counts if left == request.devices else None)
        return step.on(without(step.placement, self.lost)) if self.lost & set(step.placement.devices) else step

    def fetch(self, ahead: int) -> None:
        """Takes the metrics of finished steps to the host, and waits until no more than `ahead` are unfinished."""
        while self.pending and (len(self.pending) > ahead or finished(self.pending[0][1])):
            number, metrics = self.pending[0]
            wanted, due = number % self.metrics_every == 0, self.display.due
            values = jax.tree.map(on_host, metrics) if wanted or due else jax.block_until_ready(metrics)
            self.pending.popleft()
            if wanted:
                self.history.append((number, values))
            if due:
                self.display.update(number + 1, words(values, self.step.placement))
            if wanted and self.callback is not None:
                self.callback(number, values)

    def keep(self) -> None:
        """Copies the state to the host. The steps behind it are then known to be good."""
        self.fetch(0)  # first: steps whose metrics were not told would not be run again
        self.kept = self.number, HostCopy.of(self.state)

    def save(self) -> None:
        """Saves the state, unless a step that is run again was saved the first time."""
        if self.checkpoints is not None and (self.saved is None or self.number > self.saved):
            self.fetch(0)
            self.checkpoints.save(self.number, self.state, self.facts)
            self.saved = self.number

    def finish(self) -> None:
        """Waits for the last step, and saves the state."""
        jax.block_until_ready(self.state)
        self.fetch(0)
        self.save()
        self.display.update(self.number, "")

    def recover(self, error: Exception) -> None:
        """Goes back to the last copy of the state, on the devices that are left.

        Raises:
          PlacementError: no device is left.
          VnodeError: there is no copy.
          Exception: the error, if no device is to blame and it came before.
        """
        self.pending.clear()
        self.state = None  # makes room for the copy
        before = self.step.placement
        named = error.devices if isinstance(error, DeviceLost) else [d for d in before.devices if not self.alive(d)]
        gone = tuple(device for device in named if device not in self.lost)
        self.lost |= set(gone)
        good = self.kept[0] if self.kept is not None else self.saved
        if good is None:
            if not gone:
                raise error
            raise VnodeError(
                layout_message(
                    f"lost {', '.join(map(str, gone))} at step {self.number}, and there is no copy of the state.",
                    remedies=["keep_every=100 to keep one in the host's memory", "checkpoint=... and checkpoint_every"],
                )
            ) from error
        if not gone:
            if self.blamed == good:
                raise error
            self.blamed = good
        try:
            step = self.sibling(Request(before))
        except PlacementError as none:
            raise none from error
        began = time.perf_counter()
        if self.kept is None:
            assert self.checkpoints is not None
            found = self.checkpoints.newest(lambda number: self.restored(number, step))
            assert found is not None
            good, state = found
            self.saved = good
        else:
            state = self.kept[1].on(step.placement)
        self.state = jax.block_until_ready(state)
        moved, message = time.perf_counter() - began, f"{type(error).__name__}: {error}"
        change = Resize(good, before, step.placement, gone, message, self.number - good, moved)
        self.number = good
        self.history = [(number, metrics) for number, metrics in self.history if number < good]
        self.asked = None
        self.changed(step, change)

    def restored(self, number: int, step: Any = None) -> Any:
        """The state of a checkpoint on the devices of a step."""
        assert self.checkpoints is not None
        return self.checkpoints.restore(number, self.like, (step or self.step).placement)


class Stop:
    """Whether a signal has asked for the end."""

    def __init__(self) -> None:
        self.asked = False

    def handle(self, number: int, frame: types.FrameType | None) -> None:
        """The signal handler."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    @classmethod
    @contextlib.contextmanager
    def on(cls, signals: Iterable[signal.Signals]) -> Iterator[Stop]:
        """Catches signals for as long as the context lasts, then gives them back to who had them."""
        stop, previous = cls(), {}
        try:
            if threading.current_thread() is threading.main_thread():
                for number in signals:
                    # One that is ignored stays so (nohup); a handler that is not Python's could not be restored.
                    if signal.getsignal(number) not in (signal.SIG_IGN, None):
                        previous[number] = signal.signal(number, stop.handle)
            yield stop
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def open_folder(path: str | os.PathLike[str], keep: int) -> Checkpoints:
    """The checkpoints in a folder.

    Raises:
      ImportError: orbax is not installed.
    """
    try:
        from vnode.elastic.checkpoints import Checkpoints
    except ImportError as error:
        raise ImportError("checkpoints need orbax: pip install 'vnode[elastic]'") from error
    return Checkpoints(path, keep)


def loader(data: Any) -> Callable[[int, Placement], Any]:
    """What gives the batch of a step on a placement.

    Raises:
      VnodeError: the data have no batches by step number.
    """
    if hasattr(data, "load"):
        return data.load
    if callable(data):
        return lambda step, placement: data(step)
    if hasattr(data, "__getitem__"):  # before `batch`, which a `grain.MapDataset` has for something else
        return lambda step, placement: data[step]
    if hasattr(data, "batch"):
        return lambda step, placement: data.batch(step)
    raise VnodeError(
        layout_message(
            f"{type(data).__name__} has no batches by step number.",
            facts=["after a failure, or in another run, steps are asked for again"],
            remedies=["vnode.data.Batches(...) for a data set", "or a function of the step number"],
        )
    )


def description(data: Any) -> dict[str, Any] | None:
    """What data say about themselves."""
    return data.describe() if hasattr(data, "describe") else None


def requests(devices: Any, step: Any) -> Callable[[int], Request | None]:
    """What asks for devices, as a function of the step number."""
    if isinstance(devices, Devices):
        return lambda number: devices.request
    if callable(devices):

        def ask(number: int) -> Request | None:
            wanted = devices(number)
            return None if wanted is None else Request.of(wanted)

        return ask
    fixed = Request.of(step.placement if devices is None else devices)
    return lambda number: fixed


def without(placement: Placement, lost: set[Any]) -> Mesh:
    """The devices of a placement that are left; of a mesh with other axes, the whole slices along the nodes' axis.

    Raises:
      PlacementError: none are left.
    """
    mesh, axis = placement.mesh, placement.mesh.axis_names.index(placement.axis)
    slices = np.moveaxis(mesh.devices, axis, 0).reshape(placement.size, -1)
    left = [i for i, devices in enumerate(slices) if not lost & set(devices)]
    if not left:
        raise none_left(lost)
    return Mesh(np.take(mesh.devices, left, axis), mesh.axis_names, axis_types=mesh.axis_types)


def none_left(lost: set[Any]) -> PlacementError:
    """The error of a run that has lost all of its devices."""
    return PlacementError(
        layout_message(
            "no device is left to go on with.",
            facts=[f"lost: {', '.join(sorted(map(str, lost)))}"],
            remedies=["start again with the same checkpoint=... where there are devices: the run resumes"],
        )
    )


def on_host(leaf: Any) -> Any:
    """A metric as NumPy has it. (`jax.device_get` takes ten times as long for a scalar.)"""
    return np.array(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf) else leaf


def finished(metrics: Any) -> bool:
    """Whether metrics are computed."""
    return all(leaf.is_ready() for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array))


def words(metrics: Any, placement: Placement) -> str:
    """Scalar metrics and the placement, in a few words."""
    parts = []
    for path, leaf in jax.tree.leaves_with_path(metrics):
        if np.size(leaf) == 1 and np.issubdtype(np.asarray(leaf).dtype, np.number):
            parts.append(f"{jax.tree_util.keystr(path, simple=True, separator='.') or 'loss'} {np.ravel(leaf)[0]:.4g}")
    counts = sorted(set(placement.counts), reverse=True)
    return "  ".join([*parts[:4], f"{placement.size} devices x {'/'.join(map(str, counts))} nodes"])
