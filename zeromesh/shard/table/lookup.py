"""Forward of an embedding whose rows are spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Of (ascending row numbers without duplicates, an error to tell the other ranks): the rows, a leaf.
Fetch = Callable[[torch.Tensor, Exception | None], torch.Tensor]


def lookup(module: Any, fetch: Fetch, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute the module's output from the rows that its indices name; arguments are those of its forward."""
    bag = isinstance(module, nn.EmbeddingBag)
    return (_bag if bag else _embedding)(module, fetch, name, *args, **kwargs)


def _embedding(module: Any, fetch: Fetch, name: str, input: torch.Tensor) -> torch.Tensor:
    ids, inverse = _distinct(input)
    rows = fetch(ids, _wrong(name, module.num_embeddings, input, None))
    return F.embedding(inverse.view(input.shape), rows, _place_of(module.padding_idx, ids))


def _bag(
    module: Any, fetch: Fetch, name: str, input: torch.Tensor, offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    ids, inverse = _distinct(input)
    rows = fetch(ids, _wrong(name, module.num_embeddings, input, offsets))
    if not rows.shape[0]:  # torch wants a row, also where no bag has one
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return F.embedding_bag(
        inverse.view(input.shape), rows, offsets, mode=module.mode, per_sample_weights=per_sample_weights,
        include_last_offset=module.include_last_offset, padding_idx=_place_of(module.padding_idx, ids),
    )  # fmt: skip


def _distinct(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if input.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices of an embedding are {input.dtype}; they must be int64 or int32")
    ids, inverse = torch.unique(input.long(), return_inverse=True)
    return ids, inverse


def _place_of(padding: int | None, ids: torch.Tensor) -> int | None:
    """Return the position of the padding index among ``ids``; None if it is not there."""
    if padding is None:
        return None
    at = (ids == padding).nonzero()
    return int(at) if at.numel() else None


def _wrong(name: str, rows: int, input: torch.Tensor, offsets: torch.Tensor | None) -> IndexError | None:
    """Return the error of the first index that is out of range; None if there is none."""
    if not input.numel() or (int(input.min()) >= 0 and int(input.max()) < rows):
        return None
    at = int(((input < 0) | (input >= rows)).flatten().nonzero()[0])
    value = int(input.flatten()[at])
    sample = at // input[0].numel() if input.ndim > 1 else at
    if offsets is not None:
        sample = int((offsets <= at).sum()) - 1
    return IndexError(
        f"index {value} of sample {sample} is out of range for {name}, which has {rows} rows: indices are 0 to "
        f"{rows - 1}; map unknown values to a row of their own, or make the table larger"
    )
