"""Speed of this rank's device: products of matrices by shape and dtype, kernels by size, and the smallest kernel.

All ranks measure at the same time, as they compute at the same time: those of one machine share its memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from zeromesh.base.kernels.measure import seconds_of
from zeromesh.base.machine import live_bytes, processor, read_lines

Shape = tuple[int, int, int]

# Rows, columns and sums of products: large and small ones, and ones that are thin in each dim. On a CPU they take at
# most a few milliseconds, so that of many tries one runs undisturbed on a busy machine.
SHAPES: tuple[Shape, ...] = (
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (32, 512, 512),
    (512, 32, 512),
    (512, 512, 32),
    (256, 1024, 256),
    (256, 256, 1024),
)
ACCELERATOR_SCALE = 8  # of these sizes: a product must fill the device
SLOWEST = 0.006  # seconds of a product; larger ones of a dtype that is so slow are left out

# Bytes of each of three tensors that a kernel reads or writes: nearly nothing, in a cache, and in memory.
KERNELS = (64, 1 << 19, 1 << 21, 1 << 23, 1 << 24, 1 << 25)

LENGTHS = (128, 512)  # tokens of the sequences between which fused attention is measured
ATTENTION = (2, 6, 64)  # samples, heads, and width of a head
LOGITS = (512, 8192)  # tokens and vocabulary of the loss

SECONDS = 4.0  # of the products; the kernels take a fraction of it
KERNEL_SECONDS = 0.004  # in which a rank repeats one of them, while the others do the same
LEAST_ROUNDS, MOST_ROUNDS = 6, 40
PAUSE_SECONDS = 0.02
TRIES = 3  # in a round
CHAIN = 40  # smallest kernels of a forward, one after the other

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure_speeds(
    device: torch.device, meet: Callable[[float], float] = float, seconds: float = SECONDS
) -> dict[str, Any]:
    """Return this rank's times, each kind once per round, in a form that JSON has; it takes about ``seconds``.

    ``meet`` waits for all ranks, and returns the largest value that a rank gave it.

    The keys: ``name``, ``memory`` and ``reserved`` of the device (``memory`` is None on a CPU, whose ranks share it),
    ``threads``, ``products`` as [dtype, rows, columns, sums, seconds of each round], ``kernels`` as [bytes read and
    written, seconds of each round], ``attention`` as [operations, bytes read and written, seconds of each round] of a
    forward and a backward of each length, ``loss`` as one of them, ``launch`` and ``smallest`` (seconds of each round
    of the smallest kernel within a forward and backward, and of the smallest product), and ``host`` as [seconds of a
    small copy, bytes per second to the device, and from it], None on a CPU.
    """
    reserved = live_bytes(device)  # of the process, before the tensors below
    torch.manual_seed(0)
    cases = list(_cases(device))
    sizes = _kernel_sizes(device)
    products: list[list[float]] = [[] for _ in cases]
    kernels: list[list[float]] = [[] for _ in sizes]
    launches, smallest = [], []
    chain, tiny = _chain(device), _Products(torch.float32, (8, 8, 8), device)
    passes = [*_attention(device), _loss(device)]
    fused: list[list[float]] = [[] for _ in passes]
    start, rounds, spent = time.perf_counter(), 0, 0.0
    while rounds < LEAST_ROUNDS or (spent < seconds and rounds < MOST_ROUNDS):
        for times, (_, _, case) in zip(products, cases, strict=True):
            times.append(case.seconds())
        for times, (_, _, run) in zip(fused, passes, strict=True):
            times.append(run())
        launches.append(chain())
        smallest.append(tiny.seconds())
        time.sleep(PAUSE_SECONDS)
        # All ranks decide alike when to end.
        rounds, spent = rounds + 1, meet(time.perf_counter() - start)
    for size, times in zip(sizes, kernels, strict=True):
        add = _addition(size, device)
        for _ in range(rounds):
            meet(0.0)  # or a rank could find a moment in which the others do not use the memory
            end = time.perf_counter() + KERNEL_SECONDS
            best = add()
            while time.perf_counter() < end:
                best = min(best, add())
            times.append(best)
    return {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor()["model"],
        "memory": torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None,
        "reserved": reserved if device.type == "cpu" else _context(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "products": [[dtype, *shape, times] for (dtype, shape, _), times in zip(cases, products, strict=True)],
        "kernels": [[3 * size, times] for size, times in zip(sizes, kernels, strict=True)],
        "attention": [[*sizes, times] for (*sizes, _), times in zip(passes, fused, strict=True)][:-1],
        "loss": [*passes[-1][:2], fused[-1]],
        "launch": launches,
        "smallest": smallest,
        "host": _host_link(device) if device.type == "cuda" else None,
    }


class _Products:
    """The three products that a linear layer's forward and backward make, of one shape and dtype."""

    def __init__(self, dtype: torch.dtype, shape: Shape, device: torch.device) -> None:
        rows, columns, sums = shape
        self.device = device
        self.inputs = torch.randn(rows, sums, device=device).to(dtype)
        self.weight = torch.randn(columns, sums, device=device).to(dtype)
        self.gradient = torch.randn(rows, columns, device=device).to(dtype)

    def seconds(self, tries: int = TRIES) -> float:
        """Return the mean of the best times of the three."""
        products = (
            lambda: functional.linear(self.inputs, self.weight),
            lambda: torch.mm(self.gradient, self.weight),
            lambda: torch.mm(self.gradient.t(), self.inputs),
        )
        return sum(min(_timed(product, self.device) for _ in range(tries)) for product in products) / len(products)


