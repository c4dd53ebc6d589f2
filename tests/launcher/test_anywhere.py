"""The same script gives the same losses however its ranks are started."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness import run_command

SCRIPT = Path(__file__).with_name("anywhere.py")
PYTHON = [sys.executable, SCRIPT]
LAUNCH = [sys.executable, "-m", "zeromesh.apps.cli.main", "launch"]
MPIEXEC = next(
    (str(path) for path in [Path(sys.executable).with_name("mpiexec")] if path.exists()), shutil.which("mpiexec")
)
needs_mpiexec = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install mpi4py mpich")

WAYS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT],
    "zeromesh launch": [*LAUNCH, "--nproc", "2", SCRIPT],
}


def started(command: list[str | Path], file: Path, *arguments: str, **variables: str) -> tuple[int, list[float]]:
    finished = run_command([*command, file, *arguments], timeout=120, OMP_NUM_THREADS="1", **variables)
    assert finished.returncode == 0, finished.stdout
    world, losses = json.loads(file.read_text())
    return world, losses


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    world, losses = started(PYTHON, tmp_path_factory.mktemp("alone") / "losses")
    assert world == 1
    assert len(set(losses)) == len(losses) == 8
    return losses


def check(result: tuple[int, list[float]], alone: list[float]) -> None:
    assert result[0] == 2
    assert result[1] == pytest.approx(alone, rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_launchers_give_the_losses_of_one_process(way: str, alone: list[float], tmp_path: Path) -> None:
    check(started(WAYS[way], tmp_path / "losses"), alone)


@pytest.mark.full
def test_a_script_may_start_its_ranks_itself(alone: list[float], tmp_path: Path) -> None:
    check(started(PYTHON, tmp_path / "losses", "--ranks", "2"), alone)


@pytest.mark.full
@needs_mpiexec
def test_mpiexec_gives_the_losses_of_one_process(alone: list[float], tmp_path: Path) -> None:
    assert MPIEXEC is not None
    check(started([MPIEXEC, "-n", "2", *PYTHON], tmp_path / "losses"), alone)


def slurm_variables(rank: int, ranks: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(ranks),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_NNODES": "1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_TASKS_PER_NODE": str(ranks),
        "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NODELIST": "localhost",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURMD_NODENAME": socket.gethostname(),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }


@pytest.mark.full
def test_srun_gives_the_losses_of_one_process(alone: list[float], tmp_path: Path) -> None:
    """No Slurm is here: two processes get the variables that its tasks have."""
    processes = [
        subprocess.Popen(
            [*PYTHON, tmp_path / "losses"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | slurm_variables(rank, 2) | {"OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    world, losses = json.loads((tmp_path / "losses").read_text())
    check((world, losses), alone)
