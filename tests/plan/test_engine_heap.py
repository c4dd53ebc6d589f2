"""Live heap of a training step at the end of a forward and between micro-batches, as the planner foresees it."""

import ctypes
import gc

import pytest
import torch

import zeromesh
from heap import Heap
from models import Stack
from zeromesh.apps.plan.choose.layout_documents import GRANULARITY
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import NONE, Divided, ModelCost, Recompute, UnitCost
from zeromesh.apps.plan.predict.rank_memory import RankMemory, memory_of
from zeromesh.base.placement import ROWS

WIDTH, WORDS, DEPTH, TOKENS = 256, 512, 6, 2048
STREAM = 2 * TOKENS * WIDTH  # bytes of activations between blocks
AIM = 0.01  # the planner's error of the live heap


class Cost:
    """By hand: a block keeps its input and the output of tanh, twice as wide; the loss keeps the output in fp32.

    Products alone are the results of both layers, beside the input.
    """

    name = "net"

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        table = Divided(WORDS * WIDTH)
        block = UnitCost(
            "block", True, Divided(4 * WIDTH * WIDTH),
            saved={
                Recompute.NONE: Divided(3 * STREAM), Recompute.BLOCKS: Divided(STREAM),
                Recompute.PRODUCTS: Divided(4 * STREAM),
            },
        )  # fmt: skip
        units = (
            UnitCost("embed", False, table, resident=table),
            *[block] * DEPTH,
            UnitCost("loss", False, NONE, saved={Recompute.NONE: Divided(2 * STREAM)}),
        )
        return ModelCost(self.name, micro_batch, sequence, context, units)


def foreseen(number: int, recompute: Recompute) -> RankMemory:
    (rank,) = memory_of(Cost(), TOKENS, ParallelLayout(row=ROWS[number], accumulation=2, recompute=recompute))
    return rank


@pytest.mark.full
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 and Linux count")
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.BLOCKS, Recompute.PRODUCTS])
@pytest.mark.parametrize("number", [1, 3])
def test_the_heap_at_the_end_of_forwards(number: int, recompute: Recompute) -> None:
    heap = Heap()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": number},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "units": ["Block"],
        "activation_checkpointing": {
            "enabled": recompute is not Recompute.NONE,
            "granularity": GRANULARITY.get(recompute, "full"),
        },
    }
    for _ in range(2):  # what libraries allocate once is there from the second on
        gc.collect()
        before, found = heap.live(), []
        engine = zeromesh.initialize(model=Stack(WORDS, WIDTH, [2 * WIDTH] * DEPTH, bias=False), config=config)[0]
        for _ in range(4):
            loss = engine(torch.randint(WORDS, (1, TOKENS)))
            found.append(heap.live() - before)
            engine.backward(loss)
            del loss
            engine.step()
        engine.destroy()
        del engine
    rank = foreseen(number, recompute)
    ends = [moment for moment in rank.timeline if moment.label == "forward of loss"]
    expected = [moment.total - moment.bytes["temporary"] for moment in ends]
    assert found[2:] == pytest.approx(expected, rel=AIM)
