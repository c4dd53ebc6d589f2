"""Experts that are lists of modules, stacked, or called with sorted rows, on two ranks beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness import on_ranks
from zeromesh import Mesh
from zeromesh.parallel.expert import lists, stacked
from zeromesh.parallel.expert.dispatch import RowExchange

WIDTH, COUNT = 6, 4


class Mlp(nn.Module):
    """An expert whose output is wider by ``more``."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH + more)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Loop(nn.Module):
    """A user's loop over experts, with a counter, a buffer, noise, and hooks."""

    def __init__(self, more: int = 0, top: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT)
        self.experts = nn.ModuleList(Mlp(more) for _ in range(COUNT))
        self.seen = nn.Buffer(torch.zeros(COUNT))
        self.top, self.more, self.calls, self.losses = top, more, 0, []

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        rows = x.reshape(-1, x.shape[-1])
        logits = self.gate(rows)
        weights, chosen = logits.softmax(-1).topk(self.top, -1)
        if self.training:
            rows = F.dropout(rows, 0.25)
        self.calls += 1
        self.losses.append(logits.detach().mean())
        out = rows.new_zeros(len(rows), WIDTH + self.more)
        for number, expert in enumerate(self.experts):
            index, place = torch.where(chosen == number)
            self.seen[number] += len(index)
            if not index.numel():
                continue
            y = expert(rows[index])
            y *= scale * weights[index, place, None]
            out.index_add_(0, index, y)
        return out.view(*x.shape[:-1], WIDTH + self.more), {"logits": logits}


