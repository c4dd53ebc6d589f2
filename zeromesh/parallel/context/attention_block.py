"""Attention of some queries to some keys, with the log-sum-exp by which results for other keys are added.

Shapes are (batch, heads, sequence, width); keys and values may have fewer heads, each of which serves several of the
queries' in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

# torch's public function does not return the log-sum-exp, but the operators behind it do, and their backwards take it.
# Given the result and the log-sum-exp over all keys, such a backward yields what one block of keys gives to the
# gradients (Dao, "FlashAttention-2", 2023). Where no operator is there for a device and dtype, the same is computed by
# plain products, with all scores of the block in memory.

_WIDTH_UNIT = 8  # CUDA's operators take heads whose width is a multiple of it
_LSE_UNIT = 32  # the memory-efficient operator writes the log-sum-exp into rows of a multiple of it

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


@dataclass(frozen=True)
class AttentionBlock:
    """Some queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool  # query i sees the keys 0 to i only, of as many
    scale: float  # of the scores
    mask: Tensor | None = None  # which pairs are seen, bool of shape (batch or 1, 1, queries, keys); None: all
    cap: float | None = None  # bound of the scores, which become cap * tanh(score / cap); None: there is none

    def bias(self) -> Tensor | None:
        """Return what is added to the scores, in the dtype of the queries: of pairs that are not seen, -inf."""
        if self.mask is None:
            return None
        # The memory-efficient operator reads rows that begin at a multiple of 16 bytes.
        length = self.k.shape[2]
        bias = self.q.new_full((*self.mask.shape[:3], -(-length // _WIDTH_UNIT) * _WIDTH_UNIT), -torch.inf)
        return bias[..., :length].masked_fill_(self.mask, 0.0)


class _Cpu:
    """torch's flash attention for the CPU: all floating dtypes, and fewer key heads."""

    def attend(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            block.q, block.k, block.v, 0.0, block.causal, attn_mask=block.bias(), scale=block.scale
        )
        return out, lse

    def gradients(self, block: AttentionBlock, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, bias = block.q, block.k, block.v, block.bias()
        result: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, block.causal, attn_mask=bias, scale=block.scale
        )
        return result


class _Flash:
    """FlashAttention of CUDA: 16 bits, and fewer key heads."""

    def attend(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            block.q, block.k, block.v, 0.0, block.causal, scale=block.scale
        )
        return out, lse

    def gradients(self, block: AttentionBlock, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v = block.q, block.k, block.v
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state: nothing is dropped out
        result: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            block.causal,
            unused,
            unused[:0],
            scale=block.scale,
        )
        return result


class _Efficient:
    """The memory-efficient attention of CUDA: fp32, too, and older devices. It takes as many key heads as queries'."""

    def attend(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        k, v = (_repeat(x, block.q) for x in (block.k, block.v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            block.q, k, v, self._bias(block), True, 0.0, block.causal, scale=block.scale
        )
        return out, lse[:, :, : block.q.shape[2]]

    def gradients(self, block: AttentionBlock, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        k, v = (_repeat(x, block.q) for x in (block.k, block.v))
        padded = F.pad(lse, (0, -lse.shape[-1] % _LSE_UNIT), value=torch.inf).contiguous()
        unused = torch.zeros((), dtype=torch.int64, device=k.device)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient,
            block.q,
            k,
            v,
            self._bias(block),
            out,
            padded,
            unused,
            unused,
            0.0,
            [True, True, True, False],
            block.causal,
            scale=block.scale,
        )
        return dq, _sum_repeated(dk, block.k), _sum_repeated(dv, block.v)

    @staticmethod
    def _bias(block: AttentionBlock) -> Tensor | None:
        bias = block.bias()
        return None if bias is None else bias.expand(*block.q.shape[:2], -1, -1)


class _Products:
    """Plain products, in at least fp32, on every device."""

    def attend(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        _, _, v, scores, _ = self._scores(block)
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp() @ v
        return out.flatten(1, 2).to(block.q.dtype), lse.flatten(1, 2)

    def gradients(self, block: AttentionBlock, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, scores, slope = self._scores(block)
        dout, y = (_grouped(x, block.k).to(q.dtype) for x in (gradient, out))
        weights = (scores - lse.unflatten(1, (k.shape[1], -1)).unsqueeze(-1)).exp()
        dscores = weights * (dout @ v.mT - (dout * y).sum(-1, keepdim=True)) * slope
        dq, dk, dv = dscores @ k, dscores.mT @ q, weights.mT @ dout
        return dq.flatten(1, 2).to(block.q.dtype), dk.sum(2).to(block.k.dtype), dv.sum(2).to(block.v.dtype)

    def _scores(self, block: AttentionBlock) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and scores with heads as (key heads, queries' heads for each), and scores per product."""
        wide = torch.promote_types(block.q.dtype, torch.float32)
        q = _grouped(block.q, block.k).to(wide)
        k, v = (x.unsqueeze(2).to(wide) for x in (block.k, block.v))
        scores, slope = q @ k.mT * block.scale, torch.tensor(block.scale, dtype=wide, device=q.device)
        if block.cap is not None:
            bounded = torch.tanh(scores / block.cap)
            scores, slope = bounded * block.cap, (1 - bounded.square()) * block.scale
        if block.mask is not None:
            scores = scores.masked_fill(~block.mask.unsqueeze(2), -torch.inf)
        if block.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return q, k, v, scores, slope


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    parts: Tensor = x.unflatten(1, (k.shape[1], -1))
    return parts


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _sum_repeated(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient if gradient.shape == x.shape else _grouped(gradient, x).sum(2)


Kernel = _Cpu | _Flash | _Efficient | _Products  # their methods do what the functions of the same names do
CPU, FLASH, EFFICIENT, PRODUCTS = _Cpu(), _Flash(), _Efficient(), _Products()


def choose(block: AttentionBlock) -> Kernel:
    """Return the fastest kernel there is for a block of one width."""
    q, k, v, mask = block.q, block.k, block.v, block.mask
    if block.cap is not None:
        return PRODUCTS
    if q.device.type == "cpu":
        return CPU
    if q.device.type == "cuda":
        from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

        if can_use_flash_attention(SDPAParams(q, k, v, mask, 0.0, block.causal, k.shape[1] != q.shape[1])):
            return FLASH
        k, v = _repeat(k, q), _repeat(v, q)
        if can_use_efficient_attention(SDPAParams(q, k, v, mask, 0.0, block.causal, False)):
            return EFFICIENT
    return PRODUCTS


def attend(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Return the result and the log-sum-exp of each query's scores, (batch, heads, sequence), at least fp32."""
    _, padded = _of_one_width(block)
    with torch.autocast(block.q.device.type, enabled=False):  # it would narrow the plain products
        out, lse = choose(padded).attend(padded)
    if block.mask is not None:  # of queries that see no key, operators return this or that
        blind = ~block.mask.any(-1)
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf)
    return out[..., : block.v.shape[-1]], lse


def gradients(block: AttentionBlock, gradient: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return the block's part of the gradients, given the result over all keys, its gradient and log-sum-exp."""
    width, padded = _of_one_width(block)
    with torch.autocast(block.q.device.type, enabled=False):
        dq, dk, dv = choose(padded).gradients(padded, _pad(gradient, width), _pad(out, width), lse)
    return dq[..., : block.q.shape[-1]], dk[..., : block.q.shape[-1]], dv[..., : block.v.shape[-1]]


def _of_one_width(block: AttentionBlock) -> tuple[int, AttentionBlock]:
    """Return the block with zeros added to its heads, and their width: operators take one width for q, k and v."""
    # A zero adds nothing to a score, and a zero of a value is cut off again.
    width = max(block.q.shape[-1], block.v.shape[-1])
    if block.q.device.type != "cpu":
        width = -(-width // _WIDTH_UNIT) * _WIDTH_UNIT
    return width, replace(block, q=_pad(block.q, width), k=_pad(block.k, width), v=_pad(block.v, width))


def _pad(x: Tensor, width: int) -> Tensor:
    """Return a tensor with a last dim of this width, and its elements next to each other in memory."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
