"""How the site is built from the pages, the notebook and the docstrings: `make docs`.

Knows Sphinx. Must not know what pages say.
"""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer

HERE = Path(__file__).parent

project = "vnode"
author = "the authors of vnode"
version = release = importlib.metadata.version("vnode")
html_title = "vnode"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["README.md"]

# Docstrings. They write `names` in single backticks: links where there is such a name, code where there is none.
default_role = "py:obj"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}  # NumPy's, which is a union of a dozen protocols
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Pages. The notebook is shown with the outputs that it is kept with. tests/thorough/test_examples.py runs it and
# compares them; so it is run once, there.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
highlight_language = "text"  # of blocks that name none

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["vnode.css"]
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False
pygments_style = "default"  # of those with a light ground the one whose comments and outputs can be read
pygments_dark_style = "github-dark"


def copy_the_tour() -> None:
    """The notebook among the pages, with links as they are from there."""
    text = (HERE.parent / "examples" / "tour.ipynb").read_text(encoding="utf-8")
    text = text.replace("](../docs/", "](").replace("](bytes_lm.py)", "](../examples/bytes_lm.py)")
    text = re.sub(r"\]\((\w+\.py)\)", r"](../examples/\1)", text)
    (HERE / "tour.ipynb").write_text(text, encoding="utf-8")


def as_shown(app: Any, doctree: nodes.document) -> None:
    """Blocks of code: coloured where they are sessions, and without the empty line that ends a doctest."""
    for block in doctree.findall(nodes.literal_block):
        text = block.astext()
        if text.startswith(">>> "):
            block["language"] = "pycon"
        if block.rawsource == text:  # coloured when it is written
            block.rawsource = text.rstrip("\n")
            block.children = [nodes.Text(block.rawsource)]


def long_cells(app: Any, doctree: nodes.document) -> None:
    """Marks the columns of tables that hold sentences: on a narrow page a table scrolls before they become slivers."""
    for group in doctree.findall(nodes.tgroup):
        rows = [[cell for cell in row if isinstance(cell, nodes.entry)] for row in group.findall(nodes.row)]
        for column in zip(*rows, strict=False):
            if max(len(cell.astext()) for cell in column) > 30:
                for cell in column:
                    cell["classes"].append("long")


CODE = re.compile(r"(``.+?``|`[^`]+`)(?=(\w?))", re.DOTALL)
INITIAL = re.compile(r"^(\s*(?::[^:]+:\s+)?)(?=[A-Z]\.(?:\s|$))", re.MULTILINE)
TYPE = re.compile(r"^(:vartype \w+: )(.+)$", re.MULTILINE)
COLON = "\ue000"
"""Stands for a colon that napoleon is not to see."""


def before_napoleon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what a property or a result begins with for its type, up to a colon. Ours are sentences."""
    for number, line in enumerate(lines):
        if (what == "property" and not number) or (number and lines[number - 1].strip() == "Returns:"):
            lines[number] = line.replace(":", COLON)


def as_meant(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings as people read them: reStructuredText takes some of what they write for something else."""
    text = "\n".join(lines).replace(COLON, ":")
    text = CODE.sub(lambda found: found[1] + ("\\ " if found[2] else ""), text)  # a plural: `Batch`es
    text = INITIAL.sub(r"\1\\", text)  # "V." alone on a line is no first item of a list
    text = TYPE.sub(lambda found: found[1] + without_modules(found[2]), text)
    if what == "module":
        text = text.partition("\n\n")[0]  # the rest is for those who read the code
    lines[:] = [*text.split("\n"), ""]


def without_modules(types: str) -> str:
    """Types without the modules they are defined in, of which some are private."""
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", types)


def as_called(app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    """No arguments for a protocol, of which nobody makes an instance."""
    return ("", None) if getattr(obj, "_is_protocol", False) else None


def one_signature() -> None:
    """Overloads are for type checkers; people want the options and their defaults."""
    for module in ("vnode.transform", "vnode.integrations.nnx"):
        analyzer = ModuleAnalyzer.for_module(module)  # kept by Sphinx, and analyzed once
        analyzer.analyze()
        analyzer.overloads.clear()


def by_class(app: Any, env: Any, node: Any, shown: Any) -> Any:
    """`VirtualStep.on` and `Placement` lead to where they are, also from another module's page."""
    if node.get("refdomain") != "py" or not re.match(r"[A-Z]\w+(\.\w+)?$", node["reftarget"]):
        return None
    node["refspecific"] = True
    return env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], node["reftarget"], node, shown
    )


def setup(app: Any) -> None:
    copy_the_tour()
    one_signature()
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", as_meant, priority=600)
    app.connect("autodoc-process-signature", as_called)
    app.connect("doctree-read", as_shown)
    app.connect("doctree-read", long_cells)
    app.connect("missing-reference", by_class)
