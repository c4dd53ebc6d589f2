"""Write models as folders that ``from_pretrained`` of transformers or PEFT opens; no rank holds a whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh.base.quantized_layers import (
    change,
    dense,
    is_quantized,
    is_transposed,
    make_dense,
    parts,
    plain_parameter,
    stored,
    weight_of,
)
from zeromesh.checkpoint.weights.pretrained import first_names
from zeromesh.checkpoint.weights.weight_files import ExportFiles
from zeromesh.checkpoint.whole import Places, To, file_names, shown_states, shows, tensor_states, tensors
from zeromesh.comm.agreement import agree_run, agree_success, catch, texts
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.parameters.unit import Unit
from zeromesh.shard.sharded import ShardedModel
from zeromesh.shard.tables.table import Table

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")  # files that PEFT writes

State = dict[str, torch.Tensor]
Weight = tuple[str, torch.Tensor]


def save_model(
    sharded: ShardedModel,
    folder: Path,
    filename: str,
    taken: Sequence[tuple[nn.Module, str]] = (),
    *,
    merge_adapters: bool = False,
    exclude_frozen: bool = False,
) -> None:
    """Write the model in the dtype it computes in, with what its library needs beside the weights. Collective.

    See ``Engine.save_16bit_model``; ``taken`` are places of parameters that other stages of a pipeline have.
    """
    model: Any = sharded.model
    adapted = is_adapted(model)
    if not filename.endswith(".safetensors"):
        raise ValueError(f"save_filename = {filename!r} must end in .safetensors, which is what is written; change it")
    if merge_adapters and not adapted:
        raise ValueError(f"merge_adapters: {type(model).__name__} has no adapters of PEFT; leave it out")
    _refuse_prompts(model)
    if merge_adapters and exclude_frozen:
        raise ValueError(
            "merge_adapters and exclude_frozen_parameters: adapters are added to frozen parameters, which would be "
            "left out; set one of them to False"
        )
    if adapted and not merge_adapters:
        _save_adapters(sharded, folder, taken)
        return
    first = sharded.mesh.rank == 0
    files, failure = catch(lambda: ExportFiles(folder, filename) if first else None)
    # After a failure the other ranks go on to gather: they hear of it at the end, and would wait otherwise.
    failures = [failure]

    def plain(state: State) -> State:
        state = {
            name: tensor
            for name, tensor in state.items()
            if not (exclude_frozen and isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
        }
        copies, failure = (None, None) if any(failures) else catch(lambda: plain_state(model, state))
        failures.append(failure)
        return copies or {}

    together, others = partial(_with_adapters, sharded), tensor_states(sharded)
    for state in tensors(sharded, To.FIRST, _places(sharded), plain, together, others):
        if files is not None and not any(failures):
            failures.append(catch(lambda: files.add(_published(model, state)))[1])  # noqa: B023
    world = sharded.mesh.group("world")
    with ExitStack() as stack:
        if files is not None:
            stack.callback(files.discard)  # which leaves what is finished
        agree_success(world, "write the model", next(filter(None, failures), None))
        agree_run(world, "write the model", lambda: None if files is None else files.finish())
    agree_run(world, "write the model", lambda: _describe(folder, model) if first else None)


def full_weights(sharded: ShardedModel, dtype: torch.dtype | None, only_first_rank: bool) -> Iterator[Weight]:
    """Return the iterator of ``Engine.full_weights``."""
    _refuse_prompts(sharded.model)
    return _full_weights(sharded, dtype, sharded.mesh.rank == 0 or not only_first_rank)


def _full_weights(sharded: ShardedModel, dtype: torch.dtype | None, shown: bool) -> Iterator[Weight]:
    model, adapted = sharded.model, is_adapted(sharded.model)
    # The memory of a gathered unit is left to those who hold its tensors; other parameters go on changing.
    left = {id(p) for unit in sharded.parts if unit.sharded for flat in unit.flats for p in flat.parameters}

    def published(members: State) -> State:
        # Buffers come apart from parameters, and keep their dtype: a running mean is read in fp32.
        wanted = dtype if any(isinstance(tensor, nn.Parameter) for tensor in members.values()) else None
        state = plain_state(model, members) if adapted else members
        copies = {
            name: value.detach().to(
                sharded.mesh.device, wanted if value.is_floating_point() else None, copy=id(value) not in left
            )
            for name, value in state.items()
        }
        return _published(model, copies)

    for state in tensors(sharded, To.EVERY, _places(sharded), published, partial(_with_adapters, sharded)):
        yield from state.items() if shown else ()
        state.clear()  # or the unit would keep its memory while the next one is gathered


def write_model(model: nn.Module, states: Iterable[State], folder: Path, filename: str) -> None:
    """Write a model whose plain state comes in parts, by one process."""
    with ExportFiles(folder, filename) as files:
        for state in states:
            files.add(_published(model, state))
    _describe(folder, model)


def is_adapted(model: nn.Module) -> bool:
    """Return whether it is a model of PEFT."""
    return any(cls.__module__.startswith("peft.") and cls.__name__ == "PeftModel" for cls in type(model).__mro__)


def plain_model(model: Any) -> nn.Module:
    """Return the model that adapters were added to; else the model itself."""
    inner: nn.Module = model.get_base_model() if is_adapted(model) else model
    return inner


def written_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names under which each parameter is written, by its first name."""
    every: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        every.setdefault(id(parameter), []).append(name)
    # The first name alone, unless adapters make several values of one parameter: of an embedding that is tied to the
    # head, one may be adapted, or each in its own way. Then the written model has them untied.
    written = {}
    for names in every.values():
        wrappers = {
            next((m for _, m in _around(model, name) if _is_adapted_layer(m) or hasattr(m, "original_module")), None)
            for name in names
        }
        written[names[0]] = names if len(wrappers) > 1 else names[:1]
    return written


