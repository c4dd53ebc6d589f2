"""How numbers are written on a slow link: as they are, in 16 bits, or in 8 bits with one scale for each block.

An encoded message is one 1-D tensor. Blocks whose numbers are not all finite decode to NaN, so that an overflow is seen
by who receives it. Source of the block format: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022;
of its use between nodes: Wang et al., "ZeRO++", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 256
"""Numbers that share one scale."""

_SCALE_BYTES = 4


@dataclass(frozen=True)
class Format:
    """One way to write a vector of floating-point numbers.

    Attributes:
        name: as in the configuration.
        bytes_for: bytes of a message of so many elements.
        encode: a vector, shape ``(n,)``, to a message.
        decode: a message into a vector, shape ``(n,)``, of any floating-point dtype.
        narrows: dtypes of at least so many bytes are written in fewer; others travel as they are.
    """

    name: str
    bytes_for: Callable[[int], int]
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.Tensor], None]
    narrows: int

    def shortens(self, dtype: torch.dtype) -> bool:
        """Whether vectors of this dtype become shorter."""
        return dtype.is_floating_point and dtype.itemsize >= self.narrows


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _encode_blocks(vector: torch.Tensor) -> torch.Tensor:
    """Round to nearest multiples of each block's largest magnitude / 127."""
    elements, blocks = vector.numel(), _blocks(vector.numel())
    message = torch.empty(blocks * (BLOCK + _SCALE_BYTES), dtype=torch.uint8, device=vector.device)
    rows = torch.zeros(blocks, BLOCK, dtype=torch.float32, device=vector.device)
    rows.view(-1)[:elements].copy_(vector)
    scales = rows.abs().amax(1, keepdim=True).div_(127)
    rows.div_(scales.where(scales > 0, 1.0)).round_().clamp_(-127, 127)  # the scale of denormal numbers is inexact
    # What is not finite has no integer; its scale is not finite either, which is what is told.
    numbers, written = message[: blocks * BLOCK].view(torch.int8), message[blocks * BLOCK :].view(torch.float32)
    numbers.copy_(rows.nan_to_num_(0.0, 0.0, 0.0).view(-1))
    written.copy_(scales.view(-1))
    return message


def _decode_blocks(message: torch.Tensor, vector: torch.Tensor) -> None:
    elements, blocks = vector.numel(), _blocks(vector.numel())
    numbers, scales = message[: blocks * BLOCK].view(torch.int8), message[blocks * BLOCK :].view(torch.float32)
    rows = numbers.view(blocks, BLOCK).float().mul_(scales.where(scales.isfinite(), torch.nan)[:, None])
    vector.copy_(rows.view(-1)[:elements])


def _decode_16_bits(message: torch.Tensor, vector: torch.Tensor) -> None:
    vector.copy_(message.view(torch.bfloat16))


FORMATS: dict[str, Format] = {
    "16bit": Format(
        "16bit",
        lambda elements: 2 * elements,
        lambda vector: vector.to(torch.bfloat16).view(torch.uint8),
        _decode_16_bits,
        narrows=4,
    ),
    "8bit": Format(
        "8bit",
        lambda elements: _blocks(elements) * (BLOCK + _SCALE_BYTES),
        _encode_blocks,
        _decode_blocks,
        narrows=2,
    ),
}
"""By their names in the configuration. Where there is none, numbers travel as they are."""
