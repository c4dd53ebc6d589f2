"""Micro-batches in nested containers: their dtype, their loss, and comparisons with other ranks and the settings."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeromesh.base.containers import tensors_of
from zeromesh.base.words import counted

_log = logging.getLogger("zeromesh")


class WithLoss(ABC):
    """A micro-batch that computes its loss itself; tensors in a dataclass, or another container, are moved."""

    @abstractmethod
    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return a scalar; ``model`` is called once, with whatever it takes."""


def loss_of(
    batch: Any,
    model: Callable[..., Any],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    in_pairs: bool = False,
) -> torch.Tensor:
    """Return the loss of one micro-batch, a scalar.

    Args:
        batch: ``(inputs, labels)`` with ``loss_fn``; else what the model takes: a mapping of keyword arguments, a tuple
            or list of positional ones, or a single tensor. Or one ``WithLoss``.
        model: is called with it.
        loss_fn: from the model's output and labels to the loss.
        in_pairs: the batch is ``(inputs, labels)`` also without ``loss_fn``, and inputs are one argument of the model.

    Raises:
        ValueError: the model's output has no loss, or one that is not a scalar.
    """
    if isinstance(batch, WithLoss):
        return check_loss(batch.loss(model), graph=False)
    if in_pairs or loss_fn is not None:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            whose = "a PipelineModule" if in_pairs else "an engine with loss_fn"
            length = f" of length {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise ValueError(
                f"a micro-batch is a {type(batch).__name__}{length}; those of {whose} are pairs of inputs and labels"
            )
        inputs, labels = batch
        if in_pairs:  # DeepSpeed's layers are given tuples, and loaders make lists of them
            inputs, labels = (tuple(part) if isinstance(part, list) else part for part in batch)
        output = model(*inputs) if isinstance(inputs, tuple | list) and not in_pairs else model(inputs)
        return check_loss(output if loss_fn is None else loss_fn(output, labels), graph=False)
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    # The output of a Hugging Face model is a mapping, or with return_dict=False a tuple that begins with the loss.
    if isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = output[0] if isinstance(output, tuple | list) else getattr(output, "loss", output)
    if loss is None:
        raise ValueError("the model's output has no loss: put labels into the batch, or pass loss_fn to initialize")
    return check_loss(loss, graph=False)


def check_loss(loss: Any, graph: bool = True) -> torch.Tensor:
    """Return a loss; raise ValueError unless it is a scalar tensor, with ``graph`` one that can be differentiated."""
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"the loss is a {type(loss).__name__}, not a tensor; pass what the model's loss returned")
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(loss.shape)}; it must be a scalar: take the mean or the sum")
    if graph and not loss.requires_grad:
        raise ValueError(
            "the loss has no graph: it was computed under torch.no_grad(), detached, or depends on no trainable "
            "parameter"
        )
    return loss


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a floating-point tensor in a 16-bit dtype, finite where it was; any other tensor as it is."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    if dtype is torch.float16:  # the -1e9 of a mask must not become infinite
        limit = torch.finfo(dtype).max
        if tensor.dtype is torch.bfloat16:  # which has not this limit among its numbers
            tensor = tensor.float()
        tensor = torch.where(tensor.isinf(), tensor, tensor.clamp(-limit, limit))
    return tensor.to(dtype)


def checksum(value: Any, device: torch.device) -> torch.Tensor:
    """Return one float64 that depends on the integers in nested tensors, their order and their shapes."""
    sums = [torch.zeros((), dtype=torch.float64, device=device)]
    for tensor in tensors_of(value):
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.layout is torch.strided:
            entries = tensor.detach().reshape(-1).to(torch.float64)
            weights = torch.arange(1, len(entries) + 1, dtype=torch.float64, device=tensor.device)
            shape = sum(size * (place + 1) for place, size in enumerate(tensor.shape))
            # Whole numbers below 2**53 are summed exactly, in any order.
            # The weights make it depend on the order, the shape on what is padded, the last factor
            # on which tensor it is.
            sums.append((((entries * weights).sum() + shape) % 2**31 * (len(sums) % 97 + 1)).to(device))
    return torch.stack(sums).sum()


def require_same_inputs(ranks: Sequence[int], checksums: Sequence[float]) -> None:
    """Raise ValueError if ranks that share a batch were given different inputs."""
    other = next((n for n, checksum in enumerate(checksums) if checksum != checksums[0]), None)
    if other is not None:
        raise ValueError(
            f"ranks {ranks[0]} and {ranks[other]} share one batch, but their models were given different inputs "
            f"(checksums of the whole numbers in them: {checksums[0]:.17g} and {checksums[other]:.17g}); give them the "
            "same samples: share engine.data_rank of engine.data_size, also in a DistributedSampler "
            "(num_replicas=engine.data_size, rank=engine.data_rank), and let seeds depend on engine.data_rank only"
        )


class MicroBatchSizes:
    """A comparison of micro-batches with the configured size, which warns once.

    Args:
        size: samples per rank and micro-batch.
        warns: whether this rank is to warn; a size that nobody configured is not compared.
    """

    def __init__(self, size: int, warns: bool) -> None:
        self._size, self._configured = size, size if warns else None
        self._was_small = True  # so that a smaller one is warned of at once, if it is the first

    def compare(self, inputs: Any) -> int | None:
        """Compare one micro-batch of training, the model's arguments in any containers, and return its samples.

        None if it is unclear which dimension has the samples.
        """
        size = _samples_in(inputs, self._size)
        if self._configured is None or size is None:
            return size
        # A single smaller one later on is the last of a pass over the data: only two in a row are warned of.
        if size > self._configured or (size < self._configured and self._was_small):
            _log.warning(
                "the model is given %s at a time (the first dimension of its inputs), but "
                "train_micro_batch_size_per_gpu is %d. Gradients are right, but sample counts and learning-rate steps "
                "assume micro-batches of %d: feed %d, or set train_micro_batch_size_per_gpu to %d",
                counted(size, "sample"),
                self._configured,
                self._configured,
                self._configured,
                size,
            )
            self._configured = None
        self._was_small = self._configured is not None and size < self._configured
        return size


def tell_uneven(samples: Sequence[float], number: int) -> bool:
    """Warn if ranks computed on different numbers of samples at a time; return whether they did.

    ``samples`` are means over the forwards of update ``number``, by rank; 0 or NaN is not known.
    """
    sizes = {size: rank for rank, size in reversed([*enumerate(samples)]) if size > 0}
    if len(sizes) < 2:
        return False
    small, large = min(sizes), max(sizes)
    _log.warning(
        "in update %d rank %d computed on %g samples at a time, and rank %d on %g. Gradients are means over ranks, so "
        "a sample of the smaller micro-batch weighs %.3g times as much. Feed all ranks equally many samples, or sum "
        "the loss and divide it by the samples of all ranks, times engine.data_size",
        number,
        sizes[small],
        small,
        sizes[large],
        large,
        large / small,
    )
    return True


def _samples_in(inputs: Any, configured: int) -> int | None:
    """Return the samples in a micro-batch, the size of the first dimension of all tensors; None where it is unclear."""
    tensors = [tensor for tensor in tensors_of(inputs) if tensor.dim() > 0]
    # One dimension may be that of tokens, of a single sample.
    if not tensors or tensors[0].dim() < 2:
        return None
    first = tensors[0]
    # Some models have the batch second, in (tokens, samples) or (tokens, samples, features). Floats of two dimensions
    # are (samples, features).
    if configured in first.shape[: 1 if first.dim() == 2 and first.is_floating_point() else 2]:
        return configured
    sizes = {tensor.shape[0] for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 else None
