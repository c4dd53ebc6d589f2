"""Graphs that are made inside ``GatheredParameters`` and needed outside of it."""

import copy

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from run import configuration, sgd, start_engine, train_step, whole_parameters
from zeromesh.zero import GatheredParameters

STEPS = 3


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 6, dtype=torch.float64, generator=generator)


def penalty(model: nn.Module) -> torch.Tensor:
    squares = sum((p.pow(2).sum() for p in model.parameters()), torch.zeros((), dtype=torch.float64))
    return squares + (model[0].weight @ model[2].weight.t()).square().mean()  # type: ignore[index]


def train(row: int, inside: bool) -> list[torch.Tensor]:
    model = make()
    engine = start_engine(model, micro=2, optimizer=sgd(0.1), stage=row, slots={"parameter": 2, "gradient": 2})
    for step in range(STEPS):
        x = batch(step, engine.data_rank)
        loss = None if inside else engine(x).square().mean()
        with GatheredParameters(list(model.parameters())):
            loss = engine(x).square().mean() if loss is None else loss
            loss = loss + penalty(model)
            copied = copy.deepcopy(model)
        assert type(copied[0].weight) is nn.Parameter
        train_step(engine, loss)
    return list(whole_parameters(model).values())


@pytest.mark.parametrize("inside", [False, True])
def test_graphs_of_gathered_parameters_are_differentiated_as_in_plain_torch(inside: bool) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(2):
            ((model(batch(step, rank)).square().mean() + penalty(model)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(train, 2, 3, inside):
        for got, want in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)


def mix() -> tuple[list[torch.Tensor], list[str]]:
    """Average two engines' weights, as a teacher's; then differentiate products of them."""
    config = configuration(micro=2, optimizer=sgd(0.1), stage=3, units=["Linear"])
    student, teacher = (zeromesh.initialize(model=make(), config=config)[0] for _ in range(2))
    train_step(student, student(batch(0, student.data_rank)).square().mean())
    ours, theirs = list(student.module.parameters()), list(teacher.module.parameters())
    said = []
    with GatheredParameters(ours), GatheredParameters(theirs, modifier_rank=0):
        with torch.no_grad():
            for target, source in zip(theirs, ours, strict=True):
                target.lerp_(source, 0.25)
        with pytest.raises(RuntimeError) as caught:
            ours[0] * theirs[0]
        said.append(str(caught.value))
        mixed = (ours[0] * theirs[0].detach().clone()).sum()
    (gradient,) = torch.autograd.grad(mixed, [ours[0]])
    with GatheredParameters(theirs):
        whole = [parameter.detach().clone() for parameter in theirs]
    assert torch.equal(gradient, whole[0])
    return whole, said


def test_gathered_parameters_of_two_engines_are_computed_with_and_not_differentiated() -> None:
    model, teacher = make(), make()
    for rank in range(2):
        (model(batch(0, rank)).square().mean() / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        for target, source in zip(teacher.parameters(), model.parameters(), strict=True):
            target.lerp_(source, 0.25)
    for found, said in run_ranks(mix, 2):
        assert "mul of gathered parameters of two engines cannot be differentiated: clone" in said[0]
        for got, want in zip(found, teacher.parameters(), strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)
