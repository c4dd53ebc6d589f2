"""From what pydantic and the tables object to, to sentences with the key, the value, the rule and the remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from zeromesh.config.catalogue import Entry, children, suggest
from zeromesh.config.document import UNSET
from zeromesh.config.errors import ConfigError, nearest, show
from zeromesh.config.tables import GONE, NOT_YET, ON_IF_THERE, RENAMED, WITHOUT_EFFECT

KEYS_SHOWN = 12


def explain(error: ValidationError, entries: dict[str, Entry]) -> list[str]:
    """One sentence per problem that pydantic found."""
    return [sentence for detail in error.errors(include_url=False) for sentence in _sentences(detail, entries)]


def not_yet_problems(document: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    """One sentence per key whose value needs something that this version does not have.

    ``known`` are problems found before: a key of which the value is wrong anyway is not named again.
    """
    problems = []
    for path, row in NOT_YET.items():
        found, value = look_up(document, path)
        if any(problem.startswith(f"{path} = ") for problem in known):
            continue
        if found and value not in row.allowed:
            allowed = " or ".join(show(option) for option in row.allowed)
            problem = f"{path} = {show(value)}: {row.what} is not in this version yet"
            problems.append(f"{problem}; leave the key out or set it to {allowed}")
    return problems


def gone_problems(document: Mapping[str, Any]) -> list[str]:
    """One sentence per section that is refused."""
    found = {path: look_up(document, path) for path in GONE}
    return [
        f"{path} is not available; {GONE[path]}"
        for path, (there, value) in found.items()
        if there and not _switched_off(path, value)
    ]


def without_gone(document: Mapping[str, Any]) -> dict[str, Any]:
    """``document`` without the sections that are refused."""
    return _without(document, "")


def without_effect(document: Mapping[str, Any]) -> dict[str, str]:
    """The keys that the document sets and that change nothing, with the reason."""
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
    """Return whether a section is false or empty, or an object in which nothing is enabled at any depth.

    Those in ``ON_IF_THERE`` must say ``enabled: false`` themselves.
    """
    if not isinstance(value, Mapping) or not value:
        return not value
    if path in ON_IF_THERE:
        return value.get("enabled", True) is False
    return not _enables(value)


def _enables(value: Any) -> bool:
    """Return whether ``enabled`` is anything but false, null or "auto" in an object, or in one inside it."""
    if isinstance(value, list | tuple):
        return any(map(_enables, value))
    if not isinstance(value, Mapping):
        return False
    return value.get("enabled") not in (None, False, UNSET) or any(map(_enables, value.values()))


def _without(section: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        key: _without(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in section.items()
        if f"{prefix}{key}" not in GONE
    }


def _path(detail: ErrorDetails, entries: dict[str, Entry]) -> tuple[str, str]:
    """The dotted path of the key that a problem is with, and the position inside its value, if any."""
    path, position = "", ""
    for part in detail["loc"]:
        deeper = f"{path}.{part}".lstrip(".")
        if deeper in entries or detail["type"] == "extra_forbidden":
            path = deeper
        elif isinstance(part, int):
            position = f"[{part}]"
    return path, position


def _sentences(detail: ErrorDetails, entries: dict[str, Entry]) -> list[str]:
    path, position = _path(detail, entries)
    if detail["type"] == "extra_forbidden":
        return [_unknown(path, entries)]
    if detail["type"] == "missing":
        entry = entries[path]
        return [f"{path} is missing: {_lower(entry.meaning)} It must be {entry.rule}."]
    value = detail["input"]
    if detail["type"] == "value_error":
        return _own_sentences(path, value, detail["ctx"]["error"], entries)
    entry = entries[path]
    where = f"{path}{position} = {show(value)}"
    if entry.section and not isinstance(value, Mapping):
        keys = children(entries, path)
        shown = ", ".join(keys[:KEYS_SHOWN]) + (", ..." if len(keys) > KEYS_SHOWN else "")
        return [f"{where}: must be an object; write {{ ... }} with any of {shown}"]
    return [f"{where}: must be {entry.rule}; {_remedy(value, detail, entry)}"]


def _own_sentences(path: str, value: Any, error: Exception, entries: dict[str, Entry]) -> list[str]:
    """Problems that the settings' own checks found: with one value, or between several keys of a section."""
    if isinstance(error, ConfigError):
        return list(error.problems)
    return [f"{path}: {error}" if entries[path].section else f"{path} = {show(value)}: {error}"]


def _unknown(path: str, entries: dict[str, Entry]) -> str:
    suggestion = suggest(entries, path, RENAMED)
    if suggestion:
        return f"{path} is not a known key; did you mean {suggestion}?"
    section = path.rpartition(".")[0]
    keys = children(entries, section)
    if len(keys) <= KEYS_SHOWN:
        return f"{path} is not a known key; {section or 'the top level'} has {', '.join(keys)}"
    return f"{path} is not a known key; docs/configuration.md lists them all"


def _remedy(value: Any, detail: ErrorDetails, entry: Entry) -> str:
    """Return the remedy, as exactly as it is known."""
    return next(_remedies(value, detail["type"], entry))


def _remedies(value: Any, kind: str, entry: Entry) -> Iterator[str]:
    if isinstance(value, str) and kind == "literal_error":
        suggestion = nearest(value, [str(option) for option in _options(entry)])
        if suggestion:
            yield f'did you mean "{suggestion}"?'
    if isinstance(value, str) and kind != "literal_error":
        try:
            plain = json.loads(value.lower())
        except json.JSONDecodeError:
            plain = None
        if isinstance(plain, bool | int | float) and isinstance(plain, bool) == entry.rule.startswith("true"):
            yield f"write {show(plain)} without quotes"
    if entry.rule.startswith("true") and value in (0, 1) and not isinstance(value, str):
        yield f"write {show(bool(value))}"
    if isinstance(value, float) and "whole" in entry.rule and value == value and abs(value) != float("inf"):
        yield f"the nearest are {int(value // 1)} and {int(value // 1) + 1}"
    yield f"it is: {_lower(entry.meaning).rstrip('.')}" if entry.required else f"leave it out for {show(entry.default)}"


def _options(entry: Entry) -> list[str]:
    listed = entry.rule.removeprefix("one of ").removesuffix(" or null")
    return [word.strip('"') for word in listed.split(", ")]


def _lower(sentence: str) -> str:
    """The sentence with a small first letter, unless its first word is a name."""
    return sentence[:1].lower() + sentence[1:] if sentence.split(" ")[0].istitle() else sentence
