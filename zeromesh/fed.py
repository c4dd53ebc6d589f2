"""The size of the micro-batches that a model is given, beside the configured one."""

from __future__ import annotations

import logging
from typing import Any

from zeromesh.model.containers import tensors_of

_log = logging.getLogger("zeromesh")


class FedBatches:
    """Warns once where micro-batches have another size than the configuration says.

    Args:
        configured: samples per rank and micro-batch; None where the configuration says nothing about it.
        speaks: whether this rank is the one that warns.
    """

    def __init__(self, configured: int | None, speaks: bool = True) -> None:
        self._configured = configured if speaks else None
        self._was_small = False

    def look(self, inputs: Any) -> None:
        """Compare one micro-batch of training.

        A single smaller one is the last of a pass over the data: only the second in a row is warned of.

        Args:
            inputs: the model's arguments, in any containers.
        """
        if self._configured is None:
            return
        size = _size(inputs, self._configured)
        if size is None:
            return
        if size > self._configured or (size < self._configured and self._was_small):
            _log.warning(
                "the model is given %d samples at a time (the first dimension of its inputs), but "
                "train_micro_batch_size_per_gpu is %d; gradients are right, but samples are counted, and "
                "train_batch_size is, as configured: feed %d, or set train_micro_batch_size_per_gpu to %d",
                size,
                self._configured,
                self._configured,
                size,
            )
            self._configured = None
        self._was_small = self._configured is not None and size < self._configured


def _size(inputs: Any, configured: int) -> int | None:
    """Samples in a micro-batch: the size of the first dimension of all tensors; None where that cannot be told.

    It cannot where tensors differ in it, or the first one has a single dimension. Some models have the batch second, in
    (tokens, samples) or (tokens, samples, features): there a second dimension of the configured size is taken for it.
    """
    tensors = [tensor for tensor in tensors_of(inputs) if tensor.dim() > 0]
    if not tensors or tensors[0].dim() < 2:
        return None
    first = tensors[0]
    if configured in first.shape[: 1 if first.dim() == 2 and first.is_floating_point() else 2]:
        return configured
    sizes = {tensor.shape[0] for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 else None
