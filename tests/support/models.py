"""Small models of several tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Block(nn.Module):
    """Two layers and what goes past them: (..., width) -> the same."""

    def __init__(self, width: int, inner: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner or 2 * width, bias)
        self.down = nn.Linear(inner or 2 * width, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks after an embedding, and a head after them if there is one: tokens -> loss."""

    def __init__(self, words: int, width: int, inners: Sequence[int], bias: bool = True, head: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, inner, bias) for inner in inners)
        self.head = nn.Linear(width, head) if head else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return (x if self.head is None else self.head(x)).float().square().mean()
