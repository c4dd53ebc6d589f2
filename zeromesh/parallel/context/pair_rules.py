"""Rules of which pairs of a query and a key attention sees, and what of them two ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zeromesh.parallel.context.sequence_order import keep

ALL = slice(None)
FAR = 2**31 - 1  # a bound that no difference reaches

# Tokens of a tile, the unit in which pairs are left out: small ones leave out more, and take more calls of kernels.
LEAST_TILE, MOST_TILE, TILES = 128, 2048, 16


@dataclass(frozen=True)
class PairRule:
    """A query sees a key only if ``low <= of_queries[query] - of_keys[key] <= high``."""

    name: str
    of_queries: Tensor  # a number of each token as a query, integers of shape (samples or 1, sequence)
    of_keys: Tensor  # the same as a key
    low: int = -FAR  # least difference
    high: int = FAR  # largest difference

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return which keys queries see, bool of shape (samples, queries, keys), from these numbers of theirs."""
        queries, keys = queries.unsqueeze(2), keys.unsqueeze(1)
        if self.high == FAR:
            return queries >= keys + self.low
        below = queries <= keys + self.high
        return below if self.low == -FAR else below & (queries >= keys + self.low)

    def is_order(self) -> bool:
        """Return whether it lets a query see the keys that are not after it."""
        return self.name == "causal" and self.of_queries is self.of_keys

    def hides(self) -> bool:
        """Return whether some pair is not seen."""
        (q_low, q_high), (k_low, k_high) = (x.aminmax(dim=-1) for x in (self.of_queries, self.of_keys))
        return bool(((q_low - k_high < self.low) | (q_high - k_low > self.high)).any())


@dataclass(frozen=True)
class PairBlock:
    """Queries of a rank and keys of another, as ranges of their parts' tokens and of samples.

    ``rules`` are the numbers of those that hide some of the pairs; if ``causal``, query i sees the keys 0 to i.
    """

    rows: slice
    columns: slice
    samples: slice
    causal: bool = False
    rules: set[int] = field(default_factory=set)


class CausalPairs:
    """All pairs whose key is not after the query, in the order of ``sequence_order.py``."""

    def __init__(self, ranks: int) -> None:
        self.steps = tuple(range(1, ranks))  # distances to those ranks before whose keys some rank sees, in order

    def pieces(self, rank: int, source: int, length: int) -> list[PairBlock]:
        """Return what a rank's ``length`` queries see of rank ``source``'s keys; pieces have no pair in common."""
        half = length // 2  # of an early and a late chunk; in each case below it is half of all pairs
        if source == rank:
            return [PairBlock(ALL, ALL, ALL, causal=True)]
        if source < rank:  # its early chunk comes before both of this rank's, its late one after both
            return [PairBlock(ALL, slice(half), ALL)]
        return [PairBlock(slice(half, None), ALL, ALL)]

    def mask(self, piece: PairBlock, rank: int, source: int) -> Tensor | None:
        """Return which pairs of a piece are seen, bool of shape (samples or 1, 1, queries, keys); None: all."""
        return None


