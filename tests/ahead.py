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


def said(program: str, *arguments: str) -> Any:
    """What the last line that a program prints is as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **tpu.ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
