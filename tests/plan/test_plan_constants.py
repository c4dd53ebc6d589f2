"""Doubts that the planner states, beside the errors of its committed report card."""

import re
from pathlib import Path

from zeromesh.plan.fit import MEMORY_MARGIN, TIME_ERROR

CARD = (Path(__file__).parents[2] / "docs" / "plan-report-card.md").read_text(encoding="utf-8")
TIMES = ("step_s", "tflops_per_gpu", "tokens_per_s_per_gpu")


def mean_error(*quantities: str) -> float:
    """Mean over the rows of the card that decided no constant."""
    rows = re.findall(r"^\| \w+ \| (\w+) \| (\d+) \| (\d+) \| \d+ \| ([\d.]+)% \|", CARD, re.MULTILINE)
    kept = [(int(judged) - int(fitted), float(error)) for name, judged, fitted, error in rows if name in quantities]
    return sum(count * error for count, error in kept) / sum(count for count, _ in kept) / 100


def test_doubts_are_those_of_the_report_card() -> None:
    # Of errors that are normal, 95 % are within 2.5 times their mean.
    assert abs(2.5 * mean_error(*TIMES) - TIME_ERROR) < 0.015  # it is said in whole per cent
    assert mean_error("memory_gib") < MEMORY_MARGIN < 2 * mean_error("memory_gib")
