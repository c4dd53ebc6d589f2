"""Every hard case, under every row and budget of slots, against plain torch in one process on the same global batch."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hard_case import WIDTH, Case
from hard_cases import CASES
from harness import run_ranks
from run import Interruption, start_engine
from zeromesh.shard.parameters import slots
from zeromesh.shard.parameters.slots import Pool, Slot
from zeromesh.shard.parameters.unit import State, Unit

STEPS = 5
VARIANTS = {
    "row 0": (0, None),
    "row 1": (1, None),
    "row 2": (2, None),
    "row 3, 2 slots": (3, 2),
    "row 3, 3 slots": (3, 3),
    "row 3, all slots": (3, 99),
    "row 0, loss.backward()": (0, None),
    "row 2, loss.backward()": (2, None),
    "row 3, 2 slots, loss.backward()": (3, 2),
}
"""Name -> row, and slots of parameters and gradients. Some call ``loss.backward()`` and ``optimizer.step()``."""

IN_TORCHS_WORDS = tuple(name for name in VARIANTS if name.endswith("backward()"))

USUAL = "row 3, 2 slots"
"""The default run trains this one; the others are in the full matrix."""

Result = tuple[list[list[float]], dict[str, torch.Tensor]]
"""The losses of each step, and the model's state at the end."""


class Worker:
    def __init__(self, model: Any, module: nn.Module, rank: int, ranks: int) -> None:
        self.model, self.module, self.rank, self.ranks = model, module, rank, ranks
        self.step = 0
        self.losses: list[float] = []

    def begin(self, step: int) -> None:  # what is random, such as dropout, is the same however the model is trained
        self.step, self.losses = step, []
        torch.manual_seed(1000 * step + self.rank)

    def batch(self, number: int = 0, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10_000 * self.step + 100 * number + self.rank)
        return torch.randn(*(shape or (4, WIDTH)), generator=generator, dtype=torch.float64)


class Plain(Worker):  # plain torch: what DDP is defined to compute, one rank's share at a time
    def __init__(self, model: nn.Module, rank: int, ranks: int, micro_batches: int) -> None:
        super().__init__(model, model, rank, ranks)
        self.micro_batches = micro_batches

    def backward(self, loss: torch.Tensor, update: bool = True, **options: Any) -> None:
        self.losses.append(loss.item())
        (loss / (self.ranks * self.micro_batches)).backward(**options)

    def refused(self, message: str, action: Callable[[], object], only_if_sharded: bool = False) -> None:
        pass

    def breaks(self, action: Callable[[], object]) -> None:
        pass


class WithEngine(Worker):  # the engine; ``plainly``: by the lines that plain torch would have
    def __init__(self, model: Any, module: nn.Module, rank: int, ranks: int, plainly: bool) -> None:
        super().__init__(model, module, rank, ranks)
        self.plainly = plainly

    def backward(self, loss: torch.Tensor, update: bool = True, **options: Any) -> None:
        self.losses.append(loss.item())
        if not self.plainly:
            self.model.backward(loss, **options)
        else:
            loss.backward(**options)
        if update and self.plainly and self.model.gradient_accumulation_steps() == 1:
            self.model.optimizer.step()
            self.model.optimizer.zero_grad()
        elif update:
            self.model.step()

    def refused(self, message: str, action: Callable[[], object], only_if_sharded: bool = False) -> None:
        if only_if_sharded and not self.model.sharded.sharded:
            return
        with pytest.raises(RuntimeError, match=message):
            action()

    def breaks(self, action: Callable[[], object]) -> None:
        with pytest.raises(Interruption):
            action()


def make(build: Any) -> nn.Module:
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


@cache
def reference(name: str, ranks: int) -> tuple[list[list[list[float]]], dict[str, torch.Tensor]]:
    case = CASES[name]
    model = make(case.reference or case.model)
    kind, options = case.optimizer
    optimizer = getattr(torch.optim, kind)([p for p in model.parameters() if p.requires_grad], **options)
    workers = [Plain(model, rank, ranks, case.micro_batches) for rank in range(ranks)]
    losses: list[list[list[float]]] = [[] for _ in workers]
    for step in range(STEPS):
        before = _buffers(model)
        after = before
        for worker in workers:
            _restore(model, before)
            worker.begin(step)
            case.program(worker)
            losses[worker.rank].append(worker.losses)
            after = _buffers(model) if worker.rank == 0 else after
        _restore(model, after)
        optimizer.step()
        optimizer.zero_grad()
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, state | _buffers(model)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _restore(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, value.clone())


