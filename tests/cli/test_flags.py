"""Every flag of every command, through the command line: what is seen with it is not seen without it.

A row runs its command twice. Where the work of a command would take long, it is replaced by ``RECORDED``, which notes
the arguments that it is called with and ends the command: everything between the shell and that call is real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

from commands import call, write_config
from zeromesh.apps.cli.main import app

RECORDED = (
    "zeromesh.apps.train.train_run.launch",
    "zeromesh.apps.launch.agent.run",
    "zeromesh.apps.evaluate.evaluate_run.launch",
    "zeromesh.apps.evaluate.chat.Conversation",
    "zeromesh.apps.evaluate.serve_model.os.execv",
    "zeromesh.apps.cli.verify.verify",
    "zeromesh.apps.cli.plan_command.search",
)
"""Functions that do the work of a command."""

SMALL = "llama:layers=2,hidden=64,heads=2"

COMPLETION = ("--install-completion", "--show-completion")
"""Options of typer's, which depend on the shell."""

Shows = str | Callable[[str, str], bool]
"""A pattern of what is seen with the flag and not without, or a rule for what is seen without it and with it."""


def differs(without: str, there: str) -> bool:
    return without != there


def shorter(without: str, there: str) -> bool:
    return len(there) < len(without)


@dataclass(frozen=True)
class Row:
    """What shows that a flag has an effect."""

    command: str
    flag: str
    base: str  # arguments without the flag, which comes last or where @ is; {} are files of ``Files``
    added: str  # the flag as it is written
    shows: Shows
    recorded: bool = False
    full: bool = False


def recorded(command: str, base: str, *rows: tuple[str, str, Shows], full: bool = False) -> list[Row]:
    return [Row(command, flag, base, added, shows, recorded=True, full=full) for flag, added, shows in rows]


def real(command: str, base: str, *rows: tuple[str, str, Shows], full: bool = False) -> list[Row]:
    return [Row(command, flag, base, added, shows, full=full) for flag, added, shows in rows]


