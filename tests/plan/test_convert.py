"""Layouts become configurations that the settings accept, and come back as they were."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from planning import Plain, machine
from zeromesh import Settings
from zeromesh.apps.plan.choose.layout_documents import document_for, launch_command, layout_from, precision_for
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.choose.space import LayoutSpace, ModelLimits, PlanRequest
from zeromesh.apps.plan.machine.cluster import Device
from zeromesh.apps.plan.predict.pipeline_step import placement_of
from zeromesh.base.placement import ROWS, Tier
from zeromesh.config.written import row_name
from zeromesh.engine.initialize.widths import PRECISIONS
from zeromesh.parallel.pipeline.schedule.schedule_files import with_costs
from zeromesh.parallel.pipeline.schedule.simulate import Costs


def every_kind() -> list[ParallelLayout]:
    """One layout of each row, axis, schedule, policy and slot of the space for 8 devices with disks."""
    request = PlanRequest(Plain(16), machine(2, 4, disk=1e13), 16, 4096, ModelLimits(16, 8, 4096))
    space = LayoutSpace(request, request.machine)
    kinds: dict[object, ParallelLayout] = {}
    for mesh in space.meshes():
        plain = space.plain(*mesh)
        runs = list(space.runs(plain))
        for run in runs:
            kinds.setdefault((run.schedule, run.chunks, run.recompute, run.activations_on_host), run)
        for base in space.bases(plain):
            chosen = replace(runs[0], data=base.data, replicate=base.replicate, row=base.row)
            chosen = replace(chosen, parameter_slots=base.parameter_slots)
            kinds.setdefault(base.row, chosen)
            kinds.setdefault((base.parameter_slots, base.replicate > 1), chosen)
            kinds.setdefault((mesh[0] > 1, mesh[1] > 1, mesh[2] > 1), chosen)
    return list(kinds.values())


def test_the_settings_accept_every_kind_of_layout_and_give_it_back() -> None:
    kinds = every_kind()
    assert {layout.stage for layout in kinds} == {0, 1, 2, 3}
    assert {layout.row.optimizer_tier for layout in kinds} == set(Tier)
    assert {layout.schedule for layout in kinds} >= {"1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "breadth-first"}
    for layout in kinds:
        settings = Settings.load(document_for(layout, "bf16"))
        assert layout_from(settings, 8) == (layout, "bf16")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_come_back_with_their_widths(precision: str) -> None:
    layout = ParallelLayout(4, row=ROWS[3], widths=PRECISIONS[precision])
    assert layout_from(Settings.load(document_for(layout, precision)), 4) == (layout, precision)


def test_measured_costs_and_files_of_schedules_are_in_the_layout(tmp_path: Path) -> None:
    costs = Costs((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), latency=0.5)
    (tmp_path / "update_3.json").write_text(json.dumps(with_costs({}, costs)))
    document = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "mesh": {"pipeline": 2}}
    measured = {"schedule": "search", "costs": str(tmp_path / "update_3.json")}
    assert layout_from(Settings.load({**document, "pipeline": measured}), 4)[0].costs == costs
    own = {"schedule": {"file": "schedule.txt"}}
    layout, _ = layout_from(Settings.load({**document, "pipeline": own}), 4)
    assert (layout.schedule, layout.costs) == ("schedule.txt", None)
    with pytest.raises(ValueError, match="there is no schedule 'schedule.txt'; take one of gpipe, 1f1b"):
        placement_of(layout.schedule, 2, 4, 1)


def test_devices_train_in_the_first_precision_that_they_have() -> None:
    assert precision_for(Device("V100", 32e9, {"fp32": 15e12, "fp16": 125e12}, 9e11)) == "fp16"
    assert precision_for(Device("CPU", 32e9, {"fp32": 1e11}, 2e10)) == "fp32"


def test_the_launch_command_has_the_ranks_of_a_node() -> None:
    layout = ParallelLayout(16)
    assert launch_command(layout, 1, "c.json") == "zeromesh launch --nproc 16 train.py c.json"
    assert "--nnodes 2 " in launch_command(layout, 2, "c.json")
    assert "--nproc 8 " in launch_command(layout, 2, "c.json")


def test_rows_have_names() -> None:
    host = replace(ROWS[2], gradient_tier=Tier.HOST, optimizer_tier=Tier.HOST)
    assert row_name(ROWS[1]) == "ZeRO-1"
    assert row_name(replace(host, offloaded=0.5)) == "ZeRO-2, 50% of optimizer on host"
    assert row_name(replace(ROWS[3], parameter_tier=Tier.HOST, optimizer_tier=Tier.NVME)) == (
        "ZeRO-3, optimizer on NVMe, parameters on host"
    )


@pytest.mark.parametrize(
    ("chosen", "want"),
    [({}, 1), ({"strategy": "ulysses"}, 4), ({"ulysses_degree": 2}, 2), ({"ulysses_degree": 3}, "1 or 2 or 4 can")],
)
def test_ranks_that_share_heads_are_in_the_layout_of_a_configuration(chosen: dict, want: int | str) -> None:
    settings = Settings.load({"mesh": {"context": 4}, "context_parallel": chosen, "train_batch_size": 1})
    with pytest.raises(ValueError, match=want) if isinstance(want, str) else nullcontext():
        assert layout_from(settings, 4)[0].ulysses == want


def test_float8_is_in_the_layout_of_a_configuration() -> None:
    chosen = {"bf16": {"enabled": True}, "float8": {"enabled": True, "gather": True}, "zero_optimization": {"stage": 3}}
    layout, precision = layout_from(Settings.load({**chosen, "train_batch_size": 8}), 8)
    assert (layout.products, layout.widths.gathered, precision) == ("fp8", 1, "bf16")
    plain, _ = layout_from(Settings.load({"bf16": {"enabled": True}, "train_batch_size": 8}), 8)
    assert (plain.products, plain.widths) == ("", PRECISIONS["bf16"])
