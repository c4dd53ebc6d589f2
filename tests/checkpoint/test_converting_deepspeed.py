"""Conversion of checkpoints that the real DeepSpeed writes, and of ours that it loads."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zeromesh
from compare import assert_same
from foreign_checkpoints import Small, groups, tokens
from harness import FOLDERS, ROOT, run_command, run_ranks
from manifests import whole_manifest
from run import configuration, train_step
from zeromesh.checkpoint.boxes import Reader

# The environment of `make bench`, or another one.
PYTHON = Path(os.environ.get("DEEPSPEED_PYTHON", ROOT / ".venv-deepspeed" / "bin" / "python"))

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="DeepSpeed is not installed: make .venv-deepspeed/.peers.done"),
]


def deepspeed(*command: object) -> None:
    variables = {"PYTHONPATH": os.pathsep.join(FOLDERS), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = run_command([str(PYTHON), *map(str, command)], timeout=240, **variables)
    assert done.returncode == 0, done.stdout


def run(stage: int, precision: str, folder: Path, *universal: Path) -> dict[str, Any]:
    script = ROOT / "tests" / "support" / "deepspeed_writer.py"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    deepspeed(*ranks, script, stage, precision, folder, *universal)
    return {name: torch.load(folder / f"{name}.pt") for name in ("held", "end")}


def tensors_of(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def converted(path: Path) -> dict[str, torch.Tensor]:
    reader = Reader(path)
    reader.verify()
    return {name: reader.tensor(name) for name in reader.names if not name.startswith("buffer/")}


def require_scale(path: Path, wanted: dict[str, Any], precision: str) -> None:
    found = whole_manifest(path)["loss_scaler"]
    if precision != "fp16":
        assert found is None
        return
    scale = wanted["scale"]
    assert scale["cur_scale"] != 2**16, "the scale is as it began"
    good = scale["cur_iter"] - scale["last_overflow_iter"] - 1
    assert (found["scale"], found["good_steps"], found["window"]) == (scale["cur_scale"], good, 3)
    assert found["hysteresis"] == (scale["cur_hysteresis"] or 1)  # stage 0 has none


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_and_states_are_those_that_deepspeed_holds(stage: int, precision: str, tmp_path: Path) -> None:
    wanted = run(stage, precision, tmp_path / "theirs")["held"]
    # Stage 0 numbers its parameters, and one of them is frozen.
    model = Small() if stage == 0 else None
    path = zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", model=model)
    assert_same(converted(path), tensors_of(wanted))
    require_scale(path, wanted, precision)
    if stage == 0:
        return
    # The tool fails on checkpoints of stages 1 and 2 whose writer did not prepare for it.
    more = [] if stage == 3 else ["--inject_missing_state"]
    source, target = tmp_path / "theirs" / "global_step4", tmp_path / "universal" / "global_step4"
    target.parent.mkdir()
    folders = ["--input_folder", source, "--output_folder", target]
    deepspeed("-m", "deepspeed.checkpoint.ds_to_universal", *folders, *more)
    path = zeromesh.convert_checkpoint(tmp_path / "universal", tmp_path / "again")
    assert_same(converted(path), tensors_of(wanted))
    require_scale(path, wanted, precision)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_goes_on_from_an_exported_universal_checkpoint(stage: int, precision: str, tmp_path: Path) -> None:
    # At stage 3, DeepSpeed continues exactly with one group only, also from what its own tool writes.
    precision += "-one" if stage == 3 else ""
    wanted = run(stage, precision, tmp_path / "theirs")
    zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    zeromesh.convert_checkpoint(tmp_path / "ours", tmp_path / "universal", "deepspeed-universal", ranks=2)
    again = run(stage, precision, tmp_path / "resumed", tmp_path / "universal")
    for name, found in wanted.items():
        assert_same(tensors_of(again[name]), tensors_of(found))
        for key in ("steps", "rates", "scale"):
            assert again[name][key] == found[key], key


def resume(folder: str) -> None:
    model = Small()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, foreach=False)
    settings = configuration(
        micro=2, stage=3, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}}
    )
    engine = zeromesh.initialize(model=model, optimizer=optimizer, config=settings)[0]
    engine.load_checkpoint(folder)
    for number in (4, 5):
        train_step(engine, engine(tokens(number)))
    engine.save_checkpoint(folder)


def test_training_goes_on_as_in_deepspeed(tmp_path: Path) -> None:
    wanted = run(2, "fp32", tmp_path / "theirs")["end"]
    zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    run_ranks(resume, 2, str(tmp_path / "ours"))
    found = converted(tmp_path / "ours" / "global_step6")
    assert_same({name: value for name, value in found.items() if not name.startswith("random/")}, tensors_of(wanted))
