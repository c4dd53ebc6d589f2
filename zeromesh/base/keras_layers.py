"""Layers of Keras models as submodules. Keras is never imported: a model of it has imported it already."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

_NUMBER = re.compile(r"_\d+$")

HELD = "_torch_params"  # attribute in which Keras registers variables with torch
LAYERS = "layers"  # container, inside of it, of the layers that no attribute of their owner registers


def is_layer(value: object) -> bool:
    """Return whether ``value`` is a layer or a model of Keras, on any backend."""
    kind = getattr(sys.modules.get("keras"), "Layer", None)
    return kind is not None and isinstance(value, kind)


def refuse_other_backends(model: object) -> None:
    """Raise ValueError for a model of Keras on another backend than torch, and for one of TensorFlow."""
    if isinstance(model, nn.Module):
        return
    keras: Any = sys.modules.get("keras")
    kind = type(model).__name__
    if is_layer(model):
        raise ValueError(
            f"the model is a {kind} of Keras on the backend {keras.backend.backend()!r}, and only parameters of torch "
            "can be placed over ranks: set the environment variable KERAS_BACKEND=torch before the first import of "
            "keras, and build the model anew; its weights move with save_weights and load_weights"
        )
    if any(base.__module__.split(".")[0] in ("tensorflow", "tf_keras") for base in type(model).__mro__):
        raise ValueError(
            f"the model is a {kind} of TensorFlow, whose variables are no torch parameters: build it with Keras 3 "
            "under KERAS_BACKEND=torch"
        )


def require_policy(model: nn.Module, compute: torch.dtype | None) -> None:
    """Raise ValueError if a model of Keras computes in another dtype than the configuration's 16 bits."""
    if compute not in (torch.bfloat16, torch.float16) or not is_layer(model):
        return
    wanted, policy = str(compute).removeprefix("torch."), getattr(model, "compute_dtype", None)
    if policy != wanted:
        raise ValueError(
            f"the configuration computes in {wanted}, and the model in {policy}: write "
            f'keras.config.set_dtype_policy("mixed_{wanted}") before the model is built'
        )


def layers_of(model: nn.Module) -> Iterator[Any]:
    """Yield the Keras layers in a model, itself included, owners before what they own; each once."""
    seen: set[int] = set()
    waiting: list[Any] = [module for module in reversed(list(model.modules())) if is_layer(module)]
    while waiting:
        layer = waiting.pop()
        if id(layer) not in seen:
            seen.add(id(layer))
            yield layer
            waiting.extend(reversed(layer._layers))


def expose_layers(model: nn.Module) -> None:
    """Register each Keras layer under its owner, with its own variables alone. Without Keras nothing happens.

    Keras registers all variables with every layer that encloses them, and layers in lists not at all. Parameters become
    those of their layer. Other variables become buffers, such as moving statistics; states of seed generators are not
    persistent, because each rank has its own: ``seeds_of``.

    Raises:
        ValueError: a layer is not built.
    """
    for layer in list(layers_of(model)):
        _require_built(layer)
        _expose(layer)


def follow_buffers(model: nn.Module) -> None:
    """Let variables that are buffers have the tensors that are registered now."""
    for layer in layers_of(model):
        container = layer._modules[HELD]
        for variable, name in _variables(layer):
            if name in container._buffers:
                vars(variable)["_value"] = container._buffers[name]


def seeds_of(model: nn.Module) -> list[Any]:
    """Return the states, each (2,), of the seed generators from which a model's layers draw."""
    every = [generator.state for layer in layers_of(model) for generator in layer._seed_generators]
    return list({id(state): state for state in every}.values())  # a generator may be in several layers


def global_seed(make: bool) -> Any:
    """Return the state (2,) of Keras' global seed generator, from which functions without a seed draw.

    Keras makes it when it is first used: until then None, unless it is to be made now.
    """
    module: Any = sys.modules["keras.src.random.seed_generator"]
    global_state: Any = sys.modules["keras.src.backend.common.global_state"]
    generator = global_state.get_global_attribute(module.GLOBAL_SEED_GENERATOR)
    if generator is None and make:
        before = random.getstate()  # samples are shuffled by what comes next
        generator = module.global_seed_generator()
        random.setstate(before)
    return None if generator is None else generator.state


def separate_seeds(model: nn.Module, rank: int, ranks: int) -> None:
    """Let each rank draw numbers of its own: Dropout would drop the same elements of the rows of every rank."""
    if ranks == 1 or next(layers_of(model), None) is None:
        return
    for state in (*seeds_of(model), global_seed(make=True)):
        # Far apart, as Keras adds its count of draws: by the ratio of 2**31 to the golden ratio.
        first = (int(state.value[0]) + rank * 1327217885) % 2**31
        state.assign(torch.tensor([first, 0]).to(state.value))


def _require_built(layer: Any) -> None:
    # Layers without a ``build`` of their own have no variables.
    if not layer.built and not getattr(layer.build, "_is_default", False):
        raise ValueError(
            f"layer {layer.name} ({type(layer).__name__}) is not built, so it has no parameters yet: build the model "
            "first, with keras.Input, model.build(input_shape), or by a call on one batch"
        )


def _numbered(names: Iterable[str]) -> list[str]:
    """Return names that are unique, and the same for models that are built alike."""
    # Keras counts layers per process: a model that is built again has other numbers at the end of its names.
    seen: dict[str, int] = {}
    unique_names = []
    for name in names:
        base = _NUMBER.sub("", name).replace(".", "_")  # torch has the dot for itself
        count = seen[base] = seen.get(base, -1) + 1
        unique_names.append(f"{base}_{count}" if count else base)
    return unique_names


def _variables(layer: Any) -> list[tuple[Any, str]]:
    """Return the layer's own variables with their names in torch: parameters, states, seeds of generators."""
    every = [*layer._trainable_variables, *layer._non_trainable_variables, *(g.state for g in layer._seed_generators)]
    return list(zip(every, _numbered(variable.name for variable in every), strict=True))


def _expose(layer: Any) -> None:
    children: dict[str, nn.Module] = {name: child for name, child in layer._modules.items() if name != HELD}
    for name, child in children.items():
        # Sequential keeps a Functional of the same layers beside them, and never calls it as a module.
        if is_layer(child) and not any(child is sublayer for sublayer in layer._layers):
            vars(layer)[name] = layer._modules.pop(name)
    direct = {id(child) for name, child in layer._modules.items() if name != HELD}
    # A wrapped torch module registers its parameters itself.
    others = [child for name, child in layer._modules.items() if name != HELD and not is_layer(child)]
    wrapped = {id(parameter) for child in others for parameter in child.parameters()}
    container = nn.ParameterDict()
    trained = len(layer._trainable_variables)
    weight_count = trained + len(layer._non_trainable_variables)
    for number, (variable, name) in enumerate(_variables(layer)):
        if id(variable._value) in wrapped:
            continue
        if number < trained:
            container[name] = variable._value
            continue
        if isinstance(variable._value, nn.Parameter):
            vars(variable)["_value"] = variable._value.detach()
        container.register_buffer(name, variable._value, persistent=number < weight_count)
    if rest := [sublayer for sublayer in layer._layers if id(sublayer) not in direct]:
        named = dict(zip(_numbered(sublayer.name for sublayer in rest), rest, strict=True))
        container.add_module(LAYERS, nn.ModuleDict(named))
    layer._modules[HELD] = container
