"""Quantize the linear layers of a transformers model as their weights are read, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromesh.model.quantized import change, is_transposed, parts, stored, weight_of
from zeromesh.shard.deferred import compute_later, replayed
from zeromesh.shard.materialise import replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MISSING = "quantized weights need {library}, which cannot be imported ({error}); pip install {library}"

Read = Callable[[], torch.Tensor]


def quantize(model: PreTrainedModel, config: Any, deferred: bool) -> None:
    """Replace the weights that transformers would quantize, with the same values; see ``from_pretrained``.

    Raises:
        ValueError: the library is not installed, or does not have this kind of quantization.
    """
    library = {"bitsandbytes": "bitsandbytes", "torchao": "torchao"}.get(_method(config))
    if library is None:
        raise ValueError(
            f"quantization_config is a {type(config).__name__}; pass a BitsAndBytesConfig or a TorchAoConfig of "
            "transformers, the libraries whose frozen weights can carry adapters here"
        )
    require_library(library)
    plain = {path: module for path, module in model.named_modules() if weight_of(module) is not None}
    try:
        quantizer = import_module("transformers.quantizers").AutoHfQuantizer.from_config(config, pre_quantized=False)
        quantizer.validate_environment()
        quantizer.preprocess_model(model, device_map={"": "cpu"})
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"{library} cannot be used: {error}") from None
    for path, module in list(model.named_modules()):
        if path not in plain or not quantizer.param_needs_quantization(model, f"{path}.weight"):
            continue
        old: Any = plain[path]
        if library == "torchao":
            _torchao(module, path, config.get_apply_tensor_subclass())
        else:
            _bitsandbytes(module, path, old.weight)
            if module.bias is not None:
                module.bias = nn.Parameter(old.bias.detach(), requires_grad=False)
    quantizer.postprocess_model(model)
    change(model, hf_quantizer=quantizer)  # PEFT asks it how to quantize
    if not deferred:
        for _, part in stored(model):
            if part.is_meta and hasattr(part, MARK):
                replace(part, replayed(part))


def require_library(library: str) -> None:
    """Raise ValueError if a library cannot be imported."""
    try:
        import_module(library)
    except ImportError as error:
        raise ValueError(MISSING.format(library=library, error=error)) from None
