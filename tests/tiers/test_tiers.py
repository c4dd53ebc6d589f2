"""States that rest off the device: where they lie, what is counted, and that nothing else changes."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import zeromesh
from harness import on_ranks, run_ranks
from heap import Heap
from models import Stack
from run import adamw, start_engine, train_step

HOST = {"device": "cpu"}
OFFLOADED: dict[str, dict[str, Any]] = {
    "none": {"stage": 3},
    "optimizer of row 1": {"stage": 1, "offload_optimizer": HOST},
    "optimizer of row 2": {"stage": 2, "offload_optimizer": HOST},
    "optimizer of row 3": {"stage": 3, "offload_optimizer": HOST},
    "parameters": {"stage": 3, "offload_param": HOST},
    "all": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
    "all, split": {"stage": 3, "offload_optimizer": {**HOST, "split_master": True}, "offload_param": HOST},
}
WIDTH = 480


class Net(Stack):
    def __init__(self, depth: int = 3) -> None:
        super().__init__(32, WIDTH, [2 * WIDTH] * depth)


def start(zero: dict[str, Any], depth: int = 3, **more: Any) -> zeromesh.Engine:
    torch.manual_seed(3)
    return start_engine(Net(depth), more, micro=1, zero=zero, optimizer=adamw(1e-3), bf16=True, units=["Block"])


def update(engine: zeromesh.Engine, number: int = 0) -> float:
    tokens = torch.arange(8).view(1, 8) + 8 * engine.mesh.rank + number
    return train_step(engine, engine(tokens % 32))


def in_parameters(name: str) -> dict[str, dict[str, float]]:
    """Bytes per parameter by state and tier, on two ranks in bf16; sums of gradients of two ranks are in fp32."""
    on_host, half = "optimizer" in name or "all" in name, 0.5
    tier = "host" if on_host else "device"
    whole = 2.0 if "row 1" in name or "row 2" in name else 2 * half
    if name == "none":  # parameters rest in their masters
        return {"parameter": {}, "gradient": {"device": 4 * half}, "optimizer": {"device": 12 * half}}
    gradient = {tier: 4 * half} | ({"device": 2.0} if "row 1" in name else {})
    home = "host" if name == "parameters" or "all" in name else "device"
    states = (2 if "split" in name else 4) + 8
    return {"parameter": {home: whole}, "gradient": gradient, "optimizer": {tier: states * half}}


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 and Linux count")
@on_ranks(2)
def test_the_report_by_tier_is_what_the_formulas_say_and_the_heap_holds() -> None:
    names = list(OFFLOADED)
    found, heap = {}, Heap()
    for name in [names[0], *names]:  # what libraries allocate once is there from the second on
        gc.collect()
        before = heap.live()
        engine = start(OFFLOADED[name])
        update(engine)
        update(engine)
        engine.sharded.rest()
        gc.collect()
        found[name] = engine.memory_report(), heap.live() - before
        engine.destroy()
        del engine
    elements = sum(parameter.numel() for parameter in Net().parameters())
    for name, (report, resting) in found.items():
        for state, tiers in in_parameters(name).items():
            assert set(tiers) <= set(report[state]), (name, state)
            for tier, size in report[state].items():
                assert size / elements == pytest.approx(tiers.get(tier, 0.0), rel=0.01, abs=0.01), (name, state)
        given_back = 4 * elements / 2 if name in ("none", "parameters") else 0  # sums of gradients in row 3
        slots = sum(report["slot"].values())
        held = report["total"] - slots - given_back
        assert held - 2e5 <= resting <= held + slots + 8e5, name


@on_ranks(2)
def test_with_all_on_the_host_the_device_holds_as_much_whatever_the_depth() -> None:
    found = []
    for depth in (2, 6):
        engine = start(OFFLOADED["all"], depth)
        update(engine)
        found.append(engine.memory_report())
        engine.destroy()
    shallow, deep = ({s: v for s, v in one.items() if isinstance(v, dict) and s != "measured"} for one in found)
    on_device, on_host = (
        [sum(state.get(tier, 0) for state in report.values()) for report in (shallow, deep)]
        for tier in ("device", "host")
    )
    assert on_device[1] <= on_device[0]
    assert on_host[1] > 2.5 * on_host[0]


@on_ranks(2)
def test_units_whose_gradients_come_last_stay_on_the_device() -> None:
    engine = start({"stage": 2, "offload_optimizer": {**HOST, "ratio": 0.4}})
    update(engine)
    tiers = {unit.name: flat.optimizer_tier.value for unit in engine.sharded.units for flat in unit.flats}
    assert tiers == {"": "device", "blocks.0": "device", "blocks.1": "host", "blocks.2": "host"}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["optimizer of row 1", "optimizer of row 3", "parameters", "all"])
@on_ranks(2)
def test_the_host_is_a_store_of_its_own_where_device_and_host_are_one_memory(name: str) -> None:
    engine = start(OFFLOADED[name])
    update(engine)
    row = engine.config.row
    with engine.sharded.gathered(engine.sharded.units):
        for flat in engine.sharded.flats:
            places = {
                "shard": (flat.shard, row.parameter_tier),
                "master": (flat.master, row.optimizer_tier),
                "gradient": (flat.gradient.buffer, row.gradient_tier),
                "full": (flat.full, "slots"),
            }
            for pair in (("shard", "master"), ("gradient", "full"), ("gradient", "shard"), ("master", "full")):
                (one, tier), (other, its) = (places[state] for state in pair)
                if tier != its and one is not None and other is not None:
                    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr(), pair


def trained(zero: dict[str, Any], folder: Path, before: Path | None, **more: Any) -> Any:
    engine = start(zero, 4, **more)
    if before is not None:
        assert engine.load_checkpoint(before)[0] is not None
    losses = [update(engine, number) for number in range(2)]
    engine.save_checkpoint(folder)
    parameter = engine.module.blocks[3].down.weight
    states = [zeromesh.zero.safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    return losses, [zeromesh.zero.safe_get_full_fp32_param(parameter), *states], state


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    assert one[2].keys() == other[2].keys()
    assert all(torch.equal(value, other[2][name]) for name, value in one[2].items())


@pytest.mark.full
def test_a_checkpoint_goes_on_with_its_states_elsewhere(tmp_path: Path) -> None:
    device, before, places = {"stage": 2}, None, ["optimizer of row 2", "all", "none", "optimizer of row 1"]
    plain_before = None
    for number, name in enumerate(places):
        plain, other = tmp_path / f"plain{number}", tmp_path / f"other{number}"
        expected = run_ranks(trained, 2, device, plain, plain_before)
        for one, rank in zip(run_ranks(trained, 2, OFFLOADED[name], other, before), expected, strict=True):
            assert_same(one, rank)
        plain_before, before = plain, other


def changed(zero: dict[str, Any]) -> list[torch.Tensor]:
    engine = start(zero)
    update(engine)
    first, second, third = (block.up.weight for block in engine.module.blocks)
    zeromesh.zero.safe_set_full_fp32_param(first, torch.full(first.shape, 0.125))
    with zeromesh.zero.GatheredParameters(second, modifier_rank=1):
        second.data.mul_(0.5)
    zeromesh.zero.safe_set_full_optimizer_state(third, torch.full(third.shape, 0.25), "exp_avg")
    engine.backward(engine(torch.arange(8).view(1, 8)))
    gradient = zeromesh.zero.safe_get_full_grad(third)
    zeromesh.zero.safe_set_full_grad(first, torch.full(first.shape, 0.5))
    engine.step()
    masters = [zeromesh.zero.safe_get_full_fp32_param(parameter) for parameter in (first, second, third)]
    return [gradient, *masters]


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["optimizer of row 1", "all"])
def test_users_read_and_change_what_rests_on_the_host(name: str) -> None:
    for one, other in zip(*(run_ranks(changed, 2, zero) for zero in (OFFLOADED[name], {"stage": 2})), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def in_stages(zero: dict[str, Any], mesh: dict[str, int], clipping: float = 0.1) -> list[float]:
    import test_pipeline

    torch.manual_seed(3)
    engine = start_engine(
        test_pipeline.build("tied"),
        batch=16,
        micro=4,
        clipping=clipping,
        zero=zero,
        mesh=mesh,
        optimizer=test_pipeline.ADAMW,
    )
    accumulation = engine.gradient_accumulation_steps()
    given = [test_pipeline.batches("tied", step, accumulation, engine.data_rank, engine.data_size) for step in range(3)]
    return [value for batch in given for value in (engine.train_batch(batch).item(), engine.get_global_grad_norm())]


@pytest.mark.some(1)
@pytest.mark.parametrize(("stage", "mesh"), [(1, {"pipeline": 2}), (3, {"pipeline": 2}), (2, {"tensor": 2})], ids=str)
def test_stages_and_split_layers_update_on_the_host(stage: int, mesh: dict[str, int]) -> None:
    more = {"offload_param": HOST} if stage == 3 else {}
    zero = {"stage": stage, "offload_optimizer": HOST, **more}
    assert run_ranks(in_stages, 2, zero, mesh) == run_ranks(in_stages, 2, {"stage": stage}, mesh)
