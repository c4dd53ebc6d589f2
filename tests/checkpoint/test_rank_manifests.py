"""Manifests of many ranks: each rank writes its own, and reads the index and those of the ranks with what it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from manifests import content_of, sign, write_manifest
from runs import config, start, train
from zeromesh.base import files
from zeromesh.checkpoint.boxes import Box, Reader
from zeromesh.checkpoint.rank_manifests import part_file, shard_file, write_index, write_part
from zeromesh.checkpoint.shard_writer import write_shard

RANKS, UNITS = 1024, 3
SIZES = {"one": 40_960, "two": 1_000_003, "three": 7}
"""Elements of the parameters of a unit."""


class Reads(list[Path]):
    """Files that are opened, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        open_regular = files.open_regular
        monkeypatch.setattr(files, "open_regular", lambda path: self.append(path) or open_regular(path))

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self)


def shares(rank: int, ranks: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield what a rank has of flat units: name, elements of the tensor, and the range that is here."""
    share = -(-sum(SIZES.values()) // ranks)
    for unit in range(UNITS):
        begin = 0
        for name, size in SIZES.items():
            low, high = max(rank * share - begin, 0), min((rank + 1) * share - begin, size)
            if low < high:
                yield f"parameter/{unit}.{name}", size, low, high
            begin += size


def entry(file: str, boxes: list[tuple[str, int, int, int]]) -> dict[str, Any]:
    listed, place = [], 0
    for name, size, low, high in boxes:
        box = {"key": f"{name}[{low}:{high}]", "name": name, "shape": [size], "dtype": "float32", "start": low}
        listed.append(box | {"stop": high, "bytes": [place, place + 4 * (high - low)]})
        place += 4 * (high - low)
    return {"file": file, "boxes": listed}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    for rank in range(RANKS):
        facts = {"scalars": {f"{rank}": {}}, "members": {}}
        write_part(folder, rank, entry(shard_file(rank), [*shares(rank, RANKS)]), facts, flush=False)
    write_index(folder, {"groups": []}, RANKS)
    return folder


def test_a_rank_writes_its_own_part_and_the_index_has_a_few_bytes_of_each(checkpoint: Path) -> None:
    parts = [checkpoint / part_file(rank) for rank in range(RANKS)]
    assert sorted(checkpoint.iterdir()) == [checkpoint / "manifest.json", *parts]
    heads = [path.read_text().partition("\n")[0] for path in parts]
    # The first and the last share of a tensor tell of it: all heads together do not grow with the boxes.
    assert sum(len(json.loads(head)["tensors"]) for head in heads) <= 2 * UNITS * len(SIZES)
    assert (checkpoint / "manifest.json").stat().st_size < 110 * RANKS + 400 * UNITS * len(SIZES)


@pytest.mark.parametrize("ranks", [RANKS, RANKS // 2, 768, 5 * RANKS, 1023])
def test_a_rank_reads_the_manifests_of_those_with_what_it_needs(
    ranks: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1, ranks // 2, ranks - 2, ranks - 1):
        reads = Reads(monkeypatch)
        reader, needed = Reader(checkpoint), set()
        for name, _, low, high in shares(rank, ranks):
            reader.require(name, low, high)
            for owner in range(RANKS):
                needed |= {owner for other, _, a, b in shares(owner, RANKS) if other == name and a < high and low < b}
        assert set(reader.opened) == needed
        assert reads == [checkpoint / "manifest.json", *(checkpoint / part_file(owner) for owner in reader.opened)]
        assert reader.manifest["scalars"].keys() == {str(owner) for owner in needed}
        if ranks == RANKS:
            assert reader.opened == [rank], "with the same layout its own alone"


def test_all_ranks_together_check_each_file_once(checkpoint: Path) -> None:
    for ranks in (1, 2, 3, 1000, RANKS, 4 * RANKS):
        shared = [[*range(rank * RANKS // ranks, -(-(rank + 1) * RANKS // ranks))] for rank in range(ranks)]
        assert {number for numbers in shared for number in numbers} == {*range(RANKS)}
        assert max(map(len, shared)) <= -(-RANKS // ranks) + 1
    reader = Reader(checkpoint)
    with pytest.raises(FileNotFoundError, match=shard_file(7)):
        reader.verify(7, RANKS)
    assert reader.opened == [7]


def boxes_of(values: torch.Tensor, cuts: list[int]) -> list[Box]:
    return [Box.of("a", tuple(values.shape), low, values.flatten()[low:high]) for low, high in pairwise(cuts)]


@pytest.mark.parametrize("cuts", [[0, 1, 2, 3, 90, 96], [0, 50, 51, 52, 53, 96], [0, 10, 20, 60, 62, 96]], ids=str)
def test_shares_of_any_size_are_found(cuts: list[int], tmp_path: Path) -> None:
    values = torch.arange(96.0).view(8, 12)
    entries = [write_shard(tmp_path, rank, [box]) for rank, box in enumerate(boxes_of(values, cuts))]
    write_manifest(tmp_path, {"shards": entries})
    for low in range(0, 96, 5):
        for high in (low + 1, min(96, low + 9), 96):
            out = torch.empty(high - low)
            Reader(tmp_path).read("a", low, high, out)
            assert torch.equal(out, values.flatten()[low:high])


def test_parts_of_split_tensors_are_found_along_both_axes(tmp_path: Path) -> None:
    """Ranks are 3 (data) x 2 (pipeline) x 2 (context) x 2 (tensor); columns are split, rows of each half are shared."""
    values, entries = torch.arange(24.0 * 10).view(24, 10), []
    for rank in range(24):
        data, pipeline, context, tensor = rank // 8, rank // 4 % 2, rank // 2 % 2, rank % 2
        share, boxes = 2 * data + context, []
        if pipeline == 1:
            half = values[:, 5 * tensor :][:, :5].flatten()[20 * share :][:20]
            boxes = [Box.of("a", (24, 10), 20 * share, half, (0, 5 * tensor), (24, 5))]
        place = {"share": share, "strides": [[2, 2], [3, 8]]}
        write_part(tmp_path, rank, write_shard(tmp_path, rank, boxes), place)
        entries.append(boxes)
    write_index(tmp_path, {}, 24)
    for row in range(24):
        reader, out = Reader(tmp_path), torch.empty(10)
        reader.read("a", 10 * row, 10 * row + 10, out)
        assert torch.equal(out, values[row])
        first = 4 + (row // 4) // 2 * 8 + (row // 4) % 2 * 2
        assert reader.opened == [first, first + 1]


ALTERED: dict[str, Any] = {
    "an area of other dimensions": lambda index: index["a"]["areas"][0].update(offsets=[0], sizes=[2]),
    "an area that is larger": lambda index: index["a"]["areas"][0].update(offsets=[0, 0], sizes=[8, 2**40]),
    "shares of other ranks": lambda index: index["a"]["areas"][0].update(first=0, last=2**50, stop=1, start=90),
    "a share behind the end": lambda index: index["a"]["areas"][0].update(start=97),
    "a tensor without elements": lambda index: index.update(b={"dtype": "int8", "shape": [0], "areas": []}),
    "a tensor without boxes": lambda index: index.update(b={"dtype": "int8", "shape": [2**50], "areas": []}),
}


@pytest.mark.parametrize("change", ALTERED.values(), ids=ALTERED)
def test_an_index_that_contradicts_itself_or_the_files_is_refused(change: Any, tmp_path: Path) -> None:
    values = torch.arange(96.0).view(8, 12)
    entries = [write_shard(tmp_path, rank, [box]) for rank, box in enumerate(boxes_of(values, [0, 48, 96]))]
    write_manifest(tmp_path, {"shards": entries})
    content = content_of(tmp_path)
    change(content["tensors"])
    sign(tmp_path, content)
    with pytest.raises(ValueError, match="choose another checkpoint"):
        Reader(tmp_path).verify()
    with pytest.raises(ValueError, match="choose another checkpoint"):
        Reader(tmp_path).require_files()
    if 2**50 in content["tensors"].get("b", {"shape": []})["shape"]:
        with pytest.raises(ValueError, match="elements of b that are needed"):
            Reader(tmp_path).tensor("b")


def test_a_rank_names_by_parameter_what_belongs_there_alone(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"shards": [write_shard(tmp_path, 0, boxes_of(torch.arange(8.0), [0, 8]))]})
    content = content_of(tmp_path)
    content["ranks"][0]["named"] |= {"shard": {"file": "x", "boxes": []}, "members": {}, "extra": {"a": 1}}
    sign(tmp_path, content)
    reader = Reader(tmp_path)
    reader.verify()
    assert torch.equal(reader.tensor("a"), torch.arange(8.0))
    assert "extra" not in reader.manifest or not reader.manifest["extra"]


def test_a_file_is_opened_once_for_a_tensor_that_is_split_along_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.arange(24.0 * 10).view(24, 10)
    halves = [(rank, values[:, 5 * rank :][:, :5].flatten()) for rank in range(2)]
    boxes = [[Box.of("a", (24, 10), 0, half, (0, 5 * rank), (24, 5))] for rank, half in halves]
    write_manifest(tmp_path, {"shards": [write_shard(tmp_path, rank, boxes[rank]) for rank in range(2)]})
    opened: list[Path] = []
    monkeypatch.setattr("zeromesh.checkpoint.boxes.require_regular", opened.append)
    assert torch.equal(Reader(tmp_path).tensor("a"), values)
    assert opened == [tmp_path / shard_file(rank) for rank in range(2)]


def opened_by_load(folder: str, settings: dict[str, Any]) -> set[str]:
    engine = start(1, settings)
    train(engine, 1)
    engine.save_checkpoint(folder)
    with pytest.MonkeyPatch.context() as patched:
        reads = Reads(patched)
        engine.load_checkpoint(folder)
    return {path.name for path in reads if path.suffix == ".jsonl"}


def test_a_run_that_goes_on_with_its_layout_reads_its_own_manifest_and_that_of_the_buffers(tmp_path: Path) -> None:
    for rank, names in enumerate(run_ranks(opened_by_load, 4, str(tmp_path), config(3, mesh="4"))):
        assert names <= {part_file(0), part_file(rank)}
        assert part_file(rank) in names
