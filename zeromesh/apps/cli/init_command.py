"""Command ``init``: questions, or flags, and the configuration that follows from the answers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from zeromesh.apps.cli.command_errors import command_errors


def init(
    model: Annotated[
        str | None,
        typer.Argument(help="A model folder, a name on the Hub, or a size to train from scratch: tiny, small, medium."),
    ] = None,
    data: Annotated[str | None, typer.Argument(help="Files, a folder, org/name on the Hub, or python-stdlib.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|gpu", help="The device to train on; that of this machine if left out.")
    ] = None,
    lora: Annotated[
        bool | None,
        typer.Option("--lora/--full", help="Train adapters, or all weights, which is the default where they fit."),
    ] = None,
    output: Annotated[str, typer.Option(metavar="FOLDER", help="Folder of the run; runs/MODEL-DATA if left out.")] = "",
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; MODEL-DATA.yaml if left out.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key, as in data.prompt_key=question.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a configuration for zeromesh train, and show the command that uses it."""
    with command_errors():
        from zeromesh.apps.train import starting_config as starting
        from zeromesh.apps.train.train_settings import TrainSettings

        if model is None or data is None:
            if not is_terminal():
                raise ValueError(
                    f"name the model and the data: zeromesh init MODEL DATA. MODEL is {starting.MODEL_FORMS}. "
                    f"DATA is {starting.DATA_FORMS}"
                )
            model, data, device, lora, output = _ask(model, data, device, lora, output, overrides or ())
        start = starting.start_of(model, data, device, lora, output, overrides or ())
        path = file or Path(f"{Path(start.output).name}.yaml")
        if path.suffix not in (".yaml", ".yml"):
            raise ValueError(f"--file = {str(path)!r} must end in .yaml, since JSON has no comments")
        if path.exists() and not force and not (is_terminal() and typer.confirm(f"{path} exists; overwrite it?")):
            raise ValueError(f"{str(path)!r} exists and is not overwritten; choose another --file, or pass --force")
        document = starting.overridden(starting.document_of(start), overrides or ())
        TrainSettings.load(document)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            starting.commented(document, f"{starting.summary_of(start)}. All keys: docs/configuration.md"),
            encoding="utf-8",
        )
        hidden = "CUDA_VISIBLE_DEVICES= " if start.device.kind == "cpu" and not start.device.here else ""
        typer.echo(f"wrote {path}: {starting.summary_of(start)}")
        typer.echo(f"start it with\n  {hidden}zeromesh train {shlex.quote(str(path))}")


def is_terminal() -> bool:
    """Return whether a person can answer."""
    return sys.stdin.isatty()


def _ask(
    model: str | None,
    data: str | None,
    device: str | None,
    lora: bool | None,
    output: str,
    overrides: Sequence[str],
) -> tuple[str, str, str | None, bool | None, str]:
    """Ask for what is not given, and again after a wrong answer."""
    from zeromesh.apps.train import starting_config as starting

    typer.echo(f"MODEL is {starting.MODEL_FORMS}.\nDATA is {starting.DATA_FORMS}.")
    chosen = _answer("model", "tiny", starting.model_named, model)
    source = _answer(
        "data",
        "python-stdlib" if chosen.size else None,
        lambda text: starting.data_named(text, chosen, overrides),
        data,
    )
    place = _answer("device (cpu, gpu)", starting.device_named(None).kind, starting.device_named, device)
    if lora is None and chosen.has_weights:
        default = (
            "lora" if starting.start_of(chosen.name, source.source, place.kind, overrides=overrides).lora else "full"
        )
        lora = _answer("train adapters or all weights (lora, full)", default, _method, None)
    start = starting.start_of(chosen.name, source.source, place.kind, lora, output, overrides)
    output = output or typer.prompt("folder of the run", default=start.output)
    return chosen.name, source.source, place.kind, lora, output


def _method(text: str) -> bool:
    if text not in ("lora", "full"):
        raise ValueError(f"{text!r} is neither lora nor full")
    return text == "lora"


def _answer(question: str, default: str | None, check: Callable[[str], Any], argument: str | None) -> Any:
    """Return what ``check`` makes of an argument, or of an answer; ask until it raises no ValueError."""
    while argument is None:
        answer = typer.prompt(question, default=default)
        try:
            return check(answer)
        except ValueError as error:
            typer.echo(f"  {error}")
    return check(argument)
