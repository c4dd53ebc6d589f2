"""``zeromesh launch``: run a script as the ranks of this node."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from zeromesh.apps.launch.launch import available_cores, default_ranks, python_rank, threads
from zeromesh.base.files import meant_file
from zeromesh.base.words import counted
from zeromesh.comm.detect import Environment
from zeromesh.comm.launchers import find, names_of

DROP_IN = "zeromesh.deepspeed"  # module that runs a script in which it is deepspeed

# Options of DeepSpeed's launcher that reach other nodes, and what does the same here, on each node.
ELSEWHERE = {
    "--include": "CUDA_VISIBLE_DEVICES=0,1 for devices of this node; start zeromesh launch on the nodes that you mean",
    "--exclude": "CUDA_VISIBLE_DEVICES=0,1 for devices of this node; start zeromesh launch on the nodes that you mean",
    "--hostfile": "zeromesh launch --nnodes N --node-rank R --master HOST:PORT on each host, with srun or ssh",
}

DEFAULT_RESTARTS = 3  # where nodes may come and go, since each that goes costs one


@dataclass(frozen=True)
class LaunchOptions:
    """Number and place of ranks, as given; see ``zeromesh launch --help``."""

    ranks: int | None  # on each node; None for one per accelerator
    nodes: str | None  # COUNT or LEAST:MOST; None for 1
    node_rank: int | None
    master: str | None
    restarts: int | None
    timeout: float
    secret_file: Path | None


NO_SCRIPTS = {
    ".json": "a configuration; start it with: zeromesh train {}",
    ".ipynb": "a notebook; start ranks in one of its cells, with zeromesh.launch(function, 2)",
    ".sh": "a script of a shell; name what it starts, or add --no-python where each rank is to run it",
}
"""Files that are given in place of a Python script, by the end of the name, and what to do instead."""


def rank_command(
    name: str, arguments: Sequence[str], is_module: bool, is_command: bool, as_deepspeed: bool = False
) -> list[str]:
    """Return the command of a rank for a script, a module or another program; raise ValueError if it cannot be run."""
    if as_deepspeed and is_command:
        raise ValueError(
            f"--as-deepspeed and --no-python exclude each other: only Python can find ZeroMesh as deepspeed; leave out "
            f"--no-python, or let the program run `python -m {DROP_IN} SCRIPT`"
        )
    if is_module and is_command:
        raise ValueError("-m and --no-python exclude each other: a module is run by Python; leave one of them out")
    if not is_module and not is_command:
        if not Path(name).is_file():
            rule = "name a Python script, or -m MODULE, or --no-python PROGRAM"
            raise ValueError(f"{name!r} is no file; {meant_file(Path(name), rule)}")
        if (meant := NO_SCRIPTS.get(Path(name).suffix)) is not None:
            raise ValueError(f"{name!r} is {meant.format(name)}")
    if is_command and shutil.which(name) is None:
        raise ValueError(f"{name!r} is no program that can be run; see its path, and that it is executable")
    if as_deepspeed:
        return python_rank("module", DROP_IN, [*(["-m"] if is_module else []), name, *arguments])
    return python_rank("program" if is_command else "module" if is_module else "script", name, arguments)


def launch(command: Sequence[str], options: LaunchOptions) -> None:
    """Run a command as the ranks of this node, and wait for them; raise ValueError if options contradict each other."""
    options = with_defaults(options, os.environ)
    least, most = _node_counts(options)
    master = _master(options, most)
    restarts = (DEFAULT_RESTARTS if least < most else 0) if options.restarts is None else options.restarts
    if least < most and restarts < 1:
        raise ValueError(
            f"--nnodes {options.nodes} lets nodes go, and each costs a restart; set --max-restarts to at least 1"
        )
    if options.node_rank is not None and not 0 <= options.node_rank < most:
        raise ValueError(f"--node-rank is {options.node_rank}, but must be from 0 to {most - 1}")
    ranks = default_ranks() if options.ranks is None else options.ranks
    if ranks < 1:
        raise ValueError(f"--nproc is {ranks}, but must be at least 1")
    secret = _secret(options, master)
    # Imported late, as it imports torch: what is wrong with the options should be said at once.
    from zeromesh.apps.launch.agent import LaunchPlan, run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="replace")  # copied lines must not be torn, nor held back
    variables = threads(ranks)
    report(_announcement(options, ranks, variables))
    plan = LaunchPlan(ranks, least, most, master, options.node_rank, restarts, options.timeout, secret, variables)
    with tempfile.TemporaryDirectory(prefix="zeromesh-") as folder:
        run(command, plan, Path(folder), report)


def master_of(master: str | None, address: str | None, port: int | None) -> str | None:
    """Return HOST:PORT of --master, or of the two options in which DeepSpeed's launcher and torchrun have it."""
    if address is None:
        return master  # DeepSpeed's --master_port alone is that of one node, which needs none here
    if master is not None:
        raise ValueError(f"--master is {master!r} and --master_addr is {address!r}; leave one of them out")
    return f"{address}:{29500 if port is None else port}"