def _around(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules around a tensor by path, the outermost first."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        path = ".".join(parts[:depth])
        yield path, model.get_submodule(path)


def _is_adapted_layer(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "merge")


def _places(sharded: ShardedModel) -> Places:
    """Return the names under which tensors are written, by ``id`` of their parts."""
    model = sharded.model
    written = written_names(model)
    places = {id(part): (written[name], p) for name, p in model.named_parameters() for _, part in parts(p)}
    for flat in filter(sharded.is_first, (flat for unit in sharded.parts for flat in unit.flats)):
        for segment, parameter in zip(flat.layout.segments, flat.parameters, strict=True):
            if id(parameter) not in places:
                raise ValueError(
                    f"{segment.name} was replaced after initialize, so that the model has another than the one that is "
                    "trained; replace it before, or change its values in place"
                )
    # The state dict may name them otherwise, as wrappers and the model's hooks do.
    return places | {id(buffer): ([name], buffer) for name, buffer in model.named_buffers()}


def _with_adapters(sharded: ShardedModel, unit: Unit | Table) -> list[Unit | Table]:
    """Return the unit, and those that hold the other parameters of its adapted layers."""
    if not is_adapted(sharded.model):
        return [unit]
    owners = {id(p): owner for owner in sharded.parts for flat in owner.flats for p in flat.parameters}
    inside = {id(p) for flat in unit.flats for p in flat.parameters}
    every = sharded.model.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in every if any(id(part) in inside for _, part in parts(parameter))]
    paths = {path for name in names if (path := _adapted_path(sharded.model, name)) is not None}
    units = {unit, *(owners[id(p)] for path in paths for _, p in stored(sharded.model.get_submodule(path)))}
    # All ranks gather in one order.
    return sorted(units, key=lambda unit: unit.index)


def plain_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], layer: Callable[[str], nn.Module] | None = None
) -> State:
    """Return copies of some of a model's tensors by name, with adapters merged into their layers.

    ``layer`` gives an adapted layer, with its values, by its path; by default it is the model's own.
    """
    dtype, find = computed_dtype(model), layer or model.get_submodule

    def copied(name: str, tensor: torch.Tensor) -> torch.Tensor:
        value = dense(find(name.rpartition(".")[0])).to(dtype) if is_quantized(tensor) else tensor.detach()
        return value.to("cpu", copy=not is_quantized(tensor))

    if not is_adapted(model):
        return {name: copied(name, tensor) for name, tensor in state.items()}
    merged: State = {}
    for name, tensor in state.items():
        target, path = _merged_name(model, name), _adapted_path(model, name)
        if target is None:
            continue
        if path is None:
            merged[target] = copied(name, tensor)
        else:
            inner_name = _under_adapters(model, path, name)
            assert inner_name is not None
            merged[target] = _merged(find(path), inner_name, dtype if is_quantized(tensor) else tensor.dtype)
    return merged


