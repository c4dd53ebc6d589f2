"""Five people's first hours, as they type them: each script of ``journeys`` in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
JOURNEYS = sorted((Path(__file__).parent / "journeys").glob("*.sh"))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("journey", JOURNEYS, ids=[path.stem for path in JOURNEYS])
def test_a_first_hour_goes_through(journey: Path, tmp_path: Path) -> None:
    """The script ends with status 0, and each line that it says to expect (``# expect: TEXT``) is in its output."""
    environment = {**os.environ, "CLONE": str(REPOSITORY)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", str(journey)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
    output = " ".join((result.stdout + " " + result.stderr).split())
    expected = [
        line.removeprefix("# expect: ") for line in journey.read_text().splitlines() if line.startswith("# expect: ")
    ]
    assert expected, "the script says nothing that must be seen"
    for text in expected:
        assert text in output, f"{text!r} is not in\n{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
