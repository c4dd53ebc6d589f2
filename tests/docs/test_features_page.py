"""The page of features is what its cards say, and each card has evidence that exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import features as tool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cards() -> list[dict[str, Any]]:
    return json.loads(tool.CARDS.read_text())


def test_each_card_has_a_state_and_evidence_that_exists(cards: list[dict[str, Any]]) -> None:
    assert list(tool.problems(cards)) == []


def test_the_page_is_what_the_cards_say(cards: list[dict[str, Any]]) -> None:
    assert tool.PAGE.read_text() == tool.page(cards), "run python tools/features.py"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"state": "works"}, "state 'works' is none of"),
        ({"evidence": []}, "no evidence"),
        ({"evidence": ["tests/nowhere/test_nothing.py"]}, "tests/nowhere/test_nothing.py does not exist"),
        ({"state": "measured"}, "measured without a date"),
        ({"evidence": ["docs/faults.md"]}, "tested, but no test is named"),
    ],
)
def test_a_card_without_proof_is_refused(change: dict[str, Any], problem: str) -> None:
    card = {"section": "s", "capability": "c", "details": "d", "state": "tested", "evidence": ["tests/conftest.py"]}
    assert list(tool.problems([card | {"evidence": ["tests/tools/test_check_layers.py"]}])) == []
    assert any(problem in text for text in tool.problems([card | change]))
