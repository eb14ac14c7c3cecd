"""Reads checkpoints: which of a folder's are good, and what they hold.

Knows the layout that orbax gives a folder, and what vnode adds. Must not know runs, nor when a checkpoint is due.

A checkpoint is a folder that is named by its step number, and holds the arrays as `orbax.checkpoint.CheckpointManager`
saves a pytree; what vnode adds is in its metadata (`Header`). So orbax reads vnode's, and vnode reads those that orbax
wrote without it; these are taken as they are, since nothing says what they should hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.errors import JaxRuntimeError
from jax.sharding import Sharding

from vnode.elastic.checkpoint_contents import Entry, Leaf, Path, check, check_width, path_text, type_of
from vnode.elastic.integrity import checksums, digest
from vnode.errors import CheckpointError, DamagedCheckpointError, VnodeError, layout_message
from vnode.placement.host_copy import with_weak_type

FORMAT = 1
"""The version of what vnode adds to a checkpoint."""

NAME = "vnode"
"""The name of the same among a checkpoint's metadata."""

METADATA = "_CHECKPOINT_METADATA"
"""The file in which orbax keeps a checkpoint's metadata."""

FRAMES = 20
"""Frames that may be needed for each level of a pytree that is read."""

ITEMS = ("default", "state")
"""Where orbax keeps a state that was saved alone, and where people put it among other items."""

log = logging.getLogger("vnode")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Header:
    """The metadata that vnode adds to a checkpoint.

    Attributes:
      step: its step number, by which it knows its name.
      entries: the metadata of each array.
      facts: those that the run added.
    """

    step: int
    entries: dict[Path, Entry]
    facts: dict[str, Any]

    def json(self) -> dict[str, Any]:
        """The header as JSON, with a checksum of its own."""
        arrays = [{"path": list(path), **entry.to_json()} for path, entry in self.entries.items()]
        said = json.loads(json.dumps({"format": FORMAT, "step": self.step, "arrays": arrays, "facts": self.facts}))
        return {**said, "digest": digest(said)}

    @classmethod
    def read(cls, said: dict[str, Any]) -> Header:
        """A header as JSON has it.

        Raises:
          ValueError: it is not what was written.
        """
        said = dict(said)
        if said.pop("digest", None) != digest(said):
            raise ValueError("its metadata do not have the checksum that they had when it was saved")
        if said["format"] != FORMAT:
            raise ValueError(f"it has format {said['format']}; this version of vnode reads format {FORMAT}")
        entries = {tuple(array.pop("path")): Entry.from_json(array) for array in said["arrays"]}
        return cls(said["step"], entries, said["facts"])


