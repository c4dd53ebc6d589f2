"""Selective recomputation: results of matrix products and of attention stay, and the rest is computed again.

Source: ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch.utils.checkpoint import _CachedTorchDispatchMode, create_selective_checkpoint_contexts

PRODUCTS = {"mm", "addmm", "convolution", "_grouped_mm", "_scaled_mm"}
ATTENTION = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward")
"""Operators of torch's whose results are kept; the latter are beginnings of names.

Batched products are not among them: most are scores of attention, whose size is the square of the sequence's length.
"""


def contexts() -> tuple[Any, Any]:
    """Return the contexts of a forward and of its recomputation, for ``torch.utils.checkpoint.checkpoint``."""
    forward, again = create_selective_checkpoint_contexts(_is_kept)
    return forward, _Replay(None, again.storage)


@cache
def keeps_result(operator: Any) -> bool:
    """Return whether the results of an operator of torch's are kept."""
    name = str(operator.name()).rpartition("::")[2].partition(".")[0]
    return name in PRODUCTS or name.startswith(ATTENTION)


def _is_kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return keeps_result(operator)


class _Replay(_CachedTorchDispatchMode):
    """Recomputation that takes kept results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # An operator such as an in-place ReLU changed what was kept: the product is computed again.
            if "has been mutated" not in str(error):
                raise
            return func(*args, **(kwargs or {}))
