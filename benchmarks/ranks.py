"""Start the ranks of one run in any environment's Python, and end them all when one fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
LAST_CHARACTERS = 3000


class RunFailed(RuntimeError):
    """A rank failed or took too long; the message has its last lines."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def variables(ranks: int, rank: int, port: int) -> dict[str, str]:
    """torchrun's, and the cores divided among the ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    found = {"OMP_NUM_THREADS": str(max(1, cores // ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return found | {name: str(count) for name, count in counts.items()}


def mpiexec() -> str:
    """The launcher of the MPI that pip brought into this environment, else the system's.

    Raises:
        RunFailed: there is none.
    """
    own = Path(sys.executable).with_name("mpiexec")
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if found is None:
        raise RunFailed("there is no mpiexec; pip install mpi4py mpich brings one")
    return found


def run(python: Path, ranks: int, job: Mapping[str, Any], environment: Mapping[str, str], limit: float) -> Any:
    """What rank 0 of a job measured.

    Args:
        python: the interpreter of the environment that has what the variant needs.
        ranks: number of processes.
        job: see ``worker.Job``; when it began and where the figures go is filled in here.
        environment: variables beside torchrun's.
        limit: seconds that the run may take.

    Raises:
        RunFailed: a rank failed, or the run took too long; all ranks have ended.
    """
    if not python.exists():
        raise RunFailed(f"there is no {python}")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder, port = Path(name), free_port()
        out = folder / "figures.json"
        (folder / "job.json").write_text(json.dumps({**job, "began": time.time(), "out": str(out)}))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            # mpiexec is one process, that ends with a status of its own when one of its ranks does.
            mpi, command = job.get("backend") == "mpi", [str(python), str(WORKER), str(folder / "job.json")]
            for rank in range(1 if mpi else ranks):
                with (folder / f"{rank}.log").open("wb") as log:
                    own = variables(ranks, rank, port)
                    own = {name: own[name] for name in ("OMP_NUM_THREADS",)} if mpi else own
                    processes.append(
                        subprocess.Popen(
                            [mpiexec(), "-n", str(ranks), *command] if mpi else command, stdout=log, stderr=log,
                            env={**os.environ, **own, **environment}, cwd=folder, start_new_session=True,
                        )
                    )  # fmt: skip
            problem = _wait(processes, time.monotonic() + limit)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if problem is not None:
            rank, why = problem
            text = (folder / f"{rank}.log").read_text(errors="replace").strip()[-LAST_CHARACTERS:]
            raise RunFailed(f"rank {rank} {why}\n{text}".strip())
        return json.loads(out.read_text())


def _wait(processes: list[subprocess.Popen[bytes]], until: float) -> tuple[int, str] | None:
    """Until all have ended well; or a rank that has not, and why."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank, f"ended with status {code}"
            if code is None and time.monotonic() > until:
                return rank, "took too long"
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.02)
