"""The pages of error texts quote texts that the package has."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OF_EXPERTS = (ROOT / "docs" / "experts.md").read_text().partition("## Errors")[2]
QUOTED = re.findall(r"^\| `(.+?)` \|", PAGE + OF_EXPERTS, re.MULTILINE)


@cache
def texts() -> list[str]:
    """All strings of the package, with ``...`` in place of what is filled in."""
    found = []
    for file in (ROOT / "zeromesh").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def has(quoted: str) -> bool:
    parts = quoted.split("...")
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)  # it may leave out more than one value
    return any(pattern.search(text) for text in texts() if all(part in text for part in parts))


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_error_is_one_of_the_package(quoted: str) -> None:
    assert max(map(len, quoted.split("..."))) > 12, "it quotes too little to be found"
    assert has(quoted)


def test_every_row_is_a_quotation_and_other_texts_are_not_found() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| error text")]
    assert len(rows) == len(QUOTED) > 35
    assert not has("the master at ... cannot be loaded from ...")
