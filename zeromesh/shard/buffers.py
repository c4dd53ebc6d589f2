"""Buffers that are part of a model's state, such as running statistics: the same on all ranks after every update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zeromesh.dist.mesh import Mesh


class Buffers:
    """Notices which buffers changed and gives every rank the first rank's values, as DistributedDataParallel does."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._mesh = mesh
        self._shared: list[tuple[int, int]] = []
        self.share([True] * len(self.state()))

    def state(self) -> list[torch.Tensor]:
        """The buffers that ``state_dict`` holds, in order of registration."""
        return [
            buffer
            for module in self._model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]

    def changed(self) -> list[bool]:
        """For each of ``state``, whether it may have changed on this rank since it was shared."""
        return [now != then for now, then in zip(self._versions(), self._shared, strict=True)]

    def share(self, changed: Sequence[bool]) -> None:
        """Give every rank the first rank's values of these; all ranks pass the same."""
        for buffer, flag in zip(self.state(), changed, strict=True):
            if flag:
                self._mesh.group("world").broadcast(buffer)
        self._shared = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        """For each of ``state``, what is another once it may have changed."""
        # A module's buffers go together: torch's batch normalisation counts batches in one, but its kernels do not
        # always mark the averages as changed.
        modules = [list(module.buffers(recurse=False)) for module in self._model.modules()]
        totals = {id(buffer): sum(b._version for b in buffers) for buffers in modules for buffer in buffers}
        return [(id(buffer), totals[id(buffer)]) for buffer in self.state()]
