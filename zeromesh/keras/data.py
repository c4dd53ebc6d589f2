"""Rows of a batch that belong to a rank, and batches of other libraries as torch tensors without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import torch
from torch.utils.dlpack import from_dlpack

from zeromesh.base.kernels.sums import checksum
from zeromesh.engine.engine import Engine


@dataclass(frozen=True)
class BatchRows:
    """Rows ``[start, stop)`` of a joint batch of ``total`` rows, of which each of ``ranks`` ranks has some."""

    start: int
    stop: int
    total: int
    ranks: int

    @classmethod
    def of(cls, batch: Any, rank: int, ranks: int) -> BatchRows:
        """Return the rows of ``rank``; the first ranks have one row more where they cannot be equal."""
        total = rows_in(batch)
        each, more = divmod(total, ranks)
        start = rank * each + min(rank, more)
        return cls(start, start + each + (rank < more), total, ranks)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    @property
    def weight(self) -> float:
        """Factor of this rank's mean loss that makes the mean over ranks that of the joint batch."""
        return self.count * self.ranks / self.total

    def cut(self, batch: Any) -> Any:
        """Return views of these rows of every tensor; a rank without rows gets the first one, to compute along."""
        start, stop = (self.start, self.stop) if self.count else (0, 1)
        return keras.tree.map_structure(lambda tensor: tensor if tensor is None else tensor[start:stop], batch)


def rows_in(batch: Any) -> int:
    """Return the number of rows of a batch; raise ValueError if its tensors differ in it, or there are none."""
    counts = {int(tensor.shape[0]) for tensor in keras.tree.flatten(batch) if tensor is not None}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            f"the tensors of a batch have {sorted(counts)} rows; pass a batch whose tensors have as many each"
        )
    return counts.pop()


def checksum_of(batch: Any) -> int:
    """Return a checksum of a batch's values."""
    tensors = [
        torch.as_tensor(tensor).detach().cpu().contiguous()
        for tensor in keras.tree.flatten(batch)
        if tensor is not None
    ]
    return hash(tuple(checksum(tensor) for tensor in tensors)) & (1 << 52) - 1  # exact in float64, too


def as_torch(value: Any) -> Any:
    """Return an array of any library as a torch tensor: by DLPack in the same memory, or as a copy where it must be."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "__dlpack__"):
        try:
            return from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError):  # read-only memory, a dtype that one side lacks
            pass
    return keras.ops.convert_to_tensor(value)


def batches(data: Iterable[Any], engine: Engine | None = None) -> Iterator[Any]:
    """Yield batches of a ``tf.data.Dataset`` or any iterable as torch tensors, without a copy where DLPack allows.

    Args:
        data: yields arrays in tuples, lists or dicts; each batch is the joint one, the same on all ranks.
        engine: yields this rank's rows only, on the engine's device; None: whole batches.

    Raises:
        ValueError: a batch has no rows for some rank, or its tensors differ in their number of rows.
    """
    for batch in data:
        tensors = keras.tree.map_structure(as_torch, batch, none_is_leaf=True)
        if engine is not None:
            rows = BatchRows.of(tensors, engine.data_rank, engine.data_size)
            if rows.total < rows.ranks:
                raise ValueError(
                    f"a batch has {rows.total} rows for {rows.ranks} ranks; drop it (drop_remainder=True of tf.data), "
                    "or use larger batches"
                )
            device = engine.device
            tensors = keras.tree.map_structure(
                lambda tensor, to=device: tensor if tensor is None else tensor.to(to), rows.cut(tensors)
            )
        yield tensors


class LoadedBatches(torch.utils.data.IterableDataset[Any]):
    """A ``tf.data.Dataset`` for torch's ``DataLoader``, whose batches stay in their memory."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return batches(self._data)


class SizedBatches(LoadedBatches):
    """The same of a data set that knows its number of batches."""

    def __len__(self) -> int:
        return int(self._data.cardinality())


def loader_of(data: Any) -> Any:
    """Return a loader of a ``tf.data.Dataset`` that copies nothing; anything else as it is."""
    if not any(base.__module__.startswith("tensorflow.") for base in type(data).__mro__) or not hasattr(
        data, "element_spec"
    ):
        return data
    is_sized = int(data.cardinality()) >= 0
    return torch.utils.data.DataLoader(SizedBatches(data) if is_sized else LoadedBatches(data), batch_size=None)
