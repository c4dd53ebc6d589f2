"""Commands of machines: ``launch`` and ``doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeromesh.apps.cli.command_errors import FAILED, command_errors, end_command


def launch(
    program: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script; what follows are its arguments.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", show_default=False, help="Arguments of SCRIPT.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            *("--nproc", "-np", "--num_gpus", "--nproc-per-node", "--nproc_per_node"),
            metavar="N",
            help="Ranks per node. Default: one per accelerator, or 1.",
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            *("--nnodes", "--num_nodes"),
            metavar="A[:B]",
            help="Nodes; A:B lets nodes come and go between A and B. Default: PET_NNODES, else 1.",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            *("--node-rank", "--node_rank"),
            metavar="R",
            help="0 on the node of --master; by host name if left out.",
        ),
    ] = None,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where several nodes meet: the first one, and a free port.")
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Restart all ranks up to K times when one fails. Default: 0; 3 for A:B."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that nodes have to find each other.")] = 300.0,
    secret_file: Annotated[
        Path | None, typer.Option(help="File with a secret that all nodes share; required for several nodes.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", "--no_python", help="SCRIPT is an executable, not Python code.")
    ] = False,
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="Let `import deepspeed` in SCRIPT import ZeroMesh.")
    ] = False,
    master_addr: Annotated[str | None, typer.Option("--master_addr", "--master-addr", hidden=True)] = None,
    master_port: Annotated[int | None, typer.Option("--master_port", "--master-port", hidden=True)] = None,
    include: Annotated[str | None, typer.Option("--include", "-i", hidden=True)] = None,
    exclude: Annotated[str | None, typer.Option("--exclude", "-e", hidden=True)] = None,
    hostfile: Annotated[str | None, typer.Option("--hostfile", "-H", hidden=True)] = None,
) -> None:
    """Run a script as several ranks, on one node or many."""
    with command_errors():
        from zeromesh.apps.cli import launch_command as starting
        from zeromesh.comm.failure import RankFailure

        starting.refuse_elsewhere({"--include": include, "--exclude": exclude, "--hostfile": hostfile})
        command = starting.rank_command(program, arguments or (), module, no_python, as_deepspeed)
        master = starting.master_of(master, master_addr, master_port)
        options = starting.LaunchOptions(nproc, nnodes, node_rank, master, max_restarts, timeout, secret_file)
        try:
            starting.launch(command, options)
        except RankFailure as error:
            raise end_command(f"error: {error}", error, error.exitcode) from None


def doctor(
    folder: Annotated[Path, typer.Option(help="The folder whose disk is measured.")] = Path(),
    ranks: Annotated[
        int, typer.Option(min=1, help="Start as many ranks here, to measure how fast they exchange data.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure the devices too, and write a machine.json for plans.")
    ] = None,
) -> None:
    """Show the hardware of this machine, or of all ranks, its speed, and problems."""
    with command_errors():
        from zeromesh.apps.cli.doctor import doctor as examine

        sound = examine(folder, ranks, as_json, save)
    if not sound:
        raise typer.Exit(FAILED)
