"""Causal models of transformers, split over two ranks, train as in one process; the page says what is split."""

import pytest

from causal_models import PAGE, Row, is_equal, line, names, row

CHOSEN = {
    "apertus": "an activation with parameters",
    "bitnet": "norms over all of the split dim",
    "codegen": "a fused weight in parts for several devices",
    "cpmant": "a bias of the scores, and an MLP in two modules",
    "ctrl": "an MLP that is a sequence of layers",
    "dbrx": "experts that are rows of one weight",
    "doge": "a layer that reads the values of all heads",
    "gpt_oss": "experts that are transposed, interleaved and have biases",
    "inkling_text": "fused experts, shared experts, and an embedding with a norm",
    "jetmoe": "layers of experts, in MLPs and in attention",
    "kimi_linear": "two kinds of attention whose layers have the same names",
    "modernbert-decoder": "an MLP with a fused gate",
    "youtu": "latent attention",
    "zamba2": "adapters, and blocks of two kinds",
}
"""What is special about them."""


def told(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in one.strip("|\n").split("|")] for one in text.splitlines() if one.startswith("| ")]
    return {cells[0]: cells[1:8] + cells[9:] for cells in rows[1:]}


ALL = list(told(PAGE.read_text()))


def check(found: Row) -> None:
    assert found.failure or is_equal(found), found
    assert told(f"| model |\n{line(found)}") == {found.name: told(PAGE.read_text())[found.name]}


def test_the_page_has_a_row_for_every_causal_model_and_all_that_are_trained_are_equal() -> None:
    rows = told(PAGE.read_text())
    assert list(rows) == names()
    assert {cells[-1] for cells in rows.values()} == {"yes", ""}
    assert sum(cells[-1] == "" for cells in rows.values()) < 5


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_causal_model_is_split_as_the_page_says_and_equal(name: str) -> None:
    check(row(name))


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_every_causal_model_is_split_as_the_page_says_and_equal(name: str) -> None:
    check(row(name))


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_every_causal_model_is_equal_on_four_ranks(name: str) -> None:  # twice as many as there are heads of keys
    found = row(name, 4)
    assert found.failure or is_equal(found), found
