"""Sizes of a transformer, from which its cost follows by formula where no model is at hand to trace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a decoder, or of an encoder of the same form."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int = 0  # 0: as many as ``heads``
    width: int = 0  # of the MLP; 0: four times ``hidden``
    head_width: int = 0  # 0: ``hidden`` / ``heads``
    gated: bool = False  # three matrices in the MLP instead of two, as in Llama
    biases: bool = True  # of linear layers and norms; false for RMSNorm without biases, as in Llama
    tied: bool = True  # the output layer is the embedding
    positions: int = 0  # learned ones; 0: none, as with rotary embeddings
    dropout: bool = False  # masks of dropout are kept for the backward
    fused_attention: bool = True  # scores are not kept for the backward
    name: str = "transformer"
