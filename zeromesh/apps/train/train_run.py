"""``zeromesh train``: check, prepare the text, start the ranks, train, and write the report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

import zeromesh
from zeromesh import Engine, init_distributed, launch
from zeromesh.apps.train.check import (
    Job,
    check,
    prepare_text,
    require_packages,
    require_unchanged,
    resolved_settings,
    try_schedule,
)
from zeromesh.apps.train.data.ordered_loader import Share, training_batches
from zeromesh.apps.train.data.token_store import PreparedData
from zeromesh.apps.train.goodput import TimeLog
from zeromesh.apps.train.loop import BestLoss, Loop, Progress
from zeromesh.apps.train.metrics import MetricsLog
from zeromesh.apps.train.model import parameter_groups
from zeromesh.apps.train.planned import planned
from zeromesh.apps.train.reference import require_reference, write_reference
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.apps.train.run_loss import HeldOut, require_causal, require_document_attention
from zeromesh.apps.train.run_report import close
from zeromesh.apps.train.screen import is_first, make_console, shown_log
from zeromesh.apps.train.signals import forward_signals, ignore_requests
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.files import write_text
from zeromesh.base.progress import Display
from zeromesh.base.words import counted, scaled_text
from zeromesh.checkpoint.copies.memory_files import discard, marked, root
from zeromesh.checkpoint.random_state import share_random_state
from zeromesh.comm.agreement import agree_run, world_group
from zeromesh.comm.detect import may_restart
from zeromesh.comm.environment import device_of_group, shutdown
from zeromesh.comm.failure import RankFailure
from zeromesh.config.printing import is_auto, refuse_unfilled, tell_unset


def train(config: Path | Mapping[str, Any], overrides: Sequence[str], resume: bool | Literal["auto"]) -> None:
    """Train as a configuration and overrides such as ``run.steps=100`` say; "auto" resumes if there is a checkpoint."""
    began = time.time()
    ignore_requests()  # a batch system may send the signal before there is an engine
    overrides = [*overrides, *([f"run.resume={json.dumps(resume)}"] if resume else [])]
    loaded = TrainSettings.load(config, overrides)
    refuse_unfilled(config, loaded, overrides)
    require_packages(loaded, config)
    goes_on = is_auto(config, overrides, "run.resume") or may_restart()
    settings = planned(config, overrides, _decided(loaded, goes_on))
    if is_first():
        tell_unset(config, settings, {}, overrides)
    # Everything that can be refused is refused here, before the text is read and a rank is started.
    job = check(settings)
    try:
        with job.folder.held(job.run.resume is True) if is_first() else nullcontext():
            if is_first():
                _prepare(job, make_console())
            launch(run_rank, job.run.ranks, settings, began)
    except (KeyboardInterrupt, RankFailure, FloatingPointError) as error:  # not ValueError: such a run has not begun
        if is_first():
            error.add_note(_how_to_go_on(job))
        raise


def _decided(settings: TrainSettings, goes_on: bool) -> TrainSettings:
    """Return the settings with ``run.resume`` true or false; ``goes_on`` says that the run goes on if it can."""
    run = settings.run
    # A launcher that restarts ranks repeats the first command, which must then go on. All ranks see the same folder.
    if run is None or run.resume is True or not goes_on:
        return settings
    folder = RunFolder(Path(run.output))
    resume = folder.last_checkpoint is not None or folder.is_copied
    return settings.model_copy(update={"run": run.model_copy(update={"resume": resume})})


def _prepare(job: Job, console: Console) -> None:
    if job.folder.metrics.exists() and job.folder.last_checkpoint is None and not job.folder.has_finished:
        console.print(
            f"{job.folder.path} holds a run that ended before its first checkpoint. It starts again, and its "
            "metrics are overwritten"
        )
    if not job.run.resume:
        discard(job.folder.checkpoints)  # copies in memory of a run that ended before its first checkpoint
    console.print("reading the text")
    prepared = prepare_text(job, may_write=not job.run.resume, console=console)
    console.print(_text_line(prepared))
    if (epochs := job.run.epochs) is not None:
        job = job.in_steps(prepared)
        if job.run.resume:
            require_unchanged(job.folder, resolved_settings(job))
        console.print(f"run.epochs = {epochs:g} takes {counted(job.steps, 'step')}")
        try_schedule(job)


def _how_to_go_on(job: Job) -> str:
    checkpoint = job.folder.last_checkpoint
    if (name := marked(job.folder.checkpoints)) is not None and (root() / name).is_dir():
        return (
            f"{root() / name} in this node's memory has copies of late steps. The same command with --resume continues "
            "from them, or from the last checkpoint; delete the folder if the run is over"
        )
    if checkpoint is not None:
        return f"{job.folder.path} has the checkpoint {checkpoint}; the same command with --resume continues from it"
    every = job.run.save_every
    return f"{job.folder.path} has no checkpoint yet, and the same command starts from the beginning; " + (
        f"run.save_every = {every} writes the first after {counted(every, 'step')}"
        if every
        else "run.save_every = 0 writes none before the end"
    )


def _text_line(prepared: PreparedData) -> str:
    sides = []
    for name, parts in (("training", prepared.train), ("held out", prepared.validation)):
        documents, tokens = sum(part.documents for part in parts), sum(part.tokens for part in parts)
        sides.append(f"{name}: {counted(documents, 'document')} with {scaled_text(tokens)} tokens")
    dropped = f"{prepared.dropped} longer than a sample, " if prepared.dropped else ""
    capped = " (smaller than asked: the text is short)" if prepared.capped else ""
    return (
        f"{'; '.join(sides)}; left out: {dropped}{prepared.skipped} empty or unreadable; "
        f"vocabulary: {prepared.vocabulary} entries{capped}"
    )


def run_rank(settings: TrainSettings, began: float) -> None:
    """Run one rank with checked settings; ``began`` is the time of the command, in seconds since the epoch."""
    ignore_requests()
    job = Job.of(settings)
    with shown_log():
        if job.run.threads is not None:
            torch.set_num_threads(job.run.threads)
        init_distributed()
        try:
            # The first rank wrote the tokens before it came here.
            torch.distributed.barrier()
            prepared = prepare_text(job, may_write=False)
            trained = prepared.tokenizer is not None and job.data.tokenizer is None
            _train(job.with_vocabulary(prepared.vocabulary, trained).in_steps(prepared), prepared, began)
        finally:
            shutdown()


def _train(job: Job, prepared: PreparedData, began: float) -> None:
    engine, cost = engine_of(job)
    try:
        console = make_console(quiet=engine.mesh.rank != 0)
        trained, every = engine.sharded.count(trained=True), engine.sharded.count()
        part = f", {scaled_text(trained)} of them trained" if trained < every else ""
        console.print(
            f"{job.language.name}, {scaled_text(every)} parameters{part}, "
            f"ranks: {engine.mesh.world_size}, ZeRO-{job.settings.zero_optimization.stage}"
        )
        vocabulary = job.language.vocabulary or prepared.vocabulary
        # Trials of the sharded model, which no rank could make alone.
        require_causal(engine, job.language, vocabulary)
        if prepared.document_attention:
            require_document_attention(engine, job.language, vocabulary)
        start, best = Progress(), BestLoss()
        if job.run.resume:
            path, state = engine.load_checkpoint(job.folder.checkpoints)
            if job.folder.is_copied and not engine.config.checkpoint.peer_copies:
                console.print(
                    "checkpoint.peer_copies is 0: copies of the run in memory are not used, and the next save "
                    "deletes them"
                )
            if path is None:  # of a run with copies in memory, and no checkpoint yet
                console.print(
                    f"{job.folder.path} has no checkpoint, and no complete copy in memory: the run starts anew"
                )
            else:
                if not all(isinstance(state.get(key), int | float) for key in ("samples", "seconds")):
                    raise ValueError(f"{path} does not say how many samples the run has taken; delete it")
                start = Progress(engine.global_steps, int(state["samples"]), state["seconds"])
                best = BestLoss.of(state.get("best"))
        rows = engine.train_micro_batch_size_per_gpu()
        if job.settings.dpo is not None:
            if start.step == 0:
                pairs = sum(part.documents for part in (*prepared.train, *prepared.validation))
                console.print(f"computing the reference's log-likelihoods of {counted(pairs, 'pair')}, once")
                write_reference(engine, job.language, prepared, rows, job.settings.dpo)
            require_reference(prepared)
        if engine.mesh.rank == 0:
            # A configuration that is used again must not resume.
            again = engine.config.model_copy(update={"run": job.run.model_copy(update={"resume": False})})
            write_text(job.folder.config, again.to_json())
        with Display(console, job.steps) as display:
            loop = Loop(
                engine=engine,
                job=job,
                share=Share(engine.data_rank, engine.data_size, rows, engine.gradient_accumulation_steps()),
                held_out=HeldOut(prepared, job.language, rows, job.settings.dpo),
                flops_per_token=cost,
                metrics=MetricsLog(job.folder.metrics, start.step) if engine.mesh.rank == 0 else None,
                display=display,
                times=TimeLog(
                    job.folder.times if engine.mesh.rank == 0 else None,
                    began,
                    start.step,
                    again=job.run.resume is True or may_restart(),
                    compiled=engine.compile_seconds,
                ),
                best=best,
            )
            length, seed = job.language.sequence_length, job.settings.seed
            batches = training_batches(prepared, length, loop.share, seed, start.samples)
            with forward_signals(engine):
                reached = loop.run(batches, start)
        close(loop, began, start, reached, console)
    finally:
        engine.destroy()


def engine_of(job: Job) -> tuple[Engine, float]:
    """Return the engine of the model, and the operations per token of training."""
    settings = job.settings
    torch.manual_seed(settings.seed)
    world = world_group(device_of_group(init_distributed()))
    # If one rank cannot build the model, all end with its error instead of waiting for it.
    model = agree_run(world, "build the model", job.language.build)
    cost = job.language.cost(model)
    groups = parameter_groups(model, settings)
    engine, *_ = zeromesh.initialize(model, model_parameters=groups, config=settings)
    # Ranks drop different activations from here on, except those that split layers and must drop the same.
    torch.manual_seed(settings.seed + 1 + engine.mesh.rank)
    share_random_state(engine.mesh.group("tensor"))
    return engine, cost
