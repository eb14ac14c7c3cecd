"""A source line with an absolute path -> the same with a path that its reader knows.

Knows paths of files, and of packages. Must not know what is written there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path

LINE = re.compile(r"^(.+?)(:\d+ \(.*)$")
"""A source line: the file, and the rest."""


def short_source(source: str) -> str:
    """A source line with its file seen from the working directory, else from the folder that holds its package.

    >>> short_source("/nowhere/me/train.py:7 (train.<locals>.loss) in a/b")
    'train.py:7 (train.loss) in a/b'
    """
    found = LINE.match(source)
    if not found:
        return source
    file = display_path(found[1]) if os.path.isabs(found[1]) else found[1]  # In[3] is no file
    return file + found[2].replace(".<locals>", "")


@functools.lru_cache(maxsize=1024)
def display_path(file: str) -> str:
    """A file's path: of an installed package, from the folder that holds it, even if that is in the working directory.

    Else from the working directory, if the file is in there.
    """
    path = Path(file)
    for index, part in enumerate(path.parts):
        if part in ("site-packages", "dist-packages"):
            return str(Path(*path.parts[index + 1 :]))
    with contextlib.suppress(FileNotFoundError, ValueError):  # no working directory any more, or not in there
        return str(path.relative_to(Path.cwd()))
    root = path.parent
    while (root / "__init__.py").exists():
        root = root.parent
    return str(path.relative_to(root))
