"""Commands that run in the process of the tests, their files and what their runs write; tools of the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from zeromesh.apps.cli.main import app
from zeromesh.apps.train.metrics import read_metrics


def call(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    """Write ``config.json`` into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return path


def logged_losses(run: Path) -> list[float]:
    """Return the losses of training that a run has logged."""
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
