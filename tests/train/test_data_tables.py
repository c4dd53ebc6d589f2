"""CSV and TSV, Alpaca and ShareGPT, and files of other kinds: what is read, and what is refused with which remedy."""

import csv
import json
import logging
import zipfile
from pathlib import Path
from typing import Any

import pytest

from test_data_records import MARKED, chat_tokenizer, data, learned, lines, tokenizer_of
from zeromesh.apps.train.data.hub_datasets import is_dataset_id
from zeromesh.apps.train.data.prepare_text import prepare

PAIRS = [("Two, or\nthree?", 'He said "two"'), ("É;?", "x"), ("a" * 200_000, "y")]


def pairs_of(path: Path, **more: Any) -> list[tuple[str, str]]:
    """Return prompt and response of each record of a file, as they are learned."""
    prepared = prepare(data(path, **more), path.parent / "run" / "text")
    (part,) = prepared.train
    tokenizer = tokenizer_of(prepared)
    pairs = []
    for number in part.numbers:
        span = slice(part.indexed.bounds[number], part.indexed.bounds[number + 1])
        ids, mask = part.indexed.tokens[span], part.mask[span] != 0
        pairs.append((tokenizer.decode(ids[~mask].tolist()), tokenizer.decode(ids[mask].tolist())))
    return pairs


def table(path: Path, header: list[str] | None, rows: list[Any], encoding: str = "utf-8", **options: Any) -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, **options).writerows([*([header] if header else []), *rows])
    return path


@pytest.mark.parametrize("header", [["prompt", "completion"], ["Question", "Answer"], ["input", "output"]])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.csv", {}),
        ("a.csv", {"delimiter": ";", "encoding": "utf-8-sig"}),
        ("a.tsv", {"delimiter": "\t"}),
        ("a.csv", {"delimiter": "\t", "lineterminator": "\n", "quoting": csv.QUOTE_ALL}),
    ],
)
def test_a_table_with_a_header_is_records(tmp_path, monkeypatch, header, name, options) -> None:
    monkeypatch.setattr("zeromesh.apps.train.data.text_formats.PORTION_BYTES", 60)
    assert pairs_of(table(tmp_path / name, header, PAIRS, **options)) == PAIRS


def test_columns_are_chosen_in_the_settings_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = table(tmp_path / "a.csv", ["", "q", "a", "text"], [(n, f"q{n}", f"a{n}", "t") for n in range(3)])
    pairs = [(f"q{n}", f"a{n}") for n in range(3)]
    assert pairs_of(path, prompt_key="q", response_key="a") == pairs
    assert "a.csv: 'q' -> 'a'; not read: '', 'text'" in caplog.text
    without = table(tmp_path / "b.csv", None, pairs)
    assert pairs_of(without, columns=["prompt", "completion"]) == pairs
    prepared = prepare(data(without, format="raw"), tmp_path / "run" / "text")
    assert prepared.train[0].bytes == without.stat().st_size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "What is it?,Paris.\nWhat?,Rome.\n",
            r"line 2: the table has the columns 'What is it\?', 'Paris\.'; .*--set data\.text_key=COLUMN, or --set "
            r"data\.prompt_key=COLUMN.*no header, name the columns: --set data\.columns=.*--set data\.format=raw",
        ),
        ("a,a\nb,c\n", r"line 1: two columns are named 'a'"),
        ("text\nfine\n\nwith, comma\n", r"line 4: has 2 fields, and the table has 1 column \(text\); put .* quotes"),
        ('prompt,completion\nx,"y\n', r"line 2: is no row of a table \(unexpected end of data\); close quotes"),
        (b"prompt,completion\nx,y\ncaf\xe9,z\n", r"line 3: is not UTF-8 \(byte 0xe9\); convert it.*CSV UTF-8"),
        (b"pr\xe9mpt,completion\nx,y\n", r"line 1: is not UTF-8 \(byte 0xe9\)"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_with_its_line(tmp_path, text, message) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"a\.csv, {message}"):
        prepare(data(path), tmp_path / "text")


