"""``initialize`` for users: its arguments. ``engine/initialize/steps.py`` has its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zeromesh.apps.plan.automatic import choose_layout
from zeromesh.apps.plan.compare import prediction
from zeromesh.apps.plan.saved_choice import choose_saved
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.keras_layers import refuse_other_backends
from zeromesh.base.requirements import untested_torch
from zeromesh.base.signatures import refuse, takes_args_first
from zeromesh.comm.agreement import world_group
from zeromesh.comm.environment import Environment, device_of_group, init_distributed
from zeromesh.comm.mesh import Mesh
from zeromesh.engine.engine import Engine
from zeromesh.engine.initialize import steps
from zeromesh.engine.initialize.model_layout import make_mesh
from zeromesh.engine.initialize.place_model import place_model
from zeromesh.engine.initialize.run_plan import Arguments, Config
from zeromesh.engine.pipeline_module import PipelineModule
from zeromesh.engine.state import EngineState

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from zeromesh.base.loader import Loader
    from zeromesh.config.settings import Settings

__all__ = ["initialize", "make_mesh"]


@takes_args_first
def initialize(
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Config | Settings | None = None,
    mesh: Mesh | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    args: Any = None,
    config_params: Config | None = None,
    dist_init_required: bool | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    mesh_param: Any = None,
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Make a model train as the configuration says.

    The process group is started if nobody has. The model is changed in place: its modules stay the same objects, its
    parameters are placed over the ranks. All ranks start from the first rank's weights.

    Positional arguments whose first is not a module are taken in DeepSpeed's order, which begins with ``args``.

    Args:
        model: any module; its parameters may be on the meta device if it was built under ``zeromesh.zero.Init``.
        optimizer: one built over the model's parameters, or a function from parameters to one, in place of the
            configuration's.
        model_parameters: what the configuration's optimizer updates: parameters or groups as torch's optimizers take
            them; all trainable ones by default.
        training_data: a data set, for which a loader is made that gives each rank its share. Every pass over it has
            another order, which follows from the seed and the number of the pass; ``loader.sampler.set_epoch`` sets
            the number. A ``PipelineModule`` gets the samples in the data set's order, as in DeepSpeed. After
            ``load_checkpoint`` the next pass goes on where the checkpoint was written. Where ``mesh.pipeline`` is
            greater than 1, the first samples are read once more, to see what the model does.
        lr_scheduler: one built on ``optimizer``, or a function from an optimizer to one.
        collate_fn: for the loader.
        config: path of a JSON or YAML file in DeepSpeed's format, a dict of the same form, or settings.
        mesh: the ranks; made from the configuration by default.
        loss_fn: from the model's output and the labels to the loss, for ``train_batch``, if the model returns no loss.
        args: an object whose ``deepspeed_config`` names the file, as DeepSpeed's launcher makes it.
        config_params: DeepSpeed's older name of ``config``.
        dist_init_required: False refuses to start a process group; else it is started when there is none.
        distributed_port: port of the master, where neither MASTER_PORT nor torchrun says it.
        mpu: None; ``mesh`` in the configuration says which ranks share a model.
        mesh_param: None, as ``mpu``.

    Returns:
        The engine, the optimizer, the loader of ``training_data`` or None, the scheduler or None.

    Raises:
        ConfigError: a ValueError that lists everything wrong with the configuration.
        TypeError: positional arguments that mean nothing in this order or in DeepSpeed's.
        ValueError: the model cannot be trained this way, an argument cannot be honoured, or the ranks have different
            configurations or models. Unless a note of the error says otherwise, the model is as it was, and may be
            tried again.
    """
    sizes = 'set the sizes of the axes in the configuration, as in "mesh": {"data": 4, "tensor": 2}'
    refuse("initialize", "mpu", mpu, sizes)
    refuse("initialize", "mesh_param", mesh_param, sizes)
    configuration = only_configuration(config, config_params, args)
    chosen = Arguments(
        require_module(model),
        configuration,
        optimizer,
        model_parameters,
        lr_scheduler,
        training_data,
        collate_fn,
        loss_fn,
    )
    start = partial(init_distributed, distributed_port=distributed_port, dist_init_required=dist_init_required)
    return run_steps(chosen, start, mesh)


def require_module(model: object) -> nn.Module:
    """Return the model that ``initialize`` was given; raise ValueError if it is none."""
    # The drop-in's is a module, too.
    if isinstance(model, Engine):
        raise ValueError("initialize was given an engine, which trains already; pass the model itself")
    refuse_other_backends(model)
    if not isinstance(model, nn.Module):
        named = "" if model is None else f", not a {type(model).__name__}"
        raise ValueError(f"initialize needs a model: pass model= with a torch.nn.Module{named}")
    return model


def only_configuration(config: Any, config_params: Any, args: Any) -> Any:
    """Return the configuration from the arguments that may have it; raise ValueError if none or two have one."""
    from_args: Config | None = getattr(args, "deepspeed_config", None)
    configuration = config if config is not None else config_params
    if configuration is not None and from_args is not None:
        raise ValueError(
            f"initialize was given two configurations: config= and args.deepspeed_config = {from_args!r}; pass one"
        )
    configuration = configuration if configuration is not None else from_args
    if configuration is None:
        raise ValueError("initialize needs a configuration: pass config= with a path or a dict")
    return configuration


def run_steps(
    chosen: Arguments,
    start: Callable[[], Environment],
    mesh: Mesh | None = None,
    kind: Callable[[EngineState], Engine] = Engine,
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Run the steps of ``initialize``.

    Args:
        chosen: arguments of the user's.
        start: starts the process group unless there is one.
        mesh: as in ``initialize``.
        kind: makes the engine of its state.
    """
    if chosen.loss_fn is None and isinstance(chosen.model, PipelineModule):
        chosen = replace(chosen, loss_fn=chosen.model.loss_fn)
    _show_log()
    if notice := untested_torch(torch.__version__):
        logging.getLogger("zeromesh").info(notice)
    # The file may be one of zeromesh train's, whose sections are checked, too.
    settings, environment = steps.read_configuration(chosen, mesh, start, TrainSettings.load)
    world = world_group(device_of_group(environment))
    settings = choose_layout(chosen, settings, world, environment)
    plan = steps.plan_run(chosen, settings, mesh or make_mesh(settings, environment))
    plan = choose_saved(plan, settings, environment)
    return steps.make_engine(place_model(plan), prediction, kind)


def _show_log() -> None:
    """Write the log to standard error unless the user has configured it; the first rank writes from INFO on."""
    logger = logging.getLogger("zeromesh")
    if logger.handlers or logging.root.handlers or logger.level != logging.NOTSET:
        return
    # The process group may start only later: then the environment of the launcher knows the rank.
    first = (dist.get_rank() if dist.is_initialized() else Environment.detect().rank) == 0
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("zeromesh: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if first else logging.WARNING)
