"""Memory of a rank: what is allocated and used, and remedies when it is used up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.machine import live_bytes, peak_bytes
from zeromesh.base.placement import Placement, PlacementRow, Tier
from zeromesh.base.words import bytes_text
from zeromesh.config.settings import Resolved
from zeromesh.engine.initialize.widths import tables_of, widths_of
from zeromesh.shard import sizes
from zeromesh.shard.accounting import allocations
from zeromesh.shard.sharded import ShardedModel

if TYPE_CHECKING:
    from zeromesh.parallel.activation.activation_store import ActivationStore

STATES = ("parameter", "gradient", "optimizer", "slot", "buffer", "activation")

REMEDIES = 3  # remedies that a note about a shortage lists


class Before(NamedTuple):
    """Bytes of the device, or of the process on a CPU, before a model is placed."""

    live: int  # in use, without the model's own
    peak: int  # in use at the most so far


def memory_before(model: nn.Module, device: torch.device) -> Before:
    """Return the bytes in use now."""
    tensors = (t for t in (*model.parameters(), *model.buffers()) if t.device.type == device.type)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return Before(live_bytes(device) - sum(storages.values()), peak_bytes(device))


def memory(
    sharded: ShardedModel,
    optimizer: Optimizer | None,
    activations: ActivationStore | None = None,
    before: Before | None = None,
) -> dict[str, Any]:
    """Return the most bytes of this rank by state and tier.

    Returns:
        For each of ``STATES`` a dict of tier (``device``, ``host`` or ``nvme``) to bytes; ``total``, their sum;
        ``measured``, what the process uses now (``live``) and has used at most (``peak``), ``remainder``: the peak less
        what is counted on the measured device, and ``own``: the peak less what was in use before the model was placed,
        None if more was in use then. ``activation`` is what activation checkpointing has had in host memory at the most
        so far.
    """
    tiers: dict[str, dict[str, int]] = {state: defaultdict(int) for state in STATES}
    for state, tier, size in [*allocations(sharded), *_optimizer_state(sharded, optimizer)]:
        tiers[state][tier] += size
    if activations is not None and activations.pool is not None:
        tiers["activation"]["host"] = activations.pool.peak
    total = sum(sum(sizes.values()) for sizes in tiers.values())
    live = live_bytes(sharded.mesh.device)
    # The kernel notes peaks now and then only.
    peak = max(live, peak_bytes(sharded.mesh.device))
    cpu = sharded.mesh.device.type == "cpu"
    # On a CPU the host's tier lies in the same memory that the process is measured by.
    here = sum(sizes.get("device", 0) + (sizes.get("host", 0) if cpu else 0) for sizes in tiers.values())
    # The remainder is other activations, temporaries, fragmentation, and on a CPU Python and torch themselves.
    own_peak = peak - before.live if before is not None and peak > before.peak else None
    measured = {"live": live, "peak": peak, "remainder": peak - here, "own": own_peak}
    return {**{state: dict(sizes) for state, sizes in tiers.items()}, "total": total, "measured": measured}


def _optimizer_state(sharded: ShardedModel, optimizer: Optimizer | None) -> Iterator[tuple[str, str, int]]:
    flats = {id(piece.parameter): flat for flat in sharded.flats for _, _, piece in flat.pieces}
    for parameter, state in optimizer.state.items() if optimizer else ():
        flat = flats[id(parameter)]
        for value in state.values():
            # States of the parameter's shape may be kept with the master, and are counted with it.
            if isinstance(value, torch.Tensor) and not (flat.keeps_states and value.ndim):
                # Numbers such as the step stay on the host where the tensors rest on NVMe, as those of tables do.
                in_files = flat.optimizer_tier.in_blocks and not (value.ndim and flat in sharded.tables.flats)
                yield "optimizer", (Tier.HOST if in_files else flat.optimizer_tier).value, value.nbytes


@contextmanager
def explained(explain: Callable[[], str]) -> Iterator[None]:
    """Add ``explain()`` as a note to an error inside that says that memory is used up."""
    try:
        yield
    except BaseException as error:
        shortage = isinstance(error, torch.OutOfMemoryError | MemoryError)
        # Torch has no class for this error on a CPU.
        shortage |= isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error)
        # Once only: the phases nest, and each is a context like this one.
        if shortage and not getattr(error, "__notes__", ()):
            with suppress(Exception):  # the shortage is what counts
                error.add_note(explain())
        raise


def explain(report: dict[str, Any], sharded: ShardedModel, optimizer: Optimizer | None, settings: Resolved) -> str:
    """Return the planned and the used memory (see ``memory``), by state and tier, and remedies with numbers."""
    layout = sizes.StateLayout(
        row=settings.row,
        widths=replace(widths_of(settings), states=_state_width(optimizer)),
        parameter_slots=settings.slots.parameter or 2,
        gradient_slots=settings.slots.gradient or 2,
        early=settings.zero_optimization.early_share or 0.0,
    )
    tables = tables_of(settings)
    planned = planned_states(sharded, layout, tables)
    keys_of_states = dict.fromkeys(
        [(state, tier) for state in STATES for tier, size in report[state].items() if size] + [*planned]
    )
    lines = []
    for state, tier in keys_of_states:
        plan = f"{bytes_text(planned[state, tier])} planned, " if (state, tier) in planned else ""
        lines.append(f"  {state}: {plan}{bytes_text(report[state].get(tier, 0))} on {tier}")
    measured = report["measured"]
    rest = max(0, measured["remainder"])
    remedies = [*_remedies(sharded, settings, layout, tables, rest)][:REMEDIES]
    who = "the process uses" if sharded.mesh.device.type == "cpu" else "torch has allocated"
    return "\n".join(
        [
            f"zeromesh had planned {bytes_text(sum(planned.values()))} of states on this rank, "
            f"and has {bytes_text(report['total'])} at the most:",
            *lines,
            f"{who} {bytes_text(measured['live'])} now; {bytes_text(measured['peak'])} were in use at the most, of "
            f"which {bytes_text(rest)} are activations, temporaries and the libraries themselves. What takes less:",
            *(f"  {number}. {remedy}" for number, remedy in enumerate(remedies, 1)),
        ]
    )


def _state_width(optimizer: Optimizer | None) -> int:
    """Return the bytes of an element's states; those of Adam before the first update."""
    if optimizer is None:
        return 0
    first: Mapping[str, Any] = next(iter(optimizer.state.values()), {})
    states = [value for value in first.values() if isinstance(value, torch.Tensor) and value.ndim]
    return sum(value.element_size() for value in states) if first else 8


