"""Layouts that the planner chooses at the start of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh import Environment, init_distributed
from zeromesh.apps.plan.automatic import asked_of_planner, filled_in, repeated
from zeromesh.apps.train.check import Job, build_model
from zeromesh.apps.train.run_example import run_example
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.machine import cpu_threads
from zeromesh.comm.agreement import world_group
from zeromesh.comm.detect import is_launched
from zeromesh.comm.environment import device_of_group

ROWS = 2  # samples of the forward that the planner traces first


def planned(config: Path | Mapping[str, Any], overrides: Sequence[str], settings: TrainSettings) -> TrainSettings:
    """Return the settings with what is "auto" filled in by the planner. Collective under a launcher.

    A run that is resumed on as many ranks keeps what it had.
    """
    asked = asked_of_planner(config, overrides)
    if not asked:
        return settings
    job = Job.of(settings)
    if settings.dpo is not None:
        raise ValueError(
            f'dpo: the planner knows no samples of two answers; write numbers instead of "auto" for {asked}'
        )
    launched = is_launched()
    ranks = job.run.ranks
    environment = Environment.detect() if launched else Environment(world_size=ranks, local_world_size=ranks)
    if job.run.resume and job.folder.config.is_file():
        previous = repeated(settings, asked, job.folder.settings(), environment.world_size)
        if previous is not None:
            return previous

    def example() -> tuple[nn.Module, Mapping[str, Any], Callable[[Any], torch.Tensor]]:
        return build_model(job), *run_example(job.settings, ROWS)

    # The machine is measured with as many threads as each rank will have.
    shared = 1 if launched or "OMP_NUM_THREADS" in os.environ else ranks
    with cpu_threads(job.run.threads or max(1, torch.get_num_threads() // shared)):
        if not launched:
            return filled_in(settings, asked, example, environment, None)
        environment = init_distributed()  # with the ranks of this node, which the launcher may not tell
        world = world_group(device_of_group(environment))
        return filled_in(settings, asked, example, environment, world)