class Reader:
    """The checkpoints in a folder.

    Args:
      path: the folder; any that `etils.epath` knows (``gs://...``).

    Raises:
      CheckpointError: it is one checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = located(path)
        check_folder(self.folder)
        self.damaged: dict[int, str] = {}

    @property
    def path(self) -> str:
        """The folder, as messages have it."""
        return str(self.folder)

    def folders(self) -> dict[int, epath.Path]:
        """The folders that may be checkpoints, by step number.

        Raises:
          CheckpointError: they cannot be listed.
        """
        try:
            if not self.folder.exists():
                return {}
            found = {}
            for folder in self.folder.iterdir():
                match = re.fullmatch(r"(.*_)?(\d+)", folder.name)
                if match and not match[1] and os.path.islink(folder) and not folder.exists():
                    found[int(match[2])] = folder  # a link to what is no more: whoever reads it finds it damaged
                    continue
                if not match or not folder.is_dir() or (match[1] and not (folder / METADATA).exists()):
                    continue  # orbax can be told to begin names with a prefix; so do folders of other things
                if ocp.utils.is_checkpoint_finalized(folder):
                    found[int(match[2])] = folder
            return dict(sorted(found.items()))
        except Exception as error:  # object stores have errors of their own
            raise CheckpointError(
                layout_message(f"cannot list {self.folder}.", facts=[f"{type(error).__name__}: {error}"])
            ) from error

    @property
    def latest(self) -> int | None:
        """The step number of the newest checkpoint that is not known to be damaged.

        Only its metadata is looked at; damage to its arrays shows when they are read (`newest`).

        Raises:
          CheckpointError: there are checkpoints, and none is good.
        """
        for number in reversed(self.folders()):
            if number in self.damaged:
                continue
            try:
                self.header(number)
            except DamagedCheckpointError as error:
                self.skip(number, error)
                continue
            return number
        if self.damaged:
            raise CheckpointError(
                layout_message(
                    f"no checkpoint in {self.folder} can be used.",
                    facts=list(self.damaged.values()),
                    remedies=["restore the files from a copy", "use another folder to start anew"],
                )
            )
        return None

    def newest(self, restore: Callable[[int], T]) -> tuple[int, T] | None:
        """Restores the newest good checkpoint. Warnings name the skipped ones.

        Args:
          restore: restores the checkpoint of a step number; raises `DamagedCheckpointError` if that is not good.

        Returns:
          The step number, and what was restored; None if there are no checkpoints.

        Raises:
          CheckpointError: there are checkpoints, and none is good.
        """
        while (number := self.latest) is not None:
            try:
                return number, restore(number)
            except DamagedCheckpointError as error:
                self.skip(number, error)
        return None

    def skip(self, number: int, error: DamagedCheckpointError) -> None:
        """Takes note of a checkpoint that is not good."""
        self.damaged[number] = str(error).splitlines()[0]
        log.warning("skipped: %s", self.damaged[number])
        warnings.warn(f"{self.damaged[number]} It is skipped.", stacklevel=2)

    def header(self, number: int) -> Header | None:
        """The metadata that vnode added to a checkpoint; None if it was written without vnode.

        Raises:
          DamagedCheckpointError: it is not what was saved, or not under this step number.
        """
        try:
            said = json.loads((self.folder_of(number) / METADATA).read_text())
            if NAME not in (said["custom_metadata"] or {}):
                self.item(number)
                return None
            header = Header.read(said["custom_metadata"][NAME])
        except VnodeError:
            raise
        except Exception as error:
            raise self.damage(number, error) from error
        if header.step != number:
            raise self.damage(number, f"it was saved as checkpoint {header.step}, and has been renamed")
        return header

    def facts(self, number: int) -> dict[str, Any]:
        """The facts that were saved with the state; empty if it was saved without vnode."""
        header = self.header(number)
        return {} if header is None else header.facts

    def folder_of(self, number: int) -> epath.Path:
        """The folder of a checkpoint."""
        folders = self.folders()
        if number not in folders:
            raise CheckpointError(
                layout_message(
                    f"there is no checkpoint {number} in {self.folder}.",
                    facts=[f"there are {', '.join(map(str, folders)) or 'none'}"],
                )
            )
        return folders[number]

    def item(self, number: int) -> epath.Path:
        """Where in a checkpoint the state is.

        Raises:
          DamagedCheckpointError: nowhere.
        """
        folder = self.folder_of(number)
        for name in ITEMS:
            if (folder / name / "_METADATA").exists():
                return folder / name
        raise self.damage(number, f"it has no {' nor '.join(map(repr, ITEMS))} with a pytree of arrays")

    def read(
        self, number: int, leaves: Mapping[Path, Leaf] | None, where: Callable[[Path, tuple[int, ...]], Sharding]
    ) -> dict[Path, Any]:
        """Reads the arrays of a checkpoint, each straight to where it is to live, and compares their checksums.

        Args:
          number: the step number.
          leaves: the arrays that it must hold; None for any.
          where: the sharding of the array at a path, of a shape (for typed keys, that of their data).

        Returns:
          The arrays by path.

        Raises:
          CheckpointError: it holds another state, or is too deeply nested.
          DamagedCheckpointError: it cannot be read, or is not what was saved.
        """
        name, header = f"checkpoint {number} in {self.folder}", self.header(number)
        if header is not None and leaves is not None:
            check(header.entries, leaves, name)
        depth = max((len(path) for path in header.entries), default=0) if header is not None else 0
        try:
            with LIMIT.raised(FRAMES * depth):  # orbax needs frames for each level
                arrays = self.load(number, header, where, name)
        except (VnodeError, JaxRuntimeError, MemoryError):
            raise
        except Exception as error:  # orbax, tensorstore and JSON have many
            raise self.unreadable(number, error) from error
        if header is None:
            entries = {
                path: Entry(".".join(path), type_of(array), array.shape, str(array.dtype))
                for path, array in arrays.items()
            }
            check(entries, leaves if leaves is not None else {path: Leaf("", a) for path, a in arrays.items()}, name)
            return arrays
        sums = checksums(arrays)
        differing = [entry.label for path, entry in header.entries.items() if entry.checksum != sums.get(path)]
        if differing:
            shown = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
            raise self.damage(number, f"its content is not what was saved, as checksums tell: {shown}")
        for path, array in arrays.items():
            entry = header.entries[path]
            arrays[path] = with_weak_type(array, array.sharding) if entry.weak and array.size else array
            entry.remember_blocks(arrays[path])
        return arrays

    def load(
        self, number: int, header: Header | None, where: Callable[[Path, tuple[int, ...]], Sharding], name: str
    ) -> dict[Path, Any]:
        """The arrays of a checkpoint, as orbax reads them."""
        handler, item = ocp.StandardCheckpointHandler(), self.item(number)
        found: Any = handler.metadata(item)
        tree = found.tree if hasattr(found, "tree") else found

        def target(path: Any, array: Any) -> Any:
            if not hasattr(array, "shape"):
                return array
            shape = tuple(array.shape)
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=where(path_text(path), shape))

        targets = jax.tree_util.tree_map_with_path(target, tree)
        entries = header.entries if header is not None else {}
        wanted = {
            path_text(path): Entry(".".join(path_text(path)), type_of(leaf), leaf.shape, str(leaf.dtype))
            for path, leaf in jax.tree.leaves_with_path(targets)
            if isinstance(leaf, jax.ShapeDtypeStruct)
        }
        check_width((entries or wanted).values(), name)
        arrays = {}
        if wanted:
            restored = handler.restore(item, args=ocp.args.StandardRestore(targets))
            arrays = {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(restored)}
        if header is None:
            return {path: leaf for path, leaf in arrays.items() if isinstance(leaf, jax.Array)}
        whole = {}
        for path, entry in entries.items():
            if entry.size:
                whole[path] = arrays[path]
            else:  # orbax has none without elements
                empty = jnp.zeros(entry.shape, entry.dtype, device=where(path, entry.shape))
                whole[path] = jax.random.wrap_key_data(empty, impl=entry.key) if entry.key else empty
            if type_of(whole[path]) != entry.type:
                raise ValueError(f"{entry.label} is {type_of(whole[path])} and was saved as {entry.type}")
        return whole

    def unreadable(self, number: int, error: Exception) -> CheckpointError:
        """The error of a checkpoint whose arrays cannot be read."""
        if not isinstance(error, RecursionError):
            return self.damage(number, error)
        return CheckpointError(
            f"checkpoint {number} in {self.folder} is too deeply nested to be read.",
            remedies=[f"sys.setrecursionlimit({10 * sys.getrecursionlimit()}) before"],
        )

    def damage(self, number: int, why: Exception | str) -> DamagedCheckpointError:
        """The error of a checkpoint that is not good."""
        said = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
        first, *rest = said.splitlines() or [""]
        return DamagedCheckpointError(
            layout_message(
                f"checkpoint {number} in {self.folder} is damaged: {first[:300]}.",
                facts=[line[:300] for line in rest[:5]],
                remedies=["restore its files from a copy", "or use an older checkpoint"],
            )
        )


class RecursionLimit:
    """Python's recursion limit while states are read. The interpreter has one for all threads.

    Attributes:
      wanted: frames that readings under way want in addition.
      before: the limit before the first of them began.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted: list[int] = []
        self.before = 0

    @contextlib.contextmanager
    def raised(self, frames: int) -> Iterator[None]:
        """Raises the limit by so many frames, at least, until this reading and all others have ended.

        >>> limit, before = RecursionLimit(), sys.getrecursionlimit()
        >>> with limit.raised(500):
        ...     with limit.raised(200):
        ...         pass
        ...     sys.getrecursionlimit() - before
        500
        >>> sys.getrecursionlimit() == before
        True
        """
        with self.lock:
            self.before = self.before if self.wanted else sys.getrecursionlimit()
            self.wanted.append(frames)
            self.apply()
        try:
            yield
        finally:
            with self.lock:
                self.wanted.remove(frames)
                self.apply()

    def apply(self) -> None:
        """Sets the limit to the largest that is wanted; Python takes none above 2^31 - 1."""
        sys.setrecursionlimit(min(self.before + max(self.wanted, default=0), 2**31 - 1))


