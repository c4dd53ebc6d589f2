"""Hard cases: weights used in several places, several forwards and backwards, unusual call graphs."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hard_case import (
    RECOMPUTE,
    WIDTH,
    Block,
    Dropping,
    Nested,
    Stack,
    Table,
    Trainer,
    accumulation,
    forwards_then_backwards,
    loss_of,
    two_views,
)

CASES = Table()

CASES.add("plain")(Stack)
CASES.add("momentum", optimizer=("SGD", {"lr": 0.1, "momentum": 0.9}))(Stack)


@CASES.add("one_unit")
class SingleLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


@CASES.add("tied_head")
@CASES.add("tied_head_accumulation", accumulation, micro_batches=3)
@CASES.add("tied_head_recomputed", config=RECOMPUTE)
class TiedHead(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.embedding(x) * self.scale))


@CASES.add("tied_blocks")
class TiedBlocks(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


@CASES.add("blocks_called_several_times")
@CASES.add("blocks_called_several_times_recomputed", config=RECOMPUTE)
@CASES.add("blocks_called_several_times_contrastive", two_views)
@CASES.add("blocks_called_several_times_forwards_then_backwards", forwards_then_backwards, micro_batches=2)
class CalledSeveralTimes(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks[:3]:
                h = block(h)
        return self.blocks[3](self.blocks[3](h))


@CASES.add("weights_used_outside_their_unit")
@CASES.add("weights_used_outside_their_unit_accumulation", accumulation, micro_batches=3)
class WeightsOutside(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        transposed = self.blocks[1].up.weight.t()  # a view, held while other units come and go
        h = super().run(h)
        h = h + F.linear(F.linear(h, self.blocks[0].up.weight), transposed).tanh()
        return h + F.linear(h, self.blocks[2].down.weight @ self.blocks[3].up.weight)


@CASES.add("view_taken_while_the_unit_is_there")
class ViewTaken(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](h)
        transposed = self.blocks[0].up.weight.t()
        for block in self.blocks[1:]:
            h = block(h)
        return h + (h @ transposed)[:, :WIDTH]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, *weights)
        return torch.linalg.multi_dot([x, *weights])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        x, *weights = context.saved_tensors
        gradients = []
        for index in reversed(range(len(weights))):
            left = torch.linalg.multi_dot([x, *weights[:index]]) if index else x
            gradients.append(left.t() @ gradient)
            gradient = gradient @ weights[index].t()
        return (gradient, *reversed(gradients))


@CASES.add("one_node_for_the_weights_of_all_units")
class OneNode(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        h = super().run(h)
        first, second, third, fourth = self.blocks
        return h + Product.apply(h, first.down.weight, second.up.weight, third.down.weight, fourth.up.weight).tanh()


@CASES.add("products_of_weights")
class Products(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        h = super().run(h)
        left = [block.down.weight for block in self.blocks]
        right = [block.up.weight for block in reversed(self.blocks)]
        products = [a @ b for a, b in zip(left, right, strict=True)]
        everything = torch.cat([p.flatten() for p in self.parameters()])
        return torch.linalg.multi_dot([h, *products]).tanh() + h + everything.square().mean()


class ReturnsItsWeight(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), self.up.weight.t()


@CASES.add("block_that_returns_its_weight")
class Returned(Stack):
    block = ReturnsItsWeight

    def run(self, h: torch.Tensor) -> torch.Tensor:
        weights = []
        for block in self.blocks:
            h, weight = block(h)
            weights.append(weight)
        for weight in weights:
            h = h + F.linear(h, weight @ weight.t()).tanh()
        return h


@CASES.add("penalty_on_all_weights", lambda t: t.backward(t.model(t.batch())))
class Penalty(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(super().forward(x), x)
        return loss + 0.1 * sum((p * p).sum() for p in self.parameters())


def forwards_then_backwards_reversed(t: Trainer) -> None:
    x, y = t.batch(0), t.batch(1)
    first, second = loss_of(t.model(x), x), loss_of(t.model(y), y)
    t.backward(second)
    t.backward(first)


def unequal_accumulation(t: Trainer) -> None:
    for number, size in enumerate((2, 7, 1)):
        x = t.batch(number, size, WIDTH)
        t.backward(loss_of(t.model(x), x))


def several_backwards_in_one_micro_batch(t: Trainer) -> None:
    for number in range(3):
        x = t.batch(number)
        t.backward(loss_of(t.model(x), x), update=number == 2)


def retain_graph(t: Trainer) -> None:
    x = t.batch()
    y = t.model(x)
    t.backward(loss_of(y, x), retain_graph=True)
    t.backward(y.square().mean())


def same_loss_twice(t: Trainer) -> None:
    x = t.batch()
    loss = loss_of(t.model(x), x)
    t.backward(loss, retain_graph=True)
    t.backward(loss)


def gradient_penalty(t: Trainer) -> None:
    x = t.batch().requires_grad_()
    loss = loss_of(t.model(x), x.detach())
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    t.backward(loss + (slope.norm() - 1).square())


def gradient_of_an_input(t: Trainer) -> None:
    """Adversarial training: a gradient of the input first, the training step on what it gives."""
    x = t.batch().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(t.model(x), x.detach()), x)
    x = (x + 0.1 * slope.sign()).detach()
    t.backward(loss_of(t.model(x), x))


def evaluation_in_between(t: Trainer) -> None:
    x = t.batch()
    loss = loss_of(t.model(x), x)
    with torch.no_grad():
        weight = 1 + t.model(t.batch(1)).mean()
    t.backward(loss * weight)


def evaluation_mode_in_between(t: Trainer) -> None:
    x = t.batch()
    loss = loss_of(t.model(x), x)
    t.model.eval()
    with torch.inference_mode():
        weight = float(1 + t.model(t.batch(1)).mean())
    t.model.train()
    t.backward(loss * weight)


def evaluation_before(t: Trainer) -> None:
    x = t.batch()
    with torch.no_grad():
        target = t.model(x)
    t.backward((t.model(x + 1) - target).square().mean())


def dropped_forward(t: Trainer) -> None:
    x = t.batch()
    t.model(x + 2)
    unused = t.model(x)
    loss = loss_of(t.model(x + 1), x)
    t.backward(loss)
    del unused


class DroppingStack(Stack):
    block = Dropping


CASES.add("dropout")(DroppingStack)
CASES.add("contrastive", two_views)(Stack)
CASES.add("forwards_then_backwards", forwards_then_backwards, micro_batches=2)(Stack)
CASES.add("forwards_then_backwards_reversed", forwards_then_backwards_reversed, micro_batches=2)(Stack)
CASES.add("accumulation", accumulation, micro_batches=3)(Stack)
CASES.add("accumulation_of_unequal_batches", unequal_accumulation, micro_batches=3)(Stack)
CASES.add("several_backwards_in_one_micro_batch", several_backwards_in_one_micro_batch)(Stack)
CASES.add("retain_graph", retain_graph, micro_batches=2)(Stack)
CASES.add("retain_graph_tied_head", retain_graph, micro_batches=2)(TiedHead)
CASES.add("same_loss_twice", same_loss_twice, micro_batches=2)(Stack)
CASES.add("gradient_penalty", gradient_penalty)(Stack)
CASES.add("gradient_penalty_tied_blocks", gradient_penalty)(TiedBlocks)
CASES.add("gradient_penalty_blocks_called_several_times", gradient_penalty)(CalledSeveralTimes)
CASES.add("gradient_of_an_input", gradient_of_an_input)(Stack)
CASES.add("evaluation_in_between", evaluation_in_between)(Stack)
CASES.add("evaluation_mode_in_between", evaluation_mode_in_between)(DroppingStack)
CASES.add("evaluation_before", evaluation_before)(Stack)
CASES.add("dropped_forward", dropped_forward)(Stack)


@CASES.add("gradient_penalty_inside_the_forward")
class PenaltyInside(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + 0.1 * slope


@CASES.add("u_net")
@CASES.add("u_net_recomputed", config=RECOMPUTE)
class UNet(Stack):
    depth = 6

    def run(self, h: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.blocks[:3]:
            h = block(h)
            skips.append(h)
        for block in self.blocks[3:]:
            h = block(h) + skips.pop()
        return h


@CASES.add("two_towers")
class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Stack(), Stack()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def towers(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.image(x), self.text(x.flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.towers(x)
        return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t() * self.temperature @ x


@CASES.add("interleaved_towers")
class InterleavedTowers(TwoTowers):
    def towers(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x * self.image.scale, x.flip(0) * self.text.scale
        for left, right in zip(self.image.blocks, self.text.blocks, strict=True):
            a, b = left(a), right(b)
        return self.image.head(a), self.text.head(b)


@CASES.add("interleaved_calls")
class InterleavedCalls(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        other = h.flip(0)
        for block in self.blocks:
            h, other = block(h), block(other)
        return h * other.tanh()


@CASES.add("used_in_another_order_than_registered")
class Reversed(Stack):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            h = block(h)
        return h


@CASES.add("another_order_in_every_step", lambda t: _in_order(t))
@CASES.add("a_graph_that_one_rank_keeps", lambda t: _with_another_graph_alive(t))
class AnyOrder(Stack):
    order = (0, 1, 2, 3)

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            h = self.blocks[index](h)
        return h


def _with_another_graph_alive(t: Trainer) -> None:
    """One rank keeps what it computed, for a report perhaps, and the graph with it."""
    reported = t.model(t.batch(1)).mean()
    t.module.kept = [reported] if t.rank == 0 else []
    del reported
    _in_order(t)


def _in_order(t: Trainer) -> None:
    t.module.order = ((0, 1, 2, 3), (3, 1, 2, 0), (1, 1, 3), (2, 3, 0, 1), (0, 2, 1, 3))[t.step]
    x = t.batch()
    t.backward(loss_of(t.model(x), x))


@CASES.add("nested_units", config={"units": ["Nested", "Block"]})
@CASES.add("nested_units_to_the_leaves", config={"units": ["Nested", "Block", "*.up"]})
@CASES.add("nested_unit", config={"units": ["Nested", "blocks.1.inner.0"]})
@CASES.add("nested_units_accumulation", accumulation, micro_batches=3, config={"units": ["Nested", "Block"]})
@CASES.add(
    "nested_units_recomputed",
    config={"units": ["Nested", "Block"], "activation_checkpointing": {"enabled": True, "targets": ["Nested"]}},
)
@CASES.add(
    "nested_units_recomputed_inside",
    config={"units": ["Nested", "Block"], "activation_checkpointing": {"enabled": True, "targets": ["Block"]}},
)
class NestedStack(Stack):
    block = Nested


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner[1](self.inner[0](x))


@CASES.add("nested_units_without_parameters_of_their_own", config={"units": ["Empty", "Block"]})
class EmptyStack(Stack):
    block = Empty
