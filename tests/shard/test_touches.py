"""Parameters, and modules, that ranks use outside of a module's forward, or at different places of the model's."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeromesh
from harness import on_ranks
from run import sgd, start_engine

Parameters = Iterable[nn.Parameter]


def zero_times(parameters: Parameters) -> torch.Tensor:
    return 0.0 * sum(parameter.sum() for parameter in parameters)


# What the ranks add to the loss that do not call the adapter.
TOUCHES: dict[str, Callable[[nn.Sequential, torch.Tensor], torch.Tensor]] = {
    "sums": lambda adapter, x: zero_times(adapter.parameters()),
    "sums in another order": lambda adapter, x: zero_times(reversed(list(adapter.parameters()))),
    "norms": lambda adapter, x: sum(0.1 * one.norm() for one in adapter.parameters()),
    "squares, twice": lambda adapter, x: sum(0.1 * one.square().sum() for one in [*adapter.parameters()] * 2),
    "by name": lambda adapter, x: zero_times(one for _, one in adapter.named_parameters()),
    "state_dict": lambda adapter, x: zero_times(adapter.state_dict(keep_vars=True).values()),
    "data": lambda adapter, x: zero_times(one.data for one in adapter.parameters()),
    "the last only": lambda adapter, x: adapter[-1].weight.sum(),
    "functional": lambda adapter, x: F.linear(F.linear(x, adapter[1].weight), adapter[0].weight).square().mean(),
    "a forward of zeros": lambda adapter, x: 0.0 * adapter(torch.zeros_like(x)).sum(),
}


class Model(nn.Module):
    def __init__(self, touch: str) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.adapter = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.touch = TOUCHES.get(touch)
        self.place = touch

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            x = torch.tanh(block(x))
        return x

    def penalty(self, module: nn.Module) -> torch.Tensor:
        return 0.01 * sum(one.square().sum() for one in module.parameters())

    def forward(self, x: torch.Tensor, calls: bool) -> torch.Tensor:
        if self.touch is None:
            return PLACES[self.place](self, x, calls)
        x = self.trunk(x)
        more = self.adapter(x).square().mean() if calls else self.touch(self.adapter, x)
        return x.square().mean() + more


def touch_first(model: Model, x: torch.Tensor, calls: bool) -> torch.Tensor:
    h = model.trunk(x if calls else x + model.penalty(model.adapter))
    return h.square().mean() + (model.adapter(h).square().mean() if calls else 0.0)


def touch_and_call(model: Model, x: torch.Tensor, calls: bool) -> torch.Tensor:
    h = model.trunk(x + model.penalty(model.adapter) if calls else x)
    return h.square().mean() + (model.adapter(h).square().mean() if calls else 0.0)


def touch_between_calls(model: Model, x: torch.Tensor, calls: bool) -> torch.Tensor:
    h = model.trunk(x + model.penalty(model.adapter) + model.adapter(x) if calls else x)
    return h.square().mean() + (model.adapter(h).square().mean() if calls else 0.0)


def call_then_touch(model: Model, x: torch.Tensor, calls: bool) -> torch.Tensor:
    h = model.trunk(x)
    loss = h.square().mean() + float(calls) * model.adapter(h).square().mean()
    return loss + model.penalty(model.adapter) if calls else loss


def penalty_of_all(model: Model, x: torch.Tensor, calls: bool) -> torch.Tensor:
    loss = model.trunk(x).square().mean()
    return loss + model.penalty(model) if calls else loss


def call_first_or_touch_last(model: Model, x: torch.Tensor, calls: bool) -> torch.Tensor:
    loss = model.trunk(x + model.adapter(x) if calls else x).square().mean()
    return loss if calls else loss + zero_times(model.adapter.parameters())


# What ranks do that call the adapter, or touch it, at other places than others or not at all.
PLACES: dict[str, Callable[[Model, torch.Tensor, bool], torch.Tensor]] = {
    "touch first": touch_first,
    "touch and call": touch_and_call,
    "touch between calls": touch_between_calls,
    "call, then touch": call_then_touch,
    "penalty of all": penalty_of_all,
    "call first or touch last": call_first_or_touch_last,
}


def outside(model: nn.Module, root: Model, x: torch.Tensor, calls: bool) -> torch.Tensor:
    before = x + root.adapter(x) if calls else x
    loss = model(before, calls)
    return loss + root.adapter(x).square().mean() if calls else loss


def make(touch: str) -> Model:
    torch.manual_seed(0)
    return Model(touch).double()


def inside(model: nn.Module, root: Model, x: torch.Tensor, calls: bool) -> torch.Tensor:
    loss: torch.Tensor = model(x, calls)
    return loss


def train(
    touch: str, stage: int, calls: str, slots: int = 2, loss: Callable[..., torch.Tensor] = inside, clips: bool = False
) -> None:
    model, plain = make(touch), make(touch)
    engine = start_engine(model, micro=2, optimizer=sgd(0.1), stage=stage, slots={"parameter": slots})
    optimizer, rank = torch.optim.SGD(plain.parameters(), 0.1), engine.mesh.rank
    for update in calls.split():
        x = torch.randn(2, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(len(update)))
        engine.backward(loss(engine, model, x[rank], update[rank] == "c"))
        if clips:
            zeromesh.clip_grad_norm_(model.parameters(), 1e3)
        engine.step()
        optimizer.zero_grad()
        for one in range(2):
            (loss(plain, plain, x[one], update[one] == "c") / 2).backward()
        optimizer.step()
    with zeromesh.zero.GatheredParameters(list(model.parameters())):
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}")
    engine.destroy()


@on_ranks(2)
def test_a_parameter_used_on_one_rank_meets_its_modules_forward_on_another() -> None:
    for touch in ("sums", "sums in another order", "norms"):
        train(touch, 3, "tt ct cc tc")


@on_ranks(2)
def test_gradients_that_are_late_on_one_rank_are_summed_on_all() -> None:
    for place in ("touch first", "touch between calls"):
        train(place, 3, "tt ct tc")


@pytest.mark.full
@pytest.mark.parametrize("place", [*PLACES])
@on_ranks(2)
def test_a_module_is_used_at_different_places_of_the_forward(place: str) -> None:
    scarce = place in ("touch first", "touch and call", "touch between calls")  # the others need every block in memory
    for stage, slots in ((3, 2 if scarce else 8), (3, 8), (2, 2)):
        for calls in ("tt ct cc tc", "ct tc", "tc tt"):
            train(place, stage, calls, slots)
            train(place, stage, calls, slots, clips=True)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_a_module_may_be_called_outside_of_the_model_on_one_rank(stage: int) -> None:
    for place in ("penalty of all", "touch first"):
        for calls in ("tt ct cc tc", "ct tc", "tc tt"):
            train(place, stage, calls, loss=outside)


@pytest.mark.full
@pytest.mark.parametrize("touch", [*TOUCHES])
@on_ranks(2)
def test_every_use_of_parameters_meets_a_forward(touch: str) -> None:
    for stage, slots in ((3, 2), (3, 4), (2, 2)):
        for calls in ("tt ct cc tc", "ct tc", "tc tt"):
            train(touch, stage, calls, slots)
