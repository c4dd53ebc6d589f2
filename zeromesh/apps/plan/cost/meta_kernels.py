"""Kernels that torch would choose on a GPU or on a CPU, for meta tensors, on which it takes the plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

DEVICES = ("cuda", "cpu")
Factors = tuple[Tensor, Tensor, Tensor]  # queries, keys and values

_aten = torch.ops.aten
WIDEST_HEAD = 256  # of flash attention on GPUs
HEAD_MULTIPLE = 8  # to which flash attention on GPUs pads the width of a head


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Have torch's functions save on meta tensors what those of a device do: "cuda" or "cpu".

    Raises:
        ValueError: another device.
    """
    if device not in DEVICES:
        raise ValueError(f"kernels are known of {' and '.join(DEVICES)}, not of {device!r}; name one of them")
    with ExitStack() as stack:
        for function, chosen in _CHOSEN[device].items():
            plain = getattr(F, function)
            stack.enter_context(patch.object(F, function, _on_meta(chosen, plain)))
        stack.enter_context(patch.object(torch, "autocast", _autocast))
        yield


def _autocast(device_type: str, *args: Any, _plain: Any = torch.autocast, **kwargs: Any) -> Any:
    """Return the context in which a layer casts, or does not; torch has none for the meta device."""
    return _plain("cpu" if device_type == "meta" else device_type, *args, **kwargs)


def _on_meta(chosen: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return chosen(plain, x, *args, **kwargs) if x.is_meta else plain(x, *args, **kwargs)

    return call


def _attention(
    fused: Callable[..., Tensor | None],
    plain: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of ``fused`` kernels, or of the ``plain`` function where none of them takes the arguments."""
    same = query.shape[-1] == key.shape[-1] == value.shape[-1]
    result = fused((query, key, value), same, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if result is not None:
        return result
    return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _fused_on_cpu(
    factors: Factors, same: bool, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, _: bool
) -> Tensor | None:
    fits = same and factors[0].ndim == 4 and dropout == 0.0 and all(x.stride(-1) == 1 for x in factors)
    if not fits or (mask is not None and (mask.requires_grad or mask.ndim not in (2, 4))):
        return None
    flash = _aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = flash(*factors, dropout, causal, attn_mask=_added(mask, factors[0]), scale=scale)[0]
    return out


def _fused_on_gpu(
    factors: Factors, same: bool, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> Tensor | None:
    query, key, _ = factors
    width, half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    if query.ndim == 4 and same and half and mask is None and width <= WIDEST_HEAD:
        pad = -width % HEAD_MULTIPLE
        wide = [F.pad(x, (0, pad)) if pad else x for x in factors]
        # The scale is that of the width without padding.
        scale = scale if scale is not None else width**-0.5
        outputs = _aten._scaled_dot_product_flash_attention(*wide, dropout, causal, False, scale=scale)
        return outputs[0][..., :width] if pad else outputs[0]  # type: ignore[no-any-return]
    grouped = gqa and query.shape[1] != key.shape[1]
    learned = mask is not None and mask.requires_grad
    if query.ndim != 4 or not (half or query.dtype is torch.float32) or grouped or learned:
        return None
    if (bias := _added(mask, query)) is not None:
        bias = _aligned(bias).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    graded = any(x.requires_grad for x in factors)
    efficient = _aten._scaled_dot_product_efficient_attention
    return efficient(*factors, bias, graded, dropout, causal, scale=scale)[0]  # type: ignore[no-any-return]


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask as the kernels want it: added to the scores, in the dtype of the queries."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.empty_like(mask, dtype=query.dtype)


def _aligned(mask: Tensor) -> Tensor:
    """Return a mask whose rows lie 16 elements apart, as the memory-efficient kernel needs it."""
    length = mask.shape[-1]
    return F.pad(mask, (0, -length % 16))[..., :length] if length % 16 else mask


def _dropout_on_gpu(
    plain: Callable[..., Tensor], x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    # One byte for an element of the mask; elsewhere the mask has the dtype of the input.
    if not training or inplace or not 0 < p < 1:
        return plain(x, p, training, inplace)
    return torch.native_dropout(x, p, True)[0]


class _Norm(torch.autograd.Function):
    """LayerNorm or RMSNorm in one kernel, which keeps its input and one or two numbers for each row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shape: list[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return an output of the input's shape; ``dtype`` is that of the numbers of rows."""
        out, mean, inverse = torch.native_layer_norm(x, shape, weight, bias, eps)
        rows = (mean.to(dtype), inverse.to(dtype)) if centred else (inverse.to(dtype),)
        ctx.shape, ctx.bias = shape, bias is not None
        ctx.save_for_backward(x, weight, *((bias,) if bias is not None else ()), *rows)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return gradients of the input, the weight and the bias."""
        x, weight, *rows = ctx.saved_tensors
        bias = rows.pop(0) if ctx.bias else None
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3]]
        mean = rows[0] if len(rows) > 1 else torch.empty_like(rows[0])
        results = _aten.native_layer_norm_backward(gradients[0], x, ctx.shape, mean, rows[-1], weight, bias, needed)
        return results[0], None, results[1], results[2], None, None, None


def _norm_on_gpu(
    plain: Callable[..., Tensor],
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    # Inputs and weights of several dtypes have no fused kernel.
    if weight is not None and weight.dtype != x.dtype:
        return plain(x, normalized_shape, weight, eps)
    return _Norm.apply(x, normalized_shape, weight, None, eps or 0.0, False, torch.float32)  # type: ignore[no-any-return,no-untyped-call]


def _norm_on_cpu(
    plain: Callable[..., Tensor],
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    # In 16 bits throughout, the numbers of rows are so, too; on GPUs they are in fp32.
    if x.dtype not in (torch.float16, torch.bfloat16) or (weight is not None and weight.dtype != x.dtype):
        return plain(x, normalized_shape, weight, bias, eps)
    return _Norm.apply(x, normalized_shape, weight, bias, eps, True, x.dtype)  # type: ignore[no-any-return,no-untyped-call]


_CHOSEN: dict[str, dict[str, Callable[..., Any]]] = {
    "cpu": {"scaled_dot_product_attention": partial(_attention, _fused_on_cpu), "layer_norm": _norm_on_cpu},
    "cuda": {
        "scaled_dot_product_attention": partial(_attention, _fused_on_gpu),
        "dropout": _dropout_on_gpu,
        "rms_norm": _norm_on_gpu,
    },
}
