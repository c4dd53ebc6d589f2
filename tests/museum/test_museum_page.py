"""The museum's exhibits have tests, its tests have exhibits, and the manual shows them all."""

import ast
import re
from collections import Counter
from datetime import date
from pathlib import Path

from exhibits import PAGE, cases, page

HERE = Path(__file__).parent
LEAST = 60


def names_in(room: str) -> set[str]:
    tree = ast.parse((HERE / f"test_museum_{room}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_exhibit_has_a_test_and_every_test_an_exhibit() -> None:
    named = Counter((case.room, case.test) for case in cases())
    rooms = {file.stem.removeprefix("test_museum_") for file in HERE.glob("test_museum_*.py")} - {"page"}
    assert named == Counter((room, test) for room in rooms for test in names_in(room))


def test_exhibits_are_cited_dated_and_told_once() -> None:
    found = [(case, one) for case in cases() for one in case.exhibits]
    assert len(found) >= LEAST
    assert max(Counter((one.system, one.thread, case.test) for case, one in found).values()) == 1
    for case, one in found:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", one.system), one
        assert re.fullmatch(r"(issues|pull)/\d+", one.thread), one
        assert date(2015, 1, 1) < date.fromisoformat(one.date) < date(2027, 1, 1), one
        assert one.symptom.endswith("."), one
        assert case.protection.endswith("."), case
        assert "|" not in one.symptom + case.protection


def test_the_manuals_table_is_that_of_the_exhibits() -> None:
    assert PAGE.read_text() == page(), "run python tests/museum/exhibits.py"
