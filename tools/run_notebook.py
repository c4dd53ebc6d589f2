"""Run ``examples/quickstart.ipynb`` and write its outputs into it: ``.venv/bin/python tools/run_notebook.py``."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "quickstart.ipynb"


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run all cells in the folder of the examples and return the notebook with its outputs, which are in place.

    Raises:
        CellExecutionError: for the first cell that fails.
    """
    # Times of execution would differ at each run.
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=120, record_timing=False, resources=resources).execute()
    notebook.metadata["language_info"] = {"name": "python"}  # the kernel adds the version of this Python
    return notebook


if __name__ == "__main__":
    nbformat.write(execute(nbformat.read(NOTEBOOK, as_version=4)), NOTEBOOK)
