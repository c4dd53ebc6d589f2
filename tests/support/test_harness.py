from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from harness import (
    FOLDERS,
    Pool,
    RankFailure,
    mpi_pool,
    nursery,
    on_ranks,
    run_command,
    run_mpi_ranks,
    run_ranks,
    session_pool,
    spawn_ranks,
)


def total(value: float) -> tuple[torch.Tensor, int, dict[str, str]]:
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return tensor, os.getpid(), {name: os.environ[name] for name in names}


def raise_on(rank: int) -> None:
    dist.barrier()  # so that all are here when one raises
    if dist.get_rank() == rank:
        raise ZeroDivisionError(f"rank {rank} cannot divide")
    dist.barrier()


def hang_on(rank: int) -> None:
    print(f"rank {dist.get_rank()} is here")
    if dist.get_rank() == rank:
        wait_for_ever()
    dist.barrier()


def wait_for_ever() -> None:
    time.sleep(1000)


def kill_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        return "noticed"
    return "did not notice"


def kill_session(file: str, session: int) -> None:
    Path(file).write_text(str(os.getpid()))
    os.kill(session, signal.SIGKILL)
    time.sleep(1000)


def random_number() -> float:
    return torch.rand(()).item()


class Circle:
    def __init__(self) -> None:
        self.itself = self


left: list[weakref.ref[Circle]] = []


def leave_traces() -> None:
    left.append(weakref.ref(Circle()))
    sys.modules["left_behind"] = ModuleType("left_behind")  # what imports have made is not collected any more
    dist.new_group()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"


def traces() -> list[str]:
    found = {
        "groups": len(dist.distributed_c10d._world.pg_map) != 1,
        "dtype": torch.get_default_dtype() != torch.float32,
        "grad": not torch.is_grad_enabled(),
        "variable": "LEFT_BEHIND" in os.environ,
        "memory": left[-1]() is not None,
    }
    return [name for name, is_left in found.items() if is_left]


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


@pytest.mark.some(2)
@pytest.mark.parametrize("world_size", [4, 2, 1, 3])
def test_every_rank_computes_in_a_world_of_the_asked_size(world_size: int) -> None:
    results = run_ranks(total, world_size, 1.0)
    assert [tensor.item() for tensor, _, _ in results] == [world_size * (world_size + 1) / 2] * world_size
    for rank, (_, _, environment) in enumerate(results):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == str(world_size)
        assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert len({environment["MASTER_PORT"] for _, _, environment in results}) == 1
    pids = [pid for _, pid, _ in results]
    assert [pid for _, pid, _ in run_ranks(total, world_size, 1.0)] == pids, "workers are used again"
    assert os.getpid() not in pids


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks", timeout=60)
def test_tests_run_on_ranks_with_their_parameters_and_fixtures(ranks: int, tmp_path: Path) -> None:
    assert dist.get_world_size() == ranks
    (tmp_path / str(dist.get_rank())).touch()


@on_ranks(2)
def fails_on_the_second() -> None:
    answer = 41 + dist.get_rank()
    assert answer == 41


def test_a_failed_assertion_on_a_rank_shows_what_it_compared() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 raised(?s:.*)assert answer == 41(?s:.*)answer = 42"):
        fails_on_the_second()


@pytest.mark.full
def test_ranks_of_mpiexec_are_reused_fail_alike_and_are_started_again() -> None:
    first, second = (run_mpi_ranks(total, 2, 1.0) for _ in range(2))
    assert [tensor.item() for tensor, _, _ in first] == [3.0, 3.0]
    assert [pid for _, pid, _ in first] == [pid for _, pid, _ in second] == mpi_pool(2).pids
    for rank, (_, _, environment) in enumerate(first):
        assert environment["RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == "2"
    with pytest.raises(RankFailure) as caught:
        run_mpi_ranks(raise_on, 2, 1)
    assert caught.value.outcomes[1].kind == "raised"
    assert "ZeroDivisionError: rank 1 cannot divide" in str(caught.value)
    with pytest.raises(RankFailure) as caught:
        run_mpi_ranks(hang_on, 2, 0, timeout=1)
    assert "wait_for_ever" in caught.value.outcomes[0].text
    assert "rank 0 is here" in caught.value.outcomes[0].output
    assert [tensor.item() for tensor, _, _ in run_mpi_ranks(total, 2, 1.0)] == [3.0, 3.0]


def test_no_state_goes_from_call_to_call() -> None:
    first = run_ranks(random_number, 2)
    run_ranks(leave_traces, 2)
    assert run_ranks(random_number, 2) == first
    assert run_ranks(traces, 2) == [[]] * 2


def test_an_exception_fails_with_the_first_failure_first_and_the_next_call_works() -> None:
    with pytest.raises(RankFailure, match="rank 1 cannot divide") as failure:
        run_ranks(raise_on, 2, 1)
    message = str(failure.value)
    assert "raise_on failed" in message
    assert message.index("rank 1 raised") < message.index("rank 0 hung")
    assert "in raise_on" in message.split("rank 0 hung")[1]
    assert [tensor.item() for tensor, _, _ in run_ranks(total, 2, 1.0)] == [3.0] * 2


def test_a_hang_is_killed_and_shows_every_ranks_stack_and_output() -> None:
    pids = [pid for _, pid, _ in run_ranks(total, 2, 1.0)]
    with pytest.raises(RankFailure) as failure:
        run_ranks(hang_on, 2, 0, timeout=1)
    by_rank = {outcome.rank: outcome for outcome in failure.value.outcomes}
    assert "in wait_for_ever" in by_rank[0].text
    assert "in hang_on" in by_rank[1].text
    assert all(f"rank {rank} is here" in by_rank[rank].output for rank in (0, 1))
    assert all(by_rank[rank].text.strip() in str(failure.value) for rank in (0, 1))
    assert not any(alive(pid) for pid in pids)


@pytest.mark.full
def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 died ----\nkilled by SIGKILL"):
        run_ranks(kill_on, 2, 1)


@pytest.mark.full
def test_fresh_ranks_give_an_outcome_each() -> None:
    before = session_pool().pids
    outcomes = spawn_ranks(kill_on, 2, 0)
    assert [outcome.kind for outcome in outcomes] == ["died", "returned"]
    assert outcomes[1].value == "noticed"
    assert session_pool().pids == before


@pytest.mark.full
def test_a_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nursery()
    (tmp_path / "torch.py").write_text("raise ImportError('a torch that does not load')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OMP_DISPLAY_ENV", "false")  # which is read once: the worker is not forked
    with Pool() as pool, pytest.raises(RuntimeError, match="a torch that does not load"):
        pool.run(random_number, 1)


@pytest.mark.full
def test_workers_end_with_the_session_whatever_they_do(tmp_path: Path) -> None:
    code = (
        "import os, sys, harness, test_harness\n"
        "harness.session_pool().run(test_harness.kill_session, 1, (sys.argv[1], os.getpid()))"
    )
    file = tmp_path / "pid"
    finished = run_command([sys.executable, "-c", code, file], PYTHONPATH=os.pathsep.join(FOLDERS))
    assert finished.returncode == -signal.SIGKILL
    pid, limit = int(file.read_text()), time.monotonic() + 20
    while alive(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    if alive(pid):
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the worker outlives its session")


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)did not end in 1 s.*\d+") as failure:
        run_command(["sh", "-c", "sleep 1000 & echo $!; wait"], timeout=1)
    child, limit = int(str(failure.value).split()[-1]), time.monotonic() + 20
    while alive(child) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not alive(child)
