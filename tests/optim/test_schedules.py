"""The schedules beside closed formulas, and beside values worked out by hand."""

import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from zeromesh.shard.optim.schedules import SCHEDULES, RateSchedule, build

OWN = 0.01


def make_optimizer(*own: float, **arguments: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in own or (OWN,)]
    return torch.optim.AdamW(groups, **arguments)


def learning_rates(name: str, params: dict[str, Any], steps: int) -> list[float]:
    optimizer = make_optimizer()
    schedule = build(name, params, optimizer)
    seen = []
    for _ in range(steps):
        assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def cosine(n: int) -> float:  # warmupCosineLR(12 steps, 4 of warmup from 0.2, down to 0.1), linear, at position n
    if n < 4:
        return OWN * (0.2 + 0.8 * n / 4) if n >= 0 else 0.0
    return OWN * (0.1 + 0.9 * (1 + math.cos(math.pi * min(n - 3, 8) / 8)) / 2)


def decay(n: int) -> float:  # warmupDecayLR(10 steps, 4 of logarithmic warmup), 0.001 to 0.005, at position n
    gamma = math.log(max(n, 0) + 1) / math.log(4) if n < 4 else max(0.0, (10 - n) / 6)
    return 0.001 + 0.004 * gamma


def cycle(n: int) -> float:  # oneCycle up in 4, down in 2, then decay: a triangle as the lower of two lines
    if n < 6:
        return 0.1 + 0.9 * max(0.0, min((n + 1) / 4, (6 - (n + 1)) / 2))
    return 0.1 / (1 + 0.5 * (n - 5) / 3)


def wsd(n: int) -> float:
    """WSD of 10 updates: 3 of warmup, decay in the last 4, to a tenth; by the number of the update, n + 1."""
    u = n + 1
    return OWN * min((u + 1) / 3, 1.0, 0.1 + 0.9 * max(0.0, (10 - u) / 4))


FORMULAS: list[tuple[str, dict[str, Any], Callable[[int], float]]] = [
    ("WarmupLR", {"warmup_num_steps": 4}, lambda n: OWN * min(1.0, math.log(max(n, 0) + 1) / math.log(4))),
    (
        "warmuplr",
        {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 5, "warmup_type": "linear"},
        lambda n: 0.1 + 0.4 * min(max(n, 0) / 5, 1.0),
    ),
    ("WarmupLR", {"warmup_num_steps": 0, "warmup_type": "linear"}, lambda n: OWN * min(max(n, 0) / 2, 1.0)),
    (
        "WarmupDecayLR",
        {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_min_lr": 0.001, "warmup_max_lr": 0.005},
        decay,
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 12,
            "warmup_num_steps": 4,
            "warmup_min_ratio": 0.2,
            "cos_min_ratio": 0.1,
            "warmup_type": "linear",
        },
        cosine,
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 2,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
        },
        cycle,
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.2, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 3.0},
        lambda n: 0.2 * (1 + 3 * (n + 1) / 4),
    ),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 4, "lr_range_test_staircase": True},
        lambda n: 0.001 * (1 + (n + 1) // 4),
    ),
    ("WSD", {"total_num_steps": 10, "warmup_num_steps": 3, "decay_num_steps": 4, "min_ratio": 0.1}, wsd),
    ("WSD", {"total_num_steps": 20}, lambda n: OWN * min(1.0, max(0.0, (19 - n) / 2))),
    (
        "wsd",
        {"total_num_steps": 8, "decay_num_steps": 8, "decay_type": "sqrt"},
        lambda n: OWN * (1 - math.sqrt(min(1.0, (n + 1) / 8))),
    ),
    (
        "WSD",
        {"total_num_steps": 8, "decay_num_steps": 8, "decay_type": "cosine"},
        lambda n: OWN * (1 + math.cos(math.pi * min(1.0, (n + 1) / 8))) / 2,
    ),
]


@pytest.mark.parametrize(("name", "params", "formula"), FORMULAS)
def test_every_schedule_matches_its_formula(name, params, formula):
    assert learning_rates(name, params, 24) == pytest.approx([formula(n - 1) for n in range(24)], rel=1e-13, abs=1e-17)


def test_every_schedule_has_a_formula_here():
    assert {name.lower() for name in SCHEDULES} == {name.lower() for name, _, _ in FORMULAS}


LN2_LN10, LN3_LN10 = 0.30102999566398120, 0.47712125471966244

