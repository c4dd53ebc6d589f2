"""Comparison of a checkpoint with a model, and the differences."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.contents import RunState, model_fields, own_buffers
from zeromesh.checkpoint.stages import of_all_stages
from zeromesh.config.errors import nearest
from zeromesh.shard.sharded import ShardedModel

_log = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]

MOST_SHOWN = 20
"""So many tensors of each kind are named when a checkpoint does not fit."""


def require_same_model(engine: RunState, reader: Reader, wanted: Shapes, strict: bool) -> None:
    """Raise ValueError unless the tensors of the checkpoint are the model's, which are ``wanted``.

    Without ``strict``, those that are in one of them only are left out, with a warning; shapes must be equal anyway.
    """
    saved = {name: reader.shape(name) for name in reader.names if name.startswith(("parameter/", "buffer/"))}
    # Of a tensor without elements there is nothing to write.
    saved, wanted = ({name: shape for name, shape in found.items() if 0 not in shape} for found in (saved, wanted))
    missing = {name: shape for name, shape in wanted.items() if name not in saved}
    extra = {name: saved[name] for name in sorted(saved) if name not in wanted}
    other = [f"{_bare(name)}: saved {saved[name]}, wanted {shape}" for name, shape in wanted.items()
             if saved.get(name, shape) != shape]  # fmt: skip
    if not strict and not other:
        if (missing or extra) and engine.mesh.rank == 0:
            kept = some(map(_bare, missing), "tensors") or "none"
            ignored = some(map(_bare, extra), "tensors") or "none"
            _log.warning("not in %s, and left as they are: %s; only in it: %s", reader.folder, kept, ignored)
        return
    lacking = _unmatched(missing, extra, "not in the checkpoint")
    unknown = _unmatched(extra, missing, "not in the model")
    if other or lacking or unknown:
        hint = "" if other else "\nload_module_strict=False loads those that are in both"
        text = "\n".join(some(lines, "like these", "\n") for lines in (other, lacking, unknown) if lines)
        raise ValueError(f"{reader.folder} is of another model:\n{text}{_fields(engine, reader)}{hint}")


def shapes(sharded: ShardedModel) -> Shapes:
    """Return the parameters and buffers of all stages. Collective."""
    found = {f"parameter/{s.name}": s.held.whole for flat in sharded.flats for s in flat.layout.segments}
    found |= {f"buffer/{name}": tuple(buffer.shape) for name, buffer in own_buffers(sharded)}
    return {name: tuple(shape) for name, shape in of_all_stages(sharded.mesh, found).items()}


def _fields(engine: RunState, reader: Reader) -> str:
    """Return a line with the differing fields of the model's own configuration; empty if none are known."""
    saved = reader.manifest.get("model", {})
    differ = [
        f"{key} (saved {saved[key]!r}, wanted {value!r})"
        for key, value in model_fields(engine).items()
        if key in saved and saved[key] != value
    ]
    return f"\nof the model's configuration, these differ: {some(differ, 'fields')}" if differ else ""


def _bare(name: str) -> str:
    return name.split("/", 1)[1]


def _unmatched(names: Shapes, others: Shapes, what: str) -> list[str]:
    """One line per tensor that has no counterpart, with the nearest name of one on the other side that could be it."""
    lines = [f"{_bare(name)}: {what}" for name in names]
    for number, (name, shape) in enumerate(list(names.items())[:MOST_SHOWN]):  # comparing words takes long
        kind = name.removesuffix(_bare(name))
        similar = nearest(_bare(name), [_bare(o) for o in others if o.startswith(kind) and others[o] == shape])
        lines[number] += f"; did you mean {similar!r}?" if similar else ""
    return lines


def some(items: Iterable[str], what: str, separator: str = ", ") -> str:
    """The first of them, and how many more there are."""
    listed = list(items)
    more = [f"and {len(listed) - MOST_SHOWN} more {what}"] if len(listed) > MOST_SHOWN else []
    return separator.join(listed[:MOST_SHOWN] + more)
