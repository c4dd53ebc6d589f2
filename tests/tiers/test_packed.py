"""Masters in halves: the same on the host and in files, and seen by everybody as whole ones."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks
from test_swap import STATE, assert_equal, last_of_life
from test_tiers import HOST, start, update
from zeromesh import zero
from zeromesh.base.kernels import halves
from zeromesh.shard.optim import host
from zeromesh.shard.store import swap

SPLIT = {"split_master": True}
MOMENTS = ("exp_avg", "exp_avg_sq")


def begin(folder: Any, device: str = "cpu", split: bool = True, **more: Any) -> Any:
    place = {"device": device, "nvme_path": str(folder)}
    if not split:
        return start({"stage": 3, "offload_optimizer": {**place, "buffer_count": 2}}, **more)
    offload = {**place, "buffer_count": 2, **SPLIT}
    return start({"stage": 3, "offload_optimizer": offload, "offload_param": place}, **more)


def life(folder: Path, device: str, optimizer: str) -> list[Any]:
    params = {"lr": 1e-3, **({"momentum": 0.9, "dampening": 0.1} if optimizer == "SGD" else {})}
    params |= {"initial_accumulator_value": 0.1} if optimizer == "Adagrad" else {}
    engine = begin(folder, device, optimizer={"type": optimizer, "params": params}, gradient_clipping=0.5)
    engine.save_checkpoint(folder / device, tag="first")
    found: list[Any] = updates(engine)
    engine.load_checkpoint(folder / device, tag="first")  # which has no states
    assert updates(engine) == found
    engine.save_checkpoint(folder / device)
    going_on = updates(engine)
    engine.load_checkpoint(folder / device)
    assert updates(engine) == going_on
    first, last = next(iter(engine.module.parameters())), list(engine.module.parameters())[-1]
    master = zero.safe_get_full_fp32_param(first)
    state = zero.safe_get_full_optimizer_state(first, STATE[optimizer])
    assert bool(state.isfinite().all())
    zero.safe_set_full_fp32_param(first, master * 1.5)
    assert torch.equal(zero.safe_get_full_fp32_param(first), master * 1.5)
    zero.safe_set_full_optimizer_state(first, state * 0.5, STATE[optimizer])
    halved = zero.safe_get_full_optimizer_state(first, STATE[optimizer])
    assert torch.equal(halved, state * 0.5)
    with zero.GatheredParameters([last], modifier_rank=0), torch.no_grad():
        last.fill_(0.3)
    whole = zero.safe_get_full_fp32_param(last)
    assert torch.equal(whole, torch.full_like(whole, 0.3).bfloat16().float())
    return [*found, *going_on, master, state, halved, *last_of_life(engine)]


def updates(engine: Any, count: int = 3) -> list[float]:
    return [update(engine, number) for number in range(count)]


@pytest.mark.parametrize(
    "optimizer", ["SGD", *(pytest.param(name, marks=pytest.mark.full) for name in ("AdamW", "Adagrad", "Lion"))]
)
@on_ranks(2)
def test_a_run_on_the_host_is_one_in_files_to_the_bit(optimizer: str, tmp_path: Path) -> None:
    assert_equal(life(tmp_path, "cpu", optimizer), life(tmp_path, "nvme", optimizer))
    torch.distributed.barrier()  # the other rank deletes its files, too
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu", "nvme"]


def whole_states(engine: Any) -> dict[str, list[torch.Tensor]]:
    parameters = list(engine.module.parameters())
    moments = {key: [zero.safe_get_full_optimizer_state(p, key) for p in parameters] for key in MOMENTS}
    return {"master": [zero.safe_get_full_fp32_param(parameter) for parameter in parameters], **moments}


def assert_same_states(found: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]]) -> None:
    assert all(one is not None for values in found.values() for one in values)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert all(map(torch.equal, found[name], values)), name


@pytest.mark.full
@pytest.mark.parametrize("device", ["nvme", "cpu"])
@on_ranks(2)
def test_a_resumed_run_goes_on_as_the_one_that_was_saved(device: str, tmp_path: Path) -> None:
    for split in (True, False):
        engine = begin(tmp_path, device, split)
        updates(engine, 2)
        engine.save_checkpoint(tmp_path / str(split))
        wanted, going_on = whole_states(engine), updates(engine)
        engine.destroy()
        engine = begin(tmp_path, device)
        assert engine.load_checkpoint(tmp_path / str(split))[0] is not None
        assert_same_states(whole_states(engine), wanted)
        assert updates(engine) == going_on or not split
        engine.destroy()


@on_ranks(1)
def test_one_update_gives_the_masters_of_whole_states_to_the_bit(tmp_path: Path) -> None:
    found = []
    for split in (False, True):
        engine = begin(tmp_path, split=split)
        for parameter in engine.module.parameters():  # of values that bf16 has a split master is the same parameter
            zero.safe_set_full_fp32_param(parameter, zero.safe_get_full_fp32_param(parameter).bfloat16().float())
        update(engine)
        found.append(whole_states(engine))
        engine.destroy()
    assert_same_states(*found)


@on_ranks(1)
def test_the_update_reads_and_writes_what_rests(tmp_path: Path) -> None:
    with patch.object(host, "update", wraps=host.update) as updated:
        engine = begin(tmp_path)
        update(engine)
        engine.destroy()
    pieces = [piece for call in updated.call_args_list for piece in call.args[0]]
    assert {piece.master.dtype for piece in pieces} == {torch.bfloat16}
    assert {state.dtype for piece in pieces for state in piece.states} == {torch.float32}


@on_ranks(1)
def test_parameters_without_gradients_stay_as_they_are(tmp_path: Path) -> None:
    engine = begin(tmp_path)
    updates(engine, 2)
    block = engine.module.blocks[1]
    bias = block.down.bias

    def of_bias() -> list[Any]:
        return [zero.safe_get_full_fp32_param(bias), *(zero.safe_get_full_optimizer_state(bias, k) for k in MOMENTS)]

    before = of_bias()
    block.forward = lambda x: x + torch.nn.functional.linear(torch.tanh(block.up(x)), block.down.weight)
    updates(engine, 2)
    assert all(map(torch.equal, of_bias(), before))
    engine.destroy()


def after_one_update(folder: Path, split: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    engine = begin(folder, split=split)
    torch.manual_seed(5)
    shapes = {name: value.shape for name, value in engine.state_dict().items()}
    engine.load_state_dict({name: torch.randn(shape).mul(0.03).bfloat16().float() for name, shape in shapes.items()})
    update(engine)
    flats = engine.sharded.flats
    shards = [flat.shard.clone() for flat in flats]
    if split:
        assert all(bool(flat.master.isnan().all()) for flat in flats)
        assert all(bool(state["exp_avg"].isnan().all()) for state in engine.optimizer.state.values())
    masters = []
    for flat in flats:
        flat.load_states()
        masters.append(flat.master.clone())
    assert all(torch.equal(shard, flat.shard) for shard, flat in zip(shards, flats, strict=True))
    engine.destroy()
    return masters, shards


@on_ranks(1)
def test_a_split_master_is_the_whole_one_and_the_parameter_its_upper_half(tmp_path: Path) -> None:
    (masters, _), (joined, shards) = (after_one_update(tmp_path, split) for split in (False, True))
    for master, other, shard in zip(masters, joined, shards, strict=True):
        assert torch.equal(master, other)
        assert torch.equal(shard, halves.split(master)[0])


@on_ranks(1)
def test_a_look_does_not_change_a_tie(tmp_path: Path) -> None:
    engine = begin(tmp_path)
    first = next(iter(engine.module.parameters()))
    zero.safe_set_full_fp32_param(first, torch.full(first.shape, 1 + 2.0**-8))  # halfway between two numbers in bf16
    with zero.GatheredParameters([first], modifier_rank=0):
        assert bool((first == 1 + 2.0**-7).all())
    assert float(zero.safe_get_full_fp32_param(first).max()) == 1 + 2.0**-8
    engine.destroy()


def test_masters_are_joined_in_runs_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for run in (swap.RUN, 1024):
        monkeypatch.setattr(swap, "RUN", run)
        engine = begin(tmp_path)
        update(engine)
        engine.save_checkpoint(tmp_path / str(run))
        found.append(updates(engine))
        engine.destroy()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("offload", "more", "text"),
    [
        ({**SPLIT, "super_offload": True}, {}, "split_master is true, and a share of 1"),
        (SPLIT, {"bf16": {"enabled": False}}, "set bf16.enabled and offload_param.device"),
        (SPLIT, {"optimizer": {"type": "Lamb"}}, "fewer bytes, but Lamb, .*optimizer.split_m"),
    ],
)
def test_settings_that_cannot_be_split_are_refused(offload: dict[str, Any], more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        start({"stage": 3, "offload_optimizer": {**HOST, **offload}, "offload_param": HOST}, **more)
    with pytest.raises(ValueError, match="set bf16.enabled and offload_param.device"):
        start({"stage": 3, "offload_optimizer": {**HOST, **SPLIT}})


@on_ranks(1)
def test_rows_of_tables_are_in_no_blocks() -> None:
    found = []
    for device in ("none", "cpu"):
        torch.manual_seed(0)
        table = nn.Embedding(11, 8, sparse=True)
        model = nn.Sequential(table, nn.Linear(8, 1)).bfloat16()
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "cpu", **SPLIT}, "offload_param": {"device": "cpu"}
            },
            "embedding_tables": {"device": device},
        }  # fmt: skip
        engine = zeromesh.initialize(model=model, config=config)[0]
        assert not any(flat in engine.sharded.swap for flat in engine.sharded.tables.flats)
        for _ in range(2):
            engine.backward(engine(torch.tensor([1, 3, 3, 7])).square().sum())
            engine.step()
        found.append(zero.safe_get_full_fp32_param(table.weight))
        engine.destroy()
    assert torch.equal(*found)
