"""What all ranks must agree on: the configuration, the model, and whether something worked."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zeromesh.comm.collectives import Group, Traffic
from zeromesh.comm.peers import ranges

Result = TypeVar("Result")

SHOWN_VARIANTS = 3
"""Of the texts that differ from the first rank's."""


def world_group(device: torch.device) -> Group:
    """All ranks, before there is a mesh."""
    return Group("world", dist.group.WORLD, device, Traffic())


def attempt(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """What the action returned, or raised."""
    try:
        return action(), None
    except Exception as error:  # whatever it was, the other ranks must hear of it
        return None, error


def share(world: Group, what: str, failure: Exception | None) -> None:
    """If something failed on one rank, let it fail on all, rather than leave the others waiting.

    Raises:
        the rank's own error where it failed, RuntimeError with the first such rank and what it says elsewhere.
    """
    failed = world.exchange(torch.tensor([float(failure is not None)], dtype=torch.float64))
    if not bool(failed.any()):
        return
    said = texts(world, "" if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    rank = int(failed.flatten().nonzero()[0])
    raise RuntimeError(f"rank {rank} could not {what}: {said[rank]}")


def together(world: Group, what: str, action: Callable[[], object]) -> None:
    """Do something on every rank, with ``share``'s errors."""
    share(world, what, attempt(action)[1])


def describe(model: nn.Module) -> str:
    """One line per parameter and buffer: name, dtype, shape, trainable.

    Buffers that are no state are sorted: models of transformers register some in the order of a set of strings, which
    is another one in every process.
    """
    lines = [f"{n}: {p.dtype} {tuple(p.shape)} trainable={p.requires_grad}" for n, p in model.named_parameters()]
    modules = list(model.named_modules())
    for own, order in ((True, list), (False, sorted)):
        lines += order(
            f"{path}.{n}".removeprefix(".") + f": buffer {b.dtype} {tuple(b.shape)}"
            for path, module in modules
            for n, b in module._buffers.items()
            if b is not None and (n not in module._non_persistent_buffers_set) == own
        )
    return "\n".join(lines)


def require_agreement(world: Group, what: str, text: str) -> None:
    """Raise ValueError on every rank unless all of them have the same text.

    Args:
        world: all ranks.
        what: what the text describes, for the message.
        text: several lines; the first that differ are shown.
    """
    data = text.encode()
    digest = int.from_bytes(hashlib.sha256(data).digest()[:7], "big")
    rows = world.exchange(torch.tensor([digest, len(data)], dtype=torch.int64))
    if bool((rows == rows[0]).all()):
        return
    ranks_with: dict[str, list[int]] = {}
    for rank, found in enumerate(texts(world, text)):
        ranks_with.setdefault(found, []).append(rank)
    first, *others = ranks_with
    blocks = [f"{_named(ranks_with[other])} (+):\n{_difference(first, other)}" for other in others[:SHOWN_VARIANTS]]
    more = len(others) - SHOWN_VARIANTS
    raise ValueError(
        f"{what} differs between {_named(ranks_with[first])} (-) and "
        + "\nand ".join(blocks).replace(" (+):", " (+); all ranks need the same:", 1)
        + (f"\nand {more} more kinds on other ranks" if more > 0 else "")
    )


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ranges(ranks)


def _difference(first: str, other: str) -> str:
    """The first lines that differ."""
    diff = difflib.unified_diff(first.splitlines(), other.splitlines(), n=0, lineterm="")
    return "\n".join([line for line in diff if not line.startswith(("---", "+++", "@@"))][:20])


def texts(world: Group, text: str) -> list[str]:
    """Every rank's text."""
    data = text.encode(errors="replace")
    lengths = world.exchange(torch.tensor([len(data)], dtype=torch.int64)).flatten().tolist()
    buffer = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    if data:
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = world.exchange(buffer)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]
