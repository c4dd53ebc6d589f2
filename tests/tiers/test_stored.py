"""Parameters on NVMe: the same numbers as anywhere else, files as large as is said, and what goes wrong is told."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zeromesh
from harness import FOLDERS, on_ranks, run_ranks
from run import adamw, start_engine
from test_swap import PRECISIONS, assert_equal, places, require_files_to_be_needed
from test_tiers import Net, in_stages, start, update
from zeromesh import zero
from zeromesh.shard.store import swap_file
from zeromesh.shard.store.file_blocks import FileBlocks
from zeromesh.shard.store.nvme import FileStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the NVMe tier needs Linux")


class Part(nn.Module):
    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width)
        self.book = nn.Parameter(torch.linspace(0.5, 1.5, width), requires_grad=False)
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.moves = number == 1
        if number == 2:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves and self.training:
            self.book.data.mul_(1.03)
            self.count.data.add_(1)
        y = self.norm(x.flatten(0, 1)).view(x.shape) * self.book + self.count[1] / 8
        return x + self.down(torch.tanh(self.up(y)))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.blocks = nn.ModuleList(Part(24, number) for number in range(5))
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def begin(settings: dict[str, Any], precision: str, deferred: bool = False) -> zeromesh.Engine:
    torch.manual_seed(3)
    with zero.Init(enabled=deferred):
        model = Parts()
    return start_engine(
        model,
        PRECISIONS[precision],
        micro=1,
        zero=settings,
        optimizer=adamw(1e-2),
        clipping=0.5,
        bf16=True,
        units=["Part"],
    )


def life(folder: str, parameters: str, optimizer: str, precision: str) -> list[Any]:
    engine = begin(places(folder, parameters, optimizer), precision, deferred=parameters == "nvme")
    found: list[Any] = [update(engine, number) for number in range(3)]
    engine.eval()
    with torch.no_grad():
        found += [float(engine(torch.arange(8).view(1, 8))), float(engine(torch.arange(8).view(1, 8)))]
    engine.train()
    engine.save_checkpoint(f"{folder}/{parameters}")
    found += [update(engine, number) for number in range(2)]
    engine.load_checkpoint(f"{folder}/{parameters}")
    found += [update(engine, number) for number in range(2)]
    blocks = engine.module.blocks
    first, frozen, book = blocks[0].up.weight, blocks[2].up.weight, blocks[1].book
    master = zero.safe_get_full_fp32_param(first)
    state = zero.safe_get_full_optimizer_state(first, "exp_avg")
    assert master is not None
    assert state is not None
    found += [master, state]
    zero.safe_set_full_fp32_param(first, master * 1.5)
    zero.safe_set_full_optimizer_state(first, state * 0.5, "exp_avg")
    with zero.GatheredParameters([frozen, book, engine.module.embed.weight], modifier_rank=0):
        for parameter in (frozen, book, engine.module.embed.weight):
            parameter.data.mul_(1.25)
    found += [update(engine, 5), update(engine, 6)]
    values = engine.gathered_state_dict()
    state = {name: value * 0.9 if value.is_floating_point() else value for name, value in engine.state_dict().items()}
    engine.load_state_dict(state)
    found += [update(engine, 7), *values.values(), *engine.state_dict().values()]
    engine.save_16bit_model(f"{folder}/{parameters}")
    found.append(Path(f"{folder}/{parameters}/model.safetensors").read_bytes())
    engine.destroy()
    return found


CASES = [
    (2, "nvme", "bf16"),
    (1, "none", "fp32"),
    *(pytest.param(*case, marks=pytest.mark.full) for case in [(2, "cpu", "fp16"), (3, "none", "bf16")]),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("ranks", "optimizer", "precision"), CASES)
@on_ranks("ranks")
def test_a_run_is_the_same_to_the_bit_as_with_parameters_on_the_host(ranks, optimizer, precision, tmp_path) -> None:
    assert_equal(*(life(str(tmp_path), device, optimizer, precision) for device in ("cpu", "nvme")))
    torch.distributed.barrier()  # the other rank deletes its files, too
    assert not list(tmp_path.glob("*.swap"))


def go_on(settings: dict[str, Any], folder: str) -> list[float]:
    engine = begin(settings, "bf16")
    engine.load_checkpoint(folder)
    found = [update(engine, number) for number in range(2)]
    engine.save_checkpoint(folder)
    engine.destroy()
    return found


def test_a_checkpoint_does_not_know_where_parameters_rested(tmp_path: Path) -> None:
    nvme, plain = places(tmp_path, "nvme", "cpu", buffers=1), {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    turns = [run_ranks(go_on, 2, one, str(tmp_path / "turns")) for one in (nvme, plain, nvme)]
    assert turns == [run_ranks(go_on, 2, plain, str(tmp_path / "plain")) for _ in range(3)]
    assert len({loss for losses in turns for loss in losses[0]}) == 6


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"tensor": 2}], ids=str)
def test_stages_and_split_layers_have_their_parameters_in_files(mesh: dict[str, int], tmp_path: Path) -> None:
    settings = places(tmp_path, "nvme", "cpu")
    assert run_ranks(in_stages, 2, settings, mesh) == run_ranks(in_stages, 2, {"stage": 3}, mesh)


def test_weights_are_read_from_a_checkpoint_straight_into_the_file(tmp_path: Path) -> None:
    torch.manual_seed(5)
    weights = {name: value.bfloat16() for name, value in Net().state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    with zero.Init():
        model = Net()
    zeromesh.load_pretrained(model, tmp_path)
    engine = start_engine(model, micro=1, bf16=True, zero=places(tmp_path, "nvme", "nvme"), optimizer={"type": "AdamW"})
    state = engine.gathered_state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights.items())
    blocks = engine.sharded.stored.blocks
    assert blocks.traffic().bytes_written <= blocks.nbytes
    engine.destroy()


def watch_reads(patch: pytest.MonkeyPatch) -> list[bool]:
    seen: list[bool] = []
    real = FileBlocks.take

    def take(self: FileBlocks, key: Any, read: bool) -> Any:
        seen.extend([key in self._reading] * read)
        return real(self, key, read)

    patch.setattr(FileBlocks, "take", take)
    return seen


def test_units_are_read_once_for_each_fetch_and_begun_before_they_are_needed(tmp_path, monkeypatch) -> None:
    seen = watch_reads(monkeypatch)
    write = FileStore.write

    def write_at_once(self: FileStore, *region_and_buffer: Any) -> Any:
        pending = write(self, *region_and_buffer)
        pending.wait()  # a slow disk would have buffers still in use when reading ahead begins
        return pending

    monkeypatch.setattr(FileStore, "write", write_at_once)
    engine = start(places(tmp_path, "nvme", "nvme", buffers=3), depth=6)
    stored = engine.sharded.stored.blocks
    (size,) = {path.stat().st_size for path in tmp_path.iterdir()} - {engine.sharded.swap.blocks.nbytes}
    unit = (size - 32 * 480 * 2) / 6

    def read_so_far() -> int:
        first = [flat.layout.segments[0].name for flat in stored._reading]
        assert first == ["embed.weight", "blocks.0.up.weight"], "after an update the first units are read"
        for _, pending in stored._reading.values():
            pending.wait()
        return stored.traffic().bytes_read

    update(engine)
    for number in range(3):
        before = read_so_far()
        seen.clear()
        update(engine, number)
        assert seen == [True] * 11, "all of a forward; of the backward, those that did not stay in the two slots"
        assert read_so_far() - before == pytest.approx(size + 4 * unit, rel=1e-3)
    engine.destroy()


def test_frozen_parameters_are_written_only_if_they_changed(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Net(4)
    model.blocks.requires_grad_(False)
    engine = start_engine(
        model, micro=1, zero=places(tmp_path, "nvme", "none", buffers=2), optimizer=adamw(1e-3), units=["Block"]
    )
    stored, embed = engine.sharded.stored, 32 * 480 * 4
    blocks = stored.blocks
    block = (blocks.nbytes - embed) / 4

    def written() -> int:
        engine.sharded.rest()
        stored.read_ahead([])
        while blocks._behind:
            blocks._finish_write()
        return blocks.traffic().bytes_written

    before = written()
    assert before == blocks.nbytes
    update(engine, 0)
    assert written() - before == embed
    with zero.GatheredParameters([model.blocks[2].up.weight], modifier_rank=0):
        model.blocks[2].up.weight.data.mul_(0.5)
    assert written() - before == embed + block
    update(engine, 1)
    assert written() - before == 2 * embed + block
    engine.destroy()


def on_tier(report: dict[str, Any], tier: str) -> int:
    return sum(sizes.get(tier, 0) for state, sizes in report.items() if state not in ("measured", "total"))


def test_the_report_has_the_size_of_the_file_and_of_the_buffers(tmp_path: Path) -> None:
    reports = {}
    for depth in (3, 9):
        engine = start(places(tmp_path, "nvme", "none"), depth=depth)
        (file,) = tmp_path.iterdir()
        assert file.stat().st_blocks * 512 >= file.stat().st_size  # the space is taken before the start
        update(engine)
        reports[depth] = report = engine.memory_report()
        elements = sum(parameter.numel() for parameter in Net(depth).parameters())
        assert report["parameter"] == {"nvme": file.stat().st_size}
        assert file.stat().st_size / elements == pytest.approx(2, rel=0.01)
        largest = 2 * max(sum(p.numel() for p in unit.members) for unit in engine.sharded.units)
        assert report["slot"]["host"] == pytest.approx(3 * largest, rel=0.01)
        engine.sharded.rest()
        engine.sharded.stored.read_ahead([])
        assert all(bool(flat.shard.isnan().all()) for flat in engine.sharded.flats)
        engine.destroy()
        assert not list(tmp_path.iterdir())
    assert reports[3]["slot"] == reports[9]["slot"]


@pytest.mark.full
def test_with_all_in_files_memory_does_not_grow_with_the_depth_but_for_gradients(tmp_path: Path) -> None:
    found = []
    for depth in (3, 9):
        engine = start(places(tmp_path, "nvme", "nvme"), depth=depth)
        update(engine)
        report = engine.memory_report()
        report["optimizer"].pop("host")  # the numbers of the steps
        gradient = report["gradient"].pop("host")
        assert gradient == pytest.approx(2 * sum(parameter.numel() for parameter in Net(depth).parameters()), rel=0.01)
        found.append([on_tier(report, "device"), on_tier(report, "host")])
        assert on_tier(report, "nvme") == sum(path.stat().st_size for path in tmp_path.iterdir())
        engine.destroy()
    assert found[0] == found[1]


LIMITED = """
import resource, sys
sys.path[:0] = {tests!r}
import torch, zeromesh
from test_tiers import Net, start, update
torch.set_num_threads(1)
update(start({{"stage": 3}}, depth=1))
config = {{
    "train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": True}}, "units": ["Block"], "aio": {{"queue_depth": 1}},
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}},
    "zero_optimization": {{
        "stage": 3,
        "offload_optimizer": {{"device": "nvme", "nvme_path": {folder!r}, "buffer_count": 2}},
        "offload_param": {{"device": sys.argv[1], "nvme_path": {folder!r}, "buffer_count": 3}},
    }},
}}
used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + {limit}, used + {limit}))
with zeromesh.zero.Init():
    model = Net({depth})
