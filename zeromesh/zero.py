"""Interface of ``deepspeed.zero``: building sharded, reading and changing whole tensors.

All functions here are collective: every rank calls them, in the same order. Of a model that is cut into stages, a rank
has the parameters of its own, and what is called for one of them concerns the ranks of that stage (``engine.mesh.
stage_ranks``). In the places of those of other stages are zeros that are no parameters: these functions return None for
them, and change nothing. What several stages have, such as tied embeddings, is to be changed alike on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromesh.apps.plan import estimators
from zeromesh.base.piece import Piece
from zeromesh.base.quantized_layers import parts
from zeromesh.base.signatures import refuse
from zeromesh.base.tiled import TiledLinear as TiledLinear
from zeromesh.base.tiled import join_tiles as join_tiles
from zeromesh.base.tiled import tile_linears as tile_linears
from zeromesh.engine.owners import is_elsewhere, owner_elsewhere, owner_of, was_placed
from zeromesh.shard.gradients.reducer import complete_together
from zeromesh.shard.parameters.deferred import recording
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.parameters.unit import Unit
from zeromesh.shard.sharded import Pick
from zeromesh.shard.tables.table import Table

if TYPE_CHECKING:
    from zeromesh.engine.engine import Engine

estimate_zero2_model_states_mem_needs = estimators.estimate_zero2_model_states_mem_needs
estimate_zero2_model_states_mem_needs_all_cold = estimators.estimate_zero2_model_states_mem_needs_all_cold
estimate_zero2_model_states_mem_needs_all_live = estimators.estimate_zero2_model_states_mem_needs_all_live
estimate_zero3_model_states_mem_needs = estimators.estimate_zero3_model_states_mem_needs
estimate_zero3_model_states_mem_needs_all_cold = estimators.estimate_zero3_model_states_mem_needs_all_cold
estimate_zero3_model_states_mem_needs_all_live = estimators.estimate_zero3_model_states_mem_needs_all_live


class Init:
    """Build a model inside this context without ever holding it: ``with zeromesh.zero.Init(): model = Model()``.

    Its parameters stay on the meta device until ``initialize`` makes them, one unit at a time, with the very
    values that an ordinary construction would have given them.

    Args:
        module: accepted for DeepSpeed's sake: a module that exists already is sharded by ``initialize``.
        data_parallel_group: None; so are the other groups and ``mpu``: the mesh says which ranks share parameters.
        mem_efficient_linear: no effect; ``torch.nn.functional.linear`` is left as it is.
        remote_device: no effect; ``offload_param`` in the configuration says where parameters rest.
        pin_memory: no effect, as ``remote_device``.
        config_dict_or_path: not needed here; pass it to ``initialize``.
        config: older name of ``config_dict_or_path``.
        enabled: False does nothing, so that one line serves both.
        dtype: None, or torch's default dtype; the configuration switches 16 bits on.
        mpu: see ``data_parallel_group``.
        zero_param_parallel_group: see ``data_parallel_group``.
        zero_quantized_weights: False; the configuration has a key of this name.
        zero_quantized_nontrainable_weights: False; frozen weights are not quantised.
        sequence_data_parallel_group: see ``data_parallel_group``.
        param_swapper: None; ``offload_param`` in the configuration moves parameters to files.
        tensor_overrides: no effect.

    Raises:
        ValueError: an argument that cannot be honoured.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: Any = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        sizes = 'set the sizes in the configuration, as in "mesh": {"data": 4, "tensor": 2}'
        refuse("zero.Init", "data_parallel_group", data_parallel_group, sizes)
        refuse("zero.Init", "zero_param_parallel_group", zero_param_parallel_group, sizes)
        refuse("zero.Init", "sequence_data_parallel_group", sequence_data_parallel_group, sizes)
        refuse("zero.Init", "mpu", mpu, sizes)
        switch = "switch bf16 or fp16 on in the configuration, which converts the parameters"
        refuse("zero.Init", "dtype", None if dtype is torch.get_default_dtype() else dtype, switch)
        key = "set zero_optimization.zero_quantized_weights in the configuration"
        refuse("zero.Init", "zero_quantized_weights", zero_quantized_weights, key, False)
        name, frozen = "zero_quantized_nontrainable_weights", "frozen weights keep the dtype of the run; leave it out"
        refuse("zero.Init", name, zero_quantized_nontrainable_weights, frozen, False)
        key = 'set "zero_optimization": {"offload_param": {"device": "cpu"}} in the configuration'
        refuse("zero.Init", "param_swapper", param_swapper, key)
        self.defers = enabled and module is None
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> Init:
        # A stack, because one object may be entered again inside of itself.
        context = recording() if self.defers else nullcontext()
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _find(parameter: nn.Parameter) -> tuple[Engine, Unit | Table, Flat, int]:
    engine = owner_of(parameter)
    for unit in engine.sharded.parts:
        for flat in unit.flats:
            for index, member in enumerate(flat.parameters):
                if member is parameter:
                    return engine, unit, flat, index
    raise AssertionError("a registered parameter is in no unit")


