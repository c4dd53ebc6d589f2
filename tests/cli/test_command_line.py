"""The command line as a whole: help, examples, completion, and mistakes that are told before torch is imported."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from commands import call
from zeromesh.apps.cli.main import COMMANDS, CommandRow, app

LINES = [
    ("--version", 0, "zeromesh 0"),
    ("--help", 0, "Usage: zeromesh"),
    ("train --help", 0, "Example: zeromesh train"),
    ("launch -h", 0, "Example: zeromesh launch"),
    ("config bad.json", 2, "did you mean train_batch_size?"),
    ("train bad.json", 2, "did you mean train_batch_size?"),
    ("train bad.json --verify", 2, "did you mean train_batch_size?"),
    ("train good.json --set run.stpes=3", 2, "did you mean run.steps?"),
    ("verify bad.json", 2, "did you mean train_batch_size?"),
    ("plan 7b --gpu h100 --explain bad.json", 2, "did you mean train_batch_size?"),
]
"""Commands, their status, and a text of their output."""

# All lines in one process, as starting Python is most of their time.
PROGRAM = """
import contextlib, io, json, os, sys
from zeromesh.apps.cli.main import app
for line in json.loads(sys.argv[1]):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            app(line.split(), prog_name="zeromesh")
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, " ".join(text.getvalue().split()), "torch" in sys.modules]))
os.environ.update(_ZEROMESH_COMPLETE="complete_bash", COMP_WORDS="zeromesh pl", COMP_CWORD="1")
with contextlib.suppress(SystemExit):
    app([], prog_name="zeromesh")
print("torch" in sys.modules)
"""


def test_help_completion_and_mistakes_in_keys_come_without_torch(tmp_path: Path) -> None:
    settings = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    (tmp_path / "good.json").write_text(json.dumps(settings))
    (tmp_path / "bad.json").write_text(json.dumps({"train_batchsize": 8, "optimizer": {"type": "AdamW"}}))
    arguments = [sys.executable, "-c", PROGRAM, json.dumps([line for line, _, _ in LINES])]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    *answers, completion, completed_with_torch = result.stdout.splitlines()
    for (line, status, text), answer in zip(LINES, map(json.loads, answers), strict=True):
        assert answer[0] == status, (line, answer)
        assert text in answer[1], (line, answer)
        assert not answer[2], f"zeromesh {line} imports torch"
    assert (completion, completed_with_torch) == ("plan", "False")


def test_without_arguments_there_is_help_and_status_0() -> None:
    result = call()
    assert result.exit_code == 0
    for row in COMMANDS:
        assert row.group in result.output
        assert row.function.__name__ in result.output


@pytest.mark.parametrize("row", COMMANDS, ids=[row.function.__name__ for row in COMMANDS])
def test_help_has_an_example_that_parses_and_flags_without_a_type(row: CommandRow) -> None:
    program, name, *arguments = shlex.split(row.example)
    assert (program, name) == ("zeromesh", row.function.__name__)
    if ">" in arguments:  # a shell's
        arguments = arguments[: arguments.index(">")]
    command = typer.main.get_command(app).commands[name]
    command.make_context(name, arguments)
    for parameter in command.params:
        assert "[" not in (parameter.help or ""), f"{parameter.name}: what is in brackets is a style, and is not shown"
    text = call(name, "--help").output
    assert "Example: zeromesh" in text
    assert "<bool>" not in text
