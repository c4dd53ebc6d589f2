"""A recomputation takes the choices of its forward, though a second decision would differ."""

from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from huggingface_models import MODELS
from zeromesh.checkpointing import checkpoint
from zeromesh.parallel.activation.checkpoint import checkpoint_modules, compile_forward
from zeromesh.parallel.activation.choices import add_router, chooses, keep_choices, same_choice, with_choices
from zeromesh.parallel.activation.selective import GRANULARITIES


class Mixture(nn.Module):
    """Experts whose router draws noise from a generator of its own, and adds a buffer that changes."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.router, self.way, self.chosen = nn.Linear(8, 6, dtype=torch.float64), way, []
        self.experts = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(6))
        self.bias = torch.zeros(6, dtype=torch.float64)  # no buffer that recomputation would restore
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        if self.way == "noise":
            scores = scores + torch.randn(scores.shape, generator=self.generator, dtype=scores.dtype)
        biased = scores + self.bias
        index = {
            "argmax": lambda: biased.argmax(-1, keepdim=True),
            "max": lambda: biased.max(-1, keepdim=True).indices,
            "sort": lambda: biased.sort(dim=-1, descending=True).indices[:, :2],
            "multinomial": lambda: torch.multinomial(scores.softmax(-1), 2, generator=self.generator),
        }.get(self.way, lambda: biased.topk(2, dim=-1).indices)()
        weights = scores.gather(-1, index)
        if self.way == "threshold":
            weights = weights * (biased.gather(-1, index) > 0.5)
        self.chosen.append(index)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = (index == number).nonzero(as_tuple=True)
            y = y.index_add(0, row, expert(x[row]).tanh() * weights[row, place, None])
        return x + y


WAYS = ("noise", "bias", "argmax", "max", "sort", "multinomial", "threshold")


def gradients(way: str, recompute: str, backend: str = "") -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Mixture(way) for _ in range(2)))
    for block in blocks:
        add_router(block)
    if recompute in ("full", "selective"):
        checkpoint_modules(blocks, plan=GRANULARITIES[recompute])
    for block in blocks if backend else ():
        compile_forward(block, backend=backend)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    call: Any = partial(checkpoint, blocks) if recompute == "call" else blocks
    loss = call(x).square().sum()
    with torch.no_grad():
        for block in blocks:
            # What a second decision would be made by: an update of the selection bias, or another device's noise.
            block.bias.add_(torch.arange(6.0))
            block.generator.manual_seed(99)
    loss.backward()
    chosen = [block.chosen for block in blocks]
    assert all(torch.equal(index, of[0]) for of in chosen for index in of), "the recomputation chose otherwise"
    assert all(len(of) == (2 if recompute else 1) for of in chosen)
    return [p.grad for p in blocks.parameters()], [of[0] for of in chosen]


@pytest.mark.parametrize("recompute", ["full", "selective", "call"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_first_choice(way: str, recompute: str) -> None:
    expected, chosen = gradients(way, "")
    found, again = gradients(way, recompute)
    torch.testing.assert_close(again, chosen, rtol=0, atol=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def remembered() -> tuple[Any, Any]:
    router = nn.Linear(2, 2)
    add_router(router)
    return with_choices([router])


def test_values_at_the_places_of_the_first_choice_are_those_of_the_recomputed_scores() -> None:
    for name, args in {"topk": (2,), "sort": (-1, True), "max": (1,), "median": (0, True), "kthvalue": (2, 1)}.items():
        torch.manual_seed(0)
        (first, again), scores = remembered(), torch.randn(5, 4)
        with first:
            expected = getattr(torch, name)(scores, *args)
        for _ in range(2):  # of several backwards
            with again:
                found = getattr(torch, name)(scores, *args)
            torch.testing.assert_close(tuple(found), tuple(expected), rtol=0, atol=0)
        with again:
            values, places = getattr(torch, name)(scores.flip(0) * 2, *args)
        assert torch.equal(places, expected[1])
        assert not torch.equal(values, expected[0])


def test_a_recomputation_that_takes_another_way_is_refused() -> None:
    (first, again), scores = remembered(), torch.randn(5, 4)
    with first:
        scores.topk(2)
    with again, pytest.raises(RuntimeError, match="must take the same way both times"):
        scores.argmax(-1)


def test_modules_without_experts_pay_nothing() -> None:
    assert not chooses(nn.Linear(2, 2).modules())


class Attended(Mixture):
    """Experts as ``Exchange`` calls them, with the check that it makes."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        index = (scores + self.bias).topk(2, dim=-1).indices
        return x + self.experts[0](same_choice(x, index, "mlp.experts")) * scores.gather(-1, index).sum(
            -1, keepdim=True
        )


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_torch_that_choose_again_are_refused(reentrant: bool, differs: bool) -> None:
    torch.manual_seed(0)
    block, x = Attended("bias"), torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    loss = torch_checkpoint(block, x, use_reentrant=reentrant).sum()
    block.bias.add_(torch.arange(6.0) * differs)
    with pytest.raises(RuntimeError, match="mlp.experts.*write") if differs or reentrant else nullcontext():
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_transformers_take_the_first_choice(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = MODELS["mixtral"].build().train()
    with suppress(TypeError):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    batch = MODELS["mixtral"].batch(torch.Generator().manual_seed(1))
    gates = [module for module in model.modules() if type(module).__name__ == "MixtralTopKRouter"]
    chosen: dict[int, list[Tensor]] = {}
    for number, gate in enumerate(gates):
        add_router(gate)
        # Another bias each time: it is no buffer.
        gate.register_forward_hook(lambda *args, number=number: chosen.setdefault(number, []).append(args[2][2]))
        gate.forward = partial(biased, gate)
    keep_choices(model)
    model(**batch).loss.backward()
    assert len(chosen) == len(gates) > 1
    assert all(len(indices) == 2 and torch.equal(*indices) for indices in chosen.values())


def biased(gate: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate.calls = getattr(gate, "calls", 0) + 1
    logits = nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
    index = (logits + gate.calls * torch.arange(logits.shape[-1])).topk(gate.top_k).indices
    return logits, logits.softmax(-1).gather(-1, index), index
