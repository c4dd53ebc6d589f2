"""Cross entropy of a head whose logits are never all there, on one rank or with its vocabulary split over several.

The idea of chunks is that of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, and Hsu et
al., "Liger Kernel", 2024; that of a split vocabulary of Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeromesh.base.linear_arithmetic import Gradients, Ticket, autocast, postponed
from zeromesh.comm.collectives import Group

CHUNK_BYTES = 1 << 26  # of a chunk's logits at least, from which follows how many tokens it has
CHUNK_SHARE = 4  # of the sum of the weight's gradient in fp32, a chunk's logits may take this part
REDUCTIONS = ("mean", "sum", "none")


def chunk_bytes(rows: float, width: float, itemsize: int = 4, sums: bool = True) -> int:
    """Return the bytes that a chunk's logits may take.

    Args:
        rows: of the head on this rank.
        width: of the head.
        itemsize: bytes of one of the logits, as they are summed.
        sums: the gradient of the head is computed, and summed over chunks; not so in evaluation, or if it is frozen.
    """
    # A chunk of t tokens computes 6 t operations for each element of the head, and moves 16 bytes: it reads the head
    # twice, writes a gradient, and adds it to the sum in fp32. A GPU computes some 300 operations in the time of a
    # byte, so it waits for memory below 800 tokens. width / 4 tokens are enough for a wide model, and their logits
    # take a quarter of the sum that chunks need anyway, whatever the vocabulary is. Without that sum they would be what
    # takes the most memory.
    if not sums:
        return CHUNK_BYTES
    return max(CHUNK_BYTES, int(itemsize * rows * width) // CHUNK_SHARE)


@dataclass(frozen=True)
class Vocabulary:
    """Entries of the vocabulary in the rows of this rank's head."""

    start: int  # the first entry
    size: int  # entries on all ranks together; rows from there on are padding, which takes no part
    group: Group | None = None  # ranks that share the vocabulary; None: it is whole


@dataclass(frozen=True)
class _Terms:
    """Terms of a token's loss."""

    vocabulary: Vocabulary
    ignore_index: int
    label_smoothing: float
    scale: float
    softcap: float | None
    chunk: int
    graded: bool
    ticket: Ticket | None  # where the backward leaves the weight's gradient; None: it computes it


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    vocabulary: Vocabulary | None = None,
    chunk: int | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), labels)`` in the memory of one chunk of tokens.

    Logits are scaled, capped and summed in fp32, or in fp64 where the operands are. Gradients of ``hidden`` are, with a
    split vocabulary, those of this rank's entries: whoever feeds it to all ranks sums them.

    Where a pipeline computes weight gradients later (``zeromesh.base.linear_arithmetic.keeping``), gradients of logits
    wait for it in the dtype of ``hidden``, as many chunks as ``chunk_bytes`` hold; those of other chunks are used at
    once.

    Args:
        hidden: shape ``(..., width)``, any floating dtype; the same on all ranks.
        weight: shape ``(rows, width)``, this rank's rows of the head.
        labels: shape ``(...)``, int64: entries of the whole vocabulary, or ``ignore_index``.
        bias: shape ``(rows,)``.
        ignore_index: label that takes no part.
        reduction: "mean" over the labels that take part, "sum", or "none".
        label_smoothing: see ``F.cross_entropy``; it is over the whole vocabulary.
        scale: factor of the logits.
        softcap: c replaces logits l by ``c tanh(l / c)`` (Gemma Team, "Gemma 2", 2024).
        vocabulary: entries of ``weight``; None: all.
        chunk: tokens at a time; None: as many as ``chunk_bytes`` hold.

    Returns:
        The loss in nats, a scalar, or of the shape of ``labels``; fp32, or fp64 where the operands are.

    Raises:
        ValueError: shapes that do not fit, or an unknown reduction.
        IndexError: a label that is not in the vocabulary.
        RuntimeError: in backward, if create_graph is true, or for a second one where weight gradients come later.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, but must be one of {', '.join(REDUCTIONS)}")
    if labels.shape != hidden.shape[:-1] or weight.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, so labels must have shape {tuple(hidden.shape[:-1])}, not "
            f"{tuple(labels.shape)}, and weight (rows, {hidden.shape[-1]}), not {tuple(weight.shape)}"
        )
    vocabulary = vocabulary or Vocabulary(0, weight.shape[0])
    device = hidden.device.type
    ticket = postponed(weight, bias) if hidden.requires_grad else None
    if ticket is not None:  # the loss itself gives them no gradient
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    # Once, as autocast would cast the weight anew for each chunk; inside it is off.
    hidden, weight, bias = autocast(hidden), autocast(weight), None if bias is None else autocast(bias)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    counted = flat != ignore_index
    wrong = counted & ((flat < 0) | (flat >= vocabulary.size))
    require_known(flat, wrong, vocabulary.size, "label", ", and labels that shall not count are ignore_index")
    wide = torch.promote_types(hidden.dtype, torch.float32)
    entries, width = weight.shape
    graded = torch.is_grad_enabled()
    sums = ticket is not None or (graded and weight.requires_grad)
    size = chunk or max(1, chunk_bytes(entries, width, wide.itemsize, sums) // (wide.itemsize * max(1, entries)))
    terms = _Terms(vocabulary, ignore_index, label_smoothing, scale, softcap, size, graded, ticket)
    with torch.autocast(device, enabled=False):
        if reduction == "none":
            losses: Tensor = _PerToken.apply(rows, weight, bias, flat, terms)  # type: ignore[no-untyped-call]
            return losses.view(labels.shape)
        share = 1 / counted.sum().to(wide) if reduction == "mean" else torch.ones((), dtype=wide, device=rows.device)
        total: Tensor = _Total.apply(rows, weight, bias, flat, terms, share)  # type: ignore[no-untyped-call]
        return total


def require_known(ids: Tensor, wrong: Tensor, size: int, name: str, more: str = "") -> None:
    """Raise IndexError if one of some ids is ``wrong``; the error calls it ``name``, and ends with ``more``."""
    # An accelerator is not waited for: its own assertion fails later.
    if ids.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"one {name} is not in the vocabulary of {size} entries")
    elif bool(wrong.any()):
        wrong_id = int(ids[wrong][0])
        raise IndexError(
            f"the {name} {wrong_id} is not in the vocabulary of {size} entries: ids are 0 to {size - 1}{more}"
        )