def refuse_elsewhere(options: Mapping[str, str | None]) -> None:
    """Raise ValueError for options of DeepSpeed's launcher that zeromesh launch, which starts this node only, lacks."""
    for name, text in options.items():
        if text is not None:
            raise ValueError(f"{name} {text}: zeromesh launch starts ranks on this node only; use {ELSEWHERE[name]}")


def with_defaults(options: LaunchOptions, env: Mapping[str, str]) -> LaunchOptions:
    """Return the options, with those that were not given as the variables say.

    PET_*, which torchrun reads and Kubeflow sets, come first; else a launcher that has started one process on each
    node. Raise ValueError if it has started several, each of which would start ranks.
    """
    nodes = options.nodes or env.get("PET_NNODES")
    master, node_rank = env.get("PET_RDZV_ENDPOINT"), env.get("PET_NODE_RANK")
    if env.get("PET_MASTER_ADDR"):
        master = f"{env['PET_MASTER_ADDR']}:{env.get('PET_MASTER_PORT') or 29500}"
    others = {name: text for name, text in env.items() if not name.startswith("PET_")}
    if nodes is None and find(others) is not None:
        try:
            environment = Environment.detect(others)
        except ValueError:
            environment = Environment()  # the ranks get variables of their own, so these may be incomplete
        if environment.world_size > 1:
            if environment.local_world_size > 1:
                command = names_of(environment.launcher).command
                raise ValueError(
                    f"{command} has started {environment.local_world_size} processes on this node, and each would "
                    "start ranks; start one on each node (srun --ntasks-per-node 1), or the script itself in place of "
                    "zeromesh launch; with --nnodes 1 each is a run of its own"
                )
            nodes, node_rank = str(environment.world_size), str(environment.rank)
            if environment.master_address:
                master = f"{environment.master_address}:{environment.master_port}"
    if nodes in (None, "1"):  # where the user has said --nnodes 1, the other nodes are other runs
        master = node_rank = None
    restarts = _count("PET_MAX_RESTARTS", env.get("PET_MAX_RESTARTS"))
    return replace(
        options,
        nodes=nodes,
        ranks=_ranks_of(env.get("PET_NPROC_PER_NODE")) if options.ranks is None else options.ranks,
        node_rank=_count("PET_NODE_RANK", node_rank) if options.node_rank is None else options.node_rank,
        master=options.master or master,
        restarts=restarts if options.restarts is None else options.restarts,
    )


def _ranks_of(text: str | None) -> int | None:
    """Return the ranks of a node that PET_NPROC_PER_NODE says; None for one per accelerator."""
    if text in ("auto", "gpu"):
        return None
    return available_cores() if text == "cpu" else _count("PET_NPROC_PER_NODE", text)


def _count(name: str, text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}, but must be a whole number; set it, or the option of zeromesh launch")
    return int(text)


def report(text: str) -> None:
    """Show a line about the launch itself."""
    typer.echo(f"zeromesh launch: {text}", err=True)


def _node_counts(options: LaunchOptions) -> tuple[int, int]:
    """Return the least and the most nodes."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", options.nodes or "1")
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(
            f"--nnodes is {options.nodes!r}, but must be a number of nodes, or the least and the most: 2, or 1:4"
        )
    return least, most


def _master(options: LaunchOptions, most: int) -> str:
    """Return ``HOST:PORT`` of the master; empty for one node."""
    if most == 1 and options.master is None:
        if options.node_rank:
            raise ValueError(
                f"--node-rank {options.node_rank} needs --nnodes and --master; a single node has the rank 0"
            )
        return ""
    if options.master is None:
        raise ValueError(
            f"--nnodes {options.nodes} needs --master HOST:PORT: the first node as the others reach it, and a free "
            "port there, such as 29500; run the same command on every node"
        )
    # An address of IPv6 has colons itself, and stands in brackets.
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):(\d{1,5})", options.master)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(f"--master is {options.master!r}, but must be HOST:PORT, as in node1:29500 or 10.0.0.1:29500")
    return options.master


def _secret(options: LaunchOptions, master: str) -> bytes:
    """Return the secret that the nodes share; empty for one node."""
    from zeromesh.apps.launch.signed_rendezvous import HOW, read_secret

    secret = read_secret(options.secret_file)
    if master and not secret:
        raise ValueError(
            f"--nnodes {options.nodes or 1} needs --secret-file FILE, as strangers could run commands on the nodes "
            f"without a secret; {HOW}"
        )
    return secret if master else b""


def _announcement(options: LaunchOptions, ranks: int, variables: dict[str, str]) -> str:
    """Return a line about what the user has not set."""
    parts = [counted(ranks, "rank")]
    if options.ranks is None:
        parts.append("one for each accelerator" if ranks > 1 else "--nproc sets how many")
    parts += [f"{name}={value} for each; set it to change that" for name, value in variables.items() if ranks > 1]
    return ", ".join(parts)
