"""A checkpoint continues the run that wrote it, exactly, on this layout and on others."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

import zeromesh
from harness import run_ranks
from numerics import BATCH, MESHES, OPTIMIZERS, PRECISIONS, Net, batch, build_net, make_optimizers
from zeromesh import saving
from zeromesh.checkpoint import boxes

PART = 3
"""Updates before a checkpoint, and after it."""


class Noisy(nn.Module):
    """Draws from every generator there is; keeps running statistics, and a buffer that is not part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.late = nn.Linear(10, 10)
        self.register_buffer("positions", torch.arange(10.0), persistent=False)

    def forward(self, tokens: torch.Tensor, late: bool = False) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + self.drop(torch.tanh(block(x))) * (0.5 + random.random()) * (0.5 + float(numpy.random.rand()))
        x = self.late(x) if late else x
        logits = self.head(self.norm(x) * self.scale)
        return nn.functional.cross_entropy(logits.double(), tokens.roll(1))


def config(row: int, precision: str = "float64", mesh: str = "2", optimizer: str = "adamw") -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": row},
        "mesh": MESHES[mesh],
        "optimizer": {"type": optimizer, "params": dict(OPTIMIZERS[optimizer])},
        "scheduler": {"type": "MultiStepLR", "params": {"milestones": [2, 4], "gamma": 0.5}},
        **PRECISIONS[precision],
    }


def start(seed: int, settings: dict[str, Any]) -> zeromesh.Engine:
    torch.manual_seed(seed)
    model = Noisy().double() if not {"bf16", "fp16"} & set(settings) else Noisy()
    return zeromesh.initialize(model=model, config=settings)[0]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def train(engine: zeromesh.Engine, updates: int, late: bool = True) -> list[Any]:
    """The losses, norms and learning rates of some updates."""
    history = []
    for _ in range(updates):
        tokens = torch.randint(0, 13, (6,))
        loss = engine(tokens, late and engine.global_steps > 3)
        engine.backward(loss)
        engine.step()
        # As text, in which nan equals nan: the first updates in fp16 overflow.
        history.append(str((loss.item(), engine.get_global_grad_norm(), engine.get_lr(), engine.loss_scale)))
    return history


def everything(engine: zeromesh.Engine) -> dict[str, torch.Tensor]:
    """All that a run has on this rank: masters, optimizer states, buffers, generators."""
    found = {f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    for piece in engine.sharded.pieces.values():
        if piece is not None:
            found[piece.name] = piece.parameter.detach().clone()
            for key, value in engine.optimizer.state.get(piece.parameter, {}).items():
                found[f"{piece.name} {key}"] = torch.as_tensor(value).clone()
    found["torch"] = torch.get_rng_state()
    found["others"] = torch.tensor([random.random(), numpy.random.rand()], dtype=torch.float64)
    found["counters"] = torch.tensor([engine.global_steps, engine.micro_steps, engine.skipped_steps])
    return found


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def resume(folder: str, settings: dict[str, Any]) -> None:
    """An undisturbed run, one that goes back to the checkpoint, and a new one that loads it, end in the same state."""
    engine = start(1, settings)
    seed_everything(10 + engine.mesh.rank)
    train(engine, PART)
    path = engine.save_checkpoint(folder, client_state={"epoch": 3, "seen": (1, 2), "by number": {7: "x"}})
    assert path.name == f"global_step{PART}"
    history = train(engine, PART)
    expected = everything(engine)
    train(engine, 1)
    for again in (engine, start(2, settings)):
        seed_everything(99)
        loaded, client = again.load_checkpoint(folder)
        assert loaded == str(path)
        assert client == {"epoch": 3, "seen": (1, 2), "by number": {7: "x"}}
        assert train(again, PART) == history
        assert_same(everything(again), expected)


CASES = [
    ("row 0, float64", config(0)),
    ("row 1, float64, lamb", config(1, optimizer="lamb")),
    ("row 1, bf16", config(1, "bf16")),
    ("row 2, fp16", config(2, "fp16")),
    ("row 3, bf16, muon", config(3, "bf16", optimizer="muon")),
    ("row 3, float64, sgd, 2x2 ranks", config(3, mesh="2x2", optimizer="sgd")),
    ("row 3, fp16, adagrad, 3 ranks", config(3, "fp16", mesh="3", optimizer="adagrad")),
]


@pytest.mark.parametrize("settings", [settings for _, settings in CASES], ids=[name for name, _ in CASES])
def test_a_resumed_run_continues_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    mesh = settings["mesh"]
    run_ranks(resume, mesh.get("replicate", 1) * mesh["data"], str(tmp_path), settings)
    files = sorted(path.name for path in (tmp_path / f"global_step{PART}").iterdir())
    assert files[0] == "manifest.json"
    assert all(name.endswith(".safetensors") for name in files[1:]), "nothing but safetensors and JSON is written"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"global_step{PART}", "latest"]


