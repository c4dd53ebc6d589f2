"""Layouts that the planner chooses at the start, for keys of the configuration that are "auto"."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from zeromesh.apps.plan.cost.cost import Recompute
from zeromesh.base.placement import PlacementRow, Tier
from zeromesh.comm.agreement import agree_run, texts
from zeromesh.comm.collectives import Group
from zeromesh.comm.environment import Environment, device_of_group
from zeromesh.config.batch_sizes import MICRO
from zeromesh.config.planned_keys import MESH, OFFLOAD, STAGE, lines_of_overrides, overrides_of
from zeromesh.config.planned_keys import asked_of_planner as asked_of_planner
from zeromesh.engine.initialize.run_plan import Arguments

if TYPE_CHECKING:
    from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
    from zeromesh.apps.plan.choose.space import ModelLimits
    from zeromesh.apps.plan.cost.cost import CostSource
    from zeromesh.config.settings import Resolved, Settings

Chosen = TypeVar("Chosen", bound="Settings")

# Returns keyword arguments of a model's forward for a few samples, and the loss of its output, if it has none.
Example = Callable[[], tuple[nn.Module, Mapping[str, Any], Callable[[Any], Any] | None]]

_log = logging.getLogger("zeromesh")


def repeated(settings: Chosen, asked: frozenset[str], before: Resolved, ranks: int) -> Chosen | None:
    """Return the settings with what an earlier run had; None if it had another number of ranks."""
    from zeromesh.apps.plan.choose.layout_documents import document_for, layout_from

    if prod(before.mesh.model_dump().values()) != ranks:
        return None
    overrides = overrides_of(document_for(*layout_from(before, ranks)), asked)
    _log.info('"auto" keys keep the values of the resumed run:%s', lines_of_overrides(overrides))
    return type(settings).load(settings, overrides)


def choose_layout(chosen: Arguments, settings: Chosen, world: Group, environment: Environment) -> Chosen:
    """Return the settings with what is "auto" filled in by the planner, from the first samples. Collective.

    Raises:
        ValueError: the machine's file is wrong, or the batch does not fit the ranks.
    """
    example = partial(example_of, chosen)
    # A user's own loader may give each rank other samples, which ranks that share layers must not have.
    own_batches = chosen.data is not None
    return filled_in(settings, asked_of_planner(chosen.config), example, environment, world, own_batches)


def filled_in(
    settings: Chosen,
    asked: frozenset[str],
    example: Example,
    environment: Environment,
    world: Group | None,
    own_batches: bool = True,
) -> Chosen:
    """Return the settings with what is asked filled in by the planner, from an example; raise as ``choose_layout``.

    Without ``world`` this process will start the ranks. Only with ``own_batches`` may ranks share layers.
    """
    if not asked:
        return settings

    plan = partial(_plan, example, settings, asked, environment, own_batches)
    overrides = plan() if world is None else planned_by_first(world, environment, "plan its layout", plan)
    return type(settings).load(settings, overrides)


def planned_by_first(world: Group, environment: Environment, what: str, plan: Callable[[], Any]) -> Any:
    """Return the first rank's plan, which JSON can tell, on all ranks; ``what`` is for errors. Collective."""
    from zeromesh.base.dry.model_copy import undisturbed

    # One rank plans for all: what it measures of the machine may differ from rank to rank. Samples and measurements may
    # draw random numbers, and this rank is to draw the same afterwards as without a plan, and as the others.
    with undisturbed(device_of_group(environment)):
        local_plan = agree_run(world, what, lambda: plan() if environment.rank == 0 else None)
    return json.loads(texts(world, json.dumps(local_plan))[0])


