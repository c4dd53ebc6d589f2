"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import torch

from zeromesh.engine.joint_batch import SynchronisedBatchNorm
from zeromesh.horovod.horovod_start import rank, size
from zeromesh.horovod.operations import Sum, allreduce


class SyncBatchNorm(SynchronisedBatchNorm):
    """Batch normalisation whose mean and variance in training are those over all ranks; on any device.

    Inputs are ``(batch, num_features, ...)``; ranks may have batches of different sizes, and ranks that have joined
    have none. The arguments are those of ``torch.nn.BatchNorm1d``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(torch.nn.BatchNorm1d(num_features, eps, momentum, affine, track_running_stats), None)

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, whose gradients add up; those of ranks that have joined are zeros."""
        mask = torch.arange(size(), device=row.device) == rank()
        result: torch.Tensor = allreduce(torch.where(mask[:, None], row, 0.0), op=Sum)
        return result


__all__ = ["SyncBatchNorm"]
