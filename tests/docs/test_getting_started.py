"""The commands of the first page run, on the script that it shows."""

import re
import sys
from pathlib import Path

import pytest

from harness import run_command

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "getting-started.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
ELSEWHERE = (
    "git clone",
    "python3 -m venv",
    "pip install",
    "zeromesh doctor",
)  # an installation; depends on the machine
SHORT = (
    """ --set run.steps=2 --set train_batch_size=2 --set data.vocabulary_size=300"""
    """ --set 'data.train=["examples/tiny_model.py"]'"""
)
RUN = [command + SHORT if command.startswith("zeromesh train") else command for command in COMMANDS]
RUN = [command for command in RUN if not command.startswith(ELSEWHERE)]


def run(commands: list[str], folder: Path) -> str:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (folder / "train.py").write_text(script)
    (folder / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    finished = run_command(["bash", "-euc", "\n".join(commands)], timeout=250, cwd=folder, PATH=path)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.full
def test_the_script_learns_on_two_ranks(tmp_path: Path) -> None:
    output = run([command for command in RUN if "--nproc" in command], tmp_path)
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", output)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "checkpoints" / "latest").exists()


@pytest.mark.full
def test_all_commands_run_in_the_order_of_the_page(tmp_path: Path) -> None:
    assert len(RUN) == 5
    output = run(RUN, tmp_path)
    assert "Best: " in output
    assert (tmp_path / "plan" / "config.json").exists()
