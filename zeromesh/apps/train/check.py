"""Checks before a rank is started, of packages, settings and text, and of a resumed run's settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from zeromesh import Environment
from zeromesh.apps.train.data.hub_datasets import is_dataset_id
from zeromesh.apps.train.data.indexed import file_of
from zeromesh.apps.train.data.ordered_loader import training_samples
from zeromesh.apps.train.data.prepare_text import prepare, size_is_set
from zeromesh.apps.train.data.token_store import PreparedData, first_beyond
from zeromesh.apps.train.data.tokenizer import load_tokenizer
from zeromesh.apps.train.model import LanguageModel, Transformer, language_model
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.apps.train.train_settings import (
    KEYS_BY_USE,
    WITH_TOTAL,
    ResolvedTrainSettings,
    RunSettings,
    TextData,
    TrainSettings,
)
from zeromesh.base.requirements import pip_install
from zeromesh.base.words import counted
from zeromesh.comm.detect import is_launched, may_restart
from zeromesh.config.errors import ConfigError
from zeromesh.config.printing import changes
from zeromesh.engine.initialize.trial import try_out
from zeromesh.parallel.context.sequence_order import require_length

TOTAL = "total_num_steps"  # parameter of schedules
UNKNOWN = 2**31 - 1

# The elastic solution changes these with the number of ranks, and keeps the samples of a step.
MICRO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Job:
    """A training run as configured, with all its sections."""

    settings: TrainSettings
    language: LanguageModel
    data: TextData
    run: RunSettings

    @classmethod
    def of(cls, settings: TrainSettings) -> Job:
        """Return the run in the settings; raise ValueError if a section is missing."""
        language, data, run = language_model(settings), settings.data, settings.run
        if data is None or run is None:
            raise ValueError(
                f"zeromesh train needs the section {'data' if data is None else 'run'!r} in the configuration"
            )
        if settings.dpo is not None:
            data = data.model_copy(update={"format": "preference"})
        if data.tokenizer is None and language.tokenizer is not None:
            data = data.model_copy(update={"tokenizer": language.tokenizer})
        return cls(settings.model_copy(update={"data": data}), language, data, run)

    @property
    def origins(self) -> dict[str, Any]:
        """Repositories of the Hub that the run reads, each with its commit or revision, for its checkpoints."""
        read = [f"{name}@{self.data.revision}" for name in self.data.names if is_dataset_id(name)]
        return {"model": self.language.origin, "data": read}

    def with_vocabulary(self, size: int, trained: bool = True) -> Job:
        """Return the same run with this number of entries in the model's vocabulary, unless the settings have one."""
        # Of a tokenizer that the run trains, the settings of the data name the size, too, for a run that is resumed.
        model = self.settings.model
        if model is not None:
            model = model.model_copy(update={"vocab_size": model.vocab_size or size})
        data = self.data.model_copy(update={"vocabulary_size": size}) if trained else self.data
        settings = self.settings.model_copy(update={"model": model, "data": data})
        return replace(self, settings=settings, language=language_model(settings), data=data)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens that the model computes for a sample."""
        return self.settings.rows_per_sample * self.language.sequence_length

    @property
    def steps(self) -> int:
        """Updates of the run; of one in epochs, after ``in_steps``."""
        assert self.run.steps is not None
        return self.run.steps

    def with_steps(self, steps: int) -> Job:
        """Return the run in so many updates, which a schedule without a length of its own has, too."""
        run = self.run.model_copy(update={"steps": steps, "epochs": None})
        scheduler = self.settings.scheduler
        if scheduler is not None and TOTAL not in scheduler.params and scheduler.type.lower() in WITH_TOTAL:
            scheduler = scheduler.model_copy(update={"params": {**scheduler.params, TOTAL: steps}})
        return replace(self, settings=self.settings.model_copy(update={"run": run, "scheduler": scheduler}), run=run)

    def in_steps(self, prepared: PreparedData) -> Job:
        """Return the run with its epochs in updates: as many as take each sample at least that often."""
        if self.run.epochs is None:
            return self.with_steps(self.steps)
        parts = training_samples(prepared, self.language.sequence_length, self.settings.seed)
        samples = self.run.epochs * sum(part.count for part in parts)
        batch = resolved_settings(self).train_batch_size
        return self.with_steps(max(1, math.ceil(round(samples / batch, 6))))  # 0.1 * 30 is a little more than 3

    @property
    def folder(self) -> RunFolder:
        """Folder that the run writes to."""
        return RunFolder(Path(self.run.output))


def require_packages(settings: TrainSettings, source: Path | Mapping[str, Any]) -> None:
    """Raise ConfigError with each package that the configuration in ``source`` needs and that is missing."""
    missing = {package: reason for package, reason in _needed(settings) if not _is_installed(package)}
    problems = [
        f"{reason} needs the package {package}, which is not installed: {pip_install(package)}"
        for package, reason in missing.items()
    ]
    if len(missing) > 1:
        problems.append(f"all at once: {pip_install(*missing)}")
    if problems:
        raise ConfigError(problems, str(source) if isinstance(source, Path) else "the configuration")


def _is_installed(package: str) -> bool:
    """Return whether a package can be found; it is not imported, which may take seconds."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or it was switched off in sys.modules
        return False


