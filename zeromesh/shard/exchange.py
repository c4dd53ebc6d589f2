"""What optimizers that look at whole parameters may ask of the other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zeromesh.dist.mesh import Mesh
from zeromesh.model.placement import Placement, Row
from zeromesh.shard.unit import Flat


class FlatExchange:
    """Implements ``zeromesh.model.piece.PieceExchange`` on the flat buffers, one per bucket."""

    def __init__(self, flats: Sequence[Flat], row: Row, mesh: Mesh) -> None:
        self._flats = [flat for flat in flats if flat.layout.trainable]
        self._shared = row.optimizer is Placement.SHARDED and mesh.shard.size > 1
        self._group = mesh.shard

    @property
    def buckets(self) -> Sequence[Sequence[str]]:
        """Names of the parameters that travel together."""
        return [[segment.name for segment in flat.layout.segments] for flat in self._flats]

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that hold the other pieces."""
        if not self._shared:
            return vector
        return self._group.exchange(vector, tag=3).sum(0).to(vector.device)

    def gather(self, bucket: int, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole flattened tensors from one piece each."""
        flat = self._flats[bucket]
        layout = flat.layout
        full = torch.zeros(layout.size, dtype=flat.master.dtype, device=flat.master.device)
        own = full[flat.own]
        for _, local, piece in flat.pieces:
            if piece.name in pieces:
                own[local].copy_(pieces[piece.name].flatten())
        if self._shared:
            self._group.all_gather(full, own, flat.tag + 3).wait()
        return {segment.name: full[segment.start : segment.stop] for segment in layout.segments}
