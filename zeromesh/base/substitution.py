"""Layers that compute what torch's class of them computes, so that other code may compute in their place."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from zeromesh.base.linear_arithmetic import transposed_class

# Code that stands for a layer reads the layer's parameters and torch's definition of its class, and nothing else: not a
# subclass' forward, nor an instance's, nor a weight that is made of other parameters. Every place that replaces the
# computation of a layer asks here. Layers that compute something else run their own code, on whole weights.

_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")
# Class of torch -> names of all parameters that its forward reads. Other classes may have any.
_PARAMETERS: Mapping[str, Collection[str]] = {
    "Linear": ("weight", "bias"),
    "Conv1D": ("weight", "bias"),
    "Embedding": ("weight",),
    "EmbeddingBag": ("weight",),
    "MultiheadAttention": (*_ATTENTION, "out_proj.weight", "out_proj.bias"),
}
KNOWN = ("transformers.", "zeromesh.")  # packages whose attention and MLPs compute what the names of their layers say
# Names by which the code of a hook reaches the weights of its module.
_WEIGHTS = {"weight", "bias", "parameters", "named_parameters", "_parameters", "get_parameter", "state_dict"}
_SAME = {"FalconLinear"}  # classes of transformers with a forward of their own, which computes what torch's does
# What a subclass may define without another computation. New names are harmless, as torch does not ask for them.
_HARMLESS = {
    "__init__", "__module__", "__doc__", "__annotations__", "__dict__", "__weakref__", "__constants__", "__setstate__",
    "__firstlineno__", "__static_attributes__", "__parameters__", "__repr__", "__slots__", "__hash__", "__getstate__",
    "__init_subclass__", "__class_getitem__", "_get_name", "_version", "extra_repr", "reset_parameters",
    "_reset_parameters", "from_pretrained", "_save_to_state_dict", "_load_from_state_dict", "state_dict",
    "load_state_dict", "get_extra_state", "set_extra_state",
}  # fmt: skip


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module of a class, or of a subclass, computes what torch defines for the class.

    Its hooks run around whatever computes in its place, and count only if their code names its weights.
    """
    return isinstance(module, kind) and not own_computation(module, kind)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes what ``nn.Linear`` does, or GPT-2's ``Conv1D``."""
    kind = linear_class(module)
    return kind is not None and not own_computation(module, kind)


def linear_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the one of these two classes that a module derives from; None if it is not a linear layer."""
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, *transposed_class())
    return next((kind for kind in kinds if isinstance(module, kind)), None)


def own_computation(module: nn.Module, kind: type[nn.Module]) -> str:
    """Return what a module computes otherwise than torch's class, as a clause; "" for nothing."""
    if runs_another_forward(module):
        return "its forward was replaced"
    if changed := _overridden(type(module), kind):
        return f"{type(module).__name__} has {changed} of its own"
    names = _PARAMETERS.get(kind.__name__, ())
    if "weight" in names and "weight" not in module._parameters:
        return "its weight is made of other tensors"
    for name, parameter in module.named_parameters() if names else ():
        if name not in names:
            return f"it has a parameter {name}, which {kind.__name__} lacks"
        if isinstance(parameter, nn.UninitializedParameter) or _acts(type(parameter)):
            return f"its {name} is a {type(parameter).__name__}"
    for hook, _ in (*user_hooks(module, "forward_pre"), *user_hooks(module, "forward")) if names else ():
        if _WEIGHTS.intersection(_names_in(hook)):
            return "a hook of its forward reads its weights"
    return ""


