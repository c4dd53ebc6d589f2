"""Bytes of frozen weights: as they are, or in 4 and 8 bits as bitsandbytes and torchao keep them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from zeromesh.apps.plan.cost.cost import NONE, Divided, Frozen
from zeromesh.apps.train.train_settings import GROUP, Quantization
from zeromesh.base.quantized_layers import weight_of

BLOCK, BLOCK_OF_SCALES = 64, 256  # elements that share a scale in 4 bits of bitsandbytes, and such scales another one


class Packing(NamedTuple):
    """Form of a quantized weight."""

    element: float  # bytes
    scale: float  # bytes beside each group of elements
    group: int = 0  # elements; 0: a row of the matrix
    whole: bool = True  # scales are on every rank, since they are no parameters
    stacked: bool = False  # stacked weights of experts have this form, too


def packing_of(chosen: Quantization, width: int) -> Packing:
    """Return the form of weights that stand for numbers of ``width`` bytes."""
    if chosen.library == "torchao":
        # A zero point of one byte lies beside each scale of a group.
        return Packing(1.0, width, whole=False) if chosen.bits == 8 else Packing(1.0, width + 1, GROUP, whole=False)
    if chosen.bits == 8:
        return Packing(1.0, 4.0)
    scale = 4.0 if chosen.double is False else 1.0 + 4.0 / BLOCK_OF_SCALES
    return Packing(0.5, scale, BLOCK, stacked=chosen.stacked)


def packed_weights(model: nn.Module) -> set[int]:
    """Return the ``id`` of each frozen weight that a library would quantize: of linear layers but for the output's."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    ids = set()
    for module in model.modules():
        # Transformers has a class of its own for the linear layers of GPT-2.
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            weight = weight_of(module)
            if weight is not None and not weight.requires_grad and (output is None or weight is not output.weight):
                ids.add(id(weight))
    return ids


def frozen_of(parameter: torch.Tensor, width: int, share: Divided, root: bool, packing: Packing | None) -> Frozen:
    """Return one parameter's bytes.

    Args:
        parameter: without gradients.
        width: bytes of an element that is not quantized.
        share: the part of 1 that each tensor rank has.
        root: no unit of the engine has it, so that it stays gathered.
        packing: form of its elements; None: they are not quantized.
    """
    elements = parameter.numel()
    size, replicated = float(elements * width), 0.0
    if packing is not None:
        scales = packing.scale * elements / (packing.group or parameter.shape[-1])
        size, replicated = packing.element * elements, scales
        if not packing.whole:
            size, replicated = size + scales, 0.0
    sharded = share.times(size)
    unpacked = float(elements * width) if packing is not None else 0.0
    return Frozen(elements, sharded, sharded if root else NONE, replicated, unpacked, packed=unpacked)
