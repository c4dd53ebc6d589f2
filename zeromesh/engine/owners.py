"""Engines of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from zeromesh.engine.engine import Engine
    from zeromesh.shard.sharded import ShardedModel

# Functions of users are given a bare parameter. Which engine it belongs to is kept here, and not on the parameter, so
# that users' parameters stay as they made them. Both sides are weak: an engine that nobody else holds goes away.
_OWNERS: Any = WeakIdKeyDictionary()
_PLACES: Any = WeakIdKeyDictionary()  # parameters, and the ``ShardedModel`` that placed them
_ELSEWHERE: Any = WeakIdKeyDictionary()  # stand-ins of other stages' parameters, and their engine
_ENGINES: list[ref[Engine]] = []  # by age


def register(engine: Engine) -> None:
    """Let functions find these parameters' engine, and know those of other stages."""
    _ENGINES[:] = [reference for reference in _ENGINES if reference() is not None] + [ref(engine)]
    for flat in engine.sharded.flats:
        for parameter in flat.parameters:
            _OWNERS[parameter], _PLACES[parameter] = ref(engine), ref(engine.sharded)
    # Zeros that are no parameters are in their places; users may hand them to functions all the same.
    if engine.pipelined is not None:
        for module, name in engine.pipelined.taken:
            _ELSEWHERE[vars(module)[name]] = ref(engine)


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
