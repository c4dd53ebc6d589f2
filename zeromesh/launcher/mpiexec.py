"""Run a command as ranks that ``mpiexec`` starts: MPICH's and Intel's (Hydra), or Open MPI's."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.comm.failure import HASTE, SAVED, SAVED_AND_ENDED, first_failure, grace
from zeromesh.comm.rank import FAILURES

# Seconds that mpiexec has to end all ranks after one here has failed; it does not where that one had no MPI yet.
PATIENCE = 10.0


@dataclass(frozen=True)
class Mpiexec:
    """A launcher of MPI programs."""

    path: str
    is_open_mpi: bool  # its options differ from those of MPICH and Intel MPI


def find_mpiexec() -> Mpiexec:
    """Return the mpiexec of this Python environment, else the first one on PATH; raise ValueError if none works."""
    # That of the environment goes first, as it belongs to the MPI that pip installed beside mpi4py.
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise ValueError(
            "no mpiexec was found, neither on PATH nor beside the Python that runs; install one: "
            "pip install 'zeromesh[mpi]', or load the cluster's module (module load openmpi)"
        )
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{path} --version does not work ({error}); repair it, or take it off PATH") from None
    text = said.stdout + said.stderr
    return Mpiexec(path, "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text)


def command_line(
    mpiexec: Mpiexec, command: Sequence[str], ranks: int, nodes: int, extra: Sequence[str]
) -> list[str]:  # fmt: skip
    """Return the whole command, of ``ranks`` per node; raise ValueError if Open MPI would refuse to start."""
    root = "--allow-run-as-root"
    if mpiexec.is_open_mpi and os.geteuid() == 0 and root not in extra:
        raise ValueError(
            f"Open MPI ({mpiexec.path}) does not start as root; start as another user, or say --mpi-args={root}"
        )
    spread = [] if nodes == 1 else ["-N" if mpiexec.is_open_mpi else "-ppn", str(ranks)]
    return [mpiexec.path, "-n", str(ranks * nodes), *spread, *extra, *command]


def run(
    mpiexec: Mpiexec, command: Sequence[str], ranks: int, nodes: int, extra: Sequence[str], env: Mapping[str, str],
    folder: Path,
) -> None:  # fmt: skip
    """Run a command as ``ranks`` ranks on each of ``nodes`` nodes, and wait for them.

    Raises:
        ValueError: Open MPI would refuse to start.
        RankFailure: a rank on this node raised.
        KeyboardInterrupt: on Ctrl-C, once mpiexec has ended.
        SystemExit: with mpiexec's exit status, where that is all that is known, or on SIGTERM.
    """
    line = command_line(mpiexec, command, ranks, nodes, extra)
    # In a session of its own, as a terminal would send Ctrl-C to mpiexec and all ranks, beside what is passed on here.
    process = subprocess.Popen(line, env={**env, FAILURES: str(folder)}, start_new_session=True)
    got: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL if got else number)  # who asks twice does not want to wait
        if number != signal.SIGUSR1:  # which ends nothing
            got.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        status = _wait(process, got, folder)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind
        for number, old in before.items():
            signal.signal(number, old)
    if (folder / SAVED).exists():
        raise SystemExit(SAVED_AND_ENDED)
    if got:
        if got[0] == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + got[0])
    if status == 0:
        return
    said = [json.loads(file.read_text(encoding="utf-8"))["status"] for file in folder.glob("*.failure")]
    if status is None or status in said:
        raise first_failure(folder, {})
    # A rank here was killed, or one elsewhere failed: mpiexec has said so, and what ranks say is only about lost peers.
    raise SystemExit(status if status > 0 else 128 - status)


def _wait(process: subprocess.Popen[bytes], got: list[int], folder: Path) -> int | None:
    """Return the exit status; None if mpiexec had to be ended because a rank here failed and the others went on."""
    end = math.inf
    while not got and time.monotonic() < end:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
        if end == math.inf and any(folder.glob("*.failure")):
            end = time.monotonic() + PATIENCE
    failed = not got
    if failed:
        process.terminate()
    try:
        status = process.wait(grace(got[0]) if got else HASTE)  # the ranks may save after a signal
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return None if failed else status
