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


def run(*command: str, cwd: Path, status: int = 0) -> str:
    """Runs an example as a newcomer would; its output, on a terminal that is wide enough for a table."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"COLUMNS": "120", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"}
    finished = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == status, finished.stderr
    return finished.stdout


DIGITS = ROOT / "examples" / "digits.py"


def test_digits(tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "digits.png"
    runs = ("--devices", "1", "3", "--resize", "3", "1", "--uneven", "20", "0", "12")
    output = run(str(DIGITS), "--steps=3", "--batch=48", *runs, "--out", str(picture), cwd=tmp_path)
    found = re.finditer(r"│ +(\d[^│]*?) │([^│]+)│([^│]+)│([^│]+)│([^│]+)│ (\w+) +│", output)
    rows = {row[1]: row for row in found}
    assert list(rows) == ["1", "3", "3 → 1", "3, uneven"]
    assert [row[2].split() for row in rows.values()] == [
        ["32"],
        ["11", "or", "10"],
        ["11", "or", "10", "→", "32"],
        ["20", "0", "12"],
    ]
    losses = [float(row[3]) for row in rows.values()]
    assert max(losses) - min(losses) < 1e-4
    assert len({row[4] for row in rows.values()}) == 1  # test accuracy
    assert len({row[6] for row in rows.values()}) == 1  # SHA-256
    assert "The hashes are equal" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_digits_fail_where_a_bit_differs(tmp_path: Path) -> None:
    """The last run's fingerprint is another one."""
    code = (
        f"import sys; sys.path.insert(0, {str(DIGITS.parent)!r}); import digits\n"
        "fingerprints = iter('aab'); digits.sha256 = lambda params: next(fingerprints)\n"
        "digits.train_step = digits.vnode.virtualize(lambda state, batch: (state, state.step), virtual_nodes=32)\n"
        "digits.main()"
    )
    runs = ("--devices", "1", "--resize", "2", "1", "--uneven", "30", "2")
    output = run("-c", code, "--steps=2", "--batch=48", *runs, cwd=tmp_path, status=1)
    assert "The hashes differ: the devices show in the result of 2, uneven." in output


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
