"""The loader of ``training_data`` goes on where the checkpoint was written, on any number of ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data.distributed import DistributedSampler

import zeromesh
from harness import on_ranks, run_ranks
from run import adamw, configuration, train_step
from runs import train_on_the_loader
from zeromesh.base.loader import Loader, Position, Sampler

SAMPLES = 40


def loader_of(rank: int = 0, ranks: int = 1, batch: int = 1, drop: bool = False, length: int = SAMPLES) -> Loader:
    return Loader(range(length), Sampler(range(length), ranks, rank, 7, drop), batch, None, drop)


def whole(ranks: int, batch: int, drop: bool = False, length: int = SAMPLES) -> list[Loader]:
    return [loader_of(rank, ranks, batch, drop, length) for rank in range(ranks)]


def together(loaders: list[Loader]) -> Iterator[list[int]]:
    for batches in zip(*loaders, strict=True):
        yield torch.cat(batches).tolist()


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("length", [1, 5, 24, 25])
def test_a_pass_is_that_of_torchs_sampler(length: int, drop: bool) -> None:
    for ranks in (1, 2, 3):
        for rank in range(ranks):
            ours = Sampler(range(length), ranks, rank, 7, drop)
            theirs = DistributedSampler(range(length), ranks, rank, shuffle=True, seed=7, drop_last=drop)
            for number in range(3):
                theirs.set_epoch(number)
                assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("length", [36, 40, 41])
@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4])
def test_the_rest_of_a_pass_is_taken_by_any_number_of_ranks(taken: int, length: int, drop: bool) -> None:
    single = loader_of(length=length)
    orders = [torch.cat(list(single)).tolist() for _ in range(2)]
    position = Position(0, min(12 * taken, length))
    left = orders[0][position.samples :]
    over = len(left) < (12 if drop else 1)
    for ranks in (1, 2, 3, 4):
        again = whole(ranks, 12 // ranks, drop, length)
        for loader in again:
            loader.go_to(loader.state(position))
        for order in [orders[1]] if over else [left, orders[1]]:
            got = [*together(again)]
            full = len(order) // 12
            assert [set(batch) for batch in got[:full]] == [set(order[i : i + 12]) for i in range(0, full * 12, 12)]
            rest = [sample for batch in got[full:] for sample in batch]
            if drop:
                assert not rest
            else:
                assert set(order[full * 12 :]) <= set(rest)
                assert len(rest) - len(order[full * 12 :]) in range(ranks), "as many more as make the shares equal"


def test_the_position_is_that_of_the_iterator_which_handed_out_the_last_batch() -> None:
    loader = loader_of(ranks=2, batch=3)
    first = iter(loader)
    assert loader.position == Position(0, 0)
    next(first)
    next(first)
    assert loader.position == Position(0, 12)
    assert len(list(loader)) == 7
    assert loader.position == Position(1, SAMPLES)
    next(first)
    assert loader.position == Position(0, 18)


def test_the_number_of_the_next_pass_may_be_set_again_but_another_one_begins_anew() -> None:
    loader = loader_of(batch=4)
    passes = [torch.cat(list(loader)).tolist() for _ in range(3)]
    loader.go_to(loader.state(Position(1, 8)))
    loader.sampler.set_epoch(1)
    assert torch.cat(list(loader)).tolist() == passes[1][8:]
    loader.go_to(loader.state(Position(1, 8)))
    loader.sampler.set_epoch(2)
    assert torch.cat(list(loader)).tolist() == passes[2]
    assert loader.go_to(None) == (0, 0)
    assert torch.cat(list(loader)).tolist() == passes[0]


class Points(torch.utils.data.Dataset[Any]):
    def __init__(self, length: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.values = torch.randn(length, 6, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index], torch.tensor(index)


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        self.seen += index.tolist()
        return self.layers(x).square().mean()


def begin(
    ranks: int, accumulation: int = 2, dropout: float = 0.0, length: int = SAMPLES, seed: int = 1234
) -> zeromesh.Engine:
    torch.manual_seed(0)
    settings = configuration(batch=8, accumulation=accumulation, stage=ranks % 4, optimizer=adamw(0.01), seed=seed)
    model = Model(dropout).double()
    engine, *_ = zeromesh.initialize(model=model, config=settings, training_data=Points(length))
    torch.manual_seed(50 + engine.mesh.rank)
    return engine


def by_loop(engine: zeromesh.Engine, updates: int, folder: str | None = None) -> list[Any]:
    losses = []
    last = engine.global_steps + updates
    while True:
        for x, index in engine.training_dataloader:
            if engine.global_steps == last:
                if folder is not None:
                    engine.save_checkpoint(folder)
                return losses
            losses.append(train_step(engine, engine(x, index)))


def by_batches(engine: zeromesh.Engine, updates: int, folder: str | None = None) -> list[Any]:
    losses = train_on_the_loader(engine, updates)
    if folder is not None:
        engine.save_checkpoint(folder)
    return losses


WAYS = {"loop": by_loop, "train_batch": by_batches}


def straight_on(folder: str, way: str, before: int, after: int) -> tuple[list[float], list[int]]:
    train = WAYS[way]
    engine = begin(2, dropout=0.3)
    train(engine, before, folder)
    # The loop that saved has a batch in hand, so the undisturbed run is another one.
    engine = begin(2, dropout=0.3)
    losses = train(engine, before + after)[-after * (2 if way == "loop" else 1) :]
    seen = engine.module.seen[before * 4 :]
    again = begin(2, dropout=0.3)
    torch.manual_seed(99)
    again.load_checkpoint(folder)
    assert again.data_position == (before * 8 // SAMPLES, before * 8 % SAMPLES)
    assert train(again, after) == losses
    assert again.module.seen == seen
    return losses, seen


@pytest.mark.some(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", [3, 5, 7])
def test_a_resumed_run_sees_the_samples_of_the_undisturbed_one_bit_for_bit(way, before, tmp_path) -> None:
    found = run_ranks(straight_on, 2, str(tmp_path), way, before, 5)
    both = [sample for _, seen in found for sample in seen]
    assert len(both) == 5 * 8


def save_on_the_way(folder: str, updates: int) -> tuple[list[float], list[int]]:
    engine = begin(2)
    by_batches(engine, updates, folder)
    return by_batches(begin(2), 12)[updates:], engine.module.seen


def go_on(folder: str, ranks: int, updates: int) -> tuple[list[float], list[int]]:
    engine = begin(ranks, accumulation=1)
    engine.load_checkpoint(folder)
    return by_batches(engine, updates), engine.module.seen


def test_other_numbers_of_ranks_go_on_in_the_same_order_with_no_sample_lost_or_seen_twice(tmp_path: Path) -> None:
    (expected, first), (_, second) = run_ranks(save_on_the_way, 2, str(tmp_path), 3)
    for ranks in (1, 4):
        found = run_ranks(go_on, ranks, str(tmp_path), ranks, 9)
        assert found[0][0] == pytest.approx(expected, rel=1e-9)
        rest = [sample for _, seen in found for sample in seen[: 2 * 8 // ranks]]
        assert sorted(first + second + rest) == list(range(SAMPLES)), "the pass has each sample once"


@on_ranks(1)
def test_a_position_in_other_data_is_refused_or_left_out(tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = begin(1)
    by_batches(engine, 2, folder)
    for other, words in (
        (begin(1, length=SAMPLES + 1), "was trained on training_data of length 40, but this run has"),
        (begin(1, seed=5), "was trained on the order of seed 1234, but this run has the order of seed 5"),
    ):
        weights = {name: value.clone() for name, value in other.gathered_state_dict().items()}
        by_batches(other, 1)
        moved = other.gathered_state_dict()
        with pytest.raises(ValueError, match=words):
            other.load_checkpoint(folder)
        assert all(torch.equal(value, moved[name]) for name, value in other.gathered_state_dict().items())
        assert not all(torch.equal(value, moved[name]) for name, value in weights.items())
        other.load_checkpoint(folder, load_data_position=False)
        assert other.global_steps == 2
        assert other.training_dataloader.position == (0, 8), "the loader is where it was"
        assert other.data_position == (0, 8)
