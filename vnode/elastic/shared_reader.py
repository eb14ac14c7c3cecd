"""Reads checkpoints in several processes: the same one in all of them, and no process waits for one that has failed.

Knows readers of checkpoints, and what processes tell one another. Must not know runs, nor how checkpoints are written.

Process 0 chooses, and tells the number and a checksum of what the checkpoint says of itself. File systems of networks
may show a host an older listing: it looks again for some seconds. Whether a checkpoint is good, all processes decide
together, since each reads its own part of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jax.errors import JaxRuntimeError
from jax.sharding import Sharding

from vnode.elastic.checkpoint_contents import Path
from vnode.elastic.process_agreement import errors_anywhere
from vnode.elastic.reader import METADATA, Header, Reader
from vnode.errors import CheckpointError, DamagedCheckpointError, ProcessError, VnodeError, layout_message
from vnode.placement.process_barrier import exchange_words, run_watched
from vnode.placement.world import world

T = TypeVar("T")


class SharedReader(Reader):
    """The checkpoints in a folder, for processes that read them together; in one process, as `Reader`."""

    def wait(self) -> None:
        """Waits until what is being written is; here nothing is."""

    @contextlib.contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Ends in an error in all processes if it does in one, or the others would wait for that one.

        Args:
          what: they do.

        Raises:
          DamagedCheckpointError: another process has found a checkpoint to be damaged.
          CheckpointError: another process has failed.
        """
        mine: BaseException | None = None
        try:
            yield
        except ProcessError:
            raise
        except BaseException as error:
            mine = error
        errors = errors_anywhere(mine, what)
        if mine is not None and (isinstance(mine, DamagedCheckpointError) or not damage_in(errors)):
            raise mine
        for process, error in errors.items():
            if damage_in(errors) and not error.startswith(DamagedCheckpointError.__name__):
                continue
            kind = DamagedCheckpointError if damage_in(errors) else CheckpointError
            text = error.removeprefix(f"{kind.__name__}: ")
            raise kind(
                layout_message(
                    f"process {process} came {what}, and failed: {text}",
                    facts=[f"the folder is {self.folder}"],
                    remedies=[f"see what process {process} wrote"],
                )
            )

    def unless_peer_fails(self, work: Callable[[], T], what: str) -> T:
        """Does something in which orbax waits for the other processes; no longer than these are there.

        Raises:
          ProcessError: another process has failed.
        """
        here = world()
        if not here.has_others:
            return work()
        return run_watched(work, what, here.others)

    def newest(self, restore: Callable[[int], T]) -> tuple[int, T] | None:
        """As in one process; process 0 chooses, and the others make sure that they see the same checkpoint.

        Raises:
          CheckpointError: they do not, or there are checkpoints, and none is good.
        """
        if not world().has_others:
            return super().newest(restore)
        while (number := self.chosen()) is not None:
            try:
                return number, restore(number)
            except DamagedCheckpointError as error:
                self.skip(number, error)
        return None

    def chosen(self) -> int | None:
        """The number of the checkpoint that process 0 has chosen; None if there are none.

        Raises:
          CheckpointError: some process does not see it, or sees another one of that number.
        """
        number: int | None = None
        with self.agreed("to choose a checkpoint"):
            self.wait()
            number = self.latest if world().index == 0 else None
        mine = [number, None if number is None else self.content(number), [*self.damaged.items()]]
        number, content, damaged = json.loads(exchange_words("to restore a checkpoint", json.dumps(mine))[0])
        self.damaged.update({int(key): why for key, why in damaged})
        if number is None:
            return None
        with self.agreed(f"to look at checkpoint {number}"):
            if not seen_soon(lambda: self.content(number) == content):
                there = number in self.folders()
                raise CheckpointError(
                    layout_message(
                        f"checkpoint {number}, which process 0 has chosen, is "
                        f"{'another one' if there else 'not there'} in process {world().index}.",
                        facts=[f"the folder is {self.folder} on {socket.gethostname()}"],
                        remedies=[
                            "give all processes one folder: of a file system that all hosts have, or gs://...",
                            "if it is one, whose new content this host has not seen yet, start again",
                        ],
                    )
                )
        return number

    def content(self, number: int) -> str:
        """A checksum of what a checkpoint says of its arrays, among which are their checksums."""
        return hashlib.sha256((self.folder_of(number) / METADATA).read_bytes()).hexdigest()

    def load(
        self, number: int, header: Header | None, where: Callable[[Path, tuple[int, ...]], Sharding], name: str
    ) -> dict[Path, Any]:
        """As in one process; if one of several fails, all do, before any waits for it."""
        with self.agreed(f"to restore checkpoint {number}"):
            try:
                load = super().load
                what = f"to restore checkpoint {number}"
                return self.unless_peer_fails(lambda: load(number, header, where, name), what)
            except (VnodeError, JaxRuntimeError, MemoryError):
                raise
            except Exception as error:  # orbax, tensorstore and JSON have many
                raise self.unreadable(number, error) from error
        raise AssertionError


def damage_in(errors: dict[int, str]) -> bool:
    """Whether one of some errors says that a checkpoint is damaged."""
    return any(error.startswith(DamagedCheckpointError.__name__) for error in errors.values())


def seen_soon(look: Callable[[], bool]) -> bool:
    """Whether a file is seen; file systems of networks may take some seconds."""
    end = time.monotonic() + (SOON if world().index else 0)
    while True:
        with contextlib.suppress(Exception):  # it is not there, or cannot be read
            if look():
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


SOON = 5.0
"""Seconds within which a file that one process has written must be seen by the others."""
