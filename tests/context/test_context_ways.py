"""Code that takes other ways than those that were checked first, and backwards of a user's own, under context
parallelism: they leave tokens apart, or are refused."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from harness import run_ranks
from matrices import few
from run import sgd, start_engine, train_step
from test_context import fake
from token_programs import APART, LENGTH, VOCABULARY, WIDTH, Code, Inside, Shifted, Twice, batch, build
from zeromesh.parallel.context.applied import Unsupported
from zeromesh.parallel.context.spread_model import apply
from zeromesh.parallel.follow.ways import looks_at_ids

RANKS = 2


def spread(code: Code, unchecked: tuple[str, ...] = (), change: Callable[[Any], Any] = lambda model: None) -> Any:
    """Return a decoder of which this process is rank 0 of two, without the attention between the ranks."""
    model = build(code)
    change(model)
    applied = apply(model, "ring", fake(RANKS), unchecked=unchecked)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        applied._attentions += 1
        return v

    applied.attend = attend  # type: ignore[method-assign]
    return model


def tokens(length: int = LENGTH, samples: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(length))


def call(model: Any, times: int) -> None:
    for _ in range(times):
        model(tokens())


def windows(width: int, y: Tensor) -> Tensor:
    return y + y.unflatten(1, (-1, width)).mean(2).repeat_interleave(width, 1)


def viewed(width: int, y: Tensor) -> Tensor:
    parts = y.view(y.shape[0], y.shape[1] // width, width, WIDTH)
    return (parts + parts.flip(2)).reshape(y.shape)


LENGTHS: dict[str, Code] = {
    "windows": lambda m, y: windows(4, y),
    "pairs": lambda m, y: viewed(2, y),
    "rows of pairs": lambda m, y: (y.reshape(-1, 2, WIDTH).softmax(1)).reshape(y.shape),
    "heads of windows": lambda m, y: (z := y.view(-1, 4, WIDTH), (z @ (z.mT @ z)).view(y.shape))[1],
}  # fmt: skip
"""Code that is right where windows do not cross the bounds of what a rank has, as of 32 tokens on two ranks."""


@pytest.mark.parametrize("name", few(LENGTHS, "windows", "pairs"))
def test_each_length_is_checked(name: str) -> None:
    model = spread(LENGTHS[name])
    for length in (32, 16, 32):
        model(tokens(length))
    with pytest.raises(Unsupported, match="needs the tokens of all ranks|sums over the tokens|length"):
        model(tokens(4 if "pairs" in name else 8))
    model(tokens(32))


def test_a_branch_of_the_number_of_samples_is_checked() -> None:
    model = spread(lambda m, y: y.cumsum(1) if len(y) > 2 else y)
    model(tokens())
    with pytest.raises(Unsupported, match="cumsum"):
        model(tokens(samples=4))


def counted(m: Any, at: str) -> int:
    """Count the calls of a module in one of several places."""
    if at == "buffer":
        m.count += 1
        return int(m.count)
    if at == "dictionary":
        m.state["calls"] += 1
        return int(m.state["calls"])
    m.calls += 1
    return int(m.calls)


def prepared(model: Any) -> None:
    for block in model.blocks:
        block.inside.register_buffer("count", torch.zeros((), dtype=torch.long))
        block.inside.calls, block.inside.state = 0, {"calls": 0}
        block.inside.mixing = nn.Conv1d(WIDTH, WIDTH, 1).double()


def other_dim(m: Any, y: Tensor, dim: int) -> Tensor:
    return y.roll(1, dim)


FEW_WAYS = ("a counter in a buffer", "every third call", "another dim", "a later length", "chance", "a later function")
BACKWARDS_LATER = ("a later function", "a later hook")
WAYS: dict[str, Code] = {
    "a counter": lambda m, y: y.cumsum(1) if counted(m, "number") > 2 else y,
    "a counter in a buffer": lambda m, y: y - y.mean(1, keepdim=True) if counted(m, "buffer") > 2 else y,
    "a counter in a dictionary": lambda m, y: y.flip(1) if counted(m, "dictionary") > 2 else y,
    "every third call": lambda m, y: y.cumsum(1) if counted(m, "number") % 3 == 0 else y,
    "another dim": lambda m, y: other_dim(m, y, 1 if counted(m, "number") > 2 else 2),
    "another size of windows": lambda m, y: viewed(4 if counted(m, "number") > 2 else 2, y),
    "a later length": lambda m, y: y * y.shape[1] if counted(m, "number") > 2 else y,
    "chance": lambda m, y: y.cumsum(1) if random.random() < 0.5 else y,
    "a later function": lambda m, y: Identity.apply(y) if counted(m, "number") > 2 else y,
    "a later hook": lambda m, y: hooked(y, lambda g: g.flip(1)) if counted(m, "number") > 2 else y,
    "a table by place": lambda m, y: y + m.table[: y.shape[1]] if counted(m, "number") > 2 else y,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "grad"),
    [
        pytest.param(name, grad, marks=() if grad and name in FEW_WAYS else pytest.mark.full)
        for name in WAYS
        for grad in (True, False)
        if grad or name not in BACKWARDS_LATER
    ],
)
def test_code_that_takes_another_way_later_is_checked_again(name: str, grad: bool) -> None:
    random.seed(1)
    model = spread(WAYS[name], change=prepared)
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(
            Unsupported, match=r"in \S*test_context_ways.py:\d+.*" + re.escape("context_parallel.unchecked if it")
        ),
    ):
        call(model, 30)


OTHER_WAYS: dict[str, Code] = {
    "noise": lambda m, y: y + torch.randn_like(y) if counted(m, "number") % 2 else y,
    "another norm": lambda m, y: F.normalize(y, dim=-1) if counted(m, "buffer") > 1 else y.softmax(-1),
    "a schedule": lambda m, y: y * (1 / counted(m, "number")) + y.clamp(max=counted(m, "dictionary")),
    "chance": lambda m, y: y.sort(-1).values if random.random() < 0.5 else y,
    "another layer": lambda m, y: m.mixing(y.mT).mT if counted(m, "number") > 1 else y,
    "a look at gradients": lambda m, y: y.tanh() if y.requires_grad and torch.is_grad_enabled() else y,
}  # fmt: skip


@pytest.mark.parametrize("name", few(OTHER_WAYS, "noise", "a schedule", "another layer"))
def test_another_way_that_leaves_tokens_apart_is_accepted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    random.seed(1)
    model = spread(OTHER_WAYS[name], change=prepared)
    with caplog.at_level(logging.WARNING, "zeromesh"):
        for number in range(6):
            model(tokens(LENGTH * (1 + number % 2)))
            with torch.no_grad():
                model(tokens())
    assert not caplog.text


@pytest.mark.parametrize("unchecked", [(), ("blocks.*.inside",)])
def test_a_way_that_no_check_can_take_is_refused_unless_the_module_is_named(unchecked: tuple[str, ...]) -> None:
    model = spread(lambda m, y: y.sort(-1).values if type(y) is Tensor else y, unchecked)
    if unchecked:
        model(tokens())
        return
    with pytest.raises(Unsupported, match=r"sort, in \S*ways.py:\d+, ran in this forward, and not when the code was "):
        model(tokens())


class Identity(torch.autograd.Function):
    """Return the input; its gradient is the mean over the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mean(1, keepdim=True).expand_as(gradient)


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient + gradient.roll(1, 1)) * ctx.scale, None


