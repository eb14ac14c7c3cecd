"""Waits for other processes: up to a deadline, with an error that names the process and the purpose.

Knows processes, the service that `jax.distributed.initialize` starts, and clocks. Must not know why processes meet.

Collectives have other deadlines: gloo gives up after 30 seconds, NCCL after many minutes, a TPU never, and none of them
names the missing process. So several processes meet at a barrier of the service before they begin something together:
the first run of a program that each compiles at its own speed, or a blocking exchange. There each process posts its
purpose, and may leave a word that all others read. A meeting takes a few milliseconds; steps with a compiled program do
not meet.

Every wait reads the board (`vnode.placement.failure_board`): nobody waits for a failed process.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from vnode.compat import carry_settings
from vnode.errors import ProcessError, VnodeError, layout_message
from vnode.placement.failure_board import NOTICE_DELAY, Notice
from vnode.placement.world import World, is_local, own_index, world
from vnode.threads import background

VARIABLE = "VNODE_PROCESS_TIMEOUT"
"""The environment variable with the seconds that a process waits for another one."""

DEFAULT = 1800.0
"""Seconds if it is not set: processes may differ by the time that a large program takes to compile."""

PLACE_KEY = "vnode/last/main/"
"""Keys of each process's latest place."""

THREAD_PLACE_KEY = "vnode/last/beside/"
"""Keys of the latest place of threads other than the main one."""

WORD_KEY = "vnode/said/"
"""Keys of each process's word at a meeting."""

TELL_EVERY = 5.0
"""Seconds between two posts of a process's place, while it meets nobody."""

GRACE = 0.5
"""Seconds that a wait goes on after another process has failed: its earlier results may still arrive."""

PATIENCE = 10.0
"""As `GRACE`, for results of devices, after the regular end of another process."""

LOOK_EVERY = 2.0
"""Seconds between two looks at the places of missing processes."""

T = TypeVar("T")


def timeout() -> float:
    """The seconds that a process waits for another one.

    Raises:
      VnodeError: the environment variable is no positive number.
    """
    text = os.environ.get(VARIABLE)
    try:
        seconds = DEFAULT if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise VnodeError(f"{VARIABLE} must be a number of seconds above 0, not {text!r}")
    return seconds


def meet(what: str, processes: Iterable[int] | None = None, key: str = "") -> None:
    """Waits until other processes have come to the same place; all of them must call it.

    Args:
      what: the next action, such as "to run 'step' for the first time"; the same in all of them.
      processes: the processes; all by default. A single process waits for nobody.
      key: names the place, for threads other than the main one, which do not come in the same order in all processes.

    Raises:
      ProcessError: a process has failed, or did not come in time.
    """
    exchange_words(what, "", processes, key)


def exchange_words(what: str, word: str, processes: Iterable[int] | None = None, key: str = "") -> dict[int, str]:
    """As `meet`; each process leaves a word there, and reads those of all.

    Args:
      what: the next action.
      word: this process's word; if it is empty, it must be so in all processes, and none is read.
      processes: the processes; all by default.
      key: as for `meet`.

    Returns:
      The words by process; this one's alone if nobody is met.

    Raises:
      ProcessError: a process has failed, or did not come in time.
    """
    here = world()
    expected = sorted(range(here.count) if processes is None else {*processes})
    if not here.has_others or len(expected) < 2 or here.index not in expected:
        return {here.index: word}
    client, board, seconds = here.client, THREAD_PLACE_KEY if key else PLACE_KEY, timeout()
    among, number = next_meeting(here, expected, key)
    place = f"{number}/{zlib.crc32(what.encode()):08x}"
    began, others = time.monotonic(), [process for process in expected if process != here.index]

    def arrive() -> None:
        if word:
            client.key_value_set(f"{WORD_KEY}{place}/{here.index}", word)
        client.key_value_set(f"{board}{here.index}", f"{place} {what}", allow_overwrite=True)
        client.wait_at_barrier(f"vnode/{place}", int(1000 * seconds), expected)

    def check_places(waited: float) -> None:
        """Raises if another process has come to the same meeting for something else."""
        for process, (there, why) in whereabouts(client, board).items():
            if not key and process in others and there != place and there.rsplit("/", 1)[0] == number:
                raise mismatch_error(here.index, what, process, why)

    try:
        try:
            run_watched(arrive, what, others, scopes=(number,), patience=seconds + PATIENCE, look=check_places)
        except jax.errors.JaxRuntimeError as error:
            waited = time.monotonic() - began
            check_failed(what, others, (number,), cause=error)
            raise absence_error(what, place, here.index, expected, waited, whereabouts(client, board), error) from None
    except ProcessError as error:
        here.tell(error, number, *here.scopes)
        raise
    if not word:
        return {}
    words = {int(name.rsplit("/", 1)[-1]): text for name, text in client.key_value_dir_get(f"{WORD_KEY}{place}/")}
    before, here.posted[among] = here.posted.get(among), f"{WORD_KEY}{place}/{here.index}"
    if before is not None:  # all have read it, or they would not be here
        client.key_value_delete(before)
    return words


