"""The backend mpi: every collective of every dtype, beside plain computation; order, errors, and how ranks end."""

import os
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

from harness import mpiexec, run_command, run_mpi_ranks
from zeromesh.comm.mpi import backend as mpi

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

REAL = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [
    *REAL, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
]  # fmt: skip
USUAL = [torch.float32, torch.bfloat16, torch.complex64, torch.bool]
SMALL, LARGE = 24, 3 * 4 * 20_011
"""Elements: of an all-reduce of one stage, and of one of several, with an odd number for each rank."""

OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def values(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank has: numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2 if dtype == torch.bool else 100, (elements,), generator=generator).to(dtype)
    wide = torch.randn(elements, generator=generator, dtype=torch.float64)
    if dtype.itemsize > 1:
        wide *= 10.0 ** torch.randint(-2, 3, (elements,), generator=generator)
    return wide.to(dtype)


def reduced(ranks: Sequence[int], elements: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    """In the order of ranks; 16 bits and less in fp32, rounded once."""
    narrow = dtype.is_floating_point and dtype.itemsize <= 2
    total, *rest = [values(r, elements, dtype).to(torch.float32 if narrow else dtype) for r in ranks]
    for part in rest:
        total = OPERATIONS[name](total, part)
    return (total / len(ranks) if name == "AVG" else total).to(dtype)


def operations(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["SUM", "AVG"]  # torch refuses the others
    if dtype.is_floating_point:
        return ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
    return [name for name in OPERATIONS if name != "AVG"]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8).view(-1), other.contiguous().view(torch.uint8).view(-1)
    )


def groups() -> list[tuple[Any, list[int]]]:
    world = dist.get_world_size()
    choices = [list(range(world)), [0, 2, 3], [1, 3], [0, 1], [2]]
    made = [(dist.new_group(ranks), ranks) for ranks in choices if max(ranks) < world]
    return [(group, ranks) for group, ranks in made if dist.get_rank() in ranks]


def every_reduction(dtypes: Sequence[torch.dtype]) -> int:
    done = 0
    for (group, ranks), dtype, elements in product(groups(), dtypes, (0, 1, SMALL, LARGE)):
        if elements in (0, 1) and dtype not in (torch.float32, torch.bool):
            continue
        for name in operations(dtype) if (elements, len(ranks)) == (SMALL, 4) else ["SUM"]:
            case, op = f"{name} {dtype} {elements} {ranks}", getattr(ReduceOp, name)
            own, expected = values(dist.get_rank(), elements, dtype), reduced(ranks, elements, dtype, name)
            tensor = own.clone()
            dist.all_reduce(tensor, op, group=group)
            assert same(tensor, expected), f"all_reduce {case}"
            tensor, root = own.clone(), ranks[-1]
            dist.reduce(tensor, root, op, group=group)
            assert same(tensor, expected if dist.get_rank() == root else own), f"reduce {case}"
            if elements % len(ranks):
                continue
            mine = slice(None) if elements == 0 else slice(*bounds(elements, len(ranks), group.rank()))
            out = torch.empty_like(expected[mine])
            dist.reduce_scatter_tensor(out, own, op, group=group)
            assert same(out, expected[mine]), f"reduce_scatter_tensor {case}"
            parts = [own[slice(*bounds(elements, len(ranks), rank))] for rank in range(len(ranks))]
            out.zero_()
            dist.reduce_scatter(out, parts, op, group=group)
            assert same(out, expected[mine]), f"reduce_scatter {case}"
            done += 1
    return done


def bounds(elements: int, ranks: int, rank: int) -> tuple[int, int]:
    return elements // ranks * rank, elements // ranks * (rank + 1)


@pytest.mark.parametrize(
    ("dtypes", "least"), [(USUAL, 20), pytest.param(DTYPES, 60, marks=pytest.mark.full)], ids=["usual", "all"]
)
def test_every_reduction_is_the_one_of_one_process_bit_for_bit(dtypes: Sequence[torch.dtype], least: int) -> None:
    assert min(run_mpi_ranks(every_reduction, 4, dtypes)) > least


