"""Pipelines evaluate any number of micro-batches, under every schedule, and hold no more of them than they must."""

import weakref
from typing import Any

import pytest
import torch

import zeromesh
from harness import on_ranks, run_ranks
from test_pipeline import CHUNKS, SAMPLES, SCHEDULES, batches, build

COUNTS = (1, 2, 3, 5)


def start(pipeline: int, schedule: str = "1f1b", row: int = 0) -> zeromesh.Engine:
    settings: dict[str, Any] = {
        "train_batch_size": 4 * SAMPLES,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": row},
        "mesh": {"pipeline": pipeline},
        "pipeline": {"schedule": schedule, "chunks": CHUNKS.get(schedule) if pipeline > 1 else None},
    }
    return zeromesh.initialize(model=build("tied"), config=settings)[0]


def scores(pipeline: int, schedules: tuple[str, ...], row: int) -> list[list[float]]:
    found = []
    for schedule in schedules:
        engine = start(pipeline, schedule, row)
        share = engine.data_rank, engine.data_size
        found.append(
            [float(engine.eval_batch(batches("tied", 7, count, *share), num_micro_batches=count)) for count in COUNTS]
        )
        found[-1].append(float(engine.train_batch(batches("tied", 8, 4, *share))))
        engine.destroy()
    return found


@pytest.mark.parametrize(("ranks", "row"), [(2, 0), pytest.param(4, 3, marks=pytest.mark.full)])
def test_any_number_of_micro_batches_is_evaluated(ranks: int, row: int) -> None:
    expected = run_ranks(scores, 1, 1, ("1f1b",), 0)[0][0]
    for found in run_ranks(scores, ranks, 2, SCHEDULES, row, timeout=120):
        for schedule, numbers in zip(SCHEDULES, found, strict=True):
            assert numbers == pytest.approx(expected, rel=1e-9), schedule


def refusal() -> str:
    with pytest.raises(ValueError, match="num_micro_batches is 0; it must be at least 1") as caught:
        start(1).eval_batch(iter([]), num_micro_batches=0)
    return str(caught.value)


def test_no_micro_batch_is_refused() -> None:
    assert run_ranks(refusal, 1)


@on_ranks(2)
def test_an_evaluation_lets_go_of_what_it_has_handed_over() -> None:
    count = 6
    engine = start(2)
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive = []
    blocks = engine.pipelined.blocks_by_stage[0]

    def before(module: Any, args: Any) -> None:
        alive.append(sum(one() is not None for one in outputs))

    def after(module: Any, args: Any, output: torch.Tensor) -> None:
        outputs.append(weakref.ref(output))

    engine.eval_batch(batches("plain", 0, count, 0, 1), num_micro_batches=count)  # what passes on is found out
    engine.module.get_submodule(blocks[0]).register_forward_pre_hook(before)
    engine.module.get_submodule(blocks[-1]).register_forward_hook(after)
    engine.eval_batch(batches("plain", 0, count, 0, 1), num_micro_batches=count)
    assert len(outputs) == count
    assert max(alive) == 0
