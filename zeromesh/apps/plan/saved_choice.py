"""Plans of saved tensors for runs: the budget, the cost of the run's own model, and the same plan on all ranks."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zeromesh.apps.plan.automatic import example_of, planned_by_first
from zeromesh.base.saved_tensors import BlockPlan, Saved
from zeromesh.base.words import bytes_text, counted
from zeromesh.comm.environment import Environment
from zeromesh.engine.initialize.run_plan import Plan

if TYPE_CHECKING:
    from zeromesh.config.settings import Settings

_log = logging.getLogger("zeromesh")


def choose_saved(plan: Plan, settings: Settings, environment: Environment) -> Plan:
    """Return the plan with what each block leaves for its backward, where that is left to the planner. Collective.

    Raises:
        ValueError: there are no samples to plan for, the model cannot be traced, or no plan keeps to the budget.
    """
    if not settings.activation_checkpointing.planned:
        return plan

    planned = partial(_rows, plan, settings, environment)
    rows = planned_by_first(plan.world, environment, "plan what its blocks save", planned)
    saved = {
        name: BlockPlan(Saved(inputs), {(operator, n): Saved(fate) for operator, n, fate in results}, keeps_all)
        for name, inputs, keeps_all, results in rows
    }
    return replace(plan, saved=saved)


def _rows(plan: Plan, settings: Settings, environment: Environment) -> list[list[object]]:
    """Return a row for each block: its name, the fate of its inputs, whether it keeps all, and fates of results."""
    # Imported here: only runs that ask for a plan pay for the planner.
    from zeromesh.apps.plan.choose.layout_documents import layout_from
    from zeromesh.apps.plan.machine.here import cost_here, machine_here
    from zeromesh.apps.plan.saved import planned_cost
    from zeromesh.apps.train.run_example import run_example
    from zeromesh.apps.train.train_settings import TrainSettings

    layout, _ = layout_from(settings, environment.world_size)
    if plan.arguments.data is not None:
        model, inputs, loss = example_of(plan.arguments)
    elif isinstance(settings, TrainSettings) and (settings.model or settings.huggingface):
        model, (inputs, loss) = plan.model, run_example(settings, layout.micro_batch)
    else:
        raise ValueError(
            'activation_checkpointing.granularity is "auto", and what blocks save depends on the size of the samples; '
            'pass training_data to initialize, or set granularity to "full" or "selective"'
        )
    source, sequence = cost_here(model, inputs, loss, settings)
    ranks = environment.local_world_size
    machine = machine_here(ranks, environment.world_size // ranks)
    firsts = None if plan.stages is None else plan.stages.firsts
    planned = planned_cost(settings, source, sequence, layout, machine, firsts)
    fullest = max(planned.ranks, key=lambda rank: rank.peak)
    _log.info(
        "the planner chose what %s save: %s of activations at the peak, %s on the host, %.3g ms computed again",
        counted(len(planned.blocks), "block"),
        bytes_text(fullest.peak),
        bytes_text(fullest.costs.moved(fullest.plans)),
        1e3 * fullest.costs.seconds(fullest.plans),
    )
    return [
        [cost.name, block.inputs.value, block.keeps_all, [[*key, fate.value] for key, fate in block.results.items()]]
        for cost, block in planned.blocks
    ]
