"""``zeromesh replay``: take steps of a run again from its checkpoint and samples, and compare them with its record."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from math import isfinite, isnan, nan, prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from zeromesh import Settings, init_distributed, launch
from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.folder import locate
from zeromesh.comm.detect import is_launched
from zeromesh.comm.environment import shutdown
from zeromesh.config.keys import LOG_EVERY, OUTPUT, SAVE_EVERY
from zeromesh.observe.metrics import read_metrics
from zeromesh.observe.units import counted
from zeromesh.train.check import WATCHING, Job, changeable, prepare_text
from zeromesh.train.data.loader import Batch, Share, training_batches, training_samples
from zeromesh.train.data.order import Blend
from zeromesh.train.data.tokenizer import load_tokenizer
from zeromesh.train.folder import RunFolder
from zeromesh.train.loss import weighted
from zeromesh.train.run import engine_of
from zeromesh.train.signals import ignore_requests

AXES = {
    "tensor_parallel": ("autotp_size", "tensor_parallel"),
    "pipeline": ("stages",),
    "zero_optimization": ("mics_shard_size", "zero_hpz_partition_size"),
}
"""Keys of DeepSpeed for axes of the mesh, by their section."""

TIMES = 2  # that the steps are taken again: errors that pass differ from one time to the next
CLOSE = 1e-2  # relative difference of losses up to which one process agrees with several ranks
SHOWN = 200  # characters of each sample


@dataclass(frozen=True)
class Begin:
    """State from which steps are taken again."""

    tag: str
    step: int  # of the checkpoint
    samples: int  # consumed before its next step
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the layout and of spikes, when it was written


@dataclass(frozen=True)
class Replayed:
    """A step that was taken."""

    step: int
    loss: float  # nats per label
    norm: float  # of the gradient, before clipping
    error: str = ""  # that the step ended with


def replay(run: Path, step: int, one_process: bool, with_text: bool, console: Console) -> bool:
    """Take the steps from the last checkpoint up to ``step`` again, twice; print and return whether all are equal.

    Args:
        run: folder of the run, which is only read.
        step: the last step to take.
        one_process: on one process, with all axes of the mesh 1, instead of in the run's own layout.
        with_text: print the beginnings of the step's samples, too.
        console: for the table.

    Raises:
        ValueError: the folder holds no run, or no checkpoint from which the step can be reached.
    """
    folder = RunFolder(run)
    if is_launched():
        raise ValueError("zeromesh replay starts the ranks itself; call it without a launcher")
    if not folder.config.is_file():
        raise ValueError(f"{str(run)!r} holds no run; name the folder that {OUTPUT} named in training")
    run_settings, records = folder.settings(), read_metrics(folder.metrics)
    assert run_settings.run is not None
    batch = run_settings.train_batch_size
    last_step = max([*folder.tags(), *(record["step"] for record in records)], default=0)
    # A run may have ended with an error since its last record.
    if step > min(last_step + run_settings.run.log_every, run_settings.run.steps):
        raise ValueError(f"the run in {str(run)!r} has taken {counted(last_step, 'step')} so far, and not step {step}")
    begin = beginning(folder, records, step, batch)
    settings = replayed_settings(folder, one_process)
    # After a spike the run may have taken steps of these numbers with other samples.
    records = [
        record for record in records if record.get("samples") == begin.samples + (record["step"] - begin.step) * batch
    ]
    job = Job.of(settings)
    changed = [key for key, value in changeable(run_settings).items() if value != begin.settings.get(key, value)]
    if changed and not one_process:
        console.print(f"settings of the run that were others at {begin.tag}: {', '.join(changed)}")
    end = begin.samples + (step - begin.step) * batch
    console.print(
        f"{counted(step - begin.step, 'step')} from {begin.tag}, {counted(TIMES, 'time')}, on "
        f"{counted(job.run.ranks, 'rank')}; step {step} has the samples {end - batch} to {end - 1} of the run"
    )
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "steps.json")
        launch(replay_rank, job.run.ranks, job.settings, begin, step, str(out))
        runs = [[Replayed(**taken) for taken in times] for times in json.loads(out.read_text())]
    console.print(_table(runs, records))
    verdict, equal = judge(runs, records, one_process)
    console.print(verdict)
    for number, text in enumerate(texts_of(job, end - batch, batch) if with_text else (), end - batch):
        console.print(f"sample {number}: {text!r}")
    return equal


def beginning(folder: RunFolder, records: list[dict[str, Any]], step: int, batch: int) -> Begin:
    """Return the newest checkpoint that led to a step, and the samples that followed it.

    After a spike a run may have gone back, and on with other samples: the record of a step tells which it had. Of a
    step that was a spike, this is that of the spike.
    """
    matching = [record for record in records if record["step"] == step and "samples" in record]
    matching.sort(key=lambda record: bool(record["kind"] == "spike"))
    wanted = matching[-1]["samples"] if matching else None
    for saved, tag in reversed(folder.tags().items()):
        if saved >= step:
            continue
        # Where the run has gone on from this checkpoint: at first, and each time that it went back to it.
        state, this = Reader(locate(folder.checkpoints, tag)).manifest["client_state"], (tag, folder.mark(tag))
        spikes = [
            record for record in records if record["kind"] == "spike" and (record["back"], record.get("mark")) == this
        ]
        for samples in reversed(
            [source["samples"] for source in (state, *spikes) if isinstance(source.get("samples"), int)]
        ):
            if wanted is None or samples + (step - saved) * batch == wanted:
                return Begin(tag, saved, samples, state.get("settings", {}))
    have = ", ".join(folder.tags().values()) or "none"
    raise ValueError(
        f"no checkpoint in {str(folder.checkpoints)!r} leads to step {step}: it has {have}; a run that is to be "
        f"replayed saves often enough ({SAVE_EVERY}) and keeps what it saves"
    )


def replayed_settings(folder: RunFolder, one_process: bool) -> Settings:
    """Return the settings of a run as it is to be replayed: with its ranks, and without its monitors' files."""
    settings = folder.settings()
    assert settings.run is not None
    document = settings.model_dump(mode="json", exclude_unset=True)
    # The folder may have been moved, and a launcher may have started other ranks than the settings say.
    run = {"output": str(folder.path), "resume": False, "ranks": prod(settings.mesh.model_dump().values())}
    document["run"] = {**document["run"], **run}
    gone = WATCHING - {"run"}
    if one_process:
        document["mesh"], document["run"]["ranks"] = {}, 1
        gone |= {"gradient_accumulation_steps", "sequence_parallel_size"}
        for section, keys in AXES.items():
            document[section] = {key: value for key, value in document.get(section, {}).items() if key not in keys}
    return Settings.load({key: value for key, value in document.items() if key not in gone})


