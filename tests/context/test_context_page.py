"""Every causal model and encoder of transformers, with its sequences spread over ranks; the page says what came out."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from context_models import COLUMNS, PAGE, Row, compare, models, outcome

CHOSEN = {
    "causal:bloom": "ALiBi, and a backward of its own",
    "causal:mamba": "a state-space layer",
    "causal:gemma3": "images beside text",
    "causal:xlm": "a module that other models share",
    "masked:esm": "an embedding that counts masked tokens",
    "masked:roberta": "its own attention replaced",
    "token:t5": "biases of scores by distance",
    "token:funnel": "a sequence that becomes shorter",
}
"""What is special about them."""


def told() -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in PAGE.read_text().splitlines()]
    return {f"{cells[0]}:{cells[1]}": cells[2:] for cells in rows if cells[0] in ("causal", "masked", "token")}


ALL = list(told())


def check(found: Row) -> None:
    cells = told()[f"{found.task}:{found.name}"]
    assert [outcome(found, column) for column in range(len(COLUMNS))] == [
        outcome(Row(found.task, found.name, cells[-1], tuple(cells)), column) for column in range(len(COLUMNS))
    ], found
    assert found.way == cells[3]


def test_the_page_has_a_row_for_every_model_and_none_is_wrong_or_refused_by_default() -> None:
    assert [*told()] == [f"{task}:{name}" for task, name in models()]
    found = [
        [outcome(Row("", key.partition(":")[2], cells[-1], tuple(cells)), column) for column in range(len(COLUMNS))]
        for key, cells in told().items()
    ]
    assert not any("wrong" in row for row in found)
    ring, *auto = (sum(row[column] == "refused" for row in found) for column in range(len(COLUMNS)))
    assert ring > 100  # by which a page that is not read would show
    assert auto == [0, 0]


@pytest.mark.some(1)
@pytest.mark.parametrize("key", CHOSEN)
def test_a_model_is_as_the_page_says(key: str) -> None:
    check(compare(*key.split(":")))


@pytest.mark.full
@pytest.mark.parametrize("key", ALL)
def test_every_model_is_as_the_page_says(key: str) -> None:
    check(compare(*key.split(":")))
