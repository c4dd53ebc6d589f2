"""Ranks that compute longer than the others are named; reports of killed ranks name the step."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from zeromesh.dist import stragglers
from zeromesh.dist.failure import first_failure
from zeromesh.dist.rank import FAILURES, record_step


def train(slow: int | None, pause: float) -> list[str]:
    stragglers.INTERVAL = 0.0
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeromesh.initialize(model=nn.Linear(4, 1), config=config)
    said: list[str] = []
    with patch.object(stragglers._log, "warning", lambda text, *values: said.append(text % values)):
        for _ in range(2 * stragglers.LEAST_UPDATES + 1):
            time.sleep(pause * (3 if engine.mesh.rank == slow else 1))
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
    stragglers.INTERVAL = 60.0
    return said


def test_a_rank_that_is_three_times_slower_is_named_with_the_ratio_once_per_interval() -> None:
    first, second = run_ranks(train, 2, 1, 0.1)
    assert len(first) == 2
    assert first[0].startswith("rank 1 computed ")
    assert 2.0 <= float(first[0].split()[3]) <= 4.0
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
