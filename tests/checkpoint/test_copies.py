"""Copies of the state in memory: equal bit for bit to where they were taken, and complete while any node is lost."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh
from harness import run_ranks
from run import adamw, start_engine, train_step
from zeromesh.base.lock import FolderInUse
from zeromesh.checkpoint.copies import memory_files
from zeromesh.checkpoint.copies.copies import MemoryCopies
from zeromesh.checkpoint.copies.memory_files import MARK, MEMORY, mark, marked
from zeromesh.checkpoint.copies.needed_parts import deliveries
from zeromesh.config.errors import ConfigError

LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 1, bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "stage 3": {"zero_optimization": {"stage": 3}},
    "stage 3, host": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "tensor": {"mesh": {"tensor": 2}},
}


def make(settings: dict[str, Any], copies: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 8))
    engine = start_engine(
        model,
        settings,
        batch=12,
        micro=1,
        clipping=1.0,
        optimizer=adamw(1e-2),
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        checkpoint={"peer_copies": copies},
    )
    torch.manual_seed(engine.data_rank)
    return engine


def step(engine: Any) -> list[float]:
    losses = []
    for number in range(engine.gradient_accumulation_steps()):
        seed = engine.global_steps * 100 + number * 10 + engine.data_rank
        inputs = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
        losses.append(
            train_step(engine, engine(inputs.to(next(engine.module.parameters()).dtype)).float().square().mean())
        )
    return losses


def fail(engine: Any) -> None:
    """End an engine as an error in the script does."""
    try:
        raise RuntimeError("the run fails")
    except RuntimeError:
        engine.destroy()


def of_node(root: Path, ranks_per_node: int) -> None:
    """Let this rank be on a node of its own, or share one with those beside it."""
    folder = root / f"node-{int(os.environ['RANK']) // ranks_per_node}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[MEMORY] = str(folder)


def first(root: Path, ranks_per_node: int, settings: dict[str, Any], copies: int, steps: int) -> list[Any]:
    of_node(root, ranks_per_node)
    engine = make(settings, copies)
    losses = []
    for number in range(steps + 3):
        losses.append(step(engine))
        if number < steps:
            engine.save_to_memory(root / "run", {"step": engine.global_steps, "values": torch.arange(3)})
    fail(engine)
    return losses


def second(root: Path, ranks_per_node: int, settings: dict[str, Any], copies: int, steps: int) -> Any:
    of_node(root, ranks_per_node)
    engine = make(settings, copies)
    path, state = engine.load_checkpoint(root / "run")
    if path is None:
        engine.destroy()
        return None
    assert Path(path).is_relative_to(os.environ[MEMORY])
    assert state["step"] == engine.global_steps == steps
    assert state["values"].equal(torch.arange(3))
    losses = []
    for _ in range(3):
        losses.append(step(engine))
        engine.save_to_memory(root / "run", {})
    engine.destroy()
    return losses


def left(root: Path) -> list[str]:
    found = [str(path.relative_to(root)) for path in root.rglob("zeromesh-*")]
    return found + [MARK] * (root / "run" / MARK).exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_from_memory_bit_for_bit(layout: str, tmp_path: Path) -> None:
    before = run_ranks(first, 2, tmp_path, 2, LAYOUTS[layout], 1, 4)
    after = run_ranks(second, 2, tmp_path, 2, LAYOUTS[layout], 1, 4)
    assert [losses[4:] for losses in before] == after
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("ranks", "per_node", "copies", "lost", "survives"),
    [
        (2, 1, 1, [0], True),
        (4, 2, 1, [1], True),
        (4, 1, 1, [1, 2], False),
        (4, 1, 2, [1, 2], True),
        (3, 2, 1, [0], True),
    ],
)
def test_lost_nodes_are_made_up_for_by_those_after_them(
    ranks: int, per_node: int, copies: int, lost: list[int], survives: bool, tmp_path: Path
) -> None:
    settings = {"zero_optimization": {"stage": 3}}
    before = run_ranks(first, ranks, tmp_path, per_node, settings, copies, 3)
    for node in lost:
        shutil.rmtree(tmp_path / f"node-{node}")
    after = run_ranks(second, ranks, tmp_path, per_node, settings, copies, 3)
    if not survives:
        assert after == [None] * ranks
        return
    assert [losses[3:] for losses in before] == after
    assert left(tmp_path) == []


def sent_parts(*arguments: Any) -> tuple[Any, list[tuple[int, int]]]:
    """Return what ``second`` returns, and the number and bytes of each part that this rank has sent to load it."""
    sent: list[tuple[int, int]] = []
    send = dist.isend

    def count(data: torch.Tensor, target: int, group: Any, tag: int) -> Any:
        sent.append((tag, data.nbytes))
        return send(data, target, group, tag)

    load = MemoryCopies.find

    def find(*arguments: Any) -> Any:
        dist.isend = count
        try:
            return load(*arguments)
        finally:
            dist.isend = send

    MemoryCopies.find = find
    try:
        return second(*arguments), sent
    finally:
        MemoryCopies.find = load


def test_a_lost_node_gets_its_parts_and_no_other_node_more_than_it_needs(tmp_path: Path) -> None:
    settings = {"zero_optimization": {"stage": 3}}
    before = run_ranks(first, 4, tmp_path, 1, settings, 1, 3)
    nbytes = max(path.stat().st_size for path in tmp_path.rglob("rank_*.safetensors"))
    shutil.rmtree(tmp_path / "node-0")
    after = run_ranks(sent_parts, 4, tmp_path, 1, settings, 1, 3)
    assert [losses[3:] for losses in before] == [losses for losses, _ in after]
    # Node 0 gets its own part, and that of node 3, which it keeps. Part 0 has the user's tensors, and node 1 has it.
    assert sorted(part for _, sent in after for part, _ in sent) == [0, 0, 0, 3]
    assert all(0 < size <= nbytes for _, sent in after for _, size in sent)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_goes_on_with_the_parts_that_its_ranks_need(layout: str, tmp_path: Path) -> None:
    before = run_ranks(first, 4, tmp_path, 1, LAYOUTS[layout], 1, 3)
    shutil.rmtree(tmp_path / "node-2")
    after = run_ranks(sent_parts, 4, tmp_path, 1, LAYOUTS[layout], 1, 3)
    assert [losses[3:] for losses in before] == [losses for losses, _ in after]


def weights(root: Path, settings: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    """Return the parameters after ``steps`` updates, or those of the copy in memory where there is one."""
    of_node(root, 1)
    engine = make(settings, 1)
    engine.load_checkpoint(root / "run")
    while engine.global_steps < steps:
        step(engine)
    engine.save_to_memory(root / "run", {})
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    fail(engine)
    return state


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "later"), [(4, 3), (4, 2), (2, 4)])
@pytest.mark.parametrize("layout", ["stage 0", "stage 3"])
def test_another_number_of_ranks_goes_on_from_the_parts_of_the_others(
    layout: str, ranks: int, later: int, tmp_path: Path
) -> None:
    [before, *_] = run_ranks(weights, ranks, tmp_path, LAYOUTS[layout], 2)
    shutil.rmtree(tmp_path / "node-1")
    for after in run_ranks(weights, later, tmp_path, LAYOUTS[layout], 2):
        assert all(after[name].equal(value) for name, value in before.items())


def test_of_a_thousand_nodes_one_that_was_lost_is_sent_what_it_keeps_alone() -> None:
    nodes = [list(range(8 * node, 8 * node + 8)) for node in range(1000)]
    keeps = [{*nodes[node], *nodes[node - 1]} for node in range(1000)]
    lost = 17
    has = [set() if node == lost else parts for node, parts in enumerate(keeps)]
    missing = [keeps[node] - has[node] for node in range(1000)]
    plan = deliveries(nodes, has, missing)
    assert sorted(delivery.part for delivery in plan) == sorted(keeps[lost])
    assert {delivery.source for delivery in plan} == {*nodes[16], *nodes[18]}
    assert Counter(delivery.target for delivery in plan) == dict.fromkeys(nodes[lost], 2)
    # What all of them need comes from its holders in turn, and by all of their ranks.
    everybody = deliveries(nodes, keeps, [{0} - parts for parts in keeps])
    assert Counter(delivery.source for delivery in everybody) == {0: 499, 8: 499}


def alone(**checkpoint: Any) -> Any:
    return start_engine(nn.Linear(4, 4), optimizer={"type": "SGD"}, batch=1, checkpoint=checkpoint)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(MEMORY, str(folder))
    return folder


def test_the_newer_of_copy_and_checkpoint_is_loaded_and_a_tag_means_the_disk(memory: Path, tmp_path: Path) -> None:
    def at(steps: int) -> Any:
        engine = alone(peer_copies=1)
        engine.global_steps = steps
        return engine

    engine = at(1)
    engine.save_checkpoint(tmp_path / "run")
    engine.global_steps = 2
    engine.save_to_memory(tmp_path / "run")
    fail(engine)
    engine = at(0)
    assert engine.load_checkpoint(tmp_path / "run", tag="global_step1")[0] == str(tmp_path / "run" / "global_step1")
    fail(engine)
    engine = at(0)
    path, _ = engine.load_checkpoint(tmp_path / "run")
    assert engine.global_steps == 2
    assert Path(str(path)).is_relative_to(memory)
    engine.global_steps = 3
    engine.save_checkpoint(tmp_path / "run")
    fail(engine)
    engine = at(0)
    assert engine.load_checkpoint(tmp_path / "run")[0] == str(tmp_path / "run" / "global_step3")
    engine.save_to_memory(tmp_path / "run")  # in the place of the older ones
    assert len([*memory.iterdir()]) == 1
    engine.destroy()
    assert [*memory.iterdir()] == []


def test_copies_are_forgotten_by_a_run_that_saves_without_them(memory: Path, tmp_path: Path) -> None:
    engine = alone(peer_copies=1)
    engine.global_steps = 5
    engine.save_to_memory(tmp_path / "run")
    fail(engine)
    assert marked(tmp_path / "run")
    engine = alone()
    engine.save_checkpoint(tmp_path / "run")
    assert marked(tmp_path / "run") is None
    engine = alone(peer_copies=1)
    engine.load_checkpoint(tmp_path / "run")
    assert engine.global_steps == 0
    engine.destroy()


def test_copies_of_a_run_that_is_alive_are_neither_read_nor_deleted(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_files, "PATIENCE", 0.1)
    first, second = alone(peer_copies=1), alone(peer_copies=1)
    first.save_to_memory(tmp_path / "run")
    assert second.load_checkpoint(tmp_path / "run") == (None, {})
    with pytest.raises(FolderInUse, match="writes to"):
        second.save_to_memory(tmp_path / "run")
    alone().save_checkpoint(tmp_path / "run", tag="another")
    first.save_to_memory(tmp_path / "run")
    second.destroy()
    assert marked(tmp_path / "run")
    first.destroy()
    assert [*memory.iterdir()] == []


def test_who_only_reads_copies_leaves_them(memory: Path, tmp_path: Path) -> None:
    engine = alone(peer_copies=1)
    engine.global_steps = 5
    engine.save_to_memory(tmp_path / "run")
    engine.global_steps = 9
    engine.load_checkpoint(tmp_path / "run")  # back to its own copy
    assert engine.global_steps == 5
    fail(engine)
    reader = alone(peer_copies=1)
    reader.load_checkpoint(tmp_path / "run")
    reader.save_to_memory(tmp_path / "other")
    reader.destroy()
    again = alone(peer_copies=1)
    again.load_checkpoint(tmp_path / "run")
    assert again.global_steps == 5
    again.save_to_memory(tmp_path / "run")
    again.destroy()
    assert [*memory.iterdir()] == []


def test_a_save_that_fails_keeps_the_copy_before(memory: Path, tmp_path: Path) -> None:
    engine = alone(peer_copies=1)
    for engine.global_steps in (1, 2):
        engine.save_to_memory(tmp_path / "run")
    for engine.global_steps in (3, 4):
        with pytest.raises(TypeError):
            engine.save_to_memory(tmp_path / "run", {"what": object()})
    fail(engine)
    again = alone(peer_copies=1)
    again.load_checkpoint(tmp_path / "run")
    assert again.global_steps == 2
    again.save_to_memory(tmp_path / "run")
    again.destroy()


@pytest.mark.parametrize("damage", ["data", "description", "life"])
def test_half_of_a_part_and_parts_of_two_lives_are_no_copy(damage: str, memory: Path, tmp_path: Path) -> None:
    engine = alone(peer_copies=1)
    for engine.global_steps in (1, 2):
        engine.save_to_memory(tmp_path / "run")
    fail(engine)
    (file,) = memory.glob("*/copy_0/rank_00000.json")
    if damage == "data":
        file.with_suffix(".safetensors").unlink()
    elif damage == "description":
        file.write_text(file.read_text()[:-5])
    else:  # as if a second rank had written its part in an attempt before
        words = json.loads(file.read_text()) | {"ranks": 2}
        file.write_text(json.dumps(words))
        other = file.with_name("rank_00001.json")
        other.write_text(json.dumps(words | {"life": "another"}))
        shutil.copy(file.with_suffix(".safetensors"), other.with_suffix(".safetensors"))
    again = alone(peer_copies=1)
    again.load_checkpoint(tmp_path / "run")
    assert again.global_steps == 1
    again.save_to_memory(tmp_path / "run")
    again.destroy()


def test_a_folder_that_others_can_read_is_refused(memory: Path, tmp_path: Path) -> None:
    engine = alone(peer_copies=1)
    engine.save_to_memory(tmp_path / "run")
    fail(engine)
    (folder,) = memory.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        alone(peer_copies=1).load_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("name", ["/etc", "../run", "zeromesh-0-0123456789abcdef/..", ""])
def test_a_mark_cannot_lead_elsewhere(name: str, tmp_path: Path) -> None:
    (tmp_path / MARK).write_text(json.dumps({"name": name, "of": str(tmp_path)}))
    assert marked(tmp_path) is None


def test_the_mark_of_a_folder_that_was_copied_leads_nowhere(tmp_path: Path) -> None:
    mark(tmp_path, "zeromesh-0-0123456789abcdef")
    assert marked(tmp_path)
    (tmp_path / "copied").mkdir()
    shutil.copy(tmp_path / MARK, tmp_path / "copied" / MARK)
    assert marked(tmp_path / "copied") is None


def test_what_cannot_be_copied_is_refused_with_the_remedy(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="needs checkpoint.peer_copies in the configuration; set it to 1"):
        alone().save_to_memory(tmp_path / "run")
    zero = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with pytest.raises(ConfigError, match="offload_optimizer.device is nvme, for states that do not"):
        zeromesh.initialize(nn.Linear(4, 4), config={"zero_optimization": zero, "checkpoint": {"peer_copies": 1}})
    engine = alone(peer_copies=1)
    with pytest.raises(TypeError, match=r"client_state\['what'\] is a object"):
        engine.save_to_memory(tmp_path / "run", {"what": object()})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 50, 50))
    engine = alone(peer_copies=1)
    with pytest.raises(OSError, match=r"of two that take turns, and 50 are free there .*; set checkpoint.peer_copies"):
        engine.save_to_memory(tmp_path / "other")


def test_a_mark_that_cannot_be_removed_does_not_fail_one_rank_alone(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(folder)

    mark(tmp_path, "zeromesh-0-0123456789abcdef")
    (memory / "zeromesh-0-0123456789abcdef").mkdir()
    monkeypatch.setattr(memory_files, "locked", refuse)
    memory_files.discard(tmp_path)
    assert marked(tmp_path)
