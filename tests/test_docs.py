"""The documentation's examples do what they say they do.

Knows where documentation, its blocks of code and doctests are. Must not know what they say.
"""

import builtins
import doctest
import functools
import importlib
import inspect
import os
import pkgutil
import re
import runpy
import symtable
import sys
import types
from collections.abc import Callable, Iterator
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
BLOCK = re.compile(
    r"(?P<reason><!-- not run: [^>]+ -->\n)?^```python\n(?P<code>.*?)^```$(\n\n```(text)?\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
"""A page's code, with the block right behind it, if there is one: what the code prints.

A block that cannot run here has a comment before it that says why.
"""


SEVERAL = re.compile(
    r'jax_num_cpu_devices", (\d+)\)|^os.environ.*xla_force_host_platform_device_count=(\d+)', re.MULTILINE
)
"""How a page gets several devices, and how many."""


def updated(update: Callable[[str, Any], None], name: str, value: Any) -> None:
    """`jax.config.update`, but for the number of devices, which are there."""
    if name != "jax_num_cpu_devices":
        update(name, value)


def give_devices(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many devices as the page asks for, or one: what its readers have."""
    asked = SEVERAL.search(page.read_text(encoding="utf-8"))
    here = jax.devices()[: int(asked[1] or asked[2]) if asked else 1]
    monkeypatch.setattr(jax, "devices", lambda backend=None: here)
    monkeypatch.setattr(jax, "device_count", lambda backend=None: len(here))
    monkeypatch.setattr(jax, "make_mesh", functools.partial(jax.make_mesh, devices=here))
    monkeypatch.setattr(jax.config, "update", functools.partial(updated, jax.config.update))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[int, str, str | None]]:
    """The blocks of a page that are to run, each with the line that it begins at, and with what it is said to print."""
    text = page.read_text(encoding="utf-8")
    found = [(text.count("\n", 0, m.start("code")), m) for m in BLOCK.finditer(text)]
    return [(line, m["code"], m["shown"]) for line, m in found if not m["reason"] and ">>> " not in m["code"]]


@pytest.mark.newest
@pytest.mark.parametrize("page", [p for p in PAGES if ">>>" in p.read_text(encoding="utf-8")], ids=name_of)
def test_doctests(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_devices(page, monkeypatch)
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried
    assert not failed


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name_of)
def test_blocks(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page's blocks run from top to bottom, as a reader would paste them into one session, and print what it shows.

    They run on one device. A page that needs more says in the first line of a block how to get them, which was done
    here before. Each block is the file ``train.py`` to those that name its lines. In what is shown, `...` stands for
    what differs from machine to machine.
    """
    give_devices(page, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    session = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", session)
    checker = doctest.OutputChecker()
    for line, code, shown in blocks(page):
        capsys.readouterr()
        try:
            exec(compile(code, "train.py", "exec"), vars(session))
        except Exception as error:
            error.add_note(f"in the block of {name_of(page)} that begins at line {line}")
            raise
        printed = "".join(f"{text.rstrip()}\n" for text in capsys.readouterr().out.splitlines())
        if shown is not None and not checker.check_output(shown, printed, doctest.ELLIPSIS):
            pytest.fail(f"{name_of(page)}, line {line}, shows\n\n{shown}\nbut it is\n\n{printed}")


@pytest.mark.parametrize("name", modules())
def test_module(name: str) -> None:
    assert not doctest.testmod(importlib.import_module(name)).failed


def public_examples() -> Iterator[tuple[str, str]]:
    """The code of the examples of each public name, methods included."""
    parser = doctest.DocTestParser()
    for room in ("vnode", "vnode.cluster", "vnode.data", "vnode.elastic", "vnode.operators", "vnode.partition"):
        module = importlib.import_module(room)
        for name in module.__all__:
            value = getattr(module, name)
            members = vars(value) if inspect.isclass(value) else {}
            for member, each in {name: value, **{f"{name}.{key}": inner for key, inner in members.items()}}.items():
                text = getattr(getattr(each, "__func__", each), "__doc__", None)
                if isinstance(text, str) and not inspect.ismodule(each):
                    yield f"{room}.{member}", "".join(example.source for example in parser.get_examples(text))


def test_examples_of_public_names_import_all_that_they_use() -> None:
    """They can be pasted into a new session, where the names of their module are not there."""
    found = {}
    for name, code in public_examples():
        top = symtable.symtable(code, name, "exec")
        tables = [top, *(inner for child in top.get_children() for inner in (child, *child.get_children()))]
        used = {each.get_name() for table in tables for each in table.get_symbols() if each.is_global() or table is top}
        bound = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
        if missing := used - bound - vars(builtins).keys():
            found[name] = missing
    assert not found


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
