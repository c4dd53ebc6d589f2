"""Layouts that the planner chooses at the start, for keys of the configuration that are "auto"."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import default_collate

from zeromesh.comm.agreement import agree_run, texts
from zeromesh.comm.collectives import Group
from zeromesh.comm.environment import Environment
from zeromesh.config.automatic import MESH, OFFLOAD, STAGE, asked_of_planner, lines_of_overrides, overrides_of
from zeromesh.config.batch import MICRO
from zeromesh.initialization.plan import Arguments
from zeromesh.model.placement import PlacementRow, Tier
from zeromesh.observe.machine import devices, measured_flops, memory, memory_bandwidth, processor

if TYPE_CHECKING:
    from zeromesh.config.settings import Settings
    from zeromesh.plan.layout import ParallelLayout
    from zeromesh.plan.machine import Machine
    from zeromesh.plan.trace import TracedCost

MACHINE = "ZEROMESH_MACHINE"
"""Variable with the path of a machine.json, in place of presets and of what is measured at the start."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_log = logging.getLogger("zeromesh")


def choose_layout(chosen: Arguments, settings: Settings, world: Group, environment: Environment) -> Settings:
    """Return the settings with what is "auto" filled in by the planner. Collective.

    Raises:
        ValueError: the machine's file is wrong, or the batch does not fit the ranks.
    """
    asked = asked_of_planner(chosen.config)
    if not asked:
        return settings

    def plan() -> list[str]:
        # One rank plans for all: what it measures of the machine may differ from rank to rank.
        return _plan(chosen, settings, asked, environment) if world.rank == 0 else []

    own = agree_run(world, "plan its layout", plan)
    overrides = json.loads(texts(world, json.dumps(own))[0])
    return type(settings).load(settings, overrides)


def _plan(chosen: Arguments, settings: Settings, asked: frozenset[str], environment: Environment) -> list[str]:
    # Imported here: only runs that ask for a plan pay for the planner.
    from zeromesh.plan.answer import layout_text, reason_of
    from zeromesh.plan.convert import document_for, layout_from
    from zeromesh.plan.search import search
    from zeromesh.plan.space import ModelLimits, PlanRequest

    given, precision = layout_from(settings, environment.world_size)
    source, sequence = _cost(chosen, precision)
    machine = _machine(environment)
    batch = settings.train_batch_size or given.samples
    request = PlanRequest(
        source, machine, batch, sequence, ModelLimits(causal=False), widths=given.widths,
        accepts=_accepts(asked, given),
    )  # fmt: skip
    result = search(request)
    best = result.best
    layout = best.layout if best is not None else result.nearest[0][0]
    overrides = overrides_of(document_for(layout, precision), asked)
    cost = source.at(layout.micro_batch, sequence)
    doubt = "" if cost.exact else f"\nthe model could not be traced, so that this is rough: {cost.note}"
    if best is None:
        _log.warning(
            "the planner finds no layout that fits on %s, and takes the one that lacks least:%s%s",
            machine.name, lines_of_overrides(overrides), doubt,
        )  # fmt: skip
    else:
        _log.info(
            'the planner has filled in what is "auto", for %s: %s; %s%s%s', machine.name, layout_text(layout),
            reason_of(best), lines_of_overrides(overrides), doubt,
        )  # fmt: skip
    return overrides


def _accepts(asked: frozenset[str], given: ParallelLayout) -> Callable[[ParallelLayout], bool]:
    """Return a function that tells whether a layout leaves as it is what the configuration states."""
    free = {"data", "replicate", "tensor", "sequence"} if MESH in asked else set()
    free |= {"micro_batch", "accumulation"} if asked & {MESH, MICRO} else set()
    # Never stages or spread sequences: a loop that calls the engine itself would have to be written for them.
    kept = [one.name for one in fields(given) if one.name not in {*free, "row", "schedule", "chunks", "widths"}]

    def accepts(layout: ParallelLayout) -> bool:
        row, own = layout.row, given.row
        if OFFLOAD in asked:
            # A file's folder is for the user to name.
            rests = Tier.NVME not in (row.parameter_tier, row.optimizer_tier)
        else:
            rests = _tiers(row) == _tiers(own)
        # A group of one rank has nothing to shard, whatever the stage is.
        alike = STAGE in asked or layout.stage == given.stage or layout.data * layout.context == 1
        return rests and alike and all(getattr(layout, name) == getattr(given, name) for name in kept)

    return accepts


