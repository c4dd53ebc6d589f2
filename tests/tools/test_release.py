"""What is released: one version, and packages that are built and tried."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import zeromesh
from harness import ROOT, run_command


def test_all_places_name_one_version() -> None:
    assert version("zeromesh") == zeromesh.__version__, "install the working copy again"
    assert f"\nversion: {zeromesh.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    # A release has a heading of its own; what comes after the last one is unreleased.
    headings = [line[3:] for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == "Unreleased" if ".dev" in zeromesh.__version__ else zeromesh.__version__ in headings[0]


def test_the_package_is_a_program() -> None:
    shown = run_command([sys.executable, "-m", "zeromesh", "--version"])
    assert (shown.returncode, shown.stdout) == (0, f"zeromesh {zeromesh.__version__}\n")


@pytest.mark.full
def test_wheels_are_built_and_train(tmp_path: Path) -> None:
    built = run_command([sys.executable, ROOT / "tools" / "wheels.py", tmp_path], timeout=280)
    assert built.returncode == 0, built.stdout
    assert [line.endswith("trains") for line in built.stdout.splitlines()] == [False, True, True], built.stdout
