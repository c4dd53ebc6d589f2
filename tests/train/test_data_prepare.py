"""Preparing data: in tasks, from Megatron's files, once, and without harm where it fails."""

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import zeromesh.apps.train.data.encode as encode_module
from test_data_indexed import published
from zeromesh.apps.train.data.indexed import IndexedWriter
from zeromesh.apps.train.data.prepare_text import Changed, prepare
from zeromesh.apps.train.data.tokenizer import train_tokenizer
from zeromesh.apps.train.train_settings import TextData
from zeromesh.base.progress import ReadingBar

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a few kilobytes, so that little text is enough for several of them."""
    monkeypatch.setattr("zeromesh.apps.train.data.text_formats.PIECE_BYTES", 2000)
    monkeypatch.setattr("zeromesh.apps.train.data.text_formats.PORTION_BYTES", 2000)
    monkeypatch.setattr(encode_module, "TASK_BYTES", 4000)


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(["alpha", "beta", "naïve", "✓", "def", "\n"], k=count))


def corpus(folder: Path) -> Path:
    folder.mkdir()
    (folder / "long.txt").write_text(words(8000, 1))
    for number in range(5):
        (folder / f"{number}.txt").write_text(words(200, number))
    with (folder / "records.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": words(30, number)}) + "\n" for number in range(400))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_result_is_the_same_bytes_for_any_number_of_threads_and_size_of_tasks(
    tmp_path: Path, small_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus(tmp_path / "corpus")
    found = []
    for number, (parallel, size) in enumerate([("false", 4000), ("true", 4000), ("true", 2**21)]):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        monkeypatch.setattr(encode_module, "TASK_BYTES", size)
        data = TextData(train=(str(source),), validation_fraction=0.1)
        prepared = prepare(data, tmp_path / str(number) / "text")
        assert prepared.train[0].documents > 300
        found.append(contents(tmp_path / str(number)))
    assert found[0] == found[1] == found[2]
    # How samples are made of it is no reason to make it again.
    other = TextData(train=(str(source),), validation_fraction=0.1, packing="pad", document_attention=True)
    again = prepare(other, tmp_path / "2" / "text", may_write=False)
    assert (again.packing, again.document_attention) == ("pad", True)


@pytest.mark.full
def test_a_wrong_record_is_named_and_what_was_there_stays(tmp_path: Path, small_tasks: None) -> None:
    source = corpus(tmp_path / "corpus")
    with (source / "records.jsonl").open("a") as file:
        file.write('{"text": 3}\n' + '{"text": "good"}\n' * 1000)
    before = corpus(tmp_path / "before")
    prepare(TextData(train=(str(before),)), tmp_path / "run" / "text")
    kept = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=r"records\.jsonl, line 401: text = 3 must be a string"):
        prepare(TextData(train=(str(source),), tokenizer=_tokenizer(tmp_path)), tmp_path / "run" / "text")
    assert contents(tmp_path / "run") == kept
    assert not (tmp_path / "run" / "text.part").exists()


def _tokenizer(folder: Path) -> str:
    train_tokenizer([words(1000, 0)], 300, fill=False).save(folder)
    return str(folder / "tokenizer.json")


@pytest.mark.full
def test_a_full_disk_leaves_nothing(tmp_path: Path, small_tasks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(IndexedWriter, "add", full)
    data = TextData(train=(str(corpus(tmp_path / "corpus")),))
    with pytest.raises(OSError, match="No space left") as error:
        prepare(data, tmp_path / "run" / "text")
    assert error.value.errno == errno.ENOSPC
    assert not list((tmp_path / "run").iterdir())


INTERRUPTED = """
import sys
from pathlib import Path
import zeromesh.apps.train.data.encode as encode
import zeromesh.apps.train.data.text_formats as formats
from zeromesh.apps.train.train_settings import TextData
from zeromesh.apps.train.data.indexed import IndexedWriter
from zeromesh.apps.train.data.prepare_text import prepare

if __name__ == "__main__":
    formats.PIECE_BYTES, encode.TASK_BYTES = 50_000, 100_000
    source, folder, tokenizer = sys.argv[1:]
    prepare(TextData(train=(source,), tokenizer=tokenizer), Path(folder))
