"""Every key of the settings by its dotted path, with what may stand there: for errors and for the reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from zeromesh.config.errors import nearest, show

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
BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))


@dataclass(frozen=True)
class Entry:
    """One key.

    Attributes:
        path: dotted path.
        rule: what may stand there, in words.
        default: the default; ``required`` keys have none.
        meaning: one or two sentences.
        section: whether it is an object with keys of its own.
    """

    path: str
    rule: str
    default: Any
    required: bool
    meaning: str
    section: bool


def catalogue(model: type[BaseModel]) -> dict[str, Entry]:
    """The keys of ``model`` at every depth, in their order."""
    schema = model.model_json_schema()
    return {entry.path: entry for entry in _walk(schema, schema.get("$defs", {}), "")}


def children(entries: dict[str, Entry], section: str) -> list[str]:
    """Names of the keys directly in ``section``; "" is the top level."""
    prefix = f"{section}." if section else ""
    paths = [path.removeprefix(prefix) for path in entries if path.startswith(prefix)]
    return [name for name in paths if "." not in name]


def suggest(entries: dict[str, Entry], path: str, more: Iterable[str] = ()) -> str | None:
    """The known path nearest to an unknown one: in its own section, else anywhere by its last name.

    ``more`` are further paths that are known.
    """
    section, _, name = path.rpartition(".")
    prefix = f"{section}." if section else ""
    siblings = children(entries, section) + [
        other.removeprefix(prefix) for other in more if other.rpartition(".")[0] == section
    ]
    match = nearest(name, siblings)
    if match:
        return prefix + match
    same_name = [other for other in entries if other.rpartition(".")[2] == name]
    return same_name[0] if same_name else None


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
    """The schema of the section that ``part`` refers to, if it does."""
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
