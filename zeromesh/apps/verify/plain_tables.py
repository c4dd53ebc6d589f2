"""Updates of embedding tables in the plain process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeromesh.base.quantized_layers import change
from zeromesh.config.settings import Settings
from zeromesh.engine.initialize.place_tables import with_table_group
from zeromesh.shard.tables.find_tables import find_tables
from zeromesh.shard.tables.row_rules import RULES, rule_of


class PlainTables:
    """The tables of a model that one process trains: their groups, and their updates."""

    def __init__(self, model: nn.Module, settings: Settings, names: list[str]) -> None:
        tables, _ = find_tables(model, settings.embedding_tables.modules, {})
        self.names = frozenset(f"{name}.weight" for name in tables)  # of the tables' weights
        for module in tables.values():
            change(module, sparse=True)
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = dict(model.named_parameters())
        trained: list[dict[str, Any]] = [{"params": [parameters[name] for name in names]}]
        groups = with_table_group(trained, tables, settings)  # type: ignore[arg-type]
        # The parameter groups of the run, with the names in place of parameters.
        self.groups = [{**group, "params": [by_id[id(p)] for p in group["params"]]} for group in groups]
        # Of each table, whole, by their names in torch.
        self.states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.names}

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Mapping[str, nn.Parameter],
        gradients: Mapping[str, torch.Tensor],
    ) -> None:
        """Update the rows that have a gradient by the rules of the groups in the run's ``optimizer``."""
        for names, group in zip((each["params"] for each in self.groups), optimizer.param_groups, strict=False):
            for name in self.names.intersection(names) & gradients.keys():
                rule = RULES[rule_of(optimizer, group, name)]
                options = {**rule.defaults, **group}
                master, state = masters[name].detach(), self.states[name]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for each in rule.states:
                        shape = len(master), 1 if each.per_row else master.shape[1]
                        state[each.key] = master.new_full(shape, options[each.initial] if each.initial else 0.0)
                state["step"] += 1
                gradient = gradients[name].coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                planes = [master, *(state[each.key] for each in rule.states)]
                copies = [plane[rows] for plane in planes]
                values = -values if options.get("maximize") else values
                rule.update(copies[0], values, copies[1:], int(state["step"]), options)
                for plane, copy in zip(planes, copies, strict=True):
                    plane[rows] = copy
