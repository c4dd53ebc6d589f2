"""The closing report of a run, for programs and for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zeromesh.observe.bounds import COMPUTE
from zeromesh.observe.units import bytes_text, duration_text, scaled_text
from zeromesh.train.data.python_lines import LineCount


@dataclass(frozen=True)
class Report:
    """Result of a run.

    Attributes:
        architecture: kind of model.
        parameters: of the model.
        ranks: processes.
        zero_stage: row of ZeRO's table.
        steps: updates.
        tokens: trained on, repetitions counted.
        seconds: from the command to this report.
        training_seconds: of them, or of the resumed run altogether, in steps.
        utilization: mean share of the peak operations per second (MFU).
        training_loss: of the last step that was logged, nats per token.
        validation_loss: nats per token of all held-out text; None where nothing is held out, as the next two.
        bits_per_byte: of the same text; None also where its bytes are not known.
        gzip_bits_per_byte: what ``gzip -9`` needs for the same bytes, the documents one after the other.
        peak_memory: bytes, by rank.
        memory: the engine's memory report, of the first rank.
        traffic: the engine's traffic report, of the first rank.
        traffic_steps: steps in which that traffic was caused; evaluations in between are in it too.
        bounds: which resource bounded the first rank, as ``engine.bound_report``; None where too few steps were done.
        samples: texts, each a prompt and its continuation.
        lines: how many lines of the samples tokenize as Python; None if the text is not Python.
    """

    architecture: str
    parameters: int
    ranks: int
    zero_stage: int
    steps: int
    tokens: int
    seconds: float
    training_seconds: float
    utilization: float
    training_loss: float
    validation_loss: float | None
    bits_per_byte: float | None
    gzip_bits_per_byte: float | None
    peak_memory: list[int]
    memory: dict[str, Any]
    traffic: dict[str, dict[str, float]]
    traffic_steps: int
    bounds: dict[str, Any] | None
    samples: list[str]
    lines: LineCount | None


def markdown(report: Report) -> str:
    """The report as a Markdown document."""
    parts = [
        "# Training run",
        _table(("what", "value"), _summary(report)),
        "## Memory of the first rank",
        _table(("state", "tier", "bytes"), _memory(report.memory)),
        "## Traffic of the first rank",
        _table(("collective", "axis", "calls", "sent", "sent per step", "to other nodes"), _traffic(report)),
    ]
    if report.bounds is not None:
        parts += ["## What bounded the first rank", *_bounds(report.bounds)]
    if report.samples:
        parts += ["## Samples", *map(_block, report.samples)]
    return "\n\n".join(parts) + "\n"


def _block(text: str) -> str:
    """Text as it is, between fences that are longer than any in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _summary(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("model", f"{report.architecture}, {scaled_text(report.parameters)} parameters"),
        ("ranks", f"{report.ranks}, ZeRO-{report.zero_stage}"),
        ("time", f"{duration_text(report.seconds)}, of it {duration_text(report.training_seconds)} in steps"),
        ("steps", str(report.steps)),
        ("tokens", f"{scaled_text(report.tokens)}, {scaled_text(report.tokens / report.training_seconds, 'tok/s')}"),
        ("MFU", f"{report.utilization:.0%}"),
        ("training loss", f"{report.training_loss:.3f} nats per token"),
    ]
    if report.validation_loss is not None:
        rows.append(("validation loss", f"{report.validation_loss:.3f} nats per token"))
    if report.bits_per_byte is not None and report.gzip_bits_per_byte is not None:
        ratio = report.bits_per_byte / report.gzip_bits_per_byte
        rows.append(("held-out bits per byte", f"{report.bits_per_byte:.3f}"))
        rows.append(
            ("gzip -9 on the same bytes", f"{report.gzip_bits_per_byte:.3f}; the model needs {ratio:.2f} x that")
        )
    rows.append(("peak memory", ", ".join(map(bytes_text, report.peak_memory)) + " by rank"))
    if report.lines is not None and report.lines.lines:
        count = f"{report.lines.tokenizing} of {report.lines.lines}"
        rows.append(("sampled lines that tokenize as Python", f"{report.lines.share:.0%} ({count})"))
    return rows


def _memory(memory: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for state, tiers in memory.items():
        if isinstance(tiers, dict):
            rows += [(state, tier, bytes_text(size)) for tier, size in tiers.items() if size]
        else:
            rows.append((state, "", bytes_text(tiers)))
    return rows


LEAST = 0.005
"""Share of a step that is worth a row."""

BAR = 20
"""Characters of a bar that stands for the whole step."""


def _bounds(found: dict[str, Any]) -> tuple[str, str]:
    """A sentence, and a table with bars."""
    rows = []
    for name, use in found["uses"].items():
        if use["share"] < LEAST and use["amount"] is None:
            continue
        unit = "FLOP" if name == COMPUTE else "B"
        amount = "" if use["amount"] is None else scaled_text(use["amount"], unit)
        limit = "" if use["of_limit"] is None else f"{use['of_limit']:.0%} of {scaled_text(use['limit'], unit)}/s"
        bar = "█" * round(BAR * use["share"])
        rows.append((name, f"{1e3 * use['seconds']:.1f}", f"{use['share']:.0%} {bar}".rstrip(), amount, limit))
    sentence = f"Most of a step's {1e3 * found['seconds']:.0f} ms goes to {found['bound']}: {found['advice']}."
    return sentence, _table(("resource", "ms", "share", "per step", "of its limit"), rows)


def _traffic(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, counted in report.traffic.items():
        collective, _, axis = key.partition("/")
        per_step = bytes_text(counted["bytes"] / report.traffic_steps) if report.traffic_steps else ""
        across = bytes_text(counted["across_nodes"]) if counted["across_nodes"] else ""
        rows.append((collective, axis, str(counted["calls"]), bytes_text(counted["bytes"]), per_step, across))
    return rows
