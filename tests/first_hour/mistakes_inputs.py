"""Mistakes in data, targets of adapters and optimizers."""

from __future__ import annotations

import json

from mistakes import TINY, Mistake

ROWS = "".join(f"What is the capital of country {number}?,City {number}.\n" for number in range(40))
MODEL = TINY
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
SCRIPT = """
import copy, torch, zeromesh
model = torch.nn.Linear(4, 1)
{make}
engine, *_ = zeromesh.initialize(model=model, config="ds.json"{arguments})
engine.backward(engine(torch.ones(4, 4)).sum())
{step}
"""


def config(source: str, **data: object) -> str:
    """Return a configuration that trains a tiny model on a source."""
    return json.dumps(
        {
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "model": MODEL,
            "data": {"train": source, **data},
            "run": {"steps": 1, "output": "run"},
        }
    )


def data_mistake(name: str, source: str, says: tuple[str, ...], files: dict[str, str | bytes]) -> Mistake:
    """Return a run on data that cannot be read."""
    return Mistake(name, "zeromesh train config.json", says, {"config.json": config(source), **files})


def script_mistake(name: str, says: tuple[str, ...], make: str, arguments: str = "", step: str = "") -> Mistake:
    """Return a script with an optimizer that the engine does not have."""
    files = {
        "train.py": SCRIPT.format(make=make, arguments=arguments, step=step),
        "ds.json": json.dumps({"train_batch_size": 4, "zero_optimization": {"stage": 3}}),
    }
    return Mistake(name, "python train.py", says, files, status=1, silent_about=("AssertionError",), most_lines=40)


MISTAKES = [
    data_mistake(
        "a CSV without a header",
        "qa.csv",
        (
            "qa.csv, line 2: the table has the columns 'What is the capital of country 0?', 'City 0.'; say what is to "
            "be learned: --set data.text_key=COLUMN, or --set data.prompt_key=COLUMN --set data.response_key=COLUMN",
            '--set data.columns=\'["prompt", "completion"]\'',
            "--set data.format=raw",
        ),
        {"qa.csv": ROWS},
    ),
    data_mistake(
        "a CSV with columns of other names",
        "qa.csv",
        ("the table has the columns 'q', 'a', 'id'; say what is to be learned: --set data.text_key=COLUMN",),
        {"qa.csv": "q,a,id\n1,2,3\n"},
    ),
    Mistake(
        "a CSV whose columns are named trains on the answers",
        "zeromesh train config.json --set data.prompt_key=q --set data.response_key=a",
        ("qa.csv: 'q' -> 'a'; not read: 'id'", "40 documents"),
        {
            "config.json": config("qa.csv", validation_fraction=0),
            "qa.csv": "q,a,id\n" + "".join(f"{line},1\n" for line in ROWS.splitlines()),
        },
        status=0,
        most_lines=200,
    ),
    data_mistake(
        "a CSV of Excel that is not UTF-8",
        "qa.csv",
        ("qa.csv, line 2: is not UTF-8 (byte 0xe9)", "iconv -f WINDOWS-1252 -t UTF-8", '"CSV UTF-8"'),
        {"qa.csv": "question,answer\nCafé?,Oui\n".encode("latin-1")},
    ),
    data_mistake(
        "a workbook",
        "qa.xlsx",
        ("qa.xlsx is an Excel workbook", "save it as CSV with a header", "ZeroMesh reads plain text, .jsonl"),
        {"qa.xlsx": b"PK\x05\x06" + bytes(18)},
    ),
    data_mistake(
        "a text file named .bin",
        "book.bin",
        ("book.bin is text, and its name ends like that of Megatron's tokens", "let the name of text end in .txt"),
        {"book.bin": "It was the best of times.\n" * 20},
    ),
    data_mistake(
        "a folder of pictures",
        "pictures",
        ("2 PNG images (a.png, b.png): zeromesh train takes text only", "examples/vision"),
        {"pictures/a.png": PNG, "pictures/b.png": PNG},
    ),
    data_mistake(
        "a web page that was saved as JSON lines",
        "data.jsonl",
        ("data.jsonl is an HTML page, which is not read",),
        {"data.jsonl": "<!DOCTYPE html>\n<html><body>Not found</body></html>\n"},
    ),
    data_mistake(
        "settings in YAML as data",
        "data.yaml",
        ("data.yaml is a YAML file, which is not read: write its records as JSON lines", "--set data.format=raw"),
        {"data.yaml": "- text: one\n- text: two\n"},
    ),
    data_mistake(
        "a CSV that is not there",
        "data/qa.csv",
        ("data source 'data/qa.csv' does not exist and matches no file",),
        {},
    ),
    script_mistake(
        "an optimizer that was not passed to initialize",
        ("this optimizer was not passed to initialize: pass it to initialize, as optimizer=optimizer",),
        "optimizer = torch.optim.AdamW(model.parameters())",
        step="optimizer.step()",
    ),
    script_mistake(
        "an optimizer over a copy of the model",
        ("the optimizer holds parameters that are not the model's", "build it over the parameters of the model"),
        "optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters())",
        ", optimizer=optimizer",
    ),
]
