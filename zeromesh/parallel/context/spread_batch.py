"""Cutting a batch of sequences over the ranks, and the mean loss of what is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromesh.comm.collectives import Group
from zeromesh.parallel.context.sequence_order import keep, reordered

IGNORE_LABEL = -100  # counts neither in the loss nor in its mean; the default of torch and transformers

# Names of arguments whose second dim is the sequence.
TOKENS = ("input_ids", "tokens", "inputs_embeds", "token_type_ids")
LABELS = ("labels", "shift_labels")
POSITIONS = ("position_ids", "positions")


class NotCut(ValueError):
    """A batch that has more than plainly causal sequences, or something that is not known to be cut."""


def split(
    batch: Mapping[str, Any],
    group: Group,
    positions: str = "position_ids",
    shift: bool = True,
    counted: Tensor | None = None,
    masked: bool = False,
    order: Tensor | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a batch that all ranks of the context axis have, with positions.

    If ``shift``, a token's label is the token itself, as transformers' models take it; else it is the next. Where the
    batch has no positions, they are those ``counted`` by the model, or else from 0 on. Tokens are cut in the ``order``
    that is given, (samples, sequence). Raise ValueError for a sequence that cannot be cut, or for something in the
    batch that is not known to be cut; and, unless attention is ``masked`` by those of whole sequences, for a mask or
    positions that causal attention does not have.
    """
    parts = {name: value for name, value in batch.items() if value is not None}
    first = next((parts[name] for name in TOKENS if name in parts), None)
    if first is None:
        raise NotCut(f"the batch has {', '.join(parts) or 'nothing'}, but none of {', '.join(TOKENS)} to be cut")
    size, length = first.shape[:2]
    # Before anything is cut, as the next token of a rank's last one is on another rank.
    labels, shifted = parts.pop("labels", None), parts.pop("shift_labels", None)
    if shifted is not None:
        labels = shifted
    elif labels is not None and shift:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_LABEL)
    # A mask of ones, or of padding that comes last and has no labels, is left out: under causal attention no other
    # token sees it.
    if (mask := parts.pop("attention_mask", None)) is not None and not masked:
        _require_causal_mask(mask, labels, (size, length))
    documents = parts.pop("documents", None)
    if documents is not None and bool((documents != documents[:, :1]).any()):
        raise NotCut(
            "a row has several documents that must not see each other, which context-parallel attention cannot hide: "
            "give one document per row, let documents see each other, or set mesh.context to 1"
        )
    where = next((parts.pop(name) for name in POSITIONS if name in parts), None)
    if where is not None and (where.ndim != 2 or (not masked and bool((where.diff() != 1).any()))):
        raise NotCut(
            f"positions of shape {tuple(where.shape)} do not count up by one along dim 1; where they start anew, "
            "they stand for packed documents, which context-parallel attention cannot hide from each other: leave "
            "them out, give one document per row, or set mesh.context to 1"
        )
    if where is None:
        where = torch.arange(length, device=first.device).expand(size, length) if counted is None else counted
    parts[positions] = where
    if labels is not None:
        parts["labels"] = labels
    names = {*TOKENS, *LABELS, positions}
    for name, value in parts.items():
        if isinstance(value, Tensor) and value.ndim and name not in names:
            raise NotCut(
                f"the batch has a tensor {name} of shape {tuple(value.shape)}, and it is not known how a sequence in "
                f"it is cut over context-parallel ranks; known are {', '.join((*TOKENS, *LABELS, *POSITIONS))}, and "
                "attention_mask: leave it out, or set mesh.context to 1"
            )
        if name in names and value.shape[1] != length:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, but its sequences should have {length} tokens")
    for name in names & parts.keys():
        value = parts[name] if order is None else reordered(parts[name], order)
        parts[name] = keep(value, group.rank, group.size, 1)
    return parts


def _require_causal_mask(mask: Tensor, labels: Tensor | None, shape: tuple[int, int]) -> None:
    """Raise ValueError if the mask hides something from a token that counts."""
    reason = ""
    if mask.shape != shape:
        reason = f"it has shape {tuple(mask.shape)} and not {shape}"
    elif bool((mask[:, 1:] > mask[:, :-1]).any()):
        reason = "it hides tokens that come before others: pad at the end"
    elif labels is not None and bool((labels.ne(IGNORE_LABEL) & mask.eq(0)).any()):
        reason = f"hidden tokens have labels: give them the label {IGNORE_LABEL}"
    if reason:
        raise NotCut(
            "context-parallel attention is causal without a mask, which leaves out padding only where no token that "
            f"counts would see it; of this attention_mask, {reason}"
        )


def mean_loss(loss: Tensor, labels: Tensor, group: Group, tag: int) -> Tensor:
    """Return the mean loss over the tokens of the whole sequences, equal on all ranks.

    ``loss`` is the mean over this rank's tokens that have a label, or any value if none has.
    """
    if group.size == 1:
        return loss
    mean: Tensor = _Mean.apply(loss, labels.ne(IGNORE_LABEL).sum(), group, tag)  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: Tensor, group: Group, tag: int) -> Tensor:
        total = torch.where(count > 0, loss.detach().double() * count, 0.0)  # the mean of nothing is not a number
        sums = torch.stack([total, count.to(total)])
        group.all_reduce(sums, tag)
        # Times the number of ranks, as gradients are averaged over them: the average is then the mean's gradient,
        # however many labels count on each rank.
        ctx.save_for_backward(count * group.size / sums[1])
        return (sums[0] / sums[1]).to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (share,) = ctx.saved_tensors
        return (gradient * share).to(gradient.dtype), None, None, None
