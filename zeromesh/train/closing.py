"""The end of a run: evaluation of all held-out text, the weights, samples, the picture, and the report."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

from zeromesh.observe.machine import peak_bytes
from zeromesh.observe.metrics import loss_picture, read_metrics
from zeromesh.train.check import Job
from zeromesh.train.data.prepared import PreparedData
from zeromesh.train.data.python_lines import count_lines
from zeromesh.train.folder import RunFolder
from zeromesh.train.loop import Loop, Progress
from zeromesh.train.model import Transformer
from zeromesh.train.report import Report, markdown
from zeromesh.train.sample import load_writer


@dataclass(frozen=True)
class RunSpan:
    """Part of the run that this command did.

    Attributes:
        began: time at which the command was given, in seconds since the epoch.
        start: where it took up the run.
        reached: where the run is now.
    """

    began: float
    start: Progress
    reached: Progress


def close(loop: Loop, prepared: PreparedData, span: RunSpan, console: Console) -> None:
    """Write what a run ends with. All ranks call it; the first one writes."""
    engine, job = loop.engine, loop.job
    score = loop.held_out.score(engine)
    if score is not None:
        loop.show_score(span.reached, score)
    memory, traffic = engine.memory_report(), engine.traffic_report()
    operations = loop.flops_per_token * loop.tokens_per_step / engine.mesh.world_size
    bounds = engine.bound_report(operations)
    own = torch.tensor([float(peak_bytes(engine.device))], dtype=torch.float64)
    peaks = [round(peak) for peak in engine.mesh.group("world").exchange(own).flatten().tolist()]
    engine.save_16bit_model(job.folder.model)
    if loop.metrics is None:
        return
    loop.metrics.close()
    if isinstance(job.language, Transformer):
        job.folder.copy_tokenizer(job.folder.model)
    records = read_metrics(job.folder.metrics)
    _draw(job.folder, records, console)
    samples = _samples(job)
    steps = [record for record in records if record["kind"] == "train"]
    report = Report(
        architecture=job.language.name,
        parameters=engine.sharded.count(),
        ranks=engine.mesh.world_size,
        zero_stage=job.settings.zero_optimization.stage,
        steps=span.reached.step,
        tokens=span.reached.samples * job.language.sequence_length,
        seconds=time.time() - span.began,
        training_seconds=span.reached.seconds,
        utilization=fmean(record["utilization"] for record in steps),
        training_loss=steps[-1]["loss"],
        validation_loss=score.loss if score else None,
        bits_per_byte=score.bits_per_byte if score else None,
        gzip_bits_per_byte=prepared.gzip_bits_per_byte if score else None,
        peak_memory=peaks,
        memory=memory,
        traffic=traffic,
        traffic_steps=span.reached.step - span.start.step,
        bounds=bounds,
        samples=samples,
        lines=count_lines(samples) if prepared.python else None,
    )
    job.folder.report.write_text(json.dumps(asdict(report), indent=2))
    text = markdown(report)
    job.folder.report.with_suffix(".md").write_text(text, encoding="utf-8")
    console.print(Markdown(text))
    console.print(f"all of it is in {job.folder.path}")


def _draw(folder: RunFolder, records: list[dict[str, Any]], console: Console) -> None:
    """Draw the losses that the log holds."""
    curves = {
        kind: [(record["step"], record["loss"]) for record in records if record["kind"] == kind]
        for kind in ("train", "validation")
    }
    if not loss_picture(folder.picture, curves["train"], curves["validation"]):
        console.print(f"no {folder.picture.name}: drawing it needs matplotlib, pip install 'zeromesh[plots]'")


def _samples(job: Job) -> list[str]:
    """Continuations of the prompts in the settings."""
    wanted = job.run.sample
    if not wanted.prompts:
        return []
    writer = load_writer(job.folder)
    return [
        writer.text(prompt, wanted.length, wanted.temperature, seed, wanted.chat)
        for seed, prompt in enumerate(wanted.prompts)
    ]
