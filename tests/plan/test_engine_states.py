"""States that the planner foresees are those that the engine reports, byte by byte."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zeromesh
from harness import on_ranks
from models import Stack
from run import configuration, train_step
from zeromesh import Settings
from zeromesh.apps.plan.choose.layout_documents import layout_from
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import Divided, ModelCost, UnitCost
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.base.kernels import update_pass
from zeromesh.base.placement import ROWS, PlacementRow, Tier
from zeromesh.comm.ordered_sums import SumPlace
from zeromesh.shard import sizes
from zeromesh.shard.sharded import ShardedModel
from zeromesh.shard.store import swap

WIDTH, WORDS, DEPTH = 64, 128, 5


class Cost:
    """The decoder's parameters, counted by hand."""

    name = "decoder"

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        embed, head = Divided(WORDS * WIDTH), Divided(WORDS * WIDTH + WORDS)
        block = Divided(2 * (2 * WIDTH * WIDTH) + 3 * WIDTH)
        units = (
            UnitCost("embed", False, embed, resident=embed),
            *(UnitCost(f"blocks.{index}", True, block) for index in range(DEPTH)),
            UnitCost("head", False, head, resident=head),
        )
        return ModelCost(self.name, micro_batch, sequence, context, units)


HOST = {"device": "cpu"}
CASES: dict[str, tuple[dict[str, Any], PlacementRow]] = {
    **{f"row {number}": ({"stage": number}, row) for number, row in ROWS.items()},
    **{
        f"row {number}, optimizer on the host": (
            {"stage": number, "offload_optimizer": HOST},
            PlacementRow(row.parameter, row.gradient, row.optimizer, Tier.DEVICE, Tier.HOST, Tier.HOST),
        )
        for number, row in ROWS.items()
        if number
    },
    "parameters on the host": (
        {"stage": 3, "offload_param": HOST},
        PlacementRow(*[ROWS[3].parameter] * 3, parameter_tier=Tier.HOST),
    ),
    "all on the host": (
        {"stage": 3, "offload_param": HOST, "offload_optimizer": HOST},
        PlacementRow(*[ROWS[3].parameter] * 3, Tier.HOST, Tier.HOST, Tier.HOST),
    ),
    "all on the host, split": (
        {"stage": 3, "offload_param": HOST, "offload_optimizer": {**HOST, "split_master": True}},
        PlacementRow(*[ROWS[3].parameter] * 3, Tier.HOST, Tier.HOST, Tier.HOST, split=True),
    ),
    "a share on the host": (
        {"stage": 2, "offload_optimizer": {**HOST, "ratio": 0.5}},
        PlacementRow(*[ROWS[2].parameter, *[ROWS[2].gradient] * 2], Tier.DEVICE, Tier.HOST, Tier.HOST, offloaded=0.5),
    ),
    "a share of all on the host": (
        {"stage": 3, "offload_param": HOST, "offload_optimizer": {**HOST, "ratio": 0.5}},
        PlacementRow(*[ROWS[3].parameter] * 3, Tier.HOST, Tier.HOST, Tier.HOST, offloaded=0.5),
    ),
    "a share of all on the host, split": (
        {"stage": 3, "offload_param": HOST, "offload_optimizer": {**HOST, "ratio": 0.5, "split_master": True}},
        PlacementRow(*[ROWS[3].parameter] * 3, Tier.HOST, Tier.HOST, Tier.HOST, offloaded=0.5, split=True),
    ),
    "optimizer on disk": (
        {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        PlacementRow(*[ROWS[3].parameter] * 3, Tier.DEVICE, Tier.HOST, Tier.NVME),
    ),
    "all on disk": (
        {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
        PlacementRow(*[ROWS[3].parameter] * 3, Tier.NVME, Tier.HOST, Tier.NVME),
    ),
}


ADAMW: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
WIDTHS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": {"type": name, "params": {"lr": 1e-3}}} for name in ("lion", "adagrad", "sgd", "lamb")},
    "momentum": {"optimizer": {"type": "sgd", "params": {"lr": 1e-3, "momentum": 0.9}}},
    "centred RMSprop": {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3, "centered": True, "momentum": 0.9}}},
    "states in bf16": {**ADAMW, "optimizer_state_dtype": "bf16"},
    "second moments in bf16": {**ADAMW, "optimizer_state_dtype": {"exp_avg_sq": "bf16"}},
    "sums in bf16": {**ADAMW, "data_types": {"grad_accum_dtype": "bf16"}},
    "messages in fp32": {**ADAMW, "communication_data_type": "fp32"},
}


