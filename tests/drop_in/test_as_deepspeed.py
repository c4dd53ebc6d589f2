"""A script written for DeepSpeed trains as plain torch does, started by each of the switches."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import run_command
from run import plain_step

SCRIPT = """
import argparse, json, os, sys
import torch
import deepspeed
from deepspeed.utils import safe_get_full_grad

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out")
parser.add_argument("--fail", action="store_true")
args = deepspeed.add_config_arguments(parser).parse_args()
assert args.local_rank == int(os.environ.get("LOCAL_RANK", -1)), (args, "as DeepSpeed's launcher passes it")
deepspeed.init_distributed()
assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
assert args.local_rank == engine.local_rank == int(os.environ["LOCAL_RANK"])
rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
losses = []
for number in range(4):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    loss = engine(x[rank * 4 // size : (rank + 1) * 4 // size].to(engine.device)).pow(2).mean()
    if number % 2:
        engine.backward(loss)
    else:
        engine.scale(loss).backward()
    assert safe_get_full_grad(model[0].weight) is not None
    engine.step()
    mean = loss.detach().clone()
    deepspeed.comm.all_reduce(mean)
    losses.append(mean.item() / size)
if args.fail:
    raise KeyError("on purpose")
if rank == 0:
    with open(args.out, "w") as file:
        json.dump(losses, file)
"""

CONFIG = {
    "train_batch_size": 4,
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3},
    "a_key_that_nobody_knows": 1,
}


def plain() -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    losses = []
    for number in range(4):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        losses.append(plain_step(optimizer, model(x).pow(2).mean()))
    return losses


LAUNCH = [sys.executable, "-m", "zeromesh.apps.cli.main", "launch", "--nproc", "2", "--as-deepspeed"]
ALONE = [sys.executable, "-m", "zeromesh.deepspeed"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize(
    ("start", "ends"), [(LAUNCH, "train.py"), pytest.param(ALONE, "-m train", marks=pytest.mark.full)]
)
def test_a_script_trains_as_in_plain_torch(folder: Path, start: list[str], ends: str) -> None:
    arguments = ["--deepspeed", "--deepspeed_config", "ds.json", "--out", "losses.json"]
    done = run_command([*start, *ends.split(), *arguments], cwd=folder)

    assert done.returncode == 0, done.stdout
    torch.testing.assert_close(json.loads((folder / "losses.json").read_text()), plain(), rtol=1e-12, atol=0.0)
    assert "a_key_that_nobody_knows" in done.stdout  # what is ignored is said


@pytest.mark.full
def test_a_traceback_begins_in_the_script(folder: Path) -> None:
    arguments = ["--deepspeed_config", "ds.json", "--fail"]
    done = run_command([*ALONE, "train.py", *arguments], cwd=folder)

    assert done.returncode == 1
    shown = done.stdout[done.stdout.index("Traceback") :]
    assert "KeyError: 'on purpose'" in shown
    assert "zeromesh" not in shown
    assert "runpy" not in shown


@pytest.mark.parametrize(("arguments", "words"), [(["nothing.py"], "is not a file"), ([], "usage: python -m")])
def test_what_cannot_be_run_is_said(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = run_command([*ALONE, *arguments], cwd=tmp_path)

    assert done.returncode == 1
    assert words in done.stdout
