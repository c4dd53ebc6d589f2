"""Run every test, the full matrices too, and write what came out to docs/test-all.md: ``make test-all``."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "test-all.md"
OUTCOMES = ("passed", "failed", "skipped")


def commit() -> str:
    """The commit that is tested, with a word on changes that are not in it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
    page = str(PAGE.relative_to(ROOT))
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.splitlines()
    return (name or "unknown") + (", with changes" if any(line[3:] != page for line in changed) else "")


def outcome(case: ElementTree.Element) -> str:
    """What became of one test."""
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def page(report: Path, tested: str, began: float) -> str:
    """Markdown, from pytest's report."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(OUTCOMES, 0))
    seconds: dict[str, float] = defaultdict(float)
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").removeprefix("tests.") or case.get("name", "")  # skipped as a whole
        counts[module][outcome(case)] += 1
        seconds[module] += float(case.get("time", 0))
        if outcome(case) == "failed":
            failed.append(f"- `{module}`: `{case.get('name')}`")
    total = {kind: sum(count[kind] for count in counts.values()) for kind in OUTCOMES}
    minutes = (time.time() - began) / 60
    summary = (
        f"`make test-all` on commit {tested}, {time.strftime('%Y-%m-%d', time.gmtime(began))}: "
        + ", ".join(f"{number} {kind}" for kind, number in total.items())
        + f", in {minutes:.0f} minutes on {os.cpu_count()} cores "
        f"(Python {platform.python_version()}, torch {torch.__version__}). Written by `tools/test_all.py`."
    )
    lines = [
        "# The last run of the full matrices",
        "",
        *textwrap.wrap(summary, 120, break_on_hyphens=False),
        "",
        *(["Failed:", "", *failed, ""] if failed else []),
        "| module | " + " | ".join(OUTCOMES) + " | seconds |",
        "|---|" + "---|" * (len(OUTCOMES) + 1),
    ]
    for module in sorted(counts):
        cells = " | ".join(str(counts[module][kind]) for kind in OUTCOMES)
        lines.append(f"| {module} | {cells} | {seconds[module]:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run pytest; its exit status is this one's."""
    began, tested = time.time(), commit()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "full or not full", f"--junitxml={report}", *sys.argv[1:]]
        status = subprocess.run(command, cwd=ROOT).returncode
        if report.is_file():
            PAGE.write_text(page(report, tested, began))
            print(f"written to {PAGE.relative_to(ROOT)}")
    sys.exit(status)


if __name__ == "__main__":
    main()
