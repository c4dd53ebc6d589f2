"""Commands of layouts: ``plan``, ``schedule`` and ``verify``."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from zeromesh.apps.cli.command_errors import WRONG_INPUT, check_settings, command_errors, end_command


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A name that --list shows, such as llama-3.1-8b, a size such as 7b, sizes such as "
            "llama:layers=32,hidden=4096,heads=32, a folder with a config.json of transformers, a name on the Hugging "
            "Face Hub, or a configuration of ZeroMesh. The largest models that fit are shown if left out."
        ),
    ] = "",
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples of an update, of all ranks; 8 for each device.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a sample; up to 2048, as the model takes.")
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(min=1, metavar="R", help="Train adapters of this rank on all linear layers, not all weights."),
    ] = None,
    qlora: Annotated[
        bool, typer.Option("--qlora", help="Train adapters on weights in 4 bits; of rank 16, or --lora R.")
    ] = False,
    gpu: Annotated[str, typer.Option(help="The GPU, such as h100 or a100-40gb; those of this machine.")] = "",
    gpus: Annotated[int | None, typer.Option(min=1, metavar="N", help="GPUs of a node; all that it has.")] = None,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of nodes.")] = 1,
    node: Annotated[str, typer.Option(help="The kind of node, such as dgx-h100; the usual one of the GPU.")] = "",
    inside: Annotated[str, typer.Option(help="Link between GPUs of a node, such as nvlink4 or pcie4.")] = "",
    between: Annotated[str, typer.Option(help="Link between nodes, such as '8 x ndr' or '10 Gbit'.")] = "",
    host_memory: Annotated[
        float | None, typer.Option(metavar="GB", help="Memory of a node's host, in 10^9 bytes.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help="Tokens of the whole training, such as 1e9 or 300M: adds its hours."),
    ] = None,
    price: Annotated[float, typer.Option(min=0, help="Price of a node per hour: adds what the training costs.")] = 0.0,
    machine: Annotated[Path | None, typer.Option(help="File of zeromesh doctor --save, instead of names.")] = None,
    goal: Annotated[
        str, typer.Option(help="Smallest of: time of a step, memory of a device, cost of a token.")
    ] = "time",
    layouts: Annotated[int, typer.Option(min=1, max=8, help="Layouts to show.")] = 8,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory, the step and all layouts into this PNG.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the configuration of the best layout into this folder.")
    ] = None,
    explain: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="Judge the layout of this configuration instead.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show the names of models and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """Show which layout of a model fits a machine, how fast it is, and why, before anything runs."""
    with command_errors():
        if explain is not None:
            check_settings(explain)
        from zeromesh.apps.cli import plan_command as plans
        from zeromesh.apps.cli import plan_questions as questions
        from zeromesh.apps.cli.plan_model import Adapters

        if show_list:
            typer.echo("\n".join(questions.names_text()))
            return
        amount = questions.tokens_of(tokens) if tokens is not None else 0.0
        target = plans.machine_of(machine, gpu, gpus, nodes, node, inside, between, host_memory, price)
        adapters = Adapters(lora or questions.RANK, qlora) if qlora or lora else None
        fewest = gpu if gpu and not node and gpus is None and nodes == 1 else ""
        question = plans.PlanQuestion(
            model, batch, sequence, goal, layouts, picture, out, explain, as_json, adapters, amount, fewest
        )
        fits = plans.plan(question, target)
    if not fits:
        raise typer.Exit(WRONG_INPUT)


def schedule(
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages of all ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches of an update.")] = 8,
    name: Annotated[str, typer.Option(help="Name of the schedule; --list shows them.")] = "1f1b",
    chunks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stages on each rank; the fewest possible if left out.")
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="For interleaved-1f1b: micro-batches of a stage before the next stage."),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="F,I,W[,MESSAGE]",
            help="Time of a forward, an input and a weight gradient, and a message; or the JSON of a recorded update.",
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="N", help="Activations that a rank can hold, in micro-batches of one stage.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the schedule into this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto into this file.")] = None,
    text: Annotated[Path | None, typer.Option(help="Write the schedule, with its messages, into this file.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show the names and exit.")] = False,
    check: Annotated[Path | None, typer.Option(help="Check the schedule in this file instead of making one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """Show when the ranks of a pipeline compute, how long they are idle, and how much they hold."""
    with command_errors():
        from zeromesh.apps.cli import schedule_command as schedules

        if show_list:
            schedules.show_names()
        elif check is not None:
            schedules.check(check)
        else:
            files = schedules.ScheduleFiles(svg, trace, text)
            schedules.show(name, stages, microbatches, chunks, group, schedules.costs_of(costs), memory, files, as_json)


def verify(
    config: Annotated[Path, typer.Argument(help="A JSON or YAML file in DeepSpeed's format, with an optimizer.")],
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder with a config.json of transformers, or package.module:function, which returns a module, or "
            "one and a batch; the model of the file if left out."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes; as few as the mesh needs if left out.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Updates to compare.")] = 3,
    whole: Annotated[bool, typer.Option("--whole", help="Compare the model as it is, however large.")] = False,
    timeout: Annotated[float, typer.Option(min=1, metavar="S", help="Seconds that the processes have.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the differences of all parameters into this page (.html) or picture."),
    ] = None,
) -> None:
    """Show whether a layout trains a model as one plain process does: status 0 equal, 1 apart, 2 not verified."""
    verify_layout(config, model, overrides or (), ranks, steps, whole, timeout, as_json, picture)


def verify_layout(
    config: Path, model: str | None = None, overrides: Sequence[str] = (), *arguments: Any, **named: Any
) -> None:
    """Compare, and exit unless the layout trains as one process does. Only a difference has status 1."""
    with command_errors():
        check_settings(config, overrides)
        from zeromesh.apps.cli import verify as verifying

        try:
            verdict = verifying.run(config, model, overrides, *arguments, **named)
        except (ValueError, OSError, typer.Exit):
            raise
        except Exception as error:  # a user's function may raise anything, and a traceback's status is 1
            traceback.print_exc()
            raise end_command(f"error: {type(error).__name__}: {error}", error, WRONG_INPUT) from None
    if verdict.value:
        raise typer.Exit(verdict.value)
