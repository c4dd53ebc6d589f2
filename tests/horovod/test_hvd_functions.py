"""Each public function of ``zeromesh.horovod`` beside the same computation on the tensors of all ranks, on 1-4 ranks.

``CASES`` has one row for a function; ``ELSEWHERE`` names the modules with tests of the others.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zeromesh.horovod as hvd
from harness import run_ranks
from test_hvd_operations import close, part, reductions, world

Case = Callable[[int, int], None]
CASES: dict[str, Case] = {}

ELSEWHERE = {
    "test_hvd_optimizer": {"DistributedOptimizer", "SyncBatchNorm"},
    "test_hvd_script": {"elastic"},
    "test_hvd_sets": {"ProcessSet", "add_process_set", "get_process_set_ids_and_ranks", "remove_process_set"},
    "test_hvd_operations": {
        "HorovodInternalError", "Average", "Sum", "Adasum", "Min", "Max", "Product", "init", "shutdown",
        "is_initialized", "start_timeline", "stop_timeline",
    },
}  # fmt: skip


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def shapes(size: int) -> list[Callable[[int], torch.Tensor]]:
    """Tensors of a rank: usual, without dimensions, empty, transposed, every second column, and as images are kept."""
    return [
        lambda rank: part(rank, 3, 2),
        lambda rank: part(rank, 1)[0],
        lambda rank: part(rank, 0, 2),
        lambda rank: part(rank, 3, 4).t(),
        lambda rank: part(rank, 3, 4)[:, ::2],
        lambda rank: part(rank, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]


def equal(found: Any, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    close(found, expected)


def reduces(call: Callable[..., Any], in_place: bool, grouped: bool) -> Case:
    """Return a check of an allreduce in one of its variants: shapes, reductions, factors and names."""

    def check(rank: int, size: int) -> None:
        for number, make in enumerate(shapes(size)):
            every = [make(one) for one in range(size)]
            for op, expected in reductions(every).items():
                given = every[rank].clone(memory_format=torch.preserve_format)
                before = given.clone()
                result = call([given] if grouped else given, op=op, name=f"{number}.{op.name}")
                if "async" in call.__name__:
                    result = hvd.synchronize(result)
                found = result[0] if grouped else result
                assert (found is given) is in_place
                equal(found, expected)
                equal(given, expected if in_place else before)
        own, total = part(rank, 2), sum(part(one, 2) for one in range(size))
        scaled = call([own] if grouped else own, average=False, prescale_factor=0.5, postscale_factor=4.0)
        scaled = hvd.synchronize(scaled) if "async" in call.__name__ else scaled
        equal(scaled[0] if grouped else scaled, 2 * total)

    return check


for variant in ("", "_", "_async", "_async_"):
    for prefix in ("", "grouped_"):
        title = f"{prefix}allreduce{variant}"
        CASES[title] = reduces(getattr(hvd, title), variant.endswith("_"), bool(prefix))


def gradient_of(call: Callable[[torch.Tensor], Any], leaf: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    leaf = leaf.clone().requires_grad_()
    (call(leaf) * weight).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@case
def allgather(rank: int, size: int) -> None:
    rows = [part(one, one, 2) for one in range(size)]  # none on rank 0
    equal(hvd.allgather(rows[rank]), torch.cat(rows))
    equal(hvd.allgather(rows[rank], name="named"), torch.cat(rows))
    weights = [part(10 + one, sum(range(size)), 2) for one in range(size)]
    mean = torch.stack(weights).mean(0).split([len(one) for one in rows])[rank]
    equal(gradient_of(hvd.allgather, rows[rank], weights[rank]), mean)
    turned = torch.tensor([1 + 2j]).conj() * (rank + 1)
    equal(
        torch.view_as_real(hvd.allgather(turned.conj())),
        torch.view_as_real(torch.tensor([1 + 2j] * size) * torch.arange(1, size + 1)),
    )


@case
def allgather_async(rank: int, size: int) -> None:
    rows = [part(one, 3 - one % 2, 2, dtype=torch.uint8).t() for one in range(size)]
    rows = [row.t() for row in rows]
    equal(hvd.synchronize(hvd.allgather_async(rows[rank])), torch.cat(rows))


@case
def grouped_allgather(rank: int, size: int) -> None:
    one, other = [part(r, r + 1) for r in range(size)], [part(r, 2, 2, dtype=torch.int16) for r in range(size)]
    found = hvd.grouped_allgather([one[rank], other[rank]])
    equal(found[0], torch.cat(one))
    equal(found[1], torch.cat(other))
    weights = [part(10 + r, sum(range(size + 1))) for r in range(size)]
    mean = torch.stack(weights).mean(0).split([r + 1 for r in range(size)])[rank]
    equal(gradient_of(lambda leaf: hvd.grouped_allgather([leaf, leaf])[1], one[rank], weights[rank]), mean)
    assert hvd.grouped_allgather([]) == []


@case
def grouped_allgather_async(rank: int, size: int) -> None:
    rows = [part(r, r, 2) for r in range(size)]
    found = hvd.synchronize(hvd.grouped_allgather_async(tensors=[rows[rank], 2 * rows[rank]], name="g"))
    equal(found[1], 2 * torch.cat(rows))


def broadcasts(call: Callable[..., Any], in_place: bool) -> Case:
    def check(rank: int, size: int) -> None:
        for make in shapes(size):
            given = make(rank).clone(memory_format=torch.preserve_format)
            found = call(given, size - 1)
            found = hvd.synchronize(found) if "async" in call.__name__ else found
            assert (found is given) is in_place
            equal(found, make(size - 1))
            equal(given, make(size - 1 if in_place else rank))

    return check


for variant in ("_", "_async", "_async_"):
    CASES[f"broadcast{variant}"] = broadcasts(getattr(hvd, f"broadcast{variant}"), variant.endswith("_"))


@case
def broadcast(rank: int, size: int) -> None:
    broadcasts(hvd.broadcast, False)(rank, size)
    weights = [part(10 + one, 3) for one in range(size)]
    mean = torch.stack(weights).mean(0)
    found = gradient_of(lambda leaf: hvd.broadcast(leaf, 0), part(rank, 3), weights[rank])
    equal(found, mean if rank == 0 else torch.zeros(3, dtype=torch.float64))


@case
def alltoall(rank: int, size: int) -> None:
    rows = [part(one, 2 * size, 3) for one in range(size)]
    equal(hvd.alltoall(rows[rank]), torch.cat([one[2 * rank : 2 * rank + 2] for one in rows]))
    # Rank r sends s rows to rank s, and r more to the last one.
    splits = [[one + (one == size - 1) * r for one in range(size)] for r in range(size)]
    uneven = [part(r, sum(splits[r]), 2) for r in range(size)]
    expected = torch.cat([one.split(split)[rank] for one, split in zip(uneven, splits, strict=True)])
    for given in (splits[rank], torch.tensor(splits[rank])):
        out, received = hvd.alltoall(uneven[rank], splits=given)
        equal(out, expected)
        assert received.tolist() == [split[rank] for split in splits]
        assert received.dtype == (torch.int64 if isinstance(given, torch.Tensor) else torch.int32)
    weights = [part(10 + r, sum(split[r] for split in splits), 2) for r in range(size)]
    returned = [[weights[to].split([split[to] for split in splits])[r] for to in range(size)] for r in range(size)]
    found = gradient_of(lambda leaf: hvd.alltoall(leaf, splits[rank])[0], uneven[rank], weights[rank])
    equal(found, torch.cat(returned[rank]))
    for wrong in ([1.0] * size, [1] * (size + 1), [size, *[0] * (size - 1)]):
        with pytest.raises(ValueError, match=r"splits is .* whole numbers with the sum"):
            hvd.alltoall(torch.ones(size + 1), splits=wrong)


@case
def alltoall_async(rank: int, size: int) -> None:
    out, received = hvd.synchronize(hvd.alltoall_async(torch.full((size,), rank), name="a"))
    assert (out.tolist(), received.tolist()) == ([*range(size)], [1] * size)


def scatters(call: Callable[..., Any], grouped: bool) -> Case:
    def check(rank: int, size: int) -> None:
        for rows in (0, 1, 2 * size + 1):
            every = [part(one, rows, 2) for one in range(size)]
            counts = [rows // size + (one < rows % size) for one in range(size)]
            for op, expected in reductions(every).items():
                found = call([every[rank]] if grouped else every[rank], op=op, prescale_factor=1.0, name=f"{rows}{op}")
                found = hvd.synchronize(found) if "async" in call.__name__ else found
                equal(found[0] if grouped else found, expected.split(counts)[rank])
        own, total = part(rank, size), sum(part(one, size) for one in range(size))
        found = call([own] if grouped else own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        found = hvd.synchronize(found) if "async" in call.__name__ else found
        equal(found[0] if grouped else found, 2 * total[rank : rank + 1])

    return check


for title in ("reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"):
    CASES[title] = scatters(getattr(hvd, title), title.startswith("grouped_"))


def gradients(rank: int, size: int) -> None:
    """Check the names that the table leaves out, and their gradients."""
    weights = [part(10 + one, size) for one in range(size)]
    total = torch.stack(weights).sum(0)
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / size)):
        scales = {"op": op, "prescale_factor": 0.5, "postscale_factor": 3.0}
        equal(
            gradient_of(lambda x, s=scales: hvd.allreduce(x, **s), part(rank, size), weights[rank]),
            1.5 * factor * total,
        )
        found = gradient_of(
            lambda x, o=op: hvd.allreduce(x, op=o, compression=hvd.Compression.fp16), part(rank, size), weights[rank]
        )
        torch.testing.assert_close(found, factor * total, rtol=2e-3, atol=0.0)
        own = torch.stack([weight[:1] for weight in weights]).reshape(-1) * 1.5 * factor * size
        found = gradient_of(lambda x, s=scales: hvd.reducescatter(x, **s), part(rank, size), weights[rank][:1])
        equal(found, own)
        both = gradient_of(
            lambda x, s=scales: hvd.grouped_allreduce([x, 2 * x], **s)[1], part(rank, size), weights[rank]
        )
        equal(both, 3.0 * factor * total)
    leaf = part(rank, 2).requires_grad_()
    (slope,) = torch.autograd.grad((hvd.allreduce(leaf, op=hvd.Sum) ** 2).sum(), leaf, create_graph=True)
    slope.sum().backward()
    assert leaf.grad is not None
    equal(leaf.grad, torch.full((2,), 2.0 * size**2, dtype=torch.float64))


CASES["Compression"] = gradients


@case
def sparse_allreduce_async(rank: int, size: int) -> None:
    dense = [part(one, 4, 2) * (torch.arange(4) % (one + 1) == 0)[:, None] for one in range(size)]
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        handle = hvd.sparse_allreduce_async(dense[rank].to_sparse(1), name=f"s{op}", op=op)
        assert handle().is_sparse
        assert hvd.poll(handle)
        equal(hvd.synchronize(handle).to_dense(), torch.stack(dense).sum(0) / divisor)
    with pytest.raises(ValueError, match="op is Max, but sparse tensors"):
        hvd.sparse_allreduce_async(dense[rank].to_sparse(1), name="s", op=hvd.Max)


@case
def poll(rank: int, size: int) -> None:
    first = hvd.allreduce_async_(torch.ones(1), name="first")
    hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="second"))
    assert isinstance(hvd.poll(first), bool)
    hvd.synchronize(first)
    assert hvd.poll(first)


@case
def synchronize(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(torch.full((2,), float(rank)), op=hvd.Max)
    assert [hvd.synchronize(handle).tolist() for _ in range(2)] == [[size - 1.0] * 2] * 2
    with pytest.raises(TypeError, match="takes the handle of an asynchronous operation, not int"):
        hvd.synchronize(3)
    for wrong in (3, [torch.ones(1)], None):
        with pytest.raises(TypeError, match="allreduce takes a tensor, not"):
            hvd.allreduce(wrong)
    with pytest.raises(TypeError, match="grouped_allreduce_ takes a list of tensors, not int"):
        hvd.grouped_allreduce_([torch.ones(1), 2])


@case
def barrier(rank: int, size: int) -> None:
    late = hvd.allreduce_async(torch.ones(1), name="before") if rank else None
    if rank == 0:
        late = hvd.allreduce_async(torch.ones(1), name="before")
    hvd.barrier()
    assert hvd.synchronize(late).item() == 1


@case
def join(rank: int, size: int) -> None:
    for step in range(rank):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size - 1 - step
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@case
def broadcast_parameters(rank: int, size: int) -> None:
    torch.manual_seed(size - 1)
    expected = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.manual_seed(rank)
    for give in (
        lambda model: model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.parameters(),
    ):
        model = copy.deepcopy(expected)
        if rank < size - 1:
            model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        hvd.broadcast_parameters(give(model), root_rank=size - 1)
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, other)
    with pytest.raises(ValueError, match="params are of Tensor; pass model.state_dict"):
        hvd.broadcast_parameters(torch.ones(2), 0)


@case
def broadcast_optimizer_state(rank: int, size: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1 * (1 + rank), betas=(0.5 + 0.1 * rank, 0.9))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(1 + rank):
        parameter.grad = torch.full((2,), 1.0 + rank)
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=size - 1)
    (state,) = optimizer.state_dict()["state"].values()
    assert state["step"] == size
    assert state["exp_avg"].tolist() == pytest.approx([size * (1 - (0.4 + 0.1 * size) ** size)] * 2)
    wrapped = hvd.DistributedOptimizer(optimizer, [("it", parameter)])
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    schedule.step()  # it holds the groups of the optimizer that has been wrapped
    assert wrapped.param_groups[0]["lr"] == pytest.approx(0.05 * size)


@case
def broadcast_object(rank: int, size: int) -> None:
    given = {"rank": rank, "tensor": torch.full((2,), rank)}
    found = hvd.broadcast_object(given, root_rank=size - 1, name="it")
    assert (found["rank"], found["tensor"].tolist()) == (size - 1, [size - 1] * 2)
    assert hvd.broadcast_object(None) is None


@case
def allgather_object(rank: int, size: int) -> None:
    assert hvd.allgather_object(["x"] * rank, name="it") == [["x"] * one for one in range(size)]


def places(rank: int, size: int) -> None:
    found = (hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    assert found == (rank, rank, size, size, 0, 1)
    assert hvd.is_homogeneous() is True
    assert hvd.global_process_set.ranks == [*range(size)]


PLACES = (
    "rank",
    "local_rank",
    "size",
    "local_size",
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    "global_process_set",
)
CASES |= dict.fromkeys(PLACES, places)


def builds(rank: int, size: int) -> None:
    assert (hvd.mpi_enabled(), hvd.gloo_enabled()) == (False, True)
    assert hvd.gloo_built() is True
    assert isinstance(hvd.mpi_built(), bool)
    assert (hvd.cuda_built(), hvd.rocm_built()) == (torch.version.cuda is not None, torch.version.hip is not None)
    assert bool(hvd.nccl_built()) == torch.distributed.is_nccl_available()
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()
    with pytest.raises(ValueError, match="MPI is not in use"):
        hvd.mpi_threads_supported()


BUILDS = (
    "mpi_enabled",
    "gloo_enabled",
    "mpi_built",
    "gloo_built",
    "nccl_built",
    "cuda_built",
    "rocm_built",
    "ddl_built",
)
CASES |= dict.fromkeys((*BUILDS, "ccl_built", "mpi_threads_supported"), builds)


def run_cases(names: list[str]) -> None:
    with world() as (rank, size):
        for check in dict.fromkeys(CASES[name] for name in names):
            check(rank, size)


def test_every_public_name_has_a_case() -> None:
    files = {path.stem for path in Path(hvd.__file__).parent.glob("*.py")}
    public = {name for name in dir(hvd) if not name.startswith("_")} - (files - {"elastic"})
    assert public == CASES.keys() | {name for names in ELSEWHERE.values() for name in names}


def test_functions_equal_the_same_on_all_ranks_tensors() -> None:
    run_ranks(run_cases, 3, [*CASES])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_function_alone_equals_the_same_on_all_ranks_tensors(name: str, ranks: int) -> None:
    run_ranks(run_cases, ranks, [name])
