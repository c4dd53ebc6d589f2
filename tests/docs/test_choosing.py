"""The guide to strategies: each command gives the layout that the page says, for the reason that it says."""

import re
import shlex
from pathlib import Path

import pytest

from commands import call

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"
BLOCKS = re.findall(
    r"```sh\n([^`]*)```\n\n((?:`Best: [^\n]*;` `The limit is [a-z ]+\.`\n)+)", PAGE.read_text(), re.DOTALL
)
PAIRS = [
    (command.removeprefix("zeromesh "), re.findall("`([^`]*)`", said))
    for commands, answers in BLOCKS
    for command, said in zip(commands.splitlines(), answers.splitlines(), strict=True)
]
QUICK = ("plan gpt2-xl",)


def test_the_page_has_every_branch() -> None:
    text = " ".join(command for command, _ in PAIRS)
    assert len(PAIRS) == PAGE.read_text().count("`Best: ") >= 12
    for word in (
        "--gpus 1",
        "v100-32gb",
        "--host-memory 1500",
        "rtx-4090",
        "--inside pcie4",
        "10 Gbit",
        "--nodes 64",
        "plan 1t",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("command", "said"),
    [pytest.param(*pair, marks=() if pair[0].startswith(QUICK) else pytest.mark.full) for pair in PAIRS],
)
def test_a_command_gives_the_layout_of_the_page(
    command: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    found = call(*shlex.split(command), "--out", tmp_path)
    assert found.exit_code == 0, found.output
    output = re.sub(r"\s+", " ", found.output)
    for text in said:
        assert text in output
