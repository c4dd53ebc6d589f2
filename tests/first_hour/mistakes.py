"""A mistake that people make in their first hour, and what they must be told."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TINY = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 2,
    "mlp_size": 64,
    "sequence_length": 32,
}
"""A model of ``zeromesh train`` that starts at once."""


@dataclass(frozen=True)
class Mistake:
    """Files, a command over them, and texts that its output must and must not have."""

    name: str
    command: str  # words of a shell; `zeromesh` and `python` are those of this environment
    says: tuple[str, ...]  # each must be in the output, in any order, over line breaks
    files: Mapping[str, str | bytes] = field(default_factory=dict)  # names in the folder in which the command runs
    status: int = 2  # wrong input; 1 for a run that failed, 0 for a warning
    silent_about: tuple[str, ...] = ("Traceback (most recent call last)",)
    most_lines: int = 12  # of output on stderr
    seconds: float = 120.0


def run_mistake(mistake: Mistake, folder: Path) -> None:
    """Run the command of a mistake in a folder, and assert what it says and how it ends."""
    for name, content in mistake.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    program, *arguments = shlex.split(mistake.command)
    modules = {"zeromesh": ["-m", "zeromesh"], "python": []}
    result = subprocess.run(
        [sys.executable, *modules[program], *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=mistake.seconds,
        check=False,
    )
    output = " ".join((result.stdout + " " + result.stderr).split())
    for text in mistake.says:
        assert text in output, f"{mistake.name}: {text!r} is not in\n{result.stdout}\n{result.stderr}"
    for text in mistake.silent_about:
        assert text not in output, f"{mistake.name}: {text!r} is in\n{result.stdout}\n{result.stderr}"
    assert result.returncode == mistake.status, f"{mistake.name}: {result.returncode}\n{result.stdout}\n{result.stderr}"
    lines = result.stderr.strip().splitlines()
    assert len(lines) <= mistake.most_lines, f"{mistake.name}: {len(lines)} lines\n{result.stderr}"