ROWS = [
    Row("", "--version", "@ config {new}", "--version", r"zeromesh \d"),
    *recorded(
        "train",
        "{new}",
        ("--set", "--set run.steps=77", "steps=77"),
        ("--verify", "--verify", "verify.verify"),
    ),
    *recorded(
        "train",
        "{resumed}",
        ("--resume", "--resume", r"launch\(.*resume=True"),
        ("--auto-resume", "--auto-resume", r"launch\(.*resume=True"),
        full=True,  # as all rows with a run that has been trained; tests/train/test_train_cli.py resumes by default
    ),
    Row("report", "--watch", "{run}", "--watch", "the run has ended; the page is complete", full=True),
    *real(
        "init",
        "tiny python-stdlib --file {out}.yaml",
        ("--device", "--device gpu", "GPU of 24"),
        ("--lora", "--lora", "LoRA adapts weights that are trained"),
        ("--output", "--output runs/mine", "output: runs/mine"),
        ("--file", "--file {out}2.yaml", r"wrote OUT2\.yaml"),
        ("--set", "--set run.steps=0", "run.steps"),
    ),
    Row("init", "--force", "tiny python-stdlib --file {existing}", "--force", "wrote"),
    *real(
        "sample",
        "{run} def",
        ("--tokens", "--tokens 3", shorter),
        ("--temperature", "--temperature 0", differs),
        ("--seed", "--seed 9", differs),
        ("--count", "--count 3", lambda without, there: len(there) > 2 * len(without)),
        ("--chat", "--chat", "chat"),
        ("--json", "--json", r'^\{\n "prompt": "def"'),
        full=True,
    ),
    Row("export", "--tag", "{run} {out}", "--tag global_step9", "global_step9", full=True),
    Row("export", "--merge", "{run} {out}", "--merge", "merge", full=True),
    Row("export", "--gguf", "{run} {out}", "--gguf", "gguf", full=True),
    Row("export", "--hub", "{run} {out}", "--hub not/a/name", "is no name of a repository", full=True),
    Row("export", "--public", "{run} {out}", "--public", "--public is for --hub"),
    *recorded(
        "evaluate",
        "{run}",
        ("--data", "--data {script}", r"data=\[.*site.py"),
        ("--choices", "--choices {questions}", "choices=.*questions.jsonl"),
        ("--tasks", "--tasks arc_easy", "tasks=.*arc_easy|pip install lm_eval"),
        ("--include", "--include {folder}", "--include is for tasks"),
        ("--limit", "--limit 3", "--limit is for tasks"),
        ("--fewshot", "--fewshot 3", "--fewshot is for tasks"),
        ("--tag", "--tag global_step9", "global_step9"),
        ("--length", "--length 16", "length=16"),
        ("--batch", "--batch 9", "batch=9"),
        ("--ranks", "--ranks 2", r"launch\(<function run_rank at \w+>, 2,"),
        ("--dtype", "--dtype float16", "--dtype: the run"),
        full=True,
    ),
    Row("evaluate", "--chat", "{run} --choices {questions}", "--chat", "chat template", recorded=True, full=True),
    Row("evaluate", "--stride", "{run} --data {script}", "--stride 7", "stride=7", recorded=True, full=True),
    Row("evaluate", "--json", "{run}", "--json", r"^\{", full=True),
    Row("chat", "--tag", "{run}", "--tag global_step9", "global_step9", recorded=True, full=True),
    *recorded(
        "chat",
        "{run}",
        ("--tokens", "--tokens 4", r", 4, 0\.8, 0, None\)"),
        ("--temperature", "--temperature 0", r", 512, 0\.0, 0, None\)"),
        ("--seed", "--seed 9", r", 512, 0\.8, 9, None\)"),
        ("--system", "--system Hello", r", 512, 0\.8, 0, Hello\)"),
        full=True,
    ),
    *recorded(
        "serve",
        "{run}",
        ("--engine", "--engine vllm", "as vllm"),
        ("--tag", "--tag global_step9", "global_step9"),
        full=True,
    ),
    Row("serve", "--port", "{run}", "--port 1234567", "Invalid value for '--port'", full=True),
    *real(
        "convert",
        "{checkpoints} {out}",
        ("--to", "--to dcp", r"\.metadata"),
        ("--tag", "--tag global_step9", "global_step9"),
        ("--model", "--model no.such:thing", "no.such"),
        ("--strip", "--strip blocks.", differs),
        ("--weights-only", "--weights-only", differs),
        ("--ranks", "--ranks 2", "only deepspeed-universal has files of ranks"),
        full=True,
    ),
    *real(
        "inspect",
        "{run}",
        ("--json", "--json", r"^\{"),
        ("--verify", "--verify", differs),
        full=True,
    ),
    Row("config", "--fix", "{theirs}", "--fix", "bfloat16: .* is renamed to bf16"),
    *recorded(
        "launch",
        "@ {script}",
        ("--nproc", "--nproc 3", "ranks=3"),
        ("--module", "--module", "module.*site"),
        ("--as-deepspeed", "--as-deepspeed", "zeromesh.deepspeed"),
        ("--max-restarts", "--max-restarts 4", "restarts=4"),
        ("--timeout", "--timeout 7", "timeout=7.0"),
        ("--master", "--master node1:29500", "error: --nnodes 1 needs --secret-file"),
        ("--include", "--include node1:0", "use CUDA_VISIBLE_DEVICES"),
        ("--exclude", "--exclude node1:0", "use CUDA_VISIBLE_DEVICES"),
        ("--hostfile", "--hostfile hosts", "starts ranks on this node only"),
    ),
    Row(
        "launch", "--master_addr", "--nnodes 2 @ {script}", "--master_addr node1", "needs --secret-file", recorded=True
    ),
    Row(
        "launch",
        "--master_port",
        "--nnodes 2 --master_addr node1 --secret-file {secret} @ {script}",
        "--master_port 29555",
        "node1:29555",
        recorded=True,
    ),
    *recorded(
        "launch",
        "--nnodes 2 --master node1:29500 --secret-file {secret} @ {script}",
        ("--nnodes", "--nnodes 2:5", "least_nodes=2.*most_nodes=5"),
        ("--node-rank", "--node-rank 1", "node_rank=1"),
        ("--secret-file", "--secret-file {other}", "secret=b'the other"),
    ),
    Row("launch", "--no-python", "@ {script}", "--no-python", "is no program that can be run", recorded=True),
    Row("doctor", "--folder", "--json", "--folder {folder}", '"folder": "{folder}"', full=True),
    *real(
        "doctor",
        "",
        ("--ranks", "--ranks 2", "slowest pair"),
        ("--json", "--json", r"^\{"),
        ("--save", "--save {out}", r'"devices"'),
        full=True,
    ),
    *real(
        "schedule",
        "",
        ("--stages", "--stages 2", shorter),
        ("--microbatches", "--microbatches 3", shorter),
        ("--name", "--name gpipe", differs),
        ("--chunks", "--name interleaved-1f1b --stages 8 --chunks 4", differs),
        ("--costs", "--costs 1,2,3", differs),
        ("--memory", "--memory 2", "error"),
        ("--svg", "--svg {out}", "<svg"),
        ("--trace", "--trace {out}", "traceEvents"),
        ("--text", "--text {out}", "# 1f1b"),
        ("--list", "--list", "the shortest that is found"),
        ("--check", "--check {schedule}", "^valid: 2 stages"),
        ("--json", "--json", r'"bubble": 0.375'),
    ),
    Row("schedule", "--group", "--name interleaved-1f1b --chunks 2 --stages 4", "--group 4", differs),
    *recorded(
        "plan",
        f"{SMALL} --gpu h100 --gpus 2 --batch 8 --sequence 64",
        ("--batch", "--batch 12", differs),
        ("--sequence", "--sequence 48", "sequence=48"),
        ("--gpu", "--gpu a100-40gb", differs),
        ("--gpus", "--gpus 4", differs),
        ("--nodes", "--nodes 3", differs),
        ("--node", "--node dgx-h100", differs),
        ("--inside", "--inside pcie4", differs),
        ("--between", "--between '10 Gbit'", differs),
        ("--host-memory", "--host-memory 123", "123000000000"),
        ("--price", "--price 7", "price=7"),
        ("--machine", "--machine {out}", "leave out the options that name them"),
        ("--goal", "--goal memory", "goal=memory"),
        ("--lora", "--lora 4", "TracedCost"),
        ("--qlora", "--qlora", "TracedCost"),
    ),
    Row("plan", "--list", "no-such-model", "--list", "llama-3.1-8b"),
    *real(
        "plan",
        f"{SMALL} --gpu h100 --gpus 2 --batch 8 --sequence 64 --out {{folder}}",
        ("--layouts", "--layouts 1", shorter),
        ("--tokens", "--tokens 1e9", "1.00 G tokens take"),
        ("--picture", "--picture {out}.png", "PNG"),
        ("--out", "--out {folder}/other", "other"),
        ("--explain", "--explain {new}", differs),
        ("--json", "--json", r"^\{"),
        full=True,
    ),
    *recorded(
        "verify",
        "{new}",
        ("--set", "--set seed=77", "seed=77"),
        ("--ranks", "--ranks 3", "ranks=3"),
        ("--steps", "--steps 5", "steps=5"),
        ("--whole", "--whole", "whole=True"),
        ("--timeout", "--timeout 9", "timeout=9.0"),
    ),
    *real(
        "verify",
        "{new}",
        ("--json", "--json", r"^\{"),
        ("--picture", "--picture {out}.png", "PNG"),
        full=True,
    ),
]