def next_meeting(here: World, expected: Sequence[int], key: str = "", come: bool = True) -> tuple[str, str]:
    """The processes that meet, and the name of their next meeting.

    Each run has its own count: processes that left a run at different places may begin the next one together.

    Args:
      here: this process's world.
      expected: the processes, in order.
      key: as for `meet`.
      come: whether this process attends the meeting now, so that it is counted.
    """
    among = "all" if len(expected) == here.count else f"{zlib.crc32(repr(list(expected)).encode()):08x}"
    inside = f"{here.scopes[-1]}/{among}".replace(" ", "-") if here.scopes else among
    if key:
        return among, f"{inside}/{key}"
    with here.lock:
        number = here.meetings[inside]
        here.meetings[inside] += come
    return among, f"{inside}/{number}"


@contextlib.contextmanager
def upcoming_meeting(processes: Collection[int]) -> Iterator[str]:
    """A context for work before the next meeting of some processes; yields the name of that meeting.

    A process that fails inside posts that name (`tell_failure`). Then the others skip the meeting but count it: those
    that catch the error meet at the next one.
    """
    here, expected = world(), sorted(processes)
    _, place = next_meeting(here, expected, come=False)
    try:
        yield place
    except ProcessError as error:
        if error.told and next_meeting(here, expected, come=False)[1] == place:
            next_meeting(here, expected)
        raise


def interruptible(work: Callable[[], T], what: str, others: Collection[int], *, scopes: Collection[str] = ()) -> T:
    """Does long Python work in this thread, interrupted if another process has failed.

    Args:
      work: waits for nobody, and may be interrupted anywhere.
      what: the action, such as "to trace 'step'".
      others: the processes concerned.
      scopes: further scopes besides the current run.

    Returns:
      The result of `work`.

    Raises:
      ProcessError: another process has failed.
      Exception: raised by `work`.
    """
    if not world().has_others:
        return work()

    def watch(is_done: Callable[[], bool]) -> None:
        wait_until(is_done, lambda: time.sleep(0.05), what, others, scopes=scopes, patience=math.inf)

    from vnode.placement.interruption import interruptible as until_interrupted  # only for several processes

    return until_interrupted(work, watch)


def tell(what: str) -> None:
    """Posts this process's place now and then; costs next to nothing.

    Raises:
      ProcessError: another process has failed.
    """
    here, now = world(), time.monotonic()
    if not here.has_others:
        return
    if now - here.told_at > TELL_EVERY:
        here.told_at = now
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # users of the service will report that it is gone
            here.client.key_value_set(f"{PLACE_KEY}{here.index}", f"- {what}", allow_overwrite=True)


def tell_failure(error: BaseException, processes: Collection[int]) -> None:
    """Posts that this process has failed before the next meeting of some processes."""
    here = world()
    if here.has_others and len(processes) > 1 and here.index in processes and not getattr(error, "told", False):
        here.tell(error, next_meeting(here, sorted(processes))[1], *here.scopes)


def block_until_ready(tree: Any, what: str) -> Any:
    """Waits until arrays of several processes are computed; in one process, as `jax.block_until_ready`.

    Args:
      tree: the arrays.
      what: their origin, such as "step 7".

    Returns:
      The tree.

    Raises:
      ProcessError: another process has failed, or the arrays are not ready in time.
    """
    here = world()
    if not here.has_others:
        return jax.block_until_ready(tree)
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "is_ready")]  # typed keys have none
    pause = [1e-5]

    def computed() -> bool:
        return all(array.is_deleted() or array.is_ready() for array in arrays)

    def sleep() -> None:
        time.sleep(pause[0])
        pause[0] = min(2 * pause[0], 0.005)

    wait_until(computed, sleep, f"for {what}", here.others, patience=timeout(), linger=PATIENCE)
    try:
        return jax.block_until_ready(tree)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        check_failed(f"for {what}", here.others, cause=error)
        raise


