"""Definitions that a notebook's function needs in another process: source, modules and values.

A process cannot import what was typed into a notebook, and a copy made by ``fork`` hangs in its first parallel
operation once the notebook has computed anything with several threads, and cannot use CUDA once the notebook has. So
the definitions are sent as source. IPython keeps the text of cells where ``linecache`` finds it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import pickle
import sys
from collections.abc import Iterator
from io import BytesIO
from types import FunctionType, ModuleType
from typing import Any

MAIN = "__main__"
LAMBDA = "<lambda>"


def is_interactive() -> bool:
    """Return whether ``__main__`` is interactive or came through a pipe, so that no file can be imported."""
    main = sys.modules[MAIN]
    return getattr(main, "__spec__", None) is None and not os.path.isfile(getattr(main, "__file__", None) or "")


def definitions_of(call: Any) -> list[tuple[str, str, Any]]:
    """Return the definitions for ``__main__`` of another process; see ``rank.define``.

    Args:
        call: what can be pickled, such as a function and its arguments.

    Returns:
        Kind, name and content of each name, those that others need first.

    Raises:
        ValueError: the source of a definition is not known, or a value cannot be pickled.
    """
    found: list[tuple[str, str, Any]] = []
    seen: set[str] = set()
    namespace = vars(sys.modules[MAIN])

    def visit(name: str, wanted_by: str) -> None:
        if name in seen or name not in namespace or name.startswith("__"):
            return
        seen.add(name)
        value = namespace[name]
        if isinstance(value, ModuleType):
            found.append(("module", name, value.__name__))
            return
        mine = isinstance(value, FunctionType | type) and value.__module__ == MAIN
        if mine and value.__name__ in (name, LAMBDA):  # else it is another name of it
            file, tree, lines = _source(value, name)
            for used in _names(tree):
                visit(used, name)
            found.append(("source", name, (file, _placed(tree, lines))))
            return
        data, classes = _pickled(name, value, wanted_by)
        for used in classes:
            visit(used, name)
        found.append(("value", name, data))

    for name in _pickled("the call", call, "launch")[1]:
        visit(name, "launch")
    return found


def _names(tree: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _source(value: FunctionType | type, name: str) -> tuple[str, ast.stmt, list[str]]:
    """The cell, the statement in it that defined a function or class, and the cell's lines."""
    for file in _files(value):
        lines = linecache.getlines(file)
        try:
            statements = ast.parse("".join(lines)).body
        except SyntaxError:
            continue
        for statement in reversed(statements):
            if name in _defined(statement):
                return file, statement, lines
    raise ValueError(
        f"the source of {name} is not known, which the ranks need; define it at the top level of a cell of a "
        "notebook, or in a module or a script that is a file"
    )


def _files(value: FunctionType | type) -> list[str]:
    """Cells that may hold the definition, the likeliest first."""
    members = [value, *vars(value).values()] if isinstance(value, type) else [inspect.unwrap(value)]
    known = [str(member.__code__.co_filename) for member in members if isinstance(member, FunctionType)]
    # Of a class without methods it is not known where it was defined: the latest cell that does counts.
    return known if isinstance(value, FunctionType) else [*known, *reversed(list(linecache.cache))]


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def _placed(statement: ast.stmt, lines: list[str]) -> str:
    """The statement alone, on the lines on which it is in its cell."""
    last = statement.end_lineno
    first: int = min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", []))])
    return "\n" * (first - 1) + "".join(lines[first - 1 : last])


def _pickled(name: str, value: Any, wanted_by: str) -> tuple[bytes, list[str]]:
    """A value, and which of the notebook's functions and classes it refers to."""
    buffer = BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except Exception as error:
        raise ValueError(
            f"{name}, which {wanted_by} uses, cannot be sent to the ranks ({error}); make it inside the function"
        ) from None
    return buffer.getvalue(), pickler.mine


class _Pickler(pickle.Pickler):
    """Notes the names of ``__main__`` that it refers to."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.mine: list[str] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type) and value.__module__ == MAIN:
            self.mine.append(value.__qualname__.split(".")[0])
        return NotImplemented
