"""Peak memory and time of what blocks save for their backward: ``python benchmarks/saved_tensors.py --rounds 7``.

A decoder is trained on the processor with everything kept, with each policy of recomputation, with a plan under three
budgets, and, beside them, with torch's own ``activation_memory_budget``, whose partitioner needs compiled blocks.
Variants take turns in one process, each with a model of its own. Peaks are the most bytes of malloc blocks beyond those
before the forward, looked at twice a millisecond; gradients of parameters are among them. Seconds are of a forward and
a backward, from the clock: the median, and the smallest and largest; and of all processors, the smallest, which other
work on the machine changes least. Prints a table of Markdown.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zeromesh
from heap import Heap
from zeromesh.apps.plan import saved
from zeromesh.apps.plan.saved import PlannedCost
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.saved_tensors import BlockPlan

LINE = "activation_checkpointing"
SHARES = (0.1, 0.3, 0.6)  # of the way from the least bytes that a plan needs to those of keeping everything
ROWS: dict[str, dict[str, Any]] = {
    "everything kept": {},
    "`full`": {"enabled": True},
    "`selective`": {"enabled": True, "granularity": "selective"},
    "`full`, inputs on host": {"enabled": True, "cpu_checkpointing": True},
}
TORCH = (0.75, 0.5, 0.25)  # values of activation_memory_budget


class Variant:
    """A model, what computes a forward and backward with it, and what that took."""

    def __init__(self, step: Callable[[], None], planned: float | None) -> None:
        self.step, self.planned = step, planned
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.peaks: list[int] = []

    def measure(self, heap: Heap) -> None:
        """Take a step for the time, and one for the bytes: what looks at these takes time itself."""
        gc.collect()
        start, worked = time.perf_counter(), time.process_time()
        self.step()
        self.seconds.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - worked)
        before = heap.live()
        with heap.watch() as peak:
            self.step()
        self.peaks.append(peak.bytes - before)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch", type=float, nargs="*", default=TORCH, help="values of activation_memory_budget")
    args = parser.parse_args()
    shape = ModelShape(
        architecture="llama", hidden_size=args.width, layers=args.layers, heads=args.width // 64, vocab_size=1024,
        sequence_length=args.tokens,
    )  # fmt: skip
    tokens = torch.randint(1024, (args.samples, args.tokens))
    heap, variants, plans = Heap(), dict[str, Variant](), list[PlannedCost]()
    plan = saved.planned_cost
    saved.planned_cost = lambda *given: plans.append(plan(*given)) or plans[-1]  # type: ignore[func-returns-value]

    def engine_step(section: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": args.samples, LINE: section,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        }  # fmt: skip
        data = TensorDataset(tokens, tokens)
        engine, *_ = zeromesh.initialize(model=Decoder(shape), config=config, training_data=data, loss_fn=_loss)

        def step() -> None:
            engine.backward(_loss(engine(tokens), tokens))
            engine.step()

        return step

    for name, section in ROWS.items():
        variants[name] = Variant(engine_step(section), None)
    engine_step("auto")  # for the costs
    costs = plans[-1].ranks[0].costs
    least, most = (costs.peak((each,) * args.layers) for each in (BlockPlan(), BlockPlan(keeps_all=True)))
    variants["everything kept"].planned, variants["`full`"].planned = most, least
    for share in SHARES:
        budget = (least + share * (most - least)) * 1.00001
        step = engine_step({"enabled": True, "granularity": "auto", "budget_gb": budget / 1e9})
        variants[f"`auto`, {budget / 1e6:.0f} MB"] = Variant(step, plans[-1].ranks[0].peak)
    for value in args.torch:
        variants[f"torch's `activation_memory_budget` {value:g}, compiled"] = Variant(
            _compiled(shape, tokens, value), None
        )
    for _ in range(2):
        for variant in variants.values():
            variant.step()
    for _ in range(args.rounds):
        for variant in variants.values():
            variant.measure(heap)
    print("| saved for the backward | planned, MB | measured, MB | seconds (smallest to largest) | of processors |")
    print("|---|---|---|---|---|")
    for name, variant in variants.items():
        planned = f"{variant.planned / 1e6:.1f}" if variant.planned is not None else ""
        times = f"{median(variant.seconds):.3f} ({min(variant.seconds):.3f} to {max(variant.seconds):.3f})"
        print(f"| {name} | {planned} | {median(variant.peaks) / 1e6:.1f} | {times} | {min(variant.processor):.3f} |")


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _compiled(shape: ModelShape, tokens: Tensor, budget: float) -> Callable[[], None]:
    """Return a step of a plain model whose blocks torch compiles under its own budget, in the first call."""
    torch.manual_seed(0)
    model: nn.Module = Decoder(shape)
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = torch.compile(_under_its_own_name(block.forward, f"budget_{budget}"))

    def step() -> None:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            _loss(model(tokens), tokens).backward()
        model.zero_grad()

    return step


def _under_its_own_name(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function of other code that calls ``forward``: torch compiles each code once for all models."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return FunctionType(call.__code__.replace(co_name=name), globals(), name, None, call.__closure__)


if __name__ == "__main__":
    main()