def run_watched(
    work: Callable[[], T],
    what: str,
    others: Collection[int],
    *,
    scopes: Collection[str] = (),
    patience: float | None = None,
    look: Callable[[float], None] | None = None,
) -> T:
    """Does work that waits for other processes in a thread that is abandoned if one of them has failed.

    Args:
      work: the work.
      what: the action, such as "to save a checkpoint".
      others: the processes concerned.
      scopes: further scopes besides the current run.
      patience: the most seconds it may take; by default as long as processes wait for one another.
      look: called now and then with the elapsed seconds.

    Returns:
      The result of `work`.

    Raises:
      ProcessError: another process has failed, or the work is not done in time.
      Exception: raised by `work`.
    """
    done, results, errors = threading.Event(), [], []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    background(carry_settings(run), "vnode-wait")
    seconds = timeout() if patience is None else patience
    wait_until(done.is_set, lambda: done.wait(0.01), what, others, scopes=scopes, patience=seconds, look=look)
    if errors:
        raise errors[0]
    return results[0]


def wait_until(
    done: Callable[[], bool],
    sleep: Callable[[], Any],
    what: str,
    others: Collection[int],
    *,
    patience: float,
    scopes: Collection[str] = (),
    linger: float = GRACE,
    look: Callable[[float], None] | None = None,
) -> None:
    """Waits until something is done in which other processes take part.

    Args:
      done: returns whether it is done.
      sleep: sleeps briefly.
      what: the action, or the awaited result.
      others: the processes concerned.
      patience: the most seconds to wait.
      scopes: further scopes besides the current run.
      linger: seconds to wait after the regular end of another process.
      look: called now and then with the elapsed seconds.

    Raises:
      ProcessError: another process has failed, or the wait takes too long.
    """
    here, began = world(), time.monotonic()
    looked, noticed = began, 0.0
    while not done():
        sleep()
        now = time.monotonic()
        notice = None if here.board is None else here.board.find_failure(others, (*scopes, *here.scopes))
        if notice is not None:
            noticed = noticed or now
            if now - noticed >= grace(notice, linger) and not done():
                raise failure_error(notice, what, here.index)
        if now - began > patience and not done():
            raise deadline_error(what, here, now - began)
        if look is not None and now - looked > max(LOOK_EVERY, here.count / 50):
            looked = now
            look(now - began)


def grace(notice: Notice, linger: float) -> float:
    """Seconds that a wait goes on after a notice; `linger` if it is of a regular end.

    If process 0 is gone, jax is about to abort this process.
    """
    if notice.kind == "ended" and not notice.text:
        return linger
    return 0.0 if notice.lost and not notice.process else GRACE


def check_failed(
    what: str, others: Collection[int] | None = None, scopes: Collection[str] = (), *, cause: BaseException
) -> None:
    """After a runtime error, waits a moment for the notice of another process's failure that may have caused it.

    Raises:
      ProcessError: another process has failed.
    """
    here = world()
    if here.board is None or isinstance(cause, VnodeError) or not is_runtime_error(cause):
        return
    notice = here.board.await_failure(here.others if others is None else others, (*scopes, *here.scopes), NOTICE_DELAY)
    if notice is not None:
        raise failure_error(notice, what, here.index) from cause


def is_runtime_error(error: BaseException) -> bool:
    """Whether an error is one of jax's runtime, or of its users that wait for other processes.

    >>> is_runtime_error(ValueError("INTERNAL: connection closed")), is_runtime_error(ValueError("no such file"))
    (True, False)
    """
    return isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]{6,}: ", str(error)) is not None


def check_others(what: str, step: int | None = None) -> None:
    """Checks whether another process has failed; costs nothing.

    Args:
      what: this process's action.
      step: the step of its run, if it is in one.

    Raises:
      ProcessError: another process has failed.
    """
    here = world()
    if here.board is not None and step is not None:
        here.board.step = step
    notice = None if here.board is None else here.board.find_failure(here.others, here.scopes)
    if notice is not None and notice.text:
        raise failure_error(notice, what, here.index)


def failure_error(notice: Notice, what: str, here: int) -> ProcessError:
    """The error in a process after another one has failed.

    Args:
      notice: the other process's notice.
      what: this process's action, or awaited result.
      here: this process.
    """
    name, own = process_names([notice.process]), process_names([here])
    again = "then start all processes again: a run with checkpoint=... goes on from the last one"
    return ProcessError(
        layout_message(
            f"{name} {notice.description}",
            facts=[f"{own} waited {what}" if what.startswith("for ") else f"{own} came {what}"],
            remedies=[f"see what {name} wrote last", *([] if world().workers else [again])],
        ),
        process=notice.process,
        told=notice.kind != "left",  # or the process that has left would not know
    )