def engine_configuration(zero: dict[str, Any], steps: int, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with these sections."""
    for key in ("offload_param", "offload_optimizer"):
        if zero.get(key, {}).get("device") == "nvme":
            zero = zero | {key: {**zero[key], "nvme_path": str(folder)}}
    return configuration(micro=1, accumulation=steps, zero=zero, bf16=True, units=["Block"]) | more


def reported(config: dict[str, Any]) -> tuple[dict[tuple[str, str], int], SumPlace]:
    """Return the bytes of states by state and tier, and where gradients are summed."""
    steps = config["gradient_accumulation_steps"]
    engine = zeromesh.initialize(model=Stack(WORDS, WIDTH, [2 * WIDTH] * DEPTH, head=WORDS), config=config)[0]
    for _ in range(steps):
        train_step(engine, engine(torch.arange(8).view(1, 8)))
    report = engine.memory_report()
    sizes = {(state, tier): size for state in ("parameter", "gradient", "optimizer", "slot")
             for tier, size in report[state].items() if size}  # fmt: skip
    # Numbers of the steps, one for each parameter, are not in the plan; beside files they are on the host.
    for flat in engine.sharded.flats:
        for _, _, piece in flat.pieces:
            tier = "host" if flat.optimizer_tier is Tier.NVME else flat.optimizer_tier.value
            values = engine.optimizer.state.get(piece.parameter, {}).values()
            numbers = sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and not value.ndim)
            if numbers:
                sizes["optimizer", tier] -= numbers
    engine.destroy()
    return {key: size for key, size in sizes.items() if size}, engine.mesh.shard.sums


def check(folder: Path, ranks: int, names: list[str], accumulations: tuple[int, ...] = (1, 3)) -> None:
    for name in names:
        zero, row = CASES[name]
        for steps in accumulations:
            early = float(row.optimizer_tier is Tier.NVME and row.parameter_tier is not Tier.NVME)
            layout = ParallelLayout(data=ranks, row=row, accumulation=steps, early=early)
            found, sums = reported(engine_configuration(zero, steps, folder, ADAMW))
            (rank,) = memory_of(Cost(), 8, layout, sums=sums)
            assert found == {key: size for key, size in rank.states.items() if size}, (name, steps)


@pytest.mark.parametrize("name", ["optimizer on disk", "all on disk"])
def test_states_that_are_read_in_windows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (swap, sizes):
        monkeypatch.setattr(module, "WINDOW", 4096)
    check(tmp_path, 1, [name], (3,))


@pytest.mark.full
@pytest.mark.parametrize("name", list(CASES))
def test_states_of_one_rank(name: str, tmp_path: Path) -> None:
    check(tmp_path, 1, [name])


@pytest.mark.full
@on_ranks(2)
def test_states_of_two_ranks(tmp_path: Path) -> None:
    check(tmp_path, 2, list(CASES))


@on_ranks(2)
def test_states_of_some_rows(tmp_path: Path) -> None:
    check(tmp_path, 2, ["row 1", "all on disk"], (3,))


@on_ranks(2)
def test_states_of_configurations() -> None:
    for name, more in WIDTHS.items():
        config = engine_configuration({"stage": 3, "offload_optimizer": {**HOST, "ratio": 0.5}}, 2, Path(), more)
        layout, _ = layout_from(Settings.load(config), 2)
        found, sums = reported(config)
        (rank,) = memory_of(Cost(), 8, layout, sums=sums)
        assert found == {key: size for key, size in rank.states.items() if size}, name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("kind", "more", "parts"),
    [("AdamW", {}, True), ("AdamW", {"bf16": {"enabled": False}}, True), ("Lamb", {}, False)],
)
def test_an_update_widens_narrow_sums_of_one_unit_or_of_all(kind: str, more: dict[str, Any], parts: bool) -> None:
    named = {"optimizer": {"type": kind, "params": {"lr": 1e-3}}, **more}
    config = engine_configuration({"stage": 2}, 2, Path(), {**named, "data_types": {"grad_accum_dtype": "bf16"}})
    seen: list[int] = []
    plain = ShardedModel.set_gradients

    def noted(self: ShardedModel, *args: Any) -> None:
        plain(self, *args)
        gradients = [piece.parameter.grad for flat in self.flats for *_, piece in flat.pieces]
        seen.append(sum(gradient.nbytes for gradient in gradients if gradient is not None))

    with patch.object(ShardedModel, "set_gradients", noted):
        _, sums = reported(config)
    layout, _ = layout_from(Settings.load(config), 1)
    (rank,) = memory_of(Cost(), 8, layout, sums=sums)
    (update,) = (moment for moment in rank.timeline if moment.label == "update")
    assert update.bytes["temporary"] == max(seen)
    assert (len(seen) > 1) is parts


@pytest.mark.usefixtures("one_rank")
def test_an_update_of_narrow_states_widens_no_sums() -> None:
    more = ADAMW | {"data_types": {"grad_accum_dtype": "bf16"}, "optimizer_state_dtype": "bf16"}
    config = engine_configuration({"stage": 2}, 2, Path(), more)
    handed: list[torch.Tensor | None] = []
    plain = ShardedModel.set_gradients

    def noted(self: ShardedModel, *args: Any) -> None:
        plain(self, *args)
        handed.extend(piece.parameter.grad for flat in self.flats for *_, piece in flat.pieces)

    with patch.object(ShardedModel, "set_gradients", noted):
        _, sums = reported(config)
    assert handed
    assert all(gradient is None for gradient in handed)
    layout, _ = layout_from(Settings.load(config), 1)
    machine, block = cluster("h100", 1), 2 * (2 * WIDTH * WIDTH) + 3 * WIDTH
    nodes = tuple((replace(node, device=replace(node.device, processor=True)), n) for node, n in machine.nodes)
    for used, of_element in ((machine, update_pass.WINDOW_BYTES), (replace(machine, nodes=nodes), 0)):
        (rank,) = memory_of(Cost(), 8, layout, used, sums=sums)
        (update,) = (moment for moment in rank.timeline if moment.label == "update")
        assert update.bytes["temporary"] == block * of_element
