"""Frozen results of the steps of ``initialize``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from zeromesh.comm.collectives import Group
from zeromesh.comm.mesh import Mesh
from zeromesh.initialization.layout import Split
from zeromesh.model.placement import Placement
from zeromesh.offload import Offload
from zeromesh.shard.sharded import ShardedModel

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved, Settings
    from zeromesh.context.applied import SpreadSequences
    from zeromesh.observe.monitors import Monitor
    from zeromesh.pipelined import Pipelined
    from zeromesh.training_data import Loader

Config = str | Path | Mapping[str, Any]


@dataclass(frozen=True)
class Arguments:
    """Arguments of ``initialize``; see there."""

    model: nn.Module
    config: Config | Settings
    optimizer: Any
    parameters: Iterable[Any] | None
    scheduler: Any
    data: Any
    collate_fn: Callable[[Any], Any] | None
    loss_fn: Callable[[Any, Any], Any] | None


@dataclass(frozen=True)
class Plan:
    """Layout of a model over the ranks, decided before the model is changed.

    Attributes:
        arguments: those of ``initialize``.
        settings: the resolved configuration.
        says_batch: whether the configuration gives a size of batches.
        mesh: the ranks.
        split: parameters that are split along the tensor axis; None where that has one rank.
        stages: cut into pipeline stages, and their schedule; None where there is one stage.
        loader: of ``training_data``, whose first samples may have decided where the model is cut; None without data.
    """

    arguments: Arguments
    settings: Resolved
    says_batch: bool
    mesh: Mesh
    split: Split | None
    stages: Pipelined | None
    loader: Loader | None

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.arguments.model

    @property
    def cuts_parameters(self) -> bool:
        """True if what this rank's optimizer updates may be less than whole parameters."""
        is_sharded = self.settings.row.optimizer is Placement.SHARDED and self.mesh.shard.size > 1
        return is_sharded or self.mesh.group("tensor").size > 1

    @property
    def world(self) -> Group:
        """Group of all ranks."""
        return self.mesh.group("world")


@dataclass(frozen=True)
class Prepared:
    """Optimizer and observers of a run, made or tried before the model is changed.

    Attributes:
        groups: parameter groups that the optimizer will update.
        optimizer: the user's; None where the configuration's is made after the model is placed.
        scheduler: the user's optimizer's, or the one that was passed.
        monitor: writes metrics.
        offload: tiers of the states.
    """

    groups: list[dict[str, Any]]
    optimizer: Optimizer | None
    scheduler: Any
    monitor: Monitor
    offload: Offload


@dataclass(frozen=True)
class Placed:
    """A model whose states are placed over the ranks, and what updates them.

    Attributes:
        sharded: the states.
        optimizer: updates this rank's pieces; None if there is none.
        scheduler: of its learning rate; None if there is none.
        sequences: spread over ranks; None where the context axis has one rank.
    """

    sharded: ShardedModel
    optimizer: Optimizer | None
    scheduler: Any
    sequences: SpreadSequences | None
