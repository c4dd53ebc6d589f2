"""Batch normalisation by the statistics of the joint batch of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeromesh.comm.collectives import Group
from zeromesh.engine.joint_batch import gather_with_gradient


class JointBatch:
    """The joint batch that ranks compute on: who they are, and whether this rank's rows count."""

    def __init__(self, group: Group, shares: bool = True) -> None:
        self.group = group
        self.shares = shares  # False: statistics are of the rows of each rank
        self.probing = False
        self.counts = True  # False: this rank has no rows of its own, and computes along

    def take(self, counts: bool) -> None:
        """Note whether this rank has rows in the batch that comes."""
        self.counts = counts

    @contextmanager
    def without_statistics(self) -> Iterator[None]:
        """Let layers take their moving statistics in this context, in which parts of a batch are compared."""
        self.probing = True
        try:
            yield
        finally:
            self.probing = False


class JointMoments:
    """Mixed into the class of a Keras ``BatchNormalization``: mean and variance are those of the joint batch."""

    _joint_batch: JointBatch

    def _moments(self, inputs: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        joint = self._joint_batch
        if joint.probing:
            return self.moving_mean.value.to(inputs), self.moving_variance.value.to(inputs)  # type: ignore[attr-defined]
        mean, variance = super()._moments(inputs, mask)  # type: ignore[misc]
        if inputs.is_meta or joint.group.size == 1 or not joint.shares:
            return mean, variance
        elements = inputs.numel() / mean.numel() if mask is None else float(mask.sum())
        elements = elements if joint.counts else 0.0
        row = torch.cat([mean.reshape(-1), variance.reshape(-1), mean.new_tensor([elements])])
        rows = gather_with_gradient(row[None], joint.group.process_group)
        means, variances = rows[:, :-1].reshape(joint.group.size, 2, *mean.shape).unbind(1)
        shares = (rows[:, -1] / rows[:, -1].sum()).reshape(-1, *[1] * mean.ndim)
        joint_mean = (shares * means).sum(0)
        # The variance around the joint mean, without large squares that cancel.
        return joint_mean, (shares * (variances + (means - joint_mean) ** 2)).sum(0)
