"""Tiers of a run's states and their memory budget, known before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.machine import memory
from zeromesh.base.placement import Tier
from zeromesh.base.words import some
from zeromesh.comm.agreement import agree_success, catch
from zeromesh.comm.mesh import Mesh
from zeromesh.config.feature_sections import Aio
from zeromesh.shard.optim.host import state_names, states_of
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.store.budget import NEXT, PARTS, MemoryBudget, Prepare, require_host_memory
from zeromesh.shard.store.nvme import Disk
from zeromesh.shard.store.stores import StorePlace
from zeromesh.shard.store.swap import StateForm, Stored, Swap
from zeromesh.shard.store.tiers import Tiers

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved
    from zeromesh.config.zero_section import OffloadOptimizer, OffloadParam

_log = logging.getLogger(__name__)

USUAL_STATES = ("exp_avg", "exp_avg_sq")  # as many as an optimizer that the kernel does not know has, at the most


@dataclass(frozen=True)
class Offload:
    """Offloaded states, before the model is laid out."""

    states: StorePlace | None  # where masters and optimizer states rest in blocks; None where none do
    stored: StorePlace | None  # where parameters do
    form: StateForm  # of masters and states that rest off the device
    early: float | None  # share of states updated during the backward; None: all, where there is plenty of room


def where_offloaded(settings: Resolved, optimizer: Optimizer | None) -> Offload:
    """Return the offload that the configuration asks for; raise ValueError if these states cannot rest there."""
    zero, row = settings.zero_optimization, settings.row
    stored, early = _place(row.parameter_tier, zero.offload_param, settings), zero.early_share
    form = StateForm(split=row.split)
    states = _place(row.optimizer_tier, zero.offload_optimizer, settings, split=form.split)
    if form.split:
        early = 0.0
        if optimizer is not None:
            states_of(optimizer, "states are to rest in fewer bytes", "leave offload_optimizer.split_master out")
    narrow = _narrow_states(settings, optimizer)
    names, failure = catch(lambda: state_names(optimizer))
    if names is None:
        if row.optimizer_tier.in_blocks and failure is not None:
            raise failure
        # Only the kernel updates early, and it does not know this optimizer.
        return Offload(states, stored, StateForm(USUAL_STATES), 0.0)
    if states is not None and states.in_memory:
        early = 0.0
    return Offload(states, stored, replace(form, names=names, narrow=narrow), early)


def _narrow_states(settings: Resolved, optimizer: Optimizer | None) -> frozenset[str]:
    """Return the names of the states that are to be bf16; raise ValueError for those that the optimizer cannot keep."""
    if optimizer is None or not settings.has_narrow_states:
        return frozenset()
    states_of(optimizer, "optimizer_state_dtype keeps states in bf16", "leave it and fp32_optimizer_states out")
    names, (named, rest) = state_names(optimizer), settings.state_dtypes
    if unknown := sorted({*named} - {*names}):
        raise ValueError(
            f"optimizer_state_dtype names {some(unknown)}, but {type(optimizer).__name__}, with its options, has the "
            f"states {', '.join(names) or 'none'}; name these"
        )
    return frozenset(name for name in names if named.get(name, rest) == "bf16")


def _place(
    tier: Tier, section: OffloadOptimizer | OffloadParam | None, settings: Resolved, split: bool = False
) -> StorePlace | None:
    """Return the place of states in blocks, as a section of the configuration describes it; None if none are."""
    if section is None or not (tier.in_blocks or (split and tier is Tier.HOST)):
        return None
    disk = None
    if section.nvme_path is not None:
        access, buffers = settings.aio or Aio(), max(1, section.buffer_count)
        disk = Disk(Path(section.nvme_path), buffers, access.block_size, access.queue_depth)
    return StorePlace(tier, disk, settings.zero_optimization.pins)


def preparation(model: nn.Module, settings: Resolved, offload: Offload, mesh: Mesh) -> Prepare:
    """Return what checks that host memory suffices, and opens this rank's files; if one rank cannot, all raise."""
    limit = settings.host_memory_limit
    # Counted now, because sharding frees it: memory of the model itself is available to what takes its place.
    moves = sum(parameter.nbytes for parameter in model.parameters() if parameter.device.type == "cpu")

    def open_files(budget: MemoryBudget, early: Sequence[Flat]) -> Tiers:
        stored = None
        if offload.stored is not None and budget.stored:
            stored = Stored(budget.stored, offload.stored, mesh)
        try:
            swap = None
            if budget.blocks:
                assert offload.states is not None
                swap = Swap(budget.blocks, offload.form, offload.states, mesh, early, stored)
        except BaseException:
            Tiers(None, stored).close()
            raise
        return Tiers(swap, stored, early, offload.form)

    def prepare(budget: MemoryBudget) -> Tiers:
        # On a CPU, model and update share the cores, and only the wait for a disk can be hidden. Next copies of
        # parameters lie in host memory, which is short where parameters rest in files.
        on_disk = offload.states is not None and not offload.states.in_memory
        overlaps = mesh.device.type != "cpu" or (on_disk and offload.stored is None)
        early = budget.first_early(offload.early or (1.0 if offload.early is None and overlaps else 0.0))
        states = offload.form
        if mesh.rank == 0 and offload.form.split and not any(rows.form.split for rows in budget.rows(states)):
            _log.warning(
                "%s has no effect here: nothing that is offloaded has fp32 masters of bf16 parameters",
                "offload_optimizer.split_master",
            )
        parts = budget.host(states, offload.states, offload.stored, early)
        sizes = torch.tensor([*(parts.get(name, 0) for name in PARTS), moves], dtype=torch.float64)
        rows = mesh.group("world").exchange(sizes)
        # Ranks of one node share its memory, so that what counts is their sum.
        here = [rank for rank, node in enumerate(mesh.node_of) if node == mesh.node_of[mesh.rank]]
        *node_sizes, freed = map(int, rows[here].sum(0).tolist())
        total = {name: size for name, size in zip(PARTS, node_sizes, strict=True) if size}
        most = None
        if total:
            machine = memory()
            available = [machine[key] for key in ("available_bytes", "limit_bytes") if machine[key] is not None]
            most = min(available) + freed if available else None
        if offload.early is None and NEXT in total:
            needed = sum(total.values())
            # Half of the host's memory stays with others unless the user asks for more.
            if most is None or 2 * needed > most or (limit is not None and needed > limit):
                early = []
                del total[NEXT]
        opened, failure = catch(lambda: open_files(budget, early))
        if offload.early is None and on_disk:
            # Ranks share a disk, so that where it has no room for all second copies nobody has one.
            full = torch.tensor([float(isinstance(failure, OSError))], dtype=torch.float64)
            if bool(mesh.group("world").exchange(full).any()):
                (opened or Tiers()).close()
                mesh.group("world").exchange(full)  # all have given their room back
                early = []
                opened, failure = catch(lambda: open_files(budget, early))
        tiers = opened or Tiers()
        if failure is None and total and most is not None:
            _, failure = catch(lambda: require_host_memory(total, most, limit))
        try:
            agree_success(mesh.group("world"), "make room for what rests off the device", failure)
        except BaseException:
            tiers.close()
            raise
        return tiers

    return prepare
