"""Megatron's indexed format, against files whose bytes are put together here."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zeromesh.apps.train.data.indexed import IndexedWriter, file_of, open_indexed, prefix_of, token_dtype
from zeromesh.apps.train.data.token_store import scan_documents

MAGIC = b"MMIDIDX\x00\x00"


def published(
    prefix: Path, documents: list[list[list[int]]], code: int = 8, kind: str = "H", modes: list[int] | None = None
) -> None:  # write documents of sequences of ids byte by byte, as the layout is published
    sequences = [sequence for document in documents for sequence in document]
    width = struct.calcsize("<" + kind)
    data = b"".join(struct.pack(f"<{len(s)}{kind}", *s) for s in sequences)
    index = MAGIC + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    offset = 0
    for sequence in sequences:
        index += struct.pack("<q", offset)
        offset += width * len(sequence)
    count = 0
    index += struct.pack("<q", 0)
    for document in documents:
        count += len(document)
        index += struct.pack("<q", count)
    index += b"".join(struct.pack("<b", mode) for mode in modes or [])
    prefix.with_name(prefix.name + ".bin").write_bytes(data)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)


DOCUMENTS = [[[5, 6, 7], [8]], [[]], [[65535, 1]], [], [[2], [3, 4], [9, 9, 9]]]


def test_written_bytes_are_those_of_the_published_layout(tmp_path: Path) -> None:
    published(tmp_path / "theirs", DOCUMENTS[:3])
    with IndexedWriter(tmp_path / "ours", np.dtype("<u2")) as writer:
        # In two portions, of which the first ends inside a document.
        writer.add(np.array([5, 6, 7]), np.array([3], dtype=np.int32), np.array([False]))
        writer.add(np.array([8, 65535, 1]), np.array([1, 0, 2], dtype=np.int32), np.array([True, True, True]))
        assert not (tmp_path / "ours.bin").exists()
    for ending in (".bin", ".idx"):
        assert file_of(tmp_path / "ours", ending).read_bytes() == file_of(tmp_path / "theirs", ending).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.bin", "ours.idx", "theirs.bin", "theirs.idx"]


@pytest.mark.parametrize(
    ("code", "kind", "dtype"),
    [(1, "B", "u1"), (2, "b", "i1"), (3, "h", "i2"), (4, "i", "i4"), (5, "q", "i8"), (8, "H", "u2")],
)
def test_files_of_every_dtype_are_read(tmp_path: Path, code: int, kind: str, dtype: str) -> None:
    published(tmp_path / "a.b", [[[1, 2], [3]], [[100]]], code, kind)
    data = open_indexed(tmp_path / "a.b")
    assert data.tokens.dtype == np.dtype(dtype)
    assert [data.document(n).tolist() for n in range(data.documents)] == [[1, 2, 3], [100]]


def test_documents_and_sequences_are_read_also_with_modes(tmp_path: Path) -> None:
    published(tmp_path / "set", DOCUMENTS, modes=[0, 1, 0, 1, 0, 0, 1])
    data = open_indexed(tmp_path / "set")
    assert [data.document(n).tolist() for n in range(data.documents)] == [
        [token for sequence in document for token in sequence] for document in DOCUMENTS
    ]
    assert data.lengths.tolist() == [3, 1, 0, 2, 1, 2, 3]
    assert data.boundaries.tolist() == [0, 2, 3, 4, 4, 7]
    assert scan_documents(tmp_path / "set").tokens.tolist() == [4, 0, 2, 0, 6]
    assert scan_documents(tmp_path / "set").highest == 65535


def write_and_fail(prefix: Path) -> None:
    with IndexedWriter(prefix, token_dtype(10)) as writer:
        writer.add(np.array([1]), np.array([1], dtype=np.int32), np.array([True]))
        raise ZeroDivisionError


def test_written_documents_are_read_and_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 50, 200).astype(np.int32)
    ids = random.integers(0, 2**31, lengths.sum())
    last = random.random(200) < 0.5
    last[-1] = True
    with IndexedWriter(tmp_path / "set", token_dtype(2**31)) as writer:
        for start in range(0, 200, 7):
            part = slice(start, start + 7)
            before = lengths[:start].sum()
            writer.add(ids[before : before + lengths[part].sum()], lengths[part], last[part])
    data = open_indexed(tmp_path / "set")
    assert (data.tokens == ids).all()
    assert (data.lengths == lengths).all()
    assert (data.boundaries[1:] == 1 + np.flatnonzero(last)).all()
    with pytest.raises(ZeroDivisionError):
        write_and_fail(tmp_path / "set")
    assert (open_indexed(tmp_path / "set").tokens == ids).all()
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_data_set_is_one(tmp_path: Path) -> None:
    published(tmp_path / "set", [])
    data = open_indexed(tmp_path / "set")
    assert (data.documents, len(data.tokens)) == (0, 0)
    with IndexedWriter(tmp_path / "ours", np.dtype("<u2")):
        pass
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "set.idx").read_bytes()


def test_ids_take_16_bits_below_65500_entries() -> None:
    assert (token_dtype(65_499), token_dtype(65_500)) == (np.dtype("<u2"), np.dtype("<i4"))


def test_a_data_set_is_named_by_its_prefix_or_one_of_its_files(tmp_path: Path) -> None:
    published(tmp_path / "v1.5", [[[1]]])
    for name in ("v1.5", "v1.5.bin", "v1.5.idx"):
        assert prefix_of(tmp_path / name) == tmp_path / "v1.5"
    assert prefix_of(tmp_path / "v1") is None


def changed(start: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda index: index[:start] + data + index[start + len(data) :]


LENGTHS, OFFSETS, BOUNDARIES = 34, 34 + 4 * 3, 34 + 12 * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(0, b"PAR1"), r"set\.idx' begins with b'PAR1.*of Megatron's format with b'MMIDIDX"),
        (changed(9, b"\x02"), r"set\.idx' has version 2, and only version 1"),
        (changed(17, b"\x09"), r"set\.idx' has the dtype code 9, which must be one of 1 \(uint8\).*8 \(uint16\)"),
        (lambda index: index[:20], r"set\.idx' is cut off in its header, after 20 bytes"),
        (lambda index: b"", r"set\.idx' begins with b''"),
        (lambda index: index[:-1], r"set\.idx' is cut off: 3 sequences and 3 document boundaries take 94.*has 93"),
        (lambda index: index + b"\0", r"set\.idx' has more than it should.*94 bytes, or 97 with modes, and it has 95"),
        (changed(18, b"\x04"), r"set\.idx' is cut off: 4 sequences"),
        (changed(LENGTHS, struct.pack("<i", -1)), r"sequence of -1 tokens"),
        (changed(LENGTHS, struct.pack("<i", 3)), r"set\.bin' has 8 bytes, and by 'set\.idx' it must have 10"),
        (changed(OFFSETS + 8, struct.pack("<q", 400)), r"sequence 1 begins at byte 400, outside of 'set\.bin' of 8"),
        (changed(OFFSETS + 8, struct.pack("<q", -4)), r"sequence 1 begins at byte -4, outside of"),
        (changed(OFFSETS + 8, struct.pack("<q", 2)), r"sequence 1 begins at byte 2, not where the one before it ends"),
        (changed(BOUNDARIES + 8, struct.pack("<q", 4)), r"must rise from 0 to the 3 sequences, and are \[0, 4, 3\]"),
        (changed(BOUNDARIES, struct.pack("<q", 1)), r"must rise from 0 to the 3 sequences, and are \[1, 2, 3\]"),
        (changed(BOUNDARIES + 16, struct.pack("<q", 2)), r"must rise from 0 to the 3 sequences, and are \[0, 2, 2\]"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    published(tmp_path / "set", [[[1, 2], [3]], [[4]]])
    index = tmp_path / "set.idx"
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(ValueError, match=message):
        open_indexed(tmp_path / "set")


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    published(tmp_path / "set", [[[1, 2], [3]], [[4]]])
    (tmp_path / "set.bin").write_bytes(b"1234567")
    with pytest.raises(ValueError, match=r"set\.bin' has 7 bytes.*must have 8.*do not belong together"):
        open_indexed(tmp_path / "set")
    (tmp_path / "set.bin").unlink()
    with pytest.raises(ValueError, match=r"set\.bin' does not exist, and belongs to .*set\.idx"):
        open_indexed(tmp_path / "set")


@pytest.mark.parametrize(
    ("documents", "code", "kind", "message"),
    [
        ([[[1, 2], [3]], [[-4]]], 4, "i", r"set\.bin' has the id -4 at token 3, and ids are not negative"),
        ([[[0.5]]], 7, "f", "numbers of type float32, and ids must be whole numbers"),
    ],
)
def test_numbers_that_are_no_ids_are_refused(tmp_path, documents, code, kind, message) -> None:
    published(tmp_path / "set", documents, code, kind)
    with pytest.raises(ValueError, match=message):
        scan_documents(tmp_path / "set")
