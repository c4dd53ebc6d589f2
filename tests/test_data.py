from __future__ import annotations

import gzip
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import zeromesh.data.prepare as prepare_module
import zeromesh.data.tokens as tokens_module
from zeromesh.config.train import TextData
from zeromesh.data.corpus import Document, find_documents, is_text, parts, read_document, split_documents
from zeromesh.data.loader import (
    Permutation,
    Share,
    Windows,
    evaluation_batches,
    training_batches,
    window_of,
)
from zeromesh.data.prepare import Changed, prepare
from zeromesh.data.prepare import _sample as sample
from zeromesh.data.python_lines import count_lines
from zeromesh.data.tokens import (
    END_OF_TEXT,
    Piece,
    byte_lengths,
    load_tokenizer,
    token_bytes,
    train_tokenizer,
    write_tokens,
)

TEXTS = [f"def function_{n}(value):\n    return value + {n}  # naïve ✓ {END_OF_TEXT}\n" * 5 for n in range(12)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "corpus"
    (found / "deep").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (found / ("deep" if number % 3 else ".") / f"{number}.py").write_text(text)
    (found / "notes.txt").write_text("not Python")
    return found


def names(documents: tuple[Document, ...] | list[Document]) -> list[str]:
    return [document.name for document in documents]


def test_a_folder_a_glob_and_a_file_find_documents_in_one_order_and_each_once(folder: Path) -> None:
    by_folder = find_documents([str(folder)], [".py"])
    assert len(by_folder) == len(TEXTS)
    assert names(by_folder) == sorted(names(by_folder))
    assert names(find_documents([str(folder / "**/*.py")], [])) == names(by_folder)
    assert names(find_documents([str(folder), str(folder / "0.py")], [".py"])) == names(by_folder)
    assert names(find_documents([str(folder / "notes.txt")], [".py"])) == ["notes.txt"]
    assert len(find_documents([str(folder)], [])) == len(TEXTS) + 1


def test_the_standard_library_is_found_without_packages_and_tests() -> None:
    found = names(find_documents(["python-stdlib"], []))
    assert "json/decoder.py" in found
    assert not [name for name in found if {"site-packages", "test", "tests"} & set(name.split("/"))]


def test_a_source_without_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty.*\.py, \.md.*data\.suffixes"):
        find_documents([str(tmp_path / "empty")], [".py", ".md"])
    with pytest.raises(ValueError, match="nowhere.*does not exist"):
        find_documents([str(tmp_path / "nowhere")], [])


def test_the_side_of_a_document_depends_on_its_name_alone() -> None:
    documents = [Document(f"{n}.py", Path(f"{n}.py"), stop=100) for n in range(2000)]
    split = split_documents(documents, 0.1)
    assert 150 < len(split.validation) < 250
    assert names(split.train + split.validation) != names(documents)  # not cut off at an end
    half = split_documents(documents[::-2], 0.1)
    assert set(half.validation) == set(split.validation) & set(documents[::-2])
    more = split_documents(documents, 0.2)
    assert set(split.validation) < set(more.validation)


def contents(documents: tuple[Document, ...]) -> bytes:
    return b"".join(read_document(document).encode() for document in documents)


def test_of_a_single_document_the_last_lines_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {n}\n" for n in range(1000)))
    for name in ("one.txt", "by its hash it would be held out"):
        split = split_documents([Document(name, path)], 0.1)
        held = contents(split.validation)
        assert contents(split.train) + held == path.read_bytes()
        assert held.startswith(b"line 9")
        assert 0.1 <= len(held) / path.stat().st_size < 0.102
    assert not split_documents([Document("one.txt", path)], 0).validation


def test_both_sides_of_a_split_get_text(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"a word and {number}\n" * (1000 if number == 7 else 3))
    documents = find_documents([str(tmp_path)], [])
    for count in (1, 2, 8):
        for fraction in (1e-9, 0.02, 0.5, 0.999999):
            split = split_documents(documents[-count:], fraction)
            train, held = contents(split.train), contents(split.validation)
            assert train
            assert held
            assert len(train + held) == sum(document.size for document in documents[-count:])
            if fraction <= 0.5:
                assert len(train) > len(train + held) * (1 - fraction) / 2


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab\n\ncd\nef\ngh", ["ab\n\ncd\nef\n", "gh"]),
        ("ab\ncdef\n\n  gh", ["ab\n", "cdef\n\n  gh"]),
        ("abcdef\n\n  ghij", ["abcdef\n\n", "  ghij"]),
        ("ab cd ef gh ij", ["ab cd ef", " gh ij"]),
        ("abcdefghijkl", ["abcdefghij", "kl"]),
        ("ééééééé", ["ééééé", "éé"]),
        ("✓✓✓✓", ["✓✓✓", "✓"]),
        ("x\n", ["x\n"]),
        ("", []),
    ],
)
def test_a_long_document_is_cut_at_lines_words_or_characters(tmp_path: Path, text: str, pieces: list[str]) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    assert [read_document(part) for part in parts(Document("x", path), 10)] == pieces


