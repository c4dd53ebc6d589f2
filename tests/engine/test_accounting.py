"""Reported memory and traffic equal the formulas, what malloc holds, and what the kernel counts on the wire."""

import ctypes
import functools
import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh
from harness import on_ranks, run_ranks
from heap import Heap
from models import Block
from run import start_engine, train_step
from wire import sent_by_this_process, sent_over_loopback

linux = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 and Linux count")
WIDTH = 480
STEPS = 2


class Net(nn.Module):  # 10 million parameters: a root with an embedding and a frozen head, and blocks that grow
    def __init__(self, growth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1500, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 960 + growth * number) for number in range(8))
        self.head = nn.Linear(WIDTH, 333).requires_grad_(False)
        self.register_buffer("mask", torch.ones(70, 500))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


@dataclass(frozen=True)
class Case:
    row: int
    bf16: bool = False
    accumulation: int = 1
    replicas: int = 1
    parameter_slots: int | None = None

    def __str__(self) -> str:
        parts = [f"row {self.row}", "bf16" if self.bf16 else "fp32"]
        parts += [f"{self.accumulation} micro-batches"] if self.accumulation > 1 else []
        parts += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        return ", ".join(parts + ([f"{self.parameter_slots} slots"] if self.parameter_slots else []))

    @property
    def width(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def growth(self) -> int:
        """How much wider each block is than the one before. With more slots than two the blocks are alike.

        Slots fit the largest units, so where units differ a large one may have to wait for its slot, and with it the
        order in which units are evicted is no longer the best.
        """
        return 0 if self.parameter_slots else 64

    @property
    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {"stage": self.row},
            "mesh": {"replicate": self.replicas, "data": SHARDS},
            "slots": {"parameter": self.parameter_slots},
            "bf16": {"enabled": self.bf16},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "units": ["Block"],
            "communication": {"local_memory": False},  # so that the kernel counts what is sent
        }


SHARDS = 2
CASES = [
    *(Case(row, bf16) for row in range(4) for bf16 in (False, True)),
    *(Case(row, bf16=True, accumulation=3) for row in range(4)),
    Case(3, parameter_slots=5),
    Case(3, parameter_slots=8, accumulation=3),
]
HYBRID = [Case(1, replicas=2), Case(3, bf16=True, replicas=2)]
USUAL = {Case(0), Case(2, bf16=True, accumulation=3), Case(3, bf16=True)}


def others_in_full(cases: Sequence[Case]) -> list[Any]:
    return [case if case in USUAL else pytest.param(case, marks=pytest.mark.full) for case in cases]


def padded(sizes: list[int], width: int) -> int:
    """Elements of a flat buffer: every parameter starts at a multiple of 64 bytes, and all ranks have equal shares."""
    align = 64 // width
    together = sum(ceil(size / align) * align for size in sizes)
    return ceil(together / (align * SHARDS)) * align * SHARDS


@dataclass
class Sizes:
    """Elements of each unit's flat buffers (trainable, frozen) and of the parameters themselves; the root first."""

    trainable: list[int] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)
    parameters: int = 0


@functools.cache
def sizes(case: Case) -> Sizes:
    found, width = Sizes(), case.width
    with torch.device("meta"):
        model = Net(case.growth)
    blocks = list(model.blocks)
    inside = {parameter for block in blocks for parameter in block.parameters()}
    members = [[p for p in model.parameters() if p not in inside], *(list(block.parameters()) for block in blocks)]
    for unit in members:
        trained = [p.numel() for p in unit if p.requires_grad]
        rest = [p.numel() for p in unit if not p.requires_grad]
        found.trainable.append(padded(trained, width))
        found.frozen.append(padded(rest, width) if rest else 0)
        found.parameters += sum(trained)
    return found


def largest(values: list[int], count: int) -> int:
    return sum(sorted(values, reverse=True)[:count])


