"""The documentation's examples do what they say they do.

Knows where documentation, its blocks of code and doctests are. Must not know what they say.
"""

import doctest
import functools
import importlib
import os
import pkgutil
import re
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import tests.random_programs
import vnode

pytestmark = pytest.mark.quickly

ROOT = Path(__file__).parent.parent


def modules() -> list[str]:
    names = []
    for package in (vnode, tests.random_programs):
        names.append(package.__name__)
        names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return [name for name in names if not name.endswith("__main__")]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?P<reason><!-- not run: [^>]+ -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
"""A page's code. What cannot run here says why in a comment before it."""


SEVERAL = re.compile(r'jax_num_cpu_devices", \d+\)|^os.environ.*xla_force_host_platform_device_count', re.MULTILINE)
"""How a page gets several devices."""


def updated(update: Callable[[str, Any], None], name: str, value: Any) -> None:
    """`jax.config.update`, but for the number of devices, which are there."""
    if name != "jax_num_cpu_devices":
        update(name, value)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[int, str]]:
    """The blocks of a page that are to run, each with the line that it begins at."""
    text = page.read_text(encoding="utf-8")
    found = [(text.count("\n", 0, m.start("code")), m) for m in BLOCK.finditer(text)]
    return [(line, m["code"]) for line, m in found if not m["reason"] and ">>> " not in m["code"]]


@pytest.mark.newest
@pytest.mark.parametrize("page", [p for p in PAGES if ">>>" in p.read_text(encoding="utf-8")], ids=name_of)
def test_doctests(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not SEVERAL.search(page.read_text(encoding="utf-8")):
        one = jax.devices()[:1]
        monkeypatch.setattr(jax, "devices", lambda backend=None: one)
    monkeypatch.setattr(jax.config, "update", functools.partial(updated, jax.config.update))
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert tried
    assert not failed


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name_of)
def test_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks run from top to bottom, as a reader would paste them into one session, on one device.

    A page that needs more says in the first line of a block how to get them, which was done here before.
    """
    text = page.read_text(encoding="utf-8")
    if not SEVERAL.search(text):
        one = jax.devices()[:1]
        monkeypatch.setattr(jax, "devices", lambda backend=None: one)
        monkeypatch.setattr(jax, "device_count", lambda backend=None: 1)
        monkeypatch.setattr(jax, "make_mesh", functools.partial(jax.make_mesh, devices=one))
    monkeypatch.setattr(jax.config, "update", functools.partial(updated, jax.config.update))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    session = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", session)
    for line, code in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), vars(session))


@pytest.mark.parametrize("name", modules())
def test_module(name: str) -> None:
    assert not doctest.testmod(importlib.import_module(name)).failed


SENTENCES = """{first}

Args:
  sizes: of something.

Returns:
  A pair: its first, and `Placement`s.
"""


@pytest.mark.thorough
def test_sentences_with_colons_are_sentences_in_the_reference() -> None:
    """What stands before a colon is no type, which is what napoleon makes of it."""
    napoleon = pytest.importorskip("sphinx.ext.napoleon")
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    options = {name: value for name, value in conf.items() if name.startswith("napoleon_")}
    for what, first in (("function", "Makes pairs."), ("property", "How many: all of them.")):
        lines = SENTENCES.format(first=first).splitlines()
        conf["before_napoleon"](None, what, "", None, None, lines)
        lines = napoleon.GoogleDocstring(lines, napoleon.Config(**options), what=what, name="f").lines()
        conf["as_meant"](None, what, "", None, None, lines)
        text = "\n".join(lines)
        assert first in text and ":type:" not in text.lower()
        if what == "function":
            assert ":returns: A pair: its first, and `Placement`\\ s." in text
    shown = conf["without_modules"]("collections.abc.Mapping[str, vnode.a.Eqn] | None")
    assert shown == "Mapping[str, Eqn] | None"


def test_every_public_name_is_in_the_reference() -> None:
    said = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto\w+:: (?:vnode\.)?(\w+)", said, re.MULTILINE))
    errors = {name for name in vnode.__all__ if hasattr(vnode.errors, name)}  # by vnode.errors, whole
    assert set(vnode.__all__) - errors <= documented


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_links() -> None:
    """Every relative link of the README and the pages leads to a file."""
    made = {ROOT / "docs" / "tour.ipynb"}  # by docs/conf.py
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                there = (page.parent / target).resolve()
                assert there.exists() or there in made, f"{name_of(page)} links to {target}"
