"""Writes the checkpoints of a run, in the background, by `orbax-checkpoint`.

Knows orbax and what a state is made of. Must not know steps, nor when a checkpoint is due.

Orbax writes to a temporary folder and renames it, so that an unfinished checkpoint is never taken for a good one.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import socket
import sys
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.errors import JaxRuntimeError

from vnode.elastic.checkpoint_contents import Entry, arrays_by_path, stored_arrays, with_arrays
from vnode.elastic.integrity import checksums
from vnode.elastic.lock import NAME as LOCK
from vnode.elastic.lock import FolderLock, prepare
from vnode.elastic.logs import Quiet
from vnode.elastic.reader import NAME, Header, located
from vnode.elastic.shared_reader import SharedReader, seen_soon
from vnode.errors import CheckpointError, ProcessError, VnodeError, layout_message
from vnode.placement.failure_board import NOTICE_DELAY
from vnode.placement.leaf_sharding import fitting_sharding, partition
from vnode.placement.placement import Placement
from vnode.placement.process_barrier import (
    check_failed,
    exchange_words,
    failure_error,
    is_runtime_error,
    meet,
    process_names,
    timeout,
)
from vnode.placement.world import in_world, world

SHOWN = 4
"""Processes that a message shows."""

FULL = re.compile("no space left|disk quota exceeded|ENOSPC|EDQUOT|not enough space", re.IGNORECASE)
"""Texts of errors about full disks that have no error number."""

T = TypeVar("T")


class Checkpoints(SharedReader):
    """The checkpoints of one run, in one folder, which no other run may write to at the same time.

    Args:
      path: the folder, which is made if it is not there; or an `orbax.checkpoint.CheckpointManager`, which then
        decides what it keeps, and is not closed.
      keep: how many of the last checkpoints stay. Other files in the folder stay, too.

    Raises:
      CheckpointError: the folder cannot be written, or another run writes to it.
    """

    def __init__(self, path: str | os.PathLike[str] | ocp.CheckpointManager, keep: int) -> None:
        given = isinstance(path, ocp.CheckpointManager)
        super().__init__(path.directory if given else path)
        self.keep, self.given = keep, given
        self.last: tuple[int, Any] | None = None
        self.best: int | None = None
        """The step number of a checkpoint that stays besides the last ones."""
        self.among_others = False
        self.lock: FolderLock | None = None
        self.quiet = Quiet()
        with self.agreed("to open the folder of checkpoints"):
            if world().index == 0:
                prepare(self.folder)
                self.lock = FolderLock(self.folder)
        try:
            self.check_shared()
            self.manager = path if given else self.unless_peer_fails(self.opened, "to open the folder of checkpoints")
        except VnodeError:
            self.release()
            raise
        except Exception as error:
            self.release()
            raise CheckpointError(
                layout_message(f"cannot use {self.folder} for checkpoints.", facts=[f"{type(error).__name__}: {error}"])
            ) from error

    def check_shared(self) -> None:
        """Refuses a folder that is not the same one in all processes: each would write its part to another place.

        Raises:
          CheckpointError: some processes do not see what process 0 has written there.
        """
        here = world()
        if not here.has_others:
            return
        mine = "" if self.lock is None else self.lock.owner["token"]
        token = exchange_words("to see the folder of checkpoints", mine or "-")[0]
        lock = located(self.folder) / LOCK
        sees = seen_soon(lambda: token in lock.read_text())
        words = exchange_words(
            "to compare the folders of checkpoints", json.dumps([sees, str(self.folder), socket.gethostname()])
        )
        found = {process: json.loads(word) for process, word in sorted(words.items())}
        blind = [process for process, (good, _, _) in found.items() if not good]
        if blind:
            shown = [0, *blind[:SHOWN]]
            raise CheckpointError(
                layout_message(
                    f"the folder of checkpoints is not shared: {process_names(blind)} cannot see what process 0 "
                    "writes.",
                    facts=[f"process {process}: {found[process][1]} on {found[process][2]}" for process in shown],
                    remedies=[
                        "give all processes one folder: of a file system that all hosts have, or gs://...",
                        "if it is one folder that was made just now, start again",
                    ],
                )
            )

    def opened(self) -> ocp.CheckpointManager:
        """Orbax's manager of the folder."""
        here, together = world(), dict[str, Any]()
        if here.has_others:  # with named processes it waits by the service, which has deadlines, not by collectives
            multiprocessing = ocp.options.MultiprocessingOptions(
                active_processes=set(range(here.count)), barrier_sync_key_prefix=f"vnode-{next(here.saves)}"
            )
            together = {"create": False, "multiprocessing_options": multiprocessing}

        def meet_at_end(key: str, timeout_ms: int) -> None:
            failed = sys.exc_info()[1] if here.has_others else None
            if failed is not None:  # orbax meets the others even so, who wait for this process at another place
                raise failed
            with in_world(here):  # orbax calls it in a thread of its own
                meet("to finish a checkpoint", key=key)

        options = ocp.CheckpointManagerOptions(
            **together,
            preservation_policy=KeepLast(self),
            enable_async_checkpointing=True,
            # Where a folder cannot be made in the background, what waits for it there does so for minutes.
            async_options=ocp.AsyncOptions(
                create_directories_asynchronously=False,
                timeout_secs=math.ceil(timeout()),
                barrier_sync_fn=meet_at_end,
            ),
        )
        return ocp.CheckpointManager(self.folder, options=options)

    @property
    def latest(self) -> int | None:
        """The step number of the newest checkpoint that is not known to be damaged; waits for one being written.

        Raises:
          CheckpointError: there are checkpoints, and none is good; or the last save failed.
        """
        self.wait()
        return super().latest

    def save(self, number: int, state: Any, facts: dict[str, Any]) -> None:
        """Saves a state whose arrays are on devices. Returns when they are copied: they may then be donated.

        Args:
          number: the step number: how many steps the state has behind it.
          state: the state.
          facts: what else to save, fit for JSON.

        Raises:
          CheckpointError: this or the previous save failed; it carries the state.
        """
        self.last = number, jax.tree.map(lambda leaf: weakref.ref(leaf) if isinstance(leaf, jax.Array) else leaf, state)
        try:
            self.wait()
            with self.agreed("to save a checkpoint"):
                if self.lock is not None:
                    self.lock.check()
            leaves = arrays_by_path(state)
            sums = checksums({path: leaf.value for path, leaf in leaves.items()})
            header = Header(number, {path: Entry.from_leaf(leaf, sums[path]) for path, leaf in leaves.items()}, facts)
            self.make_way(number)
            self.unless_peer_fails(lambda: self.write(number, stored_arrays(state), header), "to save a checkpoint")
        except CheckpointError as error:
            error.state, error.step = state, number
            raise
        except (VnodeError, MemoryError):
            raise
        except JaxRuntimeError as error:
            check_failed("to save a checkpoint", cause=error)
            raise
        except Exception as error:  # orbax and tensorstore have many
            raise self.failed(error) from error

    def write(self, number: int, tree: Any, header: Header) -> None:
        """Has orbax write a checkpoint: the state alone, or as one of the items of those who save several."""
        arguments = ocp.args.StandardSave(tree)
        options = {"custom_metadata": {NAME: header.json()}, "force": True}
        done = False
        if not self.among_others:
            try:
                done = self.manager.save(number, args=arguments, **options)
            except ValueError as error:
                if "Composite" not in str(error):
                    raise
                self.among_others = True
        if self.among_others:
            done = self.manager.save(number, args=ocp.args.Composite(state=arguments), **options)
        if not done:
            raise ValueError(f"its CheckpointManager does not save step {number}")

    def make_way(self, number: int) -> None:
        """Renames a damaged checkpoint whose place is needed."""
        if number not in self.damaged:
            return
        folder = self.folders().get(number)
        if folder is not None and world().index == 0:
            aside = (folder.parent / f"{number}.damaged-{i}" for i in itertools.count(1))
            folder.rename(next(path for path in aside if not path.exists()))
        self.unless_peer_fails(self.manager.reload, "to save a checkpoint")
        del self.damaged[number]

    def restore(self, number: int, like: Any, placement: Placement) -> Any:
        """Restores a state onto a placement's devices, without a detour over others.

        Args:
          number: the step number.
          like: a state of the same structure. Leaves that are no arrays are taken from it; of its arrays, shapes,
            dtypes, and over which mesh axes they are partitioned.
          placement: where the state is to live.

        Returns:
          The state.

        Raises:
          CheckpointError: the checkpoint is of a state of another structure.
          DamagedCheckpointError: it cannot be read, or is not what was saved.
        """
        leaves = arrays_by_path(like)

        def sharding_at(path: tuple[str, ...], shape: tuple[int, ...]) -> Any:
            return (
                fitting_sharding(placement, shape, partition(leaves[path].value))
                if path in leaves
                else placement.sharding()
            )

        return with_arrays(like, self.read(number, leaves, sharding_at))

    def wait(self) -> None:
        """Waits until what is being saved is written.

        Raises:
          CheckpointError: it could not be; it carries the state that is there now.
        """
        try:
            self.unless_peer_fails(self.manager.wait_until_finished, "to finish a checkpoint")
        except ProcessError:
            raise
        except Exception as error:
            raise self.failed(error) from error

    def close(self) -> None:
        """Waits until everything is written, and gives the folder back.

        Raises:
          CheckpointError: it could not be.
        """
        try:
            self.wait()
        finally:
            try:
                if not self.given:
                    self.unless_peer_fails(self.manager.close, "to close the folder of checkpoints")
            finally:
                self.release()

    def release(self) -> None:
        """Gives the folder back to other runs."""
        self.quiet.end()
        if self.lock is not None:
            self.lock.release()

    def failed(self, error: Exception) -> CheckpointError:
        """The error of a checkpoint that could not be written, with the state if it is still there.

        Raises:
          ProcessError: it could not because another process has failed.
        """
        check_save(error)
        number, state = self.last or (None, None)
        arrays = [leaf() for leaf in jax.tree.leaves(state) if isinstance(leaf, weakref.ref)]
        if all(array is not None and not array.is_deleted() for array in arrays):
            state = jax.tree.map(lambda leaf: leaf() if isinstance(leaf, weakref.ref) else leaf, state)
        else:
            state = None
        carried = ["this error has the state: `error.state`, after `error.step` steps"] if state is not None else []
        return CheckpointError(
            layout_message(
                f"could not write a checkpoint to {self.folder}.",
                facts=[f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"],
                remedies=[*remedies_of(error), "or use another folder", *carried],
            ),
            state=state,
            step=number,
        )


def check_save(error: BaseException) -> None:
    """After a save that failed: whether another process is the cause.

    Raises:
      ProcessError: it is.
    """
    here = world()
    chain, causes = error, []
    while chain is not None and chain not in causes:
        causes.append(chain)
        chain = chain.__cause__ or chain.__context__
    for cause in causes:
        if isinstance(cause, ProcessError):
            raise cause from None
    if here.board is not None:
        waited = any(is_runtime_error(cause) or "barrier" in str(cause).lower() for cause in causes)
        notice = here.board.await_failure(here.others, here.scopes, NOTICE_DELAY if waited else 0)
        if notice is not None:
            raise failure_error(notice, "to save a checkpoint", here.index) from error


def remedies_of(error: BaseException | None) -> list[str]:
    """Remedies for a save that failed.

    >>> remedies_of(OSError(28, "No space left on device"))
    ['make room on the disk']
    >>> remedies_of(OSError(30, "Read-only file system"))
    ['make the folder writable']
    """
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT) or FULL.search(str(error)):
            return ["make room on the disk"]
        if number in (errno.EACCES, errno.EPERM, errno.EROFS) or "permission denied" in str(error).lower():
            return ["make the folder writable"]
        error = error.__cause__ or error.__context__
    return ["see what is wrong with the folder: was it moved, or changed by others?"]


class KeepLast:
    """The checkpoints that stay: the last ones of a run, and all that are damaged or not written by a run.

    Those are for whoever put them there to delete.

    Args:
      checkpoints: the run's checkpoints.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.known: dict[int, bool] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """The checkpoints among these that stay; orbax asks during each save."""
        numbers = [checkpoint.step for checkpoint in checkpoints]
        ours = sorted(number for number in numbers if self.is_ours(number))
        gone = set(ours[: -self.checkpoints.keep]) - {self.checkpoints.best}
        return [number not in gone for number in numbers]

    def is_ours(self, number: int) -> bool:
        """Whether a checkpoint was written by a run, and is not known to be damaged."""
        if number in self.checkpoints.damaged:
            return False
        if self.checkpoints.last is not None and number == self.checkpoints.last[0]:  # it is being written
            self.known[number] = True
        elif number not in self.known:
            try:
                self.known[number] = self.checkpoints.header(number) is not None
            except CheckpointError:
                self.known[number] = False
        return self.known[number]
