"""How the site is built from the pages, the notebook and the docstrings: `make docs`.

Knows Sphinx. Must not know what pages say.
"""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

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
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = True

# Pages. The notebook is shown with the outputs that it is kept with, which tests/test_examples.py holds against those
# of a run; so it is run once, there.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["vnode.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def copy_the_tour() -> None:
    """The notebook among the pages, with links as they are from there."""
    text = (HERE.parent / "examples" / "tour.ipynb").read_text(encoding="utf-8")
    text = text.replace("](../docs/", "](").replace("](bytes_lm.py)", "](../examples/bytes_lm.py)")
    text = re.sub(r"\]\((\w+\.py)\)", r"](../examples/\1)", text)
    (HERE / "tour.ipynb").write_text(text, encoding="utf-8")


def separate_plurals(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings write `Batch`es, which reStructuredText reads only with an escaped blank between."""
    lines[:] = [re.sub(r"((?<!`)`[^`]+`|``[^`]+``)(?=\w)", r"\1\\ ", line) for line in lines]


def setup(app: Any) -> None:
    copy_the_tour()
    app.connect("autodoc-process-docstring", separate_plurals)