def place_of(parameter: nn.Parameter) -> tuple[Unit | Table, Flat, int]:
    """Return the unit of a parameter, the flat buffer in it, and the parameter's index there."""
    return _find(parameter)[1:]


def tensors_of(params: object) -> list[Any]:
    """Return the tensors that a function of parameters was given; TypeError for anything else but None."""
    members = [params] if params is None or isinstance(params, torch.Tensor) else params
    if not isinstance(members, Iterable):
        members = [members]
    members = [member for member in members if member is not None]
    for member in members:
        if not isinstance(member, torch.Tensor):
            raise TypeError(
                f"GatheredParameters was given an object of {type(member)}; pass parameters, as module.weight, or "
                "module.parameters() for all of a module"
            )
    return members


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter | None] | None,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """In this context the parameters are whole on every rank, to be read; or to be changed on one rank.

    Args:
        params: parameters; those of no engine's model are left alone, as they are whole anyway, and so is None.
        modifier_rank: the rank whose changes every rank takes at the end. Of a model that is cut into stages, one of
            ``engine.mesh.stage_ranks``, which are others on each stage.
        fwd_module: no effect: the engine finds out by itself which module uses which parameters.
        enabled: False does nothing.

    Raises:
        RuntimeError: the parameters were changed and no ``modifier_rank`` says whose values count.
        ValueError: ``modifier_rank`` does not have these parameters.
        TypeError: something is not a tensor.
    """
    members: list[Any] = [p for tensor in tensors_of(params) for _, p in parts(tensor) if enabled]
    members = [p for p in members if was_placed(p)]
    if not members:
        yield
        return
    if len(owners := list(dict.fromkeys(map(owner_of, members)))) > 1:
        with ExitStack() as stack:
            for owner in owners:
                engine_members = [parameter for parameter in members if owner_of(parameter) is owner]
                stack.enter_context(GatheredParameters(engine_members, modifier_rank))
            yield
        return
    sharded = owners[0].sharded
    locations = [_find(parameter) for parameter in members]
    mesh, place = sharded.mesh, None
    if modifier_rank is not None:
        if modifier_rank not in mesh.stage_ranks:
            raise ValueError(
                f"modifier_rank is {modifier_rank}, but it is ranks {', '.join(map(str, mesh.stage_ranks))} that have "
                "these parameters; pass one of these, as engine.mesh.stage_ranks[0]"
            )
        # The group's own order counts, not that of the global ranks.
        place = mesh.group("stage").exchange(torch.tensor([mesh.rank])).flatten().tolist().index(modifier_rank)
    # All ranks gather in one order, whatever order the parameters were given in.
    units = sorted({unit for _, unit, _, _ in locations}, key=lambda unit: unit.index)
    with sharded.gathered(units):
        # Without a rank whose values count, a change would be lost, or differ between ranks: it is refused.
        before = [] if place is not None else [_fingerprint(parameter) for parameter in members]
        yield
        if place is not None:
            for flat, index in [(flat, index) for _, _, flat, index in locations]:
                sharded.take_value(flat, index, place)
        elif before != [_fingerprint(parameter) for parameter in members]:
            raise RuntimeError(
                "parameters were changed inside GatheredParameters, and ranks may have changed them differently: pass "
                "modifier_rank, the rank whose values all ranks are to take"
            )


