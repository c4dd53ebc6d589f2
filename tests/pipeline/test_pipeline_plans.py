"""Stages whose blocks follow a plan of saved tensors compute the bits of keeping everything, in the planned bytes."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import zeromesh
from harness import run_ranks
from live_storages import LiveStorages
from test_planned_peaks import AIM, GRADIENTS, MODELS, TOKENS, WORDS, is_on_host
from zeromesh.apps.plan import saved
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.saved import PlannedCost, RankPlan, planned_cost
from zeromesh.base.machine import MACHINE

SAMPLES, MICROBATCHES = 8, 4
OTHERS = 4 * (64 * 256 + (WORDS + TOKENS) * 64)
"""Bytes of gradients on their way to the two blocks': of the largest parameter, and of embeddings."""

POSTPONED = 0.05
"""Part of a peak that is not planned where gradients of weights come later: operands of the block that is at work."""


class Trained(NamedTuple):
    """Two updates on one rank."""

    losses: list[float]
    weights: dict[str, Tensor]
    peak: int  # bytes in the second update
    planned: tuple[RankPlan, ...]  # of all ranks, on the first one


def trained(name: str, schedule: dict[str, Any], section: Any, further: dict[str, Any]) -> Trained:
    make, data = MODELS[name]
    plans: list[PlannedCost] = []
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "mesh": {"pipeline": 2},
        "pipeline": {"partition": "uniform", **schedule}, "activation_checkpointing": section, **further,
    }  # fmt: skip
    with patch.object(saved, "planned_cost", lambda *args: plans.append(planned_cost(*args)) or plans[-1]):
        engine, _, loader, _ = zeromesh.initialize(model=make(), config=config, training_data=data)
    losses, batches = [], [*loader, *DataLoader(data, SAMPLES)][:MICROBATCHES]
    for number in range(2):
        torch.manual_seed(number)  # of dropout
        with (live := LiveStorages(is_on_host)) if number else nullcontext():
            losses.append(float(engine.train_batch(iter(batches))))
    state = engine.gathered_state_dict()
    engine.destroy()
    return Trained(losses, state, live.peak, plans[0].ranks if plans else ())


def both(
    name: str,
    schedule: dict[str, Any],
    megabytes: float,
    further: dict[str, Any],
    machine: dict[str, str] | None = None,
) -> tuple[Trained, Trained]:
    """Train with everything kept, and under a budget; ``machine`` names the file of one by the variable for it."""
    section = {"enabled": True, "granularity": "auto", "budget_gb": megabytes / 1e3}
    with patch.dict(os.environ, machine or {}):  # in this rank, which may have started before the test
        return trained(name, schedule, {"enabled": False}, further), trained(name, schedule, section, further)


MOVES = {"bf16": {"enabled": True}}
"""Further settings of the case in which the machine has a link to its host."""

CASES = [
    ("gpt", {"schedule": "1f1b"}, 5.0, {}),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("llama", {"schedule": "1f1b"}, 6.0, {"zero_optimization": {"stage": 1}}),
            ("llama", {"schedule": "zb-h1", "partition": [0, 3]}, 10.0, {}),
            ("gpt", {"schedule": "gpipe"}, 9.0, {}),
            ("gpt", {"schedule": "interleaved-1f1b", "chunks": 2}, 6.5, {}),
            ("bert", {"schedule": "1f1b"}, 7.0, {}),
            ("vit", {"schedule": "1f1b"}, 7.0, {}),
            ("gpt", {"schedule": "1f1b"}, 2.3, MOVES),
        )
    ),
]


def name_of(value: Any) -> str:
    return value.get("schedule", "") if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "schedule", "megabytes", "further"), CASES, ids=name_of)
def test_planned_stages_compute_the_bits_of_keeping_everything_in_the_planned_bytes(
    name: str,
    schedule: dict[str, Any],
    megabytes: float,
    further: dict[str, Any],
    tmp_path: Path,
) -> None:
    cluster("h100", 2).save(path := tmp_path / "machine.json")
    machine = {MACHINE: str(path)} if further == MOVES else {}
    ranks = run_ranks(both, 2, name, schedule, megabytes, further, machine)
    planned = ranks[0][1].planned
    assert not all(plan.keeps_all for rank in planned for plan in rank.plans)
    assert any(plan.moves for rank in planned for plan in rank.plans) is (further == MOVES)
    aim = AIM + POSTPONED * schedule["schedule"].startswith("zb")
    for rank, (whole, got) in zip(planned, ranks, strict=True):
        assert rank.peak <= megabytes * 1e6
        # How many messages are on their way is for the moment to say; the most are planned.
        sent = sum(stage.messages for stage in rank.costs.stages)
        assert (1 - aim) * (rank.peak - sent) <= got.peak <= (1 + aim) * rank.peak + GRADIENTS + OTHERS
        assert got.losses == whole.losses
        assert all(torch.equal(value, whole.weights[key]) for key, value in got.weights.items())


@pytest.mark.full
@pytest.mark.parametrize(("axis", "stage"), [("data", 2), ("data", 3), ("tensor", 1)])
def test_planned_stages_beside_other_axes_compute_the_bits_of_keeping_everything(axis: str, stage: int) -> None:
    further = {"mesh": {"pipeline": 2, axis: 2}, "zero_optimization": {"stage": stage}}
    ranks = run_ranks(both, 4, "llama", {"schedule": "1f1b"}, 6.0, further)
    assert not all(plan.keeps_all for rank in ranks[0][1].planned for plan in rank.plans)
    for whole, got in ranks:
        assert got.losses == whole.losses
        assert all(torch.equal(value, whole.weights[key]) for key, value in got.weights.items())
