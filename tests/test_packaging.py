"""What is published: what the wheel holds, that it runs with what it asks for alone, and that extras suffice.

Knows packages and environments. Must not know what vnode does.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_docs import blocks

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    """The packages that requirements bring, those of vnode's own extras included."""
    found = set()
    for requirement in requirements:
        name, extras = re.fullmatch(r"([\w-]+)(?:\[([\w,-]+)\])?.*", requirement).groups()
        if name == "vnode":
            found |= set().union(*(names(PROJECT["optional-dependencies"][extra]) for extra in extras.split(",")))
        else:
            found.add(name)
    return found


def test_extras_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(
    ("page", "extra"), [("recipes/equinox.md", "equinox"), ("recipes/nnx.md", "flax"), ("start.md", None)]
)
def test_an_extra_suffices_for_its_page(page: str, extra: str | None) -> None:
    """What a page imports is what its extra brings, or vnode itself."""
    imported = {
        found
        for _, code, _ in blocks(ROOT / "docs" / page)
        for found in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
    }
    brought = names(PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else []))
    assert imported - set(sys.stdlib_module_names) - {"vnode"} <= brought


def test_figures_are_read_from_an_archive(tmp_path: Path) -> None:
    """As `zipimport` has the package: its files are none of the file system's."""
    archive = shutil.make_archive(str(tmp_path / "vnode"), "zip", ROOT, "vnode")
    code = "from vnode.partition.cost import calibration; print(calibration.__file__, len(calibration.entries()) > 1)"
    environment = {**os.environ, "PYTHONPATH": archive}
    run = [sys.executable, "-c", code]
    said = subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.startswith(archive) and said.endswith(" True\n")


@pytest.mark.wheel
def test_wheel(tmp_path: Path) -> None:
    """Built as for publishing, installed alone, it runs the ten lines of the README."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}

    def run(*command: str | Path) -> str:
        finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    kept = {str(path.relative_to(ROOT)) for path in (ROOT / "vnode").rglob("*") if path.is_file()}
    assert packed == {name for name in kept if "__pycache__" not in name}

    venv.create(tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-compile", wheel)
    there = run(*pip, "list", "--format=freeze").lower()
    assert not re.search(r"^(flax|optax|rich|orbax)", there, re.MULTILINE)
    ((_, code, _),) = blocks(ROOT / "README.md")
    (tmp_path / "ten_lines.py").write_text(code + "print(vnode.__file__, metrics)\n", encoding="utf-8")
    said = run(python, "-W", "error", tmp_path / "ten_lines.py")
    assert "256 examples on 32 virtual nodes of 8" in said
    assert str(tmp_path / "fresh") in said.splitlines()[-1]
