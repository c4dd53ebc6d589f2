"""What is asked for by errors, by extras and by notices is what pyproject.toml and constraints.txt have."""

from __future__ import annotations

import logging
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

import zeromesh
from zeromesh.base.requirements import LEAST_TORCH, OPTIONAL, TESTED_TORCH, pip_install, torch_release, untested_torch
from zeromesh.config.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_commands_ask_for_what_the_extras_ask_for() -> None:
    requirements = {requirement for extra in EXTRAS.values() for requirement in extra}
    for package in (*OPTIONAL, "keras", "bitsandbytes", "torchao"):
        pip, install, *words = shlex.split(pip_install(package))
        assert (pip, install) == ("pip", "install")
        assert set(words) <= requirements, package
    assert pip_install("transformers", "peft") == "pip install 'transformers>=5' peft"


def test_no_text_asks_pip_for_an_extra_by_name() -> None:
    """The package is on no index: pip install 'zeromesh[hf]' finds nothing."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    for path in (*ROOT.glob("zeromesh/**/*.py"), *(page for page in pages if page.name != "log.md")):
        assert "install 'zeromesh[" not in path.read_text(), path


def test_all_has_every_extra_of_users() -> None:
    [everything] = EXTRAS["all"]
    names = everything.removeprefix("zeromesh[").removesuffix("]").split(",")
    assert set(names) == set(EXTRAS) - {"all", "test", "docs", "peers"}


def test_the_bounds_of_torch_are_those_of_the_files() -> None:
    [pinned] = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    assert torch_release(pinned.removeprefix("torch==")) == TESTED_TORCH
    assert f"torch>={'.'.join(map(str, LEAST_TORCH))}" in PROJECT["dependencies"]


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.13.1a0+git12"])
def test_a_tested_torch_is_not_mentioned(version: str) -> None:
    assert not untested_torch(version)


def test_initialize_says_that_torch_is_newer_than_tested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu140")
    with caplog.at_level(logging.INFO, "zeromesh"), pytest.raises(ConfigError):
        zeromesh.initialize(model=torch.nn.Linear(1, 1), config={"no_such_key": 1})
    [line] = [message for message in caplog.messages if "2.99.1" in message]
    assert line.endswith("if it fails: pip install 'torch==2.13.*'")