def _merged_name(model: nn.Module, name: str) -> str | None:
    """Return the name that a tensor of an adapted model has in the plain one; None for tensors of the adapters."""
    inner = name.removeprefix("base_model.model.")
    for wrapper in ("original_module", "modules_to_save"):
        if f".{wrapper}." in f".{inner}":
            before, _, after = inner.partition(f"{wrapper}.")
            return before + after.partition(".")[2] if wrapper == "modules_to_save" else None
    path = _adapted_path(model, name)
    if path is None:
        return plain_parameter(model, name).removeprefix("base_model.model.")
    inner_name = _under_adapters(model, path, name)
    # PEFT puts the token adapter between a module and its layer.
    plain = path.removesuffix(".token_adapter")
    return None if inner_name is None else f"{plain}.{inner_name}".removeprefix("base_model.model.")


def _under_adapters(model: nn.Module, path: str, name: str) -> str | None:
    """Return the name that a tensor of an adapted layer has in the plain layer; None for tensors of the adapters."""
    module: Any = model.get_submodule(path)
    inner_name = name.removeprefix(f"{path}.")
    # Adapters may be nested around one layer: experts have one for each of their parameters.
    while inner_name.startswith("base_layer."):
        module, inner_name = module.base_layer, inner_name.removeprefix("base_layer.")
    return None if _is_adapted_layer(module) else plain_parameter(module, inner_name)


def _adapted_path(model: nn.Module, name: str) -> str | None:
    """Return the path of the adapted layer that a tensor belongs to; None if there is none."""
    return next((path for path, module in _around(model, name) if _is_adapted_layer(module)), None)


