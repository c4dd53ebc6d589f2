"""Hard cases: activations computed again, of one block or several, with and without reentrant autograd."""

from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hard_case import RECOMPUTE, Block, Dropping, Stack, Table, Trainer, accumulation, loss_of, two_views
from hard_cases_idle import Lora

CASES = Table()


class Inside(Block):
    reentrant = False

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(checkpoint(self.inner, x, use_reentrant=self.reentrant))


class ReentrantInside(Inside):
    reentrant = True


class AllInside(Inside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@CASES.add("recomputed_inside")
@CASES.add("recomputed_inside_and_outside", config=RECOMPUTE)
class InsideStack(Stack):
    block = Inside


@CASES.add("recomputed_inside_reentrant")
class ReentrantInsideStack(Stack):
    block = ReentrantInside


@CASES.add("recomputed_all_inside")
@CASES.add("recomputed_all_inside_accumulation", accumulation, micro_batches=3)
class AllInsideStack(Stack):
    block = AllInside


class Outside(Stack):
    block = Dropping

    def __init__(self, per: int, reentrant: bool) -> None:
        super().__init__()
        self.per, self.reentrant = per, reentrant

    def span(self, first: int, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[first : first + self.per]:
            h = block(h)
        return h

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for first in range(0, self.depth, self.per):
            h = checkpoint(partial(self.span, first), h, use_reentrant=self.reentrant)
        return h


class WholeForward(Stack):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)


for reentrant, kind in ((False, ""), (True, "_reentrant")):
    for per, what in ((1, "each_block"), (2, "two_blocks"), (4, "all_blocks")):
        CASES.add(f"recomputed_{what}{kind}")(partial(Outside, per, reentrant))
    two = partial(Outside, 2, reentrant)
    CASES.add(f"recomputed_two_blocks{kind}_accumulation", accumulation, micro_batches=3)(two)
    CASES.add(f"recomputed_two_blocks{kind}_contrastive", two_views)(two)
    CASES.add(f"recomputed_whole_forward{kind}")(partial(WholeForward, reentrant))


@CASES.add("recomputed_use_of_weights_outside")
class WeightsOutside(Stack):  # the recomputation itself reads weights of several units outside of their forwards
    def mix(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = h + F.linear(torch.tanh(F.linear(h, block.up.weight)), block.down.weight)
        return h

    def run(self, h: torch.Tensor) -> torch.Tensor:
        return super().run(checkpoint(self.mix, h, use_reentrant=False))


@CASES.add("recomputed_adapters")
class RecomputedLora(Lora):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h


def root_recomputed(t: Trainer) -> None:
    x = t.batch()
    t.backward(loss_of(checkpoint(t.model, x, use_reentrant=False), x))


CASES.add("recomputed_root", root_recomputed)(Stack)
