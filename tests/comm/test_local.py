"""Messages between ranks of one machine go from memory to memory, whole and in order, and fail when a rank ends."""

import gc
import os
import random
import signal
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from harness import RankFailure, on_ranks, run_ranks
from run import Interruption
from zeromesh import Mesh
from zeromesh.base.kernels.native import library
from zeromesh.comm import local
from zeromesh.comm.collectives import Group, PeerLost
from zeromesh.comm.local import LocalGroup, Transport, transport
from zeromesh.comm.mesh import Links
from zeromesh.comm.ordered_sums import accumulate
from zeromesh.comm.traffic import Traffic

CPU = torch.device("cpu")
native = library()
if native is None or not native.has_links:
    pytest.skip("there is no native library, or this is not Linux", allow_module_level=True)


def group() -> LocalGroup:
    found = LocalGroup.of(transport(required=True), dist.group.WORLD)
    assert found is not None
    return found


@on_ranks(3)
def test_messages_of_any_size_and_order_arrive_whole() -> None:
    rank, world = dist.get_rank(), group()
    # Of each rank to each other one, 60 messages under 5 tags; receivers ask for tags in another order than senders.
    lengths = [0, 1, 27, 28, 5000, 70000]  # 27 numbers of 8 bytes lie in a slot
    sizes = {
        (source, target, tag, number): random.Random(f"{source} {target} {tag} {number}").choice(lengths)
        for source in range(3) for target in range(3) for tag in range(5) for number in range(12)
    }  # fmt: skip
    mine = [key for key in sizes if key[0] == rank and key[1] != rank]
    theirs = [key for key in sizes if key[1] == rank and key[0] != rank]
    order = random.Random(rank)
    for keys in (mine, theirs):  # in any order of tags, but in the order of numbers
        shuffled = sorted(order.sample(keys, len(keys)), key=lambda key: key[3])
        keys[:] = shuffled
    sent = {key: torch.full((sizes[key],), hash(key) % 1000003, dtype=torch.int64) for key in mine}
    works = [work for key in mine[:100] for work in world.post([], [(key[1], sent[key])], key[2])]
    received = {key: torch.empty(sizes[key], dtype=torch.int64) for key in theirs}
    works += [work for key in theirs for work in world.post([(key[0], received[key])], [], key[2])]
    works += [work for key in mine[100:] for work in world.post([], [(key[1], sent[key])], key[2])]
    order.shuffle(works)
    for work in works:
        work.wait()
    for key, tensor in received.items():
        assert (tensor == hash(key) % 1000003).all(), key


@on_ranks(2)
def test_more_messages_than_there_are_slots_wait_at_the_sender() -> None:
    rank, world = dist.get_rank(), group()
    values = torch.arange(9000.0)
    landings = [torch.empty(1) for _ in values]
    sends = [work for value in values for work in world.post([], [(1 - rank, value + torch.zeros(1))], 3)]
    dist.barrier()
    for landing in landings:
        world.post([(1 - rank, landing)], [], 3)[0].wait()
    for work in sends:
        work.wait()
    assert torch.equal(torch.cat(landings), values)


@on_ranks(2)
def test_messages_of_different_groups_are_not_taken_for_each_other() -> None:
    rank = dist.get_rank()
    groups = [LocalGroup.of(transport(True), dist.new_group([0, 1])) for _ in range(2)]
    found = [torch.empty(3), torch.empty(3)]
    works = [w for n in (1, 0) for w in groups[n].post([(1 - rank, found[n])], [], 1)]  # type: ignore[union-attr]
    works += [w for n in (0, 1) for w in groups[n].post([], [(1 - rank, torch.full((3,), n + 1.0))], 1)]  # type: ignore[union-attr]
    for work in works:
        work.wait()
    assert [tensor[0].item() for tensor in found] == [1.0, 2.0]


@on_ranks(2)
def test_the_memory_of_a_message_that_nobody_waits_for_stays() -> None:
    rank, world = dist.get_rank(), group()
    for step in range(20):
        world.post([], [(1 - rank, torch.full((50000,), float(step)))], 2)
        gc.collect()
        torch.full((50000,), -1.0)  # takes memory that is free
        landing = torch.empty(50000)
        world.post([(1 - rank, landing)], [], 2)[0].wait()
        assert (landing == step).all()


@on_ranks(2)
def test_a_message_of_another_size_is_an_error_on_both_sides() -> None:
    rank, world = dist.get_rank(), group()
    for count in (3, 5000):
        tensor = torch.zeros(count + rank)
        work = world.post([(0, tensor)], [], 9) if rank else world.post([], [(1, tensor)], 9)
        if rank or count > 3:  # a short message is away before the other side asks for it
            with pytest.raises(RuntimeError, match="Message too long"):
                work[0].wait()


