"""Messages over MPI: engines' collectives of every dtype, order, errors, and how ranks end."""

import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import mpiexec, run_command, run_mpi_ranks
from zeromesh import Mesh
from zeromesh.comm.collectives import Group
from zeromesh.comm.mesh import Links
from zeromesh.comm.mpi import backend as mpi

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.uint8, torch.bool)


def groups() -> list[Group]:
    """Return this rank's groups in a run of four: all ranks, and pairs."""
    mesh = Mesh({"data": 2, "tensor": 2}, torch.device("cpu"))
    return [mesh.group(axis) for axis in ("world", "data", "tensor")]


def move_every_dtype() -> int:
    moved = 0
    for group in groups():
        assert mpi.carries()
        assert type(group._carrier).__name__ == "MpiGroup"
        for dtype in DTYPES:
            for elements in (1, 24, 200_011):
                rows = [torch.arange(elements).mul(rank + 1).remainder(50).to(dtype) for rank in range(group.size)]
                full = torch.empty(group.size * elements, dtype=dtype)
                group.all_gather(full, rows[group.rank], 3).wait()
                for place, row in enumerate(rows):
                    arrived = full[place * elements : (place + 1) * elements]
                    assert torch.equal(arrived.view(torch.uint8), row.view(torch.uint8)), (dtype, elements)
                moved += 1
        values = torch.arange(5 * group.size).float()
        group.all_reduce(values, 5)
        assert torch.equal(values, torch.arange(5 * group.size).float() * group.size)
    return moved


def test_every_dtype_arrives_to_the_bit() -> None:
    assert min(run_mpi_ranks(move_every_dtype, 4)) == 3 * 3 * len(DTYPES)


def send_tags_out_of_order() -> None:
    world = groups()[0]
    target, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent = {tag: torch.full((200_000 if tag % 2 else 3,), 100.0 * world.rank + tag) for tag in range(10)}
    arrived = {tag: torch.empty_like(tensor) for tag, tensor in sent.items()}
    messages = [message for tag in sent for message in world._post([], [(target, sent[tag])], tag)]
    messages += [message for tag in reversed(sent) for message in world._post([(source, arrived[tag])], [], tag)]
    for index in torch.randperm(len(messages), generator=torch.Generator().manual_seed(world.rank)).tolist():
        messages[index].wait()
    for tag, tensor in arrived.items():
        assert torch.equal(tensor, torch.full_like(tensor, 100.0 * source + tag)), tag
    with pytest.raises(ValueError, match="the tag is -3, but this MPI has room for 0 to"):
        world._post([], [(target, sent[0])], -3)


def wait_for_nothing() -> None:
    world = groups()[0]
    others = [rank for rank in range(world.size) if rank != world.rank]
    arrived = torch.zeros(world.size, 100_000)
    sent = torch.full((100_000,), float(world.rank + 1))
    messages = world._post([(r, arrived[r]) for r in others], [(r, sent) for r in others], 9)
    limit = time.monotonic() + 20
    while not all(message.done for message in messages) and time.monotonic() < limit:
        time.sleep(0.01)  # no call of MPI
    assert arrived.sum(1).tolist() == [0.0 if r == world.rank else 1e5 * (r + 1) for r in range(world.size)]


def many_meshes() -> None:
    """MPI has room for about two thousand communicators, so those that nobody uses must go."""
    for _ in range(30):
        mesh = Mesh({"data": 4}, torch.device("cpu"))
        assert mesh.group("data").exchange(torch.ones(1)).sum() == 4
    carried = mpi.group_of(dist.group.WORLD)
    assert mesh.group("data")._carrier is mesh.group("world")._carrier is carried


def stay_in_memory() -> None:
    mesh = Mesh({"data": 4}, torch.device("cpu"), Links(local=True))
    assert type(mesh.group("data")._carrier).__name__ == "LocalGroup"


@pytest.mark.parametrize("check", [send_tags_out_of_order, wait_for_nothing, many_meshes, stay_in_memory])
def test_messages_find_their_way_whatever_the_order(check: Callable[[], None]) -> None:
    run_mpi_ranks(check, 4)


