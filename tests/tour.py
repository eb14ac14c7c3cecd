"""Runs the tour, and keeps it with its outputs: `python -m tests.tour` after a change of it or of what it prints.

Knows notebooks. Must not know what the tour says.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent
TOUR = ROOT / "examples" / "tour.ipynb"

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(folder: Path) -> nbformat.NotebookNode:
    """The tour with outputs, run in a process of its own; its last cell, `where`, says by what.

    Args:
      folder: to work in; empty.

    Raises:
      AssertionError: a cell fails.
    """
    kernel = folder / "jupyter" / "kernels" / "tests" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "tests", "language": "python"}))
    folders = ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    ours = ("XLA_FLAGS", "PYTHONWARNINGS", "JAX_COMPILATION_CACHE_DIR")  # jax's cache warns of programs for TPUs
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    environment |= dict.fromkeys(folders, str(folder / "jupyter"))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    finished = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "programs" / "executed_notebook.py"), str(TOUR), "executed.ipynb"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr
    return nbformat.read(folder / "executed.ipynb", 4)


def kept(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """What of an executed tour is kept: without its last cell, and without times of day."""
    cells = [cell for cell in notebook.cells if cell.id != "where"]
    for cell in cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.cells = cells
    return notebook


def merged(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """A cell's outputs, with what was printed bit by bit in one piece."""
    made: list[nbformat.NotebookNode] = []
    for output in outputs:
        if made and output.output_type == made[-1].output_type == "stream" and output.name == made[-1].name:
            made[-1].text += output.text
        else:
            made.append(output)
    return made


def outline(cell: nbformat.NotebookNode) -> list[tuple[str, list[str], str]]:
    """What a cell's outputs are, whatever the machine: their kinds, and what is said but for numbers."""

    def words(text: str) -> str:
        return " ".join(re.sub(r"[0-9a-f]{64}|\d[\d.,:]*(e[+-]\d+)?( [KMG]iB| B)?", "#", text).split())

    return [
        (o.output_type, sorted(o.get("data", {})), words(o.get("text", o.get("data", {}).get("text/plain", ""))))
        for o in cell.outputs
    ]


def main() -> None:
    """Runs the tour and keeps it."""
    with tempfile.TemporaryDirectory() as folder:
        TOUR.write_text(nbformat.writes(kept(execute(Path(folder)))) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
