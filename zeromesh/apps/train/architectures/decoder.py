"""A decoder-only transformer. GPT and Llama-style models are two rows of a table.

Sources: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2); Touvron et al.,
"LLaMA: Open and Efficient Foundation Language Models", 2023; Su et al., "RoFormer", 2021 (rotary positions);
Shazeer, "GLU Variants Improve Transformer", 2020 (gated MLP); Ainslie et al., "GQA", 2023 (grouped queries).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromesh.apps.train.train_settings import ModelShape

IGNORE_LABEL = -100
"""Label of a token that is not in the loss."""


@dataclass(frozen=True)
class Variant:
    """Variant of a family of decoders."""

    norm: Callable[[int, float], nn.Module]  # from a width and an epsilon
    rotary: bool  # queries and keys are rotated by their positions; else an embedding of positions is learned
    gated: bool  # the MLP is down(silu(gate(x)) * up(x)); else it is down(gelu(up(x)))
    bias: bool  # of linear layers
    tied: bool  # the output layer is the token embedding by default
    mlp_width: Callable[[int], int]  # default, for a hidden width


def _plain_width(hidden: int) -> int:
    return 4 * hidden


def _gated_width(hidden: int) -> int:
    # Two thirds of 4 x hidden: three matrices then cost what two did. Multiples of 32 suit the tensor cores.
    return 32 * math.ceil(8 * hidden / 3 / 32)


VARIANTS: dict[str, Variant] = {
    "gpt": Variant(nn.LayerNorm, rotary=False, gated=False, bias=True, tied=True, mlp_width=_plain_width),
    "llama": Variant(nn.RMSNorm, rotary=True, gated=True, bias=False, tied=False, mlp_width=_gated_width),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder, in elements, with the defaults of its variant."""

    shape: ModelShape
    variant: Variant
    vocabulary: int
    head_width: int
    kv_heads: int
    mlp: int
    tied: bool

    @classmethod
    def of(cls, shape: ModelShape) -> Sizes:
        """Return the sizes of a shape; raise ValueError if the vocabulary has none or heads have an odd width."""
        variant, width = VARIANTS[shape.architecture], shape.hidden_size // shape.heads
        if shape.vocab_size is None:
            raise ValueError("model.vocab_size is open; set it to the number of entries of the tokenizer")
        if variant.rotary and width % 2:
            raise ValueError(
                f"model.hidden_size / model.heads = {width} must be even, because rotary positions turn pairs of "
                "elements; choose another number of heads"
            )
        return cls(
            shape=shape,
            variant=variant,
            vocabulary=shape.vocab_size,
            head_width=width,
            kv_heads=shape.kv_heads or shape.heads,
            mlp=shape.mlp_size or variant.mlp_width(shape.hidden_size),
            tied=variant.tied if shape.tie_embeddings is None else shape.tie_embeddings,
        )


