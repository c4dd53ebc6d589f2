"""Experts that ranks share compute what one process computes: results and gradients, with any choice of experts."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import on_ranks, run_ranks, spawn_ranks
from zeromesh import Mesh
from zeromesh.comm import watchdog
from zeromesh.comm.collectives import Group
from zeromesh.comm.traffic import Traffic
from zeromesh.parallel.expert.dispatch import Choice, RowExchange
from zeromesh.parallel.expert.routed import RoutedExperts

EXPERTS, WIDTH, TOKENS, CHOICES = 12, 5, 11, 3


class Experts(nn.Module):
    """Experts in the form of transformers' own, in a loop over those that are chosen."""

    def __init__(self, first: int, stop: int, identities: int = 0) -> None:
        super().__init__()
        self.identities = identities
        generator = torch.Generator().manual_seed(3)
        up, down = (torch.randn(EXPERTS, *s, generator=generator) for s in ((7, WIDTH), (WIDTH, 7)))
        self.up, self.down = (nn.Parameter(x[first:stop].double()) for x in (up, down))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            if expert >= len(self.up) + self.identities:
                continue
            token, place = torch.where(index == expert)
            if expert >= len(self.up):  # without parameters
                y = hidden[token]
            else:
                y = torch.tanh(hidden[token] @ self.up[expert].T) @ self.down[expert].T
            total.index_add_(0, token, (y * weights[token, place, None]).to(total.dtype))
        return total


