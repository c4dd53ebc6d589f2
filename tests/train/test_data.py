import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import zeromesh.apps.train.data.encode as encode_module
import zeromesh.apps.train.data.prepare_text as prepare_module
import zeromesh.apps.train.data.text_formats as formats_module
from zeromesh.apps.train.data.prepare_text import Changed, prepare, sample_texts
from zeromesh.apps.train.data.sources import find_documents, is_text, split_documents
from zeromesh.apps.train.data.text_formats import Document, portions, read_portion
from zeromesh.apps.train.data.token_store import TokenSet
from zeromesh.apps.train.data.tokenizer import END_OF_TEXT, load_tokenizer, stream_text, train_tokenizer
from zeromesh.apps.train.train_settings import TextData

TEXTS = [f"def function_{n}(value):\n    return value + {n}  # naïve ✓ {END_OF_TEXT}\n" * 5 for n in range(12)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "corpus"
    (found / "deep").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (found / ("deep" if number % 3 else ".") / f"{number}.py").write_text(text)
    (found / "notes.txt").write_text("not Python")
    return found


def names(documents: list[Document]) -> list[str]:
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
    train, held = split_documents(documents, 0.1)
    assert 150 < len(held) < 250
    assert names(train + held) != names(documents)  # not cut off at an end
    assert set(split_documents(documents[::-2], 0.1)[1]) == set(held) & set(documents[::-2])
    assert set(held) < set(split_documents(documents, 0.2)[1])


def pieces_of(document: Document) -> list[str]:
    return [text for portion in portions(document) for _, text in read_portion(portion)]


def contents(documents: list[Document]) -> bytes:
    return "".join(text for document in documents for text in pieces_of(document)).encode()


def test_the_last_lines_of_a_single_document_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {n}\n" for n in range(1000)))
    for name in ("one.txt", "by its hash it would be held out"):
        train, held = map(contents, split_documents([Document(name, path)], 0.1))
        assert train + held == path.read_bytes()
        assert held.startswith(b"line 9")
        assert 0.1 <= len(held) / path.stat().st_size < 0.102
    assert not split_documents([Document("one.txt", path)], 0)[1]


def test_both_sides_of_a_split_get_text(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"a word and {number}\n" * (1000 if number == 7 else 3))
    documents = find_documents([str(tmp_path)], [])
    for count in (1, 2, 8):
        for fraction in (1e-9, 0.02, 0.5, 0.999999):
            train, held = map(contents, split_documents(documents[-count:], fraction))
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
def test_a_long_document_is_cut_at_lines_words_or_characters(tmp_path, monkeypatch, text, pieces) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    monkeypatch.setattr(formats_module, "PIECE_BYTES", 10)
    assert pieces_of(Document("x", path)) == pieces


def test_a_document_that_is_not_utf8_or_empty_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in (b"\xff\xfe", b"", b"cut off \xc3"):
        path.write_bytes(content)
        assert not is_text(Document("x", path))
    assert not is_text(Document("y", tmp_path / "y"))
    path.write_bytes("\ufeffa\r\nb".encode())
    assert is_text(Document("x", path))
    assert pieces_of(Document("x", path)) == ["\ufeffa\r\nb"]


def test_suffixes_are_the_ends_of_names(folder: Path) -> None:
    (folder / "deep" / "a_v1.txt").write_text("text")
    assert names(find_documents([str(folder)], ["_v1.txt"])) == ["deep/a_v1.txt"]
    assert len(find_documents([str(folder)], ["py"])) == len(TEXTS)


def test_files_of_runs_are_no_text(folder: Path) -> None:
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


def ids_of(part: TokenSet) -> list[list[int]]:
    return [part.indexed.document(number).tolist() for number in part.numbers]


def test_a_long_document_is_read_in_pieces_and_has_the_same_tokens(tmp_path, monkeypatch) -> None:
    path = tmp_path / "long.py"
    path.write_text("".join(text.replace("value", f"value_{n}") for n in range(30) for text in TEXTS))
    data = TextData(train=(str(path),), validation_fraction=0.1, vocabulary_size=320)
    whole = prepare(data, tmp_path / "whole")
    assert (whole.train[0].documents, whole.validation[0].documents) == (1, 1)
    assert whole.train[0].bytes + whole.validation[0].bytes == path.stat().st_size
    given: list[int] = []
    encode = encode_module.encode_text

    def counting(tokenizer: object, texts: Sequence[str]) -> object:
        given.append(sum(map(len, texts)))
        return encode(tokenizer, texts)

    monkeypatch.setattr(encode_module, "encode_text", counting)
    monkeypatch.setattr(formats_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(encode_module, "TASK_BYTES", 5000)
    pieces = prepare(data, tmp_path / "pieces")
    assert max(given) <= 6000
    assert replace(pieces, train=whole.train, validation=whole.validation, tokenizer=whole.tokenizer) == whole
    assert ids_of(pieces.train[0]) == ids_of(whole.train[0])
    assert ids_of(pieces.validation[0]) == ids_of(whole.validation[0])


def test_a_tokenizer_is_trained_on_pieces_from_all_over_the_text(tmp_path, monkeypatch) -> None:
    for name, size in (("a", 100_000), ("b", 100), ("c", 50_000)):
        (tmp_path / name).write_text(f"{name * 4}\n" * (size // 5))
    data = TextData(train=(str(tmp_path),))
    files = [replace(document, share=1.0) for document in find_documents([str(tmp_path)], [])]
    assert sum(map(len, sample_texts(data, files))) == 150_100
    monkeypatch.setattr(formats_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(prepare_module, "SAMPLE_BYTES", 15_000)
    found = list(sample_texts(data, files))
    assert 14_000 <= sum(map(len, found)) <= 16_000
    assert 9 <= sum("a" in text for text in found) <= 11
    assert max(map(len, found)) <= 1000


def test_tokens_stand_for_the_very_bytes(folder: Path, tmp_path: Path) -> None:
    data = TextData(train=(str(folder),), suffixes=(".py",), validation_fraction=0, vocabulary_size=300)
    prepared = prepare(data, tmp_path / "text")
    (part,) = prepared.train
    assert prepared.tokenizer is not None
    tokenizer = load_tokenizer(prepared.tokenizer)
    assert part.indexed.tokens.dtype == np.uint16
    documents = find_documents([str(folder)], [".py"])
    for document, ids in zip(documents, ids_of(part), strict=True):
        assert ids[-1] == tokenizer.end
        assert tokenizer.end not in ids[:-1]
        assert tokenizer.decode(ids) == "".join(pieces_of(document))
    assert part.bytes == sum(document.size for document in documents)
    assert part.tokens == part.labels == len(part.indexed.tokens)


def test_text_is_decoded_as_its_ids_come() -> None:
    tokenizer = train_tokenizer(["naïve ✓ 🙂 done"], 257)
    text = "naïve ✓ 🙂🙂 done"
    (ids,) = tokenizer.encode([text])
    pieces = list(stream_text(tokenizer, ids.tolist()))
    assert len(ids) > len(pieces) == len(text)  # every byte is a token here
    assert "".join(pieces) == text
    assert "".join(stream_text(tokenizer, ids.tolist()[:-8])) == "naïve ✓ 🙂" + "\ufffd"
    assert "".join(stream_text(tokenizer, ids.tolist()[5:], ids.tolist()[:5])) == text[4:]


def test_a_tokenizer_that_writes_words_with_spaces_before_them_streams_the_same_text() -> None:
    from tokenizers import decoders

    from zeromesh.apps.train.data.tokenizer import _wrapped

    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "</s>": 2}, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    tokenizer = _wrapped(words, "words")
    (ids,) = tokenizer.encode(["one two one"])
    assert "".join(stream_text(tokenizer, ids.tolist())) == "one two one"
    assert "".join(stream_text(tokenizer, ids.tolist()[1:], ids.tolist()[:1])) == " two one"


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
        (tmp_path / f"{number}.txt").write_bytes(b"caf\xe9" if number else b"")
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


def test_bytes_are_those_of_the_text_also_where_a_tokenizer_loses_some(folder: Path, tmp_path: Path) -> None:
    from tokenizers.normalizers import Replace

    train_tokenizer(TEXTS, 300).save(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.normalizer = Replace("def", "")
    tokenizer.save(str(tmp_path / "lossy.json"))
    data = TextData(train=(str(folder),), suffixes=(".py",), tokenizer=str(tmp_path / "lossy.json"))
    prepared = prepare(data, tmp_path / "text")
    size = sum(len(text.encode()) for text in TEXTS)
    assert prepared.train[0].bytes + prepared.validation[0].bytes == size


def test_files_that_are_no_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json.*is not a tokenizer"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(ValueError, match=r"nowhere.*does not exist.*folder"):
        load_tokenizer(tmp_path / "nowhere")
    Tokenizer(models.WordLevel({"a": 0})).save(str(tmp_path / "endless.json"))
    with pytest.raises(ValueError, match=r"endless.*no token for the end of a text.*<\|endoftext\|>"):
        load_tokenizer(tmp_path / "endless.json")


def test_text_is_prepared_once_and_again_only_if_it_changed(folder: Path, tmp_path: Path) -> None:
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    (folder / "empty.py").touch()
    data = TextData(train=(str(folder),), suffixes=(".py",), validation_fraction=0.3, vocabulary_size=280)
    first = prepare(data, tmp_path / "text")
    assert first.train[0].documents + first.validation[0].documents == len(TEXTS)
    assert (first.skipped, first.vocabulary) == (2, 280)
    documents = [document for document in find_documents([str(folder)], [".py"]) if is_text(document)]
    content = contents(split_documents(documents, 0.3)[1])
    assert first.validation[0].bytes == first.held_out_bytes == len(content)

    written = (tmp_path / "text" / "train0.bin").stat().st_mtime_ns
    summary = tmp_path / "text" / "data.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"gzip_bytes": 1}))  # of an earlier version
    assert prepare(data, tmp_path / "text", may_write=False) == first
    assert (tmp_path / "text" / "train0.bin").stat().st_mtime_ns == written

    os.utime(folder / "0.py", ns=(1, 1))
    with pytest.raises(Changed, match=r"data\.train has changed"):
        prepare(data, tmp_path / "text", may_write=False)
    assert prepare(data, tmp_path / "text").key != first.key


def test_validation_files_that_are_named_are_not_trained_on(folder: Path, tmp_path: Path) -> None:
    data = TextData(
        train=(str(folder),), suffixes=(".py",), validation=(str(folder / "deep" / "1.py"),), vocabulary_size=280
    )
    prepared = prepare(data, tmp_path / "text")
    assert prepared.validation[0].bytes == len(TEXTS[1].encode())
    assert prepared.train[0].documents == len(TEXTS) - 1


@pytest.mark.some(1)
@pytest.mark.parametrize("line", ["ab" * 1_500_000, " " * 3_000_000, "7" * 3_000_000, "=-" * 1_500_000])
def test_a_line_without_an_end_is_learned_from_in_pieces(line: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = train_tokenizer([*TEXTS, f"{line}\n{TEXTS[0]}"], 300)
    assert "1 words of more than 1,000 characters without a blank, the longest of 3,000,0" in caplog.text
    ids = tokenizer.encode([line])[0]
    assert tokenizer.decode(ids.tolist()) == line


def test_words_of_the_usual_length_are_learned_from_whole(caplog: pytest.LogCaptureFixture) -> None:
    words = ["a" * 1000 + " " + "1" * 1000, *TEXTS]
    train_tokenizer(words, 300)
    assert "words of more than" not in caplog.text


def test_files_of_zeros_and_pipes_are_left_out_and_named(folder, tmp_path, caplog) -> None:
    (folder / "zeros.py").write_bytes(bytes(5000))
    os.mkfifo(folder / "pipe.py")
    os.mkfifo(folder / "pipe.jsonl")
    caplog.set_level("INFO")
    prepared = prepare(TextData(train=[str(folder)], suffixes=[".py", ".jsonl"]), tmp_path / "run" / "text")
    assert prepared.skipped == 3
    assert "pipe.jsonl, pipe.py, zeros.py" in caplog.text
    with pytest.raises(ValueError, match=r"no readable text in .*zeros.py"):
        prepare(TextData(train=[str(folder / "zeros.py")]), tmp_path / "zeros" / "text")
    with pytest.raises(ValueError, match="is a FIFO, a socket or a device"):
        prepare(TextData(train=[str(folder / "pipe.py")]), tmp_path / "pipe" / "text")
