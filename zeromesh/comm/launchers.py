"""Table of the variables that launchers set, and functions that read them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

LOOPBACK = ("127.0.0.1", "localhost", "::1")

MASTER = ("MASTER_ADDR", "MASTER_PORT")

DEFAULT_PORT = 29500
"""torchrun's, where ranks know the master's address and no port."""

FIRST_PORT, PORTS = 15000, 17000
"""Ports that are derived from a job lie below those that systems hand out to connections, from 32768 on."""

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers from here on what is no step of tasks: the batch script and the shell of an interactive allocation."""


STEP = ("SLURM_STEP_ID", "SLURM_STEPID")


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher. Of several names the first that is set counts.

    Attributes:
        name: what ``Environment.launcher`` says.
        command: what starts ranks with it.
        marks: variables of which any says that it started this process.
        rank: global number of the process.
        local_rank: its number on its node.
        node_rank: number of the node; empty where the launcher does not tell.
        world_size: number of processes.
        local_world_size: number of processes on this node; empty where ``tasks_per_node`` tells.
        tasks_per_node: number of processes on every node, as Slurm writes it.
        node_count: number of nodes; may be left out.
        hosts: names of the nodes, as Slurm writes them.
    """

    name: str
    command: str
    marks: tuple[str, ...]
    rank: tuple[str, ...]
    local_rank: tuple[str, ...]
    world_size: tuple[str, ...]
    node_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    tasks_per_node: tuple[str, ...] = ()
    node_count: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """First name of each variable that a process must have, the master's last."""
        variables = (self.rank, self.local_rank, self.node_rank, self.world_size, self.local_world_size)
        own = tuple(names[0] for names in (*variables, self.tasks_per_node) if names)
        return own + MASTER if self is TORCHRUN else own

    def there(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of this launcher and of the master that are set."""
        names = [*self.rank, *self.local_rank, *self.node_rank, *self.world_size, *self.local_world_size]
        names += [*self.tasks_per_node, *self.node_count, *self.hosts, *self.marks, *MASTER]
        return {name: env[name] for name in dict.fromkeys(names) if name in env}


TORCHRUN = Launcher(
    name="torchrun",
    command="torchrun",
    marks=("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    rank=("RANK",),
    local_rank=("LOCAL_RANK",),
    node_rank=("GROUP_RANK",),
    world_size=("WORLD_SIZE",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    node_count=("GROUP_WORLD_SIZE",),
)

OPEN_MPI = Launcher(
    name="open mpi",
    command="Open MPI's mpiexec",
    marks=(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    rank=("OMPI_COMM_WORLD_RANK",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)  # fmt: skip

MPICH = Launcher(
    name="mpich",
    command="the mpiexec of MPICH or Intel MPI",
    marks=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    rank=("PMI_RANK",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    world_size=("PMI_SIZE",),
    local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)

SLURM = Launcher(
    name="slurm",
    command="srun",
    marks=(*STEP, "SLURM_PROCID"),
    rank=("SLURM_PROCID",),
    local_rank=("SLURM_LOCALID",),
    node_rank=("SLURM_NODEID",),
    world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    tasks_per_node=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    node_count=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
)

LAUNCHERS = (TORCHRUN, OPEN_MPI, MPICH, SLURM, replace(MPICH, marks=("PMI_RANK", "PMI_SIZE")))
"""In the order in which they are looked for: a launcher that another one started knows more of its processes.

``srun --mpi=pmi2`` sets PMI_RANK too, so this alone is taken for MPI's only where there is no Slurm.
"""

MPI = (OPEN_MPI.name, MPICH.name)


def names_of(launcher: str) -> Launcher:
    """Return the row of a launcher; torchrun's for a single process."""
    return next((row for row in LAUNCHERS if row.name == launcher), TORCHRUN)


def find(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process, or None.

    Some of torchrun's variables beside another launcher's do not make it torchrun: people set them by hand.
    """
    others = [row for row in LAUNCHERS[1:] if any(mark in env for mark in row.marks)]
    others = [row for row in others if row is not SLURM or in_step(env)]
    if _is_whole(env):
        return TORCHRUN
    if others:
        return others[0]
    allocated = "SLURM_JOB_ID" in env
    stray = TORCHRUN.marks if allocated else (*TORCHRUN.marks, *MASTER)
    return TORCHRUN if any(name in env for name in stray) else None


def _is_whole(env: Mapping[str, str]) -> bool:
    """Return whether torchrun's variables say everything."""
    short = env.get("MASTER_ADDR") in LOOPBACK
    return all(name in env for name in (("RANK", "WORLD_SIZE", "MASTER_PORT") if short else TORCHRUN.needed))


def in_step(env: Mapping[str, str]) -> bool:
    """Return whether this is one of several tasks that ``srun`` started.

    The shell of ``salloc`` and the script of ``sbatch`` have Slurm's variables too, and so has a shell that
    ``srun --pty`` started as the only task; what they start is a single process. ``sbatch`` says that its script is
    one.
    """
    step = value(env, STEP)
    if step is None and ("SLURM_PROCID" not in env or env.get("ENVIRONMENT") == "BATCH"):
        return False
    if step is not None and (not step.isdecimal() or int(step) >= FIRST_SPECIAL_STEP):
        return False
    return value(env, SLURM.world_size) != "1"


def value(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return the value of the first name that is set."""
    return next((env[name] for name in names if env.get(name)), None)


def derived_port(env: Mapping[str, str], launcher: Launcher) -> int:
    """Return a port that is the same for all ranks of a job, and most likely another for another job."""
    if launcher is SLURM:
        job = value(env, ("SLURM_JOB_ID", "SLURM_JOBID")) or "0"
        step = value(env, STEP) or "0"
        return FIRST_PORT + (int(job) * 61 + int(step)) % PORTS if (job + step).isdecimal() else DEFAULT_PORT
    return FIRST_PORT + _started_by(launcher) % PORTS


def _started_by(launcher: Launcher) -> int:
    """Return the process ID of the nearest ancestor that is no rank: the same for all ranks of a node."""
    process = os.getppid()
    while process > 1:
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            # The name of the program, in brackets, may hold anything.
            above = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        if not any(text.startswith(launcher.rank[0].encode() + b"=") for text in variables):
            break
        process = above
    return process


def tasks_of_nodes(text: str) -> list[int]:
    """Return the numbers of tasks by node: ``2(x3),1`` is [2, 2, 2, 1].

    Raises:
        ValueError: if it is written otherwise.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} does not say how many tasks each node has, as 2(x3),1 does")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def hosts_of(text: str) -> list[str]:
    """Return the hosts of Slurm's list: ``n[01-03,7]-ib,x`` is n01-ib, n02-ib, n03-ib, n7-ib, x.

    Raises:
        ValueError: if brackets or ranges are not closed.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text or not parts:
        raise ValueError(f"{text!r} is not a list of hosts, as n[01-03,7],x is")
    return [host for part in parts for host in _expand(part, text)]


def _expand(part: str, text: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    numbers: list[str] = []
    for item in match[2].split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if bounds is None:
            raise ValueError(f"{text!r} is not a list of hosts, as n[01-03,7],x is: {item!r} is no range of numbers")
        first, last = bounds[1], bounds[2] or bounds[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [match[1] + number + rest for number in numbers for rest in _expand(match[3], text)]
