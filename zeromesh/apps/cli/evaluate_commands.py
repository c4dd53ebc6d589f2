"""Commands that use a trained model: ``evaluate``, ``chat`` and ``serve``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from zeromesh.apps.cli.command_errors import command_errors

Model = Annotated[Path, typer.Argument(help="The output folder of a run, or a folder of a model of transformers.")]
Tag = Annotated[str | None, typer.Option(help="The run's checkpoint, such as global_step100; the latest if left out.")]


class ComputeDtype(StrEnum):
    """Dtypes of an evaluation."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def evaluate(
    model: Model,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Held-out file, folder or pattern, --data for each; or a run's own."),
    ] = None,
    choices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Questions of multiple choice: records or a table.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask the questions of --choices as a user in a chat.")] = False,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Tasks of lm-evaluation-harness, separated by commas.")
    ] = None,
    include: Annotated[Path | None, typer.Option(metavar="FOLDER", help="YAML files of more tasks.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Records of each task; all if left out.")] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question of a task; its own number if left out.")
    ] = None,
    tag: Tag = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the model sees at once; sequence_length, or the model's.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from one window of --data to the next; --length if left out.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a rank in one forward.")] = 4,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes to start; those of the run, or 1. A launcher decides itself.")
    ] = None,
    dtype: Annotated[
        ComputeDtype | None, typer.Option(help="Dtype of a model of transformers; that of its weights if left out.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure a model: loss, perplexity and bits per byte of text, multiple choice, lm-evaluation-harness."""
    with command_errors():
        from zeromesh.apps.evaluate.evaluate_run import Wanted
        from zeromesh.apps.evaluate.evaluate_run import evaluate as run
        from zeromesh.apps.evaluate.evaluated_model import EvaluatedModel

        names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
        files = tuple(data or ())
        wanted = Wanted(files, choices, chat, names, include, limit, fewshot, length, stride, batch)
        run(EvaluatedModel(model, tag, None if dtype is None else dtype.value), wanted, ranks, json)


def chat(
    model: Model,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="Randomness; 0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choices.")] = 0,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A message before the conversation.")] = None,
    tag: Tag = None,
) -> None:
    """Talk with a model: each line is a message, and the answer comes as it is written."""
    with command_errors():
        from zeromesh.apps.evaluate.chat import chat as talk
        from zeromesh.apps.evaluate.evaluated_model import EvaluatedModel

        talk(EvaluatedModel(model, tag), tokens, temperature, seed, system)


class InferenceEngine(StrEnum):
    """Engines that ``serve`` hands a model over to."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


def serve(
    model: Model,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="Options of the engine.")
    ] = None,
    engine: Annotated[
        InferenceEngine | None, typer.Option(help="The engine; the first that is installed if left out.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 8000,
    tag: Tag = None,
) -> None:
    """Serve a model by vLLM or transformers, whichever is installed."""
    with command_errors():
        from zeromesh.apps.evaluate.evaluated_model import EvaluatedModel
        from zeromesh.apps.evaluate.serve_model import serve as hand_over

        hand_over(EvaluatedModel(model, tag), None if engine is None else engine.value, port, arguments or [])
