"""Peak memory of small trainings as planned and as counted at each allocation."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from harness import run_command

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.full
@pytest.mark.skipif(shutil.which("cc") is None or not sys.platform.startswith("linux"), reason="needs cc and glibc")
def test_thirty_settings_are_planned_within_two_percent(tmp_path: Path) -> None:
    table = tmp_path / "peaks.md"
    command = [sys.executable, BENCHMARKS / "planned_peaks.py", "--markdown", table]
    done = run_command(command, timeout=1800, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout
    errors = [float(found) for found in re.findall(r"([+-][\d.]+)% \|$", table.read_text(), re.MULTILINE)]
    assert sum(abs(error) <= 2 for error in errors) >= 30
