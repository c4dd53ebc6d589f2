"""A user's optimizer computes what it computes in torch, on pieces of parameters too, or is refused."""

import types
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks
from run import configuration, plain_step, train_step
from zeromesh.base.kernels.update_rules import rule_of, update_class
from zeromesh.shard.optim.pieces import require_pieces
from zeromesh.shard.tables.row_rules import rule_of as table_rule_of

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


def parameters() -> list[nn.Parameter]:
    return [*nn.Sequential(nn.Linear(4, 6), nn.Conv2d(2, 3, 3)).parameters()]


def changed(optimizer: torch.optim.Optimizer, change: Callable[[Any], None]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                change(parameter)


class Ascent(AdamW):
    def step(self, closure: Any = None) -> Any:
        changed(self, lambda p: p.grad.neg_())
        return super().step(closure)


class Wrapped(AdamW):
    @wraps(AdamW.step)
    def step(self, closure: Any = None) -> Any:
        changed(self, lambda p: p.grad.neg_())
        return super().step(closure)


class Normalised(SGD):
    def step(self, closure: Any = None) -> Any:
        changed(self, lambda p: p.grad.div_(p.grad.norm()))
        return super().step(closure)


class Rows(torch.optim.Optimizer):
    """Means over rows, as Adafactor takes them."""

    def __init__(self, of: Iterable[Any]) -> None:
        super().__init__(of, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        changed(self, lambda p: p.sub_(p.grad / p.grad.square().mean(-1, keepdim=True).sqrt()))


class Few(SGD):
    """Acts on small gradients, as rules against vanishing ones do."""

    def step(self, closure: Any = None) -> Any:
        changed(self, lambda p: p.grad.mul_(2 if p.grad.norm() < 1 else 1))
        return super().step(closure)


class Late(SGD):
    """Acts in every tenth step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps % 10 == 0:
            changed(self, lambda p: p.grad.sub_(p.grad.mean()))
        return super().step(closure)


class Places(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(place + 1)
        return super().step(closure)


class Listed(torch.optim.Optimizer):
    """Updates the parameters that it was given, whatever its groups hold."""

    def __init__(self, of: Iterable[Any]) -> None:
        self.listed = list(of)
        super().__init__(self.listed, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.listed:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-2)


class Marked(torch.optim.Optimizer):
    """Takes rates from attributes of the parameters, and decays those that are called weights."""

    def __init__(self, of: Iterable[Any]) -> None:
        members = list(of)
        for place, (_, parameter) in enumerate(members):
            parameter.scale = place + 1.0
        super().__init__(members, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    parameter.mul_(0.9 if name.endswith("weight") else 1).sub_(parameter.grad, alpha=parameter.scale)


class Renamed(AdamW):
    def __init__(self, of: Iterable[Any]) -> None:
        super().__init__(of, lr=1e-2)


def patched(of: Iterable[Any]) -> torch.optim.Optimizer:
    optimizer = AdamW(of, lr=1e-2)
    inner = optimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        changed(self, lambda p: p.grad.neg_())
        return inner(closure)

    optimizer.step = types.MethodType(step, optimizer)
    return optimizer


def scheduled(of: Iterable[Any]) -> torch.optim.Optimizer:
    optimizer = Renamed(of)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def test_a_step_of_ones_own_is_not_taken_for_that_of_torch() -> None:
    for make in (Renamed, scheduled):
        optimizer = make(parameters())
        assert update_class(optimizer) is AdamW
        assert rule_of(optimizer, optimizer.param_groups[0]) == "adamw"
    for make in (Ascent, Wrapped, patched):
        optimizer = make(parameters())
        assert rule_of(optimizer, optimizer.param_groups[0]) is None
        with pytest.raises(ValueError, match="has no update for rows of table"):
            table_rule_of(optimizer, optimizer.param_groups[0], "table")


def test_a_trial_tells_which_optimizers_are_right_on_pieces() -> None:
    for make in (Renamed, Ascent, scheduled, lambda of: SGD(of, lr=0.0)):
        before = parameters()
        require_pieces(make(before))
        assert all(parameter.grad is None for parameter in before)
    wrong: list[tuple[Callable[..., Any], str]] = [
        (Normalised, "Normalised would be wrong on sharded parameters.*use ZeRO-0"),
        *((kind, f"{kind.__name__} would be wrong on sharded parameters") for kind in (Rows, Few, Late, Places)),
        (Listed, "step of Listed changes nothing of the parameters in its param_groups.*read self.param_groups"),
        (torch.optim.LBFGS, r"a trial of it on small tensors failed \(TypeError"),
        (patched, "a method of this AdamW was replaced in the object"),
    ]
    for make, text in wrong:
        with pytest.raises(ValueError, match=text):
            require_pieces(make(parameters()))


def start(optimizer: Any, stage: int, host: bool = False, half: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    zero: Any = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if host else {})}
    config: dict[str, Any] = configuration(zero=zero, micro=2, zero_allow_untested_optimizer=True)
    if half:
        config["bf16"] = {"enabled": True}
    made = optimizer(model.named_parameters() if optimizer is Marked else model.parameters())
    return (model, made) if stage < 0 else zeromesh.initialize(model=model, optimizer=made, config=config)[:2]


@on_ranks(2)
def test_optimizers_with_a_step_of_their_own_compute_it() -> None:
    for kind in (Wrapped, Marked):
        model, optimizer = start(kind, -1)
        for number in range(2):
            plain_step(optimizer, model(torch.ones(2, 4) * (number + 1)).sum())
        for stage, host in ((0, False), (2, True), (3, False)):
            engine, optimizer = start(kind, stage, host)
            for number in range(2):
                train_step(engine, engine(torch.ones(2, 4) * (number + 1)).sum())
            torch.testing.assert_close(dict(engine.state_dict()), dict(model.state_dict()))
            engine.destroy()
    with pytest.raises(ValueError, match="Rows would be wrong on sharded parameters"):
        start(Rows, 1)
    with pytest.raises(ValueError, match="Listed changes nothing"):
        start(Listed, 0, half=True)  # the masters are in its groups


def clips(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)


@on_ranks(2)
def test_hooks_of_the_step_run_once_and_see_no_pieces() -> None:
    for stage, host in ((0, False), (2, False), (3, True)):
        engine, optimizer = start(Renamed, stage, host)
        calls: list[Any] = []
        optimizer.register_step_pre_hook(lambda of, *_: calls.append(of.param_groups[0]["lr"]))  # noqa: B023
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))  # noqa: B023
        for step in (engine.step, optimizer.step):
            engine.backward(engine(torch.ones(2, 4)).sum())
            step()
        assert calls == [1e-2, "after"] * 2
        handle = optimizer.register_step_pre_hook(clips)
        engine.backward(engine(torch.ones(2, 4)).sum())
        if stage:
            with pytest.raises(RuntimeError, match="which are pieces on this rank: set gradient_clipping"):
                engine.step()
            handle.remove()
            engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        engine.destroy()


@on_ranks(2)
def test_hooks_of_the_step_set_the_rate_of_this_update_wherever_states_are() -> None:
    def warm(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 2

    found = []
    for stage, host in ((0, False), (2, False), (3, True)):
        engine, optimizer = start(Renamed, stage, host)
        optimizer.register_step_pre_hook(warm)
        for _ in range(2):
            train_step(engine, engine(torch.ones(2, 4)).sum())
        found.append(dict(engine.state_dict()))
        engine.destroy()
    for state in found[1:]:
        torch.testing.assert_close(state, found[0])
