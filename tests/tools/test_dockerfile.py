"""The Dockerfile, where no container can be built: its files, packages, command and wheel."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from commands import call
from wheels import check

ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()))
STEPS = [tuple(line.split(maxsplit=1)) for line in TEXT.splitlines() if line.strip()]
"""(instruction, arguments) of each step."""

KNOWN = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
COPIES = [words.split() for step, words in STEPS if step == "COPY" and "--from" not in words]
RUNS = [words for step, words in STEPS if step == "RUN"]


def test_each_step_is_known_and_copies_files_that_the_context_has() -> None:
    assert {step for step, _ in STEPS} <= KNOWN
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    for *sources, _ in COPIES:
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in sent, f".dockerignore keeps {source} from the build"


def test_it_installs_extras_and_a_python_that_the_project_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r"\.whl\)\[([\w,]+)\]", TEXT)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    [python] = re.findall(r"ARG PYTHON=3\.(\d+)", TEXT)
    assert int(python) >= int(project["requires-python"].removeprefix(">=3."))


def test_its_command_shows_the_help() -> None:
    steps = dict(STEPS)
    program, *arguments = json.loads(steps["ENTRYPOINT"]) + json.loads(steps["CMD"])
    assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert call(*arguments).exit_code == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_its_steps_build_and_install_a_wheel_in_a_fresh_folder(tmp_path: Path) -> None:
    source, wheels, target = tmp_path / "source", tmp_path / "wheels", tmp_path / "target"
    for folder in (source, wheels, target):
        folder.mkdir()
    for *names, place in COPIES:
        for name in names if "wheels" not in place and "examples" not in names else ():
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("*.so", "__pycache__")
                shutil.copytree(ROOT / name, source / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, source / name)
    [command] = [shlex.split(words) for words in RUNS if words.startswith("pip wheel")]
    command = [str(wheels) if word == "/wheels" else word for word in command]
    # Without an environment of its own for the build, which would be downloaded.
    subprocess.run([sys.executable, "-m", *command, "--no-build-isolation"], cwd=source, check=True)
    [wheel] = wheels.glob("*.whl")
    assert "trains" in check("native", wheel, target)
