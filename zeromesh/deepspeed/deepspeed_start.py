"""Functions of the package ``deepspeed`` itself: ``initialize`` and what comes before it."""

from __future__ import annotations

import json
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from zeromesh import build
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.signatures import refuse
from zeromesh.checkpoint.whole import parameter_copies
from zeromesh.comm.environment import Environment
from zeromesh.config.adopt import adopt, fill_defaults, share_layers, warn_of
from zeromesh.config.document import read_object
from zeromesh.config.engine_answers import Asked, answer
from zeromesh.config.errors import ConfigError
from zeromesh.config.settings import Settings
from zeromesh.deepspeed.deepspeed_engine import DeepSpeedEngine
from zeromesh.deepspeed.lr_schedules import configured
from zeromesh.deepspeed.pipeline import PipelineEngine
from zeromesh.deepspeed.questions import data_seed
from zeromesh.deepspeed.start_group import init_distributed
from zeromesh.deepspeed.wrappers import require_supported
from zeromesh.engine import owners
from zeromesh.engine.initialize.run_plan import Arguments
from zeromesh.engine.pipeline_module import PipelineModule
from zeromesh.shard.parameters.absent_guard import OWN_CLASS, change_class

_log = logging.getLogger("zeromesh")

# Ranks that share the layers of a model, from ``tp_model_init`` to ``initialize``.
_WANTED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Make a model train as the configuration says: DeepSpeed's ``initialize``, with its order of arguments.

    ``zeromesh.initialize`` describes the arguments.

    Returns:
        The engine, the optimizer, the loader of ``training_data`` or None, the scheduler or None.

    Raises:
        AssertionError: there is no model, no configuration, or more than one.
        ValueError: as ``zeromesh.initialize``.
    """
    _accept(mpu, mesh_param)
    if model is None:
        raise AssertionError("initialize needs a model: pass model= with a torch.nn.Module")
    model = build.require_module(model)
    written, document = _configuration(config, config_params, args)
    if model in _WANTED and isinstance(document, dict):
        share_layers(document, _WANTED[model])
    # DeepSpeed's stages 1 and 2 need an optimizer, which a model that is only evaluated has no use for.
    updates = model_parameters != [] and any(parameter.requires_grad for parameter in model.parameters())
    make = PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
    try:
        asked = Asked(written, TrainSettings.load(document, tells=False))
        require_supported(optimizer, asked, updates)
        answer("checkpoint_tag_validation_fail", asked)  # an unknown value is refused now, not at the first save
    except ConfigError as error:
        raise DeepSpeedConfigError(error.problems, error.source) from None
    if lr_scheduler is None and (optimizer is not None or asked.settings.optimizer is not None):
        # As one of DeepSpeed's classes, which programs ask for ``get_lr`` and the schedule's values.
        lr_scheduler = configured(written)
    # The engine's ``step`` takes its metric in ``lr_kwargs``, and Lightning steps it without the engine.
    plateau = lr_scheduler if isinstance(lr_scheduler, ReduceLROnPlateau) else None
    model = _release(model)  # not before the configuration is known to be right
    launched = Environment.detect()
    if launched.placed:
        _align_local_rank(args, launched)
    chosen = Arguments(
        model,
        document,
        optimizer,
        model_parameters,
        # With a section ``scheduler`` it is refused, as any other is.
        None if plateau is not None and asked.settings.scheduler is None else lr_scheduler,
        training_data,
        collate_fn,
        None,
        data_seed(asked),
    )

    def start() -> Environment:
        started = init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
        if not launched.placed:
            _align_local_rank(args, started)
        return started

    users = optimizer is not None
    make_engine = partial(make, document=written, mpu=mpu, users_optimizer=users, plateau=plateau)
    engine, *others = build.run_steps(chosen, start, kind=make_engine)
    assert isinstance(engine, DeepSpeedEngine)
    _warn_of_forgotten(optimizer)
    return engine, *others[:2], engine.lr_scheduler


def _align_local_rank(args: Any, environment: Environment) -> None:
    """Let the script's ``args.local_rank`` be this process's place on its node; AssertionError if it is another."""
    if not hasattr(args, "local_rank"):
        return
    place = environment.local_rank
    if args.local_rank is not None and (not isinstance(args.local_rank, int) or args.local_rank not in (-1, place)):
        raise AssertionError(
            f"args.local_rank is {args.local_rank!r}, but this process is number {place} of its node; leave it out, or "
            "set it to LOCAL_RANK"
        )
    vars(args).update(local_rank=place)


class DeepSpeedConfigError(ConfigError, AssertionError):
    """Error of a configuration: for some of them DeepSpeed raises AssertionError, for others its own."""


def _warn_of_forgotten(optimizer: Any) -> None:
    """Warn where transformers' Trainer, which calls this, has dropped the optimizer of its ``optimizers=``."""
    trainers, frame = sys.modules.get("transformers.trainer"), sys._getframe()
    while trainers is not None and frame.f_back is not None:
        frame = frame.f_back
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, trainers.Trainer):
            passed = trainer.callback_handler.optimizer  # what it was made with; after a first run, Accelerate's
            if passed not in (None, optimizer) and not type(passed).__module__.startswith("accelerate."):
                _log.warning(
                    "transformers drops the %s of Trainer(optimizers=...) where its arguments name a configuration of "
                    "DeepSpeed, and updates by another optimizer: use zeromesh.hf.Trainer(zeromesh=...) in its place, "
                    "which takes yours, return it from create_optimizer, or name it in the configuration",
                    type(passed).__name__,
                )
            return


