"""Text -> a file, written whole or not at all; a file -> its text; errors name the file and the reason.

Knows paths, and why they cannot be read or written. Must not know what the files hold.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from vnode.errors import VnodeError, layout_message


def write_text(path: str | os.PathLike[str], text: str, error: type[VnodeError]) -> None:
    """Writes a file; the previous content stays until the whole is written.

    Args:
      path: of the file, in an existing folder.
      text: the content.
      error: the type of error to raise.

    Raises:
      VnodeError: of the type `error`: it cannot be written.
    """
    target = Path(os.path.expanduser(path))
    try:
        target = Path(os.path.realpath(target))  # the target of a link
        whole = not target.exists() or target.is_file()  # else a pipe, say
        # A new name for each write: threads, and processes of several hosts, may write the same file at once.
        beside = target.with_name(f".{target.name[:40]}.{uuid.uuid4().hex}") if whole else target
        try:
            beside.write_text(text, encoding="utf-8")
            if whole:
                beside.replace(target)
        finally:
            if whole:
                beside.unlink(missing_ok=True)
    except (OSError, ValueError) as why:
        folder = target.parent
        remedies = [f"make the folder before: os.makedirs({str(folder)!r})"] if not folder.exists() else []
        raise error(
            layout_message(
                f"{os.fspath(path)!r} cannot be written.",
                facts=[failure_reason(why)],
                remedies=remedies or ["name a file in a folder that exists and is writable"],
            )
        ) from why


def read_text(path: str | os.PathLike[str], error: type[VnodeError], remedies: Sequence[str]) -> str:
    """Reads a file of text.

    Args:
      path: of the file.
      error: the type of error to raise.
      remedies: of the error.

    Raises:
      VnodeError: of the type `error`: it cannot be read.
    """
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, ValueError) as why:
        said = f"{os.fspath(path)!r} cannot be read."
        raise error(layout_message(said, facts=[failure_reason(why)], remedies=remedies)) from why


NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO}
"""Errors of a system that has no free space or handles now, and may have some later."""


def is_no_room(error: BaseException | None) -> bool:
    """Whether an error, or what has caused it, says that the system has no room now.

    >>> is_no_room(OSError(errno.ENOSPC, "No space left on device")), is_no_room(FileNotFoundError(2, "No such file"))
    (True, False)
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        error = error.__cause__
    return False


def is_locked(path: Path) -> bool:
    """Whether another process holds a lock (`flock`) on a file.

    Raises:
      OSError: there is no such file, or it cannot be opened.
    """
    import fcntl  # not on Windows

    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def failure_reason(why: OSError | ValueError) -> str:
    """Why a file cannot be read or written, without its name.

    >>> failure_reason(FileNotFoundError(2, "No such file or directory", "plan.json"))
    'No such file or directory'
    """
    if isinstance(why, UnicodeDecodeError):
        return f"it is no text in UTF-8, as from byte {why.start} on"
    return (why.strerror if isinstance(why, OSError) else None) or str(why)
