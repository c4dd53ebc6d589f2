"""Layouts that the configuration leaves to the planner: filled in at the start, on all ranks alike."""

import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import zeromesh
from harness import run_ranks
from zeromesh.apps.plan.machine.cluster import Device, LinkSpeed, Machine, Node
from zeromesh.apps.plan.machine.here import machine_here, with_host
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base import machine as observed
from zeromesh.base.machine import MACHINE
from zeromesh.config.planned_keys import MESH, MICRO, OFFLOAD, STAGE, asked_of_planner

BASE: dict[str, Any] = {
    "train_batch_size": 16, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}  # fmt: skip
STATES = 16  # bytes of a parameter's states in bf16


def trained(config: dict[str, Any]) -> tuple[float, int, int, str, dict[str, int]]:
    torch.manual_seed(0)
    model = Decoder(
        ModelShape(architecture="llama", vocab_size=256, hidden_size=64, layers=3, heads=4, sequence_length=32)
    )
    ids = torch.randint(256, (64, 33), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(ids[:, :-1], ids[:, 1:])
    engine, *_ = zeromesh.initialize(model=model, config=config, training_data=data)
    loss, settings = float(engine.train_batch()), engine.config
    engine.destroy()
    device = settings.zero_optimization.optimizer_device
    return loss, settings.zero_optimization.stage, settings.train_micro_batch_size_per_gpu, device, engine.mesh.sizes


def test_what_is_asked_follows_from_the_keys() -> None:
    assert asked_of_planner({"mesh": "auto"}) == {MESH}
    assert asked_of_planner({"zero_optimization": "auto"}) == {STAGE, OFFLOAD}
    assert asked_of_planner({"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "cpu"}}}) == {STAGE}
    assert asked_of_planner({MICRO: "auto", "train_batch_size": 8}) == {MICRO}
    # Nothing says how large a batch is to be, and Trainer's configurations have "auto" for both.
    assert asked_of_planner({MICRO: "auto", "train_batch_size": "auto"}) == frozenset()
    assert asked_of_planner(zeromesh.Settings.load({"mesh": "auto"})) == frozenset()


@pytest.mark.usefixtures("one_rank")
def test_one_process_fills_in_what_is_auto_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zeromesh")
    loss, stage, micro, device, _ = trained(BASE | {MICRO: "auto", "zero_optimization": {"stage": "auto"}})
    assert (stage, micro, device) == (0, 16, "none")
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert 'the planner set the "auto" keys' in said
    assert "nothing fills in here" not in said
    assert loss == trained(BASE | {MICRO: 16})[0]


def on_machine(config: dict[str, Any], machine: str) -> Any:
    # Here and not in the test: the ranks' processes serve several tests, with the variables of their start.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MACHINE, machine)
        return trained(config)


def test_a_model_that_does_not_fit_two_devices_goes_to_their_host(tmp_path: Path) -> None:
    config = BASE | {MICRO: 1, "zero_optimization": {"stage": "auto"}, "offload": "auto"}
    elements = 3 * (4 * 64 * 64 + 3 * 64 * 192) + 256 * 64
    path = tmp_path / "machine.json"
    found = {}
    for name, memory in (("large", 1e10), ("small", 0.55 * STATES * elements)):
        device = Device(name, memory, {"bf16": 1e12, "fp32": 1e11}, 1e11, reserved=0.0)
        link = LinkSpeed(1e10, 1e-5)
        Machine(((Node(device, 2, link, link, 1e11, 1e10, 2), 1),), link, name).save(path)
        first, second = run_ranks(on_machine, 2, config, str(path))
        assert first == second
        found[name] = first
    assert found["large"][3] == "none"
    assert found["small"][3] == "cpu"
    # One sample a rank is one update of the same batch, wherever states rest.
    assert found["small"][0] == pytest.approx(found["large"][0], rel=1e-3)


def llama_on_machine(own_batches: bool, machine: str) -> tuple[float, dict[str, int]]:
    shape = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = LlamaForCausalLM(shape), torch.randint(256, (64, 32), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": row, "labels": row} for row in ids] if own_batches else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MACHINE, machine)
        engine, *_ = zeromesh.initialize(
            model=model, training_data=data,
            config=BASE | {MICRO: 8, "bf16": {"enabled": False}, "mesh": "auto", "dataloader_drop_last": True},
        )  # fmt: skip
    loss = float(engine.train_batch()) if own_batches else 0.0
    engine.destroy()
    return loss, engine.mesh.sizes


@pytest.mark.usefixtures("one_rank")
def test_layers_are_split_where_only_that_fits_and_batches_are_ours(tmp_path: Path) -> None:
    link = LinkSpeed(1e10, 1e-5)
    paths = {}
    # States take 2.9 MB; samples of 32 tokens need more memory than those of 5, of which the model itself has some.
    for name, memory in (("large", 1e10), ("small", 4.5e6), ("smaller", 3.5e6)):
        node = Node(Device(name, memory, {"fp32": 1e11}, 1e11, reserved=0.0), 2, link, link, 1e11, 1e10, 2)
        Machine(((node, 1),), link, name).save(path := tmp_path / name)
        paths[name] = str(path)
    whole, _ = llama_on_machine(True, paths["large"])
    (loss, sizes), _ = run_ranks(llama_on_machine, 2, True, paths["small"])
    assert (sizes["tensor"], sizes["data"]) == (2, 1)
    assert loss == pytest.approx(whole, rel=1e-5)
    # The user's own loader may give each rank other samples.
    (_, sizes), _ = run_ranks(llama_on_machine, 2, False, paths["smaller"])
    assert sizes["tensor"] == 1


class Augmented(TensorDataset):
    """Samples that differ from reading to reading."""

    def __getitem__(self, index: Any) -> Any:
        ids, labels = super().__getitem__(index)
        return (ids + torch.randint(2, ids.shape) + random.randrange(2)) % 256, labels


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "asked", [{"activation_checkpointing": "auto"}, {MICRO: "auto", "zero_optimization": {"stage": "auto"}}]
)
def test_a_run_draws_the_same_random_numbers_with_and_without_a_plan(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster("h100", 1).save(path := tmp_path / "machine.json")
    monkeypatch.setenv(MACHINE, str(path))

    def drawn(config: dict[str, Any]) -> tuple[list[int], int]:
        torch.manual_seed(0)
        random.seed(0)
        model = Decoder(ModelShape(vocab_size=256, hidden_size=16, layers=2, heads=2, sequence_length=8))
        data = Augmented(*(torch.zeros(16, 8, dtype=torch.long) for _ in range(2)))
        engine, *_ = zeromesh.initialize(model=model, config=config, training_data=data)
        engine.destroy()
        return torch.randint(1000, (8,)).tolist(), random.randrange(1000)

    assert drawn(BASE | asked) == drawn(BASE)


def test_a_machine_file_that_is_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MACHINE, str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="no such file"):
        trained(BASE | {"mesh": "auto"})


def test_a_known_gpu_has_the_host_that_it_is_in() -> None:
    usual = cluster(gpu="h100", gpus=2)
    ((found, count),) = with_host(usual).nodes
    ((node, _),) = usual.nodes
    assert (found.device, found.devices, found.host, count) == (node.device, 2, node.host, 1)
    total = observed.memory()["total_bytes"]
    assert total is None or 0 < found.host_memory <= total
    assert found.cores == observed.processor()["cores"]


def test_a_run_on_fewer_ranks_has_a_part_of_a_described_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    link = LinkSpeed(1e10, 1e-5)
    node = Node(Device("gpu", 1e10, {"fp32": 1e11}, 1e11), 4, link, link, 1e11, 1e10, 2)
    Machine(((node, 3),), link).save(path)
    monkeypatch.setenv(MACHINE, str(path))
    (found,) = machine_here(2, 2).nodes
    assert found == (replace(node, devices=2), 2)
    assert machine_here(4, 3).devices == 12
    with pytest.raises(ValueError, match=r"has 12 devices, too few for 8 ranks on 1 node.*doctor --ranks 8 --save"):
        machine_here(8, 1)
