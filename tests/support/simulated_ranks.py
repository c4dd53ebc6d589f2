"""N ranks in one process: parameters cut into pieces as a flat sharded layout would, and an exchange over threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from zeromesh.base.piece import Piece
from zeromesh.base.split import Held

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Hub:
    """Where the simulated ranks meet."""

    ranks: int
    calls: list[list[tuple]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=20)
        self.slots = [None] * self.ranks
        self.calls = [[] for _ in range(self.ranks)]

    def meet(self, rank: int, call: tuple, value: object) -> list:
        """Every rank's value; the call itself must be the same on all."""
        self.calls[rank].append(call)
        self.slots[rank] = (call, value)
        self.barrier.wait()
        met = list(self.slots)
        self.barrier.wait()
        assert all(other[0] == call for other in met), met
        return [other[1] for other in met]


def in_threads(hub: Hub, run: Callable[[int], None]) -> None:
    """Run a function of each rank in a thread; raise the first error that is not of a rank that waited in vain."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)
            hub.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(hub.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])


@dataclass
class ThreadExchange:
    """A PieceExchange among threads."""

    hub: Hub
    rank: int
    layout: Sequence[Sequence[str]]
    shapes: Shapes
    ranges: list[dict[str, tuple[int, int]]]

    @property
    def buckets(self) -> Sequence[Sequence[str]]:
        return self.layout

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        return sum(self.hub.meet(self.rank, ("sum", vector.shape, vector.dtype), vector.clone()))

    def gather(
        self, bucket: int, pieces: Mapping[str, torch.Tensor], parts: Sequence[str] = ()
    ) -> dict[str, torch.Tensor]:
        met = self.hub.meet(self.rank, ("gather", bucket), {name: piece.clone() for name, piece in pieces.items()})
        whole = {name: torch.zeros(prod(self.shapes[name]), dtype=torch.float64) for name in self.layout[bucket]}
        for ranges, held in zip(self.ranges, met, strict=True):
            for name, piece in held.items():
                start, stop = ranges[name]
                assert piece.shape == (stop - start,)
                whole[name] = whole[name].to(piece.dtype)
                whole[name][start:stop] = piece
        return {name: value.view(self.shapes[name]) for name, value in whole.items()}


def cut(shapes: Shapes, layout: Sequence[Sequence[str]], ranks: int) -> list[dict[str, tuple[int, int]]]:
    """Each rank's range of each parameter of which it holds something: buckets are cut into equal parts."""
    ranges: list[dict[str, tuple[int, int]]] = [{} for _ in range(ranks)]
    for bucket in layout:
        share = -(-sum(prod(shapes[name]) for name in bucket) // ranks)
        position = 0
        for name in bucket:
            count = prod(shapes[name])
            for rank in range(ranks):
                start, stop = max(rank * share - position, 0), min((rank + 1) * share - position, count)
                if start < stop:
                    ranges[rank][name] = (start, stop)
            position += count
    return ranges


def make_pieces(values: Mapping[str, torch.Tensor], ranges: Mapping[str, tuple[int, int]]) -> dict[str, Piece]:
    """One rank's pieces, copied from whole parameters."""
    return {
        name: Piece(
            name,
            Held(tuple(values[name].shape)),
            start,
            stop,
            torch.nn.Parameter(values[name].detach().flatten()[start:stop].clone()),
        )
        for name, (start, stop) in ranges.items()
    }


def train_on_ranks(
    values: Mapping[str, torch.Tensor],
    gradients: Sequence[Mapping[str, torch.Tensor | None]],
    layout: Sequence[Sequence[str]],
    ranks: int,
    make: Callable[[dict[str, Piece], ThreadExchange], torch.optim.Optimizer],
    after_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
) -> tuple[dict[str, torch.Tensor], Hub, list[torch.optim.Optimizer]]:
    """Take one step per entry of ``gradients`` on every rank; the whole parameters afterwards."""
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    ranges, hub = cut(shapes, layout, ranks), Hub(ranks)
    pieces = [make_pieces(values, ranges[rank]) for rank in range(ranks)]
    optimizers = [make(pieces[rank], ThreadExchange(hub, rank, layout, shapes, ranges)) for rank in range(ranks)]

    def run(rank: int) -> None:
        for step in gradients:
            for name, piece in pieces[rank].items():
                gradient = step[name]
                own = None if gradient is None else gradient.flatten()[piece.start : piece.stop].clone()
                piece.parameter.grad = None if own is None else own.view_as(piece.parameter)
            optimizers[rank].step()
            after_step(optimizers[rank])

    in_threads(hub, run)
    whole = {name: torch.full((value.numel(),), float("nan"), dtype=value.dtype) for name, value in values.items()}
    for held in pieces:
        for name, piece in held.items():
            whole[name][piece.start : piece.stop] = piece.parameter.detach().flatten()
    return {name: flat.view(shapes[name]) for name, flat in whole.items()}, hub, optimizers
