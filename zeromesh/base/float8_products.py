"""Linear layers whose three products multiply float8 numbers: one rounding of each operand, and nothing else.

The formats are those of Micikevicius et al., "FP8 Formats for Deep Learning", 2022. A scale is the smallest power of
two that brings the largest magnitude into the range of its format: scaling itself rounds nothing, and what has been
rounded once is rounded to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

MULTIPLE = 16
"""Divides both sizes of a weight: kernels of float8 products read 16 bytes at a time."""

CAPABILITY = (8, 9)
"""First version of CUDA devices that have float8 products."""

TINY = 2.0**-100
"""Smallest scale: zeros have one, too, and neither it nor its reciprocal leaves fp32's range of normal numbers."""

Largest = Callable[[Tensor], Tensor]
"""Elementwise maximum of a 1-D tensor over the ranks that share a dim of an operand."""


class Quantized(NamedTuple):
    """Numbers in float8, and their scales in fp32, by which they are multiplied."""

    values: Tensor
    scale: Tensor  # a scalar, or of shape (rows, 1) or (1, columns)


def magnitude(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest magnitude of a matrix, or of each row (``dim`` 1) or column (0), 1-D, in fp32."""
    if x.numel() == 0:
        return x.new_zeros(1 if dim is None else x.shape[1 - dim], dtype=torch.float32)
    # A whole matrix is reduced row by row first: a compiled reduction to one number reads with few threads.
    largest = x.abs().amax(1).amax().view(1) if dim is None else x.abs().amax(dim)
    return largest.float()


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of numbers up to a magnitude, elementwise: a power of two; NaN where that is not finite."""
    # The bits of an fp32 number below its exponent, added and cut off, round up to a power of two. A NaN scale makes
    # NaN of all numbers that it scales: a conversion alone would make a large finite number of an infinite one.
    bits = (largest / torch.finfo(dtype).max).clamp(min=TINY).view(torch.int32)
    powers = ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    return powers.where(largest.isfinite(), torch.nan)


def quantize(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Quantized:
    """Round a matrix to float8; ``scale`` as in ``Quantized``."""
    # A scalar tensor would be rounded to fp16, which does not have its range.
    wide = x.float() if x.dtype is torch.float16 else x
    return Quantized((wide * scale.reciprocal()).to(dtype), scale)


def product(a: Quantized, b: Quantized, dtype: torch.dtype, native: bool) -> Tensor:
    """Return ``a @ b``, summed in fp32 and rounded once, of shapes (rows, sums) and (sums, columns).

    Args:
        a: a scale for all, or for each row.
        b: a scale for all, or for each column.
        dtype: of the result; float64 is summed in float64.
        native: multiply with the device's own products, and not with fp32 numbers of the same values.
    """
    if not native or dtype is torch.float64:
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(a.values.device.type, enabled=False):
            total = a.values.to(wide) @ b.values.to(wide)
        return (total * a.scale * b.scale).to(dtype)
    (rows, sums), columns = a.values.shape, b.values.shape[1]
    if 0 in (rows, sums):
        return torch.zeros(rows, columns, dtype=dtype, device=a.values.device)
    missing = -sums % MULTIPLE  # tokens, in the product of a weight's gradient
    left, right = (_padded(values, missing) for values in (a.values, b.values.t()))
    # The kernels read both along the dim that is summed.
    left, right = left.contiguous(), right.contiguous().t()
    # A transposed scale has other strides than they expect.
    of_rows = a.scale.reshape(-1)[:, None] if a.scale.ndim else a.scale
    of_columns = b.scale.reshape(-1)[None] if b.scale.ndim else b.scale
    result: Tensor = torch._scaled_mm(left, right, of_rows, of_columns, out_dtype=dtype, use_fast_accum=False)
    return result


def _padded(values: Tensor, missing: int) -> Tensor:
    """Return a matrix with so many columns of zeros more."""
    if not missing:
        return values
    # As bytes: a zero is one of zeros, and not every device pads float8.
    return torch.nn.functional.pad(values.view(torch.uint8), (0, missing)).view(values.dtype)


@dataclass(frozen=True)
class Float8Products:
    """Products of a linear layer in float8; see ``Arithmetic``.

    Activations and weights are e4m3. ``rowwise``: each row of a left operand and each column of a right one has a
    scale, and gradients are e4m3, too. Otherwise a tensor has one scale, and gradients of outputs are e5m2.
    """

    rowwise: bool
    native: bool  # the device has float8 products
    over_outputs: Largest | None = None  # over the ranks that share the outputs; None: this rank has all
    over_inputs: Largest | None = None  # over the ranks that share the inputs

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output of ``x``, shape ``(..., inputs)``, and the scales that the backward uses again."""
        if x.dtype != weight.dtype:
            raise RuntimeError(f"expected input and weight to have the same dtype, but got {x.dtype} != {weight.dtype}")
        rows, dim = x.reshape(-1, x.shape[-1]), 1 if self.rowwise else None
        of_x, of_weight = magnitude(rows, dim), magnitude(weight, dim)
        if self.over_inputs is not None:
            of_x, of_weight = _largest_of_both(self.over_inputs, of_x, of_weight)
        elif self.over_outputs is not None and not self.rowwise:
            of_weight = self.over_outputs(of_weight)
        scales = scale_of(of_x, E4M3), scale_of(of_weight, E4M3)
        left, right = (
            quantize(value, E4M3, self._of_rows(scale)) for value, scale in zip((rows, weight), scales, strict=True)
        )
        y = self._product(left, Quantized(right.values.t(), right.scale.t()), x)
        y = y.view(*x.shape[:-1], weight.shape[0])
        # After the rounding to the output's dtype, as where a layer's inputs are split over ranks.
        return y if bias is None else y + bias, () if self.rowwise else scales

    def receive(self, gradient: Tensor) -> Received:
        """Return the output's gradient, shape ``(..., outputs)``, in float8 where it has one scale.

        Raises:
            RuntimeError: create_graph is true.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph is true, but products in float8 have no second derivatives; let the layers that this "
                "gradient goes through keep their own products"
            )
        rows = gradient.reshape(-1, gradient.shape[-1])
        if self.rowwise:
            return Received(gradient, rows, None)
        largest = magnitude(rows)
        if self.over_outputs is not None:
            largest = self.over_outputs(largest)
        return Received(gradient, rows, quantize(rows, E5M2, scale_of(largest, E5M2)[0]))

    def of_input(self, received: Received, weight: Tensor, scales: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the input."""
        gradient, rows, left = received
        if left is not None:
            right = quantize(weight, E4M3, scales[1][0])
        else:
            of_rows, of_columns = magnitude(rows, 1), magnitude(weight, 0)
            if self.over_outputs is not None:
                of_rows, of_columns = _largest_of_both(self.over_outputs, of_rows, of_columns)
            left = quantize(rows, E4M3, scale_of(of_rows, E4M3)[:, None])
            right = quantize(weight, E4M3, scale_of(of_columns, E4M3)[None])
        return self._product(left, right, gradient).view(*gradient.shape[:-1], weight.shape[1])

    def of_weight(self, received: Received, x: Tensor, scales: Sequence[Tensor], transposed: bool) -> Tensor:
        """Return the gradient of the weight, of shape ``(inputs, outputs)`` if ``transposed``."""
        gradient, rows, outputs = received
        inputs = x.reshape(-1, x.shape[-1])
        if outputs is None:
            outputs = quantize(rows, E4M3, scale_of(magnitude(rows, 0), E4M3)[None])
            right = quantize(inputs, E4M3, scale_of(magnitude(inputs, 0), E4M3)[None])
        else:
            right = quantize(inputs, E4M3, scales[0][0])
        weight_gradient = self._product(Quantized(outputs.values.t(), outputs.scale.t()), right, gradient)
        return weight_gradient.t() if transposed else weight_gradient

    def _of_rows(self, scale: Tensor) -> Tensor:
        return scale[:, None] if self.rowwise else scale[0]

    def _product(self, a: Quantized, b: Quantized, like: Tensor) -> Tensor:
        # Kernels with a scale for each row write bf16 only.
        native = self.native and (like.dtype is torch.bfloat16 or not self.rowwise)
        return product(a, b, like.dtype, native)


class Received(NamedTuple):
    """Gradient of a layer's output."""

    gradient: Tensor  # as autograd gives it
    rows: Tensor  # as a matrix
    quantized: Quantized | None  # None: each product scales it along another dim


def _largest_of_both(largest: Largest, of_left: Tensor, of_right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maxima of two vectors over ranks, with one message."""
    first, second = largest(torch.cat([of_left, of_right])).split([len(of_left), len(of_right)])
    return first, second


def has_products(device: torch.device) -> bool:
    """Return whether a device multiplies float8 numbers itself."""
    # AMD's have other capabilities, and some of them other formats.
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and torch.cuda.get_device_capability(device) >= CAPABILITY


def reason_to_skip(weight: Tensor) -> str:
    """Return why a layer with this weight, or part of one, keeps its products; "" if it need not."""
    sizes = " x ".join(map(str, weight.shape))
    if not weight.is_floating_point() or weight.numel() == 0 or weight.ndim != 2:
        return f"its weight is {weight.dtype} of shape {sizes}"
    return f"{sizes} does not divide by {MULTIPLE}" if any(size % MULTIPLE for size in weight.shape) else ""
