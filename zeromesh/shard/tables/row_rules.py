"""Updates of single rows: one table of rules.

A rule changes rows that a batch has used, and their states, and leaves all others alone. ``adam`` is torch's
SparseAdam, ``adagrad`` and ``sgd`` are torch's optimizers on sparse gradients. ``rowwise_adagrad`` keeps one number per
row, the sum over updates of the mean square of its gradient (Gupta et al., "Training Recommender Models at Scale with
Communication Compression", 2020; FBGEMM calls it EXACT_ROWWISE_ADAGRAD).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch

from zeromesh.base.kernels.update_rules import update_class
from zeromesh.base.optimizer_table import row_of

Options = Mapping[str, Any]
RULE_KEY = "table_rule"
"""Option of a parameter group that names the rule of its tables; without it the optimizer's class decides."""


@dataclass(frozen=True)
class RowState:
    """One state of a rule."""

    key: str
    per_row: bool = False  # one number for each row; else one for each element
    initial: str | None = None  # option with its first value; None: 0


@dataclass(frozen=True)
class Rule:
    """The update of rows."""

    # Of (rows, gradients, states, number of the update from 1 on, options): changes rows and states in place. Shapes
    # (k, width), states (k, width) or (k, 1).
    update: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], int, Options], None]
    states: tuple[RowState, ...] = ()
    defaults: Options = field(default_factory=dict)


def _sgd(rows: torch.Tensor, gradients: torch.Tensor, states: Sequence[torch.Tensor], step: int, on: Options) -> None:
    rows.sub_(gradients, alpha=float(on["lr"]))


def _adagrad(
    rows: torch.Tensor, gradients: torch.Tensor, states: Sequence[torch.Tensor], step: int, on: Options
) -> None:
    squares = gradients.square()
    total = states[0].add_(squares.mean(1, keepdim=True) if states[0].shape != rows.shape else squares)
    rate = float(on["lr"]) / (1 + (step - 1) * float(on["lr_decay"]))
    rows.sub_(gradients / total.sqrt().add_(on["eps"]), alpha=rate)


def _adam(rows: torch.Tensor, gradients: torch.Tensor, states: Sequence[torch.Tensor], step: int, on: Options) -> None:
    first, second = states
    beta1, beta2 = map(float, on["betas"])
    first.lerp_(gradients, 1 - beta1)
    second.lerp_(gradients.square(), 1 - beta2)
    rate = float(on["lr"]) * sqrt(1 - beta2**step) / (1 - beta1**step)
    rows.sub_(first / second.sqrt().add_(on["eps"]), alpha=rate)


_SUM = {"lr": 1e-2, "lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}

RULES: Mapping[str, Rule] = {
    "sgd": Rule(_sgd, (), {"lr": 1e-3}),
    "adagrad": Rule(_adagrad, (RowState("sum", initial="initial_accumulator_value"),), _SUM),
    "rowwise_adagrad": Rule(_adagrad, (RowState("sum", True, "initial_accumulator_value"),), _SUM),
    "adam": Rule(
        _adam, (RowState("exp_avg"), RowState("exp_avg_sq")), {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    ),
}
"""Rules by the names that ``embedding_tables.optimizer`` takes."""

_NEUTRAL: Mapping[str, Any] = {"weight_decay": 0, "momentum": 0, "amsgrad": False, "nesterov": False}
"""Options that would change rows which no batch has used, and the values at which they do not."""


def rule_of(optimizer: torch.optim.Optimizer, group: Options, names: str) -> str:
    """Return the name of the rule for the tables of a group; ``names`` says which they are, for messages.

    Raises:
        ValueError: there is no rule, or an option would change rows that no batch has used.
    """
    kind = type(optimizer)
    # Adam and AdamW refuse sparse gradients: tables get SparseAdam's update.
    name = group.get(RULE_KEY, row_of(update_class(optimizer)).row_rule)
    if name not in RULES:
        subject = f"{RULE_KEY} = {name!r}" if RULE_KEY in group else f"{kind.__name__}"
        raise ValueError(
            f"{subject} has no update for rows of {names}, whose gradients are sparse; set "
            "embedding_tables.optimizer to one of "
            f"{', '.join(RULES)}, or embedding_tables.modules to [] for dense gradients"
        )
    if RULE_KEY not in group:
        for key, neutral in _NEUTRAL.items():
            if group.get(key, neutral) != neutral:
                raise ValueError(
                    f"{key} = {group[key]} of {kind.__name__} would change rows of {names} that no batch has used, and "
                    f"their gradients are sparse; set it to {neutral} for them, or embedding_tables.optimizer in the "
                    "configuration, or embedding_tables.modules to [] for dense gradients"
                )
    return str(name)
