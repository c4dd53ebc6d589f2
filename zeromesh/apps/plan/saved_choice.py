"""Plans of saved tensors for runs: the budget, the cost of the run's own model, and the same plan on all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from zeromesh.apps.plan.automatic import example_of
from zeromesh.base.saved_tensors import BlockPlan, Saved
from zeromesh.base.words import bytes_text, counted
from zeromesh.comm.agreement import agree_run, texts
from zeromesh.comm.collectives import Group
from zeromesh.comm.environment import Environment
from zeromesh.engine.initialize.run_plan import Arguments

if TYPE_CHECKING:
    from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
    from zeromesh.apps.plan.cost.cost import CostSource
    from zeromesh.apps.plan.machine.cluster import Machine
    from zeromesh.apps.plan.saved import PlannedCost
    from zeromesh.config.settings import Settings

_log = logging.getLogger("zeromesh")


def choose_saved(
    chosen: Arguments, settings: Settings, world: Group, environment: Environment
) -> Mapping[str, BlockPlan] | None:
    """Return what each block leaves for its backward, by name; None where that is not left to the planner. Collective.

    Raises:
        ValueError: there are no samples to plan for, the model cannot be traced, or no plan keeps to the budget.
    """
    if not settings.activation_checkpointing.planned:
        return None

    def plan() -> list[list[object]]:
        # One rank plans for all: what it measures of the machine may differ from rank to rank.
        return _plan(chosen, settings, environment) if environment.rank == 0 else []

    rows = agree_run(world, "plan what its blocks save", plan)
    return {
        name: BlockPlan(Saved(inputs), {(operator, n): Saved(fate) for operator, n, fate in results}, keeps_all)
        for name, inputs, keeps_all, results in json.loads(texts(world, json.dumps(rows))[0])
    }


def _plan(chosen: Arguments, settings: Settings, environment: Environment) -> list[list[object]]:
    """Return a row for each block: its name, the fate of its inputs, whether it keeps all, and fates of results."""
    # Imported here: only runs that ask for a plan pay for the planner.
    from zeromesh.apps.plan.choose.layout_documents import layout_from
    from zeromesh.apps.plan.machine.here import cost_here, machine_here
    from zeromesh.apps.train.run_example import run_example
    from zeromesh.apps.train.train_settings import TrainSettings

    layout, _ = layout_from(settings, environment.world_size)
    if chosen.data is not None:
        model, inputs, loss = example_of(chosen)
    elif isinstance(settings, TrainSettings) and (settings.model or settings.huggingface):
        model, (inputs, loss) = chosen.model, run_example(settings, layout.micro_batch)
    else:
        raise ValueError(
            'activation_checkpointing.granularity is "auto", and what blocks save depends on the size of the samples; '
            'pass training_data to initialize, or set granularity to "full" or "selective"'
        )
    source, sequence = cost_here(model, inputs, loss, settings)
    ranks = environment.local_world_size
    machine = machine_here(ranks, environment.world_size // ranks)
    planned = planned_cost(settings, source, sequence, layout, machine)
    costs, blocks = planned.costs, planned.plan.blocks
    _log.info(
        "the planner chose what %s save: %s of activations at the peak, %s on the host, %.3g ms computed again",
        counted(len(blocks), "block"),
        bytes_text(costs.peak(planned.plan)),
        bytes_text(costs.moved(planned.plan)),
        1e3 * costs.seconds(planned.plan),
    )
    return [
        [cost.name, block.inputs.value, block.keeps_all, [[*key, fate.value] for key, fate in block.results.items()]]
        for cost, block in zip(costs.blocks, blocks, strict=True)
    ]


def planned_cost(
    settings: Settings, source: CostSource, sequence: int, layout: ParallelLayout, machine: Machine
) -> PlannedCost:
    """Return the cost of a run with the plan that its settings ask for; raise ValueError as ``choose_saved``."""
    from zeromesh.apps.plan.saved import PlannedCost, choose, saved_costs

    costs = saved_costs(
        source.at(layout.micro_batch * settings.rows_per_sample, sequence, layout.context), machine, layout
    )
    if settings.compile.enabled:
        costs = replace(costs, link=0.0)  # moves cannot be traced
    gigabytes = settings.activation_checkpointing.budget_gb
    budget = gigabytes * 1e9 if gigabytes is not None else _left(source, sequence, layout, machine)
    return PlannedCost(source, costs, choose(costs, budget))


def _left(source: CostSource, sequence: int, layout: ParallelLayout, machine: Machine) -> float:
    """Return the bytes of a device that a run's states leave for activations, less the planner's own error."""
    from zeromesh.apps.plan.choose.fit import lacking
    from zeromesh.apps.plan.cost.cost import Recompute
    from zeromesh.apps.plan.predict.rank_memory import Moment, memory_of

    ranks = []
    for rank in memory_of(source, sequence, replace(layout, recompute=Recompute.NONE), machine):
        states = (
            {name: size for name, size in moment.bytes.items() if name not in ("activation", "temporary")}
            for moment in rank.timeline
        )
        ranks.append(replace(rank, timeline=tuple(Moment("states", sizes) for sizes in states)))
    # Ranks on a processor share its memory.
    node = machine.nodes[0][0]
    return -lacking(ranks, layout, machine)["device"] / (
        min(node.devices, layout.ranks) if node.device.processor else 1
    )
