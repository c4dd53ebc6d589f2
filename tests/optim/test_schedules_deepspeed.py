"""DeepSpeed's schedules under random settings, beside definitions written down anew from its documentation."""

import math
import random
from typing import Any

import pytest
import torch

from zeromesh.shard.optim.schedules import build

UPDATES = 40


def make_optimizer(*own: Any, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in own]
    return torch.optim.AdamW(groups, foreach=False, **options)


def used(name: str, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> list[list[tuple[float, Any]]]:
    schedule = build(name, params, optimizer)
    seen = []
    for _ in range(UPDATES):
        seen.append([(float(group["lr"]), group["betas"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return seen


def height(steps: int, size: int, stairs: int) -> float:
    """Return the part of the way up after so many of ``size`` steps: on the highest stair that has been reached."""
    if stairs <= 0:
        return steps / size
    return max(stair for stair in range(stairs + 1) if stair * size <= steps * stairs) / stairs


def one_cycle(p: dict[str, Any], update: int) -> tuple[float, tuple[float, float]]:
    first = p["cycle_first_step_size"]
    second = p.get("cycle_second_step_size", first)
    stairs = p.get("cycle_first_stair_count", 0), p.get("cycle_second_stair_count", p.get("cycle_first_stair_count", 0))
    low, high, calm, lively = p["cycle_min_lr"], p["cycle_max_lr"], p["cycle_min_mom"], p["cycle_max_mom"]
    if update == 0:
        return low, (calm, 0.99)
    if update <= first + second:
        step = update % (first + second)
        up = height(step, first, stairs[0]) if step <= first else height(first + second - step, second, stairs[1])
        return low + (high - low) * up, (lively - (lively - calm) * up, 0.99)
    intervals = (update - first - second) / p["decay_step_size"] if p.get("decay_step_size") else 0
    return low / (1 + p["decay_lr_rate"] * intervals), (lively * (1 + p["decay_mom_rate"] * intervals), 0.99)


def random_cycle(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    params = {
        "cycle_min_lr": draw.uniform(0.001, 0.1),
        "cycle_max_lr": draw.uniform(0.1, 1.0),
        "cycle_first_step_size": draw.randint(1, 15),
        "cycle_min_mom": draw.uniform(0.5, 0.8),
        "cycle_max_mom": draw.uniform(0.8, 0.99),
        "decay_lr_rate": draw.choice([0.0, draw.random()]),
        "decay_mom_rate": draw.choice([0.0, draw.random() / 100]),
    }
    optional = {
        "cycle_second_step_size": draw.randint(0, 15),
        "cycle_first_stair_count": draw.randint(-1, 6),
        "cycle_second_stair_count": draw.randint(-1, 6),
        "decay_step_size": draw.randint(0, 5),
    }
    return params | {key: value for key, value in optional.items() if draw.random() < 0.75}


@pytest.mark.parametrize("seed", range(60))
def test_one_cycle_goes_up_and_down_its_stairs(seed: int) -> None:
    params = random_cycle(seed)
    expected = [one_cycle(params, update) for update in range(UPDATES)]
    for [(lr, betas)], (rate, moments) in zip(used("OneCycle", params, make_optimizer(0.1)), expected, strict=True):
        assert lr == pytest.approx(rate, rel=1e-14)
        assert betas == pytest.approx(moments, rel=1e-14)


def warmup(p: dict[str, Any], update: int) -> float:
    steps = max(2, p["warmup_num_steps"])
    done = max(0, update - 1)
    return min(1.0, done / steps if p.get("warmup_type") == "linear" else math.log(done + 1) / math.log(steps))


def warmup_lr(p: dict[str, Any], own: list[float], group: int, update: int) -> float:
    """Up to a rate per group or one for all, by default the group's own."""
    low, high = (each(p.get(key, default), group) for key, default in BOUNDS.items())
    high = own[group] if high is None else high
    return low + (high - low) * warmup(p, update)


def warmup_decay_lr(p: dict[str, Any], own: list[float], group: int, update: int) -> float:
    low, high = each(p.get("warmup_min_lr", 0.0), group), each(p.get("warmup_max_lr", 0.001), group)
    steps, total, done = max(2, p["warmup_num_steps"]), p["total_num_steps"], update - 1
    down = max(0.0, (total - done) / max(1, total - steps))
    return low + (high - low) * (warmup(p, update) if done < steps else down)


def warmup_cosine_lr(p: dict[str, Any], own: list[float], group: int, update: int) -> float:
    steps, total, done = max(2, p["warmup_num_steps"]), p["total_num_steps"], update - 1
    if update == 0:
        return 0.0
    if done < steps:
        return own[group] * (p["warmup_min_ratio"] + (1 - p["warmup_min_ratio"]) * warmup(p, update))
    progress = min(1.0, (done - steps + 1) / max(1, total - steps))
    return own[group] * (p["cos_min_ratio"] + (1 - p["cos_min_ratio"]) * (1 + math.cos(math.pi * progress)) / 2)


def lr_range_test(p: dict[str, Any], own: list[float], group: int, update: int) -> float:
    done = update / p["lr_range_test_step_size"]
    done = math.floor(done) if p["lr_range_test_staircase"] else done
    return each(p["lr_range_test_min_lr"], group) * (1 + p["lr_range_test_step_rate"] * done)


BOUNDS = {"warmup_min_lr": 0.0, "warmup_max_lr": None}


def each(value: Any, group: int) -> Any:
    return value[group] if isinstance(value, list) else value


def per_group(draw: random.Random, low: float, high: float) -> Any:
    return draw.choice([draw.uniform(low, high), [draw.uniform(low, high), draw.uniform(low, high)]])


def some(draw: random.Random, **values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if draw.random() < 0.6}


def random_params(name: str, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    shared = {"warmup_num_steps": draw.randint(1, 20), "warmup_type": draw.choice(["log", "linear"])}
    rates = some(draw, warmup_min_lr=per_group(draw, 0, 0.01), warmup_max_lr=per_group(draw, 0.02, 0.5))
    total = {"total_num_steps": draw.randint(1, 35)}
    ratios = {"warmup_min_ratio": draw.random() / 2, "cos_min_ratio": draw.random() / 2}
    search = {
        "lr_range_test_min_lr": per_group(draw, 0.001, 0.1),
        "lr_range_test_step_size": draw.randint(1, 9),
        "lr_range_test_step_rate": draw.uniform(0.1, 3),
        "lr_range_test_staircase": draw.random() < 0.5,
    }
    return {
        "WarmupLR": shared | rates,
        "WarmupDecayLR": shared | rates | total,
        "WarmupCosineLR": shared | ratios | total,
        "LRRangeTest": search,
    }[name]


OTHERS = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "LRRangeTest": lr_range_test,
}


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("name", OTHERS)
def test_groups_have_the_rates_that_deepspeed_gives_them(name: str, seed: int) -> None:
    params, own = random_params(name, seed), [0.1, 0.3]
    found = used(name, params, make_optimizer(*own))
    for update, groups in enumerate(found):
        expected = [OTHERS[name](params, own, group, update) for group in range(2)]
        assert [lr for lr, _ in groups] == pytest.approx(expected, rel=1e-13, abs=1e-17)


def test_one_cycle_announces_that_it_changes_the_second_beta(caplog: pytest.LogCaptureFixture) -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    build("OneCycle", params, make_optimizer(0.1, betas=(0.9, 0.99)))
    assert not caplog.records
    build("OneCycle", params, make_optimizer(0.1))
    assert "0.99 instead of 0.999" in caplog.text
    assert "cycle_momentum to false" in caplog.text


def test_a_tensor_as_learning_rate_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = make_optimizer(rate, rate, rate.clone())  # torch lets groups share one tensor
    schedule = build("WarmupLR", {"warmup_num_steps": 4, "warmup_max_lr": [1.0, 2.0, 4.0]}, optimizer)
    tensors = [group["lr"] for group in optimizer.param_groups]
    for _ in range(5):
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0, 4.0]
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, tensors, strict=True))
    assert tensors[0] is rate
    assert schedule.get_last_lr() == [1.0, 2.0, 4.0]
    started = [group["initial_lr"] for group in optimizer.param_groups]
    assert started == [0.5, 0.5, 0.5]


def test_a_tensor_as_learning_rate_trains_as_a_number_does() -> None:
    numbers, tensors = make_optimizer(0.25), make_optimizer(torch.tensor(0.25, dtype=torch.float64))
    assert used("WSD", {"total_num_steps": 20}, numbers) == used("WSD", {"total_num_steps": 20}, tensors)
