"""Updates that run beside the next forward and backward: the same whenever they end, and nothing is lost of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from test_ahead import change_state
from test_tiers import HOST, in_stages, start, update
from zeromesh import zero
from zeromesh.shard.delayed import Delayed
from zeromesh.tiers.nvme import Store

LATE = {"inexact_delay_after": 1}
PLACES: dict[str, dict[str, Any]] = {
    "row 1": {"stage": 1, "offload_optimizer": {**HOST, **LATE}},
    "row 3": {"stage": 3, "offload_optimizer": {**HOST, **LATE}},
    "all": {"stage": 3, "offload_optimizer": {**HOST, **LATE}, "offload_param": HOST},
    "half": {"stage": 2, "offload_optimizer": {**HOST, **LATE, "ratio": 0.6}},
    "files": {"stage": 3, "offload_optimizer": {"device": "nvme", "buffer_count": 2, **LATE}},
    "all in files": {"stage": 3, "offload_optimizer": {"device": "nvme", **LATE}, "offload_param": {"device": "nvme"}},
}
USUAL = ("row 1", "all", "files")


def begin(place: str, folder: str, **more: Any) -> zeromesh.Engine:
    placed = PLACES[place].items()
    return start({key: {**value, "nvme_path": folder} if key != "stage" else value for key, value in placed}, **more)


class Held:
    """In this context no delayed update does anything before somebody waits for it."""

    def __enter__(self) -> Held:
        self.begun = 0
        self._begin, self._stop = Delayed.begin, Delayed.stop
        held, gates = self, dict[int, threading.Event]()

        def begin(self: Delayed, order: Any, present: Any, compute: Any) -> None:
            gate = gates[id(self)] = threading.Event()

            def later(flats: Any) -> Any:
                gate.wait()
                yield from present(flats)

            held.begun += 1
            held._begin(self, order, later, compute)

        def stop(self: Delayed) -> None:
            if (gate := gates.pop(id(self), None)) is not None:
                gate.set()
            held._stop(self)

        Delayed.begin, Delayed.stop = begin, stop  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        Delayed.begin, Delayed.stop = self._begin, self._stop  # type: ignore[method-assign]


def look_at_master(engine: Any) -> None:
    assert zero.safe_get_full_fp32_param(next(iter(engine.module.parameters()))) is not None


def look_at_states(engine: Any) -> None:
    step = engine.sharded.flats[0].pieces[0][2].parameter
    number = next(n for n, p in enumerate(p for g in engine.optimizer.param_groups for p in g["params"]) if p is step)
    assert int(engine.optimizer.state_dict()["state"][number]["step"]) == engine.global_steps


def change_parameter(engine: Any) -> None:
    first = next(iter(engine.module.parameters()))
    with zero.GatheredParameters([first], modifier_rank=0), torch.no_grad():
        first[3] *= 1.5


def change_master(engine: Any) -> None:
    last = list(engine.module.parameters())[-1]
    zero.safe_set_full_fp32_param(last, torch.full(last.shape, 0.25))


def write_in_place(engine: Any) -> None:
    """Where parameters are in memory; what came of the update of this one is overwritten."""
    if not engine.sharded.sharded:
        with torch.no_grad():
            list(engine.module.parameters())[-1].fill_(0.125)


def overflow(engine: Any) -> None:
    """An update is skipped while the one before it runs."""
    engine.backward(engine(torch.arange(8).view(1, 8)) * float("inf"))
    with pytest.raises(FloatingPointError):
        engine.step()


def give_up(engine: Any) -> None:
    engine.backward(engine(torch.arange(8).view(1, 8)))
    engine.zero_grad()


DISTURBANCES: list[Callable[[Any], None]] = [
    look_at_master, look_at_states, change_parameter, change_master, change_state, write_in_place, overflow, give_up,
]  # fmt: skip
"""What is done between two updates."""


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in engine.state_dict().items()}
    for name, parameter in engine.module.named_parameters():
        master = zero.safe_get_full_fp32_param(parameter)
        state = zero.safe_get_full_optimizer_state(parameter, "exp_avg_sq")
        assert master is not None
        assert state is not None
        assert torch.equal(found[name].float(), master.to(found[name].dtype).float()), "an update was not published"
        found |= {f"master of {name}": master.clone(), f"state of {name}": state.clone()}
    return found


def disturbed(place: str, folder: str, more: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = begin(place, folder, **more)
    losses = []
    for number in range(2 * (1 + len(DISTURBANCES))):
        losses.append(update(engine, number))
        if number % 2 and number // 2 < len(DISTURBANCES):
            DISTURBANCES[number // 2](engine)
    found = losses, values_of(engine)
    engine.destroy()
    return found


def at_once_and_held(place: str, folder: str, more: dict[str, Any]) -> None:
    losses, values = disturbed(place, folder, more)
    with Held() as held:
        again, others = disturbed(place, folder, more)
    assert held.begun > len(DISTURBANCES)
    assert losses == again
    assert all(torch.equal(value, others[name]) for name, value in values.items())


@pytest.mark.parametrize("place", [p if p in USUAL else pytest.param(p, marks=pytest.mark.full) for p in PLACES])
@pytest.mark.parametrize(
    "precision",
    [pytest.param({}, id="bf16"), pytest.param({"bf16": {"enabled": False}}, id="fp32", marks=pytest.mark.full)],
)
def test_the_result_does_not_depend_on_when_an_update_ends(
    place: str, precision: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(at_once_and_held, 2, place, str(tmp_path), precision)
    assert not list(tmp_path.iterdir())


def losses_of(place: str, folder: str) -> list[float]:
    engine = begin(place, folder)
    losses = [update(engine, number) for number in range(6)]
    engine.destroy()
    return losses


def with_the_same_homes(place: str, folder: str) -> bool:
    """Whether it shows that the next gradients come to where those of an update still are."""
    with Held():
        right = losses_of(place, folder)
        begin = Delayed.begin

        def keep(self: Delayed, order: Any, present: Any, compute: Any) -> None:
            gradients = [flat.gradient for flat in self.flats if flat.gradient]
            homes = [gradient.buffer for gradient in gradients]
            begin(self, order, present, compute)
            for gradient, home in zip(gradients, homes, strict=True):
                gradient.buffer = home

        Delayed.begin = keep  # type: ignore[method-assign]
        return losses_of(place, folder) != right


def test_gradients_of_an_update_that_runs_are_not_written_over(tmp_path: Path) -> None:
    assert run_ranks(with_the_same_homes, 1, "row 1", str(tmp_path)) == [True]


def kept_values(place: str, folder: str) -> None:
    engine = begin(place, folder)
    for number in range(3):
        update(engine, number)
    last = list(engine.module.parameters())[-1]
    change_master(engine)
    with zero.GatheredParameters([last]):
        assert bool((last == 0.25).all())
    change_parameter(engine)
    parameter = next(iter(engine.module.parameters()))
    with zero.GatheredParameters([parameter]):
        changed = parameter.detach().clone()
    update(engine, 3)  # what was begun before is not published over it
    with zero.GatheredParameters([parameter, last]):
        assert bool((last == 0.25).all())
        assert torch.equal(parameter, changed)
    engine.destroy()


@pytest.mark.parametrize("place", PLACES)
def test_what_is_set_stays_until_the_next_update_of_it_comes(place: str, tmp_path: Path) -> None:
    if place == "half":  # the parameters in question are updated at once
        pytest.skip("these are on the device")
    kept_values(place, str(tmp_path))


def saved_and_resumed(place: str, folder: str, checkpoints: str) -> None:
    with Held():
        engine = begin(place, folder)
        for number in range(3):
            update(engine, number)
        engine.save_checkpoint(checkpoints)
        going_on = [update(engine, number) for number in range(3, 6)]
        values = values_of(engine)
        assert engine.load_checkpoint(checkpoints)[0] is not None
        back = [update(engine, number) for number in range(3, 6)]
        assert going_on == back
        engine.destroy()
        other = begin(place, folder)
        assert other.load_checkpoint(checkpoints)[0] is not None
        assert going_on == [update(other, number) for number in range(3, 6)]
        resumed = values_of(other)
        assert all(torch.equal(value, resumed[name]) for name, value in values.items())
        other.destroy()


@pytest.mark.parametrize("place", [p if p in USUAL else pytest.param(p, marks=pytest.mark.full) for p in PLACES])
def test_a_resumed_run_goes_on_as_the_one_that_was_saved(place: str, tmp_path: Path) -> None:
    run_ranks(saved_and_resumed, 2, place, str(tmp_path), str(tmp_path / "checkpoints"))


@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"tensor": 2}], ids=str)
def test_stages_and_split_layers_are_updated_late(mesh: dict[str, int]) -> None:
    zero_ = {"stage": 2, "offload_optimizer": {**HOST, "inexact_delay_after": 0}}
    alone = run_ranks(in_stages, 1, zero_, {})[0]
    plain = run_ranks(in_stages, 1, {"stage": 2, "offload_optimizer": HOST}, {})[0]
    assert alone[0] == plain[0]
    assert alone[2] != plain[2]
    for found in run_ranks(in_stages, 2, zero_, mesh):
        assert found == pytest.approx(alone, rel=1e-9)  # float64, whose sums over ranks are in another order


def with_full_disk(folder: str) -> str:
    engine = begin("files", folder)
    for number in range(2):
        update(engine, number)
    engine.sharded.delayed.wait()
    write = Store.write

    def fail(*arguments: Any, **more: Any) -> Any:
        raise OSError(28, "No space left on device")

    Store.write = fail  # type: ignore[method-assign]
    try:
        update(engine, 2)
        try:
            update(engine, 3)
        except OSError as error:
            for way in (engine.gathered_state_dict, engine.finish_update, lambda: update(engine, 4)):
                with pytest.raises(OSError, match="No space left"):  # and nothing that was never computed is given away
                    way()
            return str(error)
        finally:
            engine.destroy()
    finally:
        Store.write = write  # type: ignore[method-assign]
    return ""


def test_what_fails_beside_the_next_backward_is_said_at_its_step(tmp_path: Path) -> None:
    assert "No space left" in run_ranks(with_full_disk, 1, str(tmp_path))[0]
    assert not list(tmp_path.iterdir())


def interrupted(folder: str) -> bool:
    engine = begin("row 1", folder)
    with Held():
        for number in range(3):
            update(engine, number)
        thread = engine.sharded.delayed._thread
        assert thread is not None
        thread.join = lambda: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.finish_update()
        del thread.join
        values_of(engine)
        alive = thread.is_alive()
    engine.destroy()
    return alive


def test_who_interrupts_the_wait_and_goes_on_waits_again(tmp_path: Path) -> None:
    assert run_ranks(interrupted, 1, str(tmp_path)) == [False]


def widened(folder: str) -> list[set[torch.dtype]]:
    """The dtypes of sums by update; from the third on several micro-batches are summed."""
    engine = begin("row 1", folder)
    found: list[set[torch.dtype]] = []
    for number in range(8):
        if number == 2:
            engine.set_train_batch_size(2)
        engine.backward(engine(torch.arange(8).view(1, 8)))
        engine.step()
        if number < 2 or number % 2:
            spare = [home for home in engine.sharded.delayed._spare.values() if home is not None]
            found.append({home.dtype for home in spare})
    engine.destroy()
    return found


def test_sums_that_become_wider_stay_so(tmp_path: Path) -> None:
    found = run_ranks(widened, 1, str(tmp_path))[0]
    assert found[-2:] == [{torch.float32}] * 2, found


def in_16_bits() -> bool:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, "offload_optimizer": {**HOST, **LATE}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine = zeromesh.initialize(model=nn.Linear(4, 4).bfloat16(), config=config)[0]
    found = bool(engine.sharded.delayed.flats)
    engine.destroy()
    return found


def test_what_the_optimizer_updates_itself_is_never_late() -> None:
    assert run_ranks(in_16_bits, 1) == [False]


def left_running(folder: str) -> int:
    with Held():
        engine = begin("files", folder)
        for number in range(3):
            update(engine, number)
        engine.destroy()
    return sum("update" in thread.name for thread in threading.enumerate())


def test_an_engine_that_ends_in_the_middle_of_an_update_leaves_nothing(tmp_path: Path) -> None:
    assert run_ranks(left_running, 1, str(tmp_path)) == [0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("offload", "optimizer", "text"),
    [
        ({**HOST, **LATE, "update_during_backward": 0.5}, "AdamW", "a share of 0.5 is to be updated during the backw"),
        ({**HOST, **LATE, "super_offload": True}, "AdamW", "done early or late"),
        ({**HOST, "inexact_delay_after": -1}, "AdamW", "inexact_delay_after"),
        ({**HOST, **LATE}, "Lamb", "updates are to be delayed, but Lamb, .* or offload_optimizer.inexact_delay_after"),
    ],
)
def test_what_cannot_be_is_refused(offload: dict[str, Any], optimizer: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        start({"stage": 1, "offload_optimizer": offload}, optimizer={"type": optimizer, "params": {"lr": 1e-3}})


def test_without_offloading_nothing_is_late() -> None:
    engine = start({"stage": 1, "offload_optimizer": {"device": "none", **LATE}})
    assert not engine.sharded.delayed.flats
    engine.destroy()