def _fingerprint(parameter: nn.Parameter) -> tuple[int, int]:
    """Return a fingerprint of the values, because torch does not count changes through ``parameter.data``."""
    # In parts, as torch first makes all of them int64.
    parts = parameter.detach().reshape(-1).view(torch.uint8).split(1 << 20)
    return parameter._version, sum(int(part.sum(dtype=torch.int64)) for part in parts)


def _whole(parameter: nn.Parameter, pick: Pick) -> torch.Tensor | None:
    """Return a whole tensor from what each rank has of a parameter; None for frozen ones and other stages'."""
    if is_elsewhere(parameter):
        return None
    engine, _, flat, index = _find(parameter)
    # What the user wrote to the parameters has to be in the masters, which are read.
    engine.sharded.take_changes()
    return engine.sharded.assemble(flat, index, pick) if flat.layout.trainable else None


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole master of a parameter, in the master's dtype; None if it is frozen, or another stage's."""
    return _whole(param, lambda flat, local, piece: piece.parameter.detach())


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole mean gradient over ranks; None if no rank has one. Call it between backward and ``step``."""
    if is_elsewhere(param):
        return None
    engine, part, flat, index = _find(param)
    gradient = part.gradient if isinstance(part, Table) else flat.gradient
    if gradient is None or not engine.sharded.reducer.begun:
        return None
    complete_together(engine.sharded.reducer, engine.mesh)
    shard, factor = gradient.values(), engine.gradient_factor
    # Another rank may have used a parameter that this one did not: all return a gradient, or none.
    used = torch.tensor([float(gradient.used[index])], dtype=torch.float64)
    if not bool(engine.mesh.group("stage").exchange(used).any()) or shard is None:
        return None
    return _whole(param, lambda flat, local, piece: shard[local].to(flat.master.dtype) * factor)


