"""Updates by the kernels' rules, from the shards of gradients: on the host, and of narrow states on the device."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from zeromesh.base.kernels.update_pass import StatesApart, StepInput
from zeromesh.base.piece import Piece
from zeromesh.base.placement import Tier
from zeromesh.base.spans import span
from zeromesh.shard.optim.host import HostSteps
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.store.link import Link
from zeromesh.shard.store.memory import Staging
from zeromesh.shard.store.tiers import Tiers
from zeromesh.shard.store.window import StateWindow, pieces_in


def pieces_on_host(flat: Flat, steps: HostSteps | None) -> Iterator[tuple[int, slice, Piece]]:
    """Yield the pieces that ``steps`` updates, from the shard of their gradient, and not the optimizer itself."""
    shard = None if flat.gradient is None else flat.gradient.shard
    if steps is not None and shard is not None and (steps.narrow or flat.optimizer_tier is not Tier.DEVICE):
        yield from (entry for entry in flat.pieces if steps.takes(entry[2].parameter, shard))


class HostUpdates:
    """Updates masters and writes the new parameters; those of masters on the host in the same pass."""

    def __init__(self, store: Tiers, link: Link, pinned: bool) -> None:
        self.nbytes, self.seconds = 0, 0.0  # read and written by all updates so far, and the time that they took
        self._store = store
        self._staging = Staging(link, pinned)

    def update(self, steps: HostSteps, flat: Flat, windows: Iterator[StateWindow]) -> None:
        """Update one flat buffer, whose windows come next, and its shard; what ``steps`` leaves is only published."""
        if not flat.keeps_states and not any(pieces_on_host(flat, steps)):
            next(windows)
            flat.write_shard()
            return
        on_host = flat.optimizer_tier is not Tier.DEVICE
        apart = flat.master is not flat.shard and not flat.splits and on_host
        if apart or flat.splits:
            flat.load_shard(write=flat.splits, read=flat.splits)
        out = self._staging.take(flat.shard, flat.parameter_tier) if apart else None
        for window in windows:
            self._step(steps, window, out)
            if window.is_last:
                break
        if out is not None:
            flat.load_shard(write=True, read=False)  # not before: an update that fails leaves what there was
            flat.expect(self._staging.send(out, flat.shard))
        elif not on_host:
            flat.write_shard()

    def _step(self, steps: HostSteps, window: StateWindow, out: torch.Tensor | None) -> None:
        """Update a window of a flat buffer, and write its new parameters to their place in ``out``."""
        flat, gradient = window.flat, window.flat.gradient
        assert gradient is not None
        shard = gradient.shard
        assert shard is not None
        inputs = []
        begins = {id(piece): local.start for _, local, piece in flat.pieces}
        for index, part, within, piece in pieces_in(window):
            output, apart = None if out is None else out[part], _apart(window, within, part.start - begins[id(piece)])
            if gradient.used[index] and steps.takes(piece.parameter, shard):
                inputs.append(StepInput(piece.parameter, shard[part], output, apart))
            elif output is not None:  # what has no gradient is sent all the same, with the rest
                output.copy_(piece.parameter.detach().view(-1) if apart is None else apart.master)
        began = time.perf_counter()
        with span("update_on_host", gradient.unit):
            steps.step(inputs)
        self.seconds += time.perf_counter() - began
        for update in inputs:
            # The gradient is read, master and states are read and written (both halves of a master are as large as the
            # whole), and the new parameter is written.
            dtype = flat.master.dtype
            rest = 2 * (dtype.itemsize + self._store.states.state_bytes(dtype)) * update.gradient.numel()
            self.nbytes += update.gradient.nbytes + rest + (0 if update.output is None else update.output.nbytes)


def _apart(window: StateWindow, within: slice, begin: int) -> StatesApart | None:
    """Return what the window has of these of its elements; None where the optimizer's own tensors have it.

    They are those of a parameter from ``begin`` on.
    """
    if window.rows is None:
        return None
    first, *states = (row[within] for row in window.rows)
    if not window.flat.splits:
        return StatesApart(first, states, begin)
    offset = window.elements.start
    return StatesApart(window.flat.shard[offset + within.start : offset + within.stop], states, begin, first)
