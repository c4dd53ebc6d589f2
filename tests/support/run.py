"""Engines of tests: their configurations, and single updates of an engine and of plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zeromesh

SHORT = {
    "micro": "train_micro_batch_size_per_gpu",
    "batch": "train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "clipping": "gradient_clipping",
    "zero": "zero_optimization",
}
"""Names that tests use for long keys of the configuration."""


def optimizer_of(kind: str, **params: Any) -> dict[str, Any]:
    """Return the section of an optimizer."""
    return {"type": kind, "params": params}


def sgd(lr: float, **params: Any) -> dict[str, Any]:
    return optimizer_of("SGD", lr=lr, **params)


def adam(lr: float, **params: Any) -> dict[str, Any]:
    return optimizer_of("Adam", lr=lr, **params)


def adamw(lr: float, **params: Any) -> dict[str, Any]:
    return optimizer_of("AdamW", lr=lr, **params)


def configuration(optimizer: Any = None, stage: int | None = None, bf16: bool | None = None, **rest: Any) -> Any:
    """Return a configuration of these sections; those of ``rest`` may have their names in ``SHORT``."""
    sections: dict[str, Any] = {} if optimizer is None else {"optimizer": optimizer}
    sections |= {} if stage is None else {"zero_optimization": {"stage": stage}}
    sections |= {} if bf16 is None else {"bf16": {"enabled": bf16}}
    return sections | {SHORT.get(name, name): value for name, value in rest.items()}


def start_engine(model: Any, config: dict[str, Any] | None = None, **sections: Any) -> Any:
    """Return the engine of a model, of this configuration and the sections that ``configuration`` makes."""
    return zeromesh.initialize(model=model, config=configuration(**sections) | (config or {}))[0]


def train_step(engine: Any, loss: torch.Tensor) -> float:
    """Train by one micro-batch, and return its loss."""
    engine.backward(loss)
    engine.step()
    return loss.item()


def train_on_tokens(engine: Any, tokens: torch.Tensor) -> float:
    """Train a Hugging Face model by this rank's part of a global batch, and return its loss."""
    mine = tokens.chunk(engine.data_size)[engine.data_rank]
    return train_step(engine, engine(input_ids=mine, labels=mine).loss)


def plain_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Train by one batch in plain torch, and return its loss; gradients are those of this batch."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def whole_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters, on each rank. Collective."""
    with zeromesh.zero.GatheredParameters(list(module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def whole_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the state with whole parameters, on each rank. Collective."""
    with zeromesh.zero.GatheredParameters(list(module.parameters())):
        return {name: value.detach().clone() for name, value in module.state_dict().items()}


class Interruption(Exception):
    """What tests raise inside of a program."""
