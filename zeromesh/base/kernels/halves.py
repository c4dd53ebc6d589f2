"""An fp32 master as two halves of 16 bits, one of which is the parameter: 4 bytes for both, and no bit lost.

The upper half is the master in bf16, to nearest; the remainder is what the bits of the master are above or below it::

    bits = (upper << 16) + remainder        -32768 <= remainder <= 32767

So each master that is a number has a pair of halves of its own.
"""

from __future__ import annotations

import torch


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper half in bf16 and the remainder in int16 of fp32 numbers, new and of their shape."""
    bits = master.view(torch.int32)
    # A NaN stays a NaN with its sign and the upper bits of its payload. The lower ones go: rounding could carry them on
    # to zero, or leave infinity.
    bits = torch.where(master.isnan(), (bits | 0x400000) & -0x10000, bits)
    # A tie, as far from one bf16 number as from the next, goes to the one farther from zero. To nearest even it could
    # not go: 65,537 masters have the same even neighbour then, and 16 bits tell 65,536 apart. So the parameter is
    # `master.to(torch.bfloat16)` but for half of the ties.
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join(upper: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers, new, of an upper half in bf16 and a remainder in int16, of the same shape."""
    return ((upper.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)
