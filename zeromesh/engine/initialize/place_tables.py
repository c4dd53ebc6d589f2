"""Embedding tables: which modules they are, the groups that update them, and where they rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from zeromesh.config.settings import TIERS
from zeromesh.shard.optim.arguments import without_auto
from zeromesh.shard.tables.find_tables import find_tables
from zeromesh.shard.tables.row_rules import RULE_KEY, RULES, rule_of
from zeromesh.shard.tables.stacked_rows import RestingExperts
from zeromesh.shard.tables.tables import TableSettings

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved
    from zeromesh.engine.pipelined import Pipelined
    from zeromesh.parallel.tensor.split_plan import SplitPlan

_log = logging.getLogger("zeromesh")


def choose_tables(
    model: nn.Module, settings: Resolved, split: SplitPlan | None, stages: Pipelined | None, tells: bool
) -> dict[str, nn.Module]:
    """Return the tables of a model by name.

    Args:
        model: on any device.
        settings: of the run.
        split: plan of the tensor axis, if it has several ranks.
        stages: of the pipeline, if it has several ranks.
        tells: log a warning for each embedding whose gradients are dense in spite of sparse=True.

    Raises:
        ValueError: see ``find_tables``.
    """
    taken: dict[str, str] = {}
    if split is not None:
        taken |= dict.fromkeys(split.held, "the tensor-parallel plan splits it, or its gradient")
    if stages is not None:
        taken |= dict.fromkeys(stages.tied, "several stages of the pipeline use it")
    tables, reasons = find_tables(model, settings.embedding_tables.modules, taken)
    if tells:
        for name, reason in reasons.items():
            _log.warning(
                "gradients of %s are dense here, in spite of sparse=True, because %s: optimizers with moments or "
                "weight decay change rows that no batch used; leave sparse=True out if that is what you want",
                name,
                reason,
            )
    return tables


def table_settings(
    tables: Mapping[str, nn.Module], resting: RestingExperts | None, settings: Resolved
) -> TableSettings:
    """Return what places the tables whose weights are on this rank's pipeline stages."""
    chosen = settings.embedding_tables
    tables = {name: module for name, module in tables.items() if module._parameters.get("weight") is not None}
    folder = None
    if tables and chosen.device == "nvme" and chosen.nvme_path is not None:
        folder = Path(chosen.nvme_path).absolute()
    hot = None if chosen.device == "none" else chosen.cache_rows
    return TableSettings(tables, TIERS[chosen.device], folder, hot, chosen.batch_lookups, resting)


def with_table_group(
    owned: Sequence[dict[str, Any]], tables: Mapping[str, nn.Module], settings: Resolved
) -> list[dict[str, Any]]:
    """Return the groups with the tables' weights in one of their own, if the configuration has an update for them."""
    chosen = settings.embedding_tables.optimizer
    if chosen is None or not tables:
        return list(owned)
    weights = {id(module.weight) for module in tables.values()}
    rule = RULES[chosen.type]
    options = without_auto(chosen.params)
    if unknown := sorted(set(options) - set(rule.defaults)):
        raise ValueError(
            f"embedding_tables.optimizer.params.{unknown[0]} is not an option of {chosen.type}, which has "
            f"{', '.join(rule.defaults)}"
        )
    taken = [p for group in owned for p in group["params"] if id(p) in weights]
    rest = [{**group, "params": [p for p in group["params"] if id(p) not in weights]} for group in owned]
    return [*rest, {"params": taken, **rule.defaults, **options, RULE_KEY: chosen.type}]


def check_rules(optimizer: Optimizer | None, parameters: Mapping[int, str], settings: Resolved, *, users: bool) -> None:
    """Raise ValueError if a table cannot be updated by its group; ``parameters`` names the tables' by ``id``."""
    if optimizer is None or not parameters:
        return
    for group in optimizer.param_groups:
        names = [parameters[id(p)] for p in group["params"] if id(p) in parameters]
        if not names:
            continue
        if users and settings.embedding_tables.optimizer is not None and RULE_KEY not in group:
            raise ValueError(
                f"embedding_tables.optimizer is set, but {names[0]} is in a group of the optimizer that was "
                "passed; give tables "
                f'a group of their own with "{RULE_KEY}" and its options, or pass a function that makes the optimizer'
            )
        rule_of(optimizer, group, ", ".join(names))
