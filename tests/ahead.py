"""Starts a program of `tests.programs` in a process of its own, and returns what it prints.

For compilers that load a large library (that for TPUs), and for what shows in a fresh process only. Knows processes.
Must not know vnode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import tpu

ROOT = Path(__file__).parents[1]

HASTY = {} if os.environ.get("VNODE_TEST_ALL") == "1" else {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0"}
"""With this in its environment the TPU compiler looks for no fast kernels, which takes nine tenths of its time.

Only for results that do not depend on it: whether a value is kept, computed again or moved, and memory within a fifth;
not for predictions of time, for closer ones of memory, nor for which collectives go together. With VNODE_TEST_ALL=1
everything is compiled as users compile it.
"""


def program(name: str) -> list[str]:
    """The command that runs a program of `tests.programs`; its working folder is to be `ROOT`."""
    return [sys.executable, "-m", f"tests.programs.{name}"]


def said(name: str, *arguments: str, hasty: bool = False) -> Any:
    """The last line that a program prints, read as JSON; `hasty`: with `HASTY`."""
    return json.loads(printed(*program(name), *arguments, hasty=hasty)[-1])


def printed(*command: str, hasty: bool = False) -> list[str]:
    """The lines that a command prints, with the environment in which the TPU compiler needs no TPU."""
    variables = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    environment = {**variables, **tpu.ENVIRONMENT, **(HASTY if hasty else {})}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
