"""``zeromesh schedule``: what it prints is so, what it writes can be read, and what it is given wrong it names."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harness import run_command
from zeromesh.apps.cli.main import app
from zeromesh.parallel.pipeline.schedule.actions import parse
from zeromesh.parallel.pipeline.schedule.generators import NAMES, generate
from zeromesh.parallel.pipeline.schedule.lowering import add_messages, forward_only


def call(*options: str | Path) -> Result:
    return CliRunner().invoke(app, ["schedule", *map(str, options)])


def test_grid_bubble_and_what_is_held_are_printed() -> None:
    shown = call("--stages", "2", "--microbatches", "4", "--name", "zb-h1")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == (
        "rank 0 F0 F1 ·  I0 W0 F2 I1 W1 F3 I2 W2 I3 W3\n"
        "rank 1 ·  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3\n"
        "\n"
        "time    13\n"
        "bubble  8.33%; (p-1)/(3 m) = 8.33% with equal costs and no messages\n"
        "largest number of micro-batches held\n"
        "  rank 0: 2  (stage 0: 2)\n"
        "  rank 1: 2  (stage 1: 2)\n"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_listed_and_works(name: str) -> None:
    assert f"\n{name} " in "\n" + call("--list").stdout
    shown = call("--stages", "4", "--microbatches", "4", "--name", name)
    assert shown.exit_code == 0, shown.output
    ranks = 4 // (2 if name in ("interleaved-1f1b", "breadth-first", "zb-v") else 1)
    assert shown.stdout.count("held") == 1
    assert f"rank {ranks - 1}: " in shown.stdout
    assert f"rank {ranks}: " not in shown.stdout


def test_chunks_groups_costs_and_memory_are_obeyed() -> None:
    shown = call("--stages", "6", "--microbatches", "6", "--name", "interleaved-1f1b", "--chunks", "3", "--group", "3")
    assert "rank 1: 7  (stage 1: 6, stage 3: 3, stage 5: 1)" in shown.stdout
    slow = call("--stages", "2", "--microbatches", "2", "--costs", "1,2,3,0.5", "--name", "1f1b")
    # F0 until 1, F0 on the other rank from 1.5, B0 until 7.5, F1 8.5, B1 13.5, and B1 of rank 0 from 14 on.
    assert "time    19\n" in slow.stdout
    small = call("--stages", "2", "--microbatches", "4", "--name", "search", "--memory", "1")
    assert "rank 0: 1  " in small.stdout


def test_measured_costs_are_read_from_a_file(tmp_path: Path) -> None:
    costs = {"forward": [1.0, 2.0], "input": [1.0, 1.0], "weight": [2.0, 1.0], "latency": 0.5}
    (tmp_path / "update_3.json").write_text(json.dumps({"traceEvents": [], "otherData": {"costs": costs}}))
    options = ("--microbatches", "2", "--costs", tmp_path / "update_3.json", "--name", "1f1b")
    # F0 until 1, F0 and B0 of the other rank from 1.5 to 5.5, F1 and B1 to 9.5, and B1 of rank 0 from 10 on.
    assert "time    13\n" in call("--stages", "2", *options).stdout
    shown = call("--stages", "4", *options)
    assert shown.exit_code == 2
    assert "the costs are those of 2 stages, and 1f1b has 4; measure as many" in shown.stderr


def test_files_are_written(tmp_path: Path) -> None:
    files = {name: tmp_path / f"a.{name}" for name in ("svg", "trace", "text")}
    options = [part for name, file in files.items() for part in (f"--{name}", file)]
    shown = call("--stages", "4", "--microbatches", "4", "--name", "zb-v", *options)
    assert shown.exit_code == 0, shown.output
    assert files["svg"].read_text().startswith("<svg")
    spans = [event for event in json.loads(files["trace"].read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 4 * 4 * 3
    assert parse(files["text"].read_text()) == add_messages(generate("zb-v", 2, 4))


def test_a_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "schedule.txt"
    file.write_text(str(add_messages(generate("1f1b", 3, 4))))
    shown = call("--check", file)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith(
        "valid: 3 stages on 3 ranks, 4 micro-batches\nlargest number of micro-batches held\n  rank 0: 3 "
    )
    table = tmp_path / "table.csv"
    table.write_text("0F0,,0B0\n1F0,1B0\n")
    assert call("--check", table).stdout.startswith("valid: 2 stages on 2 ranks, 1 micro-batch\n")
    file.write_text(str(add_messages(generate("1f1b", 3, 4))).replace("F1.2", "F1.3"))
    shown = call("--check", file)
    assert shown.exit_code == 2
    assert "error: done twice on rank 1 at position " in shown.stderr
    assert ">F1.3<" in shown.stderr
    file.write_text("microbatches: 1\nplacement: 0\nrank 0: F0.0 OFFLOAD0.0 B0.0\n")
    shown = call("--check", file)
    assert (shown.exit_code, "line 3, 'OFFLOAD0.0': an action is one of" in shown.stderr) == (2, True)
    file.write_text("rank 0: Q\n")
    shown = call("--check", file)
    assert (shown.exit_code, "line 1, 'Q'" in shown.stderr) == (2, True)
    assert call("--check", tmp_path / "none.txt").exit_code == 2


def test_a_file_for_evaluation_is_checked_as_one(tmp_path: Path) -> None:
    file = tmp_path / "schedule.txt"
    file.write_text(str(add_messages(forward_only((0, 1), 4))))
    assert call("--check", file).stdout == "valid: 2 stages on 2 ranks, 4 micro-batches\n"


def test_a_file_that_needs_buffered_sends_is_said_to(tmp_path: Path) -> None:
    file = tmp_path / "schedule.txt"
    file.write_text(
        "microbatches: 2\nplacement: 0 1\n"
        "rank 0: F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 B0.1\n"
        "rank 1: RA1.0 F1.0 B1.0 SG1.0 RA1.1 F1.1 B1.1 SG1.1\n"
    )
    shown = call("--check", file)
    assert shown.exit_code == 0, shown.output
    assert "it needs sends that do not wait for their receives; if they wait:\ndeadlock on rank 0" in shown.stdout


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--name", "2f2b"), ["no schedule '2f2b'"]),
        (("--name", "zb-v", "--stages", "5"), ["5 stages cannot be 2 on each rank", "multiple of 2"]),
        (("--name", "interleaved-1f1b", "--stages", "8", "--microbatches", "6"), ["take 4 or 8 micro-batches"]),
        (("--costs", "1,2"), ["--costs is '1,2'", "F,I,W"]),
        (("--costs", "1,2,-3"), ["--costs is '1,2,-3'"]),
        (("--costs", "1,x,1"), ["--costs is '1,x,1'"]),
        (("--costs", "/nowhere/a.json"), ["unreadable file: /nowhere/a.json"]),
        (("--memory", "2"), ["memory on rank 0", "activations take 3 of 2"]),
        (("--name", "search", "--memory", "0.5"), ["memory is 0.5", "at least that"]),
        (("--text", "/nowhere/a.txt"), ["/nowhere/a.txt"]),
    ],
)
def test_wrong_input_is_named(options: tuple[str, ...], parts: list[str]) -> None:
    shown = call(*options)
    assert shown.exit_code == 2
    assert all(part in shown.stderr for part in parts), shown.stderr


def test_the_command_does_without_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from zeromesh.apps.cli.main import app; "
        "result = CliRunner().invoke(app, ['schedule', '--name', 'search']); "
        "print(result.exit_code, 'torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    assert run_command([sys.executable, "-c", code]).stdout == "0 False False\n"
