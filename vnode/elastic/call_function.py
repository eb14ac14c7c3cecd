"""`python -m vnode.elastic.call_function FILE_OR_MODULE NAME`: has a worker run what a function returns.

Knows how functions are imported. Must not know workers: it calls `run`, as a script does.

    def make():  # in train.py
        return step, state, data, {"steps": 100}

    vnode.elastic.launch(make, workers=3)
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from vnode.elastic.run import run
from vnode.errors import VnodeError

MAIN = "__mp_main__"
"""The name of a script that is imported for one of its functions, as `multiprocessing` calls it: not ``__main__``."""


def imported(home: str, name: str) -> Callable[[], Any]:
    """A function of a module, or of a file.

    Args:
      home: the module's name, or the file's path.
      name: of the function.
    """
    if os.path.isfile(home):
        sys.path.insert(0, os.path.dirname(os.path.abspath(home)))
        spec = importlib.util.spec_from_file_location(MAIN, home)
        assert spec is not None and spec.loader is not None
        module = sys.modules[MAIN] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(home)
    return functools.reduce(getattr, name.split("."), module)


def main(arguments: list[str]) -> None:
    """Imports the function, calls it, and runs what it returns.

    Raises:
      VnodeError: it returns something else.
    """
    home, name, *rest = arguments
    sys.argv = [home, *rest]
    made = imported(home, name)()
    if not isinstance(made, tuple) or len(made) not in (3, 4) or (len(made) == 4 and not isinstance(made[3], dict)):
        raise VnodeError(
            f"{name} must return step, state, data and a dict of options, not {type(made).__name__}.",
            remedies=["return step, state, data, {'steps': 100}"],
        )
    step, state, data, *options = made
    run(step, state, data, **(options[0] if options else {}))


if __name__ == "__main__":
    main(sys.argv[1:])
