"""Masters in halves: the same on the host and in files, and seen by everybody as whole ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import on_ranks, run_ranks
from test_swap import STATE, last_of_life
from test_tiers import HOST, start, update
from zeromesh import zero
from zeromesh.kernels import halves
from zeromesh.shard import rows

SPLIT = {"split_master": True}
FORMS: dict[str, dict[str, Any]] = {"split": SPLIT}


def begin(folder: str, device: str, form: str, stage: int = 3, **more: Any) -> Any:
    place = {"device": device, "nvme_path": folder}
    offload: dict[str, Any] = {"stage": stage, "offload_optimizer": {**place, "buffer_count": 2, **FORMS.get(form, {})}}
    if "split_master" in FORMS.get(form, {}):
        offload["offload_param"] = place
    return start(offload, **more)


def life(folder: str, device: str, form: str, optimizer: str) -> list[Any]:
    params = {"lr": 1e-3, **({"momentum": 0.9, "dampening": 0.1} if optimizer == "SGD" else {})}
    params |= {"initial_accumulator_value": 0.1} if optimizer == "Adagrad" else {}
    engine = begin(
        folder, device, form, optimizer={"type": optimizer, "params": params}, gradient_clipping=0.5
    )  # fmt: skip
    engine.save_checkpoint(f"{folder}/{device}", tag="first")
    found: list[Any] = [update(engine, number) for number in range(3)]
    engine.load_checkpoint(f"{folder}/{device}", tag="first")  # which has no states
    assert [update(engine, number) for number in range(3)] == found
    engine.save_checkpoint(f"{folder}/{device}")
    going_on = [update(engine, number) for number in range(3)]
    engine.load_checkpoint(f"{folder}/{device}")
    assert [update(engine, number) for number in range(3)] == going_on
    first, last = next(iter(engine.module.parameters())), list(engine.module.parameters())[-1]
    master = zero.safe_get_full_fp32_param(first)
    state = zero.safe_get_full_optimizer_state(first, STATE[optimizer])
    assert master is not None
    assert bool(state.isfinite().all())
    zero.safe_set_full_fp32_param(first, master * 1.5)
    changed = zero.safe_get_full_fp32_param(first)
    assert changed is not None
    assert torch.equal(changed, master * 1.5)
    zero.safe_set_full_optimizer_state(first, state * 0.5, STATE[optimizer])
    halved = zero.safe_get_full_optimizer_state(first, STATE[optimizer])
    assert halved is not None
    assert torch.equal(halved, state * 0.5)
    with zero.GatheredParameters([last], modifier_rank=0), torch.no_grad():
        last.fill_(0.3)
    whole = zero.safe_get_full_fp32_param(last)
    assert whole is not None
    assert torch.equal(whole, torch.full_like(whole, 0.3).bfloat16().float())
    return [*found, *going_on, master, state, halved, *last_of_life(engine)]


def both_lives(folder: str, *case: Any) -> tuple[list[Any], list[Any]]:
    return life(folder, "cpu", *case), life(folder, "nvme", *case)


CASES = [("split", "SGD")]
REST = [("split", "AdamW"), ("split", "Adagrad"), ("split", "Lion")]


@pytest.mark.parametrize(
    ("form", "optimizer"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]
)
def test_a_run_on_the_host_is_one_in_files_to_the_bit(form: str, optimizer: str, tmp_path: Path) -> None:
    for host, nvme in run_ranks(both_lives, 2, str(tmp_path), form, optimizer):
        for one, other in zip(host, nvme, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu", "nvme"]


def masters(engine: Any) -> list[torch.Tensor]:
    found = [zero.safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
    return [master for master in found if master is not None]


def states(engine: Any, name: str) -> list[torch.Tensor]:
    found = [zero.safe_get_full_optimizer_state(parameter, name) for parameter in engine.module.parameters()]
    return [state for state in found if state is not None]


@pytest.mark.full
@pytest.mark.parametrize(("form", "device"), [("split", "nvme"), pytest.param("split", "cpu", marks=pytest.mark.full)])
@on_ranks(2)
def test_a_resumed_run_goes_on_as_the_one_that_was_saved(form: str, device: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for saved in (form, "whole"):
        engine = begin(folder, device, saved)
        for number in range(2):
            update(engine, number)
        engine.save_checkpoint(f"{folder}/{saved}")
        wanted, moments = masters(engine), states(engine, "exp_avg")
        going_on = [update(engine, number) for number in range(3)]
        engine.destroy()
        engine = begin(folder, device, form)
        assert engine.load_checkpoint(f"{folder}/{saved}")[0] is not None
        for master, expected in zip(masters(engine), wanted, strict=True):
            assert torch.equal(master, expected)
        for state, expected in zip(states(engine, "exp_avg"), moments, strict=True):
            assert torch.equal(state, expected)
        found = [update(engine, number) for number in range(3)]
        assert found == going_on or saved != form
        engine.destroy()


def one_update(folder: str, form: str) -> dict[str, list[torch.Tensor]]:
    """Masters and states after one update from values that bf16 has, of which a split master is the same parameter."""
    engine = begin(folder, "cpu", form)
    for parameter in engine.module.parameters():
        if (master := zero.safe_get_full_fp32_param(parameter)) is not None:
            zero.safe_set_full_fp32_param(parameter, master.bfloat16().float())
    update(engine)
    found = {"master": masters(engine), **{name: states(engine, name) for name in ("exp_avg", "exp_avg_sq")}}
    engine.destroy()
    return found


def test_one_update_gives_the_masters_of_whole_states_to_the_bit(tmp_path: Path) -> None:
    whole, other = (run_ranks(one_update, 1, str(tmp_path), name)[0] for name in ("whole", "split"))
    for found, expected in zip(other["master"], whole["master"], strict=True):
        assert torch.equal(found, expected)
    for name in ("exp_avg", "exp_avg_sq"):
        for found, expected in zip(other[name], whole[name], strict=True):
            assert torch.equal(found, expected)


def losses(folder: str, form: str, updates: int) -> list[float]:
    engine = begin(folder, "cpu", form)
    found = [update(engine, number % 3) for number in range(updates)]
    engine.destroy()
    return found


@pytest.mark.full
def test_a_model_learns_with_each_form(tmp_path: Path) -> None:
    for form in FORMS:
        found = run_ranks(losses, 1, str(tmp_path), form, 24)[0]
        assert found[-1] < found[0]


def kernel_calls(folder: str, form: str) -> list[tuple[set[str], set[str]]]:
    from zeromesh.optim import host

    found, update_ = [], host.update

    def watch(pieces: Any, factor: float) -> None:
        masters = {str(piece.master.dtype) for piece in pieces}
        found.append((masters, {str(state.dtype) for piece in pieces for state in piece.states}))
        update_(pieces, factor)

    host.update = watch  # type: ignore[attr-defined]
    try:
        engine = begin(folder, "cpu", form)
        update(engine)
        engine.destroy()
    finally:
        host.update = update_  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("form", "master", "state"),
    [("split", "bfloat16", "float32")],
)
def test_the_update_reads_and_writes_what_rests(form: str, master: str, state: str, tmp_path: Path) -> None:
    assert {(str(m), str(s)) for m, s in run_ranks(kernel_calls, 1, str(tmp_path), form)[0]} == {
        (f"{{'torch.{master}'}}", f"{{'torch.{state}'}}")
    }


def unused(folder: str) -> bool:
    engine = begin(folder, "cpu", "split")
    for number in range(2):
        update(engine, number)
    block = engine.module.blocks[1]
    bias = block.down.bias
    before = [zero.safe_get_full_optimizer_state(bias, key) for key in ("exp_avg", "exp_avg_sq")]
    before.append(zero.safe_get_full_fp32_param(bias))
    block.forward = lambda x: x + torch.nn.functional.linear(torch.tanh(block.up(x)), block.down.weight)
    for number in range(2):
        update(engine, number)
    after = [zero.safe_get_full_optimizer_state(bias, key) for key in ("exp_avg", "exp_avg_sq")]
    after.append(zero.safe_get_full_fp32_param(bias))
    engine.destroy()
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))  # type: ignore[arg-type]


def test_what_has_no_gradient_stays_as_it_is(tmp_path: Path) -> None:
    assert run_ranks(unused, 1, str(tmp_path)) == [True]


def after_one_update(folder: str, form: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    engine = begin(folder, "cpu", form)
    torch.manual_seed(5)
    shapes = {name: value.shape for name, value in engine.state_dict().items()}
    engine.load_state_dict({name: torch.randn(shape).mul(0.03).bfloat16().float() for name, shape in shapes.items()})
    update(engine)
    flats = engine.sharded.flats
    shards = [flat.shard.clone() for flat in flats]
    if form == "split":
        assert all(bool(flat.master.isnan().all()) for flat in flats)
        assert all(bool(state["exp_avg"].isnan().all()) for state in engine.optimizer.state.values())
    masters = []
    for flat in flats:
        flat.load_states()
        masters.append(flat.master.clone())
    assert all(torch.equal(shard, flat.shard) for shard, flat in zip(shards, flats, strict=True))
    engine.destroy()
    return masters, shards


def test_a_split_master_is_the_whole_one_and_the_parameter_its_upper_half(tmp_path: Path) -> None:
    (masters, _), (joined, shards) = (
        run_ranks(after_one_update, 1, str(tmp_path), form)[0] for form in ("none", "split")
    )
    for master, other, shard in zip(masters, joined, shards, strict=True):
        assert torch.equal(master, other)
        assert torch.equal(shard, halves.split(master)[0])


@on_ranks(1)
def test_a_look_does_not_change_a_tie(tmp_path: Path) -> None:
    folder = str(tmp_path)
    """A master that is halfway between two numbers in bf16, after a look that changes nothing."""
    engine = begin(folder, "cpu", "split")
    first = next(iter(engine.module.parameters()))
    zero.safe_set_full_fp32_param(first, torch.full(first.shape, 1 + 2.0**-8))
    with zero.GatheredParameters([first], modifier_rank=0):
        assert bool((first == 1 + 2.0**-7).all())
    master = zero.safe_get_full_fp32_param(first)
    engine.destroy()
    assert (float(master.max())) == 1 + 2.0**-8


def test_masters_are_joined_in_runs_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for run in (rows.RUN, 1024):
        monkeypatch.setattr(rows, "RUN", run)
        found.append(after_some(str(tmp_path / str(run))))
    assert found[0] == found[1]


def after_some(folder: str) -> list[float]:
    engine = begin(folder, "cpu", "split")
    update(engine)
    engine.save_checkpoint(folder)
    found = [update(engine, number) for number in range(3)]
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("offload", "more", "text"),
    [
        ({**SPLIT, "super_offload": True}, {}, "split_master is true, and a share of 1"),
        ({**SPLIT}, {"bf16": {"enabled": False}}, "set bf16.enabled and offload_param.device"),
        (
            {**SPLIT},
            {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}},
            "fewer bytes, but Lamb, .*optimizer.split_m",
        ),
    ],
)
def test_what_cannot_be_is_refused(offload: dict[str, Any], more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        start({"stage": 3, "offload_optimizer": {**HOST, **offload}, "offload_param": HOST}, **more)
    with pytest.raises(ValueError, match="set bf16.enabled and offload_param.device"):
        start({"stage": 3, "offload_optimizer": {**HOST, **SPLIT}})
