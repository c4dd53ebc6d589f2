"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from zeromesh.horovod.gradients import allreduce
from zeromesh.horovod.operations import Sum
from zeromesh.horovod.start import size


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose mean and variance in training are those over all ranks; on any device.

    Inputs have at least two dimensions, ``(batch, num_features, ...)``; ranks may have batches of different sizes.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"the input has {input.dim()} dimensions, but needs at least 2: batch and features")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input."""
        batch_statistics = self.training or self.running_mean is None
        if not batch_statistics or size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.dim())]
        own = input.new_full([1], input.numel() / input.shape[1])
        sums = allreduce(torch.cat([input.sum(axes), own]), op=Sum)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = input - mean.view(shape)
        # A second pass: a difference of sums of squares loses digits.
        variance = allreduce(centred.square().sum(axes), op=Sum) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        result = centred * (variance + self.eps).rsqrt().view(shape)
        return result * self.weight.view(shape) + self.bias.view(shape) if self.affine else result

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running statistics towards those of the batch, as torch does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_(variance.to(self.running_var), share)