def every_movement() -> int:
    done = 0
    for (group, ranks), dtype, elements in product(groups(), DTYPES, (0, 1, SMALL, LARGE)):
        if elements in (0, 1) and dtype not in (torch.float32, torch.bool):
            continue
        case, rank, size = f"{dtype} {elements} {ranks}", dist.get_rank(), len(ranks)
        own, all_of_it = values(rank, elements, dtype), [values(r, elements, dtype) for r in ranks]
        for root in ranks[:: max(1, size - 1)]:
            tensor = own.clone()
            dist.broadcast(tensor, root, group=group)
            assert same(tensor, values(root, elements, dtype)), f"broadcast {case}"
            rows = [torch.empty_like(own) for _ in ranks]
            dist.gather(own, rows if rank == root else None, root, group=group)
            assert rank != root or all(map(same, rows, all_of_it)), f"gather {case}"
            tensor = torch.empty_like(own)
            dist.scatter(tensor, all_of_it if rank == root else None, root, group=group)
            assert same(tensor, own), f"scatter {case}"
        rows = [torch.empty_like(own) for _ in ranks]
        dist.all_gather(rows, own, group=group)
        assert all(map(same, rows, all_of_it)), f"all_gather {case}"
        full = torch.empty(size * elements, dtype=dtype)
        dist.all_gather_into_tensor(full, own, group=group)
        assert same(full, torch.cat([part.view(torch.uint8) for part in all_of_it]).view(dtype)), f"into {case}"
        sent = [values(10 * rank + other, elements + group.rank(), dtype) for other in ranks]
        got = [torch.empty(elements + other, dtype=dtype) for other in range(size)]
        dist.all_to_all(got, sent, group=group)
        expected = [values(10 * r + rank, elements + i, dtype) for i, r in enumerate(ranks)]
        assert all(map(same, got, expected)), f"all_to_all {case}"
        done += 1
    return done


@pytest.mark.full
def test_every_movement_brings_every_dtype_to_the_bit() -> None:
    assert min(run_mpi_ranks(every_movement, 4)) > 40


def uneven() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Rank r sends (r + target) % 3 rows of two to each.
    sent = [(rank + target) % 3 for target in range(size)]
    received = [(source + rank) % 3 for source in range(size)]
    full = torch.arange(2 * sum(sent)).view(-1, 2) + 1000 * rank
    out = torch.empty(sum(received), 2, dtype=torch.int64)
    dist.all_to_all_single(out, full, received, sent)
    expected = []
    for source in range(size):
        before = sum((source + target) % 3 for target in range(rank))
        rows = torch.arange(2 * before, 2 * (before + (source + rank) % 3)).view(-1, 2) + 1000 * source
        expected.append(rows)
    assert torch.equal(out, torch.cat(expected))
    with pytest.raises(ValueError, match="the input has 4 rows, which the split sizes .* do not divide"):
        dist.all_to_all_single(torch.empty(4), torch.empty(4), [1] * size, [2] * size)


def views() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    strided = torch.zeros(6, 4).t()
    strided.copy_(torch.full((4, 6), float(rank)))
    rows = [torch.zeros(6, 4).t() for _ in range(size)]
    dist.all_gather(rows, strided)
    assert all(torch.equal(row, torch.full((4, 6), float(r))) for r, row in enumerate(rows))
    wide = torch.zeros(8, 3)[::2]
    dist.all_gather_into_tensor(torch_out := torch.zeros(4 * size, 6)[:, ::2], wide.fill_(rank))
    assert torch.equal(torch_out[:, 0], torch.arange(size).float().repeat_interleave(4))
    every_other = torch.arange(2 * 50_000, dtype=torch.float32)[::2]
    dist.all_reduce(every_other)
    assert torch.equal(every_other, size * torch.arange(0, 2 * 50_000, 2, dtype=torch.float32))
    negated = torch.full((3,), complex(1, rank)).conj().imag
    dist.broadcast(negated, 1)
    assert negated.is_neg()
    assert negated.tolist() == [-1.0] * 3
    parameter = nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(parameter, 2)
    assert parameter.tolist() == [2.0] * 3
    several = [torch.full((3,), float(rank)), torch.full((2, 2), 10.0 * rank)]
    dist.all_reduce_coalesced(several)
    assert several[0].tolist() == [6.0] * 3
    assert several[1].flatten().tolist() == [60.0] * 4


