"""Common parts of models whose sequences are spread over ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromesh.comm.collectives import Group
from zeromesh.parallel.context import spread_batch as batch
from zeromesh.parallel.context.pair_rules import CausalPairs
from zeromesh.parallel.context.sequence_order import keep, reordered
from zeromesh.parallel.context.spread_attention import AUTO, Attention, attend, by_heads

_log = logging.getLogger("zeromesh")


class Unsupported(ValueError):
    """A model, or what it is called with, that cannot run with its sequences spread over ranks."""


def refuse(what: str, reason: str, remedy: str = "set mesh.context to 1") -> Unsupported:
    """Return the error for a model, or a part of it."""
    return Unsupported(f"{what} cannot run under context parallelism: {reason}; {remedy}")


class SpreadSequences:
    """Context parallelism of one model, by one of ``STRATEGIES`` or ``AUTO``; messages take three tags from ``tag`` on.

    Attributes:
        active: True if the model's sequences are spread at present.
        sends: False within ``without_messages``.
        losses: number of calls of the model's loss function since the forward began.
        whole_outputs: shapes of what the last forward of ``consecutive`` tokens returned whole.
        degree: number of ranks that share heads; those of other heads pass keys on.
        causal_degree: the same of causal attention without more.
        others: settings together with which ``consecutive`` is refused.
        forwards: number of forwards that have ended without ``consecutive``.
        consecutive: True if a rank has consecutive tokens, and not those of ``sequence_order.py``.
        order: tokens of the present batch in the order in which they are cut, int64 of shape (samples, sequence);
            None: as they are.
    """

    def __init__(self, strategy: str, group: Group, tag: int, degree: int = 1, causal_degree: int = 1) -> None:
        self.strategy, self.group, self.tag = strategy, group, tag
        self.active, self.sends, self.consecutive = True, True, False
        self.degree, self.causal_degree = degree, causal_degree
        self.whole_outputs: set[torch.Size] = set()
        self.others: Sequence[str] = ()
        self.order: Tensor | None = None
        self._attentions = self.losses = self.forwards = 0
        # A compiler cannot follow messages between ranks, and would compile anew for each number of calls.
        self._uncompiled = torch.compiler.disable(self._attend)
        purposes = f"{strategy} attention", "gradients of keys and values", "the mean loss"
        group.purposes.update(zip(range(tag, tag + 3), purposes, strict=True))

    @property
    def parts(self) -> int:
        """Number of parts of a sequence whose keys go around."""
        return self.group.size // self.degree

    def takes_rules(self, implementation: str) -> bool:
        """Return whether masks of an attention of transformers are kept as rules, by which pairs are left out."""
        # What each rank computes by the model's own function has the bits of one process.
        return self.parts > 1 or self.strategy == "ring" or (self.strategy == AUTO and implementation == "sdpa")

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor of whole sequences, such as labels: (samples, sequence, ...)."""
        if self.consecutive:
            return x.chunk(self.group.size, dim)[self.group.rank]
        return keep(x if self.order is None else reordered(x, self.order), self.group.rank, self.group.size, dim)

    @property
    def replaces(self) -> bool:
        """True if attention is replaced by one over the ranks at present."""
        return self.active and not self.consecutive

    def __deepcopy__(self, memo: dict[int, Any]) -> SpreadSequences:
        """Return the same object: a copy of a model is spread over the same ranks."""
        return self

    def follow_code(self, reason: ValueError) -> None:
        """Give the model's code parts of sequences that stand for the whole; raise the reason if others forbid it."""
        if self.others:
            reason.add_note(f"parts of sequences that stand for the whole do not work with {', '.join(self.others)}")
            raise reason
        self.consecutive = True
        _log.warning("%s; under the strategy auto its code is given tokens of all ranks where it needs them", reason)

    def count_forward(self) -> None:
        """Count a forward that has ended without ``consecutive``; none of them is counted while paused."""
        self.forwards += self.active

    def paused(self) -> AbstractContextManager[Any]:
        """Return a context without context parallelism: each rank computes all that it is given."""
        return patch.object(self, "active", False)

    def without_messages(self) -> AbstractContextManager[Any]:
        """Return a context of tensors without memory, as in a check of the model's code."""
        return patch.object(self, "sends", False)

    def begin(self, order: Tensor | None = None) -> None:
        """Count calls of attention and of the loss anew: a forward begins, of tokens in an order."""
        self._attentions, self.losses, self.order = 0, 0, order

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **options: Any) -> Tensor:
        """Compute causal attention of this rank's part of the sequence, or, by ``options``, that of ``ring``.

        With the option ``run``, compute attention by that function, which gets all tokens of this rank's heads. Raise
        Unsupported if queries, keys and values are not those of the same sequences.
        """
        shapes = [tuple(x.shape) for x in (q, k, v)]
        # Kernels of blocks do not broadcast: they would read memory that is not theirs.
        alike = {(len(shape), shape[0], shape[-2]) for shape in shapes} == {(4, q.shape[0], q.shape[-2])}
        if not alike or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
            rule = "(batch, heads, sequence, width) of one batch and sequence, without a cache, and heads divide"
            raise refuse("attention", f"its queries, keys and values have shapes {shapes}, which should be {rule}")
        if not self.sends:  # of the same shape, and as apart
            is_grouped = k.shape[1] != q.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)
        out: Tensor = self._uncompiled(q, k, v, scale, **options)
        return out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, run: Attention | None = None, **options: Any
    ) -> Tensor:
        self._attentions += 1
        if run is not None:
            return by_heads(run, q, k, v, self.group, self.tag)
        if "mask" in options:
            options["pairs"] = pairs_of(options.pop("mask"))
        degree = self.degree if options else self.causal_degree
        return attend(degree, q, k, v, self.group, self.tag, scale=scale, **options)

    def mean_loss(self, loss: Tensor, labels: Tensor) -> Tensor:
        """See ``spread_batch.mean_loss``."""
        if not self.sends:
            return loss
        self.losses += 1
        return batch.mean_loss(loss, labels, self.group, self.tag + 2)

    def require_attention(self, name: str) -> None:
        """Raise Unsupported if the model's forward has ended without a call of attention that was seen."""
        # Its attention would then see this rank's tokens only, and nothing else would tell.
        if not self._attentions:
            raise refuse(name, "its forward ended without a call of the attention that is replaced")


