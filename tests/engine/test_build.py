"""What ``initialize`` makes of its arguments: the loader, the optimizer's defaults, the inputs of 16-bit runs."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset

import zeromesh
from harness import on_ranks, run_ranks
from run import train_step

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def config(**more: Any) -> dict[str, Any]:
    return {"optimizer": SGD, "train_micro_batch_size_per_gpu": 2, **more}


def orders(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    loader = zeromesh.initialize(nn.Linear(1, 1), config=config(seed=seed), training_data=torch.arange(24))[2]
    passes = [torch.cat(list(loader)).tolist() for _ in range(4)]
    loader.sampler.set_epoch(1)
    return passes, [torch.cat(list(loader)).tolist() for _ in range(2)]


def test_every_pass_over_the_loader_has_an_order_of_its_own_that_follows_from_the_seed() -> None:
    (first, again), (second, _) = run_ranks(orders, 2, 7)
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(24))
    assert len({tuple(one) for one in first}) == 4
    assert again == first[1:3]
    assert run_ranks(orders, 2, 7)[0][0] == first
    assert run_ranks(orders, 2, 8)[0][0] != first


@pytest.mark.parametrize(
    ("type", "params", "expected"),
    [
        ("AdamW", {}, ("AdamW", 0.01)),
        ("adamw", {"weight_decay": "auto"}, ("AdamW", 0.01)),
        ("AdamW", {"weight_decay": 0.1}, ("AdamW", 0.1)),
        ("Adam", {}, ("AdamW", 0.0)),
        ("Adam", {"adam_w_mode": False}, ("Adam", 0.0)),
    ],
)
@on_ranks(1)
def test_weights_decay_as_in_torch_unless_the_configuration_says_how(type, params, expected) -> None:
    settings = config(optimizer={"type": type, "params": {"lr": 0.1, **params}})
    optimizer = zeromesh.initialize(nn.Linear(2, 2), config=settings)[1]
    assert (optimizer.__class__.__name__, optimizer.param_groups[0]["weight_decay"]) == expected


class Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.linear(x.to(self.linear.weight.dtype)).square().mean()


def seen(key: str, **options: Any) -> list[torch.dtype]:
    engine = zeromesh.initialize(Inputs(), config=config(**{key: {"enabled": True, **options}}))[0]
    engine(torch.ones(1, 2))
    return engine.module.seen


@pytest.mark.parametrize(("key", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_inputs_are_cast_unless_auto_cast_is_false(key: str, dtype: torch.dtype) -> None:
    assert run_ranks(seen, 1, key) == [[dtype]]
    assert run_ranks(seen, 1, key, auto_cast=False) == [[torch.float32]]


def other_groups(backend: str | None, mesh: dict[str, int]) -> list[torch.Tensor]:
    dist.barrier()  # not before all ranks have joined the first one
    dist.destroy_process_group()
    dist.init_process_group(backend)
    found = []
    for row in (0, 3):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        engine = zeromesh.initialize(model, config=config(zero_optimization={"stage": row}, mesh=mesh))[0]
        for step in range(2):
            train_step(engine, engine(torch.eye(3) + engine.data_rank + step).square().mean())
        state = engine.gathered_state_dict()
        found.append(torch.cat([value.flatten().double() for value in state.values()]) if state else torch.empty(0))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
@pytest.mark.parametrize("mesh", [{"data": 4}, {"replicate": 2, "data": 2}], ids=["one axis", "two axes"])
def test_a_group_that_was_started_with_another_name_trains_as_with_gloo(backend, mesh) -> None:
    expected = run_ranks(other_groups, 4, "gloo", mesh)[0]
    for found, value in zip(run_ranks(other_groups, 4, backend, mesh)[0], expected, strict=True):
        assert torch.equal(found, value)


class Look(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return super().forward(x)


def seen_by_the_model(dtype: torch.dtype) -> list[float]:
    settings = config(fp16={"enabled": True}, scheduler={"type": "LambdaLR", "params": {"lr_lambda": float}})
    engine = zeromesh.initialize(Look(4, 4), config=settings)[0]
    engine(torch.tensor([[-1e9, 1e9, float("-inf"), 2.0]], dtype=dtype))
    return engine.module.seen.tolist()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_that_are_finite_stay_finite_in_fp16(dtype: torch.dtype) -> None:
    assert run_ranks(seen_by_the_model, 2, dtype)[1] == [-65504.0, 65504.0, float("-inf"), 2.0]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3)])


def fails() -> Any:
    raise ArithmeticError("of the user")


def mistakes(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    other, used = nn.Linear(3, 4), torch.optim.SGD(model.parameters(), lr=0.1)
    used.state[model[0][0].weight]["step"] = 2
    groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters()}]
    return [
        ('did you mean "lr"', {"optimizer": {"type": "SGD", "params": {"learning_rate": 0.1}}}, {}),
        ("learning rate: -1", {"optimizer": {"type": "SGD", "params": {"lr": -1.0}}}, {}),
        ("not the model's", {}, {"model_parameters": other.parameters()}),
        ("not the model's", {}, {"optimizer": torch.optim.SGD(other.parameters(), lr=0.1)}),
        ("LBFGS cannot be used", {}, {"optimizer": torch.optim.LBFGS(model.parameters())}),
        ("has been stepped", {}, {"optimizer": used}),
        ("returned a list", {}, {"optimizer": list}),
        ("of the user", {}, {"optimizer": lambda parameters: fails()}),
        ("warmup_steps", {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}, {"optimizer": optimizer}),
        (
            "3 values for 2 parameter groups",
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2, 3]}}},
            {"model_parameters": groups},
        ),
        ("of the user", {}, {"lr_scheduler": lambda optimizer: fails(), "optimizer": optimizer}),
        ("step needs metrics", {}, {"lr_scheduler": lr_scheduler.ReduceLROnPlateau, "optimizer": optimizer}),
        ("IterableDataset", {}, {"training_data": Endless(), "optimizer": optimizer}),
        ("has no len", {}, {"training_data": iter([])}),
        ("training_data has 0 samples, which gives no batch", {}, {"training_data": [], "optimizer": optimizer}),
        (
            "has 1 sample, which gives no batch .* or set dataloader_drop_last to false",
            {"dataloader_drop_last": True, "train_micro_batch_size_per_gpu": 2},
            {"training_data": [1], "optimizer": optimizer},
        ),
        ("'Bloc' matches no module", {"units": ["Bloc"]}, {"optimizer": optimizer}),
        ("'Bloc' matches no module", {"activation_checkpointing": {"enabled": True, "targets": ["Bloc"]}}, {}),
    ]


def described(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    return [
        *[(type(tensor), tensor.dtype, tensor.data_ptr(), tensor.sum().item()) for tensor in tensors],
        *[
            (module._forward_pre_hooks, module._forward_hooks, module.__dict__.get("forward"))
            for module in model.modules()
        ],
    ]


def trained(model: nn.Module, settings: dict[str, Any], optimizer: Any) -> dict[str, torch.Tensor]:
    engine = zeromesh.initialize(model, optimizer, config=settings)[0]
    for step in range(3):
        train_step(engine, engine(torch.eye(6) + engine.data_rank + step).square().mean())
    return engine.gathered_state_dict()


def trained_after_mistakes(row: int, users: bool, mesh: dict[str, int]) -> None:
    more = {"bf16": {"enabled": True}, "activation_checkpointing": {"enabled": True}, "mesh": mesh}
    settings = config(zero_optimization={"stage": row}, **more)
    model, same = normed(), normed()
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1) for m in (model, same)]
    before = described(model)
    for text, wrong, arguments in mistakes(model, optimizers[0]):
        with pytest.raises((ValueError, TypeError, ArithmeticError), match=text) as caught:
            zeromesh.initialize(model, config={**settings, **wrong}, **arguments)
        assert not hasattr(caught.value, "__notes__"), text
        assert described(model) == before, text
    if dist.get_rank() == 1:  # the others hear of it
        with pytest.raises(ValueError, match="IterableDataset"):
            zeromesh.initialize(model, config=settings, training_data=Endless())
    else:
        with pytest.raises(RuntimeError, match="rank 1 could not prepare"):
            zeromesh.initialize(model, config=settings, training_data=[1])
    assert described(model) == before
    found, expected = (
        trained(m, settings, o if users else None) for m, o in zip((model, same), optimizers, strict=True)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.some(1)
@pytest.mark.parametrize(("row", "users"), [(0, False), (1, True), (3, False), (3, True)])
def test_after_any_mistake_the_same_model_can_be_initialized(row: int, users: bool) -> None:
    run_ranks(trained_after_mistakes, 2, row, users, {})


@pytest.mark.full
def test_after_any_mistake_the_same_model_can_be_initialized_on_two_axes() -> None:
    run_ranks(trained_after_mistakes, 4, 3, False, {"replicate": 2, "data": 2})


@pytest.mark.parametrize("row", [0, 2, 3])
@on_ranks(2)
def test_late_failures_of_initialize_say_so_and_take_the_hooks_off(row: int) -> None:
    model = normed()
    settings = config(zero_optimization={"stage": row}, activation_checkpointing={"enabled": True})
    with pytest.raises(ArithmeticError) as caught:
        zeromesh.initialize(model, config=settings, lr_scheduler=lambda optimizer: fails())
    assert "had begun to change the model: build it anew" in caught.value.__notes__[0]
    assert not any(module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules())
    if row == 3:
        with pytest.raises(ValueError, match="already belongs to an engine"):
            zeromesh.initialize(model, config=settings)
    else:
        found, expected = trained(model, settings, None), trained(normed(), settings, None)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@on_ranks(1)
def test_a_warning_of_the_trial_is_logged_once() -> None:
    said: list[str] = []
    logging.getLogger("zeromesh").setLevel(logging.INFO)
    logging.getLogger("zeromesh").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    settings = config(optimizer={"type": "Adam", "params": {"torch_adam": True}})
    zeromesh.initialize(nn.Linear(2, 2), config=settings)
    assert [text for text in said if "no further effect" in text] == [
        "optimizer.params.torch_adam of Adam has no further effect"
    ]