def _needed(settings: TrainSettings) -> Iterator[tuple[str, str]]:
    """Yield each package, and the key that needs it."""
    for monitor in ("tensorboard", "wandb"):
        if getattr(settings, monitor).enabled:
            yield monitor, f"{monitor}.enabled"
    if settings.huggingface is not None:
        yield "transformers", "huggingface"
        if (quantization := settings.huggingface.quantization) is not None:
            yield quantization.library, "huggingface.quantization"
    if settings.lora is not None:
        yield "peft", "lora"
    if (data := settings.data) is None:
        return
    if data.tokenizer is not None and Path(data.tokenizer).expanduser().is_dir():
        yield "transformers", f"data.tokenizer = {data.tokenizer!r}, a folder,"
    for name in data.names:
        if is_dataset_id(name):
            yield "datasets", f"{name!r} on the Hub"
        elif name.endswith(".parquet"):
            yield "pyarrow", repr(name)


def check(settings: TrainSettings) -> Job:
    """Check everything that can be checked before the text is read; raise ValueError if the run cannot start."""
    job = Job.of(settings)
    if settings.optimizer is None:
        raise ValueError('zeromesh train needs an optimizer; add "optimizer": {"type": "AdamW", "params": {"lr": ...}}')
    sizes = _mesh(job)
    # The engine would find this, too, but in a batch, after the text was read.
    if sizes["context"] > 1:
        try:
            require_length(job.language.sequence_length, sizes["context"])
        except ValueError as error:
            raise ValueError(f"{job.language.section}.sequence_length: {error}") from None
    # Of a run in epochs, only the text tells the steps; any number shows whether the schedule can be built.
    resolved = resolved_settings(job.with_steps(job.run.steps or UNKNOWN))
    if job.run.resume and job.folder.config.is_file():
        job.folder.require_base()  # before the model is built from that folder
    # The model has no memory here, and a rank is started only if everything fits together.
    try_out(build_model(job), resolved, sizes)
    job.folder.check(bool(job.run.resume))
    if job.run.resume:
        require_unchanged(job.folder, resolved, {f"scheduler.params.{TOTAL}"} if job.run.steps is None else set())
    return job


def _mesh(job: Job) -> dict[str, int]:
    """Return the number of ranks per axis that the run will have."""
    return job.settings.resolve_mesh(Environment.detect().world_size if is_launched() else job.run.ranks)


def resolved_settings(job: Job) -> ResolvedTrainSettings:
    """Return the settings with the sizes that follow from the number of ranks."""
    sizes = _mesh(job)
    return job.settings.resolve(sizes["replicate"] * sizes["data"], sizes, elastic=may_restart())


def try_schedule(job: Job) -> None:
    """Raise ValueError if a run in epochs, whose updates are counted now, is too short for its schedule."""
    if job.settings.scheduler is not None:
        try_out(build_model(job), resolved_settings(job), _mesh(job))


def build_model(job: Job) -> nn.Module:
    """Return the model without memory; raise ValueError if its sizes do not fit together."""
    shape, wanted = job.settings.model, job.data.vocabulary_size
    entries = None if shape is None else shape.vocab_size
    if entries is not None and job.data.tokenizer is None and size_is_set(job.data) and entries < wanted:
        raise ValueError(
            f"model.vocab_size = {entries} is smaller than data.vocabulary_size = {wanted}; leave out the former"
        )
    language = job.with_vocabulary(wanted).language
    try:
        return language.build()
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # torch's, for sizes that no tensor can have
        raise ValueError(
            f"the section {language.section!r} is of a model that cannot be built: {type(error).__name__}: {error}; "
            "lower its sizes"
        ) from error


