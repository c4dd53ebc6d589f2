"""Collectives of the program's own that differ between ranks are named with their lines, in the mode that compares."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import spawn_ranks
from run import sgd, start_engine
from zeromesh.comm import calls, watchdog


def compared(case: str) -> float:
    watchdog.PATIENCE = 0.5
    engine = start_engine(nn.Linear(4, 4), debug={"collectives": True}, optimizer=sgd(0.1))
    rank = engine.mesh.rank
    total = torch.ones(3)
    for _ in range(4):
        dist.all_reduce(total)
    gathered: list[int] = [0, 0]
    dist.all_gather_object(gathered, rank)
    assert gathered == [0, 1]
    dist.barrier()
    if case == "another operation":
        dist.barrier() if rank else dist.all_reduce(total)
    elif case == "another shape":
        dist.all_reduce(torch.ones(2 + rank))
    elif case == "another dtype":
        dist.broadcast(torch.ones(2, dtype=torch.float64 if rank else torch.float32), 0)
    elif case == "one joins nothing":
        if rank == 0:
            dist.barrier()
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    return float(total[0])


LINES = {
    "another operation": ("rank 0 called all_reduce of torch.float32 (3,) at ", "rank 1 called barrier at "),
    "another shape": ("rank 0 called all_reduce of torch.float32 (2,) at ", "rank 1 called all_reduce of torch."),
    "another dtype": ("broadcast of torch.float32 (2,) at ", "broadcast of torch.float64 (2,) at "),
    "one joins nothing": ("rank 1 did not join barrier at ", "as collective ", "rank 1 waits for "),
}


@pytest.mark.parametrize(
    "case", [*list(LINES)[:1], *(pytest.param(case, marks=pytest.mark.full) for case in list(LINES)[1:])]
)
def test_the_lines_of_all_ranks_are_named_where_their_collectives_differ(case: str) -> None:
    outcomes = spawn_ranks(compared, 2, case, timeout=20)
    said = outcomes[0].text
    for line in LINES[case]:
        assert line in said, said
    assert said.count("test_calls.py:") >= 2
    if case != "one joins nothing":
        assert all("CollectiveMismatch" in outcome.text for outcome in outcomes)


@pytest.mark.full
def test_equal_collectives_do_what_they_do() -> None:
    assert [outcome.value for outcome in spawn_ranks(compared, 2, "equal", timeout=60)] == [16.0, 16.0]


def test_a_collective_that_a_tool_has_replaced_by_an_object_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in calls.CALLS:
        if hasattr(dist, name):
            monkeypatch.setattr(dist, name, getattr(dist, name))  # so that the test's end restores all of them
    said: list[object] = []
    monkeypatch.setattr(dist, "barrier", partial(lambda *args, **kwargs: said.append(kwargs), device_ids=None))
    calls.compare_calls(None, None, 1.0)
    once = dist.barrier
    calls.compare_calls(None, None, 1.0)
    assert dist.barrier is once
    dist.barrier(group=None)
    assert said == [{"device_ids": None, "group": None}]
