"""What can be known to be wrong before a rank is started, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from zeromesh.architectures.decoder import Decoder
from zeromesh.cli.folder import RunFolder
from zeromesh.config.settings import Settings
from zeromesh.config.train import ModelShape, Run, TextData
from zeromesh.data.loader import Windows
from zeromesh.data.prepare import Prepared, prepare
from zeromesh.dist.environment import Environment, is_launched


@dataclass(frozen=True)
class Job:
    """A training run as configured, its sections known to be there."""

    settings: Settings
    model: ModelShape
    data: TextData
    run: Run

    @property
    def folder(self) -> RunFolder:
        """Where the run writes."""
        return RunFolder(Path(self.run.output))


def check(settings: Settings) -> Job:
    """Look at everything that can be looked at before the text is read. Reads only, but for a trial of the folder.

    Raises:
        ValueError: if the run cannot start.
    """
    if settings.model is None or settings.data is None or settings.run is None:
        missing = [name for name in ("model", "data", "run") if getattr(settings, name) is None]
        raise ValueError(f"zeromesh train needs the section {missing[0]!r} in the configuration; see docs/training.md")
    if settings.optimizer is None:
        raise ValueError('zeromesh train needs an optimizer; add "optimizer": {"type": "AdamW", "params": {"lr": ...}}')
    world = Environment.detect().world_size if is_launched() else settings.run.ranks
    sizes = settings.resolve_mesh(world)
    settings.resolve(sizes["replicate"] * sizes["data"], sizes)
    _check_vocabulary(settings.model, settings.data)
    job = Job(settings, settings.model, settings.data, settings.run)
    job.folder.check(settings.run.resume)
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


def _check_vocabulary(model: ModelShape, data: TextData) -> None:
    """Build the model without memory; it raises if its sizes do not fit together."""
    if model.vocab_size is not None and data.tokenizer is None and model.vocab_size < data.vocabulary_size:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is smaller than data.vocabulary_size = {data.vocabulary_size}; "
            "leave out the former"
        )
    with torch.device("meta"):
        Decoder(model.model_copy(update={"vocab_size": model.vocab_size or data.vocabulary_size}))
