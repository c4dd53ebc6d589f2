"""Collectives over one axis: exact sums in the order of ranks, and exactly the bytes that the formulas name."""

import os
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import on_ranks, run_ranks
from zeromesh import Mesh
from zeromesh.base.axes import AXES
from zeromesh.comm.mesh import Links
from zeromesh.comm.ordered_sums import SumPlace

CPU = torch.device("cpu")
LENGTH = 5
"""Elements of a shard."""

Result = dict[str, Any]


def values(rank: int, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randn(elements, generator=generator, dtype=torch.float64)
    return (wide * 10.0 ** torch.randint(-3, 4, (elements,), generator=generator)).to(dtype)


def in_order(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = (total + part).to(dtype)
    return total


def line(ranks: int) -> Mesh:
    return Mesh({"data": ranks}, CPU)


def told_their_number(fn: Callable[..., Result], ranks: int, *args: Any) -> list[Result]:
    return run_ranks(fn, ranks, ranks, *args)


every_size = pytest.mark.parametrize("ranks", [1, 2, 3, 4])


def gather(ranks: int, alias: bool, dtype: torch.dtype) -> Result:
    group = line(ranks).shard
    full = torch.full((ranks * LENGTH,), 77, dtype=dtype)
    own = full.chunk(ranks)[group.rank] if alias else torch.empty(LENGTH, dtype=dtype)
    own.copy_(values(group.rank, LENGTH, dtype))
    pending = group.all_gather(full, own, 16)
    pending.wait()
    pending.wait()
    return {"full": full}


@every_size
@pytest.mark.parametrize("alias", [True, False])
def test_all_gather_puts_every_ranks_shard_in_its_place(ranks: int, alias: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        expected = torch.cat([values(rank, LENGTH, dtype) for rank in range(ranks)])
        assert all(torch.equal(result["full"], expected) for result in told_their_number(gather, ranks, alias, dtype))


def scatter(ranks: int) -> Result:  # all kinds of results: by (dtype of the buffer, dtype of the result, alias, add)
    group = line(ranks).shard
    found = {}
    for dtype, out_dtype in product((torch.float64, torch.float32, torch.bfloat16, torch.float16), repeat=2):
        for kind in ("fresh", "add", "alias"):
            if kind == "alias" and dtype != out_dtype:
                continue
            full = values(group.rank, ranks * LENGTH, dtype)
            received = torch.full((group.receive_elements(LENGTH),), float("nan"), dtype=dtype)
            out = torch.full((LENGTH,), 3.0, dtype=out_dtype)
            if kind == "alias":
                out = full.chunk(ranks)[group.rank]
            group.reduce_scatter(full, received, out, kind == "add", 16).wait()
            found[dtype, out_dtype, kind] = out.clone()
    return found


@every_size
def test_reduce_scatter_is_the_plain_sum_in_the_order_of_ranks(ranks: int) -> None:
    for rank, found in enumerate(told_their_number(scatter, ranks)):
        for (dtype, out_dtype, kind), out in found.items():
            parts = [values(other, ranks * LENGTH, dtype).chunk(ranks)[rank] for other in range(ranks)]
            total = parts[0] if ranks == 1 else in_order(parts, out_dtype)
            expected = in_order([torch.full((LENGTH,), 3.0), total] if kind == "add" else [total], out_dtype)
            assert torch.equal(out, expected), (rank, dtype, out_dtype, kind)


def overlapping(ranks: int) -> Result:
    group = line(ranks).shard
    fulls = [values(17 * number + group.rank, ranks * LENGTH) for number in range(6)]
    outs = [torch.empty(LENGTH) for _ in fulls]
    works = []
    for number, (full, out) in enumerate(zip(fulls, outs, strict=True)):
        received = torch.empty(group.receive_elements(LENGTH))
        works.append(group.reduce_scatter(full, received, out, False, 16 + 4 * number))
        gathered = torch.empty(ranks * LENGTH)
        works.append(group.all_gather(gathered, values(number, LENGTH), 17 + 4 * number))
    order = torch.randperm(len(works), generator=torch.Generator().manual_seed(group.rank)).tolist()
    for index in order:
        works[index].wait()
    return {"outs": outs}


def test_collectives_that_overlap_do_not_mix() -> None:
    for rank, found in enumerate(told_their_number(overlapping, 3)):
        for number, out in enumerate(found["outs"]):
            parts = [values(17 * number + other, 3 * LENGTH).chunk(3)[rank] for other in range(3)]
            assert torch.equal(out, in_order(parts, torch.float32))


LENGTHS = (1, 2, 7, 12, 25)
SUMMED_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def reduce_all(ranks: int) -> Result:
    group = line(ranks).shard
    found: Result = {}
    for dtype, length in product((torch.float64, torch.float32, torch.bfloat16, torch.float16), LENGTHS):
        tensor = values(group.rank, length, dtype)
        group.all_reduce(tensor, 16)
        found[dtype, length] = tensor
    return found


@every_size
def test_all_reduce_of_any_length_is_the_plain_sum_rounded_once(ranks: int) -> None:
    for found in told_their_number(reduce_all, ranks):
        for (dtype, length), total in found.items():
            parts = [values(rank, length, dtype) for rank in range(ranks)]
            expected = in_order(parts, SUMMED_IN.get(dtype, dtype)).to(dtype)
            assert torch.equal(total, expected), (dtype, length)


def tell(ranks: int) -> Result:
    group = line(ranks).shard
    rows = group.exchange(values(group.rank, 3))
    tensors = []
    for root in range(ranks):
        tensor = values(10 * root + group.rank, 4).view(2, 2)
        group.broadcast(tensor, root)
        tensors.append(tensor)
    group.broadcast(torch.empty(0))
    return {"rows": rows, "tensors": tensors}


def pass_on(ranks: int, through_host: bool) -> tuple[list[torch.Tensor], int]:
    mesh = line(ranks)
    group = mesh.shard
    group._through_host = through_host  # as on an accelerator without its own backend
    ahead, behind = (group.rank + 1) % ranks, (group.rank - 1) % ranks
    landings = [torch.zeros(3), torch.zeros(2, 3)]
    sends = [values(group.rank, 3), values(10 + group.rank, 6).view(2, 3)]
    one = group.send_and_receive({ahead: sends[0]}, {behind: landings[0]}, 8, "one way")
    other = group.send_and_receive({behind: sends[1]}, {ahead: landings[1]}, 9, "other way")
    for pending in (other, one):
        pending.wait()
    assert mesh.traffic.calls == {("one way", "data"): 1, ("other way", "data"): 1}
    return landings, sum(mesh.traffic.bytes.values())


@pytest.mark.parametrize("through_host", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_to_single_ranks_arrive_and_are_counted(ranks: int, through_host: bool) -> None:
    for rank, (landings, sent) in enumerate(run_ranks(pass_on, ranks, ranks, through_host)):
        assert torch.equal(landings[0], values((rank - 1) % ranks, 3))
        assert torch.equal(landings[1], values(10 + (rank + 1) % ranks, 6).view(2, 3))
        assert sent == 4 * 9


@every_size
def test_exchange_and_broadcast_tell_every_rank_the_same(ranks: int) -> None:
    for found in told_their_number(tell, ranks):
        assert torch.equal(found["rows"], torch.stack([values(rank, 3) for rank in range(ranks)]))
        for root, tensor in enumerate(found["tensors"]):
            assert torch.equal(tensor, values(10 * root + root, 4).view(2, 2))


def count(ranks: int) -> Result:
    mesh = line(ranks)
    group, sent = mesh.shard, {}

    def counted(name: str, action: Callable[[], Any]) -> None:
        mesh.traffic.reset()
        action()
        sent[name] = {kind: (mesh.traffic.calls[kind], size) for kind, size in mesh.traffic.bytes.items()}

    full, shard = torch.zeros(ranks * LENGTH), torch.zeros(LENGTH)
    narrow = full.bfloat16()
    received = torch.empty(group.receive_elements(LENGTH), dtype=torch.bfloat16)
    counted("gather", lambda: group.all_gather(full, shard, 16).wait())
    counted("scatter", lambda: group.reduce_scatter(narrow, received, shard, False, 16).wait())
    counted("reduce", lambda: group.all_reduce(full, 16))
    counted("odd reduce", lambda: group.all_reduce(torch.zeros(ranks * LENGTH - 1), 16))
    counted("exchange", lambda: group.exchange(torch.zeros(3, dtype=torch.float64)))
    counted("broadcast", lambda: group.broadcast(shard, ranks - 1))
    return sent


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_traffic_is_counted_as_what_the_formulas_say(ranks: int) -> None:
    gathered, scattered = ("all_gather", "data"), ("reduce_scatter", "data")
    volume = 4 * ranks * LENGTH
    once = volume * (ranks - 1) // ranks
    for rank, sent in enumerate(told_their_number(count, ranks)):
        assert sent["gather"] == {gathered: (1, once)}
        assert sent["scatter"] == {scattered: (1, once // 2)}
        assert sent["reduce"] == sent["odd reduce"] == {gathered: (1, once), scattered: (1, once)}
        assert sent["exchange"] == {("exchange", "data"): (1, 24 * (ranks - 1))}
        told = {("broadcast", "data"): (1, 4 * LENGTH * (ranks - 1))}
        assert sent["broadcast"] == (told if rank == ranks - 1 else {})


def test_one_rank_sends_nothing() -> None:
    assert not any(told_their_number(count, 1)[0].values())


def arrange(sizes: dict[str, int]) -> Result:
    mesh = Mesh(sizes, CPU)
    groups = {axis: mesh.group(axis) for axis in (*AXES, "world")}
    return {
        "members": {
            axis: group.exchange(torch.tensor([mesh.rank])).flatten().tolist() for axis, group in groups.items()
        },
        "ranks": {axis: group.rank for axis, group in groups.items()},
        "share": (mesh.data_rank, mesh.data_size),
        "traffic": mesh.traffic.bytes,
        "shortcuts": (mesh.shard is mesh.group("data"), mesh.replicate is mesh.group("replicate")),
    }


def test_the_groups_of_a_hybrid_mesh_are_its_rows_and_columns() -> None:
    for rank, found in enumerate(run_ranks(arrange, 4, {"replicate": 2, "data": 2})):
        row, column = rank // 2, rank % 2
        assert found["members"]["data"] == [2 * row, 2 * row + 1]
        assert found["members"]["replicate"] == [column, 2 + column]
        assert found["members"]["world"] == [0, 1, 2, 3]
        assert found["members"]["tensor"] == [rank]
        assert (found["ranks"]["replicate"], found["ranks"]["data"]) == (row, column)
        assert found["share"] == (rank, 4)
        assert found["shortcuts"] == (True, True)


@pytest.mark.parametrize(("axis", "share"), [("data", True), ("replicate", True), ("tensor", False)])
def test_one_axis_takes_all_ranks_and_only_two_axes_share_the_batch(axis: str, share: bool) -> None:
    for rank, found in enumerate(run_ranks(arrange, 2, {axis: 2})):
        assert found["members"] == {name: [0, 1] if name in (axis, "world") else [rank] for name in (*AXES, "world")}
        assert found["share"] == ((rank, 2) if share else (0, 1))


def test_three_axes_are_numbered_row_by_row() -> None:
    for rank, found in enumerate(run_ranks(arrange, 4, {"data": 2, "pipeline": 1, "tensor": 2})):
        assert found["members"]["tensor"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found["members"]["data"] == [rank % 2, rank % 2 + 2]
        assert found["share"] == (rank // 2, 2)


def hybrid(ranks: int) -> Result:
    mesh = Mesh({"replicate": 2, "data": 2}, CPU)
    full = values(mesh.rank, 2 * LENGTH)
    out, received = torch.empty(LENGTH), torch.empty(mesh.shard.receive_elements(LENGTH))
    mesh.shard.reduce_scatter(full, received, out, False, 16).wait()
    mesh.replicate.all_reduce(out, 17)
    return {"out": out, "bytes": dict(mesh.traffic.bytes)}


def test_sums_over_both_axes_of_a_hybrid_mesh_are_the_whole_sum_and_are_counted_apart() -> None:
    for rank, found in enumerate(told_their_number(hybrid, 4)):
        parts = [values(other, 2 * LENGTH).chunk(2)[rank % 2] for other in range(4)]
        rows = [in_order(parts[:2], torch.float32), in_order(parts[2:], torch.float32)]
        assert torch.equal(found["out"], in_order(rows, torch.float32))
        # An odd number of elements: the all-reduce pads it by one.
        half = 4 * (LENGTH + 1) // 2
        assert found["bytes"] == {
            ("reduce_scatter", "data"): 4 * LENGTH,
            ("reduce_scatter", "replicate"): half,
            ("all_gather", "replicate"): half,
        }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@on_ranks(4)
def test_meshes_of_equal_sizes_share_their_groups() -> None:
    two = [{"replicate": 2, "data": 2}, {"data": 2, "tensor": 2}]
    sizes = two * 3
    found = []
    for one in sizes:
        mesh = Mesh(one, CPU)
        assert mesh.shard.exchange(torch.tensor([mesh.rank])).numel() == 2
        found.append(len(os.listdir("/proc/self/fd")))
    assert found[2:] == found[1:2] * 4, found


@on_ranks(4)
def test_members_that_have_made_other_numbers_of_groups_make_a_mesh_together() -> None:
    """Between its members alone, torch would give a group another name on each of them, and they would wait."""
    if dist.get_rank() < 3:
        dist.new_group([0, 1, 2], use_local_synchronization=True)
    assert arrange({"data": 2, "tensor": 2})["members"]["data"] == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]


@on_ranks(4)
def test_groups_of_a_default_group_that_was_destroyed_are_not_used_again() -> None:
    before, found = dist.group.WORLD, [arrange({"replicate": 2, "data": 2})]
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    assert before is not dist.group.WORLD, "the old one is still held"
    first, second = [*found, arrange({"replicate": 2, "data": 2})]
    assert first == second


def refuse(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(sizes, CPU)


def test_a_mesh_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    run_ranks(refuse, 2, {"data": 2, "tensor": 3}, "data 2 x tensor 3 = 6 ranks, and the run has 2")
    run_ranks(refuse, 2, {"rows": 2}, "unknown mesh axis 'rows'.*replicate, data, pipeline")


@on_ranks(2)
def test_a_device_that_the_process_group_does_not_serve_is_refused() -> None:
    with pytest.raises(ValueError, match="no backend for tensors on xpu, only for .*cpu"):
        Mesh({"data": 2}, torch.device("xpu"))


@on_ranks(3)
def test_sums_need_memory_for_the_shards_of_others_unless_these_are_read_where_they_are() -> None:
    for local, expected in ((False, 2 * LENGTH), (None, 0)):
        mesh = Mesh({"data": 3}, CPU, Links(local=local))
        if local is None and mesh.shard.sums is not SumPlace.MEMORY:
            pytest.skip("ranks cannot read each other's memory here")
        assert mesh.shard.receive_elements(LENGTH) == expected
        assert mesh.replicate.receive_elements(LENGTH) == 0
