"""Write docs/features.md from the cards in docs/features.json: ``python tools/features.py [--check]``.

A card has a section, a capability, its details, a state of ``STATES``, evidence (paths of pages, benchmarks and tests),
and, where something was measured, the date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CARDS, PAGE = ROOT / "docs" / "features.json", ROOT / "docs" / "features.md"

STATES = {
    "measured": "a benchmark page has its figures, and tests run it",
    "tested": "tests compare it with plain torch, or with the library that it stands for",
    "documented only": "written and described, but not run on the hardware that it is for",
    "known failure": "refused with a message that says so",
}
"""State of a card -> what it means."""

INTRODUCTION = """# Features

This page lists what ZeroMesh does, with a link to the page that describes each feature, and
[what it does not do yet](#not-there-yet).
Unless a line says otherwise, features can be combined freely. `tools/features.py` writes the page from
[cards](features.json), which name the tests and figures of each feature.
"""


def state_of(card: dict[str, Any]) -> str:
    """Return the last cell of a card's row: its state, with a link to the page that has the figures."""
    pages = [path for path in card["evidence"] if path.startswith("docs/") and path.endswith(".md")]
    if card["state"] == "measured" and pages:
        return f"measured [{card['date']}]({pages[0].removeprefix('docs/')})"
    return f"{card['state']} {card.get('date', '')}".rstrip()


def problems(cards: list[dict[str, Any]], root: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with the cards: states that do not exist, evidence that is missing."""
    for card in cards:
        name = card["capability"]
        if card["state"] not in STATES:
            yield f"{name}: state {card['state']!r} is none of {', '.join(STATES)}"
        if not card["evidence"]:
            yield f"{name}: no evidence; name a test, a benchmark or a page"
        yield from (
            f"{name}: evidence {path} does not exist" for path in card["evidence"] if not (root / path).exists()
        )
        if card["state"] == "measured" and "date" not in card:
            yield f"{name}: measured without a date"
        if card["state"] in ("measured", "tested") and not any("test" in Path(path).name for path in card["evidence"]):
            yield f"{name}: {card['state']}, but no test is named"


def page(cards: list[dict[str, Any]]) -> str:
    """Return the text of the page."""
    lines = [INTRODUCTION, *(f"- *{state}*: {meaning}." for state, meaning in STATES.items())]
    for section, rows in groupby(cards, key=lambda card: card["section"]):
        lines += [f"\n## {section}\n", "| feature | details | state |", "|---|---|---|"]
        lines += [f"| {card['capability']} | {card['details']} | {state_of(card)} |" for card in rows]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or check it; 1 if a card is wrong, or the page is not what the cards say."""
    cards = json.loads(CARDS.read_text(encoding="utf-8"))
    wrong, text = list(problems(cards)), page(cards)
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        wrong.append("docs/features.md is stale; run python tools/features.py")
    print("\n".join(wrong) if wrong else "features: ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
