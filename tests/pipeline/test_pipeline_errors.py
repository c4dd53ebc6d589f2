"""What a pipeline says when something is wrong, on all ranks, and soon."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import FOLDERS, run_command, run_ranks
from run import configuration, sgd
from test_pipeline import batches, build

LAUNCH = [sys.executable, "-m", "zeromesh.apps.cli.main", "launch"]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers
        return fourth(third(x) + first(second(x))).square().mean()


class Skips(Branches):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[:2]:
            x = layer(x)
        return x.square().mean()


class Hides(Branches):
    def __init__(self) -> None:
        super().__init__()

        @dataclass
        class Hidden:
            x: torch.Tensor

        for layer in self.layers:
            layer.register_forward_hook(lambda module, args, output: Hidden(output))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).x
        return x.square().mean()


MODELS = {"branches": Branches, "skips": Skips, "hides": Hides}


def attempt(fault: str) -> Any:
    settings: dict[str, Any] = configuration(batch=16, micro=4, optimizer=sgd(0.1), mesh={"pipeline": 2}, pipeline={})
    model: nn.Module = build("plain")
    match fault:
        case "no blocks":
            model = nn.Linear(4, 4)
        case "too few blocks":
            model = nn.Sequential(nn.Linear(4, 4))
        case "unknown schedule":
            settings["pipeline"]["schedule"] = "1f2b"
        case "chunks":
            settings["pipeline"] = {"schedule": "1f1b", "chunks": 2}
        case "microbatches":
            settings |= {"train_batch_size": 12, "pipeline": {"schedule": "interleaved-1f1b", "chunks": 2}}
        case "partition":
            settings["pipeline"]["partition"] = [0, 9]
        case "blocks":
            settings["pipeline"]["blocks"] = ["layer.*"]
    try:
        engine = zeromesh.initialize(model=model, config=settings)[0]
        rank = engine.mesh.rank
        given = list(batches("plain", 0, 4, 0, 1))
        match fault:
            case "called":
                engine(*given[0])
            case "backward":
                engine.backward(torch.ones((), requires_grad=True))
            case "numbers":
                given = [(ids + rank, labels) for ids, labels in given]
            case "shapes":
                given = [(ids[:, rank:], labels[:, rank:]) for ids, labels in given]
        engine.train_batch(iter(given))
    except (ValueError, RuntimeError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "no error"


FAULTS = {
    "no blocks": "Linear has no list of blocks",
    "too few blocks": "1 blocks cannot be cut into 2 stages, as each needs one",
    "unknown schedule": "1f2b",
    "chunks": "1f1b with 2 stages per rank: it has exactly 1",
    "microbatches": "micro-batches",
    "partition": "pipeline.partition is [0, 9]",
    "blocks": "'layer.*' matches no module",
    "called": "call engine.train_batch(iterator)",
    "backward": "call engine.train_batch(iterator)",
    "numbers": "were given different values of micro-batches",
    "shapes": "were given different shapes of micro-batches",
}


@pytest.mark.some(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_on_all_ranks(fault: str) -> None:
    for said in run_ranks(attempt, 2, fault):
        assert FAULTS[fault] in said


SCRIPT = """
import os, signal, sys
sys.path[:0] = {tests!r}
import torch, zeromesh
from test_pipeline import batches, build
fault = sys.argv[1]
settings = {{
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "mesh": {{"pipeline": 2}},
    "optimizer": {{"type": "SGD", "params": {{"lr": 0.1}}}},
}}
model = build("plain")
if fault not in ("raises", "dies"):
    import test_pipeline_errors
    model = test_pipeline_errors.MODELS[fault]()
engine = zeromesh.initialize(model=model, config=settings)[0]
if fault not in ("raises", "dies"):
    engine.train_batch(iter([(torch.ones(4, 4), torch.ones(4))] * 4))
engine.train_batch(batches("plain", 0, 4, 0, 1))
calls = 0
def fail(module, args):
    global calls
    calls += 1
    if calls == 2 and fault == "raises":
        raise ArithmeticError("the block of the user failed")
    if calls == 2 and fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
if engine.mesh.rank == {rank}:
    model.layers[{block}].register_forward_pre_hook(fail)
engine.train_batch(batches("plain", 2, 4, 0, 1))
print("went on")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        ("raises", 1),
        ("dies", 0),
        pytest.param("raises", 0, marks=pytest.mark.full),
        pytest.param("dies", 1, marks=pytest.mark.full),
    ],
)
def test_all_ranks_end_soon_when_a_stage_fails(fault: str, stage: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=FOLDERS, rank=stage, block=[1, 6][stage]))
    finished = run_command([*LAUNCH, "--nproc", "2", script, fault], timeout=90)
    assert finished.returncode != 0
    assert "went on" not in finished.stdout
    assert f"rank {stage} failed first" in finished.stdout
    if fault == "raises":
        assert "the block of the user failed" in finished.stdout
        assert f"this was in forward of stage {stage}, micro-batch 1" in finished.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("branches", "layers.1 was called after layers.2; blocks of a pipeline are called one after the other"),
        pytest.param(
            "skips",
            "without a call of layers.2; blocks of a pipeline are called one after the other",
            marks=pytest.mark.full,
        ),
        ("hides", "Hidden, of which other stages cannot make one; define the class at the top of a module"),
    ],
)
def test_models_whose_blocks_are_no_chain_are_refused(fault: str, message: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=FOLDERS, rank=0, block=0))
    finished = run_command([*LAUNCH, "--nproc", "2", script, fault], timeout=90)
    assert finished.returncode != 0
    assert message in finished.stdout


def of_meta(custom: bool) -> Any:
    with torch.device("meta"):
        model = Branches() if custom else nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    config = configuration(
        micro=2, mesh={"pipeline": 2}, optimizer=sgd(0.1), pipeline={"blocks": ["layers.*"]} if custom else {}
    )
    try:
        engine = zeromesh.initialize(model=model, config=config, loss_fn=nn.functional.mse_loss)[0]
    except ValueError as error:
        return str(error)
    return {name: float(value.std()) for name, value in engine.gathered_state_dict().items()}


def test_a_model_on_the_meta_device_gets_its_values_in_stages_or_is_refused() -> None:
    deviations = run_ranks(of_meta, 2, False)[0]
    assert len(deviations) == 8
    assert all(deviation == pytest.approx((64 * 3) ** -0.5, rel=0.3) for deviation in deviations.values())
    for said in run_ranks(of_meta, 2, True):
        assert "the meta device" in said
        assert "zeromesh.zero.Init()" in said
