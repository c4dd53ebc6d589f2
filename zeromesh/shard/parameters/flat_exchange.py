"""Whole parameters from the parts of several ranks, and what optimizers that look at them may ask of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from zeromesh.base.placement import Placement, PlacementRow
from zeromesh.base.split import Held
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.parameters.flat import Flat

JOIN_TAG = 12  # tag of whole parameters that are put together along the tensor axis


def join(held_part: Held, part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """A whole parameter from what the ranks along the tensor axis hold; ``part`` itself where that is all."""
    if held_part.split is None:
        return part
    group = mesh.group("tensor")
    full = torch.empty(held_part.whole, dtype=part.dtype, device=part.device)
    parts = torch.empty(group.size, *part.shape, dtype=part.dtype, device=part.device)
    group.all_gather(parts.view(-1), part.detach().contiguous().view(-1), JOIN_TAG).wait()
    for rank, rank_part in enumerate(parts):
        replace(held_part, rank=rank).place(rank_part, full)
    return full


class FlatExchange:
    """Implements ``zeromesh.base.piece.PieceExchange`` on the flat buffers, one per bucket."""

    def __init__(self, flats: Sequence[Flat], row: PlacementRow, mesh: Mesh) -> None:
        self._flats = [flat for flat in flats if flat.gradient is not None]
        self._shared = row.optimizer is Placement.SHARDED and mesh.shard.size > 1
        self._group = mesh.shard
        self._mesh = mesh

    @property
    def buckets(self) -> Sequence[Sequence[str]]:
        """Names of the parameters that travel together."""
        return [[segment.name for segment in flat.layout.segments] for flat in self._flats]

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that hold the other pieces."""
        groups = [self._group] * self._shared + [self._mesh.group("tensor")]
        for group in groups:
            if group.size > 1:
                # Every rank adds in the order of ranks, so that the sums are equal bit for bit.
                vector = group.exchange(vector, tag=3).sum(0).to(vector.device)
        return vector

    def gather(self, bucket: int, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors from one piece each."""
        flat = self._flats[bucket]
        layout = flat.layout
        full = torch.zeros(layout.size, dtype=flat.master.dtype, device=self._mesh.device)
        shard = full[flat.own]  # a view: what is copied into it is what this rank contributes to the gather
        for _, local, piece in flat.pieces:
            if piece.name in pieces:
                shard[local].copy_(pieces[piece.name].flatten())
        if self._shared:
            self._group.all_gather(full, shard, flat.tag + 3).wait()
        return {
            segment.name: join(segment.held, full[segment.start : segment.stop].view(segment.shape), self._mesh)
            for segment in layout.segments
            if segment.name in pieces
        }
