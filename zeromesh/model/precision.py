"""Dtypes of a run: one frozen policy, read by every part."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossScale:
    """Scaling of the loss in fp16 (Micikevicius et al., "Mixed Precision Training", 2018).

    ``static`` is a fixed scale, or None for a dynamic one that starts at ``2 ** initial_power``, doubles after
    ``window`` good steps and halves on an overflow, once ``hysteresis`` overflows have been used up.
    """

    static: float | None = None
    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. None means: what the model's parameters have.

    Attributes:
        compute: dtype of parameters and activations; a 16-bit one keeps an fp32 master for the update.
        communicate: dtype of gradients on the wire; None is the parameters' dtype.
        accumulate: dtype in which gradients are summed and kept; None is fp32 for 16-bit parameters,
            else the parameters' dtype.
        buffers: dtype of floating-point buffers; None keeps the dtype of each, in 16-bit runs too.
        autocast: run the forward under ``torch.autocast`` with this dtype, parameters unchanged.
        cast_inputs: cast floating-point inputs of the model to ``compute``.
        loss_scale: the fp16 loss scale; None where the loss is not scaled.
    """

    compute: torch.dtype | None = None
    communicate: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    buffers: torch.dtype | None = None
    autocast: torch.dtype | None = None
    cast_inputs: bool = True
    loss_scale: LossScale | None = None
