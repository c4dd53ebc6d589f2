"""Summary of a run: a few lines without empty sections."""

from __future__ import annotations

from typing import Any

import pytest

from zeromesh.apps.train.goodput import Spent
from zeromesh.apps.train.run_summary import markdown, short_lines
from zeromesh.engine.observe.resource_bounds import ADVICE


def report_of(**changed: Any) -> dict[str, Any]:
    """Return the report of a short run on one rank."""
    times = dict.fromkeys((kind.name.lower() for kind in Spent), 0.0) | {"steps": 18.0, "start": 2.0}
    return {
        "architecture": "gpt",
        "parameters": 36_100,
        "ranks": 1,
        "zero_stage": 0,
        "steps": 60,
        "tokens": 7680,
        "seconds": 20.0,
        "training_seconds": 18.0,
        "attempts": 1,
        "time": times,
        "spikes": [],
        "goodput": 0.9,
        "utilization": 0.31,
        "training_loss": 3.557,
        "validation_loss": None,
        "bits_per_byte": None,
        "loss_unit": "nats per token",
        "accuracy": None,
        "peak_memory": [378_000_000],
        "prediction": None,
        "traffic": {},
        "traffic_steps": 60,
        "bounds": None,
        "samples": [],
    } | changed


def test_a_short_run_has_a_short_report_without_empty_sections() -> None:
    lines = short_lines(report_of())
    assert lines == [
        "model         gpt, 36.1 k parameters",
        "layout        1 rank, ZeRO-0",
        "loss          3.557 in training; nats per token",
        "speed         427 tok/s, MFU 31%; 60 steps, 7.68 k tokens",
        "time          0:20 in 1 attempt; 90% in steps that count (goodput)",
        "peak memory   378 MB",
        "time by work  steps that count 90%, starting 10%",
    ]
    document = markdown(report_of())
    assert [line for line in document.splitlines() if line.startswith("#")] == [
        "# Training run",
        "## Time of all attempts",
    ]


@pytest.mark.parametrize("bound", ADVICE)
def test_whatever_happened_the_report_has_at_most_25_lines(bound: str) -> None:
    spike = {"step": 7, "name": "loss", "value": 9.0, "usual": 3.0, "skipped": True}
    entry = {"predicted": 1e9, "measured": 2e9, "difference": -0.5}
    report = report_of(
        ranks=2000,
        peak_memory=[10**9] * 2000,
        spikes=[spike] * 30,
        samples=["a line\n" * 50, "another"],
        traffic={"all_gather/data": {"bytes": 6e9}},
        bounds={"bound": bound, "seconds": 1.5, "advice": ADVICE[bound]},
        prediction={"device": entry, "host": entry, "step": entry, "notes": ["a note"]},
        validation_loss=3.5,
        bits_per_byte=2.1,
    )
    lines = short_lines(report)
    assert len(lines) <= 25
    text = "\n".join(lines)
    assert f"limited by{' ' * 22}{bound}, in a step of 1500 ms. {ADVICE[bound]}" in text
    assert "and 1992 more ranks" in text
    assert "and 27 more" in text
    assert "3.500 held out (2.100 bits per byte)" in text
    assert ADVICE[bound].endswith(".")
