"""Running statistics, dropped gradients and writes to parameters: silent errors of others, and that ours are right."""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeromesh
from museum import Weights, gap, require, results_by_name, start, weights_of, whole
from run import train_step

UNEVEN = (2, 5)
"""Samples of the two ranks."""


def images() -> Tensor:
    """Return the joint batch with the channels last, so that what a norm is given is not contiguous."""
    return torch.randn(sum(UNEVEN), 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).exp()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.permute(0, 2, 1)).permute(0, 2, 1)).tanh()


def normed() -> Normed:
    torch.manual_seed(2)
    return Normed().double()


def norm_over_ranks() -> dict[str, Tensor]:
    """Normalise over all ranks, which have different numbers of samples, and train on the mean over these."""
    engine = start(zeromesh.sync_batch_norm(normed()))
    x = images().split(UNEVEN)[dist.get_rank()]
    train_step(engine, engine(x).mean() * len(x) * 2 / sum(UNEVEN))
    return whole(engine) | dict(engine.module.named_buffers())


def norm_of_each_rank() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Normalise on each rank: the buffers after an update, and those of the whole state."""
    engine = start(normed())
    train_step(engine, engine(images().split(UNEVEN)[dist.get_rank()]).mean())
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    state = engine.state_dict()
    return buffers, {name: state[name] for name in buffers}


class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.prototypes = nn.Linear(3, 3), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.prototypes(self.body(x).tanh()).square().mean()


def prototypes() -> Prototypes:
    torch.manual_seed(5)
    return Prototypes().double()


def rows(step: int) -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def drop_gradients(stage: int) -> Weights:
    engine = start(prototypes(), zero_optimization={"stage": stage}, units=["Linear"])
    for step in range(3):
        engine.backward(engine(rows(step).chunk(2)[dist.get_rank()]))
        if step < 2:
            engine.module.prototypes.weight.grad = None
        engine.step()
    return whole(engine)


def average(stage: int, precision: dict[str, Any]) -> list[tuple[float, float]]:
    """Train, write the average of the weights over the updates into another engine, and evaluate with it."""
    model, other = prototypes().float(), prototypes().float()
    settings = {"zero_optimization": {"stage": stage}, "units": ["Linear"], **precision}
    engine, averaged = start(model, **settings), start(other, **settings)
    found = []
    for step in range(3):
        train_step(engine, engine(rows(step).float().chunk(2)[dist.get_rank()]))
        parameters, targets = list(engine.module.parameters()), list(averaged.module.parameters())
        gathered = zeromesh.zero.GatheredParameters
        with gathered(parameters), gathered(targets, modifier_rank=0), torch.no_grad():
            for target, parameter in zip(targets, parameters, strict=True):
                target.lerp_(parameter, 0.5)
            copy = prototypes().to(targets[0].dtype)
            for value, target in zip(copy.parameters(), targets, strict=True):
                value.copy_(target)
        with torch.no_grad():
            x = rows(9).to(targets[0].dtype)
            found.append((float(averaged.eval()(x)), float(copy(x))))
    return found


def build_before_the_group() -> tuple[int, Weights]:
    """Build a model inside ``Init`` before anything has started the ranks' group: elements here, and whole weights."""
    torch.manual_seed(0)
    with zeromesh.zero.Init():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = start(model, zero_optimization={"stage": 3}, units=["Linear"])
    return sum(len(value) for value in owned(engine)), whole(engine)


def owned(engine: zeromesh.Engine) -> list[Tensor]:
    return [piece.parameter for flat in engine.sharded.flats for _, _, piece in flat.pieces]


def program() -> dict[str, Any]:
    return {
        "over ranks": norm_over_ranks(),
        "each rank": norm_of_each_rank(),
        "dropped": {stage: drop_gradients(stage) for stage in range(4)},
        "averages": [average(stage, precision) for stage in (2, 3) for precision in ({}, {"bf16": {"enabled": True}})],
        "init": build_before_the_group(),
    }


def joint(parts: tuple[int, ...]) -> dict[str, Tensor]:
    """Update once in one process, where statistics are those of all samples, or means over the parts' statistics."""
    model, statistics = normed(), []
    for x in images().split(parts):
        model.norm.reset_running_stats()
        (model(x).mean() * len(x) / sum(UNEVEN)).backward()
        statistics.append({name: buffer.double().clone() for name, buffer in model.named_buffers()})
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return weights_of(model) | {n: sum(s[n] for s in statistics) / len(parts) for n in statistics[0]}  # type: ignore[misc]


def test_batch_norm_over_ranks_weighs_them_by_their_samples() -> None:
    right, wrong = joint((sum(UNEVEN),)), joint(UNEVEN)
    for found in results_by_name(program)["over ranks"]:
        require(found, right, wrong)


def test_all_ranks_evaluate_with_the_running_statistics_that_are_saved() -> None:
    of_ranks = []
    for x in images().split(UNEVEN):
        model = normed()
        model(x)
        of_ranks.append(dict(model.named_buffers()))
    for buffers, saved in results_by_name(program)["each rank"]:
        require(buffers, of_ranks[0], of_ranks[1])  # as without an exchange, on the other rank
        require(saved, buffers, of_ranks[1])


def test_a_gradient_that_is_dropped_is_not_used() -> None:
    weights = []
    for drops in (True, False):
        model = prototypes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            model(rows(step)).backward()
            if drops and step < 2:
                model.prototypes.weight.grad = None
            optimizer.step()
        weights.append(weights_of(model))
    for found in results_by_name(program)["dropped"]:
        for stage in range(4):
            require(found[stage], *weights)


def test_what_is_written_to_a_parameter_is_computed_with() -> None:
    for found in results_by_name(program)["averages"]:
        for losses in found:
            for loss, right in losses:
                assert loss == right
            # With the weights of the evaluation before, as where those in memory are not written again.
            assert min(abs(one - other) for (one, _), (other, _) in pairwise(losses)) > 1e-4


def test_a_model_that_is_built_before_the_ranks_know_each_other_is_sharded() -> None:
    total = 2 * (8 * 8 + 8)
    elements = [count for count, _ in results_by_name(program)["init"]]
    assert sum(elements) == total
    assert max(elements) < total
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for _, weights in results_by_name(program)["init"]:
        assert gap(weights, weights_of(model)) == 0.0


class Wide(nn.Module):
    """Adds to a large number in fp32, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.001))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * self.scale.float() - 1).square().mean()


def test_layers_that_are_to_stay_in_fp32_do() -> None:
    keep = {"data_types": {"keep_in_fp32_modules": ["scale"]}}
    engine = start(Wide(), bf16={"enabled": True}, **keep)
    x = torch.ones(2, 4)
    require(engine(x) * 1e6, Wide()(x) * 1e6, Wide().bfloat16()(x) * 1e6, 1e-6)
