"""Updates that begin during the backward: the same to the bit as afterwards, whatever happens in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import run_ranks
from test_tiers import in_stages, start
from zeromesh import zero
from zeromesh.shard.store.early import EarlyState, EarlyUpdates

PLACES: dict[str, dict[str, Any]] = {
    "row 1": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "row 3": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "all": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "all in files": {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    "files": {"stage": 3, "offload_optimizer": {"device": "nvme", "buffer_count": 2}},
}
SECONDS = 30


class Watched:
    """In this context every update that has begun early is given the time to end, and those that count are counted."""

    def __enter__(self) -> Watched:
        self.counted: list[int] = []
        self._counted, self._stop = EarlyUpdates.counted, EarlyUpdates._stop
        watched = self

        def stop(self: EarlyUpdates, state: EarlyState) -> None:
            tasks, end = list(self._tasks.values()), time.monotonic() + SECONDS
            while (
                self._thread is not None and self._thread.is_alive() and not all(task.done.is_set() for task in tasks)
            ):
                last = self._swap is not None and sum(not task.done.is_set() for task in tasks) == 1
                if last or time.monotonic() > end:  # one that goes to a file is done when it was asked for the next
                    break
                time.sleep(0.001)
            watched._stop(self, state)

        def counted(self: EarlyUpdates, steps: Any) -> set[Any]:
            found = watched._counted(self, steps)
            watched.counted.append(len(found))
            return found

        EarlyUpdates.counted, EarlyUpdates._stop = counted, stop  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        EarlyUpdates.counted, EarlyUpdates._stop = self._counted, self._stop  # type: ignore[method-assign]


def begin(place: str, folder: str, share: float, **more: Any) -> Any:
    chosen = PLACES[place]
    offload = {**chosen["offload_optimizer"], "nvme_path": folder, "update_during_backward": share}
    if "offload_param" in chosen:
        chosen = {**chosen, "offload_param": {**chosen["offload_param"], "nvme_path": folder}}
    return start({**chosen, "offload_optimizer": offload}, **more)


def masters(engine: Any) -> list[torch.Tensor]:
    found = [zero.safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
    states = [zero.safe_get_full_optimizer_state(parameter, "exp_avg_sq") for parameter in engine.module.parameters()]
    return [value.clone() for value in (*found, *states) if value is not None]


Disturb = Callable[[Any], None]


def change_rate(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = 3e-3


def change_parameter(engine: Any) -> None:
    first = next(iter(engine.module.parameters()))
    with zero.GatheredParameters([first], modifier_rank=0), torch.no_grad():
        first.mul_(1.5)


def change_state(engine: Any) -> None:
    first = next(iter(engine.module.parameters()))
    state = zero.safe_get_full_optimizer_state(first, "exp_avg")
    assert state is not None
    zero.safe_set_full_optimizer_state(first, state * 2, "exp_avg")


def change_gradient(engine: Any) -> None:
    last = list(engine.module.parameters())[-1]
    gradient = zero.safe_get_full_grad(last)
    assert gradient is not None
    zero.safe_set_full_grad(last, gradient * 2)


def change_one_shard(engine: Any) -> None:
    engine.sharded.flats[-1].gradient.shard.mul_(2)


def leave_one_out(engine: Any) -> None:
    block = engine.module.blocks[1]
    block.forward = lambda x: x + nn.functional.linear(torch.tanh(block.up(x)), block.down.weight)


def look_at_state(engine: Any) -> None:
    assert zero.safe_get_full_fp32_param(next(iter(engine.module.parameters()))) is not None


def give_up(engine: Any) -> None:
    engine.zero_grad()
    engine.backward(engine((torch.arange(8).view(1, 8) * 3) % 32))


def add_more(engine: Any) -> None:
    engine.backward(engine((torch.arange(8).view(1, 8) * 3) % 32))


DISTURBANCES: list[Disturb] = [
    change_rate, change_parameter, change_state, change_gradient, change_one_shard, look_at_state, give_up,
    add_more, leave_one_out, change_one_shard,
]  # fmt: skip
"""What is done between a backward and its step."""

UNDISTURBED = 3
"""Updates before each of them: one may be paused after what did not count, and states are made by the first."""


def train(place: str, folder: str, share: float, disturbances: int, more: dict[str, Any]) -> Any:
    with Watched() as watched:
        engine = begin(place, folder, share, **more)
        losses = []
        for number in range((UNDISTURBED + 1) * max(3, disturbances)):
            tokens = (torch.arange(8).view(1, 8) + 8 * engine.mesh.rank + number) % 32
            for _ in range(engine.gradient_accumulation_steps()):
                loss = engine(tokens)
                engine.backward(loss)
                losses.append(loss.item())
                which, at = divmod(number, UNDISTURBED + 1)
                if at == UNDISTURBED and which < disturbances:
                    # Behind the updates that have begun: one that had not could count, with what was changed.
                    for task in list(engine.sharded.early._tasks.values()):
                        task.done.wait()
                    DISTURBANCES[which](engine)
                engine.step()
        found = losses, masters(engine), engine.state_dict(), engine.skipped_steps
        engine.destroy()
        return *found, watched.counted


def later_and_early(place: str, folder: str, disturbances: int = 0, more: dict[str, Any] | None = None) -> list[int]:
    later, early = (train(place, folder, share, disturbances, more or {}) for share in (0.0, 1.0))
    assert later[0] == early[0]
    for one, other in zip(later[1], early[1], strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(value, early[2][name]) for name, value in later[2].items())
    assert later[3] == early[3]
    assert set(later[4]) <= {0}
    assert (later[3] > 0) == ("fp16" in (more or {}))
    return list(early[4])


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=[pytest.mark.full] if p in ("row 3", "all") else []) for p in PLACES]
)
def test_early_updates_equal_late_ones_whatever_happens_before_the_step(place: str, tmp_path: Path) -> None:
    counted = later_and_early(place, str(tmp_path), len(DISTURBANCES))
    by_disturbance = [counted[number : number + UNDISTURBED + 1] for number in range(0, len(counted), UNDISTURBED + 1)]
    left_out = False
    for disturbance, row in zip(DISTURBANCES, by_disturbance, strict=True):
        assert max(row) == UNITS - left_out, (disturbance, row)  # all that could count did
        left_out = left_out or disturbance is leave_one_out
        # A shard may be changed before its update has begun, which then counts, with what was changed.
        timely = disturbance in (change_rate, change_parameter, change_state, change_gradient, add_more)
        if place in ("row 1", "row 3") and timely:
            assert row[UNDISTURBED] < UNITS, (disturbance, row)
    assert not list(tmp_path.iterdir())


UNITS = 4
"""The root and three blocks."""

OVERFLOWS = {"initial_scale_power": 30, "hysteresis": 1}
"""The first updates are skipped."""

SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "fp32": ({"bf16": {"enabled": False}}, True),
    "fp16, overflows": ({"bf16": {"enabled": False}, "fp16": {"enabled": True, **OVERFLOWS}}, True),
    "clipped": ({"gradient_clipping": 1e-6}, False),
    "accumulated": ({"gradient_accumulation_steps": 2}, True),
    "schedule": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}, True),
}
"""What is configured besides, and whether updates that begin early count."""


USUAL = [*(("all in files", name) for name in SETTINGS), ("row 1", "clipped"), ("all", "accumulated")]
REST = [case for case in product(["row 1", "all"], SETTINGS) if case not in USUAL]


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "setting"), [*USUAL, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]
)
def test_on_two_ranks_with(place: str, setting: str, tmp_path: Path) -> None:
    more, counts = SETTINGS[setting]
    for counted in run_ranks(later_and_early, 2, place, str(tmp_path), 0, more):
        assert (max(counted[1:], default=0) == UNITS) == counts, counted


def stages_early(zero: dict[str, Any], mesh: dict[str, int]) -> tuple[list[float], list[int]]:
    with Watched() as watched:
        return in_stages(zero, mesh, clipping=1e6), watched.counted


@pytest.mark.some(1)
@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"tensor": 2}], ids=str)
def test_stages_and_split_layers_begin_early(mesh: dict[str, int]) -> None:
    settings = {"stage": 2, "offload_optimizer": {"device": "cpu", "update_during_backward": 1.0}}
    later = run_ranks(in_stages, 2, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, mesh, 1e6)
    early = run_ranks(stages_early, 2, settings, mesh)
    assert [values for values, _ in early] == later
    assert all(max(counted) > 0 for _, counted in early), early