def clip_grad_norm_(
    parameters: nn.Parameter | Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip gradients that are spread over ranks; see ``torch.nn.utils.clip_grad_norm_``. Collective.

    To be called between the last backward of an update and its ``step``. ``gradient_clipping`` in the configuration
    clips as well.

    Args:
        parameters: of one model that was given to ``initialize``.
        max_norm: the largest norm that is left as it is.
        norm_type: order of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: whether to raise if the norm is not finite.

    Returns:
        The norm of the mean gradients before clipping: 0-dim, the same on all ranks.

    Raises:
        ValueError: a parameter belongs to no engine, or the parameters belong to several.
        RuntimeError: there is no gradient to clip, or the norm is not finite.
    """
    requested: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    members = [parameter for parameter in requested if not is_elsewhere(parameter) and parameter.requires_grad]
    # A stage that has none of them takes part all the same.
    engines: set[Any] = {owner_of(p) for p in members} | {owner_elsewhere(p) for p in requested if is_elsewhere(p)}
    if len(engines) != 1:
        raise ValueError(f"the parameters belong to {len(engines)} engines; pass those of one model")
    engine = engines.pop()
    if not engine.sharded.reducer.begun:
        raise RuntimeError("there is no gradient to clip; call this between backward and step")
    norm = engine.sharded.grads.clip(members, float(max_norm), float(norm_type))
    if error_if_nonfinite and not isfinite(norm):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm}, so it cannot be clipped")
    # As torch's own function, in the dtype of the gradients where that is wider.
    wide = bool(members) and members[0].dtype is torch.float64
    return torch.tensor(norm, dtype=torch.float64 if wide else torch.float32)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return the whole of one of the optimizer's states, such as ``exp_avg``; None before the first update.

    Raises:
        ValueError: the state is a single number, such as ``step``.
    """
    return _whole(param, lambda flat, local, piece: state_of(param, piece, optim_state_key))


def state_of(parameter: nn.Parameter, piece: Piece, key: str) -> torch.Tensor | None:
    """Return one of the optimizer's states of a piece; None if it has none. ValueError for a single number."""
    optimizer = owner_of(parameter).optimizer
    # Not ``state[...]``: that would make an empty entry, which some optimizers take for a state.
    value = None if optimizer is None else optimizer.state.get(piece.parameter, {}).get(key)
    if value is not None and (not isinstance(value, torch.Tensor) or value.numel() != piece.parameter.numel()):
        raise ValueError(f"the optimizer's state {key!r} of {piece.name} is {value}, not a tensor like the parameter")
    return value


def _set(parameter: nn.Parameter, value: torch.Tensor, pick: Pick) -> None:
    if is_elsewhere(parameter):
        return
    engine, _, flat, index = _find(parameter)
    engine.sharded.take_changes()
    segment = flat.layout.segments[index]
    if tuple(value.shape) != segment.held.whole:
        raise ValueError(f"{segment.name} has shape {segment.held.whole}, the value given {tuple(value.shape)}")
    if not flat.layout.trainable:
        raise ValueError(f"{segment.name} is frozen; change it inside GatheredParameters with modifier_rank")
    # They may rest on NVMe, and have to be written back.
    flat.load_states(write=True)
    for position, local, piece in flat.pieces:
        if position == index:
            target = pick(flat, local, piece)
            if target is None:
                raise RuntimeError(f"{segment.name} has no such state yet; optimizers make theirs in the first step()")
            with torch.no_grad():
                target.view(-1).copy_(piece.cut(value))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change a whole parameter and its master. Every rank passes the same value.

    Raises:
        ValueError: the value has another shape, or the parameter is frozen.
    """
    if not is_elsewhere(param):
        _set(param, value, lambda flat, local, piece: piece.parameter.data)
        owner_of(param).sharded.publish()


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change the whole gradient before ``step``. Every rank passes the same value.

    Rows of an embedding table that are zero, and that no batch has used, stay out of its update.

    Raises:
        ValueError: the value has another shape, or the parameter is frozen.
        RuntimeError: this is not between backward and ``step``.
    """
    if is_elsewhere(param):
        return
    engine, part, flat, index = _find(param)
    gradient, values = part.gradient if isinstance(part, Table) else flat.gradient, None
    if gradient is not None:
        if not engine.sharded.reducer.begun:
            raise RuntimeError("there is no gradient to change; call this between backward and step")
        complete_together(engine.sharded.reducer, engine.mesh)
        # Or the update would skip a parameter that no forward has used.
        gradient.used[index], values = True, gradient.values()

    def pick(flat: Flat, local: slice, piece: Piece) -> torch.Tensor:
        assert values is not None
        return values[local]

    # Sums are kept, of which the update takes the mean.
    _set(param, value / engine.gradient_factor, pick)
    if isinstance(part, Table) and values is not None:
        part.gradient.put(values)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the whole gradient of each parameter by what a function makes of it and the parameter.

    A parameter without a gradient stays so.

    Raises:
        ValueError, RuntimeError: as ``safe_set_full_grad``.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change the whole of one of the optimizer's states. Every rank passes the same value.

    Raises:
        ValueError: the value has another shape, the state is a single number, or the parameter is frozen.
        RuntimeError: the optimizer has no such state, or not before its first update.
    """
    _set(param, value, lambda flat, local, piece: state_of(param, piece, optim_state_key))
