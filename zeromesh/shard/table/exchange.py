"""Row numbers and rows that go to the ranks that have, or want, them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from zeromesh.comm.collectives import Group

# Lookups of all tables share a tag, so that ranks which look up different ones find out.
LOOKUP_TAG, ROWS_TAG, COPIES_TAG = 5, 6, 7  # not those of attention, whose ranks may be the same group

FAILED = -1  # stands for each count of a rank whose request is wrong


@dataclass(frozen=True)
class RowRequest:
    """Rows of one table that this rank asks for, or has gradients of."""

    name: str
    number: int  # of the table, the same on all ranks
    ids: torch.Tensor  # int64, shape (k,), ascending, without duplicates; on the group's device
    per_rank: int  # rows that each rank has


@dataclass(frozen=True)
class Route:
    """Rows that go between this rank and the others."""

    counts: list[list[list[int]]]  # [from][to][request]: rows that rank ``from`` asks rank ``to`` for
    asked: list[torch.Tensor]  # by rank, the local numbers of the rows that it asks this one for, request by request
    rank: int

    def of(self, index: int) -> list[torch.Tensor]:
        """Return, by rank, the local row numbers of one request."""
        return [ids.split(count[self.rank])[index] for ids, count in zip(self.asked, self.counts, strict=True)]


def ask(group: Group, tag: int, requests: Sequence[RowRequest], failure: Exception | None = None) -> Route:
    """Tell each rank which of its rows this one asks for. Collective.

    Raises:
        Exception: ``failure``, if it is given; RuntimeError on the ranks that it would leave waiting, or where ranks
            ask for rows of different tables.
    """
    size = group.size
    counts: list[list[int]] = []  # by request, for each rank
    for one in requests:
        bounds = torch.arange(1, size, device=one.ids.device) * one.per_rank
        at = [0, *torch.searchsorted(one.ids, bounds).tolist(), one.ids.numel()]
        counts.append([stop - start for start, stop in pairwise(at)])
    flat = [FAILED if failure else count for each in counts for count in each]
    vector = torch.tensor([*(one.number for one in requests), *flat])
    told = group.exchange(vector, tag).tolist()
    if failure is not None:
        raise failure
    _require_same(requests, told)
    table = [
        [[row[len(requests) + index * size + to] for index in range(len(requests))] for to in range(size)]
        for row in told
    ]
    parts = [list(one.ids.split(each)) for one, each in zip(requests, counts, strict=True)]
    messages = [
        torch.cat([part[peer] - peer * one.per_rank for part, one in zip(parts, requests, strict=True)])
        for peer in range(size)
    ]
    asked = [
        messages[group.rank] if peer == group.rank else vector_of(sum(table[peer][group.rank]), torch.int64, group)
        for peer in range(size)
    ]
    swap(group, tag, dict(enumerate(messages)), dict(enumerate(asked)), "table_indices")
    return Route(table, asked, group.rank)


def _require_same(requests: Sequence[RowRequest], told: list[list[int]]) -> None:
    count = len(requests)
    for rank, row in enumerate(told):
        if FAILED in row[count:]:
            raise RuntimeError(
                f"rank {rank} of the ranks that share {requests[0].name} gave it an index that is out of range; the "
                "error of that rank names it"
            )
        if row[:count] != [one.number for one in requests]:
            raise RuntimeError(
                f"rank {rank} looks up rows of another table than {requests[0].name}: all ranks have to call the same "
                "tables in the same order; one without indices passes an empty tensor"
            )


def vector_of(elements: int, dtype: torch.dtype, group: Group) -> torch.Tensor:
    """Return an uninitialized 1-D tensor on the group's device."""
    return torch.empty(elements, dtype=dtype, device=group.device)


def swap(
    group: Group, tag: int, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], what: str
) -> None:
    """Exchange messages with the other ranks; both sides know which of them are empty, and these are not sent."""
    going = {peer: one.contiguous() for peer, one in sends.items() if peer != group.rank and one.numel()}
    coming = {peer: one for peer, one in receives.items() if peer != group.rank and one.numel()}
    if going or coming:
        group.send_and_receive(going, coming, tag, what).wait()


def from_all(group: Group, tag: int, own: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in their order; they differ in their first dimension only. Collective."""
    lengths = group.exchange(torch.tensor([own.shape[0]]), tag).flatten().tolist()
    found = [
        own if rank == group.rank else own.new_empty(length, *own.shape[1:]) for rank, length in enumerate(lengths)
    ]
    swap(group, tag, dict.fromkeys(range(group.size), own), dict(enumerate(found)), "table_copies")
    return found
