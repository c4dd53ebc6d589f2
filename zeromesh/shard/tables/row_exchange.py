"""Row numbers and rows that go to the ranks that have, or want, them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zeromesh.comm.collectives import Group

# Lookups of all tables share a tag, so that ranks which look up different ones find out.
LOOKUP_TAG, ROWS_TAG, COPIES_TAG = 5, 6, 7  # not those of attention, whose ranks may be the same group

ABSENT = -1  # stands for the count of a table that a rank does not ask for


@dataclass(frozen=True)
class RowRequest:
    """Rows of one table that this rank asks for, or has gradients of."""

    name: str
    place: int  # of the table among all of them, the same on all ranks
    ids: torch.Tensor  # int64, shape (k,), ascending, without duplicates; on the group's device
    per_rank: int  # rows that each rank has


@dataclass(frozen=True)
class Route:
    """Rows that go between this rank and the others."""

    requests: list[RowRequest]  # those that every rank has, ascending by place
    sent: list[list[int]]  # [rank][request]: rows that this rank asks that rank for
    received: list[list[int]]  # [rank][request]: rows that that rank asks this one for
    asked: list[Sequence[torch.Tensor]]  # [rank][request]: local numbers of the rows that that rank asks this one for

    def of(self, index: int) -> list[torch.Tensor]:
        """Return, by rank, the local row numbers of one request."""
        return [parts[index] for parts in self.asked]


def ask(
    group: Group,
    tag: int,
    requests: Sequence[RowRequest],
    places: int,
    failure: tuple[int, Exception] | None = None,
    engine: int = 0,
) -> Route:
    """Tell each rank which of its rows this one asks for. Collective.

    Ranks may have come to different lookups, as where only one of them prints a result. The requests that all ranks
    have are dealt with; each rank asks again for the rest when it needs them.

    Args:
        group: ranks that have the rows.
        tag: of the messages.
        requests: ascending by place.
        places: number of all tables.
        failure: the place of a table whose lookup failed on this rank, and the error.
        engine: number of the engine that has the tables.

    Raises:
        Exception: ``failure``, if it is given; RuntimeError on the ranks that it would leave waiting, or where no
            request is one of all ranks.
    """
    size, rank = group.size, group.rank
    header = torch.full((size, 2 + places), ABSENT, device=group.device)
    header[:, 0], header[:, 1] = engine, ABSENT if failure is None else failure[0]
    if requests:
        numbers, counts = _by_owner(requests, group)
        header[:, [2 + request.place for request in requests]] = counts
    heard = header.clone()
    swap(group, tag, dict(enumerate(header)), dict(enumerate(heard)), "table_counts")
    told, own_rows = heard.tolist(), header.tolist()
    if failure is not None:
        raise failure[1]
    common = _common(requests, told, engine)
    if len(common) < len(requests):
        numbers, counts = _by_owner(common, group)
    sent, received = ([[row[2 + request.place] for request in common] for row in table] for table in (own_rows, told))
    messages = numbers.split([sum(row) for row in sent])
    asked = [
        messages[rank] if peer == rank else vector_of(sum(received[peer]), torch.int64, group) for peer in range(size)
    ]
    swap(group, tag, dict(enumerate(messages)), dict(enumerate(asked)), "table_indices")
    by_request = [ids.split(counts) for ids, counts in zip(asked, received, strict=True)]
    return Route(common, sent, received, by_request)


def _by_owner(requests: Sequence[RowRequest], group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return local row numbers, by owner and then by request, and how many there are: shape (ranks, requests)."""
    ids = torch.cat([request.ids for request in requests])
    lengths = torch.tensor([request.ids.numel() for request in requests], device=group.device)
    each = torch.tensor([request.per_rank for request in requests], device=group.device).repeat_interleave(lengths)
    index = torch.arange(len(requests), device=group.device).repeat_interleave(lengths)
    owner = ids // each
    counts = torch.bincount(owner * len(requests) + index, minlength=group.size * len(requests))
    return (ids - owner * each)[owner.argsort(stable=True)], counts.view(group.size, -1)


def _common(requests: Sequence[RowRequest], told: list[list[int]], engine: int) -> list[RowRequest]:
    """Return the requests that all ranks have; raise RuntimeError if there are none, or a rank failed."""
    names = {request.place: request.name for request in requests}
    for rank, row in enumerate(told):
        if row[0] != engine:
            raise RuntimeError(
                f"rank {rank} looks up tables of another engine than {', '.join(names.values())}: all ranks have to "
                "call the models of several engines in the same order"
            )
        if row[1] != ABSENT:
            raise RuntimeError(
                f"rank {rank} failed in a lookup of {names.get(row[1], 'a table')}, which all ranks share; the error "
                "of that rank says why, as an index that is out of range"
            )
    common = [request for request in requests if all(row[2 + request.place] != ABSENT for row in told)]
    if not common:
        first = requests[0]
        rank = next(rank for rank, row in enumerate(told) if row[2 + first.place] == ABSENT)
        raise RuntimeError(
            f"rank {rank} looks up rows of another table than {first.name}: all ranks have to call the same tables in "
            "the same order; one without indices passes an empty tensor"
        )
    return common


def vector_of(elements: int, dtype: torch.dtype, group: Group) -> torch.Tensor:
    """Return an uninitialized 1-D tensor on the group's device."""
    return torch.empty(elements, dtype=dtype, device=group.device)


def swap(
    group: Group, tag: int, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], what: str
) -> None:
    """Exchange messages with the other ranks; both sides know which of them are empty, and these are not sent."""
    going = {peer: message.contiguous() for peer, message in sends.items() if peer != group.rank and message.numel()}
    coming = {peer: message for peer, message in receives.items() if peer != group.rank and message.numel()}
    if going or coming:
        group.send_and_receive(going, coming, tag, what).wait()


def from_all(group: Group, tag: int, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in their order; they differ in their first dimension only. Collective."""
    lengths = group.exchange(torch.tensor([tensor.shape[0]]), tag).flatten().tolist()
    tensors = [
        tensor if rank == group.rank else tensor.new_empty(length, *tensor.shape[1:])
        for rank, length in enumerate(lengths)
    ]
    swap(group, tag, dict.fromkeys(range(group.size), tensor), dict(enumerate(tensors)), "table_copies")
    return tensors
