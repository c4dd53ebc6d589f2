"""Order of the tokens of packed documents in which ranks have equal work, and most documents are on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from zeromesh.parallel.context.sequence_order import joined

BALANCE = 1.05
"""Work of the rank with the most, over the mean, up to which documents are left whole."""

_LARGEST = (1.0, 0.5, 0.25, 0.125, 0.0)  # work of a document that is left whole, over that of a rank


def order_of(documents: Tensor, ranks: int) -> Tensor:
    """Return the tokens of each sequence, int64 of shape (samples, sequence), as ``sequence_order.keep`` cuts them.

    ``documents`` has a number for each token, of the same shape: each change begins another document. A rank's tokens
    are in the order of the sequence.
    """
    lengths = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in documents.cpu()]
    for largest in _LARGEST:
        work = [0] * ranks
        placed = [place(row, ranks, work, largest) for row in lengths]
        if max(work) * ranks <= BALANCE * sum(work):
            break
    orders = []
    for row, parts in zip(lengths, placed, strict=True):
        starts = [0, *itertools.accumulate(row)]
        tokens = [
            torch.cat(
                [torch.arange(starts[number] + begin, starts[number] + end) for number, begin, end in sorted(part)]
            )
            for part in parts
        ]
        orders.append(joined(tokens, 0))
    return torch.stack(orders).to(documents.device)


def place(lengths: Sequence[int], ranks: int, work: list[int], largest: float) -> list[list[tuple[int, int, int]]]:
    """Return the documents of each rank, or parts of them, as (number, begin, end): as many tokens on each.

    Args:
        lengths: of the documents, whose sum the ranks divide.
        ranks: number of them.
        work: pairs of tokens that each rank has to compute; those of these documents are added.
        largest: work of a document that is left whole, over a rank's share in that of all documents.
    """
    room = [sum(lengths) // ranks] * ranks
    limit = largest * sum(_work(0, length) for length in lengths) / ranks
    placed: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]

    def put(rank: int, number: int, begin: int, end: int) -> None:
        if begin < end:
            placed[rank].append((number, begin, end))
            room[rank] -= end - begin
            work[rank] += _work(begin, end)

    # The longest first, each on the rank with the least work (Graham, "Bounds on multiprocessing timing anomalies",
    # 1969) of those that have room.
    for number, length in sorted(enumerate(lengths), key=lambda entry: -entry[1]):
        cuts = [length * chunk // (2 * ranks) for chunk in range(2 * ranks + 1)]
        # An early and a late chunk for each rank, as where all of a sequence is one document.
        zigzag = [(cuts[rank : rank + 2], cuts[-rank - 2 : len(cuts) - rank]) for rank in range(ranks)]
        able = [rank for rank in range(ranks) if room[rank] >= length]
        if able and _work(0, length) <= limit:
            put(min(able, key=work.__getitem__), number, 0, length)
        elif all(sum(end - begin for begin, end in zigzag[rank]) <= room[rank] for rank in range(ranks)):
            for rank, chunks in enumerate(zigzag):
                for begin, end in chunks:
                    put(rank, number, begin, end)
        else:  # what is left over is cut where there is room
            begin = 0
            while begin < length:
                rank = min((rank for rank in range(ranks) if room[rank]), key=work.__getitem__)
                end = min(length, begin + room[rank])
                put(rank, number, begin, end)
                begin = end
    return placed


def _work(begin: int, end: int) -> int:
    """Return the number of pairs of tokens from begin to end of a document with those that are not after them."""
    return (end * (end + 1) - begin * (begin + 1)) // 2
