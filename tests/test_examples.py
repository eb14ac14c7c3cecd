"""The examples run from start to end, with tiny settings.

Knows their command lines and what they print. Must not know how they work.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str, cwd: Path) -> str:
    """Runs an example as a newcomer would; its output, on a terminal that is wide enough for a table."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"COLUMNS": "120", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"}
    finished = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_digits(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "digits.py")
    picture = tmp_path / "pictures" / "digits.png"
    output = run(script, "--steps=3", "--batch=48", "--devices", "1", "3", "--out", str(picture), cwd=tmp_path)
    rows = {int(row[1]): row for row in re.finditer(r"│ +(\d+) │([^│]+)│([^│]+)│([^│]+)│([^│]+)│ (\w+) +│", output)}
    assert set(rows) == {1, 3}
    assert rows[1][2].split() == ["32"]
    assert rows[3][2].split() == ["11", "or", "10"]
    losses = [float(row[3]) for row in rows.values()]
    assert abs(losses[0] - losses[1]) < 1e-4
    assert rows[1][4] == rows[3][4]  # test accuracy
    assert rows[1][6] == rows[3][6]  # SHA-256
    assert "The hashes are equal" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.newest
def test_bytes_lm(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "bytes_lm.py")
    sizes = ("--batch=32", "--length=16", "--layers=1", "--width=16", "--sample=5")
    output = run(script, "--steps=4", "--devices=2", *sizes, cwd=tmp_path)
    found = re.search(r"loss ([\d.]+) nats per byte", output)
    assert found
    assert 2 < float(found[1]) < 7
    assert "def " in output


def test_elastic(tmp_path: Path) -> None:
    output = run(str(ROOT / "examples" / "elastic.py"), "--steps=8", "--batch=40", cwd=tmp_path)
    assert len(re.findall(r"SHA-256 \w{64}", output)) == 3
    assert len(set(re.findall(r"SHA-256 (\w+)", output))) == 1
    for change in ("step 2: 8 -> 3 devices [6, 5, 5]", "step 4: 3 -> 5 devices", "lost cpu:2, 5 -> 4 devices"):
        assert change in output
    assert "stopped by a signal after 5 steps" in output
    assert "The hashes are equal" in output