def _cases(device: torch.device) -> Iterator[tuple[str, Shape, _Products]]:
    """Yield dtype, shape and products of everything that is measured, each run once."""
    scale = 1 if device.type == "cpu" else ACCELERATOR_SCALE
    for name, dtype in DTYPES.items():
        if device.type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
            continue
        if name == "fp32" and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
            name = "tf32"
        rate = 0.0  # operations per second of the shape before
        for shape in (tuple(size * scale for size in shape) for shape in SHAPES):
            rows, columns, sums = shape
            operations = 2.0 * rows * columns * sums
            # Some processors have no instructions for a dtype, and take a hundred times as long.
            if rate and operations / rate > SLOWEST:
                continue
            case = _Products(dtype, (rows, columns, sums), device)
            case.seconds(tries=1)  # the first use of a library takes longer
            rate = operations / case.seconds()
            yield name, (rows, columns, sums), case


def _kernel_sizes(device: torch.device) -> list[int]:
    """Return the sizes of the tensors of kernels; three of the largest do not fit into any cache."""
    largest = KERNELS[-1] if device.type == "cpu" else 16 * KERNELS[-1]
    caches = [
        line for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size") for line in read_lines(file)
    ]
    if device.type == "cpu":
        largest = max([largest, *(int(line[:-1]) << 10 for line in caches if re.fullmatch(r"\d+K", line))])
    return [*KERNELS[:-1], largest]


def _addition(size: int, device: torch.device) -> Callable[[], float]:
    first, second, total = (torch.ones(size // 4, device=device) for _ in range(3))
    torch.add(first, second, out=total)
    return lambda: _timed(lambda: torch.add(first, second, out=total), device)


def _attention(device: torch.device) -> Iterator[tuple[float, float, Callable[[], float]]]:
    """Yield operations, bytes and what measures the seconds, of a forward and of a backward of each length."""
    scale = 1 if device.type == "cpu" else ACCELERATOR_SCALE
    batch, heads, width = ATTENTION
    for length in (length * scale for length in LENGTHS):
        shape = (batch, heads, length, width)
        query, key, value = (torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3))
        gradient, moved = torch.randn(shape, device=device).bfloat16(), float(query.nbytes)
        operations = 4.0 * batch * heads * length**2 * width

        forward = partial(functional.scaled_dot_product_attention, query, key, value)
        backward = partial(torch.autograd.grad, forward(), (query, key, value), gradient, retain_graph=True)
        backward()
        yield operations, 4 * moved, partial(_timed, forward, device)
        # Of the five products of a backward four are counted, as the scores are made again.
        yield 2 * operations, 8 * moved, partial(_timed, backward, device)


def _loss(device: torch.device) -> tuple[float, float, Callable[[], float]]:
    """Return operations, bytes and what measures the seconds, of the loss of logits in 16 bits, both passes."""
    tokens, vocabulary = LOGITS
    logits = torch.randn(tokens, vocabulary, device=device).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=device)

    def run() -> None:
        torch.autograd.grad(functional.cross_entropy(logits, labels), logits)

    run()
    # Reads of the logits, of their logarithms and of gradients, and writes of these, in four kernels.
    return 0.0, 8.0 * logits.nbytes, partial(_timed, run, device)


def _chain(device: torch.device) -> Callable[[], float]:
    """Return what measures the seconds per kernel of a forward and backward of the smallest kernels."""
    start = torch.ones(1, device=device, requires_grad=True)
    gradient = torch.ones(1, device=device)

    def run() -> None:
        value = start
        for _ in range(CHAIN):
            value = value * 1.0
        torch.autograd.grad(value, start, gradient)

    run()
    return lambda: _timed(run, device) / (2 * CHAIN)


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    return seconds_of(work, device, repeats=1 if device.type == "cpu" else 10)


def _context(device: torch.device) -> int:
    """Return the bytes of an accelerator that are no tensors: its context and libraries, all of them loaded."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def _host_link(device: torch.device) -> list[float]:
    size = 64 << 20
    there, here = torch.empty(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8).pin_memory()
    small = [_timed(lambda: there[:1].copy_(here[:1]), device) for _ in range(5)]
    up = [_timed(lambda: there.copy_(here, non_blocking=True), device) for _ in range(5)]
    down = [_timed(lambda: here.copy_(there, non_blocking=True), device) for _ in range(5)]
    return [min(small), size / min(up), size / min(down)]
