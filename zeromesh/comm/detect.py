"""Environment of a process, from its launcher's variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        launcher: what started the process: the name of a row of ``launchers.LAUNCHERS``, or single.
        placed: False where the launcher does not tell which ranks are on one node. Then ``init_distributed`` finds it
            out, and until then each rank counts as on a node of its own.

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
    placed: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        if not self.node_count and self.local_world_size > 0:
            object.__setattr__(self, "node_count", -(-self.world_size // self.local_world_size))
        row = names_of(self.launcher)
        rank, local_rank, world = row.name_of("rank"), row.name_of("local_rank"), row.name_of("world_size")
        local = row.tasks_per_node[0] if row.tasks_per_node else row.name_of("local_world_size")
        nodes, node_rank = row.name_of("node_count"), row.name_of("node_rank")
        below = "but must be at least 0 and below"
        # In this order: a wrong number of ranks would make the later lines misleading.
        of_ranks = (
            (self.world_size >= 1, f"{world} is {self.world_size}, but there is at least one process"),
            (0 <= self.rank < self.world_size, f"{rank} is {self.rank}, {below} {world}, {self.world_size}"),
            (0 <= self.master_port < 65536, f"MASTER_PORT is {self.master_port}, but must be below 65536"),
        )
        of_nodes = (
            (
                1 <= self.local_world_size <= self.world_size,
                f"{local} is {self.local_world_size}, but must be between 1 and {world}, {self.world_size}",
            ),
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
        )
        for holds, problem in (*of_ranks, *of_nodes) if self.placed else of_ranks:
            if not holds:
                raise _wrong(row, problem)

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> Environment:
        """Return the environment that a launcher's variables describe; a single process without any.

        Launchers are looked for in the order of ``launchers.LAUNCHERS``. Of torchrun's variables, LOCAL_RANK,
        LOCAL_WORLD_SIZE and GROUP_RANK may be left out: where MASTER_ADDR is this machine itself, all ranks are on one
        node, else the environment is not ``placed``. Beside another launcher's, those of torchrun's that are set must
        say the same, and MASTER_ADDR and MASTER_PORT are taken as they are. ZEROMESH_ALONE=1 makes this process a
        single one, whatever is set.

        Raises:
            ValueError: if some variables are missing, are not numbers, or contradict each other, or those of an
                unknown launcher say that there are several processes; it lists them.
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
        """True if all ranks are known to be on this node."""
        return self.placed and self.local_world_size == self.world_size


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
    rank, world_size = _integer(values, row, row.rank), _integer(values, row, row.world_size)
    return Environment(
        rank=rank,
        world_size=world_size,
        **_place(values, row, rank, world_size),
        master_address=_text(values, row, MASTER[:1]),
        master_port=_integer(values, row, MASTER[1:]),
        launcher=row.name,
    )


def _of_others(env: Mapping[str, str], row: Launcher) -> Environment:
    rank, world_size = _integer(env, row, row.rank), _integer(env, row, row.world_size)
    place = _place(env, row, rank, world_size)
    one_node = place["local_world_size"] == world_size and place.get("placed", True)
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if one_node else "")
    if env.get("MASTER_PORT"):
        port = _integer(env, row, MASTER[1:])
    elif one_node or row.job:
        port = launchers.derived_port(env, row)
    else:  # ranks on several nodes have no common ancestor to derive a port from
        port = DEFAULT_PORT if address or row.hosts else 0
    return Environment(
        rank=rank,
        world_size=world_size,
        **place,
        master_address=address or (launchers.first_host(_text(env, row, row.hosts).split()[0]) if row.hosts else ""),
        master_port=port,
        launcher=row.name,
    )


def _place(env: Mapping[str, str], row: Launcher, rank: int, world_size: int) -> dict[str, Any]:
    """Return the attributes that tell this rank's place on its node, with ``placed`` False where nothing tells it."""
    if row.tasks_per_node:
        node, tasks = _integer(env, row, row.node_rank), _tasks(env, row, world_size)
        if not 0 <= node < len(tasks):
            raise _wrong(row, f"{row.node_rank[0]} is {node}, but {len(tasks)} nodes have tasks")
        return _numbers(_integer(env, row, row.local_rank), node, tasks[node], len(tasks))
    if row.one_per_node:
        return _numbers(0, rank, 1, world_size)
    # Beside a launcher that does not say the first two, people may set torchrun's.
    names = (row.local_rank or TORCHRUN.local_rank, row.local_size or TORCHRUN.local_world_size)
    local_rank, local_size, node_rank, node_count = (
        _integer(env, row, variables) if value(env, variables) else None
        for variables in (*names, row.node_rank, row.node_count)
    )
    if local_size is None and 1 in (node_count, world_size):
        local_size = world_size
    if node_rank is None and local_size is not None and (row.name in MPI or local_size == world_size):
        node_rank = rank // max(local_size, 1)  # MPI's: as if nodes had as many ranks, one after the other
    if world_size != 1 and (local_rank is None or local_size is None or node_rank is None):
        lowest = local_rank or 0
        return _numbers(lowest, rank, lowest + 1, max(world_size, 1)) | {"placed": False}
    return _numbers(local_rank or 0, node_rank or 0, local_size or 0, node_count or 0)


def _numbers(local_rank: int, node_rank: int, local_world_size: int, node_count: int) -> dict[str, Any]:
    return dict(local_rank=local_rank, node_rank=node_rank, local_world_size=local_world_size, node_count=node_count)


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
    for attribute in NUMBERS if environment.placed else ("rank", "world_size"):
        name, number = getattr(TORCHRUN, attribute)[0], getattr(environment, attribute)
        guessed = attribute == "node_rank" and environment.launcher in MPI
        if name in env and not guessed and env[name].strip() != str(number):
            raise ValueError(
                f"{name} is {env[name]!r}, but {names_of(environment.launcher).command} started this process with "
                f"{attribute.replace('_', ' ')} {number}; unset {name}, or set all of {', '.join(VARIABLES)}"
            )


def _wrong(row: Launcher, problem: str) -> ValueError:
    remedy = f"start the ranks with {row.command}, which sets {', '.join(row.needed)}"
    return ValueError(f"{problem}; {remedy}; for a single process unset them all, or set {launchers.ALONE}=1")


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
