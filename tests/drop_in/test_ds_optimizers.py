"""The optimizers of ``deepspeed.ops``: by themselves and under engines, beside torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh.deepspeed as deepspeed
from compare import assert_close
from harness import on_ranks
from zeromesh.base.kernels.update_rules import rule_of, update_class
from zeromesh.deepspeed import optimizers
from zeromesh.shard.optim.bound import steps_in_parts
from zeromesh.shard.optim.lion import Lion

ops: Any = deepspeed.ops


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


class PlainLamb(torch.optim.Optimizer):
    """LAMB as in its paper, with the clamped trust ratio."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                first, second, t = state.get("m", 0.0), state.get("v", 0.0), state.get("t", 0) + 1
                first, second = 0.9 * first + 0.1 * p.grad, 0.999 * second + 0.001 * p.grad**2
                state.update(m=first, v=second, t=t)
                update = first / (1 - 0.9**t) / ((second / (1 - 0.999**t)).sqrt() + 1e-8) + group["weight_decay"] * p
                ratio = (p.norm() / update.norm()).clamp(0.01, 10.0) if p.norm() > 0 and update.norm() > 0 else 1.0
                p -= group["lr"] * ratio * update


Make = Callable[[Any], torch.optim.Optimizer]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}

PAIRS: dict[str, tuple[Make, Make]] = {
    "adamw": (lambda p: ops.adam.FusedAdam(p, **OPTIONS), lambda p: torch.optim.AdamW(p, **OPTIONS)),
    "l2": (lambda p: ops.adam.FusedAdam(p, adam_w_mode=False, **OPTIONS), lambda p: torch.optim.Adam(p, **OPTIONS)),
    "cpu adamw": (lambda p: ops.adam.DeepSpeedCPUAdam(p, **OPTIONS), lambda p: torch.optim.AdamW(p, **OPTIONS)),
    "cpu l2": (
        lambda p: ops.adam.DeepSpeedCPUAdam(p, adamw_mode=False, **OPTIONS),
        lambda p: torch.optim.Adam(p, **OPTIONS),
    ),
    "adagrad": (
        lambda p: ops.adagrad.DeepSpeedCPUAdagrad(p, **OPTIONS),
        lambda p: torch.optim.Adagrad(p, **OPTIONS),
    ),
    "lion": (lambda p: ops.lion.FusedLion(p, **OPTIONS), lambda p: Lion(p, **OPTIONS)),
    "cpu lion": (lambda p: ops.lion.DeepSpeedCPULion(p, **OPTIONS), lambda p: Lion(p, **OPTIONS)),
    "lamb": (lambda p: ops.lamb.FusedLamb(p, **OPTIONS), lambda p: PlainLamb(p, **OPTIONS)),
}


def plain(make: Make, ranks: int = 1) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = make(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(batch(step, rank)).square().mean() / ranks).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", PAIRS)
def test_optimizers_by_themselves_update_as_torchs(name: str) -> None:
    ours, theirs = PAIRS[name]
    assert_close(plain(ours), plain(theirs))


def train(name: str, zero: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = PAIRS[name][0](model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    engine, returned, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert returned is optimizer
    for step in range(3):
        engine.backward(engine(batch(step, engine.data_rank)).square().mean())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {key: value.detach().clone() for key, value in engine.module.state_dict().items()}


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 3])
@on_ranks(2)
def test_optimizers_under_an_engine_update_as_torchs(stage: int) -> None:
    for name, (_, theirs) in PAIRS.items():
        assert_close(train(name, {"stage": stage}), plain(theirs, ranks=2))


def test_hooks_of_optimizers_let_an_update_step_in_parts() -> None:
    for cls in (ops.adam.DeepSpeedCPUAdam, ops.lion.DeepSpeedCPULion, ops.adam.FusedAdam):
        optimizer = cls(make_model().parameters(), lr=0.1)
        assert steps_in_parts(optimizer)
        optimizer.register_step_pre_hook(lambda *_: None)
        assert not steps_in_parts(optimizer)


@on_ranks(2)
def test_offloaded_optimizers_update_by_the_kernel_as_torchs() -> None:
    for name in [name for name in PAIRS if name != "lamb"]:
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        assert_close(train(name, zero), plain(PAIRS[name][1], ranks=2))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FusedAdam", {"bias_correction": False}),
        ("FusedAdam", {"set_grad_none": False}),
        ("DeepSpeedCPUAdagrad", {"amsgrad": True}),
        ("FusedLamb", {"max_grad_norm": 1.0}),
        ("FusedLamb", {"eps_inside_sqrt": True}),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{name}: {next(iter(options))} = .* cannot be honoured"):
        getattr(optimizers, name)([nn.Parameter(torch.zeros(2))], **options)


def test_a_subclass_counts_as_its_base_only_where_it_adds_nothing_but_a_constructor() -> None:
    class Renamed(torch.optim.SGD):
        """SGD with another constructor."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1, momentum=0.9)

    class Other(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Compute something else."""

    class Derived(Other):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)

    for cls in (Renamed, Derived):  # of which torch wraps the step then
        cls([nn.Parameter(torch.zeros(2))])
    assert update_class(Renamed) is torch.optim.SGD
    assert update_class(Other) is Other
    assert update_class(Derived) is Other
    assert update_class(torch.optim.AdamW) is torch.optim.AdamW
    assert rule_of(optimizers.FusedAdam, {"decoupled_weight_decay": True}) == "adamw"
    assert rule_of(optimizers.FusedAdam, {"decoupled_weight_decay": False}) == "adam"
    assert rule_of(Other, {}) is None


def test_states_in_fp32_of_16_bit_parameters_survive_a_load() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    first, second = (optimizers.DeepSpeedCPUAdam([parameter], lr=0.1) for _ in range(2))
    parameter.grad = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)
    first.step()
    second.load_state_dict(first.state_dict())
    kept, found = first.state[parameter]["exp_avg"], second.state[parameter]["exp_avg"]
    assert found.dtype == torch.float32
    assert torch.equal(found, kept)
    second.step()
