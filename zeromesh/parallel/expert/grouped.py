"""Grouped products of transformers' experts, of rows that are sorted by expert already.

Its ``grouped_mm_experts_forward`` would sort them again, and multiply them by weights of one: five copies of all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromesh.parallel.expert.dispatch import Late

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of torch's kernels


@dataclass(frozen=True)
class GroupedExperts:
    """Experts whose own forward computes by transformers' grouped products."""

    module: Any
    product: Callable[..., Tensor]  # transformers' product of rows by the matrices of their experts
    has_kernel: Callable[..., bool]  # tells whether torch has a kernel for operands

    @classmethod
    def of(cls, module: Any, forward: Callable[..., Tensor]) -> GroupedExperts | None:
        """Return the experts of a module with its own ``forward``; None if that computes otherwise."""
        interface: Any = sys.modules.get("transformers.integrations.moe")
        code = getattr(forward, "__code__", None)
        # Code of the decorator of experts; nobody has put another in its place.
        if interface is None or code is None or code.co_filename != interface.__file__:
            return None
        name = module.config._experts_implementation
        function = interface.ALL_EXPERTS_FUNCTIONS.get(name) if name == "grouped_mm" else None
        if function is None or function is not interface.grouped_mm_experts_forward:
            return None
        parts = (getattr(interface, part, None) for part in ("_grouped_linear", "_can_use_grouped_mm"))
        product, has_kernel = parts
        return None if product is None or has_kernel is None else cls(module, product, has_kernel)

    @property
    def _first(self) -> str:
        """Name of the weight that rows are multiplied by first."""
        return "gate_up_proj" if self.module.has_gate else "up_proj"

    def late(self, dtype: torch.dtype) -> Late | None:
        """Return the first weight if its gradient can be computed while those of rows of ``dtype`` travel."""
        # Its operands would be freed after that anyway; those of the second weight would be kept longer.
        weight = getattr(self.module, self._first)
        usable = weight.dtype == dtype in DTYPES and weight.requires_grad and torch.is_grad_enabled()
        return Late(weight) if usable else None

    def compute(self, rows: Tensor, experts: Tensor, late: Late | None = None, first: Tensor | None = None) -> Tensor:
        """Return the results of rows, shape ``(P, H)``.

        Args:
            rows: shape ``(P, H)``, sorted by expert.
            experts: of each row, int64, shape ``(P,)``.
            late: the first weight, if its gradient is computed while those of rows travel.
            first: what stands for the weight of ``late``.
        """
        module = self.module
        weights = {self._first: getattr(module, self._first) if first is None else first, "down_proj": module.down_proj}
        numbers = torch.arange(len(weights["down_proj"]), device=experts.device)
        offsets = torch.searchsorted(experts, numbers, right=True, out_int32=True)

        def layer(x: Tensor, name: str) -> Tensor:
            bias = getattr(module, f"{name}_bias")[experts] if module.has_bias else None
            weight, transposed = weights[name], module.is_transposed
            if late is None or name != self._first or not self.has_kernel(x, weight, offsets):
                return self.product(x, weight, offsets, bias=bias, is_transposed=transposed)
            y: Tensor = _Product.apply(x, weight, offsets, transposed, late)  # type: ignore[no-untyped-call]
            return y if bias is None else y + bias

        x = layer(rows, self._first)
        x = layer(module._apply_gate(x) if module.has_gate else module.act_fn(x), "down_proj")
        results: Tensor = module.post_expert_norm(x) if module.has_post_expert_norm else x
        return results


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool, late: Late) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.settings = transposed, late
        return F.grouped_mm(x, weight if transposed else weight.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors
        transposed, late = ctx.settings
        gradient = gradient.contiguous()
        of_x = F.grouped_mm(gradient, weight.transpose(1, 2) if transposed else weight, offs=offsets)

        def of_weight() -> Tensor:
            left, right = (x, gradient) if transposed else (gradient, x)
            return F.grouped_mm(left.T, right, offs=offsets)

        if torch.is_grad_enabled():  # it is to be differentiated again
            return of_x, of_weight(), None, None, None
        late.postpone(of_weight)
        return of_x, weight.new_zeros(()).expand_as(weight), None, None, None
