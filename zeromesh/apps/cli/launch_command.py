"""``zeromesh launch``: run a script as the ranks of this node."""

from __future__ import annotations

import io
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from zeromesh.apps.launch.launch import default_ranks, python_rank, threads
from zeromesh.base.words import counted

DROP_IN = "zeromesh.deepspeed"  # module that runs a script in which it is deepspeed
PASS_LOCAL_RANK = "--pass-local-rank"  # its argument, by which it does as DeepSpeed's launcher
DEFAULT_RESTARTS = 3  # where nodes may come and go, since each that goes costs one


@dataclass(frozen=True)
class LaunchOptions:
    """Number and place of ranks, as given; see ``zeromesh launch --help``."""

    ranks: int | None  # on each node; None for one per accelerator
    nodes: str  # COUNT or LEAST:MOST
    node_rank: int | None
    master: str | None
    restarts: int | None
    timeout: float
    secret_file: Path | None


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
    if not is_module and not is_command and not Path(name).is_file():
        raise ValueError(f"{name!r} is no file; name a Python script, or -m MODULE, or --no-python PROGRAM")
    if is_command and shutil.which(name) is None:
        raise ValueError(f"{name!r} is no program that can be run; see its path, and that it is executable")
    if as_deepspeed:
        return python_rank("module", DROP_IN, [PASS_LOCAL_RANK, *(["-m"] if is_module else []), name, *arguments])
    return python_rank("program" if is_command else "module" if is_module else "script", name, arguments)


def launch(command: Sequence[str], options: LaunchOptions) -> None:
    """Run a command as the ranks of this node, and wait for them; raise ValueError if options contradict each other."""
    least, most = _node_counts(options)
    master = _master(options, most)
    restarts = (DEFAULT_RESTARTS if least < most else 0) if options.restarts is None else options.restarts
    if least < most and restarts < 1:
        raise ValueError(
            f"--nnodes {options.nodes} lets nodes go, and each costs a restart; set --max-restarts to at least 1"
        )
    if options.node_rank is not None and not 0 <= options.node_rank < most:
        raise ValueError(f"--node-rank is {options.node_rank}, but must be from 0 to {most - 1}")
    ranks, secret = _ranks(options), _secret(options, master)
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


def report(text: str) -> None:
    """Show a line about the launch itself."""
    typer.echo(f"zeromesh launch: {text}", err=True)


def _node_counts(options: LaunchOptions) -> tuple[int, int]:
    """Return the least and the most nodes."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", options.nodes)
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
            f"--nnodes {options.nodes} needs --secret-file FILE, as strangers could run commands on the nodes without "
            f"a secret; {HOW}"
        )
    return secret if master else b""


def _ranks(options: LaunchOptions) -> int:
    """Return the number of ranks of a node as given, else one for each accelerator."""
    ranks = default_ranks() if options.ranks is None else options.ranks
    if ranks < 1:
        raise ValueError(f"--nproc is {ranks}, but must be at least 1")
    return ranks


def _announcement(options: LaunchOptions, ranks: int, variables: dict[str, str]) -> str:
    """Return a line about what the user has not set."""
    parts = [counted(ranks, "rank")]
    if options.ranks is None:
        parts.append("one for each accelerator" if ranks > 1 else "--nproc sets how many")
    parts += [f"{name}={value} for each; set it to change that" for name, value in variables.items() if ranks > 1]
    return ", ".join(parts)
