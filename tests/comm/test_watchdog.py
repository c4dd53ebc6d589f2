"""Ranks that wait for each other for ever are told so; ranks that are merely slow are left alone."""

import os
import signal
import threading
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh
from harness import RankFailure, run_mpi_ranks, run_ranks, spawn_ranks
from run import sgd, start_engine, train_step
from zeromesh.comm import watchdog


def make_engine(patience: float) -> zeromesh.Engine:
    watchdog.PATIENCE = patience
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    engine = start_engine(model, stage=3, optimizer=sgd(0.1))
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
    train_step(engine, engine(torch.ones(2, 64)).sum())
    watchdog.PATIENCE = 30.0
    return float(engine.get_global_grad_norm() or 0.0)


def one_rank_is_stopped(stopped: int) -> None:
    engine = make_engine(patience=0.6)
    if engine.mesh.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    train_step(engine, engine(torch.ones(2, 64)).sum())


def one_rank_calls_a_barrier() -> None:
    engine = make_engine(patience=0.3)
    if engine.mesh.rank == 1:
        dist.barrier()
    engine.backward(engine(torch.ones(2, 64)).sum())


class Store(dict[str, str]):
    def __init__(self) -> None:
        super().__init__({"zeromesh/waits/1": '{"what": "something", "number": 1}'})
        self["zeromesh/signs/1"] = "given"

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return f"{time.monotonic()} elsewhere 7 host".encode() if "signs" in key else self[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def clone(self) -> "Store":
        return self


def test_a_wait_that_an_earlier_engine_told_of_is_taken_back() -> None:
    """Else the other ranks, if they wait now, would take this one, which computes, for one that waits, too."""
    store = Store()
    store["zeromesh/waits/0"] = '{"what": "something", "number": 3}'
    watchdog.Watchdog(store, 0, 2, patience=3600).check()
    assert store["zeromesh/waits/0"] == "{}"


def test_a_large_collective_is_given_the_time_of_a_slow_link() -> None:
    for nbytes, expected in ((int(3600 * watchdog.SLOWEST_LINK), False), (0, True)):
        watched, given_up = watchdog.Watchdog(Store(), 0, 2, patience=0.03), threading.Event()
        with patch.object(watched, "_give_up", lambda states, event=given_up: event.set()):
            watched.begin("a unit", nbytes)
            assert given_up.wait(10 if expected else 0.3) == expected
            watched.end()
            time.sleep(0.05)


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
    assert "raise slots.parameter" in said


@pytest.mark.full
def test_a_stopped_rank_is_named_and_ends_the_run() -> None:
    other, _ = spawn_ranks(one_rank_is_stopped, 2, 1, timeout=10)
    assert other.kind == "died"
    assert "status 70" in other.text
    assert "rank 1 (process" in other.output
    assert "it is stopped, or gone; rank 0 waits for all_gather" in other.output
    assert "test_watchdog.py" in other.output  # the line of the program, and the stack


def test_a_store_that_does_not_answer_ends_the_run() -> None:
    """Else nobody would notice that the process that holds it, mostly rank 0, was stopped."""
    stopped, ended = threading.Event(), threading.Event()
    said: list[str] = []

    class Stopped(Store):
        def check(self, keys: list[str]) -> bool:
            stopped.wait(60)
            return False

    def end(why: str, publish: bool) -> None:
        said.append(why)
        ended.set()

    watched = watchdog.Watchdog(Stopped(), 0, 2, patience=0.03)
    with patch.object(watched, "_end", end):
        watched.begin("a unit")
        assert ended.wait(20)
        watched.end()
        stopped.set()
        time.sleep(0.1)
    assert "has not answered rank 0" in said[0]
    assert "rank 0 or the launcher of the first node, was stopped" in said[0]


def test_a_rank_whose_engine_is_gone_owes_no_sign() -> None:
    """It may prepare data for hours before it makes another engine, for which the others wait."""
    store = Store()
    watched = watchdog.Watchdog(store, 0, 2, patience=0.03)
    end = time.monotonic() + 20
    while "zeromesh/signs/0" not in store and time.monotonic() < end:
        time.sleep(0.01)
    assert "zeromesh/signs/0" in store
    del watched
    while store["zeromesh/signs/0"] and time.monotonic() < end:
        time.sleep(0.01)
    assert store["zeromesh/signs/0"] == ""


@pytest.mark.full
def test_a_rank_that_is_alone_in_a_barrier_of_its_own_ends_the_run() -> None:
    said = "".join(outcome.output for outcome in spawn_ranks(one_rank_calls_a_barrier, 2, timeout=30))
    assert "every rank has waited" in said
    assert "barrier of the program's own, at " in said
    assert "parameters of unit" in said


@pytest.mark.full
def test_the_watchdog_watches_over_mpi_too() -> None:
    with pytest.raises(RankFailure) as caught:
        run_mpi_ranks(one_rank_steps_while_the_other_runs_another_forward, 2, timeout=30)
    said = "".join(outcome.output for outcome in caught.value.outcomes)
    assert "every rank has waited" in said
    assert "rank 1 waits" in said
    assert "test_watchdog.py" in said


def test_a_slow_rank_is_waited_for() -> None:
    norms = run_ranks(one_rank_is_slow, 2)
    assert norms[0] == norms[1] > 0
