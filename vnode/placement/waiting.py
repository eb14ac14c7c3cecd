"""Waits for other processes: no longer than a deadline, and with an error that says for whom and for what.

Knows processes, the service that `jax.distributed.initialize` starts, and clocks. Must not know what they meet for.

A collective operation has no deadline of ours: gloo gives up after 30 seconds, NCCL after many minutes, a TPU never,
and none of them says which process did not come. So before several processes begin something that none of them can do
alone (the first run of a program that each compiles at its own speed, an exchange that is waited for) they meet at a
barrier of the service. There each tells what it has come for. A meeting takes a few milliseconds; steps whose program
is known do not meet.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from vnode.errors import ProcessError, VnodeError, layout_message

VARIABLE = "VNODE_PROCESS_TIMEOUT"
"""The environment variable that says how many seconds a process waits for another one."""

DEFAULT = 1800.0
"""Seconds, where it is not set: processes may differ by as much as a large program takes to compile."""

LAST = "vnode/last/main/"
"""Where each process tells what it has come for."""

BESIDE = "vnode/last/beside/"
"""Where other threads than the main one tell it."""

TELL_EVERY = 5.0
"""Seconds between two times that a process tells where it is, while it meets nobody."""

_LOCK = threading.Lock()
_TOLD = [0.0]
_MEETINGS: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def service() -> Any:
    """A client of the service that `jax.distributed.initialize` starts; None where none was started.

    jax shows no way to it: what it has for waiting (`jax.experimental.multihost_utils`) are collective operations. So
    one of its inner modules is asked here, in this line alone, and only where there are several processes.
    """
    if not jax.distributed.is_initialized():
        return None
    from jax._src import distributed

    return distributed.global_state.client


def timeout() -> float:
    """How many seconds a process waits for another one.

    Raises:
      VnodeError: the environment variable holds no such number.
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
      what: what they do next, "to run 'step' for the first time", say; the same in all of them.
      processes: which; by default all there are. This one does not wait for itself alone.
      key: of the place, for threads beside the main one, which do not come to it in the same order in all processes.

    Raises:
      ProcessError: one of them did not come in time.
    """
    client = service()
    here, expected = jax.process_index(), sorted(range(jax.process_count()) if processes is None else {*processes})
    if client is None or len(expected) < 2 or here not in expected:
        return
    seconds, board = timeout(), BESIDE if key else LAST
    among = "all" if len(expected) == jax.process_count() else f"{zlib.crc32(repr(expected).encode()):08x}"
    with _LOCK:
        place = f"{among}/{key or next(_MEETINGS[among])}/{zlib.crc32(what.encode()):08x}"
    began = time.monotonic()
    try:
        client.key_value_set(f"{board}{here}", f"{place} {what}", allow_overwrite=True)
        client.wait_at_barrier(f"vnode/{place}", int(1000 * seconds), expected)
    except jax.errors.JaxRuntimeError as error:
        waited = time.monotonic() - began
        raise missed(what, place, here, expected, waited, whereabouts(client, board), error) from None


def tell(what: str) -> None:
    """Tells the others where this process is, now and then; costs next to nothing."""
    client, now = service(), time.monotonic()
    if client is not None and jax.process_count() > 1 and now - _TOLD[0] > TELL_EVERY:
        _TOLD[0] = now
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # whoever needs the service will say that it is gone
            client.key_value_set(f"{LAST}{jax.process_index()}", f"- {what}", allow_overwrite=True)


def ready(tree: Any, what: str) -> Any:
    """Waits until arrays of several processes are computed; in one process, as `jax.block_until_ready`.

    Args:
      tree: the arrays.
      what: they are of: "step 7", say.

    Returns:
      The tree.

    Raises:
      ProcessError: they are not computed in time.
    """
    client = service()
    if client is not None and jax.process_count() > 1:
        began, pause = time.monotonic(), 1e-5
        arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "is_ready")]  # typed keys have none
        while not all(array.is_deleted() or array.is_ready() for array in arrays):
            if time.monotonic() - began > timeout():
                raise late(what, jax.process_index(), time.monotonic() - began, whereabouts(client))
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
    return jax.block_until_ready(tree)


def whereabouts(client: Any, board: str = LAST) -> dict[int, tuple[str, str]]:
    """The place that each process has come to last, and what for; nothing of those that have come to none."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service may be gone
        said = {int(key.rsplit("/", 1)[-1]): value.split(" ", 1) for key, value in client.key_value_dir_get(board)}
        return {process: (place, what) for process, (place, what) in said.items()}
    return {}