class _Chunk:
    """Losses of some tokens, and the operands of their gradients."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: _Terms) -> None:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        vocabulary = terms.vocabulary
        logits = torch.nn.functional.linear(hidden, weight, bias).to(wide)
        if terms.scale != 1.0:
            logits.mul_(terms.scale)
        self._slopes = None
        if terms.softcap is not None:
            logits.div_(terms.softcap).tanh_()
            self._slopes = 1 - logits.square() if terms.graded else None
            logits.mul_(terms.softcap)
        self._terms, self._hidden, self._weight = terms, hidden, weight
        self._real = max(0, min(weight.shape[0], vocabulary.size - vocabulary.start))
        self._counted = labels != terms.ignore_index
        local = labels - vocabulary.start
        self._here = self._counted & (local >= 0) & (local < self._real)
        self._local = local.where(self._here, 0)
        self._reduce(logits[:, : self._real])

    def _reduce(self, logits: Tensor) -> None:
        """Turn logits into losses, and, in their memory, into exponentials from which gradients are a product away."""
        # All numbers are taken relative to the maximum first. A logarithm that is added to a large maximum loses its
        # last digits, and with them those of the loss.
        terms, wide = self._terms, logits.dtype
        if self._real:
            local_top = logits.amax(1)
            target = logits.gather(1, self._local[:, None])[:, 0].where(self._here, 0.0)
        else:
            # The last ranks may have nothing but padding.
            local_top = torch.full((len(logits),), -torch.inf, dtype=wide, device=logits.device)
            target = torch.zeros_like(local_top)
        logits.sub_(local_top.where(local_top > -torch.inf, 0.0)[:, None])
        total = logits.sum(1) if terms.label_smoothing else None
        self._exponentials = logits.exp_()
        numbers = [local_top, self._exponentials.sum(1), target]
        if total is not None:
            numbers += [total, torch.full_like(local_top, self._real)]
        top, self._below, target, total = _over_ranks(numbers, terms.vocabulary.group)
        self._share = (local_top - top).exp() / self._below
        below = self._below.log()
        smoothing = terms.label_smoothing
        losses = (1 - smoothing) * (below - (target - top))
        if total is not None:
            losses += smoothing * (below - total / terms.vocabulary.size)
        self.losses = losses.where(self._counted, 0.0)

    def gradient_of_logits(self, upstream: Tensor) -> Tensor:
        """Return the gradient of the logits, padding included, given that of the losses: (tokens,) or a scalar."""
        terms, smoothing = self._terms, self._terms.label_smoothing
        shape = (len(self._exponentials), self._weight.shape[0])
        upstream = torch.where(self._counted, upstream * terms.scale, 0.0)
        factor = self._share * upstream
        # In the memory of the logits: a second buffer would double the peak.
        gradient = self._exponentials.mul_(factor[:, None])
        if smoothing:
            gradient.sub_((smoothing / terms.vocabulary.size * upstream)[:, None])
        if self._real:
            ones = self._here.to(gradient.dtype)
            gradient.scatter_add_(1, self._local[:, None], (ones * (smoothing - 1.0) * upstream)[:, None])
        if self._slopes is not None:
            gradient.mul_(self._slopes[:, : self._real])
        if self._real == shape[1]:
            return gradient.to(self._hidden.dtype)
        padded = self._hidden.new_zeros(shape)
        padded[:, : self._real] = gradient
        return padded


def _over_ranks(numbers: list[Tensor], group: Group | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Combine numbers of each rank's part of the vocabulary: three per token, five for label smoothing."""
    # The maximum, the sum of exponentials relative to it, the label's logit where it is in this part; and the sum of
    # the logits relative to the maximum, and how many these are. They are added in the order of ranks, so that all
    # ranks get the same loss to the last bit.
    top, below, target, *rest = numbers
    if group is None or group.size == 1:
        return top, below, target, rest[0] if rest else None
    gathered = group.exchange(torch.cat(numbers)).to(top.device).view(group.size, len(numbers), -1)
    tops = gathered[:, 0]
    top = tops.amax(0)
    # Exponentials relative to each part's maximum become relative to that of all; a part may be empty.
    lower = (tops - top).where(gathered[:, 1] > 0, 0.0)
    below, target = (gathered[:, 1] * lower.exp()).sum(0), gathered[:, 2].sum(0)
    return top, below, target, (gathered[:, 3] + gathered[:, 4] * lower).sum(0) if rest else None


