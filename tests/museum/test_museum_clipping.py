"""Norms, clipping and 16 bits: silent errors of other systems, and that ours are those of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeromesh
from harness import run_ranks
from museum import Weights, gap, require, results_by_name, start, weights_of, whole
from run import train_step

CLIP = 0.05
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "replicas": (0, {"data": 2}),
    "shards of states": (1, {"data": 2}),
    "shards": (3, {"data": 2}),
    "replicas of shards": (3, {"replicate": 2, "data": 1}),
}
"""ZeRO stage and mesh of two ranks, by what a rank holds of the gradients."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def rows(number: int = 0) -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def clipped(stage: int, mesh: dict[str, int], scale: float = 1.0, clip: float = CLIP) -> tuple[float | None, Weights]:
    """Update once with two micro-batches of two samples on each of two ranks: the norm and the weights."""
    settings = {"zero_optimization": {"stage": stage}, "mesh": mesh, "units": ["Linear"], "gradient_clipping": clip}
    engine = start(net(), lr=1.0, gradient_accumulation_steps=2, **settings)
    for part in rows().chunk(4)[dist.get_rank() :: 2]:
        train_step(engine, engine(part).square().mean() * scale)
    return engine.get_global_grad_norm(), whole(engine)


def opposite() -> float | None:
    """Return the norm of the mean of two gradients, (1, 3) and (2, 1)."""
    model = nn.Linear(2, 1, bias=False).double()
    engine = start(model, zero_optimization={"stage": 2})
    train_step(engine, engine(torch.tensor([[(1.0, 3.0), (2.0, 1.0)][dist.get_rank()]], dtype=torch.float64)).sum())
    return engine.get_global_grad_norm()


def torchs_clipping(stage: int) -> str:
    engine = start(net(), zero_optimization={"stage": stage})
    engine.backward(engine(rows().chunk(2)[dist.get_rank()]).square().mean())
    try:
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), CLIP)
    except RuntimeError as error:
        return str(error)
    engine.step()
    return f"{gap(whole(engine), plain_clipping(1, lr=0.5)[1]):g}"


SCALED = {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 100}


def in_fp16() -> list[tuple[float | None, float, bool, list[float]]]:
    """Train in fp16 from a scale that overflows: norm, change of the weight, whether it was skipped, and the rate."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine, optimizer, _, _ = zeromesh.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "fp16": SCALED,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
            "zero_optimization": {"stage": 2},
        },
    )
    found = []
    for _ in range(4):
        before = weight(engine)
        train_step(engine, engine(torch.ones(1, 1)).sum())
        found.append((engine.get_global_grad_norm(), before - weight(engine), optimizer.overflow, engine.get_lr()))
    return found


def weight(engine: zeromesh.Engine) -> float:
    value = zeromesh.zero.safe_get_full_fp32_param(next(iter(engine.module.parameters())))
    assert value is not None
    return float(value)


def in_bf16(start_at: float, gradients: list[float], steps: int, lr: float) -> float:
    """Train one weight in bf16 with given gradients, the same on all ranks; return its master."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start_at)
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
    engine = start(model, lr=lr, gradient_accumulation_steps=steps, **settings)
    for gradient in gradients:
        train_step(engine, engine(torch.full((1, 1), gradient)).sum())
    return weight(engine)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cold, self.warm = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.cold.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.cold(x) + self.warm(x)


def thawed(stage: int) -> float:
    """Train a layer in bf16 that is frozen in the first forward, with sums over the ranks in fp32; its master."""
    model = Pair()
    model.cold.requires_grad_(True)
    settings = {"zero_optimization": {"stage": stage}, "communication_data_type": "fp32", "units": ["Linear"]}
    engine = start(model, lr=1.0, bf16={"enabled": True}, train_micro_batch_size_per_gpu=1, **settings)
    for step in range(2):
        model.cold.requires_grad_(step > 0)
        train_step(engine, engine(torch.tensor([[THAWED[dist.get_rank()]]])).sum())
    return weight(engine)


THAWED = (256.0, 1.0)
"""Gradients of the two ranks, whose sum bf16 does not have."""


