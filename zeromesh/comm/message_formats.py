"""Compressed formats for messages between nodes: bfloat16, or 8-bit integers with one scale for each block.

The block format is that of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022; its use between nodes
is that of Wang et al., "ZeRO++", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 256  # consecutive elements that share one fp32 scale: 1.6 % more bytes, and one outlier spoils few others

_SCALE_BYTES = 4


@dataclass(frozen=True)
class Format:
    """Encoding of a vector of floating-point numbers; a message is one 1-D uint8 tensor."""

    name: str  # in the configuration
    bytes_for: Callable[[int], int]  # size in bytes of the message of so many elements
    encode: Callable[[torch.Tensor], torch.Tensor]  # from a vector of shape (n,)
    decode: Callable[[torch.Tensor, torch.Tensor], object]  # from a message into a vector of any floating-point dtype
    narrows: int  # smallest element size, in bytes, that is compressed; vectors of smaller ones are sent unchanged

    def shortens(self, dtype: torch.dtype) -> bool:
        """Return whether this format makes vectors of ``dtype`` shorter."""
        return dtype.is_floating_point and dtype.itemsize >= self.narrows


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _encode_blocks(vector: torch.Tensor) -> torch.Tensor:
    """Round each element to the nearest multiple of its block's scale, the block's largest magnitude / 127."""
    elements, blocks = vector.numel(), _blocks(vector.numel())
    message = torch.empty(blocks * (BLOCK + _SCALE_BYTES), dtype=torch.uint8, device=vector.device)
    rows = torch.zeros(blocks, BLOCK, dtype=torch.float32, device=vector.device)
    rows.view(-1)[:elements].copy_(vector)
    scales = rows.abs().amax(1, keepdim=True).div_(127)
    rows.div_(scales.where(scales > 0, 1.0)).round_().clamp_(-127, 127)  # the scale of denormal numbers is inexact
    # A non-finite element has no integer value. It is sent as 0; the block's scale is then non-finite too and tells it.
    numbers, written = message[: blocks * BLOCK].view(torch.int8), message[blocks * BLOCK :].view(torch.float32)
    numbers.copy_(rows.nan_to_num_(0.0, 0.0, 0.0).view(-1))
    written.copy_(scales.view(-1))
    return message


def _decode_blocks(message: torch.Tensor, vector: torch.Tensor) -> None:
    elements, blocks = vector.numel(), _blocks(vector.numel())
    numbers, scales = message[: blocks * BLOCK].view(torch.int8), message[blocks * BLOCK :].view(torch.float32)
    # A block with a non-finite number decodes to NaN, so that receivers see an overflow.
    rows = numbers.view(blocks, BLOCK).float().mul_(scales.where(scales.isfinite(), torch.nan)[:, None])
    vector.copy_(rows.view(-1)[:elements])


FORMATS: dict[str, Format] = {
    "16bit": Format(
        "16bit",
        lambda elements: 2 * elements,
        lambda vector: vector.to(torch.bfloat16).view(torch.uint8),
        lambda message, vector: vector.copy_(message.view(torch.bfloat16)),
        narrows=4,
    ),
    "8bit": Format(
        "8bit", lambda elements: _blocks(elements) * (BLOCK + _SCALE_BYTES), _encode_blocks, _decode_blocks, narrows=2
    ),
}
"""Formats by their names in the configuration."""
