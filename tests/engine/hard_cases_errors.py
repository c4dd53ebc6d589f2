"""Hard cases: what is refused, or raises in the user's code; training goes on as if it had not happened."""

from collections.abc import Callable
from typing import Any

import torch

from hard_case import Block, Stack, Table, Trainer, loss_of, once
from run import Interruption

CASES = Table()


def reading_a_parameter_that_is_away(t: Trainer) -> None:
    weight, name = t.module.blocks[1].up.weight, "parameter blocks.1.up.weight is sharded"
    t.refused(name, weight.sum, only_if_sharded=True)
    x = t.batch()
    loss = loss_of(t.model(x), x)
    t.refused(name, weight.sum, only_if_sharded=True)
    t.refused(name, lambda: torch.nn.functional.linear(x, weight), only_if_sharded=True)
    t.refused(name, lambda: weight.data.sum(), only_if_sharded=True)
    assert weight.shape == (12, 6)
    assert weight.requires_grad
    t.backward(loss)
    t.refused(name, weight.tolist, only_if_sharded=True)


def update_between_forward_and_backward(t: Trainer) -> None:
    x = t.batch()
    early = loss_of(t.model(x), x)
    t.backward(loss_of(t.model(x), x))
    t.refused("updated between a forward and its backward", lambda: t.model.backward(early))


def saved_activation_changed_in_place(t: Trainer) -> None:
    t.module.spoil = True
    t.refused("modified by an inplace operation", lambda: t.model.backward(t.model(t.batch()).sum()))
    t.module.spoil = False
    once(t)


CASES.add("reading_a_parameter_that_is_away", reading_a_parameter_that_is_away)(Stack)
CASES.add("update_between_forward_and_backward", update_between_forward_and_backward)(Stack)


class Spoils(Block):
    def forward(self, x: torch.Tensor, spoil: bool) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        y = self.down(h)
        if spoil:
            h.mul_(2)  # the backward of tanh and of down need it as it was
        return x + y


class SpoilsInside(Stack):
    block = Spoils
    spoil = False

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            h = block(h, self.spoil and index == 1)
        return h


class SpoilsOutside(Stack):
    spoil = False

    def run(self, h: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](h)
        y = self.blocks[1](h)
        if self.spoil:
            h.mul_(2)
        return self.blocks[3](self.blocks[2](y))


CASES.add("saved_activation_changed_inside", saved_activation_changed_in_place)(SpoilsInside)
CASES.add("saved_activation_changed_outside", saved_activation_changed_in_place)(SpoilsOutside)


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        raise Interruption


class BreakingStack(Stack):
    breaks_before = -1
    backward_breaks_before = -1

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index == self.breaks_before:
                raise Interruption
            if index == self.backward_breaks_before:
                h = Breaking.apply(h)
            h = block(h)
        return h


def breaking(attribute: str, before: Callable[[Trainer], int]) -> Callable[[Trainer], None]:
    def program(t: Trainer) -> None:
        x = t.batch(1)
        setattr(t.module, attribute, before(t))
        t.breaks(lambda: t.model.backward(loss_of(t.model(x), x)))
        setattr(t.module, attribute, -1)
        once(t)

    return program


CASES.add("backward_raises", breaking("backward_breaks_before", lambda t: t.step % 4))(BreakingStack)
CASES.add("forward_raises", breaking("breaks_before", lambda t: t.step % 4))(BreakingStack)
