"""States of optimizers, learning rates and schedules in a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from compare import assert_same
from harness import on_ranks, run_ranks
from run import train_step
from runs import config, everything, start, train
from zeromesh.checkpoint.contents import scheduler_name
from zeromesh.checkpoint.manifest import signed
from zeromesh.checkpoint.optimizer_states import state_number

# Optimizers and parameters of other shapes.


class Mine(torch.optim.AdamW):
    """Not known to work element by element, so it sees parameters in their own shape."""


class Momenta(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["counts"] = state.get("counts", torch.zeros(2, 3, dtype=torch.int64)) + 1
            state["none"] = torch.zeros(0, dtype=parameter.dtype)


class Matrices(nn.Module):
    def __init__(self, scale: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, bias=False)
        self.second = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(())) if scale else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).sum() * self.scale


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": lambda parameters: torch.optim.Muon(parameters, lr=0.1),
    "Mine": lambda parameters: Mine(parameters, lr=0.1),
    "Momenta": lambda parameters: Momenta(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def start_whole(kind: str, row: int = 0) -> zeromesh.Engine:
    model = Matrices(scale=kind != "Muon").double()
    optimizer = WHOLE[kind](model.parameters())
    settings = {"zero_optimization": {"stage": row}, "zero_allow_untested_optimizer": True}
    return zeromesh.initialize(model=model, optimizer=optimizer, config=settings)[0]


def update(engine: zeromesh.Engine, steps: int) -> None:
    for _ in range(steps):
        x = torch.arange(12.0, dtype=torch.float64).view(2, 6) / (1 + engine.global_steps + engine.mesh.rank)
        train_step(engine, engine(x))


def resume_whole(folder: str, kind: str, save: bool) -> dict[str, torch.Tensor]:
    if save:
        engine = start_whole(kind)
        update(engine, 2)
        engine.save_checkpoint(folder)
        saved = everything(engine)
        update(engine, 2)
        expected = everything(engine)
    again = start_whole(kind)
    again.load_checkpoint(folder)
    loaded = everything(again)
    if save:
        assert_same(loaded | {"others": saved["others"]}, saved)
        update(again, 2)
        assert_same(everything(again) | {"others": expected["others"]}, expected)
    return {name: value for name, value in loaded.items() if name not in ("torch", "others")}


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", WHOLE)
def test_states_of_optimizers_that_see_whole_parameters_are_kept_as_they_are(kind: str, tmp_path: Path) -> None:
    first, _ = run_ranks(resume_whole, 2, str(tmp_path), kind, True)
    assert any("first.weight " in name for name in first), "the optimizer has states"
    for loaded in run_ranks(resume_whole, 3, str(tmp_path), kind, False):
        assert_same(loaded, first)


def refuse_to_cut(folder: str) -> list[str]:
    engine, sharded = start_whole("Momenta"), start_whole("Momenta", row=1)
    update(engine, 1)
    engine.save_checkpoint(folder)
    found = []
    before = everything(sharded)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        sharded.load_checkpoint(folder)
    found.append(str(caught.value))
    assert_same(everything(sharded) | {"others": before["others"]}, before)
    update(sharded, 1)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        sharded.save_checkpoint(folder)
    return [*found, str(caught.value)]


def test_states_of_other_shapes_are_not_cut(tmp_path: Path) -> None:
    ranks = run_ranks(refuse_to_cut, 2, str(tmp_path))
    assert any("optimizer/counts/first.weight" in found[0] and "cannot be cut" in found[0] for found in ranks)
    assert any("optimizer state 'counts' of first.weight has shape (2, 3)" in found[1] for found in ranks)
    assert all("could not" in words or "shape (2, 3)" in words for found in ranks for words in found)


class Hollow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.rows = nn.Parameter(torch.zeros(0, 4))
        self.columns = nn.Parameter(torch.zeros(4, 0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() + self.rows.sum() + self.columns.sum()


@pytest.mark.parametrize("row", [0, 1, 3])
@on_ranks(2)
def test_parameters_without_elements_need_nothing_in_a_checkpoint(row: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    settings = config(row) | {"scheduler": None}
    engine, again = (zeromesh.initialize(model=Hollow().double(), config=settings)[0] for _ in range(2))
    train_step(engine, engine(torch.ones(2, 3, dtype=torch.float64)))
    engine.save_checkpoint(folder)
    again.load_checkpoint(folder)
    assert_same(again.gathered_state_dict(), engine.gathered_state_dict())


@pytest.mark.parametrize(
    ("key", "group", "device", "dtype"),
    [
        ("step", {}, "cpu", torch.float64),
        ("step", {"fused": None, "capturable": False}, "cpu", torch.float64),
        ("step", {"fused": True}, "meta", torch.float32),
        ("step", {"capturable": True}, "meta", torch.float32),
        ("eta", {}, "meta", torch.float64),
    ],
)
def test_single_numbers_of_an_optimizer_come_back_where_torch_puts_them(key, group, device, dtype) -> None:
    # The device without memory stands for any that is not the host.
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    number = state_number(key, [4.0, "float64"], parameter, group)
    assert (number.device.type, number.dtype, number.shape) == (device, dtype, ())
    assert state_number(key, 4, parameter, group) == 4
    torch_own = torch.optim.SGD._process_value_according_to_param_policy(
        parameter.double(), torch.tensor(4.0, dtype=torch.float64), 0, [{"params": [0], **group}], key
    )
    assert (number.device, number.dtype) == (torch_own.device, torch_own.dtype)


def start_moving(scheduler: Callable[[Any], Any] | None, rate: Any, betas: Any = (0.9, 0.999)) -> zeromesh.Engine:
    model = nn.Linear(3, 2).double()
    rest = {"params": [model.weight]}
    optimizer = torch.optim.AdamW([{"params": [model.bias], "lr": rate}, rest], lr=0.5, betas=betas, foreach=False)
    more = {} if scheduler is None else {"lr_scheduler": scheduler(optimizer)}
    return zeromesh.initialize(model=model, optimizer=optimizer, config={}, **more)[0]


def move(engine: zeromesh.Engine) -> list[float]:
    train_step(engine, engine(torch.ones(1, 3, dtype=torch.float64)).sum())
    return engine.get_lr()


@on_ranks(2)
def test_learning_rates_that_are_tensors_are_restored_in_place(tmp_path: Path) -> None:
    folder = str(tmp_path)
    betas = (torch.tensor(0.8), torch.tensor(0.99))
    engine = start_moving(None, torch.tensor(0.1), betas)
    engine.optimizer.param_groups[0]["lr"].fill_(0.02)
    engine.optimizer.param_groups[0]["betas"][0].fill_(0.7)
    move(engine)
    engine.save_checkpoint(folder)
    rate, betas = torch.tensor(0.1), (torch.tensor(0.8), torch.tensor(0.99))
    again = start_moving(None, rate, betas)
    again.load_checkpoint(folder)
    assert again.get_lr() == engine.get_lr()
    assert again.optimizer.param_groups[0]["lr"] is rate, "what others hold of the group is still its own"
    assert again.optimizer.param_groups[0]["betas"][0] is betas[0]
    assert betas[0].item() == pytest.approx(0.7)
    plain = start_moving(None, 0.1)
    plain.load_checkpoint(folder)
    assert plain.optimizer.param_groups[0]["lr"] == rate.item()
    assert isinstance(plain.optimizer.param_groups[0]["lr"], float)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.3**step),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.StepLR(optimizer, 1, factor) for factor in (0.5, 0.1)], milestones=[2]
    ),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
@on_ranks(1)
def test_a_schedule_goes_on_without_the_optimizers_states(kind: str, tensor: bool, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def begin() -> zeromesh.Engine:
        return start_moving(SCHEDULERS[kind], torch.tensor(0.1) if tensor else 0.1)

    engine = begin()
    for _ in range(3):
        move(engine)
    engine.save_checkpoint(folder)
    now, later = engine.get_lr(), [move(engine), move(engine)]
    for optimizer_states in (False, True):
        again = begin()
        again.load_checkpoint(folder, load_optimizer_states=optimizer_states)
        assert again.get_lr() == now
        assert [move(again), move(again)] == later


PARAMS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupCosineLR": {"warmup_num_steps": 4, "total_num_steps": 9},
    "StepLR": {"step_size": 1},
}


@on_ranks(2)
def test_the_state_of_another_scheduler_is_refused_with_both_names(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def begin(scheduler: Any) -> zeromesh.Engine:
        chosen = None if scheduler is None else {"type": scheduler, "params": PARAMS[scheduler]}
        return start(1, config(3) | {"scheduler": chosen})

    engine = begin("WarmupLR")
    train(engine, 2)
    engine.save_checkpoint(folder)
    found = {}
    for other in ("StepLR", "WarmupCosineLR"):
        again = begin(other)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            again.load_checkpoint(folder)
        found[other] = str(caught.value)
        assert again.global_steps == 0
        again.load_checkpoint(folder, load_lr_scheduler_states=False)
        assert again.global_steps == 2
    engine = begin("StepLR")
    path = engine.save_checkpoint(folder, tag="former")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["scheduler_type"], manifest["sha256"]
    engine.mesh.group("world").exchange(torch.zeros(1))
    if engine.mesh.rank == 0:
        (path / "manifest.json").write_text(json.dumps(signed(manifest)))
    engine.mesh.group("world").exchange(torch.zeros(1))
    engine.load_checkpoint(folder, tag="former")
    with pytest.raises(
        ValueError, match="is of a scheduler whose state lacks last_batch_iteration, but this run has Wa"
    ):
        begin("WarmupLR").load_checkpoint(folder, tag="former")
    begin(None).load_checkpoint(folder)
    for other, text in found.items():
        assert f"is of WarmupLR, but this run has {other}; make the same scheduler, or pass" in text


def test_schedulers_that_are_made_of_others_are_named_with_them() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert scheduler_name(SCHEDULERS["sequence"](optimizer)) == "SequentialLR(StepLR, StepLR)"
    assert scheduler_name(None) is None