def mismatch_error(here: int, what: str, process: int, why: str) -> ProcessError:
    """The error of processes that have come to the same meeting for different things."""
    return ProcessError(
        layout_message(
            f"{process_names([here, process])} do different things.",
            facts=[f"{process_names([here])} came {what}", f"{process_names([process])} came {why}"],
            remedies=["call steps, put and run in the same order in every process"],
        ),
        process=process,
    )


def whereabouts(client: Any, board: str = PLACE_KEY) -> dict[int, tuple[str, str]]:
    """The latest place and purpose of each process; processes that have met nobody are missing."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service may be gone
        said = {int(key.rsplit("/", 1)[-1]): value.split(" ", 1) for key, value in client.key_value_dir_get(board)}
        return {process: (place, what) for process, (place, what) in said.items()}
    return {}


def absence_error(
    what: str,
    place: str,
    here: int,
    expected: list[int],
    waited: float,
    found: dict[int, tuple[str, str]],
    error: Exception,
) -> ProcessError:
    """The error of a process that waited in vain, or came too late.

    Args:
      what: its action.
      place: the meeting.
      here: the process.
      expected: all processes that should have come.
      waited: the seconds that it waited.
      found: the place of each process; empty if the service is gone.
      error: the service's error.
    """
    at_once = waited < min(1.0, timeout() / 2)
    others = [process for process in expected if process != here]
    missing = others if at_once else [p for p in others if found and found.get(p, ("", ""))[0] != place]
    names, own = process_names(missing) or "the others", process_names([here])
    if not at_once and not found:
        teller = "the service" if world().workers else "process 0"
        summary = f"{own} waited {waited:.0f} s for others, and {teller}, which could tell for whom, is gone."
    elif at_once or not missing:
        summary = f"{own} came too late: others had given up waiting, or have ended."
    else:
        summary = f"{own} waited {waited:.0f} s for {names}."
    return ProcessError(
        layout_message(
            summary,
            facts=[
                f"{own} came {what}",
                *(last_seen(process, found) for process in missing[:8]),
                *([] if missing and not at_once else [str(error).splitlines()[0][:200]]),
            ],
            remedies=[
                f"see what {names} wrote last: an error, or what it waits for?",
                "call steps, put and run in the same order in every process",
                f"if it was only slow, allow more time: {VARIABLE}={4 * timeout():.0f} (seconds)",
            ],
        )
    )


def deadline_error(what: str, here: World, waited: float) -> ProcessError:
    """The error of a process that waited too long for a joint result of several."""
    found = whereabouts(here.client)
    return ProcessError(
        layout_message(
            f"{process_names([here.index])} waited {waited:.0f} s {what}, which the processes "
            f"{'compute' if what.startswith('for ') else 'do'} together.",
            facts=[last_seen(process, found) for process in here.others[:8]],
            remedies=[
                "see what the others wrote last: did one end, or wait for something else, such as its data?",
                f"if it was only slow, allow more time: {VARIABLE}={4 * timeout():.0f} (seconds)",
            ],
        )
    )


def last_seen(process: int, found: dict[int, tuple[str, str]]) -> str:
    """The latest known facts about a process.

    >>> last_seen(1, {1: ("", "to save a checkpoint")}), last_seen(2, {})
    ('process 1 was seen last when it came to save a checkpoint', 'process 2 was not seen')
    """
    return f"{process_names([process])} " + (
        f"was seen last when it came {found[process][1]}" if process in found else "was not seen"
    )


def check_own(asks: str, devices: Iterable[Any], remedies: Sequence[str]) -> None:
    """Raises for devices of other processes, where one process measures or compares.

    Args:
      asks: the called function.
      devices: the devices.
      remedies: advice for the error message.

    Raises:
      ProcessError: some devices belong to another process.
    """
    away = [device for device in devices if not is_local(device)]
    if away:
        names = process_names(sorted({device.process_index for device in away}))
        raise ProcessError(
            layout_message(
                f"{asks} runs in one process, and was to use devices of {names} in process {own_index(away[0])}.",
                facts=["each process would get its own answer, and continue differently from the others"],
                remedies=remedies,
            )
        )


def process_names(processes: list[int]) -> str:
    """Processes in words; those of a job's generation by the numbers of its workers.

    >>> process_names([1]), process_names([0, 2, 3])
    ('process 1', 'processes 0, 2, 3')
    """
    workers = world().workers
    kinds = ("worker", "workers") if workers else ("process", "processes")
    numbers = [workers[process] for process in processes] if workers else processes
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(processes) > 8 else "")
    return f"{kinds[len(processes) > 1]} {shown}" if processes else ""
