"""A small mixture in classes of a user's own: experts are stacked, and called with rows and their choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, EXPERTS, CHOICES, WORDS = 6, 4, 4, 2, 12
TARGETS = ["blocks.*.experts"]

Alter = Callable[["Block", Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Gated MLPs whose parameters are stacked, (experts, out, in)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * INNER, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, INNER) / INNER**0.5)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each row's choices: (rows, width) of index and weights (rows, choices)."""
        total = torch.zeros_like(hidden)
        for expert in range(len(self.gate_up_proj)):
            rows, places = torch.where(index == expert)
            gate, up = F.linear(hidden[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, self.down_proj[expert]) * weights[rows, places, None]
            total = total.index_add(0, rows, part)
        return total


class Router(nn.Linear):
    """Scores of the experts, with a bias that counts for the choice alone."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__(width, experts, bias=False)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (rows, experts), weights and index (rows, choices)."""
        logits = super().forward(hidden)
        scores = logits.sigmoid()
        index = (scores + self.e_score_correction_bias).topk(CHOICES, dim=-1).indices
        weights = scores.gather(1, index)
        return logits, weights / weights.sum(dim=-1, keepdim=True), index


class Block(nn.Module):
    """A norm, a router and experts, added to the input."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = Router(width, experts)
        self.experts = Experts(width, experts)
        self.logits: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x).flatten(0, -2)
        self.logits, weights, index = self.gate(hidden)
        return x + self.mix(hidden, index, weights).view(x.shape)

    def mix(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return what the experts make of the rows; tests alter it to compute as another system did."""
        mixed: Tensor = self.experts(hidden, index, weights)
        return mixed


class Mixture(nn.Module):
    """Embedding, blocks of experts, and a head."""

    def __init__(self, blocks: int = 2, width: int = WIDTH, experts: int = EXPERTS) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def auxiliary_loss(self) -> Tensor:
        """Return the balancing loss of the last forward: experts x sum(share of rows x mean probability), by block."""
        losses = []
        for block in self.blocks:
            shares = block.logits.softmax(dim=-1)
            chosen = F.one_hot(shares.topk(CHOICES, dim=-1).indices, shares.shape[-1]).sum(dim=1)
            losses.append(shares.shape[-1] * (chosen.to(shares).mean(dim=0) * shares.mean(dim=0)).sum())
        return torch.stack(losses).mean()


def build_mixture(dtype: torch.dtype = torch.float64, **options: Any) -> Mixture:
    """Return a mixture with the weights of seed 0."""
    torch.manual_seed(0)
    return Mixture(**options).to(dtype)


def token_rows(step: int, rows: int = 4, length: int = 6) -> Tensor:
    """Return token ids (rows, length) of a step."""
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(step))


def mixture_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the mean loss of the next tokens."""
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
