"""``zeromesh serve``: a run or a model, handed over to an engine for inference that is installed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from zeromesh.apps.evaluate.evaluated_model import EvaluatedModel
from zeromesh.apps.train.export_run import export_files
from zeromesh.apps.train.screen import make_console
from zeromesh.checkpoint.checkpoint_folder import locate
from zeromesh.checkpoint.manifest import MANIFEST
from zeromesh.checkpoint.weights.export import ADAPTERS
from zeromesh.checkpoint.weights.pretrained import is_model_id, model_folder

SERVED = "serve"  # folder of a run, with an export of each checkpoint that was served

ENGINES: dict[str, tuple[Callable[[str, int], list[str]], str]] = {
    "vllm": (lambda folder, port: ["vllm", "serve", folder, "--port", str(port)], "pip install vllm"),
    "transformers": (
        lambda folder, port: ["transformers", "serve", folder, "--port", str(port)],
        "pip install 'transformers[serving]'",
    ),
}
"""Command of each engine, of which the first that is installed is taken, and how it is installed."""


def serve(model: EvaluatedModel, engine: str | None, port: int, arguments: Sequence[str]) -> None:
    """Replace this process by an engine that serves the model; raise ValueError if there is none."""
    assert model.run is None or model.checkpoint is not None  # raises for a folder that is neither a run nor a model
    name, program = _program(engine)
    folder = served_folder(model)
    command = [*ENGINES[name][0](str(folder), port), *arguments]
    make_console().print(f"http://localhost:{port}/v1 (OpenAI's API): {' '.join(command)}", soft_wrap=True)
    os.execv(program, command)


def _program(engine: str | None) -> tuple[str, str]:
    """Return the name of the engine, and the path of its program."""
    for name in ENGINES if engine is None else [engine]:
        # Programs of this environment count also where it is not activated.
        places = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
        program = shutil.which(ENGINES[name][0]("", 0)[0], path=places)
        # transformers has the command without what its server needs.
        if program is not None and (name != "transformers" or all(map(find_spec, ("fastapi", "uvicorn")))):
            return name, program
    lines = " or ".join(ENGINES[name][1] for name in (ENGINES if engine is None else [engine]))
    raise ValueError(
        f"no engine for inference is installed{'' if engine is None else f' as {engine}'}: {lines}; zeromesh chat "
        "needs none"
    )


def served_folder(model: EvaluatedModel) -> Path:
    """Return a folder of transformers with the model, with adapters merged; of a run, it is written once."""
    if model.run is None:
        folder = model_folder(str(model.path)) if is_model_id(model.path) else model.path
        if (folder / ADAPTERS[0]).is_file():
            raise ValueError(
                f"{str(folder)!r} has adapters alone, which are served with their model: write both by zeromesh "
                "export RUN FOLDER --merge, and serve that folder"
            )
        return folder.absolute()
    assert model.checkpoint is not None
    folder = (model.run.path / SERVED / model.checkpoint).absolute()
    # The configuration comes last, so that a folder with it is whole. A tag such as best may name another one later.
    written, saved = folder / "config.json", locate(model.run.checkpoints, model.checkpoint) / MANIFEST
    if not written.is_file() or written.stat().st_mtime < saved.stat().st_mtime:
        shutil.rmtree(folder, ignore_errors=True)
        export_files(model.path, folder, model.checkpoint, merge=model.run.settings().lora is not None)
    return folder
