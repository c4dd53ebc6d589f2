"""Checks of a configuration and a model on the meta device before a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

from zeromesh.base.axes import shard_size
from zeromesh.engine.initialize.optimizer_setup import parameter_groups, try_optimizer
from zeromesh.engine.initialize.run_plan import cuts_parameters
from zeromesh.engine.pipelined import Pipelined
from zeromesh.parallel.pipeline.runtime.cut import examine
from zeromesh.parallel.tensor.derive import derive
from zeromesh.parallel.tensor.tensor_plan import parse, resolve
from zeromesh.shard.find_units import find_units

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved


def try_out(model: nn.Module, settings: Resolved, sizes: Mapping[str, int]) -> None:
    """Find the units, split the layers, cut the stages, and build the optimizer and the schedule, as the run will.

    The model is on the meta device. Raise ValueError if one of these is not possible with these sizes of axes.
    """
    for targets in (settings.units, settings.activation_checkpointing.targets):
        find_units(model, targets)
    ranks = sizes["tensor"]
    # The first rank's part stands for all: what cannot be split fails on every rank alike.
    resolve(model, parse(settings.tensor_parallel.plan or {}), derive(model, ranks)[0], 0, ranks)
    if sizes["pipeline"] > 1:
        blocks = examine(model, settings.pipeline.blocks)
        # A real mesh needs running ranks; the cut asks only for sizes and for this rank's place.
        mesh: Any = SimpleNamespace(sizes=sizes, group=lambda axis: SimpleNamespace(size=sizes[axis], rank=0))
        Pipelined(model, mesh, settings.pipeline, settings.gradient_accumulation_steps, blocks)
    cuts = cuts_parameters(settings, shard_size(sizes), ranks)
    if groups := list(parameter_groups(model, None)):  # none of a model that is frozen
        try_optimizer(model, settings, groups, cuts)