# Other layouts.


def train_part(folder: str, first: int, settings: dict[str, Any]) -> Any:
    """Three updates from where the last part stopped; the loss of each, and all of the model."""
    engine = zeromesh.initialize(model=build_net(torch.float64), config=settings)[0]
    if first:
        engine.load_checkpoint(folder)
    assert engine.global_steps == first
    losses = []
    for step in range(first, first + PART):
        each = BATCH // engine.data_size
        rows = slice(engine.data_rank * each, (engine.data_rank + 1) * each)
        losses.append(engine(*batch(step, torch.float64, rows)))
        engine.backward(losses[-1])
        engine.step()
    engine.save_checkpoint(folder)
    return [loss.item() for loss in losses], engine.gathered_state_dict()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "lamb", "muon", "adagrad"])
def test_a_checkpoint_of_one_layout_continues_on_every_other(optimizer: str, tmp_path: Path) -> None:
    model = build_net(torch.float64)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    views, optimizers = make_optimizers(optimizer, trained)
    layouts = [(3, "4"), (0, "1"), (2, "3"), (3, "2x2"), (1, "2"), (0, "2"), (3, "1")]
    for part, (row, mesh) in enumerate(layouts[: 7 if optimizer == "adamw" else 4]):
        settings = config(row, mesh=mesh, optimizer=optimizer) | {"scheduler": None}
        ranks = MESHES[mesh].get("replicate", 1) * MESHES[mesh]["data"]
        found = run_ranks(train_part, ranks, str(tmp_path), part * PART, settings)
        for number, step in enumerate(range(part * PART, (part + 1) * PART)):
            model.zero_grad()
            loss = model(*batch(step, torch.float64))
            loss.backward()
            step_plainly(views, optimizers, trained)
            assert sum(losses[number] for losses, _ in found) / ranks == pytest.approx(loss.item(), rel=1e-9)
        assert_close(found[0][1], model)
        assert not any(state for _, state in found[1:])


def step_plainly(views: Any, optimizers: Any, trained: dict[str, nn.Parameter]) -> None:
    for (name, start, stop), view in views.items():
        gradient = trained[name].grad
        view.grad = None if gradient is None else gradient.flatten()[start:stop].view(view.shape)
    for optimizer in optimizers:
        optimizer.step()


