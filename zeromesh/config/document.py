"""Configurations from JSON, YAML or a dict: no comments, no key twice, one name per key, nothing "unset"."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeromesh.base.files import UnreadableFile, meant_file, read_text
from zeromesh.base.words import show
from zeromesh.config.curriculum_section import sampled_by_length
from zeromesh.config.errors import ConfigError
from zeromesh.config.special_keys import MEANT, RENAMED, UNSET
from zeromesh.config.yaml_document import SUFFIXES, YamlError, read_yaml

SCHEMA = "$schema"  # key by which a file names its schema for the user's editor
DEEPEST = 50  # levels of objects and lists; far below Python's limit of recursion, which later steps rely on

# Strings come first, so that what looks like a comment inside one stays. A comma may stand before a closing bracket.
_BEYOND_JSON = re.compile(r'"(?:[^"\\\n]|\\.)*"|(?P<comment>//[^\n]*|#[^\n]*|/\*.*?\*/)', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:[^"\\\n]|\\.)*"|(?P<comma>,)(?=\s*[}\]])', re.DOTALL)

_TOO_DEEP = f"is nested more than {DEEPEST} levels deep, or holds itself; keys are at most 6 levels deep"


class _Repeated(dict[str, Any]):
    """A JSON object in which some keys stand more than once."""

    # json keeps the last of two equal keys, and nobody knows which one was meant.

    repeated: tuple[str, ...] = ()


def read_document(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the configuration as a fresh dict, with the overrides in place, other names replaced, "auto" left out.

    Raises:
        ConfigError: no such file, no JSON or YAML, not an object, a key twice, or an override that cannot be read.
    """
    document = whole_document(source, overrides)
    document.pop(SCHEMA, None)
    cleaned: dict[str, Any] = _without_unset(document)
    return sampled_by_length(cleaned)


def whole_document(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the same with what is "auto" still in it."""
    if isinstance(source, str | Path):
        document = read_object(Path(source))
    else:
        _check_depth(source, "the configuration")
        document = _copy(source)
    document = _rename(document)
    # Renamed before the merge, or a file and an override could have a key under two names.
    for override in overrides:
        document = _merge(document, _rename(parse_override(override)))
    return document


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON or YAML file; raise ConfigError where there is none, or a key stands in it twice."""
    if path.suffix == ".py" and path.is_file():
        raise ConfigError([f"is a Python script; start it with: zeromesh launch {path}"], str(path))
    try:
        text = read_text(path, "utf-8-sig")  # editors on Windows begin a file with a mark
    except FileNotFoundError:
        meant = meant_file(path, "give the path of a JSON or YAML file, or a dict")
        raise ConfigError([f"there is no such file; {meant}"], str(path)) from None
    except UnreadableFile as error:
        raise ConfigError([f"{error.what}; give the path of a JSON or YAML file, or a dict"], str(path)) from None
    except (OSError, ValueError) as error:
        raise ConfigError([f"cannot be read as a text file: {error}"], str(path)) from None
    if not text.strip():
        raise ConfigError(["is empty; write a configuration, as zeromesh init MODEL DATA does"], str(path))
    try:
        document = _parse(text, str(path), is_yaml=path.suffix.lower() in SUFFIXES)
    except json.JSONDecodeError as error:
        raise ConfigError([_syntax_problem(text, error)], str(path)) from None
    except YamlError as error:
        raise ConfigError([str(error)], str(path)) from None
    if not isinstance(document, dict):
        raise ConfigError([f"is {show(document)}, but must be an object: {{ ... }}"], str(path))
    _check_repeated(document, str(path))
    return document


def plain_json(text: str) -> str:
    """Return a text of JSON with blanks for comments (``//``, ``#``, ``/* */``) and last commas, as in Hjson."""

    def blank(match: re.Match[str]) -> str:
        # Lines keep their numbers and columns, which errors name.
        return re.sub(r"[^\n]", " ", match[0]) if match.lastgroup else match[0]

    return _LAST_COMMA.sub(blank, _BEYOND_JSON.sub(blank, text))


def _parse(text: str, source: str, is_yaml: bool = False) -> Any:
    """Return the value of a text; raise JSONDecodeError or YamlError, or ConfigError if its size is a problem."""
    try:
        value = read_yaml(text, _from_pairs) if is_yaml else json.loads(plain_json(text), object_pairs_hook=_from_pairs)
    except (json.JSONDecodeError, YamlError):
        raise
    except RecursionError:
        raise ConfigError([_TOO_DEEP], source) from None
    except ValueError:  # Python converts no whole number of more digits than a limit
        digits = sys.get_int_max_str_digits()
        raise ConfigError(
            [f"has a whole number of more than {digits} digits; no key takes such a number"], source
        ) from None
    _check_depth(value, source)
    return value


def _check_depth(value: Any, source: str) -> None:
    """Raise ConfigError if containers are nested more than ``DEEPEST`` levels deep, or hold themselves."""
    # With a list of its own: a recursion would end in Python's limit before it found the depth.
    waiting = [(value, 1)]
    while waiting:
        inner, depth = waiting.pop()
        if isinstance(inner, Mapping | list | tuple):
            if depth > DEEPEST:
                raise ConfigError([_TOO_DEEP], source)
            waiting += [(item, depth + 1) for item in (inner.values() if isinstance(inner, Mapping) else inner)]


def _syntax_problem(text: str, error: json.JSONDecodeError) -> str:
    line = text.split("\n")[error.lineno - 1].strip()
    hint = ""
    if not text[error.pos :].strip():
        hint = "; the text ends too early: a bracket is not closed"
    elif text[error.pos :].startswith("/*"):
        hint = "; this comment is not closed by */"
    elif "double quotes" in error.msg:
        hint = "; keys are in double quotes"
    elif text[error.pos :].startswith(("True", "False", "None")):
        hint = "; JSON writes true, false and null"
    return f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}: {show(line)}{hint}"


