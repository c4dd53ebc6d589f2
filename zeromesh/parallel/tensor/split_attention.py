"""``torch.nn.MultiheadAttention`` split by heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.base.linear_arithmetic import Columns, multiply
from zeromesh.comm.collectives import Group
from zeromesh.parallel.tensor.operators import move
from zeromesh.parallel.tensor.random_streams import RandomStreams
from zeromesh.parallel.tensor.split_guard import Apart
from zeromesh.parallel.tensor.split_linear import enter, leave
from zeromesh.parallel.tensor.spread_sequence import sequence_dim


class SplitAttention:
    """The forward of an ``nn.MultiheadAttention`` of which each rank has some heads.

    If it ``spread``s, the query is a part of the sequence; with ``memory``, keys and values are whole all the same, as
    an encoder's outputs in a decoder. Messages take ``TAGS`` tags.
    """

    # torch's forward reads the weights itself, past any layer's forward, and counts on all heads.

    TAGS = 10

    def __init__(self, group: Group, streams: RandomStreams, tag: int, spread: bool, name: str, memory: bool) -> None:
        self._group, self._streams, self._tag = group, streams, tag
        self._spread, self._memory = spread, memory
        self._apart = Apart(name)

    def __call__(
        self,
        module: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute ``nn.MultiheadAttention.forward``; attention weights, if asked for, are of all heads."""
        if query.is_nested:
            raise ValueError("heads of nn.MultiheadAttention are split; give it padded tensors and a mask, none nested")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal says what attn_mask is like; give nn.MultiheadAttention the mask, too")
        if self._spread and not self._memory and (key is not query or value is not query):
            raise ValueError(
                "nn.MultiheadAttention was given keys that are not the query, and it cannot be known whether they are "
                "a part of the sequence; set tensor_parallel.sequence to false"
            )
        dim = sequence_dim(query) if self._spread else None
        if dim is not None:
            self._apart.check(query, dim)
        drops = module.dropout if module.training else 0.0
        if drops and not self._spread:
            self._streams.separate()  # the weights that are dropped are of this rank's heads
        try:
            q, k, v = self._project(module, query, key, value, dim)
            heads = module.num_heads // self._group.size
            # With a mask of nothing but later keys, the fused kernel needs none, which saves the scores' memory.
            only_causal = is_causal and key_padding_mask is None and not need_weights
            mask = None if only_causal else self._mask(module, q, k.shape[1], attn_mask, key_padding_mask)
            q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
            if module.add_zero_attn:
                k, v = (torch.nn.functional.pad(tensor, (0, 0, 0, 1)) for tensor in (k, v))
            weights = None
            if need_weights:
                scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
                weights = (scores if mask is None else scores + mask).softmax(-1)
                weights = torch.nn.functional.dropout(weights, drops)
                result = weights @ v
            else:
                result = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, drops, only_causal)
        finally:
            if not self._spread:
                self._streams.join()
        result = _as_given(result.transpose(1, 2).flatten(2), module, query)
        partial = multiply(result, Columns(module.out_proj.weight, None))
        output = leave(partial, module.out_proj.bias, self._group, self._tag, dim)
        return output, None if weights is None else self._whole_weights(weights, average_attn_weights, query.ndim == 2)

    def _project(
        self, module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, dim: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads, shape ``(samples, length, part of the width)``."""
        biases: Sequence[Tensor | None] = [None] * 3
        if module.in_proj_bias is not None:
            biases = module.in_proj_bias.chunk(3)
        if module.in_proj_weight is None:
            separate: list[Any] = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
            columns = [Columns(*pair) for pair in zip(separate, biases, strict=True)]
        elif query is key and key is value:
            columns = [Columns(module.in_proj_weight, module.in_proj_bias)]
        else:
            columns = [Columns(*pair) for pair in zip(module.in_proj_weight.chunk(3), biases, strict=True)]
        sources = [query, key, value][: len(columns)]
        products: dict[int, Tensor] = {}
        for number, first in enumerate(sources):
            if number in products:
                continue
            # Layers that read one tensor enter together, so that its gradient is summed once.
            same = [n for n, source in enumerate(sources) if source is first]
            its, tag = dim if first is query else None, self._tag + 2 * number + 2
            entered, layers = enter(first, [columns[n] for n in same], self._group, tag, its)
            for position, n in enumerate(same):
                products[n] = layers[position](entered) if layers else multiply(entered, columns[n])
        outputs = [products[n] for n in range(len(sources))]
        parts = outputs[0].chunk(3, -1) if len(outputs) == 1 else outputs
        q, k, v = (_samples_first(part, module) for part in parts)
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat([k, module.bias_k.expand(k.shape[0], -1, -1)], 1)
            v = torch.cat([v, module.bias_v.expand(v.shape[0], -1, -1)], 1)
        return q, k, v

    def _mask(
        self, module: nn.MultiheadAttention, q: Tensor, keys: int, mask: Tensor | None, padding: Tensor | None
    ) -> Tensor | None:
        """Return the addend of the scores, expandable to ``(samples, this rank's heads, queries, keys)``."""
        samples = q.shape[0]
        addend = None
        if mask is not None:
            addend = _added(mask, q.dtype)
            if addend.ndim == 3:  # of each sample's heads
                addend = addend.view(samples, module.num_heads, *addend.shape[1:])
                part = addend.chunk(self._group.size, 1)[self._group.rank]
                addend = move(addend, "split", self._group, self._tag + 8, 1) if addend.requires_grad else part
            else:
                addend = self._common(addend)
        if padding is not None:
            hidden = self._common(_added(padding, q.dtype).view(samples, 1, 1, -1))
            addend = hidden if addend is None else addend + hidden
        # Keys that the module has added are seen by all.
        present = keys - (module.bias_k is not None)
        more = keys - present + module.add_zero_attn
        if addend is not None and addend.shape[-1] != present:
            raise ValueError(f"a mask of nn.MultiheadAttention is for {addend.shape[-1]} keys, and there are {present}")
        return torch.nn.functional.pad(addend, (0, more)) if addend is not None and more else addend

    def _common(self, mask: Tensor) -> Tensor:
        """Return an input of all heads, whose gradient is the sum of theirs."""
        return move(mask, "copy", self._group, self._tag + 8) if mask.requires_grad else mask

    def _whole_weights(self, weights: Tensor, average: bool, single: bool) -> Tensor:
        if average:
            heads = weights.shape[1] * self._group.size
            all_weights = move(weights.sum(1) / heads, "sum", self._group, self._tag + 9)
        else:
            all_weights = move(weights, "join", self._group, self._tag + 9, 1)
        return all_weights.squeeze(0) if single else all_weights


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as an addend of scores; True in a mask of bools hides a key."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _samples_first(x: Tensor, module: nn.MultiheadAttention) -> Tensor:
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _as_given(x: Tensor, module: nn.MultiheadAttention, query: Tensor) -> Tensor:
    if query.ndim == 2:
        return x.squeeze(0)
    return x if module.batch_first else x.transpose(0, 1)
