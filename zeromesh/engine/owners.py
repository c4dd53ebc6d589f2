"""Engines of parameters."""

from __future__ import annotations

import logging
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from zeromesh.shard.optim.bound import PartHook
from zeromesh.shard.parameters.absent_guard import AbsentError

if TYPE_CHECKING:
    from zeromesh.engine.engine import Engine
    from zeromesh.shard.sharded import ShardedModel

# Functions of users are given a bare parameter. Which engine it belongs to is kept here, and not on the parameter, so
# that users' parameters stay as they made them. Both sides are weak: an engine that nobody else holds goes away.
_OWNERS: Any = WeakIdKeyDictionary()
_PLACES: Any = WeakIdKeyDictionary()  # parameters, and the ``ShardedModel`` that placed them
_ELSEWHERE: Any = WeakIdKeyDictionary()  # stand-ins of other stages' parameters, and their engine
_ENGINES: list[ref[Engine]] = []  # by age
_TOLD: Any = WeakSet()  # optimizers that were warned of
_log = logging.getLogger("zeromesh")


def register(engine: Engine) -> None:
    """Let functions find these parameters' engine, and know those of other stages."""
    _watch_optimizers()
    _ENGINES[:] = [reference for reference in _ENGINES if reference() is not None] + [ref(engine)]
    for flat in engine.sharded.flats:
        for parameter in flat.parameters:
            _OWNERS[parameter], _PLACES[parameter] = ref(engine), ref(engine.sharded)
    # Zeros that are no parameters are in their places; users may hand them to functions all the same.
    if engine.pipelined is not None:
        for module, name in engine.pipelined.taken:
            _ELSEWHERE[vars(module)[name]] = ref(engine)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(PartHook(_refuse_outside))


def _refuse_outside(optimizer: Optimizer, *ignored: Any) -> None:
    """Raise RuntimeError if an optimizer is about to update parameters of an engine that it does not belong to.

    Where parameters and gradients are whole it may, as in torch, with a warning.
    """
    # One parameter of each group tells: this runs before every update of every optimizer.
    firsts = [parameter for group in optimizer.param_groups for parameter in group["params"][:1]]
    engine = next(filter(None, map(engine_of, firsts)), None)
    if engine is None or engine.optimizer is optimizer or optimizer in _TOLD:
        return
    kind = type(optimizer).__name__
    if engine.optimizer is None:
        remedy = "pass it to initialize, as optimizer=optimizer, and call engine.step() instead"
    else:
        remedy = (
            f"the engine updates them by {type(engine.optimizer).__name__} in engine.step(); leave out this one, and "
            "its step() and zero_grad()"
        )
    text = (
        f"{kind}.step() would update parameters that an engine has placed, past its master weights, clipping and "
        f"accumulation; this optimizer was not passed to initialize: {remedy}"
    )
    if engine.sharded.sharded or not _has_whole_gradients(optimizer):
        raise RuntimeError(text)
    _TOLD.add(optimizer)
    _log.warning("%s", text)


def _has_whole_gradients(optimizer: Optimizer) -> bool:
    try:
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if parameter.grad is not None:
                parameter.grad.sum()  # an absent one may be looked at, and not be computed with
        return True
    except AbsentError:
        return False


def engine_of(parameter: nn.Parameter) -> Engine | None:
    """Return the living engine that owns a parameter; None if there is none."""
    engine: Engine | None = _OWNERS.get(parameter, lambda: None)()
    return engine


def sharded_of(parameter: nn.Parameter) -> ShardedModel | None:
    """Return what placed a parameter, which may outlive its engine; None if that is gone, too, or never was."""
    sharded: ShardedModel | None = _PLACES.get(parameter, lambda: None)()
    return sharded


def newest_engine() -> Engine | None:
    """Return the last made of the living engines, for functions of DeepSpeed that are not told which; None without."""
    return next((engine for reference in reversed(_ENGINES) if (engine := reference()) is not None), None)


def is_elsewhere(parameter: nn.Parameter) -> bool:
    """Return whether it stands for a parameter of another pipeline stage."""
    return parameter in _ELSEWHERE


def owner_elsewhere(parameter: nn.Parameter) -> Engine | None:
    """Return the living engine of a parameter of another pipeline stage."""
    engine: Engine | None = _ELSEWHERE[parameter]()
    return engine


def was_placed(parameter: nn.Parameter) -> bool:
    """Return whether a parameter belongs to an engine, or did."""
    return parameter in _OWNERS


def owner_of(parameter: nn.Parameter) -> Engine:
    """Return the living engine of a parameter; raise ValueError if there is none."""
    engine = engine_of(parameter)
    if engine is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no engine; pass a parameter of the model that "
            "was given to zeromesh.initialize"
        )
    return engine
