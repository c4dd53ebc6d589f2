"""A configuration as DeepSpeed reads it, made into one that loads strictly, with every change and its reason.

``zeromesh.initialize`` is strict: what it does not know is an error. DeepSpeed ignores unknown keys, and some of its
features change speed or memory alone. ``adopt`` is how its alias and ``zeromesh config --fix`` read a file::

    document, changes = adopt("ds_config.json")
    warn_of(changes)  # on one rank
    engine, *_ = zeromesh.initialize(model=model, config=document)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.base.words import show
from zeromesh.config.catalogue import Entry, suggest
from zeromesh.config.deepspeed_defaults import DIFFERENCES, differences
from zeromesh.config.document import SCHEMA, is_unset, read_object, whole_document
from zeromesh.config.optimizer_names import EXACT_OPTIMIZERS
from zeromesh.config.settings import Settings, entries
from zeromesh.config.special_keys import (
    EXACT,
    GONE,
    RENAMED,
    UNREAD,
    UNSET,
    WITHOUT_EFFECT,
    enables,
    look_up,
    sections_of,
)

_log = logging.getLogger("zeromesh")

_ZERO = "zero_optimization"
_WORDS = {"true": True, "false": False}


class Change(NamedTuple):
    """One change of a document; ``now`` is None where the key is left out."""

    path: str
    was: Any
    now: str | None
    why: str
    absent: bool = False  # the document does not have the key

    def __str__(self) -> str:
        if self.absent:
            state = "is not in the file" if self.was is None else f"is {show(self.was)}"
            return f"{self.path} {state}; DeepSpeed's default {self.now} is used ({self.why})"
        return f"{self.path}: was {show(self.was)}, is {self.now or 'left out'}: {self.why}"


def adopt(
    source: str | Path | Mapping[str, Any], settings: type[Settings] = Settings
) -> tuple[dict[str, Any], list[Change]]:
    """Return a configuration without what only DeepSpeed takes, "auto" still in it, and the changes.

    What the result cannot express is left for the strict reader, ``settings.load``, to refuse. A document that loads
    strictly is not changed, nor are sections that ``settings`` leave to an application.

    Raises:
        ConfigError: as ``document.read_document``.
    """
    document = whole_document(source)
    _take_copies_back(document)  # no change of what the user wrote
    keys = entries(settings)
    # Unknown keys are known only after all others have their place.
    steps = (_dotted, partial(_switches, keys), _optimizer, _experts, _idle, partial(_unknown, keys))
    return document, [change for step in steps for change in step(document)]


def fixed(
    source: str | Path | Mapping[str, Any], settings: type[Settings] = Settings
) -> tuple[dict[str, Any], list[Change]]:
    """Return the same with the other names of keys among the changes, for a file that is to be written anew."""
    original = read_object(Path(source)) if isinstance(source, str | Path) else source
    names = [
        Change(old, look_up(original, old)[1], f"renamed to {new}", "the key has that name here")
        for old, new in RENAMED.items()
        if look_up(original, old)[0]
    ]
    document, changes = adopt(source, settings)
    return document, names + changes + fill_defaults(document)


def fill_defaults(document: dict[str, Any], autos: bool = False) -> list[Change]:
    """Write DeepSpeed's defaults into a document for keys that it leaves out where ours would give another result.

    Args:
        document: changed in place.
        autos: also in place of "auto", which nothing will fill in.
    """
    unset = {row.path for row in DIFFERENCES if is_unset(look_up(document, row.path)[1])} if autos else set()
    for path in unset:
        _drop(document, path, "")
    changes = []
    for row in [*differences(document)]:
        _set(document, row.path, row.theirs)
        was = UNSET if row.path in unset else None
        changes.append(Change(row.path, was, show(row.theirs), row.note, absent=True))
    return changes


def share_layers(document: dict[str, Any], ranks: int) -> None:
    """Let so many ranks share each layer, unless the document says how many do."""
    theirs = look_up(document, "tensor_parallel.autotp_size")[1], look_up(document, "mesh.tensor")[1]
    if not any(value is not None and not is_unset(value) for value in theirs):
        _set(document, "mesh.tensor", ranks)


def warn_of(changes: Sequence[Change]) -> None:
    """Warn of all changes: each default that is filled in, and in one message of what is read otherwise."""
    for change in changes:
        if change.absent:
            _log.warning("%s", change)
    lines = "".join(f"\n  {change}" for change in changes if not change.absent)
    if lines:
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
        there, section_value = look_up(document, name)
        if there and not is_unset(section_value):
            yield Change(name, value, None, f"its section has {show(section_value)}")
        elif all(isinstance(look_up(document, part)[1] or {}, dict) for part in sections_of(name) - {name}):
            _set(document, name, value)
            yield Change(name, value, "moved into its section", "a key with dots at the top level is the path of a key")
        else:
            yield Change(name, value, None, "its section is not an object")


def _take_copies_back(document: dict[str, Any]) -> None:
    """Take back the number of ranks that share a batch, which ``for_trainer`` writes in place of a tensor group's."""
    sizes = [look_up(document, f"mesh.{axis}")[1] for axis in ("tensor", "context", "pipeline")]
    path = "tensor_parallel.autotp_size"
    if all(type(size) is int for size in sizes) and look_up(document, path)[1] == prod(sizes):
        _drop(document, path, "mesh has the sizes")


