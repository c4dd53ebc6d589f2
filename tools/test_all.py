"""Run every test, the full matrices too, and write the outcome to docs/test-all.md: ``make test-all``.

Outcomes are recorded as they come, by commit. A run that was interrupted goes on where it stopped. Failed tests are run
once more, alone.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "test-all.md"
RECORDS = ROOT / ".test-all"
OUTCOMES = ("passed", "failed", "skipped")


def commit() -> str:
    """Return the commit that is tested, with a note on changes that are not in it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
    page = str(PAGE.relative_to(ROOT))
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.splitlines()
    return (name or "unknown") + (", with changes" if any(line[3:] != page for line in changed) else "")


def page(rows: list[dict[str, Any]], tested: str) -> str:
    """Return the page in Markdown, from the lines of a record; the last outcome of a test counts."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(OUTCOMES, 0))
    seconds: dict[str, float] = defaultdict(float)
    failed, flaky = [], []
    first = {row["test"]: row["outcome"] for row in reversed(rows)}
    for row in {row["test"]: row for row in rows}.values():
        file, _, name = row["test"].partition("::")
        module = file.removeprefix("tests/").removesuffix(".py")
        counts[module][row["outcome"]] += 1
        seconds[module] += row["seconds"]
        if row["outcome"] == "failed":
            failed.append(f"- `{module}`: `{name}`")
        elif first[row["test"]] == "failed":
            flaky.append(f"- `{module}`: `{name}`")
    total = {kind: sum(count[kind] for count in counts.values()) for kind in OUTCOMES}
    summary = (
        f"`make test-all` on commit {tested}, {time.strftime('%Y-%m-%d', time.gmtime())}: "
        + ", ".join(f"{number} {kind}" for kind, number in total.items())
        + f"; {sum(seconds.values()) / 60:.0f} minutes of tests, two at a time on {os.cpu_count()} cores "
        f"(Python {platform.python_version()}, torch {torch.__version__}). Written by `tools/test_all.py`."
    )
    lines = [
        "# The last run of the full matrices",
        "",
        *textwrap.wrap(summary, 120, break_on_hyphens=False),
        "",
        *(["Failed:", "", *failed, ""] if failed else []),
        *(["Failed in the run, passed alone:", "", *flaky, ""] if flaky else []),
        "| module | " + " | ".join(OUTCOMES) + " | seconds |",
        "|---|" + "---|" * (len(OUTCOMES) + 1),
    ]
    for module in sorted(counts):
        cells = " | ".join(str(counts[module][kind]) for kind in OUTCOMES)
        lines.append(f"| {module} | {cells} | {seconds[module]:.0f} |")
    return "\n".join(lines) + "\n"


def read(record: Path) -> list[dict[str, Any]]:
    """Return the lines of a record."""
    lines = record.read_text().splitlines(keepends=True) if record.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main() -> None:
    """Run pytest; the exit status is 1 if a test fails twice."""
    tested = commit()
    record = RECORDS / f"{tested.replace(', ', '-').replace(' ', '-')}.jsonl"
    RECORDS.mkdir(exist_ok=True)
    if "changes" in tested:
        record.unlink(missing_ok=True)  # outcomes of other changes
    pytest = [sys.executable, "-m", "pytest"]
    every = ["-m", "full or not full", f"--record={record}", "--numprocesses", "2", "--dist", "worksteal"]
    status = subprocess.run([*pytest, *every, *sys.argv[1:]], cwd=ROOT).returncode
    failed = [row["test"] for row in read(record) if row["outcome"] == "failed"]
    if failed:
        again = record.with_suffix(".again.jsonl")
        again.unlink(missing_ok=True)
        status = subprocess.run(
            [*pytest, "-m", "full or not full", f"--record={again}", *failed], cwd=ROOT
        ).returncode
        with record.open("a") as file:
            file.write(again.read_text())
    PAGE.write_text(page(read(record), tested))
    print(f"written to {PAGE.relative_to(ROOT)}")
    sys.exit(status)


if __name__ == "__main__":
    main()
