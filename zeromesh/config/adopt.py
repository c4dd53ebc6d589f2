"""A configuration as DeepSpeed reads it, made into one that loads strictly, with every change and its reason.

``zeromesh.initialize`` is strict: what it does not know is an error. DeepSpeed ignores unknown keys, and some of its
features change speed or memory alone. ``adopt`` is how its alias and ``zeromesh config --fix`` read a file::

    document, changes = adopt("ds_config.json")
    warn_of(changes)  # on one rank
    engine, *_ = zeromesh.initialize(model=model, config=document)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.config.catalogue import suggest
from zeromesh.config.document import SCHEMA, is_unset, read_object, whole_document
from zeromesh.config.errors import show
from zeromesh.config.names import EXACT_OPTIMIZERS
from zeromesh.config.settings import entries
from zeromesh.config.tables import EXACT, GONE, RENAMED, UNREAD, WITHOUT_EFFECT, look_up, sections_of

_log = logging.getLogger("zeromesh")

_ZERO = "zero_optimization"
_WORDS = {"true": True, "false": False}


class Change(NamedTuple):
    """One change of a document; ``now`` is None where the key is left out."""

    path: str
    was: Any
    now: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.path}: was {show(self.was)}, is {self.now or 'left out'}: {self.why}"


def adopt(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], list[Change]]:
    """Return a configuration without what only DeepSpeed takes, "auto" still in it, and the changes.

    What the result cannot express is left for the strict reader to refuse, so ``Settings.load`` may still raise. A
    document that loads strictly is not changed.

    Raises:
        ConfigError: as ``document.read_document``.
    """
    document = whole_document(source)
    # Unknown keys are known only after all others have their place.
    steps = (_copies, _dotted, _switches, _optimizer, _exact, _offload, _profiler, _unknown)
    return document, [change for step in steps for change in step(document)]


def fixed(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], list[Change]]:
    """Return the same with the other names of keys among the changes, for a file that is to be written anew."""
    given = read_object(Path(source)) if isinstance(source, str | Path) else source
    found = {old: look_up(given, old) for old in RENAMED}
    names = [
        Change(old, value, f"renamed to {RENAMED[old]}", "the key has that name here")
        for old, (there, value) in found.items()
        if there
    ]
    document, changes = adopt(source)
    return document, names + changes


def share_layers(document: dict[str, Any], ranks: int) -> None:
    """Let so many ranks share each layer, unless the document says how many do."""
    theirs = look_up(document, "tensor_parallel.autotp_size")[1], look_up(document, "mesh.tensor")[1]
    if not any(value is not None and not is_unset(value) for value in theirs):
        _set(document, "mesh.tensor", ranks)


def warn_of(changes: Sequence[Change]) -> None:
    """Warn of all changes in one message."""
    if changes:
        lines = "".join(f"\n  {change}" for change in changes)
        _log.warning("these keys of the configuration are read otherwise than they stand:%s", lines)


def _set(document: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        document = document.setdefault(section, {})
    document[name] = value


def _drop(document: dict[str, Any], path: str, why: str) -> Change:
    """Take a key out of a document."""
    parent, _, name = path.rpartition(".")
    section = look_up(document, parent)[1] if parent else document
    return Change(path, section.pop(name), None, why)


def _dotted(document: dict[str, Any]) -> Iterator[Change]:
    """Read ``"zero_optimization.stage"`` at the top level as the path of a key; the section's own value stays."""
    for name in [name for name in document if "." in name]:
        value = document.pop(name)
        there, own = look_up(document, name)
        if there and not is_unset(own):
            yield Change(name, value, None, f"its section has {show(own)}")
        elif all(isinstance(look_up(document, part)[1] or {}, dict) for part in sections_of(name) - {name}):
            _set(document, name, value)
            yield Change(name, value, "moved into its section", "a key with dots at the top level is the path of a key")
        else:
            yield Change(name, value, None, "its section is no object")


def _copies(document: dict[str, Any]) -> Iterator[Change]:
    """Take back the number of ranks that share a batch, which ``for_trainer`` writes in place of a tensor group's."""
    sizes = [look_up(document, f"mesh.{axis}")[1] for axis in ("tensor", "context", "pipeline")]
    path = "tensor_parallel.autotp_size"
    if all(type(size) is int for size in sizes) and look_up(document, path)[1] == prod(sizes):
        _drop(document, path, "mesh has the sizes")
    return iter(())  # nothing that the user wrote has changed


