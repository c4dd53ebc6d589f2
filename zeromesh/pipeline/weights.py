"""Weight gradients that are computed later than input gradients, for which no other stage waits.

The backward of a linear layer then gives the gradient of its input only, and keeps what its weight's needs (Qi et al.,
"Zero Bubble Pipeline Parallelism", 2023). Of other layers all gradients are computed at once: they are a small part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.model.linear import Product, Ticket, WeightGradient

Kept = list[tuple[Tensor, Ticket]]
"""For each call of a layer, where the gradient of its weight can be asked for, and what it is made of."""


class Later:
    """Has a model's linear layers keep what their weights' gradients are made of.

    Args:
        model: its plain linear layers, and transposed ones as GPT-2's, get another forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept: Kept | None = None
        for module in model.modules():
            transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
            if (type(module) is nn.Linear or transposed) and "forward" not in vars(module):
                module.forward = self._forward(module, transposed, module.forward)

    @contextmanager
    def keeping(self, kept: Kept) -> Iterator[None]:
        """In this context weight gradients are not computed; where they can be asked for is added to ``kept``."""
        before, self._kept = self._kept, kept
        try:
            yield
        finally:
            self._kept = before

    def _forward(self, module: Any, transposed: bool, plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if self._kept is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
                return plain(x)
            weight, bias = module.weight, module.bias
            if not (x.requires_grad and weight.requires_grad):
                return plain(x)
            ticket = Ticket()
            token: Tensor = WeightGradient.apply(weight, bias, ticket, transposed, None)  # type: ignore[no-untyped-call]
            self._kept.append((token, ticket))
            fixed = weight.detach(), None if bias is None else bias.detach()
            y: Tensor = Product.apply(x, None, *fixed, ticket, transposed)  # type: ignore[no-untyped-call]
            return y

        return forward


def roots_of(kept: Kept) -> list[Tensor]:
    """What autograd is to start from to compute the weight gradients that are due."""
    return [token for token, ticket in kept if ticket.operands is not None]
