"""Orders of samples, epochs and evaluations: silent errors of other systems, and that ours are those of one process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeromesh
from harness import run_ranks
from museum import in_float64, require, start
from test_data_samples import prepared, write
from zeromesh.apps.train.data.token_store import PreparedData
from zeromesh.apps.train.run_loss import HeldOut
from zeromesh.base.loader import Loader, Position, Sampler

SAMPLES, BATCH, RANKS = 20, 2, 2
FULL = SAMPLES // (BATCH * RANKS)
"""Updates of a pass."""


def loaders(length: int = SAMPLES) -> list[Loader]:
    """Return the loaders of both ranks over the numbers below ``length``."""
    return [
        Loader(range(length), Sampler(range(length), RANKS, rank, 7, False), BATCH, None, False)
        for rank in range(RANKS)
    ]


def together(both: list[Loader]) -> list[list[int]]:
    """Return the samples of each update of the next pass."""
    return [torch.cat(batches).tolist() for batches in zip(*both, strict=True)]


def resumed(position: Position) -> list[Loader]:
    both = loaders()
    for loader in both:
        loader.go_to(loader.state(position))
    return both


def test_every_pass_has_an_order_of_its_own_and_all_samples() -> None:
    both = loaders()
    passes = [[sample for update in together(both) for sample in update] for _ in range(3)]
    assert [sorted(one) for one in passes] == [[*range(SAMPLES)]] * 3
    # Torch's sampler, whose pass nobody sets, repeats the first one.
    sampler = torch.utils.data.DistributedSampler(range(SAMPLES), RANKS, 0, seed=7)  # type: ignore[arg-type]
    assert [*sampler] == [*sampler]
    assert len({tuple(one) for one in passes}) == 3


def test_a_run_that_stops_in_a_later_pass_goes_on_in_its_order() -> None:
    both = loaders()
    first, second, third = together(both), together(both), together(both)
    taken = 2
    rest = resumed(Position(1, taken * BATCH * RANKS))
    found = together(rest)
    assert found == second[taken:]
    assert found != first[taken:]  # the order of the first pass
    assert together(rest) == third


def test_a_run_that_stops_in_the_middle_neither_repeats_nor_skips_samples() -> None:
    order = together(loaders())
    for taken in range(1, FULL):
        seen = [sample for update in order[:taken] for sample in update]
        rest = [sample for update in together(resumed(Position(0, taken * BATCH * RANKS))) for sample in update]
        assert sorted(seen + rest) == [*range(SAMPLES)]
        assert not {*seen} & {*rest}  # as where the pass begins anew


def test_the_pass_after_a_resumed_one_is_another_one() -> None:
    both = loaders()
    first, second = together(both), together(both)
    again = resumed(Position(0, 2 * BATCH * RANKS))
    assert together(again) == first[2:]
    assert together(again) == second != first


def test_a_run_that_stops_at_the_end_of_a_pass_goes_on_with_the_next_one() -> None:
    both = loaders()
    _, second, third = together(both), together(both), together(both)
    again = resumed(Position(0, SAMPLES))
    assert len(second) == FULL
    assert together(again) == second  # not nothing
    assert together(again) == third


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from numpy's generator for each sample, as augmentations do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(np.random.random())])


def test_samples_of_a_pass_draw_other_random_numbers() -> None:
    np.random.seed(0)
    loader = Loader(Noisy(), Sampler(Noisy(), 1, 0, 7, False), 2, None, False)
    drawn = [float(value) for _ in range(2) for batch in loader for value in batch]
    assert len({*drawn}) == 16
    np.random.seed(0)
    copies = [float(np.random.random())] * 4  # of four workers that begin with one state
    assert len({*copies}) == 1


WORDS, LENGTH, TOKENS = 50, 4, 30
"""Thirty tokens give 29 labels in eight rows: on two ranks with rows of three, the last ones are padded."""


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def evaluate(data: PreparedData) -> float:
    # The token of padding is beyond the vocabulary.
    language: Any = SimpleNamespace(
        logits=lambda call, batch: call(batch.tokens.clamp(max=WORDS - 1)), sequence_length=LENGTH
    )
    score = HeldOut(data, language, rows=3).score(start(in_float64(Words)))
    assert score is not None
    return score.loss


def test_an_evaluation_counts_each_label_once_however_it_is_padded(tmp_path: Path) -> None:
    tokens = np.arange(1, TOKENS + 1)
    data = prepared(validation=(write(tmp_path / "set", [tokens]),))
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        losses = F.cross_entropy(in_float64(Words)(ids[:-1]), ids[1:], reduction="none")
    right = float(losses.mean())
    # A last batch that is filled up with the first samples, and a mean of the batches' means.
    padded = float(torch.cat([losses, losses[:7]]).mean())
    means = float(torch.stack([part.mean() for part in losses.split(12)]).mean())
    for found in run_ranks(evaluate, 2, data):
        require(found, right, padded)
        require(found, right, means)


def mean_of_evaluation() -> float:
    """Evaluate micro-batches of which each rank has others."""
    engine = start(nn.Linear(1, 1, bias=False).double())
    with torch.no_grad():
        engine.module.weight.fill_(1.0)
    given = [torch.full((2, 1), 10.0**number, dtype=torch.float64) for number in range(4)]
    own = given[dist.get_rank() :: 2]
    return float(engine.eval_batch(iter([Mean(x) for x in own]), num_micro_batches=2))


class Mean(zeromesh.engine.batches.WithLoss):
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def loss(self, model: Any) -> torch.Tensor:
        return model(self.x).mean()


def test_an_evaluated_loss_is_that_of_all_ranks() -> None:
    right = sum(10.0**number for number in range(4)) / 4
    for found in run_ranks(mean_of_evaluation, 2):
        require(found, right, (1.0 + 100.0) / 2)  # of this rank's alone
