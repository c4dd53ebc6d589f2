"""Dtypes of a run: one frozen policy, read by every part."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossScale:
    """Scaling of the loss in fp16 (Micikevicius et al., "Mixed Precision Training", 2018)."""

    static: float | None = None  # a fixed scale; None is a dynamic one
    initial_power: int = 16  # of 2
    window: int = 1000  # good steps after which the scale doubles
    hysteresis: int = 2  # overflows until it halves
    consecutive_hysteresis: bool = False  # a good step, and not only a doubling, forgives earlier overflows
    minimum: float = 1.0


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run. None means: what the model's parameters have."""

    compute: torch.dtype | None = None  # parameters and activations; a 16-bit one keeps fp32 masters for the update
    communicate: torch.dtype | None = None  # gradients on the wire
    accumulate: torch.dtype | None = None  # sums of gradients; None is fp32 for 16-bit parameters
    buffers: torch.dtype | None = None  # floating-point buffers; None keeps the dtype of each, in 16-bit runs too
    # Patterns of names of tensors that have fp32 in a 16-bit run; None: those that the model itself names.
    keep_fp32: tuple[str, ...] | None = None
    autocast: torch.dtype | None = None  # the forward runs under ``torch.autocast``, parameters unchanged
    narrow_masters: bool = False  # no fp32 masters beside 16-bit parameters: these are updated, with states like them
    cast_inputs: bool = True  # floating-point inputs of the model are cast to ``compute``
    loss_scale: LossScale | None = None  # None where the loss is not scaled
