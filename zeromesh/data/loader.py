"""Samples in an order that is a pure function of the seed and the number of samples consumed.

A run is resumed by its count of samples alone: nothing is replayed, and the number of ranks may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

Sample = tuple[Tensor, Tensor]
"""Token ids and the ids that follow them, int64, each of shape ``(length,)``; with a first dim when batched."""

ROUNDS = 6
"""Rounds of the permutation; four already look random (Luby and Rackoff, 1988)."""


@dataclass(frozen=True)
class Permutation:
    """A pseudo-random permutation of ``range(size)``, computed one entry at a time.

    A Feistel network permutes the smallest square of a power of two that holds the range; what falls outside is
    permuted again until it falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """

    size: int
    seed: int

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.size
        half = ((self.size - 1).bit_length() + 1) // 2
        while True:
            index = self._scramble(index, half)
            if index < self.size:
                return index

    def _scramble(self, index: int, half: int) -> int:
        mask = (1 << half) - 1
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_hash(self.seed, number, right) & mask)
        return left << half | right


def _hash(*numbers: int) -> int:
    """64 bits that depend on all of the numbers, the same on every machine."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def window_of(index: int, windows: int, seed: int) -> int:
    """The window that sample ``index`` of the stream is: every epoch has each window once, in an order of its own."""
    epoch, position = divmod(index, windows)
    return Permutation(windows, _hash(seed, epoch))[position]


class Windows(Dataset[Sample]):
    """The stream of tokens cut every ``length`` tokens; each window also has the token after it, as the last label.

    Raises:
        ValueError: if the stream is shorter than one window.
    """

    def __init__(self, tokens: NDArray[np.unsignedinteger], length: int) -> None:
        if len(tokens) < length + 1:
            raise ValueError(
                f"model.sequence_length = {length} needs {length + 1} tokens of training text, and there are "
                f"{len(tokens)}; shorten the sequence, or add text"
            )
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Sample:
        start = index * self.length
        window = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        return window[:-1], window[1:]


@dataclass(frozen=True)
class Share:
    """The part of every global batch that one data rank feeds.

    The global batch of ``micro_batches * size * rows`` consecutive samples is cut into micro-batches, and each of
    them into ``rows`` consecutive samples per data rank.
    """

    rank: int
    size: int
    rows: int
    micro_batches: int

    @property
    def global_batch(self) -> int:
        """Samples that all ranks consume in one step."""
        return self.micro_batches * self.size * self.rows

    def micro_batch(self, consumed: int, number: int) -> range:
        """Positions in the stream of this rank's samples, for the micro-batch of that number after ``consumed``."""
        start = consumed + (number * self.size + self.rank) * self.rows
        return range(start, start + self.rows)


class StreamSampler(Sampler[list[int]]):
    """This rank's micro-batches as lists of windows, without end, from ``consumed`` samples on."""

    def __init__(self, windows: int, share: Share, seed: int, consumed: int) -> None:
        self.windows, self.share, self.seed, self.consumed = windows, share, seed, consumed

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self.consumed
        while True:
            for number in range(self.share.micro_batches):
                positions = self.share.micro_batch(consumed, number)
                yield [window_of(position, self.windows, self.seed) for position in positions]
            consumed += self.share.global_batch


def training_batches(windows: Windows, share: Share, seed: int, consumed: int) -> Iterator[Sample]:
    """Micro-batches of this rank without end: ``(tokens, labels)``, each int64 of shape ``(rows, length)``.

    Args:
        windows: what is sampled from.
        share: this rank's part of a global batch.
        seed: seed of the order; the same on all ranks.
        consumed: samples that all ranks together have consumed so far.
    """
    sampler = StreamSampler(len(windows), share, seed, consumed)
    # A generator of its own: a loader otherwise draws from torch's random numbers when it starts.
    return iter(DataLoader(windows, batch_sampler=sampler, generator=torch.Generator()))


def evaluation_batches(
    tokens: NDArray[np.unsignedinteger], length: int, rows: int, rank: int, size: int, ignore: int
) -> Iterator[Sample]:
    """This rank's share of batches that together have every token of the stream but the first as a label once.

    Args:
        tokens: the stream, at least two tokens.
        length: tokens of a row. Every row is a window of its own.
        rows: rows of a batch.
        rank: this rank, which gets every ``size``-th batch.
        size: number of ranks. All get equally many batches.
        ignore: the label that fills what is left over.
    """
    step = rows * length
    batches = -(-(len(tokens) - 1) // step)
    for start in range(rank * step, -(-batches // size) * size * step, size * step):
        piece = tokens[start : start + step + 1].astype(np.int64)
        inputs, labels = np.zeros(step, dtype=np.int64), np.full(step, ignore, dtype=np.int64)
        count = max(len(piece) - 1, 0)
        inputs[:count], labels[:count] = piece[:-1], piece[1:]
        yield torch.from_numpy(inputs).view(rows, length), torch.from_numpy(labels).view(rows, length)