LENGTHS = (0, 1, 7, 8, 40, 4096, 3 * 65536 + 5)  # below and beyond the vectors of each processor, and several chunks
SUMS = (
    *((dtype, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
    *((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.float16, torch.float64)),
)


@on_ranks(3)
def test_sums_are_those_of_the_parts_in_the_order_of_ranks() -> None:
    rank, world = dist.get_rank(), group()
    others = [peer for peer in range(3) if peer != rank]
    for number, (length, (dtype, sums), add) in enumerate(product(LENGTHS, SUMS, (False, True))):
        parts = [torch.randn(length, generator=torch.Generator().manual_seed(peer)).to(dtype) for peer in range(3)]
        expected = torch.full((length + 2,), 0.3).to(sums)
        out = expected.clone()  # what lies beside the sum stays as it is
        accumulate(parts, expected[1:-1], add)
        works = [world.add_up(parts[rank].clone(), out[1:-1], add, number)]
        works += world.post([], [(peer, parts[rank]) for peer in others], number)
        if dtype == sums and not add:  # in place, too
            own = parts[rank].clone()
            works += [world.add_up(own, own, add, number), *world.post([], [(p, parts[rank]) for p in others], number)]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        assert torch.equal(out, expected), (length, dtype, sums, add)
        assert add or dtype != sums or torch.equal(own, expected[1:-1]), (length, dtype)


@on_ranks(2)
def test_numbers_that_have_no_sums_there_are_left_to_the_caller() -> None:
    mesh, rank = Mesh({"data": 2}, CPU), dist.get_rank()
    assert group().add_up(torch.ones(3, dtype=torch.int64), torch.ones(3), False, 1) is None
    out = torch.zeros(2, dtype=torch.int64)
    full = torch.arange(4) + rank
    mesh.shard.reduce_scatter(full, full.new_empty(0), out, False, 16).wait()
    assert out.tolist() == [4 * rank + 1, 4 * rank + 3]


@on_ranks(3)
def test_a_part_of_another_size_is_an_error_for_the_sum_and_for_all_who_sent_to_it() -> None:
    rank, world = dist.get_rank(), group()
    tensor = torch.ones(5001 if rank == 1 else 5000)
    works = [world.add_up(tensor, torch.empty(5000), False, 9)] if rank == 0 else world.post([], [(0, tensor)], 9)
    for work in works:
        with pytest.raises(RuntimeError, match="Message too long"):
            work.wait()  # type: ignore[union-attr]
    dist.barrier()


@on_ranks(3)
def test_a_rank_that_closes_is_an_error_for_sums_that_miss_its_part() -> None:
    rank, made = dist.get_rank(), Transport()
    if rank == 0:
        summing = made.add_up([1, 2], 0, 5, torch.ones(9000), torch.empty(9000), False)
        dist.barrier()
        with pytest.raises(RuntimeError, match="the sum of messages from ranks 1, 2: No such process"):
            summing.wait()
    elif rank == 1:
        sending = made.post(True, 0, 5, torch.ones(9000))
        dist.barrier()
        with pytest.raises(RuntimeError, match="No such process"):
            sending.wait()
    else:
        dist.barrier()
        with patch.object(local, "LEAVING", 10):
            made.close()
    dist.barrier()


@pytest.mark.full
@on_ranks(3, timeout=60)
def test_a_rank_whose_peer_has_given_up_a_sum_does_not_wait_for_it() -> None:
    rank, made = dist.get_rank(), Transport()
    world = Group("world", dist.group.WORLD, CPU, Traffic(), carrier=LocalGroup(made, dist.group.WORLD))
    if rank == 0:
        with patch.object(local, "LEAVING", 10):
            made.close()
    dist.barrier()
    for turn in (1, 2):  # rank 2 begins when rank 1 reads no more, and is still there
        if turn == rank:
            pending = world.reduce_scatter(torch.ones(3 * 9000), torch.empty(0), torch.empty(9000), False, 16)
            with pytest.raises(PeerLost, match="the sum of messages from ranks 0, .*No such process"):
                pending.wait()
        dist.barrier()


@on_ranks(2)
def test_the_memory_of_a_sum_that_nobody_waits_for_stays() -> None:
    rank, world = dist.get_rank(), group()
    out = torch.zeros(50000)
    world.add_up(torch.full((50000,), 2.0), out, False, 2)
    gc.collect()
    torch.full((50000,), -1.0)  # takes memory that is free
    dist.barrier()
    world.post([], [(1 - rank, torch.full((50000,), 3.0))], 2)[0].wait()
    while world._transport._dropped:
        world._transport._forget_dropped()
    assert (out == 5).all()


def wait_for_a_rank_that_is_killed() -> Any:
    rank, world = dist.get_rank(), group()
    pids: list[Any] = [None, None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        time.sleep(1)  # the others are ready
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for receives, sends in (([(0, torch.empty(9000))], []), ([], [(0, torch.empty(9000))])):
        try:
            world.post(receives, sends, 4)[0].wait()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_killed_rank_is_an_error_for_those_that_wait_for_it() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(wait_for_a_rank_that_is_killed, 3)
    said = [f"the message {way} rank 0: No such process" for way in ("from", "to")]
    assert [outcome.value for outcome in failure.value.outcomes[1:]] == [said, said]


def interrupt(*_: Any) -> None:
    raise Interruption


@on_ranks(2)
def test_a_signal_ends_a_wait_and_the_message_is_received_all_the_same() -> None:
    rank, world = dist.get_rank(), group()
    landing, before = torch.zeros(9000), signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(3):
            dist.barrier()
            if rank == 0:
                work = world.post([(1, landing)], [], 6)[0]
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                with pytest.raises(Interruption):
                    work.wait()
                del work
                dist.barrier()
                while world._transport._dropped:  # what was dropped is received, and forgotten, once
                    world._transport._forget_dropped()
                assert (landing == 1).all()
                landing.zero_()
            else:
                dist.barrier()  # the wait was interrupted
                world.post([], [(0, torch.ones(9000))], 6)[0].wait()
    finally:
        signal.signal(signal.SIGALRM, before)


@on_ranks(2)
def test_a_wait_ends_after_the_timeout_of_the_group() -> None:
    world = group()
    assert world._transport.timeout > 60
    if dist.get_rank() == 0:
        with (
            patch.object(world._transport, "timeout", 0.1),
            pytest.raises(RuntimeError, match="not there after the timeout of 0 s"),
        ):
            world.post([(1, torch.empty(3))], [], 6)[0].wait()
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_closes_is_an_error_for_those_that_wait_for_it() -> None:
    rank, made = dist.get_rank(), Transport()
    if rank == 0:
        late = made.post(True, 1, 5, torch.full((9000,), 7.0))
        made.post(True, 1, 6, torch.full((9,), 7.0))  # a short message is away
        with patch.object(local, "LEAVING", 10):
            made.close()
        with pytest.raises(RuntimeError, match="Cannot send after"):
            made.post(True, 1, 7, torch.zeros(1))
        assert late.handle
        dist.barrier()
    else:
        with pytest.raises(RuntimeError, match="the message from rank 0: No such process"):
            made.post(False, 0, 8, torch.empty(9000)).wait()
        dist.barrier()
        with pytest.raises(RuntimeError, match="the message from rank 0: No such process"):
            made.post(False, 0, 5, torch.empty(9000)).wait()  # its memory may be another's by now
        landing = torch.empty(9)
        made.post(False, 0, 6, landing).wait()
        assert (landing == 7).all()


@on_ranks(2)
def test_a_message_that_was_received_is_through_though_its_receiver_closes_at_once() -> None:
    for number in range(150):
        rank, link = dist.get_rank(), Transport()
        message = link.post(rank == 0, 1 - rank, number, torch.zeros(1 << 16))
        message.wait()
        link.close()


def apart(rank_of_other_machine: int) -> tuple[bool, float]:
    """Return whether the transport is used, and what an all-reduce gives, where one rank is on another machine."""
    rank = dist.get_rank()
    before = local.network_place
    local.network_place = (lambda: "elsewhere") if rank == rank_of_other_machine else before
    local._made.pop(dist.group.WORLD, None)
    try:
        mesh = Mesh({"data": 3}, CPU)
        with pytest.raises(ValueError, match="communication.local_memory is true, but not every rank can read"):
            transport(required=True)
        tensor = torch.full((5,), rank + 1.0)
        mesh.shard.all_reduce(tensor, 1)
        return mesh.shard._carrier is not None, tensor.sum().item()
    finally:
        local.network_place = before
        local._made.pop(dist.group.WORLD, None)


def test_ranks_of_other_machines_are_reached_by_the_backend() -> None:
    assert run_ranks(apart, 3, 1) == [(True, 30.0), (False, 30.0), (True, 30.0)]


@on_ranks(2)
def test_the_setting_turns_it_off() -> None:
    assert Mesh({"data": 2}, CPU, Links(local=False)).shard._carrier is None
    assert Mesh({"data": 2}, CPU, Links(local=True)).shard._carrier is not None


@on_ranks(2)
def test_bytes_that_others_have_copied_are_counted() -> None:
    mesh, before = Mesh({"data": 2}, CPU), local.bytes_sent()
    full = torch.zeros(2 * 3000)
    mesh.shard.all_gather(full, torch.ones(3000), 1).wait()
    dist.barrier()
    assert local.bytes_sent() - before == mesh.traffic.bytes["all_gather", "data"] == 12000


@on_ranks(2)
def test_links_of_groups_that_are_gone_leave_nothing() -> None:
    def opened() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:zeromesh")

    counts = []
    for _ in range(3):
        made = local.Transport()
        made.post(True, 1 - dist.get_rank(), 1, torch.zeros(5000))  # nobody receives it
        dist.barrier()
        with patch.object(local, "LEAVING", 10):
            del made
            gc.collect()
        counts.append(opened())
    assert len(set(counts)) == 1, counts


@on_ranks(2)
def test_a_fork_sends_nothing() -> None:
    world = group()
    child = os.fork()
    if child == 0:
        try:
            world.post([], [(1 - dist.get_rank(), torch.zeros(1))], 1)
        except RuntimeError as error:
            os._exit(7 if "forked process cannot" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