def rotary_table(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions, each fp32, shape ``(*positions.shape, width / 2)``."""
    # In fp32 whatever the model computes in: large positions would round to the same angle.
    wavelength = base ** (torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angle = positions.float()[..., None] / wavelength
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs ``(x[i], x[i + width / 2])`` of each head by its position's angle. ``x``: (b, heads, s, width)."""
    cos, sin = (part.to(x.dtype) for part in rotary)
    # Halves and not neighbours, as transformers has them, so that weights can be exported.
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped queries. Input and output: (b, s, hidden)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, bias = sizes.shape.hidden_size, sizes.variant.bias
        self.heads, self.kv_heads, self.width = sizes.shape.heads, sizes.kv_heads, sizes.head_width
        self.query = nn.Linear(hidden, self.heads * self.width, bias=bias)
        self.key = nn.Linear(hidden, self.kv_heads * self.width, bias=bias)
        self.value = nn.Linear(hidden, self.kv_heads * self.width, bias=bias)
        self.output = nn.Linear(self.heads * self.width, hidden, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Tensor | None = None) -> Tensor:
        """Mix the positions; ``rotary`` as from ``rotary_table``, ``mask`` is bool, (b, 1, s, s)."""
        b, s, _ = x.shape
        query = self.query(x).view(b, s, self.heads, self.width).transpose(1, 2)
        key = self.key(x).view(b, s, self.kv_heads, self.width).transpose(1, 2)
        value = self.value(x).view(b, s, self.kv_heads, self.width).transpose(1, 2)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        grouped = self.kv_heads != self.heads
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        out: Tensor = self.output(mixed.transpose(1, 2).reshape(b, s, -1))
        return out


class MLP(nn.Module):
    """Position-wise half of a block. Input and output: (b, s, hidden)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, bias = sizes.shape.hidden_size, sizes.variant.bias
        self.gate = nn.Linear(hidden, sizes.mlp, bias=bias) if sizes.variant.gated else None
        self.up = nn.Linear(hidden, sizes.mlp, bias=bias)
        self.down = nn.Linear(sizes.mlp, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute each position on its own."""
        wide = F.gelu(self.up(x), approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(wide)
        return out


class Block(nn.Module):
    """Pre-norm transformer block. Input and output: (b, s, hidden)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, eps = sizes.shape.hidden_size, sizes.shape.norm_eps
        self.attention_norm = sizes.variant.norm(hidden, eps)
        self.attention = Attention(sizes)
        self.mlp_norm = sizes.variant.norm(hidden, eps)
        self.mlp = MLP(sizes)
        self.dropout = nn.Dropout(sizes.shape.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Tensor | None = None) -> Tensor:
        """Add the results of both halves to the residual stream ``x``."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary, mask))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class Decoder(nn.Module):
    """A decoder-only language model with the variant and sizes of ``shape``, which must have a vocabulary."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        sizes = Sizes.of(shape)
        hidden = shape.hidden_size
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, hidden)
        self.positions = None if sizes.variant.rotary else nn.Embedding(shape.sequence_length, hidden)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(shape.layers))
        self.norm = sizes.variant.norm(hidden, shape.norm_eps)
        self.head = nn.Linear(hidden, sizes.vocabulary, bias=False)  # neither GPT-2 nor Llama has a bias here
        if sizes.tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights in the order of the parameters, from a normal distribution; biases are zero."""
        # The sum of all layers in the residual stream keeps its variance if each adds less (GPT-2).
        std = self.sizes.shape.initializer_range
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
            elif name.endswith(("attention.output.weight", "mlp.down.weight")):
                nn.init.normal_(parameter, std=std / math.sqrt(2 * self.sizes.shape.layers))
            else:
                nn.init.normal_(parameter, std=std)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, or the mean loss.

        Args:
            tokens: token ids, int64 of shape (b, s), ``s <= sequence_length``.
            labels: the id that follows each token, int64 of shape (b, s), or ``IGNORE_LABEL``.
            positions: position of each token, int64 of shape (b, s), below ``sequence_length``; by default its place in
                the row.
            documents: number of each token's document, int64 of shape (b, s); tokens see their own document only. By
                default a row is one document.

        Returns:
            Without labels, the logits, shape (b, s, vocabulary). With labels, the mean cross entropy in nats per label,
            a scalar in fp32, or in fp64 for a model in fp64.

        Raises:
            ValueError: the sequence is longer than ``sequence_length``.
        """
        length, longest = tokens.shape[1], self.sizes.shape.sequence_length
        if length > longest:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's {longest}; shorten it")
        x = self.embedding(tokens)
        rotary = None
        if positions is None:
            positions = torch.arange(length, device=tokens.device)[None]
        if self.positions is None:
            rotary = rotary_table(positions[:, None], self.sizes.head_width, self.sizes.shape.rope_theta)
        else:
            x = x + self.positions(positions)
        x = self.dropout(x)
        # The mask of earlier tokens of the same document: bool, (b, 1, s, s).
        mask = None if documents is None else (documents[:, None, :, None] == documents[:, None, None]).tril()
        for block in self.blocks:
            x = block(x, rotary, mask)
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        # A sum over the vocabulary in 16 bits would lose most digits.
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.flatten(0, 1).to(wide), labels.flatten(), ignore_index=IGNORE_LABEL)
