"""Answers that DeepSpeed 0.19.8 gave to the same calls, recorded in ``ds_answers.json``."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zeromesh.deepspeed as deepspeed

FACTS = json.loads((Path(__file__).parent / "ds_answers.json").read_text())
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize("fact", FACTS["schedules"], ids=lambda fact: f"{fact['class']}-{len(fact['params'])}")
def test_schedules(fact: dict[str, Any]) -> None:
    members = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.1 * (number + 1)} for number in range(2)]
    optimizer = torch.optim.Adam(members)
    schedule = getattr(deepspeed.runtime.lr_schedules, fact["class"])(optimizer, **fact["params"])
    if fact["before"] == "AssertionError":
        with pytest.raises(AssertionError):
            schedule.get_last_lr()
    else:
        assert schedule.get_last_lr() == pytest.approx(fact["before"], rel=1e-5)
    for name, value in fact["attributes"].items():
        assert getattr(schedule, name) == (pytest.approx(value) if isinstance(value, list) else value), name
    for expected in fact["rates"]:
        schedule.step()
        assert schedule.get_lr() == pytest.approx(expected, rel=1e-5)  # recorded with six digits
        assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == schedule.get_lr()


@pytest.mark.parametrize(("given", "expected"), FACTS["batches"])
def test_sizes_of_batches(given: list[int | None], expected: list[int] | str) -> None:
    document = {name: value for name, value in zip(SIZES, given, strict=True) if value is not None}
    if isinstance(expected, str):
        with pytest.raises(AssertionError):
            deepspeed.DeepSpeedConfig(document)
    else:
        config = deepspeed.DeepSpeedConfig(document)
        assert [getattr(config, name) for name in SIZES] == expected


def test_a_configuration_answers_as_its_engine_would(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 4, "fp16": {"enabled": true}, "checkpoint": {"tag_validation": "FAIL"}}')
    config = deepspeed.runtime.config.DeepSpeedConfig(str(path))
    assert (config.fp16_enabled, config.checkpoint_tag_validation_fail, config.world_size) == (True, True, 1)
    path.write_text('{"train_batch_size": 4, "train_batch_size": 8}')
    with pytest.raises(ValueError, match="more than once"):
        deepspeed.DeepSpeedConfig(str(path))
    assert deepspeed.DeepSpeedConfig({"train_batch_size": 4}).gradient_clipping == 1.0
    document = {"train_batch_size": 4, "checkpoint": {"tag_validation": "Maybe"}}
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="must be one of Warn, Ignore, Fail"):
        deepspeed.initialize(model=torch.nn.Linear(1, 1), config=document)


def test_a_wrong_configuration_leaves_the_models_engine_alone(one_rank: None) -> None:
    model = torch.nn.Linear(2, 1)
    right = {"train_batch_size": 1, "gradient_clipping": "auto", "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(model=model, config=right)[0]
    assert engine.gradient_clipping() == 1.0
    with pytest.raises(ValueError, match='did you mean "warmup_num_steps"'):
        deepspeed.initialize(
            model=model, config={**right, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}}
        )
    with pytest.raises(ValueError, match="total_num_steps"):
        deepspeed.initialize(model=torch.nn.Linear(2, 1), config={**right, "scheduler": {"type": "WarmupDecayLR"}})
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert engine.was_step_applied()
