"""Batch normalisation by the statistics of the joint batch of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from zeromesh.comm.collectives import Group
from zeromesh.engine.joint_batch import gather_with_gradient, joint_moments


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
        gather = partial(gather_with_gradient, process_group=joint.group.process_group)
        return joint_moments(mean, variance, elements, lambda row: gather(row[None]))[:2]
