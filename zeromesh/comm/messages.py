"""Texts and values that ranks tell each other, as JSON in tensors: nothing that another rank sends is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

LONGEST = 1 << 28
"""Bytes of the longest text that is taken from a rank: a wrong length must not take all memory."""


def backends(group: Any = None) -> dict[str, str]:
    """Return the backend of a process group, by default the whole one, for each type of device."""
    # Not ``get_backend``: it gives what the group was started with, which may be a list, or "undefined" for none.
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def gather_texts(text: str, exchange: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """Return the texts of all ranks, by rank. Collective.

    ``exchange`` makes every rank's vector, as the rows of one matrix on the host, of this rank's.
    """
    data = text.encode(errors="replace")
    lengths = exchange(torch.tensor([len(data)], dtype=torch.int64)).flatten().tolist()
    for rank, length in enumerate(lengths):
        if not 0 <= length <= LONGEST:
            raise RuntimeError(f"rank {rank} sends a text of {length} bytes, but the longest has {LONGEST}; send less")
    buffer = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    if data:
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = exchange(buffer)
    return [row[:length].numpy().tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def gather_rows(vector: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return every rank's vector, 1-D, as the rows of one matrix on the host. Collective of torch's own."""
    device = torch.device("cpu") if "cpu" in backends(group) else torch.accelerator.current_accelerator()
    vector = vector.to(device)
    rows = [torch.empty_like(vector) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, vector, group=group)
    return torch.stack(rows).cpu()


def gather_json(value: Any, group: Any = None) -> list[Any]:
    """Return every rank's ``value``, which JSON holds, by rank of the process group. Collective."""
    texts = gather_texts(json.dumps(value), partial(gather_rows, group=group))
    return [json.loads(text) for text in texts]
