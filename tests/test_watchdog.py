"""Ranks that wait for each other for ever are told so; ranks that are merely slow are left alone."""

import time

import torch
from torch import nn

import zeromesh
from harness import run_ranks, spawn_ranks
from zeromesh.dist import watchdog


def make_engine(patience: float) -> zeromesh.Engine:
    watchdog.PATIENCE = patience
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeromesh.initialize(model=model, config=config)
    return engine


def one_rank_steps_while_the_other_runs_another_forward() -> None:
    engine = make_engine(patience=0.6)
    engine.backward(engine(torch.ones(2, 64)).sum())
    if engine.mesh.rank == 0:
        engine.step()
    engine(torch.ones(2, 64))


def one_rank_is_slow() -> float:
    engine = make_engine(patience=0.3)
    if engine.mesh.rank == 0:
        time.sleep(1.5)
    engine.backward(engine(torch.ones(2, 64)).sum())
    engine.step()
    watchdog.PATIENCE = 30.0
    return float(engine.get_global_grad_norm() or 0.0)


def test_ranks_in_different_collectives_end_and_say_which() -> None:
    outcomes = spawn_ranks(one_rank_steps_while_the_other_runs_another_forward, 2, timeout=30)
    said = "".join(outcome.output for outcome in outcomes)
    assert all(outcome.kind != "value" for outcome in outcomes)
    assert "every rank has waited" in said
    assert "rank 0 waits" in said
    assert "rank 1 waits" in said
    assert "exchange over the axis world" in said
    assert "parameters of unit" in said
    assert "test_watchdog.py" in said  # the stack shows the user's line


def test_a_slow_rank_is_waited_for() -> None:
    norms = run_ranks(one_rank_is_slow, 2)
    assert norms[0] == norms[1] > 0
