"""Special keys by dotted path; the path of a section speaks for all keys in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.base.words import show

UNSET = "auto"
"""The value that means: as if the key were not there."""

MEANT = ("activation_checkpointing.granularity", "context_parallel.strategy")
"""Keys of which "auto" is a value of its own."""

APPLICATIONS = ("model", "huggingface", "lora", "dpo", "data", "run")
"""Sections that only an application over the engine reads, here ``zeromesh train``."""

_TABLES = json.loads(Path(__file__).with_name("special_keys.json").read_text(encoding="utf-8"))

# The reference marks them, so that a file for both programs can be written.
OURS: tuple[str, ...] = (*" ".join(_TABLES["ours"]).split(), *APPLICATIONS)
"""Keys that DeepSpeed does not have."""

PLACES: dict[str, str] = {name: path for path, names in _TABLES["places"].items() for name in names.split()}
"""Keys that people look for at the top level, by names that other trainers give them."""

RENAMED: dict[str, str] = _TABLES["renamed"]
"""Other names of a key, to the one that is used here. DeepSpeed reads the keys of stage 3 under both names."""

WITHOUT_EFFECT: dict[str, str] = {
    key: reason for reason, keys in _TABLES["without_effect"].items() for key in keys.split()
}
"""Keys that are accepted and change nothing, and why. Nothing reads their values, so these are not checked."""


class NotYet(NamedTuple):
    """A key of which only some values work in this version."""

    allowed: tuple[Any, ...]
    what: str


NOT_YET = {path: NotYet(tuple(row["only"]), row["what"]) for path, row in _TABLES["not_yet"].items()}
"""Keys that need something this version does not have; a row goes when it comes."""

EXACT: dict[str, str] = _TABLES["exact"]
"""Keys that ``adopt`` leaves out, and why a run without them computes the same, or more exactly."""

GONE: dict[str, str] = _TABLES["gone"]
"""Keys of DeepSpeed, or of earlier versions, that are refused unless they are switched off, and what to do instead."""

ON_IF_THERE = ("sparse_attention", "zero_optimization.zeropp_loco_param", "run.roll_back")
"""Keys of ``GONE`` that any object or number switches on, since they have no switch inside."""

UNREAD = frozenset({*GONE, *WITHOUT_EFFECT, *NOT_YET})
"""Keys that are not in the settings."""


def sections_of(path: str) -> set[str]:
    """Return the path of a key, and those of the sections that it is in."""
    parts = path.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}


def not_yet_problems(document: Mapping[str, Any], earlier: Sequence[str]) -> list[str]:
    """Return a sentence for each key whose value needs something that this version does not have."""
    problems = []
    # A word in the place of a section asks for what the section would switch on.
    for section in dict.fromkeys(path.rpartition(".")[0] for path in NOT_YET):
        there, value = look_up(document, section)
        if section in WITHOUT_EFFECT and there and not isinstance(value, Mapping) and value not in (None, False, UNSET):
            problems.append(f"{section} = {show(value)}: must be an object; leave it out, or write {{ ... }}")
    for path, row in NOT_YET.items():
        there, value = look_up(document, path)
        # A key whose value is wrong anyway is in the list already, and is not named twice.
        if there and value not in row.allowed and not any(problem.startswith(f"{path} = ") for problem in earlier):
            allowed = " or ".join(show(option) for option in row.allowed)
            problem = f"{path} = {show(value)}: {row.what} is not in this version yet"
            problems.append(f"{problem}; leave the key out or set it to {allowed}")
    return problems


_EFFICIENCY = {
    "data_routing": "random-LTD, which drops tokens in layers, is not available; leave it out",
    "data_sampling": "choosing samples by difficulty is not available, except a curriculum over the length alone (one "
    "metric, seqlen, with clustering_type single_cluster); order the samples in the loader",
}


def efficiency_problems(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each part of ``data_efficiency`` that is on; none counts unless the section is."""
    section = look_up(document, "data_efficiency")[1]
    if not isinstance(section, Mapping):
        return [f"data_efficiency = {show(section)}: must be an object; leave it out"] if section else []
    if section.get("enabled") in (None, False):
        return []
    on = [name for name in _EFFICIENCY if enables(section.get(name))]
    return [f"data_efficiency.{name}: {_EFFICIENCY[name]}" for name in on]


def gone_problems(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each key that is refused."""
    values = {path: look_up(document, path) for path in GONE}
    return [
        f"{path} is not available; {GONE[path]}"
        for path, (there, value) in values.items()
        if there and not _switched_off(path, value)
    ]


def without(section: Mapping[str, Any], paths: Set[str], prefix: str = "") -> dict[str, Any]:
    """Return a copy of a document without the keys of some paths."""
    return {
        key: without(value, paths, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in section.items()
        # A key with dots is none of them, though its name is the path of one.
        if f"{prefix}{key}" not in paths or "." in key
    }


def without_effect(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that the document sets and that change nothing, with the reason."""
    # A section that is refused when it is on does nothing when it is off, which is worth a line, too.
    rows = {**WITHOUT_EFFECT, **{path: "it is switched off" for path in GONE}}
    return {path: reason for path, reason in rows.items() if look_up(document, path)[0]}


def look_up(document: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Return whether ``path`` is in the document, and the value there."""
    value: Any = document
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False, None
        value = value[name]
    return True, value


def _switched_off(path: str, value: Any) -> bool:
    """Return whether a section is false or empty, or an object in which nothing is enabled at any depth."""
    if path in ON_IF_THERE and isinstance(value, Mapping | int) and value is not False:
        return False
    if not isinstance(value, Mapping) or not value:
        return not value
    return not enables(value)


def enables(value: Any) -> bool:
    """Return whether ``enabled`` is anything but false, null or "auto" in an object, or in one inside it."""
    if isinstance(value, list | tuple):
        return any(map(enables, value))
    if not isinstance(value, Mapping):
        return False
    return value.get("enabled") not in (None, False, UNSET) or any(map(enables, value.values()))