def _switches(keys: dict[str, Entry], document: dict[str, Any]) -> Iterator[Change]:
    """Read 0, 1, "true" and "false" of keys that are true or false."""
    for path, value, section in _keys(document, keys):
        name = path.rpartition(".")[2]
        if path in keys and keys[path].rule == "true or false" and type(value) in (int, str):
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


_OF_AUTOEP = (
    "enabled",
    "autoep_size",
    "preset_model",
    "moe_layer_pattern",
    "expert_pattern",
    "router_pattern",
    "use_grouped_mm",
    "grouped_mm_backend",
    "load_balance_coeff",
)
"""Keys that say where experts are and how they are multiplied; others change what routers compute."""


def _experts(document: dict[str, Any]) -> Iterator[Change]:
    """Take the number of ranks that share experts from the section of AutoEP."""
    section = look_up(document, "expert_parallel")[1]
    if not isinstance(section, Mapping) or not enables(section):
        return
    changing = [name for name, value in section.items() if name not in _OF_AUTOEP and value not in (None, UNSET)]
    size = section.get("autoep_size", 1)
    # Unless the coefficient is null, AutoEP adds a bias to routers, which changes results.
    if changing or section.get("load_balance_coeff", 0) is not None or type(size) is not int or size < 1:
        return
    there, ranks = look_up(document, "mesh.expert")
    if there and ranks != size and not is_unset(ranks):
        return
    yield _drop(document, "expert_parallel", "")._replace(
        now=f"mesh.expert = {size}", why="it changes where experts are, which are found by their structure"
    )
    if size > 1:
        _set(document, "mesh.expert", size)


def _idle(document: dict[str, Any]) -> Iterator[Change]:
    """Leave out what changes speed or memory alone, makes results less exact, or is not read by DeepSpeed either."""
    for path, is_idle, why in _IDLE:
        there, value = look_up(document, path)
        if there and not is_unset(value) and is_idle(value, document):
            yield _drop(document, path, why)


_Test = Callable[[Any, Mapping[str, Any]], bool]


def _number(section: Any, name: str) -> float:
    value = section.get(name) if isinstance(section, dict) else None
    return value if type(value) is int else inf


def _offloads_below(least: int) -> _Test:
    return lambda value, document: (
        (value is True or (isinstance(value, dict) and value.get("device") in ("cpu", "nvme")))
        and _number({"stage": 0} | document[_ZERO], "stage") < least
    )


_UNSHARDED = f"DeepSpeed reads it only if {_ZERO}.stage is {{}} or more"
_LEAST = {"offload_optimizer": 1, "cpu_offload": 1, "offload_param": 3, "cpu_offload_param": 3}

_IDLE: tuple[tuple[str, _Test, str], ...] = (
    *((path, lambda value, _: value not in (None, False), why) for path, why in EXACT.items()),
    *((f"{_ZERO}.{name}", _offloads_below(n), _UNSHARDED.format(n)) for name, n in _LEAST.items()),
    ("flops_profiler", lambda section, _: _number(section, "profile_step") < 1, "no update has this profile_step"),
    (
        "fp16.hysteresis",
        lambda value, document: value == 0 and look_up(document, "fp16.loss_scale")[1] not in (None, 0, UNSET),
        "fp16.loss_scale is fixed",
    ),
    (
        "bf16.bf16_master_weights_and_grads",
        lambda value, document: value is True and look_up(document, "bf16.bf16_optimizer_states")[1] is not True,
        EXACT["fp16.fp16_master_weights_and_grads"],
    ),
    (
        "data_efficiency.data_routing",
        lambda section, document: enables(section) and look_up(document, "data_efficiency.enabled")[1] is True,
        "layers drop tokens only after convert_to_random_ltd, which is refused",
    ),
)
"""Keys, the values with which a run does not need them, and why."""


def _unknown(keys: dict[str, Entry], document: dict[str, Any]) -> Iterator[Change]:
    """Leave out unknown keys, outside of ``zero_optimization``: DeepSpeed refuses them in this section alone."""
    for path, value, _ in _keys(document, keys):
        # A key that is refused is not unknown, and what is "auto" is read as if it were not there.
        if path in keys or path in GONE or path == SCHEMA or sections_of(path) & UNREAD or is_unset(value):
            continue
        near = suggest(keys, path)
        if not path.startswith(f"{_ZERO}."):
            hint = f"; did you mean {near}?" if near else ""
            yield _drop(document, path, f"no key has this name, so DeepSpeed ignores it{hint}")
        elif near in WITHOUT_EFFECT or value in (None, False, "none"):
            # Whatever was meant changes nothing here.
            reason = f"{near} has no effect" if near in WITHOUT_EFFECT else f"{show(value)} asks for nothing"
            yield _drop(document, path, f"no key has this name, and {reason}")


def _keys(
    section: dict[str, Any], keys: dict[str, Entry], prefix: str = ""
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the path, the value and the section of each key, except inside tables, whose keys are the user's."""
    for name, value in list(section.items()):
        path = f"{prefix}{name}"
        yield path, value, section
        entry = keys.get(path)
        if isinstance(value, dict) and entry is not None and entry.section:
            yield from _keys(value, keys, f"{path}.")
