"""Ranks that Open MPI's mpirun starts where mpi4py would load the MPICH that comes with pip."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from harness import run_command
from zeromesh.comm.mpi import backend

PROGRAM = """
import logging

import torch

import zeromesh
from zeromesh.comm.mpi import backend

logging.basicConfig(level=logging.INFO, format="log: %(message)s")
environment = zeromesh.init_distributed()
total = torch.tensor([environment.rank + 1.0])
torch.distributed.all_reduce(total)
print(f"rank {environment.rank} of {environment.world_size}: MPI {backend.carries()}, sum {float(total)}", flush=True)
"""


def open_mpi() -> str:
    """Return Open MPI's mpirun, or skip the test."""
    for name in ("mpirun.openmpi", "mpirun"):
        path = shutil.which(name, path="/usr/bin:/usr/local/bin")
        if path and "Open MPI" in subprocess.run([path, "--version"], capture_output=True, text=True).stdout:
            return path
    pytest.skip("Open MPI is not installed: apt-get install openmpi-bin")


@pytest.mark.full
@pytest.mark.parametrize(
    ("variables", "carries", "log"),
    [
        ({}, True, ""),
        # As if there were no Open MPI that mpi4py could load.
        (
            {"MPI4PY_LIBMPI": f"{sys.prefix}/lib/libmpi.so.12"},
            False,
            "the backend is gloo, not mpi, as the launcher speaks PMIx",
        ),
    ],
)
def test_open_mpis_launcher_starts_ranks_beside_the_wheel_of_mpich(
    variables: dict[str, str], carries: bool, log: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [open_mpi(), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, tmp_path / "program.py"]
    done = run_command(command, timeout=120, **variables)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"rank {rank} of 2: MPI {carries}, sum 3.0" in done.stdout
    assert log in done.stdout


def test_mpich_is_refused_before_it_would_abort_under_pmix(monkeypatch: pytest.MonkeyPatch) -> None:
    if not backend._load().Get_library_version().startswith("MPICH"):
        pytest.skip("mpi4py has another MPI than MPICH")
    assert backend.missing() == ""
    monkeypatch.setenv("PMIX_RANK", "0")
    assert "speaks PMIx, and mpi4py has loaded MPICH Version" in backend.missing()


@pytest.mark.parametrize(("choice", "abi"), [({}, "openmpi"), ({"MPI4PY_LIBMPI": "/lib/libmpi.so"}, None)])
def test_mpi4py_is_told_the_launchers_library_unless_the_user_has_chosen(
    choice: dict[str, str], abi: str | None
) -> None:
    with patch.dict(os.environ, {"OMPI_COMM_WORLD_RANK": "0", **choice}):
        backend._load()
        assert os.environ.get(backend.ABI) == abi
