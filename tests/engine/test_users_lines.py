"""Lines of users' programs at stage 3: conversions, single parts of the model, compilation, freezing, odd outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks, run_ranks
from run import plain_step, sgd, start_engine, train_step, whole_parameters

BITS = 1e-12


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.enc = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(depth))
        self.dec = nn.Linear(6, 2)
        self.logit_scale = nn.Parameter(torch.ones(()))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.enc:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dec(self.encode(x)) * self.logit_scale


class GivesParameter(Model):
    def forward(self, x: torch.Tensor) -> Any:
        return {"out": self.dec(self.encode(x)), "scale": self.logit_scale}


def make(kind: type[Model] = Model, depth: int = 3) -> Model:
    torch.manual_seed(0)
    return kind(depth).double()


def batch(number: int) -> torch.Tensor:
    return torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def start(row: int, model: Model) -> zeromesh.Engine:
    return start_engine(model, micro=2, optimizer=sgd(0.1), stage=row, slots={"parameter": 2, "gradient": 2})


Step = Callable[[Any, Any, torch.Tensor], torch.Tensor]
"""From what is called, the model, and a batch to the loss."""


def plainly(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    return call(x).square().mean()


def with_its_parameter(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    output = call(x)
    return (output["out"] * output["scale"]).square().mean()


def in_parts(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    return (call.dec(call.encode(x)) * 1.0).square().mean()


def with_gradients_of_parameters(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = call(x).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return loss * (1.0 + sum(float(gradient.sum()) for gradient in found))


def after_conversions(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    assert model.to("cpu").cpu().double().to(torch.float64) is model
    model.enc[0].to("cpu", torch.float64)
    return call(x).square().mean()


def frozen_meanwhile(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = call(x).square().mean()
    model.enc[0][0].weight.requires_grad_(False)
    return loss


CASES: dict[str, tuple[Step, type[Model]]] = {
    "a parameter among the outputs": (with_its_parameter, GivesParameter),
    "parts of the model": (in_parts, Model),
    "gradients of parameters": (with_gradients_of_parameters, Model),
    "conversions to what is": (after_conversions, Model),
    "freezing between forward and backward": (frozen_meanwhile, Model),
}


def whole(model: nn.Module) -> list[torch.Tensor]:
    return list(whole_parameters(model).values())


def train(row: int) -> dict[str, list[torch.Tensor]]:
    found = {}
    for name, (step, kind) in CASES.items():
        model = make(kind)
        engine = start(row, model)
        for number in range(3):
            try:
                engine.backward(step(engine, model, batch(number)))
            except BaseException as error:
                error.add_note(f"{name}, step {number}")
                raise
            engine.step()
        found[name] = whole(model)
    return found


def assert_same(found: list[torch.Tensor], model: nn.Module, name: str) -> None:
    for got, want in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=BITS, atol=BITS, msg=name)


@pytest.mark.parametrize("row", [pytest.param(0, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
def test_users_lines_train_as_in_plain_torch(row: int) -> None:
    results = run_ranks(train, 2, row)
    for name, (step, kind) in CASES.items():
        model = make(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            plain_step(optimizer, step(model, model, batch(number)))
        for found in results:
            assert_same(found[name], model, name)


WAYS = ["torch.compile(model)", "torch.compile(engine)", "model.compile()", "block.compile()"]


@pytest.mark.parametrize(
    ("row", "ways", "depth"),
    [(3, WAYS[:1], 3), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, WAYS, 3), (3, WAYS, 12)))],
)
@on_ranks(2, timeout=200)
def test_models_that_are_compiled_after_initialize_train(row: int, ways: list[str], depth: int) -> None:
    found = {}
    for way in ways:
        torch._dynamo.reset()
        model = make(depth=depth)
        engine = start(row, model)
        call: Any = engine
        if way == "torch.compile(model)":
            call = torch.compile(model, backend="aot_eager")
        elif way == "torch.compile(engine)":
            call = torch.compile(engine, backend="aot_eager")
        elif way == "model.compile()":
            model.compile(backend="aot_eager")
        else:
            model.enc[1].compile(backend="aot_eager")
        for number in range(2):
            train_step(engine, call(batch(number)).square().mean())
        found[way] = whole(model)
    model = make(depth=depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        plain_step(optimizer, model(batch(number)).square().mean())
    for way in ways:
        assert_same(found[way], model, way)


@on_ranks(2)
def test_a_forward_that_is_called_past_the_hooks_names_the_remedy() -> None:
    model = make()
    engine = start(3, model)
    with pytest.raises(RuntimeError, match=r"call the model, or its methods, through the engine: engine\(\.\.\.\)"):
        model.forward(batch(0))
    train_step(engine, engine(batch(0)).square().mean())


def test_a_buffer_in_the_memory_of_a_parameter_is_refused() -> None:
    model = make()
    model.enc[0].register_buffer("view", model.enc[0][0].weight.data[1:])
    with pytest.raises(ValueError, match=r"buffer enc.0.view lies in the memory of parameter enc.0.0.weight"):
        start(3, model)
    model.enc[0][0].weight.requires_grad_(False)
    start(0, model).destroy()


@on_ranks(1)
def test_a_parameter_that_is_spread_by_another_library_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = make()
    mesh = init_device_mesh("cpu", (1,))
    model.dec.weight = nn.Parameter(distribute_tensor(model.dec.weight.data, mesh))
    with pytest.raises(ValueError, match=r"parameter dec.weight is a DTensor, .* pass the model with plain parameters"):
        start(0, model)
