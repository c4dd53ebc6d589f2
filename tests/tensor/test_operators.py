"""The operators of tensor parallelism, with their gradients, and the gradients of these."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from zeromesh import Mesh
from zeromesh.parallel.tensor.operators import CONJUGATES, move

SHAPE = (4, 6, 8)
CASES = [(name, dim) for name in CONJUGATES for dim in ((0, 1, -1) if name not in ("copy", "sum") else (0,))]


def value(rank: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def apply_all() -> dict[tuple[str, int], tuple[torch.Tensor, ...]]:
    group, found = Mesh({"tensor": dist.get_world_size()}, torch.device("cpu")).group("tensor"), {}
    for name, dim in CASES:
        x = value(group.rank, SHAPE).requires_grad_()
        y = move(x, name, group, 40, dim)
        upstream = value(group.rank, tuple(y.shape), 1).requires_grad_()
        (gradient,) = torch.autograd.grad(y, x, upstream, create_graph=True)
        (second,) = torch.autograd.grad(gradient, upstream, value(group.rank, SHAPE, 2))
        found[name, dim] = y.detach(), gradient.detach(), second
    return found


def expected(what: str, values: list[torch.Tensor], rank: int, dim: int) -> torch.Tensor:
    total = torch.stack(values).sum(0)
    return {
        "nothing": lambda: values[rank],
        "sum": lambda: total,
        "keep": lambda: values[rank].chunk(len(values), dim)[rank],
        "gather": lambda: torch.cat(values, dim),
        "scatter": lambda: total.chunk(len(values), dim)[rank],
        "swap": lambda: torch.cat([x.chunk(len(values), dim)[rank] for x in values], dim),
    }[what]()


@pytest.mark.parametrize("ranks", [1, 2])
def test_operators_and_their_gradients_do_what_the_table_says(ranks: int) -> None:
    found = run_ranks(apply_all, ranks)
    for name, dim in CASES:
        forth, back = CONJUGATES[name]
        by_rank = [of_rank[name, dim] for of_rank in found]
        for rank, (y, gradient, second) in enumerate(by_rank):
            torch.testing.assert_close(y, expected(forth, [value(r, SHAPE) for r in range(ranks)], rank, dim))
            upstream = [value(r, tuple(y.shape), 1) for r in range(ranks)]
            torch.testing.assert_close(gradient, expected(back, upstream, rank, dim))
            torch.testing.assert_close(second, expected(forth, [value(r, SHAPE, 2) for r in range(ranks)], rank, dim))


# Name -> whether ranks have one input; what they have after it, and whether they go on with it alike.
MEANT: dict[str, tuple[bool, Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], bool]] = {
    "copy": (True, lambda xs: xs, False),
    "sum": (False, lambda xs: [xs[0] + xs[1]] * 2, True),
    "total": (False, lambda xs: [xs[0] + xs[1]] * 2, False),
    "gather": (False, lambda xs: [torch.cat(xs)] * 2, False),
    "scatter": (False, lambda xs: (xs[0] + xs[1]).chunk(2), False),
    "split": (True, lambda xs: xs[0].chunk(2), False),
    "join": (False, lambda xs: [torch.cat(xs)] * 2, True),
    "swap": (False, lambda xs: [torch.cat([x.chunk(2)[rank] for x in xs]) for rank in range(2)], False),
}


def gradient_of(name: str) -> torch.Tensor:
    alike, _, together = MEANT[name]
    group = Mesh({"tensor": 2}, torch.device("cpu")).group("tensor")
    x = value(0 if alike else group.rank, SHAPE).requires_grad_()
    y = move(x, name, group, 40, 0)
    (gradient,) = torch.autograd.grad(y, x, value(0 if together else group.rank, tuple(y.shape), 1))
    return gradient


@pytest.mark.some(3)
@pytest.mark.parametrize("name", CONJUGATES)
def test_each_gradient_is_that_of_all_ranks_in_one_process(name: str) -> None:
    alike, function, together = MEANT[name]
    xs = [value(rank, SHAPE).requires_grad_() for rank in range(1 if alike else 2)]
    ys = function(xs * 2 if alike else xs)[: 1 if together else 2]
    upstream = [value(rank, tuple(y.shape), 1) for rank, y in enumerate(ys)]
    expected = torch.autograd.grad(ys, xs, upstream)
    for rank, found in enumerate(run_ranks(gradient_of, 2, name)):
        torch.testing.assert_close(found, expected[0 if alike else rank])


def sums_of_16_bits() -> tuple[torch.Tensor, torch.Tensor, int]:
    mesh = Mesh({"tensor": dist.get_world_size()}, torch.device("cpu"))
    group = mesh.group("tensor")
    x = value(group.rank, SHAPE).bfloat16()
    mesh.traffic.reset()
    total = move(x, "sum", group, 40)
    sent = sum(mesh.traffic.bytes.values())
    return total, move(x, "scatter", group, 41, 1), sent


@pytest.mark.parametrize("ranks", [2, 3])
def test_16_bits_are_summed_in_32_and_rounded_once_and_an_all_reduce_sends_each_number_once_each_way(ranks) -> None:
    exact = torch.stack([value(rank, SHAPE).bfloat16().float() for rank in range(ranks)]).sum(0).bfloat16()
    for rank, (total, part, sent) in enumerate(run_ranks(sums_of_16_bits, ranks)):
        assert torch.equal(total, exact)
        assert torch.equal(part, exact.chunk(ranks, 1)[rank])
        assert sent == 2 * exact.nbytes * (ranks - 1) // ranks


def split_unevenly(dim: int) -> str:
    group = Mesh({"tensor": dist.get_world_size()}, torch.device("cpu")).group("tensor")
    with pytest.raises(ValueError, match="do not divide") as caught:
        move(torch.ones(3, 5), "split", group, 40, dim)
    return str(caught.value)


def test_a_dim_that_the_ranks_do_not_divide_is_refused() -> None:
    assert set(run_ranks(split_unevenly, 2, -1)) == {
        "dim 1 of an activation of shape (3, 5) has 5 entries, which 2 tensor-parallel ranks do not divide; the "
        "nearest lengths that work are 4 and 6"
    }