def test_a_document_that_is_not_utf8_or_empty_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in (b"\xff\xfe", b"", b"cut off \xc3"):
        path.write_bytes(content)
        assert not is_text(Document("x", path))
    assert not is_text(Document("y", tmp_path / "y"))
    path.write_bytes("\ufeffa\r\nb".encode())
    assert is_text(Document("x", path))
    assert read_document(Document("x", path)) == "\ufeffa\r\nb"


def test_suffixes_are_the_ends_of_names(folder: Path) -> None:
    (folder / "deep" / "a_v1.txt").write_text("text")
    assert names(find_documents([str(folder)], ["_v1.txt"])) == ["deep/a_v1.txt"]
    assert len(find_documents([str(folder)], ["py"])) == len(TEXTS)


def test_what_runs_write_is_no_text(folder: Path) -> None:
    before = find_documents([str(folder)], [])
    for name in ("runs/this/text", "runs/other/text", "runs/.hidden"):
        (folder / name).mkdir(parents=True)
        (folder / name / "data.json").write_text("{}")
    for name in ("config.json", "metrics.jsonl"):
        (folder / "runs" / "other" / name).write_text("{}")
    output = folder / "runs" / "this"
    assert find_documents([str(folder)], [], output) == before
    assert find_documents([str(folder / "**/*")], [], output) == before
    assert names(find_documents([str(output / "text" / "data.json")], [], output)) == ["data.json"]
    with pytest.raises(ValueError, match="run.output is the data folder"):
        find_documents([str(folder)], [], folder)


