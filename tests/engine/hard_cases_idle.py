"""Hard cases: parameters and units that get no gradient, never or now and then, on all ranks or on one."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hard_case import (
    RECOMPUTE,
    WIDTH,
    Block,
    Nested,
    Program,
    Stack,
    Table,
    Trainer,
    accumulation,
    forwards_then_backwards,
    loss_of,
    once,
    two_views,
)
from hard_cases_graph import evaluation_in_between, gradient_penalty, retain_graph

CASES = Table()


@CASES.add("frozen_parameters")
class FrozenParameters(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight.requires_grad_(False)
        self.scale.requires_grad_(False)


@CASES.add("frozen_units")
@CASES.add("frozen_units_accumulation", accumulation, micro_batches=3)
@CASES.add("frozen_units_recomputed", config=RECOMPUTE)
class FrozenUnits(Stack):
    def __init__(self) -> None:
        super().__init__()
        for module in (self.blocks[0], self.blocks[2], self.head):
            module.requires_grad_(False)
        self.scale.requires_grad_(False)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


@CASES.add("lora")
@CASES.add("lora_recomputed", config=RECOMPUTE)
class Lora(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)


@CASES.add("blocks_under_no_grad")
class UnderNoGrad(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.blocks[1](self.blocks[0](h))
        return self.blocks[3](self.blocks[2](h))


class Skipping(Stack):
    skipped: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index in self.unused:
                block(h)
            elif index not in self.skipped:
                h = block(h)
        return h


class SkippingNested(Skipping):
    block = Nested


class SkippingReentrant(Skipping):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                h = checkpoint(block, h, use_reentrant=True)
        return h


class SkippingTwice(Skipping):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        return super().run(super().run(h))


def skipping(choose: Callable[[Trainer], tuple[int, ...]], program: Program = once) -> Program:
    def run(t: Trainer) -> None:
        t.module.skipped = choose(t)
        program(t)

    return run


def leaving_unused(choose: Callable[[Trainer], tuple[int, ...]]) -> Program:
    def run(t: Trainer) -> None:
        t.module.unused = choose(t)
        once(t)

    return run


def on_one_rank(t: Trainer) -> tuple[int, ...]:
    return ((t.step + 1) % 4,) if t.rank == t.step % t.ranks else ()


def on_all_ranks(t: Trainer) -> tuple[int, ...]:
    return ((), (1,), (0, 3), (2,), (0, 1, 2, 3))[t.step]


def differently(t: Trainer) -> tuple[int, ...]:
    return tuple(index for index in range(4) if (t.step + 1) * (t.rank + 2) * (index + 3) % 7 < 3)


def first_on_all_ranks_then_on_one(t: Trainer) -> tuple[int, ...]:
    return (1, 2) if t.step % 2 == 0 or t.rank == 0 else ()


CHOICES = {
    "on_one_rank": on_one_rank,
    "on_all_ranks": on_all_ranks,
    "differently": differently,
    "first_on_all_ranks_then_on_one": first_on_all_ranks_then_on_one,
    "always": lambda t: (1, 2),
}
for name, choose in CHOICES.items():
    CASES.add(f"unit_idle_{name}", skipping(choose))(Skipping)
    CASES.add(f"unit_idle_{name}_recomputed", skipping(choose), config=RECOMPUTE)(Skipping)
    CASES.add(f"unit_unused_{name}", leaving_unused(choose))(Skipping)

PROGRAMS = {
    "contrastive": (two_views, 1),
    "forwards_then_backwards": (forwards_then_backwards, 2),
    "retain_graph": (retain_graph, 2),
    "gradient_penalty": (gradient_penalty, 1),
    "evaluation_in_between": (evaluation_in_between, 1),
}
for name, (program, micro_batches) in PROGRAMS.items():
    CASES.add(f"unit_idle_and_{name}", skipping(differently, program), micro_batches=micro_batches)(Skipping)
CASES.add("unit_idle_nested", skipping(differently), config={"units": ["Nested", "Block"]})(SkippingNested)
CASES.add("unit_idle_recomputed_reentrant", skipping(differently))(SkippingReentrant)
CASES.add("unit_idle_called_several_times", skipping(on_all_ranks))(SkippingTwice)


def idle_in_micro_batches(t: Trainer) -> None:
    for number in range(3):
        t.module.skipped = tuple(i for i in range(4) if (t.step + number + i + 2 * t.rank) % 3 == 0)
        x = t.batch(number)
        t.backward(loss_of(t.model(x), x))


CASES.add("unit_idle_accumulation", idle_in_micro_batches, micro_batches=3)(Skipping)


class Branching(Block):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 2 * WIDTH)
        self.left = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh((self.up if self.left else self.other)(x)))


class BranchingStack(Stack):
    block = Branching


def branching(choose: Callable[[Trainer, int], bool]) -> Program:
    def run(t: Trainer) -> None:
        for index, block in enumerate(t.module.blocks):
            block.left = choose(t, index)
        once(t)

    return run


CASES.add("parameter_idle_on_one_rank", branching(lambda t, i: t.rank != 1 or i % 2 == 0))(BranchingStack)
CASES.add("parameter_idle_on_all_ranks", branching(lambda t, i: (t.step + i) % 2 == 0))(BranchingStack)
CASES.add("parameter_idle_differently", branching(lambda t, i: (t.step * 3 + t.rank + i) % 3 == 0))(BranchingStack)
CASES.add("parameter_never_used", branching(lambda t, i: True))(BranchingStack)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return out


@CASES.add("experts")
@CASES.add("experts_as_units", config={"units": ["Experts", "Block"]})
@CASES.add("experts_as_units_only", config={"units": ["Block"]})
@CASES.add("experts_as_units_and_evaluation", evaluation_in_between, config={"units": ["Experts", "Block"]})
class MixtureOfExperts(Stack):
    block = Experts
