"""Batch normalisation by the statistics of the joint batch of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from zeromesh.comm.collectives import Group


class JointBatch:
    """The joint batch that ranks compute on: who they are, and whether this rank's rows count."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.counts = True  # False: this rank has no rows of its own, and computes along

    def take(self, counts: bool) -> None:
        """Note whether this rank has rows in the batch that comes."""
        self.counts = counts


class _Exchange(torch.autograd.Function):
    """Rows of all ranks; the gradient of a row is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, row: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return group.exchange(row.detach()).to(row.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        every = ctx.group.exchange(gradients[0].reshape(-1).contiguous()).to(gradients[0].device)
        return every.reshape(ctx.group.size, *gradients[0].shape).sum(0)[ctx.group.rank], None


class JointMoments:
    """Mixed into the class of a Keras ``BatchNormalization``: mean and variance are those of the joint batch."""

    _joint_batch: JointBatch

    def _moments(self, inputs: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        mean, variance = super()._moments(inputs, mask)  # type: ignore[misc]
        joint = self._joint_batch
        if inputs.is_meta or joint.group.size == 1:
            return mean, variance
        elements = inputs.numel() / mean.numel() if mask is None else float(mask.sum())
        elements = elements if joint.counts else 0.0
        row = torch.cat([mean.reshape(-1), variance.reshape(-1), mean.new_tensor([elements])])
        rows: torch.Tensor = _Exchange.apply(row, joint.group)  # type: ignore[no-untyped-call]
        means, variances = rows[:, :-1].reshape(joint.group.size, 2, *mean.shape).unbind(1)
        shares = (rows[:, -1] / rows[:, -1].sum()).reshape(-1, *[1] * mean.ndim)
        whole = (shares * means).sum(0)
        # The variance around the joint mean, without large squares that cancel.
        return whole, (shares * (variances + (means - whole) ** 2)).sum(0)
