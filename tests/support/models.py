"""Small models of several tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

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


class Parted(nn.Module):
    """A linear layer, and a part behind it that what goes past them is added to: (..., width) -> the same."""

    def __init__(self, width: int, part: nn.Module) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(width, width), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(self.linear(x))


class Layers(nn.Module):
    """Blocks that a loop calls one after the other, and a head after them if there is one: (..., width) -> loss."""

    def __init__(self, blocks: Iterable[nn.Module], head: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x if self.head is None else self.head(x)).square().mean()


def next_token_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of a Hugging Face model in its own dtype: the one that it computes itself is in fp32."""
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
