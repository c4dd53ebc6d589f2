"""``zeromesh train``: check, prepare the text, start the ranks, train, close."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

import zeromesh
from zeromesh.architectures.decoder import Decoder
from zeromesh.architectures.flops import parameters
from zeromesh.cli.check import Job, check, prepare_text
from zeromesh.cli.closing import Span, close
from zeromesh.cli.evaluate import HeldOut
from zeromesh.cli.loop import Loop, Progress
from zeromesh.config.settings import Settings
from zeromesh.data.loader import Share, Windows, training_batches
from zeromesh.data.prepare import TOKENIZER_FILE, Prepared
from zeromesh.data.tokens import byte_lengths, load_tokenizer
from zeromesh.dist.environment import Environment, init_distributed, is_launched, shutdown
from zeromesh.dist.launch import launch
from zeromesh.engine import Engine
from zeromesh.observe.metrics import MetricsLog
from zeromesh.observe.progress import Display
from zeromesh.observe.units import scaled_text


def train(config: Path, overrides: Sequence[str], resume: bool) -> None:
    """Train as a file says; everything that can be refused is refused before a rank is started.

    Raises:
        ValueError: if the configuration, the text or the output folder does not allow the run.
        RankFailure: if a rank failed.
    """
    began = time.time()
    settings = Settings.load(config, [*overrides, *(["run.resume=true"] if resume else [])])
    job = check(settings)
    if not is_launched() or Environment.detect().rank == 0:
        console = Console()
        console = Console(soft_wrap=True, highlight=False)
        console.print("reading the text")
        console.print(_text_line(prepare_text(job, may_write=not job.run.resume)))
    launch(run_rank, job.run.ranks, settings, began)


def _text_line(prepared: Prepared) -> str:
    train, held = prepared.train, prepared.validation
    return (
        f"{train.documents} documents of {scaled_text(train.tokens)} tokens to train on, {held.documents} of "
        f"{scaled_text(held.tokens)} tokens held out, {prepared.skipped} empty or unreadable; "
        f"a vocabulary of {prepared.vocabulary} entries"
    )


def run_rank(settings: Settings, began: float) -> None:
    """What every rank does.

    Args:
        settings: the same on all ranks, and checked.
        began: time at which the command was given, in seconds since the epoch.
    """
    job = Job.of(settings)
    if job.run.threads is not None:
        torch.set_num_threads(job.run.threads)
    init_distributed()
    try:
        # The first rank has written the tokens before it came here.
        torch.distributed.barrier()
        prepared = prepare_text(job, may_write=False)
        _train(job.with_vocabulary(prepared.vocabulary), prepared, began)
    finally:
        shutdown()


def _train(job: Job, prepared: Prepared, began: float) -> None:
    engine = _engine(job.settings)
    try:
        console = Console(quiet=engine.mesh.rank != 0, soft_wrap=True, highlight=False)
        console.print(
            f"{job.model.architecture}, {scaled_text(parameters(job.model))} parameters, "
            f"ranks: {engine.mesh.world_size}, ZeRO-{job.settings.zero_optimization.stage}"
        )
        start = _resume(engine, job) if job.run.resume else Progress()
        if engine.mesh.rank == 0:
            again = engine.config.model_copy(update={"run": job.run.model_copy(update={"resume": False})})
            job.folder.config.write_text(again.to_json())
        with Display(console, job.run.steps) as display:
            loop = _loop(engine, job, prepared, start, display)
            windows = Windows(prepared.train.read(), job.model.sequence_length)
            reached = loop.run(training_batches(windows, loop.share, job.settings.seed, start.samples), start)
        close(loop, prepared, Span(began, start, reached), console)
    finally:
        engine.destroy()


def _loop(engine: Engine, job: Job, prepared: Prepared, start: Progress, display: Display) -> Loop:
    rows = engine.train_micro_batch_size_per_gpu()
    lengths = byte_lengths(load_tokenizer(job.folder.text / TOKENIZER_FILE))
    return Loop(
        engine=engine,
        job=job,
        share=Share(engine.data_rank, engine.data_size, rows, engine.gradient_accumulation_steps()),
        held_out=HeldOut(prepared.validation.read(), lengths, job.model.sequence_length, rows),
        metrics=MetricsLog(job.folder.metrics, start.step) if engine.mesh.rank == 0 else None,
        display=display,
    )


def _engine(settings: Settings) -> Engine:
    """The model with the weights that the seed gives, and random numbers that differ from rank to rank after that."""
    assert settings.model is not None
    torch.manual_seed(settings.seed)
    with zeromesh.zero.Init():
        model = Decoder(settings.model)
    engine, *_ = zeromesh.initialize(model, config=settings)
    torch.manual_seed(settings.seed + 1 + engine.mesh.rank)
    return engine


def _resume(engine: Engine, job: Job) -> Progress:
    path, state = engine.load_checkpoint(job.folder.checkpoints)
    assert path is not None, "the folder was checked for a checkpoint before the start"
    return Progress(engine.global_steps, state["samples"], state["seconds"])
