"""Updates of embedding tables in the plain process, by torch's optimizers of sparse gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeromesh.config.settings import Settings
from zeromesh.initialization.tables import with_table_group
from zeromesh.model.quantized import change
from zeromesh.shard.table.find import find_tables
from zeromesh.shard.table.rules import RULES, rule_of


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum per row, of the mean squares of its gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the rows that have a gradient."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                gradient, state = parameter.grad.coalesce(), self.state[parameter]
                rows, values = gradient.indices()[0], gradient.values()
                if not state:
                    state["count"] = 0
                    state["sum"] = parameter.new_full((len(parameter), 1), group["initial_accumulator_value"])
                state["sum"][rows] += values.square().mean(1, keepdim=True)
                rate = group["lr"] / (1 + state["count"] * group["lr_decay"])
                state["count"] += 1
                with torch.no_grad():
                    parameter[rows] -= rate * values / (state["sum"][rows].sqrt() + group["eps"])


OPTIMIZERS: Mapping[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "adam": torch.optim.SparseAdam,
}
"""Optimizer of sparse gradients by the name of a table's rule."""


class PlainTables:
    """The tables of a model that one process trains: their groups, and their updates.

    Attributes:
        names: of the tables' weights.
        groups: the parameter groups of the run, with the names in place of parameters.
    """

    def __init__(self, model: nn.Module, settings: Settings, names: list[str]) -> None:
        tables, _ = find_tables(model, settings.embedding_tables.modules, {})
        self.names = frozenset(f"{name}.weight" for name in tables)
        for module in tables.values():
            change(module, sparse=True)
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = dict(model.named_parameters())
        whole: list[dict[str, Any]] = [{"params": [parameters[name] for name in names]}]
        groups = with_table_group(whole, tables, settings)  # type: ignore[arg-type]
        self.groups = [{**group, "params": [by_id[id(p)] for p in group["params"]]} for group in groups]
        self._optimizers: dict[str, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}

    def start(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> None:
        """Make the tables' optimizers with the options of their groups in the run's ``optimizer``."""
        for names, group in zip((each["params"] for each in self.groups), optimizer.param_groups, strict=False):
            for name in self.names.intersection(names):
                rule = rule_of(optimizer, group, name)
                known = {key: group.get(key, default) for key, default in RULES[rule].defaults.items()}
                if rule == "rowwise_adagrad":
                    made: torch.optim.Optimizer = RowwiseAdagrad([masters[name]], known)
                else:
                    made = OPTIMIZERS[rule]([masters[name]], **known)
                self._optimizers[name] = made, group

    def step(self) -> None:
        """Update the rows that have gradients, at the learning rates that the groups have now."""
        for optimizer, group in self._optimizers.values():
            optimizer.param_groups[0]["lr"] = group["lr"]
            optimizer.step()

    def state(self, name: str) -> dict[str, Any]:
        """Return the states of a table by their names in torch."""
        optimizer, _ = self._optimizers[name]
        return dict(optimizer.state.get(optimizer.param_groups[0]["params"][0], {}))