def assert_close(got: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        error = ((got[name] - parameter).abs() / (1 + parameter.abs())).max().item()
        assert error <= 1e-9, f"{name} is off by {error}"


# What a checkpoint holds, and what of it is taken.


def groups_of(model: Net) -> list[dict[str, Any]]:
    """One large group, and one so small that only the last rank has a piece of it."""
    last = [model.head.bias]
    rest = [p for p in model.parameters() if p.requires_grad and p is not model.head.bias]
    return [{"params": last, "lr": 0.1}, {"params": rest}]


def resume_groups(folder: str) -> list[Any]:
    found = []
    for load in (False, True):
        model = build_net(torch.float64)
        engine, *_ = zeromesh.initialize(
            model=model, config=config(1, optimizer="sgd"), model_parameters=groups_of(model)
        )
        if load:
            engine.load_checkpoint(folder)
        else:
            engine.save_checkpoint(folder)
        before = [[len(group["params"]), group["lr"]] for group in engine.optimizer.param_groups]
        engine.backward(engine(*batch(0, torch.float64)))
        engine.step()
        found.append((before, engine.gathered_state_dict()))
    return found


def test_groups_that_a_rank_has_nothing_of_stay_as_they_are(tmp_path: Path) -> None:
    ranks = run_ranks(resume_groups, 2, str(tmp_path))
    assert any(before[0][0] == 0 for (before, _), _ in ranks), "the test needs a rank without pieces of the group"
    for (before, _), (after, _) in ranks:
        assert after == before
    (_, first), (_, second) = ranks[0]
    assert_same(second, first)


def resume_tiny(folder: str, optimizer: str) -> dict[str, torch.Tensor]:
    settings = {"zero_optimization": {"stage": 1}, "optimizer": {"type": optimizer, "params": {"lr": 0.1}}}
    for load in (False, True):
        model = nn.Linear(2, 1, bias=False).double()
        engine, *_ = zeromesh.initialize(model=model, config=settings)
        if load:
            engine.load_checkpoint(folder)
        engine.backward(engine(torch.ones(1, 2, dtype=torch.float64)).sum())
        engine.step()
        if not load:
            engine.save_checkpoint(folder)
            engine.backward(engine(torch.ones(1, 2, dtype=torch.float64)).sum())
            engine.step()
            expected = engine.gathered_state_dict()
    assert_same(engine.gathered_state_dict(), expected)
    return expected


@pytest.mark.parametrize("optimizer", ["NAdam", "Adadelta", "ASGD", "RAdam"])
def test_single_numbers_in_optimizer_states_are_kept_for_ranks_that_have_no_parameter(
    optimizer: str, tmp_path: Path
) -> None:
    run_ranks(resume_tiny, 3, str(tmp_path), optimizer)


def choose(folder: str) -> None:
    engine = start(1, config(3))
    seed_everything(engine.mesh.rank)
    train(engine, 1)
    first = engine.gathered_state_dict()
    engine.save_checkpoint(folder, tag="first")
    train(engine, 1)
    engine.save_checkpoint(folder, tag="second", save_latest=False)
    again = start(2, config(3))
    assert again.load_checkpoint(folder)[0] == f"{folder}/first", "the latest is the one that was saved as such"
    assert again.load_checkpoint(folder, tag="second")[0] == f"{folder}/second"
    assert again.global_steps == 2
    fresh = start(2, config(3))
    fresh.load_checkpoint(folder, tag="first", load_optimizer_states=False, load_lr_scheduler_states=False)
    assert not any(fresh.optimizer.state.values())
    assert fresh.lr_scheduler.last_epoch == 0
    assert_same(fresh.gathered_state_dict(), first)
    assert engine.load_checkpoint(Path(folder) / "none") == (None, {})


def test_a_checkpoint_is_chosen_by_tag_and_in_part(tmp_path: Path) -> None:
    run_ranks(choose, 2, str(tmp_path))


# Optimizers and parameters of other shapes.


class Mine(torch.optim.AdamW):
    """Not known to work element by element, so it sees parameters in their own shape."""


class Momenta(torch.optim.SGD):
    """Keeps states of no particular shape."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["counts"] = state.get("counts", torch.zeros(2, 3, dtype=torch.int64)) + 1
            state["none"] = torch.zeros(0)


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
        engine.backward(engine(x))
        engine.step()


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
    """Has parameters and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.rows = nn.Parameter(torch.zeros(0, 4))
        self.columns = nn.Parameter(torch.zeros(4, 0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() + self.rows.sum() + self.columns.sum()


def resume_hollow(folder: str, row: int) -> None:
    settings = config(row) | {"scheduler": None}
    engine, again = (zeromesh.initialize(model=Hollow().double(), config=settings)[0] for _ in range(2))
    engine.backward(engine(torch.ones(2, 3, dtype=torch.float64)))
    engine.step()
    engine.save_checkpoint(folder)
    again.load_checkpoint(folder)
    assert_same(again.gathered_state_dict(), engine.gathered_state_dict())


@pytest.mark.parametrize("row", [0, 1, 3])
def test_parameters_without_elements_need_nothing_in_a_checkpoint(row: int, tmp_path: Path) -> None:
    run_ranks(resume_hollow, 2, str(tmp_path), row)


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
def test_single_numbers_of_an_optimizer_come_back_where_torch_puts_them(
    key: str, group: dict[str, Any], device: str, dtype: torch.dtype
) -> None:
    # The device without memory stands for any that is not the host.
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    number = saving._state_number(key, [4.0, "float64"], parameter, group)
    assert (number.device.type, number.dtype, number.shape) == (device, dtype, ())
    assert saving._state_number(key, 4, parameter, group) == 4
    torch_own = torch.optim.SGD._process_value_according_to_param_policy(
        parameter.double(), torch.tensor(4.0, dtype=torch.float64), 0, [{"params": [0], **group}], key
    )
    assert (number.device, number.dtype) == (torch_own.device, torch_own.dtype)


# Learning rates.


def start_moving(scheduler: Callable[[Any], Any] | None, rate: Any, betas: Any = (0.9, 0.999)) -> zeromesh.Engine:
    model = nn.Linear(3, 2).double()
    rest = {"params": [model.weight]}
    optimizer = torch.optim.AdamW([{"params": [model.bias], "lr": rate}, rest], lr=0.5, betas=betas, foreach=False)
    more = {} if scheduler is None else {"lr_scheduler": scheduler(optimizer)}
    return zeromesh.initialize(model=model, optimizer=optimizer, config={}, **more)[0]


def move(engine: zeromesh.Engine) -> list[float]:
    engine.backward(engine(torch.ones(1, 3, dtype=torch.float64)).sum())
    engine.step()
    return engine.get_lr()


def resume_tensor_rates(folder: str) -> None:
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


def test_learning_rates_that_are_tensors_are_restored_in_place(tmp_path: Path) -> None:
    run_ranks(resume_tensor_rates, 2, str(tmp_path))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.3**step),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.StepLR(optimizer, 1, factor) for factor in (0.5, 0.1)],
        milestones=[2],
    ),
}


