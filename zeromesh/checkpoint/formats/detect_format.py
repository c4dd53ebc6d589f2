"""Formats of checkpoints, and which one a folder or a file is of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.base.files import read_text
from zeromesh.checkpoint.checkpoint_folder import locate


class CheckpointFormat(NamedTuple):
    """One format: how it is called, by which files it is known, and the module that reads and writes it."""

    name: str
    title: str
    pattern: str  # of a file in its folder; the first that is there tells the format
    module: str
    reader: str = "read"  # its function that reads
    in_file: bool = False  # the checkpoint is that file alone
    numbers: bool = False  # the optimizer may number its parameters, whose names a model tells


_ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("formats.json").read_text(encoding="utf-8"))

FORMATS = tuple(CheckpointFormat(**row) for row in _ROWS)
"""Formats that are read, the more specific first."""

_LATEST = ("latest_universal", "latest", "latest_checkpointed_iteration.txt")
"""Files in a folder of checkpoints that name one of them."""

RUN = "checkpoints"
"""Folder of the checkpoints of a run of ``zeromesh train``."""


def detect(path: Path, tag: str | None = None) -> tuple[CheckpointFormat, Path] | None:
    """Return the format of a checkpoint, and its own folder or file; None if it is of no known format.

    Args:
        path: a checkpoint, a folder of checkpoints with a file that names the latest, or the folder of a run.
        tag: the name of a checkpoint in the folder.
    """
    for folder in _candidates(path, tag):
        for kind in FORMATS:
            if folder.is_dir() and any(folder.glob(kind.pattern)):
                return kind, folder
            if folder.is_file() and folder.match(kind.pattern):
                return kind, folder if kind.in_file else folder.parent
    return None


def _only(files: list[Path]) -> Path:
    """Return the file that is meant of several."""
    chosen = [path for path in files if path.stem == "last"] or files
    if len(chosen) > 1:
        names = ", ".join(path.name for path in chosen[:3])
        raise ValueError(f"{files[0].parent} has {len(chosen)} checkpoints ({names}); name one of these files")
    return chosen[0]


def _candidates(path: Path, tag: str | None) -> Iterator[Path]:
    """Yield the places where a checkpoint of a path may be."""
    folders = (path, path / RUN)
    if tag is not None:
        yield from (locate(folder, tag) for folder in folders)
        return
    for folder in folders:
        for file in (folder / name for name in _LATEST):
            if file.is_file():
                named = read_text(file, errors="replace").strip()
                # Megatron's file, the only .txt, has the bare number of its iteration.
                yield locate(folder, f"iter_{named:0>7}" if file.suffix else named)
    # Last: beside checkpoints there may be an exported model.
    yield path


def require_format(path: Path, tag: str | None) -> tuple[CheckpointFormat, Path]:
    """Return what ``detect`` finds; raise ValueError, with what was looked for, if that is nothing."""
    detected = detect(path, tag) if path.exists() else None
    if detected is None:
        looked = "; ".join(f"{kind.title} ({kind.pattern})" for kind in FORMATS)
        what = "does not exist" if not path.exists() else "has no checkpoint" + (f" {tag!r}" if tag else "")
        raise ValueError(f"{str(path)!r} {what}; looked for {looked}. Name a folder that has one of these files")
    kind, place = detected
    return kind, _only(sorted(place.glob(kind.pattern))) if kind.in_file and place.is_dir() else place


def foreign(path: Path, tag: str | None) -> str | None:
    """Return the remedy where a folder has a checkpoint of another library; None otherwise."""
    detected = detect(path, tag)
    # Weights alone are no checkpoint of a run, which may keep its first one beside them.
    if detected is None or detected[0].name in ("zeromesh", "hf"):
        return None
    return (
        f"{detected[1]} is {detected[0].title}: run `zeromesh convert {path} FOLDER` first, which writes one that "
        "loads on any number of ranks at any ZeRO stage, and load FOLDER"
    )
