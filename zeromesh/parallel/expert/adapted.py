"""Experts that carry adapters of PEFT, or whose weights bitsandbytes has packed in 4 bits.

PEFT wraps a module once for each of its stacked weights that has an adapter, one wrapper inside the other. The
outermost one is what ranks share: it is called as the experts are, and adds the adapters of the experts that are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from zeromesh.base.quantized_layers import FOUR_BIT, change, layers, weight_of
from zeromesh.base.split import Split

if TYPE_CHECKING:
    from zeromesh.parallel.expert.contract import Experts

BASE = "base_layer"


def is_wrapper(module: nn.Module) -> bool:
    """Return whether PEFT has put the module around others, for an adapter of one of their stacked weights."""
    return hasattr(module, "parameter_name") and BASE in module._modules


def inner_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module without the wrappers of PEFT around it, which take any arguments."""
    while is_wrapper(module):
        module = module.get_submodule(BASE)
    return module.forward


def plain_path(name: str) -> str:
    """Return the path that a module has in a model without PEFT."""
    return ".".join(part for part in name.removeprefix("base_model.model.").split(".") if part != BASE)


def bare_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by path, without wrappers of PEFT, and packed weights in their plain shape."""
    return {name: _plain_shape(module) for name, module in model.named_modules() if not is_wrapper(module)}


def _plain_shape(module: nn.Module) -> nn.Module:
    """Return a module without memory that has a plain parameter for each packed one; else the module itself."""
    if not parametrize.is_parametrized(module) or not any(True for _ in layers(module)):
        return module
    # Not by copy, which torch lets nobody do with parametrized modules.
    twin: Any = object.__new__(type(module).__bases__[0])
    vars(twin).update(vars(module), _modules=dict(module._modules), _parameters={})
    lists: Any = twin._modules.pop("parametrizations")
    for name, steps in lists.items():
        empty = torch.empty(shape_of(steps), dtype=steps[0].quant_state.dtype, device="meta")
        change(twin, **{name: nn.Parameter(empty, requires_grad=False)})
    change(twin, _parameters=twin._parameters | module._parameters)
    result: nn.Module = twin
    return result


def shape_of(steps: Any) -> torch.Size:
    """Return the shape of what a packed weight stands for."""
    return torch.Size(steps[0].quant_state.shape)


def with_adapters(model: nn.Module, experts: Experts) -> Experts:
    """Return experts with all that PEFT and bitsandbytes have put around them, and its splits.

    Raises:
        ValueError: the blocks of a packed weight do not end where an expert does.
    """
    name, sizes, splits = experts.name, dict(experts.sizes), dict(experts.splits)
    inner: Any = model.get_submodule(name)
    if parametrize.is_parametrized(inner):
        for key, steps in inner.parametrizations.items():
            if (split := splits.pop(f"{name}.{key}", None)) is not None:
                path = f"{name}.parametrizations.{key}"
                splits[f"{path}.original"] = _packed(path, steps, split)
    while name.endswith(f".{BASE}") and is_wrapper(wrapper := model.get_submodule(name.removesuffix(f".{BASE}"))):
        name = name.removesuffix(f".{BASE}")
        sizes = {(f"{BASE}.{path}".rstrip("."), attribute): value for (path, attribute), value in sizes.items()}
        split = experts.splits.get(f"{experts.name}.{wrapper.parameter_name}")
        if split is not None:
            splits |= _adapter_splits(name, wrapper, split)
            if wrapper.num_experts == split.size:  # 1 if the weight has two dims
                sizes["", "num_experts"] = split.length
    caller = name if experts.caller == experts.name else experts.caller
    return replace(experts, name=name, module=model.get_submodule(name), splits=splits, sizes=sizes, caller=caller)


def _adapter_splits(path: str, wrapper: Any, split: Split) -> Mapping[str, Split]:
    """Return the splits of the adapters of a stacked weight."""
    splits = {}
    for adapter, rank in wrapper.r.items():
        first, second = (f"{path}.{part}.{adapter}.weight" for part in ("lora_A", "lora_B"))
        if wrapper.num_experts == split.size:
            splits[first] = scaled(split, rank)  # (experts x rank, in)
            # (out, rank x experts): experts change the fastest.
            shifts = [number * split.size for number in range(rank)]
            parts = (tuple((a + shift, b + shift) for shift in shifts for a, b in part) for part in split.intervals)
            splits[second] = Split(1, split.size * rank, split.length * rank, tuple(parts))
        else:
            splits[second] = split  # (rows of all experts, rank), of one adapter of all of them
    return splits


def scaled(split: Split, factor: int) -> Split:
    """Return the split of a dim that has so many entries in the place of each."""
    parts = tuple(tuple((a * factor, b * factor) for a, b in part) for part in split.intervals)
    return Split(split.dim, split.size * factor, split.length * factor, parts)


def _packed(path: str, steps: Any, split: Split) -> Split:
    state, shape, original = steps[0].quant_state, shape_of(steps), weight_of(steps)
    assert original is not None
    entries = math.prod(shape) // split.size
    if entries % state.blocksize or len(original) % split.size or split.length * split.ranks != split.size:
        raise ValueError(
            f"{path} is quantized in blocks of {state.blocksize} values, and an expert has {entries}, which is not a "
            "whole number of blocks; ranks cannot share these experts, and they cannot rest. Leave mesh.expert and "
            "experts.rest out, or the quantization"
        )
    return scaled(split, len(original) // split.size)


def take_part(module: nn.Module, rank: int, ranks: int) -> None:
    """Let packed weights inside of a module stand for one of equal parts of their values, unless they are whole.

    Let adapters of one expert be those of a stacked weight.
    """
    while is_wrapper(module):
        wrapper: Any = module
        if wrapper.num_experts == 1 and wrapper.get_param().ndim == 3:
            change(wrapper, get_delta_weight=partial(_delta, wrapper))
        module = module.get_submodule(BASE)
    for step in packed_steps(module):
        take_parts(step, torch.tensor([rank]), ranks)


def packed_steps(module: nn.Module) -> Iterator[Any]:
    """Yield what unpacks the weights in 4 bits of a module, without those of modules inside."""
    for steps in module.parametrizations.values() if parametrize.is_parametrized(module) else ():  # type: ignore[operator]
        if hasattr(steps[0], FOUR_BIT):
            yield steps[0]


def take_parts(step: Any, chosen: torch.Tensor, parts: int) -> None:
    """Let a step unpack some of equal parts of a packed weight, by their numbers; or all of it where that is there."""
    if not hasattr(step, "chosen"):
        change(step, __class__=_part(type(step), parts))
    change(step, chosen=chosen)
    parametrize._cache.clear()  # it may have what other parts stand for


def innermost(item: Experts) -> tuple[str, nn.Module]:
    """Return the path and the module with the experts' own weights, without wrappers of PEFT around it."""
    name, module = item.name, item.module
    while is_wrapper(module):
        name, module = f"{name}.{BASE}", module.get_submodule(BASE)
    return name, module


