"""What of a run rests off the device, and whether there is room for it: known before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.agree import attempt, share
from zeromesh.config.parts import Aio
from zeromesh.dist.mesh import Mesh
from zeromesh.observe.inventory import memory
from zeromesh.optim.host import count_states
from zeromesh.shard.needs import PARTS, Needs, Prepare, require_host_memory
from zeromesh.shard.swap import Disk, Swap

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved

USUAL_STATES = 2
"""Of an optimizer that the kernel does not know: as many as Adam has."""


@dataclass(frozen=True)
class Offload:
    """What is known of it before the model is laid out.

    Attributes:
        disk: where what rests on NVMe is; None where nothing does.
        states: like the parameter, that the optimizer has.
        limit: bytes of host memory that all ranks of a node may use for what rests there; None: what is available.
    """

    disk: Disk | None
    states: int
    limit: int | None


def where_offloaded(settings: Resolved, optimizer: Optimizer | None) -> Offload:
    """As the configuration says, for such an optimizer.

    Raises:
        ValueError: its states cannot rest there.
    """
    chosen, limit = settings.zero_optimization.offload_optimizer, settings.host_memory_limit
    if chosen is None or chosen.device != "nvme":
        counted, _ = attempt(lambda: count_states(optimizer))
        return Offload(None, USUAL_STATES if counted is None else counted, limit)
    assert chosen.nvme_path is not None
    access, states, buffers = settings.aio or Aio(), count_states(optimizer), max(1, chosen.buffer_count)
    disk = Disk(Path(chosen.nvme_path), states, buffers, access.block_size, access.queue_depth, chosen.pin_memory)
    return Offload(disk, states, limit)


def preparation(model: nn.Module, offload: Offload, mesh: Mesh) -> Prepare:
    """Sees that host memory suffices, and opens this rank's file; if one rank cannot, all raise."""
    moves = sum(parameter.nbytes for parameter in model.parameters() if parameter.device.type == "cpu")

    def open_file(needs: Needs) -> Swap | None:
        return None if offload.disk is None or not needs.files else Swap(needs.files, offload.disk, mesh)

    def prepare(needs: Needs) -> Swap | None:
        opened, failure = attempt(lambda: open_file(needs))
        parts = needs.host(offload.states, 0 if opened is None else opened.host_bytes)
        sizes = torch.tensor([*(parts.get(name, 0) for name in PARTS), moves], dtype=torch.float64)
        rows = mesh.group("world").exchange(sizes)
        here = [rank for rank, node in enumerate(mesh.node_of) if node == mesh.node_of[mesh.rank]]
        *found, freed = map(int, rows[here].sum(0).tolist())
        total = {name: size for name, size in zip(PARTS, found, strict=True) if size}
        if failure is None and total and (available := _available()) is not None:
            _, failure = attempt(lambda: require_host_memory(total, available + freed, offload.limit))
        try:
            share(mesh.group("world"), "make room for what rests off the device", failure)
        except BaseException:
            if opened is not None:
                opened.close()
            raise
        return opened

    return prepare


def _available() -> int | None:
    """Bytes of host memory that processes of this node can still take; None where it is unknown."""
    found = memory()
    known = [found[key] for key in ("available_bytes", "limit_bytes") if found[key] is not None]
    return min(known, default=None)