def replay_rank(settings: Settings, begin: Begin, step: int, out: str) -> None:
    """Take the steps on one rank; the first one writes them to a file."""
    ignore_requests()
    job = Job.of(settings)
    if job.run.threads is not None:
        torch.set_num_threads(job.run.threads)
    init_distributed()
    try:
        prepared = prepare_text(job, may_write=False)
        trained = prepared.tokenizer is not None and job.data.tokenizer is None
        job = job.with_vocabulary(prepared.vocabulary, trained)
        engine, _ = engine_of(job)
        rows = engine.train_micro_batch_size_per_gpu()
        share = Share(engine.data_rank, engine.data_size, rows, engine.gradient_accumulation_steps())
        runs = []
        for _ in range(TIMES):
            engine.load_checkpoint(job.folder.checkpoints, tag=begin.tag)
            batches = training_batches(prepared, job.language.sequence_length, share, settings.seed, begin.samples)
            runs.append([asdict(taken) for taken in _steps(engine, job, batches, share, step)])
        if engine.mesh.rank == 0:
            Path(out).write_text(json.dumps(runs))
        engine.destroy()
    finally:
        shutdown()


def _steps(engine: Any, job: Job, batches: Iterator[Batch], share: Share, last: int) -> Iterator[Replayed]:
    while engine.global_steps < last:
        number = engine.global_steps + 1
        micro_batches, _ = weighted(engine, job.language, list(islice(batches, share.micro_batches)))
        try:
            engine.train_batch(iter(micro_batches))
        except FloatingPointError as error:  # on all ranks
            yield Replayed(number, nan, nan, str(error))
            return
        yield Replayed(number, engine.get_mean_loss(), engine.get_global_grad_norm())


