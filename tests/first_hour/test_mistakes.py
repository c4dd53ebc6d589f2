"""What people are told in their first hour: each row of the tables ``mistakes_*.py`` of this folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from mistakes import Mistake, run_mistake

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("mistakes_*.py"))
MISTAKES: list[Mistake] = [row for table in TABLES for row in import_module(table).MISTAKES]
RANKS: list[Mistake] = [*import_module("mistakes_ends").MISTAKES, *import_module("mistakes_experts").MISTAKES]
"""Mistakes that only several ranks make; they take longest."""
QUICK = [mistake for mistake in MISTAKES if mistake not in RANKS]


def test_each_mistake_has_a_name_of_its_own() -> None:
    names = [mistake.name for mistake in MISTAKES]
    assert len(names) == len(set(names))


@pytest.mark.some(2)
@pytest.mark.parametrize("mistake", QUICK, ids=[mistake.name for mistake in QUICK])
def test_a_mistake_is_told_with_its_remedy(mistake: Mistake, tmp_path: Path) -> None:
    run_mistake(mistake, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mistake", RANKS, ids=[mistake.name for mistake in RANKS])
def test_a_mistake_of_several_ranks_is_told_with_its_remedy(mistake: Mistake, tmp_path: Path) -> None:
    run_mistake(mistake, tmp_path)