@pytest.mark.parametrize("check", [uneven, views])
def test_strided_and_uneven_tensors_arrive(check: Callable[[], None]) -> None:
    run_mpi_ranks(check, 4)


def waits_in_other_orders() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = [group for group in pairs if group != dist.GroupMember.NON_GROUP_MEMBER]
    tensors = [torch.full((50_000,), float(index + rank)) for index in range(12)]
    works = []
    for index, tensor in enumerate(tensors):
        group = None if index % 3 == 0 else mine[index % 2]
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
        time.sleep(0.002 * (rank + index) % 0.005)
    for index in torch.randperm(len(works), generator=torch.Generator().manual_seed(rank)).tolist():
        works[index].wait()
        assert works[index].is_completed()
        group = None if index % 3 == 0 else mine[index % 2]
        ranks = range(size) if group is None else dist.get_process_group_ranks(group)
        assert torch.equal(tensors[index], torch.full((50_000,), float(sum(index + r for r in ranks)))), index
    return [tensor[0].item() for tensor in tensors]


def nobody_waits() -> None:
    tensor = torch.full((100_000,), float(dist.get_rank()))
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0][0].item() + 1)
    limit = time.monotonic() + 20
    while not future.done() and time.monotonic() < limit:
        time.sleep(0.01)  # no call of MPI
    assert future.value() == 7.0


def tags_out_of_order() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    target, source = (rank + 1) % size, (rank - 1) % size
    sent = {tag: torch.full((200_000 if tag % 2 else 3,), 100.0 * rank + tag) for tag in range(10)}
    got = {tag: torch.empty_like(tensor) for tag, tensor in sent.items()}
    works = [dist.isend(tensor, target, tag=tag) for tag, tensor in sent.items()]
    works += [dist.irecv(got[tag], source, tag=tag) for tag in reversed(range(10))]
    for work in works:
        work.wait()
    for tag, tensor in got.items():
        assert torch.equal(tensor, torch.full_like(tensor, 100.0 * source + tag)), tag
    with pytest.raises(ValueError, match="the tag is -3"):
        dist.isend(sent[0], target, tag=-3)


def begun_by_who_issues_them() -> None:
    """Else two collectives could be numbered in another order on one rank, and messages of one tag change places."""
    from zeromesh.comm.mpi.programs import Programs
    from zeromesh.comm.mpi.work import runtime

    class Hurried(dict[int, Any]):
        def __setitem__(self, number: int, work: Any) -> None:
            super().__setitem__(number, work)
            looking = threading.Thread(target=runtime.advance)
            looking.start()
            looking.join()

    begun, tag = [], Programs.tag
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "tag", lambda self: begun.append(threading.current_thread()) or tag(self))
        patch.setattr(runtime, "_pending", Hurried())
        works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
    assert set(begun) == {threading.current_thread()}


@pytest.mark.parametrize("check", [waits_in_other_orders, nobody_waits, tags_out_of_order, begun_by_who_issues_them])
def test_messages_find_their_way_whatever_the_order(check: Callable[[], None]) -> None:
    run_mpi_ranks(check, 4)


