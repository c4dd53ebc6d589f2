"""Processor time of a head's loss in chunks, beside torch's own: ``python benchmarks/loss_chunks.py``.

Forward and backward of ``linear_cross_entropy`` with chunks of so many tokens, of ``F.linear_cross_entropy`` with its
own chunks where torch has it (2.13), and of ``F.cross_entropy`` on all logits. Times are of the processor, not of the
clock, so that a busy machine can be measured: the least of some repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromesh.parallel.head.linear_cross_entropy import chunk_bytes, linear_cross_entropy


def seconds(loss: Callable[[], Tensor], operands: list[Tensor], repetitions: int) -> float:
    """Return the processor time of a forward and a backward."""
    best = float("inf")
    for _ in range(repetitions + 1):
        start = time.process_time()
        torch.autograd.grad(loss(), operands)
        best = min(best, time.process_time() - start)
    return best


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.width, dtype=dtype, requires_grad=True)
    weight = (torch.randn(args.vocabulary, args.width) / args.width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(args.vocabulary, (args.tokens,))
    own = chunk_bytes(args.vocabulary, args.width) // (4 * args.vocabulary)
    print(
        f"tokens {args.tokens}, width {args.width}, vocabulary {args.vocabulary}, {args.dtype}; own chunk: {own} tokens"
    )
    cases: dict[str, Callable[[], Tensor]] = {
        f"linear_cross_entropy, {size} tokens": lambda size=size: linear_cross_entropy(  # type: ignore[misc]
            hidden, weight, labels, chunk=size
        )
        for size in (32, 128, 512, args.tokens)
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        cases["F.linear_cross_entropy, its own chunks"] = lambda: F.linear_cross_entropy(  # type: ignore[attr-defined]
            hidden, weight, labels, options=options
        )
    cases["F.cross_entropy, all logits"] = lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels)
    for name, loss in cases.items():
        print(f"{seconds(loss, [hidden, weight], args.repetitions):7.2f} s  {name}")


if __name__ == "__main__":
    main()