@contextmanager
def memory_full_of_nan() -> Iterator[None]:
    """Memory that holds nothing valid holds NaN: that of slots and of gradients' shards when it is allocated, slots
    when they are given back, and what is to be gathered of replicated parameters after an update."""
    allocate, give, begin_fetch = slots.allocate, Pool.give, Unit.begin_fetch

    def poison_new(nbytes: int, device: torch.device) -> torch.UntypedStorage:
        storage = allocate(nbytes, device)
        storage.fill_(0xFF)
        return storage

    def poison_given(pool: Pool, slot: Slot) -> None:
        slot.storage.fill_(0xFF)
        give(pool, slot)

    def poison_stale(unit: Unit, *args: Any) -> None:
        for flat in unit.flats if not unit.sharded else ():
            if flat.layout.trainable:
                flat.full[: flat.own.start].fill_(float("nan"))
                flat.full[flat.own.stop :].fill_(float("nan"))
        begin_fetch(unit, *args)

    with ExitStack() as patches:
        patches.enter_context(patch.object(slots, "allocate", poison_new))
        patches.enter_context(patch.object(Pool, "give", poison_given))
        patches.enter_context(patch.object(Unit, "begin_fetch", poison_stale))
        torch.use_deterministic_algorithms(True)  # fills what torch.empty gives, too
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def start(case: Case, variant: str) -> WithEngine:
    row, budget = VARIANTS[variant]
    kind, options = case.optimizer
    model = make(case.model)
    engine = start_engine(
        model,
        case.config,
        micro=1,
        accumulation=case.micro_batches,
        optimizer={"type": kind, "params": options},
        stage=row,
        slots={"parameter": budget, "gradient": budget},
    )
    case.prepare(engine)
    return WithEngine(engine, model, engine.data_rank, engine.data_size, variant in IN_TORCHS_WORDS)


def state(engine: Any) -> dict[str, torch.Tensor]:
    sharded = engine.sharded
    with sharded.gathered(sharded.parts):
        found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return found | _buffers(engine.module)


def train(name: str, variant: str) -> Result:
    case = CASES[name]
    worker = start(case, variant)
    losses = []
    for step in range(STEPS):
        worker.begin(step)
        case.program(worker)
        losses.append(worker.losses)
    result = losses, state(worker.model)
    units = worker.model.sharded.units[1:]
    assert all(unit.state is not State.FETCHED for unit in units if unit.slot is None and unit.sharded)
    worker.model.destroy()
    return result


def train_all(name: str, variants: list[str]) -> dict[str, Result]:
    results = {}
    with memory_full_of_nan():
        for variant in variants:
            try:
                results[variant] = train(name, variant)
            except BaseException as error:
                error.add_note(f"case {name}, {variant}")
                raise
    return results


def check(name: str, ranks: int, variants: list[str]) -> None:
    losses, expected = reference(name, ranks)
    tolerance = CASES[name].tolerance
    for rank, results in enumerate(run_ranks(train_all, ranks, name, variants)):
        for variant, (found_losses, found) in results.items():
            where = f"{name}, {variant}, rank {rank} of {ranks}"
            for step, (got, want) in enumerate(zip(found_losses, losses[rank], strict=True)):
                assert got == pytest.approx(want, rel=tolerance, abs=tolerance), f"{where}: losses of step {step}"
            assert found.keys() == expected.keys()
            for key, want_value in expected.items():
                assert found[key].dtype == want_value.dtype
                gap = (found[key] - want_value).abs() - tolerance * (1 + want_value.abs())
                assert bool((gap <= 0).all()), f"{where}: {key} is off by {float(gap.max())}"


@pytest.mark.some(56)
@pytest.mark.parametrize("name", CASES)
def test_every_hard_case_trains_as_plain_torch_does(name: str) -> None:
    check(name, 2, [USUAL])


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_the_rarer_variants_of_every_hard_case_train_so_too(name: str) -> None:
    check(name, 2, [variant for variant in VARIANTS if variant != USUAL])


@pytest.mark.parametrize("name", ["interleaved_towers", "loss_from_a_stashed_activation_on_one_rank"])
def test_hard_cases_train_so_in_torchs_own_words(name: str) -> None:
    check(name, 2, ["row 3, 2 slots, loss.backward()"])
