"""Table of the variables that launchers set, and functions that read them."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ALONE = "ZEROMESH_ALONE"
"""Variable that, set to 1, makes a process a run of its own, whatever a launcher says."""
FILE = "file://"  # what the place of a rendezvous begins with that is a file in place of a host
MASTER = ("MASTER_ADDR", "MASTER_PORT")

DEFAULT_PORT = 29500  # torchrun's, where ranks know the master's address and no port

# Ports that are derived from a job lie below those that systems hand out to connections, from 32768 on.
FIRST_PORT, PORTS = 15000, 17000

# From here on Slurm numbers steps without tasks: the batch script and the shell of an interactive allocation.
FIRST_SPECIAL_STEP = 0xFFFFFFF0

_NUMBERS = r"\d+(?:-\d+)?"
_HOST = rf"(?:[^,\[\]]|\[{_NUMBERS}(?:,{_NUMBERS})*\])+"  # as Slurm writes one or several: n[01-03,7]-ib


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher. Of several names the first that is set counts."""

    name: str  # value of ``Environment.launcher``
    command: str
    marks: tuple[str, ...]  # any of them says that this launcher started the process
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()  # MPI's launchers do not tell it
    local_world_size: tuple[str, ...] = ()  # Slurm tells the tasks of all nodes instead
    tasks_per_node: tuple[str, ...] = ()
    node_count: tuple[str, ...] = ()  # may be left out
    hosts: tuple[str, ...] = ()
    master: tuple[str, ...] = ()  # with the others, what a process must have
    job: tuple[str, ...] = ()  # number of the job, the same on all nodes
    step: tuple[str, ...] = ()  # number of the step of a job; only some steps are of ranks
    one_per_node: bool = False  # it starts one process on each node, and says so of a single node, too

    @property
    def needed(self) -> tuple[str, ...]:
        """First name of each variable that a process must have, the master's last."""
        variables = (self.rank, self.local_rank, self.node_rank, self.world_size, self.local_size)
        return tuple(names[0] for names in variables if names) + self.master

    def name_of(self, attribute: str) -> str:
        """Return the first name of a variable; torchrun's, which may be set beside, where this launcher has none."""
        return str((getattr(self, attribute) or getattr(TORCHRUN, attribute))[0])

    @property
    def local_size(self) -> tuple[str, ...]:
        """Variables that tell the number of processes on this node."""
        return self.local_world_size or self.tasks_per_node

    def there(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of this launcher and of the master that are set."""
        names = [*self.rank, *self.local_rank, *self.node_rank, *self.world_size, *self.local_world_size]
        names += [*self.tasks_per_node, *self.node_count, *self.hosts, *self.marks, *MASTER]
        return {name: env[name] for name in dict.fromkeys(names) if name in env}


def _row(fields: Mapping[str, Any]) -> Launcher:
    words = {name: tuple(text.split()) for name, text in fields.items() if isinstance(text, str)}
    return Launcher(**{**fields, **words, "name": fields["name"], "command": fields["command"]})


LAUNCHERS = tuple(map(_row, json.loads(Path(__file__).with_name("launchers.json").read_text(encoding="utf-8"))))
"""Launchers in the order in which they are looked for: one that another one started knows more of its processes.

``srun --mpi=pmi2`` and Flux set PMI_RANK too, so this alone is taken for MPI's only where there is neither. Of Slurm's
variables those of the job come last: a step may have fewer nodes and tasks.
"""

TORCHRUN, OPEN_MPI, MVAPICH2, MPICH, *_ = LAUNCHERS

MPI = (OPEN_MPI.name, MPICH.name, MVAPICH2.name)

# Names such as FOO_COMM_WORLD_RANK and FOO_WORLD_SIZE, which say together how many processes a launcher has started.
_PLACE = r"(?P<launcher>[A-Z][A-Z0-9_]*?)(?:_COMM)?(?:_WORLD|_NAMESPACE|_JOB|_TASK|_NODE|_PROCESS)?"
_RANK = re.compile(rf"{_PLACE}_(?:RANK|RANKID|PROCID)")
_SIZE = re.compile(rf"{_PLACE}_(?:SIZE|N?RANKS|NUM_RANKS|N?TASKS|NUM_TASKS|NUM_NODES|NNODES|NPROCS|NUM_PROCESSES)")
# Parts of a run, and what torchrun's ranks hand down to the processes that they start.
_PARTS = ("LOCAL", "CROSS", "GROUP", "ROLE", "NODE")


def names_of(launcher: str) -> Launcher:
    """Return the row of a launcher; torchrun's for a single process."""
    return next((row for row in LAUNCHERS if row.name == launcher), TORCHRUN)


def is_here(address: str) -> bool:
    """Return whether ranks that meet there are all on this machine, unless they say more: by loopback, or in a file."""
    return is_loopback(address) or address.startswith(FILE)


def is_loopback(address: str) -> bool:
    """Return whether only processes of this machine reach an address: localhost, ::1 and 127.0.0.0/8."""
    try:
        return address in LOOPBACK or ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def find(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process, or None.

    Raise ValueError if no launcher is known, but variables say that this process is one of several.
    """
    if is_alone(env):
        return None
    local = is_here(env.get("MASTER_ADDR", ""))
    if all(name in env for name in (("RANK", "WORLD_SIZE", "MASTER_PORT") if local else TORCHRUN.needed)):
        return TORCHRUN
    for row in LAUNCHERS[1:]:
        if row.one_per_node and value(env, row.world_size) == "1":
            continue
        if any(mark in env for mark in row.marks) and (not row.step or in_step(env, row)):
            # Some of torchrun's variables beside these do not make it torchrun: people set them by hand.
            return row
    # Inside an allocation people set the master for what they start later, so it says nothing about this process.
    stray = TORCHRUN.marks if "SLURM_JOB_ID" in env else (*TORCHRUN.marks, *MASTER)
    if any(name in env for name in stray):
        return TORCHRUN
    _require_single(env)
    return None


def is_alone(env: Mapping[str, str]) -> bool:
    """Return whether the user says that this process is a run of its own; raise ValueError if it is said wrongly."""
    text = env.get(ALONE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{ALONE} is {text!r}, but must be 1, which makes this process a run of its own, or 0")
    return text == "1"


def _require_single(env: Mapping[str, str]) -> None:
    """Raise ValueError if variables of no known launcher say that this process is one of several."""
    alone = f"if this process is a run of its own, set {ALONE}=1"
    # Kubeflow's PET_* are the options of the launcher that it expects in each pod.
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
        count = env.get(name, "").rpartition(":")[2]
        if count.isdecimal() and int(count) > 1:
            raise ValueError(
                f"{name} is {env[name]}: this pod is to start its ranks with zeromesh launch or torchrun, which take "
                f"their options from PET_*, and not with python; start the script with zeromesh launch; {alone}"
            )
    sizes = {match["launcher"]: name for name in env if (match := _SIZE.fullmatch(name)) and _number(env[name]) > 1}
    # Those of known launchers have been looked at: the shell of an allocation has Slurm's, and is a single process.
    for name in env.keys() - {variable for row in LAUNCHERS for variable in row.rank}:
        match = _RANK.fullmatch(name)
        size = sizes.get(match["launcher"]) if match else None
        if match is None or size is None or match["launcher"].rpartition("_")[2] in _PARTS:
            continue
        if 0 <= _number(env[name]) < _number(env[size]):
            raise ValueError(
                f"{name} is {env[name]} and {size} is {env[size]}, so that this seems to be one of several processes, "
                "but no launcher that is known here sets these; for ranks of one run set RANK, WORLD_SIZE, MASTER_ADDR "
                f"and MASTER_PORT, or use a launcher of docs/launching.md; {alone}"
            )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else -1


def in_step(env: Mapping[str, str], launcher: Launcher) -> bool:
    """Return whether this is one of several tasks that ``srun`` started."""
    step = value(env, launcher.step)
    # The shell of ``salloc`` and the script of ``sbatch`` have Slurm's variables too; what they start is a single
    # process. ``sbatch`` says that its script is one.
    if step is None and (launcher.rank[0] not in env or env.get("ENVIRONMENT") == "BATCH"):
        return False
    if step is not None and (not step.isdecimal() or int(step) >= FIRST_SPECIAL_STEP):
        return False
    return value(env, launcher.world_size) != "1"  # a shell that ``srun --pty`` started is the only task


def value(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return the value of the first name that is set."""
    return next((env[name] for name in names if env.get(name)), None)


def derived_port(env: Mapping[str, str], launcher: Launcher) -> int:
    """Return a port that is the same for all ranks of a job, and most likely another for another job."""
    if launcher.job:
        job, step = value(env, launcher.job) or "0", value(env, launcher.step) or "0"
        return FIRST_PORT + (int(job) * 61 + int(step)) % PORTS if (job + step).isdecimal() else DEFAULT_PORT
    return FIRST_PORT + common_ancestor(launcher) % PORTS  # MPI's launchers give no number of a job


def common_ancestor(launcher: Launcher) -> int:
    """Return the number of the nearest process above this one that is not a rank: the same for all ranks of a node."""
    # The direct parent is not, as a rank may be started through a shell.
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
    """Return the numbers of tasks by node: ``2(x3),1`` is [2, 2, 2, 1]; raise ValueError if it is written otherwise."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} does not say how many tasks each node has, as 2(x3),1 does")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def first_host(text: str) -> str:
    """Return the first host of Slurm's list: n01-ib of ``n[01-03,7]-ib,x``; raise ValueError if it is no such list."""
    if not re.fullmatch(f"{_HOST}(?:,{_HOST})*", text):
        raise ValueError(f"{text!r} is not a list of hosts, as n[01-03,7],x is")
    first = re.match(_HOST, text)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
