import shutil
import sys

import pytest

from harness import run_command

HEAVY = [
    "matplotlib",
    "pydantic",
    "rich",
    "sympy",
    "tokenizers",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "transformers",
    "typer",
]


def test_import_loads_nothing_heavy_that_torch_has_not_loaded() -> None:
    code = "import sys, torch; before = set(sys.modules); import zeromesh; print(*sorted(set(sys.modules) - before))"
    finished = run_command([sys.executable, "-W", "error", "-c", code])
    assert finished.returncode == 0, finished.stdout
    loaded = set(finished.stdout.split())
    assert "zeromesh" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.skipif(not shutil.which("mpiexec"), reason="no mpiexec on PATH")
def test_a_launch_that_starts_no_rank_of_its_own_does_without_torch() -> None:
    """Torch takes seconds to import; the ranks that mpiexec starts do that themselves."""
    code = (
        "import sys; from typer.testing import CliRunner; from zeromesh.cli.main import app; "
        "result = CliRunner().invoke(app, ['launch', '--mpi', '--nproc', '1', '--no-python', 'true']); "
        "print(result.exit_code, 'torch' in sys.modules)"
    )
    finished = run_command([sys.executable, "-c", code])
    assert finished.stdout.splitlines()[-1] == "0 False", finished.stdout
