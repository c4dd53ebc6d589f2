"""``zeromesh launch``: run a script as the ranks of this node, through ``mpiexec``, or from a Slurm batch script."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from zeromesh.launcher.launch import default_ranks, python_rank, threads

DEFAULT_RESTARTS = 3
"""Restarts where nodes may come and go, since each that goes costs one."""


@dataclass(frozen=True)
class Program:
    """Program that every rank runs.

    Attributes:
        name: a script, a module, or with ``is_command`` any program.
        arguments: of it.
        is_module: as in ``python -m NAME``.
        is_command: it is not Python's.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_command: bool = False

    def check(self) -> None:
        """Raise ValueError if it cannot be run."""
        if self.is_module and self.is_command:
            raise ValueError("-m and --no-python exclude each other: a module is run by Python; leave one of them out")
        if not self.is_module and not self.is_command and not Path(self.name).is_file():
            raise ValueError(f"{self.name!r} is no file; name a Python script, or -m MODULE, or --no-python PROGRAM")
        if self.is_command and shutil.which(self.name) is None:
            raise ValueError(f"{self.name!r} is no program that can be run; see its path, and that it is executable")

    @property
    def rank_command(self) -> list[str]:
        """The command of a rank that ZeroMesh starts."""
        kind = "program" if self.is_command else "module" if self.is_module else "script"
        return python_rank(kind, self.name, self.arguments)

    @property
    def plain_command(self) -> list[str]:
        """The command as a user would type it."""
        python = [] if self.is_command else ["python", "-u", *(["-m"] if self.is_module else [])]
        return [*python, self.name, *self.arguments]


