"""Experts on several ranks: silent errors of other systems, and that ours are those of one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from mixtures import EXPERTS, TARGETS, Block, Mixture, build_mixture, mixture_loss, token_rows
from museum import Weights, gap, require, results_by_name, start, weights_of, whole
from run import train_step

LR, CLIP, RATE = 2.0, 0.1, 0.05
BALANCE = 0.5
"""Weight of the balancing loss."""
EXPERT_PARTS = ("gate_up_proj", "down_proj")
MESHES: dict[str, dict[str, int]] = {
    "data": {"data": 2, "expert": 2},
    "tensor": {"tensor": 2, "expert": 2},
}
"""Both on two ranks, each with half of the experts: with samples of its own, and with the other's."""


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Return the loss with the balancing loss of the rows, as a model of transformers returns it."""
    loss = mixture_loss(model, ids)
    mixture: Mixture = getattr(model, "module", model)
    return loss + BALANCE * mixture.auxiliary_loss()


def updated(mesh: dict[str, int], **settings: Any) -> tuple[float | None, Weights]:
    """Update once with two samples of each of two shares of the batch; return the norm and the weights."""
    experts = {"experts": {"targets": TARGETS}}
    engine = start(build_mixture(), lr=LR, mesh=mesh, zero_optimization={"stage": 3}, **experts, **settings)
    ids = token_rows(0).chunk(2)[engine.data_rank] if engine.data_size > 1 else token_rows(0)
    train_step(engine, loss_of(engine, ids))
    return engine.get_global_grad_norm(), whole(engine)


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, mesh in MESHES.items():
        rows = {} if name == "data" else {"train_micro_batch_size_per_gpu": 4}
        found[name] = updated(mesh, **rows)
        found[f"{name}, clipped"] = updated(mesh, gradient_clipping=CLIP, **rows)
    return found


Gradients = dict[str, Tensor]


def gradients(parts: int, alter: Callable[..., Tensor] | None = None, balance: float = 1.0) -> Gradients:
    """Return one process's gradients, of the mean over the parts of the batch; with other blocks if altered."""
    model = build_mixture()
    if alter is not None:
        for block in model.blocks:
            block.mix = partial(alter, block)  # type: ignore[method-assign]
    for ids in token_rows(0).chunk(parts):
        ((mixture_loss(model, ids) + balance * BALANCE * model.auxiliary_loss()) / parts).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def changed(before: Gradients, change: Callable[[Tensor], Tensor]) -> Gradients:
    """Return gradients of which those of experts are changed."""
    return {name: change(value) if name.endswith(EXPERT_PARTS) else value for name, value in before.items()}


def norm_of(values: Gradients) -> float:
    return float(torch.stack([value.square().sum() for value in values.values()]).sum().sqrt())


def stepped(values: Gradients, factor: float = 1.0) -> Weights:
    """Return the weights after an update with these gradients."""
    return {name: value - LR * factor * values[name] for name, value in weights_of(build_mixture()).items()}


PARTS = {"data": 2, "tensor": 1}
"""Parts of the batch, each with a loss of its own."""


def require_update(name: str, wrong: Gradients) -> None:
    """Assert that both ranks' weights are those of one process, and that wrong gradients would be seen."""
    right = gradients(PARTS[name])
    for norm, weights in results_by_name(everything)[name]:
        assert norm is not None
        assert gap(norm, norm_of(right)) <= 1e-9
        require(weights, stepped(right), stepped(wrong))


def half(values: Tensor, rank: int) -> Tensor:
    """Return a rank's half of the experts, and zero for the others."""
    mine = torch.arange(EXPERTS) // (EXPERTS // 2) == rank
    return torch.where(mine.view(-1, 1, 1), values, 0)


@pytest.mark.parametrize("name", MESHES)
def test_gradients_of_experts_do_not_grow_with_the_ranks_that_share_them(name: str) -> None:
    # The owner's gradient is the sum over the tokens of both ranks, and was divided as one over a single rank's.
    require_update(name, changed(gradients(PARTS[name]), lambda value: 2 * value))


def detached(block: Block, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Gathered weights of choices without their graph: the router learns from the balancing loss alone."""
    return block.experts(hidden, index, weights.detach())


def partial_sum(block: Block, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Gradients of choices among the rank's own experts, without those of the other ranks."""
    return block.experts(hidden, index, torch.where(index < EXPERTS // 2, weights, weights.detach()))


def with_empty_slots(block: Block, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Slots of other ranks' experts get a local expert's output: times zero forward, but not in the gradient."""
    slots = torch.where(index < EXPERTS // 2, 0.0, weights - weights.detach())
    return block.experts(hidden, index, weights) + block.experts(hidden, index % (EXPERTS // 2), slots)


def mispaired(block: Block, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Weights in another order than the choices."""
    return block.experts(hidden, index, weights.flip(-1))


@pytest.mark.parametrize("name", MESHES)
def test_the_router_gets_the_gradient_of_all_ranks_experts_from_the_loss(name: str) -> None:
    require_update(name, gradients(PARTS[name], detached))
    require_update(name, gradients(PARTS[name], partial_sum))


@pytest.mark.parametrize("name", MESHES)
def test_weights_and_choices_stay_pairs_and_others_get_no_gradient(name: str) -> None:
    require_update(name, gradients(PARTS[name], with_empty_slots))
    require_update(name, gradients(PARTS[name], mispaired))


def test_a_balancing_loss_weighs_the_same_however_ranks_share_the_batch() -> None:
    for name, parts in PARTS.items():
        require_update(name, gradients(parts, balance=2))  # counted by each rank of the axis
        require_update(name, gradients(parts, balance=0.5))  # divided by its size
        require_update(name, gradients(parts, balance=0))  # computed, and not in the backward


def of_half_the_rows(block: Block, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts get the gradient of one rank's rows."""
    frozen = {name: parameter.detach() for name, parameter in block.experts.named_parameters()}
    mine, others = (values.chunk(2) for values in (hidden, hidden))
    first = block.experts(mine[0], index.chunk(2)[0], weights.chunk(2)[0])
    second: Tensor = functional_call(block.experts, frozen, (others[1], index.chunk(2)[1], weights.chunk(2)[1]))
    return torch.cat([first, second])


@pytest.mark.parametrize("name", MESHES)
def test_experts_are_reduced_over_the_ranks_that_hold_them(name: str) -> None:
    # Taken for dense parameters, they were averaged with the experts that the other rank has in their place.
    require_update(name, changed(gradients(PARTS[name]), lambda value: (value + value.roll(EXPERTS // 2, 0)) / 2))
    # Or got what the rows of one rank of the tensor group gave.
    require_update(name, gradients(PARTS[name], of_half_the_rows))


@pytest.mark.parametrize("name", MESHES)
def test_the_norm_counts_every_expert_once_on_all_ranks(name: str) -> None:
    right = gradients(PARTS[name])
    of_rank = [norm_of(changed(right, partial(half, rank=rank))) for rank in range(2)]
    shared = norm_of(changed(right, torch.zeros_like))
    twice = (norm_of(right) ** 2 + shared**2) ** 0.5
    for norm, weights in results_by_name(everything)[f"{name}, clipped"]:
        # The mean of the ranks' norms, one rank's own, that without experts, and with shared parameters twice
        for wrong in (sum(of_rank) / 2, *of_rank, shared, twice):
            require(norm, norm_of(right), wrong)
        assert gap(weights, stepped(right, CLIP / (norm_of(right) + 1e-6))) <= 1e-9
