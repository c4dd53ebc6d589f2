"""The museum's exhibits, and the table of them in the manual; run this file to write it."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "museum.md"
BEGIN, END = "| What | Where | When | How ours is protected |", "\n\n## "


@dataclass(frozen=True)
class Exhibit:
    """A silent error of another system, as its thread shows it."""

    system: str  # owner/name
    thread: str  # issues/N or pull/N
    date: str  # of the entry of the thread that the row is taken from
    symptom: str


@dataclass(frozen=True)
class Case:
    """Exhibits that one test is for."""

    room: str  # of tests/museum/test_museum_ROOM.py
    test: str
    protection: str
    exhibits: tuple[Exhibit, ...]


def cases() -> list[Case]:
    """Read the exhibits: each test with what protects, and an exhibit per line."""
    found = []
    for part in (Path(__file__).parent / "exhibits.txt").read_text().strip().split("\n\n"):
        title, protection, *lines = part.splitlines()
        room, _, test = title.removeprefix("# ").partition("::")
        found.append(Case(room, test, protection, tuple(Exhibit(*line[2:].split(" ", 3)) for line in lines)))
    return found


def table() -> str:
    """Return the table of all exhibits."""
    rows = [BEGIN, "|---|---|---|---|"]
    for case in cases():
        for one in case.exhibits:
            where = f"[{one.system} #{one.thread.partition('/')[2]}](https://github.com/{one.system}/{one.thread})"
            rows.append(f"| {one.symptom} | {where} | {one.date} | {case.protection} `{case.room}::{case.test}` |")
    return "\n".join(rows)


def page() -> str:
    """Return the page as it should be: its text, with the table in it."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    return re.sub(r"\d+ errors", f"{sum(len(case.exhibits) for case in cases())} errors", before) + (
        table() + END + rest.partition(END)[2]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