# The answer.


def recorded(records: list[dict[str, Any]], step: int) -> dict[str, float]:
    """Return the loss and the norm that the run has recorded of a step; of a spike, what made it one."""
    spikes = [record for record in records if record["kind"] == "spike" and record["step"] == step]
    if spikes:
        return {"loss" if spikes[-1]["name"] == "loss" else "norm": spikes[-1]["value"]}
    steps = [record for record in records if record["kind"] == "train" and record["step"] == step]
    return {"loss": steps[-1]["loss"], "norm": steps[-1]["gradient_norm"]} if steps else {}


def judge(runs: list[list[Replayed]], records: list[dict[str, Any]], one_process: bool) -> tuple[str, bool]:
    """Return what the comparison says, and whether all that was compared is equal."""
    first, second = runs
    for left, right in zip_longest(first, second):
        if left is None or right is None or left.error != right.error or not _equal(_numbers(left), _numbers(right)):
            return (
                f"transient: step {(left or right).step} gave other bits the second time, from the same state and "
                "samples. Look for kernels that are not deterministic (torch.use_deterministic_algorithms), or a "
                "machine that errs (zeromesh doctor)"
            ), False
    compared = 0
    for taken in first:
        for name, value in ({} if taken.error else recorded(records, taken.step)).items():
            compared, replayed = compared + 1, getattr(taken, name)
            if _equal({name: replayed}, {name: value}, CLOSE if one_process else 0.0):
                continue
            told = f"step {taken.step} had a {name} of {value!r}, and has {replayed!r}"
            if one_process:
                return f"apart: {told} on one process; compare the layouts with zeromesh verify", False
            return (
                f"transient: {told} now, twice with the same bits. Something passed then, unless versions, hardware or "
                "settings have changed since"
            ), False
    if first[-1].error:
        return f"persistent: step {first[-1].step} ends so both times: {first[-1].error}", True
    if not compared:
        return f"both times gave the same bits; the run has recorded none of these steps ({LOG_EVERY})", True
    how = f"within {CLOSE:.0%}, on one process" if one_process else "bit for bit"
    return (
        f"persistent: steps {first[0].step} to {first[-1].step} give what the run recorded, {how}; what they show "
        "comes from the state and the samples"
    ), True


def _equal(left: dict[str, float], right: dict[str, float], close: float = 0.0) -> bool:
    pairs = [(left[name], right[name]) for name in left]
    return all(a == b or (isnan(a) and isnan(b)) or (isfinite(b) and abs(a - b) <= close * abs(b)) for a, b in pairs)


def _numbers(replayed: Replayed) -> dict[str, float]:
    return {"loss": replayed.loss, "norm": replayed.norm}


def _table(runs: list[list[Replayed]], records: list[dict[str, Any]]) -> Table:
    table = Table("step", "loss, recorded", *(f"replay {number + 1}" for number in range(len(runs))), "norm, recorded",
                  *(f"replay {number + 1}" for number in range(len(runs))))  # fmt: skip
    for taken in zip(*runs, strict=False):
        values = recorded(records, taken[0].step)
        cells = [
            _number(values.get("loss")), *(_number(replayed.loss) for replayed in taken),
            _number(values.get("norm")), *(_number(replayed.norm) for replayed in taken),
        ]  # fmt: skip
        table.add_row(str(taken[0].step), *cells)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"


def texts_of(job: Job, first: int, count: int) -> list[str]:
    """Return the beginnings of samples of the run, by their number.

    Raises:
        ValueError: the run was trained on tokens, without a tokenizer.
    """
    prepared = prepare_text(job, may_write=False)
    if prepared.tokenizer is None:
        raise ValueError("the run was trained on tokens and has no tokenizer, so that its samples are no text")
    parts = training_samples(prepared, job.language.sequence_length, job.settings.seed)
    tokenizer = load_tokenizer(prepared.tokenizer)
    chosen = Blend(prepared.weights, first).take(count)
    return [tokenizer.decode(parts[part].sample(index).tokens.tolist())[:SHOWN] for part, index in chosen]
