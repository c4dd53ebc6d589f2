"""How many parameters a decoder has, and what a token costs.

The cost of a matrix product counts a multiplication and an addition as two operations; norms, activations and the
softmax are left out, as usual (Kaplan et al., "Scaling Laws for Neural Language Models", 2020).
"""

from __future__ import annotations

from zeromesh.architectures.decoder import Sizes
from zeromesh.config.train import ModelShape


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
