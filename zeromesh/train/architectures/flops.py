"""Operations per token: of the built-in decoder by a formula, of any model by counting.

The cost of a matrix product counts a multiplication and an addition as two operations; norms, activations and the
softmax are left out, as usual (Kaplan et al., "Scaling Laws for Neural Language Models", 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from zeromesh.config.train import ModelShape
from zeromesh.observe.operations import Operations
from zeromesh.train.architectures.decoder import Decoder, Sizes


def parameters(shape: ModelShape) -> int:
    """Return the number of parameters of a decoder. Tied ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape).parameters())


def multiplied_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that a token is multiplied with: all except those of embeddings.

    A tied embedding counts, since it is the output layer.
    """
    sizes = Sizes.of(shape)
    looked_up = (0 if sizes.tied else sizes.vocabulary) + (0 if sizes.variant.rotary else shape.sequence_length)
    return parameters(shape) - shape.hidden_size * looked_up


def training_flops_per_token(shape: ModelShape) -> float:
    """Return the operations of forward and backward per token of a full sequence, without recomputation.

    They are ``6 P + 12 L h s / 2``, with P the multiplied parameters. The products of attention are halved, because a
    token sees half of the others on average.
    """
    attention = 12.0 * shape.layers * shape.hidden_size * shape.sequence_length / 2
    return 6.0 * multiplied_parameters(shape) + attention


@dataclass(frozen=True)
class TokenCost:
    """Operations of training on one token.

    Attributes:
        operations: operations of forward and backward, without recomputation.
        how: origin of the number, as a part of a sentence.
    """

    operations: float
    how: str


def training_cost(model: nn.Module, inputs: Mapping[str, Any], tokens: int) -> TokenCost:
    """Return the operations per token of any model, with the work that frozen and tied parameters cause.

    The forward runs on the meta device: nothing is allocated, and the model does not change. A causal mask saves
    nothing: for the built-in decoder the result is ``6 P + 12 L h s``. If the forward cannot run there, because it
        depends on values,
    the result is ``6 x`` the trained parameters ``+ 4 x`` the frozen ones. This counts embeddings as products, and
    leaves attention out.

    Args:
        model: model on any device, before ``zeromesh.initialize``.
        inputs: keyword arguments of its forward; only shapes and dtypes of tensors matter.
        tokens: number of tokens in the inputs.
    """
    reason = ""
    for dtype in (None, torch.bfloat16):  # torch's products of experts run on the meta device in 16 bits only
        try:
            counted = training_operations(model, inputs, dtype)
        except Exception as error:
            reason = reason or (str(error) or type(error).__name__).splitlines()[0]
        else:
            return TokenCost((counted.forward + counted.backward) / tokens, "counted on the meta device")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    return TokenCost(6.0 * trained + 4.0 * frozen, f"from the number of parameters, since counting failed: {reason}")


def training_operations(model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype | None = None) -> Operations:
    """Count the operations of one forward and backward on the meta device.

    Args:
        model: as in ``training_cost``.
        inputs: as in ``training_cost``.
        dtype: dtype of all floating-point tensors; None keeps theirs.

    Raises:
        Exception: the forward fails on the meta device.
        ValueError: no output depends on a trained parameter.
    """
    state = {name: _meta(tensor, dtype) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    values = {name: _meta(value, dtype) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    with torch.enable_grad(), torch.device("meta"), Operations(model) as counted:
        outputs = [tensor for tensor in _losses(functional_call(model, state, kwargs=values)) if tensor.requires_grad]
        if not outputs:
            raise ValueError("no output of the model depends on a trained parameter")
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    return counted


def _meta(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype if tensor.is_floating_point() else None
    return torch.empty_like(tensor, device="meta", dtype=dtype, requires_grad=tensor.requires_grad)


def _losses(output: Any) -> Iterator[torch.Tensor]:
    """Yield the loss in the output of a model; all tensors, if it has no loss."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        yield loss
        return
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else (output,)
    )
    yield from (part for part in parts if isinstance(part, torch.Tensor))