def agree_on_a_master() -> None:
    assert len(mpi.hosts()) == dist.get_world_size()
    address, port = mpi.agree_on_master()
    assert address == "127.0.0.1"
    assert 0 < port < 65536
    assert mpi.rank_and_size() == (dist.get_rank(), dist.get_world_size())
    assert mpi.missing() == ""


def come_too_late() -> None:
    from zeromesh.comm.mpi.mpi_messages import runtime

    world = groups()[0]
    if world.rank == 0:
        message = world._post([(1, torch.empty(3))], [], 4)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "timeout", 0.3)
            with pytest.raises(RuntimeError, match=r"recv from rank 1, tag 4.*not done after 0.3 s.*a longer timeout"):
                message.wait()
    world.exchange(torch.ones(1))
    if world.rank == 1:
        world._post([], [(0, torch.ones(3))], 4)[0].wait()  # so that nothing is left under way


def send_too_much() -> None:
    world = groups()[0]
    if world.rank == 0:
        world._post([], [(1, torch.ones(100))], 4)[0].wait()
    elif world.rank == 1:
        with pytest.raises(RuntimeError, match=r"recv from rank 0.*failed: .*runcat"):
            world._post([(0, torch.ones(10))], [], 4)[0].wait()


def send_too_little() -> None:  # what MPI itself takes for right: a message that does not fill its memory
    world = groups()[0]
    if world.rank == 0:
        world._post([], [(1, torch.ones(5, dtype=torch.bfloat16))], 4)[0].wait()
    elif world.rank == 1:
        with pytest.raises(RuntimeError, match="rank 0 sent 10 bytes where 20 were expected; ranks must give"):
            world._post([(0, torch.ones(5))], [], 4)[0].wait()


def ask_by_two_threads() -> None:
    """Which ranks have ended: the message of one that has is taken by one of the threads, and the other goes on."""
    from zeromesh.comm.mpi.mpi_messages import LEFT, runtime

    notes, rank = runtime.notes, dist.get_rank()

    class Slow:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                answer = getattr(notes, name)(*args)
                time.sleep(0.2)  # until the other thread has asked, too
                return answer

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
        assert runtime.find_gone() == {rank}
    runtime._gone.clear()
    sending.Wait()


@pytest.mark.parametrize(
    "check", [agree_on_a_master, come_too_late, send_too_much, send_too_little, ask_by_two_threads]
)
def test_misuse_and_failures_are_reported(check: Callable[[], None]) -> None:
    run_mpi_ranks(check, 4)


def run_script(folder: Path, body: str, ranks: int = 2) -> tuple[int, str]:
    head = """
        import sys, time, torch, zeromesh
        import torch.distributed as dist
        from zeromesh.comm.mesh import Mesh

        zeromesh.init_distributed("mpi")
        rank = dist.get_rank()
        world = Mesh({"data": dist.get_world_size()}, torch.device("cpu")).group("data")
        world.exchange(torch.ones(1))
    """
    script = folder / "script.py"
    script.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    done = run_command([mpiexec(), "-n", str(ranks), sys.executable, script], PYTHONPATH=os.getcwd(), timeout=120)
    return done.returncode, done.stdout


RAISED = """
if rank == 1:
    raise ZeroDivisionError("what went wrong")
world.exchange(torch.ones(3))
"""
LEFT = """
if rank == 1:
    sys.exit(3)
world.exchange(torch.ones(3))
"""
KILLED = """
import os, signal
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
world.exchange(torch.ones(3))
"""
ONE_AFTER_THE_OTHER = """
if rank == 1:
    time.sleep(2.5)
sent = {0: torch.full((100_000,), float(rank))} if rank else {}
received = {} if rank else {1: torch.empty(100_000)}
pending = world.send_and_receive(sent, received, 7, "a gathering")
if rank == 0:
    pending.wait()
    print("gathered", received[1][-1].item())
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "well", "parts"),
    [
        (RAISED, False, ("ZeroDivisionError: what went wrong",)),
        (LEFT, False, ("rank 1 ended after 0 updates; rank 0 waits in update 1 (exchange over the axis data",)),
        (KILLED, False, ()),
        (ONE_AFTER_THE_OTHER, True, ("gathered 1.0",)),
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
