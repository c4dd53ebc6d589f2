"""The page of faults: every fault has a row, and every test that it names is there."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"


def rows() -> dict[str, str]:
    found = (re.match(r"\| (\d+[a-z]?) \|", line) for line in PAGE.read_text().splitlines())
    return {match[1]: match.string for match in found if match}


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_a_row_with_tests_that_exist() -> None:
    found = rows()
    assert {int(re.sub(r"[a-z]", "", number)) for number in found} == set(range(1, 57))
    for number, row in found.items():
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row.rpartition(" | ")[2])
        assert named, number
        for path, name in named:
            assert name in names_in(path), (number, path, name)
