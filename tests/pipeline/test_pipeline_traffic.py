"""What ranks of a pipeline send: activations and their gradients along it, and gradients as often as the row says."""

from collections.abc import Iterator
from typing import Any

import pytest

import zeromesh
from harness import run_ranks
from test_pipeline import ADAMW, SAMPLES, WIDTH, batches, build

MICROBATCHES, DATA, LENGTH, BYTES = 4, 2, 6, 8


def sent(
    kind: str, row: int, schedule: str, chunks: int | None, slots: int | None = None
) -> tuple[dict[str, Any], list[int], list[int]]:
    settings = {
        "train_batch_size": SAMPLES * MICROBATCHES,
        "train_micro_batch_size_per_gpu": SAMPLES // DATA,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": row},
        "mesh": {"pipeline": 2},
        "pipeline": {"schedule": schedule, "chunks": chunks},
        "units": ["Block"],
        "slots": {"parameter": slots},
    }
    engine = zeromesh.initialize(model=build(kind), config=settings)[0]

    def given() -> Iterator[Any]:
        return batches(kind, 0, MICROBATCHES, engine.data_rank, engine.data_size)

    engine.train_batch(given())
    engine.traffic_report(reset=True)
    engine.train_batch(given())
    sizes = [sum(flat.layout.size for flat in unit.flats) * BYTES for unit in engine.sharded.units]
    stages = engine.pipelined.stages
    parts = [engine.pipelined.units_of(stage, engine.sharded) for stage in stages]
    turns = [sum(unit in part for part in parts if part is not None) or 1 for unit in range(len(sizes))]
    return engine.traffic_report(), sizes, turns


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("row", "schedule", "chunks"),
    [
        (0, "1f1b", None),
        (0, "interleaved-1f1b", 2),
        (2, "interleaved-1f1b", 2),
        pytest.param(2, "zb-h1", None, marks=pytest.mark.full),
    ],
)
def test_a_step_sends_what_the_formulas_say(row: int, schedule: str, chunks: int | None) -> None:
    boundaries = 2 * (chunks or 1) - 1
    tokens = SAMPLES // DATA * sum(LENGTH + 2 * (number % 2) for number in range(MICROBATCHES))
    along = dict.fromkeys(("activations", "gradients of activations"), 0)
    for report, sizes, turns in run_ranks(sent, 2 * DATA, "plain", row, schedule, chunks):
        by_axis = {key.rpartition("/")[2]: 0 for key in report}
        for key, value in report.items():
            what, _, axis = key.rpartition("/")
            by_axis[axis] += value["bytes"]
            if axis == "pipeline" and what in along:
                along[what] += value["bytes"]
            else:
                assert axis != "pipeline" or (what == "exchange" and value["bytes"] <= 32), key
        # Rows 0 and 1 sum gradients once in an update. The others do so after each micro-batch, a unit of two stages
        # after the part of each.
        often = 1 if row == 0 else MICROBATCHES
        reduced = sum(size * (turn if often > 1 else 1) for size, turn in zip(sizes, turns, strict=True)) * often
        assert report["reduce_scatter/data"]["bytes"] == reduced * (DATA - 1) // DATA
        assert by_axis.keys() <= {"pipeline", "data", "world"}
        assert by_axis["world"] < 2000  # what the ranks agree on
    # Between stages go the activation and the embedding, which every block is given.
    expected = 2 * tokens * WIDTH * BYTES * boundaries * DATA
    assert along == {"activations": expected, "gradients of activations": expected}


@pytest.mark.some(1)
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", None), ("zb-v", 2)])
def test_slots_say_how_often_units_are_gathered_over_micro_batches(schedule: str, chunks: int | None) -> None:
    """With a slot for each unit, once in an update; with two, for most forwards and backwards.

    What a stage fetches ahead is its own: units of the rank's other stages would be evicted before they are used.
    """
    for slots in (8, 2):
        for report, sizes, _ in run_ranks(sent, 2 * DATA, "plain", 3, schedule, chunks, slots):
            times = report["all_gather/data"]["bytes"] / (sum(sizes) * (DATA - 1) // DATA)
            assert times == 1 if slots == 8 else 1 < times <= 1.5 * MICROBATCHES