SLOTS: tuple[dict[str, Any], ...] = (
    {},
    {"slots": {"gradient": 3}},
    {"zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 10}},
    {"zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True}},
)


def in_buckets() -> list[tuple[float | None, Weights]]:
    found = []
    for settings in SLOTS:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        engine = start(model, lr=0.1, **{"zero_optimization": {"stage": 2}, "units": ["Linear"], **settings})
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).chunk(2)[dist.get_rank()]
            train_step(engine, engine(x).square().mean())
        found.append((engine.get_global_grad_norm(), whole(engine)))
    return found


def program() -> dict[str, Any]:
    return {
        "clipped": {name: clipped(stage, mesh) for name, (stage, mesh) in MESHES.items()},
        "tiny": clipped(3, {"data": 2}, scale=1e-5, clip=1e-6),
        "opposite": opposite(),
        "torch's": [torchs_clipping(stage) for stage in (0, 2)],
        "fp16": in_fp16(),
        "accumulated": in_bf16(0.0, [256.0, 1.0, 1.0, 1.0], steps=4, lr=1.0),
        "small updates": in_bf16(1.0, [1.0] * 8, steps=1, lr=2.0**-10),
        "thawed": {stage: thawed(stage) for stage in (0, 2, 3)},
        "buckets": in_buckets(),
    }


def plain_clipping(
    parts: int, lr: float = 1.0, scale: float = 1.0, clip: float = CLIP, constant: float = 1e-6, each: bool = False
) -> tuple[float, Weights]:
    """Clip in one process, the mean over parts of the batch, or ``each`` part's gradient."""
    model = net()
    parameters = list(model.parameters())
    losses = [model(part).square().mean() * scale / parts for part in rows().chunk(parts)]
    for loss in losses if each else [sum(losses)]:
        assert isinstance(loss, Tensor)
        loss.backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= min(1.0, clip / (norm + constant))
    torch.optim.SGD(parameters, lr=lr).step()
    return norm, weights_of(model)


def test_a_norm_counts_what_several_ranks_hold_once() -> None:
    right, _ = plain_clipping(1)
    for found in results_by_name(program)["clipped"]:
        for name in ("replicas", "replicas of shards"):
            require(found[name][0], right, 2**0.5 * right)  # of two ranks that each have all of it


def test_a_norm_is_that_of_all_shards() -> None:
    right, weights = plain_clipping(1)
    parts = [p.grad.flatten().chunk(2)[0] for p in _with_gradients()]
    local = float(torch.cat(parts).norm())
    for found in results_by_name(program)["clipped"]:
        for name in ("shards of states", "shards"):
            require(found[name][0], right, local)
            require(found[name][1], weights, plain_clipping(1, clip=CLIP * right / local)[1])


def _with_gradients() -> Any:
    model = net()
    model(rows()).square().mean().backward()
    return model.parameters()


def test_the_constant_of_the_clipping_factor_is_added_once() -> None:
    _, right = plain_clipping(1, scale=1e-5, clip=1e-6)
    _, wrong = plain_clipping(1, scale=1e-5, clip=1e-6, constant=2e-6)  # once on each rank
    before = weights_of(net())
    moved = {name: (right[name] - before[name]) * 1e6 for name in before}
    for _, weights in results_by_name(program)["tiny"]:
        found = {name: (weights[name] - before[name]) * 1e6 for name in before}
        require(found, moved, {name: (wrong[name] - before[name]) * 1e6 for name in before}, limit=1e-7)


def test_a_norm_is_taken_of_the_mean_and_not_of_the_parts() -> None:
    first, second = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 1.0])
    right, wrong = float((first + second).norm()) / 2, float(first.norm() + second.norm()) / 2
    for found in results_by_name(program)["opposite"]:
        require(found, right, wrong)


def test_the_sum_of_the_micro_batches_is_clipped_and_nothing_before() -> None:
    _, right = plain_clipping(4)
    _, wrong = plain_clipping(4, each=True)
    for found in results_by_name(program)["clipped"]:
        for name in MESHES:
            require(found[name][1], right, wrong)


def test_clipping_of_torch_clips_or_raises() -> None:
    for replicated, sharded in results_by_name(program)["torch's"]:
        assert float(replicated) <= 1e-9
        assert "zeromesh.clip_grad_norm_" in sharded or "safe_get_full_grad" in sharded


def test_norm_and_clipping_do_not_know_the_loss_scale() -> None:
    found = results_by_name(program)["fp16"][0]
    assert [skipped for _, _, skipped, _ in found] == [True, True, False, False]  # 2^17 and 2^16 are beyond fp16
    scale = 2.0**15
    for number, (norm, change, skipped, _) in enumerate(found):
        if not skipped:
            require(norm, 1.0, scale)  # the gradient is 1
            require(change, 0.5 * 0.5 ** (number - 2), 0.5 / scale, limit=1e-5)


def test_a_skipped_update_does_not_move_the_schedule() -> None:
    for found in results_by_name(program)["fp16"]:
        require([rates[0] for *_, rates in found], [1.0, 1.0, 0.5, 0.25], [0.5, 0.25, 0.125, 0.0625])


def test_micro_batches_are_added_in_fp32() -> None:
    gradients = [256.0, 1.0, 1.0, 1.0]
    narrow = torch.zeros((), dtype=torch.bfloat16)
    for gradient in gradients:
        narrow += gradient
    for found in results_by_name(program)["accumulated"]:
        require(found, -sum(gradients) / 4, -float(narrow) / 4)


def test_updates_below_the_resolution_of_16_bits_add_up() -> None:
    narrow = torch.ones((), dtype=torch.bfloat16)
    for _ in range(8):
        narrow -= 2.0**-10
    for found in results_by_name(program)["small updates"]:
        require(found, 1 - 8 * 2.0**-10, float(narrow))


def test_a_layer_that_thaws_is_reduced_in_the_dtype_of_the_others() -> None:
    narrow = torch.tensor(THAWED[0], dtype=torch.bfloat16) + THAWED[1]
    for found in results_by_name(program)["thawed"]:
        for stage in (0, 2, 3):
            require(found[stage], -sum(THAWED) / 2, -float(narrow) / 2)


def test_gradients_do_not_depend_on_the_buckets_that_they_travel_in() -> None:
    for found in results_by_name(program)["buckets"]:
        for other in found[1:]:
            assert gap(other, found[0]) == 0.0


@pytest.mark.full
def test_norms_of_replicas_of_shards_on_four_ranks() -> None:
    right, weights = plain_clipping(1)
    for norm, found in run_ranks(clipped_on_four, 4):
        require(norm, right, 2**0.5 * right)
        assert gap(found, weights) <= 1e-9


def clipped_on_four() -> tuple[float | None, Weights]:
    mesh = {"replicate": 2, "data": 2}
    settings = {"zero_optimization": {"stage": 3}, "mesh": mesh, "units": ["Linear"], "gradient_clipping": CLIP}
    engine = start(net(), lr=1.0, **settings)
    train_step(engine, engine(rows().chunk(4)[dist.get_rank()]).square().mean())
    return engine.get_global_grad_norm(), whole(engine)
