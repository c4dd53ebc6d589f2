"""The reference of DPO: the model at the start of a run, whose log-likelihoods of all answers are kept in files.

So no second model is in memory while the run trains, and adapters need not be switched off: at the start they are zero.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from zeromesh import Engine
from zeromesh.apps.train.data.ordered_loader import evaluation_batches
from zeromesh.apps.train.data.token_store import PreparedData, TokenSet
from zeromesh.apps.train.model import LanguageModel
from zeromesh.apps.train.run_loss import AT_ONCE, weighted
from zeromesh.apps.train.train_settings import Preference

NOT_HERE = -float("inf")  # of a pair that another rank computes


def write_reference(
    engine: Engine, language: LanguageModel, prepared: PreparedData, rows: int, dpo: Preference
) -> None:
    """Compute the log-likelihoods of all answers with the model as it is, and write them. Collective."""
    sets = _sets(prepared)
    first = engine.mesh.rank == 0
    if first:
        for part in sets:  # of an earlier start
            part.reference.unlink(missing_ok=True)
    engine.mesh.group("world").exchange(torch.zeros(1))
    columns = {part.reference: np.zeros((part.indexed.documents, 2), dtype=np.float32) for part in sets}
    for part in sets:
        _fill(engine, language, replace(prepared, validation=(part,)), rows, dpo, columns[part.reference])
    if first:
        for path, values in columns.items():
            draft = path.with_name(f"{path.name}.part")
            with draft.open("wb") as file:
                np.save(file, values)
                os.fsync(file.fileno())
            draft.replace(path)
    engine.mesh.group("world").exchange(torch.zeros(1))


def _fill(
    engine: Engine,
    language: LanguageModel,
    prepared: PreparedData,
    rows: int,
    dpo: Preference,
    values: np.ndarray,
) -> None:
    """Write the log-likelihoods of the one set in ``validation`` into its rows of ``values``, on all ranks."""
    (part,) = prepared.validation
    rank, ranks = engine.data_rank, engine.data_size
    batches = evaluation_batches(prepared, language.sequence_length, rows, rank, ranks)
    begin = 0  # first pair of the micro-batches that all ranks compute at once
    while some := list(islice(batches, AT_ONCE)):
        answers: list[torch.Tensor] = []
        micro_batches, _ = weighted(engine, language, some, dpo, answers.append)
        engine.eval_batch(iter(micro_batches), num_micro_batches=len(some))
        local = torch.full((len(some), ranks, rows, 2), NOT_HERE, dtype=torch.float64)
        for number, pair in enumerate(answers):
            local[number, rank] = pair.double().cpu()
        # Ranks that share a batch have the same numbers.
        pairs = engine.mesh.group("world").exchange(local.flatten()).amax(0).view(-1, 2)
        numbers = part.numbers[begin : begin + len(pairs)]
        values[numbers] = pairs[: len(numbers)].numpy()
        begin += len(pairs)


def require_reference(prepared: PreparedData) -> None:
    """Raise ValueError if a file with the reference's log-likelihoods is missing."""
    missing = next((part for part in _sets(prepared) if not part.reference.is_file()), None)
    if missing is not None:
        raise ValueError(
            f"{str(missing.reference)!r} is missing, which the first start of the run wrote: without it, the model at "
            "the start is lost; bring the file back, or start a new run with another run.output"
        )


def _sets(prepared: PreparedData) -> tuple[TokenSet, ...]:
    return (*prepared.train, *prepared.validation)
