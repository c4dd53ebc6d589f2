"""The end of a run: evaluation of all held-out text, the weights, samples, the report, and the run's page."""

from __future__ import annotations

import json
import os
import time
from statistics import fmean

import torch
from rich.console import Console

from zeromesh.apps.train.goodput import Spent, read_attempts, totals
from zeromesh.apps.train.loop import Loop, Progress
from zeromesh.apps.train.metrics import read_metrics
from zeromesh.apps.train.model import Transformer
from zeromesh.apps.train.run_example import run_example
from zeromesh.apps.train.run_picture import write_run_page
from zeromesh.apps.train.run_summary import Report, markdown, short_lines
from zeromesh.apps.train.sample import load_writer
from zeromesh.base.files import write_text
from zeromesh.base.machine import MACHINE, peak_bytes

WORTH = 30.0  # seconds of all steps from which the few seconds of a prediction are spent


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
        example = run_example(job.settings, rows * job.settings.rows_per_sample)
        prediction = engine.prediction_report(job.language.build, *example, memory=memory)
    wanted, samples = job.run.sample, list[str]()
    if wanted.prompts:
        writer = load_writer(job.folder)  # what was written is tried out, and not the engine's model
        options = wanted.length, wanted.temperature
        samples = [writer.text(prompt, *options, seed, wanted.chat) for seed, prompt in enumerate(wanted.prompts)]
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
    write_text(job.folder.report.with_suffix(".md"), markdown(report))
    try:
        write_run_page(job.folder.path)
    except (OSError, ValueError) as error:  # the run has succeeded; a full disk may have left no times
        console.print(f"{job.folder.page.name} was not written: {error}")
    console.print("\n".join(["", *short_lines(report)]))
    console.print(f"report.html, the weights and the checkpoints are in {job.folder.path}")
