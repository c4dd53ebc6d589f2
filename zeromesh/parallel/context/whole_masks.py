"""Masks of whole sequences for transformers' attention functions, where each rank has all tokens of its heads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.parallel.context.applied import refuse

# Functions of transformers' masks that read nothing but the numbers of tokens.
_OF_INDICES = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
)


@dataclass(frozen=True)
class Whole:
    """Describe whole sequences to attention.

    Attributes:
        shape: (batch, sequence).
        mask: which tokens are seen, bool of this shape; None: all.
        positions: positions that the caller gave, int64 of this shape; where they start anew, a document begins.
        ends: True if the mask hides tokens at the end only, which no token that counts sees under causal attention.
    """

    shape: tuple[int, int]
    mask: Tensor | None = None
    positions: Tensor | None = None
    ends: bool = False

    def make(self, interface: Any, name: str, settings: dict[str, Any]) -> Any:
        """Make the mask that the model's mask function ``interface`` gives in one process.

        ``settings`` are the arguments that it is called with for a part of the sequences. Raise Unsupported if they
        have a mask that reads more than numbers of tokens.
        """
        from transformers import masking_utils

        if settings.get("use_vmap"):
            raise refuse(name, "its attention has a mask of its own")
        function = self._rebuilt(settings["mask_function"], name)
        causal = _has(function, "causal_mask_function")
        skips = {"allow_is_causal_skip": causal}
        # As in one process: documents are found where no mask is given, and by masks of causal attention only.
        if causal and self.mask is None and self.positions is not None:
            documents = masking_utils.find_packed_sequence_indices(self.positions)
            if documents is not None:
                function = masking_utils.packed_sequence_compatibility_function(function, self.positions, documents)
                skips["allow_is_causal_skip"] = False
        rows, length = self.shape
        numbers = {"batch_size": rows, "q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
        mask = None if causal and self.ends else self.mask  # of no mask at all, kernels are faster
        changed = {**numbers, **skips, "mask_function": function, "attention_mask": mask}
        return interface(**{**settings, **changed})

    def _rebuilt(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function of a mask for whole sequences, without what transformers found in a part's positions."""
        from transformers import masking_utils

        kind, parts = _kind(function), inspect.getclosurevars(function).nonlocals
        if kind in _OF_INDICES:
            return function
        if kind in ("and_masks", "or_masks"):
            inner = parts["mask_functions"]
            if _kind(inner[0]) == "packed_sequence_mask_function":  # a part's two chunks look like two documents
                return self._rebuilt(inspect.getclosurevars(inner[1]).nonlocals["mask_function"], name)
            combined: Callable[..., Any] = getattr(masking_utils, kind)(*(self._rebuilt(part, name) for part in inner))
            return combined
        if kind == "chunked_overlay":
            padding = torch.zeros_like(parts["left_padding"])
            if self.mask is not None:
                padding = (self.mask.cumsum(-1) == 0).sum(-1)
            chunked: Callable[..., Any] = masking_utils.chunked_overlay(parts["chunk_size"], padding)
            return chunked
        raise refuse(name, f"its attention has a mask of its own, by {kind}")


def _kind(function: Callable[..., Any]) -> str:
    # They are made inside of functions of these names, "and_masks.<locals>.and_mask", say.
    name: str = function.__qualname__.partition(".")[0]
    return name


def _has(function: Callable[..., Any], kind: str) -> bool:
    if _kind(function) == kind:
        return True
    return any(_has(part, kind) for part in inspect.getclosurevars(function).nonlocals.get("mask_functions", ()))


def of_heads(
    module: nn.Module, function: Any, rank: int, heads: int, mask: Tensor | None, settings: dict[str, Any]
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention of some heads to all tokens, by an attention function of transformers.

    ``function`` is None for the one that the module's own file defines. ``heads`` are those of all ``rank``s.
    """

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        count = query.shape[1]
        some = _SomeHeads(module, heads, slice(rank * count, (rank + 1) * count), count // key.shape[1])
        extras = {
            name: some.part(value) if name == "s_aux" and isinstance(value, Tensor) else value
            for name, value in settings.items()
        }
        attention = sys.modules[type(module).__module__].eager_attention_forward if function is None else function
        out: Tensor = attention(some, query, key, value, mask, **extras)[0]
        return out.transpose(1, 2)

    return run


class _SomeHeads:
    """Attributes of a module of attention, as they are for some of its heads."""

    def __init__(self, module: nn.Module, heads: int, present: slice, groups: int) -> None:
        self._module, self._heads, self._present, self.num_key_value_groups = module, heads, present, groups

    def part(self, of_all: Tensor) -> Tensor:
        return of_all if of_all.numel() != self._heads else of_all.flatten()[self._present]

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._module, name)
        return self.part(attribute) if name == "sinks" and isinstance(attribute, Tensor) else attribute
