"""Weight gradients computed later than input gradients (Qi et al., "Zero Bubble Pipeline Parallelism", 2023)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from zeromesh.base.linear_arithmetic import Kept, columns_of, input_of, is_keeping, multiply
from zeromesh.base.substitution import is_linear


def postpone(model: nn.Module) -> None:
    """Let a model's linear layers, transposed ones as GPT-2's too, postpone weight gradients under ``keeping``."""
    # The stage before waits for input gradients, and nothing waits for weight gradients, which can fill idle time.
    # Other layers than linear ones are a small part of the time, and compute all gradients at once.
    for module in model.modules():
        # Layers with a forward of their own, as those that are split over tensor-parallel ranks, do so already.
        if is_linear(module) and "forward" not in vars(module):
            # Its arguments are copied with a copy of the model.
            module.forward = partial(_forward, module, module.forward)


def _forward(module: Any, plain: Callable[..., Tensor], *args: Tensor, **kwargs: Tensor) -> Tensor:
    return multiply(input_of(args, kwargs), columns_of(module)) if is_keeping() else plain(*args, **kwargs)


def roots_of(operands: Kept) -> list[Tensor]:
    """Return the roots from which autograd computes the weight gradients that are due."""
    return [token for token, ticket in operands if ticket.due is not None]
