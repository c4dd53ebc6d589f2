"""The classes of ``deepspeed.runtime.lr_schedules``."""

import inspect
from typing import Any

import pytest
import torch

import zeromesh.deepspeed as deepspeed
from zeromesh.shard.optim import schedules

lr_schedules: Any = deepspeed.runtime.lr_schedules

PARAMS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 5, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 12, "warmup_max_lr": 0.1, "warmup_num_steps": 5},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 5, "warmup_min_ratio": 0.1},
}

SIGNATURES = {
    "LRRangeTest": "optimizer lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate "
    "lr_range_test_staircase last_batch_iteration",
    "OneCycle": "optimizer cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom "
    "decay_mom_rate last_batch_iteration",
    "WarmupLR": "optimizer warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
    "WarmupDecayLR": "optimizer total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type "
    "last_batch_iteration",
    "WarmupCosineLR": "optimizer total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type "
    "last_batch_iteration",
}


def make_optimizer(groups: int = 2) -> torch.optim.AdamW:
    members = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1 * (n + 1)} for n in range(groups)]
    return torch.optim.AdamW(members)


@pytest.mark.parametrize("name", PARAMS)
def test_a_class_schedules_as_the_configuration_of_its_name(name: str) -> None:
    mine, other = make_optimizer(), make_optimizer()
    schedule = getattr(lr_schedules, name)(mine, **PARAMS[name])
    expected = schedules.build(name, PARAMS[name], other)
    assert list(inspect.signature(type(schedule)).parameters) == SIGNATURES[name].split()
    for _ in range(20):
        rates = [group["lr"] for group in other.param_groups]
        assert [group["lr"] for group in mine.param_groups] == rates
        assert schedule.get_lr() == rates
        schedule.step()
        assert schedule.get_last_lr() == schedule.get_lr()
        expected.step()
    resumed = getattr(lr_schedules, name)(make_optimizer(), **PARAMS[name])
    before = [group["lr"] for group in resumed.optimizer.param_groups]
    resumed.load_state_dict(schedule.state_dict())
    # The groups' rates are the optimizer's state.
    assert resumed.get_lr() == schedule.get_lr()
    assert [group["lr"] for group in resumed.optimizer.param_groups] == before
    resumed.step(3)
    assert resumed.last_batch_iteration == 3


def test_arguments_go_by_position_and_a_list_has_one_value_per_group() -> None:
    schedule = lr_schedules.WarmupLR(make_optimizer(), [0.0, 0.1], [0.1, 0.5], 10, "linear")
    assert (schedule.min_lrs, schedule.max_lrs, schedule.warmup_type) == ([0.0, 0.1], [0.1, 0.5], "linear")
    schedule.step(5)
    assert schedule.get_lr() == pytest.approx([0.05, 0.3])
    cosine = lr_schedules.WarmupCosineLR(make_optimizer(), 10, 0.2, 4)
    assert (cosine.org_lrs, cosine.total_num_steps) == ([0.1, 0.2], 10)
    cosine.step(9)
    assert cosine.get_lr_ratio() == pytest.approx(0.0001)
    with pytest.raises(TypeError, match="total_num_steps"):
        lr_schedules.WarmupDecayLR(make_optimizer())
    with pytest.raises(ValueError, match="warmup_num_steps must be a positive integer, got 0"):
        lr_schedules.WarmupLR(make_optimizer(), warmup_num_steps=0)
    assert lr_schedules.WarmupLR(make_optimizer(), warmup_type="slow").warmup_type == "log"
    late = lr_schedules.WarmupLR(make_optimizer(), last_batch_iteration=4)
    with pytest.raises(AssertionError, match="need to call step"):
        late.get_last_lr()
    with pytest.raises(TypeError, match="no torch optimizer|is not a torch optimizer"):
        lr_schedules.WarmupLR(object())


def test_one_cycle_moves_the_momentum_unless_told_not_to() -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_min_mom": 0.8}
    schedule = lr_schedules.OneCycle(make_optimizer(), **params, cycle_max_mom=0.9)
    schedule.step(3)
    assert schedule.get_mom() == [(pytest.approx(0.8), 0.99)] * 2
    assert lr_schedules.OneCycle(make_optimizer(), 0.01, 0.1, cycle_momentum=False).get_mom() is None


def test_the_configuration_gives_one_of_the_classes() -> None:
    """With the values that DeepSpeed 0.19.8 has for the same configuration."""
    model = torch.nn.Linear(2, 2)
    warmup = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }
    engine, _, _, schedule = deepspeed.initialize(model=model, config=config)
    assert isinstance(schedule, lr_schedules.WarmupLR)
    assert schedule is engine.lr_scheduler
    rates = [engine.get_lr()[0]]
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        rates.append(schedule.get_lr()[0])
    assert rates == pytest.approx([0.01, 0.01, 0.0325, 0.055])
    engine.destroy()
