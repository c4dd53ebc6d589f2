"""``zeromesh.hf.Trainer`` updates by the optimizer that it is given, or refuses one that is wrong on pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from hf_training import BATCH, arguments, fresh_libraries, model, ranks, samples

pytest.importorskip("accelerate")


def losses(folder: Path, stage: int | None, kind: str, section: dict[str, Any] | None = None) -> list[float] | str:
    import transformers

    import zeromesh.hf

    with fresh_libraries():
        options = {"per_device_train_batch_size": BATCH // ranks(), "use_cpu": True, "logging_steps": 1}
        named = {"optim": "adafactor"} if kind == "adafactor" else {}
        args = transformers.TrainingArguments(str(folder), **arguments(None, **options, **named))
        made, chosen = model(), {}
        if kind != "adafactor":
            optimizer = torch.optim.SGD(made.parameters(), lr=0.5, momentum=0.9)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if kind == "schedule" else None
            chosen["optimizers"] = (optimizer, schedule)
        trainer: Any = transformers.Trainer
        if stage is not None:
            trainer = zeromesh.hf.Trainer
            chosen["zeromesh"] = {"zero_optimization": {"stage": stage}, **(section or {})}
        try:
            run = trainer(made, args, train_dataset=samples(4 * BATCH), **chosen)
            run.train()
        except ValueError as error:
            return str(error)
        return [line["loss"] for line in run.state.log_history if "loss" in line]


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", ["optimizer", "schedule"])
def test_the_optimizer_and_the_schedule_that_are_passed_are_used(kind: str, stage: int, tmp_path: Path) -> None:
    wanted = losses(tmp_path, None, kind)
    assert run_ranks(losses, 2, tmp_path, stage, kind)[0] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_looks_at_whole_matrices_is_refused_in_spite_of_the_trainer(
    stage: int, tmp_path: Path
) -> None:
    for said in run_ranks(losses, 2, tmp_path, stage, "adafactor"):
        assert "Adafactor would be wrong on sharded parameters" in said
    section = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    for said in run_ranks(losses, 2, tmp_path, stage, "optimizer", section):
        assert "optimizers= with a SGD, and the configuration has a section optimizer" in said
