"""States that are put aside in host memory between updates, so that another program has the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.optim import Optimizer

from zeromesh.base.placement import Tier
from zeromesh.shard.parameters.flat import Flat, rebind
from zeromesh.shard.sharded import ShardedModel

OPTIMIZER, MASTER, PARAMETERS = "optimizer", "master", "parameters"
KINDS = (OPTIMIZER, MASTER, PARAMETERS)
"""Kinds of states that can be put aside: the optimizer's, masters, and parameters at rest where they are sharded."""


class Aside:
    """Puts states of a model aside, and brings them back; whoever needs them earlier brings them back, too."""

    def __init__(self, sharded: ShardedModel, optimizer: Optimizer | None) -> None:
        self._sharded, self._optimizer = sharded, optimizer
        self._device = sharded.mesh.device
        self._flats: list[Flat] = []
        self._states: list[torch.Tensor] = []

    def put(self, kinds: Collection[str], pinned: bool = True, non_blocking: bool = False) -> None:
        """Move states of these ``kinds`` to the host."""
        sharded = self._sharded
        sharded.take_changes()
        sharded.rest()
        # What rests on the host or in files is there already.
        here = [flat for flat in sharded.flats if flat.optimizer_tier is Tier.DEVICE and not flat.keeps_states]
        if OPTIMIZER in kinds and self._optimizer is not None:
            pieces = (piece for flat in here for _, _, piece in flat.pieces)
            values = (value for piece in pieces for value in self._optimizer.state.get(piece.parameter, {}).values())
            # Single numbers, as the step, stay: they cost nothing.
            self._states += [value for value in values if isinstance(value, torch.Tensor) and value.ndim]
        for flat in here:
            # A master that is the parameter itself is in use where parameters are not sharded.
            apart = flat.master is not flat.shard or flat.sharded
            kind = MASTER if flat.layout.trainable else PARAMETERS
            both = flat.master is flat.shard and PARAMETERS in kinds
            if apart and flat not in self._flats and (kind in kinds or both):
                self._flats.append(flat)
        sharded.store.put_aside(self.bring_back)
        pin = pinned and self._device.type == "cuda"

        def to_host(value: torch.Tensor) -> torch.Tensor:
            host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=pin)
            return host.copy_(value.detach(), non_blocking=non_blocking)

        self._bind(to_host)
        if non_blocking and self._device.type == "cuda":
            # The device's memory is given back in the order of its stream, but the host may read too early.
            torch.cuda.current_stream().synchronize()

    def bring_back(self, non_blocking: bool = False) -> None:
        """Move all states back to where they were."""
        self._sharded.store.put_aside(None)
        self._bind(lambda value: value.detach().to(self._device, copy=True, non_blocking=non_blocking))
        self._flats, self._states = [], []

    def _bind(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with torch.no_grad():
            for state in self._states:
                rebind(state, moved(state))
            for flat in self._flats:
                same = flat.master is flat.shard
                flat.bind_master(moved(flat.master))
                if same:
                    flat.bind_shard(flat.master)
            for table in self._sharded.tables:
                if table.flat.optimizer_tier is Tier.DEVICE:
                    table.follow()
