"""Masks of whole sequences for transformers' attention functions, where each rank has all tokens of its heads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.parallel.context.applied import refuse
from zeromesh.parallel.context.pair_rules import PairRule


@dataclass(frozen=True)
class Whole:
    """Describe whole sequences to attention."""

    shape: tuple[int, int]  # (batch, sequence)
    mask: Tensor | None = None  # which tokens are seen, bool of this shape; None: all
    positions: Tensor | None = None  # that the caller gave, int64 of this shape
    documents: Tensor | None = None  # number of each token's document, where there are several, int64 of this shape
    ends: bool = False  # the mask hides tokens at the end only, which no token that counts sees under causal attention

    def make(self, eager: bool, name: str, settings: dict[str, Any]) -> Tensor | None:
        """Make the mask that the model's mask function gives in one process, for sdpa, or for ``eager`` attention.

        ``settings`` are the arguments that it is called with for a part of the sequences. Raise Unsupported if they
        have a mask that reads more than numbers of tokens.
        """
        rules, device = self.rules(name, settings), settings["device"]
        names = [rule.name for rule in rules]
        skips = names == ["causal"] or (not names and settings.get("allow_is_bidirectional_skip"))
        if skips and not eager:  # without a mask kernels are faster
            return None
        mask = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        for rule in rules:
            mask = mask & rule.sees(rule.of_queries, rule.of_keys)
        if eager:
            zero = torch.zeros((), dtype=settings["dtype"], device=device)
            mask = torch.where(mask, zero, torch.finfo(zero.dtype).min)
        return mask.unsqueeze(1).expand(self.shape[0], 1, self.shape[1], self.shape[1])

    def rules(self, name: str, settings: dict[str, Any]) -> list[PairRule]:
        """Return the rules of a mask; ``settings`` and errors are those of ``make``."""
        kinds, device = _kinds(settings, name), settings["device"]
        causal = "causal_mask_function" in dict(kinds)
        documents = self.documents if causal else None  # masks of causal attention alone hide documents
        numbers = torch.arange(self.shape[1], device=device).expand(1, -1)
        at = numbers if documents is None or self.positions is None else self.positions
        hidden = torch.zeros_like(numbers) if self.mask is None else (~self.mask).long()
        rules = [rule for kind, parts in kinds for rule in _RULES[kind](at, parts, hidden)]
        if documents is not None:
            rules.append(PairRule("document", documents, documents, 0, 0))
        if self.mask is not None and not (causal and self.ends):
            rules.append(PairRule("padding", torch.zeros_like(hidden), hidden, 0, 0))
        return [rule for rule in rules if rule.hides()]

    def blind(self, rules: list[PairRule]) -> bool:
        """Return whether some query may see no key."""
        names = {rule.name for rule in rules}
        if self.mask is None or "padding" not in names:
            return False
        hidden = ~(self.mask[:, 0] if "causal" in names else self.mask.any(-1))
        return bool(hidden.any()) or bool(names & {"window", "chunk"})

    def causal(self, name: str, settings: dict[str, Any]) -> bool:
        """Return whether a mask is plainly causal, but for windows as long as the sequence; see ``rules``."""
        kinds = [kind for kind, _ in _kinds(settings, name)]
        return kinds == ["causal_mask_function"] and self.documents is None and (self.mask is None or self.ends)


def _chunks(at: Tensor, parts: Any, hidden: Tensor) -> list[PairRule]:
    before = hidden.cumprod(-1).sum(-1, keepdim=True)  # padding before the first token
    numbers = (at - before) // parts["chunk_size"]
    return [PairRule("chunk", numbers, numbers, 0, 0)]


# Rules of transformers' functions of masks that read nothing but the numbers of tokens: from these, what the function
# was made of, and a number for each token that is 1 if it is hidden.
_RULES: dict[str, Callable[[Tensor, Any, Tensor], list[PairRule]]] = {
    "causal_mask_function": lambda at, parts, hidden: [PairRule("causal", at, at, 0)],
    "bidirectional_mask_function": lambda at, parts, hidden: [],
    "sliding_window_overlay": lambda at, parts, hidden: [PairRule("window", at, at, high=parts["sliding_window"] - 1)],
    "sliding_window_bidirectional_overlay": lambda at, parts, hidden: [
        PairRule("window", at, at, -parts["sliding_window"], parts["sliding_window"])
    ],
    "chunked_overlay": _chunks,
}


def _kinds(settings: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    if settings.get("use_vmap"):
        raise refuse(name, "its attention has a mask of its own")
    return [*_combined(settings["mask_function"], name)]


def _combined(function: Callable[..., Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the functions that a mask's function combines, by name, and what each was made of."""
    # They are made inside of functions of these names, "and_masks.<locals>.and_mask", say.
    kind, parts = function.__qualname__.partition(".")[0], inspect.getclosurevars(function).nonlocals
    if kind in ("and_masks", "or_masks"):
        inner = parts["mask_functions"]
        if inner[0].__qualname__.startswith("packed_sequence_mask_function"):  # a part's two chunks look like documents
            inner = [inspect.getclosurevars(inner[1]).nonlocals["mask_function"]]
        for part in inner:
            yield from _combined(part, name)
    elif kind in _RULES:
        yield kind, parts
    # A function of another file may have the name of one of transformers'.
    of_transformers = function.__module__ == "transformers.masking_utils"
    if not of_transformers or (kind not in _RULES and kind != "and_masks"):
        raise refuse(name, f"its attention has a mask of its own, by {kind}")


def attention_of(function: Any, module: nn.Module) -> Any:
    """Return an attention function of transformers; for None, the one that the module's own file defines."""
    return sys.modules[type(module).__module__].eager_attention_forward if function is None else function


def of_heads(
    module: nn.Module, function: Any, rank: int, heads: int, mask: Tensor | None, settings: dict[str, Any]
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention of some heads to all tokens, by a ``function`` as ``attention_of`` takes it.

    ``heads`` are those of all ``rank``s.
    """

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        count = query.shape[1]
        some = _SomeHeads(module, heads, slice(rank * count, (rank + 1) * count), count // key.shape[1])
        extras = {
            name: some.part(value) if name == "s_aux" and isinstance(value, Tensor) else value
            for name, value in settings.items()
        }
        out: Tensor = attention_of(function, module)(some, query, key, value, mask, **extras)[0]
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
