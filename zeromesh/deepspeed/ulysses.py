"""``deepspeed.sequence.layer``: attention of sequences that are spread over ranks, around a user's own attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from zeromesh.base.signatures import refuse


class DistributedAttention(nn.Module):
    """Gives each rank the whole sequence for some of the heads (Jacobs et al., "DeepSpeed Ulysses", 2023).

    Args:
        local_attention: from queries, keys and values of whole sequences to the attention's output.
        sequence_process_group: the ranks that share each sequence.
        scatter_idx: dim of the heads, which are spread over the ranks for the attention.
        gather_idx: dim of the sequence, of which each rank has a part.
        sp_stream: None; collectives have their own stream.
        num_kv_heads: None, or the heads of keys and values, which the ranks have to divide.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        refuse("DistributedAttention", "sp_stream", sp_stream, "leave it out; collectives have their own stream")
        super().__init__()
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        _require_divisor(num_kv_heads or 0, "num_kv_heads", self.spg)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return this rank's part of the sequence of the attention's output, from that of queries, keys and values.

        Keys and values may have fewer heads. ``batch_dim_idx`` has no effect: the dims of heads and sequence say all.
        Further arguments are the attention's.
        """
        refuse("DistributedAttention", "rotary_pos_emb", rotary_pos_emb, "rotate query and key before the call")
        sequences = [exchange(self.spg, part, self.scatter_idx, self.gather_idx) for part in (query, key, value)]
        return exchange(self.spg, self.local_attn(*sequences, *args, **kwargs), self.gather_idx, self.scatter_idx)


def exchange(group: dist.ProcessGroup, input: Tensor, scatter_idx: int, gather_idx: int, *ignored: Any) -> Tensor:
    """Spread one dim of a tensor over the ranks of a group and put another together.

    Arguments after these, such as DeepSpeed's ``batch_dim_idx``, have no effect: the dims say all.
    """
    ranks = _require_divisor(input.shape[scatter_idx], f"dim {scatter_idx} of a tensor of {tuple(input.shape)}", group)
    if ranks == 1:
        return input
    rows = torch.stack(input.chunk(ranks, scatter_idx))
    received = all_to_all_single_autograd(rows.flatten(), None, None, group).view_as(rows)
    return torch.cat(received.unbind(), gather_idx)


class _SeqAllToAll:
    """``exchange`` under the name that DeepSpeed's autograd function has."""

    apply = staticmethod(exchange)


def _require_divisor(size: int, what: str, group: dist.ProcessGroup) -> int:
    ranks = dist.get_world_size(group)
    if size % ranks:
        raise ValueError(
            f"{what} has {size} elements, which {ranks} ranks cannot share equally; use fewer ranks, or repeat the "
            "heads of keys and values"
        )
    return ranks
