"""Quantize the linear layers of a transformers model as their weights are read, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from zeromesh.base.quantized_layers import (
    EIGHT_BIT,
    FOUR_BIT,
    change,
    is_transposed,
    is_wrapper,
    layers,
    parts,
    weight_of,
)
from zeromesh.base.requirements import imported
from zeromesh.checkpoint.weights.weight_files import FileTensor
from zeromesh.shard.parameters.deferred import compute_later, read_from, replayed
from zeromesh.shard.parameters.materialise import replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIBRARIES = ("bitsandbytes", "torchao")
BLOCK = 64  # values of a stacked weight that share a scale, as bitsandbytes has it by default


class Unmade:
    """Scales of a weight that is quantized when ``initialize`` places it."""

    packing_format_for_cpu = False

    def __init__(self, path: str, **attributes: Any) -> None:
        self._path = path
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    def refuse(self, memo: Any = None) -> NoReturn:
        """Raise RuntimeError, which names the weight."""
        raise RuntimeError(
            f"{self._path} is read and quantized in zeromesh.initialize, and has no values yet; what needs them "
            "earlier, such as adapters of DoRA, works with from_pretrained(..., deferred=False)"
        )


def quantize(
    model: PreTrainedModel,
    config: Any,
    deferred: bool,
    files: Sequence[FileTensor] | None = None,
    experts: bool = False,
) -> list[FileTensor]:
    """Quantize the weights that transformers would, with the same result; see ``from_pretrained``.

    Args:
        model: without memory.
        config: of transformers.
        deferred: see ``from_pretrained``.
        files: of a model that was saved quantized; None: the weights are made of the model's.
        experts: quantize stacked weights of experts, too, which transformers leaves as they are.

    Returns:
        The files of other tensors than quantized weights.

    Raises:
        ValueError: the library is not installed, does not have this kind of quantization, a file is missing, or has a
            stacked weight in 4 bits.
    """
    library = str(getattr(getattr(config, "quant_method", None), "value", ""))
    if library not in LIBRARIES:
        raise ValueError(
            f"quantization_config is a {type(config).__name__}; pass a BitsAndBytesConfig or a TorchAoConfig of "
            "transformers, whose frozen weights carry adapters here"
        )
    require_library(library)
    plain = {path: module for path, module in model.named_modules() if weight_of(module) is not None}
    saved, other = _by_layer(files or [])
    try:
        find = import_module("transformers.quantizers").AutoHfQuantizer.from_config
        quantizer = find(config, pre_quantized=files is not None)
        quantizer.validate_environment()
        # Layers of bitsandbytes take the places of plain ones; both are without memory.
        quantizer.preprocess_model(model, device_map={"": "cpu"})
        for path, module in list(model.named_modules()):
            if path in plain and quantizer.param_needs_quantization(model, f"{path}.weight"):
                if library == "torchao":
                    _use_torchao(module, path, config.get_apply_tensor_subclass())
                elif files is None:
                    _use_bitsandbytes(module, plain[path], *_made(module, path, plain[path]))
                else:
                    _use_bitsandbytes(module, plain[path], *_read(module, path, saved.pop(path, {})))
        if experts:
            _use_stacked(model, config, quantizer.modules_to_not_convert or ())
    except (ImportError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{library} cannot quantize like this here: {error}") from None
    quantizer.postprocess_model(model)
    change(model, hf_quantizer=quantizer)  # PEFT asks it how to quantize
    other += [file for left in saved.values() for file in left.values()]
    if coded := next((file.key.partition(".quant_state.")[0] for file in other if ".quant_state." in file.key), None):
        raise ValueError(
            f"{coded} was saved in 4 bits, and is no weight of a linear layer, which transformers cannot read back "
            "either; name the folder of the original weights, with quantization_config and quantize_experts=True"
        )
    if not deferred:
        for _, layer in layers(model):
            for _, part in parts(weight_of(layer)):  # type: ignore[arg-type]
                replace(part, replayed(part))  # type: ignore[arg-type]
    return other


def _by_layer(files: Sequence[FileTensor]) -> tuple[dict[str, dict[str, FileTensor]], list[FileTensor]]:
    """Return weights and their scales by the layer's path and the rest of their names, and files of other tensors."""
    saved: dict[str, dict[str, FileTensor]] = {}
    other = []
    for file in files:
        path = file.key.rpartition(".weight")[0] or file.key.rpartition(f".{EIGHT_BIT}")[0]
        if path:
            saved.setdefault(path, {})[file.key.removeprefix(f"{path}.")] = file
        else:
            other.append(file)
    return saved, other