def resume_schedule(folder: str, kind: str, tensor: bool) -> None:
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


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedule_goes_on_without_the_optimizers_states(kind: str, tensor: bool, tmp_path: Path) -> None:
    run_ranks(resume_schedule, 1, str(tmp_path), kind, tensor)


# Part of a model.


class Parts(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for number, name in enumerate(names):
            layer = nn.Linear(4, {"head": 2, "unused": 5}.get(name, 4), bias=False)
            nn.init.constant_(layer.weight, float(number))
            self.add_module(name, layer)
            self.register_buffer(f"{name}_mean", torch.full((layer.out_features,), float(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x.sum()


def load_part(folder: str, row: int) -> tuple[list[str], list[str], dict[str, float], int]:
    def begin(*names: str) -> zeromesh.Engine:
        settings = config(row, optimizer="adagrad") | {"scheduler": None}
        return zeromesh.initialize(model=Parts(*names).double(), config=settings)[0]

    engine = begin("unused", "encoder", "deco")
    engine.save_checkpoint(folder)
    again = begin("encoder", "decoder", "head")
    with pytest.raises(ValueError, match="is of another model") as caught:
        again.load_checkpoint(folder)
    refused = str(caught.value).splitlines()[1:]
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeromesh").addHandler(handler)
    path, _ = saving.load(again, Path(folder), None, True, True, strict=False)
    logging.getLogger("zeromesh").removeHandler(handler)
    assert path == f"{folder}/global_step0"
    values = {name: value.mean().item() for name, value in again.gathered_state_dict().items()}
    again.backward(again(torch.ones(1, 4, dtype=torch.float64)))
    again.step()
    return refused, messages, values, again.global_steps


@pytest.mark.parametrize("row", [0, 3])
def test_a_checkpoint_of_another_model_is_refused_or_what_is_in_both_is_taken(row: int, tmp_path: Path) -> None:
    (refused, messages, values, steps), (other, silent, _, _) = run_ranks(load_part, 2, str(tmp_path), row)
    assert refused == other
    assert refused == [
        "decoder.weight: not in the checkpoint; did you mean 'deco.weight'?",
        "head.weight: not in the checkpoint",
        "decoder_mean: not in the checkpoint; did you mean 'deco_mean'?",
        "head_mean: not in the checkpoint",
        "deco_mean: not in the model; did you mean 'decoder_mean'?",
        "unused_mean: not in the model",
        "deco.weight: not in the model; did you mean 'decoder.weight'?",
        "unused.weight: not in the model",
        "load_module_strict=False loads those that are in both",
    ]
    loaded = {"encoder.weight": 1.0, "encoder_mean": 1.0}
    kept = {"decoder.weight": 1.0, "decoder_mean": 1.0, "head.weight": 2.0, "head_mean": 2.0}
    assert values == loaded | kept
    assert steps == 1
    assert not silent
    assert len(messages) == 1
    assert "left as they are: decoder.weight, head.weight, decoder_mean, head_mean; only in it: deco" in messages[0]


# Runs that were cut off.


def continue_after_a_crash(folder: str) -> None:
    root = Path(folder)
    engine = start(1, config(0, mesh="1"))
    seed_everything(0)
    train(engine, 1)
    engine.save_checkpoint(root, tag="tag")
    shutil.copytree(root / "tag", root / "tag.old")
    (root / "tag.old" / "more").mkdir()
    engine.save_checkpoint(root, tag="tag")
    assert sorted(path.name for path in root.iterdir()) == ["latest", "tag"]
    (root / "tag").rename(root / "tag.old")
    shutil.copytree(root / "tag.old", root / "tag.draft")
    again = start(2, config(0, mesh="1"))
    assert again.load_checkpoint(root)[0] == f"{folder}/tag.old"
    assert_same(again.gathered_state_dict(), engine.gathered_state_dict())
    again.save_checkpoint(root, tag="tag")
    assert sorted(path.name for path in root.iterdir()) == ["latest", "tag"]
    assert again.load_checkpoint(root)[0] == f"{folder}/tag"


def test_a_process_that_dies_as_it_replaces_a_checkpoint_leaves_one_that_can_be_loaded_and_replaced(
    tmp_path: Path,
) -> None:
    run_ranks(continue_after_a_crash, 1, str(tmp_path))


def write_manifest(folder: Path, when: int) -> None:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"shards": []}))
    os.utime(folder / "manifest.json", (when, when))


@pytest.mark.parametrize(("text", "problem"), [("", "is empty"), ("gone", "names 'gone', which is no complete")])
def test_where_the_latest_is_not_there_the_newest_complete_one_is_taken(
    text: str, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").write_text(text)
    (tmp_path / "gone").mkdir()
    assert boxes.latest(tmp_path) == (text or None), "there is none to take instead"
    for when, tag in enumerate(["first", "third.old", "second", "second.old", "fourth.draft"]):
        write_manifest(tmp_path / tag, 1000 + when)
    os.utime(tmp_path / "third.old" / "manifest.json", (2000, 2000))
    assert not caplog.messages
    assert boxes.latest(tmp_path) == "third"
    assert boxes.locate(tmp_path, "third") == tmp_path / "third.old"
    assert boxes.locate(tmp_path, "second") == tmp_path / "second"
    assert problem in caplog.messages[0]
    assert "'third'" in caplog.messages[0]
    (tmp_path / "latest").write_text("third")
    caplog.clear()
    assert boxes.latest(tmp_path) == "third"
    assert not caplog.messages
    (tmp_path / "latest").unlink()
    assert boxes.latest(tmp_path) is None


def refuse_tags(folder: str) -> None:
    engine = start(1, config(1))
    for tag in ("latest", "mine.old", "mine.draft"):
        with pytest.raises(ValueError, match=f"cannot have the tag '{tag}'"):
            engine.save_checkpoint(folder, tag=tag)
    assert not list(Path(folder).iterdir())


def test_names_of_the_folders_own_files_are_no_tags(tmp_path: Path) -> None:
    run_ranks(refuse_tags, 2, str(tmp_path))


# Folders that are not the same on all ranks.


def load_from_own_folders(folder: str) -> dict[str, str]:
    engine = start(1, config(1, mesh="3"))
    rank, root = engine.mesh.rank, Path(folder)
    for tag in ("first", "second"):
        engine.save_checkpoint(root / "all", tag=tag)
    world = engine.mesh.group("world")
    world.exchange(torch.zeros(1))
    own = root / str(rank)
    shutil.copytree(root / "all", own)
    before = everything(engine)
    found = {}

    def fails(name: str, tag: str | None = None) -> None:
        with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
            engine.load_checkpoint(own, tag)
        found[name] = f"{type(caught.value).__name__}: {caught.value}"

    if rank == 1:
        (own / "latest").write_text("first")
    fails("other")
    if rank == 1:
        (own / "latest").unlink()
    fails("none")
    fails("tags", tag="first" if rank else "second")
    if rank == 1:
        (own / "latest").write_bytes(b"\xff\xfe")
    fails("unreadable")
    if rank == 1:
        (own / "latest").write_text("second")
        (own / "second" / "manifest.json").unlink()
    fails("manifest", tag="second")
    assert_same(everything(engine) | {"others": before["others"]}, before)
    engine.load_checkpoint(own, tag="first")
    return found


def test_ranks_that_see_different_folders_all_fail_and_say_what_they_see(tmp_path: Path) -> None:
    first, second, third = run_ranks(load_from_own_folders, 3, str(tmp_path))
    for found in (first, second, third):
        assert found["other"].startswith("ValueError: the ranks would load different checkpoints")
        assert "by rank, 0, 2: second; 1: first; all ranks need" in found["other"]
        assert "by rank, 0, 2: second; 1: none;" in found["none"]
        assert "by rank, 0: second; 1, 2: first;" in found["tags"]
    for found in (first, third):
        assert found["unreadable"].startswith("RuntimeError: rank 1 could not find the latest checkpoint")
        assert found["manifest"].startswith("RuntimeError: rank 1 could not open the checkpoint")
    assert second["unreadable"].startswith("UnicodeDecodeError")
    assert second["manifest"].startswith("FileNotFoundError")
    assert "is no complete checkpoint" in second["manifest"]


def test_each_file_of_a_checkpoint_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(12.0)
    parts = [boxes.Box("a", (3, 4), start, start + 4, values[start : start + 4]) for start in (0, 4, 8)]
    shards = [boxes.write_shard(tmp_path, 0, parts[:2]), boxes.write_shard(tmp_path, 1, parts[2:])]
    boxes.write_json(tmp_path / boxes.MANIFEST, {"shards": shards})
    opened: list[str] = []
    real = safetensors.safe_open

    def counting(path: str, framework: str) -> Any:
        opened.append(Path(path).name)
        return real(path, framework=framework)

    monkeypatch.setattr(safetensors, "safe_open", counting)
    reader = boxes.Reader(tmp_path)
    assert reader.names == {"a"}
    assert reader.dtype("a") is torch.float32
    out = torch.empty(7)
    for start in (0, 3, 5):
        reader.read("a", start, start + 7, out)
        assert torch.equal(out, values[start : start + 7])
    assert sorted(opened) == ["rank_00000.safetensors", "rank_00001.safetensors"]


# The whole model.


def gather_between(row: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = start(1, config(row))
    before = engine.gathered_state_dict()
    seed_everything(engine.mesh.rank)
    history = train(engine, 2)
    engine.gathered_state_dict()
    engine.eval()
    with torch.no_grad():
        engine(torch.arange(6))
    engine.train()
    after = engine.gathered_state_dict()
    history += train(engine, 1)
    other = start(1, config(row))
    seed_everything(engine.mesh.rank)
    assert train(other, 2) == history[:2], "looking at the model changes nothing"
    assert_same(other.gathered_state_dict(), after)
    return before, engine.gathered_state_dict()


@pytest.mark.parametrize("row", [0, 2, 3])
def test_the_gathered_state_is_the_models_own(row: int) -> None:
    (before, after), (other_before, other_after) = run_ranks(gather_between, 2, row)
    assert not other_before
    assert not other_after
    torch.manual_seed(1)
    model = Noisy().double()
    expected = model.state_dict()
    assert before.keys() == expected.keys()
    assert_same(before, expected)
    assert torch.equal(after["head.weight"], after["embed.weight"])
    assert not torch.equal(after["embed.weight"], before["embed.weight"])
    assert after["norm.num_batches_tracked"].item() == 3
    model.load_state_dict(after)


def save_whole(folder: str) -> dict[str, torch.Tensor]:
    engine = start(1, config(3, "bf16"))
    seed_everything(engine.mesh.rank)
    train(engine, 2)
    assert engine.save_16bit_model(folder) is True
    assert engine.save_16bit_model(folder, "again.safetensors") is True
    return engine.gathered_state_dict()


def test_the_whole_model_is_written_as_one_file_in_the_dtype_it_computes_in(tmp_path: Path) -> None:
    expected = run_ranks(save_whole, 2, str(tmp_path / "new" / "folder"))[0]
    for name in ("model.safetensors", "again.safetensors"):
        saved = load_file(tmp_path / "new" / "folder" / name)
        assert set(expected) - set(saved) == {"head.weight"}, "a tied weight is written once"
        assert_same(saved, {key: expected[key] for key in saved})
        assert saved["blocks.0.weight"].dtype == torch.bfloat16
        assert saved["norm.running_mean"].dtype == torch.float32
