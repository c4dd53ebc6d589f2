"""What one rank does in a step does not grow with the ranks: calls and bytes on torch's fake process group."""

import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness import on_ranks, run_ranks
from run import sgd, start_engine, train_step
from zeromesh.comm import collectives
from zeromesh.comm.stragglers import Busy, Stragglers, medians_of_others

STEPS = 3


def counted(world: int, stage: int, blocks: int) -> tuple[int, dict[str, Any]]:
    """Return the calls of Python functions in a step of the first of ``world`` ranks, and what the ranks tell."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(blocks)))
        engine = start_engine(model, stage=stage, optimizer=sgd(0.1))
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        for step in range(STEPS):
            engine.traffic_report(reset=True)
            calls = 0
            sys.setprofile(count if step == STEPS - 1 else None)
            train_step(engine, engine(torch.ones(1, 4)).sum())
            sys.setprofile(None)
        report = engine.traffic_report()
        engine.destroy()
    finally:
        sys.setprofile(None)
    return calls, report


def counts(stage: int) -> list[tuple[int, dict[str, Any]]]:
    """Return the counts of 8 and 1,024 ranks, of as many with more parameters, and of 8 ranks with as many."""
    return [counted(8, stage, 10), counted(1024, stage, 10), counted(1024, stage, 40), counted(8, stage, 40)]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_calls_no_more_functions_among_a_thousand_ranks_than_among_eight(stage: int) -> None:
    ((few, few_report), (many, many_report), (_, larger_report), (larger, _)), *_ = run_ranks(counts, 1, stage)
    assert many <= few
    assert larger <= 4 * few  # nothing is done over all units for each of them
    assert {key: entry["calls"] for key, entry in few_report.items()} == {
        key: entry["calls"] for key, entry in many_report.items()
    }
    assert many_report["exchange/world"] == larger_report["exchange/world"]  # it has four times the parameters
    assert many_report["exchange/world"]["bytes"] < 2 * 8 * (6 * collectives.SLOTS + 32)


@on_ranks(3)
def test_maxima_and_sums_have_the_same_bits_on_all_ranks() -> None:
    engine = start_engine(nn.Linear(4, 1), optimizer=sgd(0.1))
    world = engine.mesh.group("world")
    numbers = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(world.rank))
    largest, sums = world.reduce(*numbers)
    rows = world.exchange(numbers.flatten()).view(-1, 2, 7)
    assert torch.equal(largest, rows[:, 0].amax(0))
    assert torch.allclose(sums, rows[:, 1].sum(0), rtol=1e-15)
    assert len({tuple(row) for row in world.exchange(sums).tolist()}) == 1
    flags = torch.tensor([world.rank == 1, world.rank == 2, False], dtype=torch.uint8)
    assert world.reduce(flags)[0].tolist() == [1, 1, 0]


def losses() -> list[float]:
    """Train with a layer that one rank alone uses, and return the mean losses and the norms."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    engine = start_engine(layers, stage=1, optimizer=sgd(0.1))
    found: list[float] = []
    for _ in range(3):
        with patch.object(
            nn.ModuleList, "forward", lambda self, x: self[1](self[0](x)) if first() else self[0](x), create=True
        ):
            train_step(engine, engine(torch.full((2, 4), 1.0 + engine.mesh.rank)).square().sum())
        found += [engine.get_mean_loss(), engine.get_global_grad_norm()]
    return found


def first() -> bool:
    return dist.get_rank() == 0


@on_ranks(2)
def test_ranks_that_share_a_slot_come_to_the_same_losses_and_norms() -> None:
    apart = losses()
    with patch.object(collectives, "SLOTS", 1):
        assert losses() == apart


def test_the_medians_of_all_others_are_those_of_statistics() -> None:
    draw = random.Random(0)
    for count in range(12):
        values = [float(draw.randrange(6)) for _ in range(count)]
        others = [[*values[:rank], *values[rank + 1 :]] for rank in range(count)]
        assert medians_of_others(values) == [statistics.median(rest) if rest else 0.0 for rest in others]


@dataclass
class Ranks:
    """Four ranks, of which this is one."""

    rank: int
    now: float = 0.0
    waited: float | None = 0.0
    world_size: int = 4

    def lines(self, axis: str) -> list[list[int]]:
        """Return a pipeline of one stage."""
        return [[0], [1], [2], [3]]


def test_ranks_that_share_a_slot_tell_their_seconds_in_turn() -> None:
    ranks = [Ranks(rank) for rank in range(4)]
    watched = [Stragglers(cast(Any, rank), lambda rank=rank: rank.now, turns=2) for rank in ranks]
    for _ in range(7):  # the first tells nothing, as nobody knows when it began
        for rank in ranks:
            rank.now += 3.0 if rank.rank == 2 else 1.0
        told = [each.tell() for each in watched]
        slots = [[told[0][n] + told[1][n], told[2][n] + told[3][n]] for n in range(2)]
        for each in watched:
            each.hear(*slots)
    assert [each.take() for each in watched[1:]] == [None, None, None]
    assert watched[0].take() == Busy(4, [4.0, 4.0, 12.0, 4.0], [4.0, 4.0, 4.0, 4.0], 8.0)
