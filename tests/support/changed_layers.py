"""Layers of torch that users have changed, in the ways that are usual; each computes something else than its class."""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune


class Lora(nn.Linear):
    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs) / 8), nn.Parameter(torch.randn(outputs, 2) / 8)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.a.T @ self.b.T


class LowRank(Lora):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight + self.b @ self.a, self.bias)


class Standardized(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(input, weight / (weight.std(1, keepdim=True) + 1e-5), self.bias)


class Rounded(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        scale = self.weight.abs().max() / 7
        rounded = (self.weight / scale).round() * scale
        return F.linear(input, self.weight + (rounded - self.weight).detach(), self.bias)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


class Cosine(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 4 * F.linear(F.normalize(input, dim=-1), F.normalize(self.weight, dim=0), self.bias)


class Called(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args).tanh()


class Multiplied(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.full((sizes[1],), 1.5))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.gain


class Centred(nn.Linear):
    """``weight`` is a property, of a parameter of another name."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.raw = self._parameters.pop("weight")

    @property
    def weight(self) -> Any:
        raw: Any = self.raw
        return raw - raw.mean()

    @weight.setter
    def weight(self, value: Any) -> None:
        self.register_parameter("weight", value)


class Activated(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.softmax(super().forward(input), -1)


class Masked(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mask", (torch.arange(sizes[0] * sizes[1]).view(sizes[1], sizes[0]) % 3 > 0).double())

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * self.mask, self.bias)


class Quiet(nn.Linear):
    """Changes nothing that is computed: layers of such classes are split."""

    def extra_repr(self) -> str:
        return "quiet"

    def norm(self) -> Tensor:
        return self.weight.norm()


def of_class(kind: type[nn.Linear]) -> Callable[[int, int], nn.Module]:
    return lambda inputs, outputs: kind(inputs, outputs)


def changed(change: Callable[[nn.Linear], Any]) -> Callable[[int, int], nn.Module]:
    def build(inputs: int, outputs: int) -> nn.Module:
        layer = nn.Linear(inputs, outputs)
        return change(layer) or layer

    return build


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / (1 + weight.norm())


def with_forward(layer: nn.Linear) -> None:
    layer.forward = types.MethodType(lambda self, x: F.linear(x, self.weight.tanh(), self.bias), layer)  # type: ignore[method-assign]


def with_function(layer: nn.Linear) -> None:
    layer.forward = lambda input: F.linear(input, layer.weight).cumsum(-1) / 8  # type: ignore[method-assign]


SUBCLASSES: dict[str, Callable[[int, int], nn.Module]] = {
    kind.__name__: of_class(kind)
    for kind in (
        Lora, LowRank, Standardized, Rounded, Scaled, Cosine, Called, Multiplied, Centred, Activated, Masked, Quiet,
    )
}  # fmt: skip
INSTANCES = {
    "a method": changed(with_forward),
    "a function": changed(with_function),
    "a hook that reads the weight": changed(
        lambda one: one.register_forward_hook(lambda module, _, output: output + 0.01 * module.weight.sum()) and None
    ),
}
PARAMETRIZED = {
    "weight norm": changed(parametrizations.weight_norm),
    "older weight norm": changed(torch.nn.utils.weight_norm),
    "spectral norm": changed(parametrizations.spectral_norm),
    "older spectral norm": changed(torch.nn.utils.spectral_norm),
    "a parametrization": changed(lambda layer: parametrize.register_parametrization(layer, "weight", Halved())),
    "pruned": changed(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
}


def _centre(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output - output.mean(-1, keepdim=True)


HOOKED = {
    "of the input": changed(lambda one: one.register_forward_pre_hook(lambda _, args: (args[0].flip(-1),)) and None),
    "of the output": changed(lambda one: one.register_forward_hook(_centre) and None),
    "of the backward": changed(
        lambda one: one.register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] * 0.5,)) and None
    ),
    "before the backward": changed(
        lambda one: (
            one.register_full_backward_pre_hook(lambda _, outputs: (outputs[0] - outputs[0].mean(-1, True),)) and None
        )
    ),
}
LAYERS = {"subclass": SUBCLASSES, "instance": INSTANCES, "hooks": HOOKED, "parametrization": PARAMETRIZED}
