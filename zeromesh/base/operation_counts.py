"""Floating-point operations, counted while they run, on real tensors or on the meta device.

A multiplication and an addition are two operations. Products of matrices, convolutions and attention count; what is
done element by element does not, as usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Formula = Callable[..., int]

_aten = torch.ops.aten


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> int:
    # Of two products: scores, and sums of values. A mask leaves nothing out. Several heads of queries may share keys.
    return 2 * query.numel() * key.shape[-2] + 2 * query.numel() // query.shape[-1] * key.shape[-2] * value.shape[-1]


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    # Of four products. Scores that a kernel computes again do not count.
    return 2 * _attention(query, key, value)


def _grouped_product(first: torch.Tensor, second: torch.Tensor, *rest: Any, **more: Any) -> int:
    # Of experts, where each row, or column, takes part in one product.
    groups = first.shape[0] if first.ndim > second.ndim else 1
    return 2 * first.numel() * second.shape[-1] // groups


# Operations of each operator, from its arguments. torch's registry lacks some kernels, and counts for others what they
# compute again; before 2.13 it takes as many heads of keys as of queries.
FORMULAS: dict[Any, Formula] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_efficient_attention: _attention,
    _aten._scaled_dot_product_cudnn_attention: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    _aten._grouped_mm: _grouped_product,
}


class Operations(TorchDispatchMode):
    """Context in which a model's operations are counted. It may be entered again, and counts on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = 0  # outside of any backward
        self.backward = 0  # without those that are recomputed
        self.recomputed = 0  # forwards that a backward does again (activation checkpointing)
        self.modules: dict[str, int] = defaultdict(int)  # of ``forward``, by the module's name; the model's is ""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inside: list[str] = []
        self._handles: list[Any] = []
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1:  # a module's hooks count once, however often the context is entered
            self._inside = []
            self._handles = [
                register_module_forward_pre_hook(self._enters),
                register_module_forward_hook(self._leaves, always_call=True),
            ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            for handle in self._handles:
                handle.remove()

    def _enters(self, module: nn.Module, inputs: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._inside.append(name)

    def _leaves(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is not None and name in self._inside:
            while self._inside.pop() != name:  # inner modules that were not left
                pass

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count an operator's operations; torch calls it for every operator."""
        kwargs = kwargs or {}
        formula = FORMULAS.get(func._overloadpacket)
        result = func(*args, **kwargs)
        if formula is not None:
            self._add(int(formula(*args, **kwargs, out_val=result)))
        return result

    def _add(self, count: int) -> None:
        if torch._C._current_graph_task_id() == -1:  # no backward runs in this thread
            self.forward += count
            for name in set(self._inside):
                self.modules[name] += count
        elif torch.is_grad_enabled():
            self.recomputed += count
        else:
            self.backward += count


def losses_of(output: Any) -> Iterator[torch.Tensor]:
    """Yield the loss in the output of a model; all tensors, if it has no loss."""
    named = output if isinstance(output, Mapping) else {"loss": getattr(output, "loss", None)}
    if isinstance(loss := named.get("loss"), torch.Tensor):
        yield loss
        return
    parts = tuple(output.values()) if isinstance(output, Mapping) else output
    yield from (x for x in tree_leaves(parts) if isinstance(x, torch.Tensor))