def _from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Files have several keys that are comments, all of one name.
    pairs = [(key, value) for key, value in pairs if not _is_comment(key, value)]
    document = _Repeated(pairs)
    keys = [key for key, _ in pairs]
    document.repeated = tuple(dict.fromkeys(key for key in keys if keys.count(key) > 1))
    return document


def _is_comment(key: Any, value: Any) -> bool:
    """Return whether a key of an object is a comment: ``_comment``, ``_comment_batch``, ``//`` or ``comment``."""
    return str(key).startswith(("_comment", "//")) or (key == "comment" and not isinstance(value, Mapping))


def _check_repeated(document: Any, source: str) -> None:
    repeated = _repeated_paths(document, "")
    if repeated:
        raise ConfigError([f"{key} stands more than once; keep one of them" for key in repeated], source)


def _repeated_paths(value: Any, prefix: str) -> list[str]:
    """Return the dotted paths of the keys that stand more than once."""
    if isinstance(value, list):
        return [path for item in value for path in _repeated_paths(item, prefix)]
    if not isinstance(value, dict):
        return []
    here = [prefix + key for key in value.repeated] if isinstance(value, _Repeated) else []
    return here + [path for key, item in value.items() for path in _repeated_paths(item, f"{prefix}{key}.")]


def _copy(value: Any) -> Any:
    # Settings must not change when the caller's dict does.
    if isinstance(value, Mapping):
        return {str(key): _copy(item) for key, item in value.items() if not _is_comment(key, item)}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def parse_override(override: str) -> dict[str, Any]:
    """Return ``a.b=1`` as ``{"a": {"b": 1}}``; raise ConfigError for what has not this form."""
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            [f"{show(override)} must be of the form path=value, as in zero_optimization.stage=3"], "--set"
        )
    try:
        value: Any = _parse(text, "--set")
    except json.JSONDecodeError:
        value = text  # a word without quotes, as a shell leaves it
    for part in reversed(parts):
        value = {part: value}
    assert isinstance(value, dict)
    _check_repeated(value, "--set")
    return value


def _merge(document: Any, change: Any) -> Any:
    """Return ``document`` with the values of ``change``; objects are merged key by key, all else is replaced."""
    if not isinstance(document, dict) or not isinstance(change, dict):
        return change
    merged = {key: _merge(document[key], item) for key, item in change.items() if key in document}
    return {**document, **change, **merged}


def _rename(document: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with every key under the one name that it has here."""
    # The oldest form of the section is its stage alone.
    if isinstance(document.get("zero_optimization"), bool):
        document = {**document, "zero_optimization": {"stage": int(document["zero_optimization"])}}
    # Files for DeepSpeed, which read nothing of it then, have it off in these forms.
    if "compile" in document and (document["compile"] is None or isinstance(document["compile"], bool)):
        document = {**document, "compile": {"enabled": bool(document["compile"])}}
    if is_unset(document.get("activation_checkpointing")):
        document = {**document, "activation_checkpointing": {"enabled": True, "granularity": UNSET}}
    for old, new in RENAMED.items():
        parent, _, old_name = old.rpartition(".")
        section = document if not parent else document.get(parent)
        if not isinstance(section, dict) or old_name not in section:
            continue
        new_name = new.rpartition(".")[2]
        if new_name in section:
            raise ConfigError([f"{old} and {new} are two names of one key; keep {new}"])
        renamed = {new_name if key == old_name else key: item for key, item in section.items()}
        document = renamed if not parent else {**document, parent: renamed}
    return document


def _without_unset(value: Any, prefix: str = "") -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_unset(item, f"{prefix}{key}.")
            for key, item in value.items()
            if not is_unset(item) or f"{prefix}{key}" in MEANT
        }
    return [_without_unset(item) for item in value] if isinstance(value, list) else value


def is_unset(value: Any) -> bool:
    """Return whether a value means: as if the key were not there."""
    return isinstance(value, str) and value == UNSET