class Recorded(ValueError):
    """Ends a command at its work."""


def shown(value: Any) -> str:
    """Return a value as text, with all fields of dataclasses, also those that its own text hides."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{field.name}={shown(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)


@contextlib.contextmanager
def recording() -> Iterator[list[str]]:
    """Note the calls of ``RECORDED`` in place of them."""
    calls: list[str] = []

    def record(name: str) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            text = [shown(value) for value in arguments] + [f"{name}={shown(value)}" for name, value in named.items()]
            calls.append(f"{name}({', '.join(text)})")
            raise Recorded("the command ends here")

        return noted

    with contextlib.ExitStack() as stack:
        for name in RECORDED:
            stack.enter_context(patch(name, record(name)))
        yield calls


class Files:
    """Files that the rows name; each is made when it is first needed."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, self.corpus = folder, corpus
        self.made: dict[str, Path] = {}
        self.count = 0

    def settings(self, output: str, steps: int) -> dict[str, Any]:
        return {
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "model": {"hidden_size": 16, "layers": 2, "heads": 2, "sequence_length": 32},
            "data": {"train": str(self.corpus), "vocabulary_size": 270, "validation_fraction": 0.05},
            "run": {"steps": steps, "output": output, "evaluate_batches": 1},
        }

    def __getitem__(self, name: str) -> str:
        if name not in self.made:
            self.made[name] = getattr(self, f"_{name}")()
        return str(self.made[name])

    def _new(self) -> Path:
        return write_config(self.folder / "new", self.settings(str(self.folder / "unused"), 2))

    def _run(self) -> Path:
        path = write_config(self.folder / "trained", self.settings(str(self.folder / "run"), 1))
        result = call("train", path)
        assert result.exit_code == 0, result.output
        return self.folder / "run"

    def _resumed(self) -> Path:
        return write_config(self.folder / "more", self.settings(self["run"], 2))

    def _checkpoints(self) -> Path:
        return Path(self["run"], "checkpoints")

    def _theirs(self) -> Path:
        return write_config(self.folder / "theirs", {"train_batch_size": 2, "bfloat16": {"enabled": True}})

    def _existing(self) -> Path:
        path = self.folder / "existing.yaml"
        path.write_text("seed: 1")
        return path

    def _script(self) -> Path:
        path = self.folder / "site.py"
        path.write_text("print('run')")
        return path

    def _secret(self, text: str = "the secret of all nodes", name: str = "secret") -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return path

    def _questions(self) -> Path:
        path = self.folder / "questions.jsonl"
        path.write_text('{"question": "1 + 1 =", "choices": ["2", "3"], "answer": "2"}')
        return path

    def _other(self) -> Path:
        return self._secret("the other secret of all nodes", "other")

    def _schedule(self) -> Path:
        path = self.folder / "schedule.txt"
        assert call("schedule", "--stages", "2", "--text", path).exit_code == 0
        return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Files:
    return Files(tmp_path_factory.mktemp("flags"), corpus)


