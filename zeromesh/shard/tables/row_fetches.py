"""Rows of experts that are updated, and brought to the device, beside what is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch

from zeromesh.base.placement import Tier
from zeromesh.shard.store.link import DONE, Copy, Link
from zeromesh.shard.store.memory import Staging
from zeromesh.shard.tables.row_memory import plainly

STAGED = 64 << 20  # bytes of rows that are copied at a time: those that follow are read meanwhile


class FetchedRows(NamedTuple):
    """Rows on the device, which are there when the copy has run."""

    rows: torch.Tensor  # int64, ascending, on the host
    values: torch.Tensor  # shape (rows, width)
    copy: Copy = DONE

    def arrived(self) -> torch.Tensor:
        """Return the values, for what the current stream is given from here on."""
        self.copy.order()
        if self.values.device.type != "cpu":  # their memory belongs to another stream
            self.values.record_stream(torch.accelerator.current_stream(self.values.device))
        return self.values


class RowFetcher:
    """Brings rows from where they rest to the device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._link = device, Link(device)
        self._staging = Staging(self._link)
        self._stream = None if device.type == "cpu" else torch.Stream(device)  # has the memory of rows, and no work

    def fetch(
        self, rows: torch.Tensor, width: int, dtype: torch.dtype, read: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> FetchedRows:
        """Fetch ``rows``, int64 on the host; ``read`` copies some of them to memory of shape (k, width).

        A copy waits for the current stream, so that it is one on which nothing is computed.
        """
        copy, most = DONE, max(1, STAGED // max(1, width * dtype.itemsize))
        with plainly(), nullcontext() if self._stream is None else self._stream:
            values = torch.empty(len(rows), width, dtype=dtype, device=self._device)
            for part, target in zip(rows.split(most), values.view(-1).split(most * width), strict=True):
                staged = self._staging.take(target, Tier.DEVICE)
                read(part, staged.view(-1, width))
                copy = self._staging.send(staged, target)
        return FetchedRows(rows, values, copy)


class Fetching(Protocol):
    """A table whose rows can be fetched before they are asked for."""

    def fetch_ahead(self) -> None:
        """Begin to fetch the rows that were asked for last."""

    def drop(self) -> None:
        """Forget rows that were fetched, and not asked for."""


class Beside:
    """Threads that update and fetch rows of all layers of experts, and the order in which these are called.

    While a layer computes, the rows of the next one are fetched: those that it has asked for the last time.
    """

    def __init__(self, device: torch.device) -> None:
        # Of each kind one: updates go on in the order of the layers, and a fetch waits for its own table's alone.
        self.updates, self.fetches = (ThreadPoolExecutor(1, f"zeromesh-{name}-rows") for name in ("update", "fetch"))
        self.ahead, self.at_once = RowFetcher(device), RowFetcher(device)
        self._next: dict[tuple[int, bool] | None, int] = {}
        self._last: tuple[int, bool] | None = None  # the layer called last, and whether in a backward; None: updated
        self._guess: int | None = None  # the layer whose rows were fetched last before it asked for them

    def called(self, number: int, layers: Sequence[Sequence[Fetching]]) -> None:
        """Note that a layer has its rows, and begin to fetch those of the next one."""
        self._next[self._last] = number
        self._last = number, torch._C._current_graph_task_id() >= 0
        self._fetch(layers)

    def updated(self, layers: Sequence[Sequence[Fetching]]) -> None:
        """Begin to fetch the rows of the layer that is called first after an update."""
        self._last = None
        self._fetch(layers)

    def _fetch(self, layers: Sequence[Sequence[Fetching]]) -> None:
        # Rows of one layer are on the device before they are used, and not more.
        for table in () if self._guess is None else layers[self._guess]:
            table.drop()
        self._guess = self._next.get(self._last)
        for table in () if self._guess is None else layers[self._guess]:
            table.fetch_ahead()

    def close(self) -> None:
        """Wait for all that was begun."""
        self.updates.shutdown()
        self.fetches.shutdown()