@dataclass(frozen=True)
class LaunchLayout:
    """Number and place of ranks; see ``zeromesh launch --help``.

    Attributes:
        ranks: on each node; None for one per accelerator.
        nodes: ``COUNT`` or ``LEAST:MOST``.
        node_rank: 0 on the master.
        master: ``HOST:PORT``.
        restarts: of all ranks; None chooses.
        timeout: seconds until all nodes must have met.
        secret_file: with a secret of all nodes.
    """

    ranks: int | None
    nodes: str = "1"
    node_rank: int | None = None
    master: str | None = None
    restarts: int | None = None
    timeout: float = 300.0
    secret_file: Path | None = None

    @property
    def node_counts(self) -> tuple[int, int]:
        """The least and the most nodes."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", self.nodes)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise ValueError(
                f"--nnodes is {self.nodes!r}, but must be a number of nodes, or the least and the most: 2, or 1:4"
            )
        return least, most

    @property
    def may_change(self) -> bool:
        """True if nodes may come and go."""
        least, most = self.node_counts
        return least < most

    @property
    def restarts_made(self) -> int:
        """Number of times that all ranks may be restarted."""
        made = (DEFAULT_RESTARTS if self.may_change else 0) if self.restarts is None else self.restarts
        if self.may_change and made < 1:
            raise ValueError(
                f"--nnodes {self.nodes} lets nodes go, and each costs a restart; set --max-restarts to at least 1"
            )
        return made

    @property
    def secret(self) -> bytes:
        """The secret that the nodes share; empty for one node."""
        from zeromesh.launcher.rendezvous import HOW, read_secret

        secret = read_secret(self.secret_file)
        if self.endpoint and not secret:
            raise ValueError(
                f"--nnodes {self.nodes} needs --secret-file FILE, as strangers could run commands on the nodes without "
                f"a secret; {HOW}"
            )
        return secret if self.endpoint else b""

    @property
    def endpoint(self) -> str:
        """``HOST:PORT`` of the master; empty for one node."""
        if self.node_counts[1] == 1 and self.master is None:
            if self.node_rank:
                raise ValueError(
                    f"--node-rank {self.node_rank} needs --nnodes and --master; a single node has the rank 0"
                )
            return ""
        if self.master is None:
            raise ValueError(
                f"--nnodes {self.nodes} needs --master HOST:PORT: the first node as the others reach it, and a free "
                "port there, such as 29500; run the same command on every node"
            )
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):(\d{1,5})", self.master)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ValueError(f"--master is {self.master!r}, but must be HOST:PORT, as in node1:29500 or 10.0.0.1:29500")
        return self.master


def launch(program: Program, layout: LaunchLayout) -> None:
    """Run a program as the ranks of this node, and wait for them.

    Raises:
        ValueError: the options contradict each other.
        ConnectionError, TimeoutError: the nodes did not find each other.
        RankFailure: a rank failed.
    """
    program.check()
    least, most = layout.node_counts
    endpoint, restarts = layout.endpoint, layout.restarts_made
    if layout.node_rank is not None and not 0 <= layout.node_rank < most:
        raise ValueError(f"--node-rank is {layout.node_rank}, but must be from 0 to {most - 1}")
    ranks, secret = ranks_per_node(layout), layout.secret
    from zeromesh.launcher.agent import LaunchPlan, run

    variables = threads(ranks)
    tell(announcement(layout, ranks, variables))
    plan = LaunchPlan(ranks, least, most, endpoint, layout.node_rank, restarts, layout.timeout, secret, variables)
    with tempfile.TemporaryDirectory(prefix="zeromesh-") as folder:
        run(program.rank_command, plan, Path(folder), tell)


def ranks_per_node(layout: LaunchLayout) -> int:
    """Return the number of ranks as given, else one for each accelerator."""
    ranks = default_ranks() if layout.ranks is None else layout.ranks
    if ranks < 1:
        raise ValueError(f"--nproc is {ranks}, but must be at least 1")
    return ranks


def announcement(layout: LaunchLayout, ranks: int, variables: dict[str, str]) -> str:
    """Return a line that describes the start, where the user did not say it himself."""
    parts = [f"{ranks} rank{'s' if ranks > 1 else ''}"]
    if layout.ranks is None:
        parts.append("one for each accelerator" if ranks > 1 else "--nproc sets how many")
    parts += [f"{name}={value} for each; set it to change that" for name, value in variables.items() if ranks > 1]
    return ", ".join(parts)


def tell(text: str) -> None:
    """Show a line about the launch itself."""
    typer.echo(f"zeromesh launch: {text}", err=True)


def write_slurm(program: Program, layout: LaunchLayout, options: SlurmOptions, output: Path | None) -> None:
    """Write a batch script for ``sbatch`` to a file, or to standard output.

    Raises:
        ValueError: the options contradict each other.
    """
    text = slurm_script(program, layout, options)
    if output is None:
        sys.stdout.write(text)
        tell("submit it with: zeromesh launch --slurm ... | sbatch, or write it with --output FILE")
        return
    output.write_text(text, encoding="utf-8")
    tell(f"submit it with: sbatch {shlex.quote(str(output))}")


@dataclass(frozen=True)
class SlurmOptions:
    """Resources that a job asks Slurm for.

    Attributes:
        gpus: on each node; 0 for ranks on CPUs.
        cpus: cores for each rank; None leaves it to Slurm.
        time: the limit, ``HH:MM:SS`` or ``DAYS-HH:MM:SS``.
        partition: None for the cluster's default.
        more: further options of sbatch, such as ``--account=NAME``.
    """

    gpus: int = 0
    cpus: int | None = None
    time: str = "01:00:00"
    partition: str | None = None
    more: tuple[str, ...] = ()


def slurm_script(program: Program, layout: LaunchLayout, options: SlurmOptions) -> str:
    """The batch script.

    Without restarts Slurm starts each rank itself. With restarts it starts ``zeromesh launch`` on each node, which
    starts that node's ranks, as often as it takes.
    """
    least, most = layout.node_counts
    ranks = layout.ranks or options.gpus or 1
    restarts = layout.restarts_made
    if layout.master is not None or layout.node_rank is not None:
        raise ValueError("--slurm finds the master from the job's nodes; leave out --master and --node-rank")
    if options.gpus and ranks > options.gpus:
        raise ValueError(
            f"--nproc {ranks} is more than --gpus {options.gpus} of a node; each rank needs one of its own"
        )
    if not re.fullmatch(r"\d+|(\d+-)?\d{1,2}:\d{2}(:\d{2})?|\d+-\d{1,2}", options.time):
        raise ValueError(f"--time is {options.time!r}, but must be minutes, HH:MM:SS or DAYS-HH:MM:SS")
    tasks = 1 if restarts else ranks
    cpus = None if options.cpus is None else options.cpus * (ranks // tasks)
    asked = [
        f"--job-name={shlex.quote(Path(program.name).stem)}",
        f"--nodes={most}" if least == most else f"--nodes={least}-{most}",
        f"--ntasks-per-node={tasks}",
        *([] if cpus is None else [f"--cpus-per-task={cpus}"]),
        # Of the node, not of a task: all ranks of a node see its devices, and take theirs by local rank.
        *([f"--gpus-per-node={options.gpus}"] if options.gpus else []),
        f"--time={options.time}",
        *([] if options.partition is None else [f"--partition={options.partition}"]),
        *options.more,
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in asked), "set -euo pipefail", ""]
    # srun does not take over --cpus-per-task from sbatch since Slurm 22.05.
    lines += ["export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}"]
    if not restarts:
        lines += ["export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"]
        lines += [f"srun --kill-on-bad-exit=1 {shlex.join(program.plain_command)}"]
        return "\n".join(lines) + "\n"
    lines += [
        'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "port=$((20000 + SLURM_JOB_ID % 10000))",
        "export ZEROMESH_SECRET=$(head -c 32 /dev/urandom | base64)  # srun hands it to the nodes",
        f"srun --kill-on-bad-exit={int(least == most)} zeromesh launch --nproc {ranks} --nnodes {layout.nodes} "
        f'--master "$master:$port" --max-restarts {restarts} {_target(program)}',
    ]
    return "\n".join(lines) + "\n"


def _target(program: Program) -> str:
    flag = ["-m"] if program.is_module else ["--no-python"] if program.is_command else []
    return shlex.join([*flag, program.name, *program.arguments])


def run_mpi(program: Program, layout: LaunchLayout, extra: Sequence[str]) -> None:
    """Run a program as ranks that ``mpiexec`` starts, and wait for them.

    Args:
        program: what each rank runs.
        layout: ranks and nodes; which nodes is for ``extra``, or a batch system, to say.
        extra: further options of mpiexec.

    Raises:
        ValueError: the options contradict each other, or there is no mpiexec.
        RankFailure: a rank failed.
    """
    from zeromesh.launcher.mpiexec import find_mpiexec, run

    program.check()
    least, most = layout.node_counts
    if least != most or layout.restarts or layout.master is not None or layout.node_rank is not None:
        raise ValueError(
            "--mpi has no restarts and no nodes that come and go, and needs no --master or --node-rank; leave these "
            "out, or leave out --mpi"
        )
    ranks = ranks_per_node(layout)
    variables = threads(ranks)
    tell(announcement(layout, ranks * most, variables) + ", by mpiexec")
    with tempfile.TemporaryDirectory(prefix="zeromesh-") as folder:
        run(find_mpiexec(), program.rank_command, ranks, most, extra, dict(os.environ) | variables, Path(folder))
