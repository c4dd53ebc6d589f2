"""Runs that are saved and resumed: a model that draws from every generator, and all that a run has."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn

import zeromesh
from mixtures import Experts, Router
from numerics import MESHES, OPTIMIZERS, PRECISIONS

MIXTURE = "experts"
"""Name of a mesh of two ranks, each with half of the experts that the model then has."""
MIXTURE_SECTIONS: dict[str, Any] = {"mesh": {"data": 2, "expert": 2}, "experts": {"targets": ["experts"]}}


class Noisy(nn.Module):
    """Draws from every generator there is; keeps running statistics, and a buffer that is not part of its state."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.late = nn.Linear(10, 10)
        self.register_buffer("positions", torch.arange(10.0), persistent=False)
        self.gate = Router(10, experts) if experts else None
        self.experts = Experts(10, experts) if experts else None

    def forward(self, tokens: torch.Tensor, late: bool = False) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + self.drop(torch.tanh(block(x))) * (0.5 + random.random()) * (0.5 + float(numpy.random.rand()))
        if self.gate is not None and self.experts is not None:
            _, weights, index = self.gate(x)
            x = x + self.experts(x, index, weights)
        x = self.late(x) if late else x
        logits = self.head(self.norm(x) * self.scale)
        return nn.functional.cross_entropy(logits.double(), tokens.roll(1))


def config(row: int, precision: str = "float64", mesh: str = "2", optimizer: str = "adamw") -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": row},
        **({"mesh": MESHES[mesh]} if mesh != MIXTURE else MIXTURE_SECTIONS),
        "optimizer": {"type": optimizer, "params": dict(OPTIMIZERS[optimizer])},
        "scheduler": {"type": "MultiStepLR", "params": {"milestones": [2, 4], "gamma": 0.5}},
        **PRECISIONS[precision],
    }


def start(seed: int, settings: dict[str, Any]) -> zeromesh.Engine:
    torch.manual_seed(seed)
    model = Noisy(4 if settings["mesh"].get("expert") else 0)
    return zeromesh.initialize(model=model if {"bf16", "fp16"} & set(settings) else model.double(), config=settings)[0]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def train(engine: zeromesh.Engine, updates: int, late: bool = True) -> list[Any]:
    """Return the losses, norms and learning rates of some updates."""
    history = []
    for _ in range(updates):
        tokens = torch.randint(0, 13, (6,))
        loss = engine(tokens, late and engine.global_steps > 3)
        engine.backward(loss)
        engine.step()
        # As text, in which nan equals nan: the first updates in fp16 overflow.
        history.append(str((loss.item(), engine.get_global_grad_norm(), engine.get_lr(), engine.loss_scale)))
    return history


def everything(engine: zeromesh.Engine) -> dict[str, torch.Tensor]:
    """All that a run has on this rank: masters, optimizer states, buffers, generators."""
    found = {f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    for piece in engine.sharded.pieces.values():
        if piece is not None:
            found[piece.name] = piece.parameter.detach().clone()
            for key, value in engine.optimizer.state.get(piece.parameter, {}).items():
                found[f"{piece.name} {key}"] = torch.as_tensor(value).clone()
    found["torch"] = torch.get_rng_state()
    found["others"] = torch.tensor([random.random(), numpy.random.rand()], dtype=torch.float64)
    found["counters"] = torch.tensor([engine.global_steps, engine.micro_steps, engine.skipped_steps])
    return found


def train_on_the_loader(engine: zeromesh.Engine, updates: int) -> list[float]:
    """Train on the loader that ``initialize`` made, over as many passes as it takes, and return the losses."""
    losses = []
    batches = iter(engine.training_dataloader)
    while len(losses) < updates:
        try:
            losses.append(engine.train_batch(batches).item())
        except StopIteration:
            batches = iter(engine.training_dataloader)
    return losses
