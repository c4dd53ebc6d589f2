"""This rank's own elements of parameters, gradients and optimizer states: ``deepspeed.utils.safe_get_local_*``.

DeepSpeed's partition of a parameter is equal on all ranks, and padded. Here it is what the rank updates, which may be
all of a parameter, a part of it, or nothing. All functions are collective.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch import nn

from zeromesh import zero
from zeromesh.base.optimizer_table import states_of
from zeromesh.engine import owners
from zeromesh.engine.engine import Engine
from zeromesh.shard.gradients.reducer import complete_together
from zeromesh.shard.sharded import Pick
from zeromesh.shard.tables.table import Table

_log = logging.getLogger(__name__)


def _engine(parameter: nn.Parameter) -> Engine:
    engine = owners.engine_of(parameter)
    if engine is None:
        raise ValueError("the parameter belongs to no engine; pass one of the model that initialize was given")
    return engine


def _local(parameter: nn.Parameter, pick: Pick) -> torch.Tensor | None:
    """Return a copy of this rank's elements of a state: 1-D, empty if it has none; None for a frozen parameter."""
    if owners.is_elsewhere(parameter):
        return None
    _, flat, index = zero.place_of(parameter)
    _engine(parameter).sharded.take_changes()
    flat.load_states()
    if not flat.layout.trainable:
        return None
    state = next((pick(flat, local, piece) for at, local, piece in flat.pieces if at == index), flat.master[:0])
    return None if state is None else state.detach().reshape(-1).clone()


def _is_fixed(parameter: nn.Parameter) -> bool:
    """Return whether values set for a parameter are ignored as in DeepSpeed, with a warning: it is not trained."""
    if owners.is_elsewhere(parameter) or owners.engine_of(parameter) is None:
        return False
    _, flat, index = zero.place_of(parameter)
    if not flat.layout.trainable:
        name = flat.layout.segments[index].name
        _log.warning("%s is frozen, so a value set is ignored; change it in GatheredParameters(modifier_rank=)", name)
    return not flat.layout.trainable


def _set_local(parameter: nn.Parameter, value: torch.Tensor, pick: Pick) -> None:
    if _is_fixed(parameter):
        return
    present = _local(parameter, pick)
    if present is None:
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has no such state on this rank to be changed")
    if value.numel() != present.numel():
        raise ValueError(f"this rank has {present.numel()} elements of the parameter, the value given {value.numel()}")
    _, flat, index = zero.place_of(parameter)
    flat.load_states(write=True)
    for at, local, piece in flat.pieces:
        target = pick(flat, local, piece) if at == index else None
        if target is not None:
            with torch.no_grad():
                target.view(-1).copy_(value.reshape(-1))


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the summed gradient of a parameter's flat buffer; of a table, a copy of all rows."""
    part, flat, _ = zero.place_of(parameter)
    if isinstance(part, Table):
        return part.gradient.values()
    return None if flat.gradient is None else flat.gradient.shard


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole mean gradient over ranks; zeros if no rank has one, and None if the parameter is frozen.

    Raises:
        ValueError: this is not between backward and ``step``, at stage 1 or 2.
    """
    gradient, engine = zero.safe_get_full_grad(param), owners.engine_of(param)
    if gradient is not None or engine is None or owners.is_elsewhere(param):
        return gradient
    _, flat, index = zero.place_of(param)
    if engine.sharded.reducer.begun and flat.layout.trainable:
        return torch.zeros(flat.layout.segments[index].held.whole, dtype=flat.master.dtype, device=flat.master.device)
    # As in DeepSpeed, where only these stages notice.
    if flat.layout.trainable and getattr(engine, "zero_optimization_stage", lambda: 0)() in (1, 2):
        raise ValueError("gradients are only available between backward and step; call safe_get_full_grad there")
    return None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return the whole of one of the optimizer's states; None if the parameter is frozen.

    Before the first update it is zeros with ZeRO, which states begin with, and None without.

    Raises:
        ValueError, or KeyError at stage 3: there is no such state.
    """
    state = zero.safe_get_full_optimizer_state(param, optim_state_key)
    return _unmade(param, optim_state_key) if state is None else state


