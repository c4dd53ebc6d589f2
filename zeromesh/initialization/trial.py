"""Trial of an initialization without memory and without ranks: refuse early what ``initialize`` would refuse."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from zeromesh.model.piece import Piece
from zeromesh.model.placement import Placement
from zeromesh.model.split import Held
from zeromesh.optim import factory, schedules
from zeromesh.optim.groups import hidden_matrices
from zeromesh.pipeline.runtime.cut import examine
from zeromesh.pipelined import Pipelined
from zeromesh.shard.find import find_units
from zeromesh.tensor.derive import derive
from zeromesh.tensor.plan import parse, resolve

if TYPE_CHECKING:
    from zeromesh.comm.mesh import Mesh
    from zeromesh.config.settings import Resolved


def try_out(model: nn.Module, settings: Resolved, sizes: Mapping[str, int]) -> None:
    """Find the units, split the layers, cut the stages, and build the optimizer and the schedule, as the run will.

    Args:
        model: model on the meta device.
        settings: settings with the sizes that follow from the number of ranks.
        sizes: number of ranks per axis of the mesh.

    Raises:
        ValueError: one of these is not possible.
    """
    for targets in (settings.units, settings.activation_checkpointing.targets):
        find_units(model, targets)
    ranks = sizes["tensor"]
    resolve(model, parse(settings.tensor_parallel.plan or {}), derive(model, ranks)[0], 0, ranks)
    if sizes["pipeline"] > 1:
        blocks = examine(model, settings.pipeline.blocks)
        mesh = cast("Mesh", _PlannedMesh(sizes))
        Pipelined(model, mesh, settings.pipeline, settings.gradient_accumulation_steps, blocks)
    # The run logs the same messages again.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        _build_optimizer(model, settings, sizes["data"])
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class _PlannedMesh:
    """Stand-in for the mesh, as its first rank will see it."""

    sizes: Mapping[str, int]

    def group(self, axis: str) -> SimpleNamespace:
        return SimpleNamespace(size=self.sizes[axis], rank=0)


@dataclass(frozen=True)
class _NoRanks:
    """Stand-in for the other ranks of an optimizer that takes no step."""

    buckets: Sequence[Sequence[str]]

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather(self, bucket: int, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise NotImplementedError


def _build_optimizer(model: nn.Module, settings: Resolved, ranks: int) -> None:
    chosen = settings.optimizer
    assert chosen is not None
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
