"""Commands of runs: ``train``, ``report``, ``sample`` and ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zeromesh.apps.cli.command_errors import check_settings, command_errors
from zeromesh.apps.cli.layout_commands import verify_layout

CONFIGURATIONS = (".json", ".yaml", ".yml")  # suffixes


def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|MODEL",
            help="A JSON or YAML file in DeepSpeed's format, with model, data and run; or, before DATA, a model as "
            "zeromesh init takes it: a folder, a name on the Hub, or tiny, small or medium.",
        ),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA",
            help="Train MODEL on these files, with the configuration that zeromesh init would write.",
        ),
    ] = None,
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
    """Train a language model on text: zeromesh train CONFIG, or zeromesh train MODEL DATA."""
    with command_errors():
        from zeromesh.config.document import parse_override

        for override in overrides or ():
            parse_override(override)  # first: the value of one without a = is taken for DATA
        if names and len(names) > 1:
            raise ValueError(
                f"DATA is one name, and here are {len(names)}: {', '.join(names[:3])}; name their folder, or write a "
                f"pattern in quotes, so that the shell does not expand it: zeromesh train {config} 'texts/*.txt'"
            )
        data = names[0] if names else None
    if verify and data is None:
        verify_layout(config, overrides=overrides or ())
    with command_errors():
        if verify and data is not None:
            raise ValueError("--verify compares a configuration file; write one with zeromesh init MODEL DATA")
        source: Any = config
        if data is not None or config.suffix.lower() not in CONFIGURATIONS:  # a file needs no torch to be looked at
            from zeromesh.apps.train.starting_config import configuration_of

            source = configuration_of(str(config), data, overrides or [])
        else:
            check_settings(config, overrides or ())
        from zeromesh.apps.train.train_run import train as run

        run(source, overrides or [], "auto" if auto_resume else resume)


def report(
    run: Annotated[Path, typer.Argument(help="The output folder of a run, finished or not.")],
    watching: Annotated[
        bool, typer.Option("--watch", help="Write the page anew while the run goes on; it reloads itself in a browser.")
    ] = False,
) -> None:
    """Write the page of a run, report.html: its figures, curves, samples, and the ranks' work over time."""
    with command_errors():
        from zeromesh.apps.train.run_picture import watch, write_run_page

        if not watching:
            typer.echo(f"wrote {write_run_page(run)}")
            return
        pages = watch(run)
        typer.echo(f"{next(pages)} shows the run; open it in a browser. It reloads itself; Ctrl-C ends the watch.")
        for _ in pages:
            pass
        typer.echo("the run has ended; the page is complete")


def sample(
    run: Annotated[Path, typer.Argument(help="The output folder of a finished run.")],
    prompt: Annotated[str, typer.Argument(help="The beginning of the text.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="Randomness; 0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choices.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Texts to write.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message; write the answer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """Continue a text with the model of a run."""
    with command_errors():
        from zeromesh.apps.train.sample import continue_text

        continue_text(run, prompt, tokens, temperature, seed, count, chat, as_json)


def export(
    run: Annotated[Path, typer.Argument(help="The output folder of a run, finished or not.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist, or be empty.")],
    tag: Annotated[
        str | None, typer.Option(help="The checkpoint, such as global_step100; the latest if left out.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Write the model with its adapters merged in.")] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write model.gguf for llama.cpp, with adapters merged in.")
    ] = False,
    hub: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Upload the folder to this repository of the Hub, a private one."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository of --hub public.")] = False,
) -> None:
    """Write the model of a run as a folder that from_pretrained of transformers, or of PEFT, opens."""
    with command_errors():
        from zeromesh.apps.train.export_run import export as write

        write(run, folder, tag, merge, gguf, hub, public)