def stand_in(pairs: CausalPairs, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a mask that models hand on to attention, without memory: ``pairs_of`` it are these."""
    mask = torch.ones((), dtype=torch.bool, device=device).expand(shape)
    vars(mask).update(pairs=pairs)  # a tensor that is computed from it has none
    return mask


def pairs_of(mask: Tensor) -> CausalPairs:
    """Return the pairs for which a mask stands in; raise Unsupported for another mask."""
    pairs: CausalPairs | None = getattr(mask, "pairs", None)
    if pairs is None:
        raise refuse("attention", f"it has a mask of its own, of shape {tuple(mask.shape)}")
    return pairs


def is_token_mean(loss: Any, logits: Tensor, shifts: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a loss of ``logits``, of shape (samples, sequence, width), is the mean over labelled tokens.

    Others than transformers' own are tried with eight tokens; ``shifts`` if it takes ``shift_labels``.
    """
    is_known = getattr(inspect.unwrap(loss), "__name__", "") in _MEANS and loss.__module__.startswith(
        "transformers.loss"
    )
    if is_known and not kwargs.keys() & {"ignore_index", "num_items_in_batch"} and len(args) < 2:
        return True
    generator, width, device = torch.Generator().manual_seed(0), logits.shape[-1], logits.device
    trial = torch.randn(1, 8, width, generator=generator).to(device)
    labels = torch.arange(0, 56, 7, device=device).unsqueeze(0) % width
    labels[0, 1] = batch.IGNORE_LABEL

    def of(tokens: slice) -> Tensor:
        shifted = {"shift_labels": labels[:, tokens]} if shifts else {}
        result: Tensor = loss(trial[:, tokens], labels[:, tokens], *args, **shifted, **kwargs)
        return result

    try:
        with torch.no_grad():
            both, first, last = of(slice(0, 8)), of(slice(0, 4)), of(slice(4, 8))
        return both.numel() == 1 and torch.allclose((3 * first + 4 * last) / 7, both, rtol=1e-4)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False


_MEANS = ("ForCausalLMLoss", "ForMaskedLMLoss", "ForTokenClassification")


def parameters_of(kind: type[nn.Module]) -> Mapping[str, inspect.Parameter]:
    """Return the signature of the forward of a class of modules."""
    return inspect.signature(kind.forward).parameters


def named_arguments(kind: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the forward of a class of modules, all by name."""
    if not args:
        return dict(kwargs)
    bound = inspect.signature(kind.forward).bind_partial(None, *args, **kwargs)
    signature = bound.signature.parameters
    named = dict(list(bound.arguments.items())[1:])
    for name in list(named):
        if signature[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name)
        elif signature[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise refuse(kind.__name__, f"its forward takes any number of arguments as *{name}")
    return named


def arguments_of_sequences(kind: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name, without a cache. Raise Unsupported for those that only make sense in one process."""
    named = named_arguments(kind, args, kwargs)
    if named.get("past_key_values") is not None:
        raise refuse(kind.__name__, "it is called with a cache, as in generation", "generate within paused()")
    if named.get("num_items_in_batch") is not None:
        reason = "num_items_in_batch counts labels, and the ranks count theirs themselves"
        raise refuse(kind.__name__, reason, "leave it out")
    if "use_cache" in parameters_of(kind):
        named["use_cache"] = False  # a cache would have this rank's tokens only
    return named
