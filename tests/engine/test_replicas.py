"""Copies that differ between ranks are named, by rank and tensor."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks, run_ranks
from run import adamw, start_engine, train_step
from zeromesh.engine import replicas
from zeromesh.engine.replicas import ReplicaMismatch


def engine_of(row: int, settings: dict[str, Any]) -> zeromesh.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].bias.requires_grad_(False)
    return start_engine(model, settings, micro=2, stage=row, optimizer=adamw(0.01))


def flip(engine: zeromesh.Engine, name: str, element: int) -> None:
    """Change one bit of a parameter, as a fault of the memory does: no count of torch's notices it."""
    unit = next(u for u in engine.sharded.units for f in u.flats for s in f.layout.segments if s.name == name)
    flat = next(f for f in unit.flats for s in f.layout.segments if s.name == name)
    segment = next(s for s in flat.layout.segments if s.name == name)
    buffer = flat.shard if unit.sharded else flat.full
    at = buffer.detach()[segment.start + element : segment.start + element + 1]
    at.view(torch.uint8).numpy()[0] ^= 1


def said(engine: zeromesh.Engine, what: str, folder: str) -> str:
    try:
        if what == "save":
            warned: list[str] = []
            with patch.object(replicas._log, "warning", lambda text, *values: warned.append(text % values)):
                engine.save_checkpoint(folder)
            return "".join(warned)
        for _ in range(4):
            train_step(engine, engine(torch.ones(2, 8)).square().mean())
    except ReplicaMismatch as error:
        return str(error)
    return ""


def faults(folder: str) -> dict[str, str]:
    found = {}
    cases: dict[str, tuple[int, dict[str, Any], str, str]] = {
        "row 0, at a save": (0, {}, "save", "0.weight"),
        "row 0, at updates": (0, {"replica_check": {"interval": 2}}, "train", "0.weight"),
        "row 0, frozen": (0, {}, "save", "1.bias"),
        "row 0, 16 bits": (0, {"bf16": {"enabled": True}}, "save", "0.weight"),
        "row 2, at updates": (2, {"replica_check": {"interval": 1}}, "train", "0.weight"),
        "row 3, replicas": (3, {"mesh": {"replicate": 2, "data": 1}}, "save", "0.weight"),
        "switched off": (0, {"replica_check": {"at_saves": False}}, "save", "0.weight"),
    }
    for case, (row, settings, what, name) in cases.items():
        engine = engine_of(row, settings)
        assert said(engine, "train", folder) == ""  # nothing is wrong yet
        engine(torch.ones(2, 8))
        if engine.mesh.rank == 1:
            flip(engine, name, 5)
        found[case] = said(engine, what, f"{folder}/{case}")
        engine.destroy()
    return found


def test_a_flipped_bit_of_one_replica_is_named_by_rank_and_tensor(tmp_path: Path) -> None:
    first, second = run_ranks(faults, 2, str(tmp_path))
    assert first.pop("row 0, frozen") == (
        "ranks have changed frozen parameters differently, after update 4: frozen parameter 1.bias: ranks 0-1 have "
        "different values"
    )
    assert second.pop("row 0, frozen") == ""
    assert first == second
    assert first.pop("switched off") == ""
    for case, text in first.items():
        assert "parameter 0.weight: ranks 0-1 have different values" in text, (case, text)
        assert text.count("have different") == 1, (case, text)
    assert "after update 4" in first["row 0, at a save"]
    assert not any(tmp_path.glob("row 0, at*/global_step*"))


@pytest.mark.full
@on_ranks(3)
def test_the_one_of_three_replicas_that_differs_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = engine_of(0, {})
    if engine.mesh.rank == 1:
        flip(engine, "1.weight", 63)
    text = said(engine, "save", folder)
    assert "parameter 1.weight: rank 1 differs from ranks 0, 2" in text
