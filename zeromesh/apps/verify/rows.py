"""Micro-batches made from one batch of the user's: other samples for every step, share and micro-batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from zeromesh.base.containers import map_tensors, tensors_of

FLAGS = 2  # distinct values of a tensor, up to which it counts as a mask


@dataclass(frozen=True)
class SampleRows:
    """A batch of samples from which micro-batches are drawn."""

    batch: Any  # whatever the model takes: nested containers of tensors with the samples along dim 0
    count: int  # samples of a micro-batch
    ids: int = 0  # a bound for whole numbers, which are taken modulo it; 0: none. A smaller vocabulary needs it
    length: int = 0  # tokens of the samples in the second update; 0: as many as in the batch

    @property
    def samples(self) -> int:
        """Samples of the batch: the size of most tensors' first dimension."""
        sizes = Counter(tensor.shape[0] for tensor in tensors_of(self.batch) if tensor.ndim > 0)
        if not sizes:
            raise ValueError("the batch has no tensor with samples along its first dimension; pass one micro-batch")
        return sizes.most_common(1)[0][0]

    def at(self, step: int, share: int, micro_batch: int, dtype: torch.dtype | None = None) -> Any:
        """Return a micro-batch, the same wherever it is asked for; floating-point tensors in ``dtype``."""
        # Equal shares would hide a missing reduction: the mean of equal gradients is each of them.
        generator = torch.Generator().manual_seed((step * 1009 + share) * 1013 + micro_batch)
        samples = self.samples
        chosen = torch.randint(samples, (self.count,), generator=generator)
        drawn = map_tensors(self.batch, lambda tensor: self._drawn(tensor, chosen, samples, generator, dtype))
        if step != 1 or not self.length:
            return drawn
        return map_tensors(drawn, lambda tensor: tensor[:, : self.length] if tensor.ndim > 1 else tensor)

    def shorter(self, multiple: int) -> range:
        """Return shorter lengths of the samples for the second update, multiples of ``multiple``, the longest first.

        There are none unless all tensors with more than one dim have shape (samples, tokens), and some are ids.
        """
        tables = [tensor for tensor in tensors_of(self.batch) if tensor.ndim > 1]
        shapes = {tensor.shape[1:] for tensor in tables}
        if len(shapes) != 1 or tables[0].ndim > 2 or all(t.is_floating_point() or is_mask(t) for t in tables):
            return range(0)
        return range((tables[0].shape[1] - 1) // multiple * multiple, 0, -multiple)

    def _drawn(
        self,
        tensor: torch.Tensor,
        chosen: torch.Tensor,
        samples: int,
        generator: torch.Generator,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        tensor = tensor.detach().cpu()
        wide = tensor.is_floating_point() and dtype is not None
        if tensor.ndim == 0 or tensor.shape[0] != samples or tensor.is_complex():
            return tensor.to(dtype) if wide else tensor
        drawn = tensor[chosen].clone()
        if is_mask(tensor):
            pass
        elif tensor.is_floating_point():
            # Between 0.8 and 1 times the value: what lies in an interval around 0 stays there.
            drawn *= (1 - 0.2 * torch.rand(drawn.shape, generator=generator, dtype=torch.float64)).to(drawn.dtype)
        else:
            drawn = self._mixed(tensor, drawn, generator)
        return drawn.to(dtype) if wide else drawn

    def _mixed(self, tensor: torch.Tensor, drawn: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw whole numbers anew from those of the batch; negative ones, such as -100, stay where they are."""
        if tensor.ndim > 1 and bool((tensor[:, 1:] >= tensor[:, :-1]).all()) and bool((tensor == tensor[:1]).all()):
            return drawn  # positions
        numbers = tensor[tensor >= 0]
        if self.ids:
            numbers = numbers % self.ids
        places = drawn >= 0
        if len(numbers):
            drawn[places] = numbers[torch.randint(len(numbers), (int(places.sum()),), generator=generator)]
        return drawn


def is_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor says yes or no, as attention masks and token types do; samples' classes do not."""
    if tensor.dtype is torch.bool:
        return True
    return tensor.ndim > 1 and len(tensor.flatten()[: 1 << 16].unique()) <= FLAGS


def longest_sum(rows: SampleRows, shares: int, micro_batches: int, model: torch.nn.Module) -> int:
    """Return about how many terms the longest sum of an update has: entries of the batch, or of a matrix' side."""
    sides = max((max(p.shape, default=1) for p in model.parameters()), default=1)
    places = max((tensor[0].numel() for tensor in tensors_of(rows.batch) if tensor.ndim > 0), default=1)
    return max(sides, places * rows.count * shares * micro_batches)