class Mixture(nn.Module):
    """All experts for all tokens, with three dims, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT)
        self.experts = nn.ModuleList(Mlp(2) for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([expert(x) for expert in self.experts], -1)
        return (y * self.gate(x).softmax(-1)[..., None, :]).sum(-1)


class Stacked(nn.Module):
    """As Llama 4's: one tensor of rows of all experts, two-dimensional or three-dimensional."""

    def __init__(self, flat: bool, more: int) -> None:
        super().__init__()
        self.num_experts, self.flat = COUNT, flat
        self.weight = nn.Parameter(torch.randn(COUNT, WIDTH, WIDTH + more))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(x.view(self.num_experts, x.shape[:-1].numel() // self.num_experts, WIDTH), self.weight).tanh()
        return y.flatten(0, 1) if self.flat else y


class Sorted(nn.Module):
    """As JetMoE's."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = COUNT
        self.weight = nn.Parameter(torch.randn(COUNT, WIDTH + 1, WIDTH))

    def forward(self, rows: Tensor, sizes: Any) -> Tensor:
        parts = rows.split(list(sizes), dim=0)
        return torch.cat([F.linear(parts[number], self.weight[number]) for number in range(self.num_experts)])


class Around(nn.Module):
    """A gate and a module of stacked or sorted experts."""

    def __init__(self, kind: str, more: int = 1) -> None:
        super().__init__()
        self.kind, self.more, self.gate = kind, more, nn.Linear(WIDTH, COUNT)
        self.experts = Sorted() if kind == "sorted" else Stacked(kind == "flat", more)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        if self.kind == "sorted":
            best, chosen = scores.max(-1)
            order = chosen.argsort(stable=True)
            sizes = torch.bincount(chosen, minlength=COUNT).tolist()
            y = self.experts(x[order], sizes) * best[order, None]
            return y.new_zeros(len(x), WIDTH + 1).index_add(0, order, y)
        rows = scores.T[..., None] * x
        y = self.experts(rows.reshape(-1, WIDTH) if self.kind == "flat" else rows)
        return y.view(COUNT, len(x), WIDTH + self.more).sum(0)


def hooked() -> Loop:
    """Return a loop with a hook inside of one expert that mixes rows."""
    model = Loop()
    model.experts[2].get_submodule("up").register_forward_hook(lambda _, args, y: y - y.mean(0))
    return model


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


def share(block: nn.Module) -> None:
    """Share the experts of a block over all ranks, which keep all parameters here; owners alone get gradients."""
    group = Mesh({"data": dist.get_world_size()}, torch.device("cpu")).group("data")
    sharing = stacked.ExpertSharing(RowExchange(group, 600, "experts"), COUNT)
    module: Any = block.get_submodule("experts")
    if isinstance(module, nn.ModuleList):
        lists.share_listed(block, module, sharing)
        return
    module.weight = nn.Parameter(module.weight.detach().chunk(group.size)[group.rank])
    module.num_experts = COUNT // group.size
    (stacked.share_sorted if isinstance(module, Sorted) else stacked.share_stacked)(module, sharing)


def inputs(rank: int, shape: tuple[int, ...] = (7, WIDTH)) -> Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


def loss_of(output: Any) -> Tensor:
    tensors = (output[0], *output[1].values()) if isinstance(output, tuple) else (output,)
    return torch.stack([y.square().sum() for y in tensors]).sum()


def train(call: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and the gradient of the inputs."""
    torch.manual_seed(5)
    loss = loss_of(call(x))
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "loop": (Loop, (7, WIDTH)),
    "wider": (lambda: Loop(more=3, top=1), (3, 5, WIDTH)),
    "hooked": (hooked, (7, WIDTH)),
    "mixture": (Mixture, (3, 5, WIDTH)),
    "flat": (lambda: Around("flat"), (7, WIDTH)),
    "three dims": (lambda: Around("three"), (7, WIDTH)),
    "sorted": (lambda: Around("sorted"), (7, WIDTH)),
}


CASES = [(name, empty, again) for name in MODELS for empty in (False, True) for again in (False, True)]
QUICK = [
    ("loop", True, True),
    ("hooked", False, False),
    ("mixture", False, False),
    ("flat", False, True),
    ("sorted", True, False),
]


@pytest.mark.parametrize(
    ("name", "empty", "recomputed"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in CASES],
)
@on_ranks(2)
def test_outputs_and_gradients_are_those_of_one_process(name: str, empty: bool, recomputed: bool) -> None:
    make, shape = MODELS[name]
    shapes = [shape, (0, *shape[1:]) if empty else (shape[0] - 1, *shape[1:])]
    plain = build(make)
    expected = [train(plain, inputs(rank, shapes[rank])) for rank in range(2)]
    model, rank = build(make), dist.get_rank()
    share(model)
    call = (lambda x: checkpoint(model, x, use_reentrant=False)) if recomputed else model
    loss, gradient = train(call, inputs(rank, shapes[rank]))
    torch.testing.assert_close((loss, gradient), expected[rank], rtol=1e-12, atol=1e-12)
    for key, whole in plain.named_parameters():
        parameter, summed = model.get_parameter(key), torch.zeros_like(whole)
        mine = summed if len(parameter) == len(whole) else summed.chunk(2)[rank]
        mine.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
        dist.all_reduce(summed)
        wanted = torch.zeros_like(whole) if whole.grad is None else whole.grad
        torch.testing.assert_close(summed, wanted, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_a_block_runs_once_as_far_as_anybody_can_see() -> None:
    plain, model = build(Loop), build(Loop)
    share(model)
    seen: list[str] = []
    results = []
    for module in (plain, model):
        module.gate.register_forward_hook(lambda *_: seen.append("gate"))
        module.experts[0].register_forward_hook(lambda *_: seen.append("expert"))
        module.register_forward_hook(lambda *_: seen.append("block"))
        torch.manual_seed(5)
        trained = module.train()(inputs(0))
        after = torch.rand(3)
        with torch.inference_mode():
            evaluated = module.eval()(inputs(1), scale=2.0)
        results.append((trained, after, evaluated, module.seen, torch.tensor(module.calls), module.losses))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
    assert seen == ["gate", "expert", "block"] * 4


@pytest.mark.parametrize("name", ["loop", *(pytest.param(name, marks=pytest.mark.full) for name in ("flat", "sorted"))])
@on_ranks(2)
def test_a_copy_computes_with_its_own_experts(name: str) -> None:
    model = build(MODELS[name][0]).eval()
    share(model)
    x = inputs(dist.get_rank())
    duplicate, before = copy.deepcopy(model), loss_of(model(x))
    for parameter in duplicate.get_submodule("experts").parameters():
        parameter.detach().mul_(3)
    assert torch.equal(loss_of(model(x)), before)
    assert not torch.isclose(loss_of(duplicate(x)), before)


class Odd(Loop):
    """Blocks that cannot be run twice, or whose experts cannot be called for others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.drawn = kind, iter(range(100))

    def forward(self, x: Tensor) -> Any:
        first, second, *_ = self.experts
        if self.kind == "chain":
            return second(first(x))
        if self.kind == "two tensors":
            return first(x, x)
        if self.kind == "writes":
            return first(x.mul_(2))
        if self.kind == "draws":
            return first(x + next(self.drawn))
        return first(x) if next(self.drawn) % 2 else second(x)  # skips


ODD = {
    "chain": "depend on what other experts return",
    "two tensors": r"called with \(\(7, 6\), \(7, 6\)\); call it with one floating-point tensor",
    "writes": "writes to its inputs; let it write to copies",
    "draws": "draws outside of torch",
    "skips": "get other inputs when it runs again",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("chain", "draws") else pytest.mark.full) for kind in ODD]
)
@on_ranks(2)
def test_what_cannot_be_shared_is_refused(kind: str) -> None:
    model = build(lambda: Odd(kind))
    share(model)
    x = inputs(0).detach()
    with pytest.raises(RuntimeError, match=f"2 ranks cannot share the experts experts.*{ODD[kind]}.*mesh.expert to 1"):
        model(x)
    with pytest.raises(RuntimeError, match="expert 0 was called outside of it"):
        model.experts[0](x)
