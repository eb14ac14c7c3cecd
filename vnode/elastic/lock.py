"""One run at a time on a folder of checkpoints, and a folder that can be written.

Knows files, and which process holds a folder. Must not know checkpoints.

On a local file system, a run holds an operating system's lock (`flock`) on a file in the folder for as long as it
lives: the lock goes with the process, however it ends, so that a killed run blocks nobody. The file says who holds it.
Object stores have no locks. There the last run that starts owns the folder: it writes its name into the same file, and
one that finds another's name there before a save stops, instead of writing among the other's checkpoints.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
import socket
import uuid
import weakref
from typing import Any

from etils import epath

from vnode.errors import CheckpointError, layout_message

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = "vnode.lock"
"""The file in a folder of checkpoints that says which run writes there."""

PROBE = 1 << 20
"""Bytes written to learn whether a folder can be written."""

log = logging.getLogger("vnode")


def prepare(folder: epath.Path) -> None:
    """Makes a folder, and writes and deletes a file there, so that a run learns at its start whether it can save.

    Args:
      folder: the folder.

    Raises:
      CheckpointError: it cannot be written.
    """
    probe = folder / f"vnode.probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(PROBE if is_local(folder) else 1))
        finally:
            with contextlib.suppress(FileNotFoundError):
                probe.unlink()
    except Exception as error:  # object stores have errors of their own
        raise unwritable(folder, error) from error


def unwritable(folder: epath.Path, error: Exception) -> CheckpointError:
    """The error of a folder that cannot be written."""
    remedies = ["give checkpoint= a folder that this process may write to"]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedies = ["make room on the disk", "or use another folder"]
    elif isinstance(error, ImportError):
        remedies = ["install the package that is missing", "or use a local folder"]
    return CheckpointError(
        layout_message(
            f"cannot write checkpoints to {folder}.", facts=[f"{type(error).__name__}: {error}"], remedies=remedies
        )
    )


def is_local(folder: epath.Path) -> bool:
    """Whether a folder is one of this machine's file systems."""
    return "://" not in os.fspath(folder)


class FolderLock:
    """Makes a run the only one that writes to a folder.

    Args:
      folder: the folder; it must be there.

    Raises:
      CheckpointError: another run has it, or it cannot be written.

    Example:
      >>> import tempfile
      >>> folder = epath.Path(tempfile.mkdtemp())
      >>> lock = FolderLock(folder)
      >>> try:
      ...     FolderLock(folder)
      ... except CheckpointError as error:
      ...     print(str(error).splitlines()[1])
        held by another run of this same process
      >>> lock.release()
      >>> FolderLock(folder).release()
    """

    def __init__(self, folder: epath.Path) -> None:
        self.folder, self.path = folder, folder / NAME
        self.descriptor: int | None = None
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.owner = {"process": os.getpid(), "host": socket.gethostname(), "since": since, "token": uuid.uuid4().hex}
        try:
            if not (is_local(folder) and fcntl is not None and self.locked()):
                self.claim()
        except CheckpointError:
            raise
        except Exception as error:  # object stores have errors of their own
            raise unwritable(folder, error) from error

    def locked(self) -> bool:
        """Takes the operating system's lock.

        Returns:
          False where the file system has none.

        Raises:
          CheckpointError: another run holds it.
        """
        assert fcntl is not None
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not is_file(descriptor, self.path):  # its last holder has deleted it in between
                    os.close(descriptor)
                    continue
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps(self.owner).encode())
            except BlockingIOError as error:
                os.close(descriptor)
                raise locked_error(self.folder, self.holder()) from error
            except OSError as error:
                os.close(descriptor)
                if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                    return False
                raise
            self.descriptor = descriptor
            LOCKS.add(self)
            return True

    def claim(self) -> None:
        """Writes this run's name where there are no locks."""
        before = self.holder()
        if before is not None:
            log.info("%s was last used by %s; if that is still running, it stops at its next save", self.folder, before)
        self.path.write_text(json.dumps(self.owner))

    def check(self) -> None:
        """Makes sure that no other run has taken the folder. A lock that was deleted is taken again.

        Raises:
          CheckpointError: one has.
        """
        if self.descriptor is not None and not is_file(self.descriptor, self.path):
            lost, self.descriptor = self.descriptor, None
            os.close(lost)
            log.warning(
                "%s was deleted during a run, and was made again: another run may have begun meanwhile", self.path
            )
            try:
                if not self.locked():
                    self.claim()
            except OSError as error:
                raise unwritable(self.folder, error) from error
        if self.descriptor is None:
            holder = self.holder() or {}
            if holder.get("token") != self.owner["token"]:
                raise locked_error(self.folder, holder or None)

    def holder(self) -> dict[str, Any] | None:
        """Who holds the folder, as far as the file can be read."""
        try:
            found = json.loads(self.path.read_text())
        except Exception:  # it is not there, or is being written
            return None
        return found if isinstance(found, dict) else None

    def release(self) -> None:
        """Gives the folder back; again does nothing."""
        if not self.owner:
            return
        descriptor, self.descriptor = self.descriptor, None
        with contextlib.suppress(Exception):  # the folder may be gone; the lock goes in any case
            if is_file(descriptor, self.path) if descriptor is not None else self.holder() == self.owner:
                self.path.unlink()
        self.owner = {}
        if descriptor is not None:
            assert fcntl is not None
            LOCKS.discard(self)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where a forked process has a copy
            os.close(descriptor)


def is_file(descriptor: int, path: epath.Path) -> bool:
    """Whether an open file is the one that a path names."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def locked_error(folder: epath.Path, holder: dict[str, Any] | None) -> CheckpointError:
    """The error of a folder that another run holds."""
    facts, stop = [], "wait until it ends, or stop it"
    if holder is not None:
        facts = [f"held by process {holder.get('process')} on {holder.get('host')} since {holder.get('since')}"]
        if holder.get("process") == os.getpid() and holder.get("host") == socket.gethostname():
            facts = ["held by another run of this same process"]
        elif holder.get("host") == socket.gethostname():
            stop = f"wait until it ends, or stop it: kill {holder.get('process')}"
    return CheckpointError(
        layout_message(
            f"another run is writing checkpoints to {folder}.",
            facts=facts,
            remedies=[stop, "use another folder", "only to read its checkpoints: vnode.elastic.restore(folder)"],
        )
    )


LOCKS: weakref.WeakSet[FolderLock] = weakref.WeakSet()
"""The locks that this process holds."""


def after_fork() -> None:
    """Closes a forked process's copies of locks: one that outlives a killed run must not go on holding its folder."""
    for lock in list(LOCKS):
        if lock.descriptor is not None:
            os.close(lock.descriptor)
            lock.descriptor, lock.owner = None, {}
    LOCKS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)
