"""The documentation's examples do what they say they do.

Knows where documentation and doctests are. Must not know what they say.
"""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import tests.random_programs
import vnode

ROOT = Path(__file__).parent.parent


def modules() -> list[str]:
    names = []
    for package in (vnode, tests.random_programs):
        names.append(package.__name__)
        names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return [name for name in names if not name.endswith("__main__")]


@pytest.mark.newest
@pytest.mark.parametrize("page", sorted(p.name for p in (ROOT / "docs").glob("*.md") if ">>>" in p.read_text()))
def test_page(page: str) -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert tried
    assert not failed


@pytest.mark.parametrize("name", modules())
def test_module(name: str) -> None:
    assert not doctest.testmod(importlib.import_module(name)).failed


def test_links() -> None:
    """Every relative link of the README and the pages leads to a file."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