"""


@pytest.fixture
def preparing(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    source = tmp_path / "corpus"
    source.mkdir()
    (source / "a.txt").write_text(words(30_000, 0) * 400)
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script), str(source), str(tmp_path / "run" / "text"), _tokenizer(tmp_path)]
    process = subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    written = tmp_path / "run" / "text.part" / "train0.bin.part"
    deadline = time.monotonic() + 60
    while not (written.exists() and written.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    yield process
    process.kill()
    process.communicate(timeout=120)


@pytest.mark.full
def test_ctrl_c_ends_the_process_and_leaves_nothing(preparing: subprocess.Popen[str], tmp_path: Path) -> None:
    os.killpg(preparing.pid, signal.SIGINT)  # as a terminal does
    _, error = preparing.communicate(timeout=120)
    assert preparing.returncode != 0
    assert error.count("Traceback") == 1
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_data_set_of_megatron_is_trained_on_where_it_is(tmp_path: Path) -> None:
    documents = [[[100 * number + place for place in range(20)]] for number in range(50)]
    published(tmp_path / "theirs", documents)
    for name in ("theirs", "theirs.bin", "theirs.idx"):
        data = TextData(train=(str(tmp_path / name),), validation_fraction=0.2)
        prepared = prepare(data, tmp_path / "run" / "text")
        train, held = prepared.train[0], prepared.validation[0]
        assert train.prefix == held.prefix == (tmp_path / "theirs").resolve()
        assert sorted([*train.numbers, *held.numbers]) == list(range(50))
        assert 3 <= held.documents <= 20
        assert (train.tokens, held.tokens) == (20 * train.documents, 20 * held.documents)
        assert (prepared.vocabulary, prepared.tokenizer) == (4920, None)
        assert prepared.held_out_bytes == 0
        assert prepare(data, tmp_path / "run" / "text", may_write=False) == prepared
    folder = TextData(train=(str(tmp_path),), validation_fraction=0.2)
    assert prepare(folder, tmp_path / "run" / "text").train[0].prefix == train.prefix
    published(tmp_path / "more", documents[:3])
    with pytest.raises(ValueError, match=r'more than one data set \(indexed: more, theirs\).*"weight"'):
        prepare(folder, tmp_path / "run" / "text")
    weighted = [{"source": str(tmp_path / name), "weight": 1} for name in ("more", "theirs")]
    assert len(prepare(TextData.model_validate({"train": weighted}), tmp_path / "run" / "text").train) == 2


def test_data_sets_of_one_name_in_two_folders_keep_their_own_documents(tmp_path: Path) -> None:
    weighted = []
    for name, count in (("a", 40), ("b", 70)):
        (tmp_path / name).mkdir()
        published(tmp_path / name / "tokens", [[[100 * number, number]] for number in range(count)])
        weighted.append({"source": str(tmp_path / name / "tokens"), "weight": 1})
    data = TextData.model_validate({"train": weighted, "validation_fraction": 0.2})
    prepared = prepare(data, tmp_path / "run" / "text")
    for train, held, count in zip(prepared.train, prepared.validation, (40, 70), strict=True):
        assert sorted([*train.numbers, *held.numbers]) == list(range(count))


def test_a_mask_may_have_any_number_that_is_not_zero(tmp_path: Path) -> None:
    published(tmp_path / "theirs", [[[1, 2, 3]], [[4, 5]]])
    with IndexedWriter(tmp_path / "theirs.mask", np.dtype("u1")) as writer:
        writer.add(np.array([0, 255, 255, 0, 255]), np.array([3, 2], dtype=np.int32), np.array([True, True]))
    (part,) = prepare(
        TextData(train=(str(tmp_path / "theirs"),), validation_fraction=0), tmp_path / "run" / "text"
    ).train
    assert part.labels == 3


def test_a_folder_that_was_not_written_here_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "run" / "text").mkdir(parents=True)
    (tmp_path / "run" / "text" / "chapter.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"text' is where the tokens would be written.*move it away, or choose"):
        prepare(TextData(train=(str(tmp_path / "a.txt"),)), tmp_path / "run" / "text")
    assert (tmp_path / "run" / "text" / "chapter.tex").read_text() == "years of work"


def test_with_a_tokenizer_the_bytes_of_megatrons_tokens_are_known(tmp_path: Path) -> None:
    source = tmp_path / "corpus"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text(words(100, number))
    path = _tokenizer(tmp_path)
    ours = prepare(TextData(train=(str(source),), validation_fraction=0, tokenizer=path), tmp_path / "run" / "text")
    data = TextData(train=(str(ours.train[0].prefix),), validation_fraction=0.3, tokenizer=path)
    again = prepare(data, tmp_path / "again" / "text")
    sizes = [(source / f"{number}.txt").stat().st_size for number in sorted(range(20), key=str)]
    assert again.held_out_bytes == sum(sizes[number] for number in again.validation[0].numbers)


def test_our_own_records_are_records_again(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"p{n}", "response": f"r{n}"}) + "\n" for n in range(9))
    ours = prepare(TextData(train=(str(tmp_path / "a.jsonl"),), validation_fraction=0), tmp_path / "run" / "text")
    data = TextData(train=(str(ours.train[0].prefix),), validation_fraction=0)
    (again,) = prepare(data, tmp_path / "again" / "text").train
    assert again.packed
    assert again.labels == ours.train[0].labels
    assert again.mask is not None
    assert (again.mask == ours.train[0].mask).all()
    with (tmp_path / "run" / "text" / "train0.mask.idx").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"train0\.mask\.idx' begins with"):
        prepare(TextData(train=data.train, validation_fraction=0.5), tmp_path / "again" / "text")


def test_damaged_data_sets_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    published(tmp_path / "theirs", [[[1, 2]], [[3]]])
    (tmp_path / "theirs.bin").write_bytes(b"\1\2\3\4\5")
    with pytest.raises(ValueError, match=r"theirs\.bin' has 5 bytes"):
        prepare(TextData(train=(str(tmp_path / "theirs"),)), tmp_path / "run" / "text")
    (tmp_path / "theirs.idx").unlink()
    with pytest.raises(ValueError, match=r"theirs\.idx' does not exist, and belongs to"):
        prepare(TextData(train=(str(tmp_path / "theirs.bin"),)), tmp_path / "run" / "text")
    assert not (tmp_path / "run" / "text").exists()


def test_tokens_are_made_again_where_the_tokenizer_or_a_file_changed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 20)
    path = _tokenizer(tmp_path)
    data = TextData(train=(str(tmp_path / "a.jsonl"),), tokenizer=path)
    first = prepare(data, tmp_path / "run" / "text", length=8)
    assert prepare(data, tmp_path / "run" / "text", may_write=False, length=8) == first
    content = json.loads(Path(path).read_text())
    state = os.stat(path)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 999, "content": "<new>"})
    Path(path).write_text(json.dumps(content))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(Changed):
        prepare(data, tmp_path / "run" / "text", may_write=False, length=8)
    second = prepare(data, tmp_path / "run" / "text", length=8)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "two"}\n')
    with pytest.raises(Changed):
        prepare(data, tmp_path / "run" / "text", may_write=False, length=8)
    assert prepare(data, tmp_path / "run" / "text", length=8).train[0].tokens > second.train[0].tokens


def test_a_summary_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 20)
    data = TextData(train=(str(tmp_path / "a.jsonl"),))
    first = prepare(data, tmp_path / "run" / "text")
    os.truncate(tmp_path / "run" / "text" / "data.json", 20)
    with pytest.raises(Changed):
        prepare(data, tmp_path / "run" / "text", may_write=False)
    assert prepare(data, tmp_path / "run" / "text") == first


def test_ids_of_a_large_vocabulary_take_32_bits(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    entries = {f"w{number}": number for number in range(65_499)} | {"</s>": 65_499}
    for size, dtype in ((65_500, np.int32), (65_499, np.uint16)):
        kept = {word: number for word, number in entries.items() if number < size - 1} | {"</s>": size - 1}
        tokenizer = Tokenizer(models.WordLevel(kept, unk_token="</s>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(tmp_path / "words.json"))
        (tmp_path / "a.txt").write_text("w1 w65000 w2\n" * 100)
        data = TextData(train=(str(tmp_path / "a.txt"),), tokenizer=str(tmp_path / "words.json"))
        part = prepare(data, tmp_path / "run" / "text").train[0]
        assert part.indexed.tokens.dtype == dtype
        assert part.indexed.tokens[:3].tolist() == [1, 65_000, 2]


def test_ids_of_a_vocabulary_with_gaps_are_not_cut(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70_000, "</s>": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("a b a\n")
    data = TextData(train=(str(tmp_path / "a.txt"),), tokenizer=str(tmp_path / "words.json"), validation_fraction=0)
    prepared = prepare(data, tmp_path / "run" / "text")
    assert prepared.train[0].indexed.tokens.tolist() == [0, 70_000, 0, 3]
    assert prepared.vocabulary == 70_001


def test_named_records_are_held_out_and_not_trained_on(tmp_path: Path) -> None:
    for name, count in (("a", 20), ("b", 5)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps({"prompt": name, "response": f"{name}{n}"}) + "\n" for n in range(count))
    (tmp_path / "c.txt").write_text("held out text\n" * 9)
    held = (str(tmp_path / "b.jsonl"), str(tmp_path / "c.txt"))
    data = TextData(train=(str(tmp_path / "*.jsonl"),), validation=held, validation_fraction=0.5)
    prepared = prepare(data, tmp_path / "run" / "text")
    assert [(part.documents, part.packed) for part in prepared.train] == [(20, True)]
    assert [(part.documents, part.packed) for part in prepared.validation] == [(5, True), (1, False)]
    assert prepared.held_out_bytes == 5 * 2 + 9 * 14


def test_reading_shows_plain_lines_or_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromesh.base.progress.READING_SECONDS", 0.0)
    plain = io.StringIO()
    with ReadingBar(Console(file=plain), "text to tokens", 4_000_000) as bar:
        bar.advance(1_000_000)
        bar.advance(2_000_000)
    assert plain.getvalue().splitlines() == [f"text to tokens: {n}.00 MB of 4.00 MB" for n in (1, 3)]
    live = io.StringIO()
    with ReadingBar(Console(file=live, force_terminal=True, width=100), "text to tokens", 4_000_000) as bar:
        bar.advance(1_000_000)
    assert "text to tokens" in live.getvalue()
    assert "1.0/4.0 MB" in live.getvalue()
    with ReadingBar(None, "text to tokens", 1) as bar:
        bar.advance(1)