def _unmade(parameter: nn.Parameter, key: str) -> torch.Tensor | None:
    """Return zeros as a state of a trained parameter that was not updated yet, with ZeRO; None without."""
    if owners.is_elsewhere(parameter):
        return None
    engine, (_, flat, index) = _engine(parameter), zero.place_of(parameter)
    stage = getattr(engine, "zero_optimization_stage", lambda: 0)()
    if not flat.layout.trainable or stage == 0:
        return None
    names: Collection[str] = {name for state in getattr(engine.optimizer, "state", {}).values() for name in state}
    names = names or states_of(type(engine.optimizer))
    if not names and engine.global_steps == engine.skipped_steps:
        return None
    if names and key not in names:
        error = KeyError if stage == 3 else ValueError
        raise error(f"the optimizer has no state {key!r}; it has {', '.join(sorted(names))}")
    # DeepSpeed makes a gradient of zeros for it. Here it has none, as in plain torch: weight decay does not shrink it.
    return torch.zeros(flat.layout.segments[index].held.whole, dtype=flat.master.dtype, device=flat.master.device)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change a whole parameter and its master, with the same value on all ranks; nothing if it is frozen."""
    if not _is_fixed(param):
        zero.safe_set_full_fp32_param(param, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change the whole gradient before ``step``, with the same value on all ranks; nothing if it is frozen."""
    if not _is_fixed(param):
        zero.safe_set_full_grad(param, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change the whole of one of the optimizer's states, with the same value on all ranks; nothing if it is frozen."""
    if not _is_fixed(param):
        zero.safe_set_full_optimizer_state(param, value, optim_state_key)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's elements of a parameter's master: 1-D, perhaps empty; None if the parameter is frozen."""
    return _local(param, lambda flat, local, piece: piece.parameter)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's elements of the mean gradient; None where there is none. As ``safe_get_full_grad``."""
    if owners.is_elsewhere(param):
        return None
    engine = _engine(param)
    if not engine.sharded.reducer.begun:
        return None
    complete_together(engine.sharded.reducer, engine.mesh)
    shard = _gradient(param)
    gradient = _local(param, lambda flat, local, piece: None if shard is None else shard[local])
    return None if gradient is None else gradient * engine.gradient_factor


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's elements of one of the optimizer's states; errors are those of the whole's."""
    state = _local(param, lambda flat, local, piece: zero.state_of(param, piece, optim_state_key))
    if state is not None or (unmade := _unmade(param, optim_state_key)) is None:
        return state
    _, flat, index = zero.place_of(param)
    # There is a piece, since ``_local`` is empty without one.
    return unmade.new_zeros(next(piece.parameter.numel() for at, _, piece in flat.pieces if at == index))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change this rank's elements of a parameter and its master. Every rank calls it, each with its own values.

    Raises:
        ValueError: the number of elements is another one, or the parameter is another stage's.
    """
    _set_local(param, value, lambda flat, local, piece: piece.parameter.data)
    _engine(param).sharded.publish()


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change this rank's elements of the mean gradient before ``step``.

    Raises:
        ValueError: as ``safe_set_local_fp32_param``.
        RuntimeError: this is not between backward and ``step``.
    """
    engine, (part, flat, index) = _engine(param), zero.place_of(param)
    if not engine.sharded.reducer.begun:
        raise RuntimeError("there is no gradient to change; call this between backward and step")
    complete_together(engine.sharded.reducer, engine.mesh)
    shard = _gradient(param)
    pick = lambda flat, local, piece: None if shard is None else shard[local]  # noqa: E731
    _set_local(param, value / engine.gradient_factor, pick)
    if isinstance(part, Table) and shard is not None:
        part.gradient.put(shard)
    elif flat.gradient is not None:
        flat.gradient.used[index] = True


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change this rank's elements of one of the optimizer's states.

    Raises:
        ValueError: as ``safe_set_local_fp32_param``, or the optimizer has no such state yet.
    """
    _set_local(param, value, lambda flat, local, piece: zero.state_of(param, piece, optim_state_key))
