"""Reading of YAML as the objects, lists and values of JSON, by the rules of YAML 1.2."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from zeromesh.base.words import show

SUFFIXES = (".yaml", ".yml")

Pairs = list[tuple[str, Any]]


class YamlError(ValueError):
    """Error of a text that is no YAML, or more than JSON can express; the message has the line."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader without YAML 1.1's surprises: words for booleans, octal numbers, times, references."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # YAML 1.1 has 1e-5 as a string, and `no` as false

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; raise YAMLError for a reference."""
        # A few references to references would be more objects than any memory holds.
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="references (*name) are not read; write the value", problem_mark=mark)
        return super().compose_node(parent, index)


for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def read_yaml(text: str, from_pairs: Callable[[Pairs], dict[str, Any]]) -> Any:
    """Return the value of a YAML text; ``from_pairs`` makes an object of its keys and values.

    Raises:
        YamlError: it is no YAML, or has keys, tags or references that JSON has not.
        RecursionError: it is nested too deep.
        ValueError: a number has more digits than Python reads.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _value(loader, node, from_pairs)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = ""
        if mark is not None:
            lines = text.splitlines() or [""]
            place = f" at line {mark.line + 1}, column {mark.column + 1}"
            place += f": {show(lines[min(mark.line, len(lines) - 1)].strip())}"
        hint = "; indent with blanks, as YAML forbids tabs" if "'\\t'" in str(error.problem) else ""
        raise YamlError(f"is not YAML: {error.problem or error.context}{place}{hint}") from None
    except yaml.YAMLError as error:  # of a character
        raise YamlError(f"is not YAML: {' '.join(str(error).split())}") from None


def _value(loader: _Loader, node: yaml.Node, from_pairs: Callable[[Pairs], dict[str, Any]]) -> Any:
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if isinstance(node, yaml.MappingNode) and kind == "map":
        return from_pairs([(_key(loader, key), _value(loader, value, from_pairs)) for key, value in node.value])
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        return [_value(loader, item, from_pairs) for item in node.value]
    if isinstance(node, yaml.ScalarNode) and kind in ("str", "int", "float", "bool", "null"):
        return loader.construct_object(node)
    raise yaml.MarkedYAMLError(problem=f"the tag {node.tag!r} is not read", problem_mark=node.start_mark)


def _key(loader: _Loader, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=node.start_mark)
    return str(node.value)  # as it is written, so that `2:` is "2" as in JSON
