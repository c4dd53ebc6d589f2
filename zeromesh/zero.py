"""What users of ``deepspeed.zero`` know: building sharded, and reading and changing whole tensors.

All functions here are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zeromesh.shard.deferred import Recording
from zeromesh.shard.sharded import Pick
from zeromesh.shard.unit import Flat, Unit

if TYPE_CHECKING:
    from zeromesh.engine import Engine

# The functions below are given a bare parameter. Which engine it belongs to is kept here, and not on the parameter, so
# that users' parameters stay as they made them. Both sides are weak: an engine that nobody else holds goes away.
_OWNERS: Any = WeakIdKeyDictionary()


def register(engine: Engine) -> None:
    """Let the functions below find these parameters' engine."""
    for flat in engine.sharded.flats:
        for parameter in flat.parameters:
            _OWNERS[parameter] = ref(engine)


class Init:
    """Build a model inside this context without ever holding it: ``with zeromesh.zero.Init(): model = Model()``.

    Its parameters stay on the meta device until ``initialize`` makes them, one unit at a time, with the very
    values that an ordinary construction would have given them.

    Args:
        module: accepted for DeepSpeed's sake: a module that exists already is sharded by ``initialize``.
        enabled: False does nothing, so that one line serves both.
        options: DeepSpeed's other arguments; they have no effect here.
    """

    def __init__(self, module: nn.Module | None = None, enabled: bool = True, **options: Any) -> None:
        self._recording = Recording() if enabled and module is None else None

    def __enter__(self) -> Init:
        if self._recording is not None:
            self._recording.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._recording is not None:
            self._recording.__exit__(*error)


def _owner(parameter: nn.Parameter) -> Engine:
    engine: Engine | None = _OWNERS.get(parameter, lambda: None)()
    if engine is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no engine; pass a parameter of the model that "
            "was given to zeromesh.initialize"
        )
    return engine


def _find(parameter: nn.Parameter) -> tuple[Engine, Unit, Flat, int]:
    engine = _owner(parameter)
    for unit in engine.sharded.units:
        for flat in unit.flats:
            for index, member in enumerate(flat.parameters):
                if member is parameter:
                    return engine, unit, flat, index
    raise AssertionError("a registered parameter is in no unit")


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    enabled: bool = True,
    **options: Any,
) -> Iterator[None]:
    """In this context the parameters are whole on every rank, to be read; or to be changed on one rank.

    Args:
        params: parameters of one model; those of any other module are left alone, as they are whole anyway.
        modifier_rank: the rank whose changes every rank takes at the end.
        enabled: False does nothing.
        options: DeepSpeed's other arguments; they have no effect here.

    Raises:
        RuntimeError: the parameters were changed and no ``modifier_rank`` says whose values count.
    """
    members = [params] if isinstance(params, nn.Parameter) else list(params)
    members = [p for p in members if enabled and _OWNERS.get(p) is not None]
    if not members:
        yield
        return
    sharded = _owner(members[0]).sharded
    found = [_find(parameter) for parameter in members]
    units = sorted({unit for _, unit, _, _ in found}, key=lambda unit: unit.index)
    with sharded.events.gathered(units):
        before = [parameter._version for parameter in members]
        yield
        if modifier_rank is not None:
            for flat, index in [(flat, index) for _, _, flat, index in found]:
                sharded.take_value(flat, index, modifier_rank)
        elif any(parameter._version != version for parameter, version in zip(members, before, strict=True)):
            raise RuntimeError(
                "parameters were changed inside GatheredParameters, which would be lost: pass modifier_rank, the rank "
                "whose values all ranks are to take"
            )


def _whole(parameter: nn.Parameter, pick: Pick) -> torch.Tensor | None:
    """A whole tensor of the parameter's shape from what each rank has of it; None for a frozen one."""
    engine, _, flat, index = _find(parameter)
    return engine.sharded.assemble(flat, index, pick) if flat.layout.trainable else None


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The whole master of a parameter, in the master's dtype; None if it is frozen."""
    return _whole(param, lambda flat, local, piece: piece.parameter.detach())


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient, averaged over ranks; None if there is none. To be called between backward and ``step``."""
    engine, _, flat, _ = _find(param)
    gradient = flat.gradient
    if gradient is None:
        return None
    engine.sharded.reducer.complete()
    factor, home = engine.gradient_factor, gradient.home
    return _whole(param, lambda flat, local, piece: None if home is None else home[local] * factor)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The whole of one of the optimizer's states, such as ``exp_avg``; None before the first update."""
    states = _states(param)
    return _whole(param, lambda flat, local, piece: states.get(piece.parameter, {}).get(optim_state_key))


def _states(parameter: nn.Parameter) -> Any:
    optimizer = _owner(parameter).optimizer
    return {} if optimizer is None else optimizer.state


def _set(parameter: nn.Parameter, value: torch.Tensor, pick: Pick) -> None:
    _, _, flat, index = _find(parameter)
    segment = flat.layout.segments[index]
    if value.shape != segment.shape:
        raise ValueError(f"{segment.name} has shape {tuple(segment.shape)}, the value given {tuple(value.shape)}")
    for position, local, piece in flat.pieces:
        target = pick(flat, local, piece) if position == index else None
        if target is not None:
            with torch.no_grad():
                target.view(-1).copy_(value.flatten()[piece.start : piece.stop])


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change a whole parameter and its master. Every rank passes the same value."""
    _set(param, value, lambda flat, local, piece: piece.parameter.data)
    _owner(param).sharded.publish()


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change the whole gradient before ``step``. Every rank passes the same value."""
    engine, _, flat, _ = _find(param)
    gradient = flat.gradient
    if gradient is not None:
        engine.sharded.reducer.complete()
    if gradient is None or gradient.home is None:
        raise RuntimeError("there is no gradient to change; call this between backward and step")
    home = gradient.home
    _set(param, value / engine.gradient_factor, lambda flat, local, piece: home[local])


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change the whole of one of the optimizer's states. Every rank passes the same value."""
    states = _states(param)
    _set(param, value, lambda flat, local, piece: states.get(piece.parameter, {}).get(optim_state_key))
