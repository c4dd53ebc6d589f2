"""One process trains where the modules, calls and signals of POSIX are missing, as on Windows."""

import json
import sys
from pathlib import Path

from harness import run_command

# What Python's own library and torch need at their import is there until then: they have their own guards.
PROGRAM = """
import enum, importlib, os, pkgutil, signal, sys
import torch.distributed.elastic.agent.server.local_elastic_agent, torch.utils.data, transformers, typer.testing
for name in ("fcntl", "termios", "resource", "pty", "tty", "grp", "pwd"):
    sys.modules[name] = None
calls = ("fork", "forkpty", "killpg", "setsid", "getpgid", "getuid", "geteuid", "uname", "sysconf", "getloadavg",
         "sched_getaffinity", "posix_fadvise", "posix_fallocate", "pread", "pwrite", "preadv", "pwritev",
         "fstatvfs", "register_at_fork", "O_DIRECT", "O_DIRECTORY", "O_NOFOLLOW")
for name in calls:
    delattr(os, name)
kept = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
signal.Signals = enum.IntEnum("Signals", {one.name: one.value for one in signal.Signals if one.name in kept})
for name in [name for name in vars(signal) if name.startswith("SIG") and name.isalpha() and name not in kept]:
    if name not in ("SIG_DFL", "SIG_IGN"):
        delattr(signal, name)

import zeromesh
names = [module.name for module in pkgutil.walk_packages(zeromesh.__path__, "zeromesh.")]
for name in names:
    # Those of zeromesh.hf and zeromesh.keras, and the adapter for lm-evaluation-harness, are classes of other
    # libraries, which may need what is missing.
    ends = ("__main__", "._native", ".harness_model")
    if not name.endswith(ends) and not name.startswith(("zeromesh.hf.", "zeromesh.keras")):
        importlib.import_module(name)
print(len(names), "modules")

from zeromesh.apps.cli.main import app
def call(*arguments):
    result = typer.testing.CliRunner().invoke(app, arguments, catch_exceptions=False)
    print(result.exit_code, result.output)
call("train", "config.json", "--set", "run.ranks=2")
call("train", "config.json")
call("train", "config.json", "--resume", "--set", "run.steps=3")
call("doctor")
"""

CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": {"hidden_size": 16, "layers": 1, "heads": 2, "sequence_length": 16},
    "data": {"train": "text.txt", "vocabulary_size": 260},
    "run": {"steps": 2, "output": "run", "save_every": 1},
}


def test_all_modules_are_imported_and_one_process_trains(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "text.txt").write_text("a line of text to learn from\n" * 200)
    finished = run_command([sys.executable, "program.py"], cwd=tmp_path, timeout=240)
    assert finished.returncode == 0, finished.stdout
    assert "several ranks need Linux or macOS" in finished.stdout, finished.stdout
    assert "there are no locks here" in finished.stdout, finished.stdout
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in metrics} == {1, 2, 3}, finished.stdout
