"""``zeromesh train`` with the model cut into stages: its log and its weights are those of one process."""

import math
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from commands import call, write_config
from harness import run_ranks
from test_finetune import settings as finetuning
from test_train_mesh import assert_same_model, assert_same_run, numbers
from zeromesh.apps.train import loop
from zeromesh.apps.train.metrics import read_metrics
from zeromesh.apps.train.train_run import train

LIMIT = 120
RUN = {"steps": 3, "log_every": 1, "save_every": 2, "evaluate_every": 2, "evaluate_batches": 6}
TWO_STAGES = {"mesh": {"pipeline": 2}}
ZB_V = {"schedule": "zb-v", "chunks": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, TWO_STAGES),
    "zb-h1, checkpointing, chunked loss": (
        2,
        {
            **TWO_STAGES, "pipeline": {"schedule": "zb-h1"}, "chunked_loss": True,
            "activation_checkpointing": {"enabled": True},
        },
    ),
    "zb-v and data, sharded": (
        4,
        {
            **TWO_STAGES, "pipeline": ZB_V, "zero_optimization": {"stage": 3},
            "run": {"evaluate_batches": 3},  # of each rank, so that they are the same
        },
    ),
    "interleaved and tensor": (
        4, {"mesh": {"pipeline": 2, "tensor": 2}, "pipeline": {"schedule": "interleaved-1f1b", "chunks": 2}},
    ),
}  # fmt: skip


def config(corpus: Path, folder: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}},
        "gradient_clipping": 0.5,
        "model": {"architecture": "gpt", "hidden_size": 16, "layers": 4, "heads": 2, "sequence_length": 32},
        "data": {
            "train": str(corpus), "suffixes": [".py"], "validation_fraction": 0.1, "vocabulary_size": 270,
            "document_attention": True,
        },
        "run": {"output": str(folder / "run"), "sample": {"prompts": ["def"], "length": 3}, **RUN},
    }  # fmt: skip
    for section, change in changes.items():
        merges = isinstance(change, dict) and isinstance(settings.get(section), dict)
        settings[section] = settings[section] | change if merges else change
    return write_config(folder, settings)


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(train, 1, config(corpus, folder), [], resume=False, timeout=LIMIT)
    return folder / "run"


RARER = ("1f1b", "interleaved and tensor")
"""In the full matrix only; schedules and axes alone are compared in other tests."""


@pytest.mark.some(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if n in RARER else []) for n in CASES])
def test_a_run_in_stages_is_the_run_of_one_process(name: str, corpus: Path, alone: Path, tmp_path: Path) -> None:
    ranks, changes = CASES[name]
    run_ranks(train, ranks, config(corpus, tmp_path, **changes), [], resume=False, timeout=LIMIT)
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.full
def test_a_run_in_stages_may_spread_its_sequences(corpus: Path, tmp_path: Path) -> None:
    for ranks, mesh in ((1, {}), (4, {"pipeline": 2, "context": 2})):
        path = config(corpus, tmp_path / str(ranks), mesh=mesh, data={"document_attention": False})
        run_ranks(train, ranks, path, [], resume=False, timeout=LIMIT)
    assert_same_run(tmp_path / "4" / "run", tmp_path / "1" / "run")


@pytest.mark.full
def test_a_run_goes_on_in_another_number_of_stages(corpus: Path, alone: Path, tmp_path: Path) -> None:
    in_stages = config(corpus, tmp_path / "stages", **TWO_STAGES, run={"output": str(tmp_path / "run")})
    run_ranks(train, 2, in_stages, ["run.steps=2"], resume=False, timeout=LIMIT)
    shown = call("inspect", tmp_path / "run", "--verify")
    assert shown.exit_code == 0, shown.output
    run_ranks(train, 1, config(corpus, tmp_path), [], resume=True, timeout=LIMIT)
    run_ranks(train, 2, in_stages, [], resume=True, timeout=LIMIT)  # and back: there is nothing left but the end
    steps, expected = ([one for one in numbers(run) if one["step"] != 2] for run in (tmp_path / "run", alone))
    for found, want in zip(steps, expected, strict=True):  # the run ended at step 2 first, with all held-out text
        assert found == pytest.approx(want, rel=1e-3)
    assert_same_model(tmp_path / "run", alone)


def train_as_if_the_second_rank_had_more_memory(path: Path) -> None:
    rank = int(os.environ["RANK"])
    with patch.object(loop, "peak_bytes", lambda device: 1000 + rank):
        train(path, [], resume=False)


@pytest.mark.full
def test_the_memory_that_is_logged_is_that_of_the_rank_that_has_used_most(corpus: Path, tmp_path: Path) -> None:
    path = config(corpus, tmp_path, **TWO_STAGES, run={"steps": 1, "evaluate_every": 0})
    run_ranks(train_as_if_the_second_rank_had_more_memory, 2, path, timeout=LIMIT)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["memory"] for record in records if record["kind"] == "train"] == [1001]


ADAPTERS = {"r": 4, "target_modules": ["q_proj", "down_proj", "lm_head"]}  # which is the embedding, too


@pytest.mark.full
@pytest.mark.parametrize(
    ("lora", "schedule"),
    [
        pytest.param(None, "zb-h1", id="all weights", marks=pytest.mark.full),
        pytest.param(ADAPTERS, "1f1b", id="adapters"),
    ],
)
def test_a_model_of_transformers_is_trained_in_stages(lora, schedule, tiny, tmp_path) -> None:
    changes: dict[str, Any] = {"lora": lora, "train_micro_batch_size_per_gpu": 1, "run": {"evaluate_every": 2}}
    for ranks in (1, 2):
        cut = {"mesh": {"pipeline": ranks}, "pipeline": {"schedule": schedule}}
        path = write_config(tmp_path, finetuning(tiny, tmp_path / str(ranks), **changes, **cut))
        run_ranks(train, ranks, path, [], resume=False, timeout=LIMIT)
    assert_same_run(tmp_path / "2", tmp_path / "1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": {"pipeline": 5}}, "4 blocks cannot be cut into 5 stages, as each needs one; set mesh.pipeline"),
        (
            {"pipeline": {"schedule": "interleaved-1f1b"}, "gradient_accumulation_steps": 1},
            "interleaved-1f1b with 1 micro-batches in groups of 2 on 2 ranks: .* take 2 micro-batches",
        ),
        ({"pipeline": {"schedule": "1f1b", "chunks": 2}}, "1f1b with 2 stages per rank: it has exactly 1"),
        ({"pipeline": {"schedule": "breadth-first", "chunks": 3}}, "4 blocks cannot be cut into 6 stages"),
        ({"pipeline": {"schedule": "1f2b"}}, "there is no schedule '1f2b'"),
        ({"pipeline": {"partition": [0, 4]}}, r"pipeline.partition is \[0, 4\]; .* there are 4 blocks"),
        ({"pipeline": {"blocks": ["layers.*"]}}, "pipeline.blocks: 'layers.*' matches no module"),
    ],
)
def test_settings_that_cannot_run_in_stages_are_refused_before_the_start(changes, message, corpus, tmp_path) -> None:
    changes = {**TWO_STAGES, "train_batch_size": None, "gradient_accumulation_steps": 4} | changes
    path = config(corpus, tmp_path, **changes)
    ranks = math.prod(changes["mesh"].values())
    result = call("train", path, "--set", f"run.ranks={ranks}")
    assert result.exit_code == 2, result.output
    assert re.search(message, " ".join(result.output.split())), result.output
    assert not (tmp_path / "run").exists()
