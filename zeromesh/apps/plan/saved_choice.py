"""Plans of saved tensors for runs: the budget, the cost of the run's own model, and the same plan on all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zeromesh.apps.plan.automatic import example_of
from zeromesh.base.saved_tensors import BlockPlan, Saved
from zeromesh.base.words import bytes_text, counted
from zeromesh.comm.agreement import agree_run, texts
from zeromesh.comm.collectives import Group
from zeromesh.comm.environment import Environment
from zeromesh.engine.initialize.run_plan import Arguments

if TYPE_CHECKING:
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
    from zeromesh.apps.plan.saved import planned_cost
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
