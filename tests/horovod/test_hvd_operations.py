"""Operations of ``zeromesh.horovod`` beside the same computation on tensors of all ranks at once."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zeromesh.horovod as hvd
from harness import on_ranks, run_ranks, spawn_ranks
from zeromesh.horovod import world as worlds

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


@contextlib.contextmanager
def world() -> Iterator[tuple[int, int]]:
    hvd.init()
    yield hvd.rank(), hvd.size()
    hvd.shutdown()


def part(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return what a rank has: small whole numbers, whose sums and products no dtype rounds."""
    generator = torch.Generator().manual_seed(rank)
    low, high = (0, 2) if dtype == torch.bool else (1, 4)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def reductions(parts: list[torch.Tensor]) -> dict[Any, torch.Tensor]:
    stack = torch.stack([one.double() for one in parts])
    dtype = parts[0].dtype
    found = {hvd.Sum: stack.sum(0), hvd.Min: stack.amin(0), hvd.Max: stack.amax(0), hvd.Product: stack.prod(0)}
    found[hvd.Average] = stack.mean(0) if dtype.is_floating_point else stack.mean(0).trunc()
    return {op: value.to(dtype) for op, value in found.items()}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Integers are equal; means of floating-point numbers may be rounded once more."""
    bound = torch.finfo(expected.dtype).eps if expected.dtype.is_floating_point else 0.0
    torch.testing.assert_close(found, expected, rtol=bound, atol=0.0)


def moves_of_every_dtype() -> None:
    with world() as (rank, size):
        for dtype in [*FLOATS, *INTEGERS, torch.bool]:
            parts = [part(one, 3, 2, dtype=dtype) for one in range(size)]
            for op, expected in reductions(parts).items():
                if dtype != torch.bool or op in (hvd.Min, hvd.Max, hvd.Product):
                    close(hvd.allreduce(parts[rank], op=op), expected)
            uneven = [part(one, one, 2, dtype=dtype) for one in range(size)]
            assert torch.equal(hvd.allgather(uneven[rank]), torch.cat(uneven))
            assert torch.equal(hvd.broadcast(parts[rank], size - 1), parts[-1])
            rows = [part(one, size * 2, 3, dtype=dtype) for one in range(size)]
            assert torch.equal(hvd.alltoall(rows[rank]), torch.cat([one[2 * rank : 2 * rank + 2] for one in rows]))
            if dtype == torch.bool:
                continue
            odd = [part(one, 2 * size + 1, 2, dtype=dtype) for one in range(size)]
            mine = hvd.reducescatter(odd[rank], op=hvd.Sum)
            start = rank * 2 + min(rank, 1)
            assert torch.equal(mine, reductions(odd)[hvd.Sum][start : start + 2 + (rank < 1)])


def test_operations_of_every_dtype_equal_those_on_all_ranks_tensors() -> None:
    run_ranks(moves_of_every_dtype, 3)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_operations_of_every_dtype_on_other_numbers_of_ranks(ranks: int) -> None:
    run_ranks(moves_of_every_dtype, ranks)


@on_ranks(3)
def test_scales_names_splits_and_compression() -> None:
    with world() as (rank, size):
        parts = [part(one, 5) / 3 for one in range(size)]
        total = torch.stack([one * 0.5 for one in parts]).sum(0)
        scaled = hvd.allreduce(parts[rank], op=hvd.Sum, name="a", prescale_factor=0.5, postscale_factor=4.0)
        torch.testing.assert_close(scaled, 4 * total)
        whole = torch.full((2,), 5 + rank)
        assert hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5).tolist() == [8, 8]  # 2 + 3 + 3
        assert hvd.allreduce(whole, average=False).tolist() == [18, 18]
        assert hvd.allreduce(torch.full((2,), -rank - 1 - (rank == 0)), op=hvd.Average).tolist() == [-2, -2]  # of -7/3
        halves = torch.stack([one.half() for one in parts]).sum(0)
        narrow = hvd.allreduce(parts[rank], op=hvd.Sum, compression=hvd.Compression.fp16)
        assert narrow.dtype == torch.float64
        torch.testing.assert_close(narrow, halves.double(), rtol=2**-10, atol=0.0)  # two sums, each rounded
        splits = [one for one in range(size)]
        rows = torch.arange(sum(splits)) + 10 * rank
        out, received = hvd.alltoall(rows, splits=torch.tensor(splits))
        assert received.tolist() == [rank] * size
        start = sum(range(rank))
        assert out.tolist() == [10 * one + start + row for one in range(size) for row in range(rank)]
        one, other = hvd.grouped_allreduce([parts[rank], whole.int()], op=hvd.Sum)
        torch.testing.assert_close(one, 2 * total)
        assert other.tolist() == [18, 18]
        scattered = hvd.grouped_reducescatter([torch.ones(size), torch.ones(size, 2)], op=hvd.Sum)
        assert [tuple(one.shape) for one in scattered] == [(1,), (1, 2)]
        assert hvd.allgather_object({"rank": rank}) == [{"rank": one} for one in range(size)]
        assert hvd.broadcast_object(rank, root_rank=1) == 1


@on_ranks(4)
def test_adasum_is_the_pairwise_formula() -> None:
    def pair(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        dot = (one * other).sum()
        return one * (1 - dot / (2 * one.norm() ** 2)) + other * (1 - dot / (2 * other.norm() ** 2))

    with world() as (rank, size):
        parts = [part(one, 6) for one in range(size)]
        expected = pair(pair(parts[0], parts[1]), pair(parts[2], parts[3]))
        torch.testing.assert_close(hvd.allreduce(parts[rank], op=hvd.Adasum), expected)
        # Gradients without a common direction add up, and equal ones average.
        own = torch.zeros(4, dtype=torch.float64)
        own[rank] = 1.0
        assert hvd.allreduce(own, op=hvd.Adasum).tolist() == [1.0] * 4
        torch.testing.assert_close(hvd.allreduce(parts[0], op=hvd.Adasum), parts[0])


@on_ranks(2)
def test_gradients_have_horovods_scales() -> None:
    with world() as (rank, size):
        weights = [part(10 + one, 4) for one in range(size)]

        def gradient(move: Any, *shape: int) -> torch.Tensor:
            leaf = part(rank, *shape).requires_grad_()
            out = move(leaf)
            (out * weights[rank][: out.shape[0]]).sum().backward()
            assert leaf.grad is not None
            return leaf.grad

        total = weights[0] + weights[1]
        assert torch.equal(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 4), total)
        assert torch.equal(gradient(hvd.allreduce, 4), total / 2)
        assert torch.equal(gradient(hvd.allgather, 2), (total / 2)[2 * rank : 2 * rank + 2])
        assert torch.equal(gradient(lambda x: hvd.broadcast(x, 1), 4), total / 2 if rank == 1 else 0 * total)
        back = torch.cat([weight[2 * rank : 2 * rank + 2] for weight in weights])
        assert torch.equal(gradient(hvd.alltoall, 4), back)
        scattered = torch.cat([weight[:2] for weight in weights])
        assert torch.equal(gradient(hvd.reducescatter, 4), scattered)
        assert torch.equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 4), 2 * scattered)
        with pytest.raises(NotImplementedError, match="op Max has no gradient"):
            gradient(lambda x: hvd.allreduce(x, op=hvd.Max), 4)


@on_ranks(3)
def test_names_match_operations_in_whatever_order_ranks_start_them() -> None:
    with world() as (rank, _):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(rank)).tolist()
        tensors = {number: torch.full((3,), float(number * (rank + 1))) for number in order}
        handles = {number: hvd.allreduce_async_(tensors[number], op=hvd.Sum, name=f"n{number}") for number in order}
        for number in sorted(handles):
            assert hvd.synchronize(handles[number]) is tensors[number]
            assert tensors[number].tolist() == [6.0 * number] * 3
            assert hvd.poll(handles[number])


@on_ranks(2)
def test_a_name_in_use_is_refused() -> None:
    with world() as (rank, _):
        if rank == 0:
            first = hvd.allreduce_async(torch.ones(1), name="twice")
            with pytest.raises(ValueError, match=r"allreduce.twice is in progress already"):
                hvd.allreduce_async(torch.ones(1), name="twice")
            hvd.barrier()
            assert hvd.synchronize(first).item() == 1
        else:
            hvd.barrier()
            assert hvd.allreduce(torch.ones(1), name="twice").item() == 1


@on_ranks(3)
def test_contradictions_are_errors_on_every_rank() -> None:
    with world() as (rank, _):
        one = torch.ones(2)
        for call, match in [
            (lambda: hvd.allreduce(torch.ones(2 + rank)), r"shapes must be the same.*\n  rank 0: \[\[2\]\]\n  rank 1"),
            (lambda: hvd.allreduce(one.double() if rank else one), "dtypes must be the same"),
            (lambda: hvd.allreduce(one, op=hvd.Sum if rank else hvd.Max), "rank 0: Max\n  rank 1: Sum"),
            (lambda: hvd.allreduce(one, prescale_factor=1.0 + rank), "prescale_factor must be the same"),
            (lambda: hvd.reducescatter(one, postscale_factor=1.0 + rank), "postscale_factor must be the same"),
            (lambda: hvd.broadcast(one, rank), "root_rank must be the same"),
            (lambda: hvd.broadcast(one, 7), "root_rank is 7, which is not among the ranks 0-2"),
            (lambda: hvd.allgather(torch.ones(1, 2 + rank)), "shapes after the first dimension must be the same"),
            (lambda: hvd.allgather(torch.tensor(1.0)), "a tensor has none; use tensor.reshape"),
            (lambda: hvd.alltoall(one), "first dimension, 2, cannot be divided by 3 ranks"),
            (lambda: hvd.alltoall(one, splits=[1, 1, 1 if rank == 1 else 0]), r"rank 1: splits is \[1, 1, 1\]"),
            (lambda: hvd.allreduce(one > 0), "op Average of bool has no meaning"),
            (lambda: hvd.allreduce(one, op=hvd.Adasum), "power of two of ranks, and there are 3"),
            (lambda: hvd.allreduce(one.to_sparse() if rank == 2 else one), "rank 2: sparse tensors"),
        ]:
            with pytest.raises(ValueError, match=match):
                call()
        assert hvd.allreduce(one).tolist() == [1.0, 1.0]  # the world goes on


@on_ranks(2)
def test_ranks_that_wait_for_each_other_are_told() -> None:
    with world() as (rank, _), pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1), name=f"only here {rank}")
    for one in range(2):
        line = f"rank {one} waits for allreduce.only here {one}, which rank {1 - one} did not call"
        assert line in str(caught.value)


@on_ranks(2)
def test_an_operation_of_a_rank_that_has_left_fails() -> None:
    hvd.init()
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    with pytest.raises(hvd.HorovodInternalError, match="rank 1 ended before: its program ended, or called shutdown"):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()


def reduce_beside_a_rank_that_dies(number: int, ready: Path) -> str:
    hvd.init()
    if hvd.rank() == number:
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    ready.touch()
    errors = []
    for _ in range(2):  # what comes later fails, too
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="left")
        errors.append(str(caught.value))
    assert errors[0][:40] == errors[1][:40]
    return errors[0]


@pytest.mark.parametrize("number", [0, 1])
def test_operations_that_need_a_rank_that_was_killed_fail(number: int, tmp_path: Path) -> None:
    outcomes = spawn_ranks(reduce_beside_a_rank_that_dies, 2, number, tmp_path / "ready")
    assert outcomes[number].kind == "died"
    expected = "rank 0, which keeps the ranks' messages, has ended" if number == 0 else "rank 1 ended before"
    assert outcomes[1 - number].value.startswith(f"allreduce.left: {expected}"), outcomes


@on_ranks(2)
def test_results_may_be_changed_in_place_and_in_inference_mode() -> None:
    with world():
        weight = torch.full((2,), 3.0, requires_grad=True)
        for call in (
            hvd.allreduce, hvd.allgather, hvd.alltoall, lambda x: hvd.broadcast(x, 0), hvd.reducescatter,
            lambda x: hvd.grouped_allreduce([x, x])[0], lambda x: hvd.synchronize(hvd.allreduce_async(x)),
            lambda x: hvd.synchronize(hvd.grouped_allreduce_async([x, x]))[1],
            lambda x: hvd.allreduce(x.detach(), op=hvd.Adasum),
        ):  # fmt: skip
            for needs in (False, True):
                found = call(torch.ones(2, requires_grad=needs))
                found *= weight[0]
                found.sum().backward()
        with torch.inference_mode():
            tensor = torch.ones(2)
            assert hvd.allreduce_(tensor, op=hvd.Sum).tolist() == [2.0, 2.0]
            assert hvd.allgather(hvd.broadcast_(tensor, 1)).tolist() == [2.0] * 4
            assert hvd.broadcast_object({"a": tensor})["a"].tolist() == [2.0, 2.0]


@on_ranks(2)
def test_a_result_that_cannot_be_written_is_an_error() -> None:
    with world():
        with pytest.raises(hvd.HorovodInternalError, match="more than one element of the written-to tensor"):
            hvd.allreduce_(torch.ones(1).expand(3))
        assert hvd.allreduce(torch.ones(1)).item() == 1


def test_groups_of_nccl_alone_get_gloo_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, backend: made.append((ranks, backend)))
    for given in ({"cuda": "nccl"}, {"cpu": "gloo", "cuda": "nccl"}, {"cpu": "gloo"}):
        monkeypatch.setattr(worlds, "backends", lambda given=given: given)
        worlds._new_group(range(2))
    assert made == [([0, 1], "cpu:gloo,cuda:nccl"), ([0, 1], None), ([0, 1], None)]


def test_variables_about_waits_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worlds._stall_limits() == (60.0, 0.0)
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "5")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "7.5")
    assert worlds._stall_limits() == (5.0, 7.5)
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    assert worlds._stall_limits() == (float("inf"), 7.5)
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "soon")
    with pytest.raises(ValueError, match="and 'soon', but must be numbers of seconds"):
        worlds._stall_limits()


@on_ranks(3)
def test_ranks_that_have_joined_contribute_zeros() -> None:
    with world() as (rank, size):
        for step in range(rank):
            taking_part = [one for one in range(size) if one > step]
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [len(taking_part)] * 2
            assert hvd.allreduce(torch.full((1,), 3.0)).item() == len(taking_part)  # the mean is over all ranks
        if rank == 2:
            with pytest.raises(ValueError, match=r"ranks 0-1 called join\(\), after which allgather"):
                hvd.allgather(torch.ones(1))
            with pytest.raises(ValueError, match="allreduce with op Min has no meaning"):
                hvd.allreduce(torch.ones(1), op=hvd.Min)
        assert hvd.join() == 2
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


def test_calls_before_init_name_the_remedy() -> None:
    for call in (hvd.rank, hvd.size, hvd.join, hvd.local_rank, hvd.barrier, hvd.cross_size, hvd.mpi_enabled):
        with pytest.raises(ValueError, match=rf"{call.__name__}\(\) was called before hvd.init\(\)"):
            call()
    with pytest.raises(ValueError, match=r"call hvd.init\(\) once"):
        hvd.allreduce(torch.ones(1))


@on_ranks(2)
def test_the_world_has_ranks_and_can_be_started_again() -> None:
    for _ in range(2):
        with world() as (rank, size):
            assert (size, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (2, rank, 2, 0, 1)
            assert hvd.is_homogeneous()
            assert hvd.is_initialized()
            assert hvd.gloo_enabled()
            assert not hvd.mpi_enabled()
            hvd.init()  # changes nothing
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"give a part of them as process_sets"):
        hvd.init(comm=[0])
    with pytest.raises(ValueError, match="average and op are both given"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match=r"op is 9, but must be hvd.Average, hvd.Sum"):
        hvd.allreduce(torch.ones(1), op=9)


@on_ranks(2)
def record_timelines(folder: str) -> None:
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    with world():
        hvd.allreduce(torch.ones(1), name="unseen")
        hvd.start_timeline(f"{folder}/started.json")
        hvd.allreduce(torch.ones(1), name="seen")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(1), name="unseen")
    os.environ["HOROVOD_TIMELINE"] = f"{folder}/whole.json"
    with world():
        hvd.allreduce(torch.ones(1), name="seen")
    del os.environ["HOROVOD_TIMELINE"]
    assert not Path("DYNAMIC").exists()


@pytest.mark.full
def test_the_timeline_has_the_operations_between_start_and_stop(tmp_path: Path) -> None:
    record_timelines(folder=str(tmp_path))
    for file in ("started.json", "whole.json"):
        events = json.loads((tmp_path / file).read_text())
        assert [event["name"] for event in events] == ["NEGOTIATE_ALLREDUCE", "allreduce.seen"]
        assert all(event["dur"] >= 0 and event["ph"] == "X" for event in events)


@on_ranks(2)
def init_after_a_late_rank(connected: Path) -> None:
    store = torch.distributed.PrefixStore
    clone, is_late = store.clone, int(os.environ["RANK"]) == 1

    def connect(self: torch.distributed.PrefixStore) -> torch.distributed.Store:
        time.sleep(is_late)
        found = clone(self)
        if is_late:
            connected.touch()
        return found

    with patch.object(store, "clone", connect):
        hvd.init()
    assert connected.exists()
    hvd.shutdown()


def test_init_returns_only_once_every_rank_has_connected(tmp_path: Path) -> None:
    # Rank 0 keeps the store: if it left before, the others would wait for a connection that never comes.
    init_after_a_late_rank(connected=tmp_path / "connected")
