"""A checkpoint continues the run that wrote it, exactly, on this layout and on others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from compare import assert_close, assert_same
from harness import on_ranks, run_ranks
from numerics import BATCH, MESHES, Net, batch, build_net, make_optimizers
from run import train_step
from runs import MIXTURE, config, everything, seed_everything, start, train

PART = 3
"""Updates before a checkpoint, and after it."""


def resume(folder: str, settings: dict[str, Any]) -> None:
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
    ("row 3, float64, experts", config(3, mesh=MIXTURE)),
    ("row 2, bf16, experts", config(2, "bf16", mesh=MIXTURE)),
]


@pytest.mark.some(1)
@pytest.mark.parametrize("settings", [settings for _, settings in CASES], ids=[name for name, _ in CASES])
def test_a_resumed_run_continues_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    mesh = settings["mesh"]
    run_ranks(resume, mesh.get("replicate", 1) * mesh["data"], str(tmp_path), settings)
    files = sorted(path.name for path in (tmp_path / f"global_step{PART}").iterdir())
    assert files[0] == "manifest.json"
    assert {Path(name).suffix for name in files[1:]} == {".jsonl", ".safetensors"}, "nothing else but JSON is written"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"global_step{PART}", "latest"]


def train_part(folder: str, first: int, settings: dict[str, Any]) -> Any:
    engine = zeromesh.initialize(model=build_net(torch.float64), config=settings)[0]
    if first:
        engine.load_checkpoint(folder)
    assert engine.global_steps == first
    losses = []
    for step in range(first, first + PART):
        each = BATCH // engine.data_size
        rows = slice(engine.data_rank * each, (engine.data_rank + 1) * each)
        losses.append(engine(*batch(step, torch.float64, rows)))
        train_step(engine, losses[-1])
    engine.save_checkpoint(folder)
    return [loss.item() for loss in losses], engine.gathered_state_dict()


@pytest.mark.some(1)
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
    for (name, low, high), view in views.items():
        gradient = trained[name].grad
        view.grad = None if gradient is None else gradient.flatten()[low:high].view(view.shape)
    for optimizer in optimizers:
        optimizer.step()


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
        train_step(engine, engine(*batch(0, torch.float64)))
        found.append((before, engine.gathered_state_dict()))
    return found


def test_groups_that_a_rank_has_nothing_of_stay_as_they_are(tmp_path: Path) -> None:
    ranks = run_ranks(resume_groups, 2, str(tmp_path))
    assert any(before[0][0] == 0 for (before, _), _ in ranks), "the test needs a rank without pieces of the group"
    for (before, _), (after, _) in ranks:
        assert after == before
    (_, first), (_, second) = ranks[0]
    assert_same(second, first)


@pytest.mark.some(1)
@pytest.mark.parametrize("optimizer", ["NAdam", "Adadelta", "ASGD", "RAdam"])
@on_ranks(3)
def test_single_numbers_in_optimizer_states_are_kept_for_ranks_that_have_no_parameter(optimizer, tmp_path) -> None:
    folder = str(tmp_path)
    settings = {"zero_optimization": {"stage": 1}, "optimizer": {"type": optimizer, "params": {"lr": 0.1}}}
    for load in (False, True):
        model = nn.Linear(2, 1, bias=False).double()
        engine, *_ = zeromesh.initialize(model=model, config=settings)
        if load:
            engine.load_checkpoint(folder)
        train_step(engine, engine(torch.ones(1, 2, dtype=torch.float64)).sum())
        if not load:
            engine.save_checkpoint(folder)
            train_step(engine, engine(torch.ones(1, 2, dtype=torch.float64)).sum())
            expected = engine.gathered_state_dict()
    assert_same(engine.gathered_state_dict(), expected)


@on_ranks(2)
def test_a_checkpoint_is_chosen_by_tag_and_in_part(tmp_path: Path) -> None:
    folder = str(tmp_path)
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