def expected_memory(case: Case) -> dict[str, int]:
    """Bytes per rank by state. Moments and step counts are left out: they belong to pieces, see the test."""
    size, width, wide = sizes(case), case.width, 4
    whole, frozen, share = sum(size.trainable), sum(size.frozen), sum(size.trainable) // SHARDS
    late = case.accumulation > 1 or not case.bf16
    gradient = {
        0: wide * whole,
        1: wide * whole if late else width * whole + wide * share,
        2: wide * share,
        3: wide * share,
    }[case.row]
    messages = 2 if case.row < 2 else 1
    slot = width * largest([units // SHARDS * (SHARDS - 1) for units in size.trainable], messages)
    if case.row >= 2:  # the embedding's gradient is used where autograd left it, beside two slots
        slot += width * (size.trainable[0] + largest(size.trainable[1:], 2))
    elif case.bf16 and (case.row == 0 or late):
        slot += width * largest(size.trainable, 3 if case.row == 0 else messages)
    if case.row == 3:
        units = [sum(both) for both in zip(size.trainable, size.frozen, strict=True)]
        slot += width * (units[0] + largest(units[1:], case.parameter_slots or 2))
    resting = {0: whole, 1: whole, 2: whole, 3: 0 if case.bf16 else share}[case.row]
    return {
        "parameter": width * (resting + frozen // (SHARDS if case.row == 3 else 1)),
        "gradient": gradient,
        "optimizer": (wide * (whole if case.row == 0 else share)) if case.bf16 else 0,
        "slot": slot,
        "buffer": 70 * 500 * 4,  # a buffer keeps its dtype in 16-bit runs
    }


def expected_at_rest(case: Case) -> int:
    size, most = sizes(case), expected_memory(case)
    if case.row < 3:  # all but the embedding's gradient, where that is as wide as sums are kept
        late = case.accumulation > 1 or case.row == 0
        return sum(most.values()) - (0 if case.bf16 and late and case.row < 2 else case.width * size.trainable[0])
    return most["parameter"] + most["optimizer"] + most["buffer"]


def expected_traffic(case: Case) -> int:
    size, width, m = sizes(case), case.width, case.accumulation
    whole = sum(size.trainable)
    if case.row < 2:
        elements = 2 * whole
    elif case.row == 2:
        elements = (m + 1) * whole
    else:
        units = [sum(both) for both in zip(size.trainable, size.frozen, strict=True)]
        kept = case.parameter_slots or 2
        # The root once. A micro-batch's forward finds the first units where the backward before it left them, and its
        # backward the last ones where its forward did; the first forward after an update finds none.
        forwards = sum(units[1:]) + (m - 1) * sum(units[1 + kept :])
        backwards = m * sum(units[1 : len(units) - kept])
        elements = units[0] + forwards + backwards + m * whole
    inside = elements * width * (SHARDS - 1) // SHARDS
    across = 2 * (whole // (1 if case.row == 0 else SHARDS)) * width * (case.replicas - 1) // case.replicas
    return inside + across


@dataclass
class Measured:  # one rank's; all bytes. ``sent`` is for ``STEPS`` updates, ``peak`` the most during one of them
    report: dict[str, Any]
    traffic: dict[str, dict[str, int]]
    resting: int
    peak: int
    sent: int
    loopback: list[int]
    pieces: list[tuple[str, int, int]]
    left: int


def update(engine: zeromesh.Engine, tokens: torch.Tensor) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        train_step(engine, engine(tokens))


def quiet(engine: zeromesh.Engine, tokens: torch.Tensor) -> None:
    if engine.config.zero_optimization.stage < 3:
        with torch.no_grad():
            engine(tokens)
    dist.barrier()


def measure_all(cases: list[Case]) -> list[Measured]:
    heap = Heap()
    first, second = ([measure(case, heap) for case in cases] for _ in range(2))
    # What Python and the libraries allocate once, as for a table of names that grows, is in one measurement at most.
    return [
        replace(two, resting=min(one.resting, two.resting), left=min(one.left, two.left))
        for one, two in zip(first, second, strict=True)
    ]


def measure(case: Case, heap: Heap) -> Measured:
    gc.collect()
    before = heap.live()
    engine, *_ = zeromesh.initialize(model=Net(case.growth), config=case.config)
    tokens = torch.randint(0, 1500, (2, 4))

    update(engine, tokens)
    quiet(engine, tokens)
    engine.traffic_report(reset=True)
    sent, loopback = sent_by_this_process(), []
    for _ in range(STEPS):
        dist.barrier()
        counted = sent_over_loopback()
        update(engine, tokens)
        quiet(engine, tokens)
        loopback.append(sent_over_loopback() - counted)
    sent, traffic = sent_by_this_process() - sent, engine.traffic_report()
    gc.collect()
    resting, report = heap.live() - before, engine.memory_report()
    with heap.watch() as peak:
        update(engine, tokens)
    pieces = [(piece.name, piece.start, piece.stop) for piece in engine.sharded.pieces.values() if piece is not None]
    engine.destroy()
    del engine
    gc.collect()
    return Measured(report, traffic, resting, peak.bytes - before, sent, loopback, pieces, heap.live() - before)


@functools.cache
def measured(replicas: int, usual: bool) -> dict[Case, list[Measured]]:
    cases = [case for case in (HYBRID if replicas > 1 else CASES) if (case in USUAL) == usual]
    by_rank = run_ranks(measure_all, SHARDS * replicas, cases, timeout=250)
    return {case: list(ranks) for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True)}


def results(case: Case) -> list[Measured]:
    return measured(case.replicas, case in USUAL)[case]


def by_state(report: dict[str, Any]) -> dict[str, int]:
    return {state: sum(report[state].values()) for state in ("parameter", "gradient", "optimizer", "slot", "buffer")}


@linux
@pytest.mark.parametrize("case", others_in_full([*CASES, *HYBRID]), ids=str)
def test_reported_memory_is_what_the_layout_takes(case: Case) -> None:
    whole = 0
    for rank in results(case):
        elements = sum(stop - start for _, start, stop in rank.pieces)
        whole += elements
        expected = expected_memory(case)
        expected["optimizer"] += 2 * 4 * elements + 4 * len(rank.pieces)
        assert by_state(rank.report) == expected
        assert rank.report["total"] == sum(expected.values())
    copies = len(results(case)) // (1 if case.row == 0 else SHARDS)
    assert whole == copies * sizes(case).parameters


def in_parameters(case: Case) -> float:
    """Bytes per parameter of the three states, by the formulas; sums of 16-bit gradients are kept in fp32."""
    n = SHARDS
    if not case.bf16:
        return {0: 4 + 4 + 8, 1: 4 + 4 + 8 / n, 2: 4 + 12 / n, 3: 16 / n}[case.row]
    # In row 3 parameters rest in their masters.
    if case.accumulation > 1:
        return {0: 2 + 4 + 12, 1: 2 + 4 + 12 / n, 2: 2 + 16 / n, 3: 16 / n}[case.row]
    return {0: 2 + 4 + 12, 1: 2 + 2 + 16 / n, 2: 2 + 16 / n, 3: 16 / n}[case.row]


@linux
@pytest.mark.parametrize("case", others_in_full(CASES), ids=str)
def test_the_three_states_take_what_the_formulas_say(case: Case) -> None:
    frozen = 333 * (WIDTH + 1) * case.width // (SHARDS if case.row == 3 else 1)
    for rank in results(case):
        states = sum(by_state(rank.report)[state] for state in ("parameter", "gradient", "optimizer")) - frozen
        assert states / sizes(case).parameters == pytest.approx(in_parameters(case), rel=0.01)


OBJECTS = 800_000
"""Bytes that the engine's own objects take at most, and rounding up to pages: 0.3 MB were found."""


@linux
@pytest.mark.parametrize("case", others_in_full([*CASES, *HYBRID]), ids=str)
def test_the_live_heap_at_rest_is_what_is_reported_without_what_is_there_in_a_step_only(case: Case) -> None:
    for rank in results(case):
        elements = sum(stop - start for _, start, stop in rank.pieces)
        assert 0 <= rank.resting - expected_at_rest(case) - 2 * 4 * elements <= OBJECTS
        assert rank.left <= OBJECTS / 2, "an engine that is gone leaves nothing"


@linux
@pytest.mark.parametrize("case", others_in_full([case for case in CASES if case.row == 3]), ids=str)
def test_a_step_takes_no_more_than_what_is_reported_and_its_activations(case: Case) -> None:
    """Beside the activations there are the gradients of one block as autograd makes them, before they are in their
    slot, and one matrix in fp32 that a kernel works with."""
    widest = 960 + case.growth * 7
    inputs_and_insides = sum(8 * (WIDTH + 960 + case.growth * number) for number in range(8)) * case.width
    temporaries = 2 * WIDTH * widest * case.width + WIDTH * widest * 4
    for rank in results(case):
        assert rank.peak <= rank.report["total"] + inputs_and_insides + temporaries + OBJECTS


@linux
@pytest.mark.parametrize("case", others_in_full([*CASES, *HYBRID]), ids=str)
def test_reported_traffic_is_what_the_formulas_say_and_what_the_kernel_counts(case: Case) -> None:
    for rank in results(case):
        moved = {key: entry["bytes"] for key, entry in rank.traffic.items() if not key.startswith("exchange")}
        assert sum(moved.values()) == STEPS * expected_traffic(case)
        assert sum(entry["bytes"] for entry in rank.traffic.values()) <= 1.01 * sum(moved.values())
        assert rank.sent == pytest.approx(sum(moved.values()), rel=0.03)
        axes = {key.partition("/")[2] for key in moved}
        assert axes == ({"data", "replicate"} if case.replicas > 1 else {"data"})


@linux
@pytest.mark.parametrize("case", others_in_full(CASES[:8]), ids=str)
def test_one_micro_batch_moves_two_or_three_times_the_parameters(case: Case) -> None:
    """2 P (N-1)/N elements for rows 0 to 2; for row 3 3 P (N-1)/N, less the root and two blocks that stay in slots."""
    size = sizes(case)
    elements = 2 * size.parameters
    if case.row == 3:
        elements = 3 * size.parameters - size.trainable[0] - sum(size.trainable[-2:]) + 333 * (WIDTH + 1)
    for rank in results(case):
        assert rank.sent / STEPS == pytest.approx(elements * case.width * (SHARDS - 1) / SHARDS, rel=0.03)


@linux
@pytest.mark.full
@pytest.mark.parametrize("case", [Case(row) for row in range(4)], ids=str)
def test_the_loopback_interface_carries_what_is_reported(case: Case) -> None:
    """It counts the whole machine's messages, so the quietest update tells."""
    both = results(case)
    quietest = min(min(rank.loopback) for rank in both)
    assert quietest == pytest.approx(2 * expected_traffic(case), rel=0.03)


@on_ranks(2)
def test_calls_are_counted_until_the_count_is_reset() -> None:
    case = Case(2)
    engine, *_ = zeromesh.initialize(model=Net(case.growth), config=case.config)
    engine.traffic_report(reset=True)
    nothing = engine.traffic_report()
    tokens = torch.randint(0, 1500, (2, 4))
    train_step(engine, engine(tokens))
    first = engine.traffic_report()
    nothing, first, again = nothing, first, engine.traffic_report(reset=True)
    assert nothing == {}
    assert first == again
    assert first["reduce_scatter/data"]["calls"] == first["all_gather/data"]["calls"] == 9
    assert first["exchange/world"]["calls"] == 1


@on_ranks(1)
def test_one_rank_moves_nothing_and_the_process_is_measured_beside_the_report() -> None:
    engine, *_ = zeromesh.initialize(model=Net(0), config={**Case(3).config, "mesh": {"data": 1}})
    tokens = torch.randint(0, 1500, (2, 4))
    engine.traffic_report(reset=True)
    train_step(engine, engine(tokens))
    assert not any(entry["bytes"] for entry in engine.traffic_report().values())
    report = engine.memory_report()
    measured = report["measured"]
    assert measured["peak"] >= measured["live"] > report["total"]
    assert measured["remainder"] == measured["peak"] - report["total"]
    assert set(report["parameter"]) == {"device"}


class Keeper(nn.Module):
    """Keeps a loss and an activation with their graphs, and, in a normalised weight, one with its leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.weight_norm(nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.inner(x)
        self.loss = self.kept.square().mean()
        return self.kept


@pytest.mark.some(3)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(2)
def test_an_engine_that_nobody_needs_gives_all_its_memory_back(row: int, bf16: bool) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.BatchNorm1d(64), Keeper())
    engine = start_engine(model, optimizer={"type": "AdamW"}, stage=row, bf16=bf16)
    for _ in range(2):
        loss = engine(torch.ones(4, 64, dtype=torch.bfloat16 if bf16 else torch.float32)).square().mean()
        train_step(engine, loss)
        loss = engine(torch.ones(4, 64, dtype=torch.bfloat16 if bf16 else torch.float32)).square().mean()
        engine.backward(loss)
        engine.zero_grad()
    with zeromesh.zero.GatheredParameters(list(model.parameters())):
        engine.gathered_state_dict()
    things = [weakref.ref(thing) for thing in (engine, engine.sharded, model, *model.parameters())]
    del engine, model, loss
    gc.collect()
    gone = [thing() is None for thing in things]
    assert all(gone)
