"""What the hard cases are made of: a small model, the ordinary step, and the description of a case.

A program runs one step of training on one rank. It talks to a ``Trainer``, behind which is either plain torch
or the engine; ``test_hard_cases.py`` compares what the two end up with.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

import models

WIDTH = 6
RECOMPUTE = {"activation_checkpointing": {"enabled": True}}


class Trainer(Protocol):
    """One rank of a training run.

    Attributes:
        model: what is called: the engine, or the model itself.
        module: the model itself.
        rank, ranks: which share of the global batch this is.
        step: number of the step, from 0.
    """

    model: Any
    module: Any
    rank: int
    ranks: int
    step: int

    def batch(self, number: int = 0, *shape: int) -> torch.Tensor:
        """Input ``number`` of this rank and step, normally distributed; (4, WIDTH) unless a shape is given."""

    def backward(self, loss: torch.Tensor, update: bool = True, **options: Any) -> None:
        """Differentiate; ``update`` ends the micro-batch, and after the last one of them the parameters are updated."""

    def refused(self, message: str, action: Callable[[], object], only_if_sharded: bool = False) -> None:
        """Require that the engine refuses the action with a message, and is as before. Plain torch does not try it."""

    def breaks(self, action: Callable[[], object]) -> None:
        """Require that the action raises ``Interruption``, and leaves nothing behind."""


Program = Callable[[Trainer], None]


def loss_of(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a target that depends on the input, so that every output element has a gradient of its own."""
    return (output - x.roll(1, -1).cos()).square().mean()


def once(t: Trainer) -> None:
    """Take the ordinary step."""
    x = t.batch()
    t.backward(loss_of(t.model(x), x))


def accumulation(t: Trainer) -> None:
    for number in range(3):
        x = t.batch(number)
        t.backward(loss_of(t.model(x), x))


def two_views(t: Trainer) -> None:
    """Two forwards and one backward, as in contrastive learning."""
    x = t.batch(0)
    a, b = t.model(x), t.model(x + 0.1 * t.batch(1))
    similar = nn.functional.normalize(a, dim=-1) @ nn.functional.normalize(b, dim=-1).t()
    t.backward(nn.functional.cross_entropy(similar * 3, torch.arange(4)))


def forwards_then_backwards(t: Trainer) -> None:
    x, y = t.batch(0), t.batch(1)
    first, second = loss_of(t.model(x), x), loss_of(t.model(y), y)
    t.backward(first)
    t.backward(second)


@dataclass(frozen=True)
class Case:
    """One hard case.

    Attributes:
        model: makes the model, in float64, the same each time.
        program: one step on one rank.
        micro_batches: how many calls of ``backward`` end a micro-batch in a step.
        config: further keys of the engine's configuration.
        prepare: called with the engine before training.
        reference: makes the model for plain torch, where it has to be another one.
        optimizer: name and arguments.
        tolerance: relative and absolute, of losses and parameters.
    """

    model: Callable[[], nn.Module]
    program: Program = once
    micro_batches: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda engine: None
    reference: Callable[[], nn.Module] | None = None
    optimizer: tuple[str, dict[str, float]] = ("AdamW", {"lr": 0.03, "weight_decay": 0.1})
    tolerance: float = 1e-9


class Table(dict[str, Case]):
    """Cases by name."""

    def add(self, name: str, program: Program = once, **options: Any) -> Callable[[Any], Any]:
        """Put a model into the table, as a decorator."""

        def put(model: Any) -> Any:
            assert name not in self, name
            self[name] = Case(model, program, **options)
            return model

        return put


class Block(models.Block):
    """(batch, WIDTH) -> the same."""

    def __init__(self) -> None:
        super().__init__(WIDTH)


class Dropping(Block):
    """Draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.drop(super().forward(x))


class Stack(nn.Module):
    """A scale, which belongs to the root, blocks, and a head."""

    block: Callable[[], nn.Module] = Block
    depth = 4

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.run(x * self.scale))


class Nested(nn.Module):
    """Blocks inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(Block() for _ in range(2))
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.before(x))
        for inner in self.inner:
            h = inner(h)
        return x + self.after(h)