def _names_in(hook: Any) -> set[str]:
    """Return the names that the code of a hook has."""
    while (inner := getattr(hook, "func", None) or getattr(hook, "__func__", None)) is not None:
        hook = inner
    hook = hook if isinstance(hook, FunctionType) else inspect.getattr_static(type(hook), "__call__", None)
    if not isinstance(hook, FunctionType):
        return set()
    codes, names = [hook.__code__], set()
    while codes:
        code = codes.pop()
        names |= {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def runs_another_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is not the one that its class was written with, nor this library's."""
    replaced = vars(module).get("forward")
    if replaced is not None:
        # That of an engine that is gone may still be there.
        return not str(getattr(getattr(replaced, "func", replaced), "__module__", "")).startswith("zeromesh.")
    # A forward that was put into a class of torch or transformers has code in another file.
    kind = next(base for base in type(module).__mro__ if "forward" in vars(base))
    library = kind.__module__.partition(".")[0]
    forward: Any = vars(kind)["forward"]
    while library in ("torch", "transformers") and isinstance(forward, FunctionType):
        # Functions that decorators of the library have made are the library's, too.
        folders = [Path(str(sys.modules[name].__file__)).parent for name in ("torch", library)]
        if not any(Path(forward.__code__.co_filename).is_relative_to(folder) for folder in folders):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def is_known(module: nn.Module) -> bool:
    """Return whether an attention or an MLP computes what the names of its layers say, as transformers' do."""
    return type(module).__module__.startswith(KNOWN) and not runs_another_forward(module)


def is_as_written(module: nn.Module) -> bool:
    """Return whether a known attention or MLP calls nothing that a user has put there, or hooks see."""
    layers = [inner for inner in module.modules() if inner is not module]
    foreign = [inner for inner in layers if not type(inner).__module__.startswith((*KNOWN, "torch.", "peft."))]
    changed = (
        has_hooks(layer)
        or runs_another_forward(layer)
        or (type(layer).__module__.startswith("torch.") and linear_class(layer) is not None and not is_linear(layer))
        for layer in layers
    )
    return is_known(module) and not foreign and not any(changed)


def is_adapted(module: nn.Module) -> bool:
    """Return whether it is a layer with PEFT's LoRA, a sum of products, and no variant that reads weights, as DoRA."""
    lora = type(module).__module__ == "peft.tuners.lora.layer" and not runs_another_forward(module)
    return lora and not getattr(module, "lora_variant", {})


def _overridden(subclass: type, kind: type[nn.Module]) -> str:
    """Return a name by which a class changes what ``kind`` computes; "" if there is none."""
    if subclass.__module__.startswith("transformers.") and subclass.__name__ in _SAME:
        return ""
    read = {*_PARAMETERS.get(kind.__name__, ()), *getattr(kind, "__constants__", ())}
    for base in subclass.__mro__:
        for name in vars(base) if base not in kind.__mro__ else ():
            if name not in _HARMLESS and (name in read or hasattr(kind, name)):
                missing = object()
                if inspect.getattr_static(subclass, name) is not inspect.getattr_static(kind, name, missing):
                    return name
    return ""


def _acts(kind: type[torch.Tensor]) -> bool:
    """Return whether operations on tensors of a class are not torch's; those of this library's classes are."""
    definer: Any = next(base for base in kind.__mro__ if not base.__module__.startswith("zeromesh."))
    return bool(definer.__torch_function__ is not nn.Parameter.__torch_function__)


LIBRARIES = ("torch", "transformers", "peft", "accelerate", "zeromesh")


def of_library(value: Any) -> bool:
    """Return whether a function, or the class of another value, is not a user's."""
    while (inner := getattr(value, "func" if isinstance(value, partial) else _COMPILED, None)) is not None:
        value = inner
    return str(getattr(value, "__module__", "")).partition(".")[0] in LIBRARIES


def reads_weights(module: nn.Module, layers: Collection[str]) -> bool:
    """Return whether code of a user's hook of a module's forward names all its weights, or those of some layers."""
    every: tuple[Any, ...] = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    for names in (_names_in(hook) for hook in every if not of_library(hook)):
        named = not names.isdisjoint(layers) or any(
            map(str.isdigit, layers)
        )  # the names of those of a list are numbers
        if names & (_WEIGHTS if named else _WEIGHTS - {"weight", "bias"}):
            return True
    return False


_COMPILED = "_torchdynamo_orig_callable"  # attribute of what torch.compile returns: what it was given


def user_hooks(module: nn.Module, kind: str) -> list[tuple[Any, bool]]:
    """Return a user's hooks of a module, those of all modules first, and whether each takes keyword arguments.

    Args:
        module: module.
        kind: ``forward_pre``, ``forward``, ``backward_pre`` (of gradients of outputs) or ``backward`` (of inputs).
    """
    everywhere: Mapping[int, Any] = getattr(nn.modules.module, f"_global_{kind}_hooks")
    hooks: Mapping[int, Any] = vars(module)[f"_{kind}_hooks"]
    if not (hooks or everywhere):
        return []
    with_kwargs = getattr(module, f"_{kind}_hooks_with_kwargs", ())
    every = [(hook, key in with_kwargs) for key, hook in (*everywhere.items(), *hooks.items())]
    return [(hook, takes_kwargs) for hook, takes_kwargs in every if not of_library(hook)]


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks of a user see, or change, what a module is given or returns, or gradients of that."""
    return any(user_hooks(module, kind) for kind in KINDS)


KINDS = ("forward_pre", "forward", "backward_pre", "backward")


def code_inside(module: nn.Module, apart: Collection[nn.Module]) -> list[Any]:
    """Return the parts of a module and the functions that they compute with.

    Comparison of two such lists by ``is`` shows whether a user has put other code there; copies of both are alike, too.

    Args:
        module: any; its own hooks do not count.
        apart: parts whose hooks do not count.
    """
    code: list[Any] = []
    for part in module.modules():
        code.append(part)
        for name, value in vars(part).items():
            if callable(value) and name != "_compiled_call_impl" and not (name == "forward" and of_library(value)):
                code.append(value)
        if part is not module and part not in apart:
            code += [hook for kind in KINDS for hook, _ in user_hooks(part, kind)]
    return code
