"""Command line ``zeromesh``. Each command imports what it needs when it runs, so that help comes at once."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from zeromesh import __version__

app = typer.Typer(
    help="Train PyTorch models that do not fit, or are too slow, on one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Exit codes: wrong input, found before the start, as typer's own; a run that failed; Ctrl-C, as shells report it.
WRONG_INPUT, FAILED, STOPPED = 2, 1, 130


def main() -> None:
    """Run the command line."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zeromesh {__version__}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models that do not fit, or are too slow, on one device."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A JSON file in DeepSpeed's format, with model, data and run.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in run.steps=100.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in run.output.")] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Continue if run.output has a checkpoint, else start.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="First compare the layout with one plain process, on a smaller model.")
    ] = False,
) -> None:
    """Train a language model on text."""
    if verify:
        _verify(config, overrides=overrides or ())
    with _errors():
        from zeromesh.apps.train.train_run import train as run

        run(config, overrides or [], "auto" if auto_resume else resume)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="The output folder of a run, finished or not.")]) -> None:
    """Draw a run: its attempts, curves, and the ranks' work and hardware over time."""
    with _errors():
        from zeromesh.apps.train.run_picture import write_picture

        typer.echo(f"wrote {write_picture(run)}")


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="The output folder of a finished run.")],
    prompt: Annotated[str, typer.Argument(help="The beginning of the text.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="Randomness; 0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choices.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Texts to write.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message; write the answer.")] = False,
) -> None:
    """Continue a text with the model of a run."""
    with _errors():
        from zeromesh.apps.train.sample import continue_text

        continue_text(run, prompt, tokens, temperature, seed, count, chat)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The output folder of a run, finished or not.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist, or be empty.")],
    tag: Annotated[
        str | None, typer.Option(help="The checkpoint, such as global_step100; the latest if left out.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Write the model with its adapters merged in.")] = False,
) -> None:
    """Write the model of a run as a folder that from_pretrained of transformers, or of PEFT, opens."""
    with _errors():
        from zeromesh.apps.train.export_run import export as write

        write(run, folder, tag, merge)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint of any library, or a folder of checkpoints.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    to: Annotated[str, typer.Option(help="Format to write: zeromesh, hf, dcp or deepspeed-universal.")] = "zeromesh",
    tag: Annotated[str | None, typer.Option(help="The checkpoint in the folder; the latest if left out.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder with a config.json of transformers, or package.module:function."),
    ] = None,
    strip: Annotated[
        str, typer.Option(metavar="PREFIX", help="Beginning of names to take off, such as 'model.' of Lightning.")
    ] = "",
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out optimizer, scheduler and counters.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="Ranks that will load deepspeed-universal into sharded parameters.")] = 0,
) -> None:
    """Turn a checkpoint of another library into one of ZeroMesh, or one of ZeroMesh into another format."""
    with _errors():
        from zeromesh.apps.train.screen import make_console
        from zeromesh.checkpoint.weights.convert import convert_checkpoint

        convert_checkpoint(
            source,
            target,
            to,
            tag=tag,
            model=model,
            strip=strip,
            weights_only=weights_only,
            ranks=ranks,
            console=make_console(),
        )


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="The folder of a run, a folder of checkpoints, or one checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all files with their hashes.")] = False,
) -> None:
    """Show what checkpoints hold, and whether they are complete."""
    with _errors():
        from zeromesh.apps.cli.inspect import inspect as show

        sound = show(path, as_json, verify)
    if not sound:
        raise typer.Exit(FAILED)


@app.command()
def config(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A JSON file in DeepSpeed's format.")],
    fix: Annotated[
        bool, typer.Option("--fix", help="Write the file anew, as zeromesh reads it, and each change to stderr.")
    ] = False,
) -> None:
    """Show the settings of a configuration, or make one for DeepSpeed load here."""
    with _errors():
        from zeromesh.apps.cli.config import fix as rewrite
        from zeromesh.apps.cli.config import show

        (rewrite if fix else show)(path)


# What follows SCRIPT belongs to it, options too.
@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    program: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script; what follows are its arguments.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", show_default=False)] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            *("--nproc", "-np", "--num_gpus", "--nproc-per-node", "--nproc_per_node"),
            metavar="N",
            help="Ranks per node; one for each accelerator, else 1, if left out.",
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            *("--nnodes", "--num_nodes"),
            metavar="A[:B]",
            help="Nodes; A:B lets nodes come and go between A and B. [default: PET_NNODES, else 1]",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            *("--node-rank", "--node_rank"),
            metavar="R",
            help="0 on the node of --master; by its host name if left out.",
        ),
    ] = None,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where several nodes meet: the first one, and a free port.")
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Start all ranks again so often when one fails. [default: 0; 3 for A:B]"),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that nodes have to find each other.")] = 300.0,
    secret_file: Annotated[
        Path | None, typer.Option(help="File with a secret that all nodes share; needed for several.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", "--no_python", help="SCRIPT is a program that is not Python's.")
    ] = False,
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="`import deepspeed` in SCRIPT is ZeroMesh.")
    ] = False,
    master_addr: Annotated[str | None, typer.Option("--master_addr", "--master-addr", hidden=True)] = None,
    master_port: Annotated[int | None, typer.Option("--master_port", "--master-port", hidden=True)] = None,
    include: Annotated[str | None, typer.Option("--include", "-i", hidden=True)] = None,
    exclude: Annotated[str | None, typer.Option("--exclude", "-e", hidden=True)] = None,
    hostfile: Annotated[str | None, typer.Option("--hostfile", "-H", hidden=True)] = None,
) -> None:
    """Run a script as several ranks, on one node or many."""
    with _errors():
        from zeromesh.apps.cli import launch_command as starting
        from zeromesh.comm.failure import RankFailure

        starting.refuse_elsewhere({"--include": include, "--exclude": exclude, "--hostfile": hostfile})
        command = starting.rank_command(program, arguments or (), module, no_python, as_deepspeed)
        master = starting.master_of(master, master_addr, master_port)
        options = starting.LaunchOptions(nproc, nnodes, node_rank, master, max_restarts, timeout, secret_file)
        try:
            starting.launch(command, options)
        except RankFailure as error:
            raise _end(f"error: {error}", error, error.exitcode) from None


