"""Updates that jump are found, and left out on all ranks, as plain torch does that leaves them out by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks
from zeromesh.shard.optim.spikes import LEAST, MOST_SKIPPED, SpikeWatch

WIDTH, UPDATES, BAD = 8, 20, (13, 16)


def unused(loss: float | None = None, norm: float | None = None, window: int = 50, skips: bool = False) -> SpikeWatch:
    return SpikeWatch(loss, norm, window, skips)


def watch(**settings: Any) -> SpikeWatch:
    found = unused(**settings)
    for number in range(LEAST):
        assert found.look(number + 1, 1.0 + 0.01 * number, 2.0) is None
    return found


def test_a_loss_and_a_norm_are_compared_with_their_medians() -> None:
    one = watch(skips=True, loss=2.0, norm=3.0)
    assert one.look(11, 2.0, 5.9) is None
    spike = one.look(12, 2.5, 2.0)
    assert spike is not None
    assert one.last is spike
    assert str(spike) == "update 12 is left out: its loss of 2.5 is 2.4 times the median of those before, 1.05"
    high = one.look(13, None, 6.1)
    assert high is not None
    assert (high.name, high.value, high.usual, high.skipped) == ("gradient norm", 6.1, 2.0, True)
    assert one.look(14, 1.0, 2.0) is None
    assert one.last is None


def test_the_first_updates_are_no_spikes_and_nothing_is_watched_by_default() -> None:
    one = unused(loss=2.0)
    for number in range(LEAST):
        assert one.look(number + 1, 100.0 if number % 2 else 1.0, 1.0) is None
    assert watch().look(11, 1e9, 1e9) is None


def test_a_loss_that_is_not_known_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    one = watch(skips=True, loss=2.0)
    assert one.look(11, None, 2.0) is None
    assert one.look(12, None, 2.0) is None
    assert [record.message for record in caplog.records] == [
        "spikes of the loss cannot be detected, because the engine does not see the loss: call "
        "engine.backward(loss), or watch the gradient norm"
    ]


def test_a_warned_spike_counts_and_a_skipped_one_does_not() -> None:
    warned, skipped = watch(loss=2.0, window=LEAST), watch(skips=True, loss=2.0, window=LEAST)
    for one in (warned, skipped):
        for number in range(5):
            assert one.look(11 + number, 4.0, 2.0) is not None
    assert warned.state()["loss"].count(4.0) == 5
    assert skipped.state()["loss"].count(4.0) == 0
    assert warned.look(16, 4.0, 2.0) is None  # the median has followed
    assert skipped.look(16, 4.0, 2.0) is not None


def test_many_skipped_spikes_are_an_error() -> None:
    one = watch(skips=True, loss=2.0)
    for number in range(MOST_SKIPPED - 1):
        one.look(11 + number, 5.0, 2.0)
    with pytest.raises(
        FloatingPointError, match=r"10 updates in a row were left out.*raise spikes\.loss and spikes\.norm"
    ):
        one.look(20, 5.0, 2.0)


def test_a_state_goes_on_as_before() -> None:
    one, other = watch(loss=2.0, window=20), unused(loss=2.0, window=20)
    other.load(one.state())
    for number, value in enumerate((1.0, 2.2, 1.5, 9.0)):
        assert one.look(11 + number, value, 2.0) == other.look(11 + number, value, 2.0)


def data(update: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a micro-batch; of bad updates, that of the last rank is far off."""
    draw = torch.Generator().manual_seed(10 * update + rank)
    x = torch.randn(4, WIDTH, generator=draw, dtype=dtype)
    return x, x.sum(1, keepdim=True) + (50.0 if update in BAD and rank == 1 else 0.0)


EARLY = {"device": "cpu", "update_during_backward": 1.0}
CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "stage 0": ({"stage": 0}, torch.float64),
    "stage 3": ({"stage": 3}, torch.float64),
    "updated during the backward": ({"stage": 2, "offload_optimizer": EARLY}, torch.float32),
}


def build(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def plain(ranks: int, dtype: torch.dtype, skip: bool) -> list[torch.Tensor]:
    model = build(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for update in range(1, UPDATES + 1):
        optimizer.zero_grad()
        for rank in range(ranks):
            x, y = data(update, rank, dtype)
            (nn.functional.mse_loss(model(x), y) / ranks).backward()
        if not (skip and update in BAD):
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def engine_of(name: str, action: str) -> Any:
    zero, dtype = CASES[name]
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "spikes": {"action": action, "loss": 5.0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-2, "warmup_max_lr": 1e-2}},
    }  # fmt: skip
    return zeromesh.initialize(model=build(dtype), config=config)[0]


def train(engine: Any, dtype: torch.dtype, first: int, last: int) -> list[int]:
    found = []
    for update in range(first, last + 1):
        x, y = data(update, engine.mesh.rank, dtype)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        if engine.spikes.last is not None:
            assert engine.spikes.last.update == update
            found.append(update)
    return found


@on_ranks(2)
def test_spikes_are_left_out_on_all_ranks_and_after_a_resume(tmp_path: Path) -> None:
    for name, (_, dtype) in CASES.items():
        for action in ("skip", "warn"):
            engine = engine_of(name, action)
            # A checkpoint between the two spikes has what the second is compared with.
            assert train(engine, dtype, 1, 14) == [BAD[0]], name
            engine.save_checkpoint(tmp_path / f"{name}-{action}")
            resumed = engine_of(name, action)
            resumed.load_checkpoint(tmp_path / f"{name}-{action}")
            limits = {"rtol": 1e-9, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
            for one in (engine, resumed):
                assert train(one, dtype, 15, UPDATES) == [BAD[1]], name
                skipped = len(BAD) if action == "skip" else 0
                assert (one.skipped_steps, one.lr_scheduler.last_batch_iteration) == (skipped, UPDATES - skipped - 1), (
                    name
                )
                expected = plain(2, dtype, action == "skip")
                for parameter, value in zip(one.module.parameters(), expected, strict=True):
                    torch.testing.assert_close(
                        zeromesh.zero.safe_get_full_fp32_param(parameter).to(dtype), value, **limits
                    )
                one.destroy()
