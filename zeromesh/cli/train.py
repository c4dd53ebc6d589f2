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
    assert settings.model is not None
    assert settings.data is not None
    assert settings.run is not None
    job = Job(settings, settings.model, settings.data, settings.run)
    if job.run.threads is not None:
        torch.set_num_threads(job.run.threads)
    init_distributed()
    # The first rank has written the tokens before it came here.
    torch.distributed.barrier()
    try:
        _train(job, prepare_text(job, may_write=False), began)
    finally:
        shutdown()


def _train(job: Job, prepared: Prepared, began: float) -> None:
    shape = job.model.model_copy(update={"vocab_size": job.model.vocab_size or prepared.vocabulary})
    settings = job.settings.model_copy(update={"model": shape})
    engine = _engine(settings)
    try:
        first = engine.mesh.rank == 0
        console = Console(quiet=not first, soft_wrap=True, highlight=False)
        if first:
            job.folder.config.write_text(engine.config.to_json())
        console.print(
            f"{shape.architecture}, {scaled_text(parameters(shape))} parameters, ranks: {engine.mesh.world_size}, "
            f"ZeRO-{settings.zero_optimization.stage}"
        )
        start = _resume(engine, job) if job.run.resume else Progress()
        share = Share(
            engine.data_rank,
            engine.data_size,
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )
        windows = Windows(prepared.train.read(), shape.sequence_length)
        held_out = _held_out(job, prepared, share.rows)
        metrics = MetricsLog(job.folder.metrics, start.step) if first else None
        with Display(console, job.run.steps) as display:
            batches = training_batches(windows, share, settings.seed, start.samples)
            loop = Loop(engine, job.run, shape, share, held_out, job.folder, metrics, display)
            reached = loop.run(batches, start)
        close(loop, job, prepared, Span(began, start, reached), console)
    finally:
        engine.destroy()


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


def _held_out(job: Job, prepared: Prepared, rows: int) -> HeldOut:
    lengths = byte_lengths(load_tokenizer(job.folder.text / TOKENIZER_FILE))
    return HeldOut(prepared.validation.read(), lengths, job.model.sequence_length, rows)
