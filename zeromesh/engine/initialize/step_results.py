"""Frozen results of the steps of ``initialize``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from zeromesh.base.placement import Placement
from zeromesh.comm.collectives import Group
from zeromesh.comm.mesh import Mesh
from zeromesh.engine.initialize.model_layout import Split
from zeromesh.engine.initialize.offload import Offload
from zeromesh.engine.reports import Before

if TYPE_CHECKING:
    from zeromesh.base.loader import Loader
    from zeromesh.config.settings import Resolved, Settings
    from zeromesh.engine.observe.monitors import Monitor
    from zeromesh.engine.pipelined import Pipelined

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
    data_seed: int | None = None  # of DeepSpeed's order of ``data``, the same in each pass; None: an own one for each


@dataclass(frozen=True)
class Plan:
    """Layout of a model over the ranks, decided before the model is changed."""

    arguments: Arguments
    settings: Resolved
    says_batch: bool  # whether the configuration gives a size of batches
    mesh: Mesh
    split: Split | None  # None where the tensor axis has one rank
    stages: Pipelined | None  # None where there is one stage
    loader: Loader | None  # of training_data; its first samples may have decided where the model is cut
    before: Before
    tables: Mapping[str, nn.Module]  # embeddings whose rows are spread over the ranks, by name

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.arguments.model

    @property
    def cuts_parameters(self) -> bool:
        """True if what this rank's optimizer updates may be less than whole parameters."""
        return cuts_parameters(self.settings, self.mesh.shard.size, self.mesh.group("tensor").size)

    @property
    def world(self) -> Group:
        """Group of all ranks."""
        return self.mesh.group("world")


def cuts_parameters(settings: Resolved, shards: int, tensor: int) -> bool:
    """Return whether an optimizer may update less than whole parameters on so many ranks of these axes."""
    return (settings.row.optimizer is Placement.SHARDED and shards > 1) or tensor > 1


@dataclass(frozen=True)
class Prepared:
    """Optimizer and observers of a run, made or tried before the model is changed."""

    groups: list[dict[str, Any]]
    optimizer: Optimizer | None  # the user's; the configuration's is made after the model is placed
    scheduler: Any  # of the user's optimizer, or the one that was passed
    monitor: Monitor
    offload: Offload
