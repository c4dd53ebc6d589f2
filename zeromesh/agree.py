"""Whether all ranks were started with the same configuration and the same model."""

from __future__ import annotations

import difflib
import hashlib

import torch
from torch import nn

from zeromesh.dist.mesh import Mesh


def describe(model: nn.Module) -> str:
    """One line per parameter and buffer: name, dtype, shape, trainable."""
    lines = [f"{n}: {p.dtype} {tuple(p.shape)} trainable={p.requires_grad}" for n, p in model.named_parameters()]
    lines += [f"{n}: buffer {b.dtype} {tuple(b.shape)}" for n, b in model.named_buffers()]
    return "\n".join(lines)


def require_agreement(mesh: Mesh, what: str, text: str) -> None:
    """Raise ValueError on every rank unless all of them have the same text.

    Args:
        mesh: the ranks.
        what: what the text describes, for the message.
        text: several lines; the first that differ are shown.
    """
    world = mesh.group("world")
    data = text.encode()
    digest = int.from_bytes(hashlib.sha256(data).digest()[:7], "big")
    rows = world.exchange(torch.tensor([digest, len(data)], dtype=torch.int64))
    if bool((rows == rows[0]).all()):
        return
    longest = int(rows[:, 1].max())
    buffer = torch.zeros(longest, dtype=torch.uint8)
    buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    texts = world.exchange(buffer)
    decoded = [bytes(row[: int(n)].tolist()).decode() for row, n in zip(texts, rows[:, 1], strict=True)]
    other = next(rank for rank, value in enumerate(decoded) if value != decoded[0])
    diff = difflib.unified_diff(decoded[0].splitlines(), decoded[other].splitlines(), n=0, lineterm="")
    shown = [line for line in diff if not line.startswith(("---", "+++", "@@"))][:20]
    raise ValueError(
        f"{what} differs between rank 0 (-) and rank {other} (+); all ranks need the same:\n" + "\n".join(shown)
    )
