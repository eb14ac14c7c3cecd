"""The examples run from start to end, with tiny settings.

Knows their command lines and what they print. Must not know how they work.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.tour import METADATA, TOUR, execute, outline

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path, status: int = 0, **variables: str) -> str:
    """Runs an example as a newcomer would; its output, on a terminal that is wide enough for a table."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"COLUMNS": "120", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"} | variables
    finished = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == status, finished.stderr
    return finished.stdout


QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""Where nothing that is looked at depends on how programs are optimized."""

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
        "digits.train_step = digits.vnode.virtualize(lambda s, batch: (s, batch['label'].sum()), virtual_nodes=32)\n"
        "digits.main()"
    )
    runs = ("--devices", "1", "--resize", "2", "1", "--uneven", "30", "2")
    output = run("-c", code, "--steps=2", "--batch=48", *runs, cwd=tmp_path, status=1, **QUICKLY)
    assert "The hashes differ: the devices show in the result of 2, uneven." in output


def test_plan(tmp_path: Path) -> None:
    script, sizes = str(ROOT / "examples" / "plan.py"), ("--width=64", "--layers=1", "--budget=5")
    output = run(script, "--steps=3", *sizes, cwd=tmp_path, **QUICKLY)
    assert re.search(r"as compiled", output)
    held = re.search(r"a device holds ([\d.]+)% of the state; losses differ by (\S+) at most", output)
    assert held is not None and float(held[1]) < 50 and float(held[2]) < 1e-3
    elsewhere = run(script, "--machine=v5e:2x2", *sizes, cwd=tmp_path)
    assert "TPU v5e:2x2" in elsewhere and "Megatron-style" in elsewhere


@pytest.mark.newest
def test_bytes_lm(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "bytes_lm.py")
    sizes = ("--batch=32", "--length=16", "--layers=1", "--width=16", "--sample=5")
    output = run(script, "--steps=4", "--devices=2", *sizes, cwd=tmp_path, **QUICKLY)
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


@pytest.mark.quickly
def test_workers(tmp_path: Path) -> None:
    """One of three workers is killed, and another one joins."""
    output = run(str(ROOT / "examples" / "workers.py"), "--steps=600", cwd=tmp_path)
    assert len(set(re.findall(r"SHA-256 (\w{64})", output))) == 1
    for said in ("worker 0 is killed", "two workers go on", "a new one has joined", "The hashes are equal"):
        assert said in output


@pytest.mark.quickly
def test_cluster(tmp_path: Path) -> None:
    """Three jobs share four workers, and the picture says so."""
    output = run(str(ROOT / "examples" / "cluster.py"), "--out", "page", cwd=tmp_path)
    assert "The hashes are equal" in output and "shrunk" in output and "grown" in output
    assert "Devices of each job" in (tmp_path / "page" / "index.html").read_text()


TIMED = {"elastic", "fit", "profile"}
"""Cells of the tour that print more or fewer lines, or in another order, from one machine or run to the next."""


def test_the_tour_is_kept_as_text() -> None:
    """With its outputs, so that it reads where it cannot run; no traces of a machine; lines that a diff can show."""
    text = TOUR.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    nbformat.validate(notebook)
    assert notebook["metadata"] == METADATA
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1))
    for cell in notebook["cells"]:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell["id"]), "an id that a person has chosen, or diffs grow"
        assert cell["metadata"] == {}
        assert not re.search(r"/(home|root|tmp|work|Users)/|ipykernel_", json.dumps(cell.get("outputs")))
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        for link in re.findall(r"\]\(([^)#:]+)\)", "".join(cell["source"])):
            assert (TOUR.parent / link).exists(), link


def test_tour(tmp_path: Path) -> None:
    """From the first cell to the last, in a process of its own; a cell's error is the test's."""
    executed = execute(tmp_path)
    cells = {cell.id: cell for cell in executed.cells if cell.cell_type == "code"}
    streams = {id: [o for o in cell.outputs if o.output_type == "stream"] for id, cell in cells.items()}
    warned = [(id, re.sub(r"\d+", "#", o.text)) for id, found in streams.items() for o in found if o.name != "stdout"]
    assert warned == [("elastic", "step # failed: lost cpu:#\n")]  # which the tour has asked for
    said = {id: "".join(o.text for o in found) for id, found in streams.items()}
    drawn = {id: {kind for o in cell.outputs for kind in o.get("data", {})} for id, cell in cells.items()}

    executable, package = said["where"].split()
    assert executable == sys.executable and Path(package).is_relative_to(ROOT)
    assert float(said["virtualize"].split(" differ by ")[1].split()[0]) < 1e-6
    for id in ("explain", "placement", "compare", "uneven", "groups"):
        assert "text/html" in drawn[id], id
    report = "".join(o.data["text/html"] for o in cells["explain"].outputs)
    assert report.count(f"In[{cells['step'].execution_count}]:") >= 3  # the lines of both gradients, and of the loss
    for id in ("resize-plot", "memory-plot", "profile-plot"):
        assert "image/png" in drawn[id], id

    hashes = re.findall(r"(\S.*) devices: SHA-256 (\w{64})", said["hash"])
    assert [name for name, _ in hashes] == ["8, then 3, then 5", "1", "3", "8"]
    assert "the same bits: True" in said["uneven"]
    for change in ("step 10: 8 -> 3 devices", "step 20: 3 -> 5 devices", "lost cpu:2, 5 -> 4 devices"):
        assert change in said["elastic"]
    assert {value for _, value in hashes} == set(re.findall(r"SHA-256 (\w{64})", said["elastic"]))
    assert float(said["groups"].split(" differ by ")[1].split()[0]) < 1e-5
    assert re.match(r"V = (2|4|8|16|32), the smallest that fits in the 8.00 MiB", said["auto"])

    stale = [
        cell.id
        for cell in nbformat.read(TOUR, 4).cells
        if cell.cell_type == "code" and cell.id not in TIMED and outline(cell) != outline(cells[cell.id])
    ]
    assert not stale, "what the tour is kept with is not what it prints: python -m tests.tour"
