"""Measured and compiled figures -> small JSON files in a folder, one for each entry.

Knows keys, numbers and files. Must not know what they mean, nor how they are found.

Any number of processes may share a folder: no reader sees half an entry (`vnode.files`). The last writer of a key wins.
A file that cannot be read, or holds another key (another version, or another computation with the same hash), counts as
missing and is written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vnode import files
from vnode.errors import ProfileError

FORMAT = "vnode cost"
VERSION = 1


def usual_folder() -> Path:
    """Where the user's caches are (XDG Base Directory Specification): ``$XDG_CACHE_HOME/vnode/cost``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "vnode" / "cost"


class Cache:
    """Entries by key.

    Args:
      folder: where they are; made when the first is written. By default the user's (`usual_folder`).

    Example:
      >>> from vnode.partition import Cache
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     Cache(folder).put({"what": "add"}, {"seconds": 0.5})
      ...     Cache(folder).get({"what": "add"}), Cache(folder).get({"what": "mul"})
      ({'seconds': 0.5}, None)
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = usual_folder() if folder is None else Path(folder).expanduser()
        self._known: dict[str, dict[str, Any]] = {}

    def path(self, key: Mapping[str, str]) -> Path:
        """The file of an entry."""
        text = json.dumps(dict(key), sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def get(self, key: Mapping[str, str]) -> dict[str, Any] | None:
        """The content of an entry; None if there is none, or if the file holds something else."""
        path = self.path(key)
        if path.name not in self._known:
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                head = content["format"], content["version"], content["key"]
                value = {str(name): each for name, each in content["value"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                return None
            numbers = [each for each in value.values() if isinstance(each, float | int)]
            if head != (FORMAT, VERSION, dict(key)) or not all(0 <= n < math.inf for n in numbers):
                return None
            self._known[path.name] = value
        return dict(self._known[path.name])

    def put(self, key: Mapping[str, str], value: Mapping[str, Any]) -> None:
        """Writes an entry.

        Args:
          key: identifies the computation.
          value: plain data by name; numbers are not negative.

        Raises:
          ProfileError: the folder cannot be written to.
        """
        content = {"format": FORMAT, "version": VERSION, "key": dict(key), "value": dict(value)}
        with contextlib.suppress(OSError):  # the file's own error says why
            self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(key)
        files.write_text(path, json.dumps(content), ProfileError)
        self._known[path.name] = dict(value)
