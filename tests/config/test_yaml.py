"""Configurations in YAML, by the rules of version 1.2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import call
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.config.errors import ConfigError

TEXT = """\
# a comment
train_batch_size: 8
fp16: {enabled: true}
optimizer:
  type: AdamW
  params: {lr: 1e-5, betas: [0.9, .95], eps: 1.E-8}
run:
  steps: 5e2
  output: no   # a folder, and not false
  sample: {prompts: [yes, "1:30", 1999-01-01]}
"""


def test_a_yaml_file_means_what_the_json_file_means(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text(TEXT)
    settings = TrainSettings.load(path, ["fp16.enabled=false"])
    same = {
        "train_batch_size": 8,
        "fp16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8}},
        "run": {"steps": 500, "output": "no", "sample": {"prompts": ["yes", "1:30", "1999-01-01"]}},
    }
    assert settings == TrainSettings.load(same)
    assert json.loads(call("config", path).output) == json.loads(TrainSettings.load(path).to_json())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2", "seed stands more than once; keep one of them"),
        ("zero_optimization:\n  stage: 1\n  stage: 2", "zero_optimization.stage stands more than once"),
        ("fp16: {enabled: yes}", 'fp16.enabled = "yes": must be true or false'),
        ("seed: 010", 'seed = "010"'),
        ("seed: 1_000", 'seed = "1_000"'),
        ("a:\n\tb: 1", 'at line 2, column 1: "b: 1"; indent with blanks, as YAML forbids tabs'),
        ("seed: 1\nfp16: {enabled", "is not YAML"),
        ("seed: 1\n  fp16: 2", "at line 2"),
        ("a: &x [1]\nb: *x", 'references (*name) are not read; write the value at line 2, column 4: "b: *x"'),
        ("a: !!python/object/apply:os.system [ls]", "is not read at line 1"),
        ("a: !!timestamp 2001-01-01", "is not read at line 1"),
        ("[1, 2]: 3", "a key must be a word at line 1"),
        ("seed: 1\n---\nseed: 2", "is not YAML"),
        ("a: \x00", "is not YAML"),
        ("", "is empty; write a configuration"),
        ("- 1", "must be an object"),
        ("a: " + "[" * 2000, "levels deep"),
        ("seed: " + "1" * 5000, "digits"),
        ("train_batchsize: 8", "did you mean train_batch_size?"),
    ],
)
def test_what_yaml_gets_wrong_is_told(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="broken.yaml") as caught:
        TrainSettings.load(path)
    assert expected in str(caught.value)


def test_settings_are_read_without_torch(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train_batch_size: 8\n")
    code = (
        "import sys; from pathlib import Path; from zeromesh.config.document import read_object; "
        "read_object(Path('a.yaml')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
