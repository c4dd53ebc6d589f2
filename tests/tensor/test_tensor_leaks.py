"""Parts of activations that leave Python, in code that no trace has run: they are refused, or given whole."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack

from harness import run_ranks
from matrices import few
from run import sgd, start_engine, train_step
from test_split_activation import X, on_ranks, part
from zeromesh.parallel.follow.activation_parts import guard_functions
from zeromesh.parallel.follow.split_activation import NeedsWhole, Sealed, whole
from zeromesh.parallel.tensor.derive import derive
from zeromesh.parallel.tensor.split_plan import PlanRule

WIDTH = 16
Code = Callable[[Tensor], Any]


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x / x.norm()


LEVEL = threading.Lock()  # torch has one level of forward derivatives for all threads


def jvp(x: Tensor) -> Tensor:
    with LEVEL:
        return torch.func.jvp(lambda one: one.softmax(-1), (x.detach(),), (torch.ones_like(x.detach()),))[1]


def unasked(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x / x.norm()


class OfAnotherClass(Tensor):
    pass


def in_a_thread(x: Tensor, code: Code) -> Any:
    results: list[Any] = []

    def run() -> None:
        with suppress(ValueError):
            results.append(code(x))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0] if results else x


POOL = ThreadPoolExecutor(1)

REFUSED: dict[str, Code] = {
    "class made of it": lambda x: Tensor._make_subclass(OfAnotherClass, x.detach()),
    "old dlpack": lambda x: torch.from_dlpack(to_dlpack(x.detach())),
    "thread": lambda x: in_a_thread(x, lambda one: torch.tensor(one.detach())),
    "thread by rules": lambda x: POOL.submit(torch.mul, x, 2).result(),
    "messages of a thread": lambda x: POOL.submit(torch.softmax, x, -1).result(),
    "tensor": lambda x: torch.tensor(x.detach()),
    "Tensor": lambda x: torch.DoubleTensor(x.detach()),
    "memory that is set": lambda x: torch.empty(0, dtype=x.dtype).set_(x.detach()),
    "vmap": lambda x: torch.vmap(lambda one: one / one.norm())(x),
    "vmap of vmap": lambda x: torch.vmap(torch.vmap(lambda one: one.softmax(0)))(x),
    "grad": lambda x: torch.func.grad(lambda one: one.mean().square())(x.detach()),
    "jacobian": lambda x: torch.func.jacrev(lambda one: one.mean())(x.detach()),
    "vjp": lambda x: torch.func.vjp(lambda one: one.softmax(-1), x.detach())[0],
    "jvp": jvp,
    "functions switched off": unasked,
    "script": scripted,
    "traced": torch.jit.trace(lambda x: x / x.norm(), torch.ones_like(X)),
    "nested": lambda x: torch.nested.nested_tensor([*x.detach()]),
}
"""Functions that compute on a part without asking."""

WHOLE: dict[str, Code] = {
    "numpy": lambda x: torch.from_numpy(numpy.tanh(x.detach().numpy())),
    "array": lambda x: torch.from_numpy(numpy.asarray(x.detach())),
    "list": lambda x: torch.tensor(x.tolist(), dtype=x.dtype),
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "deep copy": lambda x: copy.deepcopy(x.detach()),
    "class": lambda x: x.as_subclass(Tensor),
    "operator": lambda x: torch.ops.aten.softmax.int(x, -1),
    "compiled": torch.compile(lambda x: x / x.norm(), backend="eager"),
}
"""Functions that are given the whole."""


@pytest.fixture(autouse=True, scope="module")
def guarded() -> None:
    guard_functions({Model})


@pytest.mark.parametrize(
    "name",
    few(
        REFUSED,
        "tensor",
        "class made of it",
        "old dlpack",
        "thread",
        "thread by rules",
        "vmap",
        "grad",
        "jvp",
        "functions switched off",
        "script",
    ),
)
def test_code_outside_of_python_is_refused_with_the_layer(name: str) -> None:
    def run(group: Any) -> None:
        with pytest.raises(NeedsWhole, match=r"give blocks\.0\.up the style colwise_gather_output"), Sealed():
            REFUSED[name](part(group))

    on_ranks(run)


@pytest.mark.parametrize("name", few(WHOLE, "numpy", "class", "operator"))
def test_what_asks_is_given_the_whole(name: str) -> None:
    if name == "compiled":
        WHOLE[name](X)  # the compiler is not for several threads at a time

    def run(group: Any) -> None:
        with Sealed():
            torch.testing.assert_close(whole(WHOLE[name](part(group))), WHOLE[name](X))

    on_ranks(run)


class Block(nn.Module):
    """MLP with code that runs from the seventh call on, or in one mode."""

    def __init__(self, code: Code, mode: str = "later") -> None:
        super().__init__()
        self.code, self.mode, self.calls = code, mode, 0
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.up(x).tanh()
        if self.calls > 6 if self.mode == "later" else self.training == (self.mode == "training"):
            h = h * self.code(h).mean(-1, keepdim=True)
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, *options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def losses(tensor: int, names: list[str], mode: str) -> list[list[Any]]:
    everything = []
    for name in names:
        torch.manual_seed(0)
        model = Model({**REFUSED, **WHOLE}[name], mode).double()
        engine = start_engine(model, batch=4, mesh={"tensor": tensor}, optimizer=sgd(0.1))
        values: list[Any] = []
        try:
            for step in range(4):
                x = torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                engine.train()
                loss = engine(x)
                train_step(engine, loss)
                with torch.no_grad():
                    values += [float(loss.detach()), float(engine.eval()(x))]
        except NeedsWhole as error:
            values.append(str(error))
        engine.destroy()
        everything.append(values)
    return everything


def test_code_that_runs_later_is_right_or_refused() -> None:
    names = ["tensor", "grad", "old dlpack", "thread", "numpy"]
    (want,) = run_ranks(losses, 1, 1, names, "later")
    for values in run_ranks(losses, 2, 2, names, "later"):
        for name, one, other in zip(names, values, want, strict=True):
            if name in REFUSED:
                assert "colwise_gather_output" in one.pop(), name
            assert one == pytest.approx(other[: len(one)], rel=1e-9), name


def test_code_of_both_modes_is_planned_for() -> None:
    for mode in ("training", "evaluation"):
        for trains in (True, False):
            plan, _ = derive(Model(REFUSED["tensor"], mode).train(trains), 2)
            assert plan.get("blocks.*.up") != PlanRule("colwise_parts"), (mode, trains)
    plan, _ = derive(Model(WHOLE["class"], "later"), 2)
    assert plan["blocks.*.up"] == PlanRule("colwise_parts")