class _Sums:
    """Gradients of the operands that need them, summed chunk by chunk; with ``later``, some wait for ``weights``."""

    def __init__(
        self, needs: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, later: bool = False
    ) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._hidden, self._weight = hidden, weight
        self._needs_weight, needs_bias = needs[1] or later, bias is not None and (needs[2] or later)
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight: Tensor | None = None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs_bias else None
        # For gradients of logits that wait: at least one chunk, as a chunk's logits are no narrower.
        self._room = chunk_bytes(weight.shape[0], weight.shape[1], wide.itemsize) if later else 0
        self._waiting: list[tuple[slice, Tensor]] = []

    def add(self, at: slice, gradient: Tensor) -> None:
        if self.hidden is not None:
            torch.mm(gradient, self._weight, out=self.hidden[at])
        # Computing logits anew for the weight's gradient would cost another product; keeping all would take the memory
        # that chunks save.
        if gradient.nbytes <= self._room:
            self._room -= gradient.nbytes
            self._waiting.append((at, gradient))
        else:
            self._add_weights(at, gradient)

    def _add_weights(self, at: slice, gradient: Tensor) -> None:
        if self.bias is not None:
            self.bias.add_(gradient.sum(0, dtype=self.bias.dtype))
        if not self._needs_weight:
            return
        left, right = gradient.t(), self._hidden[at]
        # A single chunk's product needs no sum and stays in its own dtype; sums are in fp32 or wider.
        if self.weight is None:
            self.weight = left @ right
            return
        self.weight = self.weight.to(torch.promote_types(self._weight.dtype, torch.float32))
        if self.weight.dtype == left.dtype:
            self.weight.addmm_(left, right)
        else:
            self.weight.add_(left @ right)

    def hiddens(self, factor: Tensor | None = None) -> Tensor | None:
        """Return the gradient of the input in its dtype, times a scalar."""
        return _scaled(self.hidden, factor, self._hidden)

    def weights(self, factor: Tensor | None = None, needs: Sequence[bool] = ()) -> Gradients:
        """Return those of weight and bias, with what has waited, in the weight's dtype, times a scalar."""
        while self._waiting:
            self._add_weights(*self._waiting.pop(0))
        if self._needs_weight and self.weight is None:  # there are no tokens
            self.weight = torch.zeros_like(self._weight)
        return _scaled(self.weight, factor, self._weight), _scaled(self.bias, factor, self._weight)

    def found(self, ticket: Ticket | None, factor: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return the gradients of all operands; those of weight and bias are left on the ticket, if there is one."""
        if ticket is None:
            return self.hiddens(factor), *self.weights(factor)
        ticket.put(partial(self.weights, factor))
        return self.hiddens(factor), None, None


def _scaled(value: Tensor | None, factor: Tensor | None, operand: Tensor) -> Tensor | None:
    return None if value is None else _times(value, factor).to(operand.dtype)


def _times(value: Tensor, factor: Tensor | None) -> Tensor:
    if factor is None:
        return value
    # A view with one dim, as torch rounds a scalar to the value's dtype.
    return value.mul_(factor) if value.dtype == factor.dtype else value * factor.view(1)


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: _Terms
) -> Iterator[tuple[slice, _Chunk]]:
    for start in range(0, len(hidden), terms.chunk):
        at = slice(start, start + terms.chunk)
        yield at, _Chunk(hidden[at], weight, bias, labels[at], terms)


def _sums_of(
    needs: tuple[bool, ...],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    terms: _Terms,
    upstream: Tensor,
) -> _Sums:
    """Return the gradients, of logits that are computed again."""
    sums = _Sums(needs, hidden, weight, bias, terms.ticket is not None)
    for at, chunk in _chunks(hidden, weight, bias, labels, terms):
        sums.add(at, chunk.gradient_of_logits(upstream[at] if upstream.ndim else upstream))
    return sums


def _require_first() -> None:
    """Refuse second derivatives."""
    # torch's own check misses those of the operands.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph is true, but linear_cross_entropy has no second derivatives; compute this loss with all "
            "logits at once: F.cross_entropy(F.linear(hidden, weight, bias), labels), or, where the model gives "
            "Logits, F.cross_entropy(logits.materialise(), labels)"
        )


class _Total(torch.autograd.Function):
    """Sum of the losses times a share. Its gradients, but for one factor, are known and computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: _Terms, share: Tensor
    ) -> Tensor:
        # What ctx says of the operands does not depend on torch.no_grad, and here, inside, gradients are always off.
        needs = tuple(terms.graded and need for need in ctx.needs_input_grad[:3])
        sums = _Sums(needs, hidden, weight, bias, terms.ticket is not None)
        total = torch.zeros_like(share)
        for at, chunk in _chunks(hidden, weight, bias, labels, terms):
            total += chunk.losses.sum()
            if any(needs):
                sums.add(at, chunk.gradient_of_logits(share))
        ctx.save_for_backward(hidden, weight, bias, labels, share)
        ctx.terms, ctx.sums = terms, sums
        return total * share

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _require_first()
        sums, ctx.sums, ticket = ctx.sums, None, ctx.terms.ticket
        if sums is None and ticket is not None:
            ticket.refuse_second()
        if sums is None:  # a second time, with retain_graph: the memory of the first is the gradients'
            hidden, weight, bias, labels, share = ctx.saved_tensors
            sums = _sums_of(ctx.needs_input_grad[:3], hidden, weight, bias, labels, ctx.terms, share)
        return (*sums.found(ticket, upstream), None, None, None)


class _PerToken(torch.autograd.Function):
    """Loss of each token; the logits are computed again for the gradients."""

    # Their factors are known only in the backward, so that nothing can be computed in the forward but the losses.
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: _Terms) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.terms = terms
        losses = [chunk.losses for _, chunk in _chunks(hidden, weight, bias, labels, terms)]
        return torch.cat(losses) if losses else hidden.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _require_first()
        ticket = ctx.terms.ticket
        if ticket is not None and ticket.due is not None:
            ticket.refuse_second()
        hidden, weight, bias, labels = ctx.saved_tensors
        sums = _sums_of(ctx.needs_input_grad[:3], hidden, weight, bias, labels, ctx.terms, upstream)
        return (*sums.found(ticket), None, None)
