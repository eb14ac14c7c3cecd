"""The house: which room may import which, and that every file says what it knows.

Knows the text of the package only; nothing of it is run. docs/how-it-works.md shows the same table.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vnode"

ROOMS = {
    "compat": "",
    "errors": "",
    "files": "errors",
    "stopped": "",
    "threads": "",
    "tracebacks": "errors",
    "show": "",
    "operators": "",
    "placement": "compat errors show stopped threads",
    "analysis": "errors operators",
    "remat": "analysis errors operators",
    "spmd": "analysis errors operators",
    "runtime": "analysis errors operators placement spmd",
    "report": "analysis operators placement runtime show",
    "step": "analysis compat errors placement remat report runtime show spmd threads tracebacks",
    "plan": "analysis errors files placement report runtime show step tracebacks",
    "transform": "errors placement plan step tracebacks",
    "partition": (
        "analysis compat errors files operators placement plan remat report runtime show spmd step threads tracebacks "
        "transform"
    ),
    "data": "compat errors placement threads",
    "workers": "compat errors files stopped",
    "cluster": "errors files plan stopped workers",
    "elastic": "analysis compat data errors partition placement plan show step threads tracebacks workers",
    "integrations": "errors placement step tracebacks transform",
}
"""What each room may import, from the ground up: each knows rooms above its own line only."""


def modules_of(file: Path, modules: set[str]) -> set[str]:
    """Modules of the package that a file imports, anywhere in it and also for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vnode":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == "vnode")
    return found & modules


DOORS = {"__init__", "__main__", "cli"}
"""What strangers enter by; it may import all rooms, and none of them imports it."""

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def room_of(file: Path) -> str:
    inside = file.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imports_of(file: Path) -> Iterator[str]:
    """Rooms that a file imports, anywhere in it; `vnode` for names of the package itself."""
    for node in ast.walk(ast.parse(file.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative imports hide which room is meant"
            modules = [node.module or ""]
            if node.module == "vnode":
                modules = [f"vnode.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            if module.split(".")[0] == "vnode":
                yield next(iter(module.split(".")[1:]), "vnode")


def test_rooms_stand_on_those_above_them() -> None:
    above: set[str] = set()
    for room, allowed in ROOMS.items():
        assert set(allowed.split()) <= above, f"{room} looks down"
        above.add(room)
    assert above | DOORS == {room_of(file) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_one_way(file: Path) -> None:
    room = room_of(file)
    if room not in DOORS:
        others = set(imports_of(file)) - {room}
        assert others <= set(ROOMS[room].split()), f"{room} may not import {others - set(ROOMS[room].split())}"


@pytest.mark.parametrize("file", [f for f in FILES if f.name != "__init__.py"], ids=name_of)
def test_a_file_says_what_it_knows(file: Path) -> None:
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    assert "Knows" in text and re.search(r"[Mm]ust\s+not\s+know", text), "say what it knows and what it must not know"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not within a room either, nor inside functions or for types alone."""
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
    graph = {name: modules_of(file, {*files}) - {name} for name, file in files.items()}
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()  # CycleError names the modules


def test_the_docs_show_the_same_table() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| `vnode/(\w+)(?:/|\.py)` \| [^|]* \| ([^|]*) \|$", page, re.MULTILINE)
    shown = {room: " ".join(re.findall(r"\w+", imports)) for room, imports in rows}
    assert shown == ROOMS and list(shown) == list(ROOMS)


def asks_of_jax(text: str) -> list[int]:
    """The lines at which a module asks jax how many processes there are, or which one this is."""
    names, lines = {"process_count", "process_index"}, []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            lines += [node.lineno for alias in node.names if alias.name in names]
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names:
            lines.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value).split(".")[0] == "jax":
            lines.append(node.lineno)
    return sorted({*lines})


def test_the_world_is_asked_and_not_jax() -> None:
    """In a second world of one process jax answers with the first: vnode.placement.world knows better."""
    asking = {name_of(file): lines for file in FILES if (lines := asks_of_jax(file.read_text()))}
    assert [*asking] == ["vnode/placement/world.py"], asking


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("jax.process_count() > 1", True),
        ("ask = jax.process_index", True),
        ("from jax import process_count as count", True),
        ("from jax._src import xla_bridge as xb\nxb.process_index()", True),
        ("device.client.process_index()", True),
        ("device.process_index", False),
    ],
)
def test_how_jax_may_be_asked(text: str, asks: bool) -> None:
    assert bool(asks_of_jax(text)) == asks