class RulePairs(CausalPairs):
    """All pairs that each of some rules lets see, of sequences of ``length`` tokens.

    Whether tiles of tokens see each other follows from the least and the largest number in each, so nothing is
    computed, and no mask is made, of tiles that see nothing of each other.
    """

    def __init__(self, rules: Sequence[PairRule], ranks: int, length: int, order: Tensor | None = None) -> None:
        """``order`` has the tokens as ``sequence_order.keep`` cuts them, int64 of shape (samples, sequence)."""
        super().__init__(ranks)
        self._rules, half = rules, length // ranks // 2
        self._pieces: dict[tuple[int, int], list[PairBlock]] = {}  # pieces, by rank and source
        tile = min(max(LEAST_TILE, -(-2 * half // TILES)), MOST_TILE)
        # Of either half, as tokens far from each other leave nothing out.
        self._ranges = [
            slice(start, min(start + tile, end)) for end in (half, 2 * half) for start in range(end - half, end, tile)
        ]
        # (samples or 1, ranks, tokens of a part)
        self._numbers = [[_by_rank(x, ranks, order) for x in (rule.of_queries, rule.of_keys)] for rule in rules]
        tiles = ranks * len(self._ranges)
        seen, self._cut = torch.ones(1, tiles, tiles, dtype=torch.bool), []  # and of each rule, what it may cut
        for rule, numbers in zip(rules, self._numbers, strict=True):
            (q_low, q_high), (k_low, k_high) = (self._limits(x) for x in numbers)
            least, most = q_low[:, :, None] - k_high[:, None], q_high[:, :, None] - k_low[:, None]
            seen = seen & (most >= rule.low) & (least <= rule.high)
            self._cut.append((least < rule.low) | (most > rule.high))
        self._seen = seen
        touched = seen.any(0).view(ranks, tiles // ranks, ranks, -1).any(3).any(1).tolist()
        self.steps = tuple(step for step in self.steps if any(touched[rank][rank - step] for rank in range(ranks)))

    def _limits(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest number in each tile, (samples or 1, tiles of all ranks)."""
        tiles = [numbers[:, :, tokens].cpu() for tokens in self._ranges]
        low, high = (torch.stack([getattr(x, name)(-1) for x in tiles], -1).flatten(1) for name in ("amin", "amax"))
        return low, high

    def pieces(self, rank: int, source: int, length: int) -> list[PairBlock]:
        """See ``CausalPairs.pieces``."""
        if (rank, source) not in self._pieces:
            self._pieces[rank, source] = self._find(rank, source)
        return self._pieces[rank, source]

    def _find(self, rank: int, source: int) -> list[PairBlock]:
        count = len(self._ranges)
        rows_of, columns_of = (slice(place * count, (place + 1) * count) for place in (rank, source))
        seen = self._seen[:, rows_of, columns_of].tolist()
        cut = [x[:, rows_of, columns_of].expand(len(seen), -1, -1).tolist() for x in self._cut]
        blocks: list[PairBlock] = []
        for sample, table in enumerate(seen):
            samples = ALL if len(seen) == 1 else slice(sample, sample + 1)
            above: dict[tuple[int, int], int] = {}  # blocks without a mask of the tile of queries before this one
            for i, rows in enumerate(self._ranges):
                runs: list[PairBlock] = []
                for j in (j for j in range(count) if table[i][j]):
                    columns = self._ranges[j]
                    rules = {number for number, x in enumerate(cut) if x[sample][i][j]}
                    last = runs[-1] if runs else PairBlock(ALL, ALL, ALL, causal=True)
                    # In a part the tokens are in the order of the sequence.
                    cutting = [self._rules[number] for number in rules]
                    if rank == source and i == j and len(cutting) == 1 and cutting[0].is_order():
                        runs.append(PairBlock(rows, columns, samples, causal=True))
                    elif not last.causal and last.columns.stop == columns.start and bool(last.rules) == bool(rules):
                        joined = slice(last.columns.start, columns.stop)
                        runs[-1] = replace(last, columns=joined, rules=last.rules | rules)
                    else:
                        runs.append(PairBlock(rows, columns, samples, rules=rules))
                below = {}
                for block in runs:
                    key = block.columns.start, block.columns.stop
                    place = len(blocks)
                    if not block.causal and not block.rules:
                        place = below[key] = above.get(key, place)
                    if place < len(blocks):
                        blocks[place] = replace(blocks[place], rows=slice(blocks[place].rows.start, rows.stop))
                    else:
                        blocks.append(block)
                above = below
        return blocks

    def mask(self, piece: PairBlock, rank: int, source: int) -> Tensor | None:
        """See ``CausalPairs.mask``."""
        mask = None
        for number in sorted(piece.rules):
            queries, keys = self._numbers[number]
            pair = (queries[:, rank, piece.rows], keys[:, source, piece.columns])
            more = self._rules[number].sees(*(x if len(x) == 1 else x[piece.samples] for x in pair))
            mask = more if mask is None else mask & more
        return None if mask is None else mask.unsqueeze(1)


def _by_rank(numbers: Tensor, ranks: int, order: Tensor | None) -> Tensor:
    """Return numbers of tokens by rank, of shape (samples, or 1 if all are alike; ranks; tokens of a part)."""
    if order is not None:
        numbers = numbers.take_along_dim(order, 1)
    if bool((numbers == numbers[:1]).all()):
        numbers = numbers[:1]
    return torch.stack([keep(numbers, rank, ranks, 1) for rank in range(ranks)], 1)
