"""Training that goes on when devices come and go: the function that people call.

Knows what may be passed to it, and who does what. Must not know how anything is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import numbers
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from vnode.data.prefetch import Prefetch
from vnode.data.source import Cycle, loader
from vnode.elastic.driver import Driver
from vnode.elastic.evaluation import check_evaluation
from vnode.elastic.options import CHECKPOINTS_KEPT, RunOptions
from vnode.elastic.run_checks import check_step, check_storable, check_takes
from vnode.elastic.run_devices import responds
from vnode.elastic.run_identity import differing_lines, facts_of_run
from vnode.elastic.run_result import Result
from vnode.elastic.signals import SecondInterrupt, Stop
from vnode.errors import CheckpointError, VnodeError
from vnode.placement.agreement import check_same
from vnode.placement.donated import check_not_donated
from vnode.placement.world import world
from vnode.plan.nodes.auto_step import AutoStep
from vnode.show.progress import display
from vnode.tracebacks import api_boundary
from vnode.workers import CHECKPOINT, SUPERVISOR

if TYPE_CHECKING:
    from vnode.elastic.checkpoints import Checkpoints

logger = logging.getLogger("vnode")


@api_boundary
def run(
    step: Any,
    state: Any,
    data: Any,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    start: int = 0,
    devices: Any = None,
    compile_ahead: bool | Literal["warm_up"] = False,
    prefetch: int = 2,
    keep_every: int | None = 100,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    checkpoint_seconds: float | None = None,
    checkpoints_kept: int | None = None,
    callback: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    metrics_every: int = 1,
    history_kept: int = 10_000,
    evaluate: Callable[..., Any] | None = None,
    evaluate_every: int | None = None,
    evaluate_callback: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    best_metric: str | None = None,
    best_mode: Literal["min", "max"] = "min",
    peak_flops: float | None = None,
    writers: Sequence[Callable[[int, dict[str, Any]], Any]] = (),
    on_nan: Literal["continue", "stop"] = "continue",
    stop_signals: Iterable[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    alive: Callable[[Any], bool] = responds,
    progress: bool | None = None,
) -> Result:
    """Runs a virtualized step over and over, on devices that may change between any two steps.

    It logs to the logger ``"vnode"`` of `logging`: warnings, and what happens to devices and checkpoints as
    information.

    Args:
      step: a virtualized ``(state, batch) -> (state, metrics)``; or one of `vnode.nnx.virtualize`, ``(*objects, batch)
        -> metrics``.
      state: the state before step `start`: a pytree of arrays and other leaves, which are passed through. It is the
        caller's no more if the step donates it. With an nnx step: an object, or a tuple of the objects that it takes;
        they are updated in place when the run ends.
      data: the batch of each step: `vnode.data.Batches`, a function of the step number, a list, or something with
        ``batch(step)``. Must depend on nothing else: a step may be asked for again. Arrays on the host are copied, so
        one buffer may be filled again and again.
      steps: how many steps in all, those before `start` or a checkpoint that is resumed from included.
      epochs: in place of `steps`: how often each example is read, for data that say how many batches that is:
        `vnode.data.Batches`, lists, what has a length. Batches of a list are then read again in the same order.
      start: how many steps `state` has behind it, to go on with a loop that began elsewhere. A checkpoint in the folder
        that has more goes before it.
      devices: a sequence of devices, a number for the first so many, a `Placement`, a `Devices`, or a function of the
        step number that returns one of the first three, or None for no change. The step's own placement by default.
      compile_ahead: whether to go on on the devices that there are until the step is compiled for those that are asked
        for, in a background thread; with "warm_up" until it has also run there once, with copies
        (`VirtualStep.warm_up`). Otherwise they are changed before the next step, which waits for its program.
      prefetch: batches to load ahead in a background thread; 0 for none.
      keep_every: copy the state to the host after so many steps, to fall back to. The loop waits for the devices
        while it copies. None for no copies: a failure then falls back to the last checkpoint.
      checkpoint: a folder for checkpoints; by default, in a worker, that of ``vnode run --checkpoint``. If it has one,
        the run resumes from it, on whatever devices. Needs `orbax-checkpoint`. There is always one of the last step,
        and of the last state before an error, if a step was made.
      checkpoint_every: further checkpoints after so many steps, written in the background.
      checkpoint_seconds: further checkpoints after so many seconds; by default ten minutes, if `checkpoint_every` is
        not given.
      checkpoints_kept: how many of the last checkpoints stay; 3 by default.
      callback: ``callback(step, metrics)`` is called with a step's number and its metrics on the host, in order, up to
        4 steps late; again for steps that are run again. If it returns True, the run ends 4 steps after that step, on
        any devices. ``callback(step, metrics, state)`` is called before the next step begins, for which the loop waits;
        the state is that after the step, to be read only, and True ends the run at once. Several callbacks may be given
        in a list: they are called in its order.
      metrics_every: fetch the metrics of every so many steps.
      history_kept: the last so many metrics are in the result, as far as they take no more than 64 MiB.
      evaluate: a `vnode.elastic.Evaluation`, or a function of the state that returns metrics. Called at the end, unless
        a signal came. The state is to be read only.
      evaluate_every: evaluate after so many steps too.
      evaluate_callback: as `callback`, with how many steps the state has behind it and the metrics of an evaluation;
        True ends the run at once.
      best_metric: the name of a metric of evaluations. The state with the best is a checkpoint that stays, besides the
        last ones; `Result.best` says which it is, also of earlier runs in the folder.
      best_mode: whether ``"min"`` or ``"max"`` is the best.
      peak_flops: operations a second of one device at its best, for the utilization; by default what makers say of
        TPUs and GPUs that `vnode.partition` knows, in bfloat16.
      writers: called with a step number and metrics by name: `vnode.elastic.JsonLines`, `vnode.elastic.TensorBoard`, or
        any function. Names of evaluations begin with ``evaluate/``; ``time/seconds`` since the run began,
        ``time/examples_per_second`` and, where the peak is known, ``time/utilization`` (scalar operations of the step
        as written) are added to those of steps.
      on_nan: what to do when the loss is not finite (the metric named ``"loss"``, or any if none is): ``"continue"``
        logs a warning once; ``"stop"`` ends the run with the last good state: the steps behind it had finite losses,
        and it holds no NaN.
      stop_signals: end the run after the current step, with a checkpoint, when one of these comes; a second Ctrl-C
        interrupts at once, though not while a checkpoint is written. Only in the main thread: elsewhere signals cannot
        be caught.
      alive: whether a device still works; asked of each after an error that does not say which failed.
      progress: a progress bar; by default if standard error is a terminal and `rich` is installed.

    Returns:
      The final state, and what happened.

    Raises:
      ValueError: an option is not what it must be, or has no effect without another one; or nobody knows how many steps
        `epochs` are.
      VnodeError: no device is left; a device failed and there is nothing to fall back to; the step is not virtualized,
        does not return a state and metrics, or returns a state of other types than it was given; or the data have no
        batches by step number.
      CheckpointError: the folder holds checkpoints of another state, of other data, or of another number of nodes; or
        the state, which the error has as `state`, cannot be saved.
      Exception: what the step, the data, a writer or a callback raises, after the state was saved. An error of jax's
        runtime is raised if no device is to blame and it comes again when the steps since the last copy are run again.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, vnode
      >>> @vnode.virtualize(virtual_nodes=4)
      ... def step(w, batch):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)
      ...     return w - 0.1 * grad, {"loss": loss}
      >>> batches = vnode.data.Batches({"x": np.eye(12, 3, dtype=np.float32)}, batch_size=8)
      >>> vnode.elastic.run(step, jnp.ones(3), batches, steps=5, devices=jax.devices()[:1])
      Result(step=5, 5 steps in history)
    """
    with world().run():  # all processes learn of its error
        options = RunOptions(
            steps=number_of_steps(steps, epochs, data),
            start=start,
            devices=devices,
            compile_ahead=compile_ahead,
            prefetch=prefetch,
            keep_every=keep_every,
            checkpoint=default_folder() if checkpoint is None and SUPERVISOR in os.environ else checkpoint,
            checkpoint_every=checkpoint_every,
            checkpoint_seconds=checkpoint_seconds,
            checkpoints_kept=checkpoints_kept,
            callback=callback,
            metrics_every=metrics_every,
            history_kept=history_kept,
            evaluate=evaluate,
            evaluate_every=evaluate_every,
            evaluate_callback=evaluate_callback,
            best_metric=best_metric,
            best_mode=best_mode,
            peak_flops=peak_flops,
            writers=writers,
            on_nan=on_nan,
            stop_signals=stop_signals,
            alive=alive,
            progress=progress,
        )
        return begin(step, state, data if epochs is None else repeated(data), options)


DEFAULTS = itertools.count()
"""Counts the runs of this process that name no folder of checkpoints."""


def default_folder() -> str | None:
    """The folder of checkpoints that the job was given; each further run of a script has one of its own beside it."""
    given = os.environ.get(CHECKPOINT)
    return None if given is None else folder_of_call(given, next(DEFAULTS))


def folder_of_call(folder: str, call: int) -> str:
    """A folder for one of the runs of a script: another run's checkpoints would be taken for its own.

    >>> folder_of_call("runs/7/", 0), folder_of_call("runs/7/", 1)
    ('runs/7/', 'runs/7.run-2')
    """
    return folder if call == 0 else f"{folder.rstrip('/')}.run-{call + 1}"


def begin(step: Any, state: Any, data: Any, options: RunOptions) -> Result:
    """`run` with options that are checked."""
    check_evaluation(options.evaluate)
    check_not_donated({"state": state}, returned="result.state")
    if options.checkpoint is not None:
        check_storable(state)
    if hasattr(step, "functional"):
        check_takes(step, len(state) if isinstance(state, tuple) else 1)
        return run_objects(step, state, data, options)
    check_step(step)
    check_takes(step)
    return run_step(step, state, data, options)


def number_of_steps(steps: int | None, epochs: float | None, data: Any) -> Any:
    """The number of steps of a run, from `steps` or `epochs`.

    Raises:
      ValueError: both are given, or neither; or nobody knows how many steps an epoch has.
    """
    if epochs is None:
        if steps is None:
            raise ValueError("say how long to run: steps=..., or epochs=... for data that have a length")
        return steps
    if steps is not None:
        raise ValueError(f"give steps={steps!r} or epochs={epochs!r}, not both")
    if isinstance(epochs, bool) or not isinstance(epochs, numbers.Real) or not 0 <= epochs < math.inf:
        raise ValueError(f"epochs must be a number, at least 0, not {epochs!r}")
    order = getattr(data, "order", None)
    length = order.steps_per_epoch if order is not None else len(data) if hasattr(data, "__len__") else None
    if length is None:
        raise ValueError(
            f"epochs={epochs!r}: {type(data).__name__} does not tell its number of batches; give steps=..."
        )
    return math.ceil(epochs * length)


def repeated(data: Any) -> Any:
    """Data that are read in every epoch: the batches of a list again and again, others as they are."""
    return Cycle(data) if isinstance(data, Sequence) and not isinstance(data, str | tuple) else data


def run_step(step: Any, state: Any, data: Any, options: RunOptions) -> Result:
    """`run` for a step on pytrees."""
    load, make = loader(data, options.steps), Driver
    if SUPERVISOR in os.environ:
        from vnode.elastic.membership import Membership  # a run without workers needs none of this
        from vnode.elastic.replaced_worker import ReplacedDriver

        check_for_worker(step, options)
        member = Membership.from_environment()
        if member.order is None:
            return run_as_worker(member, step, state, data, load, options)
        make, step = functools.partial(ReplacedDriver, member), step.on(world().devices)
        options = dataclasses.replace(options, progress=False)
    if world().has_others:
        facts = facts_of_run(step, state, data, options)
        check_same("to begin a run", facts, shows={"state": differing_lines})
    with contextlib.ExitStack() as stack:
        stack.enter_context(plain_interrupt())
        stop = stack.enter_context(Stop.catch(options.stop_signals))  # first, so that signals stay caught to the end
        saved = None if options.checkpoint is None else stack.enter_context(open_folder(options, stop))
        if isinstance(step, AutoStep):
            step = with_known_nodes(step, state, load, options, saved)
        feed = stack.enter_context(Prefetch(load, depth=options.prefetch, stop=options.steps))
        driver = make(step, data, feed, state, options, saved, stop)
        del state
        stack.callback(driver.close)
        driver.display = stack.enter_context(display(options.progress, driver.number, options.steps))
        result = driver.run()
        driver.end_run(result)
        return result


def check_for_worker(step: Any, options: RunOptions) -> None:
    """Looks whether workers whose number changes can do what is asked for.

    Raises:
      VnodeError: an option needs what the supervisor decides.
    """
    if isinstance(step, AutoStep):
        raise VnodeError(
            "virtual_nodes='auto' is not for workers: the number must stay the same when workers come and go.",
            remedies=["give a number: virtual_nodes=8", "run the script alone to see which one 'auto' chooses"],
        )
    if options.devices is not None:
        raise VnodeError(
            f"devices={options.devices!r} has no meaning for a worker: its supervisor decides where the step runs.",
            remedies=["leave devices= out", "or run the script without vnode run"],
        )


def run_as_worker(member: Any, step: Any, state: Any, data: Any, load: Any, options: RunOptions) -> Result:
    """`run` in a process that a supervisor has started, as one of several that come and go."""
    from vnode.elastic.replaced_worker import Replaced
    from vnode.elastic.worker_loop import WorkerDriver

    with contextlib.ExitStack() as stack:
        stack.enter_context(plain_interrupt())
        stop = stack.enter_context(Stop.catch(options.stop_signals))
        feed = stack.enter_context(Prefetch(load, depth=options.prefetch, stop=options.steps))
        driver = WorkerDriver(member, step, data, feed, state, options, None, stop)
        del state
        stack.callback(driver.close)
        driver.display = stack.enter_context(display(False, driver.number, options.steps))
        result = driver.run()
        driver.end_run(result)
        if result.stopped and member.replaced:  # others go on with the script from here
            raise Replaced(0)
        return result


@contextlib.contextmanager
def plain_interrupt() -> Iterator[None]:
    """Lets a second Ctrl-C end the program as Python ends it, which shells tell from its own kind only."""
    try:
        yield
    except SecondInterrupt:
        raise KeyboardInterrupt from None


def run_objects(step: Any, objects: Any, data: Any, options: RunOptions) -> Result:
    """`run` for a step that updates objects in place: on their arrays, which they are given back in the end."""
    pure, state, update = step.functional(objects)
    result = run_step(pure, state, data, options)
    result.state = update(result.state)
    return result


@contextlib.contextmanager
def open_folder(options: RunOptions, stop: Stop) -> Iterator[Checkpoints]:
    """The checkpoints in a folder; waits in the end until they are written, whatever signal comes.

    Raises:
      ImportError: orbax is not installed.
    """
    try:
        from vnode.elastic.checkpoints import Checkpoints
    except ImportError as error:
        raise ImportError("checkpoints need orbax: pip install 'vnode[elastic]'") from error
    assert options.checkpoint is not None
    checkpoints = Checkpoints(options.checkpoint, options.checkpoints_kept or CHECKPOINTS_KEPT)
    try:
        yield checkpoints
    except BaseException:
        if world().has_others:  # orbax would wait for the other processes, which may know of no error
            checkpoints.release()
            raise
        try:
            with stop.deferred_interrupts():
                checkpoints.close()
        except CheckpointError as failed:  # the first error is the one to tell
            logger.error("%s", failed)
        raise
    with stop.deferred_interrupts():
        checkpoints.close()


def with_known_nodes(
    step: AutoStep, state: Any, load: Callable[..., Any], options: RunOptions, saved: Checkpoints | None
) -> Any:
    """The step on the number of nodes that the checkpoint was made with; where there is none, on one that fits."""
    found = None if saved is None else saved.newest(saved.facts)
    known = None if found is None else found[1].get("step")
    if known is not None:
        return step.restore_choice(known["virtual_nodes"], known["nodes in a lane"])
    return step.chosen(state, load(options.start, step.template))