def torch_on_top() -> None:
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert (dist.get_backend(), world.size(), world.rank(), world.name()) == ("mpi", size, rank, "mpi")
    assert "cpu:mpi" in dist.get_backend_config()
    mesh = init_device_mesh("cpu", (2, 2))
    assert [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()] == [
        [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    ]  # fmt: skip
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, {"rank": rank})
    assert everything == [{"rank": r} for r in range(size)]
    part, _ = dist.new_subgroups(2)
    assert dist.get_global_rank(part, 1) == rank // 2 * 2 + 1
    assert functional.all_reduce(torch.ones(2), "sum", world).tolist() == [4.0, 4.0]
    assert functional.all_gather_tensor(torch.ones(1) * rank, 0, world).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, world).tolist() == [4.0 * rank]
    assert functional.all_to_all_single(torch.arange(4.0), None, None, world).tolist() == [rank] * 4
    losses = []
    for wrap in (nn.parallel.DistributedDataParallel, fully_shard, lambda model: model):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 8))
        data = torch.randn(size, 5, 8)
        wrapped = wrap(model) or model
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        whole = len(losses) == 2
        for _ in range(3):
            loss = wrapped(data if whole else data[rank]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = loss.detach().clone()
        dist.all_reduce(loss, ReduceOp.AVG)
        losses.append(loss.item())
    assert losses[:2] == pytest.approx([losses[2]] * 2, rel=1e-5)


def a_store_and_gloo_beside() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = mpi.store()
    store.set(f"key {rank}", str(rank))
    assert store.get(f"key {(rank + 1) % size}") == str((rank + 1) % size).encode()
    beside = dist.new_group(backend="gloo")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=beside)
    assert (tensor.tolist(), dist.get_backend(beside)) == ([4.0] * 3, "gloo")
    assert len(mpi.hosts()) == size
    address, port = mpi.agree_on_master()
    assert address == "127.0.0.1"
    assert 0 < port < 65536
    assert mpi.rank_and_size() == (rank, size)
    assert mpi.missing() == ""


def state_from_one_rank() -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model = nn.Linear(7, 33)
    fully_shard(model)
    state = {"model": model.state_dict()}
    checkpoint.async_save(state, checkpoint_id=folder[0]).result()
    before = model.weight.full_tensor().clone()
    full = {"weight": torch.full((33, 7), 2.0), "bias": torch.full((33,), 3.0)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    assert torch.equal(model.weight.full_tensor(), torch.full((33, 7), 2.0))
    checkpoint.load(state, checkpoint_id=folder[0])
    assert torch.equal(model.weight.full_tensor(), before)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def destroyed_while_under_way() -> None:
    for _ in range(10):
        tensors = [torch.ones(200_000) for _ in range(4)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        dist.destroy_process_group()
        dist.init_process_group("mpi")
        for work, tensor in zip(works, tensors, strict=True):
            work.wait(timedelta(seconds=10))
            assert torch.equal(tensor, torch.full_like(tensor, 4.0))


@pytest.mark.parametrize(
    "check", [torch_on_top, a_store_and_gloo_beside, state_from_one_rank, destroyed_while_under_way]
)
def test_torch_takes_it_for_its_own(check: Callable[[], None]) -> None:
    run_mpi_ranks(check, 4)


def bad_calls() -> None:
    world, size = dist.group.WORLD, dist.get_world_size()
    with pytest.raises(ValueError, match="on meta of shape .* moves dense tensors in host memory"):
        dist.all_reduce(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="sparse"):
        world.allreduce([torch.eye(3).to_sparse()])
    with pytest.raises(ValueError, match="10 elements of .*, the small one 3"):
        dist.all_gather_into_tensor(torch.empty(10), torch.empty(3))
    with pytest.raises(ValueError, match="bfloat16, the small one"):
        dist.reduce_scatter_tensor(torch.empty(3), torch.empty(3 * size, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="torch.int64 has no reduction AVG"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64), ReduceOp.AVG)
    with pytest.raises(ValueError, match="4 ranks"):
        world.allgather([[torch.empty(3)]], [torch.empty(3)])
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 3


def too_late() -> None:
    rank = dist.get_rank()
    if rank == 0:
        work = dist.irecv(torch.empty(3), 1)
        with pytest.raises(
            RuntimeError, match="recv from rank 1.*ranks 0, 1, 2, 3.*not done after 0.3 s.*a longer timeout"
        ):
            work.wait(timedelta(seconds=0.3))
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(3), 0)  # so that nothing is left under way


def unlike() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(100), 1)
    elif dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="recv from rank 0.*failed: .*runcat"):
            dist.recv(torch.ones(10), 0)


def too_short() -> None:  # what MPI itself takes for right: a message that does not fill what it is received into
    if dist.get_rank() == 0:
        dist.send(torch.ones(5, dtype=torch.bfloat16), 1)
    elif dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="rank 0 sent 10 bytes where 20 were expected; ranks must give"):
            dist.recv(torch.ones(5), 0)


