"""Parameters that are not in memory answer what needs no values; values raise an error with the remedy."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harness import on_ranks
from run import sgd, start_engine, train_step
from zeromesh import zero

P = torch.Tensor
SHAPES: dict[str, Callable[[P], P]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "a part": lambda p: p.data[1:, :3],
    "view": lambda p: p.view(-1),
    "reshape": lambda p: torch.reshape(p, (2, -1)),
    "flatten": lambda p: p.detach().flatten(),
    "T": lambda p: p.T,
    "t of a part": lambda p: p.detach()[2:].t(),
    "permute": lambda p: p.permute(1, 0),
    "transpose": lambda p: torch.transpose(p, 0, 1),
    "unsqueeze": lambda p: p.unsqueeze(0).squeeze(0).expand(3, 4, 6),
    "chunk": lambda p: p.chunk(2)[1],
    "contiguous": lambda p: p.T.contiguous(),
    "zeros_like": lambda p: torch.zeros_like(p),
    "zeros_like of a view": lambda p: torch.zeros_like(p.detach()),
    "empty_like": lambda p: torch.empty_like(p, dtype=torch.float16),
    "new_zeros": lambda p: p.new_zeros(3),
    "copy": lambda p: copy.copy(p),
    "parameter of a view": lambda p: nn.Parameter(p.detach()),
    "to its own dtype": lambda p: p.data.to(p.dtype),
    "to meta": lambda p: p.data.to("meta"),
    "unfold": lambda p: p.unfold(0, 2, 1),
    "tensor_split": lambda p: torch.tensor_split(p, 2)[1],
    "as_strided": lambda p: p.detach().as_strided((2, 2), (1, 1)),
    "broadcast_to": lambda p: torch.broadcast_to(p, (2, 4, 6)),
}
VALUES: dict[str, Callable[[P], Any]] = {
    "sum": lambda p: p.detach().sum(),
    "sum as a plain tensor": lambda p: p.as_subclass(torch.Tensor).sum(),
    "item": lambda p: p.data[0, 0].item(),
    "clone": lambda p: p.detach().clone(),
    "write": lambda p: p.data.zero_(),
    "write by another": lambda p: torch.zeros(4, 6).copy_(p.data),
    "write to a part": lambda p: p.data.__setitem__(0, 1.0),
    "compare": lambda p: p.detach() == 0,
    "numpy": lambda p: p.detach().numpy(),
    "address": lambda p: p.detach().data_ptr(),
    "save": lambda p: torch.save(p.detach(), io.BytesIO()),
    "save a copy": lambda p: torch.save(copy.copy(p), io.BytesIO()),
    "deepcopy": lambda p: copy.deepcopy(p),
    "matmul": lambda p: torch.ones(1, 4) @ p.data,
    "convert": lambda p: p.data.double(),
    "share": lambda p: p.data.share_memory_(),
    "transpose in place": lambda p: p.data.t_(),
    "place in an index": lambda p: torch.ones(9)[p.data.long()],
}


def start(model: nn.Module, stage: int = 3) -> Any:
    return start_engine(model, micro=2, optimizer=sgd(0.1), stage=stage)


@on_ranks(2)
def test_what_needs_no_values_is_answered_and_values_are_guarded() -> None:
    model = nn.Sequential(*(nn.Linear(6, 4) for _ in range(2)))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    plain = copy.deepcopy(model[1].weight)
    engine = start(model)
    p = model[1].weight
    for name, ask in SHAPES.items():
        got, want = ask(p), ask(plain)
        described = [(one.shape, one.dtype, one.device, one.stride(), one.is_contiguous()) for one in (got, want)]
        assert described[0] == described[1], name
    assert (p.type(), p.data.type(), p.is_shared(), torch.result_type(p, 1)) == (
        plain.type(),
        plain.type(),
        False,
        p.dtype,
    )
    assert f"{p}" in repr(p)
    for use in VALUES.values():
        with pytest.raises(RuntimeError, match=r"1.weight is sharded .*GatheredParameters"):
            use(p)
    values = model.state_dict()
    assert {name: value.shape for name, value in values.items()} == {name: v.shape for name, v in expected.items()}
    with pytest.raises(RuntimeError, match="GatheredParameters"):
        torch.save(values, io.BytesIO())
    with zero.GatheredParameters([p, None, model[0].bias]):
        torch.testing.assert_close(p.detach(), expected["1.weight"])
    with zero.GatheredParameters(None), zero.GatheredParameters(nn.ParameterList([p])):
        pass
    for wrong in (model[0], [[p]], 3):
        with pytest.raises(TypeError, match=r"module.parameters\(\)"), zero.GatheredParameters(wrong):  # type: ignore[arg-type]
            pass
    engine.destroy()


class Adapters(nn.Module):
    """Layers with two adapters each, one of which is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}) for _ in range(4))
        self.use("a")

    def use(self, name: str) -> None:
        self.name = name
        for path, parameter in self.named_parameters():
            parameter.requires_grad_(f".{name}." in path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer[self.name](x)
        return x


@on_ranks(2)
def test_another_adapter_may_be_switched_on_for_a_pass_of_reference() -> None:
    model = Adapters()
    plain = copy.deepcopy(model)
    engine = start(model)
    x = torch.ones(2, 4)
    model.use("b")
    with torch.no_grad():
        reference = engine(x)
    torch.testing.assert_close(reference, (plain.use("b"), plain(x))[1])
    model.use("a")
    train_step(engine, (engine(x) - reference).square().mean())
    engine.backward((engine(x) - reference).square().mean())
    model.use("b")
    with pytest.raises(RuntimeError, match="was frozen when initialize was called, and is trainable now"):
        engine.step()
    engine.destroy()
