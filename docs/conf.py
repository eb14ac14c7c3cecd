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
napoleon_use_ivar = True

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
html_show_copyright = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def copy_the_tour() -> None:
    """The notebook among the pages, with links as they are from there."""
    text = (HERE.parent / "examples" / "tour.ipynb").read_text(encoding="utf-8")
    text = text.replace("](../docs/", "](").replace("](bytes_lm.py)", "](../examples/bytes_lm.py)")
    text = re.sub(r"\]\((\w+\.py)\)", r"](../examples/\1)", text)
    (HERE / "tour.ipynb").write_text(text, encoding="utf-8")


CODE = re.compile(r"(``.+?``|`[^`]+`)(?=(\w?))", re.DOTALL)
INITIAL = re.compile(r"^(\s*(?::[^:]+:\s+)?)(?=[A-Z]\.(?:\s|$))", re.MULTILINE)


def as_meant(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings as people read them: reStructuredText takes some of what they write for something else."""
    text = "\n".join(lines)
    text = CODE.sub(lambda found: found[1] + ("\\ " if found[2] else ""), text)  # a plural: `Batch`es
    text = INITIAL.sub(r"\1\\", text)  # "V." alone on a line is no first item of a list
    if what == "module":
        text = text.partition("\n\n")[0]  # the rest is for those who read the code
    lines[:] = [*text.split("\n"), ""]


def setup(app: Any) -> None:
    copy_the_tour()
    app.connect("autodoc-process-docstring", as_meant)
