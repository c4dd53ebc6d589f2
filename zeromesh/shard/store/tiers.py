"""Storage of flat buffers whose states rest off the device, behind ``Flat.load_states`` and ``Flat.load_shard``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple
from pathlib import Path

from torch import nn

from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.store.swap import StateForm, Stored, Swap
from zeromesh.shard.store.swap_file import DiskTraffic
from zeromesh.shard.store.window import StateWindow, whole_window


class Tiers:
    """Storage of all flat buffers of a model."""

    def __init__(
        self,
        swap: Swap | None = None,
        stored: Stored | None = None,
        early: Sequence[Flat] = (),
        states: StateForm | None = None,
    ) -> None:
        self.swap = swap  # masters and optimizer states that rest in blocks; None: all are in memory
        self.stored = stored  # parameters that rest in blocks; None: all are in memory
        self.early, self.states = early, states or StateForm()  # updated during the backward; what states there are
        self._blocks = [store.blocks for store in (swap, stored) if store is not None]
        self._before_states: list[Callable[[Flat, bool], None]] = []
        self._bring_back: Callable[[], None] | None = None
        self._caches: dict[Flat, Callable[[bool], None]] = {}

    def before_states(self, listener: Callable[[Flat, bool], None]) -> None:
        """Call ``listener`` with each flat buffer whose states are about to be loaded, and whether to be changed."""
        self._before_states.append(listener)

    def write_back(self, flat: Flat, cache: Callable[[bool], None]) -> None:
        """Call ``cache`` before a flat buffer is used: some of it is in a cache, which is dropped if told True."""
        self._caches[flat] = cache

    def put_aside(self, bring_back: Callable[[], None] | None) -> None:
        """Call ``bring_back`` before any state is used: states have been put aside on the host. None: they are back."""
        self._bring_back = bring_back

    def recall(self) -> None:
        """Restore the states that were put aside."""
        if self._bring_back is not None:
            self._bring_back()

    def load_states(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """Keep the master and the optimizer states in memory until those of another flat buffer are loaded."""
        self._prepare(flat, write)
        if self.swap is not None and flat in self.swap:
            self.swap.load(flat, write, read)
        elif not flat.layout.trainable:  # a frozen parameter is its own master
            self._load_stored(flat, write, read)

    def _prepare(self, flat: Flat, write: bool) -> None:
        self._settle(flat, write)
        for listener in self._before_states:
            listener(flat, write)  # early updates use the same regions of the file, and give way

    def _settle(self, flat: Flat, write: bool) -> None:
        self.recall()
        if flat in self._caches:
            self._caches[flat](write)

    def windows(self, flat: Flat, write: bool = False, read: bool = True) -> Iterator[StateWindow]:
        """Yield the windows of a flat buffer's master and states, to be read or changed; see ``Swap.windows``."""
        if self.swap is None or flat not in self.swap:
            self.load_states(flat, write, read)
            yield whole_window(flat)
            return
        self._prepare(flat, write)
        with closing(self.swap.windows(flat, write, read)) as windows:
            yield from windows

    def names(self, flat: Flat, parameter: nn.Parameter) -> Sequence[str]:
        """Return the names of a parameter's states that windows have as rows, in order."""
        return () if self.swap is None or flat not in self.swap else self.swap.names(flat, parameter)

    def load_shard(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """Keep this rank's parameters in memory until those of another flat buffer are loaded; see ``load_states``."""
        self._settle(flat, write)
        if self.swap is not None:
            self.swap.release(flat)  # a joined master is split first: one half of it is the parameter
        self._load_stored(flat, write, read)

    def _load_stored(self, flat: Flat, write: bool, read: bool) -> None:
        if self.stored is not None and flat in self.stored:
            self.stored.load(flat, write, read)

    def form(self, flat: Flat) -> tuple[bool, bool]:
        """Return whether states are in memory only while they are loaded, and whether the master is in halves."""
        return (False, False) if self.swap is None else (flat in self.swap, self.swap.splits(flat))

    def stream(self, flats: Sequence[Flat]) -> Generator[StateWindow]:
        """Yield the windows of flat buffers in order, to be updated; see ``StateWindow``."""
        self.recall()
        if self.swap is None:
            yield from map(whole_window, flats)
            return
        with closing(self.swap.stream(flats)) as windows:
            yield from windows

    @property
    def folder(self) -> Path | None:
        """Folder of the files; None where there are none."""
        return next((blocks.folder for blocks in self._blocks if blocks.folder is not None), None)

    def disk_traffic(self) -> DiskTraffic | None:
        """Return the traffic of the files so far; None where there are none."""
        traffics = [traffic for blocks in self._blocks if (traffic := blocks.traffic()) is not None]
        return None if not traffics else DiskTraffic(*map(sum, zip(*map(astuple, traffics), strict=True)))

    def close(self) -> None:
        """Delete the files."""
        for blocks in self._blocks:
            blocks.close()
