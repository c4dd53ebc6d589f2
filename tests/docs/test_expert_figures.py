"""Figures of the page on experts: the planner predicts each cell of the table of steps."""

import json
import re
import shlex
from pathlib import Path

import pytest

from commands import call

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "experts.md").read_text()
COMMAND = re.search(r"zeromesh (plan llama:.*) --explain expert.json", PAGE.replace("\\\n", ""))
ROWS = re.findall(r"^\| `(\{.*\})` ((?:\| [0-9.]+ s ){3})\|$", PAGE, re.MULTILINE)


def test_the_table_has_all_layouts() -> None:
    assert COMMAND is not None
    assert [json.loads(mesh) for mesh, _ in ROWS] == [{"data": 16}, {"tensor": 8}, {"expert": 8}]


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "cells"), ROWS)
def test_a_step_takes_as_long_as_the_page_says(mesh: str, cells: str, tmp_path: Path) -> None:
    assert COMMAND is not None
    for batch, said in zip((16, 32, 64), re.findall(r"[0-9.]+", cells), strict=True):
        document = {
            "train_batch_size": batch,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "mesh": json.loads(mesh),
            "activation_checkpointing": {"enabled": True},
        }
        (file := tmp_path / "expert.json").write_text(json.dumps(document))
        output = call(*shlex.split(COMMAND[1]), "--explain", file, "--json").output
        answer = json.loads(output)
        assert answer["fits"]
        assert f"{answer['seconds']:.2f}" == said
        low, high = (end / answer["seconds"] for end in answer["seconds_interval"])
        assert (round(low, 1), round(high, 1)) == (0.6, 1.7)
