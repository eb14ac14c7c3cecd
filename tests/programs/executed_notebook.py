"""Executes the notebook of argument 1 into argument 2."""

import sys

import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], 4)
notebook.cells.append(nbformat.v4.new_code_cell("import sys; print(sys.executable, vnode.__file__)", id="where"))
nbclient.NotebookClient(notebook, timeout=600, kernel_name="tests").execute()
nbformat.write(notebook, sys.argv[2])