def missed(
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
      what: what it has come for.
      place: where.
      here: the process.
      expected: all that should have come.
      waited: seconds that it did.
      found: where each process is; nothing, not even of this one, if the service is gone.
      error: of the service.
    """
    at_once = waited < min(1.0, timeout() / 2)
    others = [process for process in expected if process != here]
    missing = others if at_once else [p for p in others if found and found.get(p, ("", ""))[0] != place]
    names = several(missing) or "the others"
    if not at_once and not found:
        summary = f"process {here} waited {waited:.0f} s for others, and process 0, which could tell for whom, is gone."
    elif at_once or not missing:
        summary = f"process {here} came too late: others had given up waiting, or have ended."
    else:
        summary = f"process {here} waited {waited:.0f} s for {names}."
    return ProcessError(
        layout_message(
            summary,
            facts=[
                f"process {here} came {what}",
                *(seen_last(process, found) for process in missing[:8]),
                *([] if missing and not at_once else [str(error).splitlines()[0][:200]]),
            ],
            remedies=[
                f"see what {names} wrote last: an error, or what it waits for?",
                "call steps, put and run in the same order in every process",
                f"if it was only slow, give it more time: {VARIABLE}={4 * timeout():.0f} (seconds)",
            ],
        )
    )


def late(what: str, here: int, waited: float, found: dict[int, tuple[str, str]]) -> ProcessError:
    """The error of a process that waited for what all of them compute together."""
    others = [process for process in range(jax.process_count()) if process != here]
    return ProcessError(
        layout_message(
            f"process {here} waited {waited:.0f} s for {what}, which the processes compute together.",
            facts=[seen_last(process, found) for process in others[:8]],
            remedies=[
                "see what the others wrote last: did one end, or wait for something else, such as its data?",
                f"if it was only slow, give it more time: {VARIABLE}={4 * timeout():.0f} (seconds)",
            ],
        )
    )


def seen_last(process: int, found: dict[int, tuple[str, str]]) -> str:
    """What is known of a process.

    >>> seen_last(1, {1: ("", "to save a checkpoint")}), seen_last(2, {})
    ('process 1 was seen last when it came to save a checkpoint', 'process 2 was not seen')
    """
    return f"process {process} " + (
        f"was seen last when it came {found[process][1]}" if process in found else "was not seen"
    )


def check_own(asks: str, devices: Iterable[Any], remedies: Sequence[str]) -> None:
    """Refuses devices of other processes, for what is measured or compared in one process.

    Args:
      asks: the function that was called.
      devices: that it is to use.
      remedies: what to do instead.

    Raises:
      ProcessError: some are another process's.
    """
    away = sorted({device.process_index for device in devices} - {jax.process_index()})
    if away:
        raise ProcessError(
            layout_message(
                f"{asks} runs in one process, and was to use devices of {several(away)} in process "
                f"{jax.process_index()}.",
                facts=["each process would come to an answer of its own, and go on in another way than the others"],
                remedies=remedies,
            )
        )


def several(processes: list[int]) -> str:
    """Processes for people.

    >>> several([1]), several([0, 2, 3])
    ('process 1', 'processes 0, 2, 3')
    """
    shown = ", ".join(map(str, processes[:8])) + (", ..." if len(processes) > 8 else "")
    return f"process{'es' if len(processes) > 1 else ''} {shown}" if processes else ""