def _tiers(row: PlacementRow) -> tuple[Any, ...]:
    return row.parameter_tier, row.optimizer_tier, row.offloaded, row.split


def _machine(environment: Environment) -> Machine:
    """Return the machine that this run has: a file's, a known GPU's, or what this process can measure in a second."""
    from zeromesh.plan.machine import Machine
    from zeromesh.plan.presets import cluster

    if path := os.environ.get(MACHINE):
        return Machine.load(path)
    ranks, nodes = environment.local_world_size, environment.world_size // environment.local_world_size
    if torch.cuda.is_available():
        try:
            return cluster(gpu=torch.cuda.get_device_name(), gpus=ranks, nodes=nodes)
        except ValueError as error:
            _log.warning("the planner does not know this GPU: %s", error)
    return _measured(ranks, nodes)


def _measured(ranks: int, nodes: int) -> Machine:
    """Return a machine of what one process measures quickly; its links are those of ranks that share a host."""
    from zeromesh.plan.machine import Device, LinkSpeed, Machine, Node
    from zeromesh.plan.presets import find_link

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    host, cores = memory(), processor()["cores"]
    bandwidth = memory_bandwidth(cores)
    whole = min(size for size in (host["available_bytes"], host["limit_bytes"]) if size is not None)
    flops = {name: measured_flops(device, dtype, 0.1) for name, dtype in DTYPES.items()}
    found = devices()
    own = float(found[0]["memory_bytes"] or whole) if found else whole / ranks
    copies = LinkSpeed(bandwidth / 4, 1e-4, shared=ranks)  # two copies of each message, through the host's memory
    node = Node(
        Device("this machine", own, flops, bandwidth / (1 if found else ranks), reserved=0.0, processor=not found),
        ranks, copies,
        LinkSpeed(bandwidth / 2, 1e-5, shared=ranks), whole, bandwidth, cores, name="this machine",
    )  # fmt: skip
    return Machine(((node, nodes),), find_link("ethernet-10", ranks), "this machine")


def _cost(chosen: Arguments, precision: str) -> tuple[TracedCost, int]:
    """Return the model's cost, and the length of its sequences; 1 where it has none."""
    from zeromesh.plan.passes import TraceOptions
    from zeromesh.plan.trace import TracedCost

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    options = TraceOptions(dtype, kernels="cuda" if torch.cuda.is_available() else "cpu")
    inputs, loss = _inputs(chosen)
    lengths = [x.shape[1] for x in inputs.values() if isinstance(x, torch.Tensor) and x.ndim > 1 and not x.is_complex()]
    ids = [x.shape[1] for x in inputs.values() if isinstance(x, torch.Tensor) and x.ndim > 1 and x.dtype == torch.long]
    sequence = (ids or lengths or [1])[0] if ids else 1
    return TracedCost(chosen.model, inputs, options, loss), sequence


def _inputs(chosen: Arguments) -> tuple[dict[str, Any], Any]:
    """Return keyword arguments of the model's forward for two samples, and the loss of its output, if it has none."""
    model, data = chosen.model, chosen.data
    if data is None:
        dummy = getattr(model, "dummy_inputs", None)  # of models of transformers
        return (dict(dummy), None) if isinstance(dummy, Mapping) else ({}, None)
    samples = [data[0], data[1 % len(data)]]
    batch = chosen.collate_fn(samples) if chosen.collate_fn is not None else default_collate(samples)
    if isinstance(batch, Mapping):
        return dict(batch), None
    parts = list(batch) if isinstance(batch, tuple | list) else [batch]
    names = _positional(model)
    if chosen.loss_fn is not None and len(parts) == 2:
        labels, loss_fn = parts[1], chosen.loss_fn
        return {names[0]: parts[0]}, lambda output: loss_fn(output, labels)
    return dict(zip(names, parts, strict=False)), None


def _positional(model: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in inspect.signature(model.forward).parameters.items() if one.kind in kinds]
