"""The end of a run: evaluation of all held-out text, the weights, samples, the picture of the loss, and the report."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

from zeromesh.apps.train.check import Job
from zeromesh.apps.train.goodput import Spent, read_attempts, totals
from zeromesh.apps.train.loop import Loop, Progress
from zeromesh.apps.train.metrics import read_metrics
from zeromesh.apps.train.model import Transformer
from zeromesh.apps.train.run_picture import write_picture
from zeromesh.apps.train.sample import load_writer
from zeromesh.base.files import write_text
from zeromesh.base.machine import MACHINE, peak_bytes
from zeromesh.base.words import bytes_text, counted, duration_text, scaled_text

WORTH = 30.0  # seconds of all steps from which the few seconds of a prediction are spent
BAR = 20  # characters of a bar for the whole step

Report = dict[str, Any]
"""Result of a run, as in report.json; losses are in nats per token."""


def close(loop: Loop, began: float, start: Progress, reached: Progress, console: Console) -> None:
    """Evaluate, and write the weights and the report of a loop at its end. Collective; the first rank writes."""
    engine, job = loop.engine, loop.job
    with loop.times.spend(Spent.EVALUATION):
        score = loop.held_out.score(engine)
    if score is not None:
        loop.show_score(reached, score)
    memory, traffic = engine.memory_report(), engine.traffic_report()
    # Of one rank: the operations of a step are shared out evenly.
    bounds = engine.bound_report(loop.flops_per_token * loop.tokens_per_step / engine.mesh.world_size)
    local_peak = torch.tensor([float(peak_bytes(engine.device))], dtype=torch.float64)
    peaks = [round(peak) for peak in engine.mesh.group("world").exchange(local_peak).flatten().tolist()]
    engine.save_16bit_model(job.folder.model)
    # All that is collective is done; only the first rank has metrics.
    if loop.metrics is None:
        return
    loop.metrics.close()
    loop.times.record(reached.step, ends=True)
    attempts = read_attempts(job.folder.times)
    times = totals(attempts)
    if isinstance(job.language, Transformer):
        job.folder.copy_tokenizer(job.folder.model)
    records = read_metrics(job.folder.metrics)
    steps, spikes = ([record for record in records if record["kind"] == kind] for kind in ("train", "spike"))
    prediction = None
    if reached.seconds >= WORTH or os.environ.get(MACHINE):
        rows = engine.train_micro_batch_size_per_gpu()
        # From a model that no engine has changed; the other ranks do not wait for it.
        prediction = engine.prediction_report(
            job.language.build, *job.language.example(rows * job.rows_per_sample), memory=memory
        )
    samples = _samples(job)
    report: Report = {
        "architecture": job.language.name,
        "parameters": engine.sharded.count(),
        "ranks": engine.mesh.world_size,
        "zero_stage": job.settings.zero_optimization.stage,
        "steps": reached.step,
        "tokens": reached.samples * job.tokens_per_sample,  # repetitions count
        "seconds": time.time() - began,
        "training_seconds": reached.seconds,  # in steps, of the whole run also if it was resumed
        "attempts": len(attempts),  # commands and restarts; the times are those of all
        "time": {kind.name.lower(): round(seconds, 3) for kind, seconds in times.items()},
        "spikes": [{key: spike[key] for key in ("step", "name", "value", "usual", "skipped")} for spike in spikes],
        "goodput": times[Spent.STEPS] / (sum(times.values()) or 1.0),  # 0 where no time could be written
        "utilization": fmean(record.get("utilization", 0.0) for record in steps),  # share of the peak
        "training_loss": steps[-1]["loss"],
        "validation_loss": score.loss if score else None,  # of all held-out text
        "bits_per_byte": score.bits_per_byte if score else None,
        "loss_unit": "nats per token" if job.settings.dpo is None else "nats per pair",
        "accuracy": score.accuracy if score else None,  # share of held-out pairs whose chosen answer is preferred
        "best": loop.best.state if job.run.watches_loss else None,  # of the evaluations between steps
        "peak_memory": peaks,  # by rank; all below is of the first rank
        "memory": memory,
        "prediction": prediction,  # null after a short run
        "traffic": traffic,
        "traffic_steps": reached.step - start.step,  # the traffic has evaluations between them, too
        "bounds": bounds,  # null after too few steps
        "samples": samples,
    }
    write_text(job.folder.report, json.dumps(report, indent=2))
    text = markdown(report)
    write_text(job.folder.report.with_suffix(".md"), text)
    try:
        write_picture(job.folder.path)
    except (OSError, ValueError) as error:  # the run has succeeded; a full disk may have left no times
        console.print(f"no {job.folder.picture.name} was written: {error}")
    console.print(Markdown(text))
    console.print(f"the report, the weights and the checkpoints are in {job.folder.path}")


def _samples(job: Job) -> list[str]:
    wanted = job.run.sample
    if not wanted.prompts:
        return []
    writer = load_writer(job.folder)  # what was written is tried out, and not the engine's model
    return [
        writer.text(prompt, wanted.length, wanted.temperature, seed, wanted.chat)
        for seed, prompt in enumerate(wanted.prompts)
    ]


def markdown(report: Report) -> str:
    """Return the report as a Markdown document."""
    parts = [
        "# Training run",
        _table(("what", "value"), _summary(report)),
        "## Time of all attempts",
        _table(("work", "time", "share"), _times(report)),
        *(["## Spikes", _table(SPIKE_COLUMNS, _spikes(report))] if report["spikes"] else []),
    ]
    if report["samples"]:
        parts += ["## Samples", *map(_block, report["samples"])]
    return "\n\n".join(parts) + "\n"


def _block(text: str) -> str:
    # A fence that is longer than any in the text, which a model of Markdown may well write.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _summary(report: Report) -> list[tuple[str, str]]:
    speed = report["tokens"] / report["training_seconds"]
    rows = [
        ("model", f"{report['architecture']}, {scaled_text(report['parameters'])} parameters"),
        ("ranks", f"{report['ranks']}, ZeRO-{report['zero_stage']}"),
        ("time", f"{duration_text(report['seconds'])}, {duration_text(report['training_seconds'])} of it in steps"),
        (
            "goodput",
            f"{report['goodput']:.0%} of {duration_text(sum(report['time'].values()))} in steps that count, in "
            f"{counted(report['attempts'], 'attempt')}",
        ),
        ("steps", str(report["steps"])),
        ("tokens", f"{scaled_text(report['tokens'])}, {scaled_text(speed, 'tok/s')}"),
        ("MFU", f"{report['utilization']:.0%}"),
        ("training loss", f"{report['training_loss']:.3f} {report['loss_unit']}"),
    ]
    if report["validation_loss"] is not None:
        rows.append(("validation loss", f"{report['validation_loss']:.3f} {report['loss_unit']}"))
    if report["accuracy"] is not None:
        rows.append(("chosen answers preferred", f"{report['accuracy']:.1%} of held-out pairs"))
    if report["bits_per_byte"] is not None:
        rows.append(("held-out bits per byte", f"{report['bits_per_byte']:.3f}"))
    rows.append(("peak memory by rank", ", ".join(map(bytes_text, report["peak_memory"]))))
    return [*rows, *_first_rank(report)]


def _times(report: Report) -> list[tuple[str, str, str]]:
    total, rows = sum(report["time"].values()), []
    for kind in Spent:
        if seconds := report["time"][kind.name.lower()]:
            share = seconds / total
            rows.append((str(kind), f"{seconds:.1f} s", f"{share:.0%} {'█' * round(BAR * share)}".rstrip()))
    return rows


SPIKE_COLUMNS = ("step", "of", "value", "median before", "what was done")


def _spikes(report: Report) -> Iterator[tuple[str, ...]]:
    for spike in report["spikes"]:
        done = "left out" if spike["skipped"] else "logged"
        yield str(spike["step"]), spike["name"], f"{spike['value']:.4g}", f"{spike['usual']:.4g}", done


def _first_rank(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what bounded the first rank, what it sent, and how it was predicted; report.json has all figures."""
    bounds, prediction, steps = report["bounds"], report["prediction"], report["traffic_steps"]
    if bounds is not None:
        yield "a step", f"most of its {1e3 * bounds['seconds']:.0f} ms goes to {bounds['bound']}: {bounds['advice']}"
    sent = sum(use["bytes"] for use in report["traffic"].values())
    yield "sent by the first rank", bytes_text(sent) + (f", {bytes_text(sent / steps)} per step" if steps else "")
    if prediction is None:
        yield "prediction", f"none, as the steps took less than {WORTH:.0f} s; with {MACHINE} there is one in any case"
        return
    for name, what in (("device", "memory of the device"), ("host", "memory of the host"), ("step", "time of a step")):
        entry, text = prediction[name], (lambda seconds: f"{1e3 * seconds:.1f} ms") if name == "step" else bytes_text
        if entry is not None and entry["predicted"] is not None:
            measured = "" if entry["measured"] is None else f", measured {text(entry['measured'])}"
            difference = "" if entry["difference"] is None else f" ({entry['difference']:+.0%})"
            yield f"predicted {what}", text(entry["predicted"]) + measured + difference
    yield from (("prediction", note) for note in prediction["notes"])
