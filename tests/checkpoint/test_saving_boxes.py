"""Boxes of tensors in files: any part of a tensor is read from whatever holds it, and damage is named."""

import io
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from manifests import write_manifest
from zeromesh.checkpoint import boxes
from zeromesh.checkpoint.boxes import Box, Reader
from zeromesh.checkpoint.manifest import CODES, MANIFEST
from zeromesh.checkpoint.shard_writer import write_shard


def write(folder: Path, *owned: list[Box]) -> Reader:
    folder.mkdir(exist_ok=True)
    write_manifest(folder, {"shards": [write_shard(folder, rank, shard) for rank, shard in enumerate(owned)]})
    return Reader(folder)


def ranges(name: str, values: torch.Tensor, *cuts: int) -> list[Box]:
    flat, ends = values.flatten(), [0, *cuts, values.numel()]
    return [Box.of(name, tuple(values.shape), a, flat[a:b]) for a, b in pairwise(ends)]


def test_only_files_that_hold_what_is_asked_for_are_read(tmp_path: Path) -> None:
    values = torch.arange(12.0).view(3, 4)
    first, second, third = ranges("a", values, 4, 8)
    reader = write(tmp_path, [first, second], [third])
    assert reader.names == {"a"}
    assert reader.dtype("a") is torch.float32
    assert reader.shape("a") == (3, 4)
    assert reader.files("a") == ["rank_00000.safetensors", "rank_00001.safetensors"]
    out = torch.empty(7)
    for start in (0, 3, 5):
        reader.read("a", start, start + 7, out)
        assert torch.equal(out, values.flatten()[start : start + 7])
    assert torch.equal(reader.tensor("a"), values)
    (tmp_path / "rank_00001.safetensors").unlink()
    reader.read("a", 1, 8, out)
    assert torch.equal(out, values.flatten()[1:8])
    with pytest.raises(FileNotFoundError):
        reader.read("a", 2, 9, out)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_dtype_is_written_as_safetensors_writes_it(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    other = torch.randn(3, dtype=torch.float64)
    values = torch.randint(0, 2, (2, 5)).to(dtype)
    reader = write(tmp_path, [*ranges("small", values), *ranges("other", other)])
    reader.verify()
    assert reader.dtype("small") is dtype
    loaded = load_file(tmp_path / "rank_00000.safetensors")
    assert torch.equal(loaded["other[0:3]"], other)
    for got in (loaded["small[0:10]"].view(2, 5), reader.tensor("small")):
        assert got.dtype is dtype
        assert torch.equal(got.view(torch.uint8), values.view(torch.uint8))


def test_a_dtype_that_the_files_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"wave is of torch.complex128, which a checkpoint cannot hold"):
        write(tmp_path, ranges("wave", torch.zeros(2, dtype=torch.complex128)))


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((4, 6), [((0, 0), (4, 3)), ((0, 3), (4, 3))]),
        ((4, 6), [((0, 0), (1, 6)), ((1, 0), (3, 2)), ((1, 2), (3, 4))]),
        ((2, 3, 4), [((0, 0, 0), (2, 1, 4)), ((0, 1, 0), (2, 2, 4))]),
        ((2, 3, 4), [((0, 0, 0), (2, 3, 1)), ((0, 0, 1), (1, 3, 3)), ((1, 0, 1), (1, 3, 3))]),
        ((5,), [((0,), (2,)), ((2,), (3,))]),
        ((), [((), ())]),
    ],
)
def test_parts_of_more_dimensions_hold_any_range_of_the_flattened_tensor(shape, parts, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(boxes, "PART", 16)
    monkeypatch.setattr(boxes, "BUFFER", 16)
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    written = []
    for offsets, sizes in parts:
        part = values[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].flatten()
        for start, stop in ((0, part.numel() // 3), (part.numel() // 3, part.numel())):
            written.append(Box.of("a", shape, start, part[start:stop], offsets, sizes))
    reader = write(tmp_path, written[::2], written[1::2])
    assert torch.equal(reader.tensor("a"), values)
    for start in range(values.numel()):
        for stop in range(start + 1, values.numel() + 1):
            out = torch.full((stop - start,), -1.0, dtype=torch.float64)
            reader.read("a", start, stop, out)
            assert torch.equal(out, values.flatten()[start:stop].double())


def test_elements_that_no_file_holds_are_an_error(tmp_path: Path) -> None:
    reader = write(tmp_path, ranges("a", torch.arange(6.0), 2)[:1])
    with pytest.raises(ValueError, match=r"lacks 3 of the 4 elements of a that are needed"):
        reader.read("a", 1, 5, torch.empty(4))


def damaged(tmp_path: Path) -> tuple[Reader, Path]:
    values = torch.arange(24.0)
    reader = write(tmp_path / "run", [*ranges("a", values), *ranges("b", values)], ranges("c", values, 10))
    write(tmp_path / "older", [])
    return reader, tmp_path / "run" / "rank_00000.safetensors"


def test_a_flipped_bit_is_named_by_file_and_tensor(tmp_path: Path) -> None:
    reader, file = damaged(tmp_path)
    reader.verify()
    whole = file.read_bytes()
    place = reader._shards[0]["boxes"][1]["bytes"][0] + 5
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    text = r"SHA-256 differs\): .*rank_00000.safetensors, of which b\[0:24\], cannot be used; .*tag='older'"
    with pytest.raises(ValueError, match=text):
        reader.verify()
    reader.verify(names={"a", "c"})
    found = []
    for share in range(3):
        try:
            reader.verify(share, 3)
        except ValueError as error:
            found.append(str(error))
    assert len(found) == 1, "one of those who share the work finds it"
    file.write_bytes(whole[:20] + bytes([whole[20] ^ 4]) + whole[21:])
    with pytest.raises(ValueError, match=r"of which a\[0:24\], b\[0:24\], cannot be used"):
        reader.verify()


def test_a_file_that_is_cut_off_lacks_the_tensors_at_its_end(tmp_path: Path) -> None:
    reader, file = damaged(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=rf"cut off after {len(whole) - 1} of {len(whole)} bytes, and lacks b\[0:24\];"
    ):
        reader.verify(5, 100)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"lacks a\[0:24\], b\[0:24\];"):
        reader.verify()


def test_a_missing_file_is_named_with_what_it_held(tmp_path: Path) -> None:
    reader, file = damaged(tmp_path)
    file.with_name("rank_00001.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"is missing, which held c\[0:10\], c\[10:24\]; .*tag='older'"):
        reader.verify()


class Trap:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reader, file = damaged(tmp_path)
    torch.save({"a": torch.zeros(300), "trap": Trap()}, file)
    with pytest.raises(ValueError, match="SHA-256 differs"):
        reader.verify()
    reader.tensor("a")
    torch.save(Trap(), reader.folder / MANIFEST)
    with pytest.raises(ValueError, match="incomplete save"):
        Reader(reader.folder)
    assert not Path("executed").exists()
    torch.load(io.BytesIO(file.read_bytes()), weights_only=False)
    assert Path("executed").exists(), "the trap works"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is an incomplete save: manifest.json is not a complete JSON file"),
        (lambda text: text.replace("24", "25"), "is not the file that was written (SHA-256 differs)"),
        (
            lambda text: text.replace('"format": 3', '"format": 4'),
            "1 to 3: install the version that wrote it",
        ),
        (lambda text: "[]", "is not of ZeroMesh"),
        (lambda text: json.dumps({"shards": 3}), "is not of ZeroMesh"),
    ],
)
def test_a_manifest_that_is_not_what_was_written_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    damaged(tmp_path)
    path = tmp_path / "run" / MANIFEST
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Reader(tmp_path / "run")
    assert message in str(caught.value)


def test_no_other_checkpoint_is_offered_that_is_damaged_itself(tmp_path: Path) -> None:
    reader, file = damaged(tmp_path)
    newer = write(tmp_path / "newer", ranges("a", torch.arange(24.0)))
    os.truncate(file, 300)
    with pytest.raises(ValueError, match=r"cut off after 300 .*: load it with tag='newer'"):
        reader.verify()
    (newer.folder / "rank_00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cut off after 300 .*: load it with tag='older'"):
        reader.verify()
    for name in ("newer", "older"):
        (tmp_path / name / MANIFEST).write_text('{"format": 2,')
    with pytest.raises(ValueError, match=r"incomplete save: .* has no other checkpoint that is whole"):
        Reader(newer.folder)


def test_without_a_manifest_there_is_no_checkpoint(tmp_path: Path) -> None:
    damaged(tmp_path)
    (tmp_path / "run" / MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match=r"not a complete checkpoint: manifest.json is missing; .*tag='older'"):
        Reader(tmp_path / "run")
    (tmp_path / "older" / MANIFEST).write_text("{}")
    with pytest.raises(FileNotFoundError, match="has no other checkpoint"):
        Reader(tmp_path / "run")