@app.command()
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
    with _errors():
        from zeromesh.apps.cli.doctor import doctor as examine

        sound = examine(folder, ranks, as_json, save)
    if not sound:
        raise typer.Exit(FAILED)


@app.command()
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
) -> None:
    """Show when the ranks of a pipeline compute, how long they are idle, and how much they hold."""
    with _errors():
        from zeromesh.apps.cli import schedule_command as schedules

        if show_list:
            schedules.show_names()
        elif check is not None:
            schedules.check(check)
        else:
            files = schedules.ScheduleFiles(svg, trace, text)
            schedules.show(name, stages, microbatches, chunks, group, schedules.costs_of(costs), memory, files)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A name such as llama-3-8b, a size such as 7b, sizes such as llama:layers=32,hidden=4096,heads=32, a "
            "folder with a config.json of transformers, a name on the Hugging Face Hub, or a configuration of ZeroMesh."
        ),
    ],
    batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples of an update, of all ranks.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of a sample.")] = None,
    gpu: Annotated[str, typer.Option(help="The GPU, such as h100 or a100-40gb.")] = "",
    gpus: Annotated[int | None, typer.Option(min=1, metavar="N", help="GPUs of a node; all that it has.")] = None,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of nodes.")] = 1,
    node: Annotated[str, typer.Option(help="The kind of node, such as dgx-h100; the usual one of the GPU.")] = "",
    inside: Annotated[str, typer.Option(help="Link between GPUs of a node, such as nvlink4 or pcie4.")] = "",
    between: Annotated[str, typer.Option(help="Link between nodes, such as '8 x ndr' or '10 Gbit'.")] = "",
    host_memory: Annotated[
        float | None, typer.Option(metavar="GB", help="Memory of a node's host, in 10^9 bytes.")
    ] = None,
    price: Annotated[float, typer.Option(min=0, help="Price of a node per hour, for --goal cost.")] = 0.0,
    machine: Annotated[Path | None, typer.Option(help="File of zeromesh doctor --save, instead of names.")] = None,
    goal: Annotated[
        str, typer.Option(help="Smallest of: time of a step, memory of a device, cost of a token.")
    ] = "time",
    layouts: Annotated[int, typer.Option(min=1, max=8, help="Layouts to show.")] = 8,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory, the step and all layouts into this PNG.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the configuration that is written.")] = Path("plan"),
    explain: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="Judge the layout of this configuration instead.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """Show which layout of a model fits a machine, how fast it is, and why, before anything runs."""
    with _errors():
        from zeromesh.apps.cli import plan_command as plans

        target = plans.machine_of(machine, gpu, gpus, nodes, node, inside, between, host_memory, price)
        question = plans.PlanQuestion(model, batch, sequence, goal, layouts, picture, out, explain, as_json)
        fits = plans.plan(question, target)
    if not fits:
        raise typer.Exit(WRONG_INPUT)


@app.command()
def verify(
    config: Annotated[Path, typer.Argument(help="A JSON file in DeepSpeed's format, with an optimizer.")],
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
        Path | None, typer.Option(metavar="FILE", help="Draw the differences of all parameters into this PNG.")
    ] = None,
) -> None:
    """Show whether a layout trains a model as one plain process does: status 0 equal, 1 apart, 2 not verified."""
    _verify(config, model, overrides or (), ranks, steps, whole, timeout, as_json, picture)


def _verify(*arguments: Any, **named: Any) -> None:
    """Compare, and exit unless the layout trains as one process does. Only a difference has status 1."""
    with _errors():
        from zeromesh.apps.cli import verify as verifying

        try:
            verdict = verifying.run(verifying.VerifyQuestion(*arguments, **named))
        except (ValueError, OSError, typer.Exit):
            raise
        except Exception as error:  # a user's function may raise anything, and a traceback's status is 1
            traceback.print_exc()
            raise _end(f"error: {type(error).__name__}: {error}", error, WRONG_INPUT) from None
    if verdict.value:
        raise typer.Exit(verdict.value)


@contextmanager
def _errors() -> Iterator[None]:
    """Show the log, and errors as messages instead of tracebacks, with the exit code."""
    # Other errors are bugs of ours, and keep their traceback.
    from zeromesh.apps.train.screen import shown_log
    from zeromesh.comm.failure import RankFailure, StartError

    try:
        with shown_log():
            yield
    except (ValueError, OSError) as error:
        raise _end(f"error: {error}", error, WRONG_INPUT) from None
    except (RankFailure, StartError, FloatingPointError) as error:
        raise _end(f"error: {error}", error, FAILED) from None
    except KeyboardInterrupt as error:
        raise _end("stopped", error, STOPPED) from None


def _end(message: str, error: BaseException, code: int) -> typer.Exit:
    """Print a message and the notes of its error, and return the exit."""
    typer.secho(message, err=True, fg="red")
    for note in getattr(error, "__notes__", ()):
        typer.echo(note, err=True)
    return typer.Exit(code)


if __name__ == "__main__":
    main()