def without_adapters(model: nn.Module, item: Experts) -> Experts:
    """Return experts without what PEFT and bitsandbytes have put around them, for a proof; without splits."""
    name, _ = innermost(item)
    inside = f"{name}.".removeprefix(f"{item.name}.")
    places = {(f"{path}.".removeprefix("."), attribute): value for (path, attribute), value in item.sizes.items()}
    sizes = {
        (path.removeprefix(inside).rstrip("."), attribute): value
        for (path, attribute), value in places.items()
        if path.startswith(inside)
    }
    return replace(item, name=name, module=bare_modules(model)[name], sizes=sizes, splits={})


def _delta(wrapper: Any, adapter: str) -> torch.Tensor:
    """Return what an adapter adds to a stacked weight; PEFT takes one of a single expert for a plain matrix."""
    first, second, scale = wrapper.get_delta_factors(adapter)
    delta: torch.Tensor = scale * first @ second
    return delta


def _part(base: type, parts: int) -> type:
    """The class of a step that unpacks some of equal parts of a weight; the scales are those of all of it."""

    class Part(base):  # type: ignore[misc]
        chosen: torch.Tensor  # numbers of the parts that are there

        def forward(self, packed: torch.Tensor) -> torch.Tensor:
            every = self.quant_state
            shape = (every.shape[0] // parts * len(self.chosen), *every.shape[1:])
            if 2 * packed.numel() * packed.itemsize == math.prod(every.shape):  # gathered, or all are chosen
                gathered: torch.Tensor = super().forward(packed)
                return gathered
            library = import_module("bitsandbytes.functional")
            scales = every.absmax
            if every.nested:
                scales = (library.dequantize_blockwise(scales, every.state2) + every.offset).float()
            state = library.QuantState(
                absmax=scales.view(parts, -1)[self.chosen.to(scales.device)].reshape(-1),
                shape=torch.Size([math.prod(shape)]),  # rows that end inside of a block are misread on a CPU
                code=every.code,
                blocksize=every.blocksize,
                quant_type=every.quant_type,
                dtype=every.dtype,
            )
            with torch.no_grad():
                value: torch.Tensor = library.dequantize_4bit(packed, state)
            return value.view(shape)

    return Part
