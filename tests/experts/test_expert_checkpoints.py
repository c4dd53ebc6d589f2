"""Checkpoints and exports of mixtures: from any number of ranks that share experts to any other."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import zeromesh
from compare import assert_close, assert_same
from harness import run_ranks
from huggingface_models import token_batches
from run import adamw, plain_step, start_engine, train_on_tokens
from test_expert_adapters import loaded, saved_mixture
from zeromesh.checkpoint.boxes import Reader
from zeromesh.deepspeed.fp32_weights import get_fp32_state_dict_from_zero_checkpoint

LIMIT = 240
STEPS = 4
HALF = 2

Layout = tuple[int, int, dict[str, int]]

LAYOUTS: Mapping[str, Layout] = {
    "one": (1, 0, {}),
    "data": (2, 3, {}),
    "two": (2, 3, {"expert": 2}),
    "two at stage 1": (2, 1, {"expert": 2}),
    "two at stage 0": (2, 0, {"expert": 2}),
    "two of four": (4, 2, {"expert": 2}),
    "four": (4, 3, {"expert": 4}),
    "tensor": (4, 1, {"expert": 2, "tensor": 2}),
    "pipeline": (4, 1, {"expert": 2, "pipeline": 2}),
    "replicate": (4, 3, {"expert": 2, "replicate": 2}),
}
"""Ranks, ZeRO stage and mesh."""


def wide_loss(logits: torch.Tensor, labels: torch.Tensor, *sizes: int, **options: Any) -> torch.Tensor:
    """Return the loss of transformers, which rounds logits to fp32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def mixture(folder: Path) -> Any:
    model = loaded(folder)
    model.loss_function = wide_loss
    return model


def start(folder: Path, layout: str, **changes: Any) -> Any:
    _, stage, mesh = LAYOUTS[layout]
    micro = {"train_micro_batch_size_per_gpu": 1} if "pipeline" in mesh else {}
    sections: dict[str, Any] = {"batch": 4, "optimizer": adamw(1e-2), "stage": stage, "mesh": mesh, **micro, **changes}
    return start_engine(mixture(folder), **sections)


def advance(engine: Any, tokens: torch.Tensor) -> float:
    """Train by one global batch, and return the loss of this rank's part of it."""
    if not hasattr(engine, "train_batch") or engine.mesh.sizes["pipeline"] == 1:
        return train_on_tokens(engine, tokens)
    rows = tokens.chunk(engine.data_size)[engine.data_rank].split(1)
    return float(engine.train_batch(iter([{"input_ids": row, "labels": row} for row in rows])))


def train(folder: Path, layout: str, steps: int, save: Path | None) -> list[float]:
    engine = start(folder, layout)
    losses = [advance(engine, tokens) for tokens in token_batches(steps)]
    if save is not None:
        engine.save_checkpoint(save)
    return losses


def resume(folder: Path, layout: str, run: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = start(folder, layout)
    engine.load_checkpoint(run)
    losses = [advance(engine, tokens) for tokens in token_batches(STEPS)[HALF:]]
    return losses, engine.gathered_state_dict()


@cache
def plain(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = mixture(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = [plain_step(optimizer, model(input_ids=t, labels=t).loss) for t in token_batches(STEPS)]
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def means(ranks: Sequence[Sequence[float]]) -> list[float]:
    return [sum(step) / len(ranks) for step in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_mixture(tmp_path_factory.mktemp("mixture"))


PAIRS = [(before, after) for before, after in product(LAYOUTS, LAYOUTS) if "one" in (before, after)]
PAIRS += [("two", "four"), ("four", "two at stage 1"), ("tensor", "two"), ("data", "tensor"), ("pipeline", "data")]
PAIRS += [("two of four", "pipeline"), ("replicate", "two at stage 0"), ("data", "replicate"), ("two", "two of four")]


@pytest.mark.parametrize(
    ("before", "after"), [("two", "one"), *(pytest.param(*pair, marks=pytest.mark.full) for pair in PAIRS)]
)
def test_a_run_goes_on_with_any_number_of_ranks_that_share_experts(before, after, folder, tmp_path) -> None:
    expected, parameters = plain(folder)
    first = run_ranks(train, LAYOUTS[before][0], folder, before, HALF, tmp_path, timeout=LIMIT)
    ranks = run_ranks(resume, LAYOUTS[after][0], folder, after, tmp_path, timeout=LIMIT)
    assert means(first) + means([losses for losses, _ in ranks]) == pytest.approx(expected, rel=1e-9)
    assert_close(ranks[0][1], parameters)
    assert all(not state for _, state in ranks[1:])


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_the_same_mesh_a_resumed_run_has_the_same_bits(layout, folder, tmp_path) -> None:
    straight = run_ranks(train, LAYOUTS[layout][0], folder, layout, STEPS, None, timeout=LIMIT)
    run_ranks(train, LAYOUTS[layout][0], folder, layout, HALF, tmp_path, timeout=LIMIT)
    resumed = run_ranks(resume, LAYOUTS[layout][0], folder, layout, tmp_path, timeout=LIMIT)
    assert [losses for losses, _ in resumed] == [losses[HALF:] for losses in straight]


def masters(path: Path) -> dict[str, torch.Tensor]:
    reader = Reader(path)
    reader.verify()
    return {name: reader.tensor(name) for name in reader.names if name.startswith("parameter/")}


def export(folder: Path, layout: str, output: Path) -> Any:
    engine = start(folder, layout)
    before = engine.gathered_state_dict()
    weights = dict(engine.full_weights(torch.float64, only_first_rank=True))
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    if LAYOUTS[layout][1] < 3 and layout != "tensor":
        read = engine.module.state_dict()
        assert_same(read, {name: state[name] for name in read})
    advance(engine, token_batches(1)[0])
    engine.save_16bit_model(output / "model")
    engine.save_checkpoint(output / "run")
    return before, weights, state, engine.gathered_state_dict()


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_the_plain_model_bit_for_bit(layout, folder, tmp_path) -> None:
    model = loaded(folder)
    plain_state = dict(model.state_dict())
    ranks = run_ranks(export, LAYOUTS[layout][0], folder, layout, tmp_path, timeout=LIMIT)
    before, weights, state, after = ranks[0]
    assert_same(before, plain_state)
    assert_same(state, plain_state)
    published = zeromesh.from_pretrained(folder, dtype=torch.float64)
    assert {name.rpartition(".")[2] for name in weights} >= {"weight"}
    assert sum(value.numel() for value in weights.values()) == sum(p.numel() for p in published.parameters())
    # Files that transformers opens, and checkpoints of other libraries, have the trained values.
    assert_same(dict(loaded(tmp_path / "model").state_dict()), after)
    assert_same(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run"), after)
    zeromesh.convert_checkpoint(tmp_path / "run", tmp_path / "universal", "deepspeed-universal", ranks=2)
    again = zeromesh.convert_checkpoint(tmp_path / "universal", tmp_path / "again")
    assert_same(masters(again), {n: v.float() for n, v in masters(tmp_path / "run" / "global_step1").items()})
