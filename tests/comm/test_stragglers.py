"""Ranks that compute longer than the others are named; reports of killed ranks name the step."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn

from harness import run_ranks
from run import sgd, start_engine, train_step
from zeromesh.comm import stragglers
from zeromesh.comm.failure import first_failure
from zeromesh.comm.rank import FAILURES, record_step, write_failure


def train(slow: int | None, pause: float) -> list[str]:
    stragglers.INTERVAL = 0.0
    engine = start_engine(nn.Linear(4, 1), micro=2, optimizer=sgd(0.1))
    said: list[str] = []
    with patch.object(stragglers._log, "warning", lambda text, *values: said.append(text % values)):
        for _ in range(2 * stragglers.LEAST_UPDATES + 1):
            time.sleep(pause * (3 if engine.mesh.rank == slow else 1))
            train_step(engine, engine(torch.ones(2, 4)).sum())
    stragglers.INTERVAL = 60.0
    return said


@dataclass
class FourRanks:
    stages: int = 1
    now: float = 0.0
    waited: float | None = 0.0
    rank: int = 0
    world_size: int = 4

    def lines(self, axis: str) -> list[list[int]]:
        assert axis == "pipeline"
        return [[0], [1], [2], [3]] if self.stages == 1 else [[0, 2], [1, 3]]


def warned(mesh: FourRanks, busy: list[float], updates: int) -> list[str]:
    said: list[str] = []
    watched = stragglers.Stragglers(cast(Any, mesh), lambda: mesh.now)
    with patch.object(stragglers._log, "warning", lambda text, *values: said.append(text % values)):
        for _ in range(updates):
            mesh.now += max(busy)
            watched.compare(busy, busy)
    return said


def test_work_and_the_time_that_others_wait_are_summed_until_they_are_taken() -> None:
    watched = stragglers.Stragglers(cast(Any, FourRanks()))
    assert watched.take() is None
    for _ in range(3):
        watched.compare([2.0] * 4, [1.0, 1.0, 3.0, 1.5])
    assert watched.take() == stragglers.Busy(3, [3.0, 3.0, 9.0, 4.5], [4.5, 4.5, 3.0, 3.0], 6.0)
    assert watched.take() is None
    staged = stragglers.Stragglers(cast(Any, FourRanks(stages=2)))
    staged.compare([2.0] * 4, [1.0, 1.5, 5.0, 5.0])  # ranks 0 and 1 are of one stage
    assert staged.take() == stragglers.Busy(1, [1.0, 1.5, 5.0, 5.0], [1.5, 1.0, 5.0, 5.0], 0.5)


def test_work_of_an_update_begins_where_its_batches_are_there() -> None:
    mesh = FourRanks()
    watched = stragglers.Stragglers(cast(Any, mesh), lambda: mesh.now)
    assert watched.busy() == (0.0, 0.0)
    mesh.now, mesh.waited = 5.0, 1.0  # a save, or slow data
    watched.begin()
    mesh.now, mesh.waited = 9.0, 2.0
    assert watched.busy() == (7.0, 3.0)
    mesh.now = 10.0
    assert watched.busy() == (1.0, 1.0)  # an update that nobody began
    mesh.waited = None  # nccl's waits are on the device
    watched.begin()
    assert watched.busy() == (0.0, 0.0)


def test_a_rank_that_is_three_times_slower_is_named_with_the_ratio_once_per_interval() -> None:
    said = warned(FourRanks(), [1.0, 1.0, 3.0, 1.0], 100)  # 300 seconds
    assert len(said) == 5
    assert said[0].startswith(
        "rank 2 computed 3.0 times as long as the others in the last 20 updates (3 s instead of 1 s each)"
    )
    assert warned(FourRanks(), [1.0, 1.9, 1.0, 1.0], 100) == []
    assert warned(FourRanks(), [100.0, 1.0, 1.0, 1.0], 9) == []  # too few updates to tell
    assert warned(FourRanks(stages=2), [1.0, 1.0, 5.0, 5.0], 100) == []  # stages may differ


@pytest.mark.full
def test_a_slow_rank_is_named_on_real_ranks() -> None:
    first, second = run_ranks(train, 2, 1, 0.5, timeout=120)
    assert first
    assert all(line.startswith("rank 1 computed ") for line in first)
    assert second == []


def test_the_report_of_a_killed_rank_names_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILURES, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    record_step(11)
    record_step(12)
    assert str(first_failure(tmp_path, {1: -signal.SIGKILL})).startswith(
        "rank 1 failed first: killed by SIGKILL in step 12; "
    )
    assert "in step" not in str(first_failure(tmp_path, {0: -signal.SIGKILL}))


def test_a_rank_that_ends_the_run_is_the_failure_and_not_those_that_are_killed_with_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(FAILURES, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    assert write_failure("rank 1 has given no sign of life", "the stack", 70, 12.5)
    assert write_failure("PeerLost", "as rank 1 is killed now", 1)
    found = first_failure(tmp_path, {0: 70, 1: -signal.SIGKILL})
    assert str(found) == "rank 0 failed first: rank 1 has given no sign of life\nthe stack"
    assert found.exitcode == 70
