"""Blocks that are computed again for the backward: silent errors of other systems, and that ours are those of one run.

Frozen weights whose bits are no numbers are here, too: they travel to the ranks that compute with them.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import Layers, Parted
from museum import Weights, gap, require, results_of, start
from run import train_step

KINDS = {
    "dropout": lambda: nn.Dropout(0.4),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "random slopes": nn.RReLU,
}


def build(kind: str) -> Layers:
    torch.manual_seed(0)
    return Layers((Parted(6, KINDS[kind]()) for _ in range(2)), nn.Linear(6, 1)).double()


SAMPLES = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
"""All of them on both ranks, so that their statistics are those of one process."""


def train(kind: str) -> Weights:
    engine = start(build(kind), activation_checkpointing={"enabled": True}, zero_optimization={"stage": 3})
    torch.manual_seed(2)
    train_step(engine, engine(SAMPLES))
    return engine.state_dict()


class Packed(nn.Module):
    """A layer with frozen weights that are bits in the form of numbers, some of which are not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.packed = nn.Parameter(BITS.view(torch.bfloat16).clone(), requires_grad=False)
        self.bytes = nn.Parameter(BITS.view(torch.uint8).clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        share = self.packed.view(torch.int16).double().mean() / 2**11
        return self.linear(x).square().mean() * (2 + share + self.bytes.double().mean() / 256)


BITS = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32).to(torch.int16)


def packed() -> Packed:
    torch.manual_seed(0)
    model = Packed()
    model.linear.double()
    return model


def train_packed() -> tuple[float, Tensor, Tensor]:
    engine = start(packed(), zero_optimization={"stage": 3})
    loss = engine(SAMPLES[:, :2])
    train_step(engine, loss)
    state = engine.state_dict()
    return float(loss.detach()), state["packed"].view(torch.int16), state["bytes"].view(torch.int16)


def program() -> dict[str, Any]:
    return {kind: train(kind) for kind in KINDS} | {"packed": train_packed()}


def plain(kind: str, **options: Any) -> Weights:
    """Train in one process, with blocks that are computed again as the options of torch's function say."""
    model = build(kind)
    if options:
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False, **options)
    torch.manual_seed(2)
    model(SAMPLES).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return model.state_dict()


def test_a_block_that_is_computed_again_drops_the_same_entries() -> None:
    for found in results_of(program):
        require(found["dropout"], plain("dropout"), plain("dropout", preserve_rng_state=False))


def test_a_block_that_is_computed_again_counts_its_batch_once() -> None:
    right, wrong = plain("batch norm"), plain("batch norm", preserve_rng_state=True)
    for found in results_of(program):
        require(found["batch norm"], right, wrong)
        assert int(found["batch norm"]["blocks.0.part.num_batches_tracked"]) == 1


class Undrawn(nn.RReLU):
    """Has slopes in the forward, but none in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach() + x.relu() - x.relu().detach()


def test_random_slopes_are_drawn_once() -> None:
    right = plain("random slopes")
    with patch.dict(KINDS, {"random slopes": Undrawn}):
        wrong = plain("random slopes")
    for found in results_of(program):
        require(found["random slopes"], right, wrong)


def test_bits_of_frozen_weights_are_not_taken_for_numbers() -> None:
    # Numbers that are none became one and the same of them where they were converted.
    passed = BITS.view(torch.bfloat16).masked_fill(BITS.view(torch.bfloat16).isnan(), float("nan")).view(torch.int16)
    assert gap(passed, BITS) > 0
    model = packed()
    right = float(model(SAMPLES[:, :2]).detach())
    with torch.no_grad():
        model.packed.view(torch.int16).copy_(passed)
    for loss, bits, raw in (found["packed"] for found in results_of(program)):
        require(loss, right, float(model(SAMPLES[:, :2]).detach()))
        assert torch.equal(bits, BITS)
        assert torch.equal(raw, BITS)
