"""Checks that all ranks have the same configuration and model, and that an action succeeded on all of them."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from zeromesh.comm.collectives import Group
from zeromesh.comm.messages import gather_texts
from zeromesh.comm.peers import named
from zeromesh.comm.traffic import Traffic

Result = TypeVar("Result")

SHOWN_VARIANTS = 3  # differing texts that an error message quotes, at most


def world_group(device: torch.device) -> Group:
    """Return a group of all ranks, for use before the mesh exists."""
    return Group("world", dist.group.WORLD, device, Traffic())


def catch(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Call ``action`` and return ``(result, None)``, or ``(None, error)`` if it raised."""
    try:
        return action(), None
    except Exception as error:  # whatever it was, the other ranks must hear of it
        return None, error


def agree_success(world: Group, what: str, failure: Exception | None) -> None:
    """Raise on every rank if one rank failed, so that the others do not wait for it. Collective.

    A rank with a ``failure`` raises it; the others raise a RuntimeError that quotes the first. ``what`` was tried.
    """
    agree(world, what, failure, {})


def _raise_failure(world: Group, what: str, failure: Exception | None, failed: torch.Tensor) -> None:
    """Raise this rank's failure, or one that quotes the first of those that failed. Collective."""
    # Before anybody raises: this is collective, too.
    said = texts(world, "" if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    rank = int(failed.nonzero()[0])
    raise RuntimeError(f"rank {rank} could not {what}: {said[rank]}")


def agree_run(world: Group, what: str, action: Callable[[], Result]) -> Result:
    """Return what ``action`` returns here; raise on all ranks if it fails on one, as ``agree_success``. Collective."""
    result, failure = catch(action)
    agree_success(world, what, failure)
    return cast(Result, result)


def describe(model: nn.Module) -> str:
    """Return one line for each parameter and buffer: name, dtype, shape and, for parameters, whether it is trained."""
    lines = [f"{n}: {p.dtype} {tuple(p.shape)} trainable={p.requires_grad}" for n, p in model.named_parameters()]
    modules = list(model.named_modules())
    # Non-persistent buffers are sorted: some models of transformers register them in the iteration order of a set of
    # strings, which differs between processes.
    for persistent, order in ((True, list), (False, sorted)):
        lines += order(
            f"{path}.{n}".removeprefix(".") + f": buffer {b.dtype} {tuple(b.shape)}"
            for path, module in modules
            for n, b in module._buffers.items()
            if b is not None and (n not in module._non_persistent_buffers_set) == persistent
        )
    return "\n".join(lines)


def require_agreement(world: Group, what: str, text: str) -> None:
    """Raise ValueError, with the first lines that differ, unless all ranks have the same text. Collective."""
    agree(world, "", None, {what: text})


def agree(world: Group, what: str, failure: Exception | None, compared: Mapping[str, str]) -> None:
    """Raise on all ranks if one failed, as ``agree_success``, or if texts differ, as ``require_agreement``. Collective.

    One exchange for all of them. A rank with a ``failure`` need not have the texts: of as many, any will do.
    """
    digests = [hashlib.sha256(text.encode()).digest() for text in compared.values()]
    # 7 bytes fit into a signed 64-bit integer.
    numbers = [int.from_bytes(digest[:7], "big") for digest in digests]
    rows = world.exchange(torch.tensor([int(failure is not None), *numbers], dtype=torch.int64, device="cpu"))
    if bool(rows[:, 0].any()):
        _raise_failure(world, what, failure, rows[:, 0])
    for (name, text), column in zip(compared.items(), rows.T[1:], strict=True):
        if bool((column != column[0]).any()):
            _raise_difference(world, name, text)


def _raise_difference(world: Group, what: str, text: str) -> None:
    """Raise ValueError with the first lines that differ between the ranks. Collective."""
    ranks_with: dict[str, list[int]] = {}
    for rank, rank_text in enumerate(texts(world, text)):
        ranks_with.setdefault(rank_text, []).append(rank)
    first, *others = ranks_with
    blocks = []
    for other in others[:SHOWN_VARIANTS]:
        diff = difflib.unified_diff(first.splitlines(), other.splitlines(), n=0, lineterm="")
        lines = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
        blocks.append("\n".join([f"{named(ranks_with[other])} (+):", *lines[:20]]))
    more = len(others) - SHOWN_VARIANTS
    raise ValueError(
        f"{what} differs between {named(ranks_with[first])} (-) and "
        + "\nand ".join(blocks).replace(" (+):", " (+); all ranks need the same:", 1)
        + (f"\nand {more} more kinds on other ranks" if more > 0 else "")
    )


def texts(world: Group, text: str) -> list[str]:
    """Return the texts of all ranks, by rank. Collective."""
    return gather_texts(text, world.exchange)
