from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from zeromesh.config.train import TextData
from zeromesh.data.corpus import Document, find_documents, read_document, split_documents
from zeromesh.data.loader import (
    Permutation,
    Share,
    Windows,
    evaluation_batches,
    training_batches,
    window_of,
)
from zeromesh.data.prepare import Changed, prepare
from zeromesh.data.python_lines import count_lines
from zeromesh.data.tokens import END_OF_TEXT, byte_lengths, load_tokenizer, token_bytes, train_tokenizer, write_tokens

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
    documents = [Document(f"{n}.py", Path(f"{n}.py")) for n in range(2000)]
    split = split_documents(documents, 0.1)
    assert 150 < len(split.validation) < 250
    assert names(split.train + split.validation) != names(documents)  # not cut off at an end
    half = split_documents(documents[::-2], 0.1)
    assert set(half.validation) == set(split.validation) & set(documents[::-2])
    more = split_documents(documents, 0.2)
    assert set(split.validation) < set(more.validation)


def test_both_sides_of_a_split_get_a_document() -> None:
    documents = [Document("a", Path("a")), Document("b", Path("b"))]
    for fraction in (1e-9, 0.999999):
        split = split_documents(documents, fraction)
        assert (len(split.train), len(split.validation)) == (1, 1)
    assert not split_documents(documents, 0).validation
    assert not split_documents(documents[:1], 0.5).validation or not split_documents(documents[:1], 0.5).train


def test_a_document_that_is_not_utf8_or_empty_has_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in (b"\xff\xfe", b""):
        path.write_bytes(content)
        assert read_document(Document("x", path)) is None
    assert read_document(Document("y", tmp_path / "y")) is None
    path.write_bytes("\ufeffa\r\nb".encode())
    assert read_document(Document("x", path)) == "\ufeffa\r\nb"


def test_tokens_stand_for_the_very_bytes(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    written = write_tokens(tmp_path / "tokens", tokenizer, TEXTS)
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


def test_a_tokenizer_that_loses_bytes_is_refused(tmp_path: Path) -> None:
    from tokenizers.normalizers import Replace

    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.normalizer = Replace("def", "")
    tokenizer.save(str(tmp_path / "lossy.json"))
    with pytest.raises(ValueError, match="byte-level tokenizer without normalization"):
        write_tokens(tmp_path / "tokens", load_tokenizer(tmp_path / "lossy.json"), TEXTS)
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
    held = split_documents(find_documents([str(folder)], [".py"]), 0.3).validation
    content = b"".join((read_document(document) or "").encode() for document in held)
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
