"""ZeroMesh's own checkpoints, as a source and a target of conversions."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from zeromesh.base.version import VERSION
from zeromesh.checkpoint.boxes import Box, Reader
from zeromesh.checkpoint.checkpoint_folder import Draft, require_free
from zeromesh.checkpoint.contents import options, plain_numbers
from zeromesh.checkpoint.formats.form import Contents
from zeromesh.checkpoint.manifest import BY_PARAMETER, MANIFEST, OF_STAGES, dtype_name, require_run
from zeromesh.checkpoint.packing import StoredTensors, pack, unpack
from zeromesh.checkpoint.rank_manifests import write_part
from zeromesh.checkpoint.shard_writer import write_shard

_log = logging.getLogger(__name__)

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def read(folder: Path) -> Contents:
    """Return the contents of a checkpoint; no tensor is read yet, and the files are there and whole."""
    reader = Reader(folder)
    reader.require_files()
    require_run(folder, reader.manifest)
    manifest = reader.manifest
    contents = Contents("a checkpoint of ZeroMesh")
    for name in sorted(reader.names):
        if name.startswith(("parameter/", "buffer/", "optimizer/")):
            shape, dtype = reader.shape(name), reader.dtype(name)
            if name.startswith("optimizer/") and dtype is torch.bfloat16:  # other libraries take states in fp32
                dtype = torch.float32
            contents.parts.append(Box(name, shape, dtype, 0, prod(shape), partial(reader.tensor, name)))
    parameters = manifest.get("parameters", {})
    contents.frozen = {name for name, facts in parameters.items() if not facts["trainable"]}
    contents.dtypes = {name: getattr(torch, facts["dtype"]) for name, facts in parameters.items()}
    contents.tied = dict(manifest.get("tied", {}))
    contents.groups = [unpack(group) for group in manifest["groups"]]
    contents.members = dict(manifest.get("members", {}))
    if not contents.members and len(contents.groups) == 1:
        contents.members = dict.fromkeys((name for name in parameters if name not in contents.frozen), 0)
    for name, numbers in manifest["scalars"].items():
        contents.numbers[name] = {key: _number(value) for key, value in numbers.items()}
    named = manifest["optimizer"]
    contents.optimizer = named if isinstance(named, str) and named != "NoneType" else None
    contents.progress = {key: manifest[key] for key in COUNTERS if key in manifest}
    if manifest["scheduler"]:
        contents.scheduler = unpack(manifest["scheduler"]), manifest.get("scheduler_type")
    contents.loss_scale = manifest["loss_scaler"]
    contents.client = unpack(manifest["client_state"], reader.tensor)
    contents.extra = unpack(manifest.get("extra", {}), reader.tensor)
    if manifest.get("data"):
        contents.left.append("the position in the training data has no place in other formats")
    return contents


def _number(saved: Any) -> Any:
    return torch.tensor(saved[0], dtype=getattr(torch, saved[1])) if isinstance(saved, list) else saved


def write(contents: Contents, folder: Path, advance: Callable[[int], None]) -> Path:
    """Write a checkpoint that any layout loads, tensor by tensor; ``advance`` is told the bytes."""
    draft = Draft(folder, f"global_step{contents.progress.get('global_steps', 0)}")
    if (draft.final / MANIFEST).exists():
        raise FileExistsError(
            errno.EEXIST, f"{draft.final} is a checkpoint already, and is not overwritten; choose another folder"
        )
    require_free(draft.final)
    client, of_client = _packed(contents, contents.client, "client_state")
    extra, of_extra = _packed(contents, contents.extra, "extra/0")
    boxes = [*contents.parts, *(Box.whole(name, value) for name, value in (of_client | of_extra).items())]
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as resources:
        draft.hold(resources)
        try:
            draft.begin(sum(box.nbytes for box in boxes))
            shard = write_shard(draft.path, 0, boxes, advance)
            state = _manifest(contents, client) | {"extra": extra}
            write_part(draft.path, 0, shard, state)
            draft.finish({key: value for key, value in state.items() if key not in BY_PARAMETER + OF_STAGES}, 1)
        except BaseException:
            draft.discard()
            raise
    return draft.final


def _packed(contents: Contents, values: Mapping[str, Any], kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return values as JSON, and their tensors; those that cannot be kept are told and left out."""
    packed: dict[str, Any] = {}
    apart = StoredTensors(kind)
    for key, value in values.items():
        before = {**apart}
        try:
            packed[str(key)] = pack(value, f"{kind}[{key!r}]", apart)
        except (TypeError, RecursionError) as error:
            _log.warning("not converted: %s", error)
            apart.clear()
            apart.update(before)
    return packed, {name: tensor for name, tensor in apart.items() if tensor.numel()}


def _manifest(contents: Contents, client: Any) -> dict[str, Any]:
    progress, dtypes = dict(contents.progress), contents.dtypes
    progress.setdefault("micro_steps", progress.get("global_steps", 0))
    # A run that knows its batch computes the samples itself.
    counters = {key: progress.get(key, 0) for key in COUNTERS if key != "global_samples" or progress.get(key)}
    stored = {part.name.partition("/")[2]: part.dtype for part in contents.parts if part.name.startswith("parameter/")}
    state, kind = contents.scheduler or (None, None)
    named = {"scheduler_type": kind} if kind or state is None else {}
    return (
        counters
        | named
        | {
            "zeromesh": VERSION,
            "imported": contents.source,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "data": None,
            "loss_scaler": contents.loss_scale,
            "scheduler": None if state is None else pack(dict(state), "the scheduler's state"),
            "optimizer": contents.optimizers if contents.groups else "NoneType",
            "groups": [pack(options(group)) for group in contents.groups],
            "members": contents.members,
            "client_state": client,
            "model": {},
            "parameters": {
                name: {"dtype": dtype_name(dtypes.get(name, dtype)), "trainable": name not in contents.frozen}
                for name, dtype in stored.items()
            },
            "tied": contents.tied,
            "scalars": _scalars(contents),
        }
    )


def _scalars(contents: Contents) -> dict[str, Any]:
    """Return the single numbers of the optimizer; each has the step, which some libraries keep for all at once."""
    scalars: dict[str, Any] = {}
    done = contents.progress.get("global_steps", 0) - contents.progress.get("skipped_steps", 0)
    for name in contents.members | contents.numbers:
        numbers = dict(contents.numbers.get(name, {}))
        if "exp_avg_sq" in contents.state_keys and name in contents.members:
            numbers.setdefault("step", contents.groups[contents.members[name]].get("step", done))
        scalars[name] = {
            # Torch's optimizers count their steps in tensors, whatever the other library did.
            key: [float(plain_numbers(value)), "float32"]
            if key == "step"
            else [value.item(), dtype_name(value.dtype)]
            if isinstance(value, torch.Tensor)
            else value
            for key, value in numbers.items()
        }
    return scalars
