"""Summary of a run that has ended: a few lines, and a document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zeromesh.apps.train.goodput import Spent
from zeromesh.base.words import bytes_text, counted, duration_text, scaled_text, some

BAR = 20  # characters of a bar for the whole step
RANKS_SHOWN = 8
SPIKES_SHOWN = 3
SAMPLE_LINES = 6  # of all samples in the lines of the command

Report = dict[str, Any]
"""Result of a run, as in report.json; losses are in ``loss_unit``."""


def short_lines(report: Report) -> list[str]:
    """Return the report in at most 25 lines of a terminal, for a run of at most ``RANKS_SHOWN`` ranks."""
    rows = [*summary(report), ("time by work", ", ".join(f"{kind} {share}" for kind, _, share in _times(report)))]
    spikes = [f"step {step} ({name} {value}, {done})" for step, name, value, _, done in _spikes(report)]
    if spikes:
        rows.append(("spikes", some(spikes, most=SPIKES_SHOWN)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    samples = [line for text in report["samples"] for line in text.splitlines() if line.strip()]
    if samples:
        lines += ["samples:", *(f"  {line}" for line in samples[:SAMPLE_LINES])]
        lines += ["  ... (all of them are in report.md)"] if len(samples) > SAMPLE_LINES else []
    return lines


def markdown(report: Report) -> str:
    """Return the report as a Markdown document."""
    times = [(kind, seconds, f"{share} {_bar(report, kind)}".rstrip()) for kind, seconds, share in _times(report)]
    parts = ["# Training run", _table(("what", "value"), summary(report))]
    parts += ["## Time of all attempts", _table(("work", "time", "share"), times)] if times else []
    if report["spikes"]:
        parts += ["## Spikes", _table(("step", "of", "value", "median before", "what was done"), _spikes(report))]
    if report["samples"]:
        parts += ["## Samples", *map(_block, report["samples"])]
    return "\n\n".join(parts) + "\n"


def summary(report: Report) -> list[tuple[str, str]]:
    """Return the figures of the run as rows of a name and a value."""
    speed, peaks = report["tokens"] / report["training_seconds"], report["peak_memory"]
    held_out = "" if report["validation_loss"] is None else f", {report['validation_loss']:.3f} held out"
    bits = "" if report["bits_per_byte"] is None else f" ({report['bits_per_byte']:.3f} bits per byte)"
    memory = bytes_text(max(peaks))
    if len(peaks) > 1:
        memory += f" at most; by rank: {some(map(bytes_text, peaks), 'ranks', most=RANKS_SHOWN)}"
    model = f"{report['architecture']}, {scaled_text(report['parameters'])} parameters"
    rows = [
        ("model", model),
        ("layout", f"{counted(report['ranks'], 'rank')}, ZeRO-{report['zero_stage']}"),
        ("loss", f"{report['training_loss']:.3f} in training{held_out}{bits}; {report['loss_unit']}"),
        (
            "speed",
            f"{scaled_text(speed, 'tok/s')}, MFU {report['utilization']:.0%}; {counted(report['steps'], 'step')}, "
            f"{scaled_text(report['tokens'])} tokens",
        ),
        (
            "time",
            f"{duration_text(sum(report['time'].values()))} in {counted(report['attempts'], 'attempt')}; "
            f"{report['goodput']:.0%} in steps that count (goodput)",
        ),
        ("peak memory", memory),
    ]
    if report["accuracy"] is not None:
        rows.insert(3, ("preferred", f"the chosen answer of {report['accuracy']:.1%} of the held-out pairs"))
    return [*rows, *_first_rank(report)]


def _block(text: str) -> str:
    # A fence that is longer than any in the text, which a model of Markdown may well write.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _times(report: Report) -> list[tuple[str, str, str]]:
    """Return each kind of work that took time, with its seconds and its share."""
    total = sum(report["time"].values())
    times = [(str(kind), report["time"][kind.name.lower()]) for kind in Spent]
    return [(kind, f"{seconds:.1f} s", f"{seconds / total:.0%}") for kind, seconds in times if seconds]


def _bar(report: Report, kind: str) -> str:
    total: float = sum(report["time"].values())
    share: float = report["time"][Spent(kind).name.lower()] / total
    return "█" * round(BAR * share)


def _spikes(report: Report) -> Iterator[tuple[str, ...]]:
    for spike in report["spikes"]:
        done = "left out" if spike["skipped"] else "logged"
        yield str(spike["step"]), spike["name"], f"{spike['value']:.4g}", f"{spike['usual']:.4g}", done


def _first_rank(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what bounded the first rank, what it sent, and how it was predicted; report.json has all figures."""
    bounds, prediction, steps = report["bounds"], report["prediction"], report["traffic_steps"]
    if bounds is not None:
        yield "limited by", f"{bounds['bound']}, in a step of {1e3 * bounds['seconds']:.0f} ms. {bounds['advice']}"
    if sent := sum(use["bytes"] for use in report["traffic"].values()):
        yield "sent by rank 0", bytes_text(sent) + (f", {bytes_text(sent / steps)} per step" if steps else "")
    if prediction is None:
        return
    for name, what in (("device", "memory of the device"), ("host", "memory of the host"), ("step", "time of a step")):
        entry, text = prediction[name], (lambda seconds: f"{1e3 * seconds:.1f} ms") if name == "step" else bytes_text
        if entry is not None and entry["predicted"] is not None:
            measured = "" if entry["measured"] is None else f", measured {text(entry['measured'])}"
            difference = "" if entry["difference"] is None else f" ({entry['difference']:+.0%})"
            yield f"predicted {what}", text(entry["predicted"]) + measured + difference
    yield from (("prediction", note) for note in prediction["notes"])