class Constants(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.sum(0, keepdim=True).expand_as(gradient) * gradient.shape[1]


class Weighted(torch.autograd.Function):
    """Product with a matrix, whose gradient is a sum over the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.mT + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, 1)
        return gradient @ weight, rows.mT @ x.flatten(0, 1), gradient.sum((0, 1))


identity = Identity.apply


def hooked(y: Tensor, hook: Any) -> Tensor:
    if y.requires_grad:
        y.register_hook(hook)
    return y * 1


def saved(y: Tensor, pack: Any, unpack: Any) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return y.exp()


def several(y: Tensor) -> Tensor:
    z = y * 2
    torch.autograd.graph.register_multi_grad_hook((z,), lambda gradients: None)
    return z


BACKWARDS: dict[str, tuple[Code, str]] = {
    "identity": (lambda m, y: identity(y), "expand_as, in .* sum over the tokens"),
    "context that is set up": (lambda m, y: SetUp.apply(y, 2.0), "roll, in"),
    "length": (lambda m, y: Constants.apply(y), "length"),
    "a function's forward": (lambda m, y: Shifted.apply(y), "roll, in"),
    "a hook": (lambda m, y: hooked(y, lambda g: g - g.mean(1, keepdim=True)), "sum over the tokens|sums over"),
    "a hook that sums": (lambda m, y: hooked(y, lambda g: g.cumsum(1)), "cumsum, in"),
    "hooks of several": (lambda m, y: several(y), "grad_fn, in .* autograd's graph"),
    "a hook of the graph": (lambda m, y: (z := y * 2, z.grad_fn and z.grad_fn.register_hook(print), z)[2], "grad_fn"),
    "saved tensors": (lambda m, y: saved(y, lambda x: x, lambda x: x.flip(1)), "flip, in"),
    "in place": (lambda m, y: hooked(y, lambda g: (g.copy_(g.flip(1)), None)[1]), "flip, in"),
}  # fmt: skip


@pytest.mark.parametrize("name", few(BACKWARDS, "identity", "a hook that sums", "saved tensors", "hooks of several"))
def test_backwards_that_compute_over_tokens_are_refused_with_their_line(name: str) -> None:
    code, said = BACKWARDS[name]
    model = spread(code)
    with pytest.raises(Unsupported, match=r"in \S*(ways|programs).py:\d+.*context_parallel\.unchecked") as error:
        model(tokens())
    assert re.search(said, str(error.value))
    with torch.no_grad():
        if name not in ("a function's forward", "hooks of several"):
            model(tokens())
    spread(code, ("blocks.*.inside",))(tokens()).sum().backward()


norms: list[float] = []
APART_BACKWARDS: dict[str, Code] = {
    "twice": lambda m, y: Twice.apply(y),
    "weights": lambda m, y: Weighted.apply(y, m.experts[0], m.kernel[:, 0, 0]),
    "scaled": lambda m, y: hooked(y, lambda g: g * 0.5),
    "clamped": lambda m, y: hooked(y, lambda g: g.clamp(-1, 1).nan_to_num()),
    "told": lambda m, y: hooked(y, lambda g: norms.append(float(g.norm()))),
    "saved in 32 bits": lambda m, y: saved(y, lambda x: x.float(), lambda x: x.double()),
    "saved on the CPU": lambda m, y: (torch.autograd.graph.save_on_cpu().__enter__(), y.exp(),
                                      torch._C._autograd._pop_saved_tensors_default_hooks())[1],
}  # fmt: skip


@pytest.mark.parametrize("name", few(APART_BACKWARDS, "weights", "told", "saved in 32 bits"))
def test_backwards_that_leave_tokens_apart_are_accepted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = spread(APART_BACKWARDS[name])
    with caplog.at_level(logging.WARNING, "zeromesh"):
        model(tokens()).sum().backward()
    assert not caplog.text


FORWARD_HOOKS: dict[str, tuple[str, Any, bool]] = {
    "forward": ("register_forward_hook", lambda m, args, output: output - output.mean(1, keepdim=True), False),
    "forward in place": ("register_forward_hook", lambda m, args, output: output.copy_(output.flip(1)) and None, False),
    "arguments": ("register_forward_pre_hook", lambda m, args: args[0].flip(1), False),
    "norm of outputs": ("register_forward_hook", lambda m, args, output: norms.append(float(output.norm())), True),
    "doubled arguments": ("register_forward_pre_hook", lambda m, args: (args[0] * 2,), True),
}
MODULE_HOOKS: dict[str, tuple[str, Any, bool]] = {
    "told": ("register_full_backward_hook", lambda m, inputs, outputs: norms.append(float(outputs[0].norm())), True),
    "scaled": ("register_full_backward_hook", lambda m, inputs, outputs: (inputs[0] * 2,), True),
    "mean": ("register_full_backward_hook", lambda m, inputs, outputs: (inputs[0] - inputs[0].mean(1, True),), False),
    "outputs": ("register_full_backward_pre_hook", lambda m, outputs: (outputs[0].flip(1),), False),
}


def require_checked(case: tuple[str, Any, bool], early: bool, caplog: pytest.LogCaptureFixture) -> None:
    register, hook, is_apart = case

    def add(model: Any) -> None:
        getattr(model.blocks[0].inside, register)(hook)

    model = spread(APART["nothing"], change=add if early else lambda model: None)
    if not early:
        model(tokens())
        add(model)
    with caplog.at_level(logging.WARNING, "zeromesh"):
        if is_apart:
            model(tokens()).sum().backward()
        else:
            with pytest.raises(Unsupported, match="over the tokens|flip"):
                model(tokens())
    assert not caplog.text


@pytest.mark.parametrize("early", [pytest.param(True, marks=pytest.mark.full), False])
@pytest.mark.parametrize("name", few(MODULE_HOOKS, "told", "mean"))
def test_hooks_of_gradients_of_modules_are_checked(name: str, early: bool, caplog: pytest.LogCaptureFixture) -> None:
    require_checked(MODULE_HOOKS[name], early, caplog)


@pytest.mark.parametrize("early", [pytest.param(True, marks=pytest.mark.full), False])
@pytest.mark.parametrize("name", few(FORWARD_HOOKS, "forward", "norm of outputs", "doubled arguments"))
def test_hooks_of_forwards_are_checked(name: str, early: bool, caplog: pytest.LogCaptureFixture) -> None:
    require_checked(FORWARD_HOOKS[name], early, caplog)


@pytest.mark.full
def test_compiled_code_that_takes_another_way_is_checked_again() -> None:
    model = spread(WAYS["a counter"], change=prepared)
    for block in model.blocks:
        block.compile(backend="eager")
    model(tokens())
    with pytest.raises(Unsupported, match="cumsum"):
        call(model, 4)


def train_ways(names: list[str], config: dict[str, Any]) -> list[str]:
    said = []
    for name in names:
        model = build({**WAYS, **OTHER_WAYS, **APART_BACKWARDS}[name])
        prepared(model)
        engine = start_engine(model, config, batch=4, optimizer=sgd(0.1))
        message = ""
        try:
            for step in range(4):
                train_step(engine, engine(**batch(step)))
        except ValueError as error:
            message = str(error)
        engine.destroy()
        said.append(message)
    return said


def test_an_engine_refuses_ways_that_compute_over_tokens() -> None:
    config = {"mesh": {"context": RANKS}, "zero_optimization": {"stage": 3}, "context_parallel": {"strategy": "ring"}}
    names = ["another norm", "weights", "a counter"]
    for accepted, weights, refused in run_ranks(train_ways, RANKS, names, config):
        assert not accepted
        assert not weights
        assert "cumsum, in" in refused
        assert "context_parallel.unchecked" in refused


@pytest.mark.parametrize("first", [1, 4, pytest.param(6, marks=pytest.mark.full)])
@pytest.mark.parametrize("alternates", [False, True])
def test_a_global_counter_that_the_check_advances_hides_no_way(first: int, alternates: bool) -> None:
    calls = 0

    def code(m: Any, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return y.cumsum(1 if (calls % (first + 1) == 0 if alternates else calls > first) else 2)

    model = spread(code)
    with pytest.raises(Unsupported, match="cumsum"):
        call(model, 12)


calls = 0


def of_globals(m: Any, y: Tensor, dim: int) -> Tensor:
    global calls
    calls += 1
    return y.sort(-1).values if calls % 3 else y.cumsum(dim)


class Counting(Inside):
    """Code whose way depends on a number in this file."""


@pytest.mark.parametrize("dim", [1, 2])
def test_counters_in_the_file_of_a_class_are_those_of_the_forward(dim: int) -> None:
    def change(model: Any) -> None:
        model.blocks[0].inside.__class__ = Counting

    model = spread(lambda m, y: of_globals(m, y, dim), change=change)
    with nullcontext() if dim == 2 else pytest.raises(Unsupported, match="cumsum"):
        call(model, 6)


def test_numbers_that_depend_on_the_length_are_refused_at_each_length() -> None:
    model = spread(lambda m, y: y * (1.0 if y.shape[1] < 12 else 2.0))
    model(tokens(8))
    with pytest.raises(Unsupported, match="depend on the length"):
        model(tokens(16))


def test_only_files_of_transformers_itself_are_taken_for_its_code_of_masks() -> None:
    library = Path(str(transformers.__file__)).parent
    assert looks_at_ids(str(library / "masking_utils.py"))
    assert not looks_at_ids("/home/me/mytransformers/modeling_utils.py")
    assert not looks_at_ids(f"/home/me/transformers/{library.name}/modeling_utils.py")
