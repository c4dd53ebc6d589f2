"""Hard cases, what blocks may do: outputs of all kinds, in-place operations, stashes, other methods, many layers."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hard_case import RECOMPUTE, WIDTH, Block, Stack, Table, Trainer, accumulation, loss_of
from hard_cases_graph import TiedBlocks, evaluation_mode_in_between

CASES = Table()

# Outputs of all kinds.

Pair = namedtuple("Pair", ["hidden", "extra"])


@dataclass
class Output:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None
    note: str = "text"


class ModelOutput(OrderedDict):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Opaque:
    def __init__(self, hidden: torch.Tensor, extra: torch.Tensor) -> None:
        self.hidden, self.extra = hidden, extra


class Talkative(Block):
    wrap: Callable[[torch.Tensor, torch.Tensor], Any] = Pair

    def forward(self, x: torch.Tensor) -> Any:
        h = super().forward(x)
        return self.wrap(h, self.up(h).mean(-1, keepdim=True))


class ReadsOutputs(Stack):
    block = Talkative

    def __init__(self, wrap: Callable[[Any, Any], Any], read: Callable[[Any], tuple[Any, Any]]) -> None:
        super().__init__()
        self.read = read
        for block in self.blocks:
            block.wrap = wrap

    def run(self, h: torch.Tensor) -> torch.Tensor:
        extras = []
        for block in self.blocks:
            h, extra = self.read(block(h))
            extras.append(extra)
        return h * extras[0] + extras[2]


def attributes(value: Any) -> tuple[Any, Any]:
    return value.hidden, value.extra


OUTPUTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tuple": (lambda h, e: (h, e), lambda v: v),
    "named_tuple": (Pair, attributes),
    "list_with_none": (lambda h, e: [None, h, 3, e], lambda v: (v[1], v[3])),
    "dict": (lambda h, e: {"hidden": h, "extra": e}, lambda v: (v["hidden"], v["extra"])),
    "nested": (lambda h, e: {"a": [(h,), {"b": e}]}, lambda v: (v["a"][0][0], v["a"][1]["b"])),
    "dataclass": (Output, attributes),
    "model_output": (lambda h, e: ModelOutput(hidden=h, extra=e), attributes),
    "opaque": (Opaque, attributes),
    "half_opaque": (lambda h, e: (Opaque(h, h), e), lambda v: (v[0].hidden, v[1])),
}
for name, (wrap, read) in OUTPUTS.items():
    CASES.add(f"output_{name}")(partial(ReadsOutputs, wrap, read))
CASES.add("output_tuple_recomputed", config=RECOMPUTE)(partial(ReadsOutputs, *OUTPUTS["tuple"]))
CASES.add("output_opaque_recomputed", config=RECOMPUTE)(partial(ReadsOutputs, *OUTPUTS["opaque"]))
CASES.add("output_opaque_accumulation", accumulation, micro_batches=3)(partial(ReadsOutputs, *OUTPUTS["opaque"]))


class PassesItsInput(Block):
    def forward(self, x: torch.Tensor, memory: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return x, [*memory, super().forward(x)]


@CASES.add("output_that_is_an_input")
class OutputThatIsAnInput(Stack):
    block = PassesItsInput

    def run(self, h: torch.Tensor) -> torch.Tensor:
        memory: list[torch.Tensor] = []
        for block in self.blocks:
            h, memory = block(h, memory=memory)
            h = h + memory[-1]
        return h + memory[1]


@CASES.add("keyword_arguments_and_loss_in_a_dict", lambda t: t.backward(t.model(x=t.batch(), scale=2.0)["loss"]))
class Keywords(Stack):
    def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        y = super().forward(x * scale)
        return {"logits": y, "loss": loss_of(y, x)}


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h.relu_()
        h = self.down(h)
        h[:, 0].mul_(2)
        h += x
        return h


@CASES.add("writes_through_data")
@CASES.add("writes_through_data_recomputed", config=RECOMPUTE)
@CASES.add("writes_through_data_accumulation", accumulation, micro_batches=3)
class WritesThroughData(Stack):  # changes weights before they are used, as torch does not count
    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.up.weight.data.clamp_(-0.05, 0.05)
            h = block(h)
        return h

    class block(Block):
        def forward(self, x: torch.Tensor) -> Any:
            self.down.bias.data[0] = 0.25
            self.down.weight.data.copy_(self.down.weight.data.clamp(-0.1, 0.1))
            return super().forward(x)


@CASES.add("in_place_inside_and_after")
@CASES.add("in_place_inside_and_after_recomputed", config=RECOMPUTE)
class InPlaceAfter(Stack):
    block = InPlace

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
            h.add_(1)
            h.mul_(0.5)
            h[:, 1:3].add_(h[:, 3:5].detach())
        return h


class TwoViews(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = super().forward(x)
        return h[:, :2], h[:, 2:]


@CASES.add("in_place_on_views_after")
class InPlaceOnViews(Stack):
    block = TwoViews

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            a, b = block(h)
            a.mul_(0.5)
            b.add_(a.sum(-1, keepdim=True))
            h = torch.cat([a, b], -1)
        return h


class WritesIntoItsInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(super().forward(x.clone()))
        return x


@CASES.add("in_place_on_the_input")
class InPlaceOnTheInput(Stack):
    block = WritesIntoItsInput


class Stashing(Block):
    stash: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        self.stash = h.square().mean()
        return x + self.down(h)


@CASES.add("stashed_activations")
class Stashed(Stack):
    block = Stashing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + sum(block.stash for block in self.blocks)


@CASES.add("only_a_stashed_activation_is_used")
class OnlyStashed(Stashed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        return x * self.blocks[1].stash


def loss_from_a_stash(t: Trainer) -> None:
    t.model(t.batch())
    t.backward(t.module.blocks[2].stash)


def loss_from_a_stash_on_one_rank(t: Trainer) -> None:
    x = t.batch()
    y = t.model(x)
    t.backward(t.module.blocks[2].stash if t.rank == t.step % t.ranks else loss_of(y, x))


CASES.add("loss_from_a_stashed_activation", loss_from_a_stash)(Stashed)
CASES.add("loss_from_a_stashed_activation_on_one_rank", loss_from_a_stash_on_one_rank)(Stashed)


class WithMethods(Block):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))

    def decode(self, h: torch.Tensor) -> torch.Tensor:
        return self.down(h)


@CASES.add("other_methods_of_blocks")
@CASES.add("other_methods_of_blocks_accumulation", accumulation, micro_batches=3)
class OtherMethods(Stack):
    block = WithMethods

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for encoder, decoder in zip(self.blocks, reversed(self.blocks), strict=True):
            h = h + decoder.decode(encoder.encode(h))
        return h


@CASES.add("layers_of_blocks_called_from_outside")
class LayersCalledFromOutside(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        states = [torch.tanh(block.up(h)) for block in self.blocks]
        for block, state in zip(self.blocks, states, strict=True):
            h = h + block.down(state)
        return h


def through_a_method(t: Trainer) -> None:
    x = t.batch()
    t.backward(loss_of(t.model.encode(x), x))


def through_both(t: Trainer) -> None:
    x = t.batch()
    assert t.model.width() == WIDTH
    t.backward(loss_of(t.model(x) + t.model.encode(x + 1), x))


@CASES.add("method_of_the_root", through_a_method)
@CASES.add("method_of_the_root_and_forward", through_both)
class MethodOfTheRoot(Stack):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](x * self.scale))
        return h + self.blocks[3].up(h)[:, :WIDTH] + F.linear(h, self.blocks[2].down.weight.t())[:, :WIDTH]

    def width(self) -> int:
        return len(self.scale)


class Mixed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH).float() + 0.5)
        self.offset = nn.Parameter(torch.zeros(WIDTH).float(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain + self.offset


@CASES.add("several_dtypes_in_one_unit", tolerance=1e-5)
class MixedStack(Stack):
    block = Mixed


@CASES.add("parameters_that_are_not_contiguous")
class Transposed(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())


class Normalised(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


@CASES.add("batch_norm")
@CASES.add("batch_norm_accumulation", accumulation, micro_batches=3)
@CASES.add("batch_norm_and_evaluation_in_between", evaluation_mode_in_between)
class BatchNormStack(Stack):
    block = Normalised


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean + self.table * 0.01)


@CASES.add("buffers")
class BufferStack(Stack):
    block = Counting


def tokens(t: Trainer) -> None:
    t.backward(t.model(t.batch(0, 3, 5).mul(3).long().abs() % 11))


class Language(nn.Module):
    def __init__(self, sparse: bool = False, tied: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=sparse, padding_idx=padding)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), tokens.roll(-1, 1).flatten())


CASES.add("embedding", tokens)(Language)
CASES.add("embedding_tied", tokens, optimizer=("SGD", {"lr": 0.1, "momentum": 0.9}))(partial(Language, tied=True))
CASES.add("embedding_with_padding", tokens)(partial(Language, tied=True, padding=3))
CASES.add("embedding_sparse", tokens, reference=Language, optimizer=("SGD", {"lr": 0.1}))(
    partial(Language, sparse=True)
)
CASES.add("embedding_sparse_tied", tokens, reference=partial(Language, tied=True))(
    partial(Language, sparse=True, tied=True)
)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.conv(x))


def image(t: Trainer) -> None:
    x = t.batch(0, 2, WIDTH, 4, 5).contiguous(memory_format=torch.channels_last)
    t.backward(loss_of(t.model(x), x))


class Convolutions(nn.Module):
    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Convolution() for _ in range(4))
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


CASES.add("channels_last", image)(partial(Convolutions, channels_last=True))


class Layered(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x[None])
        return x + (y if isinstance(y, torch.Tensor) else y[0])[0]


class LayeredStack(Stack):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layered(layer) for _ in range(self.depth))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}
for name, layer in LAYERS.items():
    CASES.add(name)(partial(LayeredStack, layer))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        x, weight = context.saved_tensors
        return gradient @ weight, gradient.t() @ x


class OwnFunction(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Scaled.apply(torch.tanh(Scaled.apply(x, self.up.weight)), self.down.weight)


@CASES.add("autograd_function")
class FunctionStack(Stack):
    block = OwnFunction


def compile_units(engine: Any) -> None:
    engine.compile(backend="aot_eager")


CASES.add("compiled", prepare=compile_units)(Stack)
CASES.add("compiled_recomputed", prepare=compile_units, config=RECOMPUTE)(Stack)
CASES.add("compiled_accumulation", accumulation, micro_batches=3, prepare=compile_units)(TiedBlocks)


@CASES.add("compiled_before", reference=Stack)
class CompiledBefore(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager")
