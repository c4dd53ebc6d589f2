"""Attributes of the returned optimizer that programs written for DeepSpeed read."""

from __future__ import annotations

from torch.optim import Optimizer


def answer(optimizer: Optimizer | None, scale: float, overflow: bool) -> None:
    """Let ``optimizer.cur_scale``, ``.loss_scale`` and ``.overflow`` tell how the last update went.

    An attribute that the optimizer's own class has is left alone.

    Args:
        optimizer: what ``initialize`` returned.
        scale: the loss scale of the next backward; 1 where the loss is not scaled.
        overflow: whether the last update was skipped, as a gradient was not finite.
    """
    for name, value in (("cur_scale", scale), ("loss_scale", scale), ("overflow", overflow)):
        if optimizer is not None and not hasattr(type(optimizer), name):
            setattr(optimizer, name, value)
