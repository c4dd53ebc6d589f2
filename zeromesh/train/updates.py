"""A trial of the optimizer and the schedule on a model without memory, so that what is wrong shows before the start."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeromesh.config.parts import Optimizer
from zeromesh.config.settings import Settings
from zeromesh.model.piece import Piece
from zeromesh.model.placement import Placement
from zeromesh.model.split import Held
from zeromesh.optim import factory, schedules
from zeromesh.optim.groups import hidden_matrices


@dataclass(frozen=True)
class _NoRanks:
    """Stands for the other ranks of an optimizer that is never stepped."""

    buckets: Sequence[Sequence[str]]

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather(self, bucket: int, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise NotImplementedError


def check_optimizer(model: nn.Module, settings: Settings, ranks: int) -> None:
    """Build the optimizer and the schedule as the run will.

    Args:
        model: on the meta device.
        settings: with an optimizer.
        ranks: of one shard group.

    Raises:
        ValueError: if a parameter of theirs is unknown, missing, or has a value that it cannot have.
    """
    assert settings.optimizer is not None
    # What is logged here is logged again by the run.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        _build(model, settings, settings.optimizer, ranks)
    finally:
        logging.disable(before)


def _build(model: nn.Module, settings: Settings, chosen: Optimizer, ranks: int) -> None:
    pieces = tuple(
        Piece(name, Held(tuple(parameter.shape)), 0, parameter.numel(), nn.Parameter(parameter.detach().flatten()))
        for name, parameter in model.named_parameters()
    )
    optimizer = factory.build(
        chosen.type,
        # Torch has no fused update on the meta device.
        {key: value for key, value in chosen.params.items() if key != "fused"},
        [factory.ParameterGroup(pieces)],
        _NoRanks([[piece.name for piece in pieces]]),
        settings.row.optimizer is Placement.SHARDED and ranks > 1,
        settings.zero_allow_untested_optimizer,
        hidden_matrices(model) if chosen.type.lower() == "muon" else frozenset(),
    )
    if settings.scheduler is not None:
        schedules.build(settings.scheduler.type, settings.scheduler.params, optimizer)
