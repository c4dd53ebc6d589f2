"""Stochastic rounding of optimizer states to bf16, by random bits that are a hash of an element's own numbers.

A state goes to one of the two bf16 numbers around it, to each as likely as it is near: right on the average, so that
changes smaller than half of a last place are not lost. The bits depend on the element's gradient and master and on the
number of the step, and on nothing else: any layout, cut, device and number of threads rounds alike, and no generator
has to be saved. ``random_bits`` and ``to_bfloat_randomly`` in lanes.h compute the same.
"""

from __future__ import annotations

import functools

import torch

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # of Wellons, "Prospecting for Hash Functions" (2018)
_EXPONENT = 0x7F800000
NARROW = torch.bfloat16  # what a state may rest in besides fp32


@functools.lru_cache(maxsize=256)
def salt_of(number: int) -> int:
    """Return what sets the random bits of a step apart from those of the others: a hash of its number, as an int32."""
    return int(random_bits(torch.tensor([number], dtype=torch.int32), torch.zeros(1), 0))


def random_bits(gradient: torch.Tensor, master: torch.Tensor, salt: int) -> torch.Tensor:
    """Return 32 random bits for each element, int32, of its fp32 gradient, scaled, and fp32 master before the step.

    The lower 16 are for the first state of a rule and the upper ones for the second.
    """
    bits = ((gradient.view(torch.int32) ^ salt) * _FIRST).bitwise_xor_(master.view(torch.int32))
    return _shifted(_shifted(bits, 15).mul_(_SECOND), 16)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return bits xor themselves, shifted to the right with zeros before them."""
    return (bits >> count).bitwise_and_((1 << 32 - count) - 1).bitwise_xor_(bits)


def round_randomly(state: torch.Tensor, random: torch.Tensor, index: int) -> torch.Tensor:
    """Round the state of an index in its rule, fp32, to bf16, new; infinities and NaNs stay what they are."""
    bits = state.view(torch.int32)
    rounded = bits + ((random >> 16 * index) & 0xFFFF)
    # The lower bits of a NaN go, which may be all that tells it from infinity.
    rounded = torch.where((bits & _EXPONENT) == _EXPONENT, bits | (state.isnan() * 0x400000), rounded)
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)
