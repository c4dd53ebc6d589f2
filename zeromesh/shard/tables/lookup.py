"""Forward of an embedding whose rows are spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn

from zeromesh.shard.tables.lookups import Lookups, TableCall
from zeromesh.shard.tables.table import Table


def forward_of(module: Any, lookups: Lookups, table: Table) -> Callable[..., torch.Tensor]:
    """Return a forward for the module, which may outlive the lookups and the table."""
    # Here, as this import takes a second, which only models with tables pay.
    disabled: Callable[..., torch.Tensor] = torch.compiler.disable(look_up)
    weak_lookups, weak_table = ref(lookups), ref(table)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        # A compiled model gets ordinary tensors: it asks here, outside of what is disabled for the compiler.
        return disabled(module, weak_lookups(), weak_table(), torch.compiler.is_compiling(), *args, **kwargs)

    return forward


def look_up(
    module: Any, lookups: Lookups | None, table: Table | None, at_once: bool, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return the module's output from the rows that its indices name; arguments are those of its forward."""
    if lookups is None or table is None:
        raise RuntimeError("the engine that has the rows of this table is gone; keep the engine as long as the model")
    # Of torch.func.functional_call, or of a copy of the model.
    other = module.weight is not table.flat.parameters[0]
    # Inside GatheredParameters ranks may generate texts of different lengths.
    gathered = bool(table.flat.unbound) and not torch.is_grad_enabled() and module.max_norm is None
    if other or gathered:
        output: torch.Tensor = type(module).forward(module, *args, **kwargs)
        return output
    bag = isinstance(module, nn.EmbeddingBag)
    call = (_bag if bag else _embedding)(module, table.name, *args, **kwargs)
    at_once = at_once or (bag and module.mode == "max")  # its graph depends on the rows
    # Copies of rows are shortened together, so in the order of calls, which is the same for all copies.
    at_once = at_once or (module.max_norm is not None and table.mesh.replicate.size > 1)
    return lookups.look_up(table, call, at_once)


def _embedding(module: Any, name: str, input: torch.Tensor) -> TableCall:
    ids, inverse = _distinct(input)
    padding, shape = _place_of(module.padding_idx, ids), input.shape

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(inverse.view(shape), rows, padding)

    return TableCall(ids, compute, compute, _wrong(name, module.num_embeddings, input, None))


def _bag(
    module: Any, name: str, input: torch.Tensor, offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
) -> TableCall:  # fmt: skip
    ids, inverse = _distinct(input)
    padding, shape = _place_of(module.padding_idx, ids), input.shape

    def compute(offsets: torch.Tensor | None, weights: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        if not rows.shape[0]:  # torch wants a row, also where no bag has one
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return F.embedding_bag(
            inverse.view(shape), rows, offsets, mode=module.mode, per_sample_weights=weights,
            include_last_offset=module.include_last_offset, padding_idx=padding,
        )  # fmt: skip

    first, second = (None if tensor is None else tensor.detach().clone() for tensor in (offsets, per_sample_weights))
    failure = _wrong(name, module.num_embeddings, input, offsets)
    return TableCall(ids, partial(compute, offsets, per_sample_weights), partial(compute, first, second), failure)


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
