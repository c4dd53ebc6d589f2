"""Operations per token: of the built-in decoder by a formula, of any model by counting."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from zeromesh.apps.train.architectures.decoder import Decoder, Sizes
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.operation_counts import Operations, losses_of


def parameters(shape: ModelShape) -> int:
    """Return the number of parameters of a decoder. Tied ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape).parameters())


def multiplied_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that a token is multiplied with: all except those of embeddings."""
    sizes = Sizes.of(shape)
    # A tied embedding counts, since it is the output layer.
    looked_up = (0 if sizes.tied else sizes.vocabulary) + (0 if sizes.variant.rotary else shape.sequence_length)
    return parameters(shape) - shape.hidden_size * looked_up


def training_flops_per_token(shape: ModelShape) -> float:
    """Return ``6 P + 12 L h s / 2``, the operations of forward and backward per token, without recomputation."""
    # A product counts a multiplication and an addition as two operations; norms, activations and the softmax are left
    # out, as usual (Kaplan et al., "Scaling Laws for Neural Language Models", 2020).
    # The products of attention are halved, because a token sees half of the others on average.
    attention = 12.0 * shape.layers * shape.hidden_size * shape.sequence_length / 2
    return 6.0 * multiplied_parameters(shape) + attention


def training_cost(model: nn.Module, inputs: Mapping[str, Any], tokens: int) -> float:
    """Return the operations per token of any model, with the work that frozen and tied parameters cause.

    A causal mask saves nothing: for the built-in decoder the result is ``6 P + 12 L h s``. Recomputation is left out.

    Args:
        model: model on any device, before ``zeromesh.initialize``.
        inputs: keyword arguments of its forward; only shapes and dtypes of tensors matter.
        tokens: number of tokens in the inputs.
    """
    for dtype in (None, torch.bfloat16):  # torch's products of experts run on the meta device in 16 bits only
        with suppress(Exception):
            counted = training_operations(model, inputs, dtype)
            return (counted.forward + counted.backward) / tokens
    # The forward depends on values. This counts embeddings as products, and leaves attention out.
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    return 6.0 * trained + 4.0 * frozen


def training_operations(model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype | None = None) -> Operations:
    """Count the operations of a forward and backward on the meta device, with floating-point tensors in ``dtype``."""
    # functional_call leaves the model as it is.
    state = {name: _meta(tensor, dtype) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    values = {name: _meta(value, dtype) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    with torch.enable_grad(), torch.device("meta"), Operations(model) as counted:
        outputs = [tensor for tensor in losses_of(functional_call(model, state, kwargs=values)) if tensor.requires_grad]
        if not outputs:
            raise ValueError("no output of the model depends on a trained parameter")
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    return counted


def _meta(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype if tensor.is_floating_point() else None
    return torch.empty_like(tensor, device="meta", dtype=dtype, requires_grad=tensor.requires_grad)
