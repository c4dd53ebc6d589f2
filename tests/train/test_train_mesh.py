"""``zeromesh train`` on meshes with more axes than data: its log and its weights are those of one process."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from commands import call, write_config
from harness import run_ranks
from zeromesh.apps.train.metrics import read_metrics
from zeromesh.apps.train.train_run import train

STEPS = 4
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"mesh": {"tensor": 2}}),
    "sequence and data": (
        4, {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}, "train_micro_batch_size_per_gpu": 2},
    ),
    "tensor, sharded": (
        4, {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2},
    ),
    "ring": (2, {"mesh": {"context": 2}}),
    "ulysses and data, sharded": (
        4,
        {
            "mesh": {"context": 2}, "context_parallel": {"strategy": "ulysses"}, "zero_optimization": {"stage": 3},
            "train_micro_batch_size_per_gpu": 2,
        },
    ),
    "ring and tensor": (4, {"mesh": {"context": 2, "tensor": 2}}),
}  # fmt: skip


def config(corpus: Path, folder: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}},
        "gradient_clipping": 0.5,
        "model": {"architecture": "llama", "hidden_size": 16, "layers": 2, "heads": 2, "sequence_length": 32},
        "data": {"train": str(corpus), "suffixes": [".py"], "validation_fraction": 0.3, "vocabulary_size": 270},
        "run": {"steps": STEPS, "output": str(folder / "run"), "log_every": 1, "save_every": 2},
        **changes,
    }
    return write_config(folder, settings)


def numbers(run: Path) -> list[dict[str, Any]]:
    kept = ("step", "samples", "tokens", "loss", "learning_rate", "gradient_norm", "bits_per_byte")
    return [{key: record[key] for key in kept if key in record} for record in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    result = call("train", config(corpus, folder))
    assert result.exit_code == 0, result.output
    return folder / "run"


def assert_same_run(run: Path, alone: Path) -> None:
    for found, expected in zip(numbers(run), numbers(alone), strict=True):
        assert found == pytest.approx(expected, rel=1e-3), (found, expected)
    assert_same_model(run, alone)


def assert_same_model(run: Path, alone: Path) -> None:
    found, expected = (load_file(next((one / "model").glob("*.safetensors"))) for one in (run, alone))
    assert found.keys() == expected.keys()
    for key, want in expected.items():
        assert float((found[key].float() - want.float()).abs().max()) < 1e-3, key
    reports = [json.loads((one / "report.json").read_text()) for one in (run, alone)]
    for key in ("parameters", "tokens"):
        assert reports[0][key] == reports[1][key], key


# By default each axis once; the pipeline's and the replicas' are in files of their own.
EACH_AXIS = ("tensor", "ring")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in EACH_AXIS else [pytest.mark.full]) for n in CASES])
def test_a_run_on_a_mesh_is_the_run_of_one_process(name: str, corpus: Path, alone: Path, tmp_path: Path) -> None:
    ranks, changes = CASES[name]
    run_ranks(train, ranks, config(corpus, tmp_path, **changes), [], resume=False, timeout=120)
    assert_same_run(tmp_path / "run", alone)


def test_packed_documents_train_on_two_ranks_as_in_one_process(corpus: Path, tmp_path: Path) -> None:
    data = {"train": str(corpus), "suffixes": [".py"], "validation_fraction": 0.3, "vocabulary_size": 270}
    data["document_attention"] = True
    (tmp_path / "alone").mkdir()
    assert call("train", config(corpus, tmp_path / "alone", data=data), "--set", "run.steps=2").exit_code == 0
    spread = config(corpus, tmp_path, data=data, mesh={"context": 2})
    run_ranks(train, 2, spread, ["run.steps=2"], resume=False, timeout=120)
    assert_same_run(tmp_path / "run", tmp_path / "alone" / "run")


@pytest.mark.full
def test_a_run_goes_on_under_another_mesh(corpus: Path, alone: Path, tmp_path: Path) -> None:
    run_ranks(train, 2, config(corpus, tmp_path, mesh={"context": 2}), ["run.steps=2"], resume=False, timeout=120)
    run_ranks(train, 2, config(corpus, tmp_path, mesh={"tensor": 2}), [], resume=True, timeout=120)
    steps = [one for one in numbers(tmp_path / "run") if "samples" in one]
    for found, expected in zip(steps, [one for one in numbers(alone) if "samples" in one], strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


def drawn_after(path: Path) -> float:
    train(path, [], resume=False)
    return float(torch.rand(()))


def test_ranks_that_split_layers_drop_the_same(corpus: Path, tmp_path: Path) -> None:
    model = {"architecture": "gpt", "hidden_size": 8, "layers": 1, "heads": 2, "sequence_length": 8, "dropout": 0.1}
    run = {"steps": 1, "output": str(tmp_path / "run"), "log_every": 1}
    layout = {"mesh": {"tensor": 2}, "train_micro_batch_size_per_gpu": 2}
    first, second, third, fourth = run_ranks(
        drawn_after, 4, config(corpus, tmp_path, model=model, run=run, **layout), timeout=120
    )
    assert (first, third) == (second, fourth)
    assert first != third


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": {"context": 3}},
            r"model.sequence_length: a sequence has 32 tokens, .* 2 x 3 context-parallel ranks .* 30 and 36",
        ),
        ({"mesh": {"tensor": 3}}, "mlp.down .rowwise.: a width of 64 cannot be split over 3 ranks"),
        ({"mesh": {"tensor": 2}, "tensor_parallel": {"plan": {"blocs.*": "colwise"}}}, "'blocs.*' matches no module"),
        (
            {
                "mesh": {"context": 2},
                "context_parallel": {"strategy": "ring"},
                "data": {"document_attention": True},
            },
            "the strategy ring cannot hide the documents of a sample",
        ),
    ],
)
def test_samples_that_cannot_be_spread_are_refused(changes, message, corpus, tmp_path) -> None:
    data = {"train": str(corpus), "suffixes": [".py"], "vocabulary_size": 270} | changes.pop("data", {})
    run = {"steps": 1, "output": str(tmp_path / "run"), "ranks": max(changes["mesh"].values())}
    result = call("train", config(corpus, tmp_path, run=run, data=data, **changes))
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.output.split())), result.output
