"""What the TPU compiler says, asked by a program in a process of its own: the compiler loads a large library.

Knows processes. Must not know vnode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import tpu

HASTY = {} if os.environ.get("VNODE_TEST_ALL") == "1" else {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0"}
"""With this in its environment the compiler looks for no fast kernels, which takes nine tenths of its time.

Only for what does not depend on it: whether something is kept, computed again or moved, and memory within a fifth; not
for predictions of time, for closer ones of memory, nor for which collectives go together. With VNODE_TEST_ALL=1
everything is compiled as users compile it.
"""


def said(program: str, *arguments: str, hasty: bool = False) -> Any:
    """What the last line that a program prints is as JSON; `hasty`: with `HASTY`."""
    return json.loads(printed("-c", program, *arguments, hasty=hasty)[-1])


def printed(*command: str, hasty: bool = False) -> list[str]:
    """The lines that Python prints, called so; `hasty`: with `HASTY`."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **tpu.ENVIRONMENT, **(HASTY if hasty else {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
