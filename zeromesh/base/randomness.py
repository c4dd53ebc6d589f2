"""The state from which random numbers are drawn, on the CPU and on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def _generators(device: torch.device) -> list[Any]:
    """Return getters and setters of the states of default generators: the CPU's, and the device's own."""
    # A forward on a device may draw on the CPU as well.
    return [torch.random] if device.type == "cpu" else [torch.random, torch.get_device_module(device)]


def random_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the present state, for ``drawing_from``."""
    return tuple(generator.get_rng_state() for generator in _generators(device))


def set_random_state(state: Sequence[torch.Tensor], device: torch.device) -> None:
    """Draw the random numbers that came after ``state`` from here on."""
    for generator, generator_state in zip(_generators(device), state, strict=True):
        generator.set_rng_state(generator_state)


@contextmanager
def drawing_from(state: Sequence[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Draw the random numbers that came after ``state`` in this context; after it, as if none had been drawn."""
    before = random_state(device)
    try:
        set_random_state(state, device)
        yield
    finally:
        set_random_state(before, device)
