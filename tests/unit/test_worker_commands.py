"""Command lines of workers that join a world of JAX first.

Knows `vnode.workers.start_job`, and how Python reads its options. Must not know supervisors.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from vnode.errors import WorkerError
from vnode.workers.start_job import Spec, joining_command

ECHO = "import sys; print(sys.flags.optimize, sys.flags.utf8_mode, sys.argv[1:])"


@pytest.mark.parametrize("rest", [["train.py", "-m", "x"], ["-m", "train", "a"], ["-c", "pass", "-u"]])
def test_options_of_python_stay_options_and_the_rest_goes_to_the_worker(rest: list[str], tmp_path: Path) -> None:
    """Python itself reads the command line: a module in the place of the worker's prints what came."""
    package = tmp_path / "vnode" / "elastic"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "join_world.py").write_text(ECHO)
    command = joining_command([sys.executable, "-O", "-X", "utf8", "-W", "ignore", *rest])
    said = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, check=True)
    assert said.stdout.strip() == f"1 1 {rest}"


@pytest.mark.parametrize(
    "command", [["sh", "-c", "python train.py"], ["./train.py"], ["python", "-u"], ["python", "-"]]
)
def test_other_commands_are_refused(command: list[str]) -> None:
    with pytest.raises(WorkerError, match="What to do:\n  - give"):
        Spec(command=tuple(command), name="", workers=1, restart=True).check()


@pytest.mark.parametrize("command", [["train.py", "a"], ["bash", "run.sh"]])
def test_ray_replaces_pythons_name_only(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node's own Python takes the place of the first word: another program would be lost."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(WorkerError, match="workers on Ray are started by Python, not by"):
        Spec(command=tuple(command), name="", workers=1, backend="ray").check()