def words(text: str, files: Files, out: Path) -> list[str]:
    """Return the arguments of a line, with the files that it names."""

    def name(match: re.Match[str]) -> str:
        return str({"out": out, "folder": out.parent}.get(match[1]) or files[match[1]])

    parts = re.findall(r"'([^']*)'|(\S+)", text)
    return [re.sub(r"\{(\w+)\}", name, quoted or bare) for quoted, bare in parts]


def seen(row: Row, arguments: Sequence[str], out: Path) -> str:
    """Run the row's command, and return all that there is to see: its output, its file, and the calls of its work."""
    with recording() if row.recorded else contextlib.nullcontext([]) as calls:
        result = call(*([row.command] if row.command else []), *arguments)
    assert row.recorded or result.exception is None or isinstance(result.exception, SystemExit), result.exception
    written = ""
    for path in sorted(out.parent.glob("out*")):  # a picture gets a suffix
        if path.is_dir():
            written += " ".join(sorted(f"{file.relative_to(out)} {file.stat().st_size}" for file in path.rglob("*")))
        else:
            written += path.read_bytes().decode("latin-1")
    return "\n".join([result.output, *calls, written]).replace(str(out), "OUT")


@cache
def flags() -> frozenset[tuple[str, str]]:
    """Return each option of each command, by its first long name."""
    group = typer.main.get_command(app)
    commands = {"": group, **group.commands}
    return frozenset(
        (name, next(text for text in parameter.opts if text.startswith("--")))
        for name, command in commands.items()
        for parameter in command.params
        if parameter.param_type_name == "option" and not {"--help", *COMPLETION} & {*parameter.opts}
    )


def test_every_flag_has_a_row() -> None:
    assert flags() == {(row.command, row.flag) for row in ROWS}


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=f"{row.command} {row.flag}", marks=[pytest.mark.full] if row.full else []) for row in ROWS],
)
def test_a_flag_changes_what_the_command_does(row: Row, files: Files, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "before").mkdir()
    before = tmp_path / "before" / "out"
    without = seen(row, words(row.base.replace("@", ""), files, before), before)
    line = row.base.replace("@", row.added) if "@" in row.base else f"{row.base} {row.added}"
    there = seen(row, words(line, files, out), out)
    if callable(row.shows):
        assert row.shows(without, there), (without, there)
    else:
        pattern = re.compile(row.shows.replace("{folder}", str(out.parent)), re.MULTILINE | re.DOTALL)
        assert pattern.search(there), there
        assert not pattern.search(without), without
