"""What people are told in their first hour: each row of the tables ``mistakes_*.py`` of this folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from mistakes import Mistake, run_mistake

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("mistakes_*.py"))
MISTAKES: list[Mistake] = [row for table in TABLES for row in import_module(table).MISTAKES]


def test_each_mistake_has_a_name_of_its_own() -> None:
    names = [mistake.name for mistake in MISTAKES]
    assert len(names) == len(set(names))


@pytest.mark.some(4)
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_a_mistake_is_told_with_its_remedy(mistake: Mistake, tmp_path: Path) -> None:
    run_mistake(mistake, tmp_path)
