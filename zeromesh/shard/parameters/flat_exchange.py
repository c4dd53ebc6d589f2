"""Whole parameters from the parts of several ranks, and what optimizers that look at them may ask of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zeromesh.base.placement import Placement, PlacementRow
from zeromesh.base.split import Held
from zeromesh.comm.course import this_rank
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.parameters.flat import Flat

JOIN_TAG = 12  # tag of whole parameters that are put together along an axis


def join(held_part: Held, part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """A whole parameter from what the ranks along an axis hold; ``part`` itself where that is all."""
    if held_part.split is None:
        return part
    group = mesh.group(held_part.axis)
    full = torch.empty(held_part.whole, dtype=part.dtype, device=part.device)
    if (owner := held_part.split.owner) is not None:
        full = part.detach().clone() if owner == group.rank else full
        group.broadcast(full, owner)
        return full
    parts = torch.empty(group.size, *part.shape, dtype=part.dtype, device=part.device)
    group.all_gather(parts.view(-1), part.detach().contiguous().view(-1), JOIN_TAG).wait()
    for rank, rank_part in enumerate(parts):
        replace(held_part, rank=rank).place(rank_part, full)
    return full


def join_experts(model: nn.Module, flats: Iterable[Flat], mesh: Mesh) -> None:
    """Let the model's ``state_dict()`` have all experts, which ranks share, as that of the plain model. Collective.

    It is what libraries save where the parameters are not sharded, on all ranks. ``load_state_dict`` takes it back.
    """
    mesh.group("expert").purposes[JOIN_TAG] = "experts for the model's state_dict(), which all ranks call"
    segments = [segment for flat in flats for segment in flat.layout.segments]
    parts = {segment.name: segment.held for segment in segments if segment.held.axis == "expert"}

    def join_parts(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        with this_rank.within("state_dict()"):
            for name, part in parts.items():
                value = state.get(prefix + name)
                # The engine reads parameters themselves; gathered ones are whole.
                if value is None or isinstance(value, nn.Parameter):
                    continue
                if part.split is not None and tuple(value.shape) == part.shape != part.whole:
                    state[prefix + name] = join(part, value, mesh)

    def cut_parts(module: nn.Module, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name, part in parts.items():
            value = state.get(prefix + name)
            if value is not None and tuple(value.shape) == part.whole:
                gathered = tuple(model.get_parameter(name).shape) == part.whole
                state[prefix + name] = value if gathered else part.cut(value)

    model.register_state_dict_post_hook(join_parts)
    model.register_load_state_dict_pre_hook(cut_parts)


class FlatExchange:
    """Implements ``zeromesh.base.piece.PieceExchange`` on the flat buffers, one per bucket."""

    def __init__(self, flats: Sequence[Flat], row: PlacementRow, mesh: Mesh) -> None:
        self._flats = [flat for flat in flats if flat.gradient is not None]
        self._shared = row.optimizer is Placement.SHARDED
        self._mesh = mesh
        axes = [flat.layout.axis for flat in self._flats for _ in flat.layout.segments]
        # By axis along which parameters are split, which of all parameters these are.
        self._places = {
            axis: [place for place, other in enumerate(axes) if other == axis] for axis in dict.fromkeys(axes)
        }
        self._count = len(axes)

    @property
    def buckets(self) -> Sequence[Sequence[str]]:
        """Names of the parameters that travel together."""
        return [[segment.name for segment in flat.layout.segments] for flat in self._flats]

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that hold the other pieces; the vector has rows of one number for each parameter."""
        rows = vector.view(-1, self._count)
        for axis, places in self._places.items():
            part = rows[:, places].flatten()
            for group in [self._mesh.shards_of(axis)] * self._shared + [self._mesh.group(axis)]:
                if group.size > 1:
                    # Every rank adds in the order of ranks, so that the sums are equal bit for bit.
                    part = group.exchange(part, tag=3).sum(0).to(vector.device)
            rows[:, places] = part.view(-1, len(places))
        return vector

    def gather(
        self, bucket: int, pieces: Mapping[str, torch.Tensor], parts: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Whole tensors from one piece each."""
        flat = self._flats[bucket]
        layout = flat.layout
        full = torch.zeros(layout.size, dtype=flat.master.dtype, device=self._mesh.device)
        shard = full[flat.own]  # a view: what is copied into it is what this rank contributes to the gather
        for _, local, piece in flat.pieces:
            if piece.name in pieces:
                shard[local].copy_(pieces[piece.name].flatten())
        if self._shared and flat.group.size > 1:
            flat.group.all_gather(full, shard, flat.tag + 3).wait()
        values = {
            segment: full[segment.start : segment.stop].view(segment.shape)
            for segment in layout.segments
            if segment.name in pieces
        }
        # What one rank has all of, others have no piece of, and would not take part in a message.
        return {
            segment.name: value
            if segment.name in parts or (segment.held.split is not None and segment.held.split.owner is not None)
            else join(segment.held, value, self._mesh)
            for segment, value in values.items()
        }
