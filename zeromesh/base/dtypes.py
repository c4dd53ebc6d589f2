"""Dtypes that parameters and buffers have in a run, and errors where code expects others."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_tb

import torch
from torch import nn

from zeromesh.base.buffer_memory import plain_name
from zeromesh.base.linear_arithmetic import is_transposed
from zeromesh.base.precision import Precision
from zeromesh.base.quantized_layers import change, is_wrapper, parts

_log = logging.getLogger("zeromesh")

SIXTEEN_BIT = (torch.float16, torch.bfloat16)

# Modules that PEFT puts around those which it adapts or trains in full.
_ADAPTED = re.compile(r"(?<=\.)(?:base_layer|original_module|modules_to_save\.\w+)\.")

# Words of torch's errors, of kernels on CPU and CUDA.
_DTYPES = re.compile(r"(?:same|weight) dtype|scalar type|type \(.* should be the same")
_DEVICES = re.compile(
    r"on the same device|on the expected device|type \(torch\.cuda\.\w+\) and \w+ type \(torch\.\w+\)"
    r"|type \(torch\.\w+\) and \w+ type \(torch\.cuda\.\w+\)"
)


def dtypes(model: nn.Module, precision: Precision) -> dict[int, torch.dtype]:
    """Return the dtype that each parameter and buffer of a model has in a run, by its ``id``.

    Batch norms keep the dtype of theirs, as running statistics would suffer in 16 bits. In a 16-bit run, tensors that
    ``precision.keep_fp32`` names have fp32, or those that a model of transformers names itself. Of a tensor at several
    places, one place that keeps it decides.
    """
    pattern = _kept(model, precision)
    result: dict[int, torch.dtype] = {}
    for name, module, tensor in _places(model):
        dtype = precision.compute if name.rpartition(".")[2] in module._parameters else precision.buffers
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or not tensor.is_floating_point():
            result[id(tensor)] = tensor.dtype
        elif pattern is not None and pattern.search(name):
            result[id(tensor)] = torch.float32
        else:
            result.setdefault(id(tensor), dtype or tensor.dtype)
        if is_wrapper(tensor):  # its library computes with scales as they are
            result |= {id(part): part.dtype for _, part in parts(tensor)}
    return result


def keep_wide(model: nn.Module, precision: Precision) -> None:
    """Convert to fp32, in place, the tensors that have it in a run of 16 bits; those without memory stay."""
    chosen = dtypes(model, precision)
    for tensor in (*model.parameters(), *model.buffers()):
        if chosen[id(tensor)] is torch.float32 and tensor.dtype in SIXTEEN_BIT and not tensor.is_meta:
            change(tensor, data=tensor.data.float())


def kept_layers(model: nn.Module, precision: Precision) -> list[str]:
    """Return the names of linear layers whose weight has fp32 in a 16-bit run; see ``dtypes``."""
    chosen = dtypes(model, precision) if precision.compute in SIXTEEN_BIT else {}
    layers = [
        (name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear) or is_transposed(each)
    ]
    return [name for name, each in layers if chosen.get(id(each._parameters.get("weight"))) is torch.float32]


def require_names(model: nn.Module, patterns: Sequence[str], key: str) -> None:
    """Raise ValueError unless each pattern of ``Precision.keep_fp32`` is in the name of a parameter or a buffer.

    ``key`` is that of the patterns in the configuration.
    """
    names = [name for name, _, _ in _places(model)] if patterns else []
    for pattern in patterns:
        try:
            compiled = re.compile(pattern.replace("*", ".*"))
        except re.error as error:
            text = f"{key}: {pattern!r} is not a pattern of names ({error}); write a part of tensors' names"
            raise ValueError(text) from None
        if not any(map(compiled.search, names)):
            raise ValueError(
                f"{key}: {pattern!r} is in the name of no parameter and no buffer; write a part of the model's names, "
                f"which are as {', '.join(names[:3])}"
            )


def tell_narrowed(model: nn.Module, precision: Precision, key: str) -> None:
    """Warn of parameters that somebody has made fp32 in a model of 16 bits, and that a run of 16 bits converts."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    if precision.compute not in SIXTEEN_BIT or not any(p.dtype in SIXTEEN_BIT for p in named.values()):
        return
    chosen = dtypes(model, precision)
    # PEFT makes its adapters fp32 without being asked.
    wide = [n for n, p in named.items() if p.dtype is torch.float32 is not chosen[id(p)] and "lora_" not in n]
    if wide:
        _log.warning(
            "parameters of a model in 16 bits have fp32: %s (%d in all); this run computes with them in %s. To keep "
            "them in fp32, name them in %s",
            ", ".join(wide[:3]),
            len(wide),
            precision.compute,
            key,
        )


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield parameters and buffers once for each name, with and without names of wrappers, and with their modules."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            full = f"{path}.{name}".lstrip(".")
            for each in dict.fromkeys((full, _ADAPTED.sub("", plain_name(full)))) if tensor is not None else ():
                yield each, module, tensor


def _kept(model: nn.Module, precision: Precision) -> re.Pattern[str] | None:
    """Return what finds the names of tensors that stay in fp32, as transformers finds them; None if there are none."""
    if precision.compute not in SIXTEEN_BIT:
        return None
    if precision.keep_fp32 is not None:
        patterns = [name.replace("*", ".*") for name in precision.keep_fp32]
    else:
        lists = ["_keep_in_fp32_modules_strict"]
        # transformers loads these in bf16: they overflow in fp16 only.
        lists += ["_keep_in_fp32_modules"] if precision.compute is torch.float16 else []
        patterns = [
            (f"^{re.escape(prefix)}.*" if (prefix := plain_name(f"{path}.").lstrip(".")) else "")
            + name.replace("*", ".*")
            for path, module in model.named_modules()
            for listed in lists
            for name in getattr(module, listed, None) or ()
        ]
    return re.compile("|".join(f"(?:{each})" for each in dict.fromkeys(patterns))) if patterns else None


class MismatchError(RuntimeError):
    """An error of torch about dtypes or devices that do not fit, with the module and the remedy."""


@contextmanager
def explaining(model: nn.Module, compute: torch.dtype | None, device: torch.device, key: str) -> Iterator[None]:
    """Name the module and the remedy where torch says that dtypes, in a 16-bit run, or devices do not fit.

    ``key`` is that of ``Precision.keep_fp32`` in the configuration.
    """
    try:
        yield
    except MismatchError:
        raise
    except (RuntimeError, ValueError) as error:
        path = _where(model, error)
        if _DEVICES.search(str(error)):
            raise MismatchError(
                f"{error}: {path} computes on {device}, the engine's device; move its inputs there: "
                "batch = batch.to(engine.device)"
            ) from error
        if compute in SIXTEEN_BIT and _DTYPES.search(str(error)):
            raise MismatchError(
                f"{error}: {path} meets another dtype than {compute}, which the run computes in; if its parameters "
                f'are meant to have fp32, write {key} = ["{path}"]; if they have it, cast its inputs '
                "to their dtype in its forward (x.to(self.weight.dtype)), and its output back"
            ) from error
        raise


def _where(model: nn.Module, error: BaseException) -> str:
    """Return the name of the innermost module of the model whose method raised the error."""
    names = {id(module): name for name, module in model.named_modules()}
    owners = [id(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__)]
    return next((names[owner] for owner in reversed(owners) if names.get(owner)), "the model")
