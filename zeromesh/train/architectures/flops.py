"""Parameters and operations per token: of our decoder by a formula, of any model by counting.

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
from zeromesh.train.architectures.decoder import Sizes


def parameters(shape: ModelShape) -> int:
    """Number of parameters of a decoder; tied ones count once."""
    sizes = Sizes(shape)
    hidden, kv = shape.hidden_size, sizes.kv_heads * sizes.head_width
    attention = hidden * (hidden + kv + kv) + hidden * hidden
    mlp = (3 if sizes.variant.gated else 2) * hidden * sizes.mlp
    biases = (hidden + kv + kv + hidden + sizes.mlp + hidden) if sizes.variant.bias else 0
    norm = 2 * hidden if sizes.variant.bias else hidden
    embedded = sizes.vocabulary * (1 if sizes.tied else 2) + (0 if sizes.variant.rotary else shape.sequence_length)
    return shape.layers * (attention + mlp + biases + 2 * norm) + norm + hidden * embedded


def multiplied_parameters(shape: ModelShape) -> int:
    """Parameters that take part in a matrix product for every token: all but those that are only looked up.

    A tied embedding counts once, for the output layer.
    """
    sizes = Sizes(shape)
    looked_up = (0 if sizes.tied else sizes.vocabulary) + (0 if sizes.variant.rotary else shape.sequence_length)
    return parameters(shape) - shape.hidden_size * looked_up


def training_flops_per_token(shape: ModelShape) -> float:
    """Operations of forward and backward for one token of a full sequence, without recomputation.

    ``6 P + 12 L h s / 2``, with P the multiplied parameters, and the attention's products halved because a causal
    mask lets a token see half of the others on average.
    """
    attention = 12.0 * shape.layers * shape.hidden_size * shape.sequence_length / 2
    return 6.0 * multiplied_parameters(shape) + attention


@dataclass(frozen=True)
class TokenCost:
    """Operations of training on one token.

    Attributes:
        operations: of forward and backward, without recomputation.
        how: where the number is from, as a part of a sentence.
    """

    operations: float
    how: str


def training_cost(model: nn.Module, inputs: Mapping[str, Any], tokens: int) -> TokenCost:
    """Return the operations per token of any model; frozen and tied parameters count for what they do.

    The model computes on the meta device: nothing is allocated, and it stays as it is. A causal mask leaves nothing
    out: of our decoder this is ``6 P + 12 L h s``. Where the model cannot compute there, as its flow depends on values,
    it is ``6 x`` the trained parameters ``+ 4 x`` the frozen ones, which counts embeddings as if they were multiplied,
    and attention not at all.

    Args:
        model: on any device, before ``zeromesh.initialize``.
        inputs: keyword arguments of its forward; of tensors only shape and dtype matter.
        tokens: in these inputs.
    """
    reason = ""
    for dtype in (None, torch.bfloat16):  # products of experts can do without values in 16 bits only
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
    """The operations of one forward and backward, counted on the meta device; see ``training_cost``.

    Args:
        model: as there.
        inputs: as there.
        dtype: of all that is floating-point; None leaves it as it is.

    Raises:
        Exception: whatever the model's forward raises there, or ValueError: no output depends on a trained parameter.
    """
    state = {name: _meta(tensor, dtype) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    given = {name: _meta(value, dtype) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    with torch.enable_grad(), torch.device("meta"), Operations(model) as counted:
        outputs = [tensor for tensor in _losses(functional_call(model, state, kwargs=given)) if tensor.requires_grad]
        if not outputs:
            raise ValueError("no output of the model depends on a trained parameter")
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    return counted


def _meta(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype if tensor.is_floating_point() else None
    return torch.empty_like(tensor, device="meta", dtype=dtype, requires_grad=tensor.requires_grad)


def _losses(output: Any) -> Iterator[torch.Tensor]:
    """The loss that a model returned, under that name or alone; else all tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        yield loss
        return
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else (output,)
    )
    yield from (part for part in parts if isinstance(part, torch.Tensor))
