"""Optimizer states on NVMe: the same numbers as on the host, files as large as is said, and what goes wrong is told."""

import errno
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from harness import FOLDERS, on_ranks, run_command
from test_tiers import Net, start, update
from zeromesh import zero
from zeromesh.shard.store import swap, swap_file
from zeromesh.shard.store.swap import unloaded

STATE = {"AdamW": "exp_avg_sq", "SGD": "momentum_buffer", "Adagrad": "sum", "Lion": "exp_avg"}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": {"enabled": False}},
    "bf16": {},
    "fp16": {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 4}},
}


def life(folder: str, device: str, stage: int, optimizer: str, precision: str, early: float = 0.0) -> list[Any]:
    params = {"lr": 1e-3, **({"momentum": 0.9, "dampening": 0.1} if optimizer == "SGD" else {})}
    place = {"device": device, "nvme_path": folder, "buffer_count": 2, "update_during_backward": early}
    engine = start(
        {"stage": stage, "offload_optimizer": place}, optimizer={"type": optimizer, "params": params},
        gradient_clipping=0.0 if early else 0.5, **PRECISIONS[precision],
    )  # fmt: skip
    found: list[Any] = [update(engine, number) for number in range(3)]
    engine.save_checkpoint(f"{folder}/{device}")
    found += [update(engine, number) for number in range(2)]
    engine.load_checkpoint(f"{folder}/{device}")
    found += [update(engine, number) for number in range(2)]
    first = next(iter(engine.module.parameters()))
    master = zero.safe_get_full_fp32_param(first)
    state = zero.safe_get_full_optimizer_state(first, STATE[optimizer])
    assert master is not None
    assert state is not None
    found += [master, state]
    zero.safe_set_full_fp32_param(first, master * 1.5)
    zero.safe_set_full_optimizer_state(first, state * 0.5, STATE[optimizer])
    return [*found, *last_of_life(engine)]


def last_of_life(engine: Any) -> list[Any]:
    found: list[Any] = [update(engine, 5), update(engine, 6)]
    values = engine.gathered_state_dict()
    engine.load_state_dict({name: value * 0.9 for name, value in engine.state_dict().items()})
    found += [update(engine, 7), *values.values()]
    engine.destroy()
    return found


def assert_equal(host: list[Any], nvme: list[Any]) -> None:
    assert len(host) == len(nvme)
    for one, other in zip(host, nvme, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


CASES = [
    (3, "AdamW", "bf16"),
    (1, "SGD", "fp32"),
    *(pytest.param(*case, marks=pytest.mark.full) for case in [(2, "Lion", "fp16"), (3, "Adagrad", "fp32")]),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("stage", "optimizer", "precision"), CASES)
@on_ranks(2)
def test_a_run_is_the_same_to_the_bit_as_with_states_on_the_host(stage, optimizer, precision, tmp_path) -> None:
    host, nvme = (life(str(tmp_path), device, stage, optimizer, precision) for device in ("cpu", "nvme"))
    assert_equal(host, nvme)
    torch.distributed.barrier()  # the other rank deletes its files, too
    assert sorted(os.listdir(tmp_path)) == ["cpu", "nvme"]


@pytest.mark.full
@on_ranks(2)
def test_units_that_are_updated_in_several_windows_are_the_same_to_the_bit(tmp_path: Path) -> None:
    case = 3, "AdamW", "bf16"
    host = life(str(tmp_path), "cpu", *case), life(str(tmp_path), "cpu", *case, early=1.0)
    # A rank has 461,520 elements of a block: windows end within parameters, and the last one is shorter.
    with patch.object(swap, "WINDOW", 200_003):
        assert_equal(host[0], life(str(tmp_path), "nvme", *case))
        assert_equal(host[1], life(str(tmp_path), "nvme", *case, early=1.0))


def test_checkpoints_have_no_unit_in_memory_as_a_whole(tmp_path: Path) -> None:
    with patch.object(swap, "WINDOW", 200_003):
        engine = start_nvme(tmp_path)
        update(engine)
        with patch.object(swap.Swap, "load", side_effect=AssertionError("a whole unit is loaded")):
            engine.save_checkpoint(tmp_path / "checkpoints")
            expected = update(engine)
            engine.load_checkpoint(tmp_path / "checkpoints")
            assert update(engine) == expected
        engine.destroy()


@on_ranks(2)
def test_a_disk_without_room_for_second_copies_has_one_copy_of_each_rank(tmp_path: Path) -> None:
    def reserve(self: swap_file.SwapFile, nbytes: int) -> None:
        # The first rank has taken two copies when the second one comes.
        if nbytes > 13 / 2 * sum(parameter.numel() for parameter in Net().parameters()) and os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, "no room")
        reserved(self, nbytes)

    reserved = swap_file.SwapFile.reserve
    with patch.object(swap_file.SwapFile, "reserve", reserve):
        engine = start_nvme(tmp_path)
        expected = [update(engine, number) for number in range(2)]
        assert engine.sharded.early.nbytes == 0
        engine.destroy()
        everything = {"device": "nvme", "nvme_path": str(tmp_path), "update_during_backward": 1}
        with pytest.raises((OSError, RuntimeError), match="no room"):
            start({"stage": 3, "offload_optimizer": everything})
    engine = start_nvme(tmp_path)
    assert engine.sharded.early.nbytes > 0
    assert [update(engine, number) for number in range(2)] == expected
    engine.destroy()