engine = zeromesh.initialize(model=model, config=config)[0]
print("first", update(engine))
print("last", update(engine))
"""


@pytest.mark.full
def test_under_a_limit_of_memory_too_small_for_the_parameters_it_trains(tmp_path: Path) -> None:
    """Each parameter takes two bytes, its gradient two more; all else takes 65 MB here, which is some 1.7 of each."""
    depth = 40
    elements = sum(parameter.numel() for parameter in Net(depth).parameters())
    script = tmp_path / "script.py"
    script.write_text(LIMITED.format(tests=FOLDERS, limit=int(4.5 * elements), folder=str(tmp_path), depth=depth))
    require_files_to_be_needed(script, MALLOC_MMAP_THRESHOLD_="262144")  # else the C library keeps what was freed


def test_unusable_folders_are_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="offload_param.device is nvme, but nvme_path is missing; set it to a folder"):
        start({"stage": 3, "offload_param": {"device": "nvme"}})
    with pytest.raises(OSError, match="missing"):
        start(places(tmp_path / "missing", "nvme", "none"))
    both = places(tmp_path, "nvme", "nvme")
    with pytest.raises(OSError, match="missing"):
        start({**both, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "missing")}})
    assert not list(tmp_path.iterdir()), "the optimizer's file goes, too"
    full = 10**6

    def reserve(self: swap_file.SwapFile, nbytes: int) -> None:
        if nbytes < 2 * full:
            return
        raise OSError(errno.ENOSPC, f"needs {nbytes:,} bytes more")

    monkeypatch.setattr(swap_file.SwapFile, "reserve", reserve)
    with pytest.raises(OSError, match="bytes more"):
        start(places(tmp_path, "nvme", "none"))
    assert not list(tmp_path.iterdir())


def damage(path: Path, how: str) -> None:
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
        return
    with path.open("r+b") as opened:
        for offset in range(8192, path.stat().st_size, 65536):
            opened.seek(offset)
            opened.write(b"something else")


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:module forward hook")  # which takes part in what other ranks fetch, and cannot
@pytest.mark.parametrize("how", ["changed", "cut"])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_file_that_is_changed_underneath_ends_the_run(how: str, evaluates: bool, tmp_path: Path) -> None:
    engine = start(places(tmp_path, "nvme", "none"))
    update(engine)
    (file,) = tmp_path.iterdir()
    damage(file, how)
    with torch.set_grad_enabled(not evaluates), pytest.raises(OSError, match="not those that were|changed by somebody"):
        update(engine) if not evaluates else engine(torch.arange(8).view(1, 8))
    engine.destroy()
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(places(tmp_path, "nvme", "none"))
    update(engine, 0)
    engine.backward(engine(torch.arange(8).view(1, 8)))

    def fail(descriptor: int, memory: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="No space left"):
        engine.step()
    monkeypatch.undo()
    engine.destroy()
    assert not list(tmp_path.iterdir())
