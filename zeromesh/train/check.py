"""Checks before a rank is started, which take seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from rich.console import Console
from torch import nn

from zeromesh.comm.detect import may_restart
from zeromesh.comm.environment import Environment, is_launched
from zeromesh.comm.mesh import Mesh
from zeromesh.config.settings import Resolved, Settings
from zeromesh.config.train import RunSettings, TextData
from zeromesh.context.order import require_length
from zeromesh.pipeline.runtime.cut import examine
from zeromesh.pipelined import Pipelined
from zeromesh.shard.find import find_units
from zeromesh.tensor.derive import derive
from zeromesh.tensor.plan import parse, resolve
from zeromesh.train.changes import require_unchanged
from zeromesh.train.data.indexed import file_of
from zeromesh.train.data.loader import training_samples
from zeromesh.train.data.making import size_is_set
from zeromesh.train.data.prepare import prepare
from zeromesh.train.data.prepared import PreparedData
from zeromesh.train.data.store import first_beyond
from zeromesh.train.data.tokenizer import load_tokenizer
from zeromesh.train.folder import RunFolder
from zeromesh.train.model import LanguageModel, Transformer, language_model
from zeromesh.train.updates import check_optimizer


@dataclass(frozen=True)
class _Planned:
    """Stands for the mesh before there are ranks: as its first one sees it."""

    sizes: Mapping[str, int]

    def group(self, axis: str) -> SimpleNamespace:
        return SimpleNamespace(size=self.sizes[axis], rank=0)


@dataclass(frozen=True)
class Job:
    """A training run as configured, its sections known to be there."""

    settings: Settings
    language: LanguageModel
    data: TextData
    run: RunSettings

    @classmethod
    def of(cls, settings: Settings) -> Job:
        """The run that the settings describe.

        Raises:
            ValueError: if they lack a section.
        """
        language, data, run = language_model(settings), settings.data, settings.run
        if data is None or run is None:
            raise ValueError(
                f"zeromesh train needs the section {'data' if data is None else 'run'!r} in the configuration"
            )
        if data.tokenizer is None and language.tokenizer is not None:
            data = data.model_copy(update={"tokenizer": language.tokenizer})
        return cls(settings.model_copy(update={"data": data}), language, data, run)

    def with_vocabulary(self, size: int, trained: bool = True) -> Job:
        """The same run with a vocabulary of ``size`` entries, and so many in the model unless the settings say more.

        Args:
            size: number of entries.
            trained: whether they are those of a tokenizer that the run trains, which the settings then say.
        """
        model = self.settings.model
        if model is not None:
            model = model.model_copy(update={"vocab_size": model.vocab_size or size})
        data = self.data.model_copy(update={"vocabulary_size": size}) if trained else self.data
        settings = self.settings.model_copy(update={"model": model, "data": data})
        return replace(self, settings=settings, language=language_model(settings), data=data)

    @property
    def folder(self) -> RunFolder:
        """Return the folder that the run writes to."""
        return RunFolder(Path(self.run.output))


def check(settings: Settings) -> Job:
    """Look at everything that can be looked at before the text is read. Reads only, but for a trial of the folder.

    Raises:
        ValueError: if the run cannot start.
    """
    job = Job.of(settings)
    if settings.optimizer is None:
        raise ValueError('zeromesh train needs an optimizer; add "optimizer": {"type": "AdamW", "params": {"lr": ...}}')
    sizes = _mesh(job)
    if sizes["context"] > 1:
        _check_sequences(job, sizes["context"])
    resolved = _resolved(job)
    if job.run.resume and job.folder.config.is_file():
        job.folder.require_base()
    model = _check_model(job)
    resolve(
        model, parse(job.settings.tensor_parallel.plan or {}), derive(model, sizes["tensor"])[0], 0, sizes["tensor"]
    )
    _check_stages(model, resolved, sizes)
    check_optimizer(model, resolved, sizes["data"])
    job.folder.check(bool(job.run.resume))
    if job.run.resume:
        require_unchanged(job.folder, resolved)
    return job


def prepare_text(job: Job, may_write: bool, console: Console | None = None) -> PreparedData:
    """The text as tokens, known to be long enough and to suit the model.

    Raises:
        ValueError: if there is no text, too little, a wrong record, or a token id that the model does not have.
    """
    length = job.language.sequence_length
    prepared = prepare(job.data, job.folder.text, may_write, length, console)
    if prepared.document_attention and _mesh(job)["context"] > 1:
        raise ValueError(
            "mesh.context > 1: attention over several ranks cannot hide the documents of a sample from each other; set "
            'data.document_attention to false, data.packing to "pad", or mesh.context to 1'
        )
    vocabulary = job.language.vocabulary or prepared.vocabulary
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
    if prepared.tokenizer is not None and job.run.sample.chat and job.run.sample.prompts:
        load_tokenizer(prepared.tokenizer).prompt([{"role": "user", "content": job.run.sample.prompts[0]}])
    for part in (*prepared.train, *prepared.validation):
        if part.highest >= vocabulary:
            place, token = first_beyond(part.indexed, vocabulary)
            raise ValueError(
                f"{str(file_of(part.prefix, '.bin'))!r} has the id {token} at token {place}, and the model's "
                f"vocabulary has {vocabulary} entries; {_larger(job)}, or make the tokens with its tokenizer"
            )
    samples = sum(part.count for part in training_samples(prepared, length, job.settings.seed))
    wanted = _resolved(job).train_batch_size
    if samples < wanted:
        raise ValueError(
            f"data.train gives {samples} samples of {job.language.section}.sequence_length = {length} tokens, fewer "
            f"than the {wanted} of one step (train_batch_size); add text, or make the batch or the sequence smaller"
        )
    return prepared


def _check_stages(model: nn.Module, resolved: Resolved, sizes: Mapping[str, int]) -> None:
    """Refuse models that cannot be cut into stages as configured, and schedules that there are not."""
    if sizes["pipeline"] > 1:
        blocks = examine(model, resolved.pipeline.blocks)
        timed = replace(blocks, seconds=blocks.parameters)  # which are measured when there are ranks
        mesh = cast(Mesh, _Planned(sizes))
        Pipelined(model, mesh, resolved.pipeline, resolved.gradient_accumulation_steps, timed)


def _check_sequences(job: Job, ranks: int) -> None:
    """Refuse sequences that cannot be spread over the ranks of the context axis."""
    try:
        require_length(job.language.sequence_length, ranks)
    except ValueError as error:
        raise ValueError(f"{job.language.section}.sequence_length: {error}") from None


def _larger(job: Job) -> str:
    """Return the change with which the model gets a larger vocabulary."""
    built_in = job.language.section == "model"
    return "raise model.vocab_size" if built_in else "name a model with a larger vocabulary in huggingface.path"


def _mesh(job: Job) -> dict[str, int]:
    """Ranks by axis, as many as there will be."""
    return job.settings.resolve_mesh(Environment.detect().world_size if is_launched() else job.run.ranks)


def _resolved(job: Job) -> Resolved:
    """The settings with the sizes that follow from the number of ranks."""
    sizes = _mesh(job)
    return job.settings.resolve(sizes["replicate"] * sizes["data"], sizes, elastic=may_restart())


def _check_model(job: Job) -> nn.Module:
    """Build the model without memory; it raises if its sizes do not fit together, or a unit is not in it."""
    shape, wanted = job.settings.model, job.data.vocabulary_size
    entries = None if shape is None else shape.vocab_size
    if entries is not None and job.data.tokenizer is None and size_is_set(job.data) and entries < wanted:
        raise ValueError(
            f"model.vocab_size = {entries} is smaller than data.vocabulary_size = {wanted}; leave out the former"
        )
    language = job.with_vocabulary(wanted).language
    try:
        model = language.build()
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # torch's, of sizes that no tensor can have
        raise ValueError(
            f"the section {language.section!r} is of a model that cannot be built: {type(error).__name__}: {error}; "
            "lower its sizes"
        ) from error
    for targets in (job.settings.units, job.settings.activation_checkpointing.targets):
        find_units(model, targets)
    return model
