"""Copies between a device and the host: whoever uses what is copied waits for it, and nobody else does."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zeromesh
from harness import on_ranks, run_ranks
from late_copies import LateStreams
from models import Stack
from zeromesh.comm.collectives import Pending
from zeromesh.shard import sharded
from zeromesh.shard.gradients import gradient_memory
from zeromesh.shard.gradients.gradient import Arrival, Gradient
from zeromesh.shard.gradients.gradient_memory import HostSums
from zeromesh.shard.parameters import flat
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.parameters.slots import Pool, Slot
from zeromesh.shard.store.link import DONE, Copy, Link
from zeromesh.shard.store.memory import Staging

WIDTH, UPDATES = 24, 3
HOST = {"device": "cpu"}
ZERO: dict[str, dict[str, Any]] = {
    "row 1": {"stage": 1, "offload_optimizer": HOST},
    "row 2": {"stage": 2, "offload_optimizer": HOST},
    "row 3": {"stage": 3, "offload_optimizer": HOST},
    "row 3, parameters": {"stage": 3, "offload_param": HOST},
    "row 3, all": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
    "row 3, early": {"stage": 3, "offload_optimizer": {**HOST, "update_during_backward": 1.0}},
}
OPTIMIZERS = {"native": {"type": "AdamW", "params": {"lr": 1e-2}}, "torch's": {"type": "Lamb", "params": {"lr": 1e-2}}}


def start(zero: dict[str, Any], accumulation: int = 1, bf16: bool = False, **more: Any) -> zeromesh.Engine:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": OPTIMIZERS["native"],
        "bf16": {"enabled": bf16},
        "units": ["Embedding", "Block"],
        **more,
    }
    model = Stack(16, WIDTH, [2 * WIDTH] * 4)
    for block in model.blocks:
        block.up.bias.requires_grad_("frozen" not in zero)
    return zeromesh.initialize(model=model, config={**config, "zero_optimization": _plain(zero)})[0]


def _plain(zero: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in zero.items() if key != "frozen"}


def train(engine: zeromesh.Engine, accumulation: int) -> None:
    for number in range(UPDATES * accumulation):
        tokens = torch.arange(8).view(1, 8) + 8 * engine.mesh.rank + 3 * number
        engine.backward(engine(tokens % 16))
        engine.step()


Outcome = tuple[dict[str, torch.Tensor], int]
"""Parameters and masters, and how many copies were begun."""


def result(streams: LateStreams | None, zero: dict[str, Any], accumulation: int, **more: Any) -> Outcome:
    with simulated(streams):
        engine = start(zero, accumulation, **more)
        train(engine, accumulation)
        found = {name: value.clone() for name, value in engine.gathered_state_dict().items()}
        trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        for name, parameter in trained:
            master = zeromesh.zero.safe_get_full_fp32_param(parameter)
            found[f"master of {name}"] = master.clone()
        engine.destroy()
    return found, 0 if streams is None else streams.copies


@contextmanager
def simulated(streams: LateStreams | None) -> Iterator[None]:
    give = Pool.give

    def poison(pool: Pool, slot: Slot) -> None:
        slot.storage.fill_(0xFF)
        give(pool, slot)

    with ExitStack() as patches:
        if streams is not None:
            patches.enter_context(patch.object(sharded, "Link", partial(Link, streams=streams)))
            patches.enter_context(patch.object(Pool, "give", poison))
        yield


def both(zero: dict[str, Any]) -> list[tuple[Outcome, Outcome]]:
    cases: list[tuple[int, dict[str, Any]]] = [
        (accumulation, {"bf16": bf16, "optimizer": OPTIMIZERS[optimizer]})
        for accumulation in (1, 2, 3)
        for bf16 in (False, True)
        for optimizer in (OPTIMIZERS if accumulation == 1 else ("native",))
    ]
    return [
        (result(None, zero, accumulation, **more), result(LateStreams(), zero, accumulation, **more))
        for accumulation, more in cases
    ]


SOME = ["row 2", "row 3", "row 3, parameters", "row 3, early"]
USUAL = [name for name in [*ZERO, "row 3, all, some frozen"] if name not in SOME]


@pytest.mark.some(1)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(name, marks=pytest.mark.full) for name in SOME)])
def test_late_copies_train_to_the_same_bits(name: str, ranks: int) -> None:
    zero = {**ZERO["row 3, all"], "frozen": True} if "frozen" in name else ZERO[name]
    for rank in run_ranks(both, ranks, zero):
        for number, ((expected, _), (found, copies)) in enumerate(rank):
            assert copies > UPDATES, number
            assert expected.keys() == found.keys()
            different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
            assert not different, (number, different)


def without_waits_for_buffers() -> Any:
    def take(sums: HostSums, nbytes: int) -> Any:
        if sums._arriving:
            sums._buffers.give(sums._arriving.popleft()[1])
        return take_arrival(sums, nbytes)

    take_arrival = HostSums._take
    return patch.object(HostSums, "_take", take)


def without_waits_for_staged_parameters() -> Any:
    send = Staging.send

    def forget(staging: Staging, staged: torch.Tensor, target: torch.Tensor) -> Copy:
        copy = send(staging, staged, target)
        staging._buffers[-1] = staging._buffers[-1][0], DONE
        return copy

    return patch.object(Staging, "send", forget)


def without_waits_before_slots_go_back() -> Any:
    leaving = gradient_memory._Leaving
    return patch.object(gradient_memory, "_Leaving", lambda copy, pool, slot: leaving(DONE, pool, slot))


MUTATIONS: dict[str, tuple[Callable[[], Any], int, str, int]] = {
    "of the host": (lambda: patch.object(Copy, "wait", lambda copy: None), 1, "row 2", 1),
    "of the stream": (lambda: patch.object(Copy, "order", lambda copy: None), 1, "row 3, all", 1),
    "for what is computed": (lambda: patch.object(LateStreams, "current", lambda s: s.to_host), 1, "row 3, all", 1),
    "before shards are used": (lambda: patch.object(HostSums, "land", lambda sums: None), 1, "row 2", 1),
    "before slots go back": (without_waits_before_slots_go_back, 1, "row 2", 1),
    "for buffers": (without_waits_for_buffers, 2, "row 3", 2),
    "for what is fetched": (lambda: patch.object(flat, "Pending", lambda then: Pending()), 1, "row 3, all", 1),
    "for new parameters": (lambda: patch.object(Flat, "expect", lambda flat, copy: None), 1, "row 3", 1),
    "for staged parameters": (without_waits_for_staged_parameters, 1, "row 1", 1),
    "of collectives": (lambda: patch.object(Link, "behind", lambda link: nullcontext()), 2, "row 3, all", 1),
}
"""Which wait is left out, how, and where it shows: on how many ranks, in which row, with how many micro-batches."""


def mutated(left_out: str | None, name: str, accumulation: int) -> Outcome | str:
    with nullcontext() if left_out is None else MUTATIONS[left_out][0]():
        try:
            return result(LateStreams(), ZERO[name], accumulation)
        except (AssertionError, FloatingPointError) as error:
            return str(error)


@pytest.mark.some(4)
@pytest.mark.parametrize("left_out", MUTATIONS)
def test_a_wait_that_is_left_out_is_noticed(left_out: str) -> None:
    _, ranks, *case = MUTATIONS[left_out]
    whole, cut = run_ranks(mutated, ranks, None, *case)[0], run_ranks(mutated, ranks, left_out, *case)[0]
    assert not isinstance(whole, str), whole
    assert isinstance(cut, str) or any(not torch.equal(value, cut[0][name]) for name, value in whole[0].items())


def waits(zero: dict[str, Any]) -> list[tuple[int, int]]:
    streams, found = LateStreams(), []
    with simulated(streams):
        engine = start(zero, 2)
        train(engine, 2)
        for _ in range(2):
            wait, before = Copy.wait, streams.copies
            with patch.object(Copy, "wait", autospec=True, side_effect=wait) as waited:
                engine.backward(engine(torch.arange(8).view(1, 8)))
            waits = [call for call in waited.call_args_list if call.args[0]._event is not None]
            found.append((len(waits), streams.copies - before))
            engine.step()
        engine.destroy()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["row 2", "row 3", "row 3, all"])
def test_the_host_waits_for_no_copy_but_for_memory_to_add_the_next_sums(name: str, ranks: int) -> None:
    units = 5
    for rank in run_ranks(waits, ranks, ZERO[name]):
        (first, copies), (second, more) = rank
        assert copies >= units
        assert more >= units
        assert first == 0
        assert second == 2 * (units - gradient_memory.ARRIVALS)  # for a sum, and for the one before that it is added to


def test_a_sum_is_added_after_those_that_came_before_it() -> None:
    streams, shard = LateStreams(), torch.empty(3)
    link, sums, before = Link(torch.device("cpu"), streams), [torch.full((3,), 2.0**n) for n in range(3)], None
    for number, total in enumerate(sums):
        landing = torch.empty(3)
        before = Arrival(link.to_host(landing, total), landing, shard, number > 0, before)
    before.wait()
    before.wait()
    assert shard.tolist() == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@on_ranks("ranks")
def test_listeners_are_told_of_each_shard_once_it_is_complete(ranks: int, late: bool) -> None:
    zero = ZERO["row 3, all"]
    found: list[tuple[list[str], bool]] = []
    with simulated(LateStreams() if late else None):
        engine = start(zero, 2)
        shards: dict[str, torch.Tensor] = {}

        def listen(gradient: Gradient) -> None:
            assert (gradient.landed is not None) == late
            if gradient.landed is not None:
                thread = Thread(target=gradient.landed.wait)
                thread.start()
                thread.join()
            shards[gradient.unit] = gradient.shard.clone()

        engine.sharded.reducer.on_shard = listen
        for number in range(4):
            engine.backward(engine(torch.arange(8).view(1, 8) + number))
            if number % 2:
                engine.sharded.reducer.complete()
                now = {g.unit: g.shard for g in engine.sharded.reducer.gradients}
                found.append((list(shards), all(torch.equal(now[unit], shard) for unit, shard in shards.items())))
            else:
                assert not shards
            engine.step()
            shards.clear()
        engine.destroy()
    for units, equal in found:
        assert sorted(units) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "embed"]
        assert equal
