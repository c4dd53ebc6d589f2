"""Computations over the joint batch of all ranks: a gather with gradients, and synchronised batch norm.

Both run on any device. ``torch.nn.SyncBatchNorm`` has no kernel for CPU tensors, and raises there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from zeromesh.comm.collectives import all_gather, reduce_scatter
from zeromesh.comm.messages import gather_json


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        result = tensor.new_empty(dist.get_world_size(group) * len(tensor), *tensor.shape[1:])
        all_gather(result, tensor.contiguous(), group=group)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        local_gradient = gradient.new_empty(len(gradient) // dist.get_world_size(context.group), *gradient.shape[1:])
        reduce_scatter(local_gradient, gradient.contiguous(), group=context.group)
        return local_gradient, None


def gather_with_gradient(tensor: torch.Tensor, process_group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the tensors of all ranks, joined along their first dimension in the order of the ranks. Collective.

    The gradient of a rank's tensor is the sum of what all ranks make of it, so that a mean over ranks of losses over
    the joint batch has the gradient that it has in one process. Ranks must call ``backward`` alike.

    Args:
        tensor: (n, ...) of one shape and dtype on all ranks; at least one dimension.
        process_group: the ranks that take part; None: all.

    Returns:
        (ranks x n, ...); without a process group that has been started, the tensor itself.

    Raises:
        ValueError: the tensor has no dimension, or ranks have tensors of different shapes or dtypes; on every rank.
    """
    if tensor.dim() == 0:
        raise ValueError("a tensor without dimensions cannot be joined along its first one; pass tensor.view(1)")
    if not dist.is_initialized():
        return tensor
    _refuse_different(tensor, process_group)
    result: torch.Tensor = _Gather.apply(tensor, process_group)  # type: ignore[no-untyped-call]
    return result


def _refuse_different(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    # Backends take what has another size or dtype for what they expect, or end the process.
    description = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    ranks = dist.get_world_size(group)
    sums = torch.empty(ranks, dtype=torch.int64, device=tensor.device)
    all_gather(sums, torch.tensor([zlib.crc32(description.encode())], device=tensor.device), group=group)
    if bool((sums == sums[0]).all()):
        return
    every = gather_json(description, group)
    raise ValueError(
        f"ranks 0 to {ranks - 1} have tensors of different dtypes or shapes: {'; '.join(every)}; give all ranks "
        "batches of the same size (drop_last=True) and the same dtype"
    )


def joint_moments(
    mean: torch.Tensor, variance: torch.Tensor, count: float, gather: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean and biased variance of the joint batch of all ranks, and its number of values. Collective.

    Args:
        mean: of this rank's batch, of any shape; must be finite even if ``count`` is 0.
        variance: biased, of the same shape and dtype.
        count: number of values that each mean is taken over.
        gather: makes (ranks, n) of this rank's (n); the gradient of a row is the sum of all ranks' gradients of it.
    """
    rows = gather(torch.cat([mean.reshape(-1), variance.reshape(-1), mean.new_tensor([count])]))
    means, variances = rows[:, :-1].reshape(len(rows), 2, *mean.shape).unbind(1)
    total = rows[:, -1].sum()
    shares = (rows[:, -1] / total).reshape(-1, *[1] * mean.dim())
    joint = (shares * means).sum(0)
    # The variance around the joint mean, without large squares that cancel.
    return joint, (shares * (variances + (means - joint).square())).sum(0), total


def sync_batch_norm(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replace each batch norm in a module by one that takes its statistics over the batches of all ranks.

    Call it before ``initialize``. In training, outputs, gradients and running statistics then equal those of one
    process with the joint batch; ranks may have batches of different sizes. In evaluation nothing is exchanged.

    Args:
        module: the model; ``torch.nn.SyncBatchNorm`` modules are replaced too. Subclasses with a ``forward`` of their
            own stay as they are.
        process_group: the ranks that share statistics; None: all. With tensor or pipeline parallelism, name the ranks
            that have other samples.

    Returns:
        The same module; if it is a batch norm itself, the new one. Parameters, buffers and hooks stay the same objects.

    Raises:
        ValueError: a lazy batch norm has not seen a batch, so that its size is unknown.
    """
    if _is_replaced(module):
        return SynchronisedBatchNorm(module, process_group)
    # A layer that is used in several places stays one layer.
    replacements: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, part in parent._modules.items():
            if part is not None and _is_replaced(part):
                replacements.setdefault(part, SynchronisedBatchNorm(part, process_group))
                setattr(parent, name, replacements[part])
    return module


def _is_replaced(module: nn.Module) -> bool:
    if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return False
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(f"{type(module).__name__} has no size before its first batch; run the model on one first")
    return True


class SynchronisedBatchNorm(_BatchNorm):
    """Batch norm over the samples of all ranks; input (samples, channels, ...). Made by ``sync_batch_norm``."""

    def __init__(self, source: nn.Module, process_group: dist.ProcessGroup | None) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(source))
        self.process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of (samples, channels, ...), but it has {input.dim()} dimensions")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise over all dimensions but the second and, in training, over ranks."""
        tracked = self.running_mean is not None and self.running_var is not None
        if not dist.is_initialized() or not (self.training or not tracked):
            return super().forward(input)
        self._check_input_dim(input)
        # In 16-bit runs statistics are in fp32, as in torch.
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, variance, count = self._statistics(values)
        if self.training and tracked:
            self._track(mean.detach(), (variance * (count / (count - 1).clamp(min=1))).detach())
        shape = (1, -1, *(1 for _ in input.shape[2:]))
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        result = (values - mean.view(shape)) * scale.view(shape)
        if self.bias is not None:
            result = result + self.bias.view(shape)
        return result.to(input.dtype)

    def _statistics(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return mean and biased variance (channels), and the number of values per channel, over all ranks."""
        channels = values.transpose(0, 1).flatten(1)
        # Not ``mean``, which is NaN for a rank without samples.
        mean = channels.sum(1) / max(channels.shape[1], 1)
        variance = (channels - mean[:, None]).square().sum(1) / max(channels.shape[1], 1)
        gather = partial(gather_with_gradient, process_group=self.process_group)
        return joint_moments(mean, variance, channels.shape[1], lambda row: gather(row[None]))

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)