def test_a_long_document_is_read_in_pieces_and_has_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.py"
    path.write_text("".join(text.replace("value", f"value_{n}") for n in range(30) for text in TEXTS))
    data = TextData(train=(str(path),), validation_fraction=0.1, vocabulary_size=320)
    whole = prepare(data, tmp_path / "whole")
    assert (whole.train.documents, whole.validation.documents) == (1, 1)
    assert whole.train.bytes + whole.validation.bytes == path.stat().st_size
    given: list[int] = []
    encode = Tokenizer.encode_batch_fast

    class Counting:
        """The tokenizer that was trained, which notes how much it is given at a time."""

        def __init__(self, tokenizer: Tokenizer) -> None:
            self.tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tokenizer, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            given.append(sum(map(len, texts)))
            return encode(self.tokenizer, texts, **options)

    train = prepare_module.train_tokenizer
    monkeypatch.setattr(prepare_module, "train_tokenizer", lambda *args, **more: Counting(train(*args, **more)))
    monkeypatch.setattr(prepare_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(tokens_module, "ENCODED_AT_ONCE", 5000)
    pieces = prepare(data, tmp_path / "pieces")
    assert max(given) <= 6000
    assert replace(pieces, train=whole.train, validation=whole.validation) == whole
    assert (pieces.train.read() == whole.train.read()).all()
    assert (pieces.validation.read() == whole.validation.read()).all()


def test_a_tokenizer_is_trained_on_pieces_from_all_over_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("a", 100_000), ("b", 100), ("c", 50_000)):
        (tmp_path / name).write_text(f"{name * 4}\n" * (size // 5))
    documents = find_documents([str(tmp_path)], [])
    assert sum(map(len, sample(documents))) == 150_100
    monkeypatch.setattr(prepare_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(prepare_module, "SAMPLE_BYTES", 15_000)
    found = list(sample(documents))
    assert 14_000 <= sum(map(len, found)) <= 16_000
    assert 9 <= sum("a" in text for text in found) <= 11
    assert max(map(len, found)) <= 1000


def test_tokens_stand_for_the_very_bytes(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    written = write_tokens(tmp_path / "tokens", tokenizer, map(Piece, TEXTS))
    ids = written.read()
    assert ids.dtype == np.uint16
    bytes_of = token_bytes(tokenizer)
    end = ids[0]
    starts = np.flatnonzero(ids == end)
    assert len(starts) == len(TEXTS) + 1
    assert starts[-1] == len(ids) - 1 == written.tokens - 1
    for text, start, stop in zip(TEXTS, starts, starts[1:], strict=False):
        assert b"".join(bytes_of[token] for token in ids[start + 1 : stop]) == text.encode()
    assert byte_lengths(tokenizer)[ids].sum() == written.bytes == sum(len(text.encode()) for text in TEXTS)


def test_a_vocabulary_beyond_what_the_text_gives_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.vocabulary_size = 50000 is too large.*only gives \d+"):
        train_tokenizer(TEXTS, 50000)


def test_a_vocabulary_whose_size_nobody_set_is_as_large_as_the_text_allows(folder: Path, tmp_path: Path) -> None:
    prepared = prepare(TextData(train=(str(folder),)), tmp_path / "text")
    assert prepared.capped
    assert 257 < prepared.vocabulary < 1000
    # The settings as the run wrote them down name the size that it became.
    written = TextData(train=(str(folder),), vocabulary_size=prepared.vocabulary)
    assert prepare(written, tmp_path / "text", may_write=False) == prepared
    assert prepare(TextData(train=(str(folder),)), tmp_path / "text", may_write=False) == prepared
    with pytest.raises(Changed):
        prepare(TextData(train=(str(folder),), vocabulary_size=280), tmp_path / "text", may_write=False)


def test_sources_without_readable_text_are_refused_with_the_names_of_the_files(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.txt").write_bytes(b"\xff\xfe" if number else b"")
    with pytest.raises(ValueError, match=r"no readable text in data\.train.*0\.txt.*and 2 more are empty or not UTF-8"):
        prepare(TextData(train=(str(tmp_path),)), tmp_path / "run" / "text")
    (tmp_path / "7.txt").write_text("text\n" * 100)
    data = TextData(train=(str(tmp_path / "7.txt"),), validation=(str(tmp_path / "1.txt"),))
    with pytest.raises(ValueError, match=r"no readable text in data\.validation.*1\.txt is"):
        prepare(data, tmp_path / "run" / "text")


def test_files_that_are_left_out_are_named(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    with caplog.at_level("INFO", "zeromesh"):
        prepare(TextData(train=(str(folder),)), tmp_path / "text")
    assert "latin.py" in caplog.text


def test_a_tokenizer_that_loses_bytes_is_refused(tmp_path: Path) -> None:
    from tokenizers.normalizers import Replace

    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.normalizer = Replace("def", "")
    tokenizer.save(str(tmp_path / "lossy.json"))
    with pytest.raises(ValueError, match="byte-level tokenizer without normalization"):
        write_tokens(tmp_path / "tokens", load_tokenizer(tmp_path / "lossy.json"), map(Piece, TEXTS))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json.*is not a tokenizer"):
        load_tokenizer(tmp_path / "broken.json")


def test_text_is_prepared_once_and_again_only_if_it_changed(folder: Path, tmp_path: Path) -> None:
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    (folder / "empty.py").touch()
    data = TextData(train=(str(folder),), suffixes=(".py",), validation_fraction=0.3, vocabulary_size=280)
    first = prepare(data, tmp_path / "text")
    assert first.train.documents + first.validation.documents == len(TEXTS)
    assert (first.skipped, first.vocabulary, first.python) == (2, 280, True)
    documents = [document for document in find_documents([str(folder)], [".py"]) if is_text(document)]
    content = contents(split_documents(documents, 0.3).validation)
    assert first.validation.bytes == len(content)
    assert first.gzip_bytes == len(gzip.compress(content, 9))

    made = (tmp_path / "text" / "train.tokens").stat().st_mtime_ns
    assert prepare(data, tmp_path / "text", may_write=False) == first
    assert (tmp_path / "text" / "train.tokens").stat().st_mtime_ns == made

    os.utime(folder / "0.py", ns=(1, 1))
    with pytest.raises(Changed, match=r"data\.train has changed"):
        prepare(data, tmp_path / "text", may_write=False)
    assert prepare(data, tmp_path / "text").key != first.key


def test_validation_files_that_are_named_are_not_trained_on(folder: Path, tmp_path: Path) -> None:
    data = TextData(
        train=(str(folder),), suffixes=(".py",), validation=(str(folder / "deep" / "1.py"),), vocabulary_size=280
    )
    prepared = prepare(data, tmp_path / "text")
    assert prepared.validation.bytes == len(TEXTS[1].encode())
    assert prepared.train.documents == len(TEXTS) - 1


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_every_epoch_is_a_permutation_of_the_windows(size: int) -> None:
    assert sorted(Permutation(size, 3)[n] for n in range(size)) == list(range(size))
    epochs = [[window_of(epoch * size + n, size, 5) for n in range(size)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size > 60:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != [window_of(n, size, 6) for n in range(size)]
        moved = np.abs(np.array(epochs[0]) - np.arange(size))
        assert moved.mean() > size / 5  # a third of the size is what chance gives


def stream(windows: Windows, sizes: int, consumed: int, steps: int, rows: int, micro_batches: int) -> list[list[int]]:
    """The first tokens of the samples of each step, gathered over the ranks in the order of the stream."""
    ranks = [training_batches(windows, Share(rank, sizes, rows, micro_batches), 7, consumed) for rank in range(sizes)]
    found = []
    for _ in range(steps):
        batch = [next(rank)[0][:, 0] for _ in range(micro_batches) for rank in ranks]
        found.append(torch.cat(batch).tolist())
    return found


def test_the_stream_of_samples_is_the_same_on_any_number_of_ranks_and_after_any_resume() -> None:
    windows = Windows(np.arange(1001, dtype=np.uint16), 10)
    whole = stream(windows, 1, 0, 30, 12, 1)
    assert stream(windows, 2, 0, 30, 3, 2) == whole
    assert stream(windows, 3, 0, 30, 2, 2) == whole
    assert stream(windows, 4, 13 * 12, 17, 1, 3) == whole[13:]
    first_epoch = [start for batch in whole for start in batch][:100]
    assert sorted(first_epoch) == list(range(0, 1000, 10))


def test_labels_are_the_tokens_that_follow() -> None:
    windows = Windows(np.arange(100, dtype=np.uint16), 8)
    assert len(windows) == 12
    tokens, labels = next(training_batches(windows, Share(0, 1, 3, 1), 0, 0))
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.shape == labels.shape == (3, 8)
    assert torch.equal(labels, tokens + 1)


def test_too_little_text_for_one_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sequence_length = 100 needs 101 tokens.*there are 100"):
        Windows(np.arange(100, dtype=np.uint16), 100)


def test_starting_the_loader_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    next(training_batches(Windows(np.arange(100, dtype=np.uint16), 8), Share(0, 1, 3, 1), 0, 0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("count", "length", "rows", "ranks"), [(2, 4, 2, 1), (9, 4, 2, 1), (50, 4, 3, 2), (97, 8, 2, 3)]
)
def test_evaluation_has_every_token_but_the_first_as_a_label_once(
    count: int, length: int, rows: int, ranks: int
) -> None:
    stream = np.arange(1, count + 1, dtype=np.uint32)
    shares = [list(evaluation_batches(stream, length, rows, rank, ranks, -100)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    seen = []
    for tokens, labels in (batch for share in shares for batch in share):
        assert tokens.shape == labels.shape == (rows, length)
        counted = labels != -100
        assert torch.equal(labels[counted], tokens[counted] + 1)
        seen += labels[counted].tolist()
    assert sorted(seen) == list(range(2, count + 1))


def test_lines_are_python_if_each_tokenizes_by_itself() -> None:
    good = ["def f(a, b=1):", "    return [x for x in a]", "'text'", "# anything: $?"]
    bad = ["x = 'open", "call(", "a $ b"]
    counted = count_lines(["\n".join([*good, *bad, "", "cut of"]), "x = 1\n"])
    assert (counted.lines, counted.tokenizing) == (8, 5)
    assert counted.share == 5 / 8
