"""The notebook for newcomers runs, learns, and shows its plots."""

import json
import re
from typing import Any

import nbformat
import pytest

from run_notebook import NOTEBOOK, execute

LARGEST = 120_000  # bytes of the file with its pictures
FIGURES = 3  # losses of one process, losses of two ranks, memory
STEPS = 200
END = """
print(json.dumps([*alone.losses.values(), *both.losses.values()]))
display(alone.figure)
display(both.figure)
"""


def outputs(notebook: nbformat.NotebookNode) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def shown(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    return [output.data[kind] for output in outputs(notebook) if kind in output.get("data", {})]


@pytest.mark.full
def test_the_notebook_learns_on_one_and_on_two_ranks_and_redraws_its_plots() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.update({"outputs": []} if cell.cell_type == "code" else {})
    notebook.cells.append(nbformat.v4.new_code_cell(END))
    execute(notebook)
    printed, *last = notebook.cells.pop().outputs
    curves = json.loads(printed.text)
    assert len(curves) == 3
    for losses in curves:
        assert len(losses) == STEPS
        assert sum(losses[-10:]) < sum(losses[:10]) / 2
    alone, *ranks = curves
    # The joint loss is the mean over ranks; sums in another order differ by a rounding of fp32 in each step.
    assert [sum(pair) / 2 for pair in zip(*ranks, strict=True)] == pytest.approx(alone, abs=STEPS * 2**-23)
    pictures = shown(notebook, "image/png")
    assert len(pictures) == FIGURES
    assert pictures[:2] == [output.data["image/png"] for output in last]  # the live plots show all losses
    first, last = re.search(r"loss at step 1: (\S+), at step 60: (\S+)", notebook.cells[-1].outputs[0].text).groups()
    assert float(last) < float(first)
    assert any("tokens/s" in table for table in shown(notebook, "text/markdown"))


def test_the_committed_notebook_is_small_and_has_its_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert NOTEBOOK.stat().st_size < LARGEST
    assert len(shown(notebook, "image/png")) == FIGURES
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
