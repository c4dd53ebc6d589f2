"""Keys of the settings by their dotted paths, and errors about them in sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from zeromesh.base.words import nearest, show
from zeromesh.config.errors import ConfigError
from zeromesh.config.special_keys import PLACES, RENAMED

Schema = dict[str, Any]

MARKS = {
    "string": "a string",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "null": "null",
    "object": "an object",
    "array": "a list",
}
PLACES_SHOWN = 3  # of a name that several sections have
KEYS_SHOWN = 12  # in a message; a longer list is read by nobody
BOUNDS = (
    ("minimum", ">="),
    ("exclusiveMinimum", ">"),
    ("maximum", "<="),
    ("exclusiveMaximum", "<"),
    ("multipleOf", "a multiple of"),
)


class Entry(NamedTuple):
    """One key; ``rule`` and ``meaning`` are words, and a ``section`` has keys of its own."""

    path: str
    rule: str
    default: Any
    required: bool
    meaning: str
    section: bool


def catalogue(model: type[BaseModel]) -> dict[str, Entry]:
    """Return the keys of ``model`` at every depth, in their order."""
    # Read from the schema, which has the rules in one form whatever the annotations are made of.
    schema = model.model_json_schema()
    return {entry.path: entry for entry in _walk(schema, schema.get("$defs", {}), "")}


def children(entries: dict[str, Entry], section: str) -> list[str]:
    """Return the names of the keys directly in ``section``; "" is the top level."""
    prefix = f"{section}." if section else ""
    paths = [path.removeprefix(prefix) for path in entries if path.startswith(prefix)]
    return [name for name in paths if "." not in name]


def suggest(entries: dict[str, Entry], path: str) -> str | None:
    """Return the known path nearest to an unknown one: in its own section, else anywhere by its last name."""
    section, _, name = path.rpartition(".")
    elsewhere = [other for other in entries if other.rpartition(".")[2] == name]
    if not section:
        # A name that stands in a section was left out of it, whatever looks like it at the top level.
        place = PLACES.get(name, "")
        if place in entries or place.rpartition(".")[0] in ("optimizer.params", "scheduler.params"):
            return place
        if 0 < len(elsewhere) <= PLACES_SHOWN:
            return " or ".join(elsewhere)
    prefix = f"{section}." if section else ""
    others = [other.removeprefix(prefix) for other in RENAMED if other.rpartition(".")[0] == section]
    # In its own section first, where most slips are; else anywhere by the last name, as in {"stage": 3}.
    match = nearest(name, children(entries, section) + others)
    if match:
        return prefix + match
    return next(iter(elsewhere), None)


def _walk(schema: Schema, definitions: dict[str, Schema], prefix: str) -> Iterator[Entry]:
    for name, part in schema.get("properties", {}).items():
        target = section_of(part, definitions)
        yield Entry(
            path=prefix + name,
            rule=_rule(part, definitions),
            default=part.get("default"),
            required=name in schema.get("required", ()),
            meaning=(part if "description" in part else target or {}).get("description", ""),
            section=target is not None,
        )
        if target is not None:
            yield from _walk(target, definitions, f"{prefix}{name}.")


def section_of(part: Schema, definitions: dict[str, Schema]) -> Schema | None:
    """Return the schema of the section that ``part`` refers to, if it does."""
    for option in [part, *part.get("anyOf", ())]:
        if "$ref" in option:
            return definitions[option["$ref"].rpartition("/")[2]]
    return None


def _rule(part: Schema, definitions: dict[str, Schema]) -> str:
    """Return the allowed values of a key in words: "a whole number >= 1 or null"."""
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_rule(option, definitions) for option in part["anyOf"]))
    if "$ref" in part:
        return "an object"
    if "enum" in part:
        return "one of " + ", ".join(show(value) for value in part["enum"])
    if "const" in part:
        return show(part["const"])
    kind = part.get("type")
    if kind == "array" and part.get("items", {}).get("type") == "string":
        return "a list of strings"
    words = MARKS[kind] if kind else "anything"
    bounds = [
        f"{sign} {part[key]:g}" if isinstance(part[key], float) else f"{sign} {part[key]}"
        for key, sign in BOUNDS
        if key in part
    ]
    return " ".join([words, " and ".join(bounds)]).strip()


def explain(error: ValidationError, entries: dict[str, Entry]) -> list[str]:
    """Return a sentence with key, value, rule and remedy for each problem that pydantic found."""
    return [sentence for detail in error.errors(include_url=False) for sentence in _sentences(detail, entries)]


def _path(detail: ErrorDetails, entries: dict[str, Entry]) -> tuple[str, str]:
    """Return the dotted path of the key that a problem is with, and the position inside its value, if any."""
    path, position = "", ""
    # Locations have the names of unions' members between the keys; only those that are keys count.
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
        error = detail["ctx"]["error"]
        if isinstance(error, ConfigError):  # from the rules between keys, in sentences already
            return list(error.problems)
        return [f"{path}: {error}" if entries[path].section else f"{path} = {show(value)}: {error}"]
    entry = entries[path]
    where = f"{path}{position} = {show(value)}"
    if entry.section and not isinstance(value, Mapping):
        keys = children(entries, path)
        shown = ", ".join(keys[:KEYS_SHOWN]) + (", ..." if len(keys) > KEYS_SHOWN else "")
        return [f"{where}: must be an object; write {{ ... }} with any of {shown}"]
    return [f"{where}: must be {entry.rule}; {next(_remedies(value, detail['type'], entry))}"]


def _unknown(path: str, entries: dict[str, Entry]) -> str:
    if path in entries:  # a key of the top level whose name has dots
        above, _, name = path.rpartition(".")
        return f"{path} is a path, and keys are nested; write {name} inside of {above}"
    suggestion = suggest(entries, path)
    if suggestion:
        return f"{path} is not a known key; did you mean {suggestion}?"
    section = path.rpartition(".")[0]
    keys = children(entries, section)
    if len(keys) <= KEYS_SHOWN:
        return f"{path} is not a known key; {section or 'the top level'} has {', '.join(keys)}"
    return f"{path} is not a known key; docs/configuration.md lists them all"


def _remedies(value: Any, kind: str, entry: Entry) -> Iterator[str]:
    """Yield remedies, the most exact one first."""
    if isinstance(value, str) and kind == "literal_error":
        listed = entry.rule.removeprefix("one of ").removesuffix(" or null")
        suggestion = nearest(value, [word.strip('"') for word in listed.split(", ")])
        if suggestion:
            yield f'did you mean "{suggestion}"?'
    if isinstance(value, str) and kind != "literal_error":
        # In lower case, for Python's True.
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


def _lower(sentence: str) -> str:
    """Return the sentence with a small first letter, unless its first word is a name."""
    return sentence[:1].lower() + sentence[1:] if sentence.split(" ")[0].istitle() else sentence
