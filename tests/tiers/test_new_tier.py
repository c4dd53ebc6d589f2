"""A tier of storage is added in four places of the package, and trains as host memory does."""

import shutil
import sys
from pathlib import Path

import zeromesh
from harness import FOLDERS, run_command

STORE = '''"""Blocks in anonymous memory."""

import mmap

import torch

from zeromesh.shard.store.memory import MemoryBlocks


class MappedBlocks(MemoryBlocks):
    """Blocks that the system maps."""

    def __init__(self, sizes, _, *rest):
        super().__init__(sizes, lambda nbytes: torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8), *rest)
'''

PLACES = {
    "base/placement.py": {'    NVME = "nvme"\n': '    NVME = "nvme"\n    MAPPED = "mapped"\n'},
    "shard/store/mapped_blocks.py": {"": STORE},
    "shard/store/stores.py": {
        "import FileBlocks\n": "import FileBlocks\nfrom zeromesh.shard.store.mapped_blocks import MappedBlocks\n",
        "Tier.NVME: FileBlocks}": "Tier.NVME: FileBlocks, Tier.MAPPED: MappedBlocks}",
    },
    "config/zero_section.py": {'Literal["none", "cpu", "nvme"]': 'Literal["none", "cpu", "nvme", "mapped"]'},
}
"""Places of a new tier: texts in them, and what they become. The row of "Where a change goes" names the same."""

PROGRAM = """
import sys
sys.path[:0] = {tests!r}
import torch, zeromesh
from zeromesh import zero
from zeromesh.shard.store import swap
from test_tiers import start, update

swap.WINDOW = 200_003
assert zeromesh.__file__.startswith({folder!r})

def train(device):
    place = {{"device": device}}
    engine = start({{"stage": 3, "offload_optimizer": place | {{"update_during_backward": 0}}, "offload_param": place}})
    losses = [update(engine, number) for number in range(4)]
    parameter = next(iter(engine.module.parameters()))
    values = [zero.safe_get_full_fp32_param(parameter), zero.safe_get_full_optimizer_state(parameter, "exp_avg")]
    engine.save_checkpoint({folder!r} + "/" + device)
    flat = engine.sharded.flats[0]
    flat.load_shard()
    shard = flat.shard.clone()
    for read in (False, True):  # an update that fails before it writes leaves what there was
        engine.sharded.rest()
        if engine.sharded.stored is not None:
            engine.sharded.stored.read_ahead([])
        flat.load_shard(read=read)
    assert torch.equal(flat.shard, shard)
    report = engine.memory_report()
    engine.destroy()
    return losses, [*values, *engine.module.buffers()], report

(losses, values, _), (expected, states, _) = train("mapped"), train("cpu")
assert losses == expected and len(set(losses)) == 4, (losses, expected)
assert all(map(torch.equal, values, states))
report = train("mapped")[2]
assert report["optimizer"]["mapped"] > 12 / 13 * 6 * report["parameter"]["mapped"], report
print("trained")
"""


def test_a_tier_is_added_in_four_places(tmp_path: Path) -> None:
    package = tmp_path / "zeromesh"
    shutil.copytree(Path(zeromesh.__file__).parent, package)
    for name, changes in PLACES.items():
        path = package / name
        source = path.read_text() if path.exists() else ""
        for text, changed in changes.items():
            assert text in source
            source = source.replace(text, changed, 1)
        path.write_text(source)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=[str(tmp_path), *FOLDERS], folder=str(tmp_path)))
    ended = run_command([sys.executable, program], timeout=120)
    assert ended.returncode == 0, ended.stdout
    assert "trained" in ended.stdout


def test_the_page_for_contributors_names_these_places() -> None:
    page = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| a tier of storage |")]
    for name in PLACES:
        assert f"zeromesh/{name}" in row or name == "shard/store/mapped_blocks.py"
    assert "zeromesh/shard/store/memory.py" in row  # a class to begin with
    assert row.count("`zeromesh/") == len(PLACES)
