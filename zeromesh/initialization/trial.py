"""Checks of a configuration and a model on the meta device before a run, and planning of keys that are "auto"."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

from zeromesh.comm.collectives import Group
from zeromesh.comm.environment import Environment
from zeromesh.config.automatic import asked_of_planner, lines_of_overrides, overrides_of
from zeromesh.initialization.automatic import Example, filled_in
from zeromesh.initialization.plan import cuts_parameters
from zeromesh.initialization.prepare import parameter_groups, try_optimizer
from zeromesh.pipeline.runtime.cut import examine
from zeromesh.pipelined import Pipelined
from zeromesh.shard.find import find_units
from zeromesh.tensor.derive import derive
from zeromesh.tensor.plan import parse, resolve

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved, Settings

_log = logging.getLogger("zeromesh")


class Automatic:
    """Keys of a configuration that are "auto", which the planner fills in.

    Args:
        config: path of the configuration.
        overrides: as for ``Settings.load``.
    """

    def __init__(self, config: Path, overrides: Sequence[str]) -> None:
        self._asked = asked_of_planner(config, overrides)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._asked)

    def fill(self, settings: Settings, example: Example, environment: Environment, world: Group | None) -> Settings:
        """Return the settings with what the planner chooses; see ``filled_in``."""
        return filled_in(settings, self._asked, example, environment, world)

    def repeat(self, settings: Settings, before: Resolved, ranks: int) -> Settings | None:
        """Return the settings with what an earlier run had; None if it had another number of ranks."""
        from zeromesh.plan.convert import document_for, layout_from

        if prod(before.mesh.model_dump().values()) != ranks:
            return None
        overrides = overrides_of(document_for(*layout_from(before, ranks)), self._asked)
        _log.info('what is "auto" is as it was in the run:%s', lines_of_overrides(overrides))
        return type(settings).load(settings, overrides)


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
    # The first rank's part stands for all: what cannot be split fails on every rank alike.
    resolve(model, parse(settings.tensor_parallel.plan or {}), derive(model, ranks)[0], 0, ranks)
    if sizes["pipeline"] > 1:
        blocks = examine(model, settings.pipeline.blocks)
        # A real mesh needs running ranks; the cut asks only for sizes and for this rank's place.
        mesh: Any = SimpleNamespace(sizes=sizes, group=lambda axis: SimpleNamespace(size=sizes[axis], rank=0))
        Pipelined(model, mesh, settings.pipeline, settings.gradient_accumulation_steps, blocks)
    cuts = cuts_parameters(settings, sizes["data"] * sizes["context"], ranks)
    if groups := list(parameter_groups(model, None)):  # none of a model that is frozen
        try_optimizer(model, settings, groups, cuts)