def _release(model: nn.Module) -> nn.Module:
    """Return a model, freed from the engine that this module's ``initialize`` made of it. Collective at stage 3.

    A model may be initialised again in DeepSpeed. Of an engine that is gone, what placed its parameters is still there.
    """
    owner = next(filter(None, map(owners.engine_of, model.parameters())), None)
    sharded = next(filter(None, map(owners.sharded_of, model.parameters())), None)
    if sharded is not None and (owner is None or isinstance(owner, DeepSpeedEngine)):
        if owner is not None:
            _log.warning("this model already has an engine, which can no longer train it")
        owned = [weight for weight in model.parameters() if sharded.sharded and owners.sharded_of(weight) is sharded]
        values = parameter_copies(sharded) if owned else {}
        (sharded.close if owner is None else owner.destroy)()
        for parameter in owned:
            change_class(parameter, getattr(type(parameter), OWN_CLASS, type(parameter)))
            with torch.no_grad():
                parameter.set_(values[id(parameter)])  # type: ignore[call-overload]
    return model


def _accept(mpu: Any, mesh_param: Any) -> None:
    """Raise ValueError unless these describe ranks that share nothing but the data."""
    sizes = 'set the sizes of the axes in the configuration, as in "mesh": {"data": 4, "tensor": 2}'
    asked = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size", "get_pipe_parallel_world_size")
    shared = [name for name in asked if mpu is not None and getattr(mpu, name, lambda: 1)() > 1]
    # Megatron's object is passed also where ranks share no layers.
    if mpu is not None and (shared or not any(hasattr(mpu, name) for name in asked)):
        refuse("initialize", "mpu", mpu, sizes)
    if mesh_param is not None and (len(mesh_param) < 2 or mesh_param[1] != 1):
        refuse("initialize", "mesh_param", mesh_param, sizes)


def _configuration(config: Any, config_params: Any, args: Any) -> tuple[dict[str, Any], Any]:
    """Return the configuration as it was written, and as the strict reader takes it; warn of what differs."""
    if args is not None and getattr(args, "deepscale_config", None) is not None:
        args = Namespace(deepspeed_config=args.deepscale_config)  # the older name
    try:
        source = build.only_configuration(config, config_params, args)
    except ValueError as error:
        raise AssertionError(error) from None
    if isinstance(source, Settings):
        return json.loads(source.to_json()), source
    if not isinstance(source, str | Path | Mapping):
        raise DeepSpeedConfigError([f"it is a {type(source).__name__}; pass a path or a dict"], "the configuration")
    document, changes = adopt(source, TrainSettings)
    changes += fill_defaults(document, autos=True)
    if Environment.detect().rank == 0:
        warn_of(changes)
    return dict(source) if isinstance(source, Mapping) else read_object(Path(source)), document


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Note that ``initialize`` is to split the layers of a model over ``tp_size`` ranks; return the model.

    Args:
        model: it is converted to ``dtype``, and split when ``initialize`` places it.
        tp_size: ranks that share each layer.
        dtype: of its parameters.
        config: not needed here; pass it to ``initialize``.
        kwargs: none; other options of DeepSpeed are refused.
    """
    for name, value in kwargs.items():
        refuse("tp_model_init", name, value, "leave it out; layers are found by themselves (docs/tensor.md)")
    if tp_size < 1:
        raise ValueError(f"tp_model_init: tp_size is {tp_size}; it must be at least 1")
    _WANTED[model] = tp_size
    return model.to(dtype)


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Accept the call: Muon finds out by itself which parameters are matrices."""


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add DeepSpeed's options to the parser of a script, and return it."""
    group = parser.add_argument_group("DeepSpeed", "options of DeepSpeed, which ZeroMesh reads")
    group.add_argument("--deepspeed", action="store_true", help="accepted; the script decides what it means")
    group.add_argument("--deepspeed_config", type=str, help="path of the configuration, a JSON file")
    # Options of older scripts, which their launchers still pass.
    group.add_argument("--deepscale", action="store_true", help="older name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, help="older name of --deepspeed_config")
    return parser
