"""Recomputed blocks see their buffers as the forward saw them, and change them once, as without recomputation."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from models import Parted
from zeromesh.parallel.activation.activation_store import ActivationStore
from zeromesh.parallel.activation.checkpoint import checkpoint, checkpoint_modules
from zeromesh.parallel.activation.selective import GRANULARITIES


class Counter(nn.Module):
    """Computes with a count that each forward raises, in place or by a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        return x * (1 + self.count)


class Quiet(nn.Module):
    """A batch norm whose kernel alone changes the averages, so that no version says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=self.training)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "cumulative average": lambda: nn.BatchNorm1d(6, momentum=None),
    "batch norm without a count": Quiet,
    "spectral norm": lambda: spectral_norm(nn.Linear(6, 6)),
    "counter in place": lambda: Counter(in_place=True),
    "counter in a new tensor": lambda: Counter(in_place=False),
    "random slopes": nn.RReLU,
}


WAYS = {"full": {}, "selective": {"plan": GRANULARITIES["selective"]}, "host": {"store": True}}


def train(kind: str, way: str | None, repeat: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two forwards before their backwards, of which one may be repeated, with an evaluation in front."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Parted(6, KINDS[kind]()) for _ in range(3))).double()
    if way is not None:
        store = ActivationStore(torch.device("cpu"), host=True) if "store" in WAYS[way] else None
        if store is not None:
            store.least = 0
        checkpoint_modules(model, store, WAYS[way].get("plan"))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    model.eval()(x[0]).sum().backward()
    model.train().zero_grad()
    torch.manual_seed(1)
    losses = [model(part).square().mean() for part in x]
    losses[1].backward(retain_graph=repeat)
    losses[0].backward()
    if repeat:
        losses[1].backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], state


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_buffers_are_the_same_bits(kind: str, way: str) -> None:
    repeat = way != "selective"  # whose graphs torch differentiates once
    gradients, state = train(kind, None, repeat)
    found, other = train(kind, way, repeat)
    for one, want in zip(found, gradients, strict=True):
        assert torch.equal(one, want)
    for name, want in state.items():
        assert torch.equal(other[name], want), name


def test_blocks_inside_of_blocks_change_their_buffers_once() -> None:
    inner, outer = Counter(in_place=True), nn.Sequential()
    outer.append(inner)
    checkpoint_modules([inner, outer])
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for number in (1, 2):
        (gradient,) = torch.autograd.grad(outer(x).square().sum(), x)
        assert gradient.tolist() == [2.0 * (1 + number) ** 2] * 2
        assert inner.count == number


@pytest.mark.parametrize("of", [lambda m: m, lambda m: m.forward, lambda m: partial(m.forward)])
def test_a_users_call_of_a_module_changes_its_buffers_once(of: Callable[[nn.Module], Callable[..., Tensor]]) -> None:
    module = Counter(in_place=True)
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    checkpoint(of(module), x).square().sum().backward()
    assert module.count == 1
    assert x.grad is not None
    assert x.grad.tolist() == [8.0, 8.0]


def test_a_block_whose_forward_was_replaced_changes_its_buffers_once() -> None:
    module = Counter(in_place=True)
    own = module.forward
    module.forward = lambda x: own(x)  # as ranks that split a block replace it
    checkpoint_modules([module])
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    module(x).square().sum().backward()
    assert module.count == 1


def test_a_module_that_begins_to_change_its_buffers_changes_them_once() -> None:
    class Late(Counter):
        begun = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.begun else x

    module = Late(in_place=True)
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    checkpoint(module, x).sum().backward()
    module.begun = True
    for number in (1, 2, 3):
        checkpoint(module, x).sum().backward()
        assert module.count == number


def test_buffers_that_are_added_or_missing_are_no_hindrance() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("none", None)
            self.register_buffer("mask", torch.full((3,), float("nan")), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if "late" not in self._buffers:
                self.register_buffer("late", torch.full((2,), 3.0))
            return x * self.late

    module = Lazy()
    x = torch.ones(2, requires_grad=True)
    for number in (1, 2):
        checkpoint(module, x).square().sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [18.0 * number] * 2
        assert [*module._buffers] == ["none", "mask", "late"]