BY_HAND = [
    ("WarmupLR", {"warmup_num_steps": 10}, [0.0, 0.0, OWN * LN2_LN10, OWN * LN3_LN10]),
    (
        "WarmupDecayLR",
        {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear"},
        [0.0, 0.0, 0.0005, 0.001, 0.00075, 0.0005, 0.00025, 0.0, 0.0],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear"},
        [0.0, 0.0, 0.005, 0.00853568035, 0.0050005, 0.00146531965, 0.000001],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.001, "cycle_max_lr": 0.003, "cycle_first_step_size": 2},
        [0.001, 0.002, 0.003, 0.002, 0.001, 0.001, 0.001],
    ),
    ("LRRangeTest", {"lr_range_test_step_size": 2}, [0.001, 0.0015, 0.002, 0.0025]),
]


@pytest.mark.parametrize(("name", "params", "expected"), BY_HAND)
def test_schedules_give_the_values_worked_out_by_hand(name, params, expected):
    assert learning_rates(name, params, len(expected)) == pytest.approx(expected, rel=1e-7, abs=1e-15)


def test_one_cycle_moves_the_momentum_against_the_learning_rate():
    optimizer = make_optimizer(betas=(0.5, 0.95))
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
    schedule = build("OneCycle", params | {"decay_step_size": 2, "decay_mom_rate": 0.1}, optimizer)
    seen = []
    for _ in range(10):
        seen.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        schedule.step()
    first = [0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9 * 1.05, 0.9 * 1.1, 0.9 * 1.15]
    assert [betas[0] for betas in seen] == pytest.approx(first)
    assert {betas[1] for betas in seen} == {0.99}


def test_one_cycle_leaves_momentum_that_is_not_a_beta(caplog):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.7)
    build("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}, optimizer).step()
    assert optimizer.param_groups[0]["momentum"] == 0.7
    assert "SGD has no betas" in caplog.text


def test_groups_may_have_their_own_arguments():
    schedule = build("WarmupLR", {"warmup_num_steps": 2, "warmup_max_lr": [1.0, 3.0]}, make_optimizer(0.1, 0.2))
    for _ in range(3):
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([1.0, 3.0])


WARMUPS: dict[str, tuple[str, dict[str, Any], tuple[float, ...], str]] = {
    "the default": ("WarmupDecayLR", {}, (5e-7,), "rises to its default .*warmup_max_lr of 0.001 .* lr of 5e-07; set"),
    "one for all": ("WarmupLR", {"warmup_max_lr": 0.1}, (0.1, 0.2), "of 0.1 for all parameter groups, .* are 0.1, 0.2"),
    "the groups' own": ("WarmupLR", {}, (0.1, 0.2), ""),
    "one per group": ("WarmupLR", {"warmup_max_lr": [0.3, 0.2]}, (0.1, 0.2), ""),
    "another one for equal groups": ("WarmupDecayLR", {"warmup_max_lr": 0.3}, (0.1, 0.1), ""),
    "the default, which is the groups'": ("WarmupDecayLR", {}, (0.001, 0.001), ""),
}


@pytest.mark.parametrize("case", WARMUPS)
def test_a_warm_up_that_replaces_rates_of_the_optimizer_says_so(case: str, caplog: pytest.LogCaptureFixture) -> None:
    name, params, rates, said = WARMUPS[case]
    total = {"total_num_steps": 10} if name == "WarmupDecayLR" else {}
    with caplog.at_level(logging.WARNING, logger="zeromesh"):
        build(name, {"warmup_num_steps": 2, **total, **params}, make_optimizer(*rates))
    assert bool(caplog.messages) == bool(said)
    assert re.search(said, "\n".join(caplog.messages))


@pytest.mark.parametrize(("name", "params", "formula"), FORMULAS)
def test_a_resumed_schedule_goes_on_where_it_was(name, params, formula):
    schedule = build(name, params, make_optimizer())
    for _ in range(7):
        schedule.step()
    resumed = build(name, params, make_optimizer())
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.get_last_lr() == schedule.get_last_lr() == [group["lr"] for group in resumed.optimizer.param_groups]
    schedule.step()
    resumed.step()
    assert resumed.get_last_lr() == schedule.get_last_lr()
    started = build(name, params | {"last_batch_iteration": 6}, make_optimizer())
    started.step()
    assert started.get_last_lr() == schedule.get_last_lr()


def test_schedules_made_one_after_the_other_start_from_one_learning_rate():
    optimizer = make_optimizer()
    build("WSD", {"total_num_steps": 1}, optimizer).step()
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert build("WSD", {"total_num_steps": 4}, optimizer).get_last_lr() == [OWN]


def test_auto_means_not_given():
    params = {"warmup_num_steps": 4, "warmup_min_lr": "auto", "warmup_max_lr": "auto"}
    assert learning_rates("WarmupLR", params, 6) == learning_rates("WarmupLR", {"warmup_num_steps": 4}, 6)


def test_torch_schedules_are_torch_own():
    optimizer = make_optimizer()
    schedule = build("cosineannealinglr", {"T_max": 5, "eta_min": 0.001}, optimizer)
    assert type(schedule) is torch.optim.lr_scheduler.CosineAnnealingLR
    assert schedule.T_max == 5
    assert not isinstance(schedule, RateSchedule)


LISTS = [
    ("OneCycleLR", {"max_lr": [0.1, 0.2], "total_steps": 8, "base_momentum": [0.8, 0.7], "max_momentum": [0.95, 0.9]}),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 8, "base_momentum": 0.8, "max_momentum": [0.95, 0.9]}),
    ("CyclicLR", {"base_lr": [0.1, 0.2], "max_lr": [0.3, 0.5], "step_size_up": 3, "base_momentum": [0.7, 0.6]}),
    ("MultiStepLR", {"milestones": [2, 5], "gamma": 0.5}),
]