def planned_states(
    sharded: ShardedModel, layout: sizes.StateLayout, tables: sizes.TableLayout, ranks: int | None = None
) -> dict[tuple[str, str], float]:
    """Return the bytes of this rank's states by state and tier in a layout, on these or on so many shard ranks."""
    mesh = sharded.mesh
    steps = sharded.accumulation.steps
    sharing = sizes.Sharing(ranks or mesh.shard.size, mesh.replicate.size, steps > 1, mesh.shard.sums)

    def states_with(trained: set[bool], widths: sizes.Widths) -> sizes.RankStates:
        units = []
        for unit in sharded.units:
            layouts = [flat.layout for flat in unit.flats if flat.layout.trainable in trained]
            single = len(layouts) == 1 and layouts[0].whole
            shards = max((flat.group.size for flat in unit.flats if unit.has_experts), default=0)
            shards = shards * sharing.ranks // mesh.shard.size
            units.append(sizes.UnitElements(sum(part.elements for part in layouts), 1, single, ranks=shards))
        return sizes.state_sizes(units, replace(layout, widths=widths), sharing)

    trained = states_with({True}, layout.widths)
    frozen = states_with({False}, sizes.Widths(layout.widths.parameter, 0, 0, 0, 0))
    planned: dict[tuple[str, str], float] = defaultdict(float)
    of_tables: list[tuple[tuple[str, str], float]] = []
    for table in sharded.tables:
        number = table.flat.master.itemsize
        placed = table.placed(tables)
        shape = sizes.TableShape(table.count, table.width)
        of_tables += sizes.table_sizes([shape], placed, sharing.ranks, number, mesh.device.type == "cpu").items()
    for key, size in (*trained.resting.items(), *frozen.resting.items(), *of_tables):
        planned[key] += size
    # A unit has one slot for all that it gathers.
    planned["slot", Tier.DEVICE.value] += states_with({True, False}, layout.widths).gathered + trained.working
    return {key: size for key, size in planned.items() if size}


def _remedies(
    sharded: ShardedModel, settings: Resolved, layout: sizes.StateLayout, tables: sizes.TableLayout, rest: int
) -> Iterator[str]:
    row, ranks = layout.row, sharded.mesh.shard.size

    def on_device(row: PlacementRow, ranks: int | None = None) -> float:
        planned = planned_states(sharded, replace(layout, row=row), tables, ranks)
        return sum(size for (_, tier), size in planned.items() if tier == Tier.DEVICE.value)

    now = on_device(row)
    all_sharded = replace(row, parameter=Placement.SHARDED, gradient=Placement.SHARDED, optimizer=Placement.SHARDED)
    replicated = [
        state for state in ("parameter", "gradient", "optimizer") if getattr(row, state) is not Placement.SHARDED
    ]
    if replicated and ranks > 1:
        less = _less(now - on_device(all_sharded))
        yield f'"zero_optimization": {{"stage": 3}} shards {" and ".join(replicated)} over {ranks} ranks: {less}'
    # A processor has one memory.
    elsewhere = sharded.mesh.device.type != "cpu"
    if elsewhere and row.optimizer_tier is Tier.DEVICE:
        away = replace(row, optimizer=Placement.SHARDED, gradient_tier=Tier.HOST, optimizer_tier=Tier.HOST)
        key = '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}'
        if row.optimizer is not Placement.SHARDED:
            away, key = (
                replace(away, gradient=Placement.SHARDED),
                '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}',
            )
        yield f"{key} moves the optimizer to the host: {_less(now - on_device(away))}"
    micro = settings.train_micro_batch_size_per_gpu
    if micro % 2 == 0:
        steps = 2 * sharded.accumulation.steps
        yield (
            f'"train_micro_batch_size_per_gpu": {micro // 2} with "gradient_accumulation_steps": {steps} halves '
            f"activations: up to {_less(rest // 2)}"
        )
    if not settings.activation_checkpointing.enabled:
        yield f'"activation_checkpointing": {{"enabled": true}} computes activations again: up to {_less(rest)}'
    if elsewhere and row.parameter is Placement.SHARDED and row.parameter_tier is Tier.DEVICE:
        moved = now - on_device(replace(row, parameter_tier=Tier.HOST))
        if moved > 0:  # not where they rest in masters that stay
            yield (
                '"zero_optimization": {"offload_param": {"device": "cpu"}} moves parameters to the '
                f"host: {_less(moved)}"
            )
    more = now - on_device(all_sharded, 2 * ranks)
    yield f'"zero_optimization": {{"stage": 3}} on {2 * ranks} ranks instead of {ranks}: {_less(more)}'


def _less(size: float) -> str:
    return f"{bytes_text(size)} less"
