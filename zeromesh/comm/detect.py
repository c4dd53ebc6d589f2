"""Environment of a process, from its launcher's variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from zeromesh.comm import launchers
from zeromesh.comm.launchers import DEFAULT_PORT, MASTER, MPI, TORCHRUN, Launcher, names_of, value

VARIABLES = TORCHRUN.needed
"""Variables that torchrun sets for each process."""

NUMBERS = ("rank", "local_rank", "node_rank", "world_size", "local_world_size")
"""Attributes of an environment that torchrun always sets."""


@dataclass(frozen=True)
class Environment:
    """Rank, node and rendezvous of one process, in torchrun's words.

    Attributes:
        rank: global number of the process.
        local_rank: its number on its node.
        node_rank: number of the node. MPI's launchers do not tell it: until the group has started, this is what it is
            where all nodes have as many ranks and those of a node follow each other.
        world_size: number of processes.
        local_world_size: number of processes on this node.
        master_address: host of the rendezvous; empty where the ranks have to find it out together.
        master_port: its TCP port; 0 where none is used, or none is known yet.
        node_count: number of nodes; where it is not given, that of nodes with as many ranks as this one.
        launcher: what started the process: torchrun, slurm, open mpi, mpich (and Intel MPI), or single.

    Raises:
        ValueError: if the numbers contradict each other.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    node_count: int = 0
    launcher: str = field(default="single", compare=False)

    def __post_init__(self) -> None:
        if not self.node_count and self.local_world_size > 0:
            object.__setattr__(self, "node_count", -(-self.world_size // self.local_world_size))
        row = names_of(self.launcher)
        rank, local_rank, world, local = (n[0] for n in (row.rank, row.local_rank, row.world_size, row.local_size))
        nodes = (row.node_count or TORCHRUN.node_count)[0]
        node_rank = (row.node_rank or TORCHRUN.node_rank)[0]
        below = "but must be at least 0 and below"
        # In this order: a wrong number of ranks would make the later lines misleading.
        for holds, problem in (
            (self.world_size >= 1, f"{world} is {self.world_size}, but there is at least one process"),
            (
                1 <= self.local_world_size <= self.world_size,
                f"{local} is {self.local_world_size}, but must be between 1 and {world}, {self.world_size}",
            ),
            (0 <= self.rank < self.world_size, f"{rank} is {self.rank}, {below} {world}, {self.world_size}"),
            (
                0 <= self.local_rank < self.local_world_size,
                f"{local_rank} is {self.local_rank}, {below} {local}, {self.local_world_size}",
            ),
            (
                not self.one_node or self.local_rank == self.rank,
                f"{local_rank} is {self.local_rank} and {rank} is {self.rank}, but {local} says that all "
                f"{self.world_size} ranks are on one node, where the two are the same",
            ),
            (
                self.one_node == (self.node_count == 1) and self.node_count <= self.world_size,
                f"{nodes} is {self.node_count}, but {self.local_world_size} of {self.world_size} ranks are on this "
                "node",
            ),
            (
                0 <= self.node_rank < self.node_count,
                f"{node_rank} is {self.node_rank}, {below} the number of nodes, {self.node_count}",
            ),
            (0 <= self.master_port < 65536, f"MASTER_PORT is {self.master_port}, but must be below 65536"),
        ):
            if not holds:
                raise _wrong(row, problem)

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> Environment:
        """Return the environment that a launcher's variables describe; a single process without any.

        Launchers are looked for in the order of ``launchers.LAUNCHERS``. Of torchrun's variables, LOCAL_RANK,
        LOCAL_WORLD_SIZE and GROUP_RANK may be left out where MASTER_ADDR is this machine itself, as all ranks are then
        on one node. Beside another launcher's, those of torchrun's that are set must say the same, and MASTER_ADDR and
        MASTER_PORT are taken as they are.

        Raises:
            ValueError: if some variables are missing, are not numbers, or contradict each other; it lists them.
        """
        row = launchers.find(env)
        if row is None:
            return cls()
        try:
            environment = _of_torchrun(env) if row is TORCHRUN else _of_others(env, row)
            _require_agreement(environment, env)
            return environment
        except ValueError as error:
            there = row.there(env) | TORCHRUN.there(env)
            raise ValueError(f"{error}; found: {', '.join(f'{n}={v}' for n, v in there.items())}") from None

    @property
    def one_node(self) -> bool:
        """True if all ranks are on this node."""
        return self.local_world_size == self.world_size


def is_launched(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has started this process as one of its ranks."""
    return launchers.find(env) is not None


def may_restart(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher restarts the ranks after failures or changes of nodes."""
    # ``zeromesh launch`` and torchrun set it; nodes that go cost a restart, too.
    return int(env.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0


def _of_torchrun(env: Mapping[str, str]) -> Environment:
    values = dict(env)
    if launchers.is_here(env.get("MASTER_ADDR", "")):
        # All ranks are on this machine, so people who start ranks by hand need not repeat these.
        same = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}
        values = {name: env[of] for name, of in same.items() if of in env} | values
        if "RANK" in env:
            values.setdefault("GROUP_RANK", "0")
    row = TORCHRUN
    return Environment(
        **{name: _integer(values, row, getattr(row, name)) for name in NUMBERS},
        master_address=_text(values, row, MASTER[:1]),
        master_port=_integer(values, row, MASTER[1:]),
        node_count=_integer(values, row, row.node_count) if "GROUP_WORLD_SIZE" in env else 0,
        launcher=row.name,
    )


def _of_others(env: Mapping[str, str], row: Launcher) -> Environment:
    rank, world_size = _integer(env, row, row.rank), _integer(env, row, row.world_size)
    if row.tasks_per_node:
        node_rank, tasks = _integer(env, row, row.node_rank), _tasks(env, row, world_size)
        if not 0 <= node_rank < len(tasks):
            raise _wrong(row, f"{row.node_rank[0]} is {node_rank}, but {len(tasks)} nodes have tasks")
        local_world_size, node_count = tasks[node_rank], len(tasks)
    else:
        local_world_size, node_count = _integer(env, row, row.local_world_size), 0
        node_rank = rank // max(local_world_size, 1)
    one_node = local_world_size == world_size
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if one_node else "")
    if env.get("MASTER_PORT"):
        port = _integer(env, row, MASTER[1:])
    elif one_node or row.job:
        port = launchers.derived_port(env, row)
    else:  # ranks on several nodes have no common ancestor to derive a port from
        port = DEFAULT_PORT if address else 0
    return Environment(
        rank=rank,
        local_rank=_integer(env, row, row.local_rank),
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_address=address or (launchers.first_host(_text(env, row, row.hosts)) if row.hosts else ""),
        master_port=port,
        node_count=node_count,
        launcher=row.name,
    )


def _tasks(env: Mapping[str, str], row: Launcher, world_size: int) -> list[int]:
    """Return the number of tasks by node; where Slurm does not list them, it is the same on each."""
    text = value(env, row.tasks_per_node)
    if text is None:
        nodes = _integer(env, row, row.node_count) if value(env, row.node_count) else 1
        text = f"{world_size // max(nodes, 1)}(x{nodes})"
    name = _name(env, row.tasks_per_node)
    try:
        tasks = launchers.tasks_of_nodes(text)
    except ValueError as error:
        raise _wrong(row, f"{name}: {error}") from None
    if sum(tasks) != world_size:
        says = f"{name} = {text} is {sum(tasks)} tasks"
        raise _wrong(row, f"{says}, but {_name(env, row.world_size)} is {world_size}")
    return tasks


def _require_agreement(environment: Environment, env: Mapping[str, str]) -> None:
    """Raise ValueError if torchrun's variables are set too and contradict the environment."""
    for attribute in NUMBERS:
        name, number = getattr(TORCHRUN, attribute)[0], getattr(environment, attribute)
        guessed = attribute == "node_rank" and environment.launcher in MPI
        if name in env and not guessed and env[name].strip() != str(number):
            raise ValueError(
                f"{name} is {env[name]!r}, but {names_of(environment.launcher).command} started this process with "
                f"{attribute.replace('_', ' ')} {number}; unset {name}, or set all of {', '.join(VARIABLES)}"
            )


def _wrong(row: Launcher, problem: str) -> ValueError:
    remedy = f"start the ranks with {row.command}, which sets {', '.join(row.needed)}"
    return ValueError(f"{problem}; {remedy}; for a single process unset them all")


def _name(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first name that is set, else the first of all."""
    return next((name for name in names if env.get(name)), names[0])


def _text(env: Mapping[str, str], row: Launcher, names: tuple[str, ...]) -> str:
    text = value(env, names)
    if not text:
        there = [name for name in (*row.needed, *MASTER) if name in env and name not in names]
        raise _wrong(row, f"{names[0]} is not set, but {', '.join(dict.fromkeys(there))} are")
    return text


def _integer(env: Mapping[str, str], row: Launcher, names: tuple[str, ...]) -> int:
    text = _text(env, row, names)
    # ``int`` also takes 1_0 and Arabic digits, which other programs that read the variable do not.
    if not re.fullmatch(r"-?\d+", text.strip()):
        raise _wrong(row, f"{_name(env, names)} is {text!r}, but must be a whole number")
    return int(text)
