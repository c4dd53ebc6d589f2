"""``zeromesh config``: the settings of a file, and a file for DeepSpeed made into one that loads here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from zeromesh.apps.train.screen import write
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.files import read_text
from zeromesh.config.adopt import fixed
from zeromesh.config.document import plain_json
from zeromesh.config.errors import ConfigError
from zeromesh.config.printing import autos


def show(path: Path) -> None:
    """Write every key of a file's settings with its value, as JSON."""
    write(TrainSettings.load(path).to_json() + "\n")


def fix(path: Path) -> None:
    """Write a file as one that loads strictly and means the same; each change goes to standard error."""
    document, changes = fixed(path, TrainSettings)
    # Before anything is written: what cannot be expressed here must not become a file.
    try:
        TrainSettings.load(document)
    except ConfigError as error:
        raise ConfigError(error.problems, str(path)) from None
    text = read_text(path, "utf-8-sig")
    if plain_json(text) != text or "_comment" in text:
        print("comments are left out: JSON has none", file=sys.stderr)
    for change in changes:
        print(change, file=sys.stderr)
    left = ", ".join(autos(document))
    if left:
        print(f'"auto" stays, for a Trainer or the planner to fill in: {left}', file=sys.stderr)
    write(json.dumps(document, indent=2) + "\n")
