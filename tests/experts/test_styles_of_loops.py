"""Users' own mixtures, whose experts are a list: each trains as in one process, or is refused with its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeromesh
from compare import assert_close
from harness import run_ranks
from run import adamw, configuration, train_step, whole_parameters

WIDTH, COUNT, STEPS = 6, 4, 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Buffered(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.scale = nn.Dropout(0.0), nn.Buffer(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x)) * self.scale


class Counting(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        self.scale += len(x)
        return super().forward(x)


class Centred(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0) if len(x) else x)


class Pair(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Scaled(Mlp):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Mlp(), nn.BatchNorm1d(WIDTH))


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


def routed(block: Any, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor], experts: Any = None) -> Tensor:
    """Return the weighted sum of two experts of each row."""
    rows = x.flatten(0, -2)
    weights, chosen = block.gate(rows).softmax(-1).topk(2)
    total = torch.zeros_like(rows)
    for number, expert in enumerate(block.experts if experts is None else experts):
        row, place = torch.where(chosen == number)
        if len(row):
            total.index_add_(0, row, call(expert, rows[row]) * weights[row, place, None])
    return total.view(x.shape)


class Block(nn.Module):
    kind: Callable[[], nn.Module] = Mlp

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT)
        self.experts: Any = nn.ModuleList(self.kind() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        return routed(self, x, lambda expert, rows: expert(rows))


def block(name: str, compute: Callable[[Any, Tensor], Tensor] = Block.forward, kind: Any = Mlp) -> type[Block]:
    return type(name, (Block,), {"forward": compute, "kind": kind})


def one_by_one(self: Any, x: Tensor) -> Tensor:
    rows, total = x.flatten(0, -2), []
    weights, chosen = self.gate(rows).softmax(-1).topk(2)
    for row, weight, numbers in zip(rows, weights, chosen.tolist(), strict=True):
        total.append(sum(w * self.experts[number](row) for w, number in zip(weight, numbers, strict=True)))
    return torch.stack(total).view(x.shape)


def expert_choice(self: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    scores, index = self.gate(rows).softmax(-1).topk(3, dim=0)
    total = rows.new_zeros(rows.shape)
    for number in range(COUNT):
        total[index[:, number]] += self.experts[number](rows[index[:, number]]) * scores[:, number, None]
    return total.view(x.shape)


def with_shared(self: Any, x: Tensor) -> Tensor:
    return routed(self, x, lambda expert, rows: expert(rows), self.experts[:-1]) + self.experts[-1](
        x.flatten(0, -2)
    ).view(x.shape)


def soft(self: Any, x: Tensor) -> Tensor:
    weights = self.gate(x).softmax(-1)
    return sum(weights[..., number, None] * expert(x) for number, expert in enumerate(self.experts))


def parts(self: Any, x: Tensor) -> Tensor:
    best, chosen = self.gate(rows := x.flatten(0, -2)).softmax(-1).max(-1)
    order = chosen.argsort(stable=True)
    pieces = rows[order].split(torch.bincount(chosen, minlength=COUNT).tolist())
    y = torch.cat([expert(x=piece) for expert, piece in zip(self.experts, pieces, strict=True)])
    return (torch.zeros_like(rows).index_copy(0, order, y) * best[:, None]).view(x.shape)


class Named(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{number}": Mlp() for number in range(COUNT)})

    def forward(self, x: Tensor) -> Tensor:
        return routed(self, x, lambda expert, rows: expert(rows), self.experts.values())


class TwoLists(Block):
    def __init__(self) -> None:
        super().__init__()
        self.out_experts = nn.ModuleList(Mlp() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        return routed(self, x + super().forward(x), lambda expert, rows: expert(rows), self.out_experts)


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts[1].requires_grad_(False)
        self.experts[3].requires_grad_(False)


class AllFrozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts.requires_grad_(False)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.into, self.blocks, self.out = nn.Linear(WIDTH, WIDTH), nn.ModuleList([kind(), kind()]), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.blocks:
            x = x + self.call(layer, x)
        return self.out(x).square().mean()

    def call(self, layer: Any, x: Tensor) -> Tensor:
        return layer(x)


class Checkpointed(Model):
    reentrant = False

    def call(self, layer: Any, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class OfDicts(Model):
    """Its block is a dict, which computes nothing."""

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.blocks = nn.ModuleList([nn.ModuleDict(dict(self.blocks[0].named_children()))])

    def call(self, layer: Any, x: Tensor) -> Tensor:
        return routed(layer, x, lambda expert, rows: expert(rows), layer["experts"])


class OfLists(Model):
    """The experts of all layers are in one list of lists."""

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.experts = nn.ModuleList(layer.experts for layer in self.blocks)
        for layer in self.blocks:
            del layer.experts

    def forward(self, x: Tensor) -> Tensor:
        for layer, experts in zip(self.blocks, self.experts, strict=True):
            x = x + routed(layer, x, lambda expert, rows: expert(rows), experts)
        return self.out(x).square().mean()


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "one row at a time": lambda: Model(block("OneByOne", one_by_one)),
    "experts choose": lambda: Model(block("ExpertChoice", expert_choice)),
    "a shared one in the list": lambda: Model(block("WithShared", with_shared)),
    "all rows": lambda: Model(block("Soft", soft)),
    "sorted parts, by keyword": lambda: Model(block("Parts", parts)),
    "attention": lambda: Model(block("OfAttention", soft, Attention)),
    "rows of a call mixed": lambda: Model(block("OfCentred", kind=Centred)),
    "buffers and dropout": lambda: Model(block("OfBuffered", kind=Buffered)),
    "dict": lambda: Model(Named),
    "frozen": lambda: Model(Frozen),
    "all frozen": lambda: Model(AllFrozen),
    "checkpoint": lambda: Checkpointed(Block),
    "reentrant checkpoint": lambda: Reentrant(Block),
    "checkpoint of each expert": lambda: Model(
        block("Inside", lambda self, x: routed(self, x, lambda e, rows: checkpoint(e, rows, use_reentrant=False)))
    ),
    "a block that is a dict": lambda: OfDicts(Block),
}


def inner(self: Any, x: Tensor) -> Tensor:
    return routed(self, x, lambda expert, rows: expert.down(torch.tanh(expert.up(rows))))


def chained(self: Any, x: Tensor) -> Tensor:
    for expert in self.experts:
        x = expert(x.flatten(0, -2)).view(x.shape)
    return x


def inside_checkpoint(self: Any, x: Tensor) -> Tensor:
    return checkpoint(Block.forward, self, x, use_reentrant=False)


class SharedList(Model):
    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.blocks[1].experts = self.blocks[0].experts


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "two blocks with one list": (lambda: SharedList(Block), "blocks.1.experts.0.up.weight is blocks.0.experts.0.up"),
    "several arguments": (
        lambda: Model(block("OfScaled", kind=Scaled)),
        r"blocks.0.experts.0 \(Scaled\) is not called with one tensor .*'scale'",
    ),
    "batch norm": (
        lambda: Model(block("Norm", kind=Normed)),
        "blocks.0.experts has a batch norm",
    ),
    "lists in a list": (lambda: OfLists(Block), r'experts.0 is a ModuleList.*"targets": \["experts.\*"\]'),
    "two lists in one forward": (lambda: Model(TwoLists), "the forward of blocks.0 calls 2 lists of experts"),
    "lists in a named list": (lambda: OfLists(Block), "the forward of the model calls 2 lists of experts"),
    "tuples": (lambda: Model(block("OfPairs", kind=Pair)), "an expert of blocks.0.experts returned a tuple"),
    "buffers that change": (
        lambda: Model(block("OfCounting", kind=Counting)),
        "blocks.0.experts: experts change their buffer scale",
    ),
    "modules inside of experts": (
        lambda: Model(block("Inner", inner)),
        "blocks.0.experts.*a module inside of expert . was called by itself",
    ),
    "experts after experts": (lambda: Model(block("Chained", chained)), "depend on what other experts return"),
    "a checkpoint inside": (
        lambda: Model(block("InsideCheckpoint", inside_checkpoint)),
        "blocks.1.experts.*recomputation of a checkpoint inside",
    ),
}
TARGETS = {"lists in a named list": ["experts.*"]}


def build(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    model = make().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def batch(step: int, ranks: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, WIDTH, generator=generator, dtype=torch.float64).chunk(ranks)


def engine_of(case: str, make: Callable[[], nn.Module], row: int) -> Any:
    experts = {"targets": TARGETS.get(case, [])}
    config = configuration(adamw(0.05), row, mesh={"expert": 2, "data": 2}, batch=4, experts=experts)
    return zeromesh.initialize(model=build(make), config=config)[0]


def trained(case: str, row: int) -> Any:
    engine = engine_of(case, TRAINED[case], row)
    losses = [train_step(engine, engine(batch(step, 2)[engine.data_rank])) for step in range(STEPS)]
    with torch.no_grad():
        engine.eval()
        losses.append(float(engine(batch(STEPS, 2)[engine.data_rank])))
    return losses, whole_parameters(engine.module)


def refused(case: str, row: int) -> str:
    try:
        engine = engine_of(case, REFUSED[case][0], row)
        train_step(engine, engine(batch(0, 2)[engine.data_rank]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.full
@pytest.mark.parametrize("row", [1, 3])
@pytest.mark.parametrize("case", TRAINED)
def test_it_trains_as_in_one_process(case: str, row: int) -> None:
    model = build(TRAINED[case])
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    expected = []
    for step in range(STEPS):
        losses = [model(part) for part in batch(step, 2)]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()
        optimizer.step()
        expected.append([loss.item() for loss in losses])
    with torch.no_grad():
        expected.append([float(model.eval()(part)) for part in batch(STEPS, 2)])
    for rank, (losses, state) in enumerate(run_ranks(trained, 2, case, row)):
        assert losses == pytest.approx([pair[rank] for pair in expected], rel=1e-9)
        assert_close(state, model)


@pytest.mark.full
@pytest.mark.parametrize("row", [1, 3])
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_its_name(case: str, row: int) -> None:
    for text in run_ranks(refused, 2, case, row):
        assert re.search(REFUSED[case][1], text), text
