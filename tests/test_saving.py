"""A checkpoint continues the run that wrote it, exactly, on this layout and on others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zeromesh
from harness import run_ranks
from numerics import BATCH, MESHES, OPTIMIZERS, PRECISIONS, Net, batch, build_net, make_optimizers

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
