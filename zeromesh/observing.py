"""From the settings to what watches an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromesh.comm.mesh import Mesh
from zeromesh.observe.monitors import Monitor, open_monitor
from zeromesh.observe.observer import Observer
from zeromesh.observe.profile import FlopsPlan
from zeromesh.observe.spans import collective
from zeromesh.observe.trace import Window

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved

BREAKDOWN_EVERY = 10
"""Updates between breakdowns where ``steps_per_print`` does not say."""

ARGUMENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "tensorboard": lambda chosen: (Path(chosen.output_path) / chosen.job_name,),
    "csv_monitor": lambda chosen: (Path(chosen.output_path) / chosen.job_name,),
    "wandb": lambda chosen: (chosen.group, chosen.team, chosen.project),
}
"""Return the arguments of each monitor's writer, by the name of its section."""


def open_monitors(settings: Resolved, mesh: Mesh) -> Monitor:
    """The monitors that are switched on; only the first rank has any.

    Raises:
        ImportError: one needs a package that is not installed.
        OSError: a folder cannot be made.
    """
    chosen = {name: getattr(settings, name) for name in ARGUMENTS} if mesh.rank == 0 else {}
    opened = {
        name: open_monitor(name, *ARGUMENTS[name](section)) for name, section in chosen.items() if section.enabled
    }
    return Monitor(opened)


def make_observer(model: nn.Module, settings: Resolved, mesh: Mesh, monitor: Monitor) -> Observer:
    """Return the observer of the engine on this rank."""
    every = (settings.steps_per_print or BREAKDOWN_EVERY) if settings.wall_clock_breakdown else 0
    trace, flops, window, plan = settings.profile, settings.flops_profiler, None, None
    if trace.enabled:
        window = Window(trace.start_step, trace.steps, Path(trace.output).absolute(), trace.memory)
    if flops.enabled:
        plan = FlopsPlan(
            after=flops.profile_step,
            depth=flops.module_depth,
            top=flops.top_modules,
            detailed=flops.detailed,
            output=Path(flops.output_file).absolute() if flops.output_file else None,
            dtype=settings.precision.compute or settings.precision.autocast or torch.float32,
        )
    mesh.traffic.listener = collective  # of no engine, as engines may share a mesh
    # A run of ``zeromesh train`` ends with a report of what bounded it.
    return Observer(model, mesh.device, mesh.rank, monitor, every, window, plan, whole=settings.run is not None)
