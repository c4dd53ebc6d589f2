"""Products and attention in bf16 at the speed of fp32, on processors without instructions for bf16.

There torch's own run at 2 GFLOP/s, a thirtieth of fp32's speed: forward and backward would take so long that nothing
else could be seen beside them. What goes in, what comes out, and what is kept and sent is bf16 as before.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch

BLOCK = 256
"""Rows or columns of the larger factor that are fp32 at once, so that the peak of memory is that of bf16."""

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

_kept: list[torch.library.Library] = []


def needed(device: torch.device) -> bool:
    """Whether this device's own products of bf16 are too slow for anything to be measured beside them."""
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def replace() -> None:
    """From here on compute them so in this process, forward and backward, whoever asks."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that are replaced
        library.impl("mm", product, "CPU", allow_override=True)
        into = torch.library.get_kernel("aten::mm.out", "CPU")
        library.impl("mm.out", partial(_product_into, into), "CPU", with_keyset=True, allow_override=True)
        for name, narrowed in ((ATTENTION, 1), (ATTENTION + "_backward", 3)):
            kernel = torch.library.get_kernel(name, "CPU")
            library.impl(name, partial(_attention, kernel, narrowed), "CPU", with_keyset=True, allow_override=True)
    _kept.append(library)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of shapes (m, k) and (k, n): of bf16 factors multiplied in fp32 and rounded once."""
    out = a.new_empty(a.shape[0], b.shape[1])
    if a.dtype is not torch.bfloat16:
        return torch.mm(a, b, out=out)
    if out.shape[0] < out.shape[1]:
        wide = a.float()
        for part, columns in zip(out.split(BLOCK, dim=1), b.split(BLOCK, dim=1), strict=True):
            part.copy_(torch.mm(wide, columns.float(), out=wide.new_empty(part.shape)))
    else:
        wide = b.float()
        for part, rows in zip(out.split(BLOCK), a.split(BLOCK), strict=True):
            part.copy_(torch.mm(rows.float(), wide, out=wide.new_empty(part.shape)))
    return out


def _product_into(kernel: Any, keys: Any, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """The same, where the caller has memory for it."""
    if a.dtype is not torch.bfloat16:
        kernel.call_boxed(keys, a, b, out=out)
        return out
    return out.copy_(product(a, b))


def _attention(kernel: Any, narrowed: int, keys: Any, *args: Any, **options: Any) -> Any:
    """Call torch's kernel in fp32; of what it returns, the first ``narrowed`` tensors are in the inputs' dtype."""
    dtype = args[0].dtype
    if dtype is not torch.bfloat16:
        return kernel.call_boxed(keys, *args, **options)
    wide = [a.float() if isinstance(a, torch.Tensor) and a.dtype is dtype else a for a in args]
    found = kernel.call_boxed(keys, *wide, **options)
    return (*(tensor.to(dtype) for tensor in found[:narrowed]), *found[narrowed:])