def _merged(layer: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the plain layer with its adapters added."""
    # In at least fp32, or the sum would be rounded twice; a copy, because merging is in place.
    wide = dense_copy(layer).cpu()
    wide.to(torch.promote_types(dtype, torch.float32))
    while _is_adapted_layer(wide):
        if hasattr(wide, "num_experts") and wide.get_param().ndim == 3:  # that of this rank, where ranks share them
            change(wide, num_experts=len(wide.get_param()))
        wide.merge()
        wide = wide.base_layer
    merged: torch.Tensor = dense(wide) if name == "weight" else wide.get_parameter(name)
    return merged.detach().to(dtype).clone()


def base_of(layer: Any) -> Any:
    """Return the layer inside of all adapters."""
    while _is_adapted_layer(layer):
        layer = layer.base_layer
    return layer


def dense_copy(layer: Any) -> Any:
    """Return a copy of a layer, perhaps adapted, with an ordinary base where that has a quantized weight."""
    base = base_of(layer)
    if not is_quantized(weight_of(base)):
        wide = copy.deepcopy(layer)
        make_dense(wide)
        return wide
    value = dense(base)
    value = value.mT if is_transposed(base) else value
    plain = nn.Linear(value.shape[1], value.shape[0], bias=base.bias is not None, device="meta")
    change(plain, weight=nn.Parameter(value.contiguous(), requires_grad=False), bias=copy.deepcopy(base.bias))
    if is_transposed(base):
        change(plain, source_cls=base.source_cls)
    # The copy of the base is the plain layer. PEFT's classes of quantized layers would quantize what they have merged.
    wide = copy.deepcopy(layer, {id(base): plain})
    if wide is not plain:
        change(wide, __class__=import_module("peft").tuners.lora.Linear)
    return wide


def computed_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter, in which quantized weights are written."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _published(model: nn.Module, state: State) -> State:
    """Return tensors under the names, and in the parts, in which the model's checkpoints are published."""
    named, model = file_names(model, hooks=not is_adapted(model)), plain_model(model)
    state = {key: value for name, value in state.items() if (key := named(name)) is not None}
    if not state or not hasattr(model, "base_model_prefix"):
        return state
    core = import_module("transformers.core_model_loading")
    reverted: State = core.revert_weight_conversion(model, state)
    return reverted


def _refuse_prompts(model: Any) -> None:
    """Raise ValueError for a method of PEFT whose weights belong to no layer."""
    if is_adapted(model) and model.active_peft_config.is_prompt_learning:
        kind = model.active_peft_config.peft_type.value
        raise ValueError(
            f"{kind} learns prompts, which are no part of a layer; inside zeromesh.zero.GatheredParameters("
            "model.parameters()), on the first rank, model.save_pretrained(folder) writes them"
        )


def _describe(folder: Path, model: nn.Module) -> None:
    """Write what the model's library needs beside the weights."""
    for name in ADAPTERS:  # they would be added to the model once more
        (folder / name).unlink(missing_ok=True)
    write_configuration(folder, model)


def write_configuration(folder: Path, adapted: nn.Module) -> None:
    """Write the configuration files of transformers, if the plain model is one of its models."""
    model: Any = plain_model(adapted)
    if not hasattr(model, "base_model_prefix"):
        return
    config = copy.deepcopy(model.config)
    # Or transformers would tie them again, and one of the two adapted values would be lost.
    if any(len(names) > 1 for names in written_names(adapted).values()):
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            part.tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.dtype = computed_dtype(model)
    if hasattr(config, "quantization_config"):  # what is written is not quantized
        del config.quantization_config
    config.save_pretrained(folder)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _save_adapters(sharded: ShardedModel, folder: Path, taken: Sequence[tuple[nn.Module, str]]) -> None:
    """Write the trained parameters as PEFT keeps them; PEFT chooses and names them."""
    model: Any = sharded.model
    world, first = sharded.mesh.group("world"), sharded.mesh.rank == 0
    # PEFT looks into the modules that are trained whole instead of being adapted.
    copies = {id(p) for m in model.modules() if hasattr(m, "adapter_state_dict") for p in m.parameters()}
    units = [unit for unit in sharded.parts if any(id(p) in copies for flat in unit.flats for p in flat.parameters)]
    with sharded.gathered(units), _standing_in(taken if first else ()):
        # The first rank's choice is that of all: PEFT looks for the base model's folder, which others may not see.
        names = agree_run(
            world,
            "choose what to write of the adapters",
            lambda: "\n".join(sorted(adapter_names(model))) if first else "",
        )
        wanted, others = texts(world, names)[0].split("\n"), first_names(model)
        state: State = {}
        for part in shown_states(sharded.mesh, To.FIRST, _chosen_states(sharded, wanted, others)):
            state |= part
        failure = catch(lambda: model.save_pretrained(str(folder), state_dict=state) if first else None)[1]
    agree_success(world, "write the adapters", failure)


def _chosen_states(sharded: ShardedModel, wanted: Sequence[str], others: Mapping[str, str]) -> Iterator[State]:
    """Yield the masters of some parameters, and buffers, on the ranks that show them."""
    shown = shows(sharded.mesh, To.FIRST)
    for unit in sharded.parts:
        for flat in filter(sharded.is_first, unit.flats):
            for index, segment in enumerate(flat.layout.segments):
                if names := {name for name in wanted if others.get(name, name) == segment.name}:
                    value = _whole(sharded, unit, flat, index)
                    yield {name: value.to("cpu", copy=True) for name in names} if shown else {}
    chosen = ((name, buffer) for name, buffer in sharded.model.named_buffers() if name in wanted)
    yield {name: buffer.detach().cpu().clone() for name, buffer in chosen if shown and name not in sharded.idle}


@contextmanager
def _standing_in(places: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    """Put parameters of zeros where other stages have theirs, in this context, so that PEFT sees them."""
    zeros = [vars(module).pop(name) for module, name in places]
    for (module, name), value in zip(places, zeros, strict=True):
        module._parameters[name] = nn.Parameter(value.as_subclass(torch.Tensor), requires_grad=False)
    try:
        yield
    finally:
        for (module, name), value in zip(places, zeros, strict=True):
            del module._parameters[name]
            vars(module)[name] = value


def _whole(sharded: ShardedModel, unit: Unit | Table, flat: Flat, index: int) -> torch.Tensor:
    """Return a copy of a parameter's master, in whose precision adapters are written."""
    # Frozen, as a resized embedding: it has no master.
    if not flat.layout.trainable:
        with sharded.gathered([unit]):
            return flat.parameters[index].detach().clone()
    value = sharded.assemble(flat, index, lambda _, __, piece: piece.parameter.detach())
    assert value is not None
    return value


def adapter_names(model: Any) -> set[str]:
    """Return the model's names of the tensors that PEFT saves."""
    names = list(model.state_dict(keep_vars=True))
    # PEFT renames what it chooses, so it is given a state whose values are the numbers of the names.
    numbered = {name: torch.tensor(number) for number, name in enumerate(names)}
    chosen: set[str] = set()
    for adapter in model.peft_config:
        adapter_state = import_module("peft").get_peft_model_state_dict(
            model, state_dict=numbered, adapter_name=adapter
        )
        chosen |= {names[int(number)] for number in adapter_state.values()}
    return chosen
