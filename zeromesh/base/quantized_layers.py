"""Frozen weights in 4 or 8 bits, as bitsandbytes and torchao make them: what they consist of, and their values."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.nn.utils import parametrize

# Attributes by which a quantized weight is known. Not its class: parameters that are not in memory have another one.
FOUR_BIT, EIGHT_BIT = "quant_state", "SCB"  # of bitsandbytes: Params4bit and Int8Params

_STATES = ("absmax", "code", "offset")  # tensors of a QuantState of bitsandbytes, which may have a second one inside


def is_wrapper(parameter: torch.Tensor) -> bool:
    """Return whether the tensor has no memory of its own, but consists of other tensors, as torchao's do."""
    return hasattr(type(parameter), "__tensor_flatten__")


def is_quantized(parameter: torch.Tensor | None) -> bool:
    """Return whether it is a weight in 4 or 8 bits that stands for floating-point values."""
    if parameter is None or isinstance(parameter, nn.UninitializedParameter):
        return False
    if FOUR_BIT in vars(parameter) or is_wrapper(parameter):
        return True
    # Of 8 bits, the class also holds weights in 16 bits that are quantized in each forward.
    return EIGHT_BIT in vars(parameter) and parameter.dtype is torch.int8


def parts(parameter: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that hold a parameter's memory, by name: mostly itself."""
    if not is_wrapper(parameter):
        yield name, parameter
        return
    wrapper: Any = parameter
    for key in wrapper.__tensor_flatten__()[0]:
        yield from parts(getattr(wrapper, key), f"{name}.{key}")


def stored(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that hold the memory of a model's parameters, by name."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield from parts(parameter, name)


def layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules with a quantized weight by path."""
    return ((path, module) for path, module in model.named_modules() if is_quantized(weight_of(module)))


def weight_of(module: nn.Module) -> nn.Parameter | None:
    """Return the parameter ``weight`` of a module, or the packed one of a stacked weight; None if it has none."""
    # bitsandbytes quantizes what is not of a linear layer by a parametrization, whose list of steps stands for a layer.
    return module._parameters.get("original" if isinstance(module, parametrize.ParametrizationList) else "weight")


def mark_stacked(model: nn.Module) -> None:
    """Let stacked weights that bitsandbytes' ``replace_parameter_4bit`` has quantized be known as quantized."""
    for steps in _parametrized(model):
        state = getattr(steps[0], FOUR_BIT, None)
        if state is not None:
            change(steps.original, **{FOUR_BIT: state})


def plain_parameter(model: nn.Module, name: str) -> str:
    """Return the name that a quantized stacked weight has in the plain model; other names as they are."""
    path, _, last = name.rpartition(".")
    if last != "original" or not is_quantized(weight_of(model.get_submodule(path))):
        return name
    module, _, parameter = f".{path}".rpartition(".parametrizations.")
    return f"{module}.{parameter}".lstrip(".")


def make_dense(model: nn.Module) -> None:
    """Give the modules inside of a copy ordinary parameters in the places of quantized stacked weights."""
    for module in [module for module in model.modules() if parametrize.is_parametrized(module)]:
        lists: Any = dict(module.parametrizations.items())  # type: ignore[union-attr, operator]
        if all(hasattr(steps[0], FOUR_BIT) for steps in lists.values()):
            values = {
                name: nn.Parameter(steps[0](steps.original), requires_grad=False) for name, steps in lists.items()
            }
            # torch's function would take the weights from the class, which the copied module has, too.
            del module.parametrizations
            change(module, __class__=type(module).__bases__[0])
            change(module, **values)


def _parametrized(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, parametrize.ParametrizationList))


def states(layer: Any) -> list[torch.Tensor]:
    """Return the tensors beside a weight of bitsandbytes that its values follow from; they are whole on each rank."""
    weight: Any = weight_of(layer)
    candidates: list[Any] = []
    state = vars(weight).get(FOUR_BIT)
    while state is not None:
        candidates += [getattr(state, name, None) for name in _STATES]
        state = state.state2
    if EIGHT_BIT in vars(weight):
        candidates.append(weight.SCB if weight.SCB is not None else layer.state.SCB)
    return [tensor for tensor in candidates if isinstance(tensor, torch.Tensor)]


def fingerprint(layer: Any) -> str:
    """Return a hash of the states that the values of a weight of bitsandbytes follow from."""
    digest = hashlib.sha256(type(layer).__name__.encode())
    for state in states(layer):
        digest.update(state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def settle(layer: Any, device: torch.device) -> None:
    """Let a layer of bitsandbytes compute with its parameter, wherever that lies, and have its states on the device."""
    weight: Any = weight_of(layer)
    if isinstance(layer, parametrize.ParametrizationList):
        weight.quant_state.to(device)
        change(layer, __class__=_adaptable(type(layer)))
        return
    if not is_wrapper(weight):
        change(weight, to=_converted(ref(weight), type(weight).to))
    if FOUR_BIT in vars(weight):
        weight.quant_state.to(device)
        layer.register_forward_hook(_keep_no_view)
        # On some processors the layer would put the weight in another format as soon as it is evaluated.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            change(layer, support_avx512bf16_for_cpu=False)
    elif EIGHT_BIT in vars(weight):
        scales = states(layer)[0].to(device)
        change(weight, SCB=None, CB=None)
        change(layer.state, SCB=scales, __class__=_following(type(layer.state), weight))


def _adaptable(base: type) -> type:
    """The class of a list of parametrizations that PEFT puts an adapter on for each forward, and takes it off."""

    # PEFT 0.21 looks for one of its two classes of adapters as it takes one off, and the other would stay. It asks for
    # the weight before it puts one on, so that torch would keep the weight without it where several are nested.
    class Adaptable(base):  # type: ignore[misc]
        def append(self, step: Any) -> Any:
            removed = getattr(sys.modules.get(type(step).__module__), "_LoraParameterProxy", None)
            if removed is not None and not isinstance(step, removed):
                change(step, __class__=type("Removed", (type(step), removed), {}))
            parametrize._cache.clear()
            return super().append(step)

    return Adaptable


class _Weight:
    """Stands for the tensors that a node of bitsandbytes keeps for its backward, and takes the weight only there."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter((None, self._layer.weight.view(-1, 1)))


def _keep_no_view(layer: Any, args: Any, output: torch.Tensor) -> None:
    """Let the node that made an output keep no view of the weight."""
    # Hooks for saved tensors do not see it, and it would keep the memory of all layers, until their backwards, on
    # ranks that have a part of each only.
    node: Any = output.grad_fn
    if node is not None and not hasattr(node, "tensors"):
        node = node.next_functions[0][0]  # the output was converted
    view = getattr(node, "tensors", (None, None))[1]
    if view is not None and view.data_ptr() == layer.weight.data_ptr():
        change(node, tensors=_Weight(layer))


def _converted(weak_weight: ReferenceType[Any], to: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method ``to`` of a weight, which returns the weight itself where nothing is to be converted."""

    # That of bitsandbytes makes another parameter, and PEFT puts it in the place of the one that is trained here.
    def convert(*args: Any, **kwargs: Any) -> Any:
        weight: Any = weak_weight()
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        same = device in (None, weight.device) and dtype in (None, weight.dtype)
        return weight if same else to(weight, *args, **kwargs)

    return convert


def change(target: Any, **values: Any) -> None:
    """Set attributes of an object of a library, which has no function that does it."""
    for name, value in values.items():
        setattr(target, name, value)


def _following(base: type, weight: nn.Parameter) -> type:
    """The class of a layer's state, with the values wherever the parameter lies."""

    # Its own attribute would be a second reference to the values, which would keep all of them in memory.
    class Following(base):  # type: ignore[misc]
        CB = property(lambda state: weight.data, lambda state, value: None)

    return Following


def unpack(layer: Any) -> None:
    """Undo the format that a layer of bitsandbytes has after an evaluation on some processors."""
    if getattr(vars(weight_of(layer)).get(FOUR_BIT), "packing_format_for_cpu", False):
        layer.state_dict()  # does it before it shows the weight


def dense(layer: Any) -> torch.Tensor:
    """Return the values of a layer's weight, quantized or not, in the shape of the model's files."""
    weight: Any = weight_of(layer)
    if not is_quantized(weight):
        value: torch.Tensor = weight
    elif is_wrapper(weight):
        value = weight.dequantize()
    else:
        functional = import_module("bitsandbytes.functional")
        if FOUR_BIT in vars(weight):
            value = functional.dequantize_4bit(weight.data, weight.quant_state)
        else:
            value = functional.int8_vectorwise_dequant(weight.data, states(layer)[0])
    return value.detach().mT.contiguous() if is_transposed(layer) else value.detach()


def is_transposed(layer: Any) -> bool:
    """Return whether the layer replaced one of transformers with a transposed weight, as GPT-2 has them."""
    return getattr(getattr(layer, "source_cls", None), "__name__", "") == "Conv1D"


def require_frozen(model: nn.Module) -> None:
    """Raise ValueError if a quantized weight is to be trained, or nothing else is."""
    quantized = list(layers(model))
    trained = [path for path, layer in quantized if (weight := weight_of(layer)) is not None and weight.requires_grad]
    if trained:
        raise ValueError(
            f"{trained[0]}.weight is quantized and has requires_grad: only adapters on such a weight can be trained; "
            "use peft.get_peft_model, which freezes it, or load the model without quantization"
        )
    if quantized and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"the model's weights are quantized (layers: {len(quantized)}) and nothing is trainable; add adapters with "
            "peft.get_peft_model, or load the model without quantization to train all of it"
        )


def require_dtype(model: nn.Module, compute: torch.dtype | None) -> None:
    """Raise ValueError for weights of torchao that stand for another dtype than the run computes in."""
    for path, layer in layers(model):
        weight: Any = weight_of(layer)
        if compute is not None and is_wrapper(weight) and weight.dtype is not compute:
            raise ValueError(
                f"{path}.weight stands for {weight.dtype}, and the run computes in {compute}; torchao does not "
                f"convert it: load the model with dtype={compute}"
            )
