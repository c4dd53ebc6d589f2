"""What can be known to be wrong before a rank is started, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zeromesh.architectures.decoder import Decoder
from zeromesh.cli.changes import require_unchanged
from zeromesh.cli.folder import RunFolder
from zeromesh.cli.updates import check_optimizer
from zeromesh.config.settings import Settings
from zeromesh.config.train import ModelShape, Run, TextData
from zeromesh.data.loader import Windows
from zeromesh.data.prepare import Prepared, prepare
from zeromesh.dist.environment import Environment, is_launched
from zeromesh.shard.find import find_units


@dataclass(frozen=True)
class Job:
    """A training run as configured, its sections known to be there."""

    settings: Settings
    model: ModelShape
    data: TextData
    run: Run

    @classmethod
    def of(cls, settings: Settings) -> Job:
        """The run that the settings describe.

        Raises:
            ValueError: if they lack a section.
        """
        model, data, run = settings.model, settings.data, settings.run
        if model is None or data is None or run is None:
            missing = [name for name in ("model", "data", "run") if getattr(settings, name) is None]
            raise ValueError(f"zeromesh train needs the section {missing[0]!r} in the configuration")
        return cls(settings, model, data, run)

    def with_vocabulary(self, size: int) -> Job:
        """The same run with a tokenizer of ``size`` entries, and so many in the model unless the settings say more."""
        model = self.model.model_copy(update={"vocab_size": self.model.vocab_size or size})
        data = self.data if self.data.tokenizer else self.data.model_copy(update={"vocabulary_size": size})
        settings = self.settings.model_copy(update={"model": model, "data": data})
        return replace(self, settings=settings, model=model, data=data)

    @property
    def folder(self) -> RunFolder:
        """Where the run writes."""
        return RunFolder(Path(self.run.output))


def check(settings: Settings) -> Job:
    """Look at everything that can be looked at before the text is read. Reads only, but for a trial of the folder.

    Raises:
        ValueError: if the run cannot start.
    """
    job = Job.of(settings)
    if settings.optimizer is None:
        raise ValueError('zeromesh train needs an optimizer; add "optimizer": {"type": "AdamW", "params": {"lr": ...}}')
    world = Environment.detect().world_size if is_launched() else job.run.ranks
    sizes = settings.resolve_mesh(world)
    resolved = settings.resolve(sizes["replicate"] * sizes["data"], sizes)
    model = _check_model(job)
    check_optimizer(model, resolved, sizes["data"])
    job.folder.check(job.run.resume)
    if job.run.resume:
        require_unchanged(job.folder, resolved)
    return job


def prepare_text(job: Job, may_write: bool) -> Prepared:
    """The text as tokens, known to be long enough and to suit the model.

    Raises:
        ValueError: if there is no text, too little, or more token ids than the model has.
    """
    prepared = prepare(job.data, job.folder.text, may_write)
    vocabulary = job.model.vocab_size or prepared.vocabulary
    if vocabulary < prepared.vocabulary:
        raise ValueError(
            f"model.vocab_size = {vocabulary} is smaller than the tokenizer's {prepared.vocabulary} entries; "
            "raise it, or leave it out"
        )
    Windows(prepared.train.read(), job.model.sequence_length)
    return prepared


def _check_model(job: Job) -> Decoder:
    """Build the model without memory; it raises if its sizes do not fit together, or a unit is not in it."""
    entries, wanted = job.model.vocab_size, job.data.vocabulary_size
    if entries is not None and job.data.tokenizer is None and entries < wanted:
        raise ValueError(
            f"model.vocab_size = {entries} is smaller than data.vocabulary_size = {wanted}; leave out the former"
        )
    with torch.device("meta"):
        model = Decoder(job.with_vocabulary(wanted).model)
    for targets in (job.settings.units, job.settings.activation_checkpointing.targets):
        find_units(model, targets)
    return model