def test_momentum_that_was_switched_off_comes_back_with_a_checkpoint(tmp_path: Path) -> None:
    engine = start_nvme(tmp_path, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    update(engine)
    engine.save_checkpoint(tmp_path / "checkpoints")
    expected = [update(engine, number) for number in range(3)]
    engine.optimizer.param_groups[0]["momentum"] = 0.0
    engine.load_checkpoint(tmp_path / "checkpoints")
    assert [update(engine, number) for number in range(3)] == expected
    engine.destroy()


def change_states(folder: str, device: str, early: float, kind: str) -> list[Any]:
    engine = start(
        {"stage": 2, "offload_optimizer": {"device": device, "nvme_path": folder, "update_during_backward": early}},
        optimizer={"type": kind, "params": {"lr": 1e-3}},
    )
    found = [update(engine, number) for number in range(3)]
    for group in engine.optimizer.param_groups:
        if kind == "SGD":
            group["momentum"] = 0.9
        for piece in group["params"] if kind == "AdamW" else ():
            for name, value in (("exp_avg", 0.01), ("exp_avg_sq", 0.02)):
                engine.optimizer.state[piece][name] = torch.full(piece.shape, value)
    found += [update(engine, number) for number in range(4)]
    engine.destroy()
    return found


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_states_that_users_set_or_ask_for_later_count_as_on_the_host(kind: str, tmp_path: Path) -> None:
    for early in (0.0, 1.0):
        expected = change_states(str(tmp_path), "cpu", early, kind)
        with patch.object(swap, "WINDOW", 200_003):
            assert change_states(str(tmp_path), "nvme", early, kind) == expected


def masters(engine: Any) -> list[torch.Tensor]:
    return [zero.safe_get_full_fp32_param(parameter).clone() for parameter in engine.module.parameters()]


def start_nvme(folder: Path | str, device: str = "nvme", **more: Any) -> Any:
    return start({"stage": 3, "offload_optimizer": {"device": device, "nvme_path": str(folder)}}, **more)


@pytest.mark.some(1)
@pytest.mark.parametrize(("saved", "loaded"), [("nvme", "none"), ("none", "nvme")])
def test_a_checkpoint_does_not_know_where_states_rested(saved: str, loaded: str, tmp_path: Path) -> None:
    engine = start_nvme(tmp_path, saved)
    update(engine)
    engine.save_checkpoint(tmp_path / "checkpoints")
    expected = update(engine), masters(engine)
    engine.destroy()
    engine = start_nvme(tmp_path, loaded)
    engine.load_checkpoint(tmp_path / "checkpoints")
    assert update(engine) == expected[0]
    for found, want in zip(masters(engine), expected[1], strict=True):
        # Torch's own update, of states on the device, has eight roundings to fp32 that may fall otherwise: of the
        # number, or of the step, which is at most a few times the learning rate.
        assert bool(((found - want).abs() <= 8 * 2**-24 * (want.abs() + 4e-3)).all())
    engine.destroy()


@pytest.mark.some(1)
@pytest.mark.parametrize("depth", [2, 8])
def test_the_report_has_the_size_of_the_file_and_of_the_buffers(depth: int, tmp_path: Path) -> None:
    engine = start_nvme(tmp_path, depth=depth)
    update(engine)
    report, (file,) = engine.memory_report(), list(tmp_path.iterdir())
    elements = sum(parameter.numel() for parameter in Net(depth).parameters())
    assert report["optimizer"]["nvme"] == file.stat().st_size
    assert report["optimizer"]["nvme"] / elements == pytest.approx(24, rel=0.01)  # with the next ones
    assert report["optimizer"]["host"] < 1000  # the numbers of the steps
    sizes = sorted(12 * sum(p.numel() for p in unit.members) for unit in engine.sharded.units)
    assert report["slot"]["host"] == pytest.approx(sum(sizes[-4:]) + 2 * elements, rel=0.01)
    assert file.stat().st_blocks * 512 >= file.stat().st_size  # the space is taken before the start
    for _, state in engine.optimizer.state.items():
        assert bool(state["exp_avg"].isnan().all())
    engine.destroy()
    assert not list(tmp_path.iterdir())


def test_unloaded_tensors_cannot_be_written_to() -> None:
    value = unloaded(torch.zeros(3, 2, dtype=torch.float64))
    assert (value.shape, value.dtype, bool(value.isnan().all())) == ((3, 2), torch.float64, True)
    with pytest.raises(RuntimeError, match="more than one element"):
        value.copy_(torch.ones(3, 2))


def test_states_that_cannot_rest_in_files_are_refused_before_the_start(tmp_path: Path) -> None:
    adam = {"type": "Adam", "params": {"lr": 1e-3, "amsgrad": True}}
    with pytest.raises(ValueError, match="AdamW, with the options of group 0, .* offload_optimizer.device = cpu"):
        start_nvme(tmp_path, optimizer=adam)
    with pytest.raises(ValueError, match="nvme_path is missing; set it to a folder"):
        start({"stage": 3, "offload_optimizer": {"device": "nvme"}})
    with pytest.raises(ValueError, match="aio.block_size = 1000: .* multiple of 4096"):
        start_nvme(tmp_path, aio={"block_size": 1000})
    with pytest.raises(OSError, match="missing"):
        start_nvme(tmp_path / "missing")
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_ranks_that_cannot_open_their_files_all_say_so(tmp_path: Path) -> None:
    for start_with in (lambda: start_nvme(tmp_path / "file"), lambda: start(places(tmp_path / "file", "nvme", "none"))):
        (tmp_path / "file").write_text("no folder")
        with pytest.raises((OSError, RuntimeError), match="file"):
            start_with()


def places(folder: Path | str, parameters: str, optimizer: str, buffers: int = 3) -> dict[str, Any]:
    more = {"nvme_path": str(folder), "buffer_count": buffers}
    return {
        "stage": 3,
        "offload_param": {"device": parameters, **more},
        "offload_optimizer": {"device": optimizer, **more},
    }


def test_a_file_that_is_changed_underneath_ends_the_run(tmp_path: Path) -> None:
    engine = start_nvme(tmp_path)
    update(engine)
    (file,) = tmp_path.iterdir()
    with file.open("r+b") as opened:
        opened.seek(8192)
        opened.write(b"something else")
    with pytest.raises(OSError, match="not those that were written there|changed by somebody else"):
        update(engine)
    engine.destroy()
    assert not list(tmp_path.iterdir())


LIMITED = """
import resource, sys
sys.path[:0] = {tests!r}
from test_tiers import start, update
import torch
torch.set_num_threads(1)
update(start({{"stage": 3}}, depth=1))
used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + {limit}, used + {limit}))
zero = {{"stage": 3, "offload_optimizer": {{"device": sys.argv[1], "nvme_path": {folder!r}, "buffer_count": 2}}}}
engine = start(zero, depth={depth})
print("first", update(engine))
print("last", [update(engine, number) for number in range(3)][-1])
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process's data is Linux's")
def test_under_a_limit_of_memory_too_small_for_the_states_it_trains(tmp_path: Path) -> None:
    depth = 60
    states = 12 * sum(parameter.numel() for parameter in Net(depth).parameters())
    script = tmp_path / "script.py"
    script.write_text(LIMITED.format(tests=FOLDERS, limit=int(0.9 * states), folder=str(tmp_path), depth=depth))
    require_files_to_be_needed(script)


def require_files_to_be_needed(script: Path, **variables: str) -> None:
    """Run a script that trains within a limit, which is enough for states in files and too little on the host."""
    found = {device: run_command([sys.executable, script, device], 120, **variables) for device in ("cpu", "nvme")}
    assert found["cpu"].returncode != 0
    assert "memory" in found["cpu"].stdout
    assert found["nvme"].returncode == 0, found["nvme"].stdout
    assert "last" in found["nvme"].stdout