LIMIT = RecursionLimit()


def check_folder(folder: epath.Path) -> None:
    """Refuses a checkpoint, or a part of one, in the place of the folder that holds checkpoints.

    Raises:
      CheckpointError: it is one.
    """
    for here in (folder, folder.parent):
        try:
            found = (here / METADATA).is_file()
        except Exception:  # of an object store; what cannot be looked into is told of later
            continue
        if not found:
            continue
        number = re.search(r"\d+$", here.name)
        only = f"vnode.elastic.restore({str(here.parent)!r}, step={number[0]})" if number else None
        raise CheckpointError(
            layout_message(
                f"{folder} is {'' if here == folder else 'part of '}one checkpoint, not a folder of checkpoints.",
                remedies=[f"name the folder that it is in: {str(here.parent)!r}"]
                + ([f"to read this one: {only}"] if only else []),
            )
        )


def located(path: str | os.PathLike[str]) -> epath.Path:
    """A folder as `etils.epath` has it; one of this machine's file systems with its whole path, ``~`` as the home.

    Raises:
      CheckpointError: there is no such kind of path, or no current folder for a relative one.
    """
    said = os.fspath(path)
    try:
        return epath.Path(path if "://" in said else os.path.abspath(os.path.expanduser(said)))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"cannot use {said}: it is a path from the current folder, which has been deleted.",
            remedies=["give the whole path", "or begin in a folder that is there"],
        ) from error
    except KeyError as error:
        raise CheckpointError(
            f"cannot use {said}: etils.epath knows no paths that begin with {error.args[0]}.",
            remedies=["a local folder", "gs://bucket/folder, s3://bucket/folder"],
        ) from error