def _plan(
    example: Example, settings: Settings, asked: frozenset[str], environment: Environment, own_batches: bool
) -> list[str]:
    # Imported here: only runs that ask for a plan pay for the planner.
    from zeromesh.apps.plan.choose.answer import layout_text, reason_of
    from zeromesh.apps.plan.choose.layout_documents import document_for, layout_from
    from zeromesh.apps.plan.choose.search import search
    from zeromesh.apps.plan.choose.space import ModelLimits, PlanRequest
    from zeromesh.apps.plan.cost.resting import RestingCost
    from zeromesh.apps.plan.machine.here import cost_here, machine_here

    stated_layout, precision = layout_from(settings, environment.world_size)
    model, inputs, loss = example()
    limits = _limits(model, settings) if own_batches else ModelLimits()
    traced, sequence = cost_here(model, inputs, loss, settings)
    resting = stated_layout.resting
    source: CostSource = traced if resting is None else RestingCost(traced, stated_layout.widths.parameter)
    ranks = environment.local_world_size
    machine = machine_here(ranks, environment.world_size // ranks)
    batch = settings.train_batch_size or stated_layout.samples
    request = PlanRequest(
        source,
        machine,
        batch,
        sequence,
        replace(limits, causal=False, positions=0),
        widths=stated_layout.widths,
        tables=stated_layout.tables,
        resting=resting,
        accepts=_accepts(asked, stated_layout),
    )
    result = search(request)
    best = result.best
    layout = best.layout if best is not None else result.nearest[0][0]
    overrides = overrides_of(document_for(layout, precision), asked)
    cost = source.at(layout.micro_batch, sequence)
    doubt = "" if cost.exact else f"\nthe model could not be traced, so this is a rough estimate: {cost.note}"
    text = f"no layout fits on {machine.name}; the planner takes the one that lacks the least memory:"
    if best is not None:
        text = f'the planner set the "auto" keys for {machine.name}: {layout_text(layout)}; {reason_of(best)}'
    level = logging.INFO if best is not None else logging.WARNING
    _log.log(level, "%s%s%s", text, lines_of_overrides(overrides), doubt)
    return overrides


def _limits(model: nn.Module, settings: Settings) -> ModelLimits:
    """Return the numbers that tensor ranks must divide; zeros, which allow one, of a model that does not state them."""
    from zeromesh.apps.plan.cost.models import limits_of_decoder
    from zeromesh.apps.plan.cost.source import limits_of_configuration
    from zeromesh.apps.train.train_settings import TrainSettings

    if isinstance(settings, TrainSettings) and settings.model is not None:
        return limits_of_decoder(settings.model)
    return limits_of_configuration(getattr(model, "config", None))


def _accepts(asked: frozenset[str], stated_layout: ParallelLayout) -> Callable[[ParallelLayout], bool]:
    """Return a function that tells whether a layout leaves as it is what the configuration states."""
    free = {"data", "replicate", "tensor", "sequence"} if MESH in asked else set()
    free |= {"micro_batch", "accumulation"} if asked & {MESH, MICRO} else set()
    # A plan of saved tensors is made afterwards, for the layout: it is no slower than the policies that are searched.
    free |= {"recompute", "activations_on_host"} if stated_layout.recompute is Recompute.PLANNED else set()
    # Never stages or spread sequences: a loop that calls the engine itself would have to be written for them.
    names = [
        field.name
        for field in fields(stated_layout)
        if field.name not in {*free, "row", "schedule", "chunks", "costs", "widths"}
    ]

    def accepts(layout: ParallelLayout) -> bool:
        row, stated_row = layout.row, stated_layout.row
        if OFFLOAD in asked:
            # A file's folder is for the user to name.
            rests = Tier.NVME not in (row.parameter_tier, row.optimizer_tier)
        else:
            rests = _tiers(row) == _tiers(stated_row)
        # A group of one rank has nothing to shard, whatever the stage is.
        alike = STAGE in asked or layout.stage == stated_layout.stage or layout.data * layout.context == 1
        return rests and alike and all(getattr(layout, name) == getattr(stated_layout, name) for name in names)

    return accepts


def _tiers(row: PlacementRow) -> tuple[Any, ...]:
    return row.parameter_tier, row.optimizer_tier, row.offloaded, row.split


def example_of(chosen: Arguments) -> tuple[nn.Module, Mapping[str, Any], Callable[[Any], Any] | None]:
    """Return the model, arguments of its forward for two samples, and the loss of its output, if it has none."""
    model, data = chosen.model, chosen.data
    if data is None:
        dummy = getattr(model, "dummy_inputs", None)  # of models of transformers
        return model, dict(dummy) if isinstance(dummy, Mapping) else {}, None
    samples = [data[0], data[1 % len(data)]]
    batch = chosen.collate_fn(samples) if chosen.collate_fn is not None else default_collate(samples)
    if isinstance(batch, Mapping):
        return model, dict(batch), None
    parts = list(batch) if isinstance(batch, tuple | list) else [batch]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in inspect.signature(model.forward).parameters.items() if parameter.kind in kinds]
    if chosen.loss_fn is not None and len(parts) == 2:
        return model, {names[0]: parts[0]}, _loss_without_values(chosen.loss_fn, parts[1])
    return model, dict(zip(names, parts, strict=False)), None


def _loss_without_values(loss_fn: Callable[[Any, Any], Any], labels: Any) -> Callable[[Any], Any]:
    """Return the loss of an output for labels like these, of as many samples as the output has."""
    from zeromesh.apps.plan.cost.cost_trace import resized, sequence_of

    inputs = {"labels": labels}

    def loss(output: Any) -> Any:
        rows = next(tensor.shape[0] for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor))
        return loss_fn(output, resized(inputs)(rows, sequence_of(inputs))["labels"])

    return loss
