"""Checkpoints that earlier versions wrote are still read.

``data/format_1`` and ``data/format_2`` were written by the last versions that wrote these formats, on two ranks, with
the model, settings and updates of this module.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks
from run import train_step
from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.manifest import signed

DATA = Path(__file__).parent / "data"
FOLDER = DATA / "format_1"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3, bias=False)
        self.last = nn.Linear(3, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(torch.tanh(self.first(x)) * self.scale).square().mean()


def build() -> nn.Module:
    torch.manual_seed(3)
    return Tiny().double()


def settings(row: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": row}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def update(engine: zeromesh.Engine, step: int) -> float:
    return train_step(engine, engine(torch.arange(10.0, dtype=torch.float64).view(2, 5) / (1 + step)))


def write_again() -> None:  # how the files were made, by the version before format 2, with torchrun on two processes
    engine, *_ = zeromesh.initialize(model=build(), config=settings(3))
    torch.manual_seed(7 + engine.mesh.rank)
    random.seed(engine.mesh.rank)
    for step in range(2):
        update(engine, step)
    engine.save_checkpoint(FOLDER, client_state={"seen": (1, 2)})


@pytest.mark.some(1)
@pytest.mark.parametrize(("ranks", "row"), [(1, 0), (2, 3), (3, 1)])
@pytest.mark.parametrize("number", [2, 1])
@on_ranks("ranks")
def test_a_checkpoint_of_a_former_format_goes_on(number: int, ranks: int, row: int) -> None:
    folder = DATA / f"format_{number}"
    straight, *_ = zeromesh.initialize(model=build(), config=settings(row))
    losses = [update(straight, step) for step in range(4)]
    engine, *_ = zeromesh.initialize(model=build(), config=settings(row))
    path, client = engine.load_checkpoint(folder)
    assert path == str(folder / "global_step2")
    assert client == {"seen": (1, 2)}
    assert engine.global_steps == 2
    if engine.mesh.rank < 2:
        drawn = random.random()
        random.seed(engine.mesh.rank)
        assert drawn == random.random()
    assert engine.module.seen.item() == 2
    assert [update(engine, step) for step in (2, 3)] == pytest.approx(losses[2:], rel=1e-12)


def test_a_reader_knows_the_dtypes_of_format_1_and_finds_damage(tmp_path: Path) -> None:
    folder = tmp_path / "global_step2"
    folder.mkdir()
    for file in (FOLDER / "global_step2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    reader = Reader(folder)
    assert reader.manifest["format"] == 1
    assert reader.dtype("parameter/first.weight") is torch.float64
    assert reader.tensor("buffer/seen").item() == 2
    reader.verify()
    data = bytearray((folder / "rank_00001.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "rank_00001.safetensors").write_bytes(data)
    reader.verify(0, 2)
    with pytest.raises(ValueError, match=r"rank_00001.safetensors, of which parameter/.* cannot be used"):
        reader.verify(1, 2)


def test_a_manifest_of_format_2_that_was_altered_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "format_2" / "global_step2", tmp_path / "tag")
    path = tmp_path / "tag" / "manifest.json"
    content = json.loads(path.read_text())
    Reader(path.parent).verify()
    del content["sha256"]
    for file, problem in (
        ("../rank_00000.safetensors", "is not in the checkpoint's own folder"),
        (str(tmp_path / "tag" / "rank_00000.safetensors"), "is not in the checkpoint's own folder"),
        ("rank_00001.safetensors", "names the file 'rank_00001.safetensors' twice"),
    ):
        content["shards"][0]["file"] = file
        path.write_text(json.dumps(signed(content)))
        with pytest.raises(ValueError, match=problem):
            Reader(path.parent)
    path.write_text(path.read_text().replace("[5, 3]", "[5, 4]", 1).replace("global_steps", "steps", 1))
    with pytest.raises(ValueError, match="SHA-256 differs"):
        Reader(path.parent)
