"""Faults of a run that no other file is about: killed ranks, loaders that raise, short batches, no memory."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_command, run_ranks
from run import train_step
from zeromesh.apps.plan.choose.layout_documents import layout_from
from zeromesh.base.words import bytes_text
from zeromesh.comm.environment import shutdown
from zeromesh.engine.reports import STATES, explain, planned_states

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

SCRIPT = """
import os, signal, sys
import torch, zeromesh

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if sys.argv[1] == "loader" and engine.global_steps == 2 and engine.mesh.rank == 1:
            raise ValueError("sample %d is broken" % index)
        return torch.ones(4), torch.ones(1)

model = torch.nn.Linear(4, 1)
engine, _, loader, _ = zeromesh.initialize(model=model, config=__CONFIG__, training_data=Samples())
for x, y in loader:
    loss = (engine(x) - y).square().mean()
    engine.backward(loss)
    if sys.argv[1] == "killed" and engine.global_steps == 3 and engine.mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.step()
"""


def launched(folder: Path, fault: str) -> str:
    path = folder / "script.py"
    path.write_text(SCRIPT.replace("__CONFIG__", repr(CONFIG)))
    command = [sys.executable, "-m", "zeromesh.apps.cli.main", "launch", "--nproc", "2", path, fault]
    result = run_command(command, timeout=120)
    assert result.returncode != 0
    return result.stdout


@pytest.mark.full
def test_a_rank_that_is_killed_in_a_step_is_named_with_step_and_signal(tmp_path: Path) -> None:
    said = launched(tmp_path, "killed")
    assert "rank 1 failed first: killed by SIGKILL in step 4" in " ".join(said.split())


@pytest.mark.full
def test_an_error_of_one_ranks_data_is_shown_and_not_that_of_its_peers(tmp_path: Path) -> None:
    said = launched(tmp_path, "loader")
    assert "rank 1 failed first: ValueError: sample" in " ".join(said.split())
    assert "in __getitem__" in said
    assert "could not be finished" not in said


def losses_of_a_short_pass() -> list[tuple[float, list[float]]]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    data = [(torch.tensor([float(number)]), torch.tensor([0.0])) for number in range(1, 6)]
    engine, _, loader, _ = zeromesh.initialize(
        model=model, config=CONFIG | {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}, training_data=data
    )
    found = []
    for _ in range(2):
        for x, y in loader:
            loss = (engine(x) - y).abs().mean()
            train_step(engine, loss)
            found.append((loss.item(), x.flatten().tolist()))
    return found


def test_the_rest_of_a_pass_is_divided_evenly_so_that_every_update_is_a_mean() -> None:
    """Five samples in updates of four: two are left over with one that is taken again, one for each rank."""
    by_rank = run_ranks(losses_of_a_short_pass, 2)
    assert [len(found) for found in by_rank] == [4, 4]  # two updates in each of two passes, on both ranks
    for steps in zip(*by_rank, strict=True):
        assert len({len(samples) for _, samples in steps}) == 1
        for loss, samples in steps:
            assert loss == 2.0 * sum(samples) / len(samples)  # exact: small whole numbers
    for first in (0, 2):
        seen = [sample for found in by_rank for _, samples in found[first : first + 2] for sample in samples]
        assert {*seen} == {1.0, 2.0, 3.0, 4.0, 5.0}


class Hungry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1000, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + (torch.empty(2**50, dtype=torch.uint8)[:1000] if len(x) == 2 else 0)


def test_out_of_memory_tells_what_was_planned_what_is_used_and_three_remedies() -> None:
    settings = {**CONFIG, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine = zeromesh.initialize(model=Hungry(), config=settings)[0]
    try:
        train_step(engine, engine(torch.ones(1, 1000)).sum())
        with pytest.raises(RuntimeError, match="allocate") as caught:
            engine(torch.ones(2, 1000))
        notes = "\n".join(caught.value.__notes__)
        engine.destroy()
    finally:
        shutdown()
    # A million parameters: values, gradients, and two states of Adam with the number of the step.
    assert "zeromesh had planned 16.0 MB of states on this rank, and has 16.0 MB at the most" in notes
    assert "  parameter: 4.00 MB planned, 4.00 MB on device" in notes
    assert "  optimizer: 8.01 MB planned, 8.01 MB on device" in notes
    assert "were in use at the most" in notes
    # States of a processor gain nothing on the host, whose memory is the same.
    assert "offload" not in notes
    assert '1. "train_micro_batch_size_per_gpu": 1 with "gradient_accumulation_steps": 2 halves activations' in notes
    assert '2. "activation_checkpointing": {"enabled": true}' in notes
    assert '3. "zero_optimization": {"stage": 3} on 2 ranks instead of 1: ' in notes


def on_device(zero: dict[str, Any]) -> tuple[int, str]:
    """Bytes of states on the device after a step, and what an error would say there if it were a GPU's."""
    settings = {**CONFIG, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "zero_optimization": zero}
    engine = zeromesh.initialize(model=Hungry(), config=settings)[0]
    train_step(engine, engine(torch.ones(1, 1000)).sum())
    report = engine.memory_report()
    engine.mesh.device = torch.device("cuda")
    note = explain(report, engine.sharded, engine.optimizer, engine.config)
    engine.mesh.device = torch.device("cpu")
    engine.destroy()
    return sum(report[state].get("device", 0) for state in STATES), note


def test_a_remedy_saves_what_it_says() -> None:
    try:
        before, note = on_device({"stage": 0})
        after, _ = on_device({"stage": 2, "offload_optimizer": {"device": "cpu"}})
    finally:
        shutdown()
    # Not at stage 0, which has no offload.
    key = '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}'
    assert f"1. {key} moves the optimizer to the host: {bytes_text(before - after)} less" in note


def remedies_on_two_ranks() -> str:
    engine = zeromesh.initialize(model=Hungry(), config=CONFIG)[0]
    try:
        engine(torch.ones(2, 1000))
    except RuntimeError as error:
        return "\n".join(error.__notes__)
    return ""


@pytest.mark.full
def test_out_of_memory_on_several_ranks_advises_to_shard() -> None:
    for notes in run_ranks(remedies_on_two_ranks, 2):
        assert '1. "zero_optimization": {"stage": 3} shards parameter and gradient and optimizer over 2 ranks' in notes


def planned_and_kept() -> list[tuple[dict[Any, float], dict[Any, float]]]:
    """Bytes of states by the planner's arithmetic and by the engine's count, of a model with frozen parameters."""
    found = []
    for stage in (0, 2, 3):
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64).requires_grad_(False), nn.Linear(64, 64))
        settings = CONFIG | {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        engine = zeromesh.initialize(model=model, config=settings)[0]
        layout, _ = layout_from(engine.config, engine.mesh.world_size)
        widths = replace(layout.widths, states=0)  # CONFIG has plain SGD
        planned = planned_states(engine.sharded, replace(layout, widths=widths), layout.tables)
        report = engine.memory_report()
        kept = {(s, tier): size for s in STATES for tier, size in report[s].items() if size}
        found.append((planned, kept))
        engine.destroy()
    return found


def test_states_of_a_running_engine_are_those_that_the_planner_foresees() -> None:
    for planned, kept in run_ranks(planned_and_kept, 2)[0]:
        assert planned == kept
