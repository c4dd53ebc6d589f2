"""Arguments of ``initialize``, and the plan of a run: all that is decided before the model is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from zeromesh.base.placement import Placement
from zeromesh.base.saved_tensors import BlockPlan
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
    from zeromesh.parallel.activation.tiles import Tiled
    from zeromesh.parallel.expert.forms import Experts
    from zeromesh.parallel.follow.token_check import TokenCheck
    from zeromesh.shard.tables.stacked_rows import RestingExperts

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
    data_seed: int | None = None  # of DeepSpeed's order of ``data``, the same in each pass; None: another in each pass


@dataclass(frozen=True)
class Plan:
    """Plan of a run over the ranks, made while the model is as it was."""

    arguments: Arguments
    settings: Resolved
    says_batch: bool  # whether the configuration gives a size of batches
    mesh: Mesh
    split: Split | None  # None where the tensor axis has one rank
    experts: list[Experts]  # that ranks share; none where the expert axis has one rank
    check: TokenCheck | None  # of code between split layers where sequences are spread over the tensor axis
    heads: list[str]  # layers whose losses are computed a chunk of tokens at a time, where they are not split
    tiled: Mapping[str, Tiled]  # modules that compute a tile of tokens at a time, by name
    stages: Pipelined | None  # None where there is one stage
    loader: Loader | None  # of training_data; its first samples may have decided where the model is cut
    before: Before
    tables: Mapping[str, nn.Module]  # embeddings whose rows are spread over the ranks, by name
    resting: RestingExperts | None  # experts whose rows are fetched as they are chosen
    cuts_parameters: bool  # an optimizer may update less than whole parameters on this rank
    monitor: Monitor
    groups: list[dict[str, Any]]  # of parameters that are updated; none of a model that is only evaluated
    optimizer: Optimizer | None  # the user's; the configuration's is made after the model is placed
    scheduler: Any  # of the user's optimizer, or the one that was passed
    offload: Offload
    saved: Mapping[str, BlockPlan] | None = None  # of blocks by name; others keep all; None: as the settings say

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.arguments.model

    @property
    def world(self) -> Group:
        """Group of all ranks."""
        return self.mesh.group("world")


def cuts_parameters(settings: Resolved, shards: int, splits: int) -> bool:
    """Return whether an optimizer may update less than whole parameters on so many ranks of these axes."""
    return (settings.row.optimizer is Placement.SHARDED and shards > 1) or splits > 1