def _switches(document: dict[str, Any]) -> Iterator[Change]:
    """Read 0, 1, "true" and "false" of keys that are true or false."""
    for path, value, section in _keys(document):
        name = path.rpartition(".")[2]
        if path in entries() and entries()[path].rule == "true or false" and type(value) in (int, str):
            new = _WORDS.get(value.lower()) if isinstance(value, str) else bool(value) if value in (0, 1) else None
            if new is not None:
                section[name] = new
                yield Change(path, value, show(new), "the key is true or false")


def _optimizer(document: dict[str, Any]) -> Iterator[Change]:
    """Replace an optimizer that is approximate, or needs another package, by the exact one of the same update."""
    section = document.get("optimizer")
    kind = section.get("type") if isinstance(section, dict) else None
    row = EXACT_OPTIMIZERS.get(kind.lower()) if isinstance(kind, str) else None
    if row is None or not isinstance(section, dict):
        return
    section["type"] = row.name
    yield Change("optimizer.type", kind, show(row.name), row.why)
    params = section.setdefault("params", {})
    if isinstance(params, dict):
        for name in [name for name in params if name in row.without]:
            yield Change(f"optimizer.params.{name}", params.pop(name), None, f"{row.name} takes no such argument")
        params |= row.params


def _exact(document: dict[str, Any]) -> Iterator[Change]:
    """Leave out what changes speed or memory alone, or makes results less exact."""
    for path, why in EXACT.items():
        there, value = look_up(document, path)
        if there and value not in (None, False) and not is_unset(value):
            yield _drop(document, path, why)


def _offload(document: dict[str, Any]) -> Iterator[Change]:
    """Leave out what is offloaded at a stage that does not shard it: DeepSpeed does not look there."""
    zero = document.get(_ZERO)
    if not isinstance(zero, dict) or not isinstance(zero.get("stage", 0), int):
        return
    for name, old, least in (("offload_optimizer", "cpu_offload", 1), ("offload_param", "cpu_offload_param", 3)):
        for key in (name, old):
            value = zero.get(key)
            on = value.get("device") in ("cpu", "nvme") if isinstance(value, dict) else value is True
            if on and zero.get("stage", 0) < least:
                yield _drop(document, f"{_ZERO}.{key}", f"DeepSpeed reads it only if {_ZERO}.stage is {least} or more")


def _profiler(document: dict[str, Any]) -> Iterator[Change]:
    section = document.get("flops_profiler")
    step = section.get("profile_step") if isinstance(section, dict) else None
    # No update has such a number, so DeepSpeed never profiles.
    if isinstance(section, dict) and type(step) is int and step < 1:
        yield _drop(document, "flops_profiler.profile_step", "no update has this number")
        if section.get("enabled"):
            section["enabled"] = False
            yield Change("flops_profiler.enabled", True, "false", "no update is profiled")


def _unknown(document: dict[str, Any]) -> Iterator[Change]:
    """Leave out unknown keys, outside of ``zero_optimization``: DeepSpeed refuses them in this section alone."""
    for path, value, _ in _keys(document):
        # A key that is refused is not unknown, and what is "auto" is read as if it were not there.
        if path in entries() or path in GONE or path == SCHEMA or sections_of(path) & UNREAD or is_unset(value):
            continue
        near = suggest(entries(), path)
        if not path.startswith(f"{_ZERO}."):
            hint = f"; did you mean {near}?" if near else ""
            yield _drop(document, path, f"no key has this name, so DeepSpeed ignores it{hint}")
        elif near in WITHOUT_EFFECT:
            # Whatever was meant changes nothing here.
            yield _drop(document, path, f"no key has this name, and {near} has no effect")


def _keys(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the path, the value and the section of each key, except inside tables, whose keys are the user's."""
    for name, value in list(section.items()):
        path = f"{prefix}{name}"
        yield path, value, section
        known = entries().get(path)
        if isinstance(value, dict) and known is not None and known.section:
            yield from _keys(value, f"{path}.")
