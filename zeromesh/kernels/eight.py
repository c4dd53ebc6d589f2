"""States in 8 bits: a byte for each element and an fp32 scale for each 256; about 2 bytes for both of Adam's moments.

Blocks count from the first element of a piece, wherever that lies. The scale of a block makes its largest element the
largest code. Block-wise scales are from Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022); the
code is another one, which takes neither table nor search (docs/adr/0018 compares them). A code is the upper bits of an
fp32 number from 1 on, less 1::

    signed   s eee ffff    ((1 + ffff / 16) * 2**eee - 1) * scale               first moments, momentum
    root       eee fffff   (((1 + fffff / 32) * 2**eee - 1) * scale) ** 2       second moments, Adagrad's sum

So numbers far above the scale are rounded relative to themselves, by up to a 16th or a 32nd, and those below it,
absolutely. Of states that are divided by, the root is kept, which is what is divided by. It has a code above 0 unless
it is 0.

A moment changes by less in a step than codes are apart, and rounded to nearest it would stay where it is. So what is
cut off decides, with noise, whether the code is the one below or above: the mean is right. The noise is a hash of the
number of the step and of the element in its piece, so that the same step gives the same bits.

A block with an element that is not finite is NaN as a whole, and stays so.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 256
"""Elements of a scale: ``EIGHT`` in native.h, where blocks of threads' work hold a whole number of these."""

_ROOTS = ("exp_avg_sq", "sum")
_ONE = 0x3F800000
_MASK = 0xFFFFFFFF


def scales_of(elements: int) -> int:
    """How many scales a state of so many elements has."""
    return -(-elements // BLOCK)


def rooted(name: str) -> bool:
    """Whether this state's root is what is kept; ``name`` is one of those in ``zeromesh.kernels.rules``."""
    return name in _ROOTS


def seed(number: int) -> int:
    """What the noise of a step, of which the first is 1, begins with: 32 bits."""
    return (number * 0x9E3779B97F4A7C15 >> 24) & _MASK


def encode(state: torch.Tensor, root: bool, number: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a state as the step of this number leaves it.

    Args:
        state: 1-D, fp32, on the CPU; for ``root`` not negative.
        root: see ``rooted``.
        number: of the step, of which the first is 1.
        first: the place in the piece of the state's first element, where it is not the whole of it.

    Returns:
        uint8 of the shape of ``state``, and fp32 of ``scales_of`` its elements: the kernel's bits.
    """
    elements = state.numel()
    values = torch.zeros(scales_of(elements) * BLOCK)
    # numpy's roots are rounded to nearest, as the kernel's; torch's on the CPU are not always
    values[:elements] = torch.from_numpy(np.sqrt(state.detach().numpy())) if root else state.detach()
    values = values.view(-1, BLOCK)
    shift, most, least = _parameters(root)
    largest = values.abs().amax(1, keepdim=True) if elements else values[:, :1]
    scale = torch.where(largest > 0, (largest / most).clamp(min=least), 0.0)
    scale[~largest.isfinite()] = torch.nan
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    size = (values.abs() * inverse + 1).clamp(max=most + 1)
    noise = _noise(number, first, values.numel()).view_as(values)
    noise = noise >> (32 - shift) if root else noise & ((1 << shift) - 1)
    codes = (size.view(torch.int32) - _ONE + noise) >> shift
    if root:
        codes = torch.where(values != 0, codes.clamp(min=1), codes)
    else:
        codes = codes | values.signbit().to(torch.int64) << 7
    codes = codes.masked_fill(scale.isnan(), 0)
    return codes.to(torch.uint8).flatten()[:elements], scale.flatten()


def decode(codes: torch.Tensor, scales: torch.Tensor, root: bool) -> torch.Tensor:
    """The state that ``encode`` made these of, rounded: fp32, of the shape of ``codes``."""
    shift, _, _ = _parameters(root)
    wide = codes.to(torch.int32)
    size = ((wide if root else wide & 127) << shift) + _ONE
    values = (size.view(torch.float32) - 1) * scales.repeat_interleave(BLOCK)[: codes.numel()]
    return values.square() if root else torch.where(wide > 127, -values, values)


def _parameters(root: bool) -> tuple[int, float, float]:
    """The bits of a float below those of a code, the largest number for a scale of 1, and the least scale."""
    return (18, 251.0, 2.0**-58) if root else (19, 247.0, 2.0**-100)


def _noise(number: int, first: int, elements: int) -> torch.Tensor:
    """32 bits for each element, in int64."""
    noise = (torch.arange(first, first + elements) * 0x9E3779B1 + seed(number)) & _MASK
    noise = ((noise ^ noise >> 15) * 0x85EBCA6B) & _MASK
    return noise ^ noise >> 13