def choices(case: str, rank: int, generator: torch.Generator) -> torch.Tensor:
    count = 0 if case == "a rank without tokens" and rank == 1 else TOKENS + rank
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(count)] or [index0()])
    index = index[:count]
    if case == "all on one expert":
        index = torch.full_like(index, EXPERTS - 1)
    elif case == "nobody's":
        index[::2, 1] = EXPERTS
        index[1::2] = EXPERTS
    elif case == "one rank's only":
        index = index % (EXPERTS // 4)
    return index


def index0() -> torch.Tensor:
    return torch.zeros(CHOICES, dtype=torch.int64)


CASES = ("any", "all on one expert", "nobody's", "one rank's only", "a rank without tokens")


def inputs(case: str, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(20 + rank)
    index = choices(case, rank, generator)
    hidden = torch.randn(len(index), WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, index, torch.rand(index.shape, generator=generator, dtype=torch.float64, requires_grad=True)


def upstream(case: str, rank: int) -> torch.Tensor:
    hidden, *_ = inputs(case, rank)
    return torch.randn(hidden.shape, generator=torch.Generator().manual_seed(40 + rank), dtype=torch.float64)


def data_group() -> tuple[Mesh, Group]:
    mesh = Mesh({"data": dist.get_world_size()}, torch.device("cpu"))
    return mesh, mesh.group("data")


def shared(group: Group, tag: int = 40, name: str = "moe", **rest: Any) -> tuple[Experts, RoutedExperts]:
    local = EXPERTS // group.size
    module = Experts(group.rank * local, (group.rank + 1) * local, rest.get("beyond", 0))
    return module, RoutedExperts(module, RowExchange(group, tag, name), EXPERTS, **rest)


def on_a_rank(case: str) -> dict[str, Any]:
    mesh, group = data_group()
    module, forward = shared(group)
    hidden, index, weights = inputs(case, group.rank)
    mesh.traffic.reset()
    y = forward(hidden, index, weights=weights)
    sent, calls = mesh.traffic.bytes["all_to_all", "data"], mesh.traffic.calls["all_to_all", "data"]
    tensors = (hidden, weights, module.up, module.down)
    gradients = torch.autograd.grad(y, tensors, upstream(case, group.rank), allow_unused=False)
    assert calls == 2, "once there and once back"
    assert mesh.traffic.calls["all_to_all", "data"] == 4
    back = mesh.traffic.bytes["all_to_all", "data"] - sent
    return {"y": y.detach(), "gradients": gradients, "sent": sent, "back": back}


@pytest.mark.some(6)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_experts_compute_what_one_process_does(case: str, ranks: int) -> None:
    experts = Experts(0, EXPERTS)
    results = run_ranks(on_a_rank, ranks, case)
    total_up, total_down = torch.zeros_like(experts.up), torch.zeros_like(experts.down)
    for rank, result in enumerate(results):
        hidden, index, weights = inputs(case, rank)
        y = experts(hidden, index, weights)
        torch.testing.assert_close(result["y"], y, rtol=1e-12, atol=1e-12)
        if not len(index):
            assert all(gradient is not None for gradient in result["gradients"])
            continue
        tensors = (hidden, weights, experts.up, experts.down)
        expected = torch.autograd.grad(y, tensors, upstream(case, rank), allow_unused=True)
        for got, gradient in zip(result["gradients"][:2], expected[:2], strict=True):
            torch.testing.assert_close(got, gradient if gradient is not None else torch.zeros_like(got))
        total_up += 0 if expected[2] is None else expected[2]
        total_down += 0 if expected[3] is None else expected[3]
    torch.testing.assert_close(torch.cat([result["gradients"][2] for result in results]), total_up)
    torch.testing.assert_close(torch.cat([result["gradients"][3] for result in results]), total_down)


@pytest.mark.parametrize("case", CASES)
def test_a_token_is_sent_once_to_each_rank_that_has_some_of_its_experts(case: str) -> None:
    ranks = 3
    results = run_ranks(on_a_rank, ranks, case)
    pairs = torch.zeros(ranks, ranks, dtype=torch.int64)
    for rank in range(ranks):
        owner = inputs(case, rank)[1] // (EXPERTS // ranks)
        pairs[rank] = torch.stack([(owner == other).any(1).sum() for other in range(ranks)])
    pairs.fill_diagonal_(0)
    for rank, result in enumerate(results):
        there, here = int(pairs[rank].sum()), int(pairs[:, rank].sum())
        assert result["sent"] == there * (8 * (WIDTH + CHOICES) + 4 * CHOICES) + here * 8 * WIDTH
        assert result["back"] == there * 8 * WIDTH + here * 8 * (WIDTH + CHOICES)


def test_a_choice_and_its_sum_are_each_others_transpose() -> None:
    rows = torch.tensor([3, 0, 3, 1])
    choice = Choice.of(rows, torch.bincount(rows, minlength=5))
    x, y = (
        torch.randn(5, 2, dtype=torch.float64, requires_grad=True),
        torch.randn(4, 2, dtype=torch.float64, requires_grad=True),
    )
    assert torch.equal(choice.take(x), x[rows])
    assert torch.equal(choice.add_up(y), torch.zeros(5, 2, dtype=torch.float64).index_add(0, rows, y))
    assert torch.autograd.gradcheck(choice.take, x)
    assert torch.autograd.gradgradcheck(choice.add_up, y)


def test_sums_of_16_bits_are_rounded_once_and_to_the_nearest() -> None:
    x = torch.randn(600, 8).bfloat16()
    choice = Choice.of(torch.arange(600) // 3, torch.full((200,), 3))
    assert torch.equal(choice.add_up(x), x.float().view(200, 3, 8).sum(1).bfloat16())


def in_parts(tokens: int, other: bool = False) -> dict[str, Any]:
    """Share experts by four ranks, two of which each are given the same tokens."""
    mesh = Mesh({"data": 2, "tensor": 2}, torch.device("cpu"))
    module, forward = shared(mesh.group("world"), lines=mesh.group("tensor"), tag=60)
    hidden, index, weights = (x[:tokens] for x in inputs("any", mesh.data_rank))
    if other and dist.get_rank() == 1:
        index = index.flip(0)
    y = forward(hidden, index, weights)
    tensors = (hidden, weights, module.up, module.down)
    gradients = torch.autograd.grad(y, tensors, upstream("any", mesh.data_rank)[:tokens])
    return {"y": y.detach(), "gradients": gradients}


@pytest.mark.parametrize("tokens", [10, 7, 1])
def test_ranks_that_are_given_the_same_tokens_send_a_part_of_them_each(tokens: int) -> None:
    experts = Experts(0, EXPERTS)
    results = run_ranks(in_parts, 4, tokens)
    totals = [torch.zeros_like(experts.up), torch.zeros_like(experts.down)]
    for data_rank in range(2):
        hidden, index, weights = (x[:tokens] for x in inputs("any", data_rank))
        y = experts(hidden, index, weights)
        gradients = torch.autograd.grad(
            y, (hidden, weights, *experts.parameters()), upstream("any", data_rank)[:tokens]
        )
        totals = [total + gradient for total, gradient in zip(totals, gradients[2:], strict=True)]
        for result in results[2 * data_rank :][:2]:
            torch.testing.assert_close((result["y"], *result["gradients"][:2]), (y.detach(), *gradients[:2]))
    for place, total in enumerate(totals, 2):
        torch.testing.assert_close(torch.cat([result["gradients"][place] for result in results]), total)


@on_ranks(4)
def test_other_choices_for_the_same_tokens_are_refused_before_any_row_is_sent() -> None:
    with pytest.raises(ValueError, match="experts 'moe': rank 1 of the axis tensor has chosen other experts"):
        in_parts(10, other=True)


@on_ranks(2)
def test_rows_of_another_width_are_refused_on_all_ranks() -> None:
    _, group = data_group()
    _, forward = shared(group)
    hidden, index, weights = inputs("any", group.rank)
    with pytest.raises(ValueError, match="must call the same ones in the same order"):
        forward(hidden[:, group.rank :], index, weights)


def test_what_no_contract_knows_is_refused() -> None:
    _, forward = shared(Group("expert", None, torch.device("cpu"), Traffic()))
    hidden, index, _ = inputs("any", 0)
    with pytest.raises(ValueError, match="tokens .T, H., indices .T, K. and weights .T, K."):
        forward(hidden, index, torch.ones(len(hidden), EXPERTS))


def with_identities(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, index, weights = inputs("any", rank)
    index[::3, 1] = EXPERTS + torch.arange(len(index[::3])) % 3  # the last of the three is nobody's
    return hidden, index, weights


@on_ranks(2)
def test_experts_without_parameters_are_computed_at_home() -> None:
    _, group = data_group()
    _, forward = shared(group, beyond=2)
    results = []
    for run in (forward, Experts(0, EXPERTS, 2)):
        hidden, index, weights = with_identities(group.rank)
        y = run(hidden, index, weights)
        results.append((y, *torch.autograd.grad(y, (hidden, weights), upstream("any", group.rank))))
    torch.testing.assert_close(*results)


@on_ranks(2)
def test_recomputation_sends_again_also_where_a_rank_has_no_rows_to_compute() -> None:
    _, group = data_group()
    results = []
    for again in (False, True):
        module, forward = shared(group)
        hidden, index, weights = inputs("any", group.rank)
        index = index % (EXPERTS // 2)
        run = partial(checkpoint, forward, use_reentrant=False) if again else forward
        y = run(hidden.clone().mul(2), index, weights)
        results.append(torch.autograd.grad(y.square().sum(), (hidden, weights, *module.parameters())))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def of_transformers(implementation: str, first: int, stop: int) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=EXPERTS)
    config._experts_implementation = implementation
    experts = MixtralExperts(config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in [*experts.named_parameters()]:
        values = torch.randn(parameter.shape, generator=generator) / 4
        setattr(experts, name, nn.Parameter(values[first:stop]))
    experts.num_experts = stop - first
    return experts


@on_ranks(2)
def test_grouped_products_are_those_of_transformers_and_the_same_bits_in_every_run() -> None:
    _, group = data_group()
    local = EXPERTS // group.size
    hidden, index, weights = (x.float().detach() if x.is_floating_point() else x for x in inputs("any", group.rank))
    hidden, index = torch.cat([hidden, hidden[:, :3]], 1), index // 2 * 2  # half of the experts get no rows
    results = []
    for implementation in ("grouped_mm", "grouped_mm", "eager"):
        module = of_transformers(implementation, group.rank * local, (group.rank + 1) * local)
        forward = RoutedExperts(module, RowExchange(group, 40, "moe"), EXPERTS)
        x, factors = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        y = forward(x, index, factors)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, factors, *module.parameters()))))
    first, again, eager = results
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    torch.testing.assert_close(first, eager)
    assert not first[3][1::2].any()


@on_ranks(2, timeout=60)
def test_a_rank_without_rows_takes_part_where_experts_alone_are_trained() -> None:
    _, group = data_group()
    local = EXPERTS // group.size
    module = of_transformers("grouped_mm", group.rank * local, (group.rank + 1) * local)
    forward = RoutedExperts(module, RowExchange(group, 40, "moe"), EXPERTS)
    for index in (torch.tensor([[0, 1]] * 4), torch.tensor([[0, EXPERTS - 1]] * 3)):  # at first the first rank's
        module.zero_grad()
        forward(torch.ones(len(index), 8), index, torch.ones(index.shape)).sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
        used = [bool(parameter.grad.any()) for parameter in module.parameters()]
        assert used == [group.rank == 0 or len(index) == 3] * 2


def in_another_order(what: str) -> None:
    watchdog.PATIENCE = 1.0
    _, group = data_group()
    layers = [shared(group, tag, name=name)[1] for tag, name in ((40, "layers.0"), (43, "layers.1"))]
    inputs_here = inputs("any", group.rank)
    if what == "layers":
        layers[group.rank](*inputs_here)
        return
    y = layers[0](*inputs_here)
    if group.rank == 0:
        y.sum().backward()
    else:
        layers[1](*inputs_here)


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "waits"),
    [("layers", "numbers of rows for experts 'layers.0'"), ("backward", "results of experts 'layers.0'")],
)
def test_ranks_at_different_experts_end_and_say_at_which(what: str, waits: str) -> None:
    outcomes = spawn_ranks(in_another_order, 2, what, timeout=40)
    said = " ".join("".join(outcome.output for outcome in outcomes).split())
    # The one that says it ends first; the other may find it gone before it reads that.
    assert all(outcome.kind in ("died", "raised") for outcome in outcomes), outcomes
    assert waits in said
    assert "numbers of rows for experts 'layers.1'" in said
    assert "rank 1 waits" in said


@on_ranks(2)
def test_ranks_at_different_experts_are_refused_where_a_backend_ignores_tags() -> None:
    _, group = data_group()
    exchange = [RowExchange(group, tag, name) for tag, name in ((40, "layers.0"), (43, "layers.1"))][group.rank]
    group.exchange = lambda vector, tag: Group.exchange(group, vector, 39)
    with pytest.raises(ValueError, match=r"rank 0 is at numbers of rows for experts 'layers.0'.*rank 1 .*'layers.1'"):
        exchange.counts(torch.ones(2, 1, dtype=torch.int64))
