"""The whole model on one rank."""

from __future__ import annotations

import torch

from zeromesh.saving.contents import buffers
from zeromesh.shard.sharded import Sharded


def gathered_state_dict(sharded: Sharded) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers as CPU tensors on rank 0, empty elsewhere; one unit is gathered at a time."""
    found: dict[str, torch.Tensor] = {}
    keep = sharded.mesh.rank == 0
    for unit in sharded.units:
        with sharded.gathered([unit]):
            for flat in unit.flats:
                for segment, parameter in zip(flat.layout.segments, flat.parameters, strict=True):
                    if keep:
                        found[segment.name] = parameter.detach().cpu().clone()
    if keep:
        for name, parameter in sharded.model.named_parameters(remove_duplicate=False):
            found.setdefault(name, found[sharded.names[id(parameter)]])
        found |= {name: buffer.detach().cpu().clone() for name, buffer in buffers(sharded)}
    return found