def interrupted() -> None:
    from zeromesh.comm.mpi.work import MpiWork, Program

    def program() -> Program:
        raise KeyboardInterrupt
        yield

    work = MpiWork("a work", program(), 1, [], "one rank")
    with pytest.raises(KeyboardInterrupt):
        work.advance()
    work.advance()
    assert work.done
    assert not work.is_success()


def asked_by_two_threads() -> None:
    """Which ranks have ended: the message of one that has is taken by one of the threads, and the other goes on."""
    from zeromesh.comm.mpi.work import LEFT, runtime

    notes, rank = runtime.notes, dist.get_rank()

    class Slow:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                found = getattr(notes, name)(*args)
                time.sleep(0.2)  # until the other thread has asked, too
                return found

            return call

    sending = notes.Isend([None, 0, "B"], rank, LEFT)
    while not notes.Iprobe(rank, LEFT):
        time.sleep(0.001)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "notes", Slow())
        threads = [threading.Thread(target=runtime.find_gone, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)
        assert runtime.gone == {rank}
    runtime.gone.clear()
    sending.Wait()


@pytest.mark.parametrize("check", [bad_calls, too_late, unlike, too_short, interrupted, asked_by_two_threads])
def test_misuse_and_failures_are_reported(check: Callable[[], None]) -> None:
    run_mpi_ranks(check, 4)


def run_script(folder: Path, body: str, ranks: int = 2) -> tuple[int, str]:
    head = """
        import sys, time, torch
        import torch.distributed as dist
        from zeromesh.comm.mpi import backend as mpi
        mpi.install()
        dist.init_process_group("mpi")
        rank = dist.get_rank()
        dist.barrier()
    """
    script = folder / "script.py"
    script.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    done = run_command([mpiexec(), "-n", str(ranks), sys.executable, script], PYTHONPATH=os.getcwd(), timeout=120)
    return done.returncode, done.stdout


RAISED = """
if rank == 1:
    raise ZeroDivisionError("what went wrong")
dist.all_reduce(torch.ones(3))
"""
LEFT = """
if rank == 1:
    sys.exit(3)
dist.all_reduce(torch.ones(3))
"""
KILLED = """
import os, signal
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(3))
"""
ONE_AFTER_THE_OTHER = """
if rank == 1:
    time.sleep(2.5)
rows = [torch.empty(100_000) for _ in range(2)] if rank == 0 else None
work = dist.gather(torch.full((100_000,), float(rank)), rows, 0, async_op=True)
if rank == 0:
    work.wait()
    print("gathered", [row[-1].item() for row in rows])
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "well", "parts"),
    [
        (RAISED, False, ("ZeroDivisionError: what went wrong",)),
        (LEFT, False, ("all_reduce on mpi", "waits for rank 1, which has ended")),
        (KILLED, False, ()),
        (ONE_AFTER_THE_OTHER, True, ("gathered [0.0, 1.0]",)),
    ],
)
def test_a_rank_that_ends_early_ends_all_and_what_is_shown_is_why(body, well, parts, tmp_path) -> None:
    status, said = run_script(tmp_path, body)
    assert (status == 0) == well, said
    assert all(part in said for part in parts), said
    assert said.count("Traceback") == 1 or body != RAISED


def test_the_reason_of_an_abort_is_read_first() -> None:
    reads, writes = os.pipe()
    try:
        os.write(writes, b"why")
        reader = threading.Timer(0.1, os.read, (reads, 100))
        reader.start()
        mpi.await_readers([writes])
        os.set_blocking(reads, False)
        with pytest.raises(BlockingIOError):
            os.read(reads, 100)
        reader.join()
    finally:
        os.close(reads)
        os.close(writes)


def test_an_abort_does_not_wait_for_ever_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    monkeypatch.setattr(mpi, "READERS", 0.05)
    os.write(writes, b"why")
    mpi.await_readers([writes])
    assert os.read(reads, 100) == b"why"
    os.close(reads)
    os.close(writes)
    mpi.await_readers([writes])
