"""``zeromesh inspect``: contents of checkpoints, and whether they are complete."""

from __future__ import annotations

import json
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from zeromesh.apps.train.screen import make_console, write
from zeromesh.base.files import read_text
from zeromesh.base.placement import ROWS
from zeromesh.base.words import bytes_text, counted
from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.checkpoint_folder import LATEST, is_left, order
from zeromesh.checkpoint.manifest import MANIFEST

CHECKPOINTS = "checkpoints"  # in the folder of a run
PIPED_WIDTH = 1000  # characters of a line in a file or a pipe, where nothing should be cut off
MOST_FILES = 3  # of a tensor that a line names


def inspect(path: Path, as_json: bool, verify: bool) -> bool:
    """Print checkpoints, and the tensors of the latest one that can be used; return whether all are complete."""
    listed = [_summary(folder, verify) for folder in _checkpoints(path)]
    listed.sort(key=lambda row: order(Path(row["path"]), -1 if row["step"] is None else row["step"]))
    usable = [row for row in listed if row["problem"] is None and not row["left"]]
    shown = next((row for row in usable if row["latest"]), usable[-1] if usable else None)
    details = _details(Reader(Path(shown["path"]))) if shown is not None else None
    if as_json:
        write(json.dumps({"verified": verify, "checkpoints": listed, "shown": details}, indent=1) + "\n")
    else:
        _show(make_console(PIPED_WIDTH), listed, details, verify)
    # A draft of a save that was interrupted, or is under way, is no damage.
    return all(row["problem"] is None or row["left"] for row in listed)


def _checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a path, with incomplete ones."""
    for folder in (path, path / CHECKPOINTS):
        inside = [child for child in folder.iterdir() if child.is_dir()] if folder.is_dir() else []
        checkpoints = [folder] if _is_checkpoint(folder) else [*filter(_is_checkpoint, inside)]
        if checkpoints:
            return checkpoints
    raise ValueError(
        f"{str(path)!r} holds no checkpoint; name the folder of a run, a folder of checkpoints, or one checkpoint"
    )


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or any(path.glob("rank_*.safetensors"))


def _summary(folder: Path, verify: bool) -> dict[str, Any]:
    named = folder.parent / LATEST
    files = [file for file in folder.iterdir() if file.is_file()]
    summary: dict[str, Any] = {
        "tag": folder.name,
        "path": str(folder),
        "latest": named.is_file() and read_text(named, errors="replace").strip() == folder.name,
        "left": is_left(folder),
        "bytes": sum(file.stat().st_size for file in files),
        "modified": folder.stat().st_mtime,
        "step": None,
        "problem": None,
    }
    try:
        reader = Reader(folder)
        summary["step"] = reader.manifest.get("global_steps")
        if verify:  # reads every byte, which may take minutes
            reader.verify()
        else:
            reader.require_files()
    except (ValueError, OSError) as error:
        return {**summary, "problem": str(error)}
    manifest = reader.manifest
    return {
        **summary,
        "format": manifest["format"],
        "written": manifest.get("written"),
        "world_size": manifest.get("world_size"),
        "row": _row(manifest.get("placement")),
    }


def _row(placement: dict[str, str] | None) -> int | None:
    """Return the ZeRO stage of placements; None if there is none."""
    numbers = {(row.parameter.value, row.gradient.value, row.optimizer.value): number for number, row in ROWS.items()}
    return numbers.get((placement["parameter"], placement["gradient"], placement["optimizer"])) if placement else None


def _details(reader: Reader) -> dict[str, Any]:
    manifest = reader.manifest
    sizes: dict[str, int] = defaultdict(int)
    tensors = []
    for name in sorted(reader.names):
        shape, dtype = reader.shape(name), reader.dtype(name)
        size = prod(shape) * dtype.itemsize
        sizes[name.split("/")[0]] += size
        tensors.append(
            {
                "name": name,
                "shape": list(shape),
                "dtype": str(dtype).removeprefix("torch."),
                "bytes": size,
                "files": reader.files(name),
            }
        )
    plain = ("zeromesh", "mesh", "optimizer", "data", "loss_scaler", "client_state", "model", "parameters", "tied")
    return {
        "path": str(reader.folder),
        **{key: manifest.get(key) for key in plain},
        "bytes_by_kind": sizes,
        "tensors": tensors,
    }


def _show(console: Console, listed: list[dict[str, Any]], details: dict[str, Any] | None, verify: bool) -> None:
    table = _table("checkpoint", "step", "ranks", "ZeRO", "written", "format", "size", "")
    for row in listed:
        state = "left over" if row["left"] else "damaged" if row["problem"] else "latest" if row["latest"] else ""
        keys = ("step", "world_size", "row", "written", "format")
        values = ["" if row.get(key) is None else str(row[key]) for key in keys]
        table.add_row(row["tag"], *values, bytes_text(row["bytes"]), state)
    console.print(table)
    for row in listed:
        if row["problem"]:
            console.print(f"{row['tag']}: {row['problem']}")
    if verify:
        sound = sum(row["problem"] is None for row in listed)
        total = counted(len(listed), "checkpoint")
        console.print(f"verified {sound} of {total}: they hold what was written, by their hashes (SHA-256)")
    if details is not None:
        _show_details(console, details)


def _show_details(console: Console, details: dict[str, Any]) -> None:
    console.print(f"\n{details['path']}")
    sizes = [f"{kind} {bytes_text(size)}" for kind, size in details["bytes_by_kind"].items()]
    console.print(f"  bytes: {', '.join(sizes)}")
    if details["optimizer"] != "NoneType":
        named = details["optimizer"]
        console.print(f"  optimizer: {' or '.join(named) if isinstance(named, list) else named}")
    if details["data"]:
        console.print("  data: pass {number}, {samples} of {length} samples".format_map(details["data"]))
    states = defaultdict(list)
    for tensor in details["tensors"]:
        if tensor["name"].startswith("optimizer/"):
            _, key, name = tensor["name"].split("/", 2)
            states[name].append(key)
    table = _table("tensor", "shape", "dtype", "optimizer", "files")
    for tensor in details["tensors"]:
        kind, name = tensor["name"].split("/", 1)
        if kind in ("parameter", "buffer"):
            keys = states[name] if kind == "parameter" else []
            shape = " x ".join(map(str, tensor["shape"])) or "scalar"
            table.add_row(tensor["name"], shape, tensor["dtype"], ", ".join(keys), _files(tensor["files"]))
    console.print(table)


def _files(names: list[str]) -> str:
    short = [name.removesuffix(".safetensors") for name in names]
    return ", ".join(short) if len(short) <= MOST_FILES else f"{short[0]} to {short[-1]}, {len(short)} files"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