@contextmanager
def values(layer: Any) -> Iterator[None]:
    """Give a deferred quantized weight its values in this context."""
    real = [(part, nn.Parameter(replayed(part), requires_grad=False)) for _, part in parts(weight_of(layer))]  # type: ignore[arg-type]
    for part, value in real:
        torch._C._swap_tensor_impl(part, value)
    try:
        yield
    finally:
        for part, value in real:
            torch._C._swap_tensor_impl(part, value)


def require_library(library: str) -> None:
    """Raise ValueError if a library cannot be imported."""
    imported(library, f"quantized weights need {library}")


def _device() -> torch.device:
    """Return the device that quantizes: an accelerator is much faster."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _use_bitsandbytes(
    layer: Any, old: Any, packed: torch.Tensor, attributes: Mapping[str, Any], file: FileTensor | None = None
) -> None:
    """Let a layer of bitsandbytes have a deferred weight, with some attributes, in the place of a plain layer."""
    weight = type(layer.weight)(packed, requires_grad=False, **vars(layer.weight))
    change(weight, **attributes)
    if file is not None:  # last, as what is done to a tensor later hides where its values rest
        read_from(weight, file)
    bias = None if old.bias is None else nn.Parameter(old.bias.detach(), requires_grad=False)
    change(layer, weight=weight, bias=bias)


def _read(layer: Any, path: str, files: dict[str, FileTensor]) -> tuple[torch.Tensor, dict[str, Any], FileTensor]:
    """Return a weight without memory, its scales, and the file that has its bytes."""
    four = FOUR_BIT in vars(layer.weight)
    try:
        weight = files.pop("weight")
        if four:
            scales = {key: file.whole() for key, file in files.items()}
            make = import_module("bitsandbytes.functional").QuantState.from_dict
            attributes = {FOUR_BIT: make(scales, device=torch.device("cpu")), "bnb_quantized": True}
        else:
            attributes = {EIGHT_BIT: files[EIGHT_BIT].whole()}
    except (KeyError, ValueError, AssertionError) as error:
        raise ValueError(
            f"{path}.weight is quantized by config.json, and its files lack the weight or its scales ({error}); save "
            "the model again with save_pretrained of transformers"
        ) from None
    with _disable_current_modes():
        dtype = layer.weight.quant_storage if four else torch.int8
        return torch.empty(weight.shape, dtype=dtype, device="meta"), attributes, weight


def _made(layer: Any, path: str, old: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a weight that is made of a plain layer's when it is needed, and what stands for its scales until then."""
    like, plain = layer.weight, old.weight
    kind, options = type(like), dict(vars(like))
    four = FOUR_BIT in options
    states = FOUR_BIT if four else EIGHT_BIT

    def make() -> torch.Tensor:
        value = replayed(plain).detach()
        value = value.mT.contiguous() if is_transposed(layer) else value
        weight = kind(value, requires_grad=False, **options).to(_device())  # which quantizes
        change(layer.weight, **{states: vars(weight)[states]})
        vars(layer.weight).pop("__deepcopy__", None)
        packed: torch.Tensor = weight.data
        return packed

    shape, dtype, attributes = tuple(like.shape), torch.int8, {states: Unmade(f"{path}.weight")}
    if four:
        dtype = like.quant_storage
        shape = (-(-like.numel() // (2 * dtype.itemsize)), 1)
        attributes["bnb_quantized"] = True  # type: ignore[assignment]
    # PEFT copies a layer before it reads its values.
    attributes["__deepcopy__"] = Unmade(f"{path}.weight").refuse  # type: ignore[assignment]
    return compute_later(torch.empty(shape, dtype=dtype, device="meta"), make), attributes


def _use_stacked(model: nn.Module, config: Any, left: Sequence[str]) -> None:
    """Let stacked weights have 4 bits, as bitsandbytes' ``replace_parameter_4bit`` makes them, when they are needed."""
    if not getattr(config, "load_in_4bit", False):
        raise ValueError(
            "stacked weights of experts are quantized in 4 bits of bitsandbytes only: pass a BitsAndBytesConfig with "
            "load_in_4bit=True, or leave them as they are"
        )
    weights = [
        (path, module, name)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and parameter.is_floating_point() and not any(part in f"{path}.{name}" for part in left)
    ]
    for path, module, name in weights:
        _stack(module, name, path, config)


def _stack(module: nn.Module, name: str, path: str, config: Any) -> None:
    bitsandbytes, plain = import_module("bitsandbytes.nn.parametrize"), module.get_parameter(name)

    class Packed(bitsandbytes.Bnb4bitParametrization):  # type: ignore[misc, name-defined]
        def forward(self, packed: torch.Tensor) -> torch.Tensor:
            # PEFT looks at the shape before there are values.
            if isinstance(state := self.quant_state, Unmade):
                return torch.empty(state.shape, dtype=state.dtype, device=packed.device)
            value: torch.Tensor = super().forward(packed)
            return value

    def make() -> torch.Tensor:
        value, state = import_module("bitsandbytes.functional").quantize_4bit(
            replayed(plain).detach().to(_device()),
            blocksize=BLOCK,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )
        for holder in (step, weight):
            change(holder, **{FOUR_BIT: state})
        packed: torch.Tensor = value
        return packed

    step = Packed(Unmade(f"{path}.{name}", shape=plain.shape, dtype=plain.dtype, blocksize=BLOCK))
    empty = torch.empty((-(-plain.numel() // 2), 1), dtype=torch.uint8, device="meta")
    weight = nn.Parameter(compute_later(empty, make), requires_grad=False)
    change(weight, **{FOUR_BIT: step.quant_state})
    change(module, **{name: weight})
    parametrize.register_parametrization(module, name, step, unsafe=True)
    bitsandbytes._register_parametrization_hooks(module, name)


def _use_torchao(layer: Any, path: str, config: Any) -> None:
    """Let a layer have a weight of torchao that is made of its values when it is needed."""
    plain, quantize_ = layer.weight, import_module("torchao.quantization").quantize_
    tensors: dict[str, torch.Tensor] = {}

    def quantized(value: torch.Tensor) -> Any:
        holder = nn.Linear(plain.shape[1], plain.shape[0], bias=False, device="meta")
        change(holder, weight=nn.Parameter(value, requires_grad=False))
        quantize_(holder, config)
        return holder.weight

    def make(name: str) -> torch.Tensor:
        # The parts of a weight are asked for one by one, and its file is read once.
        if name not in tensors:
            tensors.update(parts(quantized(replayed(plain).detach().to(_device()))))
        return tensors.pop(name).contiguous()

    with _disable_current_modes():
        like = quantized(torch.empty(plain.shape, dtype=plain.dtype, device="meta"))
        change(layer, weight=nn.Parameter(_deferred(like, "", make), requires_grad=False))


def _deferred(like: Any, name: str, make: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return a tensor that consists of deferred ones, as ``like`` does of ones without values."""
    if not is_wrapper(like):
        return compute_later(like, partial(make, name))
    names, context = like.__tensor_flatten__()
    inner = {key: _deferred(getattr(like, key), f"{name}.{key}", make) for key in names}
    tensor: torch.Tensor = type(like).__tensor_unflatten__(inner, context, like.size(), like.stride())
    return tensor
