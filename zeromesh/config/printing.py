"""Settings as JSON and as lines, and the values of keys that are "auto"."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from zeromesh.base.words import show
from zeromesh.config.deepspeed_defaults import differences
from zeromesh.config.document import is_unset, whole_document
from zeromesh.config.errors import ConfigError
from zeromesh.config.planned_keys import planned_keys
from zeromesh.config.section import Section
from zeromesh.config.special_keys import MEANT, UNREAD, UNSET, look_up, sections_of

_log = logging.getLogger("zeromesh")

# For these "auto" has a meaning of its own, so that there is nothing to warn of.
DOCUMENTED = ("model.vocab_size", "data.vocabulary_size", "run.resume", "data_types.keep_in_fp32_modules")


TABLES = ("optimizer.params", "scheduler.params")
"""Sections of arguments, whose defaults are those of the class."""


PRECISIONS = ("fp16.enabled", "bf16.enabled")


def jsonable(value: Any) -> Any:
    """Return ``value`` in the types of JSON; a value without such a form becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    # A function or a class of the user, among the arguments of a schedule.
    named = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{named}" if named else str(value)


def lines_of(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key, with its whole path: ``optimizer.params.lr = 0.01``."""
    return (f"{path} = {json.dumps(value)}" for path, value in leaves_of(section))


def leaves_of(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each key that is not a section, at any depth."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changes(before: Section, now: Section, free: Set[str]) -> list[str]:
    """Return a line for each key that two settings have at other values, except for keys and sections in ``free``."""
    old, new = (dict(leaves_of(jsonable(settings.model_dump()))) for settings in (before, now))

    def text(values: Mapping[str, Any], key: str) -> str:
        return json.dumps(values[key]) if key in values else "not set"

    return [
        f"{key}: {text(old, key)} in the run, {text(new, key)} now"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, "") != new.get(key, "") and sections_of(key).isdisjoint(free)
    ]


def autos(source: str | Path | Mapping[str, Any] | Section, overrides: Sequence[str] = ()) -> list[str]:
    """Return the path of each key that is "auto", has an effect, and is not the planner's."""
    if isinstance(source, Section):
        return []  # settings have no such keys any more
    meant = {*planned_keys(source, overrides), *DOCUMENTED, *MEANT}
    return [
        path
        for path, value in leaves_of(whole_document(source, overrides))
        if is_unset(value) and path not in meant and sections_of(path).isdisjoint(UNREAD)
    ]


def is_auto(source: str | Path | Mapping[str, Any], overrides: Sequence[str], path: str) -> bool:
    """Return whether a key is "auto", as one of ``DOCUMENTED``, where this says more than a key without a value."""
    return is_unset(dict(leaves_of(whole_document(source, overrides))).get(path))


def refuse_unfilled(
    source: str | Path | Mapping[str, Any] | Section,
    settings: Section,
    overrides: Sequence[str] = (),
    replaced_sections: Set[str] = frozenset(),
) -> None:
    """Raise ConfigError for each key that is "auto" and decides the result: learning rates and the precision.

    Args:
        source: the configuration, as it was given.
        settings: made from it.
        overrides: as given with the configuration.
        replaced_sections: sections in whose place the user passed an object: ``optimizer``, ``scheduler``.
    """
    unfilled = autos(source, overrides)
    # Where one precision is on, the others cannot be.
    decided = any(look_up(settings.model_dump(), path)[1] for path in (*PRECISIONS, "torch_autocast.enabled"))
    remedies = dict.fromkeys(() if decided else PRECISIONS, "write true, or false for the dtype that the model has")
    for path in unfilled:
        section, _, name = path.rpartition(".")
        # A warmup begins with 0 by default, as it does where a Trainer fills it in.
        if (
            section in TABLES
            and section.split(".")[0] not in replaced_sections
            and name.endswith("lr")
            and name != "warmup_min_lr"
        ):
            remedies[path] = "write the learning rate"
    problems = [f'{path} = "{UNSET}": {remedies[path]}' for path in unfilled if path in remedies]
    if problems:
        problems[-1] += f'. A Trainer fills in what is "{UNSET}"; here nothing does, and results depend on it'
        raise ConfigError(problems, str(source) if isinstance(source, str | Path) else "the configuration")


def tell_unset(
    source: str | Path | Mapping[str, Any] | Section,
    settings: Section,
    used: Mapping[str, Any],
    overrides: Sequence[str] = (),
) -> None:
    """Warn of what is "auto" in one line, with the value that each key has now.

    Args:
        source: the configuration, as it was given.
        settings: made from it.
        used: values by dotted path that are not in the settings, such as ``optimizer.params.lr``.
        overrides: as given with the configuration.
    """
    values = jsonable(settings.model_dump())
    listed = ", ".join(f"{path} = {_value(path, values, used)}" for path in autos(source, overrides))
    if listed:
        _log.warning('"auto" keys have their default, or follow from other keys: %s', listed)


def tell_defaults(source: str | Path | Mapping[str, Any] | Section) -> None:
    """Log what a configuration leaves out that would mean something else in DeepSpeed, each in one line.

    Settings, and configurations with keys of ZeroMesh's own, say nothing about DeepSpeed.
    """
    if isinstance(source, str | Path | Mapping):
        for row in differences(whole_document(source)):
            theirs = f"DeepSpeed 0.19 would use {show(row.theirs)}"
            _log.info("%s is not in the file; ZeroMesh %s (%s)", row.path, row.ours, theirs)


def _value(path: str, values: Mapping[str, Any], used: Mapping[str, Any]) -> str:
    if path in used:
        return show(used[path])
    if path.startswith(TABLES):
        return f"the default of {look_up(values, path.split('.')[0] + '.type')[1]}"
    return show(look_up(values, path)[1])