def prepare_text(job: Job, may_write: bool, console: Console | None = None) -> PreparedData:
    """Return the text as tokens; raise ValueError if it is wrong, too short, or does not suit the model."""
    length = job.language.sequence_length
    prepared = prepare(job.data, job.folder.text, may_write, length, console)
    strategy = job.settings.context_parallel.strategy
    hides = strategy == "auto" or isinstance(job.language, Transformer)
    if prepared.document_attention and _mesh(job)["context"] > 1 and not hides:
        raise ValueError(
            f"mesh.context > 1: the strategy {strategy} cannot hide the documents of a sample from each other; leave "
            "context_parallel.strategy out, which any mask works with, or set data.document_attention to false"
        )
    pairs = [part.pairs for part in (*prepared.train, *prepared.validation)]
    if any(pairs) and job.settings.dpo is None:
        raise ValueError(
            "data.train has records with a chosen and a rejected answer, which dpo learns from; add a section dpo, "
            'as with --set dpo.beta=0.1, or name other keys in data.prompt_key and data.response_key ("chosen")'
        )
    if not all(pairs) and job.settings.dpo is not None:
        raise ValueError("dpo needs records of prompt, chosen and rejected, and data.train has tokens; leave dpo out")
    vocabulary = job.language.vocabulary or prepared.vocabulary
    # A larger vocabulary than the tokenizer's is usual: models round theirs up.
    if prepared.tokenizer is None and job.run.sample.prompts:
        raise ValueError(
            "run.sample.prompts need a tokenizer, and data.train is tokens already; name it in data.tokenizer, or "
            "leave the prompts out"
        )
    if prepared.tokenizer is not None and vocabulary < prepared.vocabulary:
        raise ValueError(
            f"the model's vocabulary has {vocabulary} entries, and the tokenizer {prepared.vocabulary}; use the "
            f"model's own tokenizer in data.tokenizer, or {_larger(job)}"
        )
    if prepared.tokenizer is not None and isinstance(job.language, Transformer):
        job.language.require_tokenizer(job.data.tokenizer, prepared.vocabulary)
    # Now, and not after hours of training: it raises if there is no chat template.
    if prepared.tokenizer is not None and job.run.sample.chat and job.run.sample.prompts:
        load_tokenizer(prepared.tokenizer).prompt([{"role": "user", "content": job.run.sample.prompts[0]}])
    for part in (*prepared.train, *prepared.validation):
        if part.highest >= vocabulary:
            place, token = first_beyond(part.indexed, vocabulary)
            raise ValueError(
                f"{str(file_of(part.prefix, '.bin'))!r} has the id {token} at token {place}, and the model's "
                f"vocabulary has {vocabulary} entries; {_larger(job)}, or make the tokens with its tokenizer"
            )
    if job.run.watches_loss and not prepared.validation:
        raise ValueError(
            "run.early_stop and run.keep_best need held-out text, and data.train is too short to hold any out; name "
            "some in data.validation, or leave both out"
        )
    samples = sum(part.count for part in training_samples(prepared, length, job.settings.seed))
    wanted = resolved_settings(job).train_batch_size
    if samples < wanted:
        raise ValueError(
            f"data.train gives {counted(samples, 'sample')} of "
            f"{job.language.section}.sequence_length = {length} tokens, fewer than the "
            f"{wanted} of one step (train_batch_size); add text, or make the batch or the sequence smaller"
        )
    return prepared


def _larger(job: Job) -> str:
    """Return the change that gives the model a larger vocabulary, for messages."""
    if job.language.section == "model":
        return "raise model.vocab_size"
    return "name a model with a larger vocabulary in huggingface.path"


# TrainSettings of a resumed run.


def require_unchanged(folder: RunFolder, settings: ResolvedTrainSettings, unknown: Set[str] = frozenset()) -> None:
    """Raise ValueError if a run is resumed with other settings, in a key on which the result depends.

    ``unknown`` are keys whose values are not known yet.
    """
    if not folder.config.is_file():
        return
    before = folder.settings()
    free = (
        {*KEYS_BY_USE["resume"]}
        | (set(MICRO) if before.data_size != settings.data_size else set())
        | _automatic(settings)
        | unknown
    )
    different = changes(before, settings, free)
    if different:
        lines = "".join(f"\n  {line}" for line in different)
        raise ValueError(
            f"the run in {str(folder.path)!r} was started with other settings:{lines}\n"
            "bring back those of the run, or start a new one without --resume: choose another folder with "
            "--set run.output=FOLDER"
        )


def _automatic(settings: ResolvedTrainSettings) -> set[str]:
    """Return the keys of sizes that the settings leave to the text."""
    free = set()
    if settings.model is not None and settings.model.vocab_size is None:
        free.add("model.vocab_size")
    if settings.data is not None and not size_is_set(settings.data):
        free.add("data.vocabulary_size")
    return free
