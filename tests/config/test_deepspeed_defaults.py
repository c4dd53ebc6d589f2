"""Defaults that differ from DeepSpeed's: none outside of the table, and all of it in --fix, the drop-in and the log."""

import importlib.util
import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from commands import call
from zeromesh.config.adopt import fill_defaults, fixed
from zeromesh.config.deepspeed_defaults import DEFAULTS, DIFFERENCES, differences
from zeromesh.config.settings import entries
from zeromesh.config.special_keys import OURS, UNREAD, sections_of
from zeromesh.deepspeed.configuration import DeepSpeedConfig

RECORDER = Path(__file__).with_name("record_deepspeed.py")
RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("deepspeed_0_19.json").read_text())

# The sizes of batches follow from each other; "auto" and null mean the same.
ALIKE = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "data_types.keep_in_fp32_modules",
    "pipeline.stages",
    "torch_autocast.dtype",  # null where autocast is off
}


def test_each_default_that_differs_is_in_the_table() -> None:
    read = {
        path: entry.default
        for path, entry in entries().items()
        if not entry.section and not sections_of(path) & (UNREAD | set(OURS)) and path in RECORDED
    }
    assert len(read) > 60
    differ = {path for path, default in read.items() if default != RECORDED[path]} - ALIKE
    assert differ == {row.path for row in DIFFERENCES if not row.optimizers}
    assert all(RECORDED[row.path] == row.theirs for row in DIFFERENCES if not row.optimizers)


def test_recorded_answers_are_deepspeeds() -> None:
    common = {path: value for path, value in DEFAULTS.items() if path in RECORDED}
    assert len(common) > 35
    assert {path for path, value in common.items() if value != RECORDED[path]} <= {
        "torch_autocast.lower_precision_safe_modules",  # null where autocast is off
    }


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Lion", "Lamb", "Adagrad"])
def test_arguments_of_optimizers_that_differ_are_in_the_table(kind: str) -> None:
    model = nn.Linear(2, 2)
    config = {"train_batch_size": 2, "optimizer": {"type": kind}}
    engine, optimizer, *_ = zeromesh.initialize(model=model, config=config)
    assert optimizer is not None
    theirs = RECORDED[f"optimizer {kind.lower()}"]
    ours = optimizer.param_groups[0]
    differ = {key for key in theirs if key in ours and json.loads(json.dumps(ours[key])) != theirs[key]}
    rows = {row.path.rpartition(".")[2]: row.theirs for row in DIFFERENCES if kind.lower() in row.optimizers}
    assert differ == set(rows)
    assert all(theirs[key] == value for key, value in rows.items())
    engine.destroy()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_an_installed_deepspeed_has_the_recorded_defaults() -> None:
    result = subprocess.run([sys.executable, RECORDER], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout.splitlines()[-1]) == RECORDED


FILE = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def test_fix_writes_deepspeeds_defaults_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FILE))
    result = call("config", str(path), "--fix")
    assert "gradient_clipping is not in the file; DeepSpeed's default 1.0 is used (0 switches it off)" in result.stderr
    document = json.loads(result.stdout)
    assert document["gradient_clipping"] == 1.0
    assert document["optimizer"]["params"]["weight_decay"] == 0.0
    assert fixed(document) == (document, [])
    asked = DeepSpeedConfig(FILE)
    assert asked.gradient_clipping == 1.0
    assert asked.optimizer.params["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("document", "paths"),
    [
        ({}, ["gradient_clipping"]),
        ({"gradient_clipping": 0.0}, []),
        ({"seed": 1}, []),  # a key that only ZeroMesh has
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "gradient_clipping": 1}, []),
        ({"optimizer": {"type": "Adam"}, "gradient_clipping": 1}, []),
        (
            {"optimizer": {"type": "Muon", "params": {"lr": 1}}, "gradient_clipping": 1},
            ["optimizer.params.weight_decay", "optimizer.params.betas", "optimizer.params.eps"],
        ),
    ],
)
def test_defaults_are_those_of_the_program_that_a_file_is_for(document, paths) -> None:
    assert [row.path for row in differences(document)] == paths


def test_auto_stays_for_a_trainer_unless_nothing_fills_it_in() -> None:
    document = {"gradient_clipping": "auto"}
    assert fixed(document) == (document, [])
    (change,) = fill_defaults(document, autos=True)
    assert str(change) == 'gradient_clipping is "auto"; DeepSpeed\'s default 1.0 is used (0 switches it off)'


def test_initialize_says_what_it_takes_for_a_key_that_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine, *_ = zeromesh.initialize(model=nn.Linear(2, 2), config=FILE)
    assert "gradient_clipping is not in the file; ZeroMesh does not clip (DeepSpeed 0.19 would use 1.0)" in caplog.text
    assert "optimizer.params.weight_decay is not in the file; ZeroMesh uses torch's 0.01" in caplog.text
    engine.destroy()
    caplog.clear()
    engine, *_ = zeromesh.initialize(model=nn.Linear(2, 2), config=fixed(FILE)[0])
    assert "is not in the file" not in caplog.text
    engine.destroy()
    assert inspect.signature(torch.optim.AdamW).parameters["weight_decay"].default == 0.01