@pytest.mark.parametrize(("name", "params"), LISTS)
def test_lists_among_the_parameters_of_torch_schedules_mean_what_they_mean_in_torch(name, params) -> None:
    optimizers = [make_optimizer(0.1, 0.2) for _ in range(2)]
    schedules = [build(name, params, optimizers[0]), getattr(torch.optim.lr_scheduler, name)(optimizers[1], **params)]
    for _ in range(7):
        ours, theirs = ([(g["lr"], g["betas"]) for g in optimizer.param_groups] for optimizer in optimizers)
        assert ours == theirs
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()


def test_groups_may_have_their_own_momenta() -> None:
    optimizer = make_optimizer(0.1, 0.2)
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2}
    schedule = build("OneCycle", params | {"cycle_min_mom": [0.8, 0.6], "cycle_max_mom": 0.9}, optimizer)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    assert [group["betas"][0] for group in optimizer.param_groups] == pytest.approx([0.8, 0.6])


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "OneCycleLR",
            {"max_lr": 0.1, "total_steps": 8, "base_momentum": [0.8, "0.7"]},
            r'scheduler\.params\.base_momentum\[1\] = "0\.7" must be a number.*quotes',
        ),
        (
            "OneCycleLR",
            {"max_lr": [0.1, True], "total_steps": 8},
            r"scheduler\.params\.max_lr\[1\] = true must be a number",
        ),
        (
            "StepLR",
            {"step_size": 2, "gamma": [0.1, 0.2]},
            r"scheduler\.params\.gamma = \[0\.1, 0\.2\] must be a number",
        ),
        ("WarmupLR", {"warmup_steps": 4}, 'warmup_steps.*did you mean "warmup_num_steps"'),
        ("WarmupLR", {"warmup_type": "exp"}, "warmup_type is 'exp'"),
        (
            "WarmupLR",
            {"warmup_num_steps": "3"},
            r'scheduler\.params\.warmup_num_steps = "3" must be a whole number.*quotes',
        ),
        ("WarmupLR", {"warmup_num_steps": -3}, r"scheduler\.params\.warmup_num_steps = -3 must be .* at least 0"),
        ("WarmupLR", {"warmup_num_steps": [2, "3"]}, r'scheduler\.params\.warmup_num_steps = "3"'),
        ("WarmupLR", {"warmup_max_lr": "0.1"}, r'scheduler\.params\.warmup_max_lr = "0\.1" must be a number'),
        ("WarmupLR", {"last_batch_iteration": -2}, r"scheduler\.params\.last_batch_iteration = -2 must be"),
        ("WSD", {"total_num_steps": 0}, r"scheduler\.params\.total_num_steps = 0 must be .* at least 1"),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_momentum": 1},
            "cycle_momentum = 1 must be true or",
        ),
        ("StepLR", {"step_size": 2, "gamma": "0.1"}, r'scheduler\.params\.gamma = "0\.1" must be a number'),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, "warmup_max_lr has 2 values for 1 parameter groups"),
        ("WarmupDecayLR", {}, "needs 'total_num_steps'"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "needs 'cycle_max_lr'"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "at least 1"),
        ("WSD", {"total_num_steps": 5, "warmup_num_steps": 3, "decay_num_steps": 3}, "at most total_num_steps 5"),
        ("WSD", {"total_num_steps": 5, "decay_type": "exp"}, "decay_type is 'exp'"),
        ("StepLR", {"step_sise": 5}, 'step_sise.*did you mean "step_size"'),
        ("StepLR", {}, "needs 'step_size'"),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.2, "mode": "up"}, "CyclicLR.*mode"),
    ],
)
def test_bad_schedules_are_refused_by_name_with_a_remedy(name, params, message):
    with pytest.raises(ValueError, match=message):
        build(name, params, make_optimizer())
