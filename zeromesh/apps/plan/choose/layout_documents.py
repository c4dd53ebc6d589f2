"""A layout as a configuration, and the layout of a configuration."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import Recompute
from zeromesh.apps.plan.machine.cluster import Device
from zeromesh.base.axes import data_size
from zeromesh.base.placement import Placement, Tier
from zeromesh.config.settings import Settings
from zeromesh.config.written import WrittenRun, document_of, is_refused
from zeromesh.engine.initialize.widths import precision_of, resting_of, tables_of, widths_of
from zeromesh.parallel.context.spread_attention import AUTO, degree_of
from zeromesh.parallel.pipeline.schedule.generators import ROWS as SCHEDULES
from zeromesh.parallel.pipeline.schedule.schedule_files import read_costs
from zeromesh.shard.optim.factory import is_elementwise

POLICIES = {"full": Recompute.BLOCKS, "selective": Recompute.PRODUCTS, "auto": Recompute.PLANNED}
GRANULARITY = {policy: name for name, policy in POLICIES.items()}
"""Policies of recomputation by the configuration's word, and the words by policy."""


def precision_for(device: Device) -> str:
    """Return the precision that a device trains in: the first that its products have."""
    return next((name for name in ("bf16", "fp16") if name in device.flops), "fp32")


def document_for(layout: ParallelLayout, precision: str) -> dict[str, Any]:
    """Return the JSON document of a layout, as ``zeromesh.initialize`` takes it."""
    return document_of(written_run(layout, precision))


def written_run(layout: ParallelLayout, precision: str) -> WrittenRun:
    """Return what a configuration states of a layout."""
    sharded = layout.row.parameter is Placement.SHARDED and layout.row.parameter_tier is Tier.DEVICE
    # Two slots are the default, and rows with whole parameters have none for them.
    slots = layout.parameter_slots if sharded and layout.parameter_slots != 2 else None
    return WrittenRun(
        layout.samples,
        layout.micro_batch,
        layout.accumulation,
        layout.sizes,
        layout.row,
        layout.schedule,
        layout.chunks,
        GRANULARITY.get(layout.recompute, ""),
        layout.activations_on_host,
        layout.sequence,
        slots,
        layout.gradient_slots if layout.gradient_slots != 2 else None,
        precision,
    )


def is_accepted(layout: ParallelLayout, device: Device) -> bool:
    """Return whether ``zeromesh.initialize`` accepts the layout's configuration on ranks with such a device."""
    precision = "fp32" if layout.widths.parameter == 4 else precision_for(device)
    return not is_refused(written_run(layout, precision))


def layout_from(settings: Settings, world_size: int) -> tuple[ParallelLayout, str]:
    """Return the layout and the precision of a configuration on so many ranks.

    Raises:
        ConfigError: the mesh or the batch does not fit the number of ranks.
        ValueError: the pipeline's schedule is not for these sizes, its measured costs cannot be read, or the mesh has
            an axis whose costs are not known.
    """
    sizes = settings.resolve_mesh(world_size)
    axes = {axis: size for axis, size in sizes.items() if hasattr(ParallelLayout, axis)}
    for axis in sizes.keys() - axes.keys():
        if sizes[axis] > 1:
            raise ValueError(f"mesh.{axis} is {sizes[axis]}, and the planner does not know what it costs; set it to 1")
    resolved = settings.resolve(data_size(sizes), sizes)
    precision = precision_of(settings)
    # Norms and biases, which are few, still travel in 16 bits, and the head mostly computes in them.
    recomputed, float8, named = settings.activation_checkpointing, settings.float8, settings.optimizer
    chosen = settings.pipeline.schedule if sizes["pipeline"] > 1 else "1f1b"
    # A file is no name that the planner can time; it says so where it is asked to.
    name = chosen if isinstance(chosen, str) else chosen.file
    least = SCHEDULES[name].chunks[0] if name in SCHEDULES else 1
    costs = settings.pipeline.costs if sizes["pipeline"] > 1 else None
    spread = settings.context_parallel
    strategy = spread.strategy  # auto: that of causal attention
    layout = ParallelLayout(
        **axes,
        row=settings.row,
        micro_batch=resolved.train_micro_batch_size_per_gpu,
        accumulation=resolved.gradient_accumulation_steps,
        schedule=name,
        chunks=settings.pipeline.chunks or least,
        costs=read_costs(Path(costs)) if costs else None,
        recompute=POLICIES[recomputed.granularity] if recomputed.enabled else Recompute.NONE,
        activations_on_host=recomputed.enabled and recomputed.cpu_checkpointing,
        sequence=settings.tensor_parallel.sequence,
        parameter_slots=settings.slots.parameter or 2,
        gradient_slots=settings.slots.gradient or 2,
        early=settings.zero_optimization.early_share or 0.0,
        in_parts=named is None or is_elementwise(named.type, named.params),
        by_rules=named is not None and settings.has_narrow_states,
        widths=widths_of(settings),
        tables=tables_of(settings),
        resting=resting_of(settings),
        ulysses=degree_of("ring" if strategy == AUTO else strategy, sizes["context"], None, spread.ulysses_degree),
        products="fp8" if float8.enabled else "",
    )
    return layout, precision


def launch_command(layout: ParallelLayout, nodes: int, config: str, program: str = "train.py") -> str:
    """Return the command that starts a run of the layout; on several nodes, on each of them."""
    several = f"--nnodes {nodes} --master NODE0:29500 --secret-file secret " if nodes > 1 else ""
    per_node = ceil(layout.ranks / nodes)
    return f"zeromesh launch {several}--nproc {per_node} {program} {config}"
