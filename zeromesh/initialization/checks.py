"""Checks of a model before anything is changed."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from zeromesh import zero
from zeromesh.model.placement import Placement
from zeromesh.shard import guard, hooks
from zeromesh.shard.find import check_compiled, check_parameters, find_units

if TYPE_CHECKING:
    from zeromesh.config.settings import Settings


def check_model(model: nn.Module, lr_scheduler: Any, settings: Settings) -> None:
    """Raise an error for a model or a scheduler that cannot be trained.

    Raises:
        ValueError: with the rule and the remedy.
    """
    # Two engines would move the same memory.
    taken = [name for name, module in model.named_modules() if _is_driven(module)]
    for name, parameter in model.named_parameters():
        owner = zero.engine_of(parameter)
        is_left_sharded = type(parameter).__module__ == guard.__name__  # by an engine that was destroyed
        if is_left_sharded or (owner is not None and _is_driven(owner.module)):
            taken.append(name)
    if taken:
        raise ValueError(
            f"{taken[0] or 'the model'} already belongs to an engine; train with that one, or pass another model, "
            "which may load the weights that the engine's gathered_state_dict() gives; where parameters are not "
            "sharded, the model is free again after engine.destroy()"
        )
    check_parameters(model)
    find_units(model, settings.units)
    if settings.activation_checkpointing.enabled:
        find_units(model, settings.activation_checkpointing.targets)
    if settings.row.parameter is Placement.SHARDED:
        check_compiled(model, settings.units)
    if lr_scheduler is not None and not makes_scheduler(lr_scheduler):
        check_scheduler(lr_scheduler)


def _is_driven(module: nn.Module) -> bool:
    """Return whether a living engine has hooks on the module's forward."""
    return any(isinstance(hook, hooks.Hook) for hook in module._forward_pre_hooks.values())


def makes_scheduler(given: Any) -> bool:
    """Return whether ``given`` makes a scheduler (a function or a class) and is none itself."""
    return isinstance(given, type) or not hasattr(given, "step")


def check_scheduler(scheduler: Any) -> None:
    """Raise ValueError if the scheduler's ``step`` needs arguments, which the engine does not have."""
    arguments = inspect.signature(scheduler.step).parameters.values()
    needed = [a.name for a in arguments if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    if needed:
        raise ValueError(
            f"{type(scheduler).__name__}.step needs {', '.join(needed)}, which the engine does not have; pass no "
            "lr_scheduler, and call its step yourself"
        )
