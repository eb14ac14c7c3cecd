"""Writes the checkpoints of a run, in the background, by `orbax-checkpoint`.

Knows orbax and what a state is made of. Must not know steps, nor when a checkpoint is due.

Orbax writes to a temporary folder and renames it, so that an unfinished checkpoint is none.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.errors import JaxRuntimeError

from vnode.elastic.contents import Entry, filled, named, stored
from vnode.elastic.integrity import checksums
from vnode.elastic.lock import FolderLock, prepare
from vnode.elastic.logs import Quiet
from vnode.elastic.processes import anywhere
from vnode.elastic.reader import NAME, Header, Reader
from vnode.errors import CheckpointError, ProcessError, VnodeError, layout_message
from vnode.placement.placement import Placement
from vnode.placement.transfer import fitting, partition
from vnode.placement.waiting import meet, timeout


class Checkpoints(Reader):
    """The checkpoints of one run, in one folder, which no other run may write to at the same time.

    Args:
      path: the folder, which is made if it is not there; or an `orbax.checkpoint.CheckpointManager`, which then
        decides what it keeps, and is not closed.
      keep: how many of the last checkpoints stay. What else is in the folder stays too.

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
            if jax.process_index() == 0:
                prepare(self.folder)
                self.lock = FolderLock(self.folder)
        try:
            self.manager = path if given else self.opened()
        except Exception as error:
            self.release()
            raise CheckpointError(
                layout_message(f"cannot use {self.folder} for checkpoints.", facts=[f"{type(error).__name__}: {error}"])
            ) from error

    @contextlib.contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Ends in an error in all processes if it does in one, or the others would wait for that one.

        Args:
          what: they do.

        Raises:
          CheckpointError: another process has failed.
        """
        try:
            yield
        except BaseException:
            anywhere(True, what)
            raise
        if anywhere(False, what):
            raise CheckpointError(
                layout_message(
                    f"another process cannot write checkpoints to {self.folder}.",
                    remedies=["see its error: only process 0 locks the folder"],
                )
            )

    def opened(self) -> ocp.CheckpointManager:
        """Orbax's manager of the folder."""
        options = ocp.CheckpointManagerOptions(
            preservation_policy=KeepLast(self),
            enable_async_checkpointing=True,
            # Where a folder cannot be made in the background, what waits for it there does so for minutes.
            async_options=ocp.AsyncOptions(
                create_directories_asynchronously=False,
                timeout_secs=math.ceil(timeout()),
                barrier_sync_fn=lambda key, timeout_ms: meet("to finish a checkpoint", key=key),
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
            leaves = named(state)
            sums = checksums({path: leaf.value for path, leaf in leaves.items()})
            header = Header(number, {path: Entry.of(leaf, sums[path]) for path, leaf in leaves.items()}, facts)
            self.make_way(number)
            self.write(number, stored(state), header)
        except CheckpointError as error:
            error.state, error.step = state, number
            raise
        except (VnodeError, JaxRuntimeError, MemoryError):
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
        if folder is not None and jax.process_index() == 0:
            aside = (folder.parent / f"{number}.damaged-{i}" for i in itertools.count(1))
            folder.rename(next(path for path in aside if not path.exists()))
        self.manager.reload()
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
        leaves = named(like)

        def where(path: tuple[str, ...], shape: tuple[int, ...]) -> Any:
            return fitting(placement, shape, partition(leaves[path].value)) if path in leaves else placement.sharding()

        return filled(like, self.read(number, leaves, where))

    def wait(self) -> None:
        """Waits until what is being saved is written.

        Raises:
          CheckpointError: it could not be; it carries the state that is there now.
        """
        try:
            self.manager.wait_until_finished()
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
                    self.manager.close()
            finally:
                self.release()

    def release(self) -> None:
        """Gives the folder back to other runs."""
        self.quiet.end()
        if self.lock is not None:
            self.lock.release()

    def failed(self, error: Exception) -> CheckpointError:
        """The error of a checkpoint that could not be written, with the state if it is still there."""
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
                remedies=["make room, or make the folder writable", "or use another folder", *carried],
            ),
            state=state,
            step=number,
        )


class KeepLast:
    """Which checkpoints stay: the last ones of a run, and all that are not good or not written by a run.

    Those are for whoever put them there to delete.

    Args:
      checkpoints: the run's checkpoints.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.known: dict[int, bool] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which of some checkpoints stay; orbax asks during each save."""
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
