"""Random numbers: the same on all ranks where they compute the same, and each rank its own where it has a part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RandomStreams:
    """Switch of a device's default generator between the stream of all ranks and this rank's own."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._module: Any = torch.random if device.type == "cpu" else torch.get_device_module(device)
        self._shared: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomStreams:
        """Return the same object: a copy of a model draws from the same generator."""
        return self

    def separate(self) -> None:
        """Let each rank draw its own numbers from here on; no effect if it does already."""
        if self._shared is not None:
            return
        # A number is drawn from the shared generator, so that it goes on alike on all ranks. The rank's own state
        # follows from the state before that, and the rank: so recomputation, which restores the shared state at its
        # beginning, restores the ranks' own as well.
        before = self._module.get_rng_state()
        torch.rand(1, device=self._device)
        self._shared = self._module.get_rng_state()
        digest = hashlib.sha256(before.numpy().tobytes() + self._rank.to_bytes(8, "big")).digest()
        self._module.manual_seed(int.from_bytes(digest[:7], "big"))

    def join(self) -> None:
        """Let all ranks draw the same numbers again."""
        if self._shared is not None:
            self._module.set_rng_state(self._shared)
            self._shared = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let each rank draw its own numbers in this context, if it does not already."""
        inside = self._shared is not None
        self.separate()
        try:
            yield
        finally:
            if not inside:
                self.join()


def drops(module: torch.nn.Module) -> bool:
    """Return whether a module, or one inside, says that it drops something out."""
    return any(
        isinstance(value, float) and value > 0
        for inner in module.modules()
        for name, value in (*vars(inner).items(), ("dropout", getattr(inner, "p", 0.0)))
        if "drop" in name
    )
