"""Functions of the package ``deepspeed`` itself: ``initialize`` and what comes before it."""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial
from typing import Any

from torch import nn

from zeromesh import build
from zeromesh.comm.environment import init_distributed
from zeromesh.config import keys
from zeromesh.deepspeed.engine import DeepSpeedEngine, PipelineEngine
from zeromesh.initialization.plan import Arguments
from zeromesh.pipe import PipelineModule
from zeromesh.signatures import refuse


def initialize(
    args: Any = None, model: nn.Module | None = None, optimizer: Any = None, model_parameters: Any = None,
    training_data: Any = None, lr_scheduler: Any = None, distributed_port: int | None = None, mpu: Any = None,
    dist_init_required: bool | None = None, collate_fn: Any = None, config: Any = None, mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:  # fmt: skip
    """Make a model train as the configuration says: DeepSpeed's ``initialize``, with its order of arguments.

    ``zeromesh.initialize`` describes the arguments.

    Returns:
        The engine, the optimizer, the loader of ``training_data`` or None, the scheduler or None.
    """
    sizes = f"set the sizes of the axes in the configuration, as in {keys.SIZES_OF_AXES}"
    refuse("initialize", "mpu", mpu, sizes)
    refuse("initialize", "mesh_param", mesh_param, sizes)
    model = build.require_module(model)
    given = build.only_configuration(config, config_params, args)
    kind = PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
    chosen = Arguments(model, given, optimizer, model_parameters, lr_scheduler, training_data, collate_fn, None)
    start = partial(init_distributed, distributed_port=distributed_port, dist_init_required=dist_init_required)
    engine, *others = build.run_steps(chosen, start, kind=kind)
    assert isinstance(engine, DeepSpeedEngine)
    return engine, *others


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add DeepSpeed's options to the parser of a script, and return it."""
    group = parser.add_argument_group("DeepSpeed", "options of DeepSpeed, which ZeroMesh reads")
    group.add_argument("--deepspeed", action="store_true", help="accepted; the script decides what it means")
    group.add_argument("--deepspeed_config", type=str, help="path of the configuration, a JSON file")
    # Options of older scripts, which their launchers still pass.
    group.add_argument("--deepscale", action="store_true", help="older name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, help="older name of --deepspeed_config")
    return parser