ALPACA = [
    {"instruction": "Add.", "input": "1 2", "output": "3", "text": "Below is"},
    {"instruction": "Greet.", "input": "", "output": "Hi", "text": "Below is"},
]


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "parquet"])
def test_alpaca_is_read_and_only_the_output_is_learned(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"a.{form}"
    if form == "csv":
        table(path, list(ALPACA[0]), [list(record.values()) for record in ALPACA])
    elif form == "parquet":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(ALPACA).to_parquet(str(tmp_path / "a.parquet"))
        path = (tmp_path / "a.parquet").rename(tmp_path / "no ending")  # known by its first bytes
    else:
        path.write_text(json.dumps(ALPACA, indent=2) if form == "json" else "\n".join(map(json.dumps, ALPACA)))
    assert pairs_of(path) == [("Add.\n\n1 2", "3"), ("Greet.", "Hi")]


def test_sharegpt_is_read_as_the_same_chat_with_roles(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", MARKED)
    turns = [("human", "One?"), ("gpt", "Yes"), ("human", "Two?"), ("gpt", "No")]
    roles = {"human": "user", "gpt": "assistant"}
    chat = [{"role": "system", "content": "Be short."}, *({"role": roles[who], "content": said} for who, said in turns)]
    talk = [{"from": who, "value": said} for who, said in turns]
    table(tmp_path / "b.csv", ["conversations"], [[json.dumps([{"from": "system", "value": "Be short."}, *talk])]])
    lines(tmp_path / "a.jsonl", [{"messages": chat}])
    lines(tmp_path / "c.jsonl", [{"id": 1, "system": "Be short.", "conversations": talk}])
    results = []
    for name in ("a.jsonl", "b.csv", "c.jsonl"):
        prepared = prepare(data(tmp_path / name, tokenizer=str(folder)), tmp_path / "run" / "text")
        results.append(learned(prepared.train[0], tokenizer_of(prepared)))
    assert results[0] == results[1] == results[2]
    assert results[0][0][1] == "Yes[<|end|>]No[<|end|>]"
    wrong = lines(tmp_path / "d.jsonl", [{"conversations": [{"from": "martian", "value": "x"}]}])
    with pytest.raises(ValueError, match=r'conversations\[0\]\.role = "martian" must be one of'):
        prepare(data(wrong, tokenizer=str(folder)), tmp_path / "run" / "text")


PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def workbook(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("xl/workbook.xml", "<x/>")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xlsx", workbook, r"a\.xlsx is an Excel workbook, which is not read: save it as CSV.*reads plain text"),
        ("a.csv", workbook, r"a\.csv is an Excel workbook"),
        ("a.png", PNG, r"is a PNG image, which is not read: zeromesh train takes text only"),
        ("a.jsonl", PNG, "is a PNG image"),
        ("a.jsonl", b"\x1f\x8b\x08" + bytes(9), r"is a gzip file.*\.jsonl\.gz"),
        ("a.jsonl", b"\n<!DOCTYPE html><html>", r"is an HTML page.*--set data\.format=raw"),
        ("a.html", b"<p>text</p>", r"is an HTML page"),
        ("a.yaml", b"a: 1\n", r"is a YAML file, which is not read: write its records as JSON lines"),
        ("a.xml", b"<a/>", r"is an XML file"),
        ("a.pdf", b"%PDF-1.7\n", r"is a PDF document.*pdftotext"),
        ("a.pkl", b"\x80\x04\x95" + bytes(9), "is a pickle"),
        ("a.npy", b"\x93NUMPY\x01" + bytes(9), "is a NumPy array"),
        ("data", b"SQLite format 3\0" + bytes(9), "data is a SQLite database"),
        ("a.txt", "text".encode("utf-16"), r"is a UTF-16 text.*iconv -f UTF-16 -t UTF-8"),
        ("a.doc", b"plain words\n", r"is text, and its name ends like that of a Word document; .*end in \.txt"),
        (
            "a.bin",
            b"plain words\n",
            r"a\.bin is text, .*Megatron's tokens, for which a\.idx is missing; .*end in \.txt",
        ),
        ("a.txt", b'{"text": "x"}\n', r"has records in JSON, .* let it end in \.jsonl; to learn it as it is written"),
        ("a", b'[{"prompt": "x", "completion": "y"}]', r"an array of records in JSON, .* let it end in \.json;"),
    ],
)
def test_other_files_are_refused_by_what_they_are(tmp_path, name, content, message) -> None:
    path = tmp_path / name
    path.write_bytes(content(tmp_path / "x") if callable(content) else content)
    with pytest.raises(ValueError, match=message):
        prepare(data(path), tmp_path / "run" / "text")
    if name in ("a.html", "a.yaml", "a.xml", "a.doc"):
        assert prepare(data(path, format="raw"), tmp_path / "run" / "text").train[0].documents == 1


def test_other_files_in_a_folder_are_left_out_by_name_or_refused(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "in").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "in" / name).write_bytes(PNG)
    with pytest.raises(
        ValueError, match=r"no readable text in .*: 2 PNG images \(a\.png, b\.png\): zeromesh train takes"
    ):
        prepare(data(tmp_path / "in"), tmp_path / "run" / "text")
    (tmp_path / "in" / "page.html").write_text("<p>x</p>")
    with pytest.raises(ValueError, match=r"page\.html is an HTML page"):
        prepare(data(tmp_path / "in"), tmp_path / "run" / "text")
    assert prepare(data(tmp_path / "in", suffixes=[".html"]), tmp_path / "run" / "text").train[0].documents == 1
    (tmp_path / "in" / "a.py").write_text("print()")
    assert prepare(data(tmp_path / "in"), tmp_path / "run" / "text").train[0].documents == 2
    assert "not UTF-8: a.png, b.png (2 PNG images (a.png, b.png))" in caplog.text


@pytest.mark.parametrize("name", ["data/a.csv", "data/a.xlsx", "data/A.HTML", "data/a.tsv"])
def test_a_missing_file_is_no_data_set_of_the_hub(name: str) -> None:
    assert not is_dataset_id(name)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "prompt,response\ra,b\rc,d\r", "a.csv, line 1: has line ends of old Macs .*: tr "),
        ("a.csv", "prompt,response\n", "a.csv has no rows below the header; add rows; if the first row is no header"),
        ("a.txt", "prompt;response\na;b\n", r"begins with the header of a table \(prompt, response\).* end in .csv"),
        ("rows", '"Question","Answer"\na,b\n', "begins with the header of a table"),
    ],
)
def test_tables_that_cannot_be_read_get_the_remedy(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text, newline="")
    with pytest.raises(ValueError, match=expected):
        pairs_of(tmp_path / name)


def test_blank_lines_and_columns_without_a_name_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\n\nprompt,response,,\n" + "a,b,,\n" * 3)
    assert pairs_of(path) == [("a", "b")] * 3
    path.write_text("\n\nprompt,response,,\na,b,,\nc\n")
    with pytest.raises(ValueError, match="a.csv, line 5: has 1 field"):
        pairs_of(path)


def test_the_log_says_which_answer_is_preferred(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prepare(data(table(tmp_path / "a.csv", ["prompt", "chosen", "rejected"], [("a", "b", "c")] * 4)), tmp_path / "run")
    assert "a.csv: 'prompt' -> 'chosen' rather than 'rejected'" in caplog.text
